"""The list of changes before they are applied, and applying a part of them."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from casemate.errors import WorkspaceError
from casemate.workspace.diff import TopReview
from casemate.workspace.helddiff import HeldReview
from casemate.workspace.journal import Journal
from casemate.workspace.report import Limits
from casemate.workspace.select import Selection
from casemate.workspace.textdiff import Budget
from tests.unit.workspace.tops import Stage, held, paths, write

if TYPE_CHECKING:
    from casemate.workspace.report import ApplyReport
    from casemate.workspace.review import Difference, Entry

MOMENT = 1_234_567_890_000_000_000


def journal(stage: Stage) -> Journal:
    """What of the stage's top is done."""
    return Journal(str(stage.base / "done"))


def listed(stage: Stage) -> dict[str, Entry]:
    """The changes by path."""
    top = os.open(stage.upper, os.O_RDONLY | os.O_DIRECTORY)
    options = stage.options(hold_dir=None, journal=journal(stage), resumed=True)
    try:
        with TopReview(top, str(stage.ws), options) as review:
            assert not review.skipped
            return {entry.path: entry for entry in review.entries}
    finally:
        os.close(top)


def words(stage: Stage) -> dict[str, str]:
    """path -> what, or the reason for which it would be held back."""
    return {path: entry.held or entry.what for path, entry in listed(stage).items()}


def differences(stage: Stage) -> dict[str, Difference]:
    """How each content differs."""
    top = os.open(stage.upper, os.O_RDONLY | os.O_DIRECTORY)
    options = stage.options(hold_dir=None)
    budget = Budget()
    try:
        with TopReview(top, str(stage.ws), options) as review:
            return {entry.path: review.difference(entry, budget) for entry in review.entries}
    finally:
        os.close(top)


def part(stage: Stage, *globs: str, paths: tuple[str, ...] = ()) -> ApplyReport:
    """Apply a part of the top."""
    return stage.apply(resumed=True, journal=journal(stage), only=Selection(globs, paths))


def rest(stage: Stage) -> ApplyReport:
    """Apply what is left of the top."""
    return stage.apply(resumed=True, journal=journal(stage))


def test_every_kind_of_change(any_stage: Stage) -> None:
    """Created, modified, deleted, renamed, replaced, mode, time and link changes, each with both sides."""
    stage = any_stage
    stage.lower(mod="1\n", gone="12", chmod="x", touch="x", old="the same content\n", tolink="x")
    stage.lower(dir__a="123")
    os.symlink("one", stage.ws / "link")
    stage.start()
    stage.put("mod", "1\n2\n", 0o755)
    stage.whiteout("gone")
    stage.whiteout("dir")
    stage.whiteout("old")
    stage.put("new/name", "the same content\n")
    os.utime(stage.put("chmod", "x", 0o700), ns=(MOMENT, MOMENT))
    stage.put("touch", "x")
    stage.link("tolink", "mod")
    stage.link("link", "mod")
    stage.put("big", b"\0" * 10)
    found = listed(stage)
    assert {path: entry.what for path, entry in found.items()} == {
        "mod": "modified", "gone": "deleted", "dir": "deleted", "new": "created", "new/name": "renamed",
        "chmod": "mode", "touch": "touched", "tolink": "replaced", "link": "modified", "big": "created",
    }  # fmt: skip
    assert (found["mod"].size_before, found["mod"].size, found["mod"].executable) == (2, 4, True)
    assert (found["chmod"].mode_before, found["chmod"].mode) == (0o644, 0o700)
    assert (found["link"].to_before, found["link"].to) == ("one", "mod")
    assert (found["tolink"].kind_before, found["tolink"].to) == ("file", "mod")
    assert (found["dir"].kind, found["dir"].entries, found["dir"].size_before) == ("dir", 1, 3)
    assert found["new/name"].source == "old"
    assert [path for path, entry in found.items() if entry.executable] == ["chmod", "link", "mod", "tolink"]


