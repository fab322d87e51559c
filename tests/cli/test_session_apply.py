"""``diff --session`` and ``apply --session``: a session's changes reach the workspace by the same step."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from tests.cli.harness import until
from tests.cli.test_session import listed, run, sessions, snapshot, started

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.harness import Caller, Ended

pytestmark = pytest.mark.root
__all__ = ["sessions"]


def apply(caller: Caller, ws: Path, *words: str, session: str = "s") -> Ended:
    """``casemate apply --session``."""
    return caller.cli("apply", "--session", session, *words, cwd=ws)


def diff(caller: Caller, ws: Path, *words: str, session: str = "s") -> dict[str, str]:
    """``casemate diff --session``: path -> what, with the reason where it would be held back."""
    ended = caller.cli("diff", "--session", session, "--json", *words, cwd=ws)
    assert ended.code == 0, ended
    return {
        entry["path"]: entry["what"] + (f" {entry['held']}" if "held" in entry else "")
        for view in ended.json["views"]
        for entry in view["changes"]
    }


def drop_held(caller: Caller, ws: Path) -> None:
    """Throw away what apply steps have held back."""
    for entry in caller.cli("changes", "--json", cwd=ws).json["held"]:
        assert caller.cli("discard", entry["name"], "--all", cwd=ws).code == 0


def test_layers_are_applied_as_one(caller: Caller, ws: Path) -> None:
    """Several layers reach the workspace as their sum; what is protected is held back; the session goes on
    over the changed workspace, and HOME is still there.
    """
    for name in ("f", "gone", "d/x", "d/y", "e/z"):
        (ws / name).parent.mkdir(exist_ok=True)
        os.chown((ws / name).parent, caller.uid, caller.uid)
        caller.file(ws / name, f"{name}\n")
    run(caller, ws, "echo 1 >>f; rm gone; mkdir n .vscode; echo n >n/n; echo t >.vscode/t; echo h >~/h")
    snapshot(caller, ws)
    run(caller, ws, "rm -r d; mkdir d; echo new >d/new; echo 2 >>n/n; mv e e2 2>/dev/null; rm -rf e")
    snapshot(caller, ws)
    run(caller, ws, "echo 3 >>f; mkdir gone; echo g >gone/g")
    found = diff(caller, ws)
    moved = {path: found.pop(path) for path in [*found] if path.startswith("e")}
    # A user's overlay renames no directory: mv copies.
    assert moved == (
        {"e2": "created", "e2/z": "created", "e": "deleted"} if caller.uid else {"e2": "renamed"}
    )
    assert found == {
        ".vscode": "created protected", ".vscode/t": "created protected", "f": "modified", "gone": "replaced",
        "gone/g": "created", "n": "created", "n/n": "created", "d/new": "created", "d/x": "deleted",
        "d/y": "deleted",
    }  # fmt: skip
    done = apply(caller, ws)
    assert done.code == 0, done
    assert b"held back: .vscode (protected)" in done.err, done
    there = {str(path.relative_to(ws)): path.read_text() for path in ws.rglob("*") if path.is_file()}
    assert there == {
        "f": "f\n1\n3\n", "gone/g": "g\n", "n/n": "n\n2\n", "d/new": "new\n", "e2/z": "e/z\n",
    }  # fmt: skip
    assert {path.stat().st_uid for path in ws.rglob("*")} == {caller.uid}
    assert diff(caller, ws) == {}
    assert run(caller, ws, "cat ~/h f; ls -A") == b"h\nf\n1\n3\nd\ne2\nf\ngone\nn\n"
    assert [each["id"] for each in listed(caller, ws)[0]["snapshots"]] == ["start"]
    drop_held(caller, ws)


def test_a_part(caller: Caller, ws: Path) -> None:
    """What is named is applied, even if it is protected; the rest stays in the session."""
    os.makedirs(ws / "old")
    os.chown(ws / "old", caller.uid, caller.uid)
    caller.file(ws / "old/x", "x\n")
    run(caller, ws, "echo 1 >a.py; echo 1 >b.txt; mv old new; echo e >.envrc")
    snapshot(caller, ws)
    run(caller, ws, "echo 2 >>a.py")
    assert apply(caller, ws, "--only", "*.py").code == 0
    assert sorted(os.listdir(ws)) == ["a.py", "old"]
    assert (ws / "a.py").read_text() == "1\n2\n"
    run(caller, ws, "echo 3 >>a.py; cat b.txt new/x")
    assert apply(caller, ws, ".envrc", "new", "old").code == 0
    assert sorted(os.listdir(ws)) == [".envrc", "a.py", "new"]
    assert run(caller, ws, "cat a.py new/x b.txt .envrc") == b"1\n2\n3\nx\n1\ne\n"
    assert apply(caller, ws, "nosuch").code == 125
    assert apply(caller, ws).code == 0
    assert (ws / "a.py").read_text() == "1\n2\n3\n", "what the step itself has written is no conflict"
    assert (ws / "b.txt").read_text() == "1\n"
    assert diff(caller, ws) == {}


def test_words_that_mean_nothing(caller: Caller, ws: Path) -> None:
    """A typo applies nothing and takes nothing of the session: its snapshots stay, and commands go on. The
    control: a word that means something applies it, and one that does not is told beside it.
    """
    run(caller, ws, "echo 1 >a.py")
    first = snapshot(caller, ws)
    run(caller, ws, "echo 2 >>a.py; echo 1 >b")
    before = listed(caller, ws)
    for words in (("--only", "typo.txt"), ("typo",), ("typo", "--only", "no*")):
        done = apply(caller, ws, *words)
        assert (done.code, os.listdir(ws)) == (125, []), done
        assert b"in the session s" in done.err, done
        assert b"casemate diff --session s --stat" in done.err, done
        assert listed(caller, ws) == before
    assert caller.cli("diff", "--session", "s", "--stat", cwd=ws).code == 0, "what the hint says"
    assert run(caller, ws, "cat a.py b") == b"1\n2\n1\n"
    assert caller.cli("session", "rollback", "s", first, cwd=ws).code == 0
    some = apply(caller, ws, "typo", "--only", "*.py")
    assert (some.code, os.listdir(ws)) == (0, ["a.py"]), some
    assert b"nothing has changed under typo" in some.err, some


def test_a_directory_that_is_gone(caller: Caller, ws: Path) -> None:
    """Where one of the session's directories is gone nothing is applied, and the session is not stuck."""
    other = caller.workspace()
    run(caller, ws, f"echo 1 >{other}/o; echo 1 >f", "--write", str(other))
    os.rename(other, other.with_name("away"))
    done = apply(caller, ws)
    assert (done.code, os.listdir(ws)) == (125, []), done
    assert b"[workspace-unreadable]" in done.err, done
    assert run(caller, ws, "cat f") == b"1\n"
    os.rename(other.with_name("away"), other)
    assert apply(caller, ws).code == 0
    assert (os.listdir(ws), os.listdir(other)) == (["f"], ["o"])


