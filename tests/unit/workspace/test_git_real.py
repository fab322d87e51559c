"""What git itself does in a view passes the apply step, and the repository works on the host afterwards."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.unit.workspace.tops import held

if TYPE_CHECKING:
    from casemate.workspace.report import ApplyReport
    from tests.unit.workspace.tops import Stage

pytestmark = pytest.mark.root  # a real overlay

ENV = {
    "GIT_AUTHOR_NAME": "n", "GIT_AUTHOR_EMAIL": "a@b",
    "GIT_COMMITTER_NAME": "n", "GIT_COMMITTER_EMAIL": "a@b",
    "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "protocol.file.allow", "GIT_CONFIG_VALUE_0": "always",
    "GIT_CONFIG_KEY_1": "init.defaultBranch", "GIT_CONFIG_VALUE_1": "main", "HOME": "/nonexistent",
}  # fmt: skip


class Repository:
    """A workspace that is a repository, and commands in a view of it that sits at the same path."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        # Absolute paths that git writes (worktrees, clones) must name the workspace: mount over it.
        stage.view = stage.ws

    def host(self, *argv: str, cwd: str = "") -> str:
        """git on the host."""
        done = subprocess.run(
            ["git", *argv], cwd=self.stage.ws / cwd, env={**os.environ, **ENV}, capture_output=True,
             text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.rstrip("\n")

    def start(self) -> None:
        """A repository with two commits."""
        self.host("init", "-q")
        for number in ("1", "2"):
            (self.stage.ws / "file").write_text(number)
            self.host("add", "file")
            self.host("commit", "-qm", f"commit {number}")

    def sandbox(self, script: str) -> ApplyReport:
        """A script in the view, then the apply step; nothing may be held back."""
        self.stage.started = 0
        subprocess.run(["rm", "-rf", str(self.stage.upper)], check=True)
        self.stage.upper.mkdir()
        self.stage.sh(script, env=ENV)
        report = self.stage.apply()
        assert report.complete
        assert not report.failed
        return report


@pytest.fixture
def repo(stage: Stage) -> Repository:
    """A repository on the host."""
    made = Repository(stage)
    made.start()
    return made


def test_init_add_commit(stage: Stage) -> None:
    """A repository made in an empty workspace is a repository on the host."""
    repo = Repository(stage)
    report = repo.sandbox("git init -q; echo 1 >a; git add a; git commit -qm one")
    assert held(report) == {}
    assert repo.host("log", "--format=%s") == "one"
    assert repo.host("status", "--porcelain") == ""
    repo.host("fsck", "--strict")


def test_commit_on_the_hosts_repository(repo: Repository) -> None:
    """Commits, branches, tags and stashes land in the repository that the host had."""
    report = repo.sandbox(
        "echo 3 >file; git commit -qam three; git tag -m t v1; git switch -qc topic; echo 4 >file; "
        "git stash -q"
    )
    assert held(report) == {}
    assert repo.host("log", "--format=%s", "-1") == "three"
    assert repo.host("branch", "--show-current") == "topic"
    assert repo.host("stash", "list").startswith("stash@{0}: WIP on topic")
    assert repo.host("status", "--porcelain") == ""
    repo.host("stash", "pop", "-q")
    assert (repo.stage.ws / "file").read_text() == "4\n"


def test_worktree(repo: Repository) -> None:
    """A worktree added in the view works on the host, and can be removed in a later view."""
    script = "git worktree add -q wt -b other; echo w >wt/w; git -C wt add w; git -C wt commit -qm w"
    assert held(repo.sandbox(script)) == {}
    assert repo.host("log", "--format=%s", "-1", cwd="wt") == "w"
    assert repo.host("rev-parse", "--show-toplevel", cwd="wt").endswith("/ws/wt")
    assert held(repo.sandbox("git worktree remove wt")) == {}
    assert not repo.stage.exists("wt")
    assert "wt" not in repo.host("worktree", "list")


def test_submodule(repo: Repository) -> None:
    """A submodule from a repository in the workspace works on the host."""
    report = repo.sandbox(
        "git init -q lib; cd lib; echo l >l; git add l; git commit -qm lib; cd ..;"
        "git submodule --quiet add ./lib sub; git commit -qm sub"
    )
    assert held(report) == {}
    assert (repo.stage.ws / "sub/l").read_text() == "l\n"
    assert repo.host("submodule", "status").startswith(" ")
    assert repo.host("log", "--format=%s", "-1", cwd="sub") == "lib"
    repo.host("submodule", "update", "--init")


def test_clone(repo: Repository) -> None:
    """Local clones, with and without sharing objects, and bare ones."""
    report = repo.sandbox("git clone -q . c1; git clone -q --shared . c2; git clone -q --bare . c3.git")
    assert held(report) == {}
    for clone in ("c1", "c2", "c3.git"):
        assert repo.host("log", "--format=%s", "-1", cwd=clone) == "commit 2"
        repo.host("fsck", cwd=clone)


def test_rebase_merge_and_cleanup(repo: Repository) -> None:
    """Rebases, merges, gc and deleted branches leave nothing behind that was held."""
    report = repo.sandbox(
        "git switch -qc topic; echo t >t; git add t; git commit -qm t; git switch -q main; echo m >m; "
        "git add m;"
        "git commit -qm m; git rebase -q main topic; git switch -q main; "
        "git merge -q --no-ff topic -m merged;"
        "git branch -qd topic; git gc -q"
    )
    assert held(report) == {}
    assert repo.host("log", "--format=%s", "-1") == "merged"
    assert repo.host("branch", "--format=%(refname:short)") == "main"
    repo.host("fsck", "--strict")


def test_rebase_that_stopped(repo: Repository) -> None:
    """A rebase that waits for a person can be continued on the host; one that would run a command is held."""
    report = repo.sandbox(
        "git switch -qc topic HEAD~1; echo t >file; git commit -qam t; echo u >u; git add u; "
        "git commit -qm u;"
        "git rebase -q main || true"
    )
    assert held(report) == {}
    (repo.stage.ws / "file").write_text("both\n")
    repo.host("add", "file")
    repo.host("-c", "core.editor=true", "rebase", "--continue")
    assert repo.host("log", "--format=%s", "-3") == "u\nt\ncommit 2"

    report = repo.sandbox(
        "git switch -qc topic2 HEAD~1; echo z >u; git add u; git commit -qm z;"
        "git rebase -q -x 'touch /tmp/pwn' topic || true"
    )
    assert held(report) == {".git/rebase-merge/git-rebase-todo": "git-repository"}


def test_cherry_pick_and_am_that_stopped(repo: Repository) -> None:
    """The state of a stopped cherry-pick and of a stopped am passes."""
    report = repo.sandbox(
        "git switch -qc topic HEAD~1; echo t >file; git commit -qam t; echo v >v; git add v; "
        "git commit -qm v;"
        "git format-patch -q -2 --stdout >p.mbox; git switch -q main; git cherry-pick topic~1 topic || true"
    )
    assert held(report) == {}
    repo.host("cherry-pick", "--abort")
    assert held(repo.sandbox("git am -q p.mbox || true")) == {}
    repo.host("am", "--abort")


def test_rename_of_a_directory(repo: Repository) -> None:
    """``git mv`` of a directory that the host had is one rename on the host."""
    repo.stage.lower(pkg__a="a", pkg__b__c="c")
    repo.host("add", "-A")
    repo.host("commit", "-qm", "pkg")
    inode = (repo.stage.ws / "pkg/a").stat().st_ino
    report = repo.sandbox("git mv pkg lib; git commit -qm moved")
    assert held(report) == {}
    assert report.counts["renamed"] == 1
    assert (repo.stage.ws / "lib/a").stat().st_ino == inode
    assert not repo.stage.exists("pkg")
    assert repo.host("status", "--porcelain") == ""


def test_a_repository_is_not_deleted(repo: Repository) -> None:
    """Deleting .git, or making a new one in its place, is held back; the other changes are applied."""
    report = repo.sandbox("rm -rf .git; echo n >n")
    assert held(report) == {".git": "protected"}
    assert repo.stage.text("n") == "n\n"
    report = repo.sandbox("rm -rf .git; git init -q; git add -A; git commit -qm gone")
    assert held(report) == {".git": "git-repository"}
    assert repo.host("log", "--format=%s", "-1") == "commit 2"


def test_a_hook_does_not_pass(repo: Repository) -> None:
    """A hook, a hooks path and a filter are held back; the commit beside them passes."""
    report = repo.sandbox(
        "printf '#!/bin/sh\\ntouch /tmp/pwn\\n' >.git/hooks/post-commit; chmod +x .git/hooks/post-commit;"
        "git -c core.hooksPath=/dev/null commit -q --allow-empty -m three; "
        "git config core.fsmonitor 'touch /tmp/x'"
    )
    assert held(report) == {".git/hooks/post-commit": "git-hook", ".git/config": "git-config"}
    assert repo.host("log", "--format=%s", "-1") == "three"
    assert not repo.stage.exists(".git/hooks/post-commit")
    assert "fsmonitor" not in repo.stage.text(".git/config")


def test_unsafe_keys_of_the_host_stay(repo: Repository) -> None:
    """A configuration that has unsafe keys from the host passes while they stay as they are."""
    repo.host("config", "core.hooksPath", "tools/hooks")
    repo.host("config", "alias.x", "!true")
    assert held(repo.sandbox("git config branch.main.remote .")) == {}
    assert repo.host("config", "branch.main.remote") == "."
    assert held(repo.sandbox("git config alias.x '!touch /tmp/pwn'")) == {".git/config": "git-config"}
    assert held(repo.sandbox("git config --unset core.hooksPath")) == {".git/config": "git-config"}
    assert repo.host("config", "alias.x") == "!true"


def test_what_the_hosts_configuration_runs_is_protected(repo: Repository) -> None:
    """Files in the workspace that its own configuration runs are as protected as hooks."""
    repo.stage.lower(tools__hooks__pre_commit="#!/bin/sh\n", scripts__clean="cat\n", scripts__other="1\n")
    repo.host("config", "core.hooksPath", "tools/hooks")
    repo.host("config", "filter.x.clean", "scripts/clean %f")
    report = repo.sandbox(
        "for f in tools/hooks/pre_commit scripts/clean; do echo evil >$f; done; echo fine >scripts/other"
    )
    assert held(report) == {"tools/hooks": "protected", "scripts/clean": "protected"}
    assert repo.stage.text("scripts/other") == "fine\n"
