"""Whatever bytes a sandbox sends: the parsers read it, refuse it by their own error, or ask for more."""

from __future__ import annotations

import random
import string
import tracemalloc
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from casemate.egress import clienthello, dns, socks5, sshreply
from casemate.policy import hosts
from tests.unit.egress import wire

if TYPE_CHECKING:
    from collections.abc import Iterator

LDH = string.ascii_lowercase + string.digits
LABELS = st.from_regex(r"\A[a-z0-9_]([a-z0-9_-]{0,20}[a-z0-9_])?\Z")
LAST = st.from_regex(r"\A[a-z][a-z0-9]{0,10}\Z")
NAMES = st.builds(lambda labels, last: ".".join([*labels, last]), st.lists(LABELS, max_size=5), LAST)
TEXTS = st.one_of(
    st.text(max_size=80),
    st.text("aA1.-_0xf:[]%/@ \0\n\u3002\uff0e\u212aß", max_size=40),
    st.lists(
        st.sampled_from(["a", "-", ".", "127", "0x7f", "xn--", "ü", "\0", "..", "é", "1"]), max_size=8
    ).map("".join),
)  # fmt: skip

QUERIES = (
    wire.query(wire.name("www.example.org")),
    wire.query(wire.name("7.1.18.198.in-addr.arpa"), 12, flags=0x0120),
    wire.query(wire.name("wWw.eXample.org"), 28, extra=wire.opt(options=b"\0\x0a" + wire.u16(bytes(8)))),
    wire.query(wire.name("a" * 63), 255, extra=wire.opt(65535, 0, 0x8000)),
)
HELLOS = (
    *wire.real_hellos().values(),
    wire.hello(wire.sni("www.example.org"), wire.alpn(b"h2"), wire.versions(0x0304)),
    wire.records(
        wire.message(wire.body(wire.sni("www.example.org"), wire.extension(21, bytes(300)))), 1, 90, 3
    ),
)
TALKS = (
    b"\5\1\0" + b"\5\1\0\3" + wire.u8(b"www.example.org") + b"\1\xbb",
    b"\5\2\1\2" + b"\1" + wire.u8(b"user") + wire.u8(b"secret") + b"\5\1\0\1\1\2\3\4\0\x50",
    b"\5\1\0" + b"\5\1\0\4" + bytes(16) + b"\0\x50" + b"GET / HTTP/1.1\r\n",
    b"\4\1\0\x50\0\0\0\1user\0www.example.org\0",
)


# Bytes at which a parser decides something.
TELLING = (0, 1, 2, 3, 4, 5, 0x16, 0x2E, 0x3F, 0x40, 0x7F, 0x80, 0xC0, 0xFF)


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    """``data`` cut at these places."""
    places = sorted({cut % (len(data) + 1) for cut in cuts})
    for start, end in zip([0, *places], [*places, len(data)], strict=True):
        yield data[start:end]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A message with a few bytes changed, put in, taken out, doubled or cut off."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(7):
            case 0:
                out[at : at + 1] = bytes((rng.choice(TELLING),))
            case 1:
                out[at : at + 1] = bytes((rng.randrange(256),))
            case 2:
                out[at:at] = rng.randbytes(rng.choice((1, 2, 40)))
            case 3:
                del out[at : at + rng.choice((1, 2, 40))]
            case 4:
                del out[at:]
            case 5:
                start = rng.randrange(len(out) + 1)
                out[at:at] = out[start : start + rng.choice((1, 4, 50))]
            case _:
                if at < len(out):
                    out[at] = (out[at] + rng.choice((-1, 1))) % 256
    return bytes(out)


def check_name(name: str) -> None:
    """A name that a parser lets through is in the one spelling, and no resolver's address."""
    assert hosts.normalise(name) == name
    assert hosts.address(name) is None
    assert set(name) <= set(LDH + "-_.")
    assert len(name) <= 253


