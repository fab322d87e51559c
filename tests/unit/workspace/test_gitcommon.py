"""Common directories of git: a configuration counts by another directory's word, and no HEAD is needed."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.unit.workspace.test_gitrepo import GOOD, HEAD, bare, ends_well, evil, fresh
from tests.unit.workspace.tops import Stage, held

COMMON = ("HEAD", "objects", "refs")


def worktree(stage: Stage, path: str, common: str = "../..\n") -> None:
    """The directory of a linked worktree, as git makes it."""
    stage.put(f"{path}/HEAD", HEAD)
    stage.put(f"{path}/commondir", common)
    stage.put(f"{path}/gitdir", f"{stage.ws}/wt/.git\n")


def host_repository(stage: Stage) -> None:
    """A repository on the host."""
    env = {**os.environ, "HOME": "/nonexistent", "GIT_CONFIG_GLOBAL": "/dev/null"}
    subprocess.run(["git", "init", "-q", str(stage.ws)], check=True, env=env)


def test_a_commondir_of_its_own(any_stage: Stage) -> None:
    """Outside of a repository's ``worktrees`` no commondir passes, wherever it leads."""
    any_stage.start()
    any_stage.put("other/config", evil(any_stage))
    bare(any_stage, "other", "objects", "refs")
    bare(any_stage, "sound.git", *COMMON, config=GOOD)
    leads = {"w": "../other\n", "v": str(any_stage.outside), "u": "../sound.git\n", "t": ".\n"}
    for name, to in leads.items():
        any_stage.put(f"{name}/HEAD", HEAD)
        any_stage.put(f"{name}/commondir", to)
    any_stage.put("s/worktrees/n/HEAD", HEAD)
    any_stage.put("s/worktrees/n/commondir", "../..\n")
    report = any_stage.apply()
    places = [*leads, "s/worktrees/n"]
    assert held(report) == {
        **dict.fromkeys((f"{place}/commondir" for place in places), "git-link"), "other/config": "git-config",
    }  # fmt: skip
    ends_well(any_stage, "w")


def test_the_commondir_of_the_hosts_repository(any_stage: Stage) -> None:
    """The host's own .git gets none, by any way of writing it."""
    host_repository(any_stage)
    for to in (".", "../evil", "../..", str(any_stage.ws / "evil"), str(any_stage.ws / ".git"), ""):
        fresh(any_stage)
        bare(any_stage, "evil", *COMMON, config=GOOD)
        any_stage.put(".git/commondir", f"{to}\n")
        any_stage.put(".git/gitdir", f"{any_stage.ws}/.git\n")
        report = any_stage.apply()
        assert held(report) == dict.fromkeys((".git/commondir", ".git/gitdir"), "git-link"), to


def test_a_common_directory_without_a_head(any_stage: Stage) -> None:
    """It is a repository before any HEAD is there, and still one when its HEAD is gone."""
    any_stage.start()
    bare(any_stage, "evil", *COMMON)
    assert held(any_stage.apply()) == {}
    fresh(any_stage)
    any_stage.whiteout("evil/HEAD")
    assert held(any_stage.apply()) == {"evil/HEAD": "protected"}
    (any_stage.ws / "evil/HEAD").unlink()  # the host's own doing, or an older Casemate's
    fresh(any_stage)
    any_stage.put("evil/config", evil(any_stage))
    any_stage.put("evil/hooks/pre-commit", "#!/bin/sh\n", 0o755)
    assert held(any_stage.apply()) == {
        "evil/config": "git-config", "evil/hooks/pre-commit": "git-hook",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["config", "objects", "refs"])
def test_a_common_directory_in_pieces(any_stage: Stage, name: str) -> None:
    """In whatever order its parts come over three runs, the last one is held, or the configuration is."""
    parts = [name, *(other for other in ("config", "objects", "refs") if other != name)]
    any_stage.start()
    for number, part in enumerate(parts):
        fresh(any_stage)
        if part == "config":
            any_stage.put("x/config", evil(any_stage))
        else:
            (any_stage.upper / "x" / part).mkdir(parents=True)
        last = {"x/config"} if part == "config" else {"x"}
        assert set(held(any_stage.apply())) == (set() if number < 2 else last)
    # The control of it: the parts make git run something once another directory names them.
    (any_stage.ws / "c").mkdir()
    (any_stage.ws / "c/HEAD").write_text(HEAD)
    (any_stage.ws / "c/commondir").write_text("../x\n")
    (any_stage.ws / "w").mkdir()
    (any_stage.ws / "w/.git").write_text("gitdir: ../c\n")
    ends_well(any_stage, "w")
    for part in ("objects", "refs"):
        (any_stage.ws / "x" / part).mkdir(exist_ok=True)
    (any_stage.ws / "x/config").write_text(evil(any_stage).replace("\tworktree = .\n", ""))
    with pytest.raises(AssertionError):
        ends_well(any_stage, "w")


