"""DNS inside a sandbox, over UDP and TCP, asked from inside."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

import pytest

from casemate.egress.names import MOST_NAMES
from tests.cli.harness import until
from tests.unit.egress import wire
from tests.unit.egress.gatelab import ALLOWED, GATE, OTHER, exactly, gone

if TYPE_CHECKING:
    from tests.unit.egress.gatelab import Lab, Served

A, PTR, MX, TXT, AAAA, SRV, SVCB, HTTPS, ANY = 1, 12, 15, 16, 28, 33, 64, 65, 255
NOERROR, SERVFAIL, NXDOMAIN, REFUSED = 0, 2, 3, 5


class Answer:
    """What came back."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.id, self.flags, _, count, self.authority, self.additional = struct.unpack_from("!6H", data)
        self.code = self.flags & 15
        self.records: list[tuple[int, bytes]] = []
        at = 12
        while data[at]:
            at += data[at] + 1
        at += 5
        for _ in range(count):
            at += 2 if data[at] >= 0xC0 else data.index(0, at) + 1 - at
            kind, _, _, size = struct.unpack_from("!HHIH", data, at)
            self.records.append((kind, data[at + 10 : at + 10 + size]))
            at += 10 + size

    def addresses(self) -> list[str]:
        return [socket.inet_ntop(socket.AF_INET if kind == A else socket.AF_INET6, data)
                for kind, data in self.records]  # fmt: skip


def ask(served: Served, name: str, kind: int = A, server: str = GATE, **fields: object) -> Answer:
    """A query over UDP from inside."""
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    with served.inside.socket(family, socket.SOCK_DGRAM) as endpoint:
        endpoint.connect((server, 53))
        endpoint.send(wire.query(wire.name(name), kind, **fields))  # type: ignore[arg-type]
        return Answer(endpoint.recv(4096))


def ask_stream(served: Served, *messages: bytes) -> list[Answer]:
    """Queries over TCP from inside, in one go."""
    with served.inside.connect(GATE, 53) as endpoint:
        endpoint.sendall(b"".join(len(m).to_bytes(2, "big") + m for m in messages))
        return [Answer(exactly(endpoint, int.from_bytes(exactly(endpoint, 2), "big"))) for _ in messages]


def test_an_allowed_name(lab: Lab) -> None:
    """An allowed name has an address of either family, the same each time; control: another has none."""
    with lab.gate(ALLOWED) as served:
        first = ask(served, ALLOWED)
        assert (first.id, first.code) == (wire.ID, NOERROR)
        assert first.addresses() == ["198.18.1.0"]
        assert ask(served, ALLOWED, AAAA).addresses() == ["fd53:656e:7472:79::100"]
        assert ask(served, ALLOWED.upper() + ".").addresses() == ["198.18.1.0"]
        refused = ask(served, OTHER)
        assert (refused.code, refused.records) == (NXDOMAIN, [])
        event = served.told(kind="dns", verdict="deny")
        assert (event["host"], event["reason"]) == (OTHER, "not-listed")
        told = [event for event in served.events if event["kind"] == "dns" and event["verdict"] == "allow"]
        assert [(event["host"], event["rule"]) for event in told] == [(ALLOWED, ALLOWED)]  # once
        assert event["allow"] == f'network.allow = ["{OTHER}"]'


@pytest.mark.parametrize(
    "server", [GATE, "8.8.8.8", "192.0.2.1", "2001:4860:4860::8888", "fd53:656e:7472:79::1"]
)
def test_whatever_server_is_asked(lab: Lab, server: str) -> None:
    """Whichever name server a program asks, the gate answers, from the address that was asked."""
    with lab.gate(ALLOWED) as served:
        assert ask(served, ALLOWED, server=server).addresses() == ["198.18.1.0"]


@pytest.mark.parametrize("server", ["127.0.0.1", "127.0.0.53"])
def test_loopback_stays_inside(lab: Lab, server: str) -> None:
    """Nobody is answered on the sandbox's loopback, where a server of its own may be."""
    with lab.gate(ALLOWED) as served, served.inside.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
        endpoint.connect((server, 53))
        endpoint.send(wire.query(wire.name(ALLOWED)))
        assert ask(served, ALLOWED).code == NOERROR  # by then that other one has been read, too
        endpoint.setblocking(False)
        with pytest.raises(BlockingIOError):
            endpoint.recv(4096)


@pytest.mark.parametrize("kind", [MX, TXT, SRV, SVCB, HTTPS])
def test_no_way_around_the_names(lab: Lab, kind: int) -> None:
    """Records that lead elsewhere, or to keys for an encrypted hello, have no data: the name is there."""
    with lab.gate(ALLOWED) as served:
        answer = ask(served, ALLOWED, kind)
        assert (answer.code, answer.records, answer.authority) == (NOERROR, [], 1)
        assert ask(served, OTHER, kind).code == NXDOMAIN


