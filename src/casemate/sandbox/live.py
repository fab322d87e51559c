"""A running command can be spoken to: a socket in Casemate's run directory, for this user's own processes.

One kind of request is served: a TCP socket inside the command's sandbox, which the caller connects to a
server there and relays itself. So no process with rights ever carries a sandbox's bytes.
"""

from __future__ import annotations

import os
import select
import socket
from contextlib import suppress

from casemate.sys import packets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Dial = Callable[[Callable[[int], None]], None]

__all__ = ["LiveSocket", "find"]

_MOST = 16


def _directory(run: str, key: str) -> str:
    """Where the sockets of a workspace's running commands are."""
    return f"{run}/live/{key}"


class LiveSocket:
    """The socket of one running command. ``dial`` makes a socket inside and calls back with it, or with -1.
    """

    def __init__(self, run: str, key: str, name: str, dial: Dial) -> None:
        self._dial = dial
        place = _directory(run, key)
        for part in (os.path.dirname(place), place):  # who works on what is nobody else's affair
            with suppress(FileExistsError):
                os.mkdir(part, 0o700)
        self._path = f"{place}/{name}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        with suppress(FileNotFoundError):  # of one that was killed and had the same name
            os.unlink(self._path)
        self._listener.bind(self._path)
        self._listener.listen(8)
        self._callers: set[socket.socket] = set()
        # One descriptor to watch for all of them.
        self._watch = select.epoll()
        self._watch.register(self._listener, select.EPOLLIN)

    def fileno(self) -> int:
        """Readable when ``poll`` has something to do."""
        return self._watch.fileno()

    def poll(self) -> None:
        """Serve what has come; never waits."""
        # None left, or no descriptor for one: a command does not end for that.
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                caller.setblocking(False)
                if len(self._callers) < _MOST and _uid(caller) == os.getuid():
                    self._callers.add(caller)
                    self._watch.register(caller, select.EPOLLIN)
                else:
                    caller.close()  # and not left in the queue, which would wake us without end
        for caller in [*self._callers]:
            self._serve(caller)

    def _serve(self, caller: socket.socket) -> None:
        try:
            payload, handles = packets.receive(caller)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            payload, handles = None, []
        for handle in handles:
            os.close(handle)
        if payload is None or not payload.isdigit():
            self._callers.discard(caller)
            self._watch.unregister(caller)
            caller.close()
            return

        def made(descriptor: int) -> None:
            given = [descriptor] if descriptor >= 0 else []
            with suppress(OSError):
                packets.send(caller, payload, given)
            for handle in given:
                os.close(handle)

        self._dial(made)

    def close(self) -> None:
        """Take it away."""
        for caller in self._callers:
            caller.close()
        self._listener.close()
        self._watch.close()
        with suppress(OSError):
            os.unlink(self._path)
        with suppress(OSError):
            os.rmdir(os.path.dirname(self._path))


def _uid(caller: socket.socket) -> int:
    data = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(data[4:8], "little")


def find(run: str, key: str) -> socket.socket | None:
    """A connection to a running command of a workspace, the newest; sockets of killed ones are removed."""
    place = _directory(run, key)
    try:
        names = os.listdir(place)
        names.sort(key=lambda name: os.lstat(f"{place}/{name}").st_mtime_ns, reverse=True)
    except FileNotFoundError:
        return None
    for name in names:
        endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            endpoint.connect(f"{place}/{name}")
            if _uid(endpoint) == os.getuid():
                return endpoint
        except ConnectionRefusedError:
            with suppress(OSError):
                os.unlink(f"{place}/{name}")
        except OSError:
            pass
        endpoint.close()
    return None
