"""Packets with descriptors over SOCK_SEQPACKET, and lists of words in them.

One message is one packet. A large one travels in an anonymous file whose descriptor is the last of the
packet's, since a packet has to fit the socket's buffer; both ways have a bound. Words are joined by NUL,
which no argument, variable or path can hold; loading a JSON module would cost each start 6 ms.
"""

from __future__ import annotations

import _socket
import os
import select

__all__ = ["MAX_PACKET", "join", "readable", "receive", "send", "split"]

MAX_PACKET = 16 << 20
_INLINE = 64 << 10
_MAX_DESCRIPTORS = 253  # SCM_MAX_FD: the kernel passes no more
_INT = 4
_WHOLE, _SPILLED = b"w", b"s"  # first byte: the packet is the message, or the last descriptor's file is


def readable(descriptor: int, seconds: float = 0.0) -> bool:
    """Whether a descriptor has something to read, or its end, within a time. Any number of it will do."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def send(endpoint: _socket.socket, payload: bytes, descriptors: list[int] | None = None) -> None:
    """Send one message. Raises OSError (EMSGSIZE for one that is too large)."""
    handles = list(descriptors or [])
    spill = -1
    try:
        if len(payload) < _INLINE:
            packet = _WHOLE + payload
        elif len(payload) > MAX_PACKET:
            raise OSError(90, "message too large", "packet")
        else:
            spill = os.memfd_create("casemate-message", os.MFD_CLOEXEC | 0x8)  # MFD_NOEXEC_SEAL
            view = memoryview(payload)
            while view:
                view = view[os.write(spill, view) :]
            handles.append(spill)
            packet = _SPILLED
        data = b"".join(handle.to_bytes(_INT, "little") for handle in handles)
        ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, data)] if handles else []
        endpoint.sendmsg([packet], ancillary)
    finally:
        if spill >= 0:
            os.close(spill)


def receive(endpoint: _socket.socket) -> tuple[bytes | None, list[int]]:
    """Wait for one message; ``(None, [])`` at the end. Raises ValueError for what is no message."""
    space = _socket.CMSG_SPACE(_MAX_DESCRIPTORS * _INT)
    packet, ancillary, flags, _ = endpoint.recvmsg(_INLINE, space, _socket.MSG_CMSG_CLOEXEC)
    handles: list[int] = []
    for level, kind, data in ancillary:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            handles += [
                int.from_bytes(data[at : at + _INT], "little") for at in range(0, len(data) - _INT + 1, _INT)
            ]
    try:
        if flags & (_socket.MSG_TRUNC | _socket.MSG_CTRUNC):
            raise ValueError("a message was cut off")
        if not packet and not handles:
            return None, []
        if packet[:1] == _WHOLE:
            return packet[1:], handles
        if packet != _SPILLED or not handles:
            raise ValueError("not a message of ours")
        spill = handles.pop()
        try:
            size = os.fstat(spill).st_size
            if size > MAX_PACKET:
                raise ValueError("a message is too large")
            return os.pread(spill, size, 0), handles
        finally:
            os.close(spill)
    except BaseException:
        for handle in handles:
            os.close(handle)
        raise


def join(words: list[str]) -> bytes:
    """The words as one message. Raises ValueError for a word with a NUL or with half a character."""
    payload = "\0".join(words).encode("utf-8", "surrogateescape")
    if payload.count(0) != len(words) - 1:
        raise ValueError("a word holds a NUL")
    return payload


def split(payload: bytes) -> list[str]:
    """What ``join`` was given. ``Preconditions:`` that was at least one word."""
    return payload.decode("utf-8", "surrogateescape").split("\0")
