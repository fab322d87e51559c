"""What is noted of a layer: since when its paths are the session's own, and how large it is."""

from __future__ import annotations

import os
import stat
import time
from typing import TYPE_CHECKING

import pytest

from casemate.workspace import survey
from casemate.workspace.survey import Firsts, firsts_of, measure, measured, note_firsts
from tests.property.test_flatten import inside
from tests.unit.workspace.tops import WHO, stage_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.workspace.tops import Stage


@pytest.fixture(params=WHO)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A workspace of root or of a user."""
    with stage_for(request.param) as made:
        yield made


def command(stage: Stage, script: str) -> Firsts:
    """A command of a session, and what is noted at its end."""
    began = time.time_ns()
    inside(stage, [stage.ws], stage.upper, "sh", "-c", script)
    note_firsts(str(stage.upper.parent), [stage.upper.name], stage.prefix, began, 10)
    return firsts_of(str(stage.upper.parent), [stage.upper.name])[0]


def test_a_path_is_as_old_as_its_first_version(stage: Stage) -> None:
    """A file that is replaced again and again keeps the moment of its first version, which is the beginning
    of the command that made it; one that is changed for the first time has that of the present one.
    """
    stage.lower(a="1", b="1", c="1", d__x="1", d__y="1")
    start = time.time_ns()
    first = command(stage, "echo 2 >>a; rm c; echo 2 >>d/x")
    assert first.complete
    (began,) = {first.known[path][0] for path in ("a", "c", "d/x")}
    made = (stage.upper / "a").stat().st_mtime_ns
    assert start <= began < made, "before the command has made anything"
    before = time.time_ns()
    second = command(stage, "echo 3 >t; mv t a; echo 2 >b; rm d/x; echo 3 >d/x; mkdir c")
    for path in ("a", "c", "d/x"):
        assert second.known[path][0] == began, path
    assert before <= second.known["b"][0] < (stage.upper / "b").stat().st_mtime_ns
    assert second.known["c"][1], "in the place of a file, with all that is below"
    assert set(second.known) == {"a", "b", "c", "d", "d/x"}
    assert not second.known["d"][1]


def test_below_a_new_directory_nothing_is_noted(stage: Stage) -> None:
    """All of a tree that only the session has is as old as its top."""
    stage.lower(d__x="1")
    found = command(stage, "mkdir -p n/m d/new; for i in 1 2 3; do echo >n/m/$i; echo >d/new/$i; done")
    assert set(found.known) == {"n", "d", "d/new"}
    assert [found.known[path][1] for path in ("n", "d", "d/new")] == [True, False, True]
    moment = found.known["n"][0]
    assert found.since("n/m/1", 0) == moment
    assert found.since("d/other", 99) == 99, "nothing is known of it"


def test_since() -> None:
    """The oldest of what is known counts, never before the session's start; without notes only that."""
    firsts = Firsts()
    firsts.add("a", 50, True)
    firsts.add("d", 40, False)
    firsts.add("e", 30, True)
    assert [firsts.since(path, 10) for path in ("a", "b", "d", "d/x", "e/x/y")] == [50, 10, 40, 10, 30]
    assert firsts.since("a", 60) == 60
    firsts.add("a", 70, False)
    assert firsts.known["a"] == (50, True)
    firsts.add("a", 20, False)
    assert firsts.known["a"] == (20, True)
    firsts.complete = False
    assert firsts.since("a", 10) == 10
    other = Firsts(complete=False)
    other.add("b", 5, False)
    whole = Firsts()
    whole.merge(other)
    assert (whole.complete, whole.known) == (False, {"b": (5, False)})


def test_too_much(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a top holds too much the notes say that they are not complete, and that stays so."""
    stage.lower(a="1", b="1")
    monkeypatch.setattr(survey, "_MOST", 1)
    assert not command(stage, "echo >>a; echo >>b").complete
    monkeypatch.setattr(survey, "_MOST", 1000)
    assert not command(stage, ":").complete, "nobody knows what came and went"


@pytest.mark.root
def test_locked_directories() -> None:
    """A directory that a user may not read makes notes and sizes incomplete, and is not touched."""
    with stage_for("user") as stage:
        (stage.upper / "d").mkdir()
        (stage.upper / "d/f").write_text("x")
        (stage.upper / "d").chmod(0)
        assert not command(stage, ":").complete
        assert not measure(str(stage.upper.parent), [stage.upper.name]).exact
        assert stat.S_IMODE((stage.upper / "d").stat().st_mode) == 0
        (stage.upper / "d").chmod(0o700)


def test_odd_names_are_noted(stage: Stage) -> None:
    """Names of any bytes come back as they were."""
    command(stage, "touch \"$(printf 'a\\nb')\" \"$(printf '\\377 x')\" 'h 1 0 x'")
    found = firsts_of(str(stage.upper.parent), [stage.upper.name])[0]
    assert set(found.known) == {"a\nb", os.fsdecode(b"\xff x"), "h 1 0 x"}


def test_sizes(stage: Stage) -> None:
    """A size is what is on disk, each file once; it is noted, and whether it is all."""
    layer = str(stage.upper.parent)
    assert measured(layer) is None
    (stage.upper / "d").mkdir()
    (stage.upper / "d/f").write_bytes(b"x" * 100_000)
    os.link(stage.upper / "d/f", stage.upper / "again")
    size = measure(layer, [stage.upper.name, "nothing"])
    assert size.exact
    assert 100_000 <= size.bytes < 130_000
    assert measured(layer) == size
    (stage.upper.parent / "size").write_text("rubbish")
    assert measured(layer) is None
