"""What runs on the lab host beside Casemate, and must stay out of reach.

``python -m tests.network.neighbours DIRECTORY``, where the directory is for unix sockets.

The same talk as ``internet``: events on stdout, orders on stdin, an end with the input.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import threading
from typing import Any

from tests.network import zone
from tests.network.internet import Say, listen

# Ports: on loopback alone, on the host's own addresses alone, on every address; one for HTTP clients, and one
# that serves one client at a time and waits for each to finish its line.
LOOPBACK, OWN, EVERY, SLOW, UDP, VSOCK = 7001, 7002, 7003, 7005, 7006, 7004
ABSTRACT_STREAM, ABSTRACT_DGRAM = "\0casemate-lab.stream", "\0casemate-lab.dgram"
PATHS = {"stream": "stream.sock", "dgram": "dgram.sock", "docker": "docker.sock"}


def unix(kind: int, name: str) -> socket.socket:
    """A unix socket that everybody may use."""
    made = socket.socket(socket.AF_UNIX, kind)
    made.bind(name)
    if not name.startswith("\0"):
        os.chmod(name, 0o777)
    return made


def vsock() -> socket.socket | None:
    """A listener of the host for virtual machines, where the kernel has a transport for it."""
    try:
        made = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
        made.bind((socket.VMADDR_CID_ANY, VSOCK))
    except OSError:
        return None
    return made


def sockets(directory: str) -> dict[str, socket.socket | None]:
    """Every service by the name that its events carry."""
    made: dict[str, socket.socket | None] = {
        "loopback4": listen(LOOPBACK, address="127.0.0.1"), "loopback6": listen(LOOPBACK, address="::1"),
        "own4": listen(OWN, address=zone.HOST4), "own6": listen(OWN, address=zone.HOST6),
        "every": listen(EVERY), "udp": listen(UDP, socket.SOCK_DGRAM),
        "abstract": unix(socket.SOCK_STREAM, ABSTRACT_STREAM),
        "abstract-dgram": unix(socket.SOCK_DGRAM, ABSTRACT_DGRAM), "vsock": vsock(),
    }  # fmt: skip
    for name, file in PATHS.items():
        kind = socket.SOCK_DGRAM if name == "dgram" else socket.SOCK_STREAM
        made["path-" + name] = unix(kind, os.path.join(directory, file))
    return made


class Services:
    """All of them on one thread: a connection is an event, its data another; the answer is an HTTP answer."""

    def __init__(self, directory: str) -> None:
        self.say = Say()
        self.selector = selectors.DefaultSelector()
        for name, made in sockets(directory).items():
            if made is not None:
                made.setblocking(False)
                if made.type == socket.SOCK_STREAM:
                    made.listen(128)
                self.selector.register(made, selectors.EVENT_READ, name)

    def ready(self, source: socket.socket, name: str) -> None:
        """A listener, or a connection with data."""
        if source.type == socket.SOCK_STREAM and source.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            peer, _ = source.accept()
            peer.setblocking(False)
            self.say("connection", service=name)
            self.selector.register(peer, selectors.EVENT_READ, name)
            return
        data = source.recv(65536)
        if data:
            self.say("bytes", service=name, data=data.decode("latin-1"))
        if source.type == socket.SOCK_STREAM:
            if data:
                body = b"a service of the host: " + name.encode() + b"\n"
                source.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            else:
                self.selector.unregister(source)
                source.close()

    def pump(self, seconds: float | None) -> bool:
        """Handle what is ready; False when the input has ended."""
        for key, _ in self.selector.select(seconds):
            if key.data is None:
                line = sys.stdin.buffer.readline()
                if not line:
                    return False
                while self.selector.select(0) != [] and self._others():
                    pass
                self.say("synced", **json.loads(line))
                continue
            with contextlib.suppress(BlockingIOError):
                try:
                    self.ready(key.fileobj, key.data)  # type: ignore[arg-type]
                except ConnectionError:
                    self.selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
        return True

    def _others(self) -> bool:
        found: list[Any] = [key for key, _ in self.selector.select(0) if key.data is not None]
        for key in found:
            with contextlib.suppress(BlockingIOError):
                try:
                    self.ready(key.fileobj, key.data)
                except ConnectionError:
                    self.selector.unregister(key.fileobj)
                    key.fileobj.close()
        return bool(found)


def one_at_a_time() -> None:
    """The control of floods: a server that one client without a word keeps from all others."""
    listener = listen(SLOW, address="127.0.0.1")
    listener.setblocking(True)
    listener.listen(128)
    while True:
        peer, _ = listener.accept()
        with peer, contextlib.suppress(OSError), peer.makefile("rb") as stream:
            line = stream.readline()
            sys.stdout.flush()
            Say()("bytes", service="slow", data=line.decode("latin-1"))
            peer.sendall(b"served\n")


def main(directory: str) -> None:
    """Serve until the input ends."""
    services = Services(directory)
    threading.Thread(target=one_at_a_time, daemon=True).start()
    services.selector.register(sys.stdin, selectors.EVENT_READ, None)
    services.say("ready")
    while services.pump(None):
        pass


if __name__ == "__main__":
    main(sys.argv[1])
