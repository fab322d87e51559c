"""What a stream is by its first bytes: TLS, HTTP, or neither. Pure, and wary of what servers let pass.

A server may skip empty lines before a request, take a tab for a space, or any method for one. What such a
server would read as a request is HTTP here, so that its ``Host`` is looked at. As long as a stream could
still become one, it is undecided, and nothing of it is passed on; one that never says what it is counts as
HTTP, which it is refused for.
"""

from __future__ import annotations

import re

from casemate.egress import clienthello

__all__ = ["HTTP", "OTHER", "TLS", "UNDECIDED", "classify"]

TLS, HTTP, OTHER, UNDECIDED = "https", "http", "tcp", ""

_METHODS = frozenset(
    (
        b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"CONNECT", b"TRACE", b"PRI",
        b"PROPFIND", b"REPORT", b"MKCOL", b"COPY", b"MOVE", b"LOCK", b"UNLOCK", b"SEARCH", b"PURGE", b"LINK",
    )
)  # fmt: skip
# What a proxy says of its client before the client's own words (haproxy's PROXY protocol). Its first version
# begins like a request, and a server that takes either finds the request behind it: refused as one.
_PROXY_1, _PROXY_2 = b"PROXY", b"\r\n\r\n\0\r\nQUIT\n"
_TOKEN = frozenset(b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_BLANK = frozenset(b" \t\v\f")
_SKIPPED = b"\r\n \t\v\f"
# Some servers take any printable character in a method, and a method of any length.
_PRINTABLE = re.compile(rb"[!-~]*")
_MOST = 8192


def classify(data: bytes, *, server_spoke: bool = False) -> str:
    """``TLS``, ``HTTP``, ``OTHER``, or ``UNDECIDED`` until there is more.

    ``server_spoke``: no HTTP server does, so that only a request line that says its version is one; protocols
    of mail and news have commands that are called like methods.
    """
    if clienthello.looks_like_tls(data):
        return TLS
    if _PROXY_2.startswith(data[: len(_PROXY_2)]) and data:
        return HTTP if len(data) >= len(_PROXY_2) else UNDECIDED
    start = data.lstrip(_SKIPPED)
    if not start:
        return UNDECIDED if len(data) <= _MOST else HTTP
    if start[0] not in _TOKEN:
        return OTHER
    found = _PRINTABLE.match(start)
    length = found.end() if found else 0
    if length == len(start):  # one word so far
        return UNDECIDED if length <= _MOST else HTTP
    if start[length] not in _BLANK:
        return OTHER
    if start[:length] == _PROXY_1 or (start[:length].upper() in _METHODS and not server_spoke):
        return HTTP
    line, newline, _ = start.partition(b"\n")
    if b"HTTP/" in line.upper():
        return HTTP
    if newline:
        return OTHER
    return UNDECIDED if len(line) <= _MOST else HTTP
