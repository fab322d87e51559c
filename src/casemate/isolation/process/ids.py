"""One uid per running sandbox, so that neither limits nor signals nor files of two are ever shared.

Root launchers take uids from 0x70000000 on: above what systemd hands to containers (0x80000 to
0x6fffffff) and below 2^31, which some programs cannot take. A launcher locks blocks of 64 for as long
as it lives; the kernel drops the lock with the process, so nothing has to be cleaned up after a kill.
"""

from __future__ import annotations

import errno
import fcntl
import os

from casemate.errors import SandboxError
from casemate.sys.locks import sweep

__all__ = ["BASE", "BLOCK", "STORED", "UidPool"]

BASE = 0x70000000
BLOCK = 64
_BLOCKS = 1024
#: Who owns on disk what the commands of a session leave: a uid that no sandbox ever has.
STORED = BASE + _BLOCKS * BLOCK


class UidPool:
    """Uids that nobody else on this host uses while this object lives."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._locks: list[tuple[int, str]] = []
        self._free: list[int] = []

    def take(self) -> int:
        """A uid that is free. Raises SandboxError (``no-uid-left``)."""
        if not self._free:
            self._lock_block()
        return self._free.pop()

    def give_back(self, uid: int) -> None:
        """Return a uid; every process that had it must be dead."""
        self._free.append(uid)

    def close(self) -> None:
        """Release every block and leave no file behind."""
        for handle, path in self._locks:
            os.unlink(path)
            os.close(handle)
        self._locks.clear()
        self._free.clear()
        sweep(self._directory)

    def _lock_block(self) -> None:
        os.makedirs(self._directory, 0o700, exist_ok=True)
        start = os.getpid() % _BLOCKS
        for step in range(_BLOCKS):
            number = (start + step) % _BLOCKS
            path = f"{self._directory}/{number}"
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The holder unlinks its file when it ends: a lock on an unlinked file says nothing.
                if os.fstat(handle).st_nlink and os.stat(path).st_ino == os.fstat(handle).st_ino:
                    self._locks.append((handle, path))
                    first = BASE + number * BLOCK
                    self._free.extend(range(first + BLOCK - 1, first - 1, -1))
                    return
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ENOENT):
                    os.close(handle)
                    raise
            os.close(handle)
        raise SandboxError(
            f"all {_BLOCKS * BLOCK} sandbox uids are in use",
            code="no-uid-left",
            hint="end some sandboxes first",
            directory=self._directory,
        )
