"""SOCKS5: the conversation as clients lead it, and what they may not ask for."""

from __future__ import annotations

import pytest

from casemate.egress import socks5
from casemate.egress.socks5 import Connect, Refusal, Send, Socks5
from tests.unit.egress import wire

HELLO = b"\5\1\0"
PORT = (443).to_bytes(2, "big")


def request(kind: int, where: bytes, *, command: int = 1, port: bytes = PORT, reserved: int = 0) -> bytes:
    """A request for an address of this kind."""
    return bytes((5, command, reserved, kind)) + where + port


def named(name: bytes) -> bytes:
    """A request by name."""
    return request(3, wire.u8(name))


def talk(data: bytes) -> list[Send | Connect | Refusal]:
    """All that comes of these bytes."""
    return Socks5().receive(data)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (named(b"Www.Example.ORG."), Connect("www.example.org", 443, is_address=False)),
        (named(b"localhost"), Connect("localhost", 443, is_address=False)),
        (named(b"1.2.3.4"), Connect("1.2.3.4", 443, is_address=True)),
        (named(b"2001:DB8::1"), Connect("2001:db8::1", 443, is_address=True)),
        (request(1, bytes((1, 2, 3, 4))), Connect("1.2.3.4", 443, is_address=True)),
        (request(4, bytes(15) + b"\1"), Connect("::1", 443, is_address=True)),
        (request(1, bytes(4), port=b"\xff\xff"), Connect("0.0.0.0", 65535, is_address=True)),
    ],
)
def test_requests(asked: bytes, expected: Connect) -> None:
    """A name in our spelling, or an address, and the port; both steps may come at once."""
    assert talk(HELLO + asked) == [Send(b"\5\0"), expected]
    conversation = Socks5()
    assert conversation.receive(HELLO) == [Send(b"\5\0")]
    assert conversation.receive(asked) == [expected]
    assert conversation.leftover == b""


def test_mapped_addresses_stay_addresses() -> None:
    """IPv4 inside of IPv6 comes out as an address that can be judged."""
    [_, found] = talk(HELLO + request(4, bytes(10) + b"\xff\xff\x7f\0\0\1"))
    assert isinstance(found, Connect)
    assert found.is_address
    assert found.host in ("::ffff:7f00:1", "::ffff:127.0.0.1")


def test_first_bytes_for_the_host_are_given_back() -> None:
    """What an impatient client sends behind its request is kept, up to a bound."""
    conversation = Socks5()
    assert len(conversation.receive(HELLO + named(b"a.example") + b"GET ")) == 2
    assert conversation.receive(b"/") == []
    assert conversation.leftover == b"GET /"
    [refused] = conversation.receive(bytes(100_000))
    assert isinstance(refused, Refusal)
    assert (refused.data, refused.error.code) == (socks5.answer(socks5.FAILED), "socks-early")
    assert conversation.leftover == b""


def test_byte_by_byte() -> None:
    """A conversation in single bytes has the same events, login included."""
    data = b"\5\2\1\2" + b"\1" + wire.u8(b"user") + wire.u8(b"secret") + named(b"a.example") + b"rest"
    conversation = Socks5()
    events = [event for at in range(len(data)) for event in conversation.receive(data[at : at + 1])]
    assert events == talk(data) == [
        Send(b"\5\2"), Send(b"\1\0"), Connect("a.example", 443, is_address=False),
    ]  # fmt: skip
    assert conversation.leftover == b"rest"


def test_a_login_is_asked_for_only_if_the_client_insists() -> None:
    """Without a login where both are offered; an empty user name and password will do, too."""
    assert talk(b"\5\2\2\0") == [Send(b"\5\0")]
    assert talk(b"\5\1\2" + b"\1\0\0") == [Send(b"\5\2"), Send(b"\1\0")]


def test_the_answer() -> None:
    """Ten bytes with the code, and no address of the host in them."""
    assert socks5.answer(socks5.NOT_ALLOWED) == b"\5\2\0\1" + bytes(6)


@pytest.mark.parametrize(
    ("data", "reply", "code"),
    [
        (b"\4\1\0\x50\1\2\3\4user\0", b"\0\x5b" + bytes(6), "socks-version-4"),
        (b"GET / HTTP/1.1\r\n", b"", "socks-version"),
        (b"\0", b"", "socks-version"),
        (b"\5\0", b"\5\xff", "socks-method"),
        (b"\5\1\1", b"\5\xff", "socks-method"),
        (b"\5\2\x03\x80", b"\5\xff", "socks-method"),
        (b"\5\1\2" + b"\5\1\0", b"", "socks-login"),
        (HELLO + b"\4\1\0\1", b"", "socks-version"),
        (HELLO + b"\5\1\0\2\0", socks5.answer(8), "socks-address-type"),
        (HELLO + request(3, b"\0"), socks5.answer(2), "socks-name"),
        (HELLO + request(1, bytes(4), command=2), socks5.answer(7), "socks-command"),
        (HELLO + request(1, bytes(4), command=3), socks5.answer(7), "socks-command"),
        (HELLO + request(3, wire.u8(b"a.example"), command=0xF0), socks5.answer(7), "socks-command"),
        (HELLO + request(1, bytes(4), port=b"\0\0"), socks5.answer(1), "socks-request"),
        (HELLO + request(1, bytes(4), reserved=1), socks5.answer(1), "socks-request"),
    ],
)
def test_what_is_not_served(data: bytes, reply: bytes, code: str) -> None:
    """Other versions, logins, commands, kinds of address: an answer that the client knows, and the end."""
    conversation = Socks5()
    last = conversation.receive(data)[-1]
    assert isinstance(last, Refusal)
    assert (last.data, last.error.code) == (reply, code)
    assert str(last.error).isascii()
    assert conversation.receive(b"more") == [], "nothing is read any more"


@pytest.mark.parametrize(
    "name",
    [
        b"evil.example\0.example.org", b"example.org\0", b"\0", b"a b.example", b"b\xc3\xbccher.example",
        b"\xff",
        b"a..b", b".", b"127.1", b"2130706433", b"0x7f.1", b"0177.0.0.1", b"example.org:80", b"[::1]:80",
        b"fe80::1%1",
        b"a" * 64, b"a." * 127 + b"b", b"-a.example", b"a/b", b"user@example.org", b"*.example.org",
        b"a\r\nb",
    ],
)  # fmt: skip
def test_a_name_is_a_host_name(name: bytes) -> None:
    """A name that libc might cut off or take for an address is refused before anybody compares it."""
    assert talk(HELLO + named(b"example.org"))[-1] == Connect("example.org", 443, is_address=False), "control"
    last = talk(HELLO + named(name))[-1]
    assert isinstance(last, Refusal)
    assert (last.data, last.error.code) == (socks5.answer(socks5.NOT_ALLOWED), "socks-name")
    assert str(last.error).isascii()


def test_looks_like_socks() -> None:
    """Both versions are for this proxy to answer; HTTP and TLS are not."""
    assert [socks5.looks_like_socks(first) for first in (b"\5", b"\4\1", b"", b"GET", b"\x16\3")] == [
        True, True, False, False, False,
    ]  # fmt: skip
