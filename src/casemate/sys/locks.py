"""Files that are locks: what a killed holder leaves is found by trying to lock it."""

from __future__ import annotations

import fcntl
import os

__all__ = ["sweep"]


def sweep(directory: str) -> None:
    """Remove the lock files below ``directory`` that nobody holds.

    Whoever takes such a lock looks afterwards whether the file still has a name, so removing one under
    their hands makes them try again and lets nobody in.
    """
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        path = f"{directory}/{name}"
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_nlink:
                os.unlink(path)
        except OSError:
            pass
        finally:
            os.close(handle)
