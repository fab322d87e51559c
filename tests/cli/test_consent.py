"""What is held back is applied by consent to it and nothing else: no pattern, and no name where the host's
own work would be lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cli.test_review import changes, listed, project, tree, wait

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.harness import Caller

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("traceless")]
__all__ = ["project"]

EVIL = (
    "git init -q .; echo evil >.git/hooks/pre-commit; chmod +x .git/hooks/pre-commit; echo evil >.envrc;"
    " echo sandbox >mod; echo fine >fine"
)


def test_a_pattern_is_no_consent(caller: Caller, project: Path) -> None:
    """However often a pattern is repeated, nothing that is held back or in conflict is applied by it; it may
    throw such things away. Naming them is consent to what is protected, and --overwrite to conflicts.
    """
    wait(caller, project, EVIL)
    (project / "mod").write_text("host\n")
    first = caller.cli("apply", "--only", "*", cwd=project)
    for path in (b".envrc (protected)", b".git/hooks/pre-commit (git-hook)", b"mod (conflict)"):
        assert b"held back: " + path in first.err, first
    (held,) = changes(caller, project)["held"]
    for words in (("--only", "*"), ("--only", "*", "--overwrite"), (held["name"], "--only", "mod"),
                  ("--only", "**", ".envrc"), ("--only", "*", "--all")):  # fmt: skip
        again = caller.cli("apply", *words, cwd=project)
        assert (again.code, b"a pattern is no consent" in again.err) == (2, True), again
        assert changes(caller, project)["held"] == [held]
    assert (project / "mod").read_text() == "host\n"
    assert (project / "fine").read_text() == "fine\n", "what is ordinary was applied at once"
    assert not {".envrc", ".git/hooks/pre-commit"} & set(tree(project))
    assert set(listed(caller, project, held["name"], "--only", ".env*")) == {".envrc"}
    for words in (("mod",), ("--all",)):
        named = caller.cli("apply", held["name"], *words, cwd=project)
        assert (named.code, b"still held back: mod (conflict)" in named.err) == (1, True), named
        assert b"--overwrite" in named.err, named
    assert (project / "mod").read_text() == "host\n"
    assert {".envrc", ".git/hooks/pre-commit"} <= set(tree(project)), "--all is consent to the rest"
    assert caller.cli("apply", "mod", "--overwrite", cwd=project).code == 0
    assert (project / "mod").read_text() == "sandbox\n"
    wait(caller, project, "echo evil >.mcp.json")
    assert caller.cli("apply", cwd=project).code == 0
    assert caller.cli("discard", "--only", "*", cwd=project).code == 0
    assert changes(caller, project)["held"] == []


def test_names_that_look_alike(caller: Caller, project: Path) -> None:
    """Two names are never shown alike, each is taken as it is shown, and consent to one is none to the
    other.
    """
    for directory, shown in (("a\\x1b", rb"a\\x1b"), ("a\x1b", rb"a\x1b")):
        assert caller.sh(project, f"mkdir -p '{directory}'; echo evil >'{directory}/.envrc'").code == 0
        listed = caller.cli("changes", cwd=project).out
        assert b" " + shown + b"/.envrc (" in listed, listed
        assert caller.cli("discard", "--all", cwd=project).code == 0
    script = (
        r"""d='a\x1b'; e="$(printf 'a\033')"; mkdir -p "$d" "$e";"""
        r""" echo 1 >"$d/.envrc"; echo 2 >"$e/.envrc" """
    )
    ended = caller.sh(project, script)
    assert rb"    a\x1b/.envrc (" in ended.err, ended
    assert rb"    a\\x1b/.envrc (" in ended.err, ended
    done = caller.cli("apply", r"a\\x1b/.envrc", cwd=project)
    assert (done.code, done.out) == (0, b"created a\\\\x1b/.envrc\n"), done
    assert tree(project / "a\\x1b") == [".envrc"]
    assert tree(project / "a\x1b") == []
    assert caller.cli("apply", r"a\x1b/.envrc", cwd=project).code == 0
    assert tree(project / "a\x1b") == [".envrc"]


def test_naming_a_file_in_conflict(caller: Caller, project: Path) -> None:
    """A file that waits and that the host has changed since is not overwritten because it is named;
    --overwrite then takes it. The control: one that the host left alone is applied.
    """
    wait(caller, project, "echo sandbox >mod; echo sandbox >run; echo x >.envrc")
    (project / "mod").write_text("host\n")
    caller.file(project / ".envrc", "host\n")
    done = caller.cli("apply", "mod", "run", ".envrc", cwd=project)
    assert done.err.count(b"(conflict)") == 2, done
    assert (project / "mod").read_text() == (project / ".envrc").read_text() == "host\n"
    assert (project / "run").read_text() == "sandbox\n"
    (held,) = changes(caller, project)["held"]
    assert {unit["path"] for unit in held["units"]} == {"mod", ".envrc"}
    assert caller.cli("apply", held["name"], "mod", ".envrc", "--overwrite", cwd=project).code == 0
    assert (project / "mod").read_text() == "sandbox\n"
    assert (project / ".envrc").read_text() == "x\n"
