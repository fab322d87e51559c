"""A host, an internet and sandboxes, made of threads: each has a network of its own, the process does not.

A namespace belongs to a thread, and a socket to the namespace it was made in, wherever it is used. So a test
has them all in one process: the gate's loop runs in the *host* (whose ``/etc/hosts`` has the names below and
whose only cable leads to the *internet*, where every address answers), its clients hold sockets of an
*inside*, which has nothing but the listeners that are under test. Nothing of the machine itself changes, and
all of it ends with the threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import socket
import subprocess
import tempfile
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from casemate.egress.gate import Gate
from casemate.egress.resolver import Resolver
from casemate.policy.model import Network
from casemate.sys import capture, mounts, namespaces
from casemate.sys.addresses import own_addresses
from tests.cli.harness import until
from tests.network import zone

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

T = TypeVar("T")
GATE = capture.GATE
ALLOWED, ALSO, OTHER, GUARDED, BOTH, DEAF = (
    "allowed.example", "also.example", "other.example", "guarded.example", "both.example", "deaf.example",
)  # fmt: skip
# What the host's own hosts file says. The last one's first address answers nobody, its second does.
ADDRESSES = {
    ALLOWED: ("93.184.216.34",), ALSO: ("93.184.216.37",), OTHER: ("93.184.216.35",),
    GUARDED: ("10.1.2.3",), BOTH: ("93.184.216.38", "2606:2800:220:1::38"), DEAF: ("93.184.216.99",),
}  # fmt: skip
HOST4, NEAR4, HOST6, NEAR6 = "93.184.218.10", "93.184.218.1", "2606:2800:220:3::10", "2606:2800:220:3::1"
_SECONDS = 10.0


def hosts_file() -> str:
    """The host's names."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    return "\n".join(lines + [f"{one} {name}" for name, all_ in ADDRESSES.items() for one in all_]) + "\n"


