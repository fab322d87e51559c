"""Packets between the thin client and the daemon: lists of strings, with descriptors.

Both sides run as the same user; sizes are bounded all the same.
"""

from __future__ import annotations

from casemate.sys import packets

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket

__all__ = ["identity", "receive", "send"]


def identity() -> str:
    """Names this installation: a daemon of another one must not serve."""
    import os
    import sys

    import casemate

    # The same file has many names: the installed script starts it by way of ``bin/../lib``.
    place = os.path.realpath(__file__).rsplit("/", 3)[0]
    return f"{casemate.__version__} {place} {sys.version_info[0]}.{sys.version_info[1]}"


def send(endpoint: _socket.socket, words: list[str], descriptors: list[int] | None = None) -> None:
    """Send one packet. Raises OSError."""
    packets.send(endpoint, packets.join(words), descriptors)


def receive(endpoint: _socket.socket) -> tuple[list[str], list[int]]:
    """Wait for one packet; an empty list at the end. Raises OSError, also for what is no packet of ours."""
    try:
        payload, handles = packets.receive(endpoint)
    except ValueError as error:
        raise OSError(74, str(error)) from error  # EBADMSG
    return ([] if payload is None else packets.split(payload)), handles
