"""What the acts share: connections, conversations, messages made byte by byte. Standard library only."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import time
from typing import Any

SECONDS = 2.0
TCP_FASTOPEN_CONNECT = 30
MPTCP = 262


def latin(text: str) -> bytes:
    """Text of a plan as the bytes that it stands for."""
    return text.encode("latin-1")


def dial(one: dict[str, Any]) -> socket.socket:
    """A connection to ``to`` = [host, port]: by name through the resolver, or as the address it is."""
    host, port = one["to"]
    family = {4: socket.AF_INET, 6: socket.AF_INET6}.get(one.get("family", 0), 0)
    protocol = MPTCP if one.get("mptcp") else 0
    last: OSError = OSError(f"no address for {host}")
    for kind, _, _, _, address in socket.getaddrinfo(host, port, family, socket.SOCK_STREAM):
        made = socket.socket(kind, socket.SOCK_STREAM, protocol)
        made.settimeout(one.get("seconds", SECONDS))
        try:
            if one.get("fastopen") == "option":
                made.setsockopt(socket.IPPROTO_TCP, TCP_FASTOPEN_CONNECT, 1)
            made.connect(address)
            return made
        except OSError as error:
            made.close()
            last = error
    raise last


def read(sock: socket.socket, limit: int = 4096) -> bytes:
    """What comes until the end, the first pause, or the limit."""
    data = b""
    with contextlib.suppress(OSError):
        while len(data) < limit and (more := sock.recv(limit)):
            data += more
            sock.settimeout(0.3)
    return data


def until(sock: socket.socket, end: bytes) -> bytes:
    """A head: all up to and with ``end``."""
    data = b""
    while end not in data:
        more = sock.recv(4096)
        if not more:
            raise EOFError(f"closed after {data[:200]!r}")
        data += more
    return data


def exact(sock: socket.socket, count: int) -> bytes:
    """So many bytes."""
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise EOFError(f"closed after {data!r}")
        data += more
    return data


def talk(sock: socket.socket, one: dict[str, Any]) -> str:
    """Say what the try says: ``pieces`` (or ``send``), inside TLS if it has ``tls``; returns the answer.

    Between pieces it waits ``pause`` seconds; with ``answer`` it reads what the other side says to each.
    """
    if "tls" in one:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        sock = context.wrap_socket(sock, server_hostname=one["tls"] or None)
    told = b""
    with sock:
        pieces = [latin(piece) for piece in one.get("pieces", [one.get("send", "")])]
        if one.get("bytewise"):
            pieces = [bytes([byte]) for piece in pieces for byte in piece]
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number, piece in enumerate(pieces):
            if number and "pause" in one:
                time.sleep(one["pause"])
            sock.sendall(piece)
            if one.get("answer"):
                told += read(sock)
        told += read(sock)
        if one.get("finish"):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            told += read(sock)
    return told.decode("latin-1")[:600]


def resolver() -> str:
    """The name server that programs are told to use."""
    with open("/etc/resolv.conf", encoding="ascii") as file:
        return next(line.split()[1] for line in file if line.startswith("nameserver"))


def proxy() -> tuple[str, int]:
    """Where an explicit proxy is: what the environment says, or the gate's own address."""
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        if value := os.environ.get(name):
            host, _, port = value.partition("//")[2].strip("/").rpartition("@")[2].rpartition(":")
            return host.strip("[]"), int(port)
    return "198.18.0.1", 3128


# -- DNS ------------------------------------------------------------------------------------------------


def labels(name: str | list[str]) -> bytes:
    """A name as it goes over the wire; a list has its labels as they are, dots and NULs included."""
    parts = name.rstrip(".").split(".") if isinstance(name, str) else name
    return b"".join(bytes([len(latin(part))]) + latin(part) for part in parts) + b"\0"


def query(name: str | list[str], kind: int = 1, flags: int = 0x0100, more: bytes = b"", count: int = 1,
          extra: int = 0) -> bytes:  # fmt: skip
    """A DNS question; ``more`` follows it."""
    head = os.urandom(2) + struct.pack("!HHHHH", flags, count, 0, 0, extra)
    return head + labels(name) + struct.pack("!HH", kind, 1) + more


