"""``run --apply none``, ``diff``, ``apply`` and ``discard`` in parts: nothing unasked, nothing lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from casemate.workspace.names import printable
from tests.cli.harness import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.harness import Caller, Ended

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("traceless")]

WORK = (
    "echo 2 >>mod; rm gone; mkdir -p new/deep; echo a >new/deep/a.py; echo b >new/b.txt; chmod +x run;"
    " mv old.txt renamed.txt; echo evil >.envrc; ln -s mod link; exit 3"
)
OLD = "a text that is long enough to be told from others\n"
#: What that is, in the list.
LIST = {
    "mod": "modified", "gone": "deleted", "new": "created", "new/deep": "created", "new/deep/a.py": "created",
    "new/b.txt": "created", "run": "mode", "renamed.txt": "renamed", ".envrc": "created", "link": "created",
}  # fmt: skip


@pytest.fixture
def project(caller: Caller, ws: Path) -> Path:
    """A workspace with something in it."""
    for name, text in {"mod": "1\n", "gone": "1\n", "run": "#!/bin/sh\n", "old.txt": OLD}.items():
        caller.file(ws / name, text)
    return ws


def wait(caller: Caller, ws: Path, script: str = WORK, *flags: str) -> str:
    """Run it so that its changes wait; the name that they wait under."""
    ended = caller.sh(ws, script, flags=("--apply", "none", "--json", *flags))
    name: str = ended.json["applied"]["pending"]
    return name


def changes(caller: Caller, ws: Path) -> dict[str, Any]:
    found: dict[str, Any] = caller.cli("changes", "--json", cwd=ws).json
    return found


def listed(caller: Caller, ws: Path, *words: str) -> dict[str, str]:
    """path -> what, of ``diff --json``."""
    ended = caller.cli("diff", "--json", *words, cwd=ws)
    assert ended.code == 0, ended
    return {entry["path"]: entry["what"] for view in ended.json["views"] for entry in view["changes"]}


def tree(ws: Path) -> list[str]:
    return sorted(str(path.relative_to(ws)) for path in ws.rglob("*"))


def test_none_of_it_is_applied_until_it_is(caller: Caller, project: Path) -> None:
    """--apply none: the command's own exit code, an untouched workspace, changes that wait and are offered;
    ``diff`` shows them and ``apply`` makes them, without a name where only one is meant.
    """
    before = tree(project)
    ended = caller.sh(project, WORK, flags=("--apply", "none", "--json"))
    applied = ended.json["applied"]
    assert (ended.code, applied["created"], applied["changes"], applied["held"]) == (3, 0, [], [])
    assert (applied["pending-changes"], tree(project)) == (len(LIST), before)
    (pending,) = changes(caller, project)["pending"]
    assert (pending["name"], pending["state"]) == (applied["pending"], "pending")
    assert {path: what for what, path in pending["changes"]} == LIST
    later = caller.sh(project, "cat mod")
    assert later.out == b"1\n", "a later command does not see them"
    assert b"1 command(s) that wait for a review" in later.err, later
    assert listed(caller, project) == LIST
    assert tree(project) == before, "looking changes nothing"
    done = caller.cli("apply", cwd=project)
    assert done.code == 0, done
    assert b"held back: .envrc (protected)" in done.err, done
    assert (project / "mod").read_text() == "1\n2\n"
    assert os.access(project / "run", os.X_OK)
    expected = {*before, *LIST} - {"gone", "old.txt", ".envrc"}
    assert set(tree(project)) == expected
    (held,) = changes(caller, project)["held"]
    assert held["name"] == f"{pending['name']}/0"
    assert caller.cli("discard", "--all", cwd=project).code == 0


def test_all_is_the_default(caller: Caller, project: Path) -> None:
    """The control: without the option, and with --apply all, the same changes are there at once."""
    for flags in ((), ("--apply", "all")):
        ended = caller.sh(project, "echo 2 >>mod", flags=(*flags, "--json"))
        assert ended.json["applied"]["modified"] == 1, ended
        assert "pending" not in ended.json["applied"] or not ended.json["applied"]["pending"]
    assert (project / "mod").read_text() == "1\n2\n2\n"


def test_nothing_changed(caller: Caller, project: Path) -> None:
    """A command that only read, or opened a file for nothing, leaves nothing that waits."""
    assert wait(caller, project, "cat mod; : >>mod") == ""
    assert changes(caller, project)["pending"] == []


def test_what_diff_says(caller: Caller, project: Path) -> None:
    """The list and the texts for a person; --stat without texts; a part by pattern, path or old name."""
    wait(caller, project)
    text = caller.cli("diff", cwd=project).out.decode()
    for line in (
        "  renamed    old.txt -> renamed.txt", "  mode       run  (mode 0644 -> 0755; executable)",
        "--- a/mod", "+++ b/mod", "@@ -1 +1,2 @@", " 1", "+2", "--- /dev/null", "+++ b/new/deep/a.py",
        "  created    link -> mod", "  deleted    gone  (+0 -1; 2 B)",
    ):  # fmt: skip
        assert line in text.splitlines() or line.startswith("  deleted"), (line, text)
    assert "held back: protected" in text
    stat = caller.cli("diff", "--stat", cwd=project).out.decode()
    assert "modified   mod  (+1 -0; 2 B -> 4 B)" in stat
    assert "@@" not in stat
    assert listed(caller, project, "--only", "*.py") == {"new/deep/a.py": "created"}
    assert listed(caller, project, "new") == {path: what for path, what in LIST.items() if "new" in path}
    assert listed(caller, project, "old.txt") == {"renamed.txt": "renamed"}
    some = caller.cli("diff", "nosuch", "mod", cwd=project)
    assert (some.code, some.err) == (0, b"casemate: nothing has changed under nosuch\n"), some
    none = caller.cli("diff", "nosuch", cwd=project)
    assert (none.code, b"nothing has changed under nosuch" in none.err) == (125, True), none
    assert caller.cli("discard", cwd=project).code == 0


def test_parts(caller: Caller, project: Path) -> None:
    """--only and paths apply what they mean with the directories it needs; the rest waits on, and what is
    thrown away is not applied.
    """
    wait(caller, project)
    done = caller.cli("apply", "--only", "*.py", cwd=project)
    assert done.code == 0, done
    assert done.out.decode().split("\n")[:3] == ["created new", "created new/deep", "created new/deep/a.py"]
    assert b"7 more change(s) wait" in done.err, done
    assert listed(caller, project) == {
        path: what for path, what in LIST.items() if path not in ("new", "new/deep", "new/deep/a.py")
    }
    assert caller.cli("apply", "old.txt", cwd=project).code == 0
    assert not (project / "old.txt").exists()
    assert (project / "renamed.txt").read_text() == OLD
    gone = caller.cli("discard", "gone", "--only", "run", cwd=project)
    assert (gone.code, b"discarded: 2 change(s)" in gone.err) == (0, True), gone
    (project / "mod").write_text("the host's\n")
    rest = caller.cli("apply", cwd=project)
    assert rest.code == 0, rest
    assert b"held back: mod (conflict)" in rest.err, rest
    assert (project / "mod").read_text() == "the host's\n"
    assert (project / "gone").exists()
    assert not os.access(project / "run", os.X_OK)
    found = changes(caller, project)
    assert (found["pending"], {unit["path"] for unit in found["held"][0]["units"]}) == ([], {".envrc", "mod"})
    assert caller.cli("discard", found["held"][0]["name"], "--all", cwd=project).code == 0


def test_a_protected_path_that_is_named(caller: Caller, project: Path) -> None:
    """Naming a protected path exactly is the consent it waits for; a pattern or a directory above is not."""
    wait(caller, project, "mkdir d; echo 1 >d/.envrc; echo 2 >.envrc; echo 3 >.mcp.json; echo 4 >d/fine")
    by_glob = caller.cli("apply", "--only", ".env*", cwd=project)
    assert by_glob.err.count(b"held back: ") == 2, by_glob
    assert caller.cli("apply", "d", cwd=project).code == 0
    assert tree(project / "d") == ["fine"]
    exact = caller.cli("apply", ".mcp.json", cwd=project)
    assert (exact.code, b"held back" in exact.err) == (0, False), exact
    assert (project / ".mcp.json").read_text() == "3\n"
    (held,) = changes(caller, project)["held"]
    assert {unit["path"] for unit in held["units"]} == {".envrc", "d/.envrc"}
    diff = caller.cli("diff", held["name"], cwd=project).out
    assert b"+++ b/d/.envrc" in diff, diff
    assert caller.cli("apply", held["name"], "--all", cwd=project).code == 0
    assert (project / "d/.envrc").read_text() == "1\n"


def test_which_one_is_meant(caller: Caller, project: Path) -> None:
    """With several that wait a name has to be given; what is thrown away has to be clear beyond doubt."""
    first, second = wait(caller, project, "echo 2 >>mod"), wait(caller, project, "echo 3 >new")
    for verb in ("diff", "apply", "discard"):
        ended = caller.cli(verb, cwd=project)
        assert ended.code == 2, ended
        assert all(name.encode() in ended.err for name in (first, second)), ended
    assert caller.cli("apply", "nosuch", cwd=project).code == 1
    assert caller.cli("apply", first, "--all", "mod", cwd=project).code == 2
    assert caller.cli("apply", first, "--overwrite", cwd=project).code == 2
    assert caller.cli("apply", first, cwd=project).code == 0
    assert caller.cli("diff", "--only", cwd=project).code == 2
    assert caller.sh(project, "echo x >.envrc").code == 0
    assert caller.cli("discard", cwd=project).code == 2
    assert caller.cli("apply", cwd=project).code == 0, "of one that waits and a held one, the first is meant"
    assert (project / "new").read_text() == "3\n"
    assert caller.cli("discard", "--all", cwd=project).code == 0
    assert caller.cli("discard", cwd=project).code == 1


def test_where_there_is_no_view(caller: Caller, project: Path) -> None:
    """Where nothing can wait the option is refused before anything runs, and an unknown word is one, too."""
    for flags, code in (
        (("--apply", "maybe"), 2), (("--apply", "none", "--preset", "full-access"), 126),
        (("--apply", "ask", "--session", "s"), 126), (("--apply",), 2),
    ):  # fmt: skip
        ended = caller.sh(project, "echo 2 >>mod", flags=flags)
        assert ended.code == code, (flags, ended)
        assert (project / "mod").read_text() == "1\n"
    assert caller.sh(project, "echo 2 >>mod", flags=("--apply", "none", "--preset", "read-only")).code == 2
    assert changes(caller, project)["pending"] == []


def test_a_second_directory(caller: Caller, ws: Path) -> None:
    """Changes of a directory that a flag named wait as well, and are named by their absolute path."""
    other = caller.workspace()
    wait(caller, ws, f"echo 1 >a; echo 2 >{other}/a; echo 3 >{other}/b", "--write", str(other))
    ended = caller.cli("diff", "--json", cwd=ws).json
    assert [view["view"] for view in ended["views"]] == [str(ws), str(other)]
    assert caller.cli("apply", f"{other}/a", cwd=ws).code == 0
    assert (tree(ws), tree(other)) == ([], ["a"])
    assert caller.cli("apply", cwd=ws).code == 0
    assert (tree(ws), tree(other)) == (["a"], ["a", "b"])


HOSTILE = os.fsdecode(b"x\x1b[2Jy\x9b31m\xff\xe2\x80\xae\n.py")
MAKE_HOSTILE = """
import os, sys
name = sys.argv[1]
open(name, "w").write("plain\\n\\x1b]0;title\\x07\\x1b[31m \\u202e \\u2066 \\x9b 1m\\n")
os.symlink("\\x1b[2J\\u202e", "link")
os.mkdir("d" + name); open("d" + name + "/" + name, "w").write("1")
"""


def safe(ended: Ended) -> str:
    """What was printed, which must hold nothing that a terminal would act on."""
    text = (ended.out + ended.err).decode()
    bad = {character for character in text if not character.isprintable() and character not in "\n\t"}
    assert not bad, (bad, ended)
    return text


def test_hostile_names_and_texts(caller: Caller, ws: Path) -> None:
    """Names, link targets and lines with escapes, bidirectional marks and stray bytes reach neither terminal
    nor JSON as they are; they can be named as they are shown, and JSON gives them back exactly.
    """
    ended = caller.py(ws, MAKE_HOSTILE, HOSTILE, flags=("--apply", "none"))
    safe(ended)
    for words in (("diff",), ("diff", "--stat"), ("diff", "--json"), ("changes",)):
        safe(caller.cli(*words, cwd=ws))
    text = safe(caller.cli("diff", cwd=ws))
    assert "(not visible in an editor, shown as escapes: " in text
    for name in ("U+001B (2)", "U+202E (1)", "U+009B (1)", "U+0007 (1)", "U+2066 (1)"):
        assert name in text
    found = listed(caller, ws)
    told = HOSTILE.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    assert found == {told: "created", "link": "created", f"d{told}": "created", f"d{told}/{told}": "created"}
    assert safe(caller.cli("apply", printable(HOSTILE), cwd=ws)).count("created") == 1
    assert os.listdir(ws) == [HOSTILE]
    assert safe(caller.cli("discard", "link", cwd=ws))
    assert safe(caller.cli("apply", "--only", "*.py", cwd=ws))
    assert (ws / f"d{HOSTILE}" / HOSTILE).read_text() == "1"
    assert changes(caller, ws) == {"pending": [], "interrupted": [], "held": []}


def test_the_same_text_without_tricks(caller: Caller, ws: Path) -> None:
    """The control: an honest file with a backslash is shown as it stands, and no alarm is raised."""
    caller.py(ws, r"""open("a.py", "w").write('x = "\\x1b[31m"\n')""", flags=("--apply", "none"))
    text = safe(caller.cli("diff", cwd=ws))
    assert '+x = "\\x1b[31m"' in text
    assert "shown as escapes" not in text
    assert caller.cli("discard", cwd=ws).code == 0


def test_many_changes_are_folded(caller: Caller, ws: Path) -> None:
    """A new directory with much in it is one line for a person; what is held back in it is still named."""
    script = (
        "mkdir -p node_modules/p; for n in $(seq 200); do echo $n >node_modules/p/$n; done;"
        " chmod +x node_modules/p/7; echo x >node_modules/p/.envrc; echo y >own"
    )
    wait(caller, ws, script)
    text = caller.cli("diff", cwd=ws).out.decode()
    assert "created    node_modules/  (202 entries in it, 694 B; 1 of them executable)" in text, text
    assert "node_modules/p/.envrc" in text
    assert "+++ b/own" in text
    assert "node_modules/p/100" not in text
    assert len(listed(caller, ws)) == 204
    assert "+100" in caller.cli("diff", "node_modules/p/100", cwd=ws).out.decode()
    assert caller.cli("discard", cwd=ws).code == 0


def test_what_git_keeps_for_itself_is_one_line(caller: Caller, ws: Path) -> None:
    """A commit is the files and one line for the repository; what would be held back in it is still named."""
    commit = "git -c user.name=t -c user.email=t@example.invalid commit -qm"
    wait(caller, ws, f"git init -q . && echo 1 >f && git add f && {commit} one")
    text = caller.cli("diff", cwd=ws).out.decode()
    first, second = (line.split()[:2] for line in text.splitlines()[1:3])
    assert (first, second) == (["created", ".git/"], ["created", "f"]), text
    assert "objects" not in text
    assert caller.cli("apply", cwd=ws).code == 0
    wait(caller, ws, f"echo 2 >>f && {commit} two -a; echo evil >.git/hooks/pre-commit")
    text = caller.cli("diff", cwd=ws).out.decode()
    first, second, third = (line.split()[:2] for line in text.splitlines()[1:4])
    assert first == ["modified", ".git/"], text
    assert second == ["created", ".git/hooks/pre-commit"], text
    assert third == ["modified", "f"], text
    assert "+evil" in text
    assert any("objects/" in path for path in listed(caller, ws))
    assert b".git/objects/" in caller.cli("diff", ".git", cwd=ws).out
    assert caller.cli("discard", cwd=ws).code == 0


def test_by_way_of_the_daemon(caller: Caller, project: Path, daemon: int) -> None:
    """A daemon gives the same: the code, the report, what waits; ask without a terminal is none."""
    reports = []
    for flags in (("--no-daemon",), ()):
        ended = caller.sh(project, WORK, flags=("--apply", "none", "--json", *flags))
        assert ended.code == 3, ended
        applied = ended.json["applied"]
        name = applied.pop("pending")
        reports.append((applied, listed(caller, project, name)))
        assert caller.cli("discard", name, cwd=project).code == 0
    assert reports[0] == reports[1]
    assert reports[0][1] == LIST
    asked = caller.sh(project, WORK, flags=("--apply", "ask"))
    assert asked.code == 3, asked
    assert b"no terminal" in asked.err, asked
    assert b"`casemate apply`" in asked.err, asked
    assert changes(caller, project)["pending"]
    assert caller.cli("discard", cwd=project).code == 0


def test_an_earlier_answer_in_the_pipe_is_none(caller: Caller, project: Path) -> None:
    """``yes |`` answers nothing: what comes through a pipe is the command's."""
    ended = caller.sh(project, "echo 2 >>mod", flags=("--apply", "ask"), stdin=b"y\n" * 100)
    assert (ended.code, (project / "mod").read_text()) == (0, "1\n"), ended
    assert caller.cli("discard", cwd=project).code == 0


