"""One of the caller's streams, written without ever waiting for its reader."""

from __future__ import annotations

import os
import select

__all__ = ["Sink"]

_TERMINAL_ROOM = 512  # what a terminal that has any room takes at once
_EOPNOTSUPP = 95


class Sink:
    """One of the caller's output descriptors, written to without ever waiting for its reader.

    It is not set non-blocking, since others may share it.
    """

    __slots__ = ("_kind", "_room", "gone", "number", "pending")

    def __init__(self, number: int) -> None:
        self.number = number
        self.pending = b""
        self.gone = False
        mode = os.fstat(number).st_mode >> 12
        self._kind = "stream" if mode in (0o1, 0o14) else "polled" if os.isatty(number) else "other"
        self._room = _TERMINAL_ROOM

    def write(self) -> None:
        """Write as much as fits of what is pending. Raises OSError when the reader is gone."""
        while self.pending and not self.gone:
            try:
                if self._kind == "stream":
                    sent = os.pwritev(self.number, [self.pending], -1, os.RWF_NOWAIT)
                elif self._kind == "polled":
                    if not select.select([], [self.number], [], 0)[1]:
                        return
                    sent = os.write(self.number, self.pending[: self._room])
                else:
                    sent = os.write(self.number, self.pending)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != _EOPNOTSUPP or self._kind != "stream":
                    raise
                self._kind, self._room = "polled", select.PIPE_BUF  # a kernel before 6.4
                continue
            self.pending = self.pending[sent:]
        if self.gone:
            self.pending = b""
