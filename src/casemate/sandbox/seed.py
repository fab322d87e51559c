"""Starting the egress gate's worker: at once, or as a seed that becomes it when it is needed."""

from __future__ import annotations

import _signal
import _socket
import os
import sys
from contextlib import suppress

import msgspec

__all__ = ["GateSeed", "spawn"]

_BOOT = (
    "import sys; sys.path[:0] = [sys.argv[1]]; sys.path.append(sys.argv[2]); "
    "sys.modules['typing_extensions'] = None; "
    "from casemate.egress.worker import main; sys.exit(main(sys.argv[3:]))"
)


def spawn() -> tuple[_socket.socket, int]:
    """Start the worker; returns this side's end of its channel, and its pid."""
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)
    handle = theirs.fileno()
    # Inherited by this child alone: another one that a thread starts just now must not hold the channel open.
    actions = [(os.POSIX_SPAWN_DUP2, handle, handle)]
    try:
        pid = os.posix_spawn(
            sys.executable,
            _arguments(handle),
            _environ(),
            file_actions=actions,
            setsigmask=[],
            setsigdef=range(1, 32),
        )
    finally:
        theirs.close()
    return ours, pid


def _arguments(handle: int) -> list[str]:
    root = __file__.rsplit("/", 3)[0]
    libraries = os.path.dirname(os.path.dirname(str(msgspec.__file__)))
    return [sys.executable, "-I", "-S", "-c", _BOOT, root, libraries, str(handle)]


def _environ() -> dict[str, str]:
    """Resolving goes by the host's own settings; nothing else of the caller's environment comes along."""
    # No search list: an allowed name that is not there must not be tried with other endings.
    environ = {"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin", "LOCALDOMAIN": ".", "RES_OPTIONS": "ndots:0"}
    trust = ("SSL_CERT_FILE", "SSL_CERT_DIR")
    environ.update({name: os.environ[name] for name in trust if name in os.environ})
    return environ


class GateSeed:
    """A process that becomes the worker when one is needed, and costs a fork until then.

    A launcher gives up the rights that a worker needs to get a uid of its own; what is started after that
    would have to stay root. ``Preconditions:`` single-threaded, and before the launcher is made.
    """

    def __init__(self) -> None:
        kind = _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC
        self._ours, theirs = _socket.socketpair(_socket.AF_UNIX, kind)
        wait, self._go = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._go)
                self._ours.close()
                if os.read(wait, 1):
                    os.set_inheritable(theirs.fileno(), True)
                    for number in range(1, 32):
                        with suppress(OSError, ValueError):
                            _signal.signal(number, _signal.SIG_DFL)
                    _signal.pthread_sigmask(_signal.SIG_SETMASK, [])
                    os.execve(sys.executable, _arguments(theirs.fileno()), _environ())
            finally:
                os._exit(127)
        theirs.close()
        os.close(wait)

    def grow(self) -> tuple[_socket.socket, int]:
        """Become the worker; the channel and the pid are the caller's from now on."""
        os.write(self._go, b"g")
        os.close(self._go)
        self._go = -1
        return self._ours, self._pid

    def close(self) -> None:
        """It was not needed."""
        if self._go >= 0:
            os.close(self._go)
            self._go = -1
            self._ours.close()
            os.waitpid(self._pid, 0)
