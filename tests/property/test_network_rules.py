"""Rules and request patterns of any text: one spelling, or a refusal that a terminal can show."""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Any, cast

from hypothesis import example, given
from hypothesis import strategies as st

from casemate.policy import hosts, reference, requests, rules

_PIECES = st.lists(
    st.one_of(
        st.sampled_from(
            ["*", "*.", ".", ":", "/", "[", "]", "-", ",", "@", "%", "::", "://", "http://", "tcp://", "a",
             "org", "com", "co.uk", "github.io", "example", "xn--", "10.0.0.0", "/8", "127.0.0.1", "0x7f",
             "2001:db8::", "443", "80", "65536", "0", "host.casemate.internal", "localhost", "\0", " ", "\n",
             "\u3002", "\u212a", "\u00df", "\u200d", "_", "A", "\uff0e"]
        ),
        st.text(max_size=3),
    ),
    max_size=8,
).map("".join)  # fmt: skip
_label = st.from_regex(r"[a-z]([a-z0-9-]{0,5}[a-z0-9])?", fullmatch=True)
_names = st.lists(_label, min_size=2, max_size=4).map(".".join)
_ports = st.sampled_from(["", ":443", ":22", ":*", ":1-1024", ":80,443,8080"])
_valid = st.builds(
    "{}{}{}{}".format, st.sampled_from(["", "http://", "https://"]), st.sampled_from(["", "*."]), _names,
    _ports,
)  # fmt: skip
_schema = cast("dict[str, Any]", reference.json_schema())["$defs"]["RawNetwork"]["properties"]
PATTERN = re.compile(_schema["allow"]["items"]["pattern"])


def is_sentence(error: ValueError) -> bool:
    """Whether a terminal can show the refusal, and a person learns something."""
    text = str(error)
    return text != "" and text.isascii() and text.isprintable() and len(text) < 1000


def parsed(text: str, **how: bool) -> rules.Rule | None:
    """The rule that a text is, or None; a refusal is a sentence."""
    try:
        return rules.parse(text, **how)
    except ValueError as error:
        refused = error
    assert is_sentence(refused)
    return None


def pattern(text: str) -> str | None:
    """The same for a request pattern."""
    try:
        return requests.parse(text)
    except ValueError as error:
        refused = error
    assert is_sentence(refused)
    return None


@given(st.one_of(_PIECES, _valid), st.sampled_from(["allow", "deny", "bound"]))
@example("[2001:db8::]/32:443", "allow")
@example("\u212aelvin.org", "allow")
def test_any_text_is_a_rule_with_one_spelling_or_a_refusal(text: str, kind: str) -> None:
    """What is taken reads back as itself, and the published schema takes it, too."""
    how = {"deny": kind == "deny", "bound": kind == "bound"}
    rule = parsed(text, **how)
    if rule is not None:
        assert rule.text.isascii()
        assert parsed(rule.text, **how) == rule
        assert PATTERN.search(text), text
        assert PATTERN.search(rule.text), rule.text


@given(st.one_of(_PIECES, _valid))
def test_what_may_be_allowed_may_be_denied_and_bounded(text: str) -> None:
    """Refusals of breadth are the only difference, and what allows never covers everything."""
    rule = parsed(text)
    if rule is None:
        return
    bound = parsed(text, bound=True)
    assert bound == rule
    assert rules.covers(bound, rule)
    denied = parsed(text, deny=True)
    assert denied is not None
    assert rules.covers(denied, rule)
    assert rule.kind != "all"


@given(_names, _names, st.sampled_from(["", "*."]))
def test_names_are_compared_by_labels(host: str, name: str, star: str) -> None:
    """A rule is about a host exactly if the lists of labels say so."""
    rule = parsed(f"{star}{name}:*", bound=True)
    if rule is None:
        return
    mine, theirs = host.split("."), name.split(".")
    wanted = mine[-len(theirs) :] == theirs and len(mine) > len(theirs) if star else mine == theirs
    assert rules.hits(rule, host, 443) is wanted


@given(st.ip_addresses(v=4), st.integers(8, 32), st.ip_addresses(v=4))
def test_nets_are_compared_by_bits(base: Any, length: int, other: Any) -> None:
    """A rule is about an address exactly if the first bits agree."""
    mask = (0xFFFFFFFF << (32 - length)) & 0xFFFFFFFF
    net = ip_address(int(base) & mask)
    rule = parsed(f"{net}/{length}:*", bound=True)
    assert rule is not None
    assert rules.hits(rule, other, 443) is (int(other) & mask == int(net))
    assert rules.hits(rule, ip_address(int(base)), 443)


_rules = st.one_of(_valid, st.sampled_from(["10.0.0.0/8", "10.1.0.0/16:443", "10.1.2.3", "*.a.org", "a.org"]))


@given(_rules, _rules, st.sampled_from(["a.org", "b.a.org", "10.1.2.3", "10.9.9.9"]),
       st.sampled_from([22, 80, 443]), st.sampled_from(["http", "https", "tcp"]))  # fmt: skip
def test_what_covers_is_about_all_of_it(outer: str, inner: str, host: str, port: int, protocol: str) -> None:
    """No connection that the inner rule is about escapes the outer one."""
    one, two = parsed(outer, bound=True), parsed(inner, bound=True)
    if one is None or two is None or not rules.covers(one, two):
        return
    where = host if hosts.address(host) is None else ip_address(host)
    assert rules.hits(one, where, port, protocol) or not rules.hits(two, where, port, protocol)


_PATHS = st.lists(
    st.one_of(st.sampled_from(["/", "*", "**", ".", "..", "%2e", "%2F", "%25", "%", "a", "b", "?", "#", ";",
                               "\\", "GET ", " ", "//", "%00"]), st.text(max_size=2)),
    max_size=10,
).map("".join)  # fmt: skip


@given(_PATHS)
def test_any_text_is_a_pattern_with_one_spelling_or_a_refusal(text: str) -> None:
    """The same for request patterns."""
    for form in (text, f"GET /{text}"):
        shown = pattern(form)
        assert shown is None or pattern(shown) == shown


@given(_PATHS)
def test_a_path_in_one_spelling_stays_so(text: str) -> None:
    """What is let through has no way up, in any of the readings that servers have."""
    path = requests.canonical(f"/{text}")
    if path is None:
        return
    assert requests.canonical(path) == path
    decoded = path.replace("%2F", "/").replace("%5C", "/")
    assert not {".", ".."} & set(decoded.split("/"))
    assert requests.meets("* /**", "GET", path)


_shapes = st.lists(st.sampled_from(["a", "/", "*", "**", "b"]), min_size=1, max_size=6).map("".join)
_walks = st.lists(st.sampled_from(["a", "/a", "b", "/b", "%2F"]), max_size=6).map("".join)


@given(_shapes, _walks)
def test_patterns_mean_what_an_expression_says(shape: str, walk: str) -> None:
    """The matcher agrees with a regular expression made from the same pattern."""
    spelt, path = pattern(f"GET /{shape}"), requests.canonical(f"/{walk}")
    if spelt is None or path is None:
        return
    pieces = re.split(r"(\*\*|\*)", spelt.partition(" ")[2])
    wild = {"**": ".*", "*": "(?:(?!%2F)[^/])*"}
    expression = "".join(wild.get(piece, re.escape(piece)) for piece in pieces)
    assert requests.meets(spelt, "GET", path) is (re.fullmatch(expression, path) is not None)