def check_host(text: str) -> None:
    """The same for what may be an address, too."""
    address = hosts.address(text)
    if address is None:
        check_name(text)
    else:
        assert str(address) == text


def check_dns(data: bytes) -> None:
    """A query is refused, or answered so that the answer fits and repeats the question."""
    try:
        query = dns.parse_query(data)
    except dns.DnsError:
        return
    if query.name is not None:
        check_name(query.name)
    assert data[12 : 12 + len(query.question)] == query.question
    for answer in (
        dns.reply(query, ["198.18.1.7", "fd53::7"], 60),
        dns.negative(query, dns.NXDOMAIN, explain="no rule names it"),
        dns.pointer(query, "www.example.org", 60),
    ):
        assert len(answer) <= 512
        assert answer[:2] == data[:2]
        assert answer[2] & 0x80
        assert answer[4:6] == b"\0\1"
        assert answer[12 : 12 + len(query.question)] == query.question
        with pytest.raises(dns.DnsError):
            dns.parse_query(answer)


def check_hello(data: bytes) -> None:
    """A stream is refused, is asked to go on, or has a ClientHello whose name is a host."""
    assert clienthello.asks_again(data) in (True, False, None)
    with suppress(clienthello.HelloError):
        second = clienthello.parse(data, again=True)
        assert isinstance(second, clienthello.Hello) or second.needed > len(data)
    try:
        found = clienthello.parse(data)
    except clienthello.HelloError:
        return
    assert clienthello.looks_like_tls(data[:5]) or not data
    if isinstance(found, clienthello.Incomplete):
        assert len(data) < found.needed <= len(data) + (1 << 14) + 5
        return
    assert found.size <= len(data)
    if found.server_name is not None:
        check_host(found.server_name)
    assert clienthello.parse(data[: found.size]) == found, "what follows has no say"
    assert isinstance(clienthello.parse(data[: found.size - 1]), clienthello.Incomplete)


def check_socks(data: bytes) -> None:
    """A conversation goes on, ends in a host and a port, or ends in a refusal; there is one end."""
    events = socks5.Socks5().receive(data)
    for event in events[:-1]:
        assert isinstance(event, socks5.Send)
    for event in events:
        if isinstance(event, socks5.Connect):
            check_host(event.host)
            assert event.is_address is (hosts.address(event.host) is not None)
            assert 0 < event.port < 65536


@given(TEXTS)
@example("\u212a.example")
@example("a.0x")
def test_names_end_in_the_one_spelling_or_in_a_sentence(text: str) -> None:
    """Any text is a name in its one spelling, or a ValueError in ASCII; never both an address and a name."""
    try:
        name = hosts.normalise(text)
    except ValueError as error:
        name = ""
        told = type(error) is ValueError and str(error).isascii() and len(str(error)) < 1000
    else:
        told = True
    assert told
    if name:
        check_name(name)
        assert hosts.address(text) is None


@given(NAMES, LABELS)
def test_names_survive_every_way_of_writing_them(name: str, label: str) -> None:
    """Case and the last dot make no difference; below a name is what has more labels before it."""
    assert hosts.normalise(name.upper() + ".") == name
    assert hosts.matches(f"{label}.{name}", name)
    assert not hosts.matches(f"{label}{name}", name)
    assert not hosts.matches(name, f"{label}.{name}")


@given(st.text("éüñαβжшд例え", min_size=1, max_size=12))
def test_other_scripts_come_back(text: str) -> None:
    """What is accepted decodes to what was written."""
    try:
        name = hosts.normalise(text + ".example")
    except ValueError:
        assume(False)
    else:
        assert name.encode().decode("idna") == text + ".example"


@given(st.ip_addresses())
def test_addresses_survive(value: object) -> None:
    """Every address is read back from its text, and is no name."""
    assert hosts.address(str(value)) == value
    with pytest.raises(ValueError, match=r"address|colon"):
        hosts.normalise(str(value))


