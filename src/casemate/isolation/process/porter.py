"""The porter: makes sockets inside running sandboxes, so that something on the host can reach a server there.

A socket belongs for ever to the network namespace it was made in, so somebody has to enter a sandbox's
to make one. That is this process and nobody else: the launcher itself never leaves the host's network, and
a mistake here cannot make a later socket of the launcher's appear in the wrong place. It is forked from the
launcher when first needed, reads no byte that came out of a sandbox, and ends on any error.
"""

from __future__ import annotations

import _signal
import _socket
import os

from casemate.errors import SandboxError
from casemate.sys import capture, packets, process

__all__ = ["Porter"]


class Porter:
    """Asks that process, and starts it when it is not there. ``Preconditions:`` single-threaded."""

    def __init__(self) -> None:
        self._pid = 0
        self._pidfd = -1
        self._endpoint: _socket.socket | None = None

    def socket(self, network: int) -> int:
        """A TCP socket, not connected and not blocking, inside the namespace behind a descriptor.

        Raises SandboxError (``inside-unreachable``).
        """
        try:
            endpoint = self._start()
            packets.send(endpoint, b"socket", [network])
            payload, handles = packets.receive(endpoint)
        except (OSError, ValueError) as error:
            self.close()
            raise self._failed(str(error)) from error
        if payload != b"made" or len(handles) != 1:
            for handle in handles:
                os.close(handle)
            self.close()
            raise self._failed((payload or b"its process ended").decode("utf-8", "replace"))
        return handles[0]

    def _failed(self, why: str) -> SandboxError:
        return SandboxError(f"no socket could be made inside the sandbox: {why}", code="inside-unreachable")

    def _start(self) -> _socket.socket:
        if self._endpoint is not None:
            return self._endpoint
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)
        try:
            pid, pidfd = process.fork_into(0)
            if pid == 0:
                _serve(theirs)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._pid, self._pidfd, self._endpoint = pid, pidfd, ours
        return ours

    def close(self) -> None:
        """End the process."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
            process.pidfd_signal(self._pidfd, _signal.SIGKILL)
            os.waitpid(self._pid, 0)
            os.close(self._pidfd)


def _serve(endpoint: _socket.socket) -> None:
    """Make sockets until the launcher hangs up. Never returns."""
    code = 1
    try:
        process.close_all_but([endpoint.fileno()])
        process.set_dumpable(False)
        home = os.stat("/proc/self/ns/net")
        while True:
            payload, handles = packets.receive(endpoint)
            if payload != b"socket" or len(handles) != 1:
                code = 0 if payload is None else 1
                break
            wanted = os.fstat(handles[0])
            if (wanted.st_dev, wanted.st_ino) == (home.st_dev, home.st_ino):
                packets.send(endpoint, b"that is the host's own network namespace")
                break
            try:
                made = capture.socket_for(handles[0])
            except OSError as error:
                packets.send(endpoint, f"{error}".encode("utf-8", "replace"))
                break
            packets.send(endpoint, b"made", [made])
            os.close(made)
            os.close(handles[0])
    finally:
        os._exit(code)
