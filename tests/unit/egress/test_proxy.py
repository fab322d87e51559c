"""The gate as an explicit proxy: HTTP and SOCKS5 on its own address, any port."""

from __future__ import annotations

import ipaddress
import socket
import struct
from typing import TYPE_CHECKING

import pytest

from casemate.egress import connection as connection_module
from casemate.egress import proxy as proxy_module
from casemate.egress.errors import Refused
from casemate.egress.proxy import authority
from tests.cli.harness import until
from tests.unit.egress import wire
from tests.unit.egress.gatelab import ALLOWED, ALSO, GATE, OTHER, all_of, echo, exactly, gone
from tests.unit.egress.test_gate import ANSWER, web

if TYPE_CHECKING:
    from tests.unit.egress.gatelab import Lab, Served

GATE_V6 = "fd53:656e:7472:79::1"
RULE = f"{ALLOWED}:9000"


def connect(served: Served, port: int = 3128, address: str = GATE) -> socket.socket:
    """A connection to the proxy."""
    return served.inside.connect(address, port)


def head(endpoint: socket.socket) -> bytes:
    """An answer up to its empty line, to the byte."""
    data = b""
    while not data.endswith(b"\r\n\r\n") and (byte := endpoint.recv(1)):
        data += byte
    return data


def socks(endpoint: socket.socket, host: str, port: int, *, early: bytes = b"") -> int:
    """A SOCKS5 client's conversation; the code of the answer to its request."""
    endpoint.sendall(b"\x05\x01\x00")
    assert exactly(endpoint, 2) == b"\x05\x00"
    try:
        packed = ipaddress.ip_address(host).packed
        where = (b"\x01" if len(packed) == 4 else b"\x04") + packed
    except ValueError:
        where = b"\x03" + bytes([len(host)]) + host.encode("latin-1")
    endpoint.sendall(b"\x05\x01\x00" + where + struct.pack("!H", port) + early)
    answer = exactly(endpoint, 10)
    return answer[1]


# -- CONNECT -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("address", "port"), [(GATE, 3128), (GATE, 80), (GATE, 1), (GATE_V6, 8080)])
def test_connect(lab: Lab, address: str, port: int) -> None:
    """A tunnel to an allowed host, on any port of the gate but that of DNS."""
    with lab.server(echo, 9000), lab.gate(RULE) as served, connect(served, port, address) as client:
        client.sendall(f"CONNECT {RULE} HTTP/1.1\r\nHost: {RULE}\r\n\r\n".encode())
        assert head(client).startswith(b"HTTP/1.1 200 ")
        client.sendall(b"hello\n")
        assert exactly(client, 6) == b"hello\n"
        client.shutdown(socket.SHUT_WR)
        assert all_of(client) == b""
        assert served.told(verdict="allow")["host"] == ALLOWED


def test_what_follows_a_connect_at_once(lab: Lab) -> None:
    """Bytes that come behind the request, in the same piece, are the host's."""
    with lab.server(echo, 9000), lab.gate(RULE) as served, connect(served) as client:
        client.sendall(f"CONNECT {RULE} HTTP/1.0\r\n\r\nhello\n".encode())
        head(client)
        assert exactly(client, 6) == b"hello\n"


@pytest.mark.parametrize("target", [
    f"{OTHER}:9000", f"{ALLOWED}:9001", "93.184.216.34:9000", "10.1.2.3:9000", "127.0.0.1:9000",
    "[::1]:9000", "198.18.0.1:53", "localhost:9000",
])  # fmt: skip
def test_connect_elsewhere(lab: Lab, target: str) -> None:
    """A tunnel to what no rule names carries nothing; the client is told in the words that it speaks."""
    with lab.server(echo, 9000) as server, lab.gate(RULE) as served, connect(served) as client:
        client.sendall(f"CONNECT {target} HTTP/1.1\r\n\r\n".encode() + b"GET / HTTP/1.1\r\n\r\n")
        answer = all_of(client)
        assert answer.count(b"HTTP/1.1 ") == 1 or b" 403 " in answer
        assert served.told(verdict="deny")["host"] == target.rpartition(":")[0].strip("[]")
        assert server.connections == []


def test_tls_in_a_tunnel(lab: Lab) -> None:
    """The name inside of TLS has to be the tunnel's."""
    with lab.server(echo, 443), lab.gate(ALLOWED, ALSO) as served:
        for name, fine in ((ALLOWED, True), (ALSO, False)):
            hello = wire.hello(wire.sni(name))
            with connect(served) as client:
                client.sendall(f"CONNECT {ALLOWED}:443 HTTP/1.1\r\n\r\n".encode())
                head(client)
                client.sendall(hello)
                if fine:
                    assert exactly(client, len(hello)) == hello
                else:
                    assert all_of(client)[:1] == b"\x15"
                    assert served.told(verdict="deny")["reason"] == "sni-differs"


