"""The child's side: seal this process, then be the init of the sandbox.

``become_init`` runs in a process forked from the launcher and never returns. Its order is fixed; each
step uses what the next one takes away: control group, namespaces, mounts, network and names, ids,
``no_new_privs``, Landlock, descriptors, seccomp last. Init then starts the command as its own child,
which inherits every restriction, and reports the raw wait status over a pipe that the command never
holds. Init stays non-dumpable: the command has its uid, yet can read nothing of it.
"""

from __future__ import annotations

import _signal
import os
import time

from casemate.isolation.process.spec import Late, Spec
from casemate.sys import mounts, namespaces, process
from casemate.sys.bpf import Prepared as PreparedFilter
from casemate.sys.landlock import EVERYTHING, Ruleset

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Parts", "become_init"]

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
_TIOCSCTTY = 0x540E


class Parts:
    """What the launcher has made ready for one child; descriptors are closed by the seal itself."""

    __slots__ = (
        "alive_read",
        "alive_write",
        "channel",
        "entrances",
        "filter",
        "gid",
        "joined",
        "rootless",
        "ruleset",
        "spec",
        "start_block",
        "status",
        "stdio",
        "tree",
        "uid",
    )

    def __init__(self, spec: Spec, uid: int, gid: int, rootless: bool) -> None:
        self.spec = spec
        self.uid = uid
        self.gid = gid
        self.rootless = rootless
        self.tree = -1
        self.entrances: list[int] = []
        self.joined: list[tuple[int, int]] = []  # (namespace descriptor, kind) made ahead
        self.ruleset: Ruleset | None = None
        self.filter: PreparedFilter | None = None
        self.alive_read = -1
        self.alive_write = -1
        self.status = -1
        self.channel = -1  # on which a waiting sandbox gets its command
        self.stdio: tuple[int, int, int] = (-1, -1, -1)
        self.start_block: process.StartBlock | None = None


def become_init(parts: Parts, late: Late | None, receive: Callable[[], tuple[Late, tuple[int, int, int]]] | None) -> None:
    """Seal the calling process, obtain the command, run it, report, end. Never returns.

    Without ``late``, ``receive`` waits for the command and its streams; it is called when all is sealed.
    """
    step = ["start"]
    try:
        _seal(parts, step)
        step[0] = "command"
        stdio = parts.stdio
        if late is None:
            assert receive is not None  # noqa: S101
            late, stdio = receive()
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


def _seal(parts: Parts, step: list[str]) -> None:
    """Every step up to and including seccomp. ``step`` names the one that is under way."""
    spec = parts.spec
    os.close(parts.alive_write)
    if parts.start_block is not None:
        parts.start_block.rename(b"casemate-init")
    step[0] = "cgroup"
    for entrance in parts.entrances:
        os.write(entrance, b"0")
    step[0] = "namespaces"
    # The child was made in new pid and mount namespaces, and in new network, IPC and UTS ones unless they
    # were made ahead. The cgroup namespace starts at the group just entered.
    for descriptor, kind in parts.joined:
        namespaces.enter(descriptor, kind)
    namespaces.leave(namespaces.CGROUP)
    os.setsid()
    step[0] = "mounts"
    mounts.make_private()
    _mount_proc(parts)
    mounts.pivot_into(parts.tree)
    step[0] = "names"
    if not parts.joined:
        if not spec.network_host:
            namespaces.loopback_up()
        namespaces.set_hostname(spec.hostname)
    step[0] = "limits"
    _set_rlimits(spec)
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
    if parts.ruleset is not None:
        step[0] = "landlock"
        proc = os.open("/proc", os.O_PATH | os.O_CLOEXEC)
        parts.ruleset.allow(proc, EVERYTHING)
        parts.ruleset.enforce()
    step[0] = "descriptors"
    if parts.stdio[0] < 0:  # a terminal, or streams that come later
        # Nothing of the launcher's own streams comes along, its terminal least of all.
        null = os.open("/dev/null", os.O_RDWR)
        for target in (0, 1, 2):
            os.dup2(null, target)
    keep = [parts.status, parts.channel, *parts.stdio]
    process.close_all_but([descriptor for descriptor in keep if descriptor > 2])
    step[0] = "seccomp"
    if parts.filter is not None:
        parts.filter.install()


def _mount_proc(parts: Parts) -> None:
    """A fresh /proc of the new pid namespace, put into the tree before it becomes the root."""
    flags = mounts.NOSUID | mounts.NODEV | mounts.NOEXEC
    proc = mounts.filesystem("proc", flags)
    if not parts.spec.memfd_exec and not parts.rootless:
        # Per pid namespace since Linux 6.3: memfds of this sandbox can never be executed. Unprivileged
        # launchers may not write it (the file obeys global root); their filter asks for the flag instead.
        handle = os.open("sys/vm/memfd_noexec", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        os.write(handle, b"2")
        os.close(handle)
    mounts.move_mount(proc, parts.tree, "proc")
    for name in _PROC_READ_ONLY:
        try:
            cover = mounts.clone_tree(proc, name)
        except FileNotFoundError:
            continue
        mounts.restrict(cover, mounts.RDONLY | flags)
        mounts.move_mount(cover, proc, name)
        os.close(cover)
    os.close(proc)


def _set_rlimits(spec: Spec) -> None:
    import resource

    for name, value in spec.rlimits.items():
        kind: int = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))


def _serve(late: Late, status: int, stdio: tuple[int, int, int]) -> int:
    """Start the command, forward signals to it, reap what is orphaned, report how it ended."""
    signals = {_signal.SIGCHLD, *_FORWARDED}
    _signal.pthread_sigmask(_signal.SIG_BLOCK, signals)
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
        pid, how = os.waitpid(-1, os.WNOHANG)
        if pid == child:
            os.write(status, f"W\0{how}\0{time.monotonic()}\n".encode())
            return 0
        if pid:
            continue
        number = _signal.sigwaitinfo(signals).si_signo
        if number != _signal.SIGCHLD:
            try:
                os.kill(-child if late.tty else child, number)
            except ProcessLookupError:
                continue


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
