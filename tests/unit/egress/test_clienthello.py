"""ClientHello: what real clients send is read, and what servers might read differently is refused."""

from __future__ import annotations

import ssl

import msgspec
import pytest

from casemate.egress import clienthello
from casemate.egress.clienthello import Hello, HelloError, Incomplete, Reader, parse
from tests.unit.egress import wire

NAMED = wire.sni("www.example.org")
GOOD = wire.hello(NAMED, wire.alpn(b"h2", b"http/1.1"), wire.versions(0x0A0A, 0x0304, 0x0303))
TLS12, TLS13 = 0x0303, 0x0304
TWO = (TLS13, TLS12)
FOUR = (*TWO, 0x0302, 0x0301)
H2 = ("h2", "http/1.1")

# Client -> name, protocols, versions, whether it has the extension of ECH.
REAL = {
    "openssl-3.0-tls1.2-without-name": (None, (), (TLS12,), False),
    "curl-7.88-openssl-3.0": ("www.example.org", H2, FOUR, False),
    "node-24-openssl-3.5": ("www.example.org", H2, TWO, False),
    "java-17": ("www.example.org", (), TWO, False),
    "git-2.39-gnutls-3.7": ("www.example.org", H2, FOUR, False),
    "uv-rustls": ("localhost", H2, TWO, False),
    "chrome-as-boringssl-sends-it": ("www.example.org", H2, TWO, True),
    "firefox-as-boringssl-sends-it": ("www.example.org", H2, TWO, True),
    "safari-as-boringssl-sends-it": ("www.example.org", H2, TWO, False),
}


def read(data: bytes) -> Hello:
    """The ClientHello that must be there."""
    found = parse(data)
    assert isinstance(found, Hello)
    return found


def code(data: bytes) -> str:
    """Why the data are refused."""
    with pytest.raises(HelloError) as caught:
        parse(data)
    assert str(caught.value).isascii()
    return caught.value.code


@pytest.mark.parametrize("client", REAL)
def test_real_clients_are_read(client: str) -> None:
    """OpenSSL, GnuTLS, rustls, Java and browsers, post-quantum keys, placeholders and padding included."""
    data = wire.real_hellos()[client]
    name, alpn, versions, ech = REAL[client]
    assert read(data) == Hello(server_name=name, alpn=alpn, versions=versions, has_ech=ech, size=len(data))
    assert clienthello.looks_like_tls(data[:5])


def test_real_clients_are_all_there() -> None:
    """Control: some of the captured ones are larger than a packet, and every captured one is compared."""
    real = wire.real_hellos()
    assert set(real) == set(REAL)
    assert max(map(len, real.values())) > 1500


@pytest.mark.parametrize("host", ["www.example.org", "WWW.Example.ORG", "www.example.org.", "bücher.example"])
def test_this_interpreters_client_is_read(host: str) -> None:
    """What the running OpenSSL sends now, whatever its version is, has the name in our spelling."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=host)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    found = read(outgoing.read())
    assert found.server_name == ("xn--bcher-kva.example" if host.startswith("b") else "www.example.org")
    assert found.alpn == ("http/1.1",)


def test_the_alert_is_understood() -> None:
    """A client that gets the alert for its hello says that access was denied, not that the network broke."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="example.org")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    incoming.write(clienthello.alert(clienthello.FATAL, clienthello.ACCESS_DENIED))
    with pytest.raises(ssl.SSLError) as caught:
        client.do_handshake()
    assert caught.value.reason == "TLSV1_ALERT_ACCESS_DENIED"
    named = clienthello.alert(clienthello.FATAL, clienthello.UNRECOGNIZED_NAME)
    assert named == bytes.fromhex("15 0303 0002 02 70")


def test_fields() -> None:
    """Names of placeholders are left out; what follows the message is not counted."""
    expected = Hello("www.example.org", H2, TWO, has_ech=False, size=len(GOOD))
    assert read(GOOD) == expected
    assert read(GOOD + b"\x14\x03\x03\0\1\1early data") == expected


