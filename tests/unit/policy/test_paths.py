"""What may not be granted, and where a sandbox may not work: each beside a path that passes."""

from __future__ import annotations

import os
import socket
import tempfile
from typing import TYPE_CHECKING

import pytest

from casemate import settings
from casemate.errors import PolicyError
from casemate.policy import paths

if TYPE_CHECKING:
    from tests.unit.policy.conftest import Caller


@pytest.mark.parametrize(
    "path", ["/", "/etc", "/root", "/proc", "/sys", "/dev", "/var", "/run", "/home", "/tmp", "/boot",
             "/var/run", "/proc/self/root", "/proc/1/fd", "/sys/kernel", "/dev/null", "/run/user/1000",
             "/run/dbus",
             "/run/docker.sock",
             "/run/systemd/private", "//", "/etc/../", "/etc/.", "/tmp/../etc"]
)  # fmt: skip
@pytest.mark.parametrize("field", ["read", "write"])
def test_system_paths_are_too_broad(caller: Caller, path: str, field: str) -> None:
    """The paths that would open the host are refused for reading and writing, however they are spelt."""
    with pytest.raises(PolicyError, match="too broad") as caught:
        caller.load(**{field: (path,)})
    assert caught.value.details["field"] == f"filesystem.{field}"


@pytest.mark.parametrize("path", ["/etc/hostname", "/usr/share", "/var/log", "/srv", "/opt"])
def test_paths_below_the_system_ones_can_be_read(caller: Caller, path: str) -> None:
    """The control: what lies below may be named."""
    assert caller.load(read=(path,)).policy.filesystem.read == (os.path.realpath(path),)


@pytest.mark.parametrize("path", ["/etc/cron.d", "/usr/bin", "/usr/lib/x", "/bin", "/sbin", "/lib"])
def test_system_directories_are_never_written(caller: Caller, path: str) -> None:
    """A grant to write programs or settings of the host is refused, whether or not the path exists."""
    with pytest.raises(PolicyError, match="never written"):
        caller.load(write=(path,))


def test_the_home_and_what_holds_it_are_too_broad(caller: Caller) -> None:
    """The home, its parents, ``~`` and links to any of them are refused; a directory in it passes."""
    data = caller.directory("home/data")
    os.symlink(caller.places.home, f"{caller.root}/innocent")
    for path in ("~", "~/", "~/data/..", caller.places.home, caller.root, f"{caller.root}/innocent"):
        with pytest.raises(PolicyError, match="home"):
            caller.load(read=(path,))
    assert caller.load(read=("~/data", f"{caller.root}/innocent/data")).policy.filesystem.read == (data,)


def test_a_changed_home_variable_does_not_open_the_real_home(caller: Caller) -> None:
    """Both the home of ``$HOME`` and the one of the password database are refused."""
    other = caller.directory("other-home")
    places = settings.places({"HOME": other})
    real = settings.homes({}, os.getuid())[0]
    for path in (other, real):
        with pytest.raises(ValueError, match="home"):
            paths.check_grant(path, write=False, guard=paths.guard(places), workspace=caller.workspace)


def test_what_holds_ssh_keys_is_refused_even_behind_links(caller: Caller) -> None:
    """``~/.ssh`` itself, and the directory that it is a link into, are refused; its neighbour passes."""
    with pytest.raises(PolicyError, match="ssh"):
        caller.load(read=("~/.ssh",))
    os.rmdir(f"{caller.places.home}/.ssh")
    keys = caller.directory("dotfiles/ssh")
    os.symlink(keys, f"{caller.places.home}/.ssh")
    for path in (f"{caller.root}/dotfiles", keys, "~/.ssh"):
        with pytest.raises(PolicyError, match="it holds"):
            caller.load(read=(path,))
    caller.directory("dotfiles/vim")
    assert caller.load(read=(f"{caller.root}/dotfiles/vim",)).policy.filesystem.read


def test_casemates_own_files_are_out_of_reach(caller: Caller) -> None:
    """State and configuration cannot be granted, nor what holds them, nor what lies in them."""
    caller.directory("state/casemate/views/x")
    caller.directory("home/.config/casemate")
    caller.directory("home/.config/other")
    for path in (
        caller.places.state, f"{caller.root}/state", f"{caller.places.state}/views/x", "~/.config",
        "~/.config/casemate", f"{caller.root}/etc/casemate", f"{caller.root}/run",
    ):  # fmt: skip
        with pytest.raises(PolicyError, match="too broad"):
            caller.load(write=(path,))
    assert caller.load(read=("~/.config/other",)).policy.filesystem.read


