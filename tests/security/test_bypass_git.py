"""git on the host runs nothing that a command has planted; git's ordinary work arrives."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.security.lab import PATH, Scene, drop_to, give

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Runner

pytestmark = [pytest.mark.security, pytest.mark.root]

VECTORS = [
    "config_key",
    "config_case",
    "config_continued",
    "hook",
    "hook_sample_name",
    "hook_link",
    "hooks_directory_link",
    "hooks_path",
    "include_path",
    "include_if",
    "git_file",
    "git_link",
    "git_renamed",
    "git_new",
    "plain_directory",
    "plain_directory_links",
    "plain_directory_files",
    "plain_directory_head_link",
    "plain_directory_common",
    "common_directory",
    "config_worktree",
    "worktree",
    "module",
    "submodule_update",
    "alias_and_pager",
    "mirror_existing",
]


def prepare(scene: Scene) -> Path:
    """A repository per vector, and the program that must not run; returns where it leaves its marks."""
    for name in [*VECTORS, "commit_here"]:
        shutil.copytree(scene.ws / "sub/repo", scene.ws / "g" / name, symlinks=True)
    shutil.copytree(scene.ws / "sub/repo/.git", scene.ws / "g/mirror_existing/mirror")
    (scene.ws / "lib").mkdir()
    marks = scene.ws.parent / "marks"
    marks.mkdir()
    script = scene.ws.parent / "mark.sh"
    script.write_text(f'#!/bin/sh\n: >"{marks}/$1"\nexit 1\n')
    script.chmod(0o755)
    give(scene.ws.parent, scene.world.uid)
    return marks


def use_git(scene: Scene, top: Path) -> None:
    """What a person or a prompt does all day: look at the state in every directory, and commit."""
    env = {"PATH": PATH, "HOME": str(scene.world.home), "GIT_CONFIG_NOSYSTEM": "1"}
    prefix = drop_to(scene.world.uid)
    person = ["-c", "user.name=n", "-c", "user.email=e@example.invalid"]
    for base, directories, _ in os.walk(top):
        directories[:] = [name for name in directories if name not in ("objects", "refs", "hooks", "logs")]
        for words in (["status", "--short"], [*person, "commit", "-q", "--allow-empty", "-m", "x"]):
            if words[-1] == "x" and not os.path.lexists(os.path.join(base, ".git")):
                continue
            subprocess.run([*prefix, "git", *words], cwd=base, env=env, capture_output=True, check=False)


def test_no_vector_runs_a_program(casemate: Runner, scene: Scene) -> None:
    """None of the ways to make git run a program survives the apply step; every one of them works bare."""
    control = scene.world.scene()
    try:
        for place, run in ((control, casemate.__class__(control).bare), (scene, casemate.acts)):
            marks = prepare(place)
            outcome = run("git.vectors", run=f"{place.ws.parent}/mark.sh")
            use_git(place, place.ws / "g")
            ran = {path.name for path in marks.iterdir()}
            if place is control:
                assert ran == set(VECTORS), f"no control for {set(VECTORS) - ran}; {outcome.brief()}"
            else:
                assert not ran, f"git ran a program by way of {sorted(ran)}; {outcome.brief()}"
                assert outcome.applied.get("held"), "what was held back must be listed"
    finally:
        control.close()


def test_gitmodules_by_content(casemate: Runner, scene: Scene) -> None:
    """A .gitmodules that names a program does not arrive; an ordinary one does."""
    prepare(scene)
    casemate.acts("git.vectors", run=f"{scene.ws.parent}/mark.sh")
    assert not (scene.ws / "g/submodule_update/.gitmodules").exists()
    text = '[submodule "lib"]\\n\\tpath = lib\\n\\turl = https://example.invalid/lib.git\\n'
    outcome = casemate("/bin/sh", "-c", f"printf '{text}' >.gitmodules")
    assert (scene.ws / ".gitmodules").exists(), outcome.brief()


def test_two_harmless_halves_make_no_repository(casemate: Runner, scene: Scene) -> None:
    """Two runs, each of which writes half a repository, do not add up to one."""
    marks = prepare(scene)
    casemate.acts("git.first_half", run=f"{scene.ws.parent}/mark.sh")
    casemate.acts("git.second_half", run=f"{scene.ws.parent}/mark.sh")
    use_git(scene, scene.ws / "halves")
    assert not list(marks.iterdir())
    casemate.bare("git.first_half", "git.second_half", run=f"{scene.ws.parent}/mark.sh")
    use_git(scene, scene.ws / "halves")
    assert [path.name for path in marks.iterdir()] == ["halves"], "the control did not run"


def test_honest_git_work_arrives(casemate: Runner, scene: Scene) -> None:
    """init, commit, branch and worktree of an honest command are on the host afterwards."""
    prepare(scene)
    outcome = casemate.acts("git.honest_work")
    assert outcome.records["git.honest_work"]["ok"], outcome.brief()
    env = {"PATH": PATH, "HOME": str(scene.world.home), "GIT_CONFIG_NOSYSTEM": "1"}
    for place in ("honest", "honest-wt", "g/commit_here"):
        seen = subprocess.run(
            [*drop_to(scene.world.uid), "git", "log", "-1", "--format=%s"],
            cwd=scene.ws / place, env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert seen.stdout.strip() == scene.token, f"{place}: {seen.stderr}; {outcome.brief()}"
