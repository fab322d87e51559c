"""The apply step on hostile forms of what overlayfs itself keeps in a top: whiteouts, opaque and renamed
directories.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from casemate.workspace.held import take
from tests.unit.workspace.tops import WHO, Stage, guarded, held, stage_for

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.security


@pytest.fixture(params=[(who, near) for who in WHO for near in (True, False)], ids=str)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """Applied by root and by a user; with the top near (renames) and far (copies)."""
    with guarded(*request.param) as made:
        yield made


def test_whiteouts_delete_only_what_is_there(stage: Stage) -> None:
    """A whiteout deletes a file or a tree; one over nothing is nothing, also in a new directory."""
    stage.lower(f="1", d__a="2", d__b__c="3", stays="4")
    os.symlink(stage.outside, stage.ws / "d/out")
    stage.start()
    for path in ("f", "d", "nothing", "new/nothing"):
        stage.whiteout(path)
    report = stage.apply()
    assert not report.held
    assert report.counts == {"deleted": 2, "created": 1}
    assert sorted(os.listdir(stage.ws)) == ["new", "stays"]
    assert os.listdir(stage.ws / "new") == []


def test_deletion_of_protected_names_is_held(stage: Stage) -> None:
    """Protected names survive the deletion of the tree they are in; the rest of it goes."""
    stage.lower(**{"p__.git__hooks__pre-commit": "h", "p__.envrc": "e", "p__src__x": "x", "q": "q"})
    stage.start()
    stage.whiteout("p")
    stage.whiteout("q")
    report = stage.apply()
    assert held(report) == {"p/.git": "protected", "p/.envrc": "protected"}
    assert stage.text("p/.git/hooks/pre-commit") == "h"
    assert not stage.exists("p/src")
    assert not stage.exists("q")


def test_opaque_directory_replaces(stage: Stage) -> None:
    """An opaque directory hides what was there: that is deleted, except what is protected."""
    stage.lower(**{"d__old": "1", "d__both": "2", "d__sub__x": "3", "d__.vscode__t": "4", "e__x": "5"})
    stage.start()
    stage.mark("d", "opaque", b"y")
    stage.put("d/both", "new")
    stage.put("d/sub/y", "y")
    stage.put("e/y", "merged")
    report = stage.apply()
    assert held(report) == {"d/.vscode": "protected"}
    assert sorted(os.listdir(stage.ws / "d")) == [".vscode", "both", "sub"]
    assert os.listdir(stage.ws / "d/sub") == ["y"]
    assert stage.text("d/both") == "new"
    assert sorted(os.listdir(stage.ws / "e")) == ["x", "y"]


@pytest.mark.parametrize(
    "value",
    [b"../../outside", b"/../outside", b"/", b"", b".", b"..", b"a\0b", b"/a/../../outside", b"/a//b", b"x/y",
     b"/" + b"a/" * 1500 + b"b", b"/nowhere", b"nowhere", b"/.git", b"/d", b"d", b"/e/../d", b"\xff\xfe"],
)  # fmt: skip
def test_hostile_redirects(stage: Stage, value: bytes) -> None:
    """No redirect value leads out, loses a file or moves what is protected; the rest is applied."""
    stage.lower(**{"d__x": "1", "e__y": "2", ".git__HEAD": "ref: refs/heads/main\n"})
    stage.start()
    (stage.upper / "new").mkdir()
    try:
        os.setxattr(stage.upper / "new", stage.prefix + "redirect", value)
    except OSError:
        pytest.fail("the value cannot even be set")
    stage.put("new/z", "3")
    stage.put("good", "g")
    report = stage.apply()
    assert stage.text("good") == "g"
    assert stage.text("d/x") == "1"
    assert stage.text("e/y") == "2"
    assert stage.text(".git/HEAD") == "ref: refs/heads/main\n"
    assert not stage.exists("new/x")
    # Either it is said that it was left, or it is only the new directory that it looks like.
    assert report.failed or report.held or stage.text("new/z") == "3"


@pytest.mark.root
def test_redirect_cycles_and_copies() -> None:
    """Directories that trade places do; one that would be in two places at once is held."""
    with stage_for("root") as stage:
        stage.lower(a__f="A", b__f="B", c__f="C", d__f="D")
        stage.start()
        for path, source in (("a", b"/b"), ("b", b"/c"), ("c", b"/a"), ("copy", b"/d")):
            stage.mark(path, "redirect", source)
        stage.put("a/g", "with b")
        report = stage.apply()
        assert held(report) == {"copy": "move"}
        assert [stage.text(f"{name}/f") for name in "abcd"] == ["B", "C", "A", "D"]
        assert stage.text("a/g") == "with b"
        assert not stage.exists("copy")


@pytest.mark.root
def test_a_held_rename_out_of_a_renamed_directory() -> None:
    """What was moved out of a directory, to where it is held back, is not lost when that directory is moved
    itself: it has come along, and can be taken from there.
    """
    with stage_for("root") as stage:
        stage.lower(a__b__f="precious", a__g="1")
        stage.sh("mv a/b .vscode; mv a x")
        report = stage.apply()
        assert held(report) == {".vscode": "protected"}
        assert stage.text("x/b/f") == "precious"
        assert stage.text("x/g") == "1"
        hold = os.open(stage.hold, os.O_RDONLY | os.O_DIRECTORY)
        try:
            assert take(hold, str(stage.ws)).complete
        finally:
            os.close(hold)
        assert stage.text(".vscode/f") == "precious"
        assert os.listdir(stage.ws / "x") == ["g"]


@pytest.mark.root
def test_a_rename_into_a_replaced_directory() -> None:
    """A directory goes to a name that its new parent had before it was replaced: that is no conflict."""
    with stage_for("root") as stage:
        stage.lower(b__e__f="old", b__g="old", a__g="1")
        stage.sh("rm -r b; mkdir b; mv a b/e")
        report = stage.apply()
        assert not report.held
        assert os.listdir(stage.ws) == ["b"]
        assert os.listdir(stage.ws / "b") == ["e"]
        assert os.listdir(stage.ws / "b/e") == ["g"]
