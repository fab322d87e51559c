"""The network of a policy, through files and flags: what counts, what is refused, and what is said."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from casemate.errors import PolicyError
from casemate.policy import trust
from casemate.policy.model import degraded
from casemate.policy.network import powerful

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.policy.conftest import Caller

HEAD = "version = 1\n[network]\n"


@pytest.fixture
def listener(caller: Caller) -> Iterator[str]:
    """The path of a unix socket that somebody listens on."""
    path = f"{caller.directory('s')}/db.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        yield path


def refusal(caller: Caller, text: str) -> PolicyError:
    """The error of a user's file with these lines under ``[network]``."""
    caller.user(HEAD + text)
    with pytest.raises(PolicyError) as caught:
        caller.load()
    return caught.value


# ---------------------------------------------------------------- the mode


def test_the_default_is_no_network(caller: Caller) -> None:
    """Without a word about it, nothing is reached and nothing is said."""
    network = caller.load().policy.network
    assert (network.mode, network.allow, network.within, network.ask) == ("none", (), None, False)


@pytest.mark.parametrize("flags", [{"allow": ("github.com",)}, {"ssh_agent": ("github.com",)}, {"ask": True}])
def test_naming_a_host_means_the_allowlist(caller: Caller, flags: dict[str, object]) -> None:
    """Who names a host on the command line need not name the mode."""
    effective = caller.load(**flags)
    assert effective.policy.network.mode == "allowlist"
    assert effective.origins["network.mode"] == "flags"


def test_naming_a_host_narrows_nothing(caller: Caller) -> None:
    """A wider mode of the user's file stays; a mode on the command line is what was asked for."""
    caller.user(HEAD + "mode = 'full'")
    assert caller.load(allow=("github.com",)).policy.network.mode == "full"
    effective = caller.load(allow=("github.com",), network="none")
    assert effective.policy.network.mode == "none"
    assert any("network.allow (from flags) has no effect" in note for note in effective.notes)


def test_naming_a_host_does_not_lift_a_projects_no(caller: Caller) -> None:
    """A restriction counts, whoever allows what."""
    caller.project(HEAD + "mode = 'none'")
    assert caller.load(allow=("github.com",)).policy.network.mode == "none"


def test_an_empty_allowlist_is_nothing(caller: Caller) -> None:
    """The mode alone opens no host."""
    assert caller.load(network="allowlist").policy.network.allow == ()


@pytest.mark.parametrize(
    ("mode", "text"),
    [("none", "allow = ['a.org']"), ("host", "allow = ['a.org']"), ("full", "ask = true"),
     ("host", "publish = [80]"), ("none", "credentials = { T = { hosts = ['a.org'] } }"),
     ("none", "ssh-agent = ['a.org']")],
)  # fmt: skip
def test_what_has_no_effect_is_said(caller: Caller, mode: str, text: str) -> None:
    """A file may hold more than its mode uses; a person learns of it."""
    caller.user(f"{HEAD}mode = '{mode}'\n{text}")
    assert any("has no effect" in note and mode in note for note in caller.load().notes)


def test_the_hosts_network_cannot_hold_a_denial(caller: Caller) -> None:
    """Where a host is denied, ``host`` becomes ``full``: only the gate can hold it. The control keeps it."""
    assert caller.load(network="host").policy.network.mode == "host"
    caller.project(HEAD + "deny = ['*.evil.example']")
    effective = caller.load(network="host")
    assert effective.policy.network.mode == "full"
    assert degraded(effective.policy) == ()
    assert any("lowers host to full" in note and "project" in note for note in effective.notes)


def test_without_a_boundary_a_denial_is_only_said(caller: Caller) -> None:
    """The preset full-access holds nothing, and says so."""
    effective = caller.load(preset="full-access", deny_host=("*.evil.example",))
    assert effective.policy.network.mode == "host"
    assert any("network.deny does not hold" in note for note in effective.notes)


@pytest.mark.parametrize("mode", ["proxy", "open", ""])
def test_other_modes_are_refused(caller: Caller, mode: str) -> None:
    """The list of modes is closed."""
    with pytest.raises(PolicyError):
        caller.load(network=mode)


# ---------------------------------------------------------------- rules


def test_rules_are_kept_in_one_spelling(caller: Caller) -> None:
    """The same host in several layers is one rule, with both origins."""
    caller.user(
        HEAD + "mode = 'allowlist'\nallow = ['GitHub.com.', '*.Example.org:443']\n"
        "deny = ['*.evil.example.']\n"
    )
    effective = caller.load(allow=("github.com",), deny_host=("10.0.0.0/8",))
    network = effective.policy.network
    assert network.allow == ("github.com", "*.example.org:443")
    assert network.deny == ("*.evil.example", "10.0.0.0/8")
    assert effective.origins["network.allow[github.com]"] == "user, flags"


