"""From the host into a sandbox: connections to a port of the host's loopback reach a server inside.

The socket towards the server is made inside by somebody with the rights for that and handed over; connecting
it is done here, and it can reach the sandbox's own loopback and nothing else.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from casemate.egress.acceptor import Acceptor
from casemate.egress.handed import Handed
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

    ``tell`` takes an event's fields: one for each connection, when it has ended or could not be made.
    """

    def __init__(self, ask: Callable[[int], None], tell: Callable[[dict[str, object]], None]) -> None:
        self._sockets = Handed(ask, "no socket can be made inside")
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._listeners: dict[int, Acceptor] = {}
        self._tasks: set[asyncio.Task[None]] = set()

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

    async def ended(self) -> None:
        """Wait until every connection has been let go, and told, after ``close``."""
        if self._tasks:
            await asyncio.wait([*self._tasks])

    def _accepted(self, endpoint: socket.socket, inside: int) -> None:
        if len(self._tasks) >= _AT_ONCE:
            endpoint.close()
            self._refuse(inside, "too-many-connections")
            return
        task = self._loop.create_task(self._serve(endpoint, inside))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _refuse(self, inside: int, reason: str, detail: str = "") -> None:
        told: dict[str, object] = {"kind": "inbound", "verdict": "deny", "host": "localhost", "port": inside}
        self._tell(told | {"reason": reason, "detail": detail})

    async def _serve(self, outer: socket.socket, inside: int) -> None:
        with outer:
            try:
                inner = await self._connected(inside)
            except asyncio.CancelledError:
                self._refuse(inside, "unreachable", "the command has ended")
                raise
            except (OSError, TimeoutError) as error:
                self._refuse(inside, "unreachable", getattr(error, "strerror", None) or "it does not answer")
                return
            began, relay = self._loop.time(), Relay(inner, outer)
            try:
                with inner, suppress(OSError):
                    await relay.run()
            finally:
                took = round((self._loop.time() - began) * 1000, 3)
                self._tell({"kind": "inbound", "verdict": "allow", "host": "localhost", "port": inside,
                            "protocol": "tcp", "rule": "publish", "sent": relay.up, "received": relay.down,
                            "ms": took})  # fmt: skip

    async def _connected(self, port: int) -> socket.socket:
        """A connection to a port of the sandbox's loopback, of whichever family the server listens on."""
        end = self._loop.time() + _PATIENCE
        while True:
            for address in ("::ffff:127.0.0.1", "::1"):
                endpoint = await self._sockets.socket(_SECONDS)
                endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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

    def made(self, request: int, descriptor: int) -> None:
        """The socket that was asked for, or -1."""
        self._sockets.made(request, descriptor)
