"""DNS as a stub resolver speaks it: one question in, one answer out. Bytes only, no socket.

The gate answers from what it decided and never forwards a query, so this is all of DNS that is needed: a
strict reader for a message with one question, and writers for addresses, a name (PTR), and "no". The question
goes back byte for byte, since resolvers that mix upper and lower case compare it. Whatever a resolver of a C
library, Go, Java or c-ares sends is read; whatever could be read in two ways (compression in a question, a
second question, a dot inside of a label, bytes after the end) is not.

An answer never exceeds 512 bytes, so that none is ever cut off over UDP.
"""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

import msgspec

from casemate.egress.malformed import Malformed
from casemate.policy import hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "AAAA", "ANY", "EDE_BLOCKED", "EDE_FILTERED", "FORMERR", "IN", "MAX_ANSWERS", "MAX_QUERY", "NEGATIVE_TTL",
    "NOERROR", "NOTIMP", "NXDOMAIN", "PTR", "REFUSED", "SERVFAIL", "A", "DnsError", "Framer", "Query",
    "framed", "negative", "parse_query", "pointer", "reply",
]  # fmt: skip

NOERROR, FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED = range(6)
_BADVERS = 16
A, PTR, AAAA, _OPT, ANY = 1, 12, 28, 41, 255
_SOA = 6
IN = 1
#: Info codes of extended errors (RFC 8914): refused by the operator, or by a filter that the client asked
#: for.
EDE_BLOCKED, EDE_FILTERED = 15, 17
_EDE = 15  # the EDNS option

#: Bytes of a query. A question and padding (RFC 8467) fit many times.
MAX_QUERY = 4096
#: Addresses of one answer: with the longest name they still fit into 512 bytes.
MAX_ANSWERS = 8
#: Seconds that a resolver inside may remember a "no": short, since a policy can change while a command runs.
NEGATIVE_TTL = 5

_UDP_SIZE = 1232  # what we say we take: below every path's MTU
_MAX_TTL = 0x7FFFFFFF
_MAX_EXPLAIN = 160  # with the longest name and the SOA record the answer stays below 512 bytes
_QR, _RA = 0x8000, 0x0080
_KEPT = 0x0110  # RD and CD come back as they were asked
_OPCODE, _DO = 0x7800, 0x8000

_HEADER = struct.Struct("!6H")
_PAIR = struct.Struct("!HH")
_RECORD = struct.Struct("!HHHIH")  # pointer to the question's name, type, class, ttl, length
_OPT_RECORD = struct.Struct("!BHHIH")  # root name, type, udp size, extended code and flags, length
_TO_NAME = 0xC000 | _HEADER.size  # a pointer to the first name


class DnsError(Malformed):
    """Not a query that is answered. Nothing goes back: the sender is broken or tries something."""


class Query(msgspec.Struct, frozen=True, gc=False):
    """One question.

    ``name`` is the asked name as ``policy.hosts`` spells it, or None when it is no host name: the root, an
    address, anything with a byte that does not belong there. ``question`` is the question as it came, to be
    sent back.
    """

    id: int
    flags: int
    name: str | None
    qtype: int
    qclass: int
    question: bytes
    edns: bool = False
    udp_size: int = 512
    edns_version: int = 0
    dnssec_ok: bool = False


