"""The line on which a field stands: for errors only, so it may take its time and may miss.

This is no parser. It assumes what the real parser has taken already, or has refused for another reason,
and finds the deepest part of a field path that it can.
"""

from __future__ import annotations

import re

__all__ = ["find", "nesting"]

# Strings and comments, so that what they hold is not read as structure. A string of three quotes may end in
# up to two more. No string needs its end to match, and no repeat gives back what it took: the text may be
# hostile, and a search that starts anew at each quote would take the square of its length.
_TOML = re.compile(
    r'"""(?:[^"\\]|\\.|"{1,2}(?!"))*+(?:"{3,5})?'
    r"|'''(?:[^']|'{1,2}(?!'))*+(?:'{3,5})?"
    r'|"(?:[^"\\\n]|\\.)*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+",
    re.DOTALL,
)
# Nobody wrote more than this by hand, and a search takes a second per megabyte.
_SEARCHED = 256 * 1024
_HEADER = re.compile(r"\s*\[{1,2}([^\[\]\n]*)\]{1,2}")
_PART = r"(?:[A-Za-z0-9_-]+|\"[^\"\n]*\"|'[^'\n]*')"
_KEY = re.compile(rf"\s*({_PART}(?:\s*\.\s*{_PART})*)\s*=")
_JSON = re.compile(r'"(?:[^"\\]|\\.)*+"?|[{}\[\],:]|\n', re.DOTALL)


def find(text: str, field: str, *, json: bool) -> int | None:
    """The line, counted from 1, of the key at ``field`` (``filesystem.read``), or of what holds it."""
    if len(text) > _SEARCHED:
        return None
    wanted = tuple(field.split("[", 1)[0].split("."))
    spots = _json_keys(text) if json else _toml_keys(text)
    best: tuple[int, int] | None = None
    for path, line in spots:
        depth = len(path)
        if path == wanted[:depth] and (best is None or depth > best[0]):
            best = (depth, line)
    return best[1] if best else None


def nesting(text: str) -> int:
    """How many parts the longest dotted key of a TOML text has, at most.

    ``tomllib`` needs time and memory in the square of this, so it is asked before.
    """
    bare = _TOML.sub(lambda match: "q" if match[0][0] != "#" else "", text)
    longest = 1
    for line in bare.split("\n"):
        # A dot is part of a key, a number or a date here, never of a string.
        longest = max(longest, line.count(".") + 1)
    return longest


def _toml_keys(text: str) -> list[tuple[tuple[str, ...], int]]:
    spots: list[tuple[tuple[str, ...], int]] = []
    table: tuple[str, ...] = ()
    depth = 0
    # Long strings and comments become blanks, line by line, so that the lines keep their numbers.
    for number, line in enumerate(_TOML.sub(_blank, text).split("\n"), 1):
        if depth == 0:
            header = _HEADER.match(line)
            if header and "=" not in line.split("]", 1)[0]:
                table = _parts(header[1])
                spots.append((table, number))
                continue
            key = _KEY.match(line)
            if key:
                spots.append((table + _parts(key[1]), number))
                line = line[key.end() :]
        bare = re.sub(r"\"[^\"\n]*\"|'[^'\n]*'", "", line)
        depth = max(0, depth + sum(bare.count(c) for c in "[{") - sum(bare.count(c) for c in "]}"))
    return spots


def _blank(match: re.Match[str]) -> str:
    token = match[0]
    if token[0] == "#" or "\n" in token or token[:3] in ('"""', "'''"):
        return "\n" * token.count("\n")
    return token


def _parts(key: str) -> tuple[str, ...]:
    found = re.findall(r"\"([^\"]*)\"|'([^']*)'|([A-Za-z0-9_-]+)", key)
    return tuple(a or b or c for a, b, c in found)


def _json_keys(text: str) -> list[tuple[tuple[str, ...], int]]:
    spots: list[tuple[tuple[str, ...], int]] = []
    stack: list[str] = []  # "{" or "[" as they are open
    path: list[str] = []  # the key inside each open "{", "" inside "["
    line, last = 1, ""
    for match in _JSON.finditer(text):
        piece = match[0]
        if piece == "\n":
            line += 1
        elif piece in "{[":
            stack.append(piece)
            path.append("")
        elif piece in "}]":
            if stack:
                stack.pop()
                path.pop()
        elif piece == ":" and stack and stack[-1] == "{":
            path[-1] = last
            if len(path) <= 8 and "" not in path:
                spots.append((tuple(path), line))
        elif piece[0] == '"':
            last = piece[1:-1]
            line += piece.count("\n")
    return spots