def test_a_run_that_was_killed_is_told_from_one_that_waits(caller: Caller, project: Path) -> None:
    """kill -9 during a run with --apply none leaves an interrupted command: nobody knows that it was done."""
    words = ("run", "--apply", "none", "--", "sh", "-c", "echo 2 >>mod; echo up; sleep 60")
    process = caller.start(*words, cwd=project)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.kill()
    process.wait()
    caller.end(process)
    until(lambda: not caller.processes(), 2)
    found = changes(caller, project)
    assert (found["pending"], len(found["interrupted"])) == ([], 1)
    assert json.dumps(found).count('"mod"') == 1
    assert caller.cli("apply", cwd=project).code == 0
    assert (project / "mod").read_text() == "1\n2\n"
    caller.groups_cleaned_by(project)


MANY = """
import os, shutil
for n in range(150):
    with open(f"old{n}", "w") as f: f.write("new" * 20000)
    os.makedirs(f"new{n % 10}/d{n}"); open(f"new{n % 10}/d{n}/f", "w").write("made" * 20000)
    os.symlink(f"old{n}", f"link{n}")
shutil.rmtree("gone"); shutil.rmtree("again"); os.mkdir("again"); open("again/f", "w").write("2")
open(".envrc", "w").write("protected"); os.mkdir(".vscode"); open(".vscode/tasks.json", "w").write("t" * 9000)
os.chmod("mode", 0o755)
"""


