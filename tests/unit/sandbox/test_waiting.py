"""``run(…, apply=False)``, and what ``Kept`` does with changes that wait. ``test_as_user`` runs this, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from casemate.errors import PolicyError, WorkspaceError
from casemate.sandbox import Sandbox
from casemate.sandbox.kept import Kept, Words

if TYPE_CHECKING:
    from pathlib import Path


def test_changes_wait(ws: Path, environ: dict[str, str]) -> None:
    """Without ``apply`` the workspace stays as it is; the result names what waits; parts follow."""
    (ws / "mod").write_text("1\n")
    with Sandbox(ws, environ=environ) as box:
        result = box.run("echo 2 >>mod; echo n >new; mkdir d; echo e >d/.envrc; exit 4", apply=False)
        assert (result.exit_code, result.applied.pending_changes, result.applied.changes) == (4, 4, ())
        assert (ws / "mod").read_text() == "1\n"
        assert box.run("cat mod").stdout == b"1\n"
    name = result.applied.pending
    with Kept(str(ws), environ) as kept:
        assert kept.names() == {name: "pending"}
        with kept.review(name) as reviews:
            ((view, review),) = reviews.views
            assert view == str(ws)
            assert {entry.path: entry.held or entry.what for entry in review.entries} == {
                "mod": "modified", "new": "created", "d": "created", "d/.envrc": "protected",
            }  # fmt: skip
        part = kept.apply_interrupted(name, Words(globs=("new",)))
        assert (part.changes, part.pending, part.pending_changes) == (("created new",), name, 3)
        with pytest.raises(WorkspaceError) as nothing:
            kept.apply_interrupted(name, Words(paths=("nosuch",)))
        assert nothing.value.code == "nothing-kept"
        assert kept.discard_interrupted(name, Words(paths=("mod",))) == 1
        rest = kept.apply_interrupted(name)
        assert (rest.pending, rest.held) == ("", (("d/.envrc", "protected"),))
        assert kept.names() == {f"{name}/0": "held"}
        with kept.review(f"{name}/0") as reviews:
            assert [entry.path for _, review in reviews.views for entry in review.entries] == ["d/.envrc"]
        assert kept.discard_held(f"{name}/0", None) == 1
        assert kept.names() == {}
    assert (ws / "mod").read_text() == "1\n"
    assert (ws / "new").read_text() == "n\n"


def test_nothing_waits_where_nothing_changed(ws: Path, environ: dict[str, str]) -> None:
    """The control: a command that only looked leaves nothing, and with ``apply`` all is there at once."""
    with Sandbox(ws, environ=environ) as box:
        assert box.run("ls", apply=False).applied.pending == ""
        assert box.run("echo n >new").applied.changes == ("created new",)
    with Kept(str(ws), environ) as kept:
        assert kept.names() == {}


def test_where_there_is_no_view(ws: Path, environ: dict[str, str]) -> None:
    """A session keeps its changes itself: asking for both is refused before anything runs."""
    with Sandbox(ws, environ=environ, session="s") as box, pytest.raises(PolicyError) as refused:
        box.run("echo n >new", apply=False)
    assert refused.value.code == "no-view"
