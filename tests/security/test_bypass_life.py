"""Ends: whatever happens to Casemate or on the host, no process outlives it and nothing runs unprotected."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from casemate.settings import workspace_key
from tests.security import leaks
from tests.security.engines import ENGINE, Request, acts_command
from tests.security.lab import PYTHON, STARTED, drop_to, processes_with

if TYPE_CHECKING:
    from tests.conftest import Runner
    from tests.security.lab import Scene

pytestmark = [pytest.mark.security, pytest.mark.root]
REFUSED = (125, 126)


def alive(scene: Scene) -> list[int]:
    """Processes that belong to a sandbox of the scene."""
    return processes_with(str(scene.ws.parent) + "/")


def gone(scene: Scene, seconds: float) -> list[int]:
    """Wait for the end of all of them; returns who is still there."""
    end = time.monotonic() + seconds
    while (left := alive(scene)) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def wait_until_kept(scene: Scene) -> None:
    """Until a kill of Casemate would lose nothing of the command's work."""
    name = f"views/{workspace_key(os.path.realpath(scene.ws))}/*/note.json"
    state = Path("/var/lib/casemate") if scene.world.uid == 0 else scene.world.home / ".local/state/casemate"
    end = time.monotonic() + 5
    while not list(state.glob(name)) and time.monotonic() < end:
        time.sleep(0.02)
    assert list(state.glob(name)), "the command's work is not kept"


