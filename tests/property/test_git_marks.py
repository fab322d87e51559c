"""What is not marked as a repository is nothing to git: it takes no configuration and no hook from there."""

from __future__ import annotations

import itertools
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from casemate.workspace.marks import is_marked, mark

if TYPE_CHECKING:
    from pathlib import Path

HEAD = "ref: refs/heads/main\n"
DIRECTORIES = ("objects", "refs", "hooks", "remotes", "branches")
FILES = {"HEAD": HEAD, "commondir": "../empty\n", "config": "[core]\n\tbare = true\n[x]\n\ty = z\n",
         "config.worktree": "[x]\n\ty = z\n"}  # fmt: skip
ACTIVE = {"config", "config.worktree", "hooks", "remotes", "branches"}


def is_used(place: Path, *words: str) -> bool:
    """Whether git, in that directory, finds a repository (and the setting)."""
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "HOME": "/nonexistent",
           "GIT_CEILING_DIRECTORIES": str(place.parent)}  # fmt: skip
    argv = ["git", "-c", "safe.directory=*", *(words or ("rev-parse", "--git-dir"))]
    return not subprocess.run(argv, cwd=place, env=env, capture_output=True, check=False).returncode


def build(place: Path, names: tuple[str, ...]) -> None:
    """A directory with these marks and a file of no meaning."""
    place.mkdir()
    (place / "README").touch()
    for name in names:
        if name in DIRECTORIES:
            (place / name).mkdir()
        else:
            (place / name).write_text(FILES[name])


@pytest.mark.parametrize("count", range(10))
def test_what_git_uses_is_marked(tmp_path: Path, count: int) -> None:
    """Every set of names: a directory that is none of our repositories is none of git's, and not the common
    directory of another one unless there is nothing in it that git would run or read as its settings.
    """
    (tmp_path / "empty/objects").mkdir(parents=True)
    (tmp_path / "empty/refs").mkdir()
    pointer = tmp_path / "pointer"
    pointer.mkdir()
    (pointer / "HEAD").write_text(HEAD)
    for number, names in enumerate(itertools.combinations((*DIRECTORIES, *FILES), count)):
        if is_marked({mark(name) for name in names}):
            continue
        place = tmp_path / str(number)
        build(place, names)
        assert not is_used(place), names
        if ACTIVE.intersection(names):
            (pointer / "commondir").write_text(f"../{number}\n")
            assert not is_used(pointer), names


@pytest.mark.parametrize("names", [("HEAD", "objects", "refs"), ("HEAD", "commondir")])
def test_what_is_marked_is_used(tmp_path: Path, names: tuple[str, ...]) -> None:
    """The control: git takes these, and the configuration of a common directory that has no HEAD."""
    build(tmp_path / "empty", ("objects", "refs", "config"))
    build(tmp_path / "place", names)
    assert is_used(tmp_path / "place")
    build(tmp_path / "pointer", ("HEAD", "commondir"))
    assert is_used(tmp_path / "pointer", "config", "x.y")
    assert is_marked({"objects", "refs", "config"})
    assert not is_used(tmp_path / "empty")
