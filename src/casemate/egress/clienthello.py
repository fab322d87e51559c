"""The first message of TLS: which name a client asks for, without being a party to the connection.

The gate looks at it before it relays a byte, so it is read as strictly as the strictest server and no more
leniently than any: what two servers could read differently is refused. It may come in several records, as
servers accept it, within bounds. A client may split it into many small pieces; ``Incomplete.needed`` says how
many bytes there must be before another look is worth it.

Encrypted ClientHello: browsers always send that extension, mostly with rubbish in it so that it says nothing.
Then ``server_name`` is the real one. When it is in use, ``server_name`` is the outer name, and whether it is
one or the other cannot be told from outside.

A server may ask for a second ClientHello (HelloRetryRequest, when it wants another key share), and servers go
by the name in the second one. So the gate relays the first and nothing more, looks at the beginning of the
server's answer (``asks_again``), and reads the second as it did the first (``parse(..., again=True)``).
"""

from __future__ import annotations

from typing import Final

import msgspec

from casemate.egress.malformed import Malformed
from casemate.policy import hosts

__all__ = [
    "ACCESS_DENIED", "FATAL", "MAX_HELLO", "MAX_RECORDS", "UNRECOGNIZED_NAME", "Hello", "HelloError",
    "Incomplete", "Reader", "alert", "asks_again", "looks_like_tls", "parse",
]  # fmt: skip

#: Bytes of the message, its header included. With post-quantum keys and tickets real ones reach a few
#: thousand.
MAX_HELLO = 16 << 10
#: Records that the message may come in; the smallest fragments that real clients are known to make are 512
#: bytes.
MAX_RECORDS = 64

FATAL: Final = 2
#: Descriptions of alerts (RFC 8446, 6.2).
ACCESS_DENIED: Final = 49
UNRECOGNIZED_NAME: Final = 112

_HEADER = 5  # of a record: type, version, length
_MESSAGE = 4  # header of a handshake message: type, length
_RECORD_MAX = 1 << 14
_HANDSHAKE = 22
_CLIENT_HELLO = b"\1"
_CONTENT = range(20, 25)  # change_cipher_spec .. heartbeat
_SERVER_NAME, _ALPN, _VERSIONS = 0, 16, 43
_CHANGE_CIPHER = 20
_MAX_EARLY = 32 << 10  # of early data between the two messages; most servers permit half of it
# The random of a ServerHello that is none (RFC 8446, 4.1.3): the SHA-256 of "HelloRetryRequest".
_RETRY = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")
_ENCRYPTED = {0xFE0D, 0xFFCE, *range(0xFE08, 0xFE0D)}  # ECH; ESNI and drafts before it


class HelloError(Malformed):
    """Not a ClientHello, or one that must not be relayed."""


class Incomplete(msgspec.Struct, frozen=True, gc=False):
    """Right so far. ``needed`` is how many bytes, from the first one on, the next look needs at least."""

    needed: int


class Hello(msgspec.Struct, frozen=True, gc=False):
    """What a ClientHello says.

    ``server_name`` is spelt as by ``policy.hosts``, an address as ``ipaddress`` writes it (clients must not
    send one, and some do), None when there is none. ``alpn`` has the protocols, bytes above ASCII as Latin-1;
    ``versions`` has those that are offered, such as 0x0304, without the placeholders of RFC 8701. ``size`` is
    how many bytes of the stream the message took, headers of records included; what follows may be early
    data.
    """

    server_name: str | None
    alpn: tuple[str, ...]
    versions: tuple[int, ...]
    has_ech: bool
    size: int


def looks_like_tls(first_bytes: bytes) -> bool:
    """Whether a stream that begins like this is TLS, going by as many of its first five bytes as there are.

    Any record type counts, and so does a hello of SSLv2, so that ``parse`` refuses what servers might take
    for a beginning; no text protocol begins like either. Some servers do not look at the version of a record.
    """
    if not first_bytes:
        return False
    if first_bytes[0] in _CONTENT:
        return first_bytes[0] == _HANDSHAKE or len(first_bytes) < 2 or first_bytes[1] == 3
    return _may_be_sslv2(first_bytes)


def asks_again(answer: bytes) -> bool | None:
    """Whether a server whose answer begins like this wants a second ClientHello.

    None as long as that cannot be said: 43 bytes are always enough, and all but such an answer need fewer.
    """
    if answer[:1] not in (b"", b"\x16") or answer[5:6] not in (b"", b"\2"):
        return False
    random = answer[11 : 11 + len(_RETRY)]
    if not _RETRY.startswith(random):
        return False
    return True if len(random) == len(_RETRY) else None


