"""Byte streams for a flow that is looked into: a plain socket, or TLS over one.

asyncio's own transports are not enough here: when a write fails they throw away what the other side had
already said, and an early answer (413, then a reset) is just that. Here reading and writing fail apart from
each other. Nothing is read that nobody asked for and a write returns when the kernel has taken all of it, so
a slow receiver stops its sender and no stream holds more than a few pieces. Reading can be cancelled without
losing a byte.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PIECE", "SocketStream", "Stream", "TlsStream", "linger"]

#: Bytes of one read at most. From 128 KiB on malloc takes each copy of a piece from mmap, and its pages from
#: faults: at 256 KiB a flow costs three times as much.
PIECE = 120 << 10
# Reads in a row that found something before others get their turn.
_TURN = 8
# What a client may still send after the last answer, and how long that is waited for.
_LINGER_BYTES, _LINGER_SECONDS = 4 << 20, 2.0
_WRITE = 64 << 10
_AT_ONCE = 512  # the kernel takes 1024 pieces
_AHEAD = 16 << 10


class _Buffers(threading.local):
    """One buffer for all streams of a thread."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(PIECE))


_buffers = _Buffers()


class Stream(Protocol):
    """What the flow needs. Errors are OSError (``ssl.SSLError`` is one)."""

    #: The end came without the mark that tells it from a cut (TLS only).
    cut: bool

    async def pull(self, sink: Callable[[memoryview], object], size: int = PIECE) -> int:
        """Read up to ``size`` bytes, at least one, none at the end; returns how many.

        ``sink`` gets them before anybody else's turn, and must not keep what it gets.
        """
        ...

    async def read(self, size: int = PIECE) -> bytes:
        """The same, as bytes of one's own."""
        ...

    async def write(self, *parts: bytes) -> None:
        """Hand all of ``parts`` over; returns when the next ones may come."""
        ...

    async def end(self) -> None:
        """Say that nothing more is written."""
        ...

    def gone(self) -> bool:
        """Whether the other side has closed its way, as far as that can be told without waiting."""
        ...

    def stale(self) -> bool:
        """Whether an idle connection is of no more use: the other side has closed it, or said something."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...

    def abort(self) -> None:
        """Let go of it so that the other side cannot take it for a proper end."""
        ...


class SocketStream:
    """A connected, non-blocking socket, whose owner this becomes."""

    cut = False

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        with suppress(OSError):  # not TCP
            # Small pieces of an answer must not wait until the other side has confirmed the one before.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop = asyncio.get_running_loop()
        self._turn = 0

    async def pull(self, sink: Callable[[memoryview], object], size: int = PIECE) -> int:
        """As ``Stream`` says."""
        view = _buffers.view[:size]
        while True:
            try:
                got = self._sock.recv_into(view)
            except (BlockingIOError, InterruptedError):
                self._turn = 0
                await _ready(self._loop.add_reader, self._loop.remove_reader, self._sock)
                continue
            sink(view[:got])
            self._turn += 1
            if self._turn >= _TURN:
                self._turn = 0
                await asyncio.sleep(0)
            return got

    async def read(self, size: int = PIECE) -> bytes:
        """As ``Stream`` says."""
        return await _read(self, size)

    async def write(self, *parts: bytes) -> None:
        """As ``Stream`` says."""
        sent = 0
        if 1 < len(parts) <= _AT_ONCE:
            # A head and a body, or a chunk with what is around it, without a copy of all of it.
            with suppress(BlockingIOError, InterruptedError):
                sent = self._sock.sendmsg(parts)
            if sent == sum(map(len, parts)):
                return
        rest = memoryview(parts[0] if len(parts) == 1 else b"".join(parts))[sent:]
        while rest:
            try:
                rest = rest[self._sock.send(rest) :]
            except (BlockingIOError, InterruptedError):
                await _ready(self._loop.add_writer, self._loop.remove_writer, self._sock)

    async def end(self) -> None:
        """As ``Stream`` says."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def gone(self) -> bool:
        """As ``Stream`` says."""
        try:
            return not self._sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    def stale(self) -> bool:
        """As ``Stream`` says."""
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        """As ``Stream`` says."""
        self._sock.close()

    def abort(self) -> None:
        """As ``Stream`` says: a reset."""
        with suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()


