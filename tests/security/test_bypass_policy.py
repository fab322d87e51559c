"""Policy: an empty list is nothing, a misspelt key stops the run, a project file grants nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Runner
    from tests.security.lab import Scene

pytestmark = [pytest.mark.security, pytest.mark.root]

REFUSED = (2, 125, 126)
GRANTS = """version = 1
[filesystem]
read = ["{read}"]
write = ["{outside}"]
[network]
mode = "host"
[environment]
pass = ["LAB_SECRET"]
[isolation]
degrade = ["memfd-exec"{words}]
"""


def policy_file(scene: Scene, text: str) -> tuple[str, str]:
    """An operator's policy file, outside the workspace."""
    path = scene.ws.parent / "policy.toml"
    path.write_text(text)
    path.chmod(0o644)
    return ("--policy", str(path))


def not_started(casemate: Runner, scene: Scene, flags: tuple[str, ...], **how: object) -> str:
    """Run with flags that must be refused before anything starts; returns what was said."""
    outcome = casemate("/bin/sh", "-c", "echo started; : >ran.txt", flags=flags, **how)
    assert outcome.code in REFUSED, outcome.brief()
    assert "started" not in outcome.stdout, outcome.brief()
    assert not (scene.ws / "ran.txt").exists()
    assert outcome.stderr.strip(), "a refusal says why"
    assert "Traceback" not in outcome.stderr, outcome.stderr
    return outcome.stderr


def test_empty_lists_mean_nothing(casemate: Runner, scene: Scene) -> None:
    """Empty lists of reads, writes, variables and words grant nothing at all."""
    flags = policy_file(
        scene,
        "version = 1\n[filesystem]\nread = []\nwrite = []\ndeny = []\ncache = []\nprotect = []\n"
        '[network]\nmode = "none"\n[environment]\npass = []\n[isolation]\ndegrade = []\n',
    )
    acts = ("files.read_paths", "files.outside_write", "procs.own_environ", "net.tcp", "kernel.memfd_exec")
    outcome = casemate.acts(*acts, flags=flags, paths=[f"{scene.outside}/target.txt"])
    assert "untouched" not in outcome.records["files.read_paths"]["data"]
    assert not scene.outside_changed()
    assert scene.world.secret not in outcome.records["procs.own_environ"]["data"]
    assert not scene.world.listeners.got("tcp4:" + scene.token, "tcp6:" + scene.token)
    memfd = outcome.records["kernel.memfd_exec"]
    assert not any(memfd[name]["ok"] for name in ("plain", "cloexec", "exec"))
    assert (scene.ws / "alive.txt").read_text() == scene.token, "the workspace itself is still writable"


def test_grants_of_a_project_file_do_not_count(casemate: Runner, scene: Scene) -> None:
    """casemate.toml in the workspace gets no network, path, variable or word; the operator's file does."""
    text = GRANTS.format(read=f"{scene.world.home}/.aws", outside=scene.outside, words="")
    acts = ("files.read_paths", "files.outside_write", "procs.own_environ", "net.tcp", "kernel.memfd_exec")
    paths = [f"{scene.world.home}/.aws/credentials"]
    (scene.ws / "casemate.toml").write_text(text)
    os.chown(scene.ws / "casemate.toml", scene.world.uid, scene.world.uid)
    outcome = casemate.acts(*acts, paths=paths)
    assert not outcome.records["files.read_paths"]["data"], outcome.brief()
    assert not scene.outside_changed()
    assert scene.world.secret not in outcome.records["procs.own_environ"]["data"]
    assert not scene.world.listeners.got("tcp4:" + scene.token, "tcp6:" + scene.token)
    assert not outcome.records["kernel.memfd_exec"]["plain"]["ok"]
    assert "casemate.toml" in outcome.stderr + str(outcome.report), "an ignored grant is said"

    (scene.ws / "casemate.toml").unlink()
    control = casemate.acts(*acts, paths=paths, flags=policy_file(scene, text))
    assert scene.world.secret in control.records["files.read_paths"]["data"], control.brief()
    assert any(name.endswith("target.txt") for name in scene.outside_changed()), control.brief()
    assert scene.world.secret in control.records["procs.own_environ"]["data"]
    assert scene.world.listeners.got("tcp4:" + scene.token, wait=1.0)
    assert control.records["kernel.memfd_exec"]["plain"]["ok"]


def test_restrictions_of_a_project_file_count(casemate: Runner, scene: Scene) -> None:
    """The same file may take away: a denied path is hidden without any trust."""
    (scene.ws / "private.txt").write_text(scene.world.secret)
    (scene.ws / "casemate.toml").write_text('version = 1\n[filesystem]\ndeny = ["private.txt"]\n')
    for name in ("private.txt", "casemate.toml"):
        os.chown(scene.ws / name, scene.world.uid, scene.world.uid)
    paths = [f"{scene.ws}/private.txt"]
    outcome = casemate.acts("files.read_paths", paths=paths)
    assert scene.world.secret not in outcome.records["files.read_paths"]["data"]
    (scene.ws / "casemate.toml").unlink()
    control = casemate.acts("files.read_paths", paths=paths)
    assert scene.world.secret in control.records["files.read_paths"]["data"], control.brief()