def parse(data: bytes, *, again: bool = False) -> Hello | Incomplete:
    """Read the beginning of a stream. Raises HelloError once it cannot become a ClientHello any more.

    With ``again`` it is what follows a first ClientHello that the server was not content with: early data and
    one change_cipher_spec may come before, and count into ``size``.
    """
    message = b""
    at = wanted = records = 0
    if again:
        at = _behind_early_data(data)
        if at > len(data):
            return Incomplete(at)
    while not wanted or len(message) < wanted:
        head = data[at : at + _HEADER]
        if len(head) < _HEADER:
            if not records:
                _check_start(head)
            return Incomplete(at + _HEADER)
        _check_start(head)
        length = head[3] << 8 | head[4]
        if not 0 < length <= _RECORD_MAX:
            raise HelloError("tls-record-length", "a TLS record is empty or longer than one may be")
        records += 1
        if records > MAX_RECORDS:
            raise HelloError("tls-fragments", f"a ClientHello comes in more than {MAX_RECORDS} records")
        before = len(message)
        at += _HEADER
        message += data[at : at + length]
        at += length
        if message[:1] not in (b"", _CLIENT_HELLO):
            raise HelloError("tls-message", "the first TLS message is not a ClientHello")
        if len(message) >= _MESSAGE:
            wanted = _MESSAGE + int.from_bytes(message[1:_MESSAGE], "big")
            if wanted > MAX_HELLO:
                raise HelloError("tls-long", f"a ClientHello is longer than {MAX_HELLO} bytes")
            # Known before the record is whole: what does not end with it will never be right.
            if before + length > wanted:
                raise HelloError("tls-trailing", "something follows a ClientHello in the same TLS record")
        if at > len(data):
            return Incomplete(at)
    return _read(message, at)


