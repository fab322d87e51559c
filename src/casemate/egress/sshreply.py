"""How an SSH client is told why its connection is refused, before there is any key.

A connection that is just closed makes ``ssh`` say "Connection closed by remote host", which sends people to
look at the server. The protocol lets a server disconnect with a text right behind its version, and clients
show it.
"""

from __future__ import annotations

__all__ = ["looks_like_ssh", "refusal"]

_DISCONNECT = 1  # SSH_MSG_DISCONNECT
_NOT_ALLOWED = 1  # SSH_DISCONNECT_HOST_NOT_ALLOWED_TO_CONNECT
_BLOCK = 8  # what packets are padded to before a cipher is agreed on (RFC 4253, 6)
_LEAST_PADDING = 4
_MAX_TEXT = 1024


def refusal(text: str) -> bytes:
    """What to send, then close: a version, and a disconnect with ``text`` (cut off after 1 KiB)."""
    clean = "".join(char if char.isprintable() else " " for char in text[:_MAX_TEXT])
    shown = clean.encode("utf-8", "replace")[:_MAX_TEXT].decode("utf-8", "ignore").encode()
    payload = bytes((_DISCONNECT,)) + _NOT_ALLOWED.to_bytes(4, "big")
    payload += len(shown).to_bytes(4, "big") + shown
    payload += (0).to_bytes(4, "big")  # language
    padding = _LEAST_PADDING + -(5 + len(payload) + _LEAST_PADDING) % _BLOCK
    packet = (1 + len(payload) + padding).to_bytes(4, "big") + bytes((padding,)) + payload + bytes(padding)
    return b"SSH-2.0-casemate\r\n" + packet


def looks_like_ssh(first_bytes: bytes) -> bool:
    """Whether a stream begins like SSH, going by as many of its first four bytes as there are."""
    return bool(first_bytes) and b"SSH-".startswith(first_bytes[:4])
