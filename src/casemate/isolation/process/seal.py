"""The child's side: seal this process, then be the init of the sandbox.

``become_init`` runs in a process forked from the launcher and never returns. Its order is fixed; each
step uses what the next one takes away: control group, namespaces, mounts, network and names, ids,
``no_new_privs``, Landlock, descriptors, seccomp last. Init then starts the command as its own child,
which inherits every restriction, and reports the raw wait status over a pipe that the command never
holds. Init stays non-dumpable: the command has its uid, yet can read nothing of it.
"""

from __future__ import annotations

import _signal
import _socket
import os
import resource
import time

from casemate.isolation.process.spec import Late, Spec, encode
from casemate.sys import capture, mounts, namespaces, packets, process
from casemate.sys.landlock import EVERYTHING, Ruleset

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from casemate.sys.bpf import Prepared as PreparedFilter

__all__ = [
    "Parts",
    "Surroundings",
    "become_init",
    "receive_capture",
    "send_capture",
    "send_surroundings",
]

# Below /proc, what acts on the whole machine: read-only for everyone, root's own sandboxes included
# (sysctl files obey the uid of the opener and no capability, so a uid-0 sandbox could write them).
_PROC_READ_ONLY = ("sys", "sysrq-trigger", "irq", "bus", "fs")
_FORWARDED = (
    _signal.SIGHUP,
    _signal.SIGINT,
    _signal.SIGQUIT,
    _signal.SIGUSR1,
    _signal.SIGUSR2,
    _signal.SIGTERM,
    _signal.SIGCONT,
    _signal.SIGTSTP,
    _signal.SIGALRM,
)
# What init waits for; all of it is blocked since the fork.
_WAITED_FOR = frozenset((_signal.SIGCHLD, *_FORWARDED))
_TIOCSCTTY = 0x540E


class Surroundings:
    """What the launcher made for one sandbox, as the child takes it."""

    __slots__ = ("entrances", "parts", "ruleset")

    def __init__(self, entrances: list[int], parts: list[tuple[int, str]], ruleset: Ruleset | None) -> None:
        self.entrances = entrances  # files of the control groups by which a process enters
        self.parts = parts  # detached mount, place inside
        self.ruleset = ruleset


class Parts:
    """What a child is forked with; descriptors are closed by the seal itself.

    Without ``surroundings`` they come over ``channel``, with the command, while the child makes its
    namespaces.
    """

    __slots__ = (
        "alive_read",
        "alive_write",
        "broker",
        "channel",
        "filter",
        "gid",
        "joined",
        "launchers_end",
        "rootless",
        "spec",
        "start_block",
        "status",
        "stdio",
        "strict_memfd",
        "surroundings",
        "template",
        "uid",
    )

    def __init__(self, spec: Spec, uid: int, gid: int, rootless: bool) -> None:
        self.spec = spec
        self.uid = uid
        self.gid = gid
        self.rootless = rootless
        self.template = -1  # mount namespace
        self.surroundings: Surroundings | None = None
        self.joined: list[tuple[int, int]] = []  # (namespace descriptor, kind) made ahead
        self.filter: PreparedFilter | None = None
        self.start_block: process.StartBlock | None = None
        self.alive_read = -1
        self.alive_write = -1
        self.status = -1
        self.channel = -1
        self.launchers_end = -1  # the other end of the channel
        self.broker = -1  # a socket to the broker of the workspace, where it has one
        self.strict_memfd = rootless
        self.stdio: tuple[int, int, int] = (-1, -1, -1)


def send_surroundings(channel: _socket.socket, around: Surroundings, late: Late) -> None:
    """Give a child that is making its namespaces the rest: its surroundings and its command."""
    handles = [*around.entrances, *(part for part, _ in around.parts)]
    if around.ruleset is not None:
        handles.append(around.ruleset.descriptor)
    version = around.ruleset.version if around.ruleset is not None else 0
    targets = [target for _, target in around.parts]
    words = [str(len(around.entrances)), str(version), str(len(targets)), *targets, *late.as_words()]
    try:
        packets.send(channel, encode(words), handles)
    finally:
        for descriptor in around.entrances:
            os.close(descriptor)


