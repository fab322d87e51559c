"""What a client is told, and how what it says has to agree with where it went."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from casemate.egress.certificates import Authority
from casemate.policy.model import Credential, RequestRule
from tests.cli.harness import until
from tests.unit.egress import wire
from tests.unit.egress.gatelab import ALLOWED, ALSO, OTHER, all_of, echo, exactly, gone
from tests.unit.egress.test_gate import ANSWER, HELLO, banner, say, tls, web

if TYPE_CHECKING:
    from tests.unit.egress.gatelab import Lab


# -- how it is said ------------------------------------------------------------------------------------


def test_http_is_told_in_its_own_words(lab: Lab) -> None:
    """A refused request gets an answer that names host and policy line."""
    with lab.gate(ALLOWED) as served, served.connect(OTHER, 80) as client:
        client.sendall(HELLO)
        answer = all_of(client)
        assert answer.startswith(b"HTTP/1.1 403 Forbidden\r\n")
        assert f'network.allow = ["{OTHER}:80"]'.encode() in answer


def test_ssh_is_told_in_its_own_words(lab: Lab) -> None:
    """An ssh client is told, whether it speaks first or waits."""
    with lab.gate(ALLOWED) as served:
        for first in (b"", b"SSH-2.0-OpenSSH_9.2\r\n"):
            with served.connect(OTHER, 22) as client:
                client.sendall(first)
                answer = all_of(client)
                assert answer.startswith(b"SSH-2.0-casemate\r\n")
                assert f"{OTHER}:22".encode() in answer


def test_tls_is_told_in_its_own_words(lab: Lab) -> None:
    """A TLS client gets an alert: access denied."""
    with lab.gate(ALLOWED) as served, served.connect(OTHER, 443) as client:
        client.sendall(wire.hello(wire.sni(OTHER)))
        assert all_of(client) == bytes((21, 3, 3, 0, 2, 2, 49))


# -- what a client says has to agree with where it went ------------------------------------------------


@pytest.mark.parametrize(("name", "fine"), [(ALLOWED, True), (ALSO, False), (OTHER, False), (None, True)])
@pytest.mark.parametrize("curve", ["", "secp521r1"])
def test_the_name_inside_of_tls(lab: Lab, name: str | None, fine: bool, curve: str) -> None:
    """TLS for the decided name passes, for another not, allowed or not. Also with a second hello."""
    authority = Authority([ALLOWED])
    context = ssl.create_default_context(cadata=authority.certificate_pem)
    context.check_hostname = False
    seen: list[bytes] = []
    serve = tls(authority, ALLOWED, curve) if fine else lambda end: seen.append(end.recv(65536))
    with lab.server(serve, 443), lab.gate(ALLOWED, ALSO) as served, served.connect(ALLOWED, 443) as plain:
        if fine:
            with context.wrap_socket(plain, server_hostname=name) as stream:
                stream.sendall(b"hello")
                assert stream.recv(5) == b"hello"
        else:
            with pytest.raises(ssl.SSLError, match="ACCESS_DENIED"):
                context.wrap_socket(plain, server_hostname=name)
            assert served.told(verdict="deny")["reason"] == "sni-differs"
            until(lambda: served.open() == 0)
            assert b"".join(seen) == b""


def test_hostile_hellos(lab: Lab) -> None:
    """What is no proper ClientHello does not reach the host; control: one that comes in small pieces."""
    good = wire.hello(wire.sni(ALLOWED))
    seen: list[bytes] = []

    def serve(end: socket.socket) -> None:
        while data := end.recv(65536):
            seen.append(data)
            end.sendall(data)

    with lab.server(serve, 443), lab.gate(ALLOWED) as served:
        for bad in (
            wire.hello(wire.sni(ALLOWED), wire.sni(OTHER)), b"\x16\x03\x01\xff\xff" + bytes(20),
            b"\x80\x2e\x01\x03\x01" + bytes(50), good[:-1],
        ):  # fmt: skip
            with served.connect(ALLOWED, 443) as client:
                client.sendall(bad)
                client.shutdown(socket.SHUT_WR)
                assert all_of(client)[:1] in (b"\x15", b"")
        until(lambda: served.open() == 0)
        assert seen == []
        with served.connect(ALLOWED, 443) as client:
            for byte in good:
                client.sendall(bytes([byte]))
            assert exactly(client, len(good)) == good


@pytest.mark.parametrize(("rule", "data", "reached"), [
    (f"https://{ALLOWED}", HELLO, False), (f"http://{ALLOWED}:443", HELLO, True),
    (f"http://{ALLOWED}:443", wire.hello(wire.sni(ALLOWED)), False), (ALLOWED, b"SMTP or so\r\n", True),
    (f"https://{ALLOWED}", b"SMTP or so\r\n", False), (f"tcp://{ALLOWED}:443", b"SMTP or so\r\n", True),
])  # fmt: skip
def test_protocols_of_rules(lab: Lab, rule: str, data: bytes, reached: bool) -> None:
    """A rule for one protocol allows that one; what a client speaks is known by its first bytes."""
    seen: list[bytes] = []
    with (
        lab.server(lambda end: seen.append(end.recv(65536)), 443),
        lab.gate(rule) as served,
        served.connect(ALLOWED, 443) as client,
    ):
        client.sendall(data)
        if reached:
            until(lambda: seen)
        else:
            assert gone(client) in ("end", "reset")
            assert served.reasons() == ["not-listed"]
            assert seen == []


@pytest.mark.parametrize("end", [False, True])
def test_a_request_behind_urgent_data(lab: Lab, end: bool) -> None:
    """It is not taken for the end of what a client says: the request behind it would reach another host.
    Control: the same words without it, to the host that is meant.
    """
    seen: list[bytes] = []
    request = "GET / HTTP/1.1\r\nHost: {}:8080\r\n\r\n"
    serve = lab.server(lambda taken: seen.append(taken.recv(65536)), 8080)
    with serve, lab.gate(f"{ALLOWED}:8080") as served:
        with served.connect(ALLOWED, 8080) as client:
            client.sendall(b"GE")
            client.send(b"!", socket.MSG_OOB)
            with suppress(OSError):  # it may be refused by now
                client.sendall(request.format(OTHER).encode()[2:])
                client.shutdown(socket.SHUT_WR) if end else None
            gone(client)
        assert served.told(verdict="deny")["reason"] == "urgent-data"
        with served.connect(ALLOWED, 8080) as client:
            client.sendall(request.format(ALLOWED).encode())
            until(lambda: ALLOWED.encode() in b"".join(seen))
        assert OTHER.encode() not in b"".join(seen)


def test_port_80_is_for_http(lab: Lab) -> None:
    """What is not HTTP does not pass on port 80, where servers that see no Host would; tcp:// says it may."""
    with lab.server(echo, 80), lab.gate(ALLOWED) as served:
        with served.connect(ALLOWED, 80) as client:
            client.sendall(b"\0\1\2\3 something else")
            assert gone(client) == "reset"
        assert served.reasons() == ["not-http"]
        served.update(f"tcp://{ALLOWED}:80")
        for said in (b"\0\1\2\3 something else", b"word", HELLO):
            with served.connect(ALLOWED, 80) as client:
                assert say(client, said) == said