def start(scene: Scene, *argv: str, flags: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """Casemate in the background, its command running (it says so)."""
    request = Request(scene, ["/bin/sh", "-c", "echo started; " + " ".join(argv)], flags)
    process = subprocess.Popen(
        [*drop_to(scene.world.uid), *ENGINE.argv(request)], cwd=scene.ws, env=scene.world.environment(),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    STARTED.add(process.pid)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == b"started\n", line + process.stdout.read()
    return process


def say(scene: Scene, *words: str) -> str:
    """Another verb of the command line, in the workspace."""
    ran = subprocess.run(
        [*drop_to(scene.world.uid), str(scene.world.command), *words], cwd=scene.ws,
        env=scene.world.environment(), capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    assert ran.returncode == 0, ran
    return ran.stdout


_DEAF = "trap '' TERM INT HUP QUIT; "
STUBBORN = _DEAF + "(setsid sh -c 'trap \"\" TERM INT HUP QUIT; sleep 300' &) ; sleep 300 & wait; sleep 300"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_end_of_casemate_ends_the_command(casemate: Runner, scene: Scene, number: signal.Signals) -> None:
    """kill -9 and every other end of Casemate ends the whole tree, daemons that ignore signals included."""
    before = leaks.snapshot(scene.world)
    process = start(scene, "echo work >work.txt; " + STUBBORN)
    wait_until_kept(scene)  # the work of commands that end within a moment is not kept
    assert len(alive(scene)) > 1, "the control: while it runs, its processes are seen from here"
    process.send_signal(number)
    if number != signal.SIGKILL:
        # The command is told first, and may ignore it.
        try:
            process.wait(0.3)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait(10)
    left = gone(scene, 3)
    assert process.stdout is not None
    process.stdout.close()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    again = casemate("/bin/true", timeout=10)
    assert again.code == 0, f"what a kill leaves behind must not stop the next run: {again.brief()}"
    kept = json.loads(say(scene, "changes", "--json"))["interrupted"]
    assert [name for item in kept for name in str(item["changes"]).split("'") if name == "work.txt"], kept
    assert not (scene.ws / "work.txt").exists(), "nothing is applied before somebody says so"
    for item in kept:
        say(scene, "discard", item["name"])
    before = dataclasses.replace(before, first_scene=scene.world.count - 1)
    left_over = leaks.left_behind(before, scene.world)
    assert not left_over, "\n".join(left_over)


def test_timeout_ends_the_whole_tree(casemate: Runner, scene: Scene, no_leaks: None) -> None:
    """After --timeout nothing is left, whatever ignores which signal; the code says so."""
    started = time.monotonic()
    outcome = casemate("/bin/sh", "-c", STUBBORN, flags=("--timeout", "1s"), timeout=20)
    assert outcome.code == 124, outcome.brief()
    assert 0.9 < time.monotonic() - started < 5
    assert not gone(scene, 1)
    assert casemate("/bin/sleep", "0.2", flags=("--timeout", "30s")).code == 0


def test_daemons_end_with_the_command(casemate: Runner, scene: Scene, no_leaks: None) -> None:
    """Detached, double-forked and signal-proof processes end when the command does."""
    outcome = casemate(
        "/bin/sh", "-c", "(setsid sh -c 'trap \"\" TERM; sleep 300' >/dev/null 2>&1 &); exit 7"
    )
    assert outcome.code == 7, outcome.brief()
    assert not gone(scene, 1)


def test_fork_bomb_is_gone(casemate: Runner, scene: Scene, no_leaks: None) -> None:
    """A tree that forks as fast as it can ends with the time limit and leaves nobody."""
    # It stops by itself after a while, so that a broken sandbox does not take the machine down.
    bomb = (
        "import os, time\nend = time.monotonic() + 6\nwhile time.monotonic() < end:\n"
        "    try:\n        os.fork()\n    except OSError:\n        pass\n"
    )
    outcome = casemate(PYTHON, "-I", "-S", "-c", bomb, flags=("--pids", "300", "--timeout", "1s"), timeout=40)
    assert outcome.code in (124, 123), outcome.brief()
    assert not gone(scene, 1)
    assert outcome.seconds < 8, outcome.brief()


HOSTS = {
    "no-namespaces": "unshare,clone,clone3",
    "no-user-or-mount-calls": "mount,umount2,fsopen,open_tree,move_mount,fsmount,mount_setattr,fsconfig",
    "no-pivot": "pivot_root",
    "no-seccomp": "seccomp,prctl",
    "no-landlock": "landlock_create_ruleset",
}


@pytest.mark.parametrize("name", HOSTS)
def test_hardened_hosts(scene: Scene, name: str) -> None:
    """Where the host refuses what a protection needs, nothing runs, and the code says so."""
    code = errno.ENOSYS if name == "no-landlock" else errno.EPERM
    deny = [PYTHON, "-I", "-S", str(scene.ws / ".lab/deny.py"), str(code)]
    command = ENGINE.argv(Request(scene, ["/bin/sh", "-c", "echo started; : >ran.txt"]))
    env = scene.world.environment()

    def run(calls: str) -> subprocess.CompletedProcess[str]:
        argv = [*drop_to(scene.world.uid), *deny, calls, "--", *command]
        return subprocess.run(
            argv, cwd=scene.ws, env=env, capture_output=True, text=True, check=False, timeout=30
        )

    refused = run(HOSTS[name])
    assert "started" not in refused.stdout, refused
    assert not (scene.ws / "ran.txt").exists()
    assert refused.returncode in REFUSED, refused
    assert refused.stderr.strip(), "a refusal says what is missing"
    assert "Traceback" not in refused.stderr, refused.stderr
    control = run("")
    assert control.returncode == 0, control
    assert (scene.ws / "ran.txt").exists(), "the same host without the filter runs it"


def test_unreadable_workspace(scene: Scene) -> None:
    """A workspace that cannot be entered is a clear error, and nothing runs."""
    (scene.ws / "inner").mkdir()
    place = scene.ws / "inner"
    command = ENGINE.argv(Request(scene, ["/bin/echo", "started"]))
    opened = os.open(place, os.O_RDONLY)
    place.rmdir()
    try:
        ran = subprocess.run(
            [*drop_to(scene.world.uid), *command], cwd=f"/proc/self/fd/{opened}", pass_fds=(opened,),
            env=scene.world.environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        os.close(opened)
    assert ran.returncode in (*REFUSED, 2), ran
    assert "started" not in ran.stdout
    assert "Traceback" not in ran.stderr


def test_the_command_cannot_speak_for_casemate(casemate: Runner, scene: Scene) -> None:
    """The report lies on the host, out of reach; a command's own codes do not pass for Casemate's in it."""
    target = scene.ws.parent / "report.json"
    outcome = casemate("/bin/sh", "-c", f"echo '{{\"exit_code\": 0}}' >{target}; exit 125")
    assert outcome.code == 125
    assert outcome.report.get("exit-code") == 125, outcome.brief()
    assert not outcome.report.get("error"), "the command's own 125 is a result, not an error"


def test_acts_that_need_a_harness(casemate: Runner, scene: Scene) -> None:
    """The harness itself: an act that crashes or does not report is never taken for held."""
    outcome = casemate(*acts_command(scene, ["procs.no_such_act"], sandboxed=True))
    assert "crash" in outcome.records["procs.no_such_act"]
