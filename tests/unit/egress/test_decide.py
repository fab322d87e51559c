"""Decisions: deny wins, empty is nothing, names by labels, and an allowed name opens no guarded address."""

from __future__ import annotations

import tomllib
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.egress.decide import Decider, Decision
from casemate.policy import hosts, rules
from casemate.policy.model import Credential, Network, RequestRule

OWN = frozenset({"10.0.0.5", "93.184.218.7", "127.0.0.0/8"})


def decider(*allow: str, mode: str = "allowlist", approved: tuple[str, ...] = (), **fields: Any) -> Decider:
    """A decider of these rules."""
    network = Network(mode=mode, allow=allow, **fields)  # type: ignore[arg-type]
    return Decider(network, own=OWN, approved=approved)


def verdict(found: Decision) -> tuple[str, str]:
    """What was decided, and why."""
    return found.verdict, found.reason


# ---------------------------------------------------------------- names and ports


@pytest.mark.parametrize(
    ("host", "port", "allowed"),
    [
        ("github.com", 443, True),
        ("GitHub.Com.", 443, True),
        ("github.com", 80, True),
        ("github.com", 22, False),
        ("api.github.com", 443, False),
        ("notgithub.com", 443, False),
        ("github.com.evil.example", 443, False),
        ("a.example.org", 443, True),
        ("a.b.example.org", 443, True),
        ("example.org", 443, False),
        ("badexample.org", 443, False),
        ("a.example.org", 80, False),
        ("xn--bcher-kva.example", 443, True),
        ("b\u00fccher.example", 443, True),
        ("bucher.example", 443, False),
    ],
)
def test_names_are_allowed_by_labels_and_ports(host: str, port: int, allowed: bool) -> None:
    """A rule is about exactly the names and ports that it says."""
    found = decider("github.com", "*.example.org:443", "xn--bcher-kva.example").connect(host, port)
    assert (found.verdict == "allow") is allowed
    assert found.reason == ("rule" if allowed else "not-listed")


@pytest.mark.parametrize(
    "host",
    ["", ".", "github.com\0.evil.example", "evil.example\0github.com", "github.com%00", "github.com ",
     " github.com", "github.com\n", "git hub.com", "github..com", "github.com..", "github\u3002com",
     "\uff47ithub.com", "github.com/", "a@github.com", "2130706433", "0x7f.1", "0177.0.0.1", "127.1",
     "fe80::1%eth0", "[::1", "github.com:443", "*.github.com", "a" * 64, "a." * 130],
)  # fmt: skip
def test_what_is_no_host_is_denied_in_every_mode(host: str) -> None:
    """Text that two programs may read differently is never a name that was allowed."""
    for made in (decider("github.com"), decider(mode="full"), decider("github.com", ask=True)):
        assert made.resolve(host).verdict == "deny"
        assert verdict(made.connect(host, 443)) == ("deny", "bad-name")


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_what_is_no_port_is_denied(port: int) -> None:
    """Out of range is no question of rules."""
    assert decider(mode="full").connect("github.com", port).verdict == "deny"


def test_an_empty_list_is_nothing() -> None:
    """No rule, no name, no connection, and the line that would allow it."""
    found = decider()
    assert verdict(found.resolve("github.com")) == ("deny", "not-listed")
    assert found.connect("github.com", 22) == Decision(
        "deny", "default", "not-listed", 'network.allow = ["github.com:22"]'
    )
    assert found.connect("2001:4860::8888", 443).allow_line == 'network.allow = ["[2001:4860::8888]:443"]'


@pytest.mark.parametrize("mode", ["none", "host"])
def test_where_no_gate_is_nothing_is_allowed(mode: str) -> None:
    """A decider of another mode says no, whatever stands in the list."""
    found = decider("github.com", mode=mode)
    assert found.resolve("github.com").reason == "mode-none"
    assert verdict(found.connect("github.com", 443)) == ("deny", "mode-none")


def test_a_name_is_answered_if_some_port_of_it_may_be_reached() -> None:
    """Queries for names that no rule is about get no answer; a denial of one port does not hide a name."""
    found = decider("github.com:22", "*.example.org", deny=("*.bad.example.org", "github.com:80"))
    assert found.resolve("github.com").verdict == "allow"
    assert found.resolve("a.example.org").verdict == "allow"
    assert verdict(found.resolve("a.bad.example.org")) == ("deny", "denied")
    assert found.resolve("example.org").verdict == "deny"


