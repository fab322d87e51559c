"""The apply step on honest tops: everything arrives, and the report tells what did."""

from __future__ import annotations

import os
import shutil
import stat

import pytest

from casemate.errors import WorkspaceError
from casemate.workspace.apply import apply
from tests.unit.workspace.tops import Stage, held, paths, write


@pytest.mark.root
def test_a_real_overlay(stage: Stage) -> None:
    """Everything an ordinary command does in a real overlay arrives on the host."""
    stage.lower(mod="1", gone="1", mode="1", dir__f="1", todir="1", moved__f="1", moved__g="1", opaque__f="1")
    inode = (stage.ws / "moved").stat().st_ino
    stage.sh(
        "echo 2 >mod; rm gone; chmod 750 mode; rm -r dir; echo f >dir; rm todir; mkdir todir; mv moved away;"
        "echo more >>away/f; rm -r opaque; mkdir opaque; echo o >opaque/g; ln -s mod link; mkdir -p new/er;"
        "echo n >new/er/file"
    )
    report = stage.apply()
    assert not report.held
    assert report.complete
    assert stage.text("mod") == "2\n"
    assert not stage.exists("gone")
    assert stat.S_IMODE((stage.ws / "mode").stat().st_mode) == 0o750
    assert stage.text("dir") == "f\n"
    assert os.listdir(stage.ws / "todir") == []
    assert (stage.ws / "away").stat().st_ino == inode
    assert stage.text("away/f") == "1more\n"
    assert os.listdir(stage.ws / "opaque") == ["g"]
    assert stage.text("link") == "2\n"
    assert stage.text("new/er/file") == "n\n"
    assert dict(paths(report))["away"] == "renamed"
    assert report.counts == {
        "modified": 2,
        "deleted": 1,
        "mode": 1,
        "replaced": 3,
        "renamed": 1,
        "created": 5,
    }


def test_nothing_to_do(any_stage: Stage) -> None:
    """An empty top changes nothing; the workspace is not even opened."""
    any_stage.lower(a="1")
    shutil.rmtree(any_stage.ws)
    report = any_stage.apply()
    assert (report.total, report.complete) == (0, True)


def test_times_are_kept(any_stage: Stage) -> None:
    """Files, links and new directories keep their modification times to the nanosecond."""
    any_stage.start()
    file = any_stage.put("dir/file", "x")
    any_stage.link("dir/link", "file")
    moment = 1_234_567_890_123_456_789
    os.utime(file, ns=(moment, moment))
    os.utime(any_stage.upper / "dir/link", ns=(moment, moment), follow_symlinks=False)
    os.utime(any_stage.upper / "dir", ns=(moment, moment))
    any_stage.apply()
    for name in ("dir", "dir/file", "dir/link"):
        assert (any_stage.ws / name).lstat().st_mtime_ns == moment


def test_a_file_opened_but_not_changed(any_stage: Stage) -> None:
    """A file that was copied up for nothing is no change."""
    any_stage.lower(a="same")
    any_stage.start()
    copy = any_stage.put("a", "same")
    status = (any_stage.ws / "a").stat()
    os.utime(copy, ns=(status.st_mtime_ns, status.st_mtime_ns))
    report = any_stage.apply()
    assert report.total == 0
    assert (any_stage.ws / "a").stat().st_ino == status.st_ino


def test_same_size_and_time_but_other_content(any_stage: Stage) -> None:
    """A change hidden behind the old size and time is found."""
    any_stage.lower(a="good")
    any_stage.start()
    copy = any_stage.put("a", "evil")
    status = (any_stage.ws / "a").stat()
    os.utime(copy, ns=(status.st_mtime_ns, status.st_mtime_ns))
    assert any_stage.apply().counts == {"modified": 1}
    assert any_stage.text("a") == "evil"


def test_held_is_kept_and_told(any_stage: Stage) -> None:
    """Protected files are kept with their content; prose for agents is marked as a question."""
    any_stage.start()
    any_stage.put(".vscode/tasks.json", "tasks")
    any_stage.put("sub/.envrc", "run me", 0o755)
    any_stage.put("CLAUDE.md", "please")
    any_stage.put("src/main.py", "fine")
    report = any_stage.apply()
    assert held(report) == {".vscode": "protected", "sub/.envrc": "protected", "CLAUDE.md": "ask"}
    assert report.held_total == 3
    assert report.complete
    assert sorted(os.listdir(any_stage.ws)) == ["src", "sub"]
    kept = {path.read_text() for path in any_stage.hold.iterdir() if path.name.isdigit()}
    assert kept == {"tasks", "run me", "please"}


def test_held_again_with_another_content(any_stage: Stage) -> None:
    """A later version of a held file replaces the earlier one, also behind the same size and time."""
    for content in ("one", "two"):
        any_stage.start()
        os.utime(any_stage.put(".envrc", content), ns=(1, 1))
        assert any_stage.apply().complete
        assert [path.read_text() for path in any_stage.hold.iterdir() if path.name.isdigit()] == [content]