def _receive_surroundings(channel: int) -> tuple[Surroundings, Late]:
    endpoint = _socket.socket(fileno=channel)
    payload, handles = packets.receive(endpoint)
    endpoint.close()
    if payload is None:
        os._exit(1)  # the launcher met something first, and says so itself
    words = packets.split(payload)
    entrances, version, count = int(words[0]), int(words[1]), int(words[2])
    parts = list(zip(handles[entrances : entrances + count], words[3 : 3 + count], strict=True))
    ruleset = Ruleset(version, handles[-1]) if version else None
    return Surroundings(handles[:entrances], parts, ruleset), Late.from_words(words[3 + count :])


def send_capture(channel: int, ports: list[int], *, root: bool) -> None:
    """Make the gate's listeners in the present, new network namespace and hand them to the launcher.

    It is still the launcher's own code that runs in there: no process and no thread ever has to enter a
    network namespace for this in which a command has run.
    """
    made = capture.make(ports, root=root)
    endpoint = _socket.socket(fileno=channel)
    try:
        packets.send(endpoint, made.mechanism.encode(), made.descriptors)
    finally:
        endpoint.detach()
        made.close()


def receive_capture(channel: _socket.socket) -> capture.Capture:
    """Take what ``send_capture`` has sent. Raises BrokenPipeError if the child has met something first."""
    payload, handles = packets.receive(channel)
    if payload is None:
        raise BrokenPipeError(32, "the child has ended", "capture")
    return capture.Capture.from_descriptors(payload.decode(), handles)


def become_init(
    parts: Parts, late: Late | None, receive: Callable[[], tuple[Late, tuple[int, int, int]]] | None
) -> None:
    """Seal the calling process, obtain the command, run it, report, end. Never returns.

    The command is ``late``, or comes with the surroundings, or (a sandbox that waits) by ``receive``, which
    is called when all is sealed.
    """
    step = ["start"]
    try:
        proc = _make_namespaces(parts, step)
        around = parts.surroundings
        if around is None:
            step[0] = "surroundings"
            around, late = _receive_surroundings(parts.channel)
            parts.channel = -1
        _seal(parts, around, proc, step)
        step[0] = "command"
        stdio = parts.stdio
        if receive is not None:
            late, stdio = receive()
        assert late is not None  # noqa: S101
        code = _serve(late, parts.status, stdio)
    except BaseException as error:
        _report_failure(parts.status, step[0], error)
        code = 1
    os._exit(code)


def _report_failure(status: int, step: str, error: BaseException) -> None:
    number = error.errno if isinstance(error, OSError) else None
    what = error.filename if isinstance(error, OSError) else None
    text = f"F\0{step}\0{number or 0}\0{what or ''}\0{type(error).__name__}: {error}"
    try:
        os.write(status, text.encode("utf-8", "replace")[:4000])
    except OSError:
        return


def _make_namespaces(parts: Parts, step: list[str]) -> int:
    """What can be done before the surroundings are there: own namespaces, a copy of the template's mounts.

    Returns the sandbox's own /proc, still detached.
    """
    os.close(parts.alive_write)
    if parts.launchers_end >= 0:
        # A copy of it in here would keep the end of a launcher that is killed now from being noticed.
        os.close(parts.launchers_end)
    if parts.start_block is not None:
        parts.start_block.rename(b"casemate-init")
    os.setsid()
    step[0] = "namespaces"
    if parts.joined:
        for descriptor, kind in parts.joined:
            namespaces.enter(descriptor, kind)
    else:
        network = not parts.spec.network_host
        namespaces.leave(namespaces.IPC | namespaces.UTS | (namespaces.NET if network else 0))
        namespaces.set_hostname(parts.spec.hostname)
        if network:
            namespaces.loopback_up()
        if parts.spec.capture is not None:
            step[0] = "capture"
            send_capture(parts.channel, parts.spec.capture, root=not parts.rootless)
    # Before that namespace is left in which a /proc is visible: without one the unprivileged may mount none.
    proc = _new_proc(parts)
    # The template's namespace has the sandbox's root as its root and nothing of the host's mounts, so
    # there is nothing to pivot away from: unmounting the host's would wait for a grace period.
    namespaces.enter(parts.template, namespaces.MOUNT)
    namespaces.leave(namespaces.MOUNT)
    return proc


