"""Listeners and a victim process on the host: what an escape would reach. Loopback only."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

VICTIM = """
import ctypes, os, signal, sys, time
secret = ctypes.create_string_buffer(os.read(0, 64))
def note(number, frame):
    os.write(1, b"signal %d\\n" % number)
signal.signal(signal.SIGUSR1, note)
os.write(1, b"ready %d\\n" % ctypes.addressof(secret))
while True:
    signal.pause()
"""


class Listeners:
    """Every kind of socket of the host that a command must not reach, on one thread.

    ``received`` holds the data of every connection and datagram: that is the host's truth.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.received: list[str] = []
        self.accepted = 0
        self._selector = selectors.DefaultSelector()
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self.tcp4 = self._add(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0))[1]
        self.tcp6 = self._add(socket.AF_INET6, socket.SOCK_STREAM, ("::1", 0))[1]
        self.udp4 = self._add(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0))[1]
        self.abstract_stream = f"\0{name}.stream"
        self.abstract_dgram = f"\0{name}.dgram"
        self._add(socket.AF_UNIX, socket.SOCK_STREAM, self.abstract_stream)
        self._add(socket.AF_UNIX, socket.SOCK_DGRAM, self.abstract_dgram)
        self.path_stream = str(directory / "docker.sock")
        self.path_dgram = str(directory / "log.sock")
        self.add_path(self.path_stream, socket.SOCK_STREAM)
        self.add_path(self.path_dgram, socket.SOCK_DGRAM)
        self._thread = threading.Thread(target=self._serve, name="listeners", daemon=True)
        self._thread.start()

    def _add(self, family: int, kind: int, address: object) -> tuple[str, int]:
        sock = socket.socket(family, kind)
        if family != socket.AF_UNIX and kind == socket.SOCK_STREAM:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_FASTOPEN, 16)
        sock.bind(address)  # type: ignore[arg-type]
        sock.setblocking(False)
        if kind == socket.SOCK_STREAM:
            sock.listen(64)
        self._sockets.append(sock)
        self._selector.register(sock, selectors.EVENT_READ, kind == socket.SOCK_STREAM)
        name: object = sock.getsockname()
        return name[:2] if isinstance(name, tuple) else (str(name), 0)

    def add_path(self, path: str, kind: int) -> None:
        """One more socket with a path, open to everybody."""
        self._add(socket.AF_UNIX, kind, path)
        os.chmod(path, 0o777)
        os.write(self._wake_write, b"+")

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    if os.read(self._wake_read, 1) == b"q":
                        return
                    continue
                with contextlib.suppress(OSError):
                    self._receive(key.fileobj, key.data)  # type: ignore[arg-type]

    def _receive(self, sock: socket.socket, stream: bool) -> None:
        if not stream:
            text = sock.recv(4096).decode(errors="replace")
        else:
            peer, _ = sock.accept()
            self.accepted += 1
            with peer:
                peer.settimeout(1)
                text = peer.recv(4096).decode(errors="replace") or "(a connection without data)"
        with self._lock:
            self.received.append(text)

    def got(self, *marks: str, wait: float = 0.0) -> list[str]:
        """Which of the marks arrived, after at most ``wait`` seconds for the last ones."""
        end = time.monotonic() + wait
        while True:
            with self._lock:
                found = [mark for mark in marks if any(mark in text for text in self.received)]
            if len(found) == len(marks) or time.monotonic() >= end:
                return found
            time.sleep(0.01)

    def close(self) -> None:
        os.write(self._wake_write, b"q")
        self._thread.join(5)
        self._selector.close()
        for sock in self._sockets:
            sock.close()
        for number in (self._wake_read, self._wake_write):
            os.close(number)


class Victim:
    """A process of the caller's own uid on the host, with a secret in its memory and its environment."""

    def __init__(self, prefix: list[str], secret: str, name: str) -> None:
        self.secret = secret
        self.process = subprocess.Popen(
            [*prefix, "/usr/bin/python3", "-I", "-S", "-c", VICTIM, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"VICTIM_SECRET": secret},
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(secret.encode().ljust(32, b"."))
        self.process.stdin.close()
        line = self.process.stdout.readline().split()
        if line[:1] != [b"ready"]:
            raise RuntimeError("the victim did not start")
        self.address = int(line[1])
        self.pid = self.process.pid
        os.set_blocking(self.process.stdout.fileno(), False)
        self._signals = b""

    def signals(self) -> int:
        """How many signals were delivered since the last call."""
        assert self.process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            self._signals = os.read(self.process.stdout.fileno(), 65536)
            return self._signals.count(b"signal")
        return 0

    def nice(self) -> int:
        return os.getpriority(os.PRIO_PROCESS, self.pid)

    def restore(self) -> None:
        if self.nice() != 0:
            os.setpriority(os.PRIO_PROCESS, self.pid, 0)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


class Census:
    """Counts processes of the host by their name, over and over, and keeps the largest count."""

    def __init__(self, name: str, interval: float = 0.05) -> None:
        self.name = name[:15].encode() + b"\n"
        self.most = 0
        self._stop = threading.Event()
        self._interval = interval
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Census:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def count(self) -> int:
        found = 0
        for pid in os.listdir("/proc"):
            if pid.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", "rb") as stream:
                    found += stream.read() == self.name
        return found

    def _watch(self) -> None:
        while not self._stop.wait(self._interval):
            self.most = max(self.most, self.count())
