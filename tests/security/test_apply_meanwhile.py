"""The apply step while the host is at work, and when it fails or is killed in the middle: the host's changes
win, no link is followed, nothing is lost, and a second run ends the job.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.unit.workspace.tops import (
    WHO,
    Stage,
    acting_as_root_again,
    be_the_user,
    guarded,
    held,
    limited,
    stage_for,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.security


@pytest.fixture(params=[(who, near) for who in WHO for near in (True, False)], ids=str)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """Applied by root and by a user; with the top near (renames) and far (copies)."""
    with guarded(*request.param) as made:
        yield made


# -- the host at work meanwhile ---------------------------------------------------------------------------


def test_host_changes_win(stage: Stage) -> None:
    """What the host changed, made or moved since the command did is never overwritten or deleted; the
    command's version is kept.
    """
    stage.lower(mod="1", untouched="1", gone="1", gonedir__old="1", gonedir__edited="1", todir="1")
    stage.lower(precious__p="1", kind__x="1")
    stage.start()
    stage.put("mod", "sandbox")
    stage.put("untouched", "sandbox")
    stage.put("made", "sandbox")
    stage.put("madedir/x", "sandbox")
    stage.put("todir", "sandbox")
    for path in ("gone", "gonedir", "kind"):
        stage.whiteout(path)
    write(stage.ws / "mod", "host")
    write(stage.ws / "made", "host")
    write(stage.ws / "madedir", "host")
    write(stage.ws / "gone", "host")
    write(stage.ws / "gonedir/edited", "host")
    os.rename(stage.ws / "precious", stage.ws / "kind/precious")
    (stage.ws / "todir").unlink()
    write(stage.ws / "todir/x", "host")
    report = stage.apply()
    assert stage.text("untouched") == "sandbox"
    assert [stage.text(path) for path in ("mod", "made", "madedir", "gone", "gonedir/edited", "todir/x")] == (
        ["host"] * 6
    )
    assert stage.text("kind/precious/p") == "1"
    assert set(held(report).values()) == {"conflict"}
    assert {"mod", "made", "madedir", "gone", "todir"} <= set(report.conflicts)
    assert report.complete
    kept = {path.read_text() for path in stage.hold.iterdir() if path.name.isdigit()}
    assert kept == {"sandbox"}


def rewrite(path: Path, content: str) -> None:
    """Save a file as editors do."""
    new = path.with_name("new~")
    write(new, content)
    os.rename(new, path)


@pytest.mark.parametrize("save", [write, rewrite])
@pytest.mark.parametrize("seen", [True, False])
def test_host_changes_before_the_command_wrote(
    stage: Stage, save: Callable[[Path, str], None], seen: bool
) -> None:
    """What the host changed during the run wins, even if the command made its version later: it may have
    read the old one. The control: what was changed before the run was seen by it.
    """
    stage.lower(mod="1", mode="1", kind="1", deep="1", d__deep="1")
    if not seen:
        stage.start()
    for path in ("mod", "mode", "new", "d/deep", "kind"):
        save(stage.ws / path, "host")
    if seen:
        stage.start()
    stage.put("mod", "sandbox")
    stage.put("mode", "host", 0o755)
    stage.put("new", "sandbox")
    stage.put("d/deep", "sandbox")
    stage.put("deep", "sandbox")
    stage.link("kind", "mod")
    report = stage.apply()
    changed = ["d/deep", "kind", "mod", "mode", "new"]
    assert held(report) == ({} if seen else dict.fromkeys(changed, "conflict"))
    assert report.complete
    now = [stage.text(path) for path in changed]
    sandbox = ["sandbox", "sandbox", "sandbox", "host", "sandbox"]
    assert now == (sandbox if seen else ["host"] * 5)
    assert bool((stage.ws / "mode").stat().st_mode & 0o111) == seen
    assert stage.text("deep") == "sandbox"


def test_the_same_on_both_sides_is_no_conflict(stage: Stage) -> None:
    """Where the host and the command have come to the same, nothing is held back; with another mode it is."""
    stage.lower(mod="1", mode="1", link="1", dir__x="1")
    stage.start()
    for path in ("mod", "mode", "new", "dir/y"):
        write(stage.ws / path, "same")
    (stage.ws / "link").unlink()
    os.symlink("mod", stage.ws / "link")
    for path in ("mod", "new", "dir/y"):
        stage.put(path, "same")
    stage.put("mode", "same", 0o755)
    stage.link("link", "mod")
    assert held(stage.apply()) == {"mode": "conflict"}
    assert (stage.ws / "mode").stat().st_mode & 0o111 == 0


def test_names_of_one_file_are_no_conflict(stage: Stage) -> None:
    """Replacing one name of a file with several changes the others' times: that is Casemate's own doing."""
    stage.lower(a="1")
    os.link(stage.ws / "a", stage.ws / "b")
    os.link(stage.ws / "a", stage.ws / "c")
    stage.start()
    stage.put("a", "sandbox a")
    stage.put("b", "sandbox b")
    stage.whiteout("c")
    assert not stage.apply().held
    assert (stage.text("a"), stage.text("b"), stage.exists("c")) == ("sandbox a", "sandbox b", False)


SWAPPER = """
import os, sys, time
ws, outside = sys.argv[1:3]
os.chdir(ws)
print("ready", flush=True)
while True:
    try:
        os.rename("dir", "aside"); os.symlink(outside, "dir"); os.unlink("dir"); os.rename("aside", "dir")
        os.rename("file", "aside2"); os.symlink(outside + "/secret", "file"); os.unlink("file")
        os.rename("aside2", "file")
    except OSError:
        for aside, name in (("aside", "dir"), ("aside2", "file")):
            if os.path.lexists(aside):
                if os.path.islink(name): os.unlink(name)
                elif os.path.isdir(name) and not os.path.islink(name):
                    os.rename(name, name + str(time.time_ns()))
                elif os.path.lexists(name): os.unlink(name)
                os.rename(aside, name)
