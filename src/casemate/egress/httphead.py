"""What may be in the head of a request or an answer, and how it is passed on. Pure: no reading, no writing.

Both sides of a flow are written anew by h11 from what it has read on the other, so there is no way to make
the two ends disagree about where a message ends. What is decided here is what h11 leaves open: that the
request is for the host that was decided, which fields concern one hop only, and what is refused because a
server behind might read it as something else.
"""

from __future__ import annotations

import binascii
from typing import TYPE_CHECKING

import msgspec

from casemate.egress.errors import Refused
from casemate.policy import hosts

if TYPE_CHECKING:
    from collections.abc import Iterable

    import h11

__all__ = [
    "MAX_FIELDS",
    "Fields",
    "Head",
    "accepts_upgrade",
    "answer_fields",
    "check_overrides",
    "host_text",
    "is_crowded",
    "is_encoded",
    "read_request",
    "trailer_fields",
    "values",
]

Fields = list[tuple[bytes, bytes]]

#: Header fields of one message.
MAX_FIELDS = 256

_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authorization proxy-authenticate te upgrade"
    b" http2-settings".split()
)
# Fields that a message's length or way depends on: nobody may declare them a matter of one hop.
_ESSENTIAL = frozenset(b"host content-length transfer-encoding".split())
# Where one server lets these stand for another method or path, rules about methods and paths are worth
# nothing.
_OVERRIDES = frozenset(
    b"x-http-method-override x-http-method x-method-override x-original-url x-rewrite-url x-original-method"
    b" x-forwarded-method x-forwarded-uri x-original-uri".split()
)
_NOT_IN_TRAILERS = _HOP | _ESSENTIAL | frozenset(
    b"authorization cookie set-cookie content-encoding content-type content-range trailer expect range"
    b" cache-control max-forwards location age date vary".split()
)  # fmt: skip
_WEBSOCKET_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Head(msgspec.Struct, frozen=True):
    """A request that is for the host it should be for.

    ``target`` is in origin form (or ``*``), ``fields`` are those that go on, without ``Host``. ``key`` is the
    key of a WebSocket handshake, if this is one.
    """

    method: str
    target: bytes
    fields: Fields
    key: bytes = b""

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition(b"?")[0].decode("latin-1")


def host_text(name: str, port: int, *, tls: bool) -> str:
    """The one value of ``Host`` for a host: the port where it is not the usual one."""
    bare = f"[{name}]" if ":" in name else name
    return bare if port == (443 if tls else 80) else f"{bare}:{port}"


