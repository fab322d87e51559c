"""Bytes passed between two sockets: whole, in both directions, however either side ends."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from casemate.egress import pipes
from casemate.egress.relay import Relay
from tests.unit.egress.gatelab import when

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SECONDS = 30


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection, neither of which blocks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for end in (one, other):
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other


class Line:
    """A client and a server with a relay between them."""

    def __init__(self) -> None:
        self.client, self.inner = tcp_pair()
        self.outer, self.server = tcp_pair()
        self.relay = Relay(self.inner, self.outer)
        self.loop = asyncio.get_running_loop()

    async def run(self, before: Callable[[], Awaitable[None]] | None = None) -> None:
        """As whoever uses a relay does it: the sockets are closed after it."""
        try:
            await self.relay.run(before)
        finally:
            self.inner.close()
            self.outer.close()

    async def send(self, end: socket.socket, data: bytes) -> None:
        await self.loop.sock_sendall(end, data)

    async def all_of(self, end: socket.socket) -> bytes:
        data = bytearray()
        while piece := await self.loop.sock_recv(end, 65536):
            data += piece
        return bytes(data)

    async def exactly(self, end: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += await self.loop.sock_recv(end, size - len(data))
        return data

    def reset(self, end: socket.socket) -> None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.close()

    def close(self) -> None:
        for end in (self.client, self.inner, self.outer, self.server):
            end.close()


def on_a_line(test: Callable[[Line, asyncio.TaskGroup], Awaitable[None]]) -> None:
    """Run a test with a line, within its time; nothing is watched any more when it is over."""

    async def run() -> None:
        faults: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: faults.append(context))
        line = Line()
        try:
            async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as tasks:
                await test(line, tasks)
            for end in (line.inner, line.outer):
                if end.fileno() >= 0:
                    assert not loop.remove_reader(end)
                    assert not loop.remove_writer(end)
        finally:
            line.close()
        assert faults == []

    asyncio.run(run())


def test_both_ways() -> None:
    """What either side says reaches the other, and is counted."""

    async def test(line: Line, tasks: asyncio.TaskGroup) -> None:
        running = tasks.create_task(line.run())
        await line.send(line.client, b"question")
        assert await line.exactly(line.server, 8) == b"question"
        await line.send(line.server, b"the answer")
        assert await line.exactly(line.client, 10) == b"the answer"
        line.client.shutdown(socket.SHUT_WR)
        line.server.shutdown(socket.SHUT_WR)
        await running
        assert (line.relay.up, line.relay.down) == (8, 10)

    on_a_line(test)


@pytest.mark.parametrize("first", ["client", "server"])
def test_half_closes(first: str) -> None:
    """One side has said everything, and hears the rest of what the other has to say."""

    async def test(line: Line, tasks: asyncio.TaskGroup) -> None:
        running = tasks.create_task(line.run())
        one, other = (line.client, line.server) if first == "client" else (line.server, line.client)
        await line.send(one, b"all there is")
        one.shutdown(socket.SHUT_WR)
        assert await line.all_of(other) == b"all there is"
        await line.send(other, b"x" * 100_000)
        assert await line.exactly(one, 100_000) == b"x" * 100_000
        assert not running.done()
        other.shutdown(socket.SHUT_WR)
        assert await line.all_of(one) == b""
        await running

    on_a_line(test)


def test_much_both_ways_at_once() -> None:
    """Twenty megabytes in either direction at the same time arrive as they were sent."""

    async def test(line: Line, tasks: asyncio.TaskGroup) -> None:
        tasks.create_task(line.run())

        async def send(end: socket.socket, data: bytes) -> None:
            await line.send(end, data)
            end.shutdown(socket.SHUT_WR)

        there, back = os.urandom(20 << 20), os.urandom(20 << 20)
        tasks.create_task(send(line.client, there))
        tasks.create_task(send(line.server, back))
        receiving = [tasks.create_task(line.all_of(end)) for end in (line.server, line.client)]
        found = [hashlib.sha256(await task).digest() for task in receiving]
        assert found == [hashlib.sha256(data).digest() for data in (there, back)]
        assert (line.relay.up, line.relay.down) == (20 << 20, 20 << 20)

    on_a_line(test)


def test_a_slow_reader_stops_the_sender() -> None:
    """Where nobody reads, nothing is taken beyond what the kernel and one buffer hold; then all comes."""

    async def test(line: Line, tasks: asyncio.TaskGroup) -> None:
        tasks.create_task(line.run())
        for end in (line.client, line.inner, line.outer, line.server):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, 65536)
        pattern = os.urandom(65536)
        sent, still = 0, 0
        while still < 50:
            try:
                at = sent % len(pattern)
                sent += line.client.send(pattern[at:])
                still = 0
            except BlockingIOError:
                still += 1
                await asyncio.sleep(0.005)
        assert sent < 4 << 20
        assert len(line.relay._inner._rest) <= 64 << 10
        line.client.shutdown(socket.SHUT_WR)
        found = await line.all_of(line.server)
        assert found == (pattern * (sent // len(pattern) + 1))[:sent]
        line.server.shutdown(socket.SHUT_WR)

    on_a_line(test)


def test_the_other_way_goes_on_meanwhile() -> None:
    """A direction that is stuck does not stop the other."""

    async def test(line: Line, tasks: asyncio.TaskGroup) -> None:
        running = tasks.create_task(line.run())
        stuck = tasks.create_task(line.send(line.client, bytes(30 << 20)))
        for number in range(50):
            await line.send(line.server, bytes([number]) * 1000)
            assert await line.exactly(line.client, 1000) == bytes([number]) * 1000
        assert not stuck.done()
        stuck.cancel()
        line.reset(line.server)
        await running

    on_a_line(test)


@pytest.mark.parametrize("who", ["client", "server"])
def test_resets_are_passed_on(who: str) -> None:
    """A connection that breaks breaks on the other side, too: no cut answer looks like a whole one."""

    async def test(line: Line, tasks: asyncio.TaskGroup) -> None:
        running = tasks.create_task(line.run())
        one, other = (line.client, line.server) if who == "client" else (line.server, line.client)
        await line.send(one, b"half of")
        assert await line.exactly(other, 7) == b"half of"
        line.reset(one)
        with pytest.raises(ConnectionResetError):
            await line.all_of(other)
        await running

    on_a_line(test)


def test_a_proper_end_is_no_reset() -> None:
    """The control: what ends well ends well on the other side."""

    async def test(line: Line, tasks: asyncio.TaskGroup) -> None:
        running = tasks.create_task(line.run())
        await line.send(line.client, b"half of")
        line.client.shutdown(socket.SHUT_WR)
        assert await line.all_of(line.server) == b"half of"
        line.server.close()
        assert await line.all_of(line.client) == b""
        await running

    on_a_line(test)


def test_a_reader_that_goes_while_much_is_on_its_way() -> None:
    """A client that leaves in the middle ends the relay, and the sender learns of it."""

    async def test(line: Line, tasks: asyncio.TaskGroup) -> None:
        running = tasks.create_task(line.run())

        async def send() -> None:
            with suppress(ConnectionResetError, BrokenPipeError):
                await line.send(line.server, bytes(200 << 20))
                raise AssertionError("somebody took it all")

        sending = tasks.create_task(send())
        await line.exactly(line.client, 1 << 20)
        line.client.close()
        await sending
        await running

    on_a_line(test)


def test_nothing_passes_before_its_time() -> None:
    """Until ``before`` is done nothing of the client's reaches the server; the other way is open already."""

    async def test(line: Line, tasks: asyncio.TaskGroup) -> None:
        gate = asyncio.Event()
        running = tasks.create_task(line.run(gate.wait))  # type: ignore[arg-type]
        await line.send(line.client, b"early")
        await line.send(line.server, b"banner")
        assert await line.exactly(line.client, 6) == b"banner"
        with pytest.raises(BlockingIOError):
            line.server.recv(1)
        gate.set()
        assert await line.exactly(line.server, 5) == b"early"
        line.client.shutdown(socket.SHUT_WR)
        line.server.shutdown(socket.SHUT_WR)
        await running

    on_a_line(test)


