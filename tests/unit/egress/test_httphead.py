"""Heads of requests and answers: what is for the decided host, what is passed on, what is refused."""

from __future__ import annotations

import h11
import pytest

from casemate.egress.errors import Refused
from casemate.egress.httphead import (
    accepts_upgrade,
    answer_fields,
    check_overrides,
    host_text,
    is_crowded,
    is_encoded,
    read_request,
    trailer_fields,
)

NAME = "api.example.org"
WEBSOCKET = [("Connection", "keep-alive, Upgrade"), ("Upgrade", "WebSocket"), ("Sec-WebSocket-Key", "a2V5"),
             ("Sec-WebSocket-Version", "13")]  # fmt: skip


def request(
    target: str = "/x",
    *fields: tuple[str, str],
    method: str = "GET",
    host: str | None = NAME,
    version: str = "1.1",
) -> h11.Request:
    """A request as h11 reads it."""
    own = [] if host is None else [("Host", host)]
    return h11.Request(method=method, target=target, headers=[*own, *fields], http_version=version)


def refused(asked: h11.Request, *, port: int = 443, tls: bool = True, name: str = NAME) -> str:
    """The code of the refusal; ``""`` where there is none."""
    try:
        read_request(asked, name, port, tls=tls)
    except Refused as why:
        return why.code
    return ""


@pytest.mark.parametrize(
    ("host", "port", "tls", "fine"),
    [
        (NAME, 443, True, True),
        ("API.Example.ORG", 443, True, True),
        (NAME + ".", 443, True, True),
        (NAME + ":443", 443, True, True),
        (NAME, 80, False, True),
        (NAME + ":8443", 8443, True, True),
        (NAME, 8443, True, True),
        (None, 80, False, False),
        ("evil.example.net", 443, True, False),
        (NAME + ":80", 443, True, False),
        (NAME + ":444", 443, True, False),
        (NAME + ":0443", 443, True, False),
        (NAME + ":", 8443, True, False),
        (NAME + "@evil.example.net", 443, True, False),
        ("evil.example.net@" + NAME, 443, True, False),
        (NAME + "/", 443, True, False),
        (NAME + ",evil.example.net", 443, True, False),
        (NAME + " evil.example.net", 443, True, False),
        ("x" + NAME, 443, True, False),
        ("127.0.0.1", 443, True, False),
        ("", 443, True, False),
        ("xn--80ak6aa92e.com", 443, True, False),
    ],
)
def test_host(host: str | None, port: int, tls: bool, fine: bool) -> None:
    """``Host`` is the decided name, in any spelling of it, with no port or the right one."""
    if host is None:
        assert refused(request(host=None, version="1.0"), port=port, tls=tls) == ""
        return
    assert refused(request(host=host), port=port, tls=tls) == ("" if fine else "host-differs")


@pytest.mark.parametrize(
    ("name", "host", "fine"),
    [
        ("192.0.2.7", "192.0.2.7", True),
        ("192.0.2.7", "192.0.2.8", False),
        ("192.0.2.7", "3221225991", False),
        ("2001:db8::7", "[2001:db8::7]", True),
        ("2001:db8::7", "[2001:DB8:0::7]:443", True),
        ("2001:db8::7", "[2001:db8::8]", False),
        ("2001:db8::7", "[2001:db8::7]x", False),
    ],
)
def test_host_that_is_an_address(name: str, host: str, fine: bool) -> None:
    """A host that was decided by its address is compared as one."""
    assert refused(request(host=host), name=name) == ("" if fine else "host-differs")


@pytest.mark.parametrize(
    ("target", "tls", "code"),
    [
        ("/", True, ""),
        ("//x", True, ""),
        ("*", True, "target"),
        (f"https://{NAME}/x?y", True, ""),
        (f"HTTPS://{NAME}:443", True, ""),
        (f"http://{NAME}/x", False, "host-differs"),
        (f"http://{NAME}:8080/x", False, ""),
        (f"http://{NAME}/x", True, "target"),
        (f"https://{NAME}/x", False, "target"),
        ("https://evil.example.net/x", True, "host-differs"),
        (f"https://user:pass@{NAME}/x", True, "host-differs"),
        (f"https://{NAME}:444/x", True, "host-differs"),
        ("ftp://x/", True, "target"),
        ("x", True, "target"),
        ("/x#y", True, "target"),
        (f"{NAME}:443", True, "target"),
    ],
)
def test_target(target: str, tls: bool, code: str) -> None:
    """A target is a path, or an address of the same host and port, where none is the usual one."""
    assert refused(request(target), port=443 if tls else 8080, tls=tls) == code


