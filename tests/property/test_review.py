"""A review tells what the apply step will do; a step over a part of it does that part and leaves the rest."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from typing import TYPE_CHECKING, Any

import pytest

from casemate.workspace.diff import TopReview
from casemate.workspace.journal import Journal
from casemate.workspace.select import Selection
from tests.property.test_apply_equals_view import WORK, prepare
from tests.unit.workspace.tops import WHO, Stage, die_at, stage_for

if TYPE_CHECKING:
    from casemate.workspace.report import ApplyReport
    from casemate.workspace.review import Entry

Picture = dict[str, list[Any]]
_KIND, _LAST = 0, -1  # of one entry of a picture: its kind of file, its time


def work(stage: Stage, seed: int, acts: int = 25) -> Picture:
    """Random work in a view; returns what the command saw in the end."""
    for directory in (stage.upper, stage.work):
        stage.clean(directory)
    stage.started = 0
    found: Picture = json.loads(stage.run(sys.executable, "-I", "-S", "-c", WORK, str(seed), str(acts), "."))
    return found


def picture(stage: Stage) -> Picture:
    """The workspace as it is."""
    found: Picture = json.loads(
        stage.bare(sys.executable, "-I", "-S", "-c", WORK, "0", "0", str(stage.ws))
    )
    return found


def journal(stage: Stage) -> Journal:
    """What of the top is done."""
    return Journal(str(stage.base / "done"))


def review(stage: Stage) -> list[Entry]:
    """The list of changes."""
    top = os.open(stage.upper, os.O_RDONLY | os.O_DIRECTORY)
    options = stage.options(hold_dir=None, resumed=True, journal=journal(stage))
    try:
        with TopReview(top, str(stage.ws), options) as found:
            assert not found.skipped
            assert not found.truncated
            return found.entries
    finally:
        os.close(top)


def apply(stage: Stage, only: Selection | None = None) -> ApplyReport:
    """Apply all, or a part."""
    return stage.apply(resumed=True, journal=journal(stage), only=only)


def below(tree: Picture, path: str) -> list[str]:
    return [name for name in tree if name == path or name.startswith(path + "/")]


def predict(before: Picture, entries: list[Entry], after: Picture) -> Picture:
    """The workspace that the list promises; new contents are taken from ``after``."""
    tree = dict(before)
    moved: Picture = {}
    renamed = [entry for entry in entries if entry.what == "renamed"]
    # The deepest first: what was moved out of a directory that was moved itself does not come along.
    for entry in sorted(renamed, key=lambda entry: -entry.source.count("/")):
        for name in below(tree, entry.source):
            moved[entry.path + name[len(entry.source) :]] = tree.pop(name)
    for entry in renamed:
        for name in below(tree, entry.path) if entry.replaces else []:
            del tree[name]
    for entry in entries:
        if entry.what in ("deleted", "replaced"):
            gone = entry.source if entry.source in before and entry.what == "deleted" else entry.path
            for name in below(tree, gone):
                del tree[name]
            for name in below(moved, entry.path):
                if entry.what == "deleted":
                    del moved[name]
    tree |= moved
    for entry in entries:
        if entry.what != "deleted":
            if entry.what == "renamed" and entry.kind == "dir" and entry.path not in after:
                continue
            assert entry.path in after, entry
            tree[entry.path] = after[entry.path]
    return tree


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("seed", range(12))
def test_review_tells_what_apply_does(seed: int, who: str) -> None:
    """Random work in a real overlay: the workspace afterwards differs from the one before by the list."""
    with stage_for(who) as stage:
        prepare(stage, seed)
        for round_ in range(3):
            seen = work(stage, 1000 * seed + round_)
            before = picture(stage)
            entries = review(stage)
            assert not [entry for entry in entries if entry.held]
            promised = predict(before, entries, seen)
            assert promised == seen, entries
            assert picture(stage) == before, "looking changes nothing"
            assert apply(stage).complete
            assert picture(stage) == seen
            assert review(stage) == [], "nothing is left"


@pytest.mark.slow
@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("seed", range(12))
def test_parts_make_the_whole(seed: int, who: str, near: bool) -> None:
    """Applied in parts, in any order, the changes make the same tree as at once; a part is only itself."""
    chance = random.Random(seed)
    with stage_for(who, near=near) as stage:
        prepare(stage, seed)
        seen = work(stage, 77 * seed + 5, 40)
        while entries := review(stage):
            chosen = chance.sample(entries, min(len(entries), chance.randint(1, 4)))
            before = picture(stage)
            words = {name for entry in chosen for name in (entry.path, entry.source) if name}
            report = apply(stage, Selection(paths=words))
            assert report.complete, report.failed
            assert not report.held, report.held
            changed(before, picture(stage), entries, chosen)
            assert len(review(stage)) < len(entries)
        assert picture(stage) == seen


def changed(before: Picture, after: Picture, entries: list[Entry], chosen: list[Entry]) -> None:
    """What was not chosen, and is not needed for what was, is as before."""
    names = [name for entry in chosen for name in (entry.path, entry.source) if name]
    moves = [entry for entry in entries if entry.what == "renamed" and entry.kind == "dir"]
    names += [name for entry in moves for name in (entry.path, entry.source)]
    for path in before.keys() | after.keys():
        if any(path == name or path.startswith(name + "/") or name.startswith(path + "/") for name in names):
            continue
        assert before.get(path) == after.get(path), (path, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("seed", range(6))
def test_parts_that_are_killed(seed: int, who: str, near: bool) -> None:
    """The same where each step is killed at some change, perhaps twice, before it is run to its end."""
    chance = random.Random(seed)
    with stage_for(who, near=near) as stage:
        prepare(stage, seed)
        seen = work(stage, 77 * seed + 5, 40)
        while entries := review(stage):
            chosen = chance.sample(entries, min(len(entries), chance.randint(1, 6)))
            words = {name for entry in chosen for name in (entry.path, entry.source) if name}
            for _ in range(chance.randint(1, 2)):
                die(stage, chance.randint(1, 12), Selection(paths=words))
            report = apply(stage, Selection(paths=words))
            assert report.complete, report.failed
            assert not report.held, report.held
        assert picture(stage) == seen


def die(stage: Stage, change: int, only: Selection) -> None:
    """A step in a process that ends before its change number ``change``."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            die_at(change)
            apply(stage, only)
        os._exit(0)
    os.waitpid(child, 0)