def test_pointers(lab: Lab) -> None:
    """The address of a name leads back to it; others lead nowhere, and nothing is asked outside."""
    with lab.gate(ALLOWED) as served, lab.names() as asked:
        ask(served, ALLOWED)
        for text in (
            "0.1.18.198.in-addr.arpa",
            "0.0.1.0." + "0." * 12 + "9.7.0.0.2.7.4.7.e.6.5.6.3.5.d.f.ip6.arpa",
        ):
            answer = ask(served, text, PTR)
            assert answer.code == NOERROR, text
            assert b"allowed" in answer.records[0][1]
        for text in ("1.1.18.198.in-addr.arpa", "8.8.8.8.in-addr.arpa", "x.in-addr.arpa", "1.ip6.arpa"):
            assert ask(served, text, PTR).code == NXDOMAIN, text
        until(lambda: not served.resolver._asking)
        assert asked == []


def test_a_refusal_explains_itself(lab: Lab) -> None:
    """A resolver that speaks EDNS is told why; one that does not gets the plain answer."""
    with lab.gate(ALLOWED) as served:
        assert b"is not allowed here" in ask(served, OTHER, extra=wire.opt()).data
        assert b"is not allowed here" not in ask(served, OTHER).data


def test_other_classes_and_rubbish(lab: Lab) -> None:
    """A class but IN is refused, rubbish gets no answer, and the next query does."""
    with lab.gate(ALLOWED) as served, served.inside.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
        assert ask(served, ALLOWED, qclass=3).code == REFUSED
        endpoint.connect((GATE, 53))
        for rubbish in (b"", b"x", bytes(12), b"\xff" * 500, bytes(60_000)):
            endpoint.send(rubbish)
        endpoint.send(wire.query(wire.name(ALLOWED)))
        assert Answer(endpoint.recv(4096)).addresses() == ["198.18.1.0"]


def test_streams(lab: Lab) -> None:
    """The same over TCP, several in a row on one connection."""
    with lab.gate(ALLOWED) as served:
        queries = [
            wire.query(wire.name(name), kind) for name, kind in ((ALLOWED, A), (OTHER, A), (ALLOWED, AAAA))
        ]
        answers = ask_stream(served, *queries)
        assert [answer.code for answer in answers] == [NOERROR, NXDOMAIN, NOERROR]
        assert answers[2].addresses() == ["fd53:656e:7472:79::100"]
        until(lambda: served.open() == 0)


def test_a_stream_of_rubbish_ends(lab: Lab) -> None:
    """A stream that is none of DNS ends, and one in small pieces works."""
    with lab.gate(ALLOWED) as served:
        with served.inside.connect(GATE, 53) as endpoint:
            endpoint.sendall(b"GET / HTTP/1.1\r\n\r\n" * 4000)
            assert gone(endpoint) == "reset"
        with served.inside.connect(GATE, 53) as endpoint:
            message = wire.query(wire.name(ALLOWED))
            for byte in len(message).to_bytes(2, "big") + message:
                endpoint.sendall(bytes([byte]))
            assert Answer(exactly(endpoint, int.from_bytes(exactly(endpoint, 2), "big"))).code == NOERROR
        until(lambda: served.open() == 0)


def test_names_are_asked_for_ahead_only_if_allowed(lab: Lab) -> None:
    """What is allowed is looked up outside when it is asked for inside; of what is not, nothing leaves."""
    with (
        lab.gate("*.allowed.example", "*.to.example", deny=("bad.allowed.example",)) as served,
        lab.names() as asked,
    ):
        ask(served, "secret-data.evil.example")
        ask(served, "bad.allowed.example")
        ask(served, "allowed.example")
        assert ask(served, "www.allowed.example").code == NOERROR
        until(lambda: "www.allowed.example" in asked)
        until(lambda: not served.resolver._asking)
        assert set(asked) == {"www.allowed.example"}


def test_too_many_names(lab: Lab) -> None:
    """Behind the bound a new name is no answer (and no lie): those that were given go on."""
    with lab.gate("*.allowed.example") as served:
        served.lab.call(
            lambda: [served.gate.names.addresses(f"n{n}.allowed.example") for n in range(MOST_NAMES)]
        )
        assert ask(served, "new.allowed.example").code == SERVFAIL
        assert served.told(kind="dns")["reason"] == "too-many-names"
        assert ask(served, "n7.allowed.example").addresses() == ["198.18.1.7"]


def test_policy_changes(lab: Lab) -> None:
    """DNS goes by the policy of the moment."""
    with lab.gate(ALLOWED) as served:
        assert ask(served, OTHER).code == NXDOMAIN
        served.update(OTHER)
        assert ask(served, OTHER).addresses() == ["198.18.1.0"]
        assert ask(served, ALLOWED).code == NXDOMAIN


def test_closed(lab: Lab) -> None:
    """When the gate has ended nobody answers."""
    with lab.gate(ALLOWED) as served:
        assert ask(served, ALLOWED).code == NOERROR
        served.close()
        with served.inside.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
            endpoint.connect((GATE, 53))
            endpoint.send(wire.query(wire.name(ALLOWED)))
            with pytest.raises(ConnectionRefusedError):
                endpoint.recv(4096)
