"""Every connection of a network arrives at the gate's listeners: as root, as a user, without nftables."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from typing import TYPE_CHECKING

import pytest

from casemate.sys import capture
from casemate.sys.capture import GATE, GATE_V6, Capture, connected_to
from tests.cli.harness import until
from tests.unit.sys.netns import NFTABLES, Network, network

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.root]

PORTS = (5432, 3306)
HOW = {
    "sk_lookup": {"uid": 0},
    "nftables": {"uid": 1000},
    "listed ports": {"uid": 1000, "hide": True, "ports": PORTS},
}
EVERYWHERE = (
    "1.2.3.4",
    "198.18.1.0",
    "10.0.0.1",
    "255.1.2.3",
    "2001:db8::1",
    "fd53:656e:7472:79::100",
)


@pytest.fixture(scope="module", params=HOW)
def place(request: pytest.FixtureRequest) -> Iterator[Network]:
    """A network with the listeners that whoever makes it gets."""
    if request.param == "nftables":
        ctypes.CDLL(NFTABLES)  # a machine without it fails here, and does not test less
    with network(**HOW[request.param]) as made:  # type: ignore[arg-type]
        assert made.capture.mechanism == request.param
        yield made


@pytest.fixture(scope="module", params=["sk_lookup", "nftables"])
def every_port(request: pytest.FixtureRequest) -> Iterator[Network]:
    """One that gets every port."""
    with network(**HOW[request.param]) as made:  # type: ignore[arg-type]
        yield made


def accept(place: Network, seconds: float = 5) -> tuple[str, int]:
    """Take the next connection, and say what it was made to."""
    listeners = [socket.socket(fileno=os.dup(number)) for number in place.capture.tcp]
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            for listener in listeners:
                try:
                    endpoint, _ = listener.accept()
                except BlockingIOError:
                    continue
                with endpoint:
                    return connected_to(endpoint)
            time.sleep(0.002)
    finally:
        for listener in listeners:
            listener.close()
    raise AssertionError("nobody came")


def nobody(place: Network) -> None:
    """No connection waits."""
    with pytest.raises(AssertionError):
        accept(place, 0.05)


@pytest.mark.parametrize("address", EVERYWHERE)
@pytest.mark.parametrize("port", [22, 80, 443])
def test_usual_ports(place: Network, address: str, port: int) -> None:
    """The usual ports of any address arrive, whoever made the network, as what was asked for."""
    with place.connect(address, port):
        assert accept(place) == (address, port)


@pytest.mark.parametrize("address", EVERYWHERE)
@pytest.mark.parametrize("port", [1, 25, 1023, 8080, 31337, 65535])
def test_every_port(every_port: Network, address: str, port: int) -> None:
    """Any port of any address arrives where the mechanism has them all."""
    with every_port.connect(address, port):
        assert accept(every_port) == (address, port)


def test_listed_ports() -> None:
    """Without nftables the ports that rules name arrive beside the usual ones, and others fail at once."""
    with network(**HOW["listed ports"]) as place:  # type: ignore[arg-type]
        for port in (*PORTS, 53, 80):
            with place.connect("1.2.3.4", port):
                assert accept(place) == ("1.2.3.4", port)
        with place.connect(GATE, 3128):
            assert accept(place) == (GATE, 3128)
        for address, port in (("1.2.3.4", 8080), ("2001:db8::1", 5433), ("1.2.3.4", 3128)):
            began = time.monotonic()
            with pytest.raises(ConnectionRefusedError):
                place.connect(address, port)
            assert time.monotonic() - began < 1
        nobody(place)


@pytest.mark.parametrize("address", [GATE, GATE_V6])
def test_the_gates_own_address(every_port: Network, address: str) -> None:
    """The gate is there on every port of its own address."""
    for port in (53, 3128, 40000):
        with every_port.connect(address, port):
            assert accept(every_port) == (address, port)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_loopback_stays_inside(place: Network, address: str) -> None:
    """A server inside is reached on loopback, and where there is none the connection is refused."""
    with pytest.raises(ConnectionRefusedError):
        place.connect(address, 8080)
    bind = address if address == "::1" else "127.0.0.1" if address != "127.9.9.9" else address
    with place.listen(bind, 8080) as server, place.connect(address, 8080):
        server.accept()[0].close()
    nobody(place)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "198.18.1.0", "::ffff:1.2.3.4"])
def test_a_server_inside_takes_nothing_of_the_gates(every_port: Network, address: str) -> None:
    """A server inside, wherever it listens, gets what comes over loopback and nothing of the rest."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with every_port.socket(family) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            server.setsockopt(socket.IPPROTO_IPV6, 78, 1)  # IPV6_FREEBIND
        server.bind((address, 8081))
        server.listen(8)
        server.setblocking(False)
        for target in ("198.18.1.0", "1.2.3.4"):
            with every_port.connect(target, 8081):
                assert accept(every_port) == (target, 8081)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_server_on_the_gates_own_port(every_port: Network) -> None:
    """Nobody inside can put a listener of its own in the place of the gate's."""
    for address in ("0.0.0.0", GATE):
        with every_port.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            try:
                server.bind((address, 1))
                server.listen(8)
            except OSError:
                pass
            with every_port.connect("1.2.3.4", 443):
                assert accept(every_port) == ("1.2.3.4", 443)


