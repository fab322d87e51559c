"""Unified diffs: right, bounded, and with nothing in them that a terminal would act on."""

from __future__ import annotations

import random
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from casemate.workspace.textdiff import Budget, compare, is_binary, visible

if TYPE_CHECKING:
    from pathlib import Path


def text(chance: random.Random, lines: int) -> bytes:
    """Few different lines, so that there is much to align; perhaps without an end."""
    found = b"".join(chance.choice([b"a\n", b"b\n", b"c\n", b"dd\n", b"\n"]) for _ in range(lines))
    return found + chance.choice([b"", b"end"])


def patched(old: bytes, diff: list[str]) -> bytes:
    """What a unified diff makes of a text; fails if it does not fit."""
    left, made, at = old.splitlines(keepends=True), list[bytes](), 0
    for number, line in enumerate(diff):
        mark, data = line[0], line[1:].encode()
        ended = number + 1 < len(diff) and diff[number + 1].startswith("\\")
        if mark == "@":
            begin, _, length = line.split()[1].lstrip("-").partition(",")
            start = int(begin) - (length != "0")
            made += left[at:start]
            at = start
        elif mark != "\\":
            data += b"" if ended else b"\n"
            if mark in " -":
                assert left[at] == data
                at += 1
            if mark in " +":
                made.append(data)
    return b"".join(made + left[at:])


@pytest.mark.parametrize("seed", range(60))
def test_a_diff_can_be_applied(seed: int, tmp_path: Path) -> None:
    """What is printed for two plain texts makes one of the other, and is no longer than diff's."""
    chance = random.Random(seed)
    old = text(chance, chance.randint(0, 40))
    new = text(chance, chance.randint(0, 40))
    if chance.random() < 0.6:
        lines = old.splitlines(keepends=True)
        for _ in range(chance.randint(1, 4)):
            lines.insert(chance.randint(0, max(0, len(lines) - 1)), b"new\n")
        new = b"".join(lines)
    for name, data in (("old", old), ("new", new)):
        (tmp_path / name).write_bytes(data)
    found = compare(old, new, Budget())
    if old == new:
        assert not found.lines
        return
    assert patched(old, found.lines) == new
    theirs = subprocess.run(["diff", "-U3", "old", "new"], cwd=tmp_path, capture_output=True, check=False)
    length = sum(line[:1] in (b"+", b"-") for line in theirs.stdout.splitlines()[2:])
    assert found.added + found.removed == length
    assert not found.coarse
    assert not found.left_out


def test_what_is_hidden_is_shown_and_counted() -> None:
    """Escapes, bidirectional marks, invisible letters, odd spaces and stray bytes appear as escapes."""
    old = b"if access:\n"
    new = "if access\u202e:\x1b[2K\u200b\u3164\u00a0\ufeff\x9b\x7f\ttab é 漢\n".encode() + b"\xff\n"
    found = compare(old, new, Budget())
    shown = "\n".join(found.lines)
    assert shown.isprintable() or set(filter(lambda c: not c.isprintable(), shown)) == {"\n", "\t"}
    for escape in (r"\u{202e}", r"\x1b[2K", r"\u{200b}", r"\u{3164}", r"\u{feff}", r"\x7f", r"\xff"):
        assert escape in shown
    assert "tab é 漢" in shown
    assert found.hidden == {
        "U+202E": 1, "U+001B": 1, "U+200B": 1, "U+3164": 1, "U+00A0": 1, "U+FEFF": 1, "U+009B": 1,
        "U+007F": 1, "byte FF": 1,
    }  # fmt: skip


def test_a_text_about_escapes_is_no_alarm() -> None:
    """The control: what merely says so, ordinary emoji and line ends of other systems are not counted."""
    plain = 'x = "\\x1b[2K \\u202e"\r\nwarn ⚠️ ✔️\r\n'.encode()
    found = compare(b"", plain, Budget())
    assert found.hidden == {}
    assert found.lines[1] == '+x = "\\x1b[2K \\u202e"\\x0d'
    assert found.lines[2] == "+warn ⚠️ ✔️\\x0d"
    # Two variation selectors in a row are no emoji but somebody's message.
    assert compare(b"", "⚠\ufe0f\ufe01\n".encode(), Budget()).hidden == {"U+FE01": 1}


def test_an_old_hidden_character_in_the_context_is_counted_too() -> None:
    """What stands beside a change is shown as safely as the change."""
    old = "one\u202e\ntwo\n".encode()
    assert compare(old, old + b"three\n", Budget()).hidden == {"U+202E": 1}


def test_long_lines_are_cut() -> None:
    """A line of megabytes costs no megabytes of output."""
    hidden: dict[str, int] = {}
    shown = visible("x" * 1_000_000, hidden)
    assert len(shown) < 1100
    assert shown.endswith("(the line goes on)")
    assert visible("漢" * 500_000, hidden).startswith("漢" * 1000)
    assert hidden == {}


def test_files_are_bounded_each_and_together() -> None:
    """So many lines of one file, and so many of all; what is left out is counted."""
    budget = Budget(lines=250, lines_each=100)
    new = b"".join(b"%d\n" % number for number in range(1000))
    shown = []
    for _ in range(4):
        found = compare(b"", new, budget)
        assert found.added == 1000
        assert found.left_out + len(found.lines) == 1001
        shown.append(len(found.lines))
    assert shown[:2] == [100, 100]
    assert sum(shown) <= 250


@pytest.mark.parametrize("kind", ["two words", "nothing in common", "one line for ever"])
def test_texts_that_are_slow_to_compare(kind: str) -> None:
    """A file that was made to cost time is shown as replaced; all files together cost no more than one."""
    chance = random.Random(1)
    if kind == "two words":
        old, new = (b"".join(chance.choice([b"x\n", b"y\n"]) for _ in range(40_000)) for _ in range(2))
    elif kind == "nothing in common":
        old, new = (b"".join(b"%d\n" % (sign * n) for n in range(1, 40_000)) for sign in (1, -1))
    else:
        old, new = b"x\n" * 100_000, b"y\n" + b"x\n" * 99_000
    budget = Budget()
    began = time.process_time()
    for _ in range(12):
        found = compare(old, new, budget)
    assert time.process_time() - began < 20
    assert found.added
    assert found.coarse or kind == "one line for ever"


def test_binary() -> None:
    """A NUL byte makes a file no text; bytes that are not UTF-8 alone do not."""
    assert is_binary(b"\x7fELF\0\0")
    assert not is_binary(b"caf\xe9\n")
    assert not is_binary(b"")


@pytest.mark.parametrize("seed", range(40))
def test_a_diff_of_long_texts_can_be_applied(seed: int) -> None:
    """The same for long texts with few changes, at the ends too, which are not taken apart as a whole."""
    chance = random.Random(seed)
    same = seed % 3 == 0  # many equal lines: beginnings and ends that overlap
    lines = [b"same\n" if same else b"line %d\n" % number for number in range(chance.randint(8000, 9000))]
    changed = list(lines)
    for _ in range(chance.randint(1, 3)):
        at = chance.choice([0, len(changed) - 1, chance.randrange(len(changed))])
        changed[at : at + chance.randint(0, 2)] = [b"new\n"] * chance.randint(0, 2)
    old, new = b"".join(lines), b"".join(changed)
    if chance.random() < 0.3:
        new = new.removesuffix(b"\n")
    if chance.random() < 0.3:
        old = old.removesuffix(b"\n")
    found = compare(old, new, Budget())
    assert patched(old, found.lines) == new
    assert len(found.lines) < 60
    assert not found.coarse
