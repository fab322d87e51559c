"""Patterns of requests: a path that a server may read in two ways meets none of them."""

from __future__ import annotations

import time

import pytest

from casemate.policy.requests import canonical, meets, parse


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET /", "GET /"),
        ("GET /repos/*", "GET /repos/*"),
        ("* /public/**", "* /public/**"),
        ("POST /graphql", "POST /graphql"),
        ("GET /%7Euser/%41", "GET /~user/A"),
        ("GET /a%2fb", "GET /a%2Fb"),
        ("M-SEARCH /x/", "M-SEARCH /x/"),
    ],
)
def test_a_pattern_has_one_spelling(text: str, shown: str) -> None:
    """What was encoded without need is decoded; the rest is encoded in capitals."""
    assert parse(text) == shown
    assert parse(shown) == shown


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "method and a path"),
        ("GET", "method and a path"),
        ("/repos", "method and a path"),
        ("get /repos", "capitals"),
        ("GET,POST /repos", "capitals"),
        ("GET repos", "starts with a slash"),
        ("GET  /repos", "starts with a slash"),
        ("GET https://example.org/", "starts with a slash"),
        ("GET /repos?x=1", "query"),
        ("GET /repos#x", "query"),
        ("GET /a/../b", "several ways"),
        ("GET /a/%2e%2e/b", "several ways"),
        ("GET //a", "several ways"),
        ("GET /a b", "several ways"),
        ("GET /a\\b", "several ways"),
        ("GET /%zz", "several ways"),
        ("GET /***", r"no \*\*\*"),
        ("GET /" + "*/" * 9, "wildcards"),
        ("GET /" + "a" * 1100, "longer"),
        ("GET /é", "several ways"),
    ],
)
def test_what_is_no_pattern(text: str, why: str) -> None:
    """Each refusal says what to write."""
    with pytest.raises(ValueError, match=why):
        parse(text)


@pytest.mark.parametrize(
    ("pattern", "method", "target", "met"),
    [
        ("GET /repos/*", "GET", "/repos/x", True),
        ("GET /repos/*", "GET", "/repos/x?ref=main", True),
        ("GET /repos/*", "GET", "/repos/", True),
        ("GET /repos/*", "GET", "/repos", False),
        ("GET /repos/*", "GET", "/repos/x/y", False),
        ("GET /repos/*", "GET", "/repos/x%2Fy", False),
        ("GET /repos/*", "GET", "/repos/x%2fy", False),
        ("GET /repos/*", "POST", "/repos/x", False),
        ("GET /repos/*", "get", "/repos/x", False),
        ("GET /repos/*", "HEAD", "/repos/x", False),
        ("GET /repos/**", "GET", "/repos/x/y/z", True),
        ("GET /repos/**", "GET", "/repos/x%2Fy", True),
        ("GET /repos/**", "GET", "/reposx", False),
        ("GET /a/*/c", "GET", "/a/b/c", True),
        ("GET /a/*/c", "GET", "/a/b/b/c", False),
        ("GET /a/**/c", "GET", "/a/b/b/c", True),
        ("GET /*.json", "GET", "/x.json", True),
        ("GET /*.json", "GET", "/x.json5", False),
        ("* /x", "DELETE", "/x", True),
        ("GET /a%2Fb", "GET", "/a%2fb", True),
        ("GET /a%2Fb", "GET", "/a/b", False),
        ("GET /A", "GET", "/a", False),
        ("GET /~u", "GET", "/%7Eu", True),
        ("GET /x", "GET", "/x/", False),
        ("GET /*", "GET", "/", True),
        ("GET /**", "GET", "/", True),
    ],
)
def test_what_meets_a_pattern(pattern: str, method: str, target: str, met: bool) -> None:
    """One star is one segment, two are everything; the query is not looked at."""
    path = canonical(target)
    assert path is not None
    assert meets(parse(pattern), method, path) is met


@pytest.mark.parametrize(
    "target",
    [
        "/a/../b", "/a/./b", "/..", "/a/%2e%2e/b", "/a/%2E./b", "/a/.%2e/b", "/a%2f..%2fb", "/a%5c..%5cb",
        "/a/..;x=1/b", "/a/..%3bx/b", "/a/%252e%252e/b", "/a%252fb", "//a", "/a//b", "/a\\b", "/a b",
        "/a\x00b", "/a%00b", "/a%0d%0aX: y", "/a%", "/a%2", "/a%g0", "/é", "/a#b", "/a?b#c", "a", "", "*", "http://x/",
        "?x", "/" + "a" * 20000, "/a\tb", "/a\x7f", "/a%7f",
    ],
)  # fmt: skip
def test_what_has_more_than_one_reading(target: str) -> None:
    """Ways up, encodings of encodings, empty segments and bytes that no path has: no pattern is met."""
    assert canonical(target) is None


def test_a_query_may_hold_what_a_path_may_not() -> None:
    """Only the path counts."""
    assert canonical("/a?x=/../b//c") == "/a"


def test_a_long_path_and_many_wildcards_take_no_time() -> None:
    """All readings at once: the time grows with the length, not with the number of readings."""
    pattern = parse("GET /" + "a**" * 8 + "b")
    path = canonical("/" + "a" * 16000)
    assert path is not None
    began = time.monotonic()
    assert not meets(pattern, "GET", path)
    assert time.monotonic() - began < 5
