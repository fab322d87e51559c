"""Repositories that a command builds to run code on the host: held back, and their harmless forms pass."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.unit.workspace.tops import Stage, held

HEAD = "ref: refs/heads/main\n"
EVIL = """[core]
	repositoryformatversion = 0
	bare = false
	worktree = .
	fsmonitor = "touch {pwned}; false"
"""
GOOD = "[core]\n\trepositoryformatversion = 0\n\tbare = false\n"


def ends_well(stage: Stage, directory: str = "") -> None:
    """git in that directory of the workspace runs nothing of the command's."""
    pwned = stage.base / "pwned"
    where = stage.ws / directory
    for argv in (["status"], ["diff"], ["log", "-1"], ["branch"], ["checkout", "-q", "."], ["gc", "-q"]):
        subprocess.run(
            ["git", *argv], cwd=where, capture_output=True, check=False, stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0":
                 "safe.directory", "GIT_CONFIG_VALUE_0": "*", "GIT_CEILING_DIRECTORIES": str(stage.base)},
        )  # fmt: skip
    assert not pwned.exists()


def evil(stage: Stage) -> str:
    """A configuration that runs a command whenever git looks at the work tree."""
    return EVIL.format(pwned=stage.base / "pwned")


def bare(stage: Stage, path: str, *names: str, config: str | None = None) -> None:
    """Parts of a repository in the top."""
    for name in names:
        if name == "HEAD":
            stage.put(f"{path}/HEAD", HEAD)
        else:
            (stage.upper / path / name).mkdir(parents=True)
    if config is not None:
        stage.put(f"{path}/config", config)


def test_the_control_of_ends_well(any_stage: Stage) -> None:
    """The trick itself works: unjudged, the same directory runs its command on ``git status``."""
    path = any_stage.ws / "docs/assets"
    for name in ("objects", "refs"):
        (path / name).mkdir(parents=True)
    (path / "HEAD").write_text(HEAD)
    (path / "config").write_text(evil(any_stage))
    with pytest.raises(AssertionError):
        ends_well(any_stage, "docs/assets")


def test_a_plain_directory_as_a_repository(any_stage: Stage) -> None:
    """A bare repository under any name is judged: unsafe configuration is held, a safe one passes."""
    any_stage.start()
    bare(any_stage, "docs/assets", "HEAD", "objects", "refs", config=evil(any_stage))
    any_stage.put("docs/assets/hooks/post-checkout", "#!/bin/sh\n", 0o755)
    any_stage.put("docs/assets/README", "beside")
    bare(any_stage, "good.git", "HEAD", "objects", "refs", config=GOOD)
    report = any_stage.apply()
    assert held(report) == {
        "docs/assets/config": "git-config", "docs/assets/hooks/post-checkout": "git-hook",
    }  # fmt: skip
    assert any_stage.text("good.git/config") == GOOD
    assert any_stage.text("docs/assets/README") == "beside"
    ends_well(any_stage, "docs/assets")


@pytest.mark.parametrize("last", ["HEAD", "objects", "refs"])
def test_two_halves_in_two_runs(any_stage: Stage, last: str) -> None:
    """Whichever part comes last, what was put there before as an ordinary file is judged then."""
    first = [name for name in ("HEAD", "objects", "refs") if name != last]
    any_stage.start()
    bare(any_stage, "x", *first, config=evil(any_stage))
    bare(any_stage, "y", *first, config=GOOD)
    # With objects and refs it is a common directory already.
    common = last == "HEAD"
    assert held(any_stage.apply()) == ({"x/config": "git-config"} if common else {})
    fresh(any_stage)
    bare(any_stage, "x", last)
    bare(any_stage, "y", last)
    assert held(any_stage.apply()) == ({} if common else {"x": "git-repository"})
    assert any_stage.exists(f"y/{last}")
    ends_well(any_stage, "x")


def fresh(stage: Stage) -> None:
    """A second run: an empty top."""
    subprocess.run(["rm", "-rf", str(stage.upper)], check=True)
    stage.upper.mkdir()
    stage.start()


def test_halves_with_hooks_or_links(any_stage: Stage) -> None:
    """The same for hooks that lay there, and for parts of a repository that are links."""
    any_stage.start()
    any_stage.put("x/hooks/post-checkout", "#!/bin/sh\n", 0o755)
    any_stage.put("tools/post-checkout", "#!/bin/sh\n", 0o755)
    bare(any_stage, "x", "objects")
    assert held(any_stage.apply()) == {}
    fresh(any_stage)
    bare(any_stage, "x", "HEAD", "refs")
    bare(any_stage, "z", "HEAD", "objects", "refs")
    any_stage.link("z/hooks", "../tools")
    any_stage.link("z/config", "../tools/post-checkout")
    any_stage.link("z/beside", "../tools")
    report = any_stage.apply()
    assert held(report) == dict.fromkeys(("x", "z/hooks", "z/config"), "git-repository")
    assert any_stage.exists("z/beside")


