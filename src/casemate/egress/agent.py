"""An ssh agent behind a filter: the sandbox may list keys and have a login signed, and nothing else.

An agent signs whatever it is given: a commit, a certificate, a login. Here only what an ssh server asks of a
login reaches it (RFC 4252, section 7): the fields are read, the key in them must be the one that signs, and
nothing may follow. Which host a login is for the data does not say, so it is the network's rules that bound
where it can go: whoever names an agent names its hosts. What could change the agent, or use it for something
else, is answered with a failure and never reaches it.
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
_USERAUTH_REQUEST = b"\x32"
_HOST_BOUND = b"publickey-hostbound-v00@openssh.com"
_METHODS = (b"publickey", _HOST_BOUND)


def permitted(message: bytes) -> bool:
    """Whether a request (type and body) may reach the agent."""
    if not message:
        return False
    kind, body = message[0], message[1:]
    if kind == _EXTENSION:  # what a login is bound to; it only ever narrows
        return _string(body)[0] == _BIND
    if kind == _SIGN:
        key, rest = _string(body)
        data, flags = _string(rest)
        return len(flags) == 4 and key is not None and data is not None and _is_login(data, key)
    return kind == _LIST and not body


def _is_login(data: bytes, key: bytes) -> bool:
    """Whether data to be signed is a login by public key, with this very key."""
    session, rest = _string(data)
    if not session or rest[:1] != _USERAUTH_REQUEST:
        return False
    user, rest = _string(rest[1:])
    service, rest = _string(rest)
    method, rest = _string(rest)
    if user is None or service != b"ssh-connection" or method not in _METHODS or rest[:1] != b"\1":
        return False
    algorithm, rest = _string(rest[1:])
    named, rest = _string(rest)
    if method == _HOST_BOUND:
        host_key, rest = _string(rest)
        if not host_key:
            return False
    return bool(algorithm) and named == key and not rest


def _string(data: bytes) -> tuple[bytes | None, bytes]:
    """The string that data begins with, and what follows; None if there is none."""
    length = int.from_bytes(data[:4], "big")
    if len(data) < 4 + length or len(data) < 4:
        return None, b""
    return data[4 : 4 + length], data[4 + length :]


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
