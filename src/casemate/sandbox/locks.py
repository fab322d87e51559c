"""One command at a time in a workspace: a file lock that the kernel drops with its holder."""

from __future__ import annotations

import errno
import fcntl
import os

__all__ = ["WorkspaceLock"]


class WorkspaceLock:
    """``take`` it, ``release`` it; the file is gone afterwards."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._handle = -1

    def take(self, *, wait: bool, label: str = "") -> bool:
        """Lock; False if somebody else holds it and ``wait`` is not set. ``label`` tells others who we are."""
        os.makedirs(os.path.dirname(self._path), 0o700, exist_ok=True)
        while True:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError as error:
                os.close(handle)
                if error.errno == errno.EAGAIN:
                    return False
                raise
            # The last holder removed its file: a lock on a file without a name keeps nobody out.
            if os.fstat(handle).st_nlink:
                self._handle = handle
                os.ftruncate(handle, 0)
                os.pwrite(handle, label.encode("utf-8", "replace")[:200], 0)
                return True
            os.close(handle)

    def holder(self) -> str:
        """What the present holder says about itself."""
        try:
            handle = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return ""
        try:
            return os.read(handle, 200).decode("utf-8", "replace")
        finally:
            os.close(handle)

    def release(self) -> None:
        """Unlock and remove the file."""
        if self._handle >= 0:
            os.unlink(self._path)
            os.close(self._handle)
            self._handle = -1
