"""Acts that make git on the host run a program later. Each vector works in a repository of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

Params = dict[str, Any]
Result = dict[str, Any]
VECTORS: dict[str, Callable[[str, str], None]] = {}


def vector(function: Callable[[str, str], None]) -> Callable[[str, str], None]:
    """Register; called with the repository's directory and the command that must not run."""
    VECTORS[function.__name__] = function
    return function


def put(path: str, text: str, mode: int = 0o644) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.chmod(path, mode)


def config(run: str, more: str = "") -> str:
    return f"[core]\n\trepositoryformatversion = 0\n\tbare = false\n\tfsmonitor = {run}\n{more}"


def fake_repository(place: str, run: str, more: str = "") -> None:
    """A directory that git takes for a repository, by its content alone."""
    put(f"{place}/HEAD", "ref: refs/heads/main\n")
    os.makedirs(f"{place}/objects", exist_ok=True)
    os.makedirs(f"{place}/refs", exist_ok=True)
    put(f"{place}/config", config(run, more))


@vector
def config_key(repo: str, run: str) -> None:
    """A key of the configuration that names a program."""
    with open(f"{repo}/.git/config", "a", encoding="utf-8") as stream:
        stream.write(f"[core]\n\tfsmonitor = {run}\n")


@vector
def config_case(repo: str, run: str) -> None:
    """The same key written so that a naive reader misses it."""
    with open(f"{repo}/.git/config", "a", encoding="utf-8") as stream:
        stream.write(f'[CoRe] FsMonitor = "{run}"\n')


@vector
def config_continued(repo: str, run: str) -> None:
    """A value over two lines, and the key behind its section's bracket."""
    first, _, rest = run.partition(" ")
    with open(f"{repo}/.git/config", "a", encoding="utf-8") as stream:
        stream.write(f"[user] name = a ; x\n[core]fsmonitor = {first} \\\n {rest}\n")


@vector
def hook(repo: str, run: str) -> None:
    """A hook."""
    put(f"{repo}/.git/hooks/pre-commit", f"#!/bin/sh\n{run}\n", 0o755)


@vector
def hook_sample_name(repo: str, run: str) -> None:
    """A hook moved into place from a name that looks like a sample."""
    put(f"{repo}/.git/hooks/pre-commit.sample", f"#!/bin/sh\n{run}\n", 0o755)
    os.rename(f"{repo}/.git/hooks/pre-commit.sample", f"{repo}/.git/hooks/pre-commit")


@vector
def hook_link(repo: str, run: str) -> None:
    """A hook that is a link to an ordinary file of the workspace."""
    put(f"{repo}/tool.sh", f"#!/bin/sh\n{run}\n", 0o755)
    os.makedirs(f"{repo}/.git/hooks", exist_ok=True)
    os.symlink("../../tool.sh", f"{repo}/.git/hooks/pre-commit")


@vector
def hooks_directory_link(repo: str, run: str) -> None:
    """The directory of hooks as a link to an ordinary directory."""
    put(f"{repo}/tools/pre-commit", f"#!/bin/sh\n{run}\n", 0o755)
    shutil.rmtree(f"{repo}/.git/hooks", ignore_errors=True)
    os.symlink("../tools", f"{repo}/.git/hooks")


@vector
def hooks_path(repo: str, run: str) -> None:
    """core.hooksPath to an ordinary directory."""
    put(f"{repo}/tools/pre-commit", f"#!/bin/sh\n{run}\n", 0o755)
    with open(f"{repo}/.git/config", "a", encoding="utf-8") as stream:
        stream.write("[core]\n\thooksPath = tools\n")


@vector
def include_path(repo: str, run: str) -> None:
    """A configuration that includes an ordinary file."""
    put(f"{repo}/settings.txt", f"[core]\n\tfsmonitor = {run}\n")
    with open(f"{repo}/.git/config", "a", encoding="utf-8") as stream:
        stream.write("[include]\n\tpath = ../settings.txt\n")


@vector
def include_if(repo: str, run: str) -> None:
    """A conditional include."""
    put(f"{repo}/settings.txt", f"[core]\n\tfsmonitor = {run}\n")
    with open(f"{repo}/.git/config", "a", encoding="utf-8") as stream:
        stream.write('[includeIf "gitdir:**"]\n\tpath = ../settings.txt\n')


