"""What one process can be told about itself: capabilities, privileges, descriptors, limits, signals."""

from __future__ import annotations

import _signal
import ctypes
import os
import struct

from casemate.sys.native import LIBC, fail, machine, syscall

__all__ = [
    "StartBlock",
    "become",
    "close_all_but",
    "die_with_parent",
    "drop_bounding_set",
    "drop_capabilities",
    "fork_into",
    "has_admin",
    "has_ptrace",
    "is_root",
    "lives",
    "mark",
    "no_new_privileges",
    "pidfd_signal",
    "set_dumpable",
    "use_all_descriptors",
    ]

_CAPSET = {"x86_64": 126}.get(machine(), 91)
_CLOSE_RANGE, _PIDFD_SEND_SIGNAL = 436, 424
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_PR_SET_KEEPCAPS = 8
_PR_CAP_AMBIENT = 47

# Version 3 of the capability header (Linux 2.6.26), pid 0 = self, then two empty triples.
_CAP_HEADER = ctypes.create_string_buffer(b"\x22\x05\x08\x20\0\0\0\0", 8)
_CAP_NONE = ctypes.create_string_buffer(24)

_prctl = LIBC.prctl
_prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4


def is_root() -> bool:
    """Whether this is the host's root, and not the root of a user namespace (a rootless container's)."""
    if os.geteuid() != 0:
        return False
    handle = os.open("/proc/self/uid_map", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(handle, 200).split() == [b"0", b"0", b"4294967295"]
    finally:
        os.close(handle)


def has_admin() -> bool:
    """Whether CAP_SYS_ADMIN is effective here; containers take it from their root."""
    return bool(_effective() & (1 << 21))


def has_ptrace() -> bool:
    """Whether CAP_SYS_PTRACE is effective here: without it nobody looks at processes of other users."""
    return bool(_effective() & (1 << 19))


def _effective() -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    return 0


def mark(pid: int) -> str:
    """What names a process for good: its pid and when it was started. Empty if there is none."""
    facts = _stat(pid)
    return f"{pid} {facts[19]}" if facts else ""


def lives(text: str) -> bool:
    """Whether the process that ``mark`` has named is there. One that waits for its parent is not.

    Of a pid namespace's init that means: none of its processes is.
    """
    pid, _, started = text.strip().partition(" ")
    facts = _stat(int(pid)) if pid.isascii() and pid.isdigit() and len(pid) < 12 else []
    return bool(facts) and facts[19] == started and facts[0] not in ("Z", "X")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def drop_bounding_set() -> None:
    """Empty the capability bounding set: no program this process or its children exec can gain one.

    Capabilities that the process holds stay usable, so a launcher does this once for all its children.
    """
    for capability in range(64):
        if _prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            if ctypes.get_errno() == 22:  # EINVAL: past the last capability of this kernel
                return
            raise fail("prctl CAPBSET_DROP")


def drop_capabilities() -> None:
    """Give up every capability, and the ambient ones first."""
    _prctl(_PR_CAP_AMBIENT, 4, 0, 0, 0)
    syscall("capset", _CAPSET, _CAP_HEADER, _CAP_NONE)


def become(uid: int, gid: int, *, keep: int) -> None:
    """Take other ids for good, without supplementary groups, and keep one capability (its number) of all."""
    if _prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0) < 0:
        raise fail("prctl KEEPCAPS")
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    # Effective and permitted for the lower 32 capabilities, then the same for the upper; inheritable never.
    low, high = (1 << keep) & 0xFFFF_FFFF, (1 << keep) >> 32
    data = struct.pack("=6I", low, low, 0, high, high, 0)
    syscall("capset", _CAPSET, _CAP_HEADER, data)


def no_new_privileges() -> None:
    """Setuid bits and file capabilities give nothing from here on."""
    if _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0:
        raise fail("prctl NO_NEW_PRIVS")


