"""Directly changed workspaces: what is put together out of sight, or moved while it is judged, is held.

The judge of such a workspace goes by what it sees of it. A command can take away the right to look, and two
commands can change one workspace at the same time.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from tests.security.engines import acts_command
from tests.security.lab import PATH, drop_to, give
from tests.security.test_direct import DIRECT
from tests.security.test_direct_broker import start

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.conftest import Runner
    from tests.security.lab import Scene

pytestmark = [pytest.mark.security, pytest.mark.root]


def program(scene: Scene) -> str:
    """The program that git must not run: it leaves a file."""
    script = scene.ws.parent / "mark.sh"
    script.write_text(f"#!/bin/sh\n: >'{scene.ws.parent}/mark'\nexit 1\n")
    script.chmod(0o755)
    give(scene.ws.parent, scene.world.uid)
    return str(script)


def running(scene: Scene, places: Iterable[Path]) -> list[str]:
    """The directories in which ``git status`` of the host runs that program."""
    env = {"PATH": PATH, "HOME": str(scene.world.home), "GIT_CONFIG_NOSYSTEM": "1"}
    mark = scene.ws.parent / "mark"
    found = []
    for place in places:
        mark.unlink(missing_ok=True)
        if place.is_dir():
            subprocess.run(
                [*drop_to(scene.world.uid), "git", "status"], cwd=place, env=env,
                stdin=subprocess.DEVNULL, capture_output=True, check=False,
            )  # fmt: skip
        if mark.exists():
            found.append(str(place.relative_to(scene.ws)))
    return found


def make_store(scene: Scene) -> None:
    """A common directory of the host, whose settings run the program once another directory names it."""
    store = scene.ws / "built/store"
    for name in ("objects", "refs"):
        (store / name).mkdir(parents=True)
    (store / "config").write_text(
        "[core]\n\trepositoryformatversion = 1\n\tbare = false\n\tworktree = .\n"
        f"\tfsmonitor = {scene.ws.parent}/mark.sh store\n[extensions]\n\tworktreeConfig = true\n"
    )
    give(store.parent, scene.world.uid)


@pytest.mark.slow
def test_no_repository_is_built_out_of_sight(casemate: Runner, scene: Scene) -> None:
    """In whatever order, by whatever calls and under whatever modes its names come: git on the host takes no
    directory for a repository that a command has made, and runs nothing.
    """
    make_store(scene)
    outcome = casemate.acts("built.repositories", run=program(scene), flags=DIRECT, how={"timeout": 120})
    made = outcome.records["built.repositories"]["made"]
    assert len(made) == 128
    ran = running(scene, [scene.ws / "built" / name for name in made])
    assert not ran, f"git ran a program in {ran}; {outcome.brief()}"
    control = scene.world.scene()
    try:
        make_store(control)
        casemate.__class__(control).bare("built.repositories", run=program(control))
        ran = running(control, [control.ws / "built" / name for name in made])
        assert ran == [f"built/{name}" for name in made]
    finally:
        control.close()


@pytest.mark.parametrize("flags", [DIRECT, ()], ids=["direct", "view"])
def test_no_repository_among_the_data_of_another(
    casemate: Runner, scene: Scene, flags: tuple[str, ...]
) -> None:
    """Anything may be written to objects, refs and logs, but no directory of theirs becomes a repository."""
    places = [
        f"{git}/{inner}"
        for git in (".git", "sub/repo/.git")
        for inner in "refs refs/d logs logs/d/e objects objects/d rr-cache/d lfs/objects/d".split()
    ]
    outcome = casemate.acts("built.inside_git", run=program(scene), places=places, flags=flags)
    ran = running(scene, [scene.ws / place for place in places])
    assert not ran, f"git ran a program in {ran}; {outcome.brief()}"
    control = scene.world.scene()
    try:
        casemate.__class__(control).bare("built.inside_git", run=program(control), places=places)
        assert running(control, [control.ws / place for place in places]) == places
    finally:
        control.close()


def test_directories_are_locked_and_opened(casemate: Runner, scene: Scene) -> None:
    """The control of hidden directories: an ordinary one may have any mode, and get its old one back."""
    record = casemate.acts("built.chmod_rounds", flags=DIRECT).records["built.chmod_rounds"]
    assert record["ok"], record
    assert (scene.ws / "locked/out/f").read_text() == "x"
    assert (scene.ws / "locked/in").exists() is False


@pytest.mark.parametrize("flags", [DIRECT, ()], ids=["direct", "view"])
def test_no_link_is_a_part_of_a_protected_path(
    casemate: Runner, scene: Scene, flags: tuple[str, ...]
) -> None:
    """A link ``.cargo`` to an ordinary directory would make its ``config.toml`` one that cargo reads."""
    paths = [
        f"ways/{order}/{number}/{path}"
        for order in ("before", "after", "moved")
        for number, path in enumerate(
            (".cargo/config.toml", ".github/workflows/ci.yml", ".hg/hgrc", "deep/.yarn/plugins/p.cjs")
        )
    ]
    outcome = casemate.acts("built.ways_around", flags=flags)
    assert not [path for path in paths if (scene.ws / path).exists()], outcome.brief()
    assert (scene.ws / "ways/after/0/plain0/config.toml").read_text() == scene.token, "the ordinary arrives"
    control = scene.world.scene()
    try:
        casemate.__class__(control).bare("built.ways_around")
        assert not [path for path in paths if not (control.ws / path).exists()]
    finally:
        control.close()


@pytest.mark.slow
def test_two_commands_race(casemate: Runner, scene: Scene) -> None:
    """Two commands, one of which moves the directory that the other one is making something in."""
    acts = ("built.race_names", "built.race_parents")
    both = [start(scene, *acts_command(scene, [act], seconds=4.0)) for act in acts]
    reports = [process.communicate(timeout=60) for process in both]
    assert all(b'"done": ' in output for output, _ in reports), reports
    assert not (scene.ws / ".github/workflows").exists(), reports
    control = scene.world.scene()
    try:
        (control.ws / "x").mkdir()
        (control.ws / "y").mkdir()
        give(control.ws, control.world.uid)
        script = "mv y x/workflows && mv x .github"
        subprocess.run([*drop_to(control.world.uid), "sh", "-c", script], cwd=control.ws, check=True)
        assert (control.ws / ".github/workflows").exists()
    finally:
        control.close()


@pytest.mark.slow
def test_two_commands_at_random(casemate: Runner, scene: Scene) -> None:
    """Two commands that do anything at all with names and modes: no repository and no protected name."""
    top = scene.ws / "mixed"
    both = [
        start(scene, *acts_command(scene, ["built.mixed"], seconds=6.0, seed=seed)) for seed in (11, 12)
    ]
    met: set[str] = set()
    while any(process.poll() is None for process in both):
        met |= forbidden(top)
    reports = [process.communicate(timeout=60) for process in both]
    assert all(b'"done": ' in output for output, _ in reports), reports
    assert not met | forbidden(top), reports
    casemate.bare("built.mixed", seconds=2.0, seed=11)
    assert forbidden(top), "the control"


def forbidden(top: Path) -> set[str]:
    """Directories that git takes for repositories, and protected names."""
    found: set[str] = set()
    for base, directories, files in os.walk(top):
        names = {*directories, *files}
        if "HEAD" in names and ("commondir" in names or names >= {"objects", "refs"}):
            found.add(base)
        if names & {".git", ".vscode", ".envrc"} or (base.endswith("/.github") and "workflows" in names):
            found.add(base)
    return found


ROOMS = ["run", "m/000/run", "m/199/run"]


def test_a_socket_that_is_moved_while_a_command_starts(casemate: Runner, scene: Scene) -> None:
    """What has to be covered does not get away from a command that is being started: its mover waits."""
    (scene.ws / "run").mkdir()
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        listener.bind(f"{scene.ws}/run/s")
        listener.listen()
        listener.setblocking(False)
        give(scene.ws, scene.world.uid)
        mover = start(scene, *acts_command(scene, ["built.move_rooms"], rooms=ROOMS, seconds=30.0))
        end = time.monotonic() + 20
        while not (scene.ws / "m/199").exists() and time.monotonic() < end:
            time.sleep(0.02)
        for _ in range(12):
            record = casemate.acts("built.hide_and_connect", rooms=ROOMS, flags=DIRECT)
            assert not record.records["built.hide_and_connect"]["connected"]
        (scene.ws / "stop").touch()
        output, _ = mover.communicate(timeout=60)
        assert b'"done": ' in output
        with pytest.raises(BlockingIOError):
            listener.accept()
        control = casemate.bare("built.hide_and_connect", rooms=ROOMS).records["built.hide_and_connect"]
        assert control["connected"] in ROOMS


def test_a_socket_in_a_directory_that_nobody_may_list(casemate: Runner, scene: Scene) -> None:
    """A directory that can be entered and not listed may hold a socket: that is out of reach."""
    (scene.ws / "run").mkdir()
    give(scene.ws, scene.world.uid)
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        listener.bind(f"{scene.ws}/run/s")
        listener.listen()
        os.chmod(scene.ws / "run/s", 0o777)
        os.chown(scene.ws / "run", 1234, 1234)
        os.chmod(scene.ws / "run", 0o711)
        outcome = casemate.acts("built.hide_and_connect", rooms=["run"], flags=DIRECT)
        assert not outcome.records["built.hide_and_connect"]["connected"]
        control = casemate.bare("built.hide_and_connect", rooms=["run"]).records["built.hide_and_connect"]
        assert control["connected"] == "run"


def test_a_workspace_is_moved_by_another_command(scene: Scene) -> None:
    """A command in a directory of another one's workspace, which that one gives a name that counts: nothing
    more is changed in it, until it is back.
    """
    (scene.ws / "inner").mkdir()
    give(scene.ws, scene.world.uid)
    step = "read x; mkdir workflows && echo made || echo no; rmdir workflows"
    script = f"echo up; {step}; {step}; {step}"
    inner = start(scene, "/bin/sh", "-c", script, cwd=scene.ws / "inner")
    assert inner.stdin is not None
    assert inner.stdout is not None

    def answer() -> bytes:
        assert inner.stdin is not None
        assert inner.stdout is not None
        inner.stdin.write(b"\n")
        inner.stdin.flush()
        return inner.stdout.readline()

    def outer(*argv: str) -> None:
        process = start(scene, *argv)
        output = process.communicate(timeout=60)
        assert process.returncode == 0, output

    assert inner.stdout.readline() == b"up\n"
    assert answer() == b"made\n", "the control"
    outer("/bin/mv", "inner", ".github")
    assert answer() == b"no\n"
    assert not (scene.ws / ".github/workflows").exists()
    outer("/bin/mv", ".github", "inner")
    assert answer() == b"made\n"
    _, errors = inner.communicate(timeout=60)
    assert b"refused-move" in errors
