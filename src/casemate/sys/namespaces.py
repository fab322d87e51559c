"""Namespaces, and the few things that are set once one is inside them."""

from __future__ import annotations

import ctypes
import os
import struct

from casemate.sys.native import LIBC, fail
from casemate.sys.process import fork_into

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "CGROUP",
    "IPC",
    "MOUNT",
    "NET",
    "NO_GROUPS",
    "PID",
    "USER",
    "UTS",
    "enter",
    "halve_inotify",
    "id_map",
    "leave",
    "loopback_up",
    "make",
    "map_single",
    "network_of",
    "no_groups",
    "reap_helpers",
    "set_hostname",
]

MOUNT, CGROUP, UTS, IPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
USER, PID, NET = 0x10000000, 0x20000000, 0x40000000

#: Of an id map in which no group is any: it has to hold something, and this is the highest gid that there is.
NO_GROUPS = [(4294967294, 4294967294)]

NAMES = {MOUNT: "mnt", CGROUP: "cgroup", UTS: "uts", IPC: "ipc", USER: "user", PID: "pid", NET: "net"}


def leave(kinds: int) -> None:
    """``unshare(2)``: leave the present namespaces of these kinds for new ones."""
    if LIBC.unshare(kinds) < 0:
        raise fail("unshare " + "+".join(name for bit, name in NAMES.items() if kinds & bit))


def enter(namespace: int, kind: int) -> None:
    """``setns(2)`` into the namespace behind a descriptor."""
    if LIBC.setns(namespace, kind) < 0:
        raise fail(f"setns {NAMES.get(kind, kind)}")


def set_hostname(name: str) -> None:
    """Name the host of the present UTS namespace."""
    encoded = name.encode()
    if LIBC.sethostname(encoded, len(encoded)) < 0:
        raise fail("sethostname")


def loopback_up() -> None:
    """Bring up ``lo`` in the present network namespace (SIOCSIFFLAGS by ctypes: no socket module)."""
    handle = LIBC.socket(2, 2 | os.O_CLOEXEC, 0)
    if handle < 0:
        raise fail("socket for lo")
    request = ctypes.create_string_buffer(struct.pack("16sh14x", b"lo", 0x41), 32)
    try:
        if LIBC.ioctl(handle, ctypes.c_ulong(0x8914), request) < 0:
            raise fail("lo up")
    finally:
        os.close(handle)


def network_of(pid: int) -> int:
    """The network namespace of a process, which is another than the caller's. Raises OSError also if not."""
    handle = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    theirs, own = os.fstat(handle), os.stat("/proc/self/ns/net")
    if (theirs.st_dev, theirs.st_ino) == (own.st_dev, own.st_ino):
        os.close(handle)
        raise OSError(1, "it is in the caller's own network namespace", f"/proc/{pid}/ns/net")
    return handle


def map_single(inside: int, outside: int, inside_gid: int, outside_gid: int) -> None:
    """Write the id maps of the user namespace that the caller has just entered: one id each."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {outside} 1"),
        ("gid_map", f"{inside_gid} {outside_gid} 1"),
    ):
        handle = os.open(f"/proc/self/{name}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)


def halve_inotify() -> None:
    """Leave the user half of what the kernel lets one user watch: sandboxes count against the same quota.

    The files written belong to the user namespace that has just been entered; nobody else's limits change.
    """
    for name in ("instances", "watches"):
        try:
            with open(f"/proc/sys/fs/inotify/max_user_{name}") as file:
                most = int(file.read())
            with open(f"/proc/sys/user/max_inotify_{name}", "w") as file:
                file.write(str(max(1, most // 2)))
        except (OSError, ValueError):
            continue


def make(
    kinds: int,
    setup: Callable[[], None],
    finish: Callable[[int], None] | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> dict[int, int]:
    """New namespaces without a process: kind -> descriptor.

    A short-lived child makes them, since an unprivileged process cannot come back out of one, and a
    privileged one that failed to would go on in the wrong place. ``setup`` runs in the child and
    ``meanwhile`` in the caller, then ``finish(pid)`` in the caller while the child waits. Raises OSError,
    also with what ``setup`` raised.
    """
    reap_helpers()
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()
    child, pidfd = fork_into(kinds)
    if child == 0:
        try:
            os.close(go_write)
            setup()
            os.write(ready_write, b"r")
            os.read(go_read, 1)  # until the parent has what it wants, or is gone
        except Exception as error:
            number = error.errno if isinstance(error, OSError) else 0
            os.write(ready_write, f"!{number or 1} {error}".encode("utf-8", "replace")[:2000])
        finally:
            os._exit(0)
    held: dict[int, int] = {}
    try:
        os.close(ready_write)
        ready_write = -1
        if meanwhile is not None:
            meanwhile()
        answer = os.read(ready_read, 4096)
        if answer != b"r":
            code, _, text = answer[1:].decode("utf-8", "replace").partition(" ")
            raise OSError(int(code or 1), text or "the process that makes it died", "namespaces")
        if finish is not None:
            finish(child)
        for bit, name in NAMES.items():
            if kinds & bit:
                held[bit] = os.open(f"/proc/{child}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        return held
    except BaseException:
        for descriptor in held.values():
            os.close(descriptor)
        raise
    finally:
        for descriptor in (ready_read, ready_write, go_read, go_write, pidfd):
            if descriptor >= 0:
                os.close(descriptor)
        _ending.append(child)


# Helpers that are on their way out: nobody has to wait for that (0.4 ms) before going on.
_ending: list[int] = []


def reap_helpers(*, wait: bool = False) -> None:
    """Collect the helpers of ``make`` that have ended; with ``wait`` all of them."""
    for child in [*_ending]:
        pid, _ = os.waitpid(child, 0 if wait else os.WNOHANG)
        if pid:
            _ending.remove(child)


def id_map(uids: list[tuple[int, int]], gids: list[tuple[int, int]]) -> int:
    """A descriptor of a user namespace that maps each ``(on disk, seen)`` pair; for ``mounts.idmap``."""
    return _mapped(*("".join(f"{disk} {seen} 1\n" for disk, seen in pairs) for pairs in (uids, gids)))


def no_groups() -> int:
    """The same, of a user namespace in which users are who they are, and no group is any."""
    return _mapped("0 0 4294967295\n", "".join(f"{disk} {seen} 1\n" for disk, seen in NO_GROUPS))


def _mapped(uid_map: str, gid_map: str) -> int:
    reap_helpers()
    until_read, until_write = os.pipe()
    child, pidfd = fork_into(USER)  # nothing has to be done in there, so nobody waits for it (0.35 ms)
    if child == 0:
        os.close(until_write)
        os.read(until_read, 1)
        os._exit(0)
    try:
        for name, text in (("uid_map", uid_map), ("gid_map", gid_map)):
            handle = os.open(f"/proc/{child}/{name}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(handle, text.encode())
            finally:
                os.close(handle)
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for descriptor in (until_read, until_write, pidfd):
            os.close(descriptor)
        _ending.append(child)