def test_ordinary_directories_of_these_names(any_stage: Stage) -> None:
    """A directory ``config`` is no configuration; objects and refs alone are no repository."""
    any_stage.lower(app__objects__a="1", app__refs__b="1", lib__objects__a="1", lib__hooks__useIt="1")
    any_stage.start()
    any_stage.put("app/config/database.yml", "x: 1\n")
    any_stage.put("app/HEADER", "x")
    any_stage.put("lib/config", "x")
    any_stage.link("app/objects/l", "a")
    assert held(any_stage.apply()) == {}
    fresh(any_stage)
    any_stage.whiteout("app")
    any_stage.whiteout("lib")
    assert held(any_stage.apply()) == {}
    assert not any_stage.exists("app")


def test_a_worktree_goes_as_a_whole(any_stage: Stage) -> None:
    """Its HEAD and commondir may go; the same files of the repository may not, whatever lies beside them."""
    host_repository(any_stage)
    any_stage.start()
    worktree(any_stage, ".git/worktrees/wt")
    any_stage.put(".git/worktrees/wt/refs/bisect/bad", "0" * 40)
    assert held(any_stage.apply()) == {}
    (any_stage.ws / ".git/commondir").write_text(".\n")  # the host's own doing
    fresh(any_stage)
    for name in ("HEAD", "config", "commondir"):
        any_stage.whiteout(f".git/{name}")
    any_stage.whiteout(".git/worktrees/wt")
    assert held(any_stage.apply()) == dict.fromkeys(
        (".git/HEAD", ".git/config", ".git/commondir"), "protected"
    )
    assert not any_stage.exists(".git/worktrees/wt")
    assert any_stage.text(".git/HEAD").startswith("ref: ")


@pytest.mark.parametrize("common", ["../../../evil", "../../.", "..//..", "../..\n\n", ".", "../../x/.."])
def test_what_a_worktrees_commondir_says(any_stage: Stage, common: str) -> None:
    """Nothing but what git writes passes, not even another way to say the same."""
    host_repository(any_stage)
    any_stage.start()
    bare(any_stage, "evil", *COMMON, config=GOOD)
    worktree(any_stage, ".git/worktrees/wt", f"{common}\n")
    assert held(any_stage.apply()) == {".git/worktrees/wt/commondir": "git-link"}


def test_a_repository_called_worktree(any_stage: Stage) -> None:
    """A directory with objects of its own is no worktree: it gets no commondir, and keeps its HEAD."""
    any_stage.start()
    bare(any_stage, "b.git", *COMMON, config=GOOD)
    worktree(any_stage, "b.git/worktrees/n")
    bare(any_stage, "b.git/worktrees/n", "objects", "refs")
    assert held(any_stage.apply()) == dict.fromkeys(
        (f"b.git/worktrees/n/{name}" for name in ("commondir", "gitdir")), "git-link"
    )
    fresh(any_stage)
    any_stage.whiteout("b.git/worktrees/n/HEAD")
    worktree(any_stage, "b.git/worktrees/n/worktrees/m", "../../..\n")
    assert held(any_stage.apply()) == {
        "b.git/worktrees/n/HEAD": "protected", "b.git/worktrees/n/worktrees/m/commondir": "git-link",
    }  # fmt: skip


def test_a_worktree_that_loses_its_head(any_stage: Stage) -> None:
    """What is left of it stays a part of the repository, and no other commondir comes to be there."""
    any_stage.start()
    bare(any_stage, "b.git", *COMMON, config=GOOD)
    worktree(any_stage, "b.git/worktrees/n")
    assert held(any_stage.apply()) == {}
    fresh(any_stage)
    any_stage.whiteout("b.git/worktrees/n/HEAD")
    assert held(any_stage.apply()) == {}
    fresh(any_stage)
    any_stage.put("b.git/worktrees/n/commondir", "../../../evil\n")
    assert held(any_stage.apply()) == {"b.git/worktrees/n/commondir": "git-repository"}
    fresh(any_stage)
    any_stage.put("b.git/worktrees/n/HEAD", HEAD)
    assert held(any_stage.apply()) == {"b.git/worktrees/n": "git-repository"}


def test_a_path_that_a_link_could_bend(any_stage: Stage) -> None:
    """``a/..`` is another place once ``a`` is a link: no file that leads git elsewhere may say it."""
    any_stage.start()
    bare(any_stage, "sound", *COMMON, config=GOOD)
    any_stage.put("one/.git", "gitdir: ../a/../sound\n")
    any_stage.put("two/.git", f"gitdir: {any_stage.ws}/a/../sound\n")
    any_stage.put("three/.git", "gitdir: ../sound\n")
    any_stage.put("sound/objects/info/alternates", "../../a/../x/objects\n")
    assert held(any_stage.apply()) == dict.fromkeys(
        ("one/.git", "two/.git", "sound/objects/info/alternates"), "git-link"
    )