# ---------------------------------------------------------------- protocols


def test_a_protocol_narrows_a_rule() -> None:
    """What is not known yet may turn out to be allowed; what is known has to be what the rule says."""
    found = decider("https://a.org", "http://b.org:8080")
    assert found.connect("a.org", 443).verdict == "allow"
    assert found.connect("a.org", 443, "https").verdict == "allow"
    assert found.connect("a.org", 443, "tcp").verdict == "deny"
    assert found.connect("a.org", 443, "http").verdict == "deny"
    assert found.connect("b.org", 8080, "http").verdict == "allow"
    assert found.connect("b.org", 8080, "https").verdict == "deny"
    assert found.connect("b.org", 80, "http").verdict == "deny"


def test_a_denied_protocol_is_denied_once_it_is_known() -> None:
    """A denial of plain HTTP leaves TLS."""
    found = decider("a.org", deny=("http://a.org",))
    assert found.connect("a.org", 80).verdict == "allow"
    assert verdict(found.connect("a.org", 80, "http")) == ("deny", "denied")
    assert found.connect("a.org", 443, "https").verdict == "allow"


def test_a_rule_that_looks_inside_comes_first() -> None:
    """Where a tcp:// rule and another one allow, names inside of TLS are still compared."""
    found = decider("tcp://a.org:443", "a.org")
    assert found.connect("a.org", 443, "https").rule == "a.org"
    assert found.connect("a.org", 443, "tcp").rule == "tcp://a.org:443"
    assert decider("tcp://a.org:443").connect("a.org", 443, "https").rule == "tcp://a.org:443"


# ---------------------------------------------------------------- deny


@pytest.mark.parametrize("mode", ["allowlist", "full"])
def test_deny_wins_everywhere(mode: str) -> None:
    """Over rules, over approvals, over mode full; for names, addresses and what names resolve to."""
    found = decider(
        "*.example.org", "10.1.0.0/16:5432", "a.org", mode=mode, approved=("evil.example.org:443",),
        deny=("evil.example.org", "10.1.2.0/24", "8.8.8.8", "*:25"),
    )  # fmt: skip
    assert verdict(found.connect("evil.example.org", 443)) == ("deny", "denied")
    assert found.connect("evil.example.org", 443).allow_line == ""
    assert found.connect("good.example.org", 443).verdict == "allow"
    assert verdict(found.connect("10.1.2.3", 5432)) == ("deny", "denied")
    assert verdict(found.connect("::ffff:10.1.2.3", 5432)) == ("deny", "denied")
    assert found.connect("10.1.3.3", 5432).verdict == "allow"
    assert verdict(found.address("a.org", "8.8.8.8", 443)) == ("deny", "denied")
    assert verdict(found.address("a.org", "::ffff:8.8.8.8", 443)) == ("deny", "denied")
    assert found.address("a.org", "8.8.4.4", 443).verdict == "allow"
    assert verdict(found.connect("good.example.org", 25)) == ("deny", "denied")


def test_deny_of_everything_is_nothing() -> None:
    """``*`` leaves no name and no address."""
    found = decider("github.com", mode="full", deny=("*",))
    assert found.resolve("github.com").verdict == "deny"
    assert found.connect("github.com", 443).verdict == "deny"
    assert found.connect("8.8.8.8", 443).verdict == "deny"


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("address", "port", "reason"),
    [
        ("10.1.2.3", 5432, "rule"),
        ("::ffff:10.1.2.3", 5432, "rule"),
        ("10.1.2.3", 5433, "guarded-private"),
        ("10.2.2.3", 5432, "guarded-private"),
        ("10.0.0.5", 5432, "guarded-own"),
        ("127.0.0.1", 5432, "guarded-loopback"),
        ("169.254.169.254", 80, "guarded-metadata"),
        ("169.254.1.1", 80, "rule"),
        ("168.63.129.16", 80, "guarded-metadata"),
        ("168.63.129.17", 80, "rule"),
        ("8.8.8.8", 443, "not-listed"),
        ("2002:a01:203::1", 5432, "guarded-6to4"),
        ("64:ff9b::a01:203", 5432, "guarded-nat64"),
    ],
)
def test_addresses_need_a_rule_of_their_own(address: str, port: int, reason: str) -> None:
    """A net opens what lies in it and in the guarded net; a wider net opens nothing special in it."""
    found = decider("10.1.0.0/16:5432", "10.0.0.0/24:5432", "169.254.0.0/16", "168.0.0.0/8", "*.a.org:*")
    assert found.connect(address, port).reason == reason


