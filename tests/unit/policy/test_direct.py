"""``filesystem.workspace = "direct"``: the operator's choice, within the ceiling, and never a project's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from casemate.errors import PolicyError
from casemate.policy import trust

if TYPE_CHECKING:
    from tests.unit.policy.conftest import Caller

DIRECT = "version = 1\n[filesystem]\nworkspace = 'direct'\n"


def test_the_operators_choice(caller: Caller) -> None:
    """A flag or the user's file; the note says which."""
    effective = caller.load(workspace="direct")
    assert effective.policy.filesystem.workspace == "direct"
    assert any("is direct (from flags)" in note for note in effective.notes)
    caller.user(DIRECT)
    effective = caller.load()
    assert effective.policy.filesystem.workspace == "direct"
    assert any("is direct (from user)" in note for note in effective.notes)
    assert caller.load(workspace="write").policy.filesystem.workspace == "write"


@pytest.mark.parametrize("trusted", [False, True])
def test_never_a_projects(caller: Caller, trusted: bool) -> None:
    """Trusted or not, a project cannot have its workspace changed directly; a note says that it asked."""
    caller.project(DIRECT)
    if trusted:
        trust.record(caller.places, caller.workspace, DIRECT.encode())
    effective = caller.load()
    assert effective.policy.filesystem.workspace == "write"
    assert any("filesystem.workspace" in note and "not counted" in note for note in effective.notes)


def test_a_project_restricts_it(caller: Caller) -> None:
    """A project that asks for a view, or for nothing to be changed, gets that whatever the operator says."""
    for word in ("write", "read"):
        caller.project(f"version = 1\n[filesystem]\nworkspace = '{word}'\n")
        effective = caller.load(workspace="direct")
        assert effective.policy.filesystem.workspace == word
        assert any("lowers direct" in note for note in effective.notes)


def test_the_ceiling(caller: Caller) -> None:
    """The administrator can bar it."""
    caller.managed("version = 1\n[ceiling]\nworkspace = 'write'\n")
    with pytest.raises(PolicyError, match="administrator allows"):
        caller.load(workspace="direct")
    assert caller.load(workspace="write").policy.filesystem.workspace == "write"
    caller.managed("version = 1\n[ceiling]\nworkspace = 'direct'\n")
    assert caller.load(workspace="direct").policy.filesystem.workspace == "direct"


def test_read_only_gives_way_to_no_file(caller: Caller) -> None:
    """The preset read-only holds against a user's file that says direct, not against the flag."""
    caller.user(DIRECT)
    assert caller.load(preset="read-only").policy.filesystem.workspace == "read"