@pytest.mark.parametrize("request_", [
    b"CONNECT allowed.example HTTP/1.1\r\n\r\n", b"CONNECT allowed.example:0 HTTP/1.1\r\n\r\n",
    b"CONNECT allowed.example:99999 HTTP/1.1\r\n\r\n", b"CONNECT allowed.example:+443 HTTP/1.1\r\n\r\n",
    b"CONNECT allowed.example\0.evil.example:443 HTTP/1.1\r\n\r\n", b"CONNECT 0x7f.1:443 HTTP/1.1\r\n\r\n",
    b"CONNECT 2130706433:443 HTTP/1.1\r\n\r\n", b"CONNECT a@allowed.example:443 HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: allowed.example\r\n\r\n", b"GET https://allowed.example/ HTTP/1.1\r\n\r\n",
    b"GET http://allowed.example/ HTTP/2.0\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n", b"no request at all\r\n\r\n",
    b"\x16\x03\x01\x00\x05hello", b"\x04\x01\x00\x50\x01\x02\x03\x04\0",
    b"GET  http://allowed.example/ HTTP/1.1\r\n\r\n",
])  # fmt: skip
def test_no_request_to_a_proxy(lab: Lab, request_: bytes) -> None:
    """What is none is refused with a reason, and nothing is dialled."""
    with lab.server(web, 80) as server, lab.server(echo, 443) as other, lab.gate(ALLOWED) as served:
        with connect(served) as client:
            client.sendall(request_)
            client.shutdown(socket.SHUT_WR)
            answer = all_of(client)
            assert answer[:1] in (b"H", b"\0", b""), answer
            if answer[:1] == b"H":
                assert answer.startswith(b"HTTP/1.1 403 ")
                assert b"\r\n\r\ncasemate: " in answer
        assert served.told(verdict="deny")["reason"]
        until(lambda: served.open() == 0)
        assert server.connections == other.connections == []


# -- requests ------------------------------------------------------------------------------------------


def test_requests(lab: Lab) -> None:
    """A request in absolute form is answered by its host; one for another host is refused."""
    with lab.server(web, 80), lab.server(web, 8080), lab.gate(ALLOWED, f"{ALLOWED}:8080") as served:
        for where in (ALLOWED, f"{ALLOWED}:8080"):
            with connect(served) as client:
                client.sendall(f"GET http://{where}/x?y HTTP/1.1\r\nHost: {where}\r\n\r\n".encode())
                assert ANSWER.rpartition(b"\r\n")[2] in all_of(client)
        with connect(served) as client:
            client.sendall(f"GET http://{OTHER}/ HTTP/1.1\r\nHost: {OTHER}\r\n\r\n".encode())
            assert all_of(client).startswith(b"HTTP/1.1 403 ")


def test_each_request_by_itself(lab: Lab) -> None:
    """A connection of a proxy's client ends after its request: the next may be for another host."""
    with lab.server(web, 80), lab.gate(ALLOWED) as served, connect(served) as client:
        one = f"GET http://{ALLOWED}/ HTTP/1.1\r\nHost: {ALLOWED}\r\n\r\n"
        two = f"GET http://{OTHER}/ HTTP/1.1\r\nHost: {OTHER}\r\n\r\n"
        client.sendall((one + two).encode())
        answer = all_of(client)
        assert answer.count(b"HTTP/1.1 200 ") == 1
        assert b"connection: close" in answer.lower()


def test_host_and_target_have_to_agree(lab: Lab) -> None:
    """A request whose Host is another than its target's goes to neither."""
    with lab.server(web, 80) as server, lab.gate(ALLOWED, ALSO) as served, connect(served) as client:
        client.sendall(f"GET http://{ALLOWED}/ HTTP/1.1\r\nHost: {ALSO}\r\n\r\n".encode())
        assert all_of(client).startswith(b"HTTP/1.1 40")
        until(lambda: served.open() == 0)
        for connection in server.connections:
            connection.setblocking(False)
            assert connection.recv(100) == b""


