"""From the host into a sandbox: a listener outside, a server inside, and what lies between."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from casemate.egress import inbound as inbound_module
from casemate.egress.inbound import Inbound
from tests.cli.harness import until
from tests.unit.egress.gatelab import Inside, Server, all_of, descriptors, echo, exactly, gone, silent
from tests.unit.egress.test_gate import in_small_pieces, say_slowly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.unit.egress.gatelab import Lab


class Published:
    """A port of the lab host's loopback that leads to port 7000 inside. ``made`` counts the sockets."""

    def __init__(self, lab: Lab, place: Inside, make: Callable[[int], int] | None = None) -> None:
        self.lab, self.place = lab, place
        self.asked: list[int] = []
        self.told: list[dict[str, object]] = []
        self.make = make if make is not None else (lambda _: place.made())
        listener = lab.call(lambda: socket.create_server(("127.0.0.1", 0)))
        self.port: int = listener.getsockname()[1]

        def start() -> Inbound:
            made = Inbound(self._ask, self.told.append)
            made.publish(1, listener, 7000)
            return made

        self.inbound = lab.call(start)

    def _ask(self, number: int) -> None:
        self.asked.append(number)

        def answer() -> None:
            descriptor = self.make(number)
            if descriptor != -2:
                self.lab.call(lambda: self.inbound.made(number, descriptor))

        threading.Thread(target=answer, daemon=True).start()

    def connect(self) -> socket.socket:
        return self.lab.call(lambda: socket.create_connection(("127.0.0.1", self.port), 10))

    def tasks(self) -> int:
        return len(self.inbound._tasks)


@contextmanager
def published(lab: Lab, make: Callable[[int], int] | None = None) -> Iterator[Published]:
    """One, and its sandbox."""
    place = Inside()
    made = Published(lab, place, make)
    try:
        yield made
    finally:
        lab.call(made.inbound.close)
        until(lambda: made.tasks() == 0)
        place.close()


@contextmanager
def server(
    place: Inside, serve: Callable[[socket.socket], object], address: str = "127.0.0.1"
) -> Iterator[Server]:
    """A server inside."""
    made = Server(place.listen(7000, address), serve)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_a_server_inside(lab: Lab, address: str) -> None:
    """A server is reached on whichever loopback it listens, and both ends of the talk come through."""
    with published(lab) as made, server(made.place, echo, address), made.connect() as client:
        client.sendall(b"x" * 300_000)
        client.shutdown(socket.SHUT_WR)
        assert all_of(client) == b"x" * 300_000
        until(lambda: made.told)
        (event,) = made.told
        assert (event["kind"], event["verdict"], event["port"], event["rule"]) == (
            "inbound", "allow", 7000, "publish",
        )  # fmt: skip
        assert (event["sent"], event["received"]) == (300_000, 300_000)


