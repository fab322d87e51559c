"""An ssh agent behind a filter: the sandbox may list keys and have a login signed, and nothing else.

The agent itself cannot tell for which host a signature is meant, so it is the network's rules that bound
where a login can go: whoever names an agent names its hosts, and no others are reachable from the sandbox's
ssh. What could change the agent (adding, removing, locking keys) or use it for something else (extensions) is
answered with a failure here and never reaches it. The format is that of the agent protocol's draft: a length
of four bytes, a type, a body.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from casemate.egress.acceptor import Acceptor

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

__all__ = ["AgentFilter", "permitted"]

_MOST = 256 << 10
_AT_ONCE = 16
_SECONDS = 120.0
_FAILURE = (1).to_bytes(4, "big") + b"\x05"
_LIST, _SIGN, _EXTENSION = 11, 13, 27
_BIND = b"session-bind@openssh.com"


def permitted(message: bytes) -> bool:
    """Whether a request (type and body) may reach the agent."""
    if not message:
        return False
    if message[0] == _EXTENSION:  # what a login is bound to; it only ever narrows
        return message[1:5] == len(_BIND).to_bytes(4, "big") and message[5 : 5 + len(_BIND)] == _BIND
    return message[0] in (_LIST, _SIGN)


class AgentFilter:
    """Serves a sandbox's listener. ``connect`` gives a connection to the agent, ``tell`` takes events."""

    def __init__(
        self,
        listener: socket.socket,
        connect: Callable[[], Awaitable[socket.socket]],
        tell: Callable[[dict[str, object]], None],
    ) -> None:
        self._connect, self._tell = connect, tell
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = Acceptor(listener, self._accepted)

    def close(self) -> None:
        """Stop."""
        self._listener.close()
        for task in [*self._tasks]:
            task.cancel()

    def _accepted(self, client: socket.socket) -> None:
        if len(self._tasks) >= _AT_ONCE:
            client.close()
            return
        task = self._loop.create_task(self._serve(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(_SECONDS):
                with await self._connect() as agent:
                    agent.setblocking(False)
                    while True:
                        message = await self._message(client)
                        if not permitted(message):
                            self._tell({"kind": "ssh-agent", "host": "", "reason": "agent-request",
                                        "detail": f"type {message[0]}"})  # fmt: skip
                            await self._loop.sock_sendall(client, _FAILURE)
                            continue
                        await self._loop.sock_sendall(agent, len(message).to_bytes(4, "big") + message)
                        answer = await self._message(agent)
                        if message[0] == _SIGN:
                            self._tell({"kind": "ssh-agent", "verdict": "allow", "host": "",
                                        "reason": "rule"})  # fmt: skip
                        await self._loop.sock_sendall(client, len(answer).to_bytes(4, "big") + answer)

    async def _message(self, endpoint: socket.socket) -> bytes:
        """One message without its length. Raises OSError at the end, ValueError for one that is too long."""
        length = int.from_bytes(await self._exactly(endpoint, 4), "big")
        if not 0 < length <= _MOST:
            raise ValueError("a message of an ssh agent is empty or too long")
        return await self._exactly(endpoint, length)

    async def _exactly(self, endpoint: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = await self._loop.sock_recv(endpoint, size - len(data))
            if not piece:
                raise ConnectionError(104, "the other side has ended")
            data += piece
        return data
