"""Patterns of HTTP requests: ``GET /repos/*``, ``POST /graphql``, ``* /public/**``.

The method is one word in capitals, or ``*``. In the path ``*`` stands for any characters of one segment and
``**`` for any characters at all. Queries are not looked at. A request's path is brought into one spelling
first, and one that a server may read in two ways (dot segments, empty segments, what is encoded twice) meets
no pattern. An encoded slash is met by ``**`` and by itself only.
"""

from __future__ import annotations

from functools import lru_cache

__all__ = ["canonical", "meets", "parse"]

_TOKEN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ-")
_UNRESERVED = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~")
_HEX = frozenset("0123456789abcdefABCDEF")
_LENGTH = 1024
_STARS = 8
_LONGEST = 16384


def parse(text: str) -> str:
    """The canonical text of one pattern. Raises ValueError with a sentence."""
    method, space, path = text.partition(" ")
    if not space or not path:
        raise ValueError("write a method and a path: GET /repos/*")
    if method != "*" and (not method or not _TOKEN.issuperset(method)):
        raise ValueError("the method is one word in capitals, or * for all")
    if not path.startswith("/"):
        raise ValueError("the path starts with a slash: write GET /repos/*")
    if len(path) > _LENGTH:
        raise ValueError(f"the path is longer than {_LENGTH} characters")
    if "?" in path or "#" in path:
        raise ValueError("a query is not looked at; write the path alone")
    if path.replace("**", "*").count("*") > _STARS:
        raise ValueError(f"the path has more than {_STARS} wildcards")
    if "***" in path:
        raise ValueError("* is one segment, ** is everything below; there is no ***")
    # A wildcard is a character that no canonical path changes, so the pattern goes the way of a path.
    spelt = canonical(path)
    if spelt is None:
        raise ValueError("servers read this path in several ways: no dot segments, no //, no backslashes")
    return f"{method} {spelt}"


def meets(pattern: str, method: str, path: str) -> bool:
    """Whether a request meets a canonical pattern. ``path`` is ``canonical``'s."""
    wanted, _, shape = pattern.partition(" ")
    return (wanted == "*" or wanted == method) and _matches(_pieces(shape), path)


def canonical(target: str) -> str | None:
    """The path of a request target in origin form, in one spelling; None where it has several readings.

    Unreserved characters stand for themselves, all others that were encoded stay so, in capitals.
    """
    path = target.partition("?")[0]
    if not path.startswith("/") or len(path) > _LONGEST or "#" in target:
        return None
    spelt = _unescape(path)
    if spelt is None:
        return None
    # What a server might take for a slash, when it looks for the ways up.
    segments = spelt.replace("%2F", "/").replace("%5C", "/").split("/")
    for segment in segments:
        # Some servers cut a segment at its semicolon before they look at the dots.
        if segment.partition(";")[0].partition("%3B")[0] in (".", ".."):
            return None
    if "" in spelt.split("/")[1:-1]:
        return None
    return spelt


def _unescape(path: str) -> str | None:
    found: list[str] = []
    at = 0
    while at < len(path):
        char = path[at]
        if char == "%":
            pair = path[at + 1 : at + 3]
            if len(pair) != 2 or not _HEX.issuperset(pair):
                return None
            code = int(pair, 16)
            if code < 0x20 or code == 0x7F:
                return None
            if chr(code) in _UNRESERVED:
                found.append(chr(code))
            elif code == 0x25 and _HEX.issuperset(path[at + 3 : at + 5]) and len(path[at + 3 : at + 5]) == 2:
                return None  # encoded twice
            else:
                found.append(f"%{pair.upper()}")
            at += 3
        elif char <= " " or char >= "\x7f" or char == "\\":
            return None
        else:
            found.append(char)
            at += 1
    return "".join(found)


@lru_cache(maxsize=1024)
def _pieces(shape: str) -> tuple[str, ...]:
    """Single characters, ``*`` and ``**``."""
    found: list[str] = []
    for char in shape:
        if char == "*" and found and found[-1] == "*":
            found[-1] = "**"
        else:
            found.append(char)
    return tuple(found)


def _matches(pieces: tuple[str, ...], path: str) -> bool:
    """All readings at once, so that no pattern takes more than its length times the path's."""
    states = _behind_stars({0}, pieces)
    at = 0
    while at < len(path) and states:
        # An encoded slash is one character that only `**`, or the pattern's own, stands for.
        size = 3 if path[at : at + 3] == "%2F" else 1
        char = path[at : at + size]
        following: set[int] = set()
        for state in states:
            if state == len(pieces):
                continue
            piece = pieces[state]
            if piece == "**" or (piece == "*" and char not in ("/", "%2F")):
                following.add(state)
            elif "".join(pieces[state : state + size]) == char:
                following.add(state + size)
        states = _behind_stars(following, pieces)
        at += size
    return len(pieces) in states


def _behind_stars(states: set[int], pieces: tuple[str, ...]) -> set[int]:
    """A wildcard may stand for nothing."""
    found = set(states)
    for state in states:
        while state < len(pieces) and pieces[state] in ("*", "**"):
            state += 1
            found.add(state)
    return found
