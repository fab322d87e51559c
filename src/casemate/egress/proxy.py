"""The gate as an explicit proxy: for programs that are told of one, on its own address inside, any port.

HTTP and SOCKS5 are told apart by the first byte. Either way all that comes out of it is a host and a port,
which go the same way as those of any other connection: what a proxy's client says earns it nothing.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from casemate.egress import clienthello, socks5
from casemate.egress.connection import HELLO_SECONDS, refuse_plainly
from casemate.egress.errors import Refused
from casemate.egress.peek import peek
from casemate.policy import hosts

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

    from casemate.egress.gate import Gate

__all__ = ["authority", "serve_proxy"]

_MAX_HEAD = 32 << 10


async def serve_proxy(gate: Gate, endpoint: socket.socket) -> None:
    """Serve one connection of a proxy's client; the caller closes the socket if it is still open."""
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            first = await peek(endpoint)
            if socks5.looks_like_socks(first):
                target = await _socks(gate, endpoint)
                once = False
            elif clienthello.looks_like_tls(first):
                raise Refused(
                    "proxy-tls", "the proxy is spoken to without TLS: its address begins with http://"
                )
            elif first:
                target, once = await _http(endpoint)
            else:
                return
    except Refused as refused:
        gate.tell({"kind": "connect", "host": "", "protocol": "proxy", "reason": refused.code,
                   "detail": str(refused)})  # fmt: skip
        await refuse_plainly(endpoint, "http", 0, refused)
        return
    except (OSError, TimeoutError):
        return
    if target is not None:
        host, port = target
        await gate.serve_host(endpoint, gate.names.name(host) or host, port, once=once)


async def _socks(gate: Gate, endpoint: socket.socket) -> tuple[str, int] | None:
    """The host and port of a SOCKS5 client, after it was told that it is connected."""
    loop = asyncio.get_running_loop()
    conversation = socks5.Socks5()
    while True:
        # Bytes behind the request are the client's for its host: they stay in the socket.
        data = await peek(endpoint)
        if not data:
            return None
        events = conversation.receive(data)
        endpoint.recv(len(data) - len(conversation.leftover) if _over(events) else len(data))
        for event in events:
            if isinstance(event, socks5.Send):
                await loop.sock_sendall(endpoint, event.data)
            elif isinstance(event, socks5.Refusal):
                gate.tell({"kind": "connect", "host": "", "protocol": "socks5", "reason": event.error.code,
                           "detail": str(event.error)})  # fmt: skip
                with suppress(OSError):
                    await loop.sock_sendall(endpoint, event.data)
                return None
            else:
                # A client that looked the name up itself says the address that stands for it.
                host = gate.names.name(event.host) or event.host
                decision = gate.decider.connect(host, event.port)
                if decision.verdict == "deny":  # whatever its client is going to speak
                    gate.tell({"kind": "connect", "host": host, "port": event.port,
                               "protocol": "socks5", "rule": decision.rule, "reason": decision.reason,
                               "allow": decision.allow_line})  # fmt: skip
                    await loop.sock_sendall(endpoint, socks5.answer(socks5.NOT_ALLOWED))
                    return None
                await loop.sock_sendall(endpoint, socks5.answer(socks5.SUCCEEDED))
                return host, event.port


def _over(events: list[socks5.Send | socks5.Connect | socks5.Refusal]) -> bool:
    return any(isinstance(event, socks5.Connect) for event in events)


async def _http(endpoint: socket.socket) -> tuple[tuple[str, int], bool]:
    """The host and port of an HTTP proxy's client. A CONNECT is answered; another request stays unread.

    Raises Refused for what is no request to a proxy.
    """
    data = b""
    while b"\r\n\r\n" not in data:
        found = await peek(endpoint, len(data) + 1)
        if len(found) <= len(data) or len(found) > _MAX_HEAD:
            raise Refused("proxy-head", "a request to the proxy has no end, or none that is near")
        data = found
    line = data.split(b"\r\n", 1)[0].decode("latin-1")
    words = line.split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.0", "HTTP/1.1"):
        raise Refused("proxy-request", "a request to the proxy has no form of HTTP/1")
    method, target, _ = words
    if method == "CONNECT":
        where = authority(target, None)
        endpoint.recv(data.index(b"\r\n\r\n") + 4)
        await asyncio.get_running_loop().sock_sendall(endpoint, b"HTTP/1.1 200 Connected\r\n\r\n")
        return where, False
    scheme, found_scheme, rest = target.partition("://")
    if not found_scheme or scheme.lower() != "http":
        why = "a request to the proxy names no http:// address; https goes by CONNECT"
        raise Refused("proxy-request", why)
    end = min((at for mark in "/?#" if (at := rest.find(mark)) >= 0), default=len(rest))
    return authority(rest[:end], 80), True


def authority(text: str, default: int | None) -> tuple[str, int]:
    """Host and port of ``host:port``; the port may be left out if there is a default. Raises Refused."""
    host, port = text, str(default or "")
    if text.startswith("["):
        bracket = text.find("]")
        host, rest = text[: bracket + 1], text[bracket + 1 :]
        if rest:
            port = rest[1:] if rest[0] == ":" else "?"
    elif ":" in text:
        # An IPv6 address without brackets could be read in two ways.
        host, _, port = text.partition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536 and len(port) <= 5):
        raise Refused("proxy-port", "a request to the proxy names no port, or none that there is")
    known = hosts.address(host)
    try:
        return (str(known) if known is not None else hosts.normalise(host)), int(port)
    except ValueError as error:
        raise Refused("proxy-host", f"a request to the proxy is for no host: {error}") from None
