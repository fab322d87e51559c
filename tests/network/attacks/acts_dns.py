"""Acts on names: questions to any server, in any form, and connections to what the answers say."""

from __future__ import annotations

import socket
import struct
from typing import Any

import wire


def _exchange(one: dict[str, Any], data: bytes) -> bytes:
    server, port = one.get("server") or wire.resolver(), one.get("port", 53)
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    if one.get("over") == "tcp":
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(2)
            sock.connect((server, port))
            sock.sendall(struct.pack("!H", len(data)) + data)
            return wire.exact(sock, struct.unpack("!H", wire.exact(sock, 2))[0])
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(1)
        sock.sendto(data, (server, port))
        return sock.recv(65535)


def ask(one: dict[str, Any]) -> list[str]:
    """A question for ``name`` (a text, or its labels as a list), ``type``; the addresses of the answer.

    With ``then`` the addresses are dialled, since names are looked up outside only when they are used.
    """
    reply = _exchange(one, wire.query(one["name"], one.get("type", 1)))
    found = wire.answers(reply)
    if "then" in one:
        for address in found:
            wire.talk(wire.dial({"to": [address, one["then"]]}), one)
    return [*found, f"code {reply[3] & 15}"]


def _option(data: bytes) -> bytes:
    """An EDNS record with an option of nobody's."""
    option = struct.pack("!HH", 65001, len(data)) + data
    return b"\0" + struct.pack("!HHIH", 41, 4096, 0, len(option)) + option


def odd(one: dict[str, Any]) -> str:
    """A message that no resolver sends, with ``name`` somewhere in it."""
    name, good = one["name"], one["good"]
    message = {
        "two-questions": lambda: wire.query(good, count=2, more=wire.labels(name) + b"\0\1\0\1"),
        "trailing": lambda: wire.query(good, more=wire.labels(name)),
        "option": lambda: wire.query(good, extra=1, more=_option(wire.latin(name))),
        "update": lambda: wire.query(name, flags=0x2800),
        "notify": lambda: wire.query(name, flags=0x2000),
        "response": lambda: wire.query(name, flags=0x8180),
        "chaos": lambda: wire.query(name)[:-2] + b"\0\3",
        "pointer": lambda: wire.query(good)[:12] + wire.labels(name)[:-1] + b"\xc0\x0c\0\1\0\1",
        "long": lambda: wire.query([name[:60]] * 6),
    }[one["shape"]]()  # fmt: skip
    return _exchange(one, message).hex()