def said(
    name: str | None = None, alpn: tuple[str, ...] = (), version: int = TLS12, ech: bool = False
) -> Hello:
    """A ClientHello of unknown length."""
    return Hello(server_name=name, alpn=alpn, versions=(version,), has_ech=ech, size=0)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (wire.records(wire.message(wire.body(legacy=0x0301))), said(version=0x0301)),
        (wire.records(wire.message(wire.body(b"", session=b""))), said()),
        (wire.hello(wire.sni("1.2.3.4")), said("1.2.3.4")),
        (wire.hello(wire.sni("2001:DB8::1")), said("2001:db8::1")),
        (wire.hello(wire.extension(0xFE0D, b"\1")), said(ech=True)),
        (wire.hello(wire.alpn(b"\xff\n")), said(alpn=("\xff\n",))),
        (wire.hello(wire.extension(0x2A2A), wire.extension(0x3A3A, b"\0")), said()),
    ],
)
def test_rare_hellos(data: bytes, expected: Hello) -> None:
    """No extensions, an empty block, an address for a name, ECH, odd protocols, placeholders."""
    assert read(data) == msgspec.structs.replace(expected, size=len(data))


@pytest.mark.parametrize("sizes", [(1,), (3, 1), (4,), (5, 5, 5), (1,) * 60, (40,), (100, 1)])
def test_fragments_of_records(sizes: tuple[int, ...]) -> None:
    """A message that is spread over records, as servers accept it, is put together."""
    message = GOOD[5:]
    data = wire.records(message, *sizes)
    found = read(data)
    assert (found.server_name, found.size) == ("www.example.org", len(data))


def test_incomplete_says_how_much_is_missing() -> None:
    """Each look needs what it says and no less, so a client that sends single bytes costs few looks."""
    data = wire.records(GOOD[5:], 10, 10)
    looks = []
    have = 0
    while isinstance(found := parse(data[:have]), Incomplete):
        assert have < found.needed <= len(data)
        assert all(parse(data[:less]) == found for less in range(have, found.needed))
        have = found.needed
        looks.append(have)
    assert looks == [5, 15, 20, 30, 35, len(data)]
    assert found.server_name == "www.example.org"


def test_reader_takes_any_pieces() -> None:
    """Byte by byte the reader comes to the same result, and keeps everything for the relay."""
    data = wire.records(GOOD[5:], 10, 10)
    reader = Reader()
    results = [reader.feed(data[at : at + 1]) for at in range(len(data))]
    assert results == [None] * (len(data) - 1) + [parse(data)]
    assert reader.data == data
    assert Reader().feed(data + b"early") == parse(data)


def names(data: bytes) -> bytes:
    """A hello with this as the server_name extension's data."""
    return wire.hello(wire.extension(0, data))


