"""Pipes through which the kernel passes data on from socket to socket without a copy into this process.

A pipe belongs to a connection only while something is in it. So a few do for all, and a connection that is
quiet, or slow, costs no descriptor.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

__all__ = ["SIZE", "Pipe", "take"]

#: Bytes that a pipe holds where the kernel allows it.
SIZE = 1 << 20
_MOST = 32
_SET_SIZE = 1031  # F_SETPIPE_SZ
_FLAGS = 1 | 2  # SPLICE_F_MOVE, SPLICE_F_NONBLOCK

_spare: list[Pipe] = []
_made = 0


class Pipe:
    """``held`` bytes are in it."""

    __slots__ = ("_read", "_write", "held")

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.held = 0
        with suppress(OSError):  # a user may have a bound on all of its pipes
            fcntl.fcntl(self._write, _SET_SIZE, SIZE)

    def fill(self, source: int) -> int:
        """Take what a socket has to read; 0 at its end. Raises OSError, BlockingIOError where it has nothing.

        ``Preconditions:`` it is empty.
        """
        self.held = os.splice(source, self._write, SIZE, flags=_FLAGS)
        return self.held

    def empty(self, sink: int) -> bool:
        """Give a socket what it takes; whether that was all. Raises OSError."""
        with suppress(BlockingIOError):
            while self.held:
                self.held -= os.splice(self._read, sink, self.held, flags=_FLAGS)
        return not self.held

    def give_back(self) -> None:
        """Let somebody else use it. What is still in it is thrown away, with the pipe."""
        global _made
        if not self.held:
            _spare.append(self)
            return
        os.close(self._read)
        os.close(self._write)
        _made -= 1


def take() -> Pipe | None:
    """An empty pipe; None where there is none to be had."""
    global _made
    if _spare:
        return _spare.pop()
    if _made >= _MOST:
        return None
    try:
        pipe = Pipe()
    except OSError:
        return None
    _made += 1
    return pipe
