"""Host names and addresses: one spelling each, and nothing that could be read in two ways."""

from __future__ import annotations

import socket

import pytest

from casemate.policy import hosts

LEGACY = (
    "127.1", "127.0.1", "2130706433", "0177.0.0.1", "0x7f.1", "0x7f.0.0.1", "0x7f000001", "017700000001", "0",
    "127.0.0.1", "127.0.0.01", "1.2.3.4.5", "256.256.256.256", "999", "0x", "0X7F.1", "1.0x1",
    "00000000177.1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("example.org", "example.org"), ("Example.ORG", "example.org"), ("example.org.", "example.org"),
        ("localhost", "localhost"), ("a", "a"), ("a-b.c-d.e", "a-b.c-d.e"), ("1.example", "1.example"),
        ("3com.com", "3com.com"), ("0x7f.example", "0x7f.example"),
        ("_dmarc.example.org", "_dmarc.example.org"),
        ("my_host.internal", "my_host.internal"), ("r3---sn-x.example.com", "r3---sn-x.example.com"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("XN--BCHER-KVA.example", "xn--bcher-kva.example"),
        ("bücher.example", "xn--bcher-kva.example"), ("BÜCHER.example", "xn--bcher-kva.example"),
        ("bu\u0308cher.example", "xn--bcher-kva.example"), ("пример.рф", "xn--e1afmkfd.xn--p1ai"),
        ("例え.jp", "xn--r8jz45g.jp"), ("i❤.ws", "xn--i-7iq.ws"),
        ("1.0.18.198.in-addr.arpa", "1.0.18.198.in-addr.arpa"),
        ("a" * 63 + ".example", "a" * 63 + ".example"),
        (".".join(["a" * 49] * 5) + ".abc", ".".join(["a" * 49] * 5) + ".abc"),
    ],
)  # fmt: skip
def test_names_have_one_spelling(text: str, name: str) -> None:
    """However somebody writes a name, rules and traffic see the same bytes, and once is enough."""
    assert hosts.normalise(text) == name
    assert hosts.normalise(name) == name


@pytest.mark.parametrize(
    "text",
    [
        "", ".", "..", ".example.org", "example..org", "example.org..", "-a.example", "a-.example", "a.-",
        "-",
        "evil.example\0.example.org", "example.org\0", "\0", "a b.example", " example.org", "example.org ",
        "example.org\n", "a\tb.example", "a\x7fb.example", "a%2eb.example", "user@example.org",
        "example.org/x",
        "example.org:443", "[::1]", "::1", "*.example.org", "a?b", "a\\b.example", "a,b.example", "a.b_", "_",
        "a" * 64 + ".example", ".".join(["a" * 49] * 5) + ".abcd.", "a" * 300,
        ".".join(["a" * 49] * 5) + ".abcd", "ü" * 60 + ".example",
        "a." * 200,
        *LEGACY,
    ],
)  # fmt: skip
def test_what_is_no_name_is_refused(text: str) -> None:
    """Bytes that do not belong there, lengths that no resolver takes, and every spelling of an address."""
    with pytest.raises(ValueError, match=r"\w") as caught:
        hosts.normalise(text)
    assert not isinstance(caught.value, UnicodeError)
    assert str(caught.value).isascii()
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "text",
    [
        "\uff45xample.org", "example\uff0eorg", "example\u3002org", "example\uff61org", "example\u2024org",
        "\u212aelvin.example", "\u017fite.example", "exa\u00admple.org", "exam\u200bple.org",
        "exam\u200dple.org",
        "straße.example", "\u1e9e.example", "①.example", "⒈example", "\U0001f100.example", "ﬁle.example",
        "\u202eexample.org", "example.org\u2028", "a\ud800.example", "\uff11\uff12\uff17.0.0.1",
        "127\u30020\u30020\u30021",
        "a\u2100b.example", "א1a.example", "xn--ü.example", "ü@.example", "ü b.example", "ü\0.example",
    ],
)  # fmt: skip
def test_confusable_names_are_refused(text: str) -> None:
    """What an encoder would turn into another name than was written is an error that says how to write it."""
    with pytest.raises(ValueError, match=r"\w") as caught:
        hosts.normalise(text)
    assert not isinstance(caught.value, UnicodeError)
    assert str(caught.value).isascii()


def test_other_scripts_are_other_names() -> None:
    """Control: a Cyrillic letter that looks Latin is accepted, in a name of its own that equals no other."""
    fake = hosts.normalise("\u0435xample.org")
    assert fake.startswith("xn--")
    assert fake != hosts.normalise("example.org")


@pytest.mark.parametrize("text", LEGACY)
def test_no_accepted_name_is_an_address_for_a_resolver(text: str) -> None:
    """Control for the list: what C libraries read as an address is on it; a name beside it is accepted."""
    assert hosts.normalise(text + "a.example")
    try:
        socket.inet_aton(text)
    except OSError:
        return  # not for this C library, still for a browser's
    with pytest.raises(ValueError, match="address"):
        hosts.normalise(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.2.3.4", "1.2.3.4"), ("0.0.0.0", "0.0.0.0"), ("::1", "::1"), ("[::1]", "::1"), ("::", "::"),
        ("[2001:DB8::1]", "2001:db8::1"), ("2001:db8:0:0:0:0:0:1", "2001:db8::1"),
    ],
)  # fmt: skip
def test_addresses(text: str, value: str) -> None:
    """A dotted quad of four decimal numbers, and IPv6 with or without brackets."""
    assert str(hosts.address(text)) == value


def test_mapped_addresses_are_told() -> None:
    """An IPv4 address inside of IPv6 is still an address, and its inner one can be had for judging."""
    found = hosts.address("[::ffff:127.0.0.1]")
    assert found is not None
    assert found.version == 6
    assert str(found.ipv4_mapped) == "127.0.0.1"


@pytest.mark.parametrize(
    "text",
    [
        "", "1", "localhost", "example.org", "1.2.3", "1.2.3.4.", "01.2.3.4", "1.2.3.4 ", " 1.2.3.4",
        "1.2.3.4\n",
        "1.2.3.4\0", "[1.2.3.4]", "[::1", "::1]", "[]", "[[::1]]", "fe80::1%eth0", "[fe80::1%25eth0]",
        "::1/128",
        "1.2.3.4/8", "::ffff:0x7f.1", "::ffff:127.1", "1::2::3", "12345::", "\u0662.2.3.4", "::\u0661",
        "256.1.1.1", "1.2.3.4:80",
        "-1.2.3.4", "+1.2.3.4", "1_0.2.3.4", ":", ":::", "1" * 10000, ":" * 10000,
        *(text for text in LEGACY if text != "127.0.0.1"),
    ],
)  # fmt: skip
def test_what_is_no_address_is_none(text: str) -> None:
    """Old spellings, zones, brackets where none belong and everything else are no address."""
    assert hosts.address(text) is None


@pytest.mark.parametrize(
    ("name", "suffix", "below"),
    [
        ("a.example.org", "example.org", True), ("a.b.example.org", "example.org", True),
        ("example.org", "example.org", False), ("badexample.org", "example.org", False),
        ("example.org.evil", "example.org", False), ("org", "example.org", False),
        ("a.example.org", "", False),
        ("a.example.org", "xample.org", False), ("", "example.org", False),
    ],
)  # fmt: skip
def test_suffixes_are_whole_labels(name: str, suffix: str, below: bool) -> None:
    """A name is below another one by its labels; the same letters at the end are not enough."""
    assert hosts.matches(name, suffix) is below