@pytest.mark.parametrize(
    "data",
    [
        wire.hello(wire.sni("")), names(b""), names(b"\0\0"), names(b"\0\1\0"),
        wire.hello(wire.sni("a.example", 1)),
        names(wire.u16((b"\0" + wire.u16(b"www.example.org")) * 2)),
        names(wire.u16(b"\0" + wire.u16(b"www.example.org") + b"\1" + wire.u16(b"x"))),
        names(wire.u16(b"\0" + wire.u16(b"www.example.org")) + b"\0"),
        names(wire.u16(b"\0" + wire.u16(b"www.example.org") + b"\0")),
        names(wire.u16(b"\0\0\xff" + b"www.example.org")),
        names(wire.u16(b"\0\0\3" + b"www.example.org")),
        names(b"\0\xff\0" + wire.u16(b"www.example.org")),
        *(wire.hello(wire.sni(name)) for name in (
            b"www.example.org\0", b"evil.example\0.example.org", b"\0", b" www.example.org",
            b"b\xc3\xbccher.example",
            b"www.example.org:443", b"*.example.org", b"a..b", b".", b"127.1", b"2130706433", b"[::1]x",
            b"a" * 64, b"a." * 200 + b"b", b"-a.example", b"a/b", b"user@example.org", b"x" * 5000,
        )),
    ],
)  # fmt: skip
def test_a_server_name_is_one_host_name(data: bytes) -> None:
    """Two entries, other kinds, wrong lengths, NUL and every text that is no host name are refused."""
    assert code(data) == "tls-server-name"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (wire.hello(NAMED, NAMED), "tls-duplicate"),
        (wire.hello(NAMED, wire.sni("other.example")), "tls-duplicate"),
        (wire.hello(NAMED, wire.extension(0x2A2A), wire.extension(0x2A2A)), "tls-duplicate"),
        (wire.records(wire.message(wire.body(NAMED, tail=b"\0"))), "tls-trailing"),
        (wire.records(wire.message(wire.body(tail=b"\0"))), "tls-short"),
        (wire.records(wire.message(wire.body(NAMED)) + b"\0"), "tls-trailing"),
        (wire.records(wire.message(wire.body(NAMED)) * 2), "tls-trailing"),
        (wire.records(wire.message(wire.body()) + b"\0\0"), "tls-trailing"),
        (wire.records(wire.message(wire.body(NAMED)) + b"\0\0", 20), "tls-trailing"),
        (wire.records(wire.message(wire.body(NAMED)[:-1])), "tls-short"),
        (wire.records(wire.message(wire.body(NAMED)[:20])), "tls-short"),
        (wire.records(wire.message(wire.body()[:34])), "tls-short"),
        (wire.records(wire.message(wire.body()[:70])), "tls-short"),
        (wire.records(wire.message(b"")), "tls-version"),
        (wire.records(wire.message(b"\3")), "tls-version"),
        (wire.records(wire.message(wire.body(NAMED, legacy=0x0202))), "tls-version"),
        (wire.records(wire.message(wire.body(NAMED, legacy=0xFEFD))), "tls-version"),
        (wire.records(wire.message(wire.body(NAMED, session=bytes(33)))), "tls-field"),
        (wire.records(wire.message(wire.body(NAMED, suites=b""))), "tls-field"),
        (wire.records(wire.message(wire.body(NAMED, suites=b"\0\1\0"))), "tls-field"),
        (wire.records(wire.message(wire.body(NAMED, methods=b""))), "tls-field"),
        (wire.records(wire.message(wire.body(NAMED), kind=2)), "tls-message"),
        (wire.records(wire.message(wire.body(NAMED), kind=0)), "tls-message"),
        (wire.records(wire.message(wire.body(wire.extension(21, bytes(17000)))), 16000), "tls-long"),
        (wire.hello(wire.extension(16, b"")), "tls-alpn"),
        (wire.hello(wire.extension(16, wire.u16(b""))), "tls-alpn"),
        (wire.hello(wire.alpn(b"")), "tls-alpn"),
        (wire.hello(wire.alpn(b"h2", b"")), "tls-alpn"),
        (wire.hello(wire.extension(16, wire.u16(b"\5h2"))), "tls-alpn"),
        (wire.hello(wire.extension(16, b"\0\3\2h2\0")), "tls-alpn"),
        (wire.hello(wire.extension(43, b"")), "tls-versions"),
        (wire.hello(wire.versions()), "tls-versions"),
        (wire.hello(wire.extension(43, b"\3\3\4\3")), "tls-versions"),
        (wire.hello(wire.extension(43, b"\2\3\4\3\3")), "tls-versions"),
        (wire.records(GOOD[5:], kind=21), "tls-record-type"),
        (wire.records(GOOD[5:], 9)[:14] + wire.records(GOOD[14:], kind=23), "tls-record-type"),
        (wire.records(GOOD[5:], version=0x0200), "tls-version"),
        (b"\x16\3\1\0\0" + GOOD, "tls-record-length"),
        (b"\x16\3\1\x40\1" + GOOD, "tls-record-length"),
        (wire.records(GOOD[5:], 9)[:14] + b"\x16\3\1\0\0" + wire.records(GOOD[14:]), "tls-record-length"),
        (wire.records(GOOD[5:], *(1,) * 64), "tls-fragments"),
        (b"\x80\x2e\1\3\1" + bytes(40), "tls-sslv2"),
        (b"\x80\x2e\1\0\2" + bytes(40), "tls-sslv2"),
        (b"GET / HTTP/1.1\r\n", "tls-record-type"),
        (b"SSH-2.0-x\r\n", "tls-record-type"),
        (b"\x15\3\1\0\2\1\0" + GOOD, "tls-record-type"),
    ],
)
def test_what_no_client_sends_is_refused(data: bytes, expected: str) -> None:
    """Duplicates, trailing bytes, wrong lengths, other messages, other protocols: each by its own reason."""
    assert read(GOOD).server_name == "www.example.org", "control"
    assert code(data) == expected


def test_the_largest_hello_is_read_and_no_larger_one() -> None:
    """16 KiB, in one record or two; one byte more is refused as soon as the header says so."""
    room = clienthello.MAX_HELLO - len(wire.message(wire.body(NAMED, wire.extension(21))))
    message = wire.message(wire.body(NAMED, wire.extension(21, bytes(room))))
    assert len(message) == clienthello.MAX_HELLO
    assert read(wire.records(message)).server_name == "www.example.org"
    assert read(wire.records(message, 8000)).server_name == "www.example.org"
    more = wire.message(wire.body(NAMED, wire.extension(21, bytes(room + 1))))
    assert code(wire.records(more, 100)[:9]) == "tls-long"