@pytest.mark.parametrize(
    ("address", "port", "reason"),
    [
        ("140.82.112.3", 443, "rule"),
        ("10.1.2.3", 5432, "rule"),
        ("10.1.2.3", 443, "guarded-private"),
        ("127.0.0.1", 443, "guarded-loopback"),
        ("::1", 443, "guarded-loopback"),
        ("::ffff:169.254.169.254", 443, "guarded-metadata"),
        ("93.184.218.7", 443, "guarded-own"),
        ("192.0.2.7", 443, "rule"),
        ("169.254.42.42", 443, "guarded-metadata"),
        ("4000::1", 443, "guarded-reserved"),
        ("fd00::1", 443, "guarded-private"),
        ("0.0.0.0", 443, "guarded-unspecified"),
        ("not an address", 443, "bad-name"),
        ("fe80::1%2", 443, "bad-name"),
    ],
)
@pytest.mark.parametrize("mode", ["allowlist", "full"])
def test_a_name_opens_no_guarded_address(address: str, port: int, reason: str, mode: str) -> None:
    """Whatever a name resolves to, today or the next time: only a rule about the address opens that."""
    found = decider("github.com", "db.example:5432", "10.1.0.0/16:5432", mode=mode)
    assert found.address("github.com", address, port).reason == reason


@pytest.mark.parametrize(
    "address", ["10.0.0.5", "93.184.218.7", "169.254.42.42", "fd00:ec2::254", "192.80.8.124"]
)
def test_what_only_the_very_address_opens(address: str) -> None:
    """This host's own addresses, and metadata of clouds: a rule has to say that address, with the port."""
    wide, tight = (decider(f"{net}:80") for net in around(address))
    assert wide.connect(address, 80).verdict == "deny"
    assert tight.connect(address, 80).verdict == "allow"
    assert tight.connect(address, 81).verdict == "deny"


def around(address: str) -> tuple[str, str]:
    """The narrowest net that is no single address, and the address, as rules spell them."""
    found = ip_address(address)
    net = ip_network(f"{address}/{found.max_prefixlen - 1}", strict=False)
    if found.version == 4:
        return str(net), address
    return f"[{net.network_address}]/{net.prefixlen}", f"[{address}]"


def test_the_lines_that_would_open_an_address() -> None:
    """The address for a neighbour, the name for this host, and none for what hands out keys."""
    found = decider("a.org")
    assert found.address("a.org", "10.1.2.3", 5432).allow_line == 'network.allow = ["10.1.2.3:5432"]'
    loopback = found.address("a.org", "127.0.0.1", 8080)
    assert loopback.allow_line == 'network.allow = ["host.casemate.internal:8080"]'
    assert found.address("a.org", "169.254.169.254", 80).allow_line == ""
    assert found.address("a.org", "224.0.0.1", 80).allow_line == ""


def test_the_lines_are_rules() -> None:
    """What is offered can be pasted: it parses, and then it allows what was refused."""
    for host, port in (("github.com", 22), ("8.8.8.8", 53), ("2001:4860::8888", 853), ("10.1.2.3", 5432),
                       ("192.0.2.7", 443), ("host.casemate.internal", 8080)):  # fmt: skip
        line = decider().connect(host, port).allow_line
        (text,) = tomllib.loads(line)["network"]["allow"]
        assert decider(rules.parse(text).text).connect(host, port).verdict == "allow"


# ---------------------------------------------------------------- this host


