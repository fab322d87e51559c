"""What was held back can be listed, taken with consent, and thrown away."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from casemate.errors import WorkspaceError
from casemate.workspace.held import discard, take, units
from tests.unit.workspace.tops import Stage, held, write

if TYPE_CHECKING:
    from casemate.workspace.report import ApplyReport


def hold(stage: Stage) -> int:
    """The hold directory."""
    return os.open(stage.hold, os.O_RDONLY | os.O_DIRECTORY)


def took(stage: Stage, *chosen: str, overwrite: bool = False) -> ApplyReport:
    """Take units."""
    fd = hold(stage)
    try:
        return take(fd, str(stage.ws), chosen or None, overwrite=overwrite)
    finally:
        os.close(fd)


def listed(stage: Stage) -> dict[str, tuple[str, str, int]]:
    """path -> (kind, reason, entries)."""
    fd = hold(stage)
    try:
        return {unit.path: (unit.kind, unit.reason, unit.entries) for unit in units(fd)}
    finally:
        os.close(fd)


@pytest.fixture
def full(any_stage: Stage) -> Stage:
    """A stage where one thing of each kind was held back."""
    any_stage.lower(**{"p__.envrc": "old", "conflict": "1", "q__.vscode__a": "a"})
    any_stage.start()
    any_stage.put(".vscode/sub/tasks.json", "tasks", 0o640)
    any_stage.put("p/.envrc", "new", 0o4755)
    any_stage.link("out", "/etc/hostname")
    any_stage.whiteout("q")
    any_stage.put("conflict", "sandbox")
    any_stage.put("fine", "f")
    write(any_stage.ws / "conflict", "host")
    report = any_stage.apply()
    assert held(report) == {".vscode": "protected", "p/.envrc": "protected", "out": "link-outside",
                            "q/.vscode": "protected", "conflict": "conflict"}  # fmt: skip
    return any_stage


def test_listing(full: Stage) -> None:
    """Units are what a person decides about: an entry, or a directory as a whole."""
    assert listed(full) == {
        ".vscode": ("dir", "protected", 3), "p/.envrc": ("file", "protected", 1),
        "out": ("link", "link-outside", 1),
        "q/.vscode": ("delete", "protected", 1), "conflict": ("file", "conflict", 1),
    }  # fmt: skip


def test_taking_one_leaves_the_others(full: Stage) -> None:
    """Only the named unit is applied, with modes cut as ever; it is no longer held afterwards."""
    report = took(full, "p/.envrc")
    assert report.counts == {"modified": 1}
    assert full.text("p/.envrc") == "new"
    assert stat.S_IMODE((full.ws / "p/.envrc").stat().st_mode) == 0o755
    assert report.executables == ("p/.envrc",)
    assert not full.exists(".vscode")
    assert "p/.envrc" not in listed(full)
    assert len(listed(full)) == 4


def test_taking_all(full: Stage) -> None:
    """Directories, files, links, deletions and conflicts; then nothing is left in the hold directory."""
    report = took(full, overwrite=True)
    assert report.complete
    assert not report.held
    assert full.text(".vscode/sub/tasks.json") == "tasks"
    assert stat.S_IMODE((full.ws / ".vscode/sub/tasks.json").stat().st_mode) == 0o640
    assert os.readlink(full.ws / "out") == "/etc/hostname"
    assert full.text("conflict") == "sandbox"
    assert os.listdir(full.ws / "q") == []
    assert os.listdir(full.hold) == []


def test_a_conflict_is_not_waived_by_naming_it(full: Stage) -> None:
    """What was in conflict stays held back, named or not, until overwriting is asked for, too."""
    for chosen in (("conflict",), ("conflict", "out"), ()):
        report = took(full, *chosen)
        assert (held(report), report.complete) == ({"conflict": "conflict"}, True)
        assert full.text("conflict") == "host"
        assert listed(full)["conflict"] == ("file", "conflict", 1)
    assert os.readlink(full.ws / "out") == "/etc/hostname", "the others are applied"
    assert not took(full, "conflict", overwrite=True).held
    assert full.text("conflict") == "sandbox"
    assert listed(full) == {}


def test_the_host_still_wins(full: Stage) -> None:
    """What the host changed since is not overwritten or deleted, unless that is asked for."""
    for path in ("p/.envrc", "conflict", "q/.vscode/a"):
        write(full.ws / path, "host again")
    report = took(full)
    assert held(report) == {"p/.envrc": "conflict", "conflict": "conflict", "q/.vscode": "conflict"} or (
        held(report) == {"p/.envrc": "conflict", "conflict": "conflict", "q/.vscode/a": "conflict"}
    )
    assert full.text("conflict") == full.text("p/.envrc") == full.text("q/.vscode/a") == "host again"
    report = took(full, overwrite=True)
    assert not report.held
    assert full.text("p/.envrc") == "new"
    assert not full.exists("q/.vscode")


def test_a_link_in_the_way_is_not_followed(full: Stage) -> None:
    """Consent to a path is no consent to where the host's links lead from it."""
    os.symlink(full.outside, full.ws / ".vscode")
    report = took(full, ".vscode")
    assert not report.complete or report.held
    assert sorted(os.listdir(full.outside)) == ["f1", "other", "secret"]
    (full.ws / ".vscode").unlink()
    assert took(full, ".vscode").complete
    assert full.text(".vscode/sub/tasks.json") == "tasks"


def test_discarding(full: Stage) -> None:
    """A thrown-away unit is gone with its content; the others stay."""
    fd = hold(full)
    try:
        assert discard(fd, [".vscode"]) == 3
        assert ".vscode" not in listed(full)
        assert discard(fd, ["nothing"]) == 0
        assert discard(fd) == 4
    finally:
        os.close(fd)
    assert os.listdir(full.hold) == []
    assert took(full).total == 0


def test_no_workspace(full: Stage) -> None:
    """Without the workspace nothing is taken, and nothing lost."""
    os.rename(full.ws, full.base / "elsewhere")
    with pytest.raises(WorkspaceError):
        took(full)
    assert len(listed(full)) == 5


@pytest.mark.root
def test_a_held_rename(stage: Stage) -> None:
    """A rename that would move something protected is held as a whole, with what was changed in it; taking it
    does both.
    """
    stage.lower(**{"d__.vscode__t": "t", "d__src": "1", "x": "x"})
    stage.sh("mv d e; echo 2 >e/src; echo y >x; echo n >e/new")
    assert held(stage.apply()) == {"e": "move"}
    assert stage.text("d/src") == "1"
    assert stage.text("x") == "y\n"
    assert not stage.exists("e")
    report = took(stage, "e")
    assert report.complete
    assert not report.held
    assert stage.text("e/src") == "2\n"
    assert stage.text("e/.vscode/t") == "t"
    assert stage.text("e/new") == "n\n"
    assert not stage.exists("d")


def test_a_torn_manifest(full: Stage) -> None:
    """A last line cut short by a crash costs that line, not the list."""
    with open(full.hold / "manifest.jsonl", "ab") as file:
        file.write(b'{"path":"YWJj","kin')
    assert len(listed(full)) == 5
