"""The addresses that lead to this host itself, as the kernel's own tables have them.

Asked are the local routes and not the interfaces: an address that a load balancer hands to a host has a local
route and no interface. The kernel filters (Linux 4.20), so that a router's tables are not read to the end.
"""

from __future__ import annotations

import os
import socket
import struct

__all__ = ["own_addresses"]

_RTM_NEWROUTE, _RTM_GETROUTE = 24, 26
_REQUEST_DUMP = 0x1 | 0x300
_ERROR, _DONE = 2, 3
_INTERRUPTED = 0x10  # NLM_F_DUMP_INTR: the table changed meanwhile
_SOL_NETLINK, _STRICT = 270, 12
_RTN_LOCAL, _RTN_ANYCAST = 2, 4
_RTA_DST = 1
_HEADER = struct.Struct("=IHHII")
_ROUTE = struct.Struct("=BBBBBBBBI")
_TRIES = 5


def own_addresses() -> frozenset[str]:
    """Every address and net (``192.0.2.7``, ``127.0.0.0/8``) that this network namespace takes for its own.

    Raises OSError when the kernel does not say.
    """
    found: set[str] = set()
    for family in (socket.AF_INET, socket.AF_INET6):
        for kind in (_RTN_LOCAL, _RTN_ANYCAST):
            if family == socket.AF_INET and kind == _RTN_ANYCAST:
                continue
            found |= _routes(family, kind)
    return frozenset(found)


def _routes(family: int, kind: int) -> set[str]:
    for _ in range(_TRIES):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as channel:
            try:
                channel.setsockopt(_SOL_NETLINK, _STRICT, 1)
            except OSError:
                kind_asked = 0  # an older kernel dumps everything, and says no to a filter
            else:
                kind_asked = kind
            route = _ROUTE.pack(family, 0, 0, 0, 0, 0, 0, kind_asked, 0)
            channel.send(_HEADER.pack(16 + len(route), _RTM_GETROUTE, _REQUEST_DUMP, 1, 0) + route)
            found = _read(channel, family, kind)
        if found is not None:
            return found
    raise OSError(11, "the host's addresses change faster than they can be read")


def _read(channel: socket.socket, family: int, kind: int) -> set[str] | None:
    """All answers; None where the table changed while it was read."""
    found: set[str] = set()
    whole = True
    while True:
        data = channel.recv(1 << 16)
        at = 0
        while at + _HEADER.size <= len(data):
            length, what, flags, _, _ = _HEADER.unpack_from(data, at)
            if length < _HEADER.size or at + length > len(data):
                raise OSError(74, "an answer of the kernel is cut")
            body = data[at + _HEADER.size : at + length]
            whole = whole and not flags & _INTERRUPTED
            if what == _DONE:
                return found if whole else None
            if what == _ERROR:
                number = -struct.unpack_from("=i", body)[0]
                if number == 2 or number == 97:  # no such table, no such family: nothing of it is here
                    return found
                raise OSError(number, f"the host's addresses cannot be read: {os.strerror(number)}")
            if what == _RTM_NEWROUTE and (text := _destination(body, family, kind)):
                found.add(text)
            at += (length + 3) & ~3


def _destination(body: bytes, family: int, kind: int) -> str:
    """The address or net of one route, ``""`` for a route of another kind."""
    known, bits, _, _, _, _, _, found_kind, _ = _ROUTE.unpack_from(body)
    if known != family or found_kind != kind:
        return ""
    at, size = _ROUTE.size, 4 if family == socket.AF_INET else 16
    while at + 4 <= len(body):
        length, attribute = struct.unpack_from("=HH", body, at)
        if length < 4:
            break
        if attribute == _RTA_DST and length == 4 + size:
            text = socket.inet_ntop(family, body[at + 4 : at + length])
            return text if bits == 8 * size else f"{text}/{bits}"
        at += (length + 3) & ~3
    return ""
