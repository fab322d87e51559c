"""``casemate changes``, ``apply``, ``discard``: a wrong word loses nothing, nothing is applied unasked."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.harness import Caller

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("traceless")]


def kept(caller: Caller, ws: Path) -> dict[str, list[dict[str, object]]]:
    """What ``changes --json`` says."""
    ended = caller.cli("changes", "--json", cwd=ws)
    assert ended.code == 0, ended
    found: dict[str, list[dict[str, object]]] = json.loads(ended.out)
    return found


def test_held_changes_of_a_second_directory(caller: Caller, ws: Path) -> None:
    """What was held back of a directory that a flag named can be applied without the flag."""
    other = caller.workspace()
    script = f"mkdir {other}/.vscode && echo x >{other}/.vscode/tasks.json"
    done = caller.sh(ws, script, flags=("--write", str(other)))
    assert done.code == 0, done
    (entry,) = kept(caller, ws)["held"]
    assert entry["view"] == str(other)
    applied = caller.cli("apply", str(entry["name"]), ".vscode", cwd=ws)
    assert applied.code == 0, applied
    assert (other / ".vscode/tasks.json").read_text() == "x\n"
    assert kept(caller, ws)["held"] == []


def test_from_another_directory(caller: Caller, ws: Path) -> None:
    """-C names the workspace; -- ends the switches; an unknown switch or directory changes nothing."""
    away = caller.workspace()
    assert caller.sh(ws, "echo x >.envrc; echo y >.mcp.json").code == 0
    name = str(kept(caller, ws)["held"][0]["name"])
    assert kept(caller, away)["held"] == []
    assert caller.cli("apply", "-C", str(ws / "nosuch"), name, "--all", cwd=away).code == 2
    assert caller.cli("apply", "-C", str(ws), name, "--al", cwd=away).code == 2
    assert caller.cli("apply", "-C", str(ws), name, "--", "--all", cwd=away).code == 125
    assert sorted(os.listdir(ws)) == []
    applied = caller.cli("apply", "-C", str(ws), name, "--", ".envrc", cwd=away)
    assert (applied.code, sorted(os.listdir(ws)), os.listdir(away)) == (0, [".envrc"], []), applied
    listed = caller.cli("changes", "--json", "-C", str(ws), cwd=away)
    assert b".mcp.json" in listed.out, listed
    assert b".envrc" not in listed.out, listed


def test_words_that_name_nothing(caller: Caller, ws: Path) -> None:
    """An unknown name or path, or both paths and --all, changes nothing and says so."""
    assert caller.sh(ws, "echo x >.envrc; echo y >.mcp.json").code == 0
    (entry,) = kept(caller, ws)["held"]
    name = str(entry["name"])
    for words, code in (
        (("apply", "nope", "x"), 1), (("apply", name), 2), (("apply", name, ".envrc", "--all"), 2),
        (("discard", name), 2), (("apply", name, "nosuch"), 125), (("discard", name, "nosuch"), 125),
    ):  # fmt: skip
        ended = caller.cli(*words, cwd=ws)
        assert ended.code == code, (words, ended)
        assert ended.err, words
    assert sorted(os.listdir(ws)) == []
    assert len(kept(caller, ws)["held"]) == 1
    one = caller.cli("apply", name, ".envrc", cwd=ws)
    assert (one.code, sorted(os.listdir(ws))) == (0, [".envrc"]), one
    rest = caller.cli("discard", name, "--all", cwd=ws)
    assert (rest.code, kept(caller, ws)["held"]) == (0, []), rest


def test_special_files_are_not_said_to_be_kept(caller: Caller, ws: Path) -> None:
    """A FIFO is held back and gone: nobody is told that it is kept."""
    ended = caller.sh(ws, "mkfifo pipe")
    assert b"pipe (special)" in ended.err, ended
    assert b"kept:" not in ended.err, ended
    assert kept(caller, ws) == {"pending": [], "interrupted": [], "held": []}