def test_a_service_of_the_host_only_by_its_rule() -> None:
    """The name, the port, and a loopback address behind it; mode full and questions do not open it."""
    found = decider("host.casemate.internal:8080")
    assert found.resolve("host.casemate.internal").verdict == "allow"
    assert found.connect("host.casemate.internal", 8080).verdict == "allow"
    assert found.address("host.casemate.internal", "127.0.0.1", 8080).verdict == "allow"
    assert found.address("host.casemate.internal", "::1", 8080).verdict == "allow"
    assert found.address("host.casemate.internal", "10.1.2.3", 8080).verdict == "deny"
    assert found.address("host.casemate.internal", "127.0.0.1", 22).verdict == "deny"
    assert found.address("github.com", "127.0.0.1", 8080).verdict == "deny"
    for other in (decider("github.com", ask=True), decider(mode="full")):
        assert verdict(other.connect("host.casemate.internal", 8080)) == ("deny", "host-service")
        assert other.resolve("host.casemate.internal").verdict == "deny"
        assert other.address("host.casemate.internal", "127.0.0.1", 8080).verdict == "deny"


@pytest.mark.parametrize("name", ["localhost", "a.localhost", "casemate.internal", "x.casemate.internal"])
def test_other_names_of_the_host_are_denied(name: str) -> None:
    """By mode full and by question as well: what they lead to is this host."""
    for found in (decider(mode="full"), decider(ask=True)):
        assert found.connect(name, 80).verdict == "deny"
        assert found.resolve(name).verdict == "deny"


# ---------------------------------------------------------------- full, questions, the administrator


def test_full_is_everything_public() -> None:
    """Every name and public address, none that is guarded."""
    found = decider(mode="full")
    assert verdict(found.resolve("anything.example")) == ("allow", "full")
    assert verdict(found.connect("anything.example", 25)) == ("allow", "full")
    assert verdict(found.connect("8.8.8.8", 53)) == ("allow", "full")
    assert found.address("anything.example", "8.8.8.8", 25).verdict == "allow"
    assert verdict(found.connect("10.1.2.3", 80)) == ("deny", "guarded-private")
    assert decider("10.1.2.3", mode="full").connect("10.1.2.3", 80).verdict == "allow"


def test_questions_are_about_what_no_rule_names() -> None:
    """Allowed is not asked about, denied and guarded neither; an approval is for its host and port."""
    found = decider("github.com", ask=True, deny=("*.evil.example",))
    assert found.connect("github.com", 443).verdict == "allow"
    assert verdict(found.connect("other.example", 443)) == ("ask", "not-listed")
    assert verdict(found.connect("8.8.8.8", 443)) == ("ask", "not-listed")
    assert found.resolve("other.example").verdict == "ask"
    assert found.connect("a.evil.example", 443).verdict == "deny"
    assert found.connect("10.1.2.3", 443).verdict == "deny"
    assert found.connect("169.254.169.254", 80).verdict == "deny"
    approved = decider(ask=True, approved=("other.example:443",))
    assert approved.connect("other.example", 443).verdict == "allow"
    assert approved.connect("other.example", 80).verdict == "ask"
    assert approved.address("other.example", "10.1.2.3", 443).verdict == "deny"


def test_what_is_no_approval_allows_nothing() -> None:
    """A saved approval that does not parse, or that is too broad, is none."""
    found = decider(approved=("*", "*.com", "0.0.0.0/0", "nonsense here", "", "127.0.0.1:80"))
    for host in ("github.com", "8.8.8.8", "127.0.0.1"):
        assert found.connect(host, 80).verdict == "deny"


def test_the_administrators_bound_holds_for_questions_and_approvals() -> None:
    """What nobody may allow is not asked about, and an approval of it does not count."""
    found = decider("a.corp.example", ask=True, within=("*.corp.example",), approved=("evil.example:443",))
    assert verdict(found.connect("b.corp.example", 443)) == ("ask", "not-listed")
    assert verdict(found.connect("evil.example", 443)) == ("deny", "above-ceiling")
    assert verdict(found.resolve("evil.example")) == ("deny", "above-ceiling")
    assert verdict(found.connect("b.corp.example", 22)) == ("deny", "above-ceiling")
    assert found.connect("a.corp.example", 443).verdict == "allow"