def test_what_before_raises_ends_it() -> None:
    """A refusal that comes up late ends the relay, and nothing has passed."""

    async def test(line: Line, tasks: asyncio.TaskGroup) -> None:
        async def refuse() -> None:
            await asyncio.sleep(0)
            raise PermissionError("no")

        await line.send(line.client, b"early")
        with pytest.raises(PermissionError):
            await line.run(refuse)
        assert await line.all_of(line.server) == b""

    on_a_line(test)


def test_a_server_that_ends_first() -> None:
    """A server that breaks while the client is still looked at ends the relay at once."""

    async def test(line: Line, tasks: asyncio.TaskGroup) -> None:
        forever = asyncio.Event()
        running = tasks.create_task(line.run(forever.wait))  # type: ignore[arg-type]
        await line.send(line.server, b"go away")
        assert await line.exactly(line.client, 7) == b"go away"
        line.reset(line.server)
        await running

    on_a_line(test)


def test_cancelled() -> None:
    """A relay that is cancelled lets go of both sockets, with data on its way in both directions."""

    async def test(line: Line, tasks: asyncio.TaskGroup) -> None:
        running = tasks.create_task(line.relay.run())
        sending = [tasks.create_task(line.send(end, bytes(50 << 20))) for end in (line.client, line.server)]
        await when(lambda: all(way._rest or way._pipe for way in (line.relay._inner, line.relay._outer)))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        for task in sending:
            task.cancel()

    on_a_line(test)