def parse_query(data: bytes) -> Query:
    """Read one message. Raises DnsError for anything but a standard query with exactly one question.

    Of the further records only one OPT is taken; its options are checked for their form and not used.
    """
    if len(data) < _HEADER.size:
        raise DnsError("dns-short", "a DNS message is shorter than its header")
    if len(data) > MAX_QUERY:
        raise DnsError("dns-long", f"a DNS query is longer than {MAX_QUERY} bytes")
    ident, flags, questions, answers, authorities, additional = _HEADER.unpack_from(data)
    if flags & _QR:
        raise DnsError("dns-response", "a DNS message is a response, not a query")
    if flags & _OPCODE:
        raise DnsError("dns-opcode", "a DNS message is not a standard query")
    if questions != 1 or answers or authorities or additional > 1:
        raise DnsError("dns-counts", "a DNS query has one question, and nothing besides but EDNS")
    name, at = _read_name(data)
    if at + 4 > len(data):
        raise DnsError("dns-short", "a DNS query ends inside of its question")
    qtype, qclass = _PAIR.unpack_from(data, at)
    at += 4
    question = bytes(data[_HEADER.size : at])
    if not additional:
        if at != len(data):
            raise DnsError("dns-trailing", "a DNS query goes on behind its end")
        return Query(ident, flags, name, qtype, qclass, question)
    size, version, ext_flags = _read_opt(data, at)
    return Query(
        ident, flags, name, qtype, qclass, question, edns=True, udp_size=max(size, 512), edns_version=version,
        dnssec_ok=bool(ext_flags & _DO),
    )  # fmt: skip


def reply(query: Query, addresses: Sequence[str], ttl: int) -> bytes:
    """The answer with those of ``addresses`` that are of the asked type; none of them: no data, and no error.

    ``ttl`` is in seconds. Raises ValueError for what is no address, and for more than MAX_ANSWERS of them.
    """
    if len(addresses) > MAX_ANSWERS:
        raise ValueError(f"a DNS answer holds at most {MAX_ANSWERS} addresses")
    found: list[tuple[int, bytes]] = []
    for text in addresses:
        family, kind = (socket.AF_INET6, AAAA) if ":" in text else (socket.AF_INET, A)
        try:
            packed = socket.inet_pton(family, text)
        except (OSError, ValueError):
            raise ValueError(f"{text[:80]!a} is not an address") from None
        if query.qtype in (kind, ANY):
            found.append((kind, packed))
    return _answer(query, found, ttl)


def pointer(query: Query, name: str, ttl: int) -> bytes:
    """The answer to a PTR question: one name, as ``policy.hosts`` spells it. ``ttl`` is in seconds."""
    labels = name.encode("ascii").split(b".")
    if len(name) > hosts.MAX_NAME or not all(0 < len(label) <= hosts.MAX_LABEL for label in labels):
        raise ValueError(f"{name[:80]!a} is not a host name")
    wire = b"".join(bytes((len(label),)) + label for label in labels) + b"\0"
    return _answer(query, [(PTR, wire)], ttl)


def negative(query: Query, rcode: int, *, explain: str = "", code: int = EDE_BLOCKED) -> bytes:
    """An answer without records: NXDOMAIN, REFUSED, SERVFAIL, ... or NOERROR for "the name has no such data".

    ``explain`` is for the person (``dig`` shows it): sent as an extended error with the info code ``code`` to
    whom speaks EDNS, cut off after 160 bytes. NXDOMAIN and NOERROR carry an SOA, without which nobody
    remembers them. Its owner is the asked name and no zone above: a "no" says nothing about the names beside
    or below.
    """
    if not 0 <= rcode < _BADVERS:
        raise ValueError("a DNS response code is between 0 and 15")
    authority = b""
    if rcode in (NOERROR, NXDOMAIN):
        # Names of one zero byte, then serial, refresh, retry, expire and the lifetime of this "no".
        data = b"\0\0" + struct.pack("!5I", 1, 3600, 600, 86400, NEGATIVE_TTL)
        authority = _RECORD.pack(_TO_NAME, _SOA, IN, NEGATIVE_TTL, len(data)) + data
    option = b""
    if explain and query.edns:
        text = "".join(char if char.isprintable() else " " for char in explain[:_MAX_EXPLAIN])
        encoded = text.encode("utf-8", "replace")[:_MAX_EXPLAIN].decode("utf-8", "ignore").encode()
        option = struct.pack("!HHH", _EDE, 2 + len(encoded), code) + encoded
    return _message(query, rcode, 0, b"", authority, option)


