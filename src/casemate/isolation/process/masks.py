"""The file mode masks of a sandbox's threads, for the broker that makes files for them.

The kernel applies a mask, or a default ACL in its place, where a file is made: so the broker takes over the
mask of the thread that it acts for. Reading it from /proc for each act would cost as much as the act.
"""

from __future__ import annotations

import os
import time

__all__ = ["Masks"]

_MOST, _KNOWN = 4096, 1.0  # threads, seconds
_CAUTIOUS = 0o077  # of a thread whose mask cannot be read


class Masks:
    """``proc`` is the /proc in which the threads have the numbers that are used here."""

    def __init__(self, proc: int) -> None:
        self._proc = proc
        self._known: dict[int, tuple[int, float]] = {}
        self._own = -1

    def use(self, thread: int) -> None:
        """Have this process make files with a thread's mask."""
        now = time.monotonic()
        mask, until = self._known.get(thread, (0, 0.0))
        if now > until:  # a thread's number may be another one's by then
            if len(self._known) > _MOST:
                self._known.clear()
            mask = self._read(thread)
            self._known[thread] = mask, now + _KNOWN
        if mask != self._own:
            os.umask(mask)
            self._own = mask

    def forget(self) -> None:
        """A mask is about to change."""
        self._known.clear()

    def _read(self, thread: int) -> int:
        try:
            handle = os.open(b"%d/status" % thread, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
            try:
                head = os.read(handle, 256)
            finally:
                os.close(handle)
            # A name may hold what looks like a line; a newline in it is shown as \n, so lines are lines.
            for line in head.split(b"\n"):
                if line.startswith(b"Umask:"):
                    return int(line[6:], 8) & 0o777
        except (OSError, ValueError):
            pass
        return _CAUTIOUS
