"""Imports point downwards only, rooms do not know their neighbours, and foreign packages are few."""

from __future__ import annotations

import ast
import sys
from typing import TYPE_CHECKING

import pytest

from tests.repo.tree import PACKAGE, module_name, parsed, python_files, short

if TYPE_CHECKING:
    from pathlib import Path

# Room -> layer. A room may import itself and rooms of lower layers, never another room of its own layer.
LAYERS = {
    "errors": 0,
    "settings": 0,
    "audit": 0,
    "sys": 1,
    "policy": 1,
    "permissions": 2,
    "isolation": 2,
    "guest": 2,
    "egress": 2,
    "workspace": 2,
    "advice": 2,
    "sandbox": 3,
    "fleet": 3,
    "server": 4,
    "mcp": 4,
    "integrations": 4,
    "redteam": 4,
    "cli": 5,
    "testing": 6,
}
# Within one layer, and only these: both are single files without a life of their own.
SAME_LAYER = {("settings", "errors"), ("audit", "errors"), ("audit", "settings"), ("fleet", "sandbox")}

# Foreign package -> rooms that may import it. Adding a row is a decision: say in docs/decisions.md why.
FOREIGN = {
    "cryptography": {"egress"},
    "h11": {"egress"},
    "msgspec": {"settings", "policy", "isolation", "workspace", "egress", "sandbox", "cli"},
}


def imports(tree: ast.Module) -> list[tuple[int, str]]:
    """Every module named in an import statement, at any depth of the file, with its line."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "casemate" else [base]
            found += [(node.lineno, name) for name in names]
    return found


def complaints(room: str, tree: ast.Module) -> list[str]:
    """What is wrong with the imports of one file of this room."""
    wrong = []
    for line, name in imports(tree):
        top, *rest = name.split(".")
        if top == "casemate":
            other = rest[0] if rest else ""
            if other in (room, "") or (room, other) in SAME_LAYER or other.startswith("__"):
                continue
            if other not in LAYERS or LAYERS[other] >= LAYERS[room]:
                wrong.append(f"line {line}: {room} imports {name}")
        elif top not in sys.stdlib_module_names and room not in FOREIGN.get(top, set()):
            wrong.append(f"line {line}: {room} imports the foreign package {top}")
    return wrong


def rooms() -> list[tuple[str, Path]]:
    """Every file of the package with the room that it belongs to."""
    return [
        (path.stem if path.parent == PACKAGE else module_name(path).split(".")[1], path)
        for path in python_files("src")
    ]


def test_every_room_has_a_layer() -> None:
    """A new folder or file of the package is placed in a layer before anything is put in it."""
    known = {*LAYERS, "__init__", "__main__"}
    assert {room for room, _ in rooms()} <= known


def test_imports_point_downwards() -> None:
    """No file imports upwards, sideways, or a foreign package that its room may not have."""
    known = [(room, path) for room, path in rooms() if room in LAYERS]
    wrong = {short(path): found for room, path in known if (found := complaints(room, parsed(path)))}
    assert wrong == {}


def test_package_root_loads_nothing() -> None:
    """``import casemate`` runs no import of its own: names are found on first use."""
    for name in ("__init__", "__main__"):
        tree = parsed(PACKAGE / f"{name}.py")
        loaded = [n for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for n in [node]]
        modules = {alias.name for node in loaded for alias in node.names}
        assert modules <= {"os", "sys"}, name


@pytest.mark.parametrize(
    ("room", "source", "fine"),
    [
        ("policy", "from casemate.errors import PolicyError", True),
        ("policy", "import msgspec", True),
        ("isolation", "from casemate.policy.model import Policy", True),
        ("isolation", "def f():\n    from casemate.workspace.apply import apply", False),
        ("sys", "from casemate.policy import model", False),
        ("sys", "import msgspec", False),
        ("errors", "from casemate import sandbox", False),
        ("workspace", "import requests", False),
        ("sandbox", "from casemate.cli import run", False),
    ],
)
def test_the_rule_can_fail(room: str, source: str, fine: bool) -> None:
    """Control: the check tells good imports from bad ones, wherever in the file they stand."""
    assert (complaints(room, ast.parse(source)) == []) is fine