@given(st.binary(max_size=600))
def test_any_bytes(data: bytes) -> None:
    """Bytes without any sense raise nothing but the declared errors, in every parser."""
    check_dns(data)
    check_hello(data)
    check_hello(wire.records(data))
    check_hello(wire.records(data, 40, kind=23) + HELLOS[-1])
    check_hello(wire.records(wire.message(data)))
    check_socks(data)
    check_socks(b"\5\1\0" + data)
    assert len(sshreply.refusal(data.decode("latin-1"))) < 1200
    assert sshreply.looks_like_ssh(data) is (data[:1] != b"" and b"SSH-".startswith(data[:4]))


@pytest.mark.parametrize("seed", range(20))
def test_mutated_messages(seed: int) -> None:
    """Messages of real clients with something wrong in them raise nothing but the declared errors."""
    rng = random.Random(seed)
    for _ in range(300):
        check_dns(mutated(rng.choice(QUERIES), rng))
        check_hello(mutated(rng.choice(HELLOS), rng))
        check_socks(mutated(rng.choice(TALKS), rng))


def test_messages_that_are_cut_off_or_go_on() -> None:
    """Every beginning of a good message is incomplete, and never a message itself."""
    for data in QUERIES:
        check_dns(data)
        for end in range(len(data)):
            with pytest.raises(dns.DnsError):
                dns.parse_query(data[:end])
    for data in HELLOS:
        check_hello(data)
        starts = (clienthello.parse(data[:end]) for end in range(len(data)))
        assert all(isinstance(start, clienthello.Incomplete) for start in starts)


def test_every_byte_of_a_hello_matters_or_is_ignored() -> None:
    """With any one byte changed the name is the same, another host, none, or the hello is refused."""
    data = wire.hello(wire.sni("www.example.org"), wire.alpn(b"h2"), wire.versions(0x0304))
    for at in range(len(data)):
        for value in range(256):
            check_hello(data[:at] + bytes((value,)) + data[at + 1 :])


@given(NAMES, st.sampled_from([1, 28, 12, 65, 255]), st.booleans(), st.integers(0, 0xFFFF), st.randoms())
def test_queries_come_back(name: str, qtype: int, edns: bool, ident: int, rng: random.Random) -> None:
    """What was put into a query is read out of it, in whatever mix of cases it was asked."""
    mixed = "".join(rng.choice((char.lower(), char.upper())) for char in name)
    data = wire.query(wire.name(mixed), qtype, ident=ident, extra=wire.opt() if edns else b"")
    query = dns.parse_query(data)
    assert (query.id, query.name, query.qtype, query.qclass, query.edns) == (ident, name, qtype, 1, edns)
    assert query.question == wire.name(mixed) + qtype.to_bytes(2, "big") + b"\0\1"


PROTOCOLS = st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=5)
VERSIONS = st.lists(st.integers(0, 0xFFFF).filter(lambda v: v & 0x0F0F != 0x0A0A), min_size=1, max_size=8)


SIZES = st.lists(st.integers(1, 200), max_size=30)


@given(NAMES, PROTOCOLS, VERSIONS, st.booleans(), st.binary(max_size=32), SIZES, st.binary(max_size=20))
def test_hellos_come_back(
    name: str,
    protocols: list[bytes],
    versions: list[int],
    ech: bool,
    session: bytes,
    sizes: list[int],
    rest: bytes,
) -> None:
    """What was put into a ClientHello is read out of it, over however many records it is spread."""
    extensions = [
        wire.extension(0x4A4A),
        wire.sni(name.upper()),
        wire.alpn(*protocols),
        wire.versions(0x3A3A, *versions),
    ]
    if ech:
        extensions.insert(1, wire.extension(0xFE0D, b"\0" * 10))
    data = wire.records(wire.message(wire.body(*extensions, session=session)), *sizes)
    assert clienthello.parse(data + rest) == clienthello.Hello(
        server_name=name, alpn=tuple(protocol.decode("latin-1") for protocol in protocols),
        versions=tuple(versions),
        has_ech=ech, size=len(data),
    )  # fmt: skip