def test_what_would_be_held_back(any_stage: Stage) -> None:
    """Protected names, links that lead out, special files and conflicts stand in the list with their reason,
    before anything is done, just as the step holds them back afterwards.
    """
    stage = any_stage
    stage.lower(edited="1", both="1", p__x="1", q__z="1", **{"p__.envrc": "1"})
    stage.start()
    stage.put(".vscode/tasks.json", "t")
    stage.put("CLAUDE.md", "c")
    stage.link("out", "/etc/shadow")
    os.mkfifo(stage.upper / "pipe")
    stage.put("edited", "sandbox")
    stage.put("both", "the same")
    stage.whiteout("p")
    stage.whiteout("q")
    stage.put("made/x", "sandbox")
    stage.put("fine", "f")
    write(stage.ws / "edited", "host")
    write(stage.ws / "both", "the same")
    write(stage.ws / "q/z", "host")
    write(stage.ws / "made", "host")
    found = words(stage)
    assert found == {
        ".vscode": "protected", ".vscode/tasks.json": "protected", "CLAUDE.md": "ask", "out": "link-outside",
        "pipe": "special", "edited": "conflict", "both": "touched", "p": "deleted", "p/.envrc": "protected",
        "q": "deleted", "q/z": "conflict", "made": "conflict", "made/x": "conflict", "fine": "created",
    }  # fmt: skip
    assert [path for path, entry in listed(stage).items() if entry.within] == [".vscode/tasks.json", "made/x"]
    before = sorted(path.name for path in stage.ws.rglob("*"))
    report = stage.apply()
    assert held(report) == {
        path: reason
        for path, reason in found.items()
        if reason not in ("deleted", "created", "touched") and path not in (".vscode/tasks.json", "made/x")
    }
    assert before != sorted(path.name for path in stage.ws.rglob("*"))


def test_a_change_behind_the_old_size_and_time_is_listed(any_stage: Stage) -> None:
    """A command that sets size and time back hides nothing; a file that it only opened is no change."""
    any_stage.lower(a="good", b="good")
    any_stage.start()
    for name, content in (("a", "evil"), ("b", "good")):
        copy, status = any_stage.put(name, content), (any_stage.ws / name).stat()
        os.utime(copy, ns=(status.st_mtime_ns, status.st_mtime_ns))
    assert words(any_stage) == {"a": "modified"}
    assert differences(any_stage)["a"].text is not None


def test_looking_changes_nothing(any_stage: Stage) -> None:
    """A review writes neither to the workspace nor what would count in the top."""
    any_stage.lower(a="1", d__x="1", d__y="1")
    any_stage.start()
    any_stage.put("a", "2")
    any_stage.mark("d", "opaque", b"y")
    any_stage.put("d/z", "1")

    def state() -> list[tuple[str, int, int]]:
        return sorted((str(p), p.lstat().st_mtime_ns, p.lstat().st_ino) for p in any_stage.ws.rglob("*"))

    before = state()
    assert words(any_stage) == {"a": "modified", "d/x": "deleted", "d/y": "deleted", "d/z": "created"}
    assert state() == before
    assert any_stage.apply().complete


def test_contents(any_stage: Stage) -> None:
    """Texts as unified diffs, of a renamed file too; binary and large files by a word."""
    stage = any_stage
    lines = "".join(f"{number}\n" for number in range(30))
    stage.lower(text="a\nb\n", old=lines, binary=b"\0", empty="", locked="x\n")
    stage.start()
    stage.put("text", "a\nc\n")
    stage.whiteout("old")
    stage.put("new", lines.replace("15\n", "fifteen\n"))
    stage.put("binary", b"\0\1")
    stage.put("large", b"x" * 1_100_000)
    stage.put("empty", "full")
    stage.put("locked", "y\n", 0)
    stage.link("link", "text")
    found = differences(stage)
    assert {path: item.why for path, item in found.items() if item.text is None} == {
        "binary": "binary", "large": "large", "link": "",
    }  # fmt: skip
    text, new, empty = found["text"].text, found["new"].text, found["empty"].text
    assert text is not None
    assert text.lines == ["@@ -1,2 +1,2 @@", " a", "-b", "+c"]
    assert new is not None
    assert (new.added, new.removed) == (1, 1)
    assert empty is not None
    assert empty.lines == ["@@ -0,0 +1 @@", "+full", "\\ No newline at end of file"]
    assert found["locked"].text is not None
    assert stat.S_IMODE((stage.upper / "locked").stat().st_mode) == 0


def test_too_many_changes(stage: Stage) -> None:
    """More than the limits allow is said to be so; half a list is not taken for the whole."""
    stage.start()
    for number in range(20):
        stage.put(f"f{number}")
    top = os.open(stage.upper, os.O_RDONLY | os.O_DIRECTORY)
    options = stage.options(hold_dir=None)
    try:
        with TopReview(top, str(stage.ws), options) as whole:
            assert not whole.truncated
        options = stage.options(hold_dir=None, limits=Limits(entries=10))
        with TopReview(top, str(stage.ws), options) as half:
            assert half.truncated
    finally:
        os.close(top)


