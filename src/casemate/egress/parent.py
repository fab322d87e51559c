"""Through another proxy: where the host itself has no way out but that one.

The parent resolves names, so what the gate would check of an address is the parent's to check: that is why
the policy has to say so by a word of its own. Names are still decided here.
"""

from __future__ import annotations

import asyncio
import socket

from casemate.egress.errors import Refused

__all__ = ["dial_through"]

_SECONDS = 20.0
_MAX_HEAD = 16 << 10


async def dial_through(proxy: str, host: str, port: int) -> socket.socket:
    """A non-blocking socket on which ``host``:``port`` answers. ``proxy`` is ``http://HOST:PORT``.

    Raises Refused.
    """
    where, _, parent_port = proxy.removeprefix("http://").rpartition(":")
    shown = f"[{host}]" if ":" in host else host
    loop = asyncio.get_running_loop()
    endpoint: socket.socket | None = None
    try:
        async with asyncio.timeout(_SECONDS):
            endpoint = await _connect(where.strip("[]"), int(parent_port))
            request = f"CONNECT {shown}:{port} HTTP/1.1\r\nHost: {shown}:{port}\r\n\r\n"
            await loop.sock_sendall(endpoint, request.encode("ascii"))
            status = await _status(endpoint)
    except (OSError, TimeoutError) as error:
        if endpoint is not None:
            endpoint.close()
        raise Refused("parent-unreachable", f"the parent proxy cannot be reached: {error}") from error
    except BaseException:
        if endpoint is not None:
            endpoint.close()
        raise
    if status // 100 != 2:
        endpoint.close()
        why = f"the parent proxy does not connect to {host}:{port}: it says {status}"
        raise Refused("parent-refused", why)
    return endpoint


async def _connect(host: str, port: int) -> socket.socket:
    """A connection to the first of its addresses that takes one. Raises OSError."""
    loop = asyncio.get_running_loop()
    last: OSError | None = None
    for family, kind, _, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        endpoint = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await loop.sock_connect(endpoint, address)
        except OSError as error:
            endpoint.close()
            last = error
        except BaseException:
            endpoint.close()
            raise
        else:
            return endpoint
    raise last or OSError(99, "it has no address")


async def _status(endpoint: socket.socket) -> int:
    """The status of the parent's answer. Byte by byte: what follows the head is the host's already."""
    loop = asyncio.get_running_loop()
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        data = await loop.sock_recv(endpoint, 1)
        if not data or len(head) > _MAX_HEAD:
            raise ConnectionError(104, "no answer that can be read")
        head += data
    words = head.split(b"\r\n", 1)[0].split(b" ")
    good = len(words) > 1 and words[0].startswith(b"HTTP/1.") and len(words[1]) == 3 and words[1].isdigit()
    return int(words[1]) if good else 0


