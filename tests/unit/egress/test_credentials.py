"""Placeholders: what they look like, where a value takes their place, and where it does not."""

from __future__ import annotations

import base64
import re
import string
from typing import TYPE_CHECKING

import pytest

from casemate.egress.credentials import (
    MIN_SECRET,
    Book,
    applies,
    complaint,
    placeholder,
    placeholders_for,
)
from tests.unit.egress.flowlab import NAME, OTHER, SECRET, credential

if TYPE_CHECKING:
    from casemate.policy.model import Credential

STAND_IN = "ghp_casemateAAAABBBBCCCCDDDDEEEEFFFF1234"


def book(*credentials: Credential, name: str = NAME, trusted: bool = True, secret: str = SECRET,
         stand_in: str = STAND_IN) -> Book:  # fmt: skip
    """The credentials of a sandbox with one secret for all of them."""
    names = [known.name for known in credentials]
    return Book(
        name, credentials, dict.fromkeys(names, secret), dict.fromkeys(names, stand_in), trusted=trusted
    )


def basic(user: str, password: str) -> bytes:
    """The value of basic credentials."""
    return b"Basic " + base64.b64encode(f"{user}:{password}".encode())


# ---------------------------------------------------------------- placeholders


@pytest.mark.parametrize(
    "secret", [SECRET, "x" * 16, "y" * 17, "z" * 21, "w" * 24, "npm_" + "q" * 36, "sk-ant-api03-" + "k" * 90]
)
def test_a_placeholder_has_the_secrets_length(secret: str) -> None:
    """It is as long as a secret of 16 characters or more, fits any place, and is another one each time."""
    made = {placeholder(secret) for _ in range(50)}
    assert len(made) == 50
    assert {len(text) for text in made} == {len(secret)}
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+", text) for text in made)
    assert all("cas" in text for text in made), "recognisable"


def test_a_short_secret_has_a_longer_placeholder() -> None:
    """Below 16 characters there is no room for chance: the placeholder is longer."""
    assert len(placeholder("hunter22")) == 24


@pytest.mark.parametrize("secret", [SECRET, "glpat-abcdefghij0123456789XYZ", "pypi-AgEIcHlwaS5vcmcCJDU0"])
def test_the_kind_of_a_token_shows(secret: str) -> None:
    """Programs that choose by the first letters of a token choose alike."""
    assert placeholder(secret).startswith(secret.partition("_")[0][:4] if "_" in secret else secret[:5])


def test_a_placeholder_shows_nothing_else() -> None:
    """No run of the secret's own characters is in it, but for its kind."""
    made = placeholder(SECRET)
    assert not any(SECRET[at : at + 6] in made for at in range(4, len(SECRET) - 6))


@pytest.mark.parametrize(
    ("secret", "word"),
    [
        ("short", "fewer"),
        ("", "fewer"),
        ("with\nnewline", "printable"),
        ("with\0nul-byte", "printable"),
        ("pässword", "printable"),
        ("trailing-space ", "space"),
        ("x" * 9000, "more"),
    ],
)
def test_secrets_that_cannot_be_used(secret: str, word: str) -> None:
    """What no header can carry, or no answer can be kept free of, is refused, and not shown."""
    why = complaint(secret)
    assert word in why
    assert not secret or secret not in why
    with pytest.raises(ValueError, match="TOKEN") as caught:
        placeholders_for({"TOKEN": secret})
    assert not secret or secret not in str(caught.value)


def test_secrets_that_can_be_used() -> None:
    """Control: all of printable ASCII is fine, and the shortest length."""
    assert complaint(string.printable[:94]) == ""
    assert complaint("p" * MIN_SECRET) == ""
    assert placeholders_for({"A": SECRET}).keys() == {"A"}