def test_rubbish_is_refused_before_it_is_whole() -> None:
    """A first byte, a version, a message type that cannot be right are enough."""
    for start in (b"G", b"\x16\2", b"\x17", b"\0", b"\x16\3\1\xff\xff", b"\x16\3\1\0\x20\2", b"\x80\1\2"):
        with pytest.raises(HelloError):
            parse(start)
    for start in (b"", b"\x16", b"\x16\3", b"\x16\3\1\0\x20", b"\x16\3\1\0\x20\1", b"\x80", b"\x80\x2e\1\3"):
        assert isinstance(parse(start), Incomplete)
    reader = Reader()
    assert reader.feed(b"\x16") is None
    with pytest.raises(HelloError):
        reader.feed(b"\2")


def test_a_later_record_is_judged_by_its_whole_header() -> None:
    """Where a piece ends inside of one makes no difference to what comes of the stream."""
    first = wire.records(GOOD[5:], 10)[:15]
    for rest in (b"", b"\x17", b"\x16\2", b"\x17\3\3\0"):
        assert parse(first + rest) == Incomplete(20)
    assert code(first + b"\x17\3\3\0\1") == "tls-record-type"


@pytest.mark.parametrize(
    ("first", "tls"),
    [
        (b"\x16\3\1\2\0", True), (b"\x16", True), (b"\x15\3\3\0\2", True), (b"\x17\3\3", True),
        (b"\x80\x2e\1\3\1", True),
        (b"\x80", True), (b"", False), (b"GET /", False), (b"SSH-2", False), (b"\x16\2\0", True),
        (b"\5\1\0", False),
        (b"\0\0\0\x08\4", False), (b"\x80\x2e\2", False), (b"PRI *", False),
    ],
)  # fmt: skip
def test_looks_like_tls(first: bytes, tls: bool) -> None:
    """Every way that a server might take for a beginning of TLS counts, and other protocols do not."""
    assert clienthello.looks_like_tls(first) is tls


# What a server of OpenSSL 3.0 answered to a hello without a key share that it takes.
RETRY = bytes.fromhex(
    "1603030058 02000054 0303 cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c 20"
    + "00" * 32
    + "130200000c002b00020304003300020018 140303000101"
)
CHANGE = bytes.fromhex("140303000101")
EARLY = bytes.fromhex("1703030020") + bytes(32)


@pytest.mark.parametrize(
    ("answer", "again"),
    [
        (b"", None), (RETRY, True), (RETRY[:43], True), (RETRY[:42], None), (RETRY[:11], None),
        (b"\x16", None),
        (RETRY[:11] + b"\xcf\x22", False), (RETRY[:42] + b"\0", False),
        (b"\x16\3\3\0\x7a\2\0\0\x76\3\3\xa8", False),
        (clienthello.alert(2, 49), False), (b"\x16\3\3\0\x58\x0b", False), (b"HTTP/1.1 400", False),
        (b"\x17", False),
    ],
)  # fmt: skip
def test_a_server_that_asks_again_is_noticed(answer: bytes, again: bool | None) -> None:
    """By the random that stands for a HelloRetryRequest; each other answer is told from it at once."""
    assert clienthello.asks_again(answer) is again


@pytest.mark.parametrize("before", [b"", CHANGE, EARLY, CHANGE + EARLY * 3, EARLY + CHANGE])
def test_a_second_hello_is_read_behind_early_data(before: bytes) -> None:
    """Servers go by the name in the second one: it is found behind whatever precedes it, in any pieces."""
    second = wire.records(wire.message(wire.body(wire.sni("other.example"))), 20)
    data = before + second
    expected = Hello("other.example", (), (TLS12,), has_ech=False, size=len(data))
    assert parse(data + b"more", again=True) == expected
    for end in range(len(data)):
        found = parse(data[:end], again=True)
        assert isinstance(found, Incomplete)
        assert end < found.needed <= len(data)
    if before:
        assert code(data) == "tls-record-type", "control: nothing may stand before the first one"


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (CHANGE * 2, "tls-early"),
        (b"\x14\3\3\0\2\1\1", "tls-early"),
        (b"\x14\3\3\0\0", "tls-early"),
        (EARLY * 2000, "tls-early"),
        ((b"\x17\3\3\xff\xff"), "tls-early"),
        (b"\x17\2\3\0\1x", "tls-version"),
        (clienthello.alert(1, 0), "tls-record-type"),
    ],
)
def test_what_may_not_stand_before_a_second_hello(before: bytes, expected: str) -> None:
    """Early data within bounds and one change of ciphers; nothing else."""
    with pytest.raises(HelloError) as caught:
        parse(before + GOOD, again=True)
    assert caught.value.code == expected
