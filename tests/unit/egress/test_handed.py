"""Sockets that somebody else makes: whoever has asked for one may be gone when it comes."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from casemate.egress.handed import Handed


def _spare() -> int:
    return socket.socket(socket.AF_UNIX).detach()


def _closed(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False


@pytest.mark.parametrize("answered", ["before", "with", "after"])
def test_a_cancellation(answered: str) -> None:
    """Nothing is left open by a cancellation before the answer, in the same turn, and long after."""

    async def run() -> None:
        asked: list[int] = []
        handed = Handed(asked.append, "none")
        task = asyncio.get_running_loop().create_task(handed.socket(5))
        await asyncio.sleep(0)
        spare = _spare()
        if answered == "before":
            task.cancel()
            await asyncio.sleep(0)
        handed.made(asked[0], spare)
        if answered == "with":
            task.cancel()
        if answered == "after":
            got = await task
            assert got.fileno() == spare
            assert not got.getblocking()
            got.close()
        else:
            with pytest.raises(asyncio.CancelledError):
                await task
        assert _closed(spare)
        assert handed.waiting == 0

    asyncio.run(run())


def test_no_answer() -> None:
    """None, none in time, and one that nobody has asked for."""

    async def run() -> None:
        asked: list[int] = []
        handed = Handed(asked.append, "nobody is there")
        task = asyncio.get_running_loop().create_task(handed.socket(5))
        await asyncio.sleep(0)
        handed.made(asked[0], -1)
        with pytest.raises(ConnectionRefusedError, match="nobody is there"):
            await task
        with pytest.raises(TimeoutError):
            await handed.socket(0.01)
        spare = _spare()
        handed.made(asked[-1], spare)
        assert _closed(spare)

    asyncio.run(run())