def use_all_descriptors() -> None:
    """Raise the limit of open files as far as it goes. It is also what may be on its way between a user's
    processes: any sandbox's descriptors in flight count for all of them (Linux 4.5, ETOOMANYREFS).
    """
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def set_dumpable(value: bool) -> None:
    """Whether processes of the same uid may look into this one (memory, environment, descriptors)."""
    if _prctl(_PR_SET_DUMPABLE, int(value), 0, 0, 0) < 0:
        raise fail("prctl DUMPABLE")


def die_with_parent(alive: int) -> None:
    """Have the kernel kill this process when its parent dies.

    ``alive`` is the read end of a pipe whose only writer is the parent: if it already reads as
    ended, the parent died before the request and the caller must end as well (OSError ESRCH).
    A change of uid clears the request, so this comes after it.
    """
    if _prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0) < 0:
        raise fail("prctl PDEATHSIG")
    try:
        if os.read(alive, 1) == b"":
            raise ProcessLookupError(3, "the launcher is gone", "pdeathsig")
    except BlockingIOError:
        return


def close_all_but(keep: list[int]) -> None:
    """Close every descriptor from 3 up that is not in ``keep``."""
    start = 3
    for descriptor in [*sorted(keep), 1 << 32]:
        if descriptor > start:
            syscall("close_range", _CLOSE_RANGE, start, min(descriptor - 1, 0xFFFFFFFF), 0)
        start = max(start, descriptor + 1)


def pidfd_signal(pidfd: int, number: int) -> bool:
    """Send a signal through a pidfd; False if the process has ended."""
    try:
        syscall("pidfd_send_signal", _PIDFD_SEND_SIGNAL, pidfd, number, None, 0)
    except ProcessLookupError:
        return False
    return True


_CLONE = {"x86_64": 56}.get(machine(), 220)
_CLONE_PIDFD, _SIGCHLD = 0x1000, 17
_pidfd_cell = ctypes.c_int(-1)
_EVERY = range(1, 32)


def fork_into(kinds: int) -> tuple[int, int]:
    """Fork with the child in new namespaces (``CLONE_NEW*``); return its pid and pidfd, or ``(0, -1)``.

    ``os.fork`` after ``unshare(CLONE_NEWPID)`` would need a way back for the parent, and setns into
    the host's pid namespace is refused to the unprivileged. The interpreter's own fork hooks are run
    around the raw call. ``Preconditions:`` single-threaded, since the C library's hooks are not run.

    Every signal is blocked in the child. A handler of the parent's that raised there would send the copy
    back up the parent's own way, to clean up a second time; and one that comes before an init waits for it
    would be dropped by the kernel.
    """
    held = _signal.pthread_sigmask(_signal.SIG_BLOCK, _EVERY)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = LIBC.syscall(
        ctypes.c_long(_CLONE),
        ctypes.c_long(kinds | _CLONE_PIDFD | _SIGCHLD),
        ctypes.c_long(0),
        ctypes.byref(_pidfd_cell),
        ctypes.c_long(0),
        ctypes.c_long(0),
    )
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0, -1
    error = fail("clone") if pid < 0 else None
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    _signal.pthread_sigmask(_signal.SIG_SETMASK, held)
    if error is not None:
        raise error
    return pid, _pidfd_cell.value


class StartBlock:
    """The memory that holds the arguments and environment this process was started with.

    It stays readable through ``/proc/PID/cmdline`` (for everyone) and ``/proc/PID/environ``; a forked
    init of a sandbox has no use for its parent's, which may hold secrets.
    """

    __slots__ = ("_address", "_size")

    def __init__(self) -> None:
        handle = os.open("/proc/self/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fields = os.read(handle, 4096).rsplit(b")", 1)[1].split()
        finally:
            os.close(handle)
        # proc(5): arg_start, arg_end, env_start, env_end are fields 48 to 51; two stand before the ")".
        self._address = int(fields[45])
        self._size = max(0, int(fields[48]) - self._address)

    def rename(self, name: bytes) -> None:
        """Overwrite all of it by ``name`` and zeros."""
        if self._address and self._size > len(name):
            ctypes.memset(self._address, 0, self._size)
            ctypes.memmove(self._address, name, len(name))
