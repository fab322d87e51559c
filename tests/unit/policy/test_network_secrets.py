"""Credentials and rules about requests in a policy: secrets stay outside, restrictions add up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from casemate.errors import PolicyError
from casemate.policy.model import Credential, RawCredential, RequestRule

if TYPE_CHECKING:
    from tests.unit.policy.conftest import Caller

HEAD = "version = 1\n[network]\n"


def test_a_credential_in_full(caller: Caller) -> None:
    """Every field in its one spelling, and the short form with its defaults."""
    caller.user(
        HEAD + "mode = 'allowlist'\nallow = ['github.com', '*.example.org']\n"
        "[network.credentials.GITHUB_TOKEN]\nhosts = ['GitHub.com', '*.example.org.', 'github.com']\n"
        "from = 'file:~/.token'\nas = 'basic:x-access-token'\nadd = true\n"
        "[network.credentials.SHORT]\nhosts = ['a.example.org']\n"
    )
    effective = caller.load()
    assert effective.policy.network.credentials == (
        Credential(name="GITHUB_TOKEN", hosts=("github.com", "*.example.org"), add=True,
                   source=f"file:{caller.places.home}/.token", as_="basic:x-access-token"),
        Credential(name="SHORT", hosts=("a.example.org",), source="env:SHORT", as_="bearer", add=False),
    )  # fmt: skip
    assert effective.notes == ()
    first = effective.policy.network.credentials[0]
    assert (first.kind, first.argument) == ("basic", "x-access-token")


def test_a_later_credential_replaces_one_of_the_same_name(caller: Caller) -> None:
    """Flags weigh more than the file."""
    caller.user(HEAD + "credentials = { T = { hosts = ['a.org'] }, U = { hosts = ['a.org'] } }")
    flags = {"T": RawCredential(hosts=("b.org",))}
    found = caller.load(network="full", credentials=flags).policy.network.credentials
    assert [(one.name, one.hosts) for one in found] == [("T", ("b.org",)), ("U", ("a.org",))]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ("hosts = []", "nobody would get"),
        ("from = 'env'", "hosts is missing"),
        ("hosts = ['a.org:443']", "host alone"),
        ("hosts = ['*.com']", "too broad"),
        ("hosts = ['10.0.0.1']", "a host's name"),
        ("hosts = ['a.org']\nfrom = 'keyring'", "env:NAME or file:/path"),
        ("hosts = ['a.org']\nfrom = 'env:A B'", "not a variable's name"),
        ("hosts = ['a.org']\nfrom = 'file:'", "env:NAME or file:/path"),
        ("hosts = ['a.org']\nfrom = 'file:token'", "whole path"),
        ("hosts = ['a.org']\nas = 'digest'", "is not bearer"),
        ("hosts = ['a.org']\nas = 'header'", "is not bearer"),
        ("hosts = ['a.org']\nas = 'header:A B'", "is not bearer"),
        ("hosts = ['a.org']\nas = 'header:X\\r\\nY'", "is not bearer"),
        ("hosts = ['a.org']\nas = 'header:Host'", "belongs to the connection"),
        ("hosts = ['a.org']\nas = 'header:Content-Length'", "belongs to the connection"),
        ("hosts = ['a.org']\nas = 'query:a=b'", "is not bearer"),
        ("hosts = ['a.org']\nas = 'basic:a:b'", "user's name"),
        ("hosts = ['a.org']\nas = 'bearer:x'", "is not bearer"),
        ("hosts = ['a.org']\nvalue = 'secret'", "unknown field"),
    ],
)  # fmt: skip
def test_credentials_that_are_refused(caller: Caller, fields: str, why: str) -> None:
    """Each with the reason; a value has no place in a policy."""
    caller.user(f"version = 1\n[network.credentials.TOKEN]\n{fields.replace(chr(39), chr(34))}\n")
    with pytest.raises(PolicyError, match=why) as caught:
        caller.load()
    assert "TOKEN" in str(caught.value)


@pytest.mark.parametrize("name", ["HOME", "CASEMATE_X", "A B", "A-B", ""])
def test_names_that_no_credential_has(caller: Caller, name: str) -> None:
    """The name is a variable that the sandbox does not decide itself."""
    with pytest.raises(PolicyError):
        caller.load(network="full", credentials={name: RawCredential(hosts=("a.org",))})


def test_a_secret_file_in_the_workspace_is_refused(caller: Caller) -> None:
    """The command could read it there."""
    caller.user(HEAD + f"credentials = {{ T = {{ hosts = ['a.org'], from = 'file:{caller.workspace}/t' }} }}")
    with pytest.raises(PolicyError, match="lies in the workspace"):
        caller.load()


def test_a_credential_that_nothing_reaches_is_said(caller: Caller) -> None:
    """So that a misspelt host is found."""
    flags = {"credentials": {"T": RawCredential(hosts=("gihub.com",))}, "allow": ("github.com",)}
    assert any("no rule of network.allow reaches gihub.com" in note for note in caller.load(**flags).notes)
    flags["credentials"] = {"T": RawCredential(hosts=("github.com",))}
    assert caller.load(**flags).notes == ()


def test_a_passed_variable_stays_a_placeholder(caller: Caller) -> None:
    """Named twice, the secret stays outside, and a person learns of it."""
    notes = caller.load(
        network="full", pass_=("T",), credentials={"T": RawCredential(hosts=("a.org",))}
    ).notes
    assert any("holds the placeholder" in note for note in notes)


def test_requests_of_all_layers_count(caller: Caller) -> None:
    """A project restricts, trusted or not; what the user says of the same host has to be met as well."""
    caller.project('version = 1\n[network.requests]\n"API.github.com." = ["GET /repos/**"]\n')
    caller.user(
        'version = 1\n[network.requests]\n"api.github.com" = ["* /repos/mine/**"]\n"*.example.org" = []\n'
    )
    effective = caller.load(network="full", requests={"api.github.com": ("GET /**",)})
    assert effective.policy.network.requests == (
        RequestRule(host="api.github.com", allow=("GET /repos/**",), layer="project"),
        RequestRule(host="api.github.com", allow=("* /repos/mine/**",), layer="user"),
        RequestRule(host="*.example.org", allow=(), layer="user"),
        RequestRule(host="api.github.com", allow=("GET /**",), layer="flags"),
    )
    assert effective.origins["network.requests[api.github.com]"] == "project, user, flags"


@pytest.mark.parametrize(
    "text", ['"api.github.com" = ["get /"]', '"api.github.com:443" = ["GET /"]', '"10.0.0.1" = ["GET /"]',
             '"a.org" = ["GET /a/../b"]', '"a.org" = ["GET /"]\n"A.org" = []', '"*" = []']
)  # fmt: skip
def test_requests_that_are_refused(caller: Caller, text: str) -> None:
    """A restriction that cannot be read is an error, never no restriction."""
    caller.project(f"version = 1\n[network.requests]\n{text}\n")
    with pytest.raises(PolicyError):
        caller.load()
