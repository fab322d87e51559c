"""Addresses that stand for names: what DNS inside a sandbox answers, and what a connection's address means.

Each allowed name gets one IPv4 and one IPv6 address out of ranges that nobody uses (198.18.0.0/15 is for
benchmarks, RFC 2544; the IPv6 one is a random unique local prefix, RFC 4193). An address is given once in a
sandbox's life: a connection to it means that name and no other, whatever the program remembered for how long.
"""

from __future__ import annotations

import ipaddress

from casemate.sys.capture import GATE, GATE_V6

__all__ = ["MOST_NAMES", "Names", "is_synthetic"]

#: Names that one sandbox may have addresses for; then DNS says SERVFAIL and those it has go on working.
MOST_NAMES = 4096

_V4 = ipaddress.IPv4Network("198.18.0.0/15")
_V6 = ipaddress.IPv6Network("fd53:656e:7472:79::/64")
# The first 256 of each are the gate's own.
_FIRST = 256


def is_synthetic(address: str) -> bool:
    """Whether an address lies in one of the ranges; it is in text as ``inet_ntop`` writes it."""
    return address.startswith(("198.18.", "198.19.", "fd53:656e:7472:79:"))


class Names:
    """The table of one sandbox."""

    def __init__(self, most: int = MOST_NAMES) -> None:
        self._most = most
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self._meant: dict[str, str] = {}  # by address, as ``inet_ntop`` writes it

    def addresses(self, name: str) -> tuple[str, str] | None:
        """The IPv4 and IPv6 address of a name; None when there are no more to give."""
        number = self._numbers.get(name)
        if number is None:
            number = len(self._names)
            if number >= self._most:
                return None
            self._names.append(name)
            self._numbers[name] = number
            self._meant.update(dict.fromkeys(_pair(number), name))
        return _pair(number)

    def name(self, address: str) -> str | None:
        """The name that an address was given for; None if it was given for none."""
        if address in self._meant:
            return self._meant[address]
        try:
            value = ipaddress.ip_address(address)
        except ValueError:
            return None
        base = _V4 if value.version == 4 else _V6
        number = int(value) - int(base.network_address) - _FIRST
        return self._names[number] if 0 <= number < len(self._names) else None

    def is_gate(self, address: str) -> bool:
        """Whether an address is the gate's own."""
        return address in (GATE, GATE_V6)


def _pair(number: int) -> tuple[str, str]:
    return str(_V4[_FIRST + number]), str(_V6[_FIRST + number])
