"""TLS that is looked into: real clients on one side, a real TLS host on the other, a secret that stays
between.
"""

from __future__ import annotations

import base64
import gzip
import json
import socket

import pytest

from tests.unit.egress.flowlab import (
    NAME,
    OTHER,
    SECRET,
    Certificates,
    Gate,
    credential,
    curl,
    gate,
    head,
    network,
    raw,
    rest,
    trusting,
    until,
    web,
)
from tests.unit.egress.tlslab import Echo, ask, looking


def test_nothing_of_it_comes_back(made: Gate) -> None:
    """Header fields, their names, the reason, redirects, single-byte chunks, base64, trailers: no secret in
    any.
    """
    stand_in = made.placeholders["TOKEN"]
    for path in ("/", "/header", "/drip"):
        for kind in (f"Bearer {stand_in}", "Basic " + base64.b64encode(f"u:{stand_in}".encode()).decode()):
            with socket.create_connection(("127.0.0.1", made.port), 10) as plain:
                sock = trusting(made).wrap_socket(plain, server_hostname=NAME)
                sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {made.host}\r\nAuthorization: {kind}\r\n"
                             "Connection: close\r\n\r\n".encode())  # fmt: skip
                found = rest(sock)
                sock.close()
            assert found.startswith(b"HTTP/1.1 "), path
            assert SECRET.encode() not in found
            assert base64.b64encode(f"x:{SECRET}".encode())[4:-4] not in found
            assert base64.b64encode(f"u:{SECRET}".encode()) not in found
            if path != "/drip":
                assert stand_in.encode() in found
    assert all(seen[1]["Authorization"] not in ("", f"Bearer {stand_in}") for seen in Echo.seen)


def test_requests_without_the_token_are_kept_free_of_it_too(made: Gate) -> None:
    """A later request that carries nothing gets nothing either."""
    _, found = ask(made)
    assert SECRET.encode() not in found
    assert made.placeholders["TOKEN"].encode() in found


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_compressed_answers_are_read(made: Gate, coding: str) -> None:
    """An answer that comes compressed all the same is opened, cleaned, and passed on open."""
    stand_in = made.placeholders["TOKEN"]
    answer, found = ask(made, f"/coded/{coding}", Authorization=f"Bearer {stand_in}", Accept_Encoding=coding)
    assert answer.headers["Content-Encoding"] is None
    assert found == f"Bearer {stand_in}||/coded/{coding}".encode() * 1000
    assert Echo.seen[0][1]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, br", "x-new"])
def test_answers_that_cannot_be_read(made: Gate, coding: str) -> None:
    """What cannot be opened is refused with the reason."""
    answer, found = ask(made, f"/coded/{coding.replace(' ', '')}")
    assert (answer.status, answer.headers["X-Casemate-Refused"]) == (502, "coded-answer")
    assert b"may hide a credential" in found


def test_compressed_answers_pass_without_credentials(
    host: tuple[str, int], certificates: Certificates
) -> None:
    """Control: where no secret is given, codings are nobody's business."""
    with looking(host, certificates, requests={NAME: ("GET /**",)}) as made:
        answer, found = ask(made, "/coded/gzip", Accept_Encoding="gzip")
        assert answer.headers["Content-Encoding"] == "gzip"
        assert gzip.decompress(found).startswith(b"||/coded/gzip")
        assert ask(made, "/coded/br")[0].headers["Content-Encoding"] == "br"


def test_no_answer_in_halves(made: Gate) -> None:
    """A secret cannot be asked for one half at a time: requests for a range are for the whole."""
    assert ask(made, "/range", Range="bytes=0-9")[1] == b"whole"


def test_a_placeholder_for_another_host(host: tuple[str, int], certificates: Certificates) -> None:
    """Towards a host that the credential does not name a placeholder stays one, and an event tells."""
    Echo.seen.clear()
    rules = {NAME: ("* /**",)}
    with looking(host, certificates, credential(hosts=(OTHER,), add=True), requests=rules) as made:
        stand_in = made.placeholders["TOKEN"]
        ask(made, f"/?k={stand_in}", Authorization=f"Bearer {stand_in}")
        assert made.kinds("credential") == [("deny", "placeholder-astray", "TOKEN")]
    path, fields, _ = Echo.seen[0]
    assert (path, fields["Authorization"]) == (f"/?k={stand_in}", f"Bearer {stand_in}")


