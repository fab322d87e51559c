"""From the host into a sandbox: connections to a port of the host's loopback reach a server inside.

The socket towards the server is made inside by somebody with the rights for that and handed over; connecting
it is done here, and it can reach the sandbox's own loopback and nothing else.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from casemate.egress.acceptor import Acceptor
from casemate.egress.relay import Relay

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Inbound"]

_AT_ONCE = 256
_SECONDS = 10.0
# A server that has just been started may not listen yet: whoever opens the page first waits for it.
_PATIENCE, _PAUSE = 3.0, 0.05


class Inbound:
    """The published ports of one sandbox. ``ask(number)`` has a socket made inside, for ``made(number, …)``.
    """

    def __init__(self, ask: Callable[[int], None]) -> None:
        self._ask = ask
        self._loop = asyncio.get_running_loop()
        self._listeners: dict[int, Acceptor] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._requests: dict[int, asyncio.Future[socket.socket]] = {}
        self._count = 0

    def publish(self, key: int, listener: socket.socket, inside: int) -> None:
        """Pass connections that come to a listener on the host to a port inside."""
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # its connections inherit it
        self._listeners[key] = Acceptor(listener, lambda endpoint: self._accepted(endpoint, inside))

    def unpublish(self, key: int) -> None:
        """Take no more connections for one of them; those that are there go on."""
        listener = self._listeners.pop(key, None)
        if listener is not None:
            listener.close()

    def close(self) -> None:
        """Stop."""
        for key in [*self._listeners]:
            self.unpublish(key)
        for task in [*self._tasks]:
            task.cancel()

    def _accepted(self, endpoint: socket.socket, inside: int) -> None:
        if len(self._tasks) >= _AT_ONCE:
            endpoint.close()
            return
        task = self._loop.create_task(self._serve(endpoint, inside))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, outer: socket.socket, inside: int) -> None:
        with outer, suppress(OSError, TimeoutError), await self._connected(inside) as inner:
            await Relay(inner, outer).run()

    async def _connected(self, port: int) -> socket.socket:
        """A connection to a port of the sandbox's loopback, of whichever family the server listens on."""
        end = self._loop.time() + _PATIENCE
        while True:
            for address in ("::ffff:127.0.0.1", "::1"):
                endpoint = await self._socket()
                try:
                    async with asyncio.timeout(_SECONDS):
                        await self._loop.sock_connect(endpoint, (address, port))
                    return endpoint
                except ConnectionRefusedError:
                    endpoint.close()
                except BaseException:
                    endpoint.close()
                    raise
            if self._loop.time() > end:
                raise ConnectionRefusedError(111, "nothing listens inside")
            await asyncio.sleep(_PAUSE)

    async def _socket(self) -> socket.socket:
        self._count += 1
        number = self._count
        waiting: asyncio.Future[socket.socket] = self._loop.create_future()
        self._requests[number] = waiting
        try:
            self._ask(number)
            async with asyncio.timeout(_SECONDS):
                return await waiting
        finally:
            self._requests.pop(number, None)

    def made(self, request: int, descriptor: int) -> None:
        """The socket that was asked for, or -1."""
        endpoint = socket.socket(fileno=descriptor) if descriptor >= 0 else None
        waiting = self._requests.get(request)
        if waiting is None or waiting.done():
            if endpoint is not None:
                endpoint.close()
        elif endpoint is None:
            waiting.set_exception(ConnectionRefusedError(111, "no socket could be made inside"))
        else:
            endpoint.setblocking(False)
            endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            waiting.set_result(endpoint)
