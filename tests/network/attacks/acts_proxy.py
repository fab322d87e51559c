"""Acts by programs that know a proxy: CONNECT, absolute-form requests, SOCKS 4 and 5."""

from __future__ import annotations

import socket
import struct
from typing import Any

import wire


def _dial(one: dict[str, Any]) -> socket.socket:
    return wire.dial({"to": one.get("proxy") or wire.proxy(), "seconds": wire.SECONDS})


def connect(one: dict[str, Any]) -> str:
    """CONNECT to ``target`` (as it is written, port included); when it is granted, talk."""
    sock = _dial(one)
    try:
        target = wire.latin(one["target"])
        host = wire.latin(one.get("host", one["target"]))
        sock.sendall(b"CONNECT " + target + b" HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
        head = wire.until(sock, b"\r\n\r\n")
        if not head.split(b" ", 2)[1].startswith(b"2"):
            raise ValueError(head.decode("latin-1")[:300] + wire.read(sock).decode("latin-1")[:300])
        return wire.talk(sock, one)
    finally:
        sock.close()


def request(one: dict[str, Any]) -> str:
    """Raw bytes to the proxy, such as an absolute-form request."""
    return wire.talk(_dial(one), one)


def socks(one: dict[str, Any]) -> str:
    """SOCKS 5 to ``host`` (a name or an address) and ``port``, then talk. ``command``: 1 is CONNECT."""
    sock = _dial(one)
    try:
        sock.sendall(b"\x05\x01\x00")
        if wire.exact(sock, 2) != b"\x05\x00":
            raise ValueError("no method")
        host = one["host"]
        if one.get("as") == "v4":
            place = b"\x01" + socket.inet_aton(host)
        elif one.get("as") == "v6":
            place = b"\x04" + socket.inet_pton(socket.AF_INET6, host)
        else:
            place = b"\x03" + bytes([len(wire.latin(host))]) + wire.latin(host)
        sock.sendall(
            b"\x05" + bytes([one.get("command", 1)]) + b"\x00" + place + struct.pack("!H", one["port"])
        )
        reply = wire.exact(sock, 4)
        if reply[1]:
            raise ValueError(f"reply {reply[1]}")
        wire.exact(sock, {1: 6, 4: 18}[reply[3]])
        return wire.talk(sock, one)
    finally:
        sock.close()


def redirect(one: dict[str, Any]) -> str:
    """GET ``url`` through the proxy or straight, and follow where it sends one, as a simple client does."""
    place, path = one["host"], one["path"]
    for _ in range(3):
        target = [place.partition(":")[0], int(place.partition(":")[2] or 80)]
        sock = _dial(one) if one["proxied"] else wire.dial({"to": target})
        with sock:
            line = f"http://{place}{path}" if one["proxied"] else path
            sock.sendall(f"GET {line} HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n\r\n".encode())
            told = wire.read(sock, 65536).decode("latin-1")
        where = [text[10:] for text in told.split("\r\n") if text.lower().startswith("location: ")]
        if not where:
            return told[:300]
        place, _, rest = where[0].partition("//")[2].partition("/")
        path = "/" + rest
    return "too often"
