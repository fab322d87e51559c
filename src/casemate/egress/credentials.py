"""Placeholders, and where the gate puts the real value in their place.

A sandbox has a *placeholder* where a program expects a token. The gate puts the value in its place only in a
request to a host that the credential names, over a connection whose other end is verified, and only where
tokens stand: in ``Authorization`` (bearer, token, basic), in the header or the query parameter that the
credential names. Anywhere else, a placeholder stays one: in bodies, in paths, and towards every other host.

No object from here shows a secret when it is printed.
"""

from __future__ import annotations

import binascii
import os
from typing import TYPE_CHECKING

import msgspec

from casemate.egress.redact import Redactor, quote, variants
from casemate.policy import hosts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from casemate.policy.model import Credential

__all__ = [
    "MIN_SECRET",
    "Book",
    "Filled",
    "Watcher",
    "applies",
    "complaint",
    "placeholder",
    "placeholders_for",
]

#: A shorter secret cannot be told from ordinary text in an answer, and so could not be kept out of it.
MIN_SECRET = 8
_MAX_SECRET = 8192

_LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
# Programs choose by these how they log in, so a placeholder begins as the token does.
_KINDS = (
    "github_pat_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "glpat-", "gldt-", "npm_", "pypi-", "hf_",
    "dop_v1_", "sk-ant-api03-", "sk-ant-oat01-", "sk-ant-", "sk-proj-", "sk-", "xoxb-", "xoxp-", "xoxa-",
)  # fmt: skip
_MARK = "casemate"
_RANDOM = 13  # characters of 62: 77 bits

_USER = "x-access-token"
_AUTHORIZATION = b"authorization"
_SCHEMES = (b"bearer", b"token")
# The sent forms of basic credentials that are remembered for redaction. One program needs one or two.
_REMEMBERED = 16


def complaint(secret: str) -> str:
    """Why ``secret`` cannot be a credential, or ``""``. The text does not show it."""
    if len(secret) < MIN_SECRET:
        return f"it has fewer than {MIN_SECRET} characters, and could not be kept out of answers"
    if len(secret) > _MAX_SECRET:
        return f"it has more than {_MAX_SECRET} characters"
    if not secret.isascii() or not secret.isprintable():
        return "it holds something other than printable ASCII, which no header can carry"
    if secret != secret.strip():
        return "it begins or ends with a space"
    return ""


def placeholder(secret: str) -> str:
    """A new placeholder for ``secret``: random, recognisable, of letters, digits, ``-`` and ``_`` only.

    It has the length of a secret of 16 characters or more, and begins as known kinds of tokens do.
    """
    length = len(secret) if len(secret) >= 16 else 24
    kind = next((kind for kind in _KINDS if secret.startswith(kind)), "")
    if len(secret) - len(kind) < _RANDOM + 3:
        kind = ""
    mark = _MARK[: length - len(kind) - _RANDOM]  # at least "cas"
    return kind + mark + _random(length - len(kind) - len(mark))


def placeholders_for(secrets: Mapping[str, str]) -> dict[str, str]:
    """A placeholder for each of the secrets, by the same names.

    Raises ValueError with a sentence that names a secret, and does not show it, that cannot be one.
    """
    for name, secret in secrets.items():
        if why := complaint(secret):
            raise ValueError(f"the value of {name} cannot be used: {why}")
    return {name: placeholder(secret) for name, secret in secrets.items()}


def _random(length: int) -> str:
    found = b""
    while len(found) < length:
        # 248 is the largest multiple of 62 in a byte: no letter is more likely than another.
        found += bytes(_LETTERS[byte % 62] for byte in os.urandom(length + 8) if byte < 248)
    return found[:length].decode()


def applies(credential: Credential, name: str) -> bool:
    """Whether ``credential`` belongs to the host ``name`` (normalised)."""
    return any(
        hosts.matches(name, host[2:]) if host.startswith("*.") else host == name for host in credential.hosts
    )


