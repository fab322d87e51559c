"""Where the hashes of trusted files are kept, and what is not believed."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from casemate.errors import CasemateError
from casemate.policy import trust
from casemate.settings import workspace_key

if TYPE_CHECKING:
    from tests.unit.policy.conftest import Caller


def test_trust_is_recorded_listed_and_taken_back(caller: Caller) -> None:
    """A record is private to its owner, and only it makes the content trusted."""
    where, workspace = caller.places, caller.workspace
    assert not trust.is_trusted(where, workspace, b"x")
    trust.record(where, workspace, b"x")
    assert trust.is_trusted(where, workspace, b"x")
    assert not trust.is_trusted(where, workspace, b"y")
    assert not trust.is_trusted(where, f"{workspace}2", b"x")
    (name,) = os.listdir(where.trust)
    assert stat.S_IMODE(os.stat(f"{where.trust}/{name}").st_mode) == 0o600
    assert stat.S_IMODE(os.stat(where.trust).st_mode) == 0o700
    assert trust.listed(where) == [(workspace, trust.digest(b"x"))]
    trust.record(where, workspace, b"y")
    assert not trust.is_trusted(where, workspace, b"x")
    assert trust.forget(where, workspace)
    assert not trust.forget(where, workspace)
    assert not trust.is_trusted(where, workspace, b"y")


def test_links_and_strange_records_are_not_believed(caller: Caller) -> None:
    """A record that is a link, a FIFO, empty or for another path is no trust, and nothing hangs."""
    where, workspace = caller.places, caller.workspace
    trust.record(where, workspace, b"x")
    record = f"{where.trust}/{workspace_key(workspace)}"
    good = Path(record).read_bytes()
    elsewhere = caller.file("elsewhere", good)
    for make in (
        lambda: os.symlink(elsewhere, record),
        lambda: os.mkfifo(record),
        lambda: os.mkdir(record),
        lambda: caller.file(record, b""),
        lambda: caller.file(record, good.replace(b"project", b"other")),
        lambda: caller.file(record, good.rstrip(b"\n")),
    ):
        if os.path.isdir(record) and not os.path.islink(record):
            os.rmdir(record)
        else:
            os.unlink(record)
        make()
        assert not trust.is_trusted(where, workspace, b"x")
    caller.file(record, good, 0o600)
    assert trust.is_trusted(where, workspace, b"x")


def test_recording_replaces_a_planted_link_and_never_follows_it(caller: Caller) -> None:
    """A link in the place of the record is replaced; what it points to keeps its content."""
    where, workspace = caller.places, caller.workspace
    trust.record(where, workspace, b"x")
    record = f"{where.trust}/{workspace_key(workspace)}"
    victim = caller.file("victim", "precious")
    os.unlink(record)
    os.symlink(victim, record)
    trust.record(where, workspace, b"y")
    assert Path(victim).read_text() == "precious"
    assert trust.is_trusted(where, workspace, b"y")


def test_a_store_that_others_can_write_is_not_used(caller: Caller) -> None:
    """Records in a directory of everybody are worth nothing, and none is added."""
    where = caller.places
    trust.record(where, caller.workspace, b"x")
    os.chmod(where.trust, 0o777)
    assert not trust.is_trusted(where, caller.workspace, b"x")
    with pytest.raises(CasemateError) as caught:
        trust.record(where, caller.workspace, b"x")
    assert caught.value.code == "state-unusable"
    os.chmod(where.trust, 0o700)
    assert trust.is_trusted(where, caller.workspace, b"x")


def test_workspaces_with_odd_names_are_kept_apart(caller: Caller) -> None:
    """Blanks, newlines and bytes that are no text in a path neither break a record nor confuse two."""
    names = ["/w/a b", "/w/a\nb", "/w/a", "/w/\udcff"]
    for name in names:
        trust.record(caller.places, name, name.encode("utf-8", "surrogateescape"))
    for name in names:
        content = name.encode("utf-8", "surrogateescape")
        assert [n for n in names if trust.is_trusted(caller.places, n, content)] == [name]
    assert sorted(path for path, _ in trust.listed(caller.places)) == sorted(names)