@pytest.mark.parametrize("name", ["secret.txt", "fresh/secret.txt"])
def test_denied_names_that_do_not_exist(casemate: Runner, scene: Scene, name: str) -> None:
    """A denied path that does not exist yet is not created on the host by the command."""
    flags = policy_file(scene, f'version = 1\n[filesystem]\ndeny = ["{name}"]\n')
    outcome = casemate.acts("files.names", names=[name, "control.txt"], flags=flags)
    assert set(scene.carries()) - {"alive.txt"} == {"control.txt"}, outcome.brief()


@pytest.mark.parametrize(
    "text",
    [
        "version = 1\n[filesystem]\nalowRead = []\n",
        "version = 1\n[filesystem]\nwirte = []\n",
        'version = 1\n[netwrok]\nmode = "none"\n',
        'version = 1\n[network]\nmode = "nnone"\n',
        "version = 2\n",
        "[filesystem]\nread = []\n",
        'version = 1\n[filesystem]\nwrite = ["/"]\n',
        'version = 1\n[filesystem]\nread = ["/"]\n',
        'version = 1\n[environment]\npass = ["*"]\n',
        'version = 1\n[isolation]\ndegrade = ["everything"]\n',
        'version = 1\n[network]\nmode = "open"\n',
        "version = 1\nversion = 1\n",
        "not toml at all",
        "",
    ],
)
def test_wrong_policies_stop_the_run(casemate: Runner, scene: Scene, text: str) -> None:
    """A misspelt, over-broad, unknown or broken entry is refused before the command starts."""
    not_started(casemate, scene, policy_file(scene, text))


def test_a_wrong_project_file_stops_the_run(casemate: Runner, scene: Scene) -> None:
    """A broken file of the workspace does not make the run less protected: it stops it."""
    path = scene.ws / "casemate.toml"
    path.write_text("version = 1\n[filesystem]\ndenny = ['x']\n")
    os.chown(path, scene.world.uid, scene.world.uid)
    said = not_started(casemate, scene, ())
    assert "denny" in said, said


@pytest.mark.parametrize(
    "flags",
    [
        ("--wirte", "x"), ("--policy", "/nowhere/policy.toml"), ("--preset", "everything"), ("--read", "/"),
        ("--memory", "lots"), ("--pids", "-1"), ("--timeout", "soon"), ("--env", "=x"), ("--write", "/"),
    ],
)  # fmt: skip
def test_wrong_flags_stop_the_run(casemate: Runner, scene: Scene, flags: tuple[str, ...]) -> None:
    """A flag that is unknown or means too much is refused before the command starts."""
    not_started(casemate, scene, flags)


def test_workspaces_that_are_too_much(casemate: Runner, scene: Scene) -> None:
    """/, the home, a directory that holds ~/.ssh and Casemate's own state are no workspaces."""
    world = scene.world
    state = Path("/var/lib/casemate") if world.uid == 0 else world.home / ".local/state/casemate"
    places = [Path("/"), world.home, world.base, world.home / ".ssh", Path("/etc"), Path("/usr")]
    if state.is_dir():
        places.append(state)
    for place in places:
        outcome = casemate("/bin/echo", "started", cwd=place)
        assert outcome.code in REFUSED, f"{place}: {outcome.brief()}"
        assert "started" not in outcome.stdout
        assert "Traceback" not in outcome.stderr, outcome.stderr


def test_the_commands_own_directory_widens_nothing(casemate: Runner, scene: Scene) -> None:
    """Where the command goes once inside, and where the call starts below, gives no more to write."""
    script = f"cd {scene.outside.parent} 2>/dev/null && echo {scene.token} >outside/target.txt; cd ..; pwd"
    outcome = casemate("/bin/sh", "-c", script)
    assert not scene.outside_changed(), outcome.brief()
    (scene.ws.parent / "other").mkdir()
    os.chown(scene.ws.parent / "other", scene.world.uid, scene.world.uid)
    script = f"echo {scene.token} >../ws/README.md; echo {scene.token} >../outside/target.txt"
    casemate("/bin/sh", "-c", script, cwd=scene.ws.parent / "other")
    assert not scene.outside_changed()
    assert scene.token not in (scene.ws / "README.md").read_text()


def test_a_home_variable_does_not_move_the_guard(casemate: Runner, scene: Scene) -> None:
    """HOME set to somewhere else by the caller's environment does not open the real one's neighbours."""
    fake = scene.ws.parent / "fakehome"
    fake.mkdir()
    os.chown(fake, scene.world.uid, scene.world.uid)
    paths = [f"{scene.world.home}/.ssh/id_rsa"]
    outcome = casemate.acts(
        "files.read_ssh", "files.read_paths", paths=paths, how={"env": {"HOME": str(fake)}}
    )
    assert scene.world.secret not in outcome.stdout
