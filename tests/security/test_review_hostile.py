"""Reviews of tops, and of workspaces, that were made to mislead, to hang or to show what lies outside: they
read beneath the workspace and the top only, change neither, end, and hide nothing that the step would do.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from typing import TYPE_CHECKING

import pytest

from casemate.workspace.diff import TopReview
from casemate.workspace.helddiff import HeldReview
from casemate.workspace.names import printable
from casemate.workspace.report import Limits
from casemate.workspace.textdiff import Budget
from tests.security.test_apply_meanwhile import swapping
from tests.unit.workspace.tops import WHO, Stage, guarded, held, limited, write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from casemate.workspace.review import Entry, Review

pytestmark = pytest.mark.security


@pytest.fixture(params=[(who, near) for who in WHO for near in (True, False)], ids=str)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """Looked at by root and by a user; with the top near and far. Nothing outside changes, nothing hangs."""
    with guarded(*request.param) as made:
        yield made


@contextlib.contextmanager
def reviewing(stage: Stage, **more: object) -> Iterator[Review]:
    top = os.open(stage.upper, os.O_RDONLY | os.O_DIRECTORY)
    hold = stage.options()
    assert hold.hold_dir is not None
    os.close(hold.hold_dir)
    options = stage.options(**more)
    try:
        with TopReview(top, str(stage.ws), options) as review:
            yield review
    finally:
        os.close(top)
        assert options.hold_dir is not None
        os.close(options.hold_dir)


def listed(stage: Stage) -> dict[str, Entry]:
    with reviewing(stage) as review:
        return {entry.path: entry for entry in review.entries}


def texts(stage: Stage) -> str:
    """Everything that a person would read."""
    budget, found = Budget(), list[str]()
    with reviewing(stage) as review:
        for entry in review.entries:
            found += [entry.path, entry.to, entry.to_before, entry.detail]
            if (text := review.difference(entry, budget).text) is not None:
                found += text.lines
    return "\n".join(found)


def test_what_links_lead_to_is_not_shown(stage: Stage) -> None:
    """Neither a link of the workspace that becomes a file, nor one of the top, nor a directory that is a link
    by now has anything of the outside shown; an honest file beside them is.
    """
    os.symlink(stage.outside / "secret", stage.ws / "mine")
    stage.lower(dir__f1="honest before\n", plain="honest before\n")
    stage.start()
    stage.put("mine", "a file now\n")
    stage.link("new", str(stage.outside / "secret"))
    stage.put("dir/f1", "honest after\n")
    stage.put("plain", "honest after\n")
    stage.link("elsewhere", str(stage.outside))
    os.rename(stage.ws / "dir", stage.ws / "aside")
    os.symlink(stage.outside, stage.ws / "dir")
    shown = texts(stage)
    assert "untouched" not in shown, "the secret's content"
    assert "-honest before" in shown
    assert "+a file now" in shown
    entries = listed(stage)
    assert (entries["mine"].what, entries["mine"].kind_before) == ("replaced", "link")
    assert entries["new"].held == "link-outside"


def test_the_control_that_goes_by_path(stage: Stage) -> None:
    """The control: a reader that follows what is there shows the secret."""
    os.symlink(stage.outside, stage.ws / "dir")
    assert (stage.ws / "dir/secret").read_text() == "untouched\n"


def test_nothing_blocks(stage: Stage) -> None:
    """FIFOs, sockets and devices in the top, FIFOs in the workspace under the old names, and a file that is
    one when it is opened: the review ends, and says what they are.
    """
    stage.lower(was="x" * 20, gone="y" * 20)
    for name in ("old", "dir"):
        os.mkfifo(stage.ws / name)
    stage.start()
    os.mkfifo(stage.upper / "pipe")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(stage.upper / "sock"))
    stage.put("old", "a file now\n")
    stage.put("dir/x", "in a directory now\n")
    stage.put("was", "changed\n")
    stage.put("made", "y" * 20)
    stage.whiteout("gone")
    entries = listed(stage)
    server.close()
    assert (entries["pipe"].held, entries["sock"].held) == ("special", "special")
    assert (entries["old"].kind_before, entries["made"].what) == ("special", "renamed")
    with limited(5), reviewing(stage) as review:
        (stage.ws / "was").unlink()
        os.mkfifo(stage.ws / "was")
        found = {entry.path: entry for entry in review.entries}
        assert review.difference(found["was"], Budget()).text is None


def test_locked_directories_and_files(stage: Stage) -> None:
    """What the command made unreadable is listed and shown all the same; its modes stay what they were."""
    stage.lower(mod="1\n")
    stage.start()
    stage.put("locked/in/file", "hidden?\n", 0)
    stage.put("mod", "2\n", 0)
    for path in ("locked/in", "locked"):
        (stage.upper / path).chmod(0)
    with limited(5):
        entries = listed(stage)
        shown = texts(stage)
    assert {"locked", "locked/in", "locked/in/file", "mod"} <= set(entries)
    assert (entries["locked"].mode, entries["locked/in/file"].mode) == (0, 0)
    assert "+hidden?" in shown
    assert "+2" in shown
    report = stage.apply()
    assert report.complete
    assert stat.S_IMODE((stage.ws / "locked").stat().st_mode) == 0


def test_names_that_lie(stage: Stage) -> None:
    """Two names that look the same on a screen are shown as different, and none holds a raw control."""
    stage.start()
    names = ["a.py", "a\u200b.py", "a\u3164.py", "a\ufe0f.py", "a\\u{200b}.py", "a\x1b[1m.py", "\u202eyp.a"]
    for name in names:
        stage.put(name, "x")
    shown = [printable(path) for path in listed(stage)]
    assert len(set(shown)) == len(names)
    assert all(name.isprintable() for name in shown)
    assert "a.py" in shown


def test_files_that_claim_much(stage: Stage) -> None:
    """A sparse file of a tebibyte, before and after, costs neither time nor memory."""
    stage.lower(big="x")
    os.truncate(stage.ws / "big", 1 << 40)
    stage.start()
    for name in ("big", "new"):
        os.truncate(stage.put(name, "y"), 1 << 40)
    began = time.monotonic()
    entries = listed(stage)
    assert entries["big"].what == "modified"
    with reviewing(stage) as review:
        (big,) = (entry for entry in review.entries if entry.path == "big")
        assert review.difference(big, Budget()).why == "large"
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("limits", [Limits(entries=50), Limits(seconds=0.0)], ids=["entries", "seconds"])
def test_a_top_that_is_too_much(stage: Stage, limits: Limits) -> None:
    """More than the limits allow is told; a part of a list is never taken for all of it."""
    stage.start()
    for number in range(100):
        stage.put(f"f{number}", "x")
    with reviewing(stage, limits=limits) as review:
        assert review.truncated
    with reviewing(stage) as review:
        assert not review.truncated
        assert len(review.entries) == 100


def test_forged_marks_of_the_overlay(stage: Stage) -> None:
    """Redirects that lead out or to nowhere, and whiteouts of the second form, promise nothing that the step
    would not do: what the list has is what is there afterwards.
    """
    stage.lower(keep__f="1", other__g="1")
    stage.start()
    for name, value in (("up", b"../outside"), ("abs", str(stage.outside).encode()), ("self", b"self"),
                        ("dots", b"/keep/../other"), ("nul", b"ke\0ep")):  # fmt: skip
        stage.mark(name, "redirect", value)
        stage.put(f"{name}/x", "x")
    stage.mark("keep", "opaque", b"x")
    stage.put("fine", "f")
    with reviewing(stage) as review:
        promised = {entry.path for entry in review.entries if not entry.held}
        skipped = {path for path, _ in review.skipped}
    report = stage.apply()
    made = {path for _, path in report.changed}
    assert made <= promised
    assert {failure.path for failure in report.failed} == skipped
    assert "fine" in made
    assert stage.text("keep/f") == "1"


def test_swaps_during_a_review(stage: Stage) -> None:
    """Whatever the host swaps for links out meanwhile, a review is not led out, and does not fail."""
    stage.lower(file="before\n" * 3, **{f"dir__f{number}": "before\n" for number in range(20)})
    stage.start()
    stage.put("file", "after\n")
    for number in range(20):
        stage.put(f"dir/f{number}", "after\n")
    with swapping(stage):
        for _ in range(25):
            assert "untouched" not in texts(stage)


def test_held_contents_are_read_from_the_hold_directory_only(stage: Stage) -> None:
    """A manifest that names other files, and a workspace whose old file is a link by now, show neither."""
    stage.lower(**{"d__.envrc": "old\n"})
    stage.start()
    stage.put("d/.envrc", "new\n")
    stage.put(".mcp.json", "{}\n")
    assert held(stage.apply()) == {"d/.envrc": "protected", ".mcp.json": "protected"}
    manifest = stage.hold / "manifest.jsonl"
    (number,) = (path.name for path in stage.hold.glob("0*") if path.read_text() == "{}\n")
    os.symlink(stage.outside / "secret", stage.hold / "999999")
    manifest.write_text(manifest.read_text().replace(f'"content":"{number}"', '"content":"999999"'))
    (stage.ws / "d/.envrc").unlink()
    os.symlink(stage.outside / "secret", stage.ws / "d/.envrc")
    hold = os.open(stage.hold, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with HeldReview(hold, str(stage.ws)) as review:
            found = {entry.path: review.difference(entry, Budget()) for entry in review.entries}
    finally:
        os.close(hold)
    lines = [line for item in found.values() for line in (item.text.lines if item.text else ())]
    assert lines == ["@@ -0,0 +1 @@", "+new"]
    assert found[".mcp.json"].why == "unreadable"


def test_a_change_cannot_be_kept_off_the_list(stage: Stage) -> None:
    """Whatever times, sizes and marks a command sets, what the step changes was listed before."""
    stage.lower(**{f"f{number}": f"content {number}" for number in range(8)}, d__x="1", d__y="1")
    stage.start()
    for number in range(8):
        status = (stage.ws / f"f{number}").stat()
        copy = stage.put(f"f{number}", f"CONTENT {number}", 0o755 if number % 2 else 0o644)
        times = (status.st_atime_ns, status.st_mtime_ns if number < 4 else 0)
        os.utime(copy, ns=times)
    stage.mark("d", "opaque", b"y")
    stage.put("d/x", "1")
    before = {path: path.read_bytes() for path in stage.ws.rglob("*") if path.is_file()}
    promised = set(listed(stage))
    assert stage.apply().complete
    after = {path: path.read_bytes() for path in stage.ws.rglob("*") if path.is_file()}
    changed = {str(path.relative_to(stage.ws)) for path in before.keys() | after.keys()
               if before.get(path) != after.get(path)}  # fmt: skip
    assert changed == {*(f"f{number}" for number in range(8)), "d/y"}
    assert changed <= promised
    write(stage.ws / "done", "")