def test_the_hosts_of_the_agent_are_allowed_on_their_port() -> None:
    """ssh-agent = ["github.com"] allows port 22 of it and no other."""
    found = decider(ssh_agent=("github.com", "git.example:2222"))
    assert found.resolve("github.com").verdict == "allow"
    assert found.connect("github.com", 22, "tcp").verdict == "allow"
    assert found.connect("github.com", 443).verdict == "deny"
    assert found.connect("git.example", 2222).verdict == "allow"
    assert found.connect("git.example", 22).verdict == "deny"


# ---------------------------------------------------------------- requests and credentials

CREDENTIALS = (
    Credential(name="T", hosts=("github.com", "*.example.org"), source="env:T", as_="bearer", add=False),
    Credential(name="U", hosts=("a.example.org",), source="env:U", as_="bearer", add=False),
)
REQUESTS = (
    RequestRule(host="api.github.com", allow=("GET /repos/**", "POST /graphql"), layer="user"),
    RequestRule(host="api.github.com", allow=("* /repos/mine/**", "POST /graphql"), layer="project"),
    RequestRule(host="*.example.org", allow=(), layer="user"),
)


def test_credentials_are_for_their_hosts() -> None:
    """By labels, like everything else, and for no address."""
    found = decider("*.example.org", "github.com", credentials=CREDENTIALS)
    assert [one.name for one in found.credentials_for("a.example.org")] == ["T", "U"]
    assert [one.name for one in found.credentials_for("GITHUB.com.")] == ["T"]
    for host in ("example.org", "badexample.org", "github.com.evil.example", "8.8.8.8", "bad name"):
        assert found.credentials_for(host) == ()


def test_the_gate_looks_inside_only_where_it_must() -> None:
    """A rule about requests, or a credential, of that host; a tcp:// rule is passed on."""
    found = decider("github.com", "other.org", "api.github.com", "tcp://github.com:8443",
                    credentials=CREDENTIALS, requests=REQUESTS)  # fmt: skip
    assert found.intercept("github.com", 443)
    assert found.intercept("api.github.com", 443)
    assert not found.intercept("other.org", 443)
    assert not found.intercept("github.com", 8443)
    assert not found.intercept("8.8.8.8", 443)


def test_every_layers_rules_about_requests_are_met() -> None:
    """A request passes only if each rule of its host lets it."""
    found = decider("api.github.com", requests=REQUESTS)
    assert found.request("api.github.com", "GET", "/repos/mine/x?y=1").verdict == "allow"
    assert found.request("api.github.com", "POST", "/graphql").verdict == "allow"
    refused = found.request("api.github.com", "GET", "/repos/other/x")
    assert verdict(refused) == ("deny", "request")
    assert refused.rule == 'network.requests."api.github.com" (project)'
    assert refused.allow_line == 'network.requests."api.github.com" = ["GET /repos/other/x"]'
    assert verdict(found.request("api.github.com", "POST", "/repos/mine/x")) == ("deny", "request")
    assert found.request("a.example.org", "GET", "/").verdict == "deny"
    assert found.request("other.org", "DELETE", "/../x").verdict == "allow"


@pytest.mark.parametrize(
    "target", ["/repos/mine/../../admin", "/repos/mine/%2e%2e/x", "//repos/mine/x", "*", "x"]
)
def test_a_request_of_two_readings_is_refused(target: str) -> None:
    """Whatever the server makes of it."""
    found = decider("api.github.com", requests=REQUESTS)
    assert verdict(found.request("api.github.com", "GET", target)) == ("deny", "request-ambiguous")


def test_what_the_sandbox_sent_is_no_wildcard_in_a_line() -> None:
    """The line that is offered lets through that one request, whatever characters it had."""
    found = decider("api.github.com", requests=REQUESTS)
    line = found.request("api.github.com", "GET", '/**"]\u007f').allow_line
    assert line == ""
    line = found.request("api.github.com", "GET", '/a*/**"]').allow_line
    ((host, (text,)),) = tomllib.loads(line)["network"]["requests"].items()
    assert host == "api.github.com"
    assert "*" not in text
    assert found.request("api.github.com", "GET\n", "/a").allow_line == ""
    assert found.request("api.github.com", "GET", "/" + "a" * 1000).allow_line == ""


