"""What a person names: patterns, paths, names that cannot be typed; and the journal of what is done."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from casemate.workspace.journal import Journal
from casemate.workspace.names import printable
from casemate.workspace.select import Choice, Selection

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("*.py", ("a.py", "d/e/a.py", "x.py/inner"), ("a.pyc", "py", "d/a.py.txt")),
        ("src", ("src", "src/a", "lib/src/a"), ("srcs", "my-src")),
        ("src/", ("src", "src/a"), ("source",)),
        ("/src", ("src", "src/a"), ("lib/src", "lib/src/a")),
        ("src/*.py", ("src/a.py",), ("a.py", "src/d/a.py", "lib/src/a.py")),
        ("src/**/t?.py", ("src/t1.py", "src/a/b/t2.py"), ("t1.py", "src/a/t12.py")),
        ("**/b/*", ("b/x", "a/b/x", "a/b/x/y"), ("b", "a/b", "ab/x")),
        ("a/**/b/**/c", ("a/b/c", "a/x/b/y/c", "a/b/b/c"), ("a/c", "b/c")),
        ("./a", ("a", "a/b"), ("b/a",)),
        ("[id].tsx", ("[id].tsx", "app/[id].tsx"), ("i.tsx", "d.tsx")),
        ("**", ("a", "a/b"), ()),
        ("", ("a", "a/b"), ()),
    ],
)
def test_patterns(pattern: str, inside: tuple[str, ...], outside: tuple[str, ...]) -> None:
    """A pattern without a slash counts at any depth, one with a slash from the top; directories are whole."""
    assert [path for path in inside if not Selection([pattern]).matches(path)] == []
    assert [path for path in outside if Selection([pattern]).matches(path)] == []


def test_paths_are_exact() -> None:
    """A path means itself and what is in it; stars in it are stars."""
    only = Selection(paths=["d/e", "*", "./x/"])
    assert only.matches("d/e")
    assert only.matches("d/e/f")
    assert only.matches("*")
    assert only.matches("x")
    assert not only.matches("d")
    assert not only.matches("y")
    assert not only.matches("e")


def test_which_words_meant_something() -> None:
    """Words that matched nothing are told; an exact name can be told from a match by other means."""
    only = Selection(["*.py", "*.c"], ["d", "nosuch"])
    for path in ("a.py", "d", "d/x"):
        assert only.matches(path)
    assert only.missed() == ["*.c", "nosuch"]
    assert only.names("d")
    assert not only.names("d/x")
    assert not only.names("a.py")


def test_names_that_cannot_be_typed() -> None:
    """A name may be given as it is shown; two names never look the same, so that is no ambiguity."""
    hostile = os.fsdecode(b"a\x1b[2J\xff\xe2\x80\xae.py")
    assert Selection(paths=[printable(hostile)]).matches(hostile)
    assert Selection(paths=[printable(hostile)]).names(hostile)
    assert Selection(paths=[hostile]).matches(hostile)
    assert Selection([r"a\x1b*"]).matches(hostile)
    assert not Selection(paths=[printable(hostile)]).matches("a.py")
    # A name that is written like the escape of another one is shown with its backslash doubled.
    assert not Selection(paths=[printable(printable(hostile))]).matches(hostile)


def test_a_name_as_it_is_wins() -> None:
    """Where a word is a name as it is, it does not also mean another one that is shown like it."""
    plain, hostile = r"a\x1b", "a\x1b"
    only = Selection(paths=[plain])
    assert (only.matches(plain), only.matches(hostile)) == (True, True)
    only.prefer([plain, hostile])
    assert (only.matches(plain), only.matches(hostile), only.matches(f"{hostile}/x")) == (True, False, False)
    assert (only.names(plain), only.names(hostile)) == (True, False)
    only.prefer([hostile])
    assert (only.names(hostile), only.matches(f"{hostile}/x")) == (True, True)


def test_hostile_patterns_are_quick() -> None:
    """Many stars, and many directories, cost no more than the product of the lengths."""
    began = time.process_time()
    assert not Selection(["/".join(["**", "a"] * 30) + "/b"]).matches("/".join("a" * 200))
    assert not Selection(["*a" * 30 + "b"]).matches("a" * 200)
    assert time.process_time() - began < 2


def test_choice(tmp_path: Path) -> None:
    """All but what is done, or what was chosen of that; the directories above are needed."""
    journal = Journal(str(tmp_path / "done"))
    journal.add(["a", "d/b"])
    choice = Choice(None, journal)
    assert [path for path in ("a", "a/x", "d", "d/b", "c") if choice.wants(path)] == ["a/x", "d", "c"]
    chosen = Choice(Selection(paths=["d"]), journal)
    assert [path for path in ("c", "d", "d/b", "d/e") if chosen.wants(path)] == ["d", "d/e"]
    chosen.need("p/q/r")
    assert chosen.needed == {"p", "p/q"}
    assert not Choice(None, None).partial


def test_the_journal_lasts(tmp_path: Path) -> None:
    """What was noted is there for the next reader, whatever bytes the names are of."""
    path = str(tmp_path / "done")
    names = ["plain", "with\nnewline", os.fsdecode(b"\xff\xfe"), "d/e f"]
    Journal(path).add(names[:2])
    Journal(path).add(names)
    assert Journal(path).done == set(names)
    assert (tmp_path / "done").read_bytes().count(b"\0") == len(names)


def test_a_torn_line_counts_as_not_there(tmp_path: Path) -> None:
    """A writer that was killed leaves the beginning of a path: it is neither read nor joined to the next."""
    file = tmp_path / "done"
    Journal(str(file)).add(["one", "two"])
    file.write_bytes(file.read_bytes() + b"thr")
    assert Journal(str(file)).done == {"one", "two"}
    Journal(str(file)).add(["four"])
    assert Journal(str(file)).done == {"one", "two", "four"}


def test_the_journal_follows_no_link(tmp_path: Path) -> None:
    """A link in its place is refused."""
    os.symlink(tmp_path / "elsewhere", tmp_path / "done")
    with pytest.raises(OSError, match="symbolic links"):
        Journal(str(tmp_path / "done")).add(["x"])
    assert not (tmp_path / "elsewhere").exists()


def test_directories_that_were_left_open(tmp_path: Path) -> None:
    """What a killed step has opened gets its mode back, unless the host has given it another one since."""
    ws = tmp_path / "ws"
    for name, mode in (("opened", 0o755), ("changed", 0o711), ("gone", 0o755), ("twice", 0o755)):
        (ws / name).mkdir(parents=True)
        (ws / name).chmod(mode)
    os.symlink(ws / "opened", ws / "link")
    unlocked = Journal(str(tmp_path / "done")).unlocked
    for name in ("opened", "gone", "twice", "link"):
        unlocked.note(name, 0o555)
    unlocked.note("changed", 0o500)
    unlocked.note("twice", 0o755)
    (ws / "gone").rmdir()
    with open(unlocked.path, "ab") as file:
        file.write(b"555 cha")
    root = os.open(ws, os.O_PATH | os.O_DIRECTORY)
    try:
        unlocked.restore(root)
        assert [(ws / name).stat().st_mode & 0o777 for name in ("opened", "changed", "twice")] == [
            0o555, 0o711, 0o555,
        ]  # fmt: skip
        assert not os.path.exists(unlocked.path)
        unlocked.restore(root)
    finally:
        os.close(root)
