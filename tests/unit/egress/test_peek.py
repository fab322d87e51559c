"""Looking without taking."""

from __future__ import annotations

import asyncio
import resource
import socket
from typing import TYPE_CHECKING

import pytest

from casemate.egress.errors import Refused
from casemate.egress.peek import peek, readable, stopped
from tests.unit.egress.gatelab import when
from tests.unit.egress.test_relay import tcp_pair

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def with_a_pair(test: Callable[[socket.socket, socket.socket], Awaitable[None]]) -> None:
    """Run a test with a client and the end that is looked at; nothing is watched any more afterwards."""

    async def run() -> None:
        client, end = tcp_pair()
        try:
            async with asyncio.timeout(10):
                await test(client, end)
            assert not asyncio.get_running_loop().remove_reader(end)
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        finally:
            client.close()
            end.close()

    asyncio.run(run())


def test_nothing_is_taken() -> None:
    """What was looked at, twice, is all there for whoever reads it."""

    async def test(client: socket.socket, end: socket.socket) -> None:
        client.send(b"first words")
        assert await peek(end) == b"first words"
        assert await peek(end, 11) == b"first words"
        assert end.recv(100) == b"first words"

    with_a_pair(test)


def test_waits_for_enough() -> None:
    """With a least number of bytes it waits until they are there, however they come."""

    async def test(client: socket.socket, end: socket.socket) -> None:
        looking = asyncio.get_running_loop().create_task(peek(end, 10))
        for letter in b"0123456789":
            assert not looking.done()
            client.send(bytes([letter]))
            await asyncio.sleep(0)
        assert await looking == b"0123456789"

    with_a_pair(test)


@pytest.mark.parametrize("said", [b"", b"four"])
def test_an_end_is_not_waited_for(said: bytes) -> None:
    """A client that ends before it has said enough is taken for what it said."""

    async def test(client: socket.socket, end: socket.socket) -> None:
        client.send(said)
        looking = asyncio.get_running_loop().create_task(peek(end, 100))
        await asyncio.sleep(0)
        client.shutdown(socket.SHUT_WR)
        assert await looking == said

    with_a_pair(test)


def test_a_reset_is_an_error() -> None:
    """A client that breaks off raises."""

    async def test(client: socket.socket, end: socket.socket) -> None:
        looking = asyncio.get_running_loop().create_task(peek(end, 100))
        await asyncio.sleep(0)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        with pytest.raises(ConnectionResetError):
            await looking

    with_a_pair(test)


def test_a_tedious_client_costs_nothing() -> None:
    """While too little is there, nobody is woken: a client that says one byte and waits costs no time."""

    async def test(client: socket.socket, end: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        client.send(b"x")
        turns = 0
        looking = loop.create_task(peek(end, 2))
        began = resource.getrusage(resource.RUSAGE_THREAD).ru_utime
        stop = loop.time() + 0.3
        while loop.time() < stop:
            turns += 1
            await asyncio.sleep(0.05)
        assert turns < 10
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_utime - began < 0.1
        client.send(b"y")
        assert await looking == b"xy"

    with_a_pair(test)


def test_cancelled() -> None:
    """A look that is given up lets go of the socket, and the next one finds everything."""

    async def test(client: socket.socket, end: socket.socket) -> None:
        looking = asyncio.get_running_loop().create_task(peek(end, 100))
        await asyncio.sleep(0)
        client.send(b"words")
        await stopped(looking)
        assert looking.cancelled()
        assert await peek(end) == b"words"

    with_a_pair(test)


def test_stopping_keeps_ones_own_cancellation() -> None:
    """Whoever is cancelled while waiting for a task that it stopped is cancelled, and does not go on."""

    async def test(client: socket.socket, end: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        looking = loop.create_task(readable(end))
        await asyncio.sleep(0)

        async def stop() -> str:
            await stopped(looking)
            return "went on"

        stopping = loop.create_task(stop())
        await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert looking.cancelled()

    with_a_pair(test)


def test_stopping_drops_what_a_task_raised() -> None:
    """An error of a task that is not wanted any more is nobody's, and its result neither."""

    async def test(client: socket.socket, end: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        looking = loop.create_task(peek(end, 5))
        await when(looking.done)
        await stopped(looking)
        faults: list[object] = []
        loop.set_exception_handler(lambda _, context: faults.append(context))
        del looking
        await asyncio.sleep(0)
        assert faults == []

    with_a_pair(test)


def test_urgent_data() -> None:
    """Looking stops at urgent data, which is no end, with or without one behind it. Control: an end."""

    async def urgent(client: socket.socket, end: socket.socket) -> None:
        client.send(b"GE")
        client.send(b"!", socket.MSG_OOB)
        client.send(b"T / HTTP/1.1")
        with pytest.raises(Refused, match="urgent"):
            await peek(end, 5)
        client.shutdown(socket.SHUT_WR)
        with pytest.raises(Refused, match="urgent"):
            await peek(end, 5)

    async def ended(client: socket.socket, end: socket.socket) -> None:
        client.send(b"GE")
        client.shutdown(socket.SHUT_WR)
        assert await peek(end, 5) == b"GE"

    with_a_pair(urgent)
    with_a_pair(ended)
