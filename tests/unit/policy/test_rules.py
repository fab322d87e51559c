"""Rules about hosts: one spelling each, nothing too broad, nothing that could be read in two ways."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from casemate.policy import hosts, rules
from casemate.policy.rules import covers, hits, parse

WEB = ((80, 80), (443, 443))


@pytest.mark.parametrize(
    ("text", "canonical", "kind", "ports"),
    [
        ("github.com", "github.com", "name", WEB),
        ("GitHub.COM.", "github.com", "name", WEB),
        ("github.com:22", "github.com:22", "name", ((22, 22),)),
        ("github.com:443,80", "github.com", "name", WEB),
        ("github.com:*", "github.com:*", "name", ((1, 65535),)),
        ("github.com:8010,8000-8009", "github.com:8000-8010", "name", ((8000, 8010),)),
        ("github.com:22,22,23-30,25", "github.com:22-30", "name", ((22, 30),)),
        ("*.example.org:443", "*.example.org:443", "suffix", ((443, 443),)),
        ("*.Example.org.", "*.example.org", "suffix", WEB),
        ("http://example.org", "http://example.org", "name", ((80, 80),)),
        ("HTTPS://example.org", "https://example.org", "name", ((443, 443),)),
        ("https://example.org:443", "https://example.org", "name", ((443, 443),)),
        ("https://example.org:8443", "https://example.org:8443", "name", ((8443, 8443),)),
        ("tcp://db.internal:5432", "tcp://db.internal:5432", "name", ((5432, 5432),)),
        ("10.0.0.0/8:5432", "10.0.0.0/8:5432", "net", ((5432, 5432),)),
        ("192.0.2.7", "192.0.2.7", "net", WEB),
        ("192.0.2.7/32", "192.0.2.7", "net", WEB),
        ("[2001:db8::1]:443", "[2001:db8::1]:443", "net", ((443, 443),)),
        ("[2001:DB8:0::]/32", "[2001:db8::/32]", "net", WEB),
        ("[2001:db8::/32]:443", "[2001:db8::/32]:443", "net", ((443, 443),)),
        ("2001:db8::/32:443", "[2001:db8::/32]:443", "net", ((443, 443),)),
        ("host.casemate.internal:8080", "host.casemate.internal:8080", "name", ((8080, 8080),)),
        ("bücher.example", "xn--bcher-kva.example", "name", WEB),
        ("xn--bcher-kva.example", "xn--bcher-kva.example", "name", WEB),
        ("db", "db", "name", WEB),
    ],
)
def test_a_rule_has_one_spelling(
    text: str, canonical: str, kind: str, ports: tuple[tuple[int, int], ...]
) -> None:
    """What people write comes to one text, which reads back as the same rule."""
    rule = parse(text)
    assert (rule.text, rule.kind, rule.ports) == (canonical, kind, ports)
    assert parse(canonical) == rule


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("*", "network.mode = \"full\""),
        ("*:443", "network.mode = \"full\""),
        ("*.com", "below com"),
        ("*.com.", "below com"),
        ("*.internal", "below internal"),
        ("*.co.uk", "below co.uk"),
        ("*.CO.UK", "below co.uk"),
        ("*.com.au:443", "below com.au"),
        ("*.github.io", "below github.io"),
        ("*.s3.amazonaws.com", "below s3.amazonaws.com"),
        ("*.s3.eu-west-1.amazonaws.com", "below s3.eu-west-1.amazonaws.com"),
        ("*.us-east-1.elb.amazonaws.com", "below us-east-1.elb.amazonaws.com"),
        ("*.azure.com", "below cloudapp.azure.com"),
        ("*.googleapis.com", "below googleapis.com"),
        ("*.xn--p1ai", "below xn--p1ai"),
        ("0.0.0.0/0", "full"),
        ("8.0.0.0/7", "too broad"),
        ("::/0", "full"),
        ("2000::/3", "too broad"),
        ("10.0.0.1/8", "write 10.0.0.0/8"),
        ("2001:db8::1/32", r"write \[2001:db8::/32\]"),
        ("10.0.0.0/255.0.0.0", "number of bits"),
        ("10.0.0.0/33", "number of bits"),
        ("10.0.0.0/", "number of bits"),
        ("10.0.0.0/+8", "number of bits"),
        ("10.0.0.0/8/8", "prefix length"),
        ("127.0.0.1:8080", r"host\.casemate\.internal"),
        ("127.1.2.0/24", r"host\.casemate\.internal"),
        ("[::1]:80", r"host\.casemate\.internal"),
        ("localhost:80", r"host\.casemate\.internal"),
        ("a.localhost", r"host\.casemate\.internal"),
        ("*.localhost", r"host\.casemate\.internal|below localhost"),
        ("0.0.0.0", "no destination"),
        ("[::]", "nothing has an address"),
        ("224.0.0.1", "multicast"),
        ("[ff02::1]", "multicast"),
        ("255.255.255.255", "nothing has an address"),
        ("198.18.1.7", "gives addresses"),
        ("198.19.0.0/16", "gives addresses"),
        ("[fd53:656e:7472:79::1]", "gives addresses"),
        ("[::ffff:10.0.0.1]", "mapped"),
        ("::ffff:10.0.0.0/104", "mapped"),
        ("[::10.0.0.1]", "nothing has an address"),
        ("2001:db8::1", "brackets"),
        ("2001:db8::1:443", "brackets"),
        ("[10.0.0.1]:443", "IPv6"),
        ("[fe80::1%eth0]", "zone"),
        ("[2001:db8::1", "IPv6"),
        ("[2001:db8::1]443", "colon"),
        ("2130706433", "number"),
        ("0x7f000001", "number"),
        ("0177.0.0.1", "number"),
        ("127.1", "number"),
        ("10.0.0", "number"),
        ("010.0.0.1", "number"),
        ("010.0.0.0/8", "prefix length|number"),
        ("*.0.0.1", "number"),
        ("*foo.org", r"\*\.example\.org"),
        ("a.*.org", r"\*\.example\.org"),
        ("**.example.org", r"\*\.example\.org"),
        ("*.*.example.org", "asterisk"),
        (".example.org", r"write \*\.example\.org"),
        ("example.org..", "empty"),
        ("a..org", "empty"),
        ("example.org:", "after the colon"),
        ("example.org:0", "after the colon"),
        ("example.org:65536", "after the colon"),
        ("example.org:080", "after the colon"),
        ("example.org:+80", "after the colon"),
        ("example.org:٨٠", "after the colon"),
        ("example.org: 80", "after the colon"),
        ("example.org:80-", "after the colon"),
        ("example.org:,80", "after the colon"),
        ("example.org:443-80", "write 80-443"),
        ("example.org:https", "after the colon"),
        ("https://example.org/path", "write https://example.org"),
        ("example.org/", "write example.org"),
        ("user@example.org", "no user"),
        ("ssh://git@example.org", "HOST:22"),
        ("ssh://example.org", "HOST:22"),
        ("udp://example.org:53", "only TCP"),
        ("gopher://example.org", "http, https or tcp"),
        ("://example.org", "http, https or tcp"),
        ("http:example.org", "after the colon"),
        ("tcp://example.org", "tcp://HOST:PORT"),
        ("host.casemate.internal", "needs the port"),
        ("host.casemate.internal:*", "needs the port"),
        ("host.casemate.internal:1-65535", "needs the port"),
        ("host.casemate.internal:1-99,200-300", "needs the port"),
        ("other.casemate.internal:80", r"only host\.casemate\.internal"),
        ("*.casemate.internal:80", r"only host\.casemate\.internal"),
        ("*.host.casemate.internal:80", r"only host\.casemate\.internal"),
        ("exa mple.org", "a space"),
        ("example.org\n", "line break"),
        ("evil.org\0.example.org", "a NUL"),
        ("example%2eorg", "percent"),
        ("\uff45xample.org", "xn--"),
        ("example\u3002org", "xn--"),
        ("example.org\\@evil.org", "no user"),
        ("a" * 64 + ".org", "at most 63"),
        ("a" * 301, "longer"),
    ],
)  # fmt: skip
def test_what_cannot_be_allowed(text: str, why: str) -> None:
    """Each refusal is one ASCII sentence that names the reason or what to write in its place."""
    with pytest.raises(ValueError, match=why) as caught:
        parse(text)
    assert str(caught.value).isascii()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "text", ["*", "*:22", "*.com", "0.0.0.0/0", "::/0", "127.0.0.0/8", "host.casemate.internal", "*.internal",
             "localhost", "169.254.169.254", "http://*"]
)  # fmt: skip
def test_what_denies_may_be_as_broad_as_it_likes(text: str) -> None:
    """A rule that takes away is taken, and means every port where it names none."""
    rule = parse(text, deny=True)
    assert rule.ports == (((22, 22),) if text == "*:22" else ((1, 65535),))
    assert parse(rule.text, deny=True) == rule


@pytest.mark.parametrize("text", ["2130706433", "0177.0.0.1", "10.0.0.1/8", "a b", "[::ffff:10.0.0.1]"])
def test_what_denies_has_one_spelling_too(text: str) -> None:
    """A denial that could never match, or that two programs read differently, is an error and not a hole."""
    with pytest.raises(ValueError, match=r"."):
        parse(text, deny=True)


@pytest.mark.parametrize("text", ["*", "*.com:443", "10.0.0.0/7", "0.0.0.0/0:*"])
def test_a_bound_may_be_broad_and_has_the_ports_of_what_it_bounds(text: str) -> None:
    """The administrator's bound reads as ``allow`` does, without its refusals of breadth."""
    rule = parse(text, bound=True)
    assert parse(rule.text, bound=True) == rule
    if ":" not in text:
        assert rule.ports == WEB