def test_no_workspace(stage: Stage) -> None:
    """Without a workspace there is an error with a code, and nothing stays open."""
    top, options = os.open(stage.upper, os.O_RDONLY | os.O_DIRECTORY), stage.options(hold_dir=None)
    before = len(os.listdir("/proc/self/fd"))
    try:
        with pytest.raises(WorkspaceError) as gone:
            TopReview(top, str(stage.ws / "nosuch"), options)
        assert gone.value.code == "workspace-unreadable"
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        os.close(top)


# -- parts -------------------------------------------------------------------------------------------------


def test_a_part_leaves_the_rest(any_stage: Stage) -> None:
    """Only what is chosen is applied, with the directories it needs; the rest waits, and can be applied."""
    stage = any_stage
    stage.lower(mod="1", gone="1", keep="1")
    stage.start()
    stage.put("mod", "2")
    stage.put("new/deep/a.py", "a")
    stage.put("new/deep/b.txt", "b")
    stage.put("other/c.py", "c")
    stage.whiteout("gone")
    report = part(stage, "*.py")
    assert report.complete
    assert [path for path, _ in paths(report)] == ["new", "new/deep", "new/deep/a.py", "other", "other/c.py"]
    assert (stage.text("mod"), stage.exists("gone"), stage.exists("new/deep/b.txt")) == ("1", True, False)
    assert words(stage) == {"mod": "modified", "gone": "deleted", "new/deep/b.txt": "created"}
    assert part(stage, paths=("gone",)).counts == {"deleted": 1}
    assert words(stage) == {"mod": "modified", "new/deep/b.txt": "created"}
    assert rest(stage).counts == {"modified": 1, "created": 1}
    assert words(stage) == {}


def test_what_was_applied_is_the_hosts_from_then_on(any_stage: Stage) -> None:
    """What the host does to the applied part meanwhile is neither undone nor a conflict."""
    stage = any_stage
    stage.lower(a="1", b="1", c="1")
    stage.start()
    for name in "abcd":
        stage.put(name, "2")
    stage.whiteout("e")
    assert part(stage, paths=("a", "b", "d")).complete
    write(stage.ws / "a", "host")
    (stage.ws / "d").unlink()
    report = rest(stage)
    assert not report.held
    assert [stage.text(name) for name in "abc"] == ["host", "2", "2"]
    assert not stage.exists("d")


def test_a_part_of_a_deleted_directory(any_stage: Stage) -> None:
    """Of a directory that the command deleted, a part can be deleted; the rest goes later."""
    stage = any_stage
    stage.lower(d__a="1", d__e__b="1", d__e__c="1")
    stage.start()
    stage.whiteout("d")
    report = part(stage, paths=("d/e/b",))
    assert (report.complete, stage.exists("d/e/b"), stage.exists("d/e/c")) == (True, False, True)
    assert listed(stage)["d"].entries == 3
    assert part(stage, "e").complete
    assert sorted(os.listdir(stage.ws / "d")) == ["a"]
    assert rest(stage).counts == {"deleted": 1}
    assert os.listdir(stage.ws) == []


def test_a_part_of_a_replaced_directory(any_stage: Stage) -> None:
    """In a directory that was made anew, a file can be taken without what that deletes, and the other way."""
    stage = any_stage
    stage.lower(d__old="1", d__both="1", d__sub__x="1")
    stage.start()
    stage.mark("d", "opaque", b"y")
    stage.put("d/both", "2")
    stage.put("d/new", "2")
    assert words(stage) == {
        "d/both": "modified", "d/new": "created", "d/old": "deleted", "d/sub": "deleted",
    }  # fmt: skip
    assert part(stage, paths=("d/new",)).complete
    assert sorted(os.listdir(stage.ws / "d")) == ["both", "new", "old", "sub"]
    assert part(stage, paths=("d/sub",)).complete
    assert sorted(os.listdir(stage.ws / "d")) == ["both", "new", "old"]
    assert stage.text("d/both") == "1"
    write(stage.ws / "d/mine", "host")
    assert rest(stage).complete
    assert words(stage) == {"d/mine": "conflict"} or words(stage) == {}
    assert sorted(os.listdir(stage.ws / "d")) == ["both", "mine", "new"]
    assert stage.text("d/both") == "2"