@pytest.mark.parametrize("address", ["1.2.3.4", GATE, "2001:db8::1", GATE_V6])
def test_dns(place: Network, address: str) -> None:
    """A query to any address arrives with the address that was asked, and the answer comes back from it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with (
        socket.socket(fileno=os.dup(place.capture.udp)) as listener,
        place.socket(family, socket.SOCK_DGRAM) as client,
    ):
        client.connect((address, 53))
        client.send(b"query")
        data, ancillary, _, sender = until(lambda: _received(listener))
        assert data == b"query"
        packed = next(d for level, kind, d in ancillary if (level, kind) == (socket.IPPROTO_IPV6, 50))
        text = socket.inet_ntop(socket.AF_INET6, packed[:16]).removeprefix("::ffff:")
        assert text == address
        listener.sendmsg([b"answer"], [(socket.IPPROTO_IPV6, 50, packed)], 0, sender)
        assert client.recv(100) == b"answer"


def _received(listener: socket.socket) -> object:
    try:
        return listener.recvmsg(512, 64)
    except BlockingIOError:
        return None


@pytest.mark.parametrize("address", ["1.2.3.4", "2001:db8::1", "198.18.1.0"])
@pytest.mark.parametrize("port", [443, 123, 54])
def test_other_datagrams_fail_at_once(place: Network, address: str, port: int) -> None:
    """QUIC and the like are refused in a moment, so that a program takes TCP instead."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with place.socket(family, socket.SOCK_DGRAM) as client:
        client.connect((address, port))
        client.send(b"hello")
        began = time.monotonic()
        with pytest.raises(ConnectionRefusedError):
            client.recv(100)
        assert time.monotonic() - began < 1


def test_a_server_on_a_port_that_was_connected_to(every_port: Network) -> None:
    """A connection to a port elsewhere does not keep a server inside from that port, open or just ended."""
    with every_port.connect("1.2.3.4", 8082), every_port.listen("0.0.0.0", 8082):
        accept(every_port)
    with every_port.connect("1.2.3.4", 8083) as client:
        accept(every_port)
        client.recv(1)
    with every_port.listen("::", 8083):
        pass


def test_fast_open(every_port: Network) -> None:
    """Data with the first packet arrives at the gate like any other."""
    with every_port.socket() as client:
        client.settimeout(None)
        client.sendto(b"hello", 0x20000000, ("1.2.3.4", 443))  # MSG_FASTOPEN
        assert accept(every_port) == ("1.2.3.4", 443)


def test_multipath(every_port: Network) -> None:
    """A connection of Multipath TCP arrives at the gate, too. A kernel without it has no such way around."""
    try:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262).close()
    except OSError:
        return
    with every_port.connect("1.2.3.4", 443, proto=262):
        assert accept(every_port) == ("1.2.3.4", 443)


def test_without_a_listener() -> None:
    """When the gate is gone connections are refused, also where something inside listens on that port."""
    with network() as place:
        with place.connect("1.2.3.4", 443):
            assert accept(place) == ("1.2.3.4", 443)
        for number in place.capture.give_listeners():
            os.close(number)
        with place.listen("0.0.0.0", 443) as server:
            server.setblocking(False)
            with pytest.raises(ConnectionRefusedError):
                place.connect("1.2.3.4", 443)
            with pytest.raises(BlockingIOError):
                server.accept()


def test_how_a_capture_travels() -> None:
    """Descriptors in order, the link last; what was given away is not closed, and closing twice is fine."""
    for mechanism, linked in (("sk_lookup", True), ("nftables", False), ("listed ports", False)):
        numbers = [os.open("/dev/null", os.O_RDONLY) for _ in range(4)]
        made = Capture.from_descriptors(mechanism, numbers)
        assert (made.udp, made.tcp) == (numbers[0], numbers[1:3] if linked else numbers[1:])
        assert made.link == (numbers[3] if linked else -1)
        assert made.descriptors == numbers
        given = made.give_listeners()
        assert given == numbers[: 3 if linked else 4]
        made.close()
        made.close()
        for number in given:
            os.close(number)
        with pytest.raises(OSError, match=r"Bad file"):
            os.fstat(numbers[3])


def test_the_program_is_as_it_was_checked() -> None:
    """The program has no jump that leads out of it, and every path ends in a verdict."""
    code = capture._program(3)
    lines = [struct.unpack_from("=BBhI", code, at) for at in range(0, len(code), 8)]
    for at, (operation, _, offset, _) in enumerate(lines):
        if operation in (0x05, 0x15, 0x55):
            assert 0 <= at + 1 + offset < len(lines)
    assert lines[-1][0] == lines[-3][0] == 0x95