def _seal(parts: Parts, around: Surroundings, proc: int, step: list[str]) -> None:
    """Every step up to and including seccomp. ``step`` names the one that is under way."""
    spec = parts.spec
    step[0] = "cgroup"
    for entrance in around.entrances:
        os.write(entrance, b"0")
    namespaces.leave(namespaces.CGROUP)
    step[0] = "mounts"
    for part, target in around.parts:
        mounts.move_mount(part, mounts.AT_FDCWD, target)
    _attach_proc(proc)
    step[0] = "ids"
    if parts.rootless:
        namespaces.leave(namespaces.USER)
        namespaces.map_single(parts.uid, parts.uid, parts.gid, parts.gid)
        process.drop_bounding_set()
    else:
        os.setgroups([])
        os.setresgid(parts.gid, parts.gid, parts.gid)
        os.setresuid(parts.uid, parts.uid, parts.uid)
    process.drop_capabilities()
    process.set_dumpable(False)
    process.die_with_parent(parts.alive_read)
    step[0] = "no_new_privs"
    process.no_new_privileges()
    if around.ruleset is not None:
        step[0] = "landlock"
        proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
        around.ruleset.allow(proc, EVERYTHING)
        around.ruleset.enforce()
    step[0] = "descriptors"
    if parts.stdio[0] < 0:  # a terminal, or streams that come later
        # Nothing of the launcher's own streams comes along, its terminal least of all.
        null = os.open("/dev/null", os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
    keep = [parts.status, parts.channel, parts.broker, *parts.stdio]
    process.close_all_but([descriptor for descriptor in keep if descriptor > 2])
    # Not before: a launcher of many sandboxes has more descriptors than a sandbox may have.
    step[0] = "limits"
    _set_rlimits(spec)
    step[0] = "seccomp"
    if parts.filter is not None and parts.broker >= 0:
        from casemate.isolation.process import direct

        direct.hand_over(parts.filter, parts.broker)
    elif parts.filter is not None:
        parts.filter.install()


_PROC_FLAGS = mounts.NOSUID | mounts.NODEV | mounts.NOEXEC


def _new_proc(parts: Parts) -> int:
    """A fresh /proc of the new pid namespace, whose init the caller is."""
    proc = mounts.filesystem("proc", _PROC_FLAGS)
    if not parts.spec.memfd_exec and not parts.strict_memfd:
        # Per pid namespace since Linux 6.3: memfds of this sandbox can never be executed. Unprivileged
        # launchers may not write it (the file obeys global root); their filter asks for the flag instead.
        handle = os.open("sys/vm/memfd_noexec", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        os.write(handle, b"2")
        os.close(handle)
    return proc


def _attach_proc(proc: int) -> None:
    mounts.move_mount(proc, mounts.AT_FDCWD, "/proc")
    for name in _PROC_READ_ONLY:
        try:
            cover = mounts.clone_tree(proc, name)
        except FileNotFoundError:
            continue
        mounts.restrict(cover, mounts.RDONLY | _PROC_FLAGS)
        mounts.move_mount(cover, proc, name)
        os.close(cover)
    os.close(proc)


def _set_rlimits(spec: Spec) -> None:
    for name, value in spec.rlimits.items():
        kind: int = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))