def test_git_link_files(any_stage: Stage) -> None:
    """A .git file passes only if it leads to a repository in the workspace that passes."""
    any_stage.start()
    bare(any_stage, "sound", "HEAD", "objects", "refs", config=GOOD)
    for name, to in {"a": "../sound", "b": "../nowhere", "c": str(any_stage.outside), "d": "../../outside",
                     "e": f"{any_stage.ws}/sound", "f": "../sound\nx"}.items():  # fmt: skip
        any_stage.put(f"{name}/.git", f"gitdir: {to}\n")
    any_stage.put("g/.git", "[core]")
    any_stage.link("h/.git", "../sound")
    any_stage.put("i/.GIT", "gitdir: ../sound\n")
    report = any_stage.apply()
    assert held(report) == {**dict.fromkeys([f"{name}/.git" for name in "bcdfg"], "git-link"),
                            "h/.git": "protected", "i/.GIT": "protected"}  # fmt: skip
    assert any_stage.exists("a/.git")
    assert any_stage.exists("e/.git")


def test_dot_git_holds_what_it_does_not_know(any_stage: Stage) -> None:
    """In a .git, data passes; unknown files, other cases of known names, links and nested tricks do not."""
    any_stage.lower(**{".git__HEAD": HEAD, ".git__config": GOOD})
    any_stage.start()
    good = ["description", "index", "packed-refs", "logs/HEAD", "refs/heads/main", "info/exclude", "shallow",
            "objects/ab/cdef", "objects/pack/pack-1.idx", "COMMIT_EDITMSG", "rebase-merge/done"]  # fmt: skip
    bad = ["unknown", "Config", "CONFIG", "hooks/pre-commit", "hooks/evil.sample", "config.lock", "remotes/x",
           "branches/x", "objects/x/.git/config", "refs/.envrc", "logs/.vscode/tasks.json",
           "objects/info/http-alternates", "modules/m/config", "worktrees/w/config.worktree", "gk/config",
           "rebase-merge/unknown", "info/unknown", "hooks/sub/pre-commit"]  # fmt: skip
    for name in good + bad:
        any_stage.put(f".git/{name}", "data\n")
    any_stage.put(".git/objects/info/alternates", "../../other/objects\n")
    any_stage.put(".git/modules/n/objects/info/alternates", f"{any_stage.outside}\n")
    bare(any_stage, ".git/modules/n", "HEAD", "objects/x", "refs")
    bare(any_stage, ".git/refs/r", "HEAD", "objects", "refs", config=evil(any_stage))
    any_stage.link(".git/index2", "index")
    any_stage.link(".git/ORIG_HEAD", "../secret")
    report = any_stage.apply()
    for name in good:
        assert any_stage.exists(f".git/{name}"), name
    for name in [*bad, "refs/r/config", "index2", "ORIG_HEAD", "modules/n/objects/info/alternates"]:
        assert not any_stage.exists(f".git/{name}"), name
    assert any_stage.exists(".git/objects/info/alternates")
    assert report.complete
    ends_well(any_stage)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("HEAD", "ref: refs/heads/topic/x\n", "ref: refs/heads/../../../x\n"),
        ("HEAD", "0" * 40 + "\n", "../../x\n"),
        ("rebase-merge/git-rebase-todo", "pick 12 a\n# exec x\nfixup -C 12\n", "pick 1\nexec touch /x\n"),
        ("rebase-merge/git-rebase-todo", "update-ref refs/heads/x\n", "x touch /x\n"),
        ("rebase-merge/author-script", "GIT_AUTHOR_NAME='A'\\''B'\n", "GIT_AUTHOR_NAME='A';touch /x;'B'\n"),
        ("rebase-merge/strategy", "ort\n", "evil\n"),
        ("rebase-apply/apply-opt", "\n", "--directory=../x\n"),
        ("sequencer/todo", "revert 12 x\n", "exec x\n"),
        ("sequencer/opts", "[options]\n\tsignoff = true\n", "[options]\n\tstrategy = evil\n"),
    ],
)
def test_files_with_a_form(any_stage: Stage, name: str, good: str, bad: str) -> None:
    """Files that git acts on pass in the form git gives them, and not with a command or path in them."""
    any_stage.lower(**{"a__.git__HEAD": HEAD, "b__.git__HEAD": HEAD})
    any_stage.start()
    any_stage.put(f"a/.git/{name}", good)
    any_stage.put(f"b/.git/{name}", bad)
    assert held(any_stage.apply()) == {f"b/.git/{name}": "git-repository"}
    assert any_stage.text(f"a/.git/{name}") == good


