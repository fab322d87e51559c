"""Opening policy files: nothing blocks, nothing strange is read, nothing of others grants."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from casemate.errors import PolicyError
from casemate.policy.load import MAX_FILE, read_file

if TYPE_CHECKING:
    from tests.unit.policy.conftest import Caller


def refused(file: str, **options: bool) -> PolicyError:
    """The error for reading ``file``."""
    with pytest.raises(PolicyError) as caught:
        read_file(file, **options)
    return caught.value


def test_a_plain_file_is_read_and_a_missing_one_is_none(caller: Caller) -> None:
    """The control of the tests below."""
    file = caller.file("p.toml", "version = 1\n")
    assert read_file(file, owned=True, follow=False) == b"version = 1\n"
    assert read_file(f"{caller.root}/missing") is None
    assert read_file(f"{file}/below") is None


@pytest.mark.parametrize("kind", ["fifo", "directory", "socket", "device"])
def test_what_is_no_regular_file_is_refused_at_once(caller: Caller, kind: str) -> None:
    """A FIFO that nobody writes to, a directory, a socket, an endless device: an error and no wait."""
    path = f"{caller.root}/p.toml"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        os.mkdir(path)
    elif kind == "device":
        path = "/dev/zero"
    else:
        with socket.socket(socket.AF_UNIX) as server:
            here = os.getcwd()
            os.chdir(caller.root)
            try:
                server.bind("p.toml")
            finally:
                os.chdir(here)
    assert refused(path).code == "policy-unreadable"


def test_a_file_above_one_mebibyte_is_refused(caller: Caller) -> None:
    """A byte more than the limit is refused, the limit itself is read."""
    assert len(read_file(caller.file("a", b"#" * MAX_FILE)) or b"") == MAX_FILE
    assert refused(caller.file("b", b"#" * (MAX_FILE + 1))).code == "policy-too-large"


def test_a_projects_file_is_no_link(caller: Caller) -> None:
    """A link where the project's file should be is refused: it could show what its maker cannot read."""
    target = caller.file("secret", "version = 1\n")
    os.symlink(target, f"{caller.workspace}/casemate.toml")
    assert "symbolic link" in refused(f"{caller.workspace}/casemate.toml", follow=False).message
    with pytest.raises(PolicyError, match="symbolic link"):
        caller.load()
    assert read_file(f"{caller.workspace}/casemate.toml") == b"version = 1\n"


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
@pytest.mark.parametrize("whose", ["user", "managed"])
def test_a_file_that_others_can_write_grants_nothing(caller: Caller, mode: int, whose: str) -> None:
    """The user's and the administrator's files are refused when others can write them."""
    file = getattr(caller, whose)("version = 1\n")
    caller.load()
    os.chmod(file, mode)
    with pytest.raises(PolicyError, match="others can write it") as caught:
        caller.load()
    assert caught.value.code == "policy-owner"
    assert "chmod go-w" in caught.value.hint


@pytest.mark.root
def test_a_file_of_somebody_else_grants_nothing(caller: Caller) -> None:
    """A user file that belongs to another uid is refused; root's own counts."""
    file = caller.user("version = 1\n")
    assert read_file(file, owned=True) is not None
    os.chown(file, 12345, 12345)
    assert "uid 12345" in refused(file, owned=True).message


def test_an_unreadable_managed_file_is_no_missing_one(caller: Caller) -> None:
    """A ceiling that cannot be read stops the run; it is never taken for no ceiling."""
    os.mkdir(caller.places.managed)
    with pytest.raises(PolicyError, match="not a regular file"):
        caller.load()


def test_a_nul_in_a_name_is_an_error_of_ours(caller: Caller) -> None:
    """No name of a file makes anything but a PolicyError."""
    assert "NUL" in refused("a\0b").message
    with pytest.raises(PolicyError):
        caller.load(policy_file="a\0b")


def test_the_named_policy_file_must_exist(caller: Caller) -> None:
    """``--policy`` with a file that is not there is an error, never the default policy."""
    with pytest.raises(PolicyError, match="no such file"):
        caller.load(policy_file=f"{caller.root}/none.toml")