def _serve(late: Late, status: int, stdio: tuple[int, int, int]) -> int:
    """Start the command, forward signals to it, reap what is orphaned, report how it ended."""
    started = time.monotonic()
    os.umask(late.umask)
    try:
        os.chdir(late.cwd)
    except OSError as error:
        os.write(status, f"C\0{error.errno}\0{late.cwd}".encode("utf-8", "surrogateescape"))
        return 1
    for target, descriptor in enumerate(stdio):
        if descriptor >= 0 and descriptor != target:
            os.dup2(descriptor, target)
    try:
        child = _spawn(late)
    except OSError as error:
        os.write(status, f"X\0{error.errno}\0{late.argv[0]}".encode("utf-8", "surrogateescape"))
        return 1
    os.write(status, f"S\0{started}\n".encode())
    for descriptor in {0, 1, 2, *(d for d in stdio if d > 2)}:
        os.close(descriptor)
    while True:
        pid, how, usage = os.wait4(-1, os.WNOHANG)
        if pid == child:
            used = f"{usage.ru_utime}\0{usage.ru_stime}\0{usage.ru_maxrss}"
            os.write(status, f"W\0{how}\0{time.monotonic()}\0{used}\n".encode())
            return 0
        if pid:
            continue
        number = _signal.sigwaitinfo(_WAITED_FOR).si_signo
        if number != _signal.SIGCHLD:
            _forward(number, child, group=late.tty)


def _forward(number: int, child: int, *, group: bool) -> None:
    """Pass on a signal that came from outside."""
    try:
        os.kill(-child if group else child, number)
        # The kernel ignores SIGTSTP in a session without a parent outside of it, which the command's is: a
        # stop from outside stops every process of the sandbox, and every one goes on with it.
        if number == _signal.SIGTSTP:
            os.kill(-1, _signal.SIGSTOP)
        elif number == _signal.SIGCONT:
            os.kill(-1, _signal.SIGCONT)
    except ProcessLookupError:
        return


def _spawn(late: Late) -> int:
    """posix_spawn along PATH, as execvp would; a text file without ``#!`` is given to /bin/sh."""
    name = late.argv[0]
    if "/" in name:
        candidates = [name]
    else:
        path = late.env.get("PATH", "/usr/bin:/bin")
        candidates = [f"{part or '.'}/{name}" for part in path.split(":")]
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = []
    if late.tty:
        # Opening it as the leader of a new session makes it the controlling terminal.
        actions.append((os.POSIX_SPAWN_OPEN, 0, late.pts, os.O_RDWR, 0))
        actions.append((os.POSIX_SPAWN_DUP2, 0, 1))
        actions.append((os.POSIX_SPAWN_DUP2, 0, 2))
    last: OSError = FileNotFoundError(2, "not found", name)
    for candidate in candidates:
        # Each failed attempt would cost a vfork, and a PATH has a dozen entries.
        if len(candidates) > 1 and not os.access(candidate, os.X_OK):
            if last.errno == 2 and os.access(candidate, os.F_OK):
                last = PermissionError(13, "not executable", candidate)
            continue
        for argv in ([candidate, *late.argv[1:]], ["/bin/sh", candidate, *late.argv[1:]]):
            try:
                return os.posix_spawn(
                    candidate if argv[0] == candidate else "/bin/sh",
                    [late.argv[0], *argv[1:]] if argv[0] == candidate else argv,
                    late.env,
                    file_actions=actions,
                    setsid=True,
                    setsigmask=[],
                    setsigdef=range(1, 32),
                )
            except OSError as error:
                if error.errno == 8 and argv[0] == candidate:  # ENOEXEC
                    continue
                if error.errno not in (2, 20, 13):  # not there, no directory on the way, no permission
                    raise
                if error.errno == 13 or last.errno == 2:
                    last = error
                break
    raise last