@vector
def git_file(repo: str, run: str) -> None:
    """.git as a file that names a directory of the workspace."""
    fake_repository(f"{repo}/innocent", run, "\tworktree = ..\n")
    shutil.rmtree(f"{repo}/.git")
    put(f"{repo}/.git", "gitdir: innocent\n")


@vector
def git_link(repo: str, run: str) -> None:
    """.git as a link to a directory of the workspace."""
    fake_repository(f"{repo}/innocent", run)
    shutil.rmtree(f"{repo}/.git")
    os.symlink("innocent", f"{repo}/.git")


@vector
def git_renamed(repo: str, run: str) -> None:
    """A prepared directory takes the place of .git by one rename."""
    fake_repository(f"{repo}/innocent", run)
    shutil.rmtree(f"{repo}/.git")
    os.rename(f"{repo}/innocent", f"{repo}/.git")


@vector
def git_new(repo: str, run: str) -> None:
    """A repository where none was."""
    fake_repository(f"{repo}/fresh/deep/.git", run)


@vector
def plain_directory(repo: str, run: str) -> None:
    """An ordinary name with a repository's content."""
    fake_repository(f"{repo}/docs/assets", run, "\tworktree = ../..\n")


@vector
def plain_directory_links(repo: str, run: str) -> None:
    """The same with its parts as links: git only asks whether they can be entered."""
    place = f"{repo}/docs/linked"
    os.makedirs(f"{repo}/docs/store")
    put(f"{place}/HEAD", "ref: refs/heads/main\n")
    os.symlink("../store", f"{place}/objects")
    os.symlink("../store", f"{place}/refs")
    put(f"{place}/config", config(run, "\tworktree = ../..\n"))


@vector
def plain_directory_files(repo: str, run: str) -> None:
    """The same with executable files for its parts: git asks for no more than access."""
    place = f"{repo}/docs/files"
    put(f"{place}/HEAD", "ref: refs/heads/main\n")
    put(f"{place}/objects", "x", 0o755)
    put(f"{place}/refs", "x", 0o755)
    put(f"{place}/config", config(run, "\tworktree = ../..\n"))


@vector
def plain_directory_head_link(repo: str, run: str) -> None:
    """The same with HEAD as a dangling link, which git accepts."""
    place = f"{repo}/docs/headlink"
    fake_repository(place, run, "\tworktree = ../..\n")
    os.unlink(f"{place}/HEAD")
    os.symlink("refs/heads/main", f"{place}/HEAD")


@vector
def plain_directory_common(repo: str, run: str) -> None:
    """HEAD and commondir only; all else lies in another ordinary directory."""
    more = "\trepositoryformatversion = 1\n[extensions]\n\tworktreeConfig = true\n"
    put(f"{repo}/docs/common/store/config", config(run, more))
    # With a commondir git takes core.worktree from here only.
    put(f"{repo}/docs/common/config.worktree", "[core]\n\tbare = false\n\tworktree = ../..\n")
    os.makedirs(f"{repo}/docs/common/store/objects")
    os.makedirs(f"{repo}/docs/common/store/refs")
    put(f"{repo}/docs/common/HEAD", "ref: refs/heads/main\n")
    put(f"{repo}/docs/common/commondir", "store\n")


@vector
def common_directory(repo: str, run: str) -> None:
    """A commondir in the repository, so that another directory's configuration counts."""
    fake_repository(f"{repo}/innocent", run)
    put(f"{repo}/.git/commondir", "../innocent\n")


@vector
def config_worktree(repo: str, run: str) -> None:
    """The second configuration file, switched on by an extension."""
    with open(f"{repo}/.git/config", "a", encoding="utf-8") as stream:
        stream.write("[core]\n\trepositoryformatversion = 1\n[extensions]\n\tworktreeConfig = true\n")
    put(f"{repo}/.git/config.worktree", f"[core]\n\tfsmonitor = {run}\n")


