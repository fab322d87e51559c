"""Packets between the thin client and the daemon: lists of strings, with descriptors.

Strings are joined by NUL, which none of them can hold. A packet that does not fit the socket travels in an
anonymous file. Both sides run as the same user; sizes are bounded all the same.
"""

from __future__ import annotations

import _socket
import os

__all__ = ["identity", "receive", "send"]

_INLINE = 64 << 10
_MOST = 16 << 20
_INT = 4


def identity() -> str:
    """Names this installation: a daemon of another one must not serve."""
    import sys

    import casemate

    return f"{casemate.__version__} {__file__.rsplit('/', 3)[0]} {sys.version_info[0]}.{sys.version_info[1]}"


def send(endpoint: _socket.socket, words: list[str], descriptors: list[int] | None = None) -> None:
    """Send one packet. Raises OSError."""
    payload = "\0".join(words).encode("utf-8", "surrogateescape")
    handles = list(descriptors or [])
    spill = -1
    try:
        if len(payload) > _INLINE:
            spill = os.memfd_create("casemate", os.MFD_CLOEXEC | 0x8)  # MFD_NOEXEC_SEAL
            view = memoryview(payload)
            while view:
                view = view[os.write(spill, view) :]
            handles.append(spill)
            payload = b"\1"
        data = b"".join(handle.to_bytes(_INT, "little") for handle in handles)
        ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, data)] if handles else []
        endpoint.sendmsg([payload], ancillary)
    finally:
        if spill >= 0:
            os.close(spill)


def receive(endpoint: _socket.socket) -> tuple[list[str], list[int]]:
    """Wait for one packet; an empty list at the end."""
    payload, ancillary, _, _ = endpoint.recvmsg(_INLINE + 1, _socket.CMSG_SPACE(16 * _INT), _socket.MSG_CMSG_CLOEXEC)
    handles: list[int] = []
    for level, kind, data in ancillary:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            handles += [int.from_bytes(data[i : i + _INT], "little") for i in range(0, len(data), _INT)]
    if payload == b"\1" and handles:
        spill = handles.pop()
        try:
            size = min(os.fstat(spill).st_size, _MOST)
            payload = os.pread(spill, size, 0)
        finally:
            os.close(spill)
    if not payload:
        return [], handles
    return payload.decode("utf-8", "surrogateescape").split("\0"), handles
