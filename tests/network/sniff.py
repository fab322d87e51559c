"""Every packet that arrives at the internet's end of the lab host's cable. What is not here has not left."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PACKET_OUTGOING = 4
# Neighbour discovery and multicast reports: the kernel's own, on every cable.
_KERNELS_ICMP6 = {130, 131, 132, 133, 134, 135, 136, 137, 143}
_NAMES = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp6", 132: "sctp"}


def parse(frame: bytes) -> dict[str, Any] | None:
    """What a frame asks for; None for what the kernel says by itself and for packets amid a stream."""
    kind, data = frame[12:14], frame[14:]
    if kind == b"\x08\x00":
        protocol, source, target = data[9], data[12:16], data[16:20]
        rest = data[(data[0] & 15) * 4 :]
    elif kind == b"\x86\xdd":
        protocol, source, target, rest = data[6], data[8:24], data[24:40], data[40:]
        while protocol in (0, 60) and len(rest) > 8:  # hop-by-hop and destination options
            protocol, rest = rest[0], rest[(rest[1] + 1) * 8 :]
    elif kind == b"\x08\x06":
        return None
    else:
        return {"proto": kind.hex(), "data": data[:64].hex()}
    found: dict[str, Any] = {
        "proto": _NAMES.get(protocol, str(protocol)),
        "from": str(ipaddress.ip_address(source)), "to": str(ipaddress.ip_address(target)),
    }  # fmt: skip
    if protocol == 58 and rest[:1] and rest[0] in _KERNELS_ICMP6:
        return None
    if protocol == 6:
        if not rest[13] & 2 or rest[13] & 16:
            return None  # not the first of a connection
        found["data"] = rest[(rest[12] >> 4) * 4 :].decode("latin-1")
    if protocol in (6, 17):
        found["port"] = int.from_bytes(rest[2:4], "big")
        found["source"] = int.from_bytes(rest[:2], "big")
    if protocol != 6:
        found["data"] = rest[8 if protocol in (1, 17, 58) else 0 : 2048].decode("latin-1")
    return found


class Sniffer:
    """Reads a device; ``drain`` reports what has come by now."""

    def __init__(self, device: str, say: Callable[..., None]) -> None:
        self.say = say
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 << 20)
        self.socket.bind((device, 0))
        self.socket.setblocking(False)

    def drain(self) -> None:
        while True:
            try:
                frame, address = self.socket.recvfrom(65536)
            except OSError:  # nothing more, or the cable is gone at the lab's end
                return
            if address[2] != PACKET_OUTGOING and (found := parse(frame)) is not None:
                self.say("packet", **found)