def answers(reply: bytes) -> list[str]:
    """The addresses in a reply to ``query``."""
    count = struct.unpack_from("!H", reply, 6)[0]
    at = 12
    while reply[at]:
        at += reply[at] + 1
    at += 5
    found = []
    for _ in range(count):
        while reply[at] and reply[at] < 192:
            at += reply[at] + 1
        at += 2 if reply[at] >= 192 else 1
        kind, _, _, size = struct.unpack_from("!HHIH", reply, at)
        at += 10
        if kind == 1:
            found.append(socket.inet_ntop(socket.AF_INET, reply[at : at + size]))
        if kind == 28:
            found.append(socket.inet_ntop(socket.AF_INET6, reply[at : at + size]))
        at += size
    return found


# -- TLS ------------------------------------------------------------------------------------------------


def extension(kind: int, data: bytes) -> bytes:
    return struct.pack("!HH", kind, len(data)) + data


def names(*entries: tuple[int, bytes]) -> bytes:
    """The server name extension, with as many names as one likes."""
    listed = b"".join(struct.pack("!BH", kind, len(name)) + name for kind, name in entries)
    return extension(0, struct.pack("!H", len(listed)) + listed)


def hello(*extensions: bytes, version: int = 0x0303) -> bytes:
    """The handshake message of a ClientHello with these extensions."""
    body = struct.pack("!H", version) + bytes(32) + b"\0"
    body += b"\0\x06\x13\x01\xc0\x2f\x00\x2f" + b"\x01\0"
    joined = b"".join(extensions)
    body += struct.pack("!H", len(joined)) + joined
    return b"\x01" + len(body).to_bytes(3, "big") + body


def records(message: bytes, size: int = 16384, kind: int = 22) -> bytes:
    """A message in TLS records of at most ``size`` bytes."""
    parts = [message[at : at + size] for at in range(0, len(message), size)] or [b""]
    return b"".join(struct.pack("!BHH", kind, 0x0301, len(part)) + part for part in parts)


COMMON = (
    extension(10, b"\0\x04\0\x1d\0\x17"), extension(11, b"\x01\0"), extension(13, b"\0\x04\x04\x03\x08\x04"),
    extension(43, b"\x04\x03\x04\x03\x03"), extension(51, b"\0\x26\0\x24\0\x1d\0\x20" + bytes(range(32))),
)  # fmt: skip


def named_hello(shape: str, name: bytes, other: bytes) -> bytes:
    """A stream that asks for ``name`` in the way that ``shape`` says; ``other`` is a harmless one."""
    sni = names((0, name))
    plain = hello(sni, *COMMON)
    grease = [extension(kind, bytes(n)) for n, kind in enumerate((0x0A0A, 0x1A1A, 0xFAFA))]
    made = {
        "plain": lambda: records(plain),
        "records": lambda: records(plain, 9),
        "two-extensions": lambda: records(hello(names((0, other)), sni, *COMMON)),
        "two-names": lambda: records(hello(names((0, other), (0, name)), *COMMON)),
        "other-type-first": lambda: records(hello(names((7, other), (0, name)), *COMMON)),
        "other-type": lambda: records(hello(names((7, name)), *COMMON)),
        "last-of-many": lambda: records(hello(*COMMON, *grease, extension(21, bytes(9000)), sni)),
        "giant": lambda: records(hello(*(extension(0x5A5A, bytes(60000)), sni))),
        "after-alert": lambda: records(b"\x01\0", kind=21) + records(plain),
        "after-ccs": lambda: records(b"\x01", kind=20) + records(plain),
        "after-empty": lambda: records(b"") + records(plain),
        "after-request": lambda: records(b"\0\0\0\0" + plain),
        "second-hello": lambda: records(hello(names((0, other)), *COMMON) + plain),
        "truncated": lambda: records(plain)[:-20],
        "sslv2": lambda: _sslv2(name),
        "ssl3": lambda: records(hello(sni, *COMMON, version=0x0300)),
        "odd-record-version": lambda: b"\x16\x02\x00" + records(plain)[3:],
        "odd-record-high": lambda: b"\x16\x0f\x01" + records(plain)[3:],
    }  # fmt: skip
    return made[shape]()


def _sslv2(name: bytes) -> bytes:
    body = b"\x01\x03\x03" + struct.pack("!HHH", 3, 0, 32) + b"\x00\x00\x2f" + name.ljust(32, b".")[:32]
    return struct.pack("!H", 0x8000 | len(body)) + body