@vector
def worktree(repo: str, run: str) -> None:
    """A linked worktree whose commondir leads to another configuration."""
    fake_repository(f"{repo}/innocent", run)
    put(f"{repo}/.git/worktrees/wt/HEAD", "ref: refs/heads/main\n")
    put(f"{repo}/.git/worktrees/wt/commondir", "../../../innocent\n")
    put(f"{repo}/.git/worktrees/wt/gitdir", f"{repo}/wt/.git\n")
    put(f"{repo}/wt/.git", f"gitdir: {repo}/.git/worktrees/wt\n")


@vector
def module(repo: str, run: str) -> None:
    """A submodule's repository below .git/modules."""
    fake_repository(f"{repo}/.git/modules/lib", run, "\tworktree = ../../../lib\n")
    put(f"{repo}/lib/.git", "gitdir: ../.git/modules/lib\n")


@vector
def submodule_update(repo: str, run: str) -> None:
    """A .gitmodules and a configuration that name a program as the way to update."""
    put(f"{repo}/.gitmodules", f'[submodule "lib"]\n\tpath = lib\n\turl = ./lib\n\tupdate = !{run}\n')
    with open(f"{repo}/.git/config", "a", encoding="utf-8") as stream:
        stream.write(f'[submodule "lib"]\n\turl = ./lib\n\tupdate = !{run}\n[core]\n\tfsmonitor = {run}\n')


@vector
def alias_and_pager(repo: str, run: str) -> None:
    """Keys that run a program for other commands: here the editor, at the next commit."""
    with open(f"{repo}/.git/config", "a", encoding="utf-8") as stream:
        stream.write(f"[alias]\n\tst = !{run}\n[core]\n\tpager = {run}\n\tsshCommand = {run}\n")
        stream.write(f'[filter "x"]\n\tclean = {run}\n\tsmudge = {run}\n[diff]\n\texternal = {run}\n')
    put(f"{repo}/.gitattributes", "* filter=x\n")
    # Of the same size, so that git has to read it through the filter.
    put(f"{repo}/tracked.txt", "Tracked\n")


@vector
def mirror_existing(repo: str, run: str) -> None:
    """A bare repository under an ordinary name that the host has already."""
    with open(f"{repo}/mirror/config", "w", encoding="utf-8") as stream:
        stream.write(config(run, "\tworktree = ..\n"))


def vectors(p: Params) -> Result:
    """All of them; says which could be laid at all."""
    done: Result = {}
    for name, function in VECTORS.items():
        repo = f"{p['ws']}/g/{name}"
        try:
            function(repo, f"{p['run']} {name}")
            done[name] = {"ok": True}
        except OSError as error:
            done[name] = {"ok": False, "error": str(error)}
    return {"laid": done}


def first_half(p: Params) -> Result:
    """A repository's content in two runs, each half harmless: HEAD and objects."""
    place = f"{p['ws']}/halves"
    put(f"{place}/HEAD", "ref: refs/heads/main\n")
    put(f"{place}/objects/keep", "x")
    return {"ok": True}


def second_half(p: Params) -> Result:
    """The rest of it: refs and the configuration."""
    place = f"{p['ws']}/halves"
    put(f"{place}/refs/keep", "x")
    put(f"{place}/config", config(f"{p['run']} halves", "\tworktree = ..\n"))
    return {"ok": True}


def honest_work(p: Params) -> Result:
    """What people do: init, add, commit, a branch, a worktree. It must arrive."""
    steps = [
        ["git", "init", "-q", "-b", "main", "honest"],
        ["git", "-C", "honest", "-c", "user.name=n", "-c", "user.email=e@example.invalid", "commit", "-q",
         "--allow-empty", "-m", p["token"]],
        ["git", "-C", "honest", "branch", "topic"],
        ["git", "-C", "honest", "worktree", "add", "-q", "../honest-wt", "topic"],
        ["git", "-C", "g/commit_here", "-c", "user.name=n", "-c", "user.email=e@example.invalid", "commit",
         "-q", "--allow-empty", "-m", p["token"]],
    ]  # fmt: skip
    done = [subprocess.run(step, cwd=p["ws"], capture_output=True, text=True) for step in steps]
    return {"ok": not any(step.returncode for step in done), "errors": [step.stderr for step in done]}