def test_sockets_devices_and_pipes_are_refused(caller: Caller) -> None:
    """A socket leads out even where it cannot be written, so it is refused, by kind and by name."""
    holder = caller.directory("services")
    here = os.getcwd()
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(holder)
        try:
            server.bind("db")
        finally:
            os.chdir(here)
    os.mkfifo(f"{caller.root}/pipe")
    for path in (f"{holder}/db", holder, f"{caller.root}/pipe", f"{caller.root}/none/docker.sock"):
        with pytest.raises(PolicyError, match="too broad"):
            caller.load(read=(path,))
    os.unlink(f"{holder}/db")
    assert caller.load(read=(holder,)).policy.filesystem.read == (holder,)


def test_only_directories_can_be_written_and_none_that_holds_the_workspace(caller: Caller) -> None:
    """A file and the workspace's parent are refused for writing and can be read."""
    file = caller.file("data/file", "x")
    for path in (file, f"{caller.root}/work"):
        with pytest.raises(PolicyError, match="too broad"):
            caller.load(write=(path,))
        assert caller.load(read=(path,)).policy.filesystem.read == (path,)
    assert caller.load(write=(f"{caller.root}/data",)).policy.filesystem.write == (f"{caller.root}/data",)


def test_a_missing_path_is_an_error_in_flags_and_a_note_in_a_file(caller: Caller) -> None:
    """A misspelt flag stops; a file that names what this machine lacks says so and goes on."""
    with pytest.raises(PolicyError, match="does not exist"):
        caller.load(read=("/srv/no/such",))
    caller.user("version = 1\n[filesystem]\nread = ['/srv/no/such']\n")
    effective = caller.load()
    assert effective.policy.filesystem.read == ()
    assert any("/srv/no/such does not exist" in note for note in effective.notes)


def test_relative_paths_start_at_the_workspace_or_the_flags_directory(caller: Caller) -> None:
    """In a file the workspace, on the command line the directory that it names."""
    caller.directory("work/near")
    caller.directory("elsewhere/near")
    caller.user("version = 1\n[filesystem]\nread = ['../near']\n")
    effective = caller.load(read=("near",), cwd=f"{caller.root}/elsewhere")
    assert effective.policy.filesystem.read == (f"{caller.root}/work/near", f"{caller.root}/elsewhere/near")


@pytest.mark.parametrize("text", ["", "a\0b", "~nobody/x", "~root"])
def test_what_is_no_path_is_refused(caller: Caller, text: str) -> None:
    """Empty paths, NULs and other people's homes are errors at their field."""
    with pytest.raises(PolicyError) as caught:
        caller.load(read=(text,))
    assert caught.value.details["field"] == "filesystem.read"


def test_deny_cannot_hide_the_workspace_and_takes_no_patterns(caller: Caller) -> None:
    """Hiding the workspace or what holds it is refused, a path in it is hidden, existing or not."""
    for path in (".", caller.workspace, "..", "/", "/proc", "/sys", "/dev", "*.env", "secret?"):
        with pytest.raises(PolicyError, match=r"hidden|patterns"):
            caller.load(deny=(path,))
    hidden = caller.load(deny=(".env", "~/data")).policy.filesystem.deny
    assert hidden == (f"{caller.workspace}/.env", f"{caller.places.home}/data")


def test_deny_follows_links(caller: Caller) -> None:
    """What a hidden name leads to is what is hidden."""
    target = caller.file("real", "secret")
    os.symlink(target, f"{caller.workspace}/.env")
    # The link too: led elsewhere by one command it would show the next one what is hidden.
    assert caller.load(deny=(".env",)).policy.filesystem.deny == (target, f"{caller.workspace}/.env")


# ---------------------------------------------------------------- workspaces