def test_what_was_on_its_way_reaches_nobody_else() -> None:
    """What a broken connection has left in a pipe is gone with it: the next one gets its own bytes alone."""

    async def test(line: Line, tasks: asyncio.TaskGroup) -> None:
        spare = len(pipes._spare)
        for number in range(8):
            one = Line()
            running = tasks.create_task(one.run())
            sending = tasks.create_task(one.send(one.client, b"secret" * (8 << 20)))
            await when(lambda one=one: one.relay._inner._pipe)  # type: ignore[misc]
            if number % 2:
                running.cancel()
            else:
                one.reset(one.server)
            await asyncio.wait({running})
            sending.cancel()
            await asyncio.wait({sending})
            one.close()
        assert pipes._made == len(pipes._spare) >= spare
        assert all(not pipe.held for pipe in pipes._spare)
        tasks.create_task(line.run())
        data = os.urandom(16 << 20)

        async def send() -> None:
            await line.send(line.client, data)
            line.client.shutdown(socket.SHUT_WR)

        tasks.create_task(send())
        assert await line.all_of(line.server) == data
        line.server.shutdown(socket.SHUT_WR)

    on_a_line(test)


def test_urgent_data() -> None:
    """It stops the kernel's own way of passing data on, and nothing else: all comes through but its byte."""

    async def test(line: Line, tasks: asyncio.TaskGroup) -> None:
        running = tasks.create_task(line.run())
        piece, found = os.urandom(4 << 20), 0

        async def send() -> None:
            for _ in range(5):
                await line.send(line.client, piece)
                line.client.send(b"!", socket.MSG_OOB)
            await line.send(line.client, piece)

        tasks.create_task(send())
        while found < 6 * len(piece):
            found += len(await line.loop.sock_recv(line.server, 1 << 20))
        # One that was not seen before the next one came is a byte like any other.
        assert 0 <= found - 6 * len(piece) <= 5
        assert line.relay.up == found
        for end in (line.client, line.server):
            end.shutdown(socket.SHUT_WR)
        await running

    on_a_line(test)


def test_without_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no more pipes to be had everything comes through by hand."""
    monkeypatch.setattr(pipes, "_MOST", 0)
    monkeypatch.setattr(pipes, "_spare", [])
    test_much_both_ways_at_once()
    assert pipes._spare == []


def test_many_share_one_buffer() -> None:
    """A hundred relays at once mix nothing up."""

    async def run() -> None:
        made = [Line() for _ in range(100)]
        try:
            async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
                for number, line in enumerate(made):
                    tasks.create_task(line.run())
                    tasks.create_task(one(number, line, tasks))
        finally:
            for line in made:
                line.close()

    async def one(number: int, line: Line, tasks: asyncio.TaskGroup) -> None:
        data = number.to_bytes(4, "big") * 50_000

        async def send() -> None:
            await line.send(line.client, data)
            line.client.shutdown(socket.SHUT_WR)

        tasks.create_task(send())
        assert await line.all_of(line.server) == data
        line.server.shutdown(socket.SHUT_WR)

    asyncio.run(run())
