"""Opening, renaming and dating files beneath a directory descriptor, where nothing may be followed.

Python has no ``openat2``, no ``renameat2`` and no birth time; the rest of what the workspace needs it
has. The calls go through ``CDLL``, which lets go of the interpreter lock: a file system may be slow.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from casemate.sys.native import machine

__all__ = [
    "BENEATH",
    "DIRECTORY",
    "EXCHANGE",
    "NOREPLACE",
    "birth_ns",
    "chmod_fd",
    "clone_range",
    "descriptor_path",
    "find_handle",
    "link_fd",
    "mode_beneath",
    "mount_id",
    "open_beneath",
    "open_in_root",
    "rename",
    "stat_block",
    "xattrs",
]

#: openat2's RESOLVE_NO_XDEV | NO_MAGICLINKS | NO_SYMLINKS | BENEATH.
BENEATH = 0x01 | 0x02 | 0x04 | 0x08
#: Flags for a directory that is only a starting point: no right to read it is needed.
DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW

_NO_MAGICLINKS, _IN_ROOT = 0x02, 0x10
NOREPLACE, EXCHANGE = 1, 2

_OPENAT2 = 437
_RENAMEAT2, _STATX, _OPEN_BY_HANDLE_AT = {"x86_64": (316, 332, 304)}.get(machine(), (276, 291, 265))
_AT_SYMLINK_NOFOLLOW, _AT_EMPTY_PATH = 0x100, 0x1000
_STATX_BTIME, _STATX_MNT_ID = 0x800, 0x1000
_FICLONE = 0x40049409

_libc = ctypes.CDLL(None, use_errno=True)
# One prototype per call: a bare syscall() would pass Python's integers as C ints.
_openat2 = ctypes.CFUNCTYPE(
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_size_t,
    use_errno=True,
)(("syscall", _libc))
_renameat2 = ctypes.CFUNCTYPE(
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_uint,
    use_errno=True,
)(("syscall", _libc))
_statx = ctypes.CFUNCTYPE(
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_void_p,
    use_errno=True,
)(("syscall", _libc))

_open_by_handle_at = ctypes.CFUNCTYPE(
    ctypes.c_long, ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_int, use_errno=True
)(("syscall", _libc))

_unpack_mount = struct.Struct("=I140xQ").unpack_from  # stx_mask, stx_mnt_id
_pack_how = struct.Struct("=QQQ").pack  # struct open_how: flags, mode, resolve
# The flags in use are few, and packing them costs a third of the call.
_hows: dict[tuple[int, int, int], bytes] = {}


def _fail(path: str | bytes) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), path)


def _name(path: str | bytes) -> bytes:
    raw = os.fsencode(path)
    if b"\0" in raw:  # the kernel would see a shorter name than we have judged
        raise OSError(errno.EINVAL, "a name holds a NUL byte", path)
    return raw


def open_beneath(directory: int, path: str | bytes, flags: int, mode: int = 0) -> int:
    """Open ``path`` below ``directory``: no link anywhere in it, no mount crossed, no way up.

    The path is relative and not empty ("." is the directory itself). Raises OSError: ELOOP where a link
    is, EXDEV where the path leaves the directory or enters another mount.
    """
    return _open(directory, path, flags, mode, BENEATH)


def mode_beneath(directory: int, path: str) -> int:
    """st_mode of what ``open_beneath`` would open, links themselves included; "" is the directory. Raises
    OSError.
    """
    handle = open_beneath(directory, path or ".", os.O_PATH | os.O_NOFOLLOW)
    try:
        return os.fstat(handle).st_mode
    finally:
        os.close(handle)


def open_in_root(directory: int, path: str | bytes) -> int:
    """Open a directory as a process would whose root is ``directory``: absolute links start there, too."""
    return _open(directory, path, os.O_PATH | os.O_DIRECTORY, 0, _IN_ROOT | _NO_MAGICLINKS)


def _open(directory: int, path: str | bytes, flags: int, mode: int, resolve: int) -> int:
    key = (flags, mode, resolve)
    how = _hows.get(key)
    if how is None:
        how = _hows[key] = _pack_how(flags | os.O_CLOEXEC, mode, resolve)
    for _ in range(16):
        result: int = _openat2(_OPENAT2, directory, _name(path), how, 24)
        if result >= 0:
            return result
        # EAGAIN: something was renamed on the way and the kernel could not rule out an escape.
        if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            break
    raise _fail(path)


def rename(from_dir: int, name: str | bytes, to_dir: int, to: str | bytes, flags: int = 0) -> None:
    """``renameat2``: with ``NOREPLACE`` an existing name is EEXIST, with ``EXCHANGE`` both are swapped."""
    if _renameat2(_RENAMEAT2, from_dir, _name(name), to_dir, _name(to), flags) < 0:
        raise _fail(to)


def birth_ns(descriptor: int, name: str | bytes = b"") -> int | None:
    """When the file was made, in ns since the epoch; None if the file system does not say."""
    block = _stat_block(descriptor, name, _STATX_BTIME)
    if block is None:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", block, 80)  # stx_btime
    born: int = seconds * 1_000_000_000 + nanoseconds
    return born


def stat_block() -> ctypes.Array[ctypes.c_char]:
    """Room for what the kernel says of a file, for who asks often."""
    return ctypes.create_string_buffer(256)


def mount_id(descriptor: int, room: ctypes.Array[ctypes.c_char] | None = None) -> int | None:
    """Which mount the descriptor was opened through (Linux 5.8); None if the kernel does not say."""
    if room is not None:
        if _statx(_STATX, descriptor, b"", _AT_EMPTY_PATH, _STATX_MNT_ID, room) < 0:
            raise _fail(b"")
        mask, identity = _unpack_mount(room)
        return identity if mask & _STATX_MNT_ID else None
    block = _stat_block(descriptor, b"", _STATX_MNT_ID)
    if block is None:
        return None
    number: int = struct.unpack_from("=Q", block, 144)[0]  # stx_mnt_id
    return number


def _stat_block(descriptor: int, name: str | bytes, mask: int) -> bytes | None:
    """A raw struct statx, or None if the kernel did not fill in what ``mask`` asks for."""
    block = ctypes.create_string_buffer(256)
    flags = _AT_SYMLINK_NOFOLLOW if name else _AT_EMPTY_PATH
    if _statx(_STATX, descriptor, _name(name), flags, mask, block) < 0:
        raise _fail(name)
    return block.raw if struct.unpack_from("=I", block, 0)[0] & mask else None


def find_handle(directory: int, kind: int, handle: bytes) -> str | None:
    """Where below ``directory`` the file is that a file handle names (its identity, whatever it is called
    by now); None if it is elsewhere or gone, or we may not ask: that needs CAP_DAC_READ_SEARCH.
    """
    # struct file_handle: u32 handle_bytes, int handle_type, then the handle.
    block = struct.pack("=Ii", len(handle), kind) + handle
    mount = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)  # not O_PATH: EBADF
    try:
        fd: int = _open_by_handle_at(_OPEN_BY_HANDLE_AT, mount, block, os.O_PATH | os.O_CLOEXEC)
    finally:
        os.close(mount)
    if fd < 0:
        return None
    try:
        if not os.fstat(fd).st_nlink:
            return None
        top = os.readlink(descriptor_path(directory)).rstrip("/") + "/"
        path = os.readlink(descriptor_path(fd))
    finally:
        os.close(fd)
    return path[len(top) :] if path.startswith(top) else None


def descriptor_path(descriptor: int) -> str:
    """A path that means exactly the descriptor's file, for calls that take no descriptor."""
    return f"/proc/self/fd/{descriptor}"


