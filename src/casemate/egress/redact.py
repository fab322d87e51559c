"""Takes a secret out of what comes back from the host that it was sent to.

A host that gets a secret may show it: in an error page, in a debugging header, in a redirect. What the
sandbox gets has something of the same length in its place, so no length changes. Looked for are the ways in
which such secrets are written on the web: as they are, percent-encoded, escaped for JSON or HTML, in
hexadecimal, and in base64 at each of the three alignments (which is how ``user:secret`` shows up). Whoever
turns a secret into something else (a digest, its letters backwards, one piece per answer) is not stopped by
this: a secret is given to hosts that are trusted with it.
"""

from __future__ import annotations

import binascii
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Redactor", "quote", "variants"]

_UNRESERVED = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~")
_MARKUP = {ord("&"): b"&amp;", ord("<"): b"&lt;", ord(">"): b"&gt;"}
_HTML = [
    {**_MARKUP, ord('"'): double, ord("'"): single}
    for double in (b'"', b"&quot;", b"&#34;")
    for single in (b"'", b"&#39;", b"&#x27;", b"&apos;")
]
_JSON = {ord('"'): b'\\"', ord("\\"): b"\\\\"}
_JSON_SLASH = {**_JSON, ord("/"): b"\\/"}


def quote(text: bytes, *, safe: bytes = b"", lower: bool = False) -> bytes:
    """Percent-encode everything but unreserved characters and those in ``safe``."""
    keep = _UNRESERVED | frozenset(safe)
    form = b"%%%02x" if lower else b"%%%02X"
    return b"".join(bytes((byte,)) if byte in keep else form % byte for byte in text)


def variants(secret: bytes, stand_in: bytes) -> list[tuple[bytes, bytes]]:
    """Each way to write ``secret``, with what stands in its place: ``stand_in`` written alike, or asterisks.

    The two of a pair have the same length. A secret of eight bytes gives patterns of ten and more.
    """
    same = len(stand_in) == len(secret)
    found: dict[bytes, bytes] = {}

    def add(pattern: bytes, instead: bytes) -> None:
        fits = same and len(instead) == len(pattern)
        found.setdefault(pattern, instead if fits else b"*" * len(pattern))

    add(secret, stand_in)
    if not _UNRESERVED.issuperset(secret):
        # Some encoders leave a few reserved characters alone; a space may be a plus.
        for safe in (b"", b"/", b"!*'()", b"/:@!$&'()*+,;="):
            for lower in (False, True):
                add(quote(secret, safe=safe, lower=lower), quote(stand_in, safe=safe, lower=lower))
                add(quote(secret, safe=safe, lower=lower).replace(b"%20", b"+"), stand_in)
        for table in (*_HTML, _JSON, _JSON_SLASH):
            add(_escaped(secret, table), _escaped(stand_in, table))
    for digits in (secret.hex(), secret.hex().upper()):
        add(digits.encode(), (stand_in.hex() if digits.islower() else stand_in.hex().upper()).encode())
    for offset in range(3):
        pattern, instead = _base64(secret, offset), _base64(stand_in, offset)
        add(pattern, instead)
        add(pattern.translate(_URL_SAFE), instead.translate(_URL_SAFE))
    return list(found.items())


class Redactor:
    """Replaces patterns in a stream; a pattern may lie across any number of pieces.

    Only what may become a pattern is held back, so an event stream arrives as it comes. Preconditions: the
    two of each pair have the same length, and no pattern is empty.
    """

    def __init__(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        self._pairs = dict(pairs)
        # The longest first: a pattern may begin with another one.
        self._patterns = sorted(self._pairs, key=len, reverse=True)
        self._search = re.compile(b"|".join(map(re.escape, self._patterns)) or b"(?!)", re.DOTALL)
        self._longest = max(map(len, self._patterns), default=0)
        self._held = b""
        self.found = 0

    def __bool__(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._patterns)

    def whole(self, data: bytes) -> bytes:
        """``data`` with every pattern replaced; for texts that come in one piece."""
        # `in` runs at gigabytes a second, the alternation at a few hundred megabytes.
        if not any(pattern in data for pattern in self._patterns):
            return data
        return self._search.sub(self._instead, data)

    def feed(self, data: bytes) -> bytes:
        """What can be passed on after ``data`` came; the rest comes with a later call."""
        text = self._held + data if self._held else data
        if not any(pattern in text for pattern in self._patterns):
            keep = self._beginning(text)
            self._held = bytes(text[len(text) - keep :])
            return text[: len(text) - keep] if keep else text
        # What follows the last pattern may begin one; a pattern itself is never taken apart. A shorter
        # pattern at the very end may be the beginning of a longer one, so it waits, too.
        keep = self._beginning(text)
        cut = len(text) - keep
        parts: list[bytes] = []
        at = 0
        while match := self._search.search(text, at):
            if match.end() > cut and match.start() < cut:
                cut = match.end()
            if match.start() >= cut:
                break
            parts += (text[at : match.start()], self._instead(match))
            at = match.end()
        parts.append(text[at:cut])
        self._held = bytes(text[cut:])
        return b"".join(parts)

    def end(self) -> bytes:
        """What was held back, when nothing more comes."""
        rest, self._held = self._held, b""
        return self.whole(rest)

    def _instead(self, match: re.Match[bytes]) -> bytes:
        self.found += 1
        return self._pairs[match[0]]

    def _beginning(self, text: bytes) -> int:
        """Length of the longest end of ``text`` that a pattern begins with, patterns themselves left out."""
        tail = text[max(0, len(text) - self._longest + 1) :]
        longest = 0
        for pattern in self._patterns:
            at = tail.find(pattern[:1])
            while at >= 0 and len(tail) - at > longest:
                length = len(tail) - at
                if length < len(pattern) and pattern.startswith(tail[at:]):
                    longest = length
                    break
                at = tail.find(pattern[:1], at + 1)
        return longest


_URL_SAFE = bytes.maketrans(b"+/", b"-_")


def _escaped(text: bytes, table: dict[int, bytes]) -> bytes:
    return b"".join(table.get(byte, bytes((byte,))) for byte in text)


def _base64(text: bytes, offset: int) -> bytes:
    """The base64 of ``text`` behind ``offset`` other bytes: those characters that depend on it alone."""
    encoded = binascii.b2a_base64(bytes(offset) + text + bytes(3), newline=False)
    return encoded[-(-8 * offset // 6) : 8 * (offset + len(text)) // 6]
