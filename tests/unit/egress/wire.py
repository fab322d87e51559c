"""Messages as clients send them, built field by field so that a test can get any one of them wrong."""

from __future__ import annotations

import base64
from pathlib import Path

ID = 0x1234
FLAGS = 0x0100  # recursion desired


def u8(data: bytes) -> bytes:
    """A vector with its length in one byte."""
    return len(data).to_bytes(1, "big") + data


def u16(data: bytes) -> bytes:
    """A vector with its length in two bytes."""
    return len(data).to_bytes(2, "big") + data


def name(text: str | bytes) -> bytes:
    """A DNS name on the wire; the dots divide its labels."""
    raw = text.encode() if isinstance(text, str) else text
    return b"".join(u8(label) for label in raw.split(b".") if label) + b"\0"


def opt(size: int = 1232, version: int = 0, flags: int = 0, options: bytes = b"") -> bytes:
    """An EDNS record."""
    fields = size.to_bytes(2, "big") + bytes((0, version)) + flags.to_bytes(2, "big")
    return b"\0" + b"\0\x29" + fields + u16(options)


def query(
    wire_name: bytes, qtype: int = 1, qclass: int = 1, *, ident: int = ID, flags: int = FLAGS,
    counts: tuple[int, int, int, int] | None = None, extra: bytes = b"",
) -> bytes:  # fmt: skip
    """A DNS query; ``extra`` is what follows its question: one record, unless ``counts`` says else."""
    counts = counts or (1, 0, 0, 1 if extra else 0)
    head = b"".join(value.to_bytes(2, "big") for value in (ident, flags, *counts))
    return head + wire_name + qtype.to_bytes(2, "big") + qclass.to_bytes(2, "big") + extra


def sni(text: str | bytes, kind: int = 0) -> bytes:
    """The server_name extension with one entry."""
    raw = text.encode() if isinstance(text, str) else text
    return extension(0, u16(bytes((kind,)) + u16(raw)))


def alpn(*protocols: bytes) -> bytes:
    """The ALPN extension."""
    return extension(16, u16(b"".join(map(u8, protocols))))


def versions(*values: int) -> bytes:
    """The supported_versions extension."""
    return extension(43, u8(b"".join(value.to_bytes(2, "big") for value in values)))


def extension(kind: int, data: bytes = b"") -> bytes:
    """One extension."""
    return kind.to_bytes(2, "big") + u16(data)


def body(
    *extensions: bytes, legacy: int = 0x0303, session: bytes = bytes(32), suites: bytes = b"\x13\x01\xc0\x2f",
    methods: bytes = b"\0", tail: bytes = b"",
) -> bytes:  # fmt: skip
    """A ClientHello without its header; no ``extensions`` at all leaves out the whole block."""
    block = u16(b"".join(extensions)) if extensions else b""
    return legacy.to_bytes(2, "big") + bytes(32) + u8(session) + u16(suites) + u8(methods) + block + tail


def message(data: bytes, kind: int = 1) -> bytes:
    """A handshake message."""
    return bytes((kind,)) + len(data).to_bytes(3, "big") + data


def records(data: bytes, *sizes: int, kind: int = 22, version: int = 0x0301) -> bytes:
    """``data`` in TLS records: of the given sizes first, and the rest in one."""
    out = b""
    for size in (*sizes, len(data)):
        if data:
            out += bytes((kind,)) + version.to_bytes(2, "big") + u16(data[:size])
            data = data[size:]
    return out


def hello(*extensions: bytes) -> bytes:
    """A ClientHello in one record."""
    return records(message(body(*extensions)))


def real_hellos() -> dict[str, bytes]:
    """What TLS clients sent for www.example.org (one of them for localhost), by client."""
    lines = Path(__file__).with_name("hellos.txt").read_text().splitlines()
    return {client: base64.b64decode(data) for client, data in map(str.split, lines)}
