"""DNS: what resolvers send is read, what they do not send is refused, answers are what they understand."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from casemate.egress import dns
from tests.unit.egress import wire

EXAMPLE = wire.name("www.example.org")
LONGEST = wire.name(".".join(["x" * 63, "y" * 63, "z" * 63, "w" * 61]))

# As these resolvers ask, in what matters to a reader: flags, EDNS with its options, case of letters.
CLIENTS = {
    "glibc": wire.query(wire.name("allowed.example")),
    "glibc, edns0 trust-ad": wire.query(wire.name("allowed.example"), flags=0x0120, extra=wire.opt(1200)),
    "musl": wire.query(wire.name("allowed.example"), flags=0x0120),
    "go": wire.query(wire.name("allowed.example"), flags=0x0120, extra=wire.opt(1232)),
    "c-ares, 0x20": wire.query(wire.name("ALLoWED.eXampLE")),
    "c-ares, edns and a cookie": wire.query(
        wire.name("allowed.example"), extra=wire.opt(options=b"\0\x0a" + wire.u16(bytes(8)))
    ),
    "systemd-resolved": wire.query(wire.name("allowed.example"), extra=wire.opt(65494, flags=0x8000)),
    "dig": wire.query(
        wire.name("allowed.example"), flags=0x0120, extra=wire.opt(options=b"\0\x0a" + wire.u16(bytes(8)))
    ),
    "padded": wire.query(
        wire.name("allowed.example"), extra=wire.opt(options=b"\0\x0c" + wire.u16(bytes(400)))
    ),
}


def unpack(data: bytes) -> dict[str, Any]:
    """A response with one question, read by other code than wrote it: records as (type, ttl, data)."""
    ident, flags, *counts = struct.unpack_from("!6H", data)
    at = 12
    while data[at]:
        at += 1 + data[at]
    question = data[12 : at + 5]
    at += 5
    sections: list[list[tuple[int, int, bytes]]] = []
    options: dict[int, bytes] = {}
    for count in counts[1:]:
        found = []
        for _ in range(count):
            owner = data[at : at + 2]
            at += 1 if owner[0] == 0 else 2
            kind, size, life, length = struct.unpack_from("!HHIH", data, at)
            at += 10
            value = data[at : at + length]
            assert len(value) == length
            at += length
            assert owner == b"\xc0\x0c" if kind != 41 else owner[0] == 0
            found.append((kind, life, value))
            inner = 0
            while kind == 41 and inner < length:
                code, long = struct.unpack_from("!HH", value, inner)
                options[code] = value[inner + 4 : inner + 4 + long]
                inner += 4 + long
            assert size >= 512 if kind == 41 else size == 1
        sections.append(found)
    assert at == len(data), "nothing behind the last record"
    assert counts[0] == 1
    assert flags & 0x8080 == 0x8080, "a response, and recursion is available"
    assert flags & 0x7E60 == 0, "neither authoritative, nor cut off, nor authenticated"
    rcode = (flags & 15) | (sections[2][0][1] >> 24 << 4 if sections[2] else 0)
    return {
        "id": ident, "rcode": rcode, "question": question, "answers": sections[0], "authority": sections[1],
        "edns": bool(sections[2]), "options": options, "flags": flags,
    }  # fmt: skip


@pytest.mark.parametrize("client", CLIENTS)
def test_queries_of_real_resolvers_are_read(client: str) -> None:
    """Flags, EDNS, cookies, padding and mixed case of the resolvers in use lead to the same name."""
    query = dns.parse_query(CLIENTS[client])
    assert (query.name, query.qtype, query.qclass) == ("allowed.example", dns.A, dns.IN)
    found = unpack(dns.reply(query, ["198.18.1.7", "fd53::7"], 60))
    assert found["id"] == wire.ID
    assert found["question"] in CLIENTS[client], "byte for byte, case included"
    assert found["answers"] == [(dns.A, 60, bytes((198, 18, 1, 7)))]
    assert found["edns"] is query.edns


def test_fields_of_a_query() -> None:
    """Everything that an answer depends on is in the query."""
    data = wire.query(EXAMPLE, 28, flags=0x0110, extra=wire.opt(4096, flags=0x8000))
    assert dns.parse_query(data) == dns.Query(
        id=wire.ID, flags=0x0110, name="www.example.org", qtype=dns.AAAA, qclass=dns.IN,
        question=data[12:-11],
        edns=True, udp_size=4096, edns_version=0, dnssec_ok=True,
    )  # fmt: skip


def test_a_udp_size_below_512_counts_as_512() -> None:
    """As RFC 6891 has it: nobody takes less."""
    assert dns.parse_query(wire.query(EXAMPLE, extra=wire.opt(100))).udp_size == 512


@pytest.mark.parametrize(
    ("wire_name", "name"),
    [
        (wire.name("WWW.Example.ORG"), "www.example.org"),
        (wire.name("plain"), "plain"),
        (wire.name("_sip._tcp.example.org"), "_sip._tcp.example.org"),
        (wire.name("1.1.18.198.in-addr.arpa"), "1.1.18.198.in-addr.arpa"),
        (LONGEST, ".".join(["x" * 63, "y" * 63, "z" * 63, "w" * 61])),
        (b"\0", None),
        (wire.u8(b"example.org") + b"\0", None),
        (wire.u8(b"evil") + wire.u8(b"www.example") + wire.u8(b"org") + b"\0", None),
        (wire.u8(b"www.") + wire.u8(b"example") + wire.u8(b"org") + b"\0", None),
        (wire.name(b"evil\0.example.org"), None),
        (wire.name(b"a b.example.org"), None),
        (wire.name(b"b\xc3\xbccher.example"), None),
        (wire.name(b"b\xfccher.example"), None),
        (wire.name("a/b.example"), None),
        (wire.name("-a.example"), None),
        (wire.name("127.0.0.1"), None),
        (wire.name("2130706433"), None),
        (wire.name("0x7f.1"), None),
    ],
)
def test_a_name_is_a_host_name_or_none(wire_name: bytes, name: str | None) -> None:
    """A dot inside of a label never becomes one between labels; what is no host name is None."""
    query = dns.parse_query(wire.query(wire_name))
    assert query.name == name
    assert unpack(dns.negative(query, dns.NXDOMAIN))["question"] == wire_name + b"\0\1\0\1"


GOOD = wire.query(EXAMPLE, extra=wire.opt(options=b"\0\x0a" + wire.u16(bytes(8))))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "dns-short"),
        (GOOD[:11], "dns-short"),
        (wire.query(b""), "dns-short"),
        (wire.query(EXAMPLE)[:-1], "dns-short"),
        (wire.query(EXAMPLE)[:20], "dns-short"),
        (GOOD[:-1], "dns-trailing"),
        (GOOD + b"\0", "dns-trailing"),
        (wire.query(EXAMPLE) + b"\0", "dns-trailing"),
        (wire.query(EXAMPLE, counts=(1, 0, 0, 1)), "dns-short"),
        (wire.query(EXAMPLE, flags=0x8100), "dns-response"),
        (wire.query(EXAMPLE, flags=0x2800), "dns-opcode"),
        (wire.query(EXAMPLE, flags=0x0800), "dns-opcode"),
        (wire.query(EXAMPLE, counts=(0, 0, 0, 0)), "dns-counts"),
        (wire.query(EXAMPLE, extra=EXAMPLE + b"\0\1\0\1", counts=(2, 0, 0, 0)), "dns-counts"),
        (wire.query(EXAMPLE, extra=wire.opt(), counts=(1, 1, 0, 0)), "dns-counts"),
        (wire.query(EXAMPLE, extra=wire.opt(), counts=(1, 0, 1, 0)), "dns-counts"),
        (wire.query(EXAMPLE, extra=wire.opt() * 2, counts=(1, 0, 0, 2)), "dns-counts"),
        (wire.query(EXAMPLE, extra=wire.opt() * 2), "dns-trailing"),
        (wire.query(EXAMPLE, extra=b"\0\0\xfa" + wire.opt()[3:]), "dns-additional"),
        (wire.query(EXAMPLE, extra=b"\xc0" + wire.opt()), "dns-additional"),
        (wire.query(EXAMPLE, extra=b"\1" + wire.opt()[1:]), "dns-additional"),
        (wire.query(EXAMPLE, extra=wire.opt(options=b"\0\x0a\0")), "dns-option"),
        (wire.query(EXAMPLE, extra=wire.opt(options=b"\0\x0a\0\1")), "dns-option"),
        (wire.query(b"\xc0\x0c"), "dns-label"),
        (wire.query(b"\3www\xc0\x0c"), "dns-label"),
        (wire.query(b"\x41\0"), "dns-label"),
        (wire.query(b"\x80\0"), "dns-label"),
        (wire.query(b"\x40" + b"a" * 64 + b"\0"), "dns-label"),
        (wire.query(wire.u8(b"x") + LONGEST), "dns-name-long"),
        (wire.query(wire.name(".".join(["x" * 63] * 3 + ["x" * 62]))), "dns-name-long"),
        (wire.query(wire.u8(b"x") * 200 + b"\0"), "dns-name-long"),
        (wire.query(EXAMPLE, extra=wire.opt(options=b"\0\x0c" + wire.u16(bytes(5000)))), "dns-long"),
    ],
)
def test_what_no_resolver_sends_is_refused(data: bytes, code: str) -> None:
    """Compression in a question, second questions, further records, trailing bytes: a reason."""
    assert dns.parse_query(GOOD).name == "www.example.org", "control: the message that the others are made of"
    with pytest.raises(dns.DnsError) as caught:
        dns.parse_query(data)
    assert caught.value.code == code


def test_addresses_of_the_asked_type_only() -> None:
    """A has IPv4, AAAA has IPv6, ANY has both; none of the type is no data and no error."""
    both = ["198.18.1.7", "fd53::7"]
    six = bytes.fromhex("fd53" + "0" * 26 + "07")
    for qtype, answers in (
        (dns.A, [(dns.A, 9, bytes((198, 18, 1, 7)))]),
        (dns.AAAA, [(dns.AAAA, 9, six)]),
        (dns.ANY, [(dns.A, 9, bytes((198, 18, 1, 7))), (dns.AAAA, 9, six)]),
    ):
        assert unpack(dns.reply(dns.parse_query(wire.query(EXAMPLE, qtype)), both, 9))["answers"] == answers
    for qtype in (16, 33, 64, 65):
        found = unpack(dns.reply(dns.parse_query(wire.query(EXAMPLE, qtype)), both, 9))
        assert (found["rcode"], found["answers"], len(found["authority"])) == (dns.NOERROR, [], 1)


@pytest.mark.parametrize(
    "wrong", ["", "127.1", "0177.0.0.1", "1.2.3.4 ", "fe80::1%1", "example.org", "1.2.3.4\0", ":" * 999]
)
def test_what_is_no_address_is_not_sent(wrong: str) -> None:
    """The writer does not guess: a mistake of the gate is an error there, and no odd answer inside."""
    query = dns.parse_query(wire.query(EXAMPLE))
    with pytest.raises(ValueError, match="address"):
        dns.reply(query, [wrong], 1)
    with pytest.raises(ValueError, match="at most"):
        dns.reply(query, ["1.2.3.4"] * (dns.MAX_ANSWERS + 1), 1)


def test_pointer() -> None:
    """The name of an address, as labels; what is no name is an error."""
    query = dns.parse_query(wire.query(wire.name("7.1.18.198.in-addr.arpa"), dns.PTR))
    assert unpack(dns.pointer(query, "www.example.org", 9))["answers"] == [(dns.PTR, 9, EXAMPLE)]
    for wrong in ("", "a..b", "a" * 64, ".".join(["a" * 60] * 5)):
        with pytest.raises(ValueError, match="host name"):
            dns.pointer(query, wrong, 9)


def test_a_no_is_remembered_shortly_and_for_this_name_only() -> None:
    """NXDOMAIN and no data carry an SOA of a few seconds that the asked name owns; failures carry none."""
    query = dns.parse_query(wire.query(EXAMPLE, flags=0x0110))
    for rcode in (dns.NXDOMAIN, dns.NOERROR):
        found = unpack(dns.negative(query, rcode))
        assert found["rcode"] == rcode
        assert found["flags"] & 0x0110 == 0x0110, "RD and CD as they were asked"
        [(kind, life, data)] = found["authority"]
        assert (kind, life, len(data)) == (6, dns.NEGATIVE_TTL, 22)
        assert data.endswith(struct.pack("!I", dns.NEGATIVE_TTL))
    for rcode in (dns.SERVFAIL, dns.REFUSED, dns.NOTIMP, dns.FORMERR):
        found = unpack(dns.negative(query, rcode))
        assert (found["rcode"], found["authority"], found["edns"]) == (rcode, [], False)
    with pytest.raises(ValueError, match="code"):
        dns.negative(query, 16)


def test_the_reason_is_told_to_whom_can_read_it() -> None:
    """An extended error comes with EDNS and never without, bounded, without control characters."""
    with_edns = dns.parse_query(wire.query(EXAMPLE, extra=wire.opt()))
    found = unpack(dns.negative(with_edns, dns.NXDOMAIN, explain="no rule\nnames it"))
    assert found["options"] == {15: b"\0\x0fno rule names it"}
    found = unpack(dns.negative(with_edns, dns.NXDOMAIN, explain="x", code=dns.EDE_FILTERED))
    assert found["options"] == {15: b"\0\x11x"}
    for text in ("é" * 500, "\ud800" * 500, "a" + "é" * 100):
        option = unpack(dns.negative(with_edns, dns.NXDOMAIN, explain=text))["options"][15]
        assert len(option) <= 162
        assert option[2:].decode()
    without = dns.parse_query(wire.query(EXAMPLE))
    assert dns.negative(without, dns.NXDOMAIN, explain="no rule") == dns.negative(without, dns.NXDOMAIN)


def test_no_answer_needs_more_than_512_bytes() -> None:
    """The longest name with the most records, and with the longest reason, still goes over plain UDP."""
    for extra in (b"", wire.opt()):
        query = dns.parse_query(wire.query(LONGEST, dns.AAAA, extra=extra))
        assert len(dns.reply(query, ["fd53::1"] * dns.MAX_ANSWERS, 60)) <= 512
        assert len(dns.negative(query, dns.NXDOMAIN, explain="x" * 9999)) <= 512


def test_a_newer_edns_is_told_the_version() -> None:
    """Whatever would have been the answer, it is "bad version" and nothing else (RFC 6891, 6.1.3)."""
    query = dns.parse_query(wire.query(EXAMPLE, extra=wire.opt(version=1)))
    for data in (dns.reply(query, ["198.18.1.7"], 60), dns.negative(query, dns.NXDOMAIN, explain="x")):
        found = unpack(data)
        assert (found["rcode"], found["answers"], found["authority"], found["options"]) == (16, [], [], {})


def test_messages_over_tcp() -> None:
    """Several in one piece, one in many pieces; what comes behind them waits."""
    stream = dns.framed(GOOD) + dns.framed(CLIENTS["glibc"])
    assert dns.Framer().feed(stream + b"\0") == [GOOD, CLIENTS["glibc"]]
    framer = dns.Framer()
    assert [found for at in range(len(stream)) for found in framer.feed(stream[at : at + 1])] == [
        GOOD,
        CLIENTS["glibc"],
    ]


@pytest.mark.parametrize("length", [0, 1, 11, dns.MAX_QUERY + 1, 0xFFFF])
def test_a_frame_that_no_query_has_is_refused_by_its_length(length: int) -> None:
    """Nothing is collected for a message that would be refused anyway."""
    with pytest.raises(dns.DnsError) as caught:
        dns.Framer().feed(length.to_bytes(2, "big"))
    assert caught.value.code == "dns-frame"