def test_exactly_the_judged_bytes_are_written(any_stage: Stage) -> None:
    """Git's own sample hooks pass by content, whatever they are called by case or link count."""
    sample = "/usr/share/git-core/templates/hooks/pre-commit.sample"
    with open(sample, "rb") as file:
        content = file.read()
    any_stage.start()
    bare(any_stage, "r/.git", "HEAD", "objects", "refs", config=GOOD)
    any_stage.put("r/.git/hooks/pre-commit.sample", content, 0o755)
    any_stage.put("r/.git/hooks/pre-push.sample", content, 0o755)
    any_stage.put("r/.git/hooks/pre-commit", content, 0o755)
    report = any_stage.apply()
    assert held(report) == {"r/.git/hooks/pre-push.sample": "git-hook", "r/.git/hooks/pre-commit": "git-hook"}
    assert any_stage.text("r/.git/hooks/pre-commit.sample").encode() == content
    assert report.executables == ()


def test_gitmodules(any_stage: Stage) -> None:
    """A .gitmodules passes by its keys."""
    any_stage.start()
    any_stage.put("a/.gitmodules", '[submodule "x"]\n\tpath = x\n\turl = ./x\n')
    any_stage.put("b/.gitmodules", '[submodule "x"]\n\tpath = x\n\turl = ./x\n\tupdate = !touch /x\n')
    any_stage.put("c/.gitmodules", '[submodule "x"]\n\tpath = ../../x\n\turl = ./x\n')
    any_stage.link("d/.gitmodules", "../a/.gitmodules")
    report = any_stage.apply()
    assert held(report) == {"b/.gitmodules": "git-config", "c/.gitmodules": "git-config",
                            "d/.gitmodules": "protected"}  # fmt: skip


def test_a_nested_repository_of_the_host(any_stage: Stage) -> None:
    """The same for a repository in a subdirectory, and for a worktree whose repository is around the
    workspace.
    """
    config = "[core]\n\thooksPath = tools\n"
    any_stage.lower(
        **{"sub__.git__HEAD": HEAD, "sub__.git__config": config, "sub__tools__x": "1", "tools__x": "1"}
    )
    outer = any_stage.base / "outer.git"
    (outer / "worktrees/w").mkdir(parents=True)
    (outer / "config").write_text("[core]\n\thooksPath = githooks\n")
    (outer / "worktrees/w/commondir").write_text("../..\n")
    (any_stage.ws / ".git").write_text(f"gitdir: {outer}/worktrees/w\n")
    any_stage.lower(githooks__pre_commit="1")
    any_stage.start()
    for path in ("sub/tools/x", "tools/x", "githooks/pre_commit"):
        any_stage.put(path, "2")
    assert held(any_stage.apply()) == {"sub/tools": "protected", "githooks": "protected"}
    assert any_stage.text("tools/x") == "2"


def test_repositories_are_not_deleted(any_stage: Stage) -> None:
    """The deletion of a repository under any name is held as a whole; what lies around it goes."""
    any_stage.lower(
        **{"d__x.git__HEAD": HEAD, "d__x.git__objects__a": "", "d__x.git__refs__b": "", "d__c": "c"}
    )
    any_stage.lower(**{"e__HEAD": HEAD, "e__objects__a": ""})
    any_stage.start()
    any_stage.whiteout("d")
    any_stage.whiteout("e")
    assert held(any_stage.apply()) == {"d/x.git": "protected"}
    assert sorted(os.listdir(any_stage.ws / "d/x.git")) == ["HEAD", "objects", "refs"]
    assert os.listdir(any_stage.ws / "d") == ["x.git"]
    assert not any_stage.exists("e")


@pytest.mark.parametrize("spelling", ["head", "HEAD.", "h\u200cead", "HEAD::$DATA"])
def test_other_spellings_of_the_marks(any_stage: Stage, spelling: str) -> None:
    """What is a repository on a file system that folds names is judged as one."""
    any_stage.start()
    any_stage.put(f"x/{spelling}", HEAD)
    bare(any_stage, "x", "objects", "refs", config=evil(any_stage))
    assert held(any_stage.apply())["x/config"] == "git-config"


@pytest.mark.parametrize("key", ["core.hooksPath", "filter.x.smudge", "include.path"])
def test_configured_paths_of_the_host(any_stage: Stage, key: str) -> None:
    """What the host's configuration names is protected, and only that."""
    section, _, name = key.rpartition(".")
    section, dot, sub = section.partition(".")
    header = f'[{section} "{sub}"]' if dot else f"[{section}]"
    value = "../tools/thing" if key == "include.path" else "tools/thing"
    any_stage.lower(**{".git__HEAD": HEAD, ".git__config": f"{header}\n\t{name} = {value}\n"})
    any_stage.lower(tools__thing="1", tools__other="1")
    any_stage.start()
    any_stage.put("tools/thing", "evil")
    any_stage.put("tools/other", "fine")
    assert held(any_stage.apply()) == {"tools/thing": "protected"}
    assert any_stage.text("tools/other") == "fine"