class Place:
    """A thread in new namespaces that does what it is told, one thing after the other."""

    def __init__(self, kinds: int, setup: Callable[[], None]) -> None:
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.tid = 0
        self._kinds = kinds
        self._thread = threading.Thread(target=self._run, name="place", daemon=True)
        self._thread.start()
        self.do(setup)

    def _run(self) -> None:
        self.tid = threading.get_native_id()
        gone = False
        while (order := self._orders.get()) is not None:
            function, answers = order
            try:
                if not gone:
                    namespaces.leave(self._kinds)
                    gone = True
                answers.put((function(), None))
            except BaseException as error:
                answers.put((None, error))

    def do(self, function: Callable[[], T]) -> T:
        """Call it there; returns or raises what it does."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._orders.put((function, answers))
        value, error = answers.get(timeout=_SECONDS)
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def close(self) -> None:
        self._orders.put(None)
        self._thread.join(_SECONDS)


class _Reset(socket.socket):
    """A connection that was reset while it was made: the kernel has forgotten by now that it was one."""

    def recv(self, *_: Any) -> bytes:  # type: ignore[override]
        raise ConnectionResetError(104, "Connection reset by peer")

    def sendall(self, *_: Any) -> None:  # type: ignore[override]
        return None

    def shutdown(self, how: int) -> None:
        return None


class Inside(Place):
    """A sandbox's network: its loopback and the gate's listeners, as they are made for a real one."""

    def __init__(self, ports: Sequence[int] = ()) -> None:
        super().__init__(namespaces.NET, namespaces.loopback_up)
        self.capture = self.do(lambda: capture.make([*ports], root=True))

    def descriptors(self) -> list[int]:
        """The listeners, for a gate: they are its own from here on."""
        return self.capture.give_listeners()

    def socket(self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """A socket inside, that waits for ten seconds at most."""
        made = self.do(lambda: socket.socket(family, kind))
        made.settimeout(_SECONDS)
        return made

    def connect(self, address: str, port: int) -> socket.socket:
        """A connection from inside. Where it was reset before this could return, reading says so."""
        made = self.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            made.connect((address, port))
        except ConnectionResetError:
            made.close()
            return _Reset()
        except BaseException:
            made.close()
            raise
        return made

    def listen(self, port: int, address: str = "127.0.0.1") -> socket.socket:
        """A server inside."""
        made = self.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, port))
        made.listen(64)
        return made

    def made(self) -> int:
        """A socket inside as the porter makes them, for the gate."""
        endpoint = self.socket(socket.AF_INET6)
        endpoint.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        return endpoint.detach()

    def close(self) -> None:
        self.capture.close()
        super().close()


class Server:
    """A listener somewhere whose connections are each served by a thread, and are closed with it."""

    def __init__(self, listener: socket.socket, serve: Callable[[socket.socket], object]) -> None:
        self._listener = listener
        self._serve = serve
        self.connections: list[socket.socket] = []
        self.port: int = listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.settimeout(_SECONDS)
                self.connections.append(connection)
                threading.Thread(target=self._served, args=(connection,), daemon=True).start()

    def _served(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self._serve(connection)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(_SECONDS)
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def echo(connection: socket.socket) -> None:
    """Say what is heard, and end when the other side has ended."""
    while data := connection.recv(65536):
        connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


def silent(_: socket.socket) -> None:
    """Say nothing."""


class Lab:
    """The host with the loop in which gates run, and the internet at the other end of its cable."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.faults: list[str] = []
        self.net = Place(namespaces.NET, lambda: None)
        self._stack.callback(self.net.close)
        self.host = Place(namespaces.NET | namespaces.MOUNT, self._furnish)
        self._stack.callback(self.host.close)
        self._cable()
        self.loop: asyncio.AbstractEventLoop = self.host.do(asyncio.new_event_loop)
        self.loop.set_exception_handler(lambda _, context: self.faults.append(str(context)))
        self._ended = queue.SimpleQueue[Any]()
        self.host._orders.put((self.loop.run_forever, self._ended))
        self._numbers = itertools.count(1)

    def _furnish(self) -> None:
        mounts.make_private()
        # Sandboxes of others that run just now: this copy of their mounts must not hold them.
        with open("/proc/thread-self/mounts") as file:
            for place in [line.split()[1] for line in file if "/casemate/" in line.split()[1]]:
                with contextlib.suppress(OSError):
                    mounts.unmount(place)
        resolver = f"nameserver {zone.RESOLVER}\noptions timeout:1 attempts:1\n"
        for place, text in (("/etc/hosts", hosts_file()), ("/etc/resolv.conf", resolver)):
            with tempfile.NamedTemporaryFile("w", suffix="-etc") as file:
                file.write(text)
                file.flush()
                os.chmod(file.name, 0o644)
                tree = mounts.clone_tree(mounts.AT_FDCWD, file.name)
                mounts.move_mount(tree, mounts.AT_FDCWD, os.path.realpath(place))
                os.close(tree)

    def _cable(self) -> None:
        def ip(place: Place, commands: str) -> None:
            for line in commands.strip().splitlines():
                words = ["ip", *(["-6"] if "::" in line else []), *line.split()]
                place.do(lambda words=words: subprocess.run(words, check=True))  # type: ignore[misc]

        ip(
            self.host,
            f"""
            link set lo up
            link add up0 type veth peer name down0 netns {self.net.tid}
            link set up0 up
            addr add {HOST4}/24 dev up0
            addr add {HOST6}/64 dev up0 nodad
            route add default via {NEAR4}""",
        )
        ip(
            self.net,
            f"""
            link set lo up
            link set down0 up
            addr add {NEAR4}/24 dev down0
            addr add {NEAR6}/64 dev down0 nodad
            route add local 0.0.0.0/0 dev lo table main
            route add local ::/0 dev lo table main""",
        )
        ip(self.host, f"route add default via {NEAR6}")

    # -- in the host's loop -----------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something there."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(_SECONDS * 3)

    def call(self, function: Callable[[], T]) -> T:
        """Call something there."""

        async def work() -> T:
            return function()

        return self.run(work())

    # -- servers ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def server(self, serve: Callable[[socket.socket], object], port: int = 0) -> Iterator[Server]:
        """A server on the internet: at every address of it."""
        how: dict[str, Any] = {"family": socket.AF_INET6, "dualstack_ipv6": True, "backlog": 1024}
        made = Server(self.net.do(lambda: socket.create_server(("::", port), **how)), serve)
        try:
            yield made
        finally:
            made.close()

    @contextlib.contextmanager
    def service(
        self, serve: Callable[[socket.socket], object], address: str = "127.0.0.1"
    ) -> Iterator[Server]:
        """A service of the host's own loopback."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = self.call(lambda: socket.create_server((address, 0), family=family, backlog=1024))
        made = Server(listener, serve)
        try:
            yield made
        finally:
            made.close()

    @contextlib.contextmanager
    def names(self, silent: str = "\0") -> Iterator[list[str]]:
        """The internet's name server, by the lab's zone; gives the names that it was asked for.

        Names that end with ``silent`` get no answer.
        """
        asked: list[str] = []
        answers = zone.Zone()
        endpoint = self.net.do(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        endpoint.bind((zone.RESOLVER, 53))

        def serve() -> None:
            while True:
                data, sender = endpoint.recvfrom(4096)
                if not data:
                    return
                question = zone.Question(data)
                asked.append(question.name)
                reply = answers.reply(question)
                if reply is not None and not question.name.endswith(silent):
                    endpoint.sendto(reply, sender)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield asked
        finally:
            with self.net.do(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as last:
                last.sendto(b"", (zone.RESOLVER, 53))
            thread.join(_SECONDS)
            endpoint.close()

    # -- gates ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def gate(self, *allow: str, inside: Inside | None = None, **fields: Any) -> Iterator[Served]:
        """A gate in this process that serves a new inside by the rules ``allow``."""
        fields.setdefault("mode", "allowlist")
        extra = {name: fields.pop(name) for name in ("approved", "secrets", "placeholders", "authority")
                 if name in fields}  # fmt: skip
        place = inside or Inside()
        served = Served(self, place, Network(allow=allow, **fields), extra)
        try:
            yield served
        finally:
            served.close()
            place.close()

    def close(self) -> None:
        async def rest() -> None:
            mine = asyncio.current_task()
            for task in [one for one in asyncio.all_tasks() if one is not mine]:
                task.cancel()
            await asyncio.get_running_loop().shutdown_default_executor()

        self.run(rest())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._ended.get(timeout=_SECONDS)
        self.host.do(self.loop.close)
        self._stack.close()


class Served:
    """A gate under test, with its client's side."""

    def __init__(self, lab: Lab, inside: Inside, network: Network, extra: dict[str, Any]) -> None:
        self.lab, self.inside = lab, inside
        self.said: list[dict[str, Any]] = []
        self.closed = False
        udp, *tcp = inside.descriptors()
        options = {"secrets": {}, "placeholders": {}, "authority": None, **extra}

        def make() -> Gate:
            self.resolver = Resolver()
            number = next(lab._numbers)
            gate = Gate(number, network, self.resolver, self.said.append, own=own_addresses, **options)
            gate.begin(udp, tcp)
            return gate

        self.gate: Gate = lab.call(make)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The decisions so far."""
        return [message["what"] for message in self.said if message["event"] == "decision"]

    def reasons(self) -> list[str]:
        """Why something was refused, in order."""
        return [event["reason"] for event in self.events if event["verdict"] == "deny"]

    def told(self, **fields: Any) -> dict[str, Any]:
        """The first event with these fields, waited for."""

        def found() -> dict[str, Any] | None:
            return next((e for e in self.events if fields.items() <= e.items()), None)

        value: dict[str, Any] = until(found, 10, f"event {fields} among {self.events}")
        return value

    def message(self, kind: str) -> dict[str, Any]:
        """The first message of a kind for the front end, waited for."""
        value: dict[str, Any] = until(
            lambda: next((m for m in self.said if m["event"] == kind), None), 10, f"message {kind}"
        )
        return value

    def address(self, name: str, family: int = socket.AF_INET) -> str:
        """What DNS inside says of a name, without DNS."""
        found = self.lab.call(lambda: self.gate.names.addresses(name))
        assert found is not None
        return found[family == socket.AF_INET6]

    def connect(self, name: str, port: int, family: int = socket.AF_INET) -> socket.socket:
        """A connection from inside to what stands for a name."""
        return self.inside.connect(self.address(name, family), port)

    def open(self) -> int:
        """How many connections there are."""
        return self.lab.call(lambda: len(self.gate._connections))

    def update(self, *allow: str, **fields: Any) -> None:
        """Another policy."""
        fields.setdefault("mode", "allowlist")
        self.lab.call(lambda: self.gate.update(Network(allow=allow, **fields)))

    def close(self) -> dict[str, int]:
        """End it; nothing of it is left."""
        if self.closed:
            return {}
        self.closed = True

        async def end() -> dict[str, int]:
            totals = self.gate.close()
            await self.gate.ended()
            self.resolver.close()
            return totals

        return self.lab.run(end())


def gone(endpoint: socket.socket) -> str:
    """How a connection ended: ``end`` or ``reset``; what comes before is dropped."""
    try:
        while endpoint.recv(65536):
            pass
    except ConnectionResetError:
        return "reset"
    return "end"


def all_of(endpoint: socket.socket) -> bytes:
    """Everything up to the end."""
    data = b""
    while piece := endpoint.recv(65536):
        data += piece
    return data


def exactly(endpoint: socket.socket, size: int) -> bytes:
    """So many bytes."""
    data = b""
    while len(data) < size and (piece := endpoint.recv(size - len(data))):
        data += piece
    return data


def descriptors() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


async def when(condition: Callable[[], object]) -> None:
    """Wait in a loop until something is so."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to it")
