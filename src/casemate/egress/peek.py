"""Looking at what a client has sent without taking it: whoever serves the connection finds it untouched."""

from __future__ import annotations

import asyncio
import socket

__all__ = ["look", "peek", "readable", "stopped", "writable"]

_MOST = 64 << 10


async def readable(endpoint: socket.socket) -> None:
    """Wait until a socket has something to read, or its end."""
    loop = asyncio.get_running_loop()
    # By number: the selector writes a socket out in full for each one that it does not know yet.
    descriptor = endpoint.fileno()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _wake, ready)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


async def writable(endpoint: socket.socket) -> None:
    """Wait until a socket takes something, is connected, or has failed."""
    loop = asyncio.get_running_loop()
    descriptor = endpoint.fileno()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(descriptor, _wake, ready)
    try:
        await ready
    finally:
        loop.remove_writer(descriptor)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def look(endpoint: socket.socket) -> bytes | None:
    """What has arrived by now: None where that is nothing yet, empty at the end. Raises OSError."""
    try:
        return endpoint.recv(_MOST, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return None


async def peek(endpoint: socket.socket, least: int = 1) -> bytes:
    """What has arrived, at least ``least`` bytes; fewer if the client sends no more. Raises OSError.

    ``SO_RCVLOWAT`` keeps the socket from reading as ready until there is that much: a client that sends one
    byte at a time costs one wake-up for each look that is worth it.
    """
    before = -1
    least = min(least, _MOST)
    try:
        while True:
            data = look(endpoint)
            if data is not None and (len(data) >= least or not data or len(data) == before):
                return data
            before = -1 if data is None else len(data)
            if least > 1:
                endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            await readable(endpoint)
    finally:
        if least > 1:
            endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


async def stopped(task: asyncio.Task[object]) -> None:
    """Cancel a task and wait until it has let go of its sockets: the next reader may be of the same one.

    What it raised is dropped; a cancellation of the caller's own is not.
    """
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
