"""Taking connections from a listener, without a moment's spin when there is no descriptor left for one."""

from __future__ import annotations

import asyncio
import errno

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

__all__ = ["Acceptor"]

_AT_ONCE = 64
_PAUSE = 0.1  # seconds
# What accept(2) says when the connection is fine and this process or host has no room for it.
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Owns a listener; ``taken`` is called with each connection, which does not block, and owns it."""

    def __init__(self, listener: socket.socket, taken: Callable[[socket.socket], None]) -> None:
        self._listener, self._taken = listener, taken
        self._loop = asyncio.get_running_loop()
        self._resuming: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._descriptor = listener.fileno()
        self._loop.add_reader(self._descriptor, self._accept)

    def close(self) -> None:
        """Take no more; what waits in the queue is refused with the listener's end."""
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None
        else:
            self._loop.remove_reader(self._descriptor)
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                endpoint, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    # The listener stays readable: to go on watching it would be to try without end.
                    self._loop.remove_reader(self._descriptor)
                    self._resuming = self._loop.call_later(_PAUSE, self._resume)
                    return
                continue  # this one was gone before it was taken
            endpoint.setblocking(False)
            self._taken(endpoint)

    def _resume(self) -> None:
        self._resuming = None
        self._loop.add_reader(self._descriptor, self._accept)
