"""Through another proxy: what is said to it, and what it may answer."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from casemate.egress import parent as parent_module
from casemate.egress.errors import Refused
from casemate.egress.parent import dial_through
from tests.cli.harness import until
from tests.unit.egress import wire
from tests.unit.egress.gatelab import ALLOWED, ALSO, OTHER, all_of, echo, exactly, gone
from tests.unit.egress.test_gate import ANSWER, HELLO, web

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.egress.gatelab import Lab


class Parent:
    """A proxy on the host's own loopback that answers as it is told, then serves as the host would."""

    def __init__(
        self, answer: bytes = b"HTTP/1.1 200 OK\r\n\r\n", then: Callable[..., object] = echo
    ) -> None:
        self.answer, self.then = answer, then
        self.heads: list[bytes] = []

    def __call__(self, end: socket.socket) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            byte = end.recv(1)
            if not byte:
                return
            head += byte
        self.heads.append(head)
        with suppress(OSError):
            for byte in self.answer:
                end.sendall(bytes([byte]))
            self.then(end)


def dial(lab: Lab, proxy: str, host: str = ALLOWED, port: int = 443) -> socket.socket:
    """A connection through the parent."""
    made = lab.run(dial_through(proxy, host, port))
    made.settimeout(10)
    return made


@pytest.mark.parametrize("answer", [
    b"HTTP/1.1 200 Connection established\r\n\r\n", b"HTTP/1.0 200 OK\r\nVia: 1.1 x\r\nX: y\r\n\r\n",
    b"HTTP/1.1 204 \r\n\r\n",
])  # fmt: skip
def test_through(lab: Lab, answer: bytes) -> None:
    """What follows the answer's head is the host's, to the byte."""
    parent = Parent(answer + b"the host's first words")
    with lab.service(parent) as server, dial(lab, f"http://127.0.0.1:{server.port}") as made:
        assert exactly(made, 22) == b"the host's first words"
        made.sendall(b"hello")
        assert exactly(made, 5) == b"hello"
    where = f"{ALLOWED}:443"
    assert parent.heads == [f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n\r\n".encode()]


def test_an_ipv6_address(lab: Lab) -> None:
    """An IPv6 address is written with its brackets, and a parent may have one itself."""
    parent = Parent()
    with lab.service(parent, "::1") as server, dial(lab, f"http://[::1]:{server.port}", "2001:db8::1", 8443):
        pass
    assert parent.heads[0].startswith(b"CONNECT [2001:db8::1]:8443 HTTP/1.1\r\nHost: [2001:db8::1]:8443\r\n")


def test_the_next_address(lab: Lab) -> None:
    """A parent whose first address does not answer is asked at its second: localhost is often two."""
    for address in ("127.0.0.1", "::1"):
        with lab.service(Parent(), address) as server, dial(lab, f"http://localhost:{server.port}") as made:
            made.sendall(b"hello")
            assert exactly(made, 5) == b"hello"


@pytest.mark.parametrize("answer", [
    b"HTTP/1.1 403 Forbidden\r\n\r\n",
    b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 3\r\n\r\nno!",
    b"HTTP/1.1 2 OK\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"200 OK\r\n\r\n", b"\r\n\r\n",
    b"HTTP/1.1 +20 OK\r\n\r\n",
    b"SSH-2.0-nothing\r\n\r\n",
])  # fmt: skip
def test_a_parent_that_refuses(lab: Lab, answer: bytes) -> None:
    """Anything but a clear yes is a no."""
    with lab.service(Parent(answer)) as server:
        with pytest.raises(Refused) as caught:
            dial(lab, f"http://127.0.0.1:{server.port}")
        assert caught.value.code == "parent-refused"
        until(lambda: all(gone(end) for end in server.connections))


def test_a_parent_that_is_no_proxy(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not there, ends, falls silent or never ends its head is an error, and is let go."""
    monkeypatch.setattr(parent_module, "_SECONDS", 0.3)
    with lab.service(echo) as unused:
        port = unused.port
    for proxy in (f"http://127.0.0.1:{port}", "http://no.such.name.invalid:3128"):
        with pytest.raises(Refused) as caught:
            dial(lab, proxy)
        assert caught.value.code == "parent-unreachable"
    endless = b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 5000
    for serve in (Parent(b"", lambda end: end.shutdown(socket.SHUT_WR)), Parent(b""), Parent(endless)):
        with lab.service(serve) as server:
            with pytest.raises(Refused) as caught:
                dial(lab, f"http://127.0.0.1:{server.port}")
            assert caught.value.code == "parent-unreachable"


def test_a_gate_behind_a_parent(lab: Lab) -> None:
    """The gate decides about names, the parent resolves them: nothing is looked up, HTTP is read as ever."""
    tunnel, http = Parent(), Parent(then=web)
    with lab.service(tunnel) as first, lab.service(http) as second, lab.names() as names:
        proxy = f"http://127.0.0.1:{first.port}"
        with lab.gate(ALLOWED, ALSO, "tcp://nowhere.at.all.invalid:9000", parent_proxy=proxy) as served:
            hello = wire.hello(wire.sni(ALLOWED))
            with served.connect(ALLOWED, 443) as client:
                client.sendall(hello)
                assert exactly(client, len(hello)) == hello
            assert served.told(verdict="allow")["address"] == "parent-proxy"
            with served.connect("nowhere.at.all.invalid", 9000) as client:
                client.sendall(b"hello")
                assert exactly(client, 5) == b"hello"
            with served.connect(ALLOWED, 443) as client:
                client.sendall(wire.hello(wire.sni(ALSO)))
                assert all_of(client)[:1] == b"\x15"
            count = len(tunnel.heads)
            with served.connect(OTHER, 443) as client:
                client.sendall(hello)
                assert all_of(client)[:1] == b"\x15"
            assert len(tunnel.heads) == count
            served.update(ALLOWED, parent_proxy=f"http://127.0.0.1:{second.port}")
            with served.connect(ALLOWED, 80) as client:
                client.sendall(HELLO)
                assert exactly(client, len(ANSWER)) == ANSWER or ANSWER[-5:] in client.recv(4096)
        assert names == []
        assert http.heads[0].startswith(f"CONNECT {ALLOWED}:80 ".encode())
