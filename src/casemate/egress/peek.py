"""Looking at what a client has sent without taking it: whoever serves the connection finds it untouched."""

from __future__ import annotations

import asyncio
import fcntl
import select
import socket
import termios

from casemate.egress.errors import Refused

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
    """What has arrived, at least ``least`` bytes; fewer if the client sends no more. Raises OSError, and
    Refused where what comes cannot be looked at.

    ``SO_RCVLOWAT`` keeps the socket from reading as ready until there is that much: a client that sends one
    byte at a time costs one wake-up for each look that is worth it.
    """
    before = -1
    least = min(least, _MOST)
    try:
        while True:
            data = look(endpoint)
            if data is not None and (len(data) >= least or not data):
                return data
            if data is not None and len(data) == before:
                _check_end(endpoint, before)
                return data
            before = -1 if data is None else len(data)
            if least > 1:
                endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            await readable(endpoint)
    finally:
        if least > 1:
            endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


def _check_end(endpoint: socket.socket, size: int) -> None:
    """That a stream whose first ``size`` bytes were seen ends there. Raises Refused.

    Looking stops at urgent data (MSG_OOB), and so do FIONREAD and the end of the stream behind it; a server
    that takes the stream as it comes reads on.
    """
    poll = select.poll()
    poll.register(endpoint, select.POLLPRI | select.POLLRDHUP)
    events = poll.poll(0)
    state = events[0][1] if events else 0
    waiting = int.from_bytes(fcntl.ioctl(endpoint, termios.FIONREAD, b"\0" * 4), "little")
    if state & select.POLLPRI or not state & (select.POLLRDHUP | select.POLLHUP) or waiting != size:
        raise Refused("urgent-data", "urgent data is sent where the host that is meant has to be said first")


async def stopped(task: asyncio.Task[object]) -> None:
    """Cancel a task and wait until it has let go of its sockets: the next reader may be of the same one.

    What it raised is dropped; a cancellation of the caller's own is not.
    """
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
