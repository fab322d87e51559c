"""Acts on sockets: every way to a listener of the host."""

from __future__ import annotations

import socket
from typing import Any

import raw

Params = dict[str, Any]
Result = dict[str, Any]


def _send(family: int, kind: int, protocol: int, address: object, text: str) -> Result:
    try:
        with socket.socket(family, kind, protocol) as sock:
            sock.settimeout(2)
            sock.connect(address)  # type: ignore[arg-type]
            sock.sendall(text.encode())
    except OSError as error:
        return {"ok": False, "errno": error.errno}
    return {"ok": True}


def tcp(p: Params) -> Result:
    """Plain connections over both versions, and the mapped form."""
    return {
        "v4": _send(socket.AF_INET, socket.SOCK_STREAM, 0, ("127.0.0.1", p["tcp4"]), "tcp4:" + p["token"]),
        "v6": _send(socket.AF_INET6, socket.SOCK_STREAM, 0, ("::1", p["tcp6"]), "tcp6:" + p["token"]),
        "mapped": _send(
            socket.AF_INET6, socket.SOCK_STREAM, 0, ("::ffff:127.0.0.1", p["tcp4"]), "map:" + p["token"]
        ),
    }


def fastopen(p: Params) -> Result:
    """Data in the first packet, which needs no connect() call."""
    # Blocking: without a cookie the first such call connects, and a non-blocking one would send nothing.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.sendto(("tfo:" + p["token"]).encode(), 0x20000000, ("127.0.0.1", p["tcp4"]))
    return {"ok": True}


def mptcp(p: Params) -> Result:
    """Multipath TCP, which rules about TCP do not see."""
    return _send(socket.AF_INET, socket.SOCK_STREAM, 262, ("127.0.0.1", p["tcp4"]), "mptcp:" + p["token"])


def udp(p: Params) -> Result:
    """A datagram, and a DNS question that carries the token."""
    done = _send(socket.AF_INET, socket.SOCK_DGRAM, 0, ("127.0.0.1", p["udp4"]), "udp:" + p["token"])
    label = ("dns" + p["token"])[:60]
    question = (
        b"\x12\x34\x01\x00\x00\x01\0\0\0\0\0\0" + bytes([len(label)]) + label.encode() + b"\0\0\x01\0\x01"
    )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(question, ("127.0.0.1", p["udp4"]))
    return {"ok": True, "plain": done}


def abstract(p: Params) -> Result:
    """The host's abstract unix sockets."""
    return {
        "stream": _send(socket.AF_UNIX, socket.SOCK_STREAM, 0, p["abstract_stream"], "as:" + p["token"]),
        "dgram": _send(socket.AF_UNIX, socket.SOCK_DGRAM, 0, p["abstract_dgram"], "ad:" + p["token"]),
    }


def path_unix(p: Params) -> Result:
    """The host's unix sockets with a path, also through /proc/1/root."""
    result: Result = {}
    for name, kind, tag in (
        ("path_stream", socket.SOCK_STREAM, "ps:"),
        ("path_dgram", socket.SOCK_DGRAM, "pd:"),
    ):
        for prefix in ("", "/proc/1/root"):
            result[name + prefix] = _send(socket.AF_UNIX, kind, 0, prefix + p[name], tag + p["token"])
    return result


def sockets(p: Params) -> Result:
    """Which of the listed (family, type, protocol) can be made at all; high bits set on request."""
    made: Result = {}
    for name, family, kind, protocol in p["sockets"]:
        made[name] = raw.attempt("socket", family, kind, protocol)
    return {"made": made}
