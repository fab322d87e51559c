"""Messages between a keeper and its client: JSON objects with descriptors."""

from __future__ import annotations

import json
import os

from casemate.sys import packets
from casemate.sys.plain import is_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from collections.abc import Mapping

__all__ = ["receive", "send"]


def send(
    endpoint: _socket.socket, message: Mapping[str, object], descriptors: list[int] | None = None
) -> None:
    """Send one message. Raises OSError (EMSGSIZE for one that is too large)."""
    packets.send(endpoint, json.dumps(message, separators=(",", ":")).encode(), descriptors)


def receive(endpoint: _socket.socket) -> tuple[dict[str, object] | None, list[int]]:
    """Wait for one message; ``(None, [])`` at the end. Raises ValueError for what is no message."""
    payload, handles = packets.receive(endpoint)
    if payload is None:
        return None, []
    try:
        message: object = json.loads(payload)
        if is_object(message):
            return message, handles
        raise ValueError("a message is no object")
    except BaseException:
        for handle in handles:
            os.close(handle)
        raise