class Filled(msgspec.Struct, frozen=True):
    """A request with its real values. ``used`` and ``astray`` are names of credentials."""

    target: bytes
    headers: list[tuple[bytes, bytes]]
    used: tuple[str, ...]
    astray: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Filled(used={self.used!r}, astray={self.astray!r})"


class _Held:
    """One credential with its value."""

    __slots__ = ("credential", "secret", "stand_in")

    def __init__(self, credential: Credential, secret: str, stand_in: str) -> None:
        self.credential = credential
        self.secret = secret.encode("ascii")
        self.stand_in = stand_in.encode("ascii")


class Book:
    """The credentials of one sandbox as they count towards one host.

    ``secrets`` and ``placeholders`` are by the name of the credential. ``trusted`` says that the other end of
    the connection is verified, or that the policy asks for plain HTTP to this host in so many words; without
    it no value is given.
    """

    def __init__(
        self,
        name: str,
        credentials: Iterable[Credential],
        secrets: Mapping[str, str],
        placeholders: Mapping[str, str],
        *,
        trusted: bool,
    ) -> None:
        self._mine: list[_Held] = []
        self._pairs: dict[bytes, bytes] = {}
        self._all: dict[str, bytes] = {known: text.encode() for known, text in placeholders.items() if text}
        for credential in credentials:
            secret, stand_in = secrets.get(credential.name), placeholders.get(credential.name)
            if secret and stand_in and applies(credential, name):
                held = _Held(credential, secret, stand_in)
                # The host may have got it another time, and show it now.
                self._pairs.update(variants(held.secret, held.stand_in))
                if trusted:
                    self._mine.append(held)
        self._sent: dict[bytes, bytes] = {}

    def __repr__(self) -> str:
        return f"Book({[held.credential.name for held in self._mine]})"

    def __bool__(self) -> bool:
        """Whether this host may have got a value, now or another time: its answers are to be cleaned."""
        return bool(self._pairs)

    @property
    def names(self) -> frozenset[bytes]:
        """The header fields, in lower case, that values stand in."""
        named = [held.credential for held in self._mine if held.credential.kind == "header"]
        return frozenset((_AUTHORIZATION, *(credential.argument.lower().encode() for credential in named)))

    def belongs(self, credential: str) -> bool:
        """Whether the value of this credential may go to this host."""
        return any(held.credential.name == credential for held in self._mine)

    def redactor(self) -> Redactor:
        """Takes the values that this host may have got out of one answer."""
        return Redactor({**self._pairs, **self._sent}.items())

    def fill(self, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> Filled:
        """Put values in the place of placeholders, and add those that are to be added.

        ``target`` is the request target (path and query), ``headers`` the header fields in any case of
        letters.
        """
        fields = list(headers)
        used: dict[str, None] = {}
        for held in self._mine:
            done, target, fields = self._replace(held, target, fields)
            if done:
                used[held.credential.name] = None
        for held in self._mine:
            done, target, fields = self._add(held, target, fields)
            if done:
                used[held.credential.name] = None
        return Filled(target, fields, tuple(used), self.mentioned(target, fields))

    def mentioned(self, target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, ...]:
        """Names of the credentials whose placeholders stand in a target or in header fields."""
        if not self._all:
            return ()
        text = b"\n".join((target, *(value for _, value in headers), *_decoded(headers)))
        return tuple(known for known, stand_in in self._all.items() if stand_in in text)

    def watcher(self) -> Watcher:
        """Looks for placeholders in one body."""
        return Watcher(self._all)

    # ------------------------------------------------------------ one credential

    def _replace(
        self, held: _Held, target: bytes, fields: list[tuple[bytes, bytes]]
    ) -> tuple[bool, bytes, list[tuple[bytes, bytes]]]:
        kind = held.credential.kind
        done = False
        if kind == "query":
            target, done = _in_query(target, held.credential.argument, held)
            return done, target, fields
        named = held.credential.argument.lower().encode() if kind == "header" else _AUTHORIZATION
        changed: list[tuple[bytes, bytes]] = []
        for name, value in fields:
            new = value
            if name.lower() == named:
                new = self._authorization(held, value)
                if kind == "header" and new == value:
                    new = value.replace(held.stand_in, held.secret)
            done = done or new != value
            changed.append((name, new))
        return done, target, changed

    def _authorization(self, held: _Held, value: bytes) -> bytes:
        scheme, space, rest = value.partition(b" ")
        rest = rest.strip()
        if not space:
            return value
        if scheme.lower() in _SCHEMES and rest == held.stand_in:
            return scheme + b" " + held.secret
        if scheme.lower() == b"basic":
            plain = _unbase64(rest)
            user, colon, password = plain.partition(b":")
            if colon and held.stand_in in (user, password):
                user = held.secret if user == held.stand_in else user
                password = held.secret if password == held.stand_in else password
                return scheme + b" " + self._basic(user, password, rest)
        return value

    def _add(
        self, held: _Held, target: bytes, fields: list[tuple[bytes, bytes]]
    ) -> tuple[bool, bytes, list[tuple[bytes, bytes]]]:
        credential = held.credential
        if not credential.add:
            return False, target, fields
        if credential.kind == "query":
            key = credential.argument.encode()
            if any(name == key for name, _ in _parameters(target)):
                return False, target, fields
            joint = b"&" if b"?" in target else b"?"
            return True, target + joint + quote(key) + b"=" + quote(held.secret), fields
        name = credential.argument.encode() if credential.kind == "header" else b"Authorization"
        if any(known.lower() == name.lower() for known, _ in fields):
            return False, target, fields
        if credential.kind == "header":
            value = held.secret
        elif credential.kind == "basic":
            value = b"Basic " + self._basic((credential.argument or _USER).encode(), held.secret, b"")
        else:
            value = b"Bearer " + held.secret
        return True, target, [*fields, (name, value)]

    def _basic(self, user: bytes, password: bytes, before: bytes) -> bytes:
        """The base64 of both, remembered so that an answer cannot show the edges that ``variants`` leaves."""
        encoded = binascii.b2a_base64(user + b":" + password, newline=False)
        if len(self._sent) < _REMEMBERED:
            self._sent[encoded] = before if len(before) == len(encoded) else b"*" * len(encoded)
        return encoded


class Watcher:
    """Tells which placeholders went by in a stream that is not changed."""

    def __init__(self, placeholders: Mapping[str, bytes]) -> None:
        self._left = dict(placeholders)
        self._longest = max(map(len, self._left.values()), default=0)
        self._tail = b""
        self.seen: tuple[str, ...] = ()

    def feed(self, data: bytes) -> None:
        """Look at the next piece."""
        if not self._left:
            return
        text = self._tail + data
        for name in [name for name, stand_in in self._left.items() if stand_in in text]:
            self.seen += (name,)
            del self._left[name]
        self._tail = text[max(0, len(text) - self._longest + 1) :]


def _decoded(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """What stands in the basic credentials of header fields."""
    return [
        _unbase64(value[6:].strip())
        for name, value in headers
        if name.lower() in (_AUTHORIZATION, b"proxy-authorization") and value[:6].lower() == b"basic "
    ]


def _unbase64(text: bytes) -> bytes:
    """The bytes that a base64 text stands for, or nothing when it is not quite one."""
    try:
        return binascii.a2b_base64(text + b"=" * (-len(text) % 4), strict_mode=True)
    except binascii.Error:
        return b""


def _parameters(target: bytes) -> list[tuple[bytes, bytes]]:
    """Names and values of a query as they are written."""
    _, mark, query = target.partition(b"?")
    if not mark:
        return []
    pairs = (part.partition(b"=") for part in query.split(b"&"))
    return [(name, value) for name, _, value in pairs]


def _in_query(target: bytes, key: str, held: _Held) -> tuple[bytes, bool]:
    path, mark, query = target.partition(b"?")
    wanted = key.encode() + b"=" + held.stand_in
    parts = query.split(b"&")
    if not mark or wanted not in parts:
        return target, False
    real = key.encode() + b"=" + quote(held.secret)
    return path + mark + b"&".join(real if part == wanted else part for part in parts), True
