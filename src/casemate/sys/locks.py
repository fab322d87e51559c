"""Files that are locks: what a killed holder leaves is found by trying to lock it."""

from __future__ import annotations

import fcntl
import os

__all__ = ["sweep"]


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