def furnish(caller: Caller, ws: Path) -> None:
    """A workspace for ``MANY``."""
    for name in ("gone", "again"):
        (ws / name).mkdir()
        os.chown(ws / name, caller.uid, caller.uid)
    for number in range(150):
        caller.file(ws / f"old{number}", "old")
        caller.file(ws / f"gone/f{number}", "old")
    for name in ("again/f", "again/g", "mode"):
        caller.file(ws / name, "1")


def picture(ws: Path) -> dict[str, tuple[int, str, int]]:
    """Names, modes and contents."""
    found = {}
    for path in ws.rglob("*"):
        text = os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else ""
        found[str(path.relative_to(ws))] = (path.lstat().st_mode, text[:10], len(text))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("part", [False, True])
def test_apply_killed_at_any_moment(caller: Caller, ws: Path, part: bool) -> None:
    """kill -9 of ``casemate apply``, over and over at later and later moments: what is there in the end is
    what an undisturbed one makes, in the workspace and among the held-back changes.
    """
    other = caller.workspace()
    results = []
    for place, killing in ((other, False), (ws, True)):
        furnish(caller, place)
        assert caller.py(place, MANY, flags=("--apply", "none", "--quiet")).code == 0
        words = ("apply", "--only", "old*", "--only", "again") if part else ("apply",)
        kills, ended = 0, False
        for step in range(90 if killing else 0):
            process = caller.start(*words, cwd=place)
            end = os.times().elapsed + 0.03 + step * 0.006
            until(lambda end=end, process=process: os.times().elapsed >= end or process.poll() is not None)  # type: ignore[misc]
            ended = process.poll() is not None
            for pid in [*_children(process.pid), process.pid]:
                _kill(pid)
            _, said = process.communicate(timeout=20)
            kills += not ended
            if ended:
                assert process.returncode == 0 or _is_done(said), said
                break
        if not ended:
            last = caller.cli(*words, cwd=place)
            # It may have been killed when all was done, but for saying so.
            assert last.code == 0 or _is_done(last.err), last
        assert kills > 3 or not killing, "the control: some were killed on their way"
        found = changes(caller, place)
        results.append(
            (
                picture(place),
                [sorted(what for what, _ in item["changes"]) for item in found["pending"]],
                [sorted((unit["path"], unit["entries"]) for unit in item["units"]) for item in found["held"]],
            )
        )
        for item in found["pending"]:
            assert caller.cli("discard", item["name"], cwd=place).code == 0
        for item in found["held"]:
            assert caller.cli("discard", item["name"], "--all", cwd=place).code == 0
        caller.groups_cleaned_by(place)
    for undisturbed, killed in zip(*results, strict=True):
        assert undisturbed == killed
    assert results[0][0]["old7"][2] == 60000


def _is_done(said: bytes) -> bool:
    """Whether a run was told that it is done: the one before was killed when it had yet to say so."""
    return any(words in said for words in (b"nothing is kept", b"name the paths", b"nothing has changed"))


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