def link_fd(descriptor: int, directory: int, name: str) -> None:
    """Give an open file (one of O_TMPFILE, too) a name; an existing one is EEXIST.

    By way of /proc: AT_EMPTY_PATH needs a capability before Linux 6.10.
    """
    os.link(descriptor_path(descriptor), name, dst_dir_fd=directory, follow_symlinks=True)


def chmod_fd(descriptor: int, mode: int) -> None:
    """Set the mode of an open file; O_PATH descriptors, which fchmod refuses, work as well."""
    os.chmod(descriptor_path(descriptor), mode)


def clone_range(source: int, destination: int) -> bool:
    """Share the whole content of ``source`` (a reflink); False where the file system cannot."""
    import fcntl

    try:
        fcntl.ioctl(destination, _FICLONE, source)
    except OSError:
        return False
    return True


def xattrs(descriptor: int, prefix: str) -> dict[str, bytes]:
    """The extended attributes of an open file whose names start with ``prefix``, without the prefix.

    A file system without extended attributes has none.
    """
    try:
        names = os.listxattr(descriptor)
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.ENOSYS):
            return {}
        raise
    found: dict[str, bytes] = {}
    for name in names:
        if name.startswith(prefix):
            found[name[len(prefix) :]] = os.getxattr(descriptor, name)
    return found