def test_nobody_listens(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody listens inside the connection ends, after a moment in which somebody may begin to."""
    monkeypatch.setattr(inbound_module, "_PATIENCE", 0.2)
    with published(lab) as made, made.connect() as client:
        assert gone(client) in ("end", "reset")
        until(lambda: made.tasks() == 0)
        assert [(event["reason"], event["detail"]) for event in made.told] == [
            ("unreachable", "nothing listens inside")
        ]


def test_the_end_is_told(lab: Lab) -> None:
    """A connection that stands when all ends is an event, and so is one that has not come about."""
    with published(lab) as made, made.connect() as waiting:
        assert waiting
        until(made.tasks)
        lab.call(made.inbound.close)
        until(lambda: made.tasks() == 0)
        assert [(event["reason"], event["detail"]) for event in made.told] == [
            ("unreachable", "the command has ended")
        ]


def test_a_server_that_is_just_starting(lab: Lab) -> None:
    """Who comes first waits for the server."""
    with published(lab) as made, made.connect() as client:
        client.sendall(b"early\n")
        until(lambda: len(made.asked) > 2)
        with server(made.place, echo):
            assert exactly(client, 6) == b"early\n"


def test_the_sandbox_only(lab: Lab) -> None:
    """What is reached is the sandbox's loopback, not the host's: a service there on the same port is not."""
    with published(lab) as made:
        outside = Server(lab.call(lambda: socket.create_server(("127.0.0.1", 7000))), silent)
        try:
            with server(made.place, echo), made.connect() as client:
                client.sendall(b"hello\n")
                assert exactly(client, 6) == b"hello\n"
            assert outside.connections == []
        finally:
            outside.close()


def test_no_socket(lab: Lab) -> None:
    """Where no socket can be made inside the connection ends, and the next one may get one."""
    good: list[bool] = []
    with published(lab, lambda _: made.place.made() if good else -1) as made, server(made.place, echo):
        with made.connect() as client:
            assert gone(client) in ("end", "reset")
        good.append(True)
        with made.connect() as client:
            client.sendall(b"hello\n")
            assert exactly(client, 6) == b"hello\n"


def test_a_socket_that_comes_too_late(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that nobody waits for any more is closed."""
    monkeypatch.setattr(inbound_module, "_SECONDS", 0.1)
    with published(lab, lambda _: -2) as made:
        with made.connect() as client:
            assert gone(client) in ("end", "reset")
        before = descriptors()
        late = made.place.made()
        lab.call(lambda: made.inbound.made(made.asked[-1], late))
        lab.call(lambda: made.inbound.made(999, -1))
        assert descriptors() == before
        with pytest.raises(OSError, match=r"Bad file"):
            os.fstat(late)


def test_small_pieces_wait_for_nothing(lab: Lab) -> None:
    """What is written in small pieces is not held back on its way, in either direction."""
    with published(lab) as made, server(made.place, in_small_pieces), made.connect() as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.monotonic()
        for _ in range(40):
            say_slowly(client)
            assert exactly(client, 3) == b"abc"
        assert time.monotonic() - began < 1.2


@pytest.mark.parametrize("who", ["client", "server"])
def test_who_goes_in_the_middle(lab: Lab, who: str) -> None:
    """Either side may break off, and the other learns of it."""
    with published(lab) as made, server(made.place, silent) as inside:
        client = made.connect()
        client.sendall(b"hello\n")
        until(lambda: inside.connections)
        other = inside.connections[0]
        one, rest = (client, other) if who == "client" else (other, client)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        one.close()
        assert gone(rest) == "reset"
        rest.close()
        until(lambda: made.tasks() == 0)


def test_many_at_once(lab: Lab) -> None:
    """Two hundred connections at a time come through unmixed; those beyond the bound are ended."""
    with published(lab) as made, server(made.place, echo):
        clients = [made.connect() for _ in range(200)]
        for number, client in enumerate(clients):
            client.sendall(b"%08d\n" % number)
        for number, client in enumerate(clients):
            assert exactly(client, 9) == b"%08d\n" % number
        more = [made.connect() for _ in range(100)]
        ended = [client for client in more if not _answered(client)]
        assert len(ended) == 200 + 100 - inbound_module._AT_ONCE
        assert [event["reason"] for event in made.told] == ["too-many-connections"] * len(ended)
        for client in (*clients, *more):
            client.close()
        until(lambda: made.tasks() == 0)


def _answered(client: socket.socket) -> bool:
    try:
        client.sendall(b"hello\n")
        return exactly(client, 6) == b"hello\n"
    except OSError:
        return False


def test_unpublished(lab: Lab) -> None:
    """A port that is taken back takes no more connections; those that are there go on."""
    with published(lab) as made, server(made.place, echo), made.connect() as client:
        client.sendall(b"hello\n")
        assert exactly(client, 6) == b"hello\n"
        lab.call(lambda: made.inbound.unpublish(1))
        lab.call(lambda: made.inbound.unpublish(1))
        with pytest.raises(ConnectionRefusedError):
            made.connect()
        client.sendall(b"again\n")
        assert exactly(client, 6) == b"again\n"


def test_the_end(lab: Lab) -> None:
    """The end cuts connections in every state, and leaves no descriptor."""
    before = descriptors()
    with published(lab) as made, server(made.place, echo):
        client, waiting = made.connect(), made.connect()
        client.sendall(b"hello\n")
        assert exactly(client, 6) == b"hello\n"
        lab.call(made.inbound.close)
        for end in (client, waiting):
            assert gone(end) in ("end", "reset")
            end.close()
    until(lambda: descriptors() <= before)