class Framer:
    """Messages out of a TCP stream, where each has its length before it (RFC 1035, 4.2.2)."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are whole now. Raises DnsError for a length that no query has."""
        self._held += data
        whole: list[bytes] = []
        at = 0
        while len(self._held) - at >= 2:
            length = int.from_bytes(self._held[at : at + 2], "big")
            if not _HEADER.size <= length <= MAX_QUERY:
                raise DnsError("dns-frame", "a DNS message over TCP has a length that no query has")
            if len(self._held) - at - 2 < length:
                break
            whole.append(bytes(self._held[at + 2 : at + 2 + length]))
            at += 2 + length
        del self._held[:at]
        return whole


def framed(message: bytes) -> bytes:
    """A message as TCP carries it."""
    return len(message).to_bytes(2, "big") + message


def _read_name(data: bytes) -> tuple[str | None, int]:
    """The name of the question (None: not a host name), and where it ends."""
    at = _HEADER.size
    labels: list[bytes] = []
    while True:
        if at >= len(data):
            raise DnsError("dns-short", "a DNS query ends inside of its name")
        length = data[at]
        at += 1
        if length == 0:
            break
        if length > hosts.MAX_LABEL:
            # 0xC0: a pointer. In a first name it can only point at itself or into the header.
            raise DnsError("dns-label", "a name in a DNS question is compressed or has too long a label")
        labels.append(data[at : at + length])
        at += length
        if at - _HEADER.size > 254:  # 255 with the zero byte that must follow
            raise DnsError("dns-name-long", "a name in a DNS question is longer than 255 bytes")
    joined = b".".join(labels)
    # A dot inside of a label would look like two labels once it is text.
    if not joined or joined.count(b".") != len(labels) - 1:
        return None, at
    try:
        return hosts.normalise(joined.decode("ascii")), at
    except ValueError:  # UnicodeDecodeError is one
        return None, at


def _read_opt(data: bytes, at: int) -> tuple[int, int, int]:
    """UDP size, version and flags of the OPT record (RFC 6891) that must be what is left of the message."""
    if at + _OPT_RECORD.size > len(data):
        raise DnsError("dns-short", "a DNS query ends inside of its additional record")
    root, kind, size, extended, length = _OPT_RECORD.unpack_from(data, at)
    if root != 0 or kind != _OPT:
        raise DnsError("dns-additional", "a DNS query carries a record that is not EDNS")
    at += _OPT_RECORD.size
    if at + length != len(data):
        raise DnsError("dns-trailing", "the EDNS record of a DNS query does not end where the query ends")
    while at < len(data):
        if at + 4 > len(data):
            raise DnsError("dns-option", "an EDNS option is cut off")
        at += 4 + _PAIR.unpack_from(data, at)[1]
        if at > len(data):
            raise DnsError("dns-option", "an EDNS option is longer than its record")
    return size, (extended >> 16) & 0xFF, extended & 0xFFFF


def _answer(query: Query, records: Sequence[tuple[int, bytes]], ttl: int) -> bytes:
    """A message with records for the asked name."""
    if not records:
        return negative(query, NOERROR)
    life = min(max(ttl, 0), _MAX_TTL)
    parts = [_RECORD.pack(_TO_NAME, kind, IN, life, len(data)) + data for kind, data in records]
    return _message(query, NOERROR, len(parts), b"".join(parts), b"", b"")


def _message(
    query: Query, rcode: int, count: int, answer: bytes, authority: bytes, option: bytes
) -> bytes:
    """Header, question and sections. Who asks in a newer version of EDNS is told ours, and nothing else."""
    if query.edns_version:
        rcode, count, answer, authority, option = _BADVERS, 0, b"", b"", b""
    flags = _QR | _RA | (query.flags & _KEPT) | (rcode & 0xF)
    head = _HEADER.pack(query.id, flags, 1, count, 1 if authority else 0, 1 if query.edns else 0)
    tail = b""
    if query.edns:
        extended = (rcode >> 4) << 24 | (_DO if query.dnssec_ok else 0)
        tail = _OPT_RECORD.pack(0, _OPT, _UDP_SIZE, extended, len(option)) + option
    return head + query.question + answer + authority + tail