def test_an_error_names_file_line_entry_and_what_to_write(caller: Caller) -> None:
    """A person finds the entry and learns what would do."""
    error = refusal(caller, "mode = 'allowlist'\nallow = ['good.org', '10.0.0.1/8']")
    assert error.details["line"] == 4
    assert error.details["field"] == "network.allow"
    assert "'10.0.0.1/8'" in error.message
    assert "write 10.0.0.0/8" in error.message
    caller.user("version = 1\n")
    with pytest.raises(PolicyError, match=r"flags: network\.allow: '\*\.com': .*YOURS"):
        caller.load(allow=("*.com",))


def test_denials_add_up_over_layers(caller: Caller) -> None:
    """A project, untrusted, and the administrator deny, too."""
    caller.project(HEAD + "deny = ['a.org']")
    caller.managed("version = 1\n[network]\ndeny = ['b.org']\n")
    network = caller.load(deny_host=("c.org",), network="full").policy.network
    assert sorted(network.deny) == ["a.org", "b.org", "c.org"]


# ---------------------------------------------------------------- the project

PROJECT = """version = 1
[network]
mode = "allowlist"
allow = ["github.com", "10.0.0.0/8:5432", "192.0.2.1", "host.casemate.internal:80", "*.example.org"]
ask = true
publish = [3000]
ssh-agent = ["github.com"]
parent-proxy = "http://proxy.example:3128"
sockets = ["{socket}"]
credentials = {{ TOKEN = {{ hosts = ["github.com"] }} }}
"""


def test_an_untrusted_project_opens_nothing(caller: Caller, listener: str) -> None:
    """None of its grants counts, and the note says which."""
    caller.project(PROJECT.format(socket=listener))
    effective = caller.load()
    assert effective.policy == caller.load(preset="workspace-write").policy
    network = effective.policy.network
    assert network.mode == "none"
    assert (network.allow, network.ask, network.publish, network.sockets) == ((), False, (), ())
    (note,) = [note for note in effective.notes if "not counted" in note]
    for field in ("allow", "mode", "ask", "publish", "ssh-agent", "parent-proxy", "sockets", "credentials"):
        assert f"network.{field}" in note


def test_a_trusted_project_opens_names_and_nothing_else(caller: Caller, listener: str) -> None:
    """Hosts by name count; addresses, the host's services, secrets and sockets stay the operator's."""
    text = PROJECT.format(socket=listener)
    caller.project(text)
    trust.record(caller.places, caller.workspace, text.encode())
    effective = caller.load()
    network = effective.policy.network
    assert (network.mode, network.allow) == ("allowlist", ("github.com", "*.example.org"))
    assert (network.ask, network.publish, network.sockets, network.ssh_agent) == (False, (), (), ())
    assert (network.credentials, network.parent_proxy) == ((), None)
    (note,) = [note for note in effective.notes if "never grants" in note]
    for what in ("network.allow (10.0.0.0/8:5432)", "network.allow (192.0.2.1)", "host.casemate.internal:80"):
        assert what in note


@pytest.mark.parametrize("mode", ["full", "host"])
def test_a_trusted_project_has_no_wider_mode(caller: Caller, mode: str) -> None:
    """More than an allowlist is never a project's."""
    text = f"{HEAD}mode = '{mode}'\n"
    caller.project(text)
    trust.record(caller.places, caller.workspace, text.encode())
    effective = caller.load()
    assert effective.policy.network.mode == "none"
    assert any("network.mode" in note and "never grants" in note for note in effective.notes)


def test_the_user_closes_what_a_trusted_project_opens(caller: Caller) -> None:
    """The operator's later word counts."""
    text = HEAD + "mode = 'allowlist'\nallow = ['github.com']\n"
    caller.project(text)
    trust.record(caller.places, caller.workspace, text.encode())
    assert caller.load(network="none").policy.network.mode == "none"
    caller.user(HEAD + "mode = 'none'")
    assert caller.load().policy.network.mode == "none"


# ---------------------------------------------------------------- the administrator


