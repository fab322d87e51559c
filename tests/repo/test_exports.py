"""``__all__`` tells the truth, and the package's public names are really there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.tree import PACKAGE, parsed, python_files, short


def exported(tree: ast.Module) -> set[str] | None:
    """The names in ``__all__``, or None."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(ast.unparse(t) == "__all__" for t in node.targets):
            return set(ast.literal_eval(node.value))
    return None


def defined(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Public functions and classes of the file; then every name that it binds at its top."""
    own, bound = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node in tree.body:
            bound.add(node.name)
            if not node.name.startswith("_"):
                own.add(node.name)
    for node in tree.body:
        for child in ast.walk(node) if isinstance(node, ast.Assign | ast.AnnAssign | ast.If) else [node]:
            if isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                bound |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
            elif isinstance(child, ast.Import | ast.ImportFrom):
                bound |= {(alias.asname or alias.name).split(".")[0] for alias in child.names}
    return own, bound


def complaints(tree: ast.Module) -> list[str]:
    """Names exported but not there, and functions or classes there but not exported."""
    names = exported(tree)
    if names is None:
        return []
    own, bound = defined(tree)
    missing = [f"not defined: {name}" for name in sorted(names - bound)]
    return missing + [f"not in __all__: {name}" for name in sorted(own - names)]


def test_exports_are_real() -> None:
    """``__all__`` holds all public functions and classes of its module, and nothing that is not there."""
    wrong = {short(p): found for p in python_files("src") if (found := complaints(parsed(p)))}
    assert wrong == {}


def test_modules_say_what_is_public() -> None:
    """Every module with public functions or classes has an ``__all__``."""
    silent = [
        short(path)
        for path in python_files("src")
        if defined(parsed(path))[0] and exported(parsed(path)) is None and path.name != "__init__.py"
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("source", "fine"),
    [
        ("__all__ = ['f', 'X']\nX = 1\ndef f(): ...\ndef _g(): ...", True),
        ("__all__ = ['f']", False),
        ("__all__ = []\ndef f(): ...", False),
    ],
)
def test_the_rule_can_fail(source: str, fine: bool) -> None:
    """Control: the comparison tells a true list from a false one."""
    assert (complaints(ast.parse(source)) == []) is fine


def test_public_names_load() -> None:
    """Each name in ``casemate.__all__`` loads and is listed; an unknown one is an AttributeError."""
    program = (
        "import casemate\n"
        "assert set(casemate.__all__) <= set(dir(casemate))\n"
        "for name in casemate.__all__: getattr(casemate, name)\n"
        "try: casemate.nothing\n"
        "except AttributeError as error: print(error)\n"
    )
    assert "nothing" in fresh(program)


def test_import_casemate_loads_nothing_else() -> None:
    """``import casemate`` adds no module but its own: it costs no more than reading one small file."""
    program = "import sys; before = set(sys.modules); import casemate; print(*(set(sys.modules) - before))"
    assert fresh(program).split() == ["casemate"]


def test_type_checkers_see_the_same_names() -> None:
    """The lazy table and the imports for type checkers name the same things."""
    tree = parsed(PACKAGE / "__init__.py")
    seen = {
        alias.name
        for node in tree.body
        if isinstance(node, ast.If)
        for inner in node.body
        if isinstance(inner, ast.ImportFrom)
        for alias in inner.names
    }
    names = exported(tree)
    assert names is not None
    assert seen == names - {"__version__"}


def fresh(program: str) -> str:
    """What a program prints, run by an isolated interpreter that finds the package under test."""
    import casemate

    where = str(Path(casemate.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {where!r})\n{program}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