class TlsStream:
    """TLS over a connected, non-blocking socket, whose owner this becomes. ``handshake`` comes first."""

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, *, server: bool, name: str | None = None
    ) -> None:
        self._plain = SocketStream(sock)
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=server, server_hostname=name)
        # Records must leave in the order in which they were made, whoever made them: reading writes, too.
        self._writing = asyncio.Lock()
        self._sock = sock
        self._ahead = b""
        self._reading = False
        self.cut = False

    async def handshake(self) -> None:
        """Raises ssl.SSLError, ssl.SSLCertVerificationError, OSError."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._plain.pull(self._encrypted)
                continue
            except ssl.SSLError:
                with suppress(OSError):  # the alert that says why
                    self._sock.send(self._out.read())
                raise
            await self._flush()
            return

    async def pull(self, sink: Callable[[memoryview], object], size: int = PIECE) -> int:
        """As ``Stream`` says."""
        if self._ahead:
            data, self._ahead = self._ahead[:size], self._ahead[size:]
            sink(memoryview(data))
            return len(data)
        self._reading = True
        try:
            while (got := self._decrypted(_buffers.view[:size])) < 0:
                await self._flush()
                await self._plain.pull(self._encrypted)
        finally:
            self._reading = False
        sink(_buffers.view[:got])
        return got

    def _decrypted(self, view: memoryview) -> int:
        """What has arrived, record after record; -1 where more of a record is needed."""
        got = 0
        while got < len(view):
            try:
                # With a buffer it returns the number of bytes, whatever the type hints say.
                size = cast("int", self._tls.read(len(view) - got, view[got:]))
            except ssl.SSLWantReadError:
                return got or -1
            except ssl.SSLZeroReturnError:
                break
            except ssl.SSLEOFError:
                self.cut = True
                break
            if not size:
                break
            got += size
        return got

    def _encrypted(self, data: memoryview) -> None:
        if data:
            self._in.write(data)
        else:
            self._in.write_eof()

    async def read(self, size: int = PIECE) -> bytes:
        """As ``Stream`` says."""
        return await _read(self, size)

    async def write(self, *parts: bytes) -> None:
        """As ``Stream`` says."""
        rest = memoryview(parts[0] if len(parts) == 1 else b"".join(parts))
        async with self._writing:
            while rest:
                piece, rest = rest[:_WRITE], rest[_WRITE:]
                while piece:
                    piece = piece[self._tls.write(piece) :]
                await self._plain.write(self._out.read())

    async def end(self) -> None:
        """As ``Stream`` says; what the other side says after that can still be read."""
        with suppress(OSError):
            self._say_end()
            await self._flush()

    def gone(self) -> bool:
        """As ``Stream`` says. What is read on the way there is kept; session tickets count for nothing."""
        if self._ahead or self._reading:
            return False
        try:
            data = self._sock.recv(_AHEAD)
            if not data:
                return True
            self._in.write(data)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            return True
        try:
            self._ahead = self._tls.read(_AHEAD)
        except ssl.SSLWantReadError:
            return False
        except OSError:
            pass
        return not self._ahead

    def stale(self) -> bool:
        """As ``Stream`` says."""
        return self.gone() or bool(self._ahead)

    def close(self) -> None:
        """As ``Stream`` says, with the word that this is the end."""
        with suppress(OSError):
            self._say_end()
            self._sock.send(self._out.read())
        self._plain.close()

    def abort(self) -> None:
        """As ``Stream`` says: a reset, without the word that would make it an end."""
        self._plain.abort()

    def _say_end(self) -> None:
        if not self._writing.locked():
            with suppress(ssl.SSLError):  # it wants to read the other side's word, which is not waited for
                self._tls.unwrap()

    async def _flush(self) -> None:
        if self._out.pending:
            async with self._writing:
                await self._plain.write(self._out.read())


async def linger(stream: Stream) -> None:
    """Wait a moment for the other side's end after the last word.

    Closing a socket that has something unread makes a reset of it, which takes the last word away.
    """
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            await stream.end()
            left = _LINGER_BYTES
            while left > 0 and (data := await stream.read()):
                left -= len(data)


async def _read(stream: Stream, size: int) -> bytes:
    found: list[bytes] = []
    await stream.pull(lambda data: found.append(bytes(data)), size)
    return found[0]


async def _ready(
    add: Callable[[socket.socket, Callable[[], object]], object],
    remove: Callable[[socket.socket], bool],
    sock: socket.socket,
) -> None:
    """Wait until a socket is ready for what ``add`` watches. Takes nothing, so it can be cancelled."""
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    add(sock, wake)
    try:
        await ready
    finally:
        remove(sock)