def test_without_a_place_to_keep_the_top_must_stay(any_stage: Stage) -> None:
    """With nowhere to keep what is held back, the report says that the top is not done with."""
    any_stage.start()
    any_stage.put(".envrc", "x")
    assert not any_stage.apply(hold_dir=None).complete
    assert any_stage.apply().complete


def test_no_room_to_keep(any_stage: Stage) -> None:
    """What does not fit into the hold directory's bound stays in the top, and that is said."""
    any_stage.start()
    any_stage.put(".envrc", "x" * 100)
    report = any_stage.apply(hold_bytes=99)
    assert not report.complete
    assert report.failed[0].path == ".envrc"
    assert any_stage.apply(hold_bytes=100).complete


def test_executables_are_listed(any_stage: Stage) -> None:
    """New and changed files that can be executed are listed, and links to them; others are not."""
    any_stage.lower(old="1")
    any_stage.start()
    any_stage.put("node_modules/eslint/cli.js", "js", 0o755)
    any_stage.link("node_modules/.bin/eslint", "../eslint/cli.js")
    any_stage.link("node_modules/.bin/plain", "../eslint/readme")
    any_stage.put("node_modules/eslint/readme", "r")
    any_stage.put("old", "2", 0o700)
    report = any_stage.apply()
    assert set(report.executables) == {"node_modules/eslint/cli.js", "node_modules/.bin/eslint", "old"}
    assert report.executables_total == 3


def test_the_workspace_must_be_the_same(stage: Stage) -> None:
    """Another directory in the workspace's place is refused, with a stable code; so is none at all."""
    stage.start()
    stage.put("a")
    status = stage.ws.stat()
    assert stage.apply(expect=(status.st_dev, status.st_ino)).complete
    stage.put("b")
    with pytest.raises(WorkspaceError) as replaced:
        stage.apply(expect=(status.st_dev, status.st_ino + 1))
    assert replaced.value.code == "workspace-replaced"
    shutil.rmtree(stage.ws)
    with pytest.raises(WorkspaceError) as gone:
        stage.apply()
    assert gone.value.code == "workspace-unreadable"


def test_the_workspace_is_no_link(stage: Stage) -> None:
    """A link in the workspace's place is not followed."""
    stage.start()
    stage.put("secret", "x")
    shutil.rmtree(stage.ws)
    os.symlink(stage.outside, stage.ws)
    top = os.open(stage.upper, os.O_RDONLY)
    options = stage.options()
    try:
        with pytest.raises(WorkspaceError):
            apply(top, str(stage.ws), options)
    finally:
        os.close(top)
        os.close(options.hold_dir or 0)
    assert (stage.outside / "secret").read_text() == "untouched\n"


def test_applied_twice(any_stage: Stage) -> None:
    """A second step over the same top finds nothing to do, and no conflict with the first."""
    any_stage.lower(a="1", d__x="1", e__y="1")
    any_stage.start()
    any_stage.put("a", "2")
    any_stage.put("new/file", "n", 0o755)
    any_stage.link("new/link", "file")
    any_stage.whiteout("d")
    any_stage.mark("e", "opaque", b"y")
    any_stage.put(".envrc", "held")
    assert any_stage.apply().complete
    report = any_stage.apply(resumed=True)
    assert report.total == 0
    assert held(report) == {".envrc": "protected"}
    assert len([path for path in any_stage.hold.iterdir() if path.name.isdigit()]) == 1


def test_hard_links_become_files_of_their_own(any_stage: Stage) -> None:
    """Two names of one file arrive as two files: a later change to one does not reach the other."""
    any_stage.start()
    any_stage.put("a", "x")
    os.link(any_stage.upper / "a", any_stage.upper / "b")
    any_stage.apply()
    write(any_stage.ws / "a", "changed")
    assert any_stage.text("b") == "x"


def test_python_and_node_environments(any_stage: Stage) -> None:
    """What venv and npm make passes without a question."""
    any_stage.start()
    for name in ("python", "python3"):
        any_stage.link(f"venv/bin/{name}", "/usr/bin/python3")
    any_stage.link("venv/lib64", "lib")
    any_stage.put("venv/lib/python3/site-packages/p.py", "p")
    any_stage.put("venv/pyvenv.cfg", "home = /usr/bin\n")
    any_stage.put("venv/bin/pip", "#!/usr/bin/python3\n", 0o755)
    any_stage.put("node_modules/a/bin/a.js", "a", 0o755)
    any_stage.link("node_modules/.bin/a", "../a/bin/a.js")
    any_stage.link("node_modules/ws", "../packages/ws")
    any_stage.put("node_modules/a/.github/workflows/ci.yml", "on: push")
    any_stage.put("node_modules/.package-lock.json", "{}")
    any_stage.put("package-lock.json", "{}")
    report = any_stage.apply()
    assert held(report) == {}
    assert report.complete
