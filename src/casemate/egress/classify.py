"""What a stream is by its first bytes: TLS, HTTP, or neither. Pure, and wary of what servers let pass.

A server may skip empty lines before a request, take a tab for a space, or any method for one. What such a
server would read as a request is HTTP here, so that its ``Host`` is looked at. As long as a stream could
still become one, it is undecided, and nothing of it is passed on.
"""

from __future__ import annotations

from casemate.egress import clienthello

__all__ = ["HTTP", "OTHER", "TLS", "UNDECIDED", "classify"]

TLS, HTTP, OTHER, UNDECIDED = "https", "http", "tcp", ""

_METHODS = frozenset(
    (
        b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"CONNECT", b"TRACE", b"PRI",
        b"PROPFIND", b"REPORT", b"MKCOL", b"COPY", b"MOVE", b"LOCK", b"UNLOCK", b"SEARCH", b"PURGE", b"LINK",
    )
)  # fmt: skip
_TOKEN = frozenset(b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_BLANK = frozenset(b" \t\v\f")
_SKIPPED = b"\r\n \t\v\f"
_LONGEST_METHOD = 32
_LONGEST_LINE = 8192


def classify(data: bytes, *, server_spoke: bool = False) -> str:
    """``TLS``, ``HTTP``, ``OTHER``, or ``UNDECIDED`` until there is more.

    ``server_spoke``: no HTTP server does, so that only a request line that says its version is one; protocols
    of mail and news have commands that are called like methods.
    """
    if clienthello.looks_like_tls(data):
        return TLS
    start = data.lstrip(_SKIPPED)
    if not start:
        return UNDECIDED if len(data) <= _LONGEST_LINE else OTHER
    length = next((at for at, byte in enumerate(start[: _LONGEST_METHOD + 1]) if byte not in _TOKEN), -1)
    if length < 0:  # tokens only so far
        return UNDECIDED if len(start) <= _LONGEST_METHOD else OTHER
    if not length or start[length] not in _BLANK:
        return OTHER
    if start[:length].upper() in _METHODS and not server_spoke:
        return HTTP
    line, newline, _ = start.partition(b"\n")
    if b"HTTP/" in line.upper():
        return HTTP
    if newline or len(line) > _LONGEST_LINE or not _is_text(line):
        return OTHER
    return UNDECIDED


def _is_text(line: bytes) -> bool:
    """Whether a line may go on as a request line: no control characters but blanks."""
    return all(byte >= 0x20 or byte in _BLANK or byte == 0x0D for byte in line)
