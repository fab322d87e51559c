"""One sandbox's gate: what its connections reach, what they do not, and how each of them ends."""

from __future__ import annotations

import select
import socket
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from casemate.egress import connection as connection_module
from casemate.egress import gate as gate_module
from casemate.egress.certificates import Authority
from tests.cli.harness import until
from tests.unit.egress import wire
from tests.unit.egress.gatelab import (
    ALLOWED,
    BOTH,
    GUARDED,
    HOST4,
    OTHER,
    all_of,
    descriptors,
    echo,
    exactly,
    gone,
    silent,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.egress.gatelab import Lab, Served

HELLO = b"GET / HTTP/1.1\r\nHost: allowed.example\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


def web(served: socket.socket) -> None:
    """Answers requests of HTTP."""
    data = b""
    while piece := served.recv(65536):
        data += piece
        while b"\r\n\r\n" in data:
            _, _, data = data.partition(b"\r\n\r\n")
            served.sendall(ANSWER)


def banner(served: socket.socket) -> None:
    """Speaks first, then says what it hears."""
    served.sendall(b"220 here\r\n")
    echo(served)


def tls(authority: Authority, name: str, curve: str = "") -> Callable[[socket.socket], None]:
    """A TLS server that says what it hears. With a curve that no client guesses it asks for another hello."""
    context = authority.context_for(name)
    if curve:
        context.set_ecdh_curve(curve)

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), context.wrap_socket(connection, server_side=True) as stream:
            stream.settimeout(10)
            while data := stream.recv(65536):
                stream.sendall(data)

    return serve


def say(endpoint: socket.socket, data: bytes = b"hello\n") -> bytes:
    """Say something to an echo, and hear it."""
    endpoint.sendall(data)
    return exactly(endpoint, len(data))


# -- reached and not reached ---------------------------------------------------------------------------


def test_an_allowed_name(lab: Lab) -> None:
    """A connection to an allowed name reaches it, and its event says all about it."""
    with lab.server(echo, 9000), lab.gate(f"{ALLOWED}:9000") as served:
        with served.connect(ALLOWED, 9000) as client:
            assert say(client, b"\0" * 1000) == b"\0" * 1000
        event = served.told(kind="connect", verdict="allow")
        assert {key: event[key] for key in ("host", "port", "address", "protocol", "rule")} == {
            "host": ALLOWED, "port": 9000, "address": "93.184.216.34", "protocol": "tcp",
            "rule": f"{ALLOWED}:9000",
        }  # fmt: skip
        assert (event["sent"], event["received"]) == (1000, 1000)
        assert event["ms"] > 0
        assert event["time-ns"] > 1 << 60
        until(lambda: served.open() == 0)
        totals = served.close()
        assert totals == {"allowed": 1, "refused": 0, "sent": 1000, "received": 1000, "untold": 0}


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_either_family_stands_for_the_name(lab: Lab, family: int) -> None:
    """The name's address of either family leads to the name, whatever family the host itself has."""
    with (
        lab.server(echo, 9000),
        lab.gate(f"{ALLOWED}:9000") as served,
        served.connect(ALLOWED, 9000, family) as client,
    ):
        assert say(client) == b"hello\n"


def test_another_port(lab: Lab) -> None:
    """The port counts, not the name alone."""
    with lab.server(echo, 9001) as server, lab.gate(f"{ALLOWED}:9000") as served:
        with served.connect(ALLOWED, 9001) as client:
            assert gone(client) == "reset"
        event = served.told(verdict="deny")
        assert (event["reason"], event["allow"]) == ("not-listed", f'network.allow = ["{ALLOWED}:9001"]')
        assert server.connections == []


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::34", "8.8.8.8", HOST4])
def test_addresses_that_no_rule_names(lab: Lab, address: str) -> None:
    """An address is not its name: what the name's rule allows the address does not get."""
    with lab.server(echo, 9000) as server, lab.gate(f"{ALLOWED}:9000") as served:
        with served.inside.connect(address, 9000) as client:
            assert gone(client) == "reset"
        assert served.told(verdict="deny")["host"] == address
        assert server.connections == []


def test_an_address_that_a_rule_names(lab: Lab) -> None:
    """The control: an address that is in the policy itself."""
    with lab.server(echo, 9000), lab.gate("93.184.216.0/24:9000") as served:
        with served.inside.connect("93.184.216.77", 9000) as client:
            assert say(client) == b"hello\n"
        assert served.told(verdict="allow")["host"] == "93.184.216.77"


def test_addresses_that_stand_for_nothing(lab: Lab) -> None:
    """An address out of the ranges that was given for no name is none, with any rule."""
    with lab.gate(mode="full") as served:
        for address in ("198.18.1.0", "198.19.200.1", "fd53:656e:7472:79::777"):
            with served.inside.connect(address, 9000) as client:
                assert gone(client) == "reset"
        assert served.reasons() == ["unknown-address"] * 3


