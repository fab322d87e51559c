"""kill -9 of the apply step at any moment: run again it ends where an undisturbed one does, whether all was
to be applied or a part; nothing is lost, nothing is there twice.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from casemate.workspace.diff import TopReview
from casemate.workspace.held import take, units
from casemate.workspace.journal import Journal
from casemate.workspace.select import Selection
from tests.unit.workspace.tops import DIED, WHO, Stage, die_at, stage_for, write

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.security

BIG = b"x" * 300_000


@contextlib.contextmanager
def furnished(who: str, near: bool) -> Iterator[Stage]:
    """A top with every kind of change, some of which are held back: protected, leading out, in conflict."""
    with stage_for(who, near=near) as stage:
        stage.lower(**{f"old{n}": "1" for n in range(12)}, **{f"gone__d{n}__f": "1" for n in range(12)})
        stage.lower(**{"keep__.envrc": "1", "keep__x": "1", "todir": "1", "both": "1", "conflict": "1"})
        stage.lower(replaced__a="1", replaced__b="1", replaced__sub__c="1")
        stage.start()
        for number in range(12):
            stage.put(f"old{number}", BIG)
            stage.put(f"new/deep{number}/n", BIG, 0o755)
            stage.link(f"links/l{number}", f"../old{number}")
            stage.put(f"p{number}/.vscode/tasks.json", "t" * 5000)
        stage.put(".envrc", "e" * 5000)
        stage.link("out", "/etc/shadow")
        for path in ("gone", "keep"):
            stage.whiteout(path)
        stage.mark("replaced", "opaque", b"y")
        stage.put("replaced/b", "2")
        stage.put("replaced/new", "2")
        stage.put("todir/x", "2")
        stage.put("conflict", "sandbox")
        os.utime(stage.put("both", "1"), ns=(1, 1))
        write(stage.ws / "conflict", "host")
        yield stage


def journal(stage: Stage) -> Journal:
    return Journal(str(stage.base / "done"))


def state(stage: Stage) -> dict[str, Any]:
    """The workspace without its times, what is held back, and how many contents are kept for that."""
    found: dict[str, Any] = {}
    for path in stage.ws.rglob("*"):
        name, status = str(path.relative_to(stage.ws)), path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[name] = (oct(status.st_mode), os.readlink(path) if path.is_symlink() else content)
    hold = os.open(stage.hold, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found["held"] = [(unit.path, unit.reason, unit.entries) for unit in units(hold)]
    finally:
        os.close(hold)
    found["kept"] = sum(path.name.isdigit() for path in stage.hold.iterdir())
    return found


def step(stage: Stage, only: Selection | None = None) -> bool:
    """One apply step; whether all went well."""
    return stage.apply(resumed=True, journal=journal(stage), only=only).complete


def killed(stage: Stage, seconds: float, only: Selection | None = None) -> bool:
    """The step in a process of its own that is killed after ``seconds``; False if it had ended by then."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            step(stage, only)
        os._exit(0)
    handle = os.pidfd_open(child)
    try:
        select.select([handle], [], [], seconds)
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) < 0


def undisturbed(stage: Stage, only: Selection | None = None) -> float:
    """The seconds that a process which nobody kills takes for the step here, the longest a kill may wait."""
    began = time.monotonic()
    assert not killed(stage, 60, only)
    took = time.monotonic() - began
    assert step(stage, only), "it was complete: nothing is left to do"
    return took


def died(stage: Stage, change: int, only: Selection | None) -> bool:
    """The step in a process that ends before its change number ``change``; False if there are fewer."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            die_at(change)
            step(stage, only)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == DIED


def whole(stage: Stage) -> None:
    """Nothing half-written is to be seen."""
    for path in stage.ws.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.name.startswith(("old", "n")):
            assert path.stat().st_size in (1, len(BIG)), path


def waiting(stage: Stage) -> list[str]:
    top, options = os.open(stage.upper, os.O_RDONLY), stage.options(resumed=True, journal=journal(stage))
    assert options.hold_dir is not None
    try:
        with TopReview(top, str(stage.ws), options) as review:
            return [entry.path for entry in review.entries]
    finally:
        os.close(top)
        os.close(options.hold_dir)


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("who", WHO)
def test_killed_at_many_moments(who: str, near: bool) -> None:
    """SIGKILL after any time, once or several times in a row: the last run ends as an undisturbed one."""
    with furnished(who, near) as stage:
        took = undisturbed(stage)
        expected = state(stage)
        assert {reason for _, reason, _ in expected["held"]} == {"protected", "link-outside", "conflict"}
    chance, kills = random.Random(f"{who}{near}"), 0
    for _ in range(10):
        with furnished(who, near) as stage:
            for _ in range(chance.randint(1, 3)):
                kills += killed(stage, chance.uniform(0, took))
                whole(stage)
            assert step(stage)
            assert state(stage) == expected
    assert kills > 3, "the control: most of them were killed while they were at work"


@pytest.mark.slow
@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("who", WHO)
def test_a_part_that_is_killed(who: str, near: bool) -> None:
    """The same for a part: killed at any moment and run again it is that part, and the rest can follow."""
    globs = ["old*", "new", "keep", "replaced/new", "p3"]
    with furnished(who, near) as stage:
        took = undisturbed(stage, Selection(globs))
        part, rest = state(stage), waiting(stage)
        assert "todir" in rest
        assert step(stage)
        expected = state(stage)
    chance = random.Random(f"{who}{near}")
    for number in range(10):
        with furnished(who, near) as stage:
            if number % 2:
                killed(stage, chance.uniform(0, took), Selection(globs))
            else:
                died(stage, chance.randint(1, 60), Selection(globs))
            assert step(stage, Selection(globs))
            assert (state(stage), waiting(stage)) == (part, rest)
            killed(stage, chance.uniform(0, took))
            assert step(stage)
            assert state(stage) == expected


@pytest.mark.parametrize("who", WHO)
def test_taking_what_was_held_is_killed(who: str) -> None:
    """Consent that is killed while it is acted upon can be given again: no false conflict, nothing twice."""
    with furnished(who, True) as stage:
        assert step(stage)
        for change in (1, 3, 6, 10, 15, 21, 40):
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    die_at(change)
                    hold = os.open(stage.hold, os.O_RDONLY | os.O_DIRECTORY)
                    take(hold, str(stage.ws))
                    take(hold, str(stage.ws), ["conflict"], overwrite=True)
                os._exit(0)
            os.waitpid(child, 0)
        hold = os.open(stage.hold, os.O_RDONLY | os.O_DIRECTORY)
        try:
            report = take(hold, str(stage.ws))
            last = take(hold, str(stage.ws), ["conflict"], overwrite=True)
            left = units(hold)
        finally:
            os.close(hold)
        assert report.complete
        assert {item.path for item in report.held} <= {"conflict"}
        assert (last.complete, last.held) == (True, ())
        assert left == []
        assert (stage.text(".envrc"), stage.text("conflict")) == ("e" * 5000, "sandbox")
        assert not stage.exists("keep/.envrc")
