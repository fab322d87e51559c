"""A workspace that is changed directly: what the launcher makes for it, and the start of its broker.

The broker (see there) is a child of the launcher beside the sandbox, forked when everything of the sandbox
exists. The sandbox's init installs the filter last of all, hands the listener to the broker over a socket
that nobody else has, and waits for its word before it starts the command.
"""

from __future__ import annotations

import _signal
import _socket
import errno
import gc
import os
import resource
import sys
import time
from contextlib import suppress

from casemate.errors import ProtectionUnavailable
from casemate.isolation.process import record
from casemate.sys import mounts, notify, packets, process
from casemate.sys.files import open_beneath
from casemate.sys.locks import ActLock, open_act_lock, sweep
from casemate.sys.native import machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from casemate.isolation.process.deeds import Judge
    from casemate.isolation.process.outcome import Outcome
    from casemate.isolation.process.spec import Direct, Spec
    from casemate.sys.bpf import Prepared as PreparedFilter

__all__ = ["DirectSite", "channel", "hand_over", "special_files"]

_CAP_SYS_PTRACE = 19
_MOST_SPECIAL = 100
_LONGEST_SCAN, _MOST_DIRECTORIES = 20.0, 500_000  # seconds; how many wait to be looked at
_MOST_MEMORY = 512 << 20  # of a broker, should anything in it grow after all
_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_LISTENER, _READY = b"listener", b"ready"
_LOST = "broker: it ended before the command did, which could change nothing from then on"


def special_files(tree: int) -> list[str]:
    """Sockets, pipes and devices below a directory: what a read-only mount keeps nobody from using. With them
    directories in which there may be some, since they can be entered but not listed.

    The kinds come with the listing, so no file is looked at. Raises ProtectionUnavailable for more than can
    be covered, or where a tree cannot be searched. ``Preconditions:`` no other command changes it meanwhile.
    """
    found: list[str] = []
    queue = [""]
    end = time.monotonic() + _LONGEST_SCAN
    while queue:
        above = queue.pop()
        try:
            # No link is followed, whatever the host puts there just now.
            handle = open_beneath(tree, above or ".", _LISTED)
            try:
                with os.scandir(handle) as entries:
                    for entry in entries:
                        if entry.is_symlink() or entry.is_file(follow_symlinks=False):
                            continue
                        path = f"{above}/{entry.name}" if above else entry.name
                        (queue if entry.is_dir(follow_symlinks=False) else found).append(path)
            finally:
                os.close(handle)
        except OSError as error:
            if above and _may_hold_some(tree, above, error):
                found.append(above)
        if len(found) > _MOST_SPECIAL or len(queue) > _MOST_DIRECTORIES or time.monotonic() > end:
            raise _unsearchable(f"{len(found)} so far")
    return found


def _may_hold_some(tree: int, directory: str, error: OSError) -> bool:
    """Whether a directory that could not be listed has to be covered as a whole."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV):
        return False  # the host has removed or replaced it, or another file system is there
    if error.errno != errno.EACCES:
        raise _unsearchable(f"{directory[:200]}: {error.strerror}")
    try:
        os.close(open_beneath(tree, f"{directory}/.", os.O_PATH))
    except OSError:
        return False
    return True


def _unsearchable(found: str) -> ProtectionUnavailable:
    return ProtectionUnavailable(
        "the workspace cannot be changed directly: it holds too much to be looked through, or too many "
        "sockets, pipes and devices",
        hint='remove them, or use filesystem.workspace = "write"',
        protection="direct workspace",
        needed=f"at most {_MOST_SPECIAL} of them, and paths that can be named",
        found=found,
    )


# -- the launcher's side ---------------------------------------------------------------------------------


class DirectSite:
    """One sandbox's share of it. Every descriptor in it is closed by ``close``.

    It has the act lock from the beginning until the broker serves, as init has mounted everything by then.
    ``tree`` is the writable mount of the workspace, which is taken over. It is put at its usual path in a
    tree of its own, where the kernel can, so that a process that asks for the path of what it has open for
    writing gets the one it knows.
    """

    __slots__ = ("beyond", "lock", "lost", "outer", "pid", "record", "tree")

    def __init__(self, direct: Direct, tree: int, *, nested: bool) -> None:
        self.tree = tree
        self.beyond: list[str] = []
        self.pid = 0
        self.lost = False
        self.outer = self.lock = self.record = -1
        try:
            self._make(direct, nested=nested)
        except BaseException:
            self.close(direct)
            raise

    def _make(self, direct: Direct, *, nested: bool) -> None:
        if nested:
            self.outer = mounts.filesystem("tmpfs", mode="0755", size="64k")
            path = direct.target.strip("/")
            for depth in range(1, path.count("/") + 2):
                os.mkdir("/".join(path.split("/")[:depth]), 0o755, dir_fd=self.outer)
            mounts.move_mount(self.tree, self.outer, path)
        self.lock = open_act_lock(direct.lock)
        # Until the covers are in their places, no other command moves what they are for.
        ActLock(self.lock).take()
        self.record = os.memfd_create("casemate-refusals", os.MFD_CLOEXEC | 0x8)  # MFD_NOEXEC_SEAL

    def set_beyond(self, direct: Direct, targets: Iterable[str]) -> None:
        """Say where something else is mounted: acts below the workspace, but there, are not the broker's."""
        below = f"{direct.target}/"
        self.beyond = [target.removeprefix(below) for target in targets if target.startswith(below)]

    def start(self, spec: Spec, ids: tuple[int, int] | None, *, alive: tuple[int, int], channel: int) -> None:
        """Fork the broker, which takes over ``channel`` and (unless it has them) the sandbox's uid and gid.

        ``alive`` is a pipe whose only writer is this process. Raises OSError.
        """
        gc.freeze()
        pid, pidfd = process.fork_into(0)
        if pid == 0:
            _become_broker(self, spec, ids, alive, channel)
        self.pid = pid
        # Now they are the broker's. If that dies, nobody waits for the lock.
        for handle in (self.tree, self.outer, self.lock, pidfd, channel):
            if handle >= 0:
                os.close(handle)
        self.tree = self.outer = self.lock = -1

    def stop(self) -> None:
        """End the broker; nobody it could serve is left."""
        self._look()
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, _signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0

    def _look(self) -> None:
        """See whether the broker has ended already. By itself it does so in order, after everybody else."""
        if self.pid:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid, self.lost = 0, status != 0

    def report(self, outcome: Outcome) -> None:
        """Put into an outcome what the broker has noted so far, and whether it is lost."""
        self._look()
        record.read(self.record, outcome)
        if self.lost:
            outcome.refused.append((_LOST, "the workspace"))

    def close(self, direct: Direct) -> None:
        """Let everything go."""
        self.stop()
        for handle in (self.tree, self.outer, self.lock, self.record):
            if handle >= 0:
                os.close(handle)
        self.tree = self.outer = self.lock = self.record = -1
        sweep(os.path.dirname(direct.lock))