class Reader:
    """The same for bytes that arrive in pieces; ``data`` is all that came, to be relayed once decided."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._needed = 1

    @property
    def data(self) -> bytes:
        """Everything that was fed so far."""
        return bytes(self._held)

    def feed(self, data: bytes) -> Hello | None:
        """The ClientHello once it is whole, None before. Raises HelloError as ``parse`` does."""
        self._held += data
        if len(self._held) < self._needed:
            return None
        found = parse(bytes(self._held))
        if isinstance(found, Hello):
            return found
        # Inside of the first header each byte may tell that this is no TLS.
        self._needed = found.needed if len(self._held) >= _HEADER else 1
        return None


def alert(level: int, description: int) -> bytes:
    """The record that ends a handshake before it began, such as ``alert(FATAL, ACCESS_DENIED)``."""
    return bytes((21, 3, 3, 0, 2, level, description))


def _behind_early_data(data: bytes) -> int:
    """Where the second ClientHello begins, or how many bytes are needed to say so."""
    at = changes = 0
    while data[at : at + 1] in (b"\x14", b"\x17"):
        head = data[at : at + _HEADER]
        if len(head) < _HEADER:
            return at + _HEADER
        if head[1] != 3:
            raise HelloError("tls-version", "a TLS record has an unknown version")
        length = head[3] << 8 | head[4]
        if head[0] == _CHANGE_CIPHER:
            changes += 1
            if length != 1 or changes > 1:
                raise HelloError("tls-early", "something odd stands before a second ClientHello")
        at += _HEADER + length
        if at > _MAX_EARLY:
            raise HelloError("tls-early", "much early data stands before a second ClientHello")
        if at > len(data):
            break
    return at


def _may_be_sslv2(head: bytes) -> bool:
    """Whether this is, or may become, the hello of SSLv2: a length with its high bit, type 1, a version."""
    return head[0] >= 0x80 and head[2:3] in (b"", b"\1") and head[3:4] in (b"", b"\0", b"\3")


def _check_start(head: bytes) -> None:
    """Refuse what is no header of a handshake record, by as much of it as is there."""
    if not head:
        return
    if head[0] != _HANDSHAKE:
        if not _may_be_sslv2(head):
            raise HelloError("tls-record-type", "the stream does not begin with a TLS handshake")
        if len(head) == _HEADER:
            raise HelloError("tls-sslv2", "a client begins with SSLv2, which has no server name")
        return
    # Only the major version: the record's own version means nothing otherwise (RFC 8446, 5.1).
    if len(head) > 1 and head[1] != 3:
        raise HelloError("tls-version", "a TLS record has an unknown version")


def _read(message: bytes, size: int) -> Hello:
    """The fields of a whole message."""
    legacy = message[_MESSAGE : _MESSAGE + 2]
    if len(legacy) < 2 or legacy[0] != 3:
        raise HelloError("tls-version", "a ClientHello has an unknown version")
    at = _skip(message, _MESSAGE + 34, 1, 0, 32)  # behind version and random: the session's id
    at = _skip(message, at, 2, 2, 0xFFFE, even=True)  # cipher suites
    at = _skip(message, at, 1, 1, 0xFF)  # compression methods
    found = _extensions(message, at) if at < len(message) else {}
    server_name = found.get(_SERVER_NAME)
    protocols = found.get(_ALPN)
    versions = found.get(_VERSIONS)
    return Hello(
        server_name=None if server_name is None else _server_name(server_name),
        alpn=() if protocols is None else _protocols(protocols),
        versions=(legacy[0] << 8 | legacy[1],) if versions is None else _versions(versions),
        has_ech=not _ENCRYPTED.isdisjoint(found),
        size=size,
    )


def _skip(message: bytes, at: int, width: int, least: int, most: int, *, even: bool = False) -> int:
    """Where a vector ends that begins at ``at`` with its length in ``width`` bytes."""
    start = at + width
    if start > len(message):
        raise HelloError("tls-short", "a ClientHello ends inside of a field")
    length = int.from_bytes(message[at:start], "big")
    if not least <= length <= most or (even and length & 1):
        raise HelloError("tls-field", "a field of a ClientHello has a length that it cannot have")
    if start + length > len(message):
        raise HelloError("tls-short", "a ClientHello ends inside of a field")
    return start + length


def _extensions(message: bytes, at: int) -> dict[int, bytes]:
    """Every extension by its type; the block ends with the message, and no type comes twice."""
    end = len(message)
    if _skip(message, at, 2, 0, 0xFFFF) != end:
        raise HelloError("tls-trailing", "something follows the extensions of a ClientHello")
    at += 2
    found: dict[int, bytes] = {}
    while at < end:
        if at + 4 > end:
            raise HelloError("tls-short", "a ClientHello ends inside of an extension")
        kind = message[at] << 8 | message[at + 1]
        start = at + 4
        at = start + (message[at + 2] << 8 | message[at + 3])
        if at > end:
            raise HelloError("tls-short", "a ClientHello ends inside of an extension")
        if kind in found:
            raise HelloError("tls-duplicate", "a ClientHello has the same extension twice")
        found[kind] = message[start:at]
    return found


def _server_name(data: bytes) -> str:
    """The one name of the extension (RFC 6066, 3)."""
    # List length, type 0 (host_name, the only one there is), name length: the three must agree to the byte.
    if len(data) < 6 or int.from_bytes(data[:2], "big") != len(data) - 2 or data[2] != 0:
        raise HelloError("tls-server-name", "the server name of a ClientHello is not one host name")
    if int.from_bytes(data[3:5], "big") != len(data) - 5:
        raise HelloError("tls-server-name", "the server name of a ClientHello is not one host name")
    try:
        text = data[5:].decode("ascii")
        address = hosts.address(text)
        return hosts.normalise(text) if address is None else str(address)
    except UnicodeDecodeError:
        raise HelloError("tls-server-name", "the server name of a ClientHello is not ASCII") from None
    except ValueError as error:
        raise HelloError("tls-server-name", f"the server name of a ClientHello: {error}") from None


def _protocols(data: bytes) -> tuple[str, ...]:
    """The protocols that the client speaks (RFC 7301)."""
    if len(data) < 4 or int.from_bytes(data[:2], "big") != len(data) - 2:
        raise HelloError("tls-alpn", "the protocols of a ClientHello are not a list")
    names: list[str] = []
    at = 2
    while at < len(data):
        end = at + 1 + data[at]
        if end == at + 1 or end > len(data):
            raise HelloError("tls-alpn", "the protocols of a ClientHello are not a list")
        names.append(data[at + 1 : end].decode("latin-1"))
        at = end
    return tuple(names)


def _versions(data: bytes) -> tuple[int, ...]:
    """The versions that the client offers (RFC 8446, 4.2.1), without placeholders such as 0x3A3A."""
    if len(data) < 3 or data[0] != len(data) - 1 or not len(data) & 1:
        raise HelloError("tls-versions", "the versions of a ClientHello are not a list")
    offered = (data[at] << 8 | data[at + 1] for at in range(1, len(data), 2))
    return tuple(value for value in offered if value & 0x0F0F != 0x0A0A)