def test_the_target_goes_on_in_origin_form() -> None:
    """An address in a target is compared and taken off."""
    assert read_request(request(f"https://{NAME}/a?b"), NAME, 443, tls=True).target == b"/a?b"
    assert read_request(request(f"https://{NAME}?b"), NAME, 443, tls=True).target == b"/?b"
    assert read_request(request("*", method="OPTIONS"), NAME, 443, tls=True).target == b"*"


@pytest.mark.parametrize("method", ["CONNECT", "TRACE", "TRACK"])
def test_methods_that_are_refused(method: str) -> None:
    """Nothing tunnels out of a flow, and nothing echoes what was put in; other methods pass, unknown ones
    too.
    """
    asked = h11.Request(method=method, target="/x", headers=[("Host", NAME)])
    assert refused(asked) == "method"
    assert refused(request(method="PROPFIND")) == ""


@pytest.mark.parametrize(
    ("fields", "version", "code"),
    [
        ([("Content-Length", "3"), ("Transfer-Encoding", "chunked")], "1.1", "length"),
        ([("Transfer-Encoding", "chunked")], "1.0", "length"),
        ([("Connection", "close, Content-Length"), ("Content-Length", "3")], "1.1", "connection-field"),
        ([("Connection", "host")], "1.1", "connection-field"),
        ([("Connection", "transfer-encoding")], "1.1", "connection-field"),
        ([("X", "y")] * 300, "1.1", "too-many-fields"),
        ([("X", "y")] * 200, "1.1", ""),
        ([("Transfer-Encoding", "chunked")], "1.1", ""),
    ],
)
def test_lengths_that_could_be_read_twice(fields: list[tuple[str, str]], version: str, code: str) -> None:
    """A request that says in two ways where it ends, or hides how, is refused."""
    assert refused(request("/x", *fields, version=version)) == code


def test_versions() -> None:
    """What is not HTTP/1 is refused, the preface of HTTP/2 included."""
    preface = h11.Request(method="PRI", target="*", headers=[], http_version="2.0")
    assert refused(preface) == "http-version"


def test_fields_of_one_hop_stay() -> None:
    """What concerns one hop, or is declared to, stays; the rest goes on, in order and as it is spelt."""
    asked = request(
        "/x", ("Connection", "close, X-Mine"), ("x-mine", "1"), ("Keep-Alive", "5"),
        ("Proxy-Connection", "x"),
        ("Proxy-Authorization", "Basic x"), ("TE", "trailers"), ("Upgrade", "h2c"), ("HTTP2-Settings", "x"),
        ("X-Other", "2"), ("accept", "a"), ("Accept", "b"),
    )  # fmt: skip
    assert read_request(asked, NAME, 443, tls=True).fields == [
        (b"X-Other", b"2"), (b"accept", b"a"), (b"Accept", b"b")
    ]  # fmt: skip