def test_a_head_without_end(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that grows and grows is refused at its bound, and one that does not end after its time."""
    monkeypatch.setattr(proxy_module, "HELLO_SECONDS", 0.3)
    with lab.gate(ALLOWED) as served:
        with connect(served) as client:
            client.sendall(b"GET http://allowed.example/ HTTP/1.1\r\n" + b"X: y\r\n" * 8000)
            assert all_of(client).startswith(b"HTTP/1.1 403 ")
        with connect(served) as client:
            client.sendall(b"GET http://allowed.example/ HTTP/1.1\r\n")
            assert gone(client) in ("end", "reset")
        with connect(served) as client:
            assert gone(client) in ("end", "reset")
        until(lambda: served.open() == 0)


# -- SOCKS5 --------------------------------------------------------------------------------------------


def test_socks(lab: Lab) -> None:
    """A name is resolved by the gate, and what follows the request at once is the host's."""
    with lab.server(echo, 9000), lab.gate(RULE, "93.184.216.0/24:9000") as served:
        for host in (ALLOWED, ALLOWED.upper() + ".", "93.184.216.34"):
            with connect(served, 1080) as client:
                assert socks(client, host, 9000, early=b"early\n") == 0
                assert exactly(client, 6) == b"early\n"


@pytest.mark.parametrize(("host", "port", "code"), [
    (OTHER, 9000, 2), (ALLOWED, 9001, 2), ("10.1.2.3", 9000, 2), ("::1", 9000, 2), ("2001:db8::1", 9000, 2),
    ("allowed.example\0.evil.example", 9000, None), ("127.1", 9000, None),
])  # fmt: skip
def test_socks_elsewhere(lab: Lab, host: str, port: int, code: int | None) -> None:
    """What no rule names is answered with `not allowed`, what is no host with an error."""
    with lab.server(echo, 9000) as server, lab.gate(RULE) as served, connect(served, 1080) as client:
        found = socks(client, host, port)
        assert found == code if code is not None else found != 0
        assert gone(client) in ("end", "reset")
        assert served.told(verdict="deny")["protocol"] == "socks5"
        assert server.connections == []


def test_socks_to_the_synthetic_address(lab: Lab) -> None:
    """A client that resolves first and hands the address over reaches what it would by the name."""
    with lab.server(echo, 9000), lab.gate(RULE) as served:
        for address in (served.address(ALLOWED), served.address(ALLOWED, socket.AF_INET6)):
            with connect(served, 1080) as client:
                assert socks(client, address, 9000) == 0
                client.sendall(b"hello\n")
                assert exactly(client, 6) == b"hello\n"
            with connect(served) as client:
                shown = f"[{address}]" if ":" in address else address
                client.sendall(f"CONNECT {shown}:9000 HTTP/1.1\r\n\r\nhello\n".encode())
                head(client)
                assert exactly(client, 6) == b"hello\n"
        with connect(served, 1080) as client:
            assert socks(client, "198.18.7.7", 9000) == 2


def test_socks_in_small_pieces(lab: Lab) -> None:
    """However the conversation is cut, it is the same one."""
    name = ALLOWED.encode()
    said = (
        b"\x05\x02\x00\x02"
        + b"\x05\x01\x00\x03"
        + bytes([len(name)])
        + name
        + struct.pack("!H", 9000)
        + b"hi\n"
    )
    with lab.server(echo, 9000), lab.gate(RULE) as served, connect(served, 1080) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in said:
            client.sendall(bytes([byte]))
        assert exactly(client, 12)[3] == 0
        assert exactly(client, 3) == b"hi\n"


def test_slow_socks(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation that does not come to its point is ended."""
    monkeypatch.setattr(proxy_module, "HELLO_SECONDS", 0.2)
    monkeypatch.setattr(connection_module, "HELLO_SECONDS", 0.2)
    with lab.gate(RULE) as served, connect(served, 1080) as client:
        client.sendall(b"\x05\x01\x00")
        assert exactly(client, 2) == b"\x05\x00"
        assert gone(client) in ("end", "reset")
        until(lambda: served.open() == 0)


# -- authority -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "found"), [
    ("allowed.example:443", ("allowed.example", 443)), ("ALLOWED.Example.:443", ("allowed.example", 443)),
    ("10.0.0.1:1", ("10.0.0.1", 1)), ("[2001:DB8::1]:65535", ("2001:db8::1", 65535)),
    ("allowed.example", ("allowed.example", 80)), ("[::1]", ("::1", 80)),
])  # fmt: skip
def test_authorities(text: str, found: tuple[str, int]) -> None:
    """Host and port as they are meant, in their one spelling."""
    assert authority(text, 80) == found


@pytest.mark.parametrize("text", [
    "", ":", ":80", "a:", "a:b", "a:0", "a:65536", "a:00000080", "a: 80", "a:\uff18\uff10",
    "a:80:80", "::1:80", "[::1", "[::1]80",
    "[::1]x:80", "[a.example]:80", "user@a.example:80", "a.example/x:80", "a b:80",
    "a%25b:80", "[fe80::1%eth0]:80",
])  # fmt: skip
def test_no_authority(text: str) -> None:
    """What is none, or could be read in two ways, is refused."""
    with pytest.raises(Refused):
        authority(text, None)
