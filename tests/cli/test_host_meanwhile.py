"""The host works on files that a command is just changing: nothing of the host's is overwritten unseen."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.cli.test_session import sessions
from tests.security.lab import give

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.harness import Caller, Ended

pytestmark = pytest.mark.root
__all__ = ["sessions"]

OLD, PRECIOUS = "a\nline\n", "a\nline\nHOST PRECIOUS\n"


def save(caller: Caller, path: Path) -> None:
    """As editors save: a new file in the place of the old one."""
    caller.file(path.with_name("f.new"), PRECIOUS)
    os.rename(path.with_name("f.new"), path)


def append(_caller: Caller, path: Path) -> None:
    """In place, as ``>>`` does."""
    with open(path, "a") as file:
        file.write("HOST PRECIOUS\n")


def merge(caller: Caller, path: Path) -> None:
    """As ``git merge --ff-only`` does."""
    git(caller, path.parent, "merge", "-q", "--ff-only", "other")


def git(caller: Caller, ws: Path, *words: str) -> None:
    """Git, as the owner of the workspace."""
    argv = ["setpriv", f"--reuid={caller.uid}", f"--regid={caller.uid}", "--clear-groups", "git"]
    argv += ["-c", "user.name=n", "-c", "user.email=e@example.org", "-C", str(ws), *words]
    subprocess.run(argv, check=True, env={"PATH": os.environ["PATH"], "HOME": str(ws)})


def meanwhile(caller: Caller, ws: Path, script: str, act: Callable[[], object], *flags: str) -> bytes:
    """Run a script that says ``up`` and reads a line; the host acts between the two. Returns what it said."""
    process = caller.start("run", *flags, "--", "/bin/sh", "-ec", script, cwd=ws)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    act()
    _, err = process.communicate(b"\n", timeout=20)
    assert process.returncode == 0, err
    return err


def changes(caller: Caller, ws: Path) -> dict[str, str]:
    """path -> reason of what is held back."""
    ended: Ended = caller.cli("changes", "--json", cwd=ws)
    return {unit["path"]: unit["reason"] for entry in ended.json["held"] for unit in entry["units"]}


@pytest.mark.parametrize("host", [save, append, merge])
@pytest.mark.parametrize(
    ("looks", "writes"),
    [
        ("cat f >/dev/null", "chmod +x f"), ("cat f >/dev/null", "sed -i s/line/LINE/ f"),
        (":", "echo x >>f"), ("cp f /tmp/c", "cat /tmp/c >f; echo x >>f"), ("ls -l f >/dev/null", "rm f"),
    ],
)  # fmt: skip
def test_a_file(
    caller: Caller, ws: Path, host: Callable[[Caller, Path], None], looks: str, writes: str
) -> None:
    """The host saves, appends or merges while the command is between reading and writing: that stays, and the
    command's version is kept. The control: what the host did before the run is there for the command.
    """
    for name, text in (("f", OLD), ("g", OLD)):
        caller.file(ws / name, text)
    if host is merge:
        git(caller, ws, "init", "-q", "-b", "main")
        git(caller, ws, "add", "f", "g")
        git(caller, ws, "commit", "-qm", "1")
        git(caller, ws, "checkout", "-qb", "other")
        caller.file(ws / "f", PRECIOUS)
        git(caller, ws, "commit", "-qam", "2")
        git(caller, ws, "checkout", "-q", "main")
    err = meanwhile(
        caller, ws, f"{looks}; cat g >/dev/null; echo up; read x; {writes}; echo y >>g",
        lambda: host(caller, ws / "f"),
    )  # fmt: skip
    assert (ws / "f").read_text() == PRECIOUS
    assert b"f (conflict)" in err, err
    assert changes(caller, ws) == {"f": "conflict"}
    assert (ws / "g").read_text() == f"{OLD}y\n", "what the host left alone is applied"
    assert caller.cli("discard", "--all", cwd=ws).code == 0
    assert caller.sh(ws, writes).code == 0
    assert not changes(caller, ws)
    assert not (ws / "f").exists() or (ws / "f").read_text() != PRECIOUS or os.access(ws / "f", os.X_OK)


def test_a_file_that_was_not_there(caller: Caller, ws: Path) -> None:
    """The host makes what the command has looked for in vain, and then makes as well. The control: the same
    content is no conflict.
    """
    script = "test ! -e g; test ! -e same; echo up; read x; echo sandbox >g; echo same >same"

    def make() -> None:
        caller.file(ws / "g", "host\n")
        caller.file(ws / "same", "same\n")

    meanwhile(caller, ws, script, make)
    assert ((ws / "g").read_text(), (ws / "same").read_text()) == ("host\n", "same\n")
    assert changes(caller, ws) == {"g": "conflict"}
    assert caller.cli("discard", "--all", cwd=ws).code == 0


@pytest.mark.usefixtures("sessions")
def test_a_session(caller: Caller, ws: Path) -> None:
    """A single run writes what a command of a session has read before and writes afterwards: that is not
    overwritten by ``apply --session``. The control: what it wrote before the session's command began is seen.
    """
    for name in ("shared", "before"):
        caller.file(ws / name, "line\n")
    assert caller.sh(ws, "true", flags=("--session", "s")).code == 0
    assert caller.sh(ws, "echo run >>before").code == 0
    script = "cp shared /tmp/c; echo up; read x; sed s/line/session/ /tmp/c >shared; echo session >>before"

    def run() -> None:
        assert caller.sh(ws, "echo run >>shared").code == 0

    meanwhile(caller, ws, script, run, "--session", "s")
    done = caller.cli("apply", "--session", "s", cwd=ws)
    assert b"held back: shared (conflict)" in done.err, done
    assert (ws / "shared").read_text() == "line\nrun\n"
    assert (ws / "before").read_text() == "line\nrun\nsession\n"
    assert changes(caller, ws) == {"shared": "conflict"}
    assert caller.cli("discard", "--all", cwd=ws).code == 0


def test_another_workspace(caller: Caller, ws: Path) -> None:
    """A directory that the host has put in the place of the workspace gets nothing of what was done in the
    old one, which waits. Control: the old one, moved back.
    """
    caller.file(ws / "f", OLD)
    old = ws.with_name("old")

    def replace() -> None:
        os.rename(ws, old)
        ws.mkdir()
        give(ws, caller.uid)

    process = caller.start("run", "--", "/bin/sh", "-ec", "echo up; read line; echo new >f", cwd=ws)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    replace()
    _, err = process.communicate(b"\n", timeout=20)
    assert process.returncode == 125, err
    assert b"[workspace-replaced]" in err
    assert os.listdir(ws) == []
    assert (old / "f").read_text() == OLD
    ws.rmdir()
    os.rename(old, ws)
    assert caller.cli("apply", cwd=ws).code == 0
    assert (ws / "f").read_text() == "new\n"