def test_more_directories(caller: Caller, ws: Path) -> None:
    """Changes of every directory that the session could write to are shown and applied, without the flag."""
    other = caller.workspace()
    caller.file(other / "o", "o\n")
    run(caller, ws, f"echo 1 >>{other}/o; echo 1 >f", "--write", str(other))
    snapshot(caller, ws)
    run(caller, ws, "echo 2 >g")
    assert diff(caller, ws) == {"f": "created", "g": "created", "o": "modified"}
    assert apply(caller, ws, str(other / "o")).code == 0
    assert ((other / "o").read_text(), os.listdir(ws)) == ("o\n1\n", [])
    run(caller, ws, f"echo 2 >>{other}/o", "--write", str(other))
    assert apply(caller, ws).code == 0
    assert ((other / "o").read_text(), sorted(os.listdir(ws))) == ("o\n1\n2\n", ["f", "g"])


def test_a_conflict_that_is_named(caller: Caller, ws: Path) -> None:
    """Naming a file of a session is no consent to overwriting what the host has changed since."""
    for name in ("f", "g"):
        caller.file(ws / name, "0\n")
    run(caller, ws, "echo session >>f; echo session >>g; echo e >.envrc")
    caller.file(ws / "f", "host\n")
    done = apply(caller, ws, "f", "g", ".envrc")
    assert b"held back: f (conflict)" in done.err, done
    there = {name: (ws / name).read_text() for name in os.listdir(ws)}
    assert there == {"f": "host\n", "g": "0\nsession\n", ".envrc": "e\n"}
    assert caller.cli("apply", "f", "--overwrite", cwd=ws).code == 0
    assert (ws / "f").read_text() == "0\nsession\n"