def test_servers_that_speak_first(lab: Lab) -> None:
    """A server's greeting comes without a word of the client's, who is looked at when it speaks."""
    with lab.server(banner, 9000), lab.gate(f"{ALLOWED}:9000") as served:
        with served.connect(ALLOWED, 9000) as client:
            assert exactly(client, 10) == b"220 here\r\n"
            assert say(client) == b"hello\n"
        for name, fine in ((OTHER, False), (ALLOWED, True)):
            hello = wire.hello(wire.sni(name))
            with served.connect(ALLOWED, 9000) as client:
                exactly(client, 10)
                client.sendall(hello)
                if fine:
                    assert exactly(client, len(hello)) == hello
                else:
                    assert all_of(client)[:1] == b"\x15"
                    assert served.told(verdict="deny")["reason"] == "sni-differs"


def test_http_is_read(lab: Lab) -> None:
    """Requests on a plain connection are for the decided host, each of them; another Host is refused."""
    with lab.server(web, 80), lab.gate(ALLOWED, ALSO) as served, served.connect(ALLOWED, 80) as client:
        for _ in range(3):
            client.sendall(HELLO)
            assert exactly(client, len(ANSWER)).endswith(b"hello")
        client.sendall(HELLO.replace(b"allowed", b"also"))
        assert all_of(client).startswith(b"HTTP/1.1 403 ")
        assert served.told(verdict="deny")["kind"] == "request"


def test_credentials(lab: Lab) -> None:
    """A placeholder becomes the value on the way to its host, and to no other."""
    seen: list[bytes] = []

    def serve(end: socket.socket) -> None:
        seen.append(end.recv(65536))
        end.sendall(ANSWER)

    credential = Credential(name="TOKEN", hosts=(ALLOWED,), source="env:TOKEN", as_="bearer", add=False)
    how = {"credentials": (credential,), "secrets": {"TOKEN": "the-real-value-of-it"},
           "placeholders": {"TOKEN": "casemate-placeholder-1"}}  # fmt: skip
    with lab.server(serve, 80), lab.gate(f"http://{ALLOWED}:80", f"http://{ALSO}:80", **how) as served:
        for name in (ALLOWED, ALSO):
            with served.connect(name, 80) as client:
                token = b"Authorization: Bearer casemate-placeholder-1\r\n\r\n"
                client.sendall(f"GET / HTTP/1.1\r\nHost: {name}\r\n".encode() + token)
                assert exactly(client, len(ANSWER)).endswith(b"hello")
        assert b"Bearer the-real-value-of-it" in seen[0]
        assert b"the-real" not in seen[1]


def test_only_http_where_requests_have_rules(lab: Lab) -> None:
    """Towards a host whose requests have rules nothing passes that cannot be read."""
    rule = RequestRule(host=ALLOWED, allow=("GET /",), layer="user")
    with lab.server(echo, 9000) as server, lab.gate(f"{ALLOWED}:9000", requests=(rule,)) as served:
        with served.connect(ALLOWED, 9000) as client:
            client.sendall(b"\0\1\2 anything")
            assert gone(client) == "reset"
        assert served.reasons() == ["requests"]
        assert server.connections == []
        with served.connect(ALLOWED, 9000) as client:
            client.sendall(wire.hello(wire.sni(ALLOWED)))
            assert all_of(client)[:1] == b"\x15"
        assert served.told(reason="no-authority")
