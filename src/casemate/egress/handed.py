"""Sockets that the gate asks the front end for, since making them takes rights that it has not."""

from __future__ import annotations

import asyncio
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Handed"]


class Handed:
    """``ask(number)`` has a socket made; ``made(number, …)`` is called with it. ``missing`` is what to say
    when there is none.
    """

    def __init__(self, ask: Callable[[int], None], missing: str) -> None:
        self._ask, self._missing = ask, missing
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[socket.socket]] = {}
        self._count = 0

    @property
    def waiting(self) -> int:
        """How many have been asked for and are not there."""
        return len(self._waiting)

    async def socket(self, seconds: float) -> socket.socket:
        """Ask for one. Raises ConnectionRefusedError, TimeoutError."""
        self._count += 1
        number = self._count
        waiting: asyncio.Future[socket.socket] = self._loop.create_future()
        self._waiting[number] = waiting
        try:
            self._ask(number)
            async with asyncio.timeout(seconds):
                return await waiting
        except BaseException:
            # A cancellation may come between the answer and the moment in which it would be taken.
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                waiting.result().close()
            raise
        finally:
            del self._waiting[number]

    def made(self, number: int, descriptor: int) -> None:
        """The socket that was asked for, or -1."""
        endpoint = socket.socket(fileno=descriptor) if descriptor >= 0 else None
        waiting = self._waiting.get(number)
        if waiting is None or waiting.done():
            if endpoint is not None:
                endpoint.close()
        elif endpoint is None:
            waiting.set_exception(ConnectionRefusedError(111, self._missing))
        else:
            endpoint.setblocking(False)
            waiting.set_result(endpoint)
