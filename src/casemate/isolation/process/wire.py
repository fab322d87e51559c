"""Messages between a launcher and whoever gives it orders: JSON with descriptors, over SOCK_SEQPACKET.

One message is one packet. A large one travels in an anonymous file whose descriptor is the last of the
packet's, since a packet has to fit the socket's buffer; both ways have a bound.
"""

from __future__ import annotations

import _socket
import array
import json
import os

__all__ = ["MAX_MESSAGE", "receive", "send"]

MAX_MESSAGE = 16 << 20
_INLINE = 64 << 10
_MAX_DESCRIPTORS = 64


def send(endpoint: _socket.socket, message: dict[str, object], descriptors: list[int] | None = None) -> None:
    """Send one message. Raises OSError (EMSGSIZE for one that is too large)."""
    payload = json.dumps(message, separators=(",", ":")).encode()
    handles = list(descriptors or [])
    spill = -1
    try:
        if len(payload) > _INLINE:
            if len(payload) > MAX_MESSAGE:
                raise OSError(90, "message too large", "wire")
            spill = os.memfd_create("casemate-message", os.MFD_CLOEXEC | 0x8)  # MFD_NOEXEC_SEAL
            view = memoryview(payload)
            while view:
                view = view[os.write(spill, view) :]
            handles.append(spill)
            payload = b"+"
        ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", handles))] if handles else []
        endpoint.sendmsg([payload], ancillary)
    finally:
        if spill >= 0:
            os.close(spill)


def receive(endpoint: _socket.socket) -> tuple[dict[str, object] | None, list[int]]:
    """Wait for one message; ``(None, [])`` at the end. Raises ValueError for what is no message."""
    space = _socket.CMSG_SPACE(_MAX_DESCRIPTORS * 4)
    payload, ancillary, flags, _ = endpoint.recvmsg(_INLINE + 1, space, _socket.MSG_CMSG_CLOEXEC)
    handles: list[int] = []
    for level, kind, data in ancillary:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            handles += numbers
    try:
        if flags & (_socket.MSG_TRUNC | _socket.MSG_CTRUNC):
            raise ValueError("a message was cut off")
        if not payload:
            return None, []
        if payload == b"+":
            if not handles:
                raise ValueError("a large message without its file")
            spill = handles.pop()
            try:
                size = os.fstat(spill).st_size
                if size > MAX_MESSAGE:
                    raise ValueError("a message is too large")
                payload = os.pread(spill, size, 0)
            finally:
                os.close(spill)
        message = json.loads(payload)
        if not isinstance(message, dict):
            raise ValueError("a message is no object")
    except BaseException:
        for handle in handles:
            os.close(handle)
        raise
    return message, handles