@pytest.mark.parametrize("how", ["in place", "by a new file"])
@pytest.mark.parametrize("frozen", [False, True])
def test_conflicts(caller: Caller, ws: Path, how: str, frozen: bool) -> None:
    """What the host changed after the session made its own version is a conflict, however the session changed
    it again; what it changed before, so that the session went on from that, is none.
    """
    for name in ("seen", "unseen"):
        caller.file(ws / name, "0\n")
    write = "echo {0} >>{1}" if how == "in place" else "{{ cat {1}; echo {0}; }} >t; mv t {1}"
    run(caller, ws, write.format("session", "unseen"))
    if frozen:
        snapshot(caller, ws)
    for name in ("seen", "unseen"):
        caller.file(ws / name, "host\n")
    run(caller, ws, write.format("session", "seen"))
    run(caller, ws, write.format("again", "unseen"))
    assert diff(caller, ws) == {"seen": "modified", "unseen": "modified conflict"}
    done = apply(caller, ws)
    assert done.code == 0, done
    assert b"held back: unseen (conflict)" in done.err, done
    assert (ws / "seen").read_text() == "host\nsession\n"
    assert (ws / "unseen").read_text() == "host\n"
    (entry,) = caller.cli("changes", "--json", cwd=ws).json["held"]
    assert caller.cli("apply", entry["name"], "unseen", "--overwrite", cwd=ws).code == 0
    assert (ws / "unseen").read_text() == "0\nsession\nagain\n", "neither version is lost"


def test_a_branch_keeps_what_another_applies(caller: Caller, ws: Path) -> None:
    """Applying one session takes nothing out of the layers that its branches share."""
    run(caller, ws, "mkdir d; echo 1 >d/f; echo 1 >g; echo h >~/h")
    assert caller.cli("session", "branch", "s", "twin", cwd=ws).code == 0
    assert apply(caller, ws).code == 0
    assert (ws / "d/f").read_text() == "1\n"
    for name in ("d/f", "g"):
        (ws / name).unlink()
    (ws / "d").rmdir()
    assert run(caller, ws, "cat d/f g ~/h; echo 2 >>d/f", session="twin") == b"1\n1\nh\n"
    assert apply(caller, ws, session="twin").code == 0
    assert (ws / "d/f").read_text() == "1\n2\n"


def test_while_a_command_runs(caller: Caller, ws: Path) -> None:
    """Neither is there while a command of the session runs, or a single one in the workspace."""
    process = started(caller, ws, "echo x >f; echo up; read x")
    for verb in ("diff", "apply"):
        ended = caller.cli(verb, "--session", "s", cwd=ws)
        assert ended.code == 126, ended
        assert b"[busy]" in ended.err, ended
    process.communicate(b"\n", timeout=20)
    single = caller.start("run", "--", "/bin/sh", "-c", "echo up; read x", cwd=ws)
    assert single.stdout is not None
    assert single.stdout.readline() == b"up\n"
    assert caller.cli("apply", "--session", "s", cwd=ws).code == 126
    assert os.listdir(ws) == []
    single.communicate(b"\n", timeout=20)
    assert apply(caller, ws).code == 0
    assert os.listdir(ws) == ["f"]
    assert caller.cli("diff", "--session", "nope", cwd=ws).code == 125


MANY_MORE = """
for number in range(1500): open(f"new{number}", "w").write(f"session {number}")
"""

