"""What comes back from a host shows no secret, in whatever pieces it comes."""

from __future__ import annotations

import base64
import html
import json
import urllib.parse

import pytest

from casemate.egress.redact import Redactor, quote, variants

SECRET = b"s3cr/et+Tok=en&x\"y'z <9>"
STAND_IN = b"casemate" + b"A" * (len(SECRET) - 8)


def redactor(secret: bytes = SECRET, stand_in: bytes = STAND_IN) -> Redactor:
    """For one secret."""
    return Redactor(variants(secret, stand_in))


@pytest.mark.parametrize(
    "written",
    [
        SECRET,
        urllib.parse.quote(SECRET, safe="").encode(),
        urllib.parse.quote(SECRET).encode(),
        urllib.parse.quote_plus(SECRET).encode(),
        quote(SECRET, lower=True),
        SECRET.hex().encode(),
        SECRET.hex().upper().encode(),
        json.dumps(SECRET.decode())[1:-1].encode(),
        html.escape(SECRET.decode()).encode(),
    ],
)
def test_ways_to_write_a_secret(written: bytes) -> None:
    """A secret is found as it is, percent-encoded in each usual way, and escaped for JSON or HTML."""
    text = b"before " + written + b" after"
    cleaned = redactor().whole(text)
    assert cleaned != text
    assert len(cleaned) == len(text)
    assert cleaned.startswith(b"before ")
    assert cleaned.endswith(b" after")
    for part in (SECRET[:12], SECRET[-12:]):
        assert part not in cleaned


@pytest.mark.parametrize("user", ["", "x", "me", "bot", "x-access-token"])
@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_base64_behind_any_user(user: str, encode: object) -> None:
    """In the base64 of ``user:secret`` at most two bytes of the secret can be read, whatever the user."""
    assert callable(encode)
    secret = b"ghp_9fKq2LmZx7RtUvWy4BnCdEaHs1Jg3PoQi5Yb"
    encoded = encode(user.encode() + b":" + secret)
    cleaned = redactor(secret, b"casemate" + b"B" * 32).whole(b'{"auth":"' + encoded + b'"}')[9:-2]
    assert len(cleaned) == len(encoded)
    decoded = base64.b64decode(cleaned, altchars=b"-_" if encode is base64.urlsafe_b64encode else None)
    left = [at for at in range(len(secret)) if decoded[len(user) + 1 + at] == secret[at]]
    assert len(set(left) & {*range(2, len(secret) - 2)}) <= 2  # a letter may be the same by chance
    assert decoded.startswith(user.encode() + b":")


def test_shown_is_the_placeholder() -> None:
    """What stands in the place of a secret of the same length is the placeholder, so programs can go on with
    it.
    """
    assert redactor(b"0123456789abcdef", b"casemate01234567").whole(b"=0123456789abcdef;") == (
        b"=casemate01234567;"
    )


def test_another_length_gives_asterisks() -> None:
    """Where the placeholder is longer, asterisks keep the length."""
    assert redactor(b"shortpwd", b"casemate-0123456789").whole(b"<shortpwd>") == b"<********>"


def test_nothing_is_held_without_a_reason() -> None:
    """An event stream arrives as it comes: only what may become a secret waits."""
    stream = redactor(b"secret-value-1", b"X" * 14)
    assert stream.feed(b"data: one\n\n") == b"data: one\n\n"
    assert stream.feed(b"data: sec") == b"data: "
    assert stream.feed(b"ond\n\n") == b"second\n\n"
    assert stream.end() == b""


def test_a_secret_in_single_bytes() -> None:
    """A secret that comes byte by byte is found, and what surrounds it is whole."""
    stream = redactor(b"secret-value-1", b"X" * 14)
    text = b"se-secret-value-1secret-value-"
    found = b"".join(stream.feed(bytes((byte,))) for byte in text) + stream.end()
    assert found == b"se-" + b"X" * 14 + b"secret-value-"
    assert stream.found == 1


def test_patterns_within_patterns() -> None:
    """The longer of two patterns wins, also when the shorter one is already there; a lone shorter one is
    found.
    """
    pairs = [(b"abcdefgh", b"1" * 8), (b"abcdefghijkl", b"2" * 12), (b"fghijklm", b"3" * 8)]
    for size in range(1, 16):
        for text, wanted in [
            (b"..abcdefghijkl..", b"..222222222222.."),
            (b"..abcdefghi", b"..11111111i"),
            (b"abcdefgh", b"11111111"),
            (b"abcabcdefgh!", b"abc11111111!"),
            (b"..abcdefghijklm", b"..222222222222m"),
        ]:
            stream = Redactor(pairs)
            parts = [stream.feed(text[at : at + size]) for at in range(0, len(text), size)]
            assert b"".join(parts) + stream.end() == wanted


def test_nothing_to_look_for() -> None:
    """Without patterns everything passes."""
    stream = Redactor([])
    assert not stream
    assert stream.feed(b"anything") == b"anything"
    assert stream.whole(b"anything") == b"anything"