@pytest.mark.parametrize(
    ("rule", "host", "port", "protocol", "about"),
    [
        ("example.org", "example.org", 443, "", True),
        ("example.org", "example.org", 80, "http", True),
        ("example.org", "example.org", 22, "", False),
        ("example.org", "a.example.org", 443, "", False),
        ("example.org", "badexample.org", 443, "", False),
        ("*.example.org", "a.example.org", 443, "", True),
        ("*.example.org", "a.b.example.org", 443, "", True),
        ("*.example.org", "example.org", 443, "", False),
        ("*.example.org", "badexample.org", 443, "", False),
        ("*.example.org", "example.org.evil.net", 443, "", False),
        ("example.org:8000-8010", "example.org", 8005, "", True),
        ("example.org:8000-8010", "example.org", 8011, "", False),
        ("https://example.org", "example.org", 443, "https", True),
        ("https://example.org", "example.org", 443, "http", False),
        ("https://example.org", "example.org", 443, "tcp", False),
        ("https://example.org", "example.org", 443, "", False),
        ("tcp://example.org:443", "example.org", 443, "https", True),
        ("10.0.0.0/8:5432", "10.9.8.7", 5432, "tcp", True),
        ("10.0.0.0/8:5432", "11.9.8.7", 5432, "tcp", False),
        ("10.0.0.0/8:5432", "example.org", 5432, "tcp", False),
        ("[2001:db8::/32]", "2001:db8:1::1", 443, "", True),
        ("[2001:db8::/32]", "10.0.0.1", 443, "", False),
    ],
)
def test_what_a_rule_is_about(rule: str, host: str, port: int, protocol: str, about: bool) -> None:
    """Names by whole labels, addresses by their net, ports and protocols as they are said."""
    address = hosts.address(host)
    assert hits(parse(rule), host if address is None else ip_address(host), port, protocol) is about


