"""The worker: the process that holds the gates. It parses everything hostile, so it has no rights at all.

It is started clean (``python -I -S``), takes a uid that nobody else has where it can, gives up every
capability, may write to no file and read only the system's and its own program's, can start no process and
reach none, has none of its caller's streams, and ends with its front end. It gets sockets that were made
inside of sandboxes and a policy for each, and tells of every decision.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import sys
from collections import deque

import msgspec

from casemate.egress.gate import Gate
from casemate.egress.resolver import Resolver
from casemate.policy.model import Network
from casemate.sys import bpf, landlock, packets, process, syscalls
from casemate.sys.addresses import own_addresses
from casemate.sys.plain import is_list, is_object

__all__ = ["FIRST_UID", "main"]

#: Uids of workers of a root front end: above those of sandboxes, one for each process.
FIRST_UID = 0x70010000
_READABLE = (
    "/etc", "/usr", "/lib", "/lib64", "/bin", "/opt", "/run", "/proc/self", "/dev/null", "/dev/urandom",
)  # fmt: skip


# What it never calls: it starts no program and no process (threads only, for name resolution), touches no
# other one, changes no file, no identity and no mount, and has nothing to do with the kernel's larger
# subsystems. (Landlock does not speak of modes, owners, times and attributes.)
_NEVER = """
execve execveat fork vfork ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_open
pidfd_getfd pidfd_send_signal kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo memfd_secret
setpriority ioprio_set sched_setaffinity sched_setattr sched_setparam sched_setscheduler setpgid
creat mkdir mkdirat mknod mknodat rmdir unlink unlinkat rename renameat renameat2 link linkat symlink
symlinkat truncate chmod fchmodat fchmodat2 chown lchown fchownat utime utimes futimesat utimensat
setxattr lsetxattr setxattrat removexattr lremovexattr removexattrat fchmod fchown fsetxattr fremovexattr
setns unshare mount umount2 pivot_root chroot move_mount open_tree open_tree_attr fsopen fsconfig fsmount
fspick mount_setattr name_to_handle_at open_by_handle_at setuid setreuid setresuid setfsuid setgid setregid
setresgid setfsgid setgroups capset personality seccomp bpf perf_event_open userfaultfd io_uring_setup
io_uring_enter io_uring_register add_key request_key keyctl init_module finit_module delete_module
kexec_load kexec_file_load reboot swapon swapoff quotactl shmget msgget semget mq_open
"""
_CLONE_THREAD = 0x10000
# fcntl's F_SETOWN, F_SETSIG, F_SETOWN_EX; ioctl's FIOSETOWN, SIOCSPGRP: a signal for somebody else.
_FCNTL_OWNER, _IOCTL_OWNER = (8, 10, 15), (0x8901, 0x8902)
# AF_UNIX and AF_NETLINK are what resolving names takes.
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)


def main(argv: list[str]) -> int:
    """``worker FD``: serve the socket that was inherited as FD."""
    import _signal

    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT):
        _signal.signal(number, _signal.SIG_IGN)  # a terminal's; the front end's end is the worker's
    endpoint = socket.socket(fileno=int(argv[0]))
    process.close_all_but([endpoint.fileno()])
    # What it parses is hostile: no word of its own may reach a terminal. Faults are told to the front end.
    null = os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)
    os.chdir("/")
    process.use_all_descriptors()
    _give_up_rights()
    asyncio.run(_Worker(endpoint).run())
    return 0


def _give_up_rights() -> None:
    """Nothing that came before may be needed after. Every module on the way is loaded, or readable by all."""
    if os.geteuid() == 0 and process.is_root():
        if not all(_is_public(place) for place in (*sys.path, os.path.dirname(os.__file__))):
            _load_everything()
        uid = FIRST_UID + os.getpid()
        process.drop_bounding_set()
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    process.drop_capabilities()
    process.set_dumpable(False)
    process.no_new_privileges()
    bpf.install(_filter())
    version = landlock.abi()
    if not version:
        return
    rules = landlock.Ruleset(version)
    authorities = [os.environ[name] for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ]
    for path in dict.fromkeys((*_READABLE, *sys.path, *authorities)):
        try:
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rights = landlock.READ | (landlock.WRITE_DEVICE if path.startswith("/dev/") else 0)
        rules.allow(handle, rights, directory=os.path.isdir(path))
        os.close(handle)
    rules.enforce()
    rules.close()


def _is_public(place: str) -> bool:
    """Whether everybody can read a directory, or there is none."""
    while os.path.isdir(place):
        needed = 0o5 if place in sys.path else 0o1
        if os.stat(place).st_mode & needed != needed:
            return False
        if place == "/":
            break
        place = os.path.dirname(place)
    return True


def _load_everything() -> None:
    """The modules that are loaded when they are needed, which takes time and memory: at once. For a Python
    below /root, say, where the worker could not read them later.
    """
    import importlib
    import pkgutil

    import casemate.egress

    names = [f"casemate.egress.{module.name}" for module in pkgutil.iter_modules(casemate.egress.__path__)]
    for name in (*names, "concurrent.futures.thread", "encodings.idna", "stringprep", "ipaddress"):
        importlib.import_module(name)
    from casemate.egress.intercept import Authority

    Authority(["a.example"]).context_for("a.example")  # loads the parts of cryptography that it takes


def _filter() -> bytes:
    """The system calls that are left. Raises ProtectionUnavailable on a machine without a table of them."""
    machine = syscalls.native()
    refused, absent, never = bpf.Errno(errno.EPERM), bpf.Errno(errno.ENOSYS), frozenset(_NEVER.split())
    rules: dict[int, bpf.Rule] = {
        number: refused if name in never else bpf.ALLOW for name, number in syscalls.TABLES[machine].items()
    }
    numbers, thread = syscalls.TABLES[machine], bpf.Arg(0, _CLONE_THREAD, bits=64, mask=_CLONE_THREAD)
    rules[numbers["clone"]] = bpf.When(thread, bpf.ALLOW, refused)
    rules[numbers["clone3"]] = absent  # its flags lie in memory; the C library takes clone then
    rules[numbers["prlimit64"]] = bpf.When(bpf.Arg(0, 0), bpf.ALLOW, refused)  # its own
    rules[numbers["socket"]] = bpf.When(bpf.Arg(0, *_FAMILIES), bpf.ALLOW, bpf.Errno(errno.EAFNOSUPPORT))
    rules[numbers["fcntl"]] = bpf.When(bpf.Arg(1, *_FCNTL_OWNER), refused, bpf.ALLOW)
    rules[numbers["ioctl"]] = bpf.When(bpf.Arg(1, *_IOCTL_OWNER), refused, bpf.ALLOW)
    return bpf.assemble(syscalls.AUDIT_ARCH[machine], rules, absent)


_BAD_REQUEST = (ValueError, LookupError, TypeError, AssertionError, OSError, msgspec.ValidationError)


class _Worker:
    """The front end's requests, one after the other."""

    def __init__(self, endpoint: socket.socket) -> None:
        self._endpoint = endpoint
        endpoint.setblocking(False)
        self._gates: dict[int, Gate] = {}
        self._resolver = Resolver()
        self._outgoing: deque[bytes] = deque()
        self._done = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until the front end is gone."""
        loop = self._loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._fault)
        loop.add_reader(self._endpoint, self._incoming)
        self._send({"event": "hello"})
        await self._done.wait()
        for gate in self._gates.values():
            gate.close()
        self._resolver.close()
        os._exit(0)  # threads that wait for a resolver wait for nobody any more

    def _fault(self, _: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Tell of an error that nobody has expected: what kind it is and where, nothing of what it says."""
        error = context.get("exception")
        place = ""
        trace = error.__traceback__ if isinstance(error, BaseException) else None
        while trace is not None:
            file = os.path.basename(trace.tb_frame.f_code.co_filename)
            place = f"{file}:{trace.tb_lineno}"
            trace = trace.tb_next
        self._send({"event": "fault", "id": 0, "error": type(error).__name__, "place": place})

    # -- the channel -----------------------------------------------------------------------------------

    def _send(self, message: dict[str, object]) -> None:
        self._outgoing.append(msgspec.json.encode(message))
        self._flush()

    def _flush(self) -> None:
        assert self._loop is not None  # noqa: S101
        while self._outgoing:
            try:
                packets.send(self._endpoint, self._outgoing[0])
            except BlockingIOError:
                self._loop.add_writer(self._endpoint, self._flush)
                return
            except OSError as error:
                if error.errno in _GONE:
                    self._done.set()
                    return
                # One message is lost for want of memory or descriptors, not every sandbox's gate.
            self._outgoing.popleft()
        self._loop.remove_writer(self._endpoint)

    def _incoming(self) -> None:
        try:
            payload, handles = packets.receive(self._endpoint)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            payload, handles = None, []
        if payload is None:
            self._done.set()
            return
        taken = False
        message: object = None
        try:
            message = json.loads(payload)
            if is_object(message):
                taken = self._do(message, handles)
        except _BAD_REQUEST as error:
            number = message.get("id") if is_object(message) else None
            # A policy that was not understood may be a narrower one: what it is for reaches nothing more.
            gate = self._gates.pop(number, None) if type(number) is int else None
            if gate is not None:
                gate.close()
            # The kind of the error only: its text may hold what the request held.
            self._send({"event": "failed", "id": number, "error": type(error).__name__})
        finally:
            if not taken:
                for handle in handles:
                    os.close(handle)

    # -- requests --------------------------------------------------------------------------------------

    def _do(self, message: dict[str, object], handles: list[int]) -> bool:
        """Do one request; returns whether the descriptors have a new owner."""
        operation, number = message["op"], _whole(message["id"])
        if operation == "add":
            self._add(number, message)
            return False
        gate = self._gates.get(number)
        if gate is None:
            return False
        if operation == "listen":
            gate.begin(handles[0], handles[1:])
            return True
        if operation == "update":
            gate.update(msgspec.convert(message["network"], Network))
            self._send({"event": "updated", "id": number})
        elif operation == "answer":
            host, port = str(message["host"]), _whole(message["port"])
            gate.answer(host, port, allow=message["allow"] is True, scope=str(message["scope"]))
        elif operation == "agent":
            gate.serve_agent(socket.socket(fileno=handles[0]))
            return True
        elif operation == "agent-connected":
            gate.agents.made(_whole(message["request"]), handles[0] if handles else -1)
            return bool(handles)
        elif operation == "dialled":
            gate.inbound.made(_whole(message["request"]), handles[0] if handles else -1)
            return bool(handles)
        elif operation == "publish":
            key, inside = _whole(message["key"]), _whole(message["inside"])
            gate.inbound.publish(key, socket.socket(fileno=handles[0]), inside)
            return True
        elif operation == "unpublish":
            gate.inbound.unpublish(_whole(message["key"]))
        elif operation == "remove":
            task = asyncio.get_running_loop().create_task(self._remove(number, gate))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        return False

    def _add(self, number: int, message: dict[str, object]) -> None:
        """A new sandbox. Its listeners come later, by ``listen``: its certificate is needed before that."""
        network = msgspec.convert(message["network"], Network)
        secrets = message["secrets"]
        approved = message.get("approved", [])
        assert is_object(secrets)  # noqa: S101
        assert is_list(approved)  # noqa: S101
        authority, placeholders = None, dict[str, str]()
        if message["authority"] is True:
            from casemate.egress.credentials import placeholders_for
            from casemate.egress.intercept import Authority

            # Worth nothing for any host but those whose connections are looked into.
            known = {host for credential in network.credentials for host in credential.hosts}
            authority = Authority(known | {rule.host for rule in network.requests})
            placeholders = placeholders_for({name: str(value) for name, value in secrets.items()})
        self._gates[number] = Gate(
            number,
            network,
            self._resolver,
            self._send,
            own=own_addresses,
            secrets={name: str(value) for name, value in secrets.items()},
            placeholders=placeholders,
            authority=authority,
            approved=[str(rule) for rule in approved],
        )
        self._send(
            {
                "event": "added",
                "id": number,
                "certificate": authority.certificate_pem if authority is not None else "",
                "placeholders": placeholders,
            }
        )

    async def _remove(self, number: int, gate: Gate) -> None:
        totals = gate.close()
        await gate.ended()
        totals = gate.log.totals() | {"untold": totals["untold"]}
        self._gates.pop(number, None)
        self._send({"event": "removed", "id": number, "totals": totals})


def _whole(value: object) -> int:
    if type(value) is not int:
        raise ValueError("a whole number was expected")
    return value