def read_request(request: h11.Request, name: str, port: int, *, tls: bool) -> Head:
    """Check one request of a connection to ``name``:``port``. Raises Refused."""
    if request.http_version not in (b"1.0", b"1.1"):
        raise Refused("http-version", "HTTP/1.1 is the one version of HTTP that is spoken here")
    method = request.method.decode("ascii")
    if method in ("CONNECT", "TRACE", "TRACK"):
        raise Refused("method", f"the method {method} is not passed on")
    fields = request.headers.raw_items()
    _check_fields(request, fields)
    target = _origin(request.target, name, port, tls=tls)
    if target == b"*" and method != "OPTIONS":
        raise Refused("target", "the target * is for OPTIONS only")
    for value in values(fields, b"host"):
        _check_authority(value, name, port, tls=tls, what="Host")
    key = _handshake(request, fields)
    also = (b"host", b"expect") if request.http_version == b"1.0" else (b"host",)
    kept = _for_the_next_hop(fields, also=also)
    if key:
        kept += [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
    return Head(method, target, kept, key)


def check_overrides(fields: Fields) -> None:
    """Refuse fields that stand for another method or path than a rule has seen. Raises Refused."""
    # Gateways turn an underscore into a hyphen, or the other way round.
    for name in {name.lower().replace(b"_", b"-") for name, _ in fields} & _OVERRIDES:
        raise Refused(
            "override", f"{name.decode()} stands for another method or path than the rules have seen"
        )


def answer_fields(fields: Iterable[tuple[bytes, bytes]]) -> Fields:
    """The fields of an answer that go on."""
    listed = list(fields)
    # What Alt-Svc offers cannot be reached from inside: QUIC, mostly. Of two lengths the coding wins.
    coded = values(listed, b"transfer-encoding")
    return _for_the_next_hop(listed, also=(b"alt-svc", b"content-length") if coded else (b"alt-svc",))


def trailer_fields(fields: Iterable[tuple[bytes, bytes]], also: Iterable[bytes] = ()) -> Fields:
    """The fields behind a body that go on: none that would have had to be seen before it."""
    without = _NOT_IN_TRAILERS.union(name.lower() for name in also)
    return [(name, value) for name, value in fields if name.lower() not in without][:MAX_FIELDS]


def values(fields: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    """The values of a field (``name`` in lower case), in order."""
    return [value for known, value in fields if known.lower() == name]


def is_encoded(fields: Fields) -> str:
    """The content codings of a message, in lower case and joined by commas; ``""`` for none."""
    words = b",".join(values(fields, b"content-encoding")).lower().split(b",")
    return ",".join(word for raw in words if (word := raw.strip().decode("latin-1")) not in ("", "identity"))


def is_crowded(data: bytes) -> bool:
    """Whether a head that begins ``data`` has more lines than a message may have fields.

    A field of two bytes costs a parser as much as a long one: 64 KiB of them are 50 ms for everybody else.
    """
    ends = [at + 1 for mark in (b"\n\r\n", b"\n\n") if (at := data.find(mark)) >= 0]
    return data.count(b"\n", 0, min(ends, default=len(data))) > MAX_FIELDS + 1


def accepts_upgrade(key: bytes, fields: Fields) -> bool:
    """Whether an answer of 101 is the other half of a WebSocket handshake."""
    from hashlib import sha1

    digest = sha1(key + _WEBSOCKET_GUID, usedforsecurity=False).digest()
    wanted = binascii.b2a_base64(digest, newline=False)
    upgrade = [value.lower() for value in values(fields, b"upgrade")]
    return upgrade == [b"websocket"] and values(fields, b"sec-websocket-accept") == [wanted]


# ---------------------------------------------------------------- parts


def _check_fields(request: h11.Request, fields: Fields) -> None:
    if len(fields) > MAX_FIELDS:
        raise Refused("too-many-fields", f"a request has more than {MAX_FIELDS} header fields")
    coded = values(fields, b"transfer-encoding")
    if coded and (request.http_version == b"1.0" or values(fields, b"content-length")):
        raise Refused("length", "a request says in two ways where it ends")
    named = {word for value in values(fields, b"connection") for word in _words(value)}
    if named & _ESSENTIAL:
        raise Refused("connection-field", "a request declares its Host or its length a matter of one hop")


def _origin(target: bytes, name: str, port: int, *, tls: bool) -> bytes:
    """The target in origin form, after its authority, if it has one, was compared."""
    if b"#" in target:
        raise Refused("target", "a request's target has a fragment")
    if target.startswith(b"/") or target == b"*":
        return target
    scheme, found, rest = target.partition(b"://")
    if not found or scheme.lower() != (b"https" if tls else b"http"):
        raise Refused(
            "target", "a request's target is neither a path nor an address of the connection's kind"
        )
    end = min((at for mark in b"/?" if (at := rest.find(mark)) >= 0), default=len(rest))
    _check_authority(rest[:end], name, port, tls=tls, what="target")
    path = rest[end:]
    return path if path.startswith(b"/") else b"/" + path


def _check_authority(value: bytes, name: str, port: int, *, tls: bool, what: str) -> None:
    """``value`` is the host that was decided, however it is spelt, and the port, if it gives one."""
    text = value.decode("latin-1")
    host, digits = text, ""
    if text.startswith("["):
        host, bracket, rest = text.partition("]")
        host += bracket
        digits = rest[1:] if rest.startswith(":") else rest and "?"
    elif ":" in text:
        host, _, digits = text.rpartition(":")
    known = hosts.address(host)
    try:
        spelt = hosts.normalise(host) if known is None else str(known)
    except ValueError:
        raise Refused("host-differs", f"the {what} of a request to {name} is no host name") from None
    if spelt != name:
        raise Refused("host-differs", f"a request to {name} has another host in its {what}: {spelt}")
    # Old clients leave an unusual port out of Host; in an address, none is the usual one.
    usual = str(443 if tls else 80)
    left_out = "" if what == "Host" and not text.endswith(":") else usual
    if digits != str(port) and (digits or left_out not in ("", str(port))):
        raise Refused("host-differs", f"a request to {name}:{port} has another port in its {what}")


def _handshake(request: h11.Request, fields: Fields) -> bytes:
    """The key of a WebSocket handshake. Other upgrades are not passed on: HTTP/2 would escape the rules."""
    named = {word for value in values(fields, b"connection") for word in _words(value)}
    keys = values(fields, b"sec-websocket-key")
    upgrades = [value.lower() for value in values(fields, b"upgrade")]
    if request.method != b"GET" or request.http_version != b"1.1" or b"upgrade" not in named:
        return b""
    has_body = values(fields, b"transfer-encoding") or set(values(fields, b"content-length")) - {b"0"}
    return keys[0] if upgrades == [b"websocket"] and len(keys) == 1 and not has_body else b""


def _for_the_next_hop(fields: Fields, *, also: tuple[bytes, ...]) -> Fields:
    named = {word for value in values(fields, b"connection") for word in _words(value)} - _ESSENTIAL
    without = _HOP.union(named, also)
    return [(name, value) for name, value in fields if name.lower() not in without]


def _words(value: bytes) -> list[bytes]:
    return [word.strip() for word in value.lower().split(b",")]