@pytest.mark.parametrize(
    ("modes", "widest"), [("['none']", 0), ("['none', 'allowlist']", 1), ("['full']", 2), ("[]", 0)]
)
def test_the_widest_mode_is_the_ceiling(caller: Caller, modes: str, widest: int) -> None:
    """Up to it everything goes, above it the operator's own wish is an error."""
    caller.managed(f"version = 1\n[ceiling]\nnetwork = {modes}\n")
    order = ("none", "allowlist", "full", "host")
    for rank, mode in enumerate(order):
        if rank <= widest:
            assert caller.load(network=mode).policy.network.mode == mode
        else:
            with pytest.raises(PolicyError) as caught:
                caller.load(network=mode)
            assert caught.value.code == "policy-above-ceiling"


def test_hosts_can_be_allowed_below_the_ceiling_only(caller: Caller) -> None:
    """A bound on hosts bounds rules, logins and the mode, and the result carries it for approvals."""
    bound = "['*.corp.example', '*.corp.example:22', '10.0.0.0/8:*']"
    caller.managed(f"version = 1\n[ceiling]\nnetwork-allow = {bound}\n")
    effective = caller.load(allow=("a.corp.example", "10.1.0.0/16:5432"), ssh_agent=("git.corp.example",))
    assert effective.policy.network.within == ("*.corp.example", "*.corp.example:22", "10.0.0.0/8:*")
    for flags in (
        {"allow": ("github.com",)}, {"allow": ("a.corp.example:8080",)}, {"allow": ("11.0.0.0/8",)},
        {"ssh_agent": ("github.com",)}, {"ssh_agent": ("git.corp.example:2222",)}, {"network": "full"},
        {"network": "host"},
    ):  # fmt: skip
        with pytest.raises(PolicyError) as caught:
            caller.load(**flags)
        assert caught.value.code == "policy-above-ceiling"
    with pytest.raises(PolicyError):
        caller.load(preset="full-access")


def test_an_empty_bound_allows_no_host(caller: Caller) -> None:
    """``network-allow = []`` is no bound of nothing but the bound that nothing is within."""
    caller.managed("version = 1\n[ceiling]\nnetwork-allow = []\n")
    assert caller.load(network="allowlist").policy.network.within == ()
    with pytest.raises(PolicyError):
        caller.load(allow=("github.com",))


def test_a_trusted_projects_hosts_above_the_ceiling_are_left_out(caller: Caller) -> None:
    """With a note, since the project cannot know the administrator's file."""
    caller.managed("version = 1\n[ceiling]\nnetwork-allow = ['*.corp.example']\n")
    text = HEAD + "mode = 'allowlist'\nallow = ['github.com', 'a.corp.example']\n"
    caller.project(text)
    trust.record(caller.places, caller.workspace, text.encode())
    effective = caller.load()
    assert effective.policy.network.allow == ("a.corp.example",)
    assert any("github.com (from project) is above" in note for note in effective.notes)


def test_sockets_have_a_ceiling(caller: Caller, listener: str) -> None:
    """The administrator names the sockets that may be named."""
    caller.managed("version = 1\n[ceiling]\nsockets = []\n")
    with pytest.raises(PolicyError, match="more than the administrator allows"):
        caller.load(sockets=(listener,))
    caller.managed(f"version = 1\n[ceiling]\nsockets = ['{listener}']\n")
    assert caller.load(sockets=(listener,)).policy.network.sockets == (listener,)


@pytest.mark.parametrize(
    "text", ["network-allow = ['10.0.0.1/8']", "network-allow = ['a b']", "network = ['open']"]
)
def test_the_administrators_file_is_checked(caller: Caller, text: str) -> None:
    """A bound that cannot be read is an error, never no bound."""
    caller.managed(f"version = 1\n[ceiling]\n{text}\n")
    with pytest.raises(PolicyError):
        caller.load()


# ---------------------------------------------------------------- the parent proxy


def test_a_parent_proxy_needs_its_word(caller: Caller) -> None:
    """Without it a run is refused; with it every result shows it."""
    with pytest.raises(PolicyError) as caught:
        caller.load(network="full", parent_proxy="http://proxy.example:3128")
    assert caught.value.code == "policy-word-missing"
    assert "parent-proxy" in caught.value.hint
    policy = caller.load(
        network="full", parent_proxy="http://Proxy.example:3128/", degrade=("parent-proxy",)
    ).policy
    assert policy.network.parent_proxy == "http://proxy.example:3128"
    assert degraded(policy) == ("parent-proxy",)


@pytest.mark.parametrize(
    "text", ["proxy.example:3128", "https://proxy.example:3128", "socks5://proxy.example:1080",
             "http://user:secret@proxy.example:3128", "http://proxy.example", "http://proxy.example:0",
             "http://proxy.example:1-2", "http://2130706433:80", "http://proxy example:80", ""]
)  # fmt: skip
def test_other_proxies_are_refused(caller: Caller, text: str) -> None:
    """Only plain HTTP proxies without a password are spoken to, and a password is not shown back."""
    with pytest.raises(PolicyError) as caught:
        caller.load(network="full", parent_proxy=text, degrade=("parent-proxy",))
    assert "secret" not in str(caught.value)


