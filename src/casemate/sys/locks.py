"""Files that are locks: what a killed holder leaves is found by trying to lock it.

An *act lock* is taken for one act at a time by many processes, each of which keeps its file open. It is a
lock of the open file (``F_OFD_SETLKW``), beside the one that marks the file as used while it is open.
"""

from __future__ import annotations

import fcntl
import os
import struct

__all__ = ["ActLock", "open_act_lock", "paused", "sweep"]

_F_OFD_SETLKW = 38
_WHOLE, _NONE = (struct.pack("@hhqqi4x", kind, 0, 0, 0, 0) for kind in (fcntl.F_WRLCK, fcntl.F_UNLCK))


def open_act_lock(path: str) -> int:
    """Open (or make) the file of an act lock, private to this user; nobody sweeps it while it is open."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        handle = os.open(path, flags, 0o600)
        fcntl.flock(handle, fcntl.LOCK_SH)
        if os.fstat(handle).st_nlink:
            return handle
        os.close(handle)


class ActLock:
    """``with`` it for one act. ``Preconditions:`` nobody else uses this very description of the file."""

    __slots__ = ("_handle",)

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self) -> None:
        """Wait for it. A child that is forked then has it as well; whoever releases it does so for both."""
        fcntl.fcntl(self._handle, _F_OFD_SETLKW, _WHOLE)

    def release(self) -> None:
        """Let others act."""
        fcntl.fcntl(self._handle, _F_OFD_SETLKW, _NONE)


class paused:
    """Hold an act lock for a longer work; the file is gone afterwards if nobody else has it open."""

    __slots__ = ("_handle", "_path")

    def __init__(self, path: str) -> None:
        self._path = path
        self._handle = -1

    def __enter__(self) -> None:
        self._handle = open_act_lock(self._path)
        fcntl.fcntl(self._handle, _F_OFD_SETLKW, _WHOLE)

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)
        sweep(os.path.dirname(self._path))


def sweep(directory: str) -> None:
    """Remove the lock files below ``directory`` that nobody holds.

    Whoever takes such a lock looks afterwards whether the file still has a name, so removing one under
    their hands makes them try again and lets nobody in. A link is not followed: what is behind it is no
    directory of locks.
    """
    try:
        place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if os.fstat(place).st_uid == os.geteuid():
            for name in os.listdir(place):
                _remove_unheld(place, name)
    except OSError:
        return
    finally:
        os.close(place)


def _remove_unheld(directory: int, name: str) -> None:
    try:
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(name, flags, dir_fd=directory)
    except OSError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_nlink:
            os.unlink(name, dir_fd=directory)
    except OSError:
        pass
    finally:
        os.close(handle)
