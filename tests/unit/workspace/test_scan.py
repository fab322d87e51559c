"""What the scan of a top says about it."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest

from casemate.workspace.report import Limits
from casemate.workspace.scan import Changes, scan

if TYPE_CHECKING:
    from tests.unit.workspace.tops import Stage


def changes(stage: Stage, **more: Any) -> Changes:
    """Scan the stage's top."""
    top = os.open(stage.upper, os.O_RDONLY)
    lower = os.open(stage.ws, os.O_PATH)
    try:
        return scan(top, lower, prefix=stage.prefix, redirects=not stage.user, **more)
    finally:
        os.close(top)
        os.close(lower)


@pytest.mark.root
def test_every_kind_of_change(stage: Stage) -> None:
    """Created, modified, deleted, replaced, renamed and mode changes are told apart in a real overlay."""
    stage.lower(mod="1", gone="1", mode="1", opened="1", dir__f="1", todir="1", moved__f="1", opaque__f="1")
    os.symlink("mod", stage.ws / "link")
    stage.sh(
        "echo 2 >mod; rm gone; chmod 700 mode; : >>opened; rm -r dir; echo f >dir; rm todir; mkdir todir;"
        "mv moved away; rm -r opaque; mkdir opaque; ln -sf mode link; mkdir new; echo n >new/file; "
        "chmod 700 away"
    )
    told = {path: what for what, path in changes(stage).summary()}
    assert told == {
        "mod": "modified", "gone": "deleted", "mode": "mode", "dir": "replaced", "todir": "replaced",
        "away": "renamed", "moved": "deleted", "opaque": "replaced", "link": "modified", "new": "created",
        "new/file": "created",
    }  # fmt: skip


def test_an_empty_top_is_nothing(stage: Stage) -> None:
    """No entry, nothing skipped."""
    found = changes(stage)
    assert (found.entries, found.skipped, found.truncated) == ([], [], False)


def test_parents_come_first_and_siblings_together(stage: Stage) -> None:
    """A directory precedes its entries; those that are no directories stand together."""
    for name in ("a/b/x", "a/y", "a/b/z", "c/x", "top", "a/w"):
        stage.put(name)
    order = [entry.path for entry in changes(stage).entries]
    for path in order:
        above = path.rpartition("/")[0]
        assert not above or order.index(above) < order.index(path)
    files = [path.rpartition("/")[0] for path in order if path.rpartition("/")[2] in "wxyz"]
    assert len([1 for one, two in itertools.pairwise(files) if one != two]) == len(set(files)) - 1


@pytest.mark.parametrize(
    ("limits", "skipped", "truncated"),
    [
        (Limits(), 0, False),
        (Limits(depth=2), 1, False),
        (Limits(path=6), 1, False),
        (Limits(entries=3), 0, True),
        (Limits(seconds=0.0), 0, True),
    ],
)
def test_bounds(stage: Stage, limits: Limits, skipped: int, truncated: bool) -> None:
    """Each bound stops the walk or leaves a subtree out, and that is said."""
    stage.put("a/b/c/d")
    stage.put("e")
    found = changes(stage, limits=limits)
    assert (len(found.skipped), found.truncated) == (skipped, truncated)


def test_nothing_is_followed(stage: Stage) -> None:
    """A link in the top is an entry, whatever it leads to; no time is lost on pipes."""
    stage.link("out", str(stage.outside))
    stage.link("dir/loop", "loop")
    os.mkfifo(stage.upper / "pipe")
    kinds = {entry.path: entry.kind for entry in changes(stage).entries}
    assert kinds == {"out": "link", "dir": "dir", "dir/loop": "link", "pipe": "special"}


def test_a_link_in_the_workspace_is_not_entered(stage: Stage) -> None:
    """A directory over a link of the workspace has no lower half."""
    os.symlink(stage.outside, stage.ws / "dir")
    stage.put("dir/secret")
    entries = {entry.path: entry for entry in changes(stage).entries}
    assert entries["dir"].source is None
    assert entries["dir"].hides
    assert not entries["dir/secret"].lower_mode