"""


@contextlib.contextmanager
def swapping(stage: Stage) -> Iterator[None]:
    """A process that swaps a directory and a file of the workspace for links out, as fast as it can."""
    racer = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", SWAPPER, str(stage.ws), str(stage.outside)],
        stdout=subprocess.PIPE,
        preexec_fn=be_the_user if stage.user and os.getuid() == 0 else None,
    )
    try:
        assert racer.stdout is not None
        racer.stdout.readline()
        yield
    finally:
        racer.kill()
        racer.communicate()


def test_swaps_during_the_apply(stage: Stage) -> None:
    """Whatever is swapped for a link out while the step is at work, it is not led out."""
    stage.lower(file="1", **{f"dir__f{number}": "1" for number in range(40)})
    with swapping(stage):
        for number in range(30):
            stage.started = 0
            stage.start()
            stage.put("file", f"new {number}")
            for name in range(40):
                stage.put(f"dir/f{name}", f"new {number}")
                stage.put(f"dir/sub{name}/x", "n")
            stage.apply(hold_dir=None)


def test_the_same_without_swaps(stage: Stage) -> None:
    """The control: undisturbed, all of it arrives."""
    stage.lower(file="1", dir__f1="1")
    stage.start()
    stage.put("file", "new")
    stage.put("dir/f1", "new")
    stage.put("dir/sub1/x", "n")
    assert stage.apply(hold_dir=None).complete
    assert [stage.text(path) for path in ("file", "dir/f1", "dir/sub1/x")] == ["new", "new", "n"]


def test_the_swaps_are_fast_enough() -> None:
    """The control: a writer that goes by path, as a plain copy would, is led out by the same process."""
    with stage_for(WHO[0]) as stage:
        stage.lower(file="1", dir__f1="1")
        with swapping(stage), limited(20):
            while (stage.outside / "f1").read_text() == "untouched\n":
                with contextlib.suppress(OSError):
                    (stage.ws / "dir/f1").write_text("led out")


# -- failures in the middle --------------------------------------------------------------------------------


@pytest.mark.root
def test_full_disk_loses_nothing() -> None:
    """A workspace that fills up: what did not fit is reported, stays in the top, nothing is deleted; a second
    try after making room ends the job.
    """
    with stage_for("root") as stage:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mount(b"tmpfs", os.fsencode(stage.ws), b"tmpfs", 0, b"size=1m") == 0
        try:
            stage.lower(old="o" * 1000, ballast=b"b" * 600_000)
            stage.start()
            for number in range(10):
                stage.put(f"f{number}", b"x" * 100_000)
            stage.whiteout("old")
            report = stage.apply()
            assert not report.complete
            assert report.failed_total >= 6
            assert "No space" in report.failed[0].error
            assert stage.exists("old")
            for name in os.listdir(stage.ws):
                if name.startswith("f"):
                    assert (stage.ws / name).stat().st_size == 100_000, "a half-written file is visible"
            (stage.ws / "ballast").unlink()
            report = stage.apply(resumed=True)
            assert report.complete
            assert not report.held
            assert sorted(os.listdir(stage.ws)) == [f"f{number}" for number in range(10)]
        finally:
            libc.umount2(os.fsencode(stage.ws), 2)


@pytest.mark.root
def test_denied_in_the_middle() -> None:
    """A directory of the workspace that we may not write to: its entries fail, the others arrive."""
    with stage_for("user") as stage:
        stage.lower(a="1", locked__b="2", z="3")
        with acting_as_root_again():
            os.chown(stage.ws / "locked", 0, 0)
        stage.start()
        for path in ("a", "locked/b", "z"):
            stage.put(path, "new")
        report = stage.apply()
        assert [failure.path for failure in report.failed] == ["locked/b"]
        assert not report.complete
        assert stage.text("a") == stage.text("z") == "new"
        assert stage.text("locked/b") == "2"


@pytest.mark.parametrize("step", [1, 2, 3, 5, 8, 13, 21, 34, 55, 89])
def test_killed_in_the_middle(stage: Stage, step: int) -> None:
    """An apply step killed at any point leaves no half-written file, and no temporary name once it is run
    again; the second run ends the job.
    """
    stage.lower(**{f"old{number}": "1" for number in range(9)}, **{f"d__gone{n}": "1" for n in range(9)})
    stage.start()
    big = b"x" * 200_000
    for number in range(9):
        stage.put(f"old{number}", big)
        stage.put(f"new/n{number}", big, 0o755)
    stage.whiteout("d")
    stage.die(step)
    for path in stage.ws.rglob("*"):
        if path.is_file() and path.name.startswith(("old", "n")):
            assert path.stat().st_size in (1, len(big))
    report = stage.apply(resumed=True)
    assert report.complete
    assert not report.held
    names = {str(path.relative_to(stage.ws)) for path in stage.ws.rglob("*")}
    assert names == {"new", *(f"old{n}" for n in range(9)), *(f"new/n{n}" for n in range(9))}
    assert all((stage.ws / f"old{n}").read_bytes() == big for n in range(9))