def test_thrown_away_parts_are_not_applied(any_stage: Stage) -> None:
    """What stands in the journal is left alone, deletions of a replaced directory's content included."""
    stage = any_stage
    stage.lower(d__old="1", e__f__x="1", e__g="1", a="1")
    stage.start()
    stage.mark("d", "opaque", b"y")
    stage.put("d/new", "2")
    stage.put("a", "2")
    stage.whiteout("e")
    journal(stage).add(["d/old", "e/f", "a"])
    assert words(stage) == {"d/new": "created", "e": "deleted"}
    report = rest(stage)
    assert report.complete
    assert (stage.text("d/old"), stage.text("e/f/x"), stage.text("a")) == ("1", "1", "1")
    assert stage.text("d/new") == "2"
    assert not stage.exists("e/g")


def test_held_parts(any_stage: Stage) -> None:
    """A protected change that is chosen goes to the held ones, once; one that is not stays in the top."""
    stage = any_stage
    stage.start()
    stage.put(".envrc", "e")
    stage.put(".vscode/tasks.json", "t")
    stage.put(".vscode/settings.json", "s")
    stage.put("fine", "f")
    assert held(part(stage, paths=("fine",))) == {}
    assert held(part(stage, paths=(".envrc",))) == {".envrc": "protected"}
    assert words(stage) == {
        ".vscode": "protected", ".vscode/tasks.json": "protected", ".vscode/settings.json": "protected",
    }  # fmt: skip
    assert held(part(stage, "tasks.json")) == {".vscode/tasks.json": "protected"}
    assert held(rest(stage)) == {".vscode": "protected"}
    hold = os.open(stage.hold, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with HeldReview(hold, str(stage.ws)) as review:
            assert [entry.path for entry in review.entries] == [
                ".envrc", ".vscode", ".vscode/settings.json", ".vscode/tasks.json",
            ]  # fmt: skip
            (envrc, *_) = review.entries
            assert (envrc.what, envrc.held, envrc.size) == ("created", "protected", 1)
            difference = review.difference(envrc, Budget())
            assert difference.text is not None
            assert difference.text.lines[1] == "+e"
    finally:
        os.close(hold)


@pytest.mark.root
def test_renamed_directories_in_parts(stage: Stage) -> None:
    """A rename is made for what is chosen in the directory, or by its old name; its other changes wait."""
    stage.lower(a__x="1", a__y="1", c__z="1", other="1")
    stage.sh("mv a b; echo 2 >b/x; rm b/y; echo n >b/new; mv c d; echo 2 >other")
    found = listed(stage)
    assert {path: entry.what for path, entry in found.items()} == {
        "b": "renamed", "b/x": "modified", "b/y": "deleted", "b/new": "created", "d": "renamed",
        "other": "modified",
    }  # fmt: skip
    assert (found["b"].source, found["b/x"].source, found["d"].source) == ("a", "a/x", "c")
    assert part(stage, paths=("other",)).complete
    assert sorted(os.listdir(stage.ws)) == ["a", "c", "other"]
    report = part(stage, paths=("b/new",))
    assert (report.complete, report.counts) == (True, {"renamed": 1, "created": 1})
    assert sorted(os.listdir(stage.ws / "b")) == ["new", "x", "y"]
    assert stage.text("b/x") == "1"
    assert part(stage, paths=("c",)).counts == {"renamed": 1}
    assert rest(stage).counts == {"modified": 1, "deleted": 1}
    assert sorted(os.listdir(stage.ws)) == ["b", "d", "other"]


@pytest.mark.root
def test_a_rename_that_the_host_undid(stage: Stage) -> None:
    """A directory that was moved in one part, and then by the host to elsewhere: the rest is kept."""
    stage.lower(a__x="1")
    stage.sh("mv a b; echo 2 >b/x; echo n >b/new")
    assert part(stage, paths=("b/new",)).complete
    os.rename(stage.ws / "b", stage.ws / "mine")
    report = rest(stage)
    assert report.complete
    assert set(held(report).values()) == {"conflict"}
    assert sorted(os.listdir(stage.ws)) == ["mine"]
    assert stage.text("mine/x") == "1"
    assert "2\n" in {path.read_text() for path in stage.hold.iterdir() if path.name.isdigit()}
