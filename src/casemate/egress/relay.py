"""Passing bytes both ways between two connected sockets: one buffer for all, nothing parsed.

What comes in full buffers goes through a pipe (``splice``) and is not copied here: for 256 MiB this process
needs 70 ms of processor time then, 110 by ``recv_into`` the shared buffer, and 200 by asyncio's streams; the
sender needs 35, the receiver 60. What a slow receiver does not take is kept, one piece of it, and nothing
more is read for it meanwhile.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
from contextlib import suppress

from casemate.egress.peek import stopped
from casemate.egress.pipes import take

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from casemate.egress.pipes import Pipe

__all__ = ["Relay"]

_SIZE, _BEGIN, _LEAST = 512 << 10, 64 << 10, 16 << 10
_TURNS = 4  # buffers of one connection in a row, when they come full
_SIOCATMARK = 0x8905
_RESET = struct.pack("ii", 1, 0)
_buffer = memoryview(bytearray(_SIZE))


class Relay:
    """One connection between two sockets, both non-blocking and connected.

    ``up`` and ``down`` count the bytes from the first to the second and back. Half-closes are passed on, and
    so are resets: an end that was none must not look like one to whoever reads until the end.
    """

    def __init__(self, inner: socket.socket, outer: socket.socket) -> None:
        self.up = self.down = 0
        self._sockets = (inner, outer)
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._inner = _Way(self, inner, outer, self._count_up)
        self._outer = _Way(self, outer, inner, self._count_down)

    def _count_up(self, size: int) -> None:
        self.up += size

    def _count_down(self, size: int) -> None:
        self.down += size

    async def run(self, before: Callable[[], Awaitable[None]] | None = None) -> None:
        """Relay until both ways have ended or either socket breaks; the caller closes the sockets.

        ``before`` has to be done before a byte of the first socket is passed on; what it raises ends the
        relay and is raised here.
        """
        try:
            self._outer.begin()
            if before is not None:
                waiting = self._loop.create_task(_awaited(before))
                try:
                    await asyncio.wait({waiting, self._done}, return_when=asyncio.FIRST_COMPLETED)
                    if waiting.done():
                        waiting.result()
                finally:
                    await stopped(waiting)
            if not self._done.done():
                self._inner.begin(at_once=True)
            await self._done
        finally:
            self._inner.stop()
            self._outer.stop()

    def ended(self) -> None:
        """One way has ended."""
        if self._inner.over and self._outer.over and not self._done.done():
            self._done.set_result(None)

    def broken(self) -> None:
        """A socket is gone: there is nobody to pass on to, or nothing to come."""
        if self._done.done():
            return
        for endpoint in self._sockets:
            with suppress(OSError):
                endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._done.set_result(None)


def _at_urgent_data(endpoint: int) -> bool:
    return any(fcntl.ioctl(endpoint, _SIOCATMARK, b"\0" * 4))


async def _awaited(work: Callable[[], Awaitable[None]]) -> None:
    await work()


class _Way:
    """One direction."""

    __slots__ = (
        "_count", "_from", "_input", "_loop", "_most", "_output", "_pipe", "_reading", "_relay", "_rest",
        "_to", "_writing", "over",
    )  # fmt: skip

    def __init__(
        self, relay: Relay, source: socket.socket, sink: socket.socket, count: Callable[[int], None]
    ) -> None:
        self._relay = relay
        self._from, self._to = source, sink
        # For the loop by number: its selector writes a socket out in full for each one that is new to it.
        self._input, self._output = source.fileno(), sink.fileno()
        self._count = count
        self._rest = memoryview(b"")
        self._most = _BEGIN
        self._pipe: Pipe | None = None  # while something is in it that the receiver has not taken
        self._reading = self._writing = False
        self.over = False
        self._loop = asyncio.get_running_loop()

    def begin(self, *, at_once: bool = False) -> None:
        """``at_once``: there is something to read already, most likely."""
        if at_once:
            self._readable()
        if not self.over and not self._writing:
            self._read_on()

    def stop(self) -> None:
        if self._reading:
            self._loop.remove_reader(self._input)
        if self._writing:
            self._loop.remove_writer(self._output)
        self._reading = self._writing = False
        if self._pipe is not None:
            self._pipe.give_back()
            self._pipe = None

    def _read_on(self) -> None:
        if not self._reading:
            self._loop.add_reader(self._input, self._readable)
            self._reading = True

    def _readable(self) -> None:
        try:
            pipe = take() if self._most == _SIZE else None
            if pipe is not None:
                self._stream(pipe)
                return
            for _ in range(_TURNS):
                if not self._pass_on():
                    return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._relay.broken()

    def _stream(self, pipe: Pipe) -> None:
        """Pass on what comes in full buffers without looking at it. Raises OSError.

        Not for what comes in small pieces: that is quicker by hand.
        """
        try:
            for _ in range(_TURNS):
                try:
                    size = pipe.fill(self._input)
                except BlockingIOError:
                    if _at_urgent_data(self._input):  # splice stops there for good; reading passes over it
                        self._most = _BEGIN
                    raise
                if not size:
                    self._finish()
                    return
                self._count(size)
                if size < _BEGIN:
                    self._most = _BEGIN
                if not pipe.empty(self._output):
                    self._pipe = pipe
                    self._wait_for_room()
                    return
        finally:
            if self._pipe is None:
                pipe.give_back()

    def _pass_on(self) -> bool:
        """Pass on one buffer; whether there may be more at once.

        More is read at a time while the receiver takes it all, and less where it does not: what it leaves is
        kept here, for each of many slow receivers.
        """
        most = self._most
        size = self._from.recv_into(_buffer, most)
        if not size:
            self._finish()
            return False
        self._count(size)
        try:
            sent = self._to.send(_buffer[:size])
        except (BlockingIOError, InterruptedError):
            sent = 0
        if sent < size:
            self._most = max(_LEAST, most // 2)
            self._rest = memoryview(bytes(_buffer[sent:size]))
            self._wait_for_room()
            return False
        if size < most:
            return False
        self._most = min(_SIZE, most * 2)
        return True

    def _wait_for_room(self) -> None:
        if self._reading:
            self._loop.remove_reader(self._input)
            self._reading = False
        if not self._writing:
            self._loop.add_writer(self._output, self._write)
            self._writing = True

    def _write(self) -> None:
        try:
            if self._pipe is not None:
                if not self._pipe.empty(self._output):
                    return
                self._pipe.give_back()
                self._pipe = None
            else:
                self._rest = self._rest[self._to.send(self._rest) :]
                if self._rest:
                    return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._relay.broken()
            return
        self._loop.remove_writer(self._output)
        self._writing = False
        self._read_on()

    def _finish(self) -> None:
        """The source has ended: say so to the sink, whose own way may go on."""
        self.stop()
        self.over = True
        with suppress(OSError):
            self._to.shutdown(socket.SHUT_WR)
        self._relay.ended()