# ---------------------------------------------------------------- ports, sockets, ssh


def test_published_ports(caller: Caller) -> None:
    """A number, a text, or host port first; all come to pairs."""
    caller.user(HEAD + "publish = [3000, '8080:80', '3000']")
    assert caller.load(publish=("9000:9000",)).policy.network.publish == ("3000:3000", "8080:80", "9000:9000")


@pytest.mark.parametrize("value", ["0", "65536", "-1", "http", "1:2:3", "0:80", ":80", "80:", "٣", "", "1.5"])
def test_what_is_no_port_is_refused(caller: Caller, value: str) -> None:
    """Each port is from 1 to 65535."""
    with pytest.raises(PolicyError, match="HOST-PORT:PORT"):
        caller.load(publish=(value,))


def test_one_port_of_the_host_leads_to_one_port_inside(caller: Caller) -> None:
    """Two meanings of a port are an error within a layer; between layers the later one counts."""
    with pytest.raises(PolicyError, match="leads to 80 already"):
        caller.load(publish=("8080:80", "8080:81"))
    caller.user(HEAD + "publish = ['8080:80']")
    assert caller.load(publish=("8080:81",)).policy.network.publish == ("8080:81",)


def test_a_socket_is_named_by_its_path(caller: Caller, listener: str) -> None:
    """Links are followed; what is no socket is refused, what is missing is left out of a file with a note."""
    os.symlink(listener, f"{caller.root}/link")
    assert caller.load(sockets=(f"{caller.root}/link",)).policy.network.sockets == (listener,)
    with pytest.raises(PolicyError, match="is not a socket"):
        caller.load(sockets=(caller.file("plain", ""),))
    with pytest.raises(PolicyError, match="does not exist"):
        caller.load(sockets=(f"{caller.root}/none",))
    caller.user(HEAD + f"sockets = ['{caller.root}/none']")
    effective = caller.load()
    assert effective.policy.network.sockets == ()
    assert any("does not exist and is left out" in note for note in effective.notes)


def test_casemates_own_sockets_are_never_given(caller: Caller) -> None:
    """Who reaches the daemon decides about sandboxes."""
    for path in (f"{caller.places.run}/daemon.sock", f"{caller.places.state}/x.sock", "/run/casemate/x.sock"):
        with pytest.raises(PolicyError, match="Casemate's own"):
            caller.load(sockets=(path,))


@pytest.mark.parametrize(
    "path", ["/run/docker.sock", "/run/podman/podman.sock", "/run/containerd/containerd.sock",
             "/run/systemd/private", "/run/dbus/system_bus_socket", "/run/user/1000/bus", "/tmp/.X11-unix/X0",
             "/home/a/.docker/run/docker.sock", "/run/libvirt/libvirt-sock", "/run/crio/crio.sock",
             "/run/user/1000/systemd/private", "/run/user/1000/gnupg/S.gpg-agent",
             "/tmp/ssh-XXabc/agent.12", "/run/user/1000/keyring/ssh", "/tmp/tmux-1000/default",
             "/run/user/1000/vscode-git-1.sock", "/run/user/1000/sway-ipc.1000.2.sock"]
)  # fmt: skip
def test_sockets_as_good_as_root_are_known(path: str) -> None:
    """Each of them comes with a warning; an ordinary one does not."""
    assert powerful(path)
    assert not powerful("/run/postgresql/.s.PGSQL.5432")


def test_a_powerful_socket_is_warned_of(caller: Caller) -> None:
    """The warning stands in the notes of each run; an ordinary socket has none."""
    directory = caller.directory("d")
    for name, loud in (("docker.sock", True), ("db.sock", False)):
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"{directory}/{name}")
            notes = caller.load(sockets=(f"{directory}/{name}",)).notes
        assert any("WARNING" in note and "root on this host" in note for note in notes) is loud


def test_hosts_of_the_ssh_agent(caller: Caller) -> None:
    """A host, and a port where it is not 22."""
    network = caller.load(ssh_agent=("GitHub.com", "git.example:2222", "github.com:22")).policy.network
    assert network.ssh_agent == ("github.com", "git.example:2222")
    for text in ("*.github.com", "10.0.0.1", "git.example:22-23", "git.example:*", "ssh://github.com", "*"):
        with pytest.raises(PolicyError):
            caller.load(ssh_agent=(text,))