# ---------------------------------------------------------------- where a value goes


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        (f"Bearer {STAND_IN}".encode(), f"Bearer {SECRET}".encode()),
        (f"bearer  {STAND_IN}".encode(), f"bearer {SECRET}".encode()),
        (f"token {STAND_IN}".encode(), f"token {SECRET}".encode()),
        (basic("x-access-token", STAND_IN), basic("x-access-token", SECRET)),
        (basic(STAND_IN, ""), basic(SECRET, "")),
        (basic(STAND_IN, "x-oauth-basic"), basic(SECRET, "x-oauth-basic")),
        (basic("a", STAND_IN).rstrip(b"="), basic("a", SECRET)),
    ],
)
@pytest.mark.parametrize("place", ["bearer", "basic", "basic:me"])
@pytest.mark.parametrize("name", [b"Authorization", b"authorization", b"AUTHORIZATION"])
def test_authorization(sent: bytes, arrives: bytes, place: str, name: bytes) -> None:
    """Bearer, token and basic credentials get the value, as user or as password."""
    filled = book(credential(place=place)).fill(b"/", [(b"Host", b"x"), (name, sent)])
    assert filled.headers == [(b"Host", b"x"), (name, arrives)]
    assert filled.used == ("TOKEN",)
    assert filled.astray == ()


@pytest.mark.parametrize(
    "sent",
    [
        f"Digest {STAND_IN}".encode(),
        f"Bearer x{STAND_IN}".encode(),
        STAND_IN.encode(),
        basic("user", f"{STAND_IN}x"),
        b"Basic " + base64.b64encode(STAND_IN.encode()),
        b"Basic ???" + STAND_IN.encode(),
    ],
)
def test_authorization_of_other_kinds(sent: bytes) -> None:
    """Where no token stands alone, nothing is replaced, and that is told."""
    filled = book(credential()).fill(b"/", [(b"Authorization", sent)])
    assert filled.headers == [(b"Authorization", sent)]
    assert (filled.used, filled.astray) == ((), ("TOKEN",))


def test_a_named_header() -> None:
    """The header that the credential names gets the value wherever the placeholder stands in it; no other
    does.
    """
    mine = book(credential(place="header:X-Api-Key"))
    filled = mine.fill(b"/", [(b"x-api-key", STAND_IN.encode()), (b"X-Other", STAND_IN.encode())])
    assert filled.headers == [(b"x-api-key", SECRET.encode()), (b"X-Other", STAND_IN.encode())]
    assert (filled.used, filled.astray) == (("TOKEN",), ("TOKEN",))
    assert mine.fill(b"/", [(b"X-Api-Key", b"key=" + STAND_IN.encode())]).headers == [
        (b"X-Api-Key", b"key=" + SECRET.encode())
    ]
    bare = book(credential(place="header:Authorization")).fill(b"/", [(b"Authorization", STAND_IN.encode())])
    assert bare.headers == [(b"Authorization", SECRET.encode())]


def test_a_query_parameter() -> None:
    """The parameter that the credential names gets the value, encoded; others, and the path, do not."""
    secret = "tok&en=1+/x%y#z"
    mine = book(credential(place="query:key"), secret=secret)
    target = f"/{STAND_IN}?a={STAND_IN}&key={STAND_IN}&b=1".encode()
    filled = mine.fill(target, [])
    assert filled.target == f"/{STAND_IN}?a={STAND_IN}&key=tok%26en%3D1%2B%2Fx%25y%23z&b=1".encode()
    assert (filled.used, filled.astray) == (("TOKEN",), ("TOKEN",))
    assert mine.fill(f"/?xkey={STAND_IN}".encode(), []).used == ()


@pytest.mark.parametrize(
    ("place", "header"),
    [
        ("bearer", (b"Authorization", f"Bearer {SECRET}".encode())),
        ("basic", (b"Authorization", basic("x-access-token", SECRET))),
        ("basic:me", (b"Authorization", basic("me", SECRET))),
        ("header:X-Api-Key", (b"X-Api-Key", SECRET.encode())),
    ],
)
def test_added_where_there_is_none(place: str, header: tuple[bytes, bytes]) -> None:
    """``add`` gives a request the credential that it does not bring; without ``add`` nothing is added."""
    assert book(credential(place=place, add=True)).fill(b"/", []).headers == [header]
    assert book(credential(place=place)).fill(b"/", []).headers == []
    own = [(header[0].lower(), b"Bearer of-its-own")]
    assert book(credential(place=place, add=True)).fill(b"/", own).headers == own


def test_added_to_a_query() -> None:
    """A parameter is added behind what is there."""
    mine = book(credential(place="query:key", add=True))
    assert mine.fill(b"/x", []).target == f"/x?key={SECRET}".encode()
    assert mine.fill(b"/x?a=1", []).target == f"/x?a=1&key={SECRET}".encode()
    assert mine.fill(b"/x?key=own", []).target == b"/x?key=own"


# ---------------------------------------------------------------- where it does not