def test_websockets() -> None:
    """The handshake of a WebSocket goes on; other upgrades, and half a handshake, do not."""
    head = read_request(request("/ws", *WEBSOCKET), NAME, 443, tls=True)
    assert head.key == b"a2V5"
    assert head.fields[-2:] == [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
    for wrong in (
        [("Connection", "Upgrade"), ("Upgrade", "h2c"), ("HTTP2-Settings", "AAA")],
        [("Connection", "Upgrade"), ("Upgrade", "websocket")],
        [("Upgrade", "websocket"), ("Sec-WebSocket-Key", "a2V5")],
        [*WEBSOCKET, ("Upgrade", "h2c")],
        [*WEBSOCKET, ("Content-Length", "5")],
    ):
        head = read_request(request("/ws", *wrong), NAME, 443, tls=True)
        assert head.key == b""
        assert not any(name.lower() in (b"upgrade", b"connection") for name, _ in head.fields)
    assert read_request(request("/ws", *WEBSOCKET, method="POST"), NAME, 443, tls=True).key == b""


def test_the_other_half_of_a_handshake() -> None:
    """A change of protocol is one only with the digest of the key (the example of RFC 6455)."""
    good = [(b"Upgrade", b"websocket"), (b"Sec-WebSocket-Accept", b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=")]
    assert accepts_upgrade(b"dGhlIHNhbXBsZSBub25jZQ==", good)
    assert not accepts_upgrade(b"x", good)
    assert not accepts_upgrade(b"dGhlIHNhbXBsZSBub25jZQ==", [(b"Upgrade", b"h2c"), good[1]])
    assert not accepts_upgrade(b"dGhlIHNhbXBsZSBub25jZQ==", good[:1])


@pytest.mark.parametrize(
    "name", ["X-HTTP-Method-Override", "x_http_method", "X-Original-URL", "X_Rewrite-Url"]
)
def test_overrides(name: str) -> None:
    """Fields that some servers take for another method or path are refused where rules are about those."""
    with pytest.raises(Refused) as caught:
        check_overrides([(name.encode(), b"DELETE")])
    assert caught.value.code == "override"
    check_overrides([(b"X-Http", b"x"), (b"X-Request-Id", b"y")])


def test_answers() -> None:
    """Of an answer goes on what is not of one hop; of two lengths the coding, and no offer of QUIC."""
    fields = [
        (b"Connection", b"X-Gone"), (b"x-gone", b"1"), (b"Content-Length", b"5"), (b"Alt-Svc", b'h3=":443"'),
        (b"Set-Cookie", b"a"), (b"Set-Cookie", b"b"), (b"Trailer", b"X"),
    ]  # fmt: skip
    kept = [(b"Content-Length", b"5"), (b"Set-Cookie", b"a"), (b"Set-Cookie", b"b"), (b"Trailer", b"X")]
    assert answer_fields(fields) == kept
    coded = [*fields, (b"Transfer-Encoding", b"chunked")]
    assert answer_fields(coded) == [*kept[1:], (b"Transfer-Encoding", b"chunked")]


def test_trailers() -> None:
    """Behind a body comes nothing that would have counted before it."""
    fields = [(b"X-Sum", b"1"), (b"Host", b"evil"), (b"Content-Length", b"1"), (b"authorization", b"x"),
              (b"X-Api-Key", b"k"), (b"Transfer-Encoding", b"chunked")]  # fmt: skip
    assert trailer_fields(fields, [b"x-api-key"]) == [(b"X-Sum", b"1")]
    assert len(trailer_fields([(b"X", b"y")] * 1000)) == 256


def test_codings() -> None:
    """The codings of a body are read from every field, without the one that is none."""
    assert is_encoded([]) == ""
    assert is_encoded([(b"Content-Encoding", b"Identity")]) == ""
    assert is_encoded([(b"content-encoding", b"GZip")]) == "gzip"
    assert is_encoded([(b"Content-Encoding", b"gzip, br"), (b"content-encoding", b"zstd")]) == "gzip,br,zstd"


def test_crowded_heads() -> None:
    """Lines count up to the end of a head, whatever ends them, and the lines of a body do not."""
    fine = b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 256 + b"\r\n"
    assert not is_crowded(fine + b"\n" * 1000)
    assert not is_crowded(fine.replace(b"\r\n", b"\n") + b"line\n" * 1000)
    assert is_crowded(b"X: y\r\n" + fine)
    assert is_crowded(b"a:\n" * 300)
    assert not is_crowded(b"")


def test_the_hosts_own_spelling() -> None:
    """A host gets one spelling of its name, whatever the client wrote."""
    assert host_text(NAME, 443, tls=True) == NAME
    assert host_text(NAME, 80, tls=True) == f"{NAME}:80"
    assert host_text(NAME, 80, tls=False) == NAME
    assert host_text("2001:db8::7", 8443, tls=True) == "[2001:db8::7]:8443"