def test_a_placeholder_in_a_body(made: Gate) -> None:
    """In a body, in a path and in another field it stays one, and events tell."""
    stand_in = made.placeholders["TOKEN"]
    ask(made, f"/p/{stand_in}", "POST", f"token={stand_in}", X_Other=stand_in)
    path, fields, body = Echo.seen[0]
    assert (path, body.decode(), fields["X-Other"]) == (f"/p/{stand_in}", f"token={stand_in}", stand_in)
    assert set(made.kinds("credential", 2)) == {
        ("deny", "placeholder-misplaced", "TOKEN"),
        ("deny", "placeholder-in-body", "TOKEN"),
    }


@pytest.mark.parametrize(("place", "field", "value"), [
    ("bearer", "Authorization", f"Bearer {SECRET}"),
    ("basic", "Authorization", "Basic " + base64.b64encode(f"x-access-token:{SECRET}".encode()).decode()),
    ("header:X-Api-Key", "X-Api-Key", SECRET),
])  # fmt: skip
def test_added(host: tuple[str, int], certificates: Certificates, place: str, field: str, value: str) -> None:
    """A credential with ``add`` comes with every request that has none of its own."""
    Echo.seen.clear()
    with looking(host, certificates, credential(place=place, add=True)) as made:
        ask(made)
        ask(made, **{field.replace("-", "_"): "mine"})
    assert [fields[field] for _, fields, _ in Echo.seen] == [value, "mine"]


@pytest.mark.parametrize(("allow", "gets"), [((f"{NAME}:*",), False), ((f"http://{NAME}:*",), True)])
def test_plain_http_gets_no_secret(allow: tuple[str, ...], gets: bool) -> None:
    """Without TLS the value is given only where the policy says http:// of this very host."""
    Echo.seen.clear()
    policy = network(allow=allow, credentials=(credential(),))
    with web(Echo) as address, gate(address, policy, secrets={"TOKEN": SECRET}) as made:
        stand_in = made.placeholders["TOKEN"]
        done = curl(made, "-H", f"Authorization: Bearer {stand_in}")
        assert Echo.seen[0][1]["Authorization"] == f"Bearer {SECRET if gets else stand_in}"
        assert made.kinds("credential")[0][1] == ("filled" if gets else "placeholder-astray")
        assert SECRET.encode() not in done.stdout  # the host shows it to everybody


def test_events_and_errors_do_not_show_it(made: Gate) -> None:
    """No event, and no exception while it runs, holds the secret."""
    stand_in = made.placeholders["TOKEN"]
    for path in ("/", "/header", "/coded/br", f"/x?key={stand_in}"):
        ask(made, path, Authorization=f"Bearer {stand_in}")
    until(lambda: len([e for e in made.events if e["kind"] == "request"]) == 4)
    assert SECRET not in json.dumps(made.events)
    assert stand_in not in json.dumps(made.events)
    assert made.errors == []


def test_websocket_after_tls(certificates: Certificates) -> None:
    """A WebSocket inside of TLS passes where GET on its path is allowed, and shows no secret either."""

    def script(plain: socket.socket) -> None:
        with certificates.context.wrap_socket(plain, server_side=True) as sock:
            begin = head(sock)
            assert f"Bearer {SECRET}".encode() in begin
            assert b"deflate" not in begin  # a compressed message could not be kept free of it
            sock.sendall(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
            )
            while data := sock.recv(65536):
                sock.sendall(data + SECRET.encode() + b"\n")

    fields = ("Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
              "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Extensions: permessage-deflate\r\n")  # fmt: skip
    rules = {NAME: ("GET /ws",)}
    with raw(script) as address, looking(address, certificates, credential(), requests=rules) as made:
        stand_in = made.placeholders["TOKEN"]
        fields += f"Host: {made.host}\r\nAuthorization: Bearer {stand_in}\r\n\r\n"
        for path, code in (("/ws", b"101"), ("/other", b"403")):
            with (
                socket.create_connection(("127.0.0.1", made.port), 10) as plain,
                trusting(made).wrap_socket(plain, server_hostname=NAME) as sock,
            ):
                sock.sendall(f"GET {path} HTTP/1.1\r\n{fields}".encode())
                assert head(sock).split(b" ")[1] == code
                if code == b"101":
                    sock.sendall(b"hello ")
                    found = b""
                    while not found.endswith(b"\n"):
                        found += sock.recv(65536)
                    assert found == b"hello " + stand_in.encode() + b"\n"
