"""Sequences of runs, each of which looks harmless, after which git on the host would run a command's program.

Every sequence is run as it is, in a view, directly and in sessions, and on the host without Casemate: there
it does run its program.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.security.engines import Nothing, Request
from tests.security.lab import PATH, drop_to
from tests.security.test_direct_built import program

if TYPE_CHECKING:
    from tests.conftest import Runner
    from tests.security.lab import Scene

pytestmark = [pytest.mark.security, pytest.mark.root]

HEAD = "echo 'ref: refs/heads/main' >"
# What git runs for status, and for a commit; {run} is the program.
EVIL = (
    "mkdir -p {0}/hooks; printf '[core]\\n\\trepositoryformatversion = 0\\n\\tfsmonitor = {{run}}\\n'"
    " >{0}/config;"
    " printf '#!/bin/sh\\n{{run}}\\n' >{0}/hooks/pre-commit; chmod +x {0}/hooks/pre-commit"
)


def repository(place: str) -> str:
    """Make what git takes for a repository, and nothing that would run."""
    return f"mkdir -p {place}/objects {place}/refs; {HEAD}{place}/HEAD"


def hook(path: str) -> str:
    """Write the program as a hook."""
    return f"printf '#!/bin/sh\\n{{run}}\\n' >{path}; chmod +x {path}"


# An honest hook of the host's.
OLD = "printf '#!/bin/sh\\n' >tools/hook; chmod +x tools/hook"

#: name -> (what the host does before, one script per run, where git is used on the host afterwards).
SEQUENCES: dict[str, tuple[str, list[str], str]] = {
    "the hosts own": (
        "",
        [f"{repository('evil')}; echo ../.git >evil/commondir; echo ../evil >.git/commondir",
         "rm evil/HEAD", EVIL.format("evil")],
        ".",
    ),
    "a pointer beside": (
        "",
        [f"{repository('evil')}; echo . >evil/commondir; {repository('g')}; echo ../evil >g/commondir;"
         " mkdir s; echo 'gitdir: ../g' >s/.git",
         "rm evil/HEAD", EVIL.format("evil")],
        "s",
    ),
    "the pointer last": (
        "",
        ["mkdir -p evil/objects evil/refs", EVIL.format("evil"),
         f"mkdir s g; {HEAD}g/HEAD; echo ../evil >g/commondir; echo 'gitdir: ../g' >s/.git"],
        "s",
    ),
    "the pieces reversed": (
        "",
        [EVIL.format("evil"), "mkdir g; echo ../evil >g/commondir", "mkdir evil/refs",
         f"mkdir s evil/objects; {HEAD}g/HEAD; echo 'gitdir: ../g' >s/.git"],
        "s",
    ),
    "a path that is bent": (
        "",
        [f"mkdir -p bend p/x; {repository('evil')}; mkdir s g; {HEAD}g/HEAD;"
         " echo ../bend/../evil >g/commondir; echo 'gitdir: ../g' >s/.git",
         f"mkdir -p p/evil/objects p/evil/refs; {EVIL.format('p/evil')}", "rmdir bend; ln -s p/x bend"],
        "s",
    ),
    "a worktrees rest": (
        "git clone -q --bare . b.git; git -C b.git worktree add -q ../wt",
        ["rm b.git/worktrees/wt/HEAD", "echo ../../../evil >b.git/worktrees/wt/commondir",
         f"mkdir -p evil/objects evil/refs; {EVIL.format('evil')}; {HEAD}b.git/worktrees/wt/HEAD"],
        "wt",
    ),
    "a worktree of a worktree": (
        "git clone -q --bare . b.git",
        [f"{repository('b.git/worktrees/p')}; echo ../.. >b.git/worktrees/p/commondir;"
         f" mkdir -p s b.git/worktrees/p/worktrees/n; cd b.git/worktrees/p/worktrees/n; {HEAD}HEAD;"
         " echo ../.. >commondir; cd ../../../../..; echo 'gitdir: ../b.git/worktrees/p/worktrees/n' >s/.git",
         "rm b.git/worktrees/p/HEAD", EVIL.format("b.git/worktrees/p")],
        "s",
    ),
    "another work tree": (
        "git config core.hooksPath tools/hooks",
        [f"mkdir -p s/tools/hooks; {hook('s/tools/hooks/pre-commit')}",
         "git config core.worktree ../s"],
        ".",
    ),
    "another place with the hosts settings": (
        "git config core.hooksPath tools/hooks",
        ["mkdir -p s; echo 'gitdir: ../.git' >s/.git",
         f"mkdir -p s/tools/hooks; {hook('s/tools/hooks/pre-commit')}"],
        "s",
    ),
    "a worktree with the hosts settings": (
        "git config core.hooksPath tools/hooks",
        [f"git worktree add -q s; mkdir -p s/tools/hooks; {hook('s/tools/hooks/pre-commit')}"],
        "s",
    ),
    "hooks that were not there": (
        "git config core.hooksPath tools/hooks",
        [f"mkdir -p tools/hooks; {hook('tools/hooks/pre-commit')}"],
        ".",
    ),
    "a hook that is a link": (
        f"mkdir -p tools .git/hooks; {OLD}; ln -s ../../tools/hook .git/hooks/pre-commit",
        [hook("tools/hook")],
        ".",
    ),
    "hooks that are a link": (
        f"mkdir -p tools; {OLD}; ln -s ../tools .git/hooks",
        [hook("tools/pre-commit")],
        ".",
    ),
    "a way with a link in it": (
        "mkdir -p real/hooks; ln -s real tools; git config core.hooksPath tools/hooks",
        [hook("real/hooks/pre-commit")],
        ".",
    ),
    "a repository around": (
        "rm -rf .git; cd ..; git init -q; git config core.hooksPath ws/tools",
        [f"mkdir -p tools; {hook('tools/pre-commit')}"],
        ".",
    ),
    "a hook of a repository around": (
        f"rm -rf .git; mkdir tools; {OLD}; cd ..; git init -q --template=; mkdir .git/hooks;"
        " ln -s ../../ws/tools/hook .git/hooks/pre-commit",
        [hook("tools/hook")],
        ".",
    ),
    "settings that are hard to read": (
        "git config core.hooksPath tools/hooks; printf '[x]\\n\\ty = a\\tb\\n' >>.git/config",
        [f"mkdir -p tools/hooks; {hook('tools/hooks/pre-commit')}"],
        ".",
    ),
    "a work tree of the hosts": (
        "mkdir s; git config core.worktree ../s; git config core.hooksPath tools",
        [f"mkdir -p s/tools; {hook('s/tools/pre-commit')}"],
        ".",
    ),
    "included settings": (
        "git config include.path more; printf '[core]\\n\\thooksPath = tools\\n' >.git/more",
        [f"mkdir -p tools; {hook('tools/pre-commit')}"],
        ".",
    ),
    "settings of the person": (
        "git config --file ../gitconfig core.hooksPath tools",
        [f"mkdir -p tools sub/repo/tools; {hook('tools/pre-commit')}; {hook('sub/repo/tools/pre-commit')}"],
        "sub/repo",
    ),
    "a work tree of a worktree": (
        "git config core.hooksPath tools; git worktree add -q wt",
        [f"mkdir -p s/tools; {hook('s/tools/pre-commit')}",
         "git config extensions.worktreeConfig true; printf '[core]\\n\\tworktree = ../../../s\\n'"
         " >.git/worktrees/wt/config.worktree"],
        "wt",
    ),
    "a repository that looks up": (
        "git -C sub/repo config core.hooksPath ../../a/hooks",
        [f"echo x >sub/repo/changed; mkdir -p a/hooks; {hook('a/hooks/pre-commit')}"],
        "sub/repo",
    ),
    "a submodule that looks up": (
        "git -c protocol.file.allow=always submodule add -q ./sub/repo m;"
        " git -C m config core.hooksPath ../tools",
        [f"mkdir -p tools; {hook('tools/pre-commit')}"],
        "m",
    ),
    "a git that is a link": (
        "mv .git ../git; ln -s ../git .git; git config core.hooksPath tools",
        [f"mkdir -p tools; {hook('tools/pre-commit')}"],
        ".",
    ),
}  # fmt: skip


def by_person(scene: Scene, script: str, place: str = ".") -> None:
    """The user's own shell on the host."""
    env = {"PATH": PATH, "HOME": str(scene.world.home), "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(
        [*drop_to(scene.world.uid), "sh", "-c", script], cwd=scene.ws / place, env=env,
        stdin=subprocess.DEVNULL, capture_output=True, check=False,
    )  # fmt: skip