def outcome(reader: clienthello.Reader, parts: Iterator[bytes]) -> object:
    """What a reader comes to in the end: a ClientHello, the code of an error, or None."""
    try:
        for part in parts:
            found = reader.feed(part)
            if found is not None:
                return found
    except clienthello.HelloError as error:
        return error.code
    return None


CUTS = st.lists(st.integers(0, 5000), max_size=12)
SEEDS = st.integers(0, 10**6)


def broken(data: bytes, seed: int) -> bytes:
    """A message with something wrong in it."""
    return mutated(data, random.Random(seed))


def cut(data: bytes, sizes: list[int]) -> bytes:
    """Any message in TLS records."""
    return wire.records(data, *sizes)


STREAMS = st.one_of(
    st.binary(max_size=300),
    st.sampled_from(HELLOS),
    st.builds(broken, st.sampled_from(HELLOS), SEEDS),
    st.builds(cut, st.binary(max_size=300), st.lists(st.integers(1, 9), max_size=9)),
)


@given(STREAMS, CUTS)
def test_a_hello_does_not_depend_on_its_pieces(data: bytes, cuts: list[int]) -> None:
    """However the stream arrives, the result is the same: the gate cannot be steered by timing."""
    whole = outcome(clienthello.Reader(), iter([data]))
    assert outcome(clienthello.Reader(), pieces(data, cuts)) == whole
    if isinstance(whole, clienthello.Hello):
        assert clienthello.parse(data) == whole


@given(
    st.one_of(
        st.binary(max_size=300).map(lambda data: b"\5\1\0" + data),
        st.builds(broken, st.sampled_from(TALKS), SEEDS),
        st.sampled_from(TALKS),
    ),
    CUTS,
)  # fmt: skip
def test_a_socks_conversation_does_not_depend_on_its_pieces(data: bytes, cuts: list[int]) -> None:
    """However the stream arrives, the events are the same, and so is what is left over."""

    def told(parts: Iterator[bytes]) -> list[object]:
        conversation = socks5.Socks5()
        events = [event for part in parts for event in conversation.receive(part)]
        shown = [(e.data, e.error.code) if isinstance(e, socks5.Refusal) else e for e in events]
        return [*shown, conversation.leftover]

    assert told(pieces(data, cuts)) == told(iter([data]))


@given(st.lists(st.sampled_from(QUERIES), max_size=5), CUTS)
def test_messages_over_tcp_do_not_depend_on_their_pieces(messages: list[bytes], cuts: list[int]) -> None:
    """However the stream arrives, the messages are the same."""
    framer = dns.Framer()
    stream = b"".join(map(dns.framed, messages))
    assert [found for part in pieces(stream, cuts) for found in framer.feed(part)] == messages


MANY = [wire.extension(kind) for kind in range(100, 4090)]
WORST = {
    "many records": wire.records(wire.message(wire.body(wire.extension(21, bytes(9000)))), *(100,) * 64),
    "many extensions": wire.hello(*MANY),
    "many protocols": wire.hello(wire.alpn(*[b"x"] * 7000)),
    "many suites": wire.records(wire.message(wire.body(wire.sni("a.example"), suites=bytes(15000)))),
}


@pytest.mark.parametrize("worst", WORST)
def test_the_worst_hello_is_cheap(worst: str) -> None:
    """Single bytes of the most tedious hello cost no more looks than it has records, and bounded memory."""
    data = WORST[worst]
    looks = 0
    needed = 0
    tracemalloc.start()
    try:
        while needed <= len(data):
            looks += 1
            try:
                found = clienthello.parse(data[:needed])
            except clienthello.HelloError:
                break
            if isinstance(found, clienthello.Hello):
                break
            assert found.needed > needed
            needed = found.needed
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert looks <= 2 * clienthello.MAX_RECORDS + 2
    assert peak < 4 << 20
