"""Acts on connections and datagrams, sent straight to where they want to go."""

from __future__ import annotations

import socket
from typing import Any

import wire

MSG_FASTOPEN = 0x20000000


def send(one: dict[str, Any]) -> str:
    """Connect and talk."""
    return wire.talk(wire.dial(one), one)


def every(one: dict[str, Any]) -> list[str]:
    """Connect to each address that a name has, several times over: a name may change its mind."""
    told = []
    for _ in range(one.get("times", 1)):
        host, port = one["to"]
        for _, _, _, _, address in socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM):
            try:
                told.append(wire.talk(wire.dial({**one, "to": address[:2]}), one)[:80])
            except OSError as error:
                told.append(str(error))
    return told


def fastopen(one: dict[str, Any]) -> str:
    """Data in the very first packet, by a call that needs no connect()."""
    family = socket.AF_INET6 if ":" in one["to"][0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(wire.SECONDS)
        sock.setblocking(True)  # a call that does not wait sends nothing without a cookie
        sock.sendto(wire.latin(one["send"]), MSG_FASTOPEN, tuple(one["to"]))
        sock.settimeout(wire.SECONDS)
        return wire.read(sock).decode("latin-1")[:200]


def datagram(one: dict[str, Any]) -> str:
    """One datagram, by sendto and by connect and send; the answer, if one comes soon."""
    family = socket.AF_INET6 if ":" in one["to"][0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM, one.get("protocol", 0)) as sock:
        sock.settimeout(0.5)
        sock.sendto(wire.latin(one["send"]), tuple(one["to"]))
        try:
            return sock.recv(2048).decode("latin-1")
        except TimeoutError:
            return ""


def packet(one: dict[str, Any]) -> str:
    """A socket of any family, type and protocol, and its data sent to an address."""
    with socket.socket(one["family"], one["type"], one["protocol"]) as sock:
        sock.settimeout(0.5)
        sock.sendto(wire.latin(one["send"]), tuple(one["to"]))
    return "sent"