def test_only_http_can_be_held_to_rules_about_requests() -> None:
    """A connection that speaks something else to such a host is refused, whatever allows it."""
    found = decider("api.github.com", "api.github.com:22", "tcp://api.github.com:9999", requests=REQUESTS)
    for port in (443, 22, 9999):
        assert verdict(found.connect("api.github.com", port, "tcp")) == ("deny", "requests")
        assert found.connect("api.github.com", port, "https").verdict == "allow"


# ---------------------------------------------------------------- properties

_hosts = st.sampled_from(
    ["a.org", "b.a.org", "c.b.a.org", "ba.org", "org", "10.1.2.3", "8.8.8.8", "2001:4860::1", "localhost",
     "host.casemate.internal", "10.0.0.5", "xn--bcher-kva.example"]
)  # fmt: skip
_ports = st.sampled_from([22, 80, 443, 8080])
_rules = st.lists(
    st.sampled_from(["a.org", "*.a.org", "b.a.org:22", "tcp://a.org:443", "https://b.a.org", "10.0.0.0/8:*",
                     "8.8.8.8", "10.0.0.5:80", "host.casemate.internal:80"]),
    max_size=4, unique=True,
).map(tuple)  # fmt: skip
_denies = st.lists(
    st.sampled_from(["*.a.org", "a.org:443", "10.0.0.0/9", "*:22", "http://a.org", "0.0.0.0/0"]), max_size=3
).map(tuple)
_modes = st.sampled_from(["none", "allowlist", "full"])
_protocols = st.sampled_from(["", "http", "https", "tcp"])


def _open(found: Decider, host: str, port: int, protocol: str) -> bool:
    """Whether a connection is made: the name or address passes, and the address is dialled."""
    if found.connect(host, port, protocol).verdict != "allow":
        return False
    at = host if hosts.address(host) else "127.0.0.1" if host == rules.HOST_NAME else "93.184.215.14"
    return found.address(host, at, port, protocol).verdict == "allow"


@given(_modes, _rules, _denies, _denies, _hosts, _ports, _protocols)
def test_another_denial_never_opens(
    mode: str, allow: tuple[str, ...], deny: tuple[str, ...], more: tuple[str, ...], host: str, port: int,
    protocol: str,
) -> None:
    """What is shut with fewer denials is shut with more."""
    without = decider(*allow, mode=mode, deny=deny)
    with_more = decider(*allow, mode=mode, deny=(*deny, *more))
    assert _open(without, host, port, protocol) or not _open(with_more, host, port, protocol)


@given(_rules, _rules, _denies, _hosts, _ports, _protocols)
def test_another_rule_never_shuts(
    allow: tuple[str, ...], more: tuple[str, ...], deny: tuple[str, ...], host: str, port: int, protocol: str
) -> None:
    """What is open with fewer rules is open with more."""
    without = decider(*allow, deny=deny)
    with_more = decider(*allow, *more, deny=deny)
    assert _open(with_more, host, port, protocol) or not _open(without, host, port, protocol)


@given(_modes, _rules, _denies, _hosts, _ports, _protocols)
def test_each_step_lets_through_what_the_next_one_allows(
    mode: str, allow: tuple[str, ...], deny: tuple[str, ...], host: str, port: int, protocol: str
) -> None:
    """An open connection's name is answered, and it is open before its protocol is known."""
    found = decider(*allow, mode=mode, deny=deny)
    if _open(found, host, port, protocol):
        assert found.connect(host, port, "").verdict == "allow"
        if hosts.address(host) is None:
            assert found.resolve(host).verdict == "allow"


@given(st.text(max_size=40), st.integers(-5, 70000), _protocols)
def test_no_text_raises(host: str, port: int, protocol: str) -> None:
    """Whatever a sandbox sends, the answer is a decision."""
    found = decider("a.org", ask=True, requests=REQUESTS, credentials=CREDENTIALS)
    assert found.resolve(host).verdict in ("deny", "ask", "allow")
    assert found.connect(host, port, protocol).verdict in ("deny", "ask", "allow")
    assert found.address(host, host, port).verdict in ("deny", "allow")
    assert found.request(host, host, host).verdict in ("deny", "allow")
    assert found.credentials_for(host) == () or found.intercept(host, port) in (True, False)
