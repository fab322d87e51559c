"""Files and functions stay short, each test says what it promises, and no note to oneself is left."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from tests.repo.tree import ROOT, listed, parsed, python_files, short

if TYPE_CHECKING:
    from pathlib import Path

MAX_FILE, MAX_FUNCTION = 500, 60

# What is longer, with its length now. It may only shrink: a smaller number must be written here, too.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}

TOPS = ("src", "tests", "bench")


def functions(path: Path) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of a file with its name, classes included: ``file::Class.method``."""
    found = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append((prefix + child.name, child))
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(parsed(path), f"{short(path)}::")
    return found


def test_files_are_short() -> None:
    """No Python file is over 500 lines, but for the listed ones, whose length is exact."""
    lengths = {short(p): len(p.read_text().splitlines()) for p in python_files(*TOPS)}
    assert {name: n for name, n in lengths.items() if n > MAX_FILE} == LONG_FILES


def test_functions_are_short() -> None:
    """No function is over 60 lines, but for the listed ones, whose length is exact."""
    lengths = {
        name: (node.end_lineno or 0) - node.lineno + 1
        for path in python_files(*TOPS)
        for name, node in functions(path)
    }
    assert {name: n for name, n in lengths.items() if n > MAX_FUNCTION} == LONG_FUNCTIONS


def test_each_test_says_its_promise() -> None:
    """Every test function has a docstring."""
    silent = [
        name
        for path in python_files("tests")
        if path.name.startswith("test_")
        for name, node in functions(path)
        if node.name.startswith("test_") and not ast.get_docstring(node)
    ]
    assert silent == []


# Put together from halves, so that this file does not accuse itself.
FORBIDDEN = {
    "note to oneself": r"(#|//|<!--).*\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b",
    "number of a work item": r"(?i)\bissue" + r" #?\d",
    "how the text came about": r"(?i)\b(this|that|my|an? (earlier|later|previous|other)) ses" + r"sion\b",
    "registry host": r"(?i)\b(py"
    + r"pi\.org|pythonhos"
    + r"ted\.org|npm"
    + r"js\.(org|com)|deb\.deb"
    + r"ian)",
    "path of one machine": r"/(wo" + r"rk|ro" + r"ot)/(main|lab|shared|\.pyenv)\b",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_forbidden_words(what: str) -> None:
    """No file holds notes to oneself, numbers of work items, registry hosts or paths of one machine."""
    pattern = re.compile(FORBIDDEN[what])
    found = []
    for path in listed():
        if path.name == "LICENSE" or path.suffix in (".png", ".gz", ".whl"):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{short(path)}:{number}: {line.strip()[:100]}")
    assert found == []


def sleeps(tree: ast.AST, in_loop: bool = False) -> list[int]:
    """Lines of sleeps that stand outside any loop: waiting for a time, not for a condition."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found += sleeps(node)
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "sleep", "asyncio.sleep"):
            found += [] if in_loop or ast.unparse(node.args[0]) == "0" else [node.lineno]
        found += sleeps(node, in_loop or isinstance(node, ast.While | ast.For | ast.AsyncFor))
    return found


def test_tests_do_not_sleep() -> None:
    """A test waits for a condition, polling if it must, and never for a time.

    Programs that attack from inside may dawdle: what they do is not how a test waits.
    """
    files = [path for path in python_files("tests") if "probes" not in path.parts]
    found = [f"{short(path)}:{line}" for path in files for line in sleeps(parsed(path))]
    assert found == []


def test_sleeps_are_found() -> None:
    """Control: a bare sleep is seen, one that polls in a loop is fine."""
    assert sleeps(ast.parse("def f():\n    time.sleep(1)")) == [2]
    assert sleeps(ast.parse("while not done():\n    time.sleep(0.01)")) == []


def test_scripts_can_be_executed() -> None:
    """Whatever a person or CI starts has its mode bit and a first line that names its interpreter."""
    for name in ("bin/casemate", "scripts/setup", "scripts/check", "scripts/test", ".ci/run"):
        path = ROOT / name
        assert path.stat().st_mode & 0o111, name
        assert path.read_text().startswith("#!"), name
