"""Names and addresses of the lab's internet, and what its name server answers: pure, no socket.

Every address exists there: whatever leaves the lab host arrives, is seen and is answered. Names below
``to.example`` say themselves where they lead (``x-h0a010203.to.example`` is 10.1.2.3), names with ``gone`` in
the middle do not exist.
"""

from __future__ import annotations

import ipaddress
import struct

# The lab host's own addresses, and the far end of its only cable. Public ones: no guard list names them, so
# that only the fact that they are its own can protect them.
HOST4, HOST6 = "93.184.218.10", "2606:2800:220:3::10"
NEAR4, NEAR6 = "93.184.218.1", "2606:2800:220:3::1"
RESOLVER = "192.0.2.53"
RESOLVERS = (RESOLVER, "8.8.8.8", "1.1.1.1")
METADATA = "169.254.169.254"
METADATA_SECRET = "metadata-of-the-cloud"

WEB, WEB_TLS = (80, 8080), (443, 8443)
ECHO, SOURCE, SINK, RAW, PROXY = 9000, 9001, 9002, 9443, 3128
# Ports on which anything that connects is accepted, logged and answered with a line.
PLAIN = (9, 21, 25, 587, 853, 2375, 3306, 5432, 6379, 6443, 9418, 27017, 65535, RAW)

# Names below this say where they lead. The host's resolver tries the other one as an ending of every name.
TO, SEARCH = "to.example", "search.example"

NAMES: dict[str, tuple[str, ...]] = {
    "allowed.example": ("93.184.216.34", "2606:2800:220:1::34"),
    "also.example": ("93.184.216.37", "2606:2800:220:1::37"),
    "other.example": ("93.184.216.35", "2606:2800:220:1::35"),
    "git.example": ("93.184.216.40", "2606:2800:220:1::40"),
    "proxy.example": ("93.184.216.41", "2606:2800:220:1::41"),
    "v4only.example": ("93.184.216.42",),
    "v6only.example": ("2606:2800:220:1::43",),
    "untrusted.example": ("93.184.216.44",),
    "doh.example": ("93.184.216.45",),
    "many.example": tuple(f"93.184.217.{n}" for n in range(1, 41))
    + tuple(f"2606:2800:220:2::{n:x}" for n in range(1, 41)),
}
# Every name below these has the same addresses.
WILD: dict[str, tuple[str, ...]] = {
    "allowed.example": ("93.184.216.36", "2606:2800:220:1::36"),
    "other.example": ("93.184.216.35", "2606:2800:220:1::35"),
    SEARCH: ("45.77.250.1", "2a00:77:250::1"),
}

A, NS, CNAME, SOA, PTR, TXT, AAAA = 1, 2, 5, 6, 12, 16, 28
NOERROR, NXDOMAIN = 0, 3


def label(*addresses: str) -> str:
    """The part of a name below ``to.example`` that stands for addresses."""
    words = []
    for text in addresses:
        value = ipaddress.ip_address(text)
        words.append(("h" if value.version == 4 else "s") + value.packed.hex())
    return "-".join(words)


def to(tag: str, *addresses: str) -> str:
    """A name that leads to these addresses. Tags: ``flip`` one after the other, ``cname``, ``slow``."""
    return f"{tag}-{label(*addresses)}.{TO}"


def _spelled(first: str) -> tuple[str, ...]:
    found = []
    for word in first.split("-"):
        if word[:1] in ("h", "s") and len(word) in (9, 33):
            try:
                found.append(str(ipaddress.ip_address(bytes.fromhex(word[1:]))))
            except ValueError:
                continue
    return tuple(found)


class Zone:
    """Answers questions; the only state is how often a changing name was asked for."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, int], int] = {}

    def addresses(self, name: str, kind: int) -> tuple[str, ...] | None:
        """The addresses of one kind; None where there is no such name."""
        found = NAMES.get(name)
        if found is None:
            for suffix, value in WILD.items():
                if name.endswith("." + suffix):
                    found = value
        if ".gone." in name and not name.endswith("." + SEARCH):
            return None
        if found is None and name.endswith("." + TO):
            first = name.removesuffix("." + TO).rpartition(".")[2]
            found = _spelled(first)
            if "flip" in first.split("-"):
                version = 4 if kind == A else 6
                found = tuple(a for a in found if ipaddress.ip_address(a).version == version)
                turn = self._asked[name, kind] = self._asked.get((name, kind), -1) + 1
                found = found[turn % len(found) :][:1] if found else ()
        if found is None:
            return None
        version = 4 if kind == A else 6
        return tuple(a for a in found if ipaddress.ip_address(a).version == version)

    def reply(self, question: Question) -> bytes | None:
        """The whole answer, or None for a name that is never answered."""
        name, kind = question.name, question.kind
        first = name.partition(".")[0].split("-")
        if "slow" in first:
            return None
        if kind == PTR:
            return _message(question, NOERROR, [(PTR, _pack("allowed.example"))])
        if "cname" in first and name.endswith("." + TO):
            target = "-".join(word for word in first if word != "cname") + "." + TO
            return _message(question, NOERROR, [(CNAME, _pack(target)), *self._records(target, kind)], target)
        known = self.addresses(name, kind)
        if known is None:
            return _message(question, NXDOMAIN, [])
        if kind == TXT:
            return _message(question, NOERROR, [(TXT, b"\x05hello")])
        return _message(question, NOERROR, self._records(name, kind, known))

    def _records(self, name: str, kind: int, known: tuple[str, ...] | None = None) -> list[tuple[int, bytes]]:
        if kind not in (A, AAAA):
            return []
        found = self.addresses(name, kind) if known is None else known
        return [(kind, ipaddress.ip_address(a).packed) for a in found or ()]


class Question:
    """One query as it came: identity, the labels as bytes and as text, type, and the question's bytes."""

    def __init__(self, data: bytes) -> None:
        self.id = data[:2]
        if len(data) < 17 or data[2] & 0x80:
            raise ValueError("not a query")
        labels, at = [], 12
        while size := data[at]:
            if size > 63 or at + size >= len(data):
                raise ValueError("no label")
            labels.append(data[at + 1 : at + 1 + size])
            at += size + 1
        self.kind = struct.unpack_from("!H", data, at + 1)[0]
        self.raw = data[12 : at + 5]
        self.name = ".".join(part.decode("latin-1") for part in labels).lower()


def _pack(name: str) -> bytes:
    parts = [part.encode("latin-1") for part in name.split(".")]
    return b"".join(bytes([len(part)]) + part for part in parts) + b"\0"


def _message(
    question: Question, code: int, records: list[tuple[int, bytes]], second: str | None = None
) -> bytes:
    out = question.id + struct.pack("!HHHHH", 0x8580 | code, 1, len(records), 0, 0) + question.raw
    owner = b"\xc0\x0c"
    for kind, data in records:
        out += owner + struct.pack("!HHIH", kind, 1, 0, len(data)) + data
        if kind == CNAME and second is not None:
            owner = _pack(second)
    return out
