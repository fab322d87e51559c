"""One command at a time in a workspace: a file lock that the kernel drops with its holder."""

from __future__ import annotations

import errno
import fcntl
import os

from casemate.errors import SandboxError
from casemate.sys.locks import sweep

__all__ = ["WorkspaceLock"]


class WorkspaceLock:
    """``take`` it, ``release`` it, and ``close`` it in the end; the file is gone then.

    The file stays between two uses, since making and removing one costs more than locking it.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._handle = -1
        self._label = ""

    def take(self, *, wait: bool, label: str = "") -> bool:
        """Lock; False if somebody else holds it and ``wait`` is not set. ``label`` tells others who it is."""
        while True:
            if self._handle < 0:
                self._handle, self._label = self._open(), ""
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except OSError as error:
                if error.errno == errno.EAGAIN:
                    return False
                raise
            # Another holder may have removed the file: a lock on one without a name keeps nobody out.
            if os.fstat(self._handle).st_nlink:
                if label != self._label:
                    self._label = label
                    os.ftruncate(self._handle, 0)
                    os.pwrite(self._handle, label.encode("utf-8", "replace")[:200], 0)
                return True
            os.close(self._handle)
            self._handle = -1

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(self._path, flags, 0o600)
        except FileNotFoundError:
            try:
                os.makedirs(os.path.dirname(self._path), 0o700, exist_ok=True)
                return os.open(self._path, flags, 0o600)
            except OSError as error:
                raise SandboxError(
                    f"Casemate's own directory cannot be used: {error}",
                    code="state-unusable",
                    hint="check XDG_RUNTIME_DIR and XDG_STATE_HOME",
                    path=self._path,
                ) from error

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
        """Unlock; the next ``take`` is cheap."""
        if self._handle >= 0:
            fcntl.flock(self._handle, fcntl.LOCK_UN)

    def close(self) -> None:
        """Unlock, and remove the file unless somebody else holds it by now."""
        if self._handle < 0:
            return
        if self.take(wait=False, label=self._label):
            os.unlink(self._path)
        os.close(self._handle)
        self._handle = -1
        sweep(os.path.dirname(self._path))
