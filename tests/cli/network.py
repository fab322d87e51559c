"""Services of the machine's own loopback, and what the tests of the network ask of processes."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cli.harness import until

if TYPE_CHECKING:
    from tests.cli.harness import Caller, Ended

HOST = "host.casemate.internal"
CURL = ("curl", "-fsS", "--max-time", "20")


class Service:
    """A server of the machine's loopback: pages over HTTP, and echoes of everything else."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self.listener.getsockname()[1]
        self.heads: list[bytes] = []
        self.lost = 0
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def rule(self) -> str:
        return f"{HOST}:{self.port}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = self.listener.accept()
                end.settimeout(30)
                self._connections.append(end)
                threading.Thread(target=self._serve, args=(end,), daemon=True).start()

    def _serve(self, end: socket.socket) -> None:
        try:
            data = end.recv(65536)
            if b" HTTP/1." in data:
                self.heads.append(data)
                end.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nhello\n")
                return
            while data:
                end.sendall(data)
                data = end.recv(65536)
            end.shutdown(socket.SHUT_WR)
        except OSError:
            self.lost += 1

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for end in self._connections:
            end.close()


def network(ended: Ended) -> dict[str, Any]:
    """What the result says of the network."""
    found: dict[str, Any] = ended.json["network"]
    return found


def fetch(caller: Caller, ws: Path, service: Service, *flags: str, **more: Any) -> Ended:
    """A page of the service, fetched inside."""
    return caller.run(ws, *CURL, f"http://{service.rule}/", flags=flags, **more)


def ticks(pid: int) -> int:
    """Hundredths of a second that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def children(pid: int) -> list[int]:
    """A process's own; none where it has just ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]
    return []


def cmdline(pid: int) -> bytes:
    """Its words; none where it has just ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def relatives(pid: int) -> list[int]:
    """A process and everything below it."""
    return [pid, *(one for child in children(pid) for one in relatives(child))]


def worker_of(pid: int) -> int:
    """The gate's worker below a process; waited for."""

    def found() -> int:
        for one in relatives(pid):
            if b"casemate.egress.worker" in cmdline(one):
                return one
        return 0

    return int(until(found, 10, "a worker"))


def free() -> int:
    """A port that nobody has just now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def ask(port: int, data: bytes, address: str = "127.0.0.1") -> bytes:
    """What a server answers."""
    with socket.create_connection((address, port), 10) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        found = b""
        while piece := client.recv(100):
            found += piece
        return found