def channel() -> tuple[int, int]:
    """The socket between a broker and an init: the end of each."""
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)
    return ours.detach(), theirs.detach()


# -- init's side -----------------------------------------------------------------------------------------


def hand_over(program: PreparedFilter, channel: int) -> None:
    """Install the filter, give its listener and the root directory to the broker, wait until it serves.

    Raises OSError; BrokenPipeError if there is no broker any more.
    """
    endpoint = _socket.socket(fileno=channel)
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = notify.install(program)
    try:
        packets.send(endpoint, _LISTENER, [listener, root])
    finally:
        os.close(listener)
        os.close(root)
    payload, _ = packets.receive(endpoint)
    endpoint.close()
    if payload != _READY:
        why = (payload or b"it died").decode("utf-8", "replace")
        raise BrokenPipeError(errno.EPIPE, f"the broker of the workspace: {why}", "broker")


# -- the broker ------------------------------------------------------------------------------------------


def _become_broker(
    site: DirectSite, spec: Spec, ids: tuple[int, int] | None, alive: tuple[int, int], channel: int
) -> None:
    """In the forked child: give up what is not needed, serve, end. Never returns."""
    code = 1
    endpoint: _socket.socket | None = None
    try:
        os.close(alive[1])
        endpoint = _socket.socket(fileno=channel)
        _serve(endpoint, site, spec, ids, alive[0])
        code = 0
    except BaseException as error:
        with suppress(BaseException):
            assert endpoint is not None  # noqa: S101
            packets.send(endpoint, f"{type(error).__name__}: {error}".encode("utf-8", "replace")[:500])
    finally:
        os._exit(code)


def _serve(
    endpoint: _socket.socket, site: DirectSite, spec: Spec, ids: tuple[int, int] | None, alive: int
) -> None:
    direct = spec.direct
    assert direct is not None  # noqa: S101
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for number in (0, 1, 2):
        os.dup2(null, number)
    process.close_all_but([endpoint.fileno(), site.tree, site.outer, site.record, site.lock, alive])
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    host = os.open(direct.target, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    if not os.path.samestat(os.fstat(host), os.fstat(site.tree)):
        raise FileNotFoundError(errno.ENOENT, "the workspace is not there any more", direct.target)
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, _MOST_MEMORY))
    size = spec.rlimits.get("FSIZE")
    if size is not None:
        # A size that the command sets by a path is set here; the signal that goes with it is blocked.
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    # Everything that will be needed is loaded now: later nothing can be.
    from casemate.isolation.process import filter as seccomp
    from casemate.isolation.process.broker import Broker
    from casemate.isolation.process.reach import Reach
    from casemate.sys.bpf import Prepared

    program = Prepared(seccomp.broker(machine()))
    judge = _judge(direct, site.tree)
    if ids is None:
        process.drop_capabilities()
    else:
        process.become(*ids, keep=_CAP_SYS_PTRACE)
    process.set_dumpable(False)
    process.die_with_parent(alive)
    process.no_new_privileges()
    payload, handles = packets.receive(endpoint)
    if payload != _LISTENER:
        return  # init has met something first
    listener, root = handles
    program.install()
    reach = Reach(site.tree, host, root, proc, direct.target, site.beyond)
    lock = ActLock(site.lock)
    served = Broker(notify.Listener(listener), reach, judge, record=site.record, lock=lock)
    gc.freeze()
    gc.enable()
    lock.release()
    packets.send(endpoint, _READY)
    endpoint.close()
    served.serve()


def _judge(direct: Direct, tree: int) -> Judge:
    sys.path.extend(path for path in direct.paths if path not in sys.path)
    module, _, name = direct.judge.partition(":")
    __import__(module)
    make: Callable[..., Judge] = getattr(sys.modules[module], name)
    return make(
        tree, direct.target, protect=direct.protect, readable=direct.readable, git_path=direct.git_path
    )
