"""Ports of the host's loopback that lead into a sandbox: taken before a command runs, so that none runs in
vain.
"""

from __future__ import annotations

import os
import socket

from casemate.errors import SandboxError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from casemate.sandbox.gate import CommandNetwork

__all__ = ["Published"]


class Published:
    """The listeners of ``publish`` entries (``HOST-PORT:PORT-INSIDE``), on both loopback addresses."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._listeners: list[tuple[int, int]] = []
        try:
            for entry in entries:
                outside, _, inside = entry.partition(":")
                self._take(int(outside), int(inside))
        except BaseException:
            self.close()
            raise

    def _take(self, port: int, inside: int) -> None:
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            try:
                endpoint = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            except OSError:
                continue  # a host without IPv6
            try:
                endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                endpoint.bind((address, port))
                endpoint.listen(128)
            except OSError as error:
                endpoint.close()
                if family == socket.AF_INET6 and error.errno == 99:
                    continue  # no loopback of that family
                raise SandboxError(
                    f"port {port} of the host cannot be taken: {error.strerror}",
                    code="port-taken",
                    hint=f"choose another one: -p OTHER:{inside}",
                    port=port,
                ) from error
            self._listeners.append((endpoint.detach(), inside))

    @property
    def descriptors(self) -> list[int]:
        """The listeners, for whoever serves them; ``close`` lets the ones here go."""
        return [descriptor for descriptor, _ in self._listeners]

    def hand_over(self, share: CommandNetwork) -> None:
        """Give them to the gate that serves the command."""
        for descriptor, inside in self._listeners:
            share.publish(descriptor, inside)
        self.close()

    def close(self) -> None:
        """Let them go; what was handed over stays with the gate."""
        for descriptor, _ in self._listeners:
            os.close(descriptor)
        self._listeners = []
