"""Takes the compression off an answer, so that what it says can be looked at.

Bounded: what a small input blows up to comes in pieces, each made when it is asked for.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CODINGS", "Decoder"]

#: The content codings that can be taken off.
CODINGS = frozenset(("gzip", "x-gzip", "deflate"))
_PIECE = 64 << 10
_GZIP, _ZLIB, _RAW = 31, 15, -15


class Decoder:
    """One body in one of ``CODINGS``. Raises ValueError where it is not what it says."""

    def __init__(self, coding: str) -> None:
        self._gzip = coding != "deflate"
        self._machine = zlib.decompressobj(_GZIP) if self._gzip else None
        self._first = b""
        self._begun = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What ``data`` holds, in pieces."""
        rest, more = bytes(data), False
        while rest or more:
            if self._machine is None:
                self._first += rest
                if len(self._first) < 2:
                    return
                rest, self._first = self._first, b""
                # RFC 9110 means the zlib format by "deflate"; some servers send the bare one.
                zlib_head = rest[0] & 0x0F == 8 and int.from_bytes(rest[:2], "big") % 31 == 0
                self._machine = zlib.decompressobj(_ZLIB if zlib_head else _RAW)
            if self._machine.eof:
                if not self._gzip:
                    raise ValueError("something follows the end of a compressed answer")
                self._machine = zlib.decompressobj(_GZIP)  # the next member
            machine = self._machine
            self._begun = True
            try:
                piece = machine.decompress(rest, _PIECE)
            except zlib.error as error:
                raise ValueError("an answer is not compressed as it says") from error
            rest = machine.unused_data if machine.eof else machine.unconsumed_tail
            # With a full piece, all input may be taken and some output still be inside.
            more = len(piece) == _PIECE and not machine.eof
            if piece:
                yield piece

    def end(self) -> None:
        """Say that nothing more comes. Raises ValueError if something is missing."""
        if self._first or (self._machine is not None and not self._machine.eof and self._begun):
            raise ValueError("a compressed answer ends too early")
