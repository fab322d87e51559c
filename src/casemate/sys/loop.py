"""A file system of an exact size in a file: what limits disk space where no quota can be had."""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from casemate.sys import mounts

__all__ = ["available", "make"]

_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_AUTOCLEAR = 4
_MKFS = ("/sbin/mkfs.ext4", "/usr/sbin/mkfs.ext4")


def available() -> str:
    """Why it cannot be had, or ``""``."""
    if not os.access("/dev/loop-control", os.W_OK):
        return "/dev/loop-control cannot be opened"
    if not any(os.access(path, os.X_OK) for path in _MKFS):
        return "mkfs.ext4 is not installed"
    return ""


def make(path: str, size: int, attributes: int) -> int:
    """Make an ext4 file system of ``size`` bytes in the new file ``path``; returns its detached mount.

    The file is sparse; the loop device holds it, and lets go of it with the
    last use of the mount (Linux 5.8). There is no journal, since nothing of it has to outlive a crash of
    the machine, and no kernel thread fills in inode tables later. Raises OSError.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(handle, size)
        _format(path)
        device, loop = _attach(handle)
    finally:
        os.close(handle)
    try:
        return mounts.filesystem("ext4", attributes, source=device, noinit_itable=True)
    finally:
        os.close(loop)


def _format(path: str) -> None:
    program = next((name for name in _MKFS if os.access(name, os.X_OK)), _MKFS[0])
    # The file is sparse and reads as zeros, so there is nothing to discard and no inode table to write.
    options = ["-q", "-F", "-m", "0", "-O", "^has_journal", "-i", "8192"]
    options += ["-E", "nodiscard,lazy_itable_init=1"]
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    try:
        pid = os.posix_spawn(
            program,
            [program, *options, path],
            {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            file_actions=[(os.POSIX_SPAWN_DUP2, null, target) for target in (0, 1, 2)],
        )
    finally:
        os.close(null)
    _, status = os.waitpid(pid, 0)
    if status:
        raise OSError(errno.EIO, f"mkfs.ext4 ended with {os.waitstatus_to_exitcode(status)}", path)


def _attach(handle: int) -> tuple[str, int]:
    """A loop device over an open file: its path, and a descriptor that keeps it until it is mounted."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(64):
            device = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
            loop = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            # struct loop_config: descriptor, block size, struct loop_info64 (flags at byte 52), reserve.
            info = bytearray(232)
            struct.pack_into("=I", info, 52, _AUTOCLEAR)
            try:
                fcntl.ioctl(loop, _LOOP_CONFIGURE, struct.pack("=II", handle, 0) + bytes(info) + bytes(64))
                return device, loop
            except OSError as error:
                os.close(loop)
                if error.errno != errno.EBUSY:  # else somebody was faster
                    raise
        raise OSError(errno.EBUSY, "no loop device is free", "/dev/loop-control")
    finally:
        os.close(control)
