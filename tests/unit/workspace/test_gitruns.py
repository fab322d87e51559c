"""What the host has set up for git to run is protected, wherever it is set; what merely looks so is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.workspace.test_gitrepo import HEAD, bare
from tests.unit.workspace.tops import held

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.workspace.tops import Stage


def host(stage: Stage, config: str) -> None:
    """The repository of the host, with these settings."""
    stage.lower(**{".git__HEAD": HEAD, ".git__config": config})
    for name in ("objects", "refs", "hooks"):
        (stage.ws / ".git" / name).mkdir()


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home of the test's own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    "config",
    [
        "[core]\n\thooksPath = tools\n",
        "[core]\n\thooksPath = tools/\n",
        "[core]\n\thooksPath = ./x/../tools\n",
        '[filter "x"]\n\tclean = sh tools/x %f\n',
        "[include]\n\tpath = ../tools/x\n",
        "[include]\n\tpath = more\n",
        "[odd]\n\tx = a\tb\n[core]\n\thooksPath = tools/x\n",
    ],
)
def test_paths_that_are_not_there_yet(stage: Stage, config: str) -> None:
    """What a setting names as a path cannot come about either."""
    host(stage, config)
    stage.lower(**{".git__more": "[core]\n\thooksPath = tools\n"})
    stage.start()
    stage.put("tools/x", "#!/bin/sh\n", 0o755)
    stage.put("other/x", "fine\n")
    assert set(held(stage.apply())) <= {"tools", "tools/x"}
    assert not stage.exists("tools/x")
    assert stage.exists("other/x")


@pytest.mark.parametrize("place", [".gitconfig", ".config/git/config"])
def test_settings_of_the_person(stage: Stage, home: Path, place: str) -> None:
    """Those count in every repository of the workspace, and only in repositories."""
    (home / place).parent.mkdir(parents=True, exist_ok=True)
    (home / place).write_text("[include]\n\tpath = ~/more\n[credential]\n\thelper = cache --timeout 5\n")
    (home / "more").write_text("[core]\n\thooksPath = tools\n")
    host(stage, "[core]\n\tbare = false\n")
    stage.lower(**{"sub__.git__HEAD": HEAD, "sub__a": "1", "cache__a": "1"})
    stage.start()
    for name in ("tools/x", "sub/tools/x", "deep/tools/x", "cache/a"):
        stage.put(name, "2")
    assert held(stage.apply()) == {"tools": "protected", "sub/tools": "protected"}
    assert stage.text("cache/a") == "2"


def test_words_that_are_no_paths(stage: Stage) -> None:
    """A command's words protect neither the work tree nor everything above it, nor what is elsewhere."""
    host(
        stage,
        '[alias]\n\tx = "!cd . && cd ./ && ls .. / /usr/bin"\n\ty = log origin/main\n'
        '[url "ssh://git@h/"]\n\tinsteadOf = https://h/\n[core]\n\teditor = vim\n',
    )
    stage.lower(**{"sub__.git__HEAD": HEAD, "sub__.git__config": '[alias]\n\tx = "!cd .. && ls ./"\n'})
    stage.start()
    for name in ("a", "sub/a", "log/a", "h/a"):
        stage.put(name, "1")
    assert held(stage.apply()) == {}


def test_a_git_file_that_names_the_hosts_repository(stage: Stage) -> None:
    """In such a directory, and in a new worktree, the host's settings count from the first moment."""
    host(stage, "[core]\n\thooksPath = tools/hooks\n")
    stage.start()
    stage.put("one/.git", "gitdir: ../.git\n")
    stage.put("two/.git", "gitdir: ../.git/worktrees/two\n")
    stage.put(".git/worktrees/two/HEAD", HEAD)
    stage.put(".git/worktrees/two/commondir", "../..\n")
    stage.put("three/.git", "gitdir: ../own\n")
    bare(stage, "own", "HEAD", "objects", "refs")
    for name in ("one", "two", "three"):
        stage.put(f"{name}/tools/hooks/pre-commit", "x", 0o755)
        stage.put(f"{name}/tools/other", "x")
    assert held(stage.apply()) == dict.fromkeys(("one/tools/hooks", "two/tools/hooks"), "protected")
    assert stage.exists("two/tools/other")
    assert stage.exists("three/tools/hooks/pre-commit")


def test_the_work_tree_of_the_hosts_repository(stage: Stage) -> None:
    """It is not changed, taken away or set a second time; a new repository has the one it wants."""
    host(stage, "[core]\n\tbare = false\n")
    stage.lower(m__objects__x="", m__refs__x="", m__HEAD=HEAD, m__config="[core]\n\tworktree = ../s\n")
    stage.start()
    stage.put(".git/config", "[core]\n\tbare = false\n\tworktree = ../s\n")
    stage.put(".git/config.worktree", "[core]\n\tworktree = ../s\n")
    stage.put("m/config", "[core]\n\tbare = false\n")
    bare(stage, "n", "HEAD", "objects", "refs", config="[core]\n\tworktree = ../s\n")
    assert held(stage.apply()) == dict.fromkeys(
        (".git/config", ".git/config.worktree", "m/config"), "git-config"
    )
    assert stage.exists("n/config")
