"""Mounts by file descriptor: the mount API of Linux 5.2 and later.

Mounts are made *detached*, filled through their descriptor, and attached once the process that
needs them is in its own mount namespace, so that nothing has to be attached in the host's on the way.
"""

from __future__ import annotations

import ctypes
import os
import struct

from casemate.sys.native import LIBC, fail, machine, syscall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "attach",
    "clone_tree",
    "detached_trees",
    "filesystem",
    "idmap",
    "keep_out_of_copies",
    "layers_by_path",
    "make_private",
    "move_mount",
    "overlay_of_paths",
    "pivot_into",
    "restrict",
    "unmount",
]

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
AT_SYMLINK_NOFOLLOW = 0x100

_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _MOUNT_SETATTR = 428, 429, 430, 431, 432, 442
_PIVOT_ROOT = {"x86_64": 155}.get(machine(), 41)

RDONLY, NOSUID, NODEV, NOEXEC = 0x1, 0x2, 0x4, 0x8
IDMAP = 0x100000

_MS_REC, _MS_UNBINDABLE, _MS_PRIVATE, _MNT_DETACH = 0x4000, 1 << 17, 1 << 18, 2


def filesystem(
    kind: str, attributes: int = 0, layers: Iterable[tuple[str, str | int]] = (), **options: str | bool
) -> int:
    """Mount a new file system, detached, and return its descriptor (O_CLOEXEC).

    An option's value is a string, or ``True`` for a bare flag. ``layers`` are the directories of an
    overlay, as paths or (Linux 6.13) as descriptors; ``lowerdir+`` (Linux 6.7 for paths) adds one below
    those before it. Raises OSError that names the option.
    """
    context = syscall(f"fsopen {kind}", _FSOPEN, kind.encode(), 1)
    try:
        for name, layer in layers:
            if isinstance(layer, int):
                syscall(f"{kind} {name}", _FSCONFIG, context, 5, name.encode(), None, layer)
            else:
                syscall(f"{kind} {name}", _FSCONFIG, context, 1, name.encode(), os.fsencode(layer), 0)
        for name, value in options.items():
            if value is True:
                syscall(f"{kind} {name}", _FSCONFIG, context, 0, name.encode(), None, 0)
            elif value is not False:
                syscall(f"{kind} {name}", _FSCONFIG, context, 1, name.encode(), value.encode(), 0)
        syscall(f"create {kind}", _FSCONFIG, context, 6, None, None, 0)
        return syscall(f"fsmount {kind}", _FSMOUNT, context, 1, attributes)
    finally:
        os.close(context)


def overlay_of_paths(place: str, attributes: int, options: str) -> int:
    """An overlay by mount(2), whose options may take 4 KiB together: detached, having been at ``place``.

    Relative paths among the options start from the present directory. Raises OSError.
    """
    flags = ctypes.c_ulong(attributes)
    if LIBC.mount(b"overlay", os.fsencode(place), b"overlay", flags, os.fsencode(options)) < 0:
        raise fail("mount overlay")
    try:
        return clone_tree(AT_FDCWD, place)
    finally:
        unmount(place)


def clone_tree(directory: int, path: str = "", *, recursive: bool = False, follow: bool = True) -> int:
    """A detached copy of the mount at ``path`` (a bind mount that is nowhere yet)."""
    flags = 1 | os.O_CLOEXEC | (AT_RECURSIVE if recursive else 0)
    flags |= 0 if path else AT_EMPTY_PATH
    flags |= 0 if follow else AT_SYMLINK_NOFOLLOW
    return syscall(f"open_tree {path}", _OPEN_TREE, directory, os.fsencode(path), flags)


def restrict(
    mount: int, attributes: int, *, path: bytes = b"", recursive: bool = False, ids: int = -1
) -> None:
    """Set ``RDONLY`` and friends on a mount; with ``recursive`` on every mount below it too.

    It becomes private as well: what the host mounts later at such a place does not come to appear in it.
    With ``ids``, a user namespace, its files are shown through that id map (see ``idmap``). All or nothing.
    """
    block = struct.pack("=QQQQ", attributes | (IDMAP if ids >= 0 else 0), 0, _MS_PRIVATE, max(ids, 0))
    flags = (0 if path else AT_EMPTY_PATH) | (AT_RECURSIVE if recursive else 0)
    syscall("mount_setattr", _MOUNT_SETATTR, mount, path, flags, block, 32)


def keep_out_of_copies(mount: int) -> None:
    """Have a recursive copy of what a mount is attached below leave it out, until ``restrict``."""
    block = struct.pack("=QQQQ", 0, 0, _MS_UNBINDABLE, 0)
    syscall("mount_setattr unbindable", _MOUNT_SETATTR, mount, b"", AT_EMPTY_PATH, block, 32)


def idmap(mount: int, user_namespace: int) -> None:
    """Show the mount's files through the id map of a user namespace (Linux 5.12; tmpfs 6.3)."""
    block = struct.pack("=QQQQ", IDMAP, 0, 0, user_namespace)
    syscall("mount_setattr idmap", _MOUNT_SETATTR, mount, b"", AT_EMPTY_PATH, block, 32)


def move_mount(mount: int, directory: int, path: str) -> None:
    """Attach a detached mount at ``path`` below ``directory``; a link at the end is not followed."""
    syscall(f"move_mount {path}", _MOVE_MOUNT, mount, b"", directory, os.fsencode(path), 4)


def make_private() -> None:
    """Cut the calling process's mount namespace off from its peers."""
    if LIBC.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None) < 0:
        raise fail("mount --make-rprivate /")


def detached_trees() -> bool:
    """Whether detached mounts can be cloned and put into one another (Linux 6.15), by the kernel's name.

    Overlay layers by descriptor came before that, with 6.13.
    """
    return _version() >= (6, 15)


def layers_by_path() -> bool:
    """Whether an overlay takes its lower layers one by one as paths (Linux 6.7), by the kernel's name."""
    return _version() >= (6, 7)


def _version() -> tuple[int, int]:
    words = os.uname().release.split(".")[:2]
    major, minor = (int("".join(c for c in word if c.isdigit()) or 0) for word in words)
    return major, minor


def attach(mount: int, path: str) -> None:
    """Attach a detached mount at an absolute path."""
    move_mount(mount, AT_FDCWD, path)


def pivot_into(mount: int) -> None:
    """Make an attached mount the root of the calling process's (own, private) mount namespace.

    The old root is stacked under the new one by ``pivot_root(".", ".")`` and then let go, so no
    directory for it is needed inside.
    """
    os.fchdir(mount)
    syscall("pivot_root", _PIVOT_ROOT, b".", b".")
    if LIBC.umount2(b".", _MNT_DETACH) < 0:
        raise fail("umount old root")
    os.chdir("/")


def unmount(path: str) -> None:
    """Detach the mount at ``path``."""
    if LIBC.umount2(os.fsencode(path), _MNT_DETACH | 8) < 0:
        raise fail(f"umount {path}")