def is_run(scene: Scene, place: str) -> bool:
    """Whether git on the host runs the program, in what anybody does there all day."""
    if not (scene.ws / place).is_dir():
        return False
    by_person(scene, "git status; git -c user.name=n -c user.email=e commit --allow-empty -qm x", place)
    return (scene.ws.parent / "mark").exists()


def in_session(casemate: Runner, scene: Scene, scripts: list[str], *, each: bool) -> None:
    """The runs in one session, applied at the end or after ``each``."""
    for number, script in enumerate(scripts, 1):
        casemate("/bin/sh", "-c", script, flags=("--session", "steps"))
        if each or number == len(scripts):
            by_person(scene, f"{scene.world.command} apply --session steps")
    by_person(scene, f"{scene.world.command} session discard steps")


def sequence(casemate: Runner, scene: Scene, way: str, scripts: list[str]) -> None:
    """All runs of a sequence."""
    if way.startswith("session"):
        in_session(casemate, scene, scripts, each=way == "session, applied each time")
        return
    for script in scripts:
        if way == "bare":
            Nothing().run(Request(scene, ["/bin/sh", "-c", script]))
        elif way == "view, then direct":
            first = script is scripts[0]
            casemate("/bin/sh", "-c", script, flags=() if first else ("--direct",))
        else:
            casemate("/bin/sh", "-c", script, flags=("--direct",) if way == "direct" else ())


WAYS = [
    "bare", "view", "direct", pytest.param("session", marks=pytest.mark.slow),
    pytest.param("view, then direct", marks=pytest.mark.slow),
    pytest.param("session, applied each time", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("way", WAYS)
def test_a_sequence_of_runs(casemate: Runner, scene: Scene, name: str, way: str) -> None:
    """No sequence of runs leads to a program that git on the host runs; without Casemate (bare) each does."""
    before, scripts, place = SEQUENCES[name]
    run = program(scene)
    by_person(scene, before)
    if (own := scene.ws.parent / "gitconfig").exists():
        own.rename(scene.world.home / ".gitconfig")
    sequence(casemate, scene, way, [script.replace("{run}", run) for script in scripts])
    ran = is_run(scene, place)
    (scene.world.home / ".gitconfig").unlink(missing_ok=True)
    assert ran is (way == "bare")


@pytest.mark.parametrize("way", WAYS)
def test_the_hosts_repository_stays(casemate: Runner, scene: Scene, way: str) -> None:
    """Whatever lies beside them, HEAD and the settings of the host's repository are not deleted."""
    sequence(casemate, scene, way, ["echo . >.git/commondir", "rm .git/config .git/HEAD"])
    for name in ("HEAD", "config"):
        assert (scene.ws / ".git" / name).exists() is (way != "bare"), name
