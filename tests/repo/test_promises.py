"""SPECIFICATION.md is a contract: every promise is numbered, and names the tests that hold it."""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

import pytest

from tests.repo.tree import ROOT, parsed

START = re.compile(r"^- \*\*([A-Z]+[0-9]+)\*\* ")
TEST = re.compile(r"`(tests/[\w/.]+\.py)(?:::([\w.:]+))?(\[[^`]*\])?`")
MARK = re.compile(r"\[(not run here|no test yet)(?:: [^\]]+)?\]")


class Promise(NamedTuple):
    """One numbered line, with the tests and the marks in it."""

    number: str
    text: str
    tests: tuple[tuple[str, str], ...]
    marks: tuple[str, ...]


def promises(text: str) -> list[Promise]:
    """The items ``- **X1** ...`` of a document, each up to the next blank line, heading or item."""
    blocks: list[str] = []
    for line in text.splitlines():
        if START.match(line):
            blocks.append(line)
        elif blocks and line.startswith("  "):
            blocks[-1] += "\n" + line
        else:
            blocks.append("")
    found = []
    for block in blocks:
        if start := START.match(block):
            tests = tuple((m[1], m[2] or "") for m in TEST.finditer(block))
            marks = tuple(m[1] for m in MARK.finditer(block))
            found.append(Promise(start[1], block, tests, marks))
    return found


def complaint(promise: Promise) -> str:
    """What is wrong with a promise; nothing if it is kept."""
    if not promise.tests and not promise.marks:
        return "no test and no mark"
    for path, name in promise.tests:
        if not (ROOT / path).is_file():
            return f"{path} does not exist"
        if name and name.split("::")[-1] not in names(parsed(ROOT / path)):
            return f"{path} has no {name}"
    return ""


def names(tree: ast.Module) -> set[str]:
    """Every function and class in a test file."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_promises_name_their_tests() -> None:
    """Each promise names a test that exists, or says that there is none, or that it is not run here."""
    read = promises((ROOT / "SPECIFICATION.md").read_text())
    assert len(read) > 30
    assert {p.number: wrong for p in read if (wrong := complaint(p))} == {}


def test_numbers_are_unique() -> None:
    """No two promises have the same number."""
    numbers = [promise.number for promise in promises((ROOT / "SPECIFICATION.md").read_text())]
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("- **A1** holds. `tests/repo/test_promises.py::test_numbers_are_unique`", True),
        ("- **A1** holds.\n  `tests/repo/test_promises.py::test_numbers_are_unique`", True),
        ("- **A1** holds. [not run here: no such kernel]", True),
        ("- **A1** holds. [no test yet]", True),
        ("- **A1** holds.", False),
        ("- **A1** holds. `tests/repo/test_promises.py::test_gone`", False),
        ("- **A1** holds. `tests/repo/test_gone.py`", False),
    ],
)
def test_the_rule_can_fail(text: str, fine: bool) -> None:
    """Control: a promise without a real test is found."""
    (promise,) = promises(text)
    assert (complaint(promise) == "") is fine
