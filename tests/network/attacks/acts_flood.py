"""Acts that use a resource up, and look whether anybody is served meanwhile."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from typing import Any

import wire

# How a connection can be begun and left: what is said, and whether one more byte follows now and then.
_HEAD = "GET / HTTP/1.1\r\nHost: allowed.example\r\nX-Slow: "
STARTS: dict[str, tuple[list[Any], str, bool]] = {
    "silent": (["allowed.example", 443], "", False),
    "half-head": (["allowed.example", 80], _HEAD, True),
    "half-hello": (["allowed.example", 443], "\x16\x03\x01\x02\x00\x01\x00\x01", True),
    "half-body": (["allowed.example", 80], _HEAD + "a\r\nContent-Length: 100000\r\n\r\nx", True),
    "proxy-silent": (["198.18.0.1", 3128], "", False),
    "proxy-head": (["198.18.0.1", 3128], "CONNECT allowed.example:443 HTTP/1.1\r\nX: ", True),
    "proxy-socks": (["198.18.0.1", 3128], "\x05\xff", True),
    "dns-stream": (["198.18.0.1", 53], "\xff", True),
    "unread": (
        ["allowed.example", 80], "GET /big?n=50000000 HTTP/1.1\r\nHost: allowed.example\r\n\r\n", False
    ),
}  # fmt: skip


def _begin(target: list[Any], text: str) -> socket.socket:
    made = socket.create_connection((target[0], target[1]), 5)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.sendall(wire.latin(text))
    made.setblocking(False)
    return made


def slow(one: dict[str, Any]) -> list[float]:
    """Hold ``count`` connections of each start (or to ``to``), then get ``pages`` pages; seconds of each."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    starts = [(one["to"], "", False)] if "to" in one else [STARTS[name] for name in one["starts"]]
    held = []
    for target, text, drips in starts:
        for _ in range(one["count"]):
            with contextlib.suppress(OSError):
                held.append((_begin(target, text), drips))
    taken = []
    for page in one["pages"]:
        for sock, drips in held:
            if drips:
                with contextlib.suppress(OSError):
                    sock.send(b"x")
        started = time.monotonic()
        with contextlib.suppress(OSError):
            wire.talk(wire.dial({"seconds": 5, **page}), page)
        taken.append(round(time.monotonic() - started, 3))
    for sock, _ in held:
        sock.close()
    return taken


def exhaust(one: dict[str, Any]) -> dict[str, int]:
    """Ask for ``count`` different names; how often each code of an answer came."""
    server = wire.resolver()
    codes: dict[str, int] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.settimeout(2)
        sock.connect((server, 53))
        for number in range(one["count"]):
            sock.send(wire.query(f"n{number}.{one['below']}"))
            try:
                code = str(sock.recv(2048)[3] & 15)
            except TimeoutError:
                code = "silence"
            codes[code] = codes.get(code, 0) + 1
    for page in one["pages"]:
        with contextlib.suppress(OSError):
            wire.talk(wire.dial(page), page)
    return codes


def many(one: dict[str, Any]) -> int:
    """Open ``count`` connections and keep them; how many could be opened. Then, with all gone, get a page."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    held = []
    for _ in range(one["count"]):
        with contextlib.suppress(OSError):
            held.append(_begin(*one["start"]))
    opened = len(held)
    for sock in held:
        sock.close()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if "200 OK" in wire.talk(wire.dial(one["page"]), one["page"]):
                break
        time.sleep(0.1)
    return opened