def test_a_protocol_that_is_not_known_yet() -> None:
    """A rule with a protocol of its own is about an unknown one only where maybe is enough."""
    assert hits(parse("https://example.org"), "example.org", 443, maybe=True)
    assert not hits(parse("https://example.org"), "example.org", 443, "tcp", maybe=True)


@pytest.mark.parametrize(
    ("outer", "inner", "inside"),
    [
        ("*", "example.org", True),
        ("*", "example.org:22", False),
        ("*:*", "10.0.0.0/8:5432", True),
        ("*.example.org", "a.example.org", True),
        ("*.example.org", "*.example.org", True),
        ("*.example.org", "*.a.example.org:443", True),
        ("*.example.org", "example.org", False),
        ("*.example.org", "*.org.example", False),
        ("*.a.example.org", "*.example.org", False),
        ("example.org", "*.example.org", False),
        ("example.org", "example.org", True),
        ("example.org", "https://example.org", True),
        ("https://example.org", "example.org:443", False),
        ("https://example.org", "tcp://example.org:443", False),
        ("example.org:1-100", "example.org:22,80", True),
        ("10.0.0.0/8", "10.1.0.0/16", True),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.1.0.0/16", "10.0.0.0/8", False),
        ("10.0.0.0/8", "a.example.org", False),
        ("*.example.org", "10.0.0.1", False),
        ("[2001:db8::/32]", "10.0.0.1", False),
    ],
)
def test_what_covers_what(outer: str, inner: str, inside: bool) -> None:
    """A bound takes in a rule only with all of its hosts, ports and protocols."""
    assert covers(parse(outer, bound=True), parse(inner)) is inside


@pytest.mark.parametrize(
    ("text", "shown"), [("GitHub.com", "github.com"), ("*.example.org.", "*.example.org"), ("db", "db")]
)
def test_a_host_alone(text: str, shown: str) -> None:
    """Credentials and requests are about hosts without ports."""
    assert rules.parse_host(text) == shown


@pytest.mark.parametrize("text", ["github.com:443", "https://a.org", "10.0.0.1", "*", "*.com", "a/b", ""])
def test_what_is_no_host_alone(text: str) -> None:
    """A port, a protocol, an address or everybody's names are refused there."""
    with pytest.raises(ValueError, match=r"."):
        rules.parse_host(text)


@pytest.mark.parametrize(
    ("text", "guarded"),
    [("example.org", False), ("*.example.org", False), ("10.0.0.1", True), ("192.0.2.1", True),
     ("host.casemate.internal:80", True)],
)  # fmt: skip
def test_what_only_the_operator_opens(text: str, guarded: bool) -> None:
    """Addresses, and the host's own services: a project's file never opens them."""
    assert rules.is_guarded_grant(parse(text)) is guarded


def test_a_long_list_is_read_in_no_time() -> None:
    """Hostile text costs its length: neither ports nor labels nor brackets make a parser slow."""
    for text in ("," * 290, "1-" * 140, "[" * 290, "a." * 140, "*." * 140, ":" * 290, "0" * 290, "/" * 290):
        for form in (text, f"example.org:{text}"[:300], f"10.0.0.0/{text}"[:300]):
            with pytest.raises(ValueError, match=r"."):
                parse(form)