@pytest.mark.parametrize(("rule", "reached"), [
    (f"{GUARDED}:9000", False), ("10.1.2.3:9000", True),
    ("10.0.0.0/8:9000", True), ("10.0.0.0/8:9001", False),
])  # fmt: skip
def test_guarded_addresses(lab: Lab, rule: str, reached: bool) -> None:
    """A name that leads to a private address leads nowhere, unless a rule names that address and port."""
    with (
        lab.server(echo, 9000) as server,
        lab.gate(f"{GUARDED}:9000", rule) as served,
        served.connect(GUARDED, 9000) as client,
    ):
        if reached:
            assert say(client) == b"hello\n"
        else:
            assert gone(client) == "reset"
            assert served.told(verdict="deny")["reason"] == "guarded-private"
            assert server.connections == []


def test_the_hosts_own_addresses(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is not reached at its own addresses, also not at one that it got while the sandbox ran."""
    monkeypatch.setattr(gate_module, "_OWN_SECONDS", 0.0)
    service = lab.call(lambda: socket.create_server(("0.0.0.0", 9005)))
    with service, lab.gate("93.184.218.0/24:9005", f"{ALLOWED}:9005", "93.184.216.0/24:9005") as served:
        with served.inside.connect(HOST4, 9005) as client:
            assert gone(client) == "reset"
        assert served.told(verdict="deny")["reason"] == "guarded-own"
        # The control: the same address as a foreign one.
        with lab.server(echo, 9005):
            with served.connect(ALLOWED, 9005) as client:
                assert say(client) == b"hello\n"
            add = ["ip", "addr", "add", "93.184.216.34/32", "dev", "up0"]
            lab.call(lambda: subprocess.run(add, check=True))
            try:
                with served.connect(ALLOWED, 9005) as client:
                    assert gone(client) == "reset"
                assert served.told(verdict="deny", host=ALLOWED)["reason"] == "guarded-own"
            finally:
                lab.call(lambda: subprocess.run([*add[:2], "del", *add[3:]], check=True))


def test_services_of_the_host(lab: Lab) -> None:
    """A service of the host's loopback that a rule names with its port is reached; another one is not."""
    name = "host.casemate.internal"
    with lab.service(echo) as named, lab.service(echo) as other, lab.gate(f"{name}:{named.port}") as served:
        with served.connect(name, named.port) as client:
            assert say(client) == b"hello\n"
        assert served.told(verdict="allow")["address"] == "127.0.0.1"
        with served.connect(name, other.port) as client:
            assert gone(client) == "reset"
        assert other.connections == []


def test_a_service_on_the_other_loopback(lab: Lab) -> None:
    """A service that listens on ::1 alone is found as well."""
    name = "host.casemate.internal"
    with (
        lab.service(echo, "::1") as named,
        lab.gate(f"{name}:{named.port}") as served,
        served.connect(name, named.port) as client,
    ):
        assert say(client) == b"hello\n"


def test_the_next_address(lab: Lab) -> None:
    """Where the first address does not answer the next one is tried."""
    listener = lab.net.do(lambda: socket.create_server(("::", 9010), family=socket.AF_INET6))
    with listener, lab.gate(f"{BOTH}:9010") as served, served.connect(BOTH, 9010) as client:
        client.sendall(b"hello\n")
        accepted, _ = listener.accept()
        with accepted:
            assert exactly(accepted, 6) == b"hello\n"


def test_nobody_there(lab: Lab) -> None:
    """Where nobody answers the client learns it, and so does whoever reads the events."""
    with lab.gate(f"{ALLOWED}:9020", f"{ALLOWED}:80") as served:
        with served.connect(ALLOWED, 9020) as client:
            assert gone(client) == "reset"
        assert served.told(verdict="deny")["reason"] == "unreachable"
        with served.connect(ALLOWED, 80) as client:
            client.sendall(HELLO)
            assert b" 403 " in all_of(client).split(b"\r\n")[0] + b" "


def test_no_such_name(lab: Lab) -> None:
    """A name that the host cannot resolve."""
    with lab.names(), lab.gate("no.such.name.invalid:9000") as served:
        with served.connect("no.such.name.invalid", 9000) as client:
            assert gone(client) == "reset"
        assert served.told(verdict="deny")["reason"] == "unresolvable"


def in_small_pieces(end: socket.socket) -> None:
    """Answers three bytes, which come one by one, by three writes."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while exactly(end, 3):
        say_slowly(end)


def say_slowly(end: socket.socket) -> None:
    for piece in (b"a", b"b", b"c"):
        end.sendall(piece)
        select.select([], [], [], 0.0005)


def test_small_pieces_wait_for_nothing(lab: Lab) -> None:
    """What is written in small pieces is not held back until the one before is acknowledged (40 ms each)."""
    with (
        lab.server(in_small_pieces, 9000),
        lab.gate(f"tcp://{ALLOWED}:9000") as served,
        served.connect(ALLOWED, 9000) as client,
    ):
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.monotonic()
        for _ in range(40):
            say_slowly(client)
            assert exactly(client, 3) == b"abc"
        assert time.monotonic() - began < 1.2


# -- bounds --------------------------------------------------------------------------------------------


def test_too_many_connections(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound a connection is reset; those that stand go on, and the place of one is given again."""
    monkeypatch.setattr(gate_module, "MOST_CONNECTIONS", 10)
    with lab.server(echo, 9000), lab.gate(f"{ALLOWED}:9000") as served:
        clients = [served.connect(ALLOWED, 9000) for _ in range(10)]
        assert all(say(client) == b"hello\n" for client in clients)
        with pytest.raises(ConnectionResetError), served.connect(ALLOWED, 9000) as client:
            client.recv(1)
        assert served.told(verdict="deny")["reason"] == "too-many-connections"
        assert say(clients[0]) == b"hello\n"
        clients.pop().close()
        until(lambda: served.open() == 9)
        with served.connect(ALLOWED, 9000) as client:
            assert say(client) == b"hello\n"
        for client in clients:
            client.close()


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01", b"GE", b"\r\n\r\n"])
def test_slow_beginners(lab: Lab, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    """A client that does not say what it wants is let go after its time, also if it has begun to."""
    monkeypatch.setattr(connection_module, "HELLO_SECONDS", 0.2)
    with lab.server(silent, 443), lab.gate(ALLOWED) as served, served.connect(ALLOWED, 443) as client:
        client.sendall(said)
        assert gone(client) in ("end", "reset")
        until(lambda: served.open() == 0)


def test_nothing_is_left(lab: Lab) -> None:
    """Two hundred connections that end in every way leave no descriptor and no task."""
    authority = Authority([ALLOWED])
    with lab.server(echo, 9000), lab.server(web, 80), lab.server(tls(authority, ALLOWED), 443):
        with lab.gate(ALLOWED, f"{ALLOWED}:9000", f"{GUARDED}:9000", f"{ALLOWED}:9999") as served:
            ends: list[Callable[[Served], None]] = [
                _plain,
                _reset,
                _refused,
                _http,
                _cut_hello,
                _guarded,
                _nobody,
            ]
            for end in ends:
                end(served)
            until(lambda: served.open() == 0)
            before = descriptors()
            for _ in range(30):
                for end in ends:
                    end(served)
            until(lambda: served.open() == 0)
            # The servers of this test keep theirs: one for each connection that reached them.
            until(lambda: descriptors() - before <= 5 * 30 + 3, 5, "descriptors are closed")
        assert lab.faults == []


def _plain(served: Served) -> None:
    with served.connect(ALLOWED, 9000) as client:
        assert say(client) == b"hello\n"


def _reset(served: Served) -> None:
    with served.connect(ALLOWED, 9000) as client:
        client.sendall(b"hello")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def _refused(served: Served) -> None:
    with served.connect(OTHER, 9000) as client:
        client.sendall(b"\0\n")
        gone(client)


def _http(served: Served) -> None:
    with served.connect(ALLOWED, 80) as client:
        client.sendall(HELLO)
        assert exactly(client, len(ANSWER)).endswith(b"hello")


def _cut_hello(served: Served) -> None:
    with served.connect(ALLOWED, 443) as client:
        client.sendall(wire.hello(wire.sni(ALLOWED))[:50])


def _guarded(served: Served) -> None:
    with served.connect(GUARDED, 9000) as client:
        client.sendall(b"\0\n")
        gone(client)


def _nobody(served: Served) -> None:
    with served.connect(ALLOWED, 9999) as client:
        client.sendall(b"\0\n")
        gone(client)


def test_the_end(lab: Lab) -> None:
    """When the gate ends every connection is cut, in whatever state it is, and so is the next one."""
    with (
        lab.server(echo, 9000) as server,
        lab.server(web, 80),
        lab.gate(ALLOWED, f"{ALLOWED}:9000", ask=True) as served,
    ):
        relayed, flowing, asked = (
            served.connect(ALLOWED, 9000),
            served.connect(ALLOWED, 80),
            served.connect(OTHER, 9000),
        )
        silent_ = served.connect(ALLOWED, 443)
        with relayed, flowing, asked, silent_:
            assert say(relayed) == b"hello\n"
            flowing.sendall(HELLO)
            exactly(flowing, len(ANSWER))
            asked.sendall(b"words\n")
            served.message("question")
            until(lambda: served.open() == 4)
            served.close()
            for client in (relayed, flowing, asked, silent_):
                assert gone(client) in ("end", "reset")
        until(lambda: all(gone(connection) for connection in server.connections))
        with pytest.raises(ConnectionRefusedError):
            served.inside.connect("198.18.1.0", 9000)
