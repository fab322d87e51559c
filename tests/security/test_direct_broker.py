"""The broker of a directly changed workspace: who it is, when it ends, and what remains without it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from tests.security.engines import ENGINE, Request
from tests.security.lab import drop_to
from tests.security.test_direct import DIRECT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Runner
    from tests.security.lab import Scene

pytestmark = [pytest.mark.security, pytest.mark.root]


def start(scene: Scene, *argv: str, cwd: Path | None = None) -> subprocess.Popen[bytes]:
    """A direct run in the background, with open streams."""
    request = Request(scene, list(argv), DIRECT)
    return subprocess.Popen(
        [*drop_to(scene.world.uid), *ENGINE.argv(request)],
        cwd=cwd or scene.ws, env=scene.world.environment(),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def broker_of(process: subprocess.Popen[bytes]) -> int:
    """The child of a command line that answers for the sandbox."""
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        children = [int(word) for word in file.read().split()]
    for child in children:
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{child}/fd"):
                if "seccomp notify" in os.readlink(f"/proc/{child}/fd/{number}"):
                    return child
    raise AssertionError(f"none of {children}")


def test_a_broker_that_dies(scene: Scene, no_leaks: None) -> None:
    """Without its broker the command can change nothing any more: not in the workspace, not elsewhere."""
    script = "echo up; read x; echo a >one; echo b >/tmp/two && echo wrote; ls; exit 7"
    process = start(scene, "/bin/sh", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    broker = broker_of(process)
    os.kill(broker, signal.SIGKILL)
    output, _ = process.communicate(b"go\n", timeout=60)
    assert process.returncode == 7
    assert b"wrote" not in output
    assert not (scene.ws / "one").exists()


def test_a_command_line_that_is_killed(scene: Scene, casemate: Runner) -> None:
    """Command and broker end with it; what was written stays."""
    process = start(scene, "/bin/sh", "-c", "echo a >one; echo up; sleep 60")
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    broker = broker_of(process)
    process.kill()
    process.communicate(timeout=30)
    end = time.monotonic() + 10
    while os.path.exists(f"/proc/{broker}") and time.monotonic() < end:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{broker}"), "the broker is still there"
    assert (scene.ws / "one").read_text() == "a\n"
    outcome = casemate("/bin/true")
    assert "interrupted" not in outcome.stderr, "there is nothing to be offered"


def test_what_a_broker_may(scene: Scene) -> None:
    """It has the sandbox's uid, no capability but (as root) the one to read memory, and its own filter."""
    process = start(scene, "/bin/sh", "-c", "echo up; sleep 60")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        broker = broker_of(process)
        with open(f"/proc/{broker}/status") as file:
            status = dict(line.split(":\t", 1) for line in file.read().splitlines() if ":\t" in line)
        with open(f"/proc/{broker}/fd/0", "rb") as stream:
            assert stream.read() == b"", "no stream of the caller's"
    finally:
        process.terminate()
        process.communicate(timeout=30)
    ptrace = 1 << 19 if scene.world.uid == 0 else 0
    for name in ("CapInh", "CapBnd", "CapAmb"):
        assert int(status[name], 16) == 0, name
    for name in ("CapPrm", "CapEff"):
        assert int(status[name], 16) == ptrace, name
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    uids = set(status["Uid"].split())
    assert len(uids) == 1
    assert (int(uids.pop()) >= 0x70000000) == (scene.world.uid == 0)


@pytest.mark.parametrize("end", ["killed", "in order"])
def test_a_lost_broker_is_reported(scene: Scene, end: str) -> None:
    """When its broker ends before it, a command that says nothing is not taken for one that was served."""
    process = start(scene, "/bin/sh", "-c", "echo up; read x; echo a >one; exit 0")
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    if end == "killed":
        broker = broker_of(process)
        os.kill(broker, signal.SIGKILL)
        until = time.monotonic() + 10
        while "\nState:\tZ" not in status_of(broker) and time.monotonic() < until:
            time.sleep(0.01)
    _, errors = process.communicate(b"go\n", timeout=60)
    assert process.returncode == 0
    assert (b"refused-broker" in errors) is (end == "killed"), errors
    assert (scene.ws / "one").exists() is (end == "in order")


def status_of(pid: int) -> str:
    """What /proc says of a process; that it is a zombie for one that is gone."""
    try:
        with open(f"/proc/{pid}/status") as file:
            return file.read()
    except OSError:
        return "\nState:\tZ"
