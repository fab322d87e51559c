"""With a resident daemon behind the command line every row of the table is held as well."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from tests.security import daemon, matrix
from tests.security.engines import Request, acts_command
from tests.security.lab import MODES, drop_to, processes_with
from tests.security.rows import ROWS, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.security.lab import Scene, World

pytestmark = [pytest.mark.security, pytest.mark.root]


@pytest.fixture(scope="module", params=MODES)
def served(request: pytest.FixtureRequest, worlds: Callable[[str], World]) -> Iterator[World]:
    """A lab whose command line finds a daemon."""
    world = worlds(request.param)
    daemon.ENGINE.daemons[world.mode] = daemon.Daemon(world)
    yield world
    daemon.ENGINE.daemons.pop(world.mode).close()
    assert not processes_with(world.base.name + "/s"), "the daemon's end left a sandbox"


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row(row: Row, served: World) -> None:
    """The attack does not get through (its control is in test_matrix)."""
    verdict = matrix.run_row(row, served, "daemon")
    assert verdict.held, verdict.line()
    assert "pid" in daemon.ENGINE.daemons[served.mode].status(), "the daemon did not survive the attack"


def scene_of(served: World) -> Iterator[Scene]:
    scene = served.scene()
    try:
        yield scene
    finally:
        scene.close()


@pytest.fixture
def served_scene(served: World) -> Iterator[Scene]:
    """A fresh workspace in the lab with the daemon."""
    yield from scene_of(served)


def test_the_seal_is_the_same(served_scene: Scene) -> None:
    """A command of the daemon is sealed like any other, and sees neither the daemon nor its keeper."""
    outcome = daemon.ENGINE.run(
        Request(served_scene, acts_command(served_scene, ["seal.look"], sandboxed=True))
    )
    look = outcome.records["seal.look"]
    status = dict(line.split(":\t", 1) for line in look["status"].splitlines() if ":\t" in line)
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert all(int(status[name], 16) == 0 for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"))
    assert served_scene.world.secret not in str(look["env"]) + str(look["neighbours"])
    assert not [line for line in look["mountinfo"].splitlines() if "daemon.sock" in line]


def test_the_socket_is_out_of_reach(served_scene: Scene) -> None:
    """No command can speak to the daemon, by any path, so none can start a sandbox with another policy."""
    world = served_scene.world
    place = "/run/casemate" if world.uid == 0 else f"{world.home}/.local/state/casemate/run"
    script = (
        "import socket, sys\n"
        f"for prefix in ('', '/proc/1/root', '/proc/self/cwd/../../..'):\n"
        "    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "    try:\n"
        f"        s.connect(prefix + '{place}/daemon.sock')\n"
        "        print('reached', prefix)\n"
        "    except OSError as error:\n"
        "        print('refused', error.errno)\n"
    )
    argv = ["/usr/bin/python3", "-I", "-S", "-c", script]
    outcome = daemon.ENGINE.run(Request(served_scene, argv))
    assert outcome.stdout.count("refused") == 3, outcome.brief()
    bare = [*drop_to(world.uid), *daemon.ENGINE.daemons[world.mode].client("/"), *argv]
    control = subprocess.run(bare, capture_output=True, text=True, check=False)
    assert "reached" in control.stdout, control


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_clients_death_kills_its_command(served_scene: Scene, number: signal.Signals) -> None:
    """A client that is killed takes its whole tree with it, daemons of the command included."""
    script = "trap '' TERM; (setsid sleep 300 >/dev/null 2>&1 &); echo started; sleep 300; sleep 300"
    request = Request(served_scene, ["/bin/sh", "-c", script])
    world = served_scene.world
    process = subprocess.Popen(
        [*drop_to(world.uid), *daemon.ENGINE.argv(request)], cwd=served_scene.ws, env=world.environment(),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    mark = str(served_scene.ws)
    assert processes_with(mark), "the control: its processes are seen while it runs"
    process.send_signal(number)
    if number != signal.SIGKILL:
        # The command is told first, and may ignore it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
        process.kill()
    process.wait(10)
    process.stdout.close()
    end = time.monotonic() + 5
    while (left := processes_with(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left, [os.readlink(f"/proc/{pid}/exe") for pid in left if os.path.exists(f"/proc/{pid}")]
    again = daemon.ENGINE.run(Request(served_scene, ["/bin/echo", "works"]))
    assert again.stdout == "works\n", again.brief()


def test_environments_do_not_mix(served_scene: Scene) -> None:
    """What one client's environment holds is not seen by the next client's command."""
    first = Request(served_scene, ["/usr/bin/env"], ("--env", "ONLY_ONCE"), env={"ONLY_ONCE": "first"})
    assert "ONLY_ONCE=first" in daemon.ENGINE.run(first).stdout
    second = Request(served_scene, ["/usr/bin/env"], ("--env", "ONLY_ONCE=second"))
    assert "ONLY_ONCE=second" in daemon.ENGINE.run(second).stdout
    third = daemon.ENGINE.run(Request(served_scene, ["/usr/bin/env"]))
    assert "ONLY_ONCE" not in third.stdout, third.brief()
    assert "PATH=" in third.stdout


def test_kill_of_the_daemon_ends_its_commands(served_scene: Scene) -> None:
    """kill -9 of the daemon leaves no command running, and the next run works without it."""
    world = served_scene.world
    request = Request(served_scene, ["/bin/sh", "-c", "(setsid sleep 300 &); echo started; sleep 300"])
    process = subprocess.Popen(
        [*drop_to(world.uid), *daemon.ENGINE.argv(request)], cwd=served_scene.ws, env=world.environment(),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    served = daemon.ENGINE.daemons[world.mode]
    served.process.kill()
    served.process.wait()
    try:
        code = process.wait(10)
        end = time.monotonic() + 5
        while (left := processes_with(str(served_scene.ws))) and time.monotonic() < end:
            time.sleep(0.02)
        assert not left, "a command outlived its daemon"
        assert code == 125, code
    finally:
        process.kill()
        process.stdout.close()
        daemon.ENGINE.daemons[world.mode] = daemon.Daemon(world)
