"""The options about the network become the policy's flag layer, and the policy that they mean."""

from __future__ import annotations

import os

import pytest

from casemate.cli import run
from casemate.errors import PolicyError
from casemate.policy.load import load
from casemate.policy.model import Credential, Network, RawCredential
from casemate.settings import Places


def network(*words: str, base: str) -> Network:
    """The network that a run with these options has, with no file of anybody."""
    os.makedirs(f"{base}/w", exist_ok=True)
    places = Places(
        home=f"{base}/home", homes=(f"{base}/home",), config=f"{base}/c", managed=f"{base}/m/managed.toml",
        user=f"{base}/c/policy.toml", state=f"{base}/state", run=f"{base}/run",
    )  # fmt: skip
    flags = run.parse([*words, "--", "true"]).flags(f"{base}/w")
    return load(workspace=f"{base}/w", environ={}, flags=flags, places=places).policy.network


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory for one caller."""
    return os.path.realpath(tmp_path_factory.mktemp("caller"))


def test_hosts_and_modes(base: str) -> None:
    """What is repeated adds up; a host alone means the allowlist."""
    found = network("--allow", "GitHub.com", "--allow=*.example.org:443", "--deny-host", "*.evil.example",
                    base=base)  # fmt: skip
    assert (found.mode, found.allow, found.deny) == (
        "allowlist", ("github.com", "*.example.org:443"), ("*.evil.example",)
    )  # fmt: skip
    assert network("--network", "full", "--allow", "10.0.0.0/8", base=base).mode == "full"
    assert network("--network", "none", "--allow", "a.org", base=base).mode == "none"
    assert network("--ask", base=base) == Network(mode="allowlist", ask=True)


def test_ports_agents_and_proxies(base: str) -> None:
    """The rest of the options, in the policy's spelling."""
    found = network("-p", "3000", "--publish=8080:80", "--ssh-agent", "github.com", "--parent-proxy",
                    "http://proxy.example:3128", "--degrade", "parent-proxy", base=base)  # fmt: skip
    assert found.publish == ("3000:3000", "8080:80")
    assert (found.ssh_agent, found.parent_proxy) == (("github.com",), "http://proxy.example:3128")
    assert found.mode == "allowlist"


@pytest.mark.parametrize(
    ("text", "name", "wanted"),
    [
        ("T=a.org", "T", RawCredential(hosts=("a.org",), as_="bearer", add=False)),
        ("T=a.org,*.b.org", "T", RawCredential(hosts=("a.org", "*.b.org"), as_="bearer", add=False)),
        ("T:basic=a.org", "T", RawCredential(hosts=("a.org",), as_="basic", add=False)),
        ("T:basic:me=a.org", "T", RawCredential(hosts=("a.org",), as_="basic:me", add=False)),
        ("T:header:X-Key+add=a.org", "T", RawCredential(hosts=("a.org",), as_="header:X-Key", add=True)),
        ("T+add=a.org", "T", RawCredential(hosts=("a.org",), as_="bearer", add=True)),
    ],
)
def test_a_credential_in_one_word(text: str, name: str, wanted: RawCredential) -> None:
    """Name, form and hosts; the value is never on a command line."""
    assert run.parse(["--credential", text, "true"]).flags("/").credentials == {name: wanted}


def test_a_credential_comes_from_the_environment(base: str) -> None:
    """Of the same name, outside."""
    found = network("--allow", "a.org", "--credential", "T:basic+add=A.org", base=base)
    assert found.credentials == (
        Credential(name="T", hosts=("a.org",), source="env:T", as_="basic", add=True),
    )


@pytest.mark.parametrize("text", ["T", "=a.org", "T:=a.org", "", "+add=a.org", ":basic=a.org"])
def test_what_is_no_credential(text: str) -> None:
    """The form is said, and nothing is guessed."""
    with pytest.raises(PolicyError, match="--credential takes NAME") as caught:
        run.parse(["--credential", text, "true"]).flags("/")
    assert caught.value.code == "usage"


@pytest.mark.parametrize("text", ["T=", "T=,", "T:digest=a.org", "T=*.com", "1T=a.org", "HOME=a.org"])
def test_a_credential_that_the_policy_refuses(text: str, base: str) -> None:
    """What reads as one is checked like one of a file."""
    with pytest.raises(PolicyError, match=r"network\.credentials"):
        network("--credential", text, base=base)