@pytest.mark.parametrize("place", ["bearer", "header:X-Api-Key", "query:key"])
@pytest.mark.parametrize("add", [False, True])
def test_another_host_gets_a_placeholder(place: str, add: bool) -> None:
    """Towards a host that the credential does not name it stays a placeholder, and that is told."""
    sent = [(b"Authorization", f"Bearer {STAND_IN}".encode()), (b"X-Api-Key", STAND_IN.encode())]
    other = book(credential(place=place, add=add), name=OTHER)
    filled = other.fill(f"/?key={STAND_IN}".encode(), sent)
    assert filled.headers == sent
    assert filled.target == f"/?key={STAND_IN}".encode()
    assert (filled.used, filled.astray) == ((), ("TOKEN",))
    assert not other
    assert not other.redactor()


@pytest.mark.parametrize("add", [False, True])
def test_an_unverified_connection_gets_a_placeholder(add: bool) -> None:
    """Without a verified other end no value is given, to the right host either."""
    sent = [(b"Authorization", basic("me", STAND_IN))]
    filled = book(credential(add=add), trusted=False).fill(b"/", sent)
    assert filled.headers == sent
    assert (filled.used, filled.astray) == ((), ("TOKEN",))


@pytest.mark.parametrize(
    ("host", "name", "fits"),
    [
        ("api.example.org", "api.example.org", True),
        ("api.example.org", "xapi.example.org", False),
        ("api.example.org", "api.example.org.evil.net", False),
        ("*.example.org", "api.example.org", True),
        ("*.example.org", "a.b.example.org", True),
        ("*.example.org", "example.org", False),
        ("*.example.org", "badexample.org", False),
    ],
)
def test_hosts_by_labels(host: str, name: str, fits: bool) -> None:
    """A credential belongs to exact hosts, or to all below one by whole labels."""
    assert applies(credential(hosts=(host,)), name) is fits


def test_two_credentials_of_one_host() -> None:
    """Each placeholder becomes its own value."""
    first, second = credential("ONE"), credential("TWO", place="header:X-Key")
    secrets = {"ONE": "value-of-one-111111", "TWO": "value-of-two-222222"}
    stand_ins = {"ONE": "casemate-one-111111", "TWO": "casemate-two-222222"}
    both = Book(NAME, (first, second), secrets, stand_ins, trusted=True)
    sent = [(b"Authorization", b"Bearer casemate-one-111111"), (b"X-Key", b"casemate-two-222222")]
    filled = both.fill(b"/", sent)
    assert filled.headers == [
        (b"Authorization", b"Bearer value-of-one-111111"), (b"X-Key", b"value-of-two-222222")
    ]  # fmt: skip
    swapped = both.fill(b"/", [(b"Authorization", b"Bearer casemate-two-222222")])
    assert swapped.headers == [(b"Authorization", b"Bearer casemate-two-222222")]
    assert swapped.astray == ("TWO",)


# ---------------------------------------------------------------- what is never shown


def test_nothing_shows_a_secret_when_printed() -> None:
    """Objects that hold a value do not show it, however they are printed."""
    mine = book(credential(add=True))
    filled = mine.fill(b"/", [(b"Authorization", f"Bearer {STAND_IN}".encode())])
    shown = f"{mine!r} {filled!r} {mine.redactor()!r} {mine} {filled} {[mine, filled]}"
    assert SECRET not in shown
    assert "TOKEN" in shown


def test_the_very_form_that_was_sent_is_taken_out() -> None:
    """Basic credentials come back as the program sent them, to the last character."""
    mine = book(credential())
    sent = basic("me", STAND_IN)
    real = mine.fill(b"/", [(b"Authorization", sent)]).headers[0][1]
    assert real == basic("me", SECRET)
    assert mine.redactor().whole(b"you sent: " + real) == b"you sent: " + sent


def test_bodies_are_watched() -> None:
    """A placeholder in a body is seen across pieces, told once, and one that is not there is not."""
    watch = book(credential()).watcher()
    for piece in (b"{'x': '" + STAND_IN[:10].encode(), STAND_IN[10:].encode() + b"'}", STAND_IN.encode()):
        watch.feed(piece)
    assert watch.seen == ("TOKEN",)
    quiet = book(credential()).watcher()
    quiet.feed(b"nothing" * 1000 + STAND_IN[:-1].encode())
    assert quiet.seen == ()