MANY = """
import os
for d in range(12):
    os.makedirs(f"new{d}/in")
    for n in range(40): open(f"new{d}/in/f{n}", "w").write(f"{d} {n}\\n")
    os.rename(f"old{d}", f"moved{d}") if os.geteuid() < 1000 or os.geteuid() > 10**6 else None
    os.unlink(f"gone{d}")
    open(f"changed{d}", "a").write("session\\n")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("tidy")
def test_kill_while_a_part_is_applied(caller: Caller, ws: Path) -> None:
    """kill -9 of an apply step of a part: before it has changed anything the session is not held up, and
    later the hint goes on with that part, not with all.
    """
    for number in range(1500):
        caller.file(ws / f"new{number}", "host\n")
    assert caller.py(ws, MANY_MORE, flags=("--session", "s")).code == 0
    snapshot(caller, ws)
    run(caller, ws, "echo e >evil")
    hints = unharmed = 0

    def harmed() -> int:
        return sum((ws / f"new{number}").read_text() != "host\n" for number in range(1500))

    for step in range(60):
        process = caller.start("apply", "--session", "s", "--only", "new*", "new0", cwd=ws)
        end = time.monotonic() + 0.02 + step * 0.03
        until(lambda end=end: time.monotonic() >= end)  # type: ignore[misc]
        done = process.poll() is not None
        process.kill()
        caller.end(process)
        refused = caller.sh(ws, "true", flags=("--session", "s"))
        if refused.code:
            hints += 1
            assert b"casemate apply --session s --only 'new*' -- new0 goes on with it" in refused.err, refused
        elif not done:
            unharmed += 1
            assert hints or not harmed()
        if done or hints > 2:
            break
    assert hints
    assert unharmed
    last = apply(caller, ws, "--only", "new*", "--", "new0")
    assert last.code in (0, 125), last
    assert harmed() == 1500
    assert "evil" not in os.listdir(ws)
    assert diff(caller, ws) == {"evil": "created"}


@pytest.mark.slow
@pytest.mark.usefixtures("tidy")
def test_kill_while_it_is_applied(caller: Caller, ws: Path) -> None:
    """kill -9 of an apply step at any moment loses nothing: it goes on with the next, and until then no
    command meets half of it.
    """
    for number in range(12):
        (ws / f"old{number}").mkdir()
        os.chown(ws / f"old{number}", caller.uid, caller.uid)
        for name in (f"old{number}/x", f"gone{number}", f"changed{number}"):
            caller.file(ws / name, f"{name}\n")
    ended = caller.py(ws, MANY, flags=("--session", "s"))
    assert ended.code == 0, ended
    snapshot(caller, ws)
    run(caller, ws, "echo 2 >>changed0; echo h >~/h; rm -r new11")
    seen = run(caller, ws, "find . -type f | sort | xargs cat; find . | sort")
    killed = 0
    for step in range(80):
        process = caller.start("apply", "--session", "s", cwd=ws)
        end = time.monotonic() + 0.03 + step * 0.003
        until(lambda end=end: time.monotonic() >= end)  # type: ignore[misc]
        if process.poll() is not None:
            caller.end(process)
            break
        process.kill()
        caller.end(process)
        killed += 1
        (item,) = listed(caller, ws)
        if item["applying"]:
            refused = caller.sh(ws, "true", flags=("--session", "s"))
            assert refused.code == 125, refused
            assert b"[session-applying]" in refused.err, refused
            assert caller.cli("session", "snapshot", "s", cwd=ws).code == 125
    assert killed
    done = apply(caller, ws)
    assert done.code == 0, done
    assert run(caller, ws, "find . -type f | sort | xargs cat; find . | sort") == seen
    assert caller.run(ws, "sh", "-c", "find . -type f | sort | xargs cat; find . | sort").out == seen
    assert run(caller, ws, "cat ~/h") == b"h\n"
    assert diff(caller, ws) == {}
    assert not caller.cli("changes", "--json", cwd=ws).json["held"]