@pytest.mark.parametrize(
    "path", ["/", "/etc", "/usr", "/var", "/run", "/tmp", "/home", "/root", "/proc", "/proc/self", "/sys",
             "/dev",
             "/dev/shm", "/bin", "/usr/bin", "/opt", "/srv", "/boot"]
)  # fmt: skip
def test_a_system_directory_is_no_workspace(caller: Caller, path: str) -> None:
    """A sandbox whose changes land in the system's own directories is refused."""
    if not os.path.isdir(path):
        path = "/"
    with pytest.raises(PolicyError) as caught:
        paths.check_workspace(path, caller.places)
    assert caught.value.code == "workspace-refused"


def test_a_home_or_what_holds_secrets_or_state_is_no_workspace(caller: Caller) -> None:
    """HOME, its ancestors, ~/.ssh, Casemate's state and configuration, and links to them are refused."""
    for path in (caller.places.state, caller.places.config, f"{caller.places.state}/views"):
        os.makedirs(path, exist_ok=True)
    os.symlink(caller.places.home, f"{caller.root}/link")
    for path in (
        caller.places.home, caller.root, f"{caller.root}/link", f"{caller.places.home}/.ssh",
        caller.places.state, caller.places.config, f"{caller.places.state}/views", f"{caller.root}/state",
        f"{caller.places.home}/.config",
    ):  # fmt: skip
        with pytest.raises(PolicyError, match="cannot be a workspace"):
            paths.check_workspace(path, caller.places)
    project = caller.directory("home/project")
    assert paths.check_workspace(f"{caller.root}/link/project", caller.places) == project


def test_a_missing_or_strange_workspace_is_a_clear_error(caller: Caller) -> None:
    """Missing, a file, a loop of links, a NUL, nothing: each an error of its own kind."""
    file = caller.file("file", "x")
    os.symlink("loop", f"{caller.root}/loop")
    for path, code in (
        (f"{caller.root}/none", "workspace-missing"), (file, "workspace-refused"),
        (f"{file}/below", "workspace-missing"), (f"{caller.root}/loop", "workspace-missing"),
        ("a\0b", "workspace-refused"), ("", "workspace-refused"),
    ):  # fmt: skip
        with pytest.raises(PolicyError) as caught:
            paths.check_workspace(path, caller.places)
        assert caught.value.code == code


def test_an_unreadable_workspace_is_a_clear_error(caller: Caller) -> None:
    """A directory that the caller cannot read is refused before anything starts."""
    uid = os.geteuid()
    with tempfile.TemporaryDirectory() as base:
        workspace = f"{base}/project"
        os.mkdir(workspace, 0)
        os.chmod(base, 0o755)
        if uid == 0:
            os.seteuid(12345)  # root reads everything, so somebody else looks
        try:
            with pytest.raises(PolicyError, match="cannot be read") as caught:
                paths.check_workspace(workspace, caller.places)
        finally:
            os.seteuid(uid)
        assert caught.value.code == "workspace-unreadable"
        os.chmod(workspace, 0o700)
        assert paths.check_workspace(workspace, caller.places) == os.path.realpath(workspace)


# ---------------------------------------------------------------- settings


def test_places_follow_the_uid_and_absolute_xdg_variables() -> None:
    """Root's state is fixed; a user's follows XDG variables, but never a relative one."""
    root = settings.places({"HOME": "/root", "XDG_STATE_HOME": "/x"}, uid=0)
    assert (root.state, root.run, root.managed) == (
        "/var/lib/casemate", "/run/casemate", "/etc/casemate/managed.toml",
    )  # fmt: skip
    environ = {
        "HOME": "/home/a",
        "XDG_STATE_HOME": "/x",
        "XDG_CONFIG_HOME": "rel",
        "XDG_RUNTIME_DIR": "/run/user/7",
    }
    user = settings.places(environ, uid=7)
    assert (user.state, user.run) == ("/x/casemate", "/run/user/7/casemate")
    assert user.user == "/home/a/.config/casemate/policy.toml"
    assert settings.places({"HOME": "/home/a"}, uid=7).run == "/home/a/.local/state/casemate/run"


def test_workspace_keys_are_file_names_and_differ() -> None:
    """Two workspaces never share a key, and a key is a plain name whatever the path holds."""
    names = ["/a/b", "/a/c/b", "/a/b ", "/a/b\n", "/a/\udcff", "/a/..b", "/x" * 200, "/"]
    keys = [settings.workspace_key(name) for name in names]
    assert len(set(keys)) == len(names)
    for key in keys:
        assert key.isascii()
        assert "/" not in key
        assert not key.startswith(".")
        assert len(key) < 80
