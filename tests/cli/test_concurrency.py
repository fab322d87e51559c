"""Two commands in one workspace run one after the other, and neither loses the other's changes."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.cli.harness import until

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from tests.cli.harness import Caller

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("traceless")]


def start(caller: Caller, ws: Path, script: str, *flags: str) -> subprocess.Popen[bytes]:
    process = caller.start("run", *flags, "--", "/bin/sh", "-c", script, cwd=ws)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def test_the_second_waits_with_a_word(caller: Caller, ws: Path) -> None:
    """The second says for whom it waits, runs when the first is done, and sees what that applied."""
    first = start(caller, ws, "echo first >file; echo up; read x")
    second = caller.start("run", "--", "/bin/sh", "-c", "cat file; echo second >>file", cwd=ws)
    assert second.stderr is not None
    line = second.stderr.readline()
    assert line.startswith(b"casemate: waiting for another command in this workspace (pid "), line
    assert b"read x" in line, "it says what the other one runs"
    assert line.endswith(b"; with --direct, or in another workspace, it need not wait\n")
    assert second.poll() is None
    first.communicate(b"\n", timeout=20)
    out, err = second.communicate(timeout=20)
    assert (second.returncode, out, err) == (0, b"first\n", b"")
    assert (ws / "file").read_text() == "first\nsecond\n"


def test_what_need_not_wait(caller: Caller, ws: Path, how: str) -> None:
    """What the second is told to do instead does not wait, and is only said where it does not."""
    first = start(caller, ws, "echo up; read x")
    direct = ("--direct", "--no-wait")
    assert caller.sh(ws, "echo 1 >made", flags=direct).code == 0
    assert (ws / "made").read_text() == "1\n"
    beside = start(caller, ws, "echo up; read x", *direct)
    assert caller.sh(ws, "cat made", flags=direct).out == b"1\n"
    assert caller.sh(caller.workspace(), "true", flags=("--no-wait",)).code == 0
    out = caller.workspace()
    second = caller.start("run", "--write", str(out), "--", "true", cwd=ws)
    assert second.stderr is not None
    assert second.stderr.readline().endswith(b"); in another workspace it need not wait\n")
    refused = caller.sh(ws, "true", flags=(*direct, "--write", str(out)))
    assert refused.code == 126, refused
    for process in (beside, first):
        process.communicate(b"\n", timeout=20)
    second.communicate(timeout=20)
    assert second.returncode == 0


def test_no_wait_refuses(caller: Caller, ws: Path) -> None:
    """--no-wait refuses at once, with a code and the name of the holder; the first is not disturbed."""
    first = start(caller, ws, "echo first >file; echo up; read x")
    ended = caller.sh(ws, ": >ran", flags=("--no-wait",))
    assert ended.code == 126, ended
    assert b"[busy]" in ended.err, ended
    ended = caller.sh(ws, ": >ran", flags=("--no-wait", "--json"))
    assert ended.json["error"]["code"] == "busy", ended
    assert "read x" in ended.json["error"]["details"]["holder"], ended
    first.communicate(b"\n", timeout=20)
    assert sorted(os.listdir(ws)) == ["file"]
    assert caller.sh(ws, ": >ran", flags=("--no-wait",)).code == 0


def test_a_subdirectory_is_another_workspace(caller: Caller, ws: Path) -> None:
    """Workspaces are told apart by their path: another one is not waited for."""
    other = caller.workspace()
    first = start(caller, ws, "echo up; read x")
    assert caller.sh(other, "echo x >file", flags=("--no-wait",)).code == 0
    first.communicate(b"\n", timeout=20)
    assert first.returncode == 0


def test_reading_only_waits_for_nobody(caller: Caller, ws: Path) -> None:
    """A command that writes nothing needs no lock."""
    first = start(caller, ws, "echo up; read x")
    assert caller.sh(ws, "true", flags=("--preset", "read-only", "--no-wait")).code == 0
    first.communicate(b"\n", timeout=20)


def test_the_lock_dies_with_its_holder(caller: Caller, ws: Path) -> None:
    """After a kill of the first the second goes on, as soon as nobody of it is left."""
    first = start(caller, ws, "echo up; sleep 60")
    second = caller.start("run", "-q", "--", "/bin/echo", "second", cwd=ws)
    assert second.stderr is not None
    assert b"waiting" in second.stderr.readline()
    first.kill()
    out, _ = second.communicate(timeout=20)
    assert (second.returncode, out) == (0, b"second\n")
    caller.end(first)
    caller.clean()
    assert caller.run(ws, "true").code == 0  # which removes the control group of the dead


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_waits_can_be_told_to_stop(caller: Caller, ws: Path, number: signal.Signals) -> None:
    """A signal ends the waiting without a traceback, and the first one is not disturbed."""
    first = start(caller, ws, "echo up; read x; echo done")
    second = caller.start("run", "--", "/bin/sh", "-c", ": >ran", cwd=ws)
    assert second.stderr is not None
    assert b"waiting" in second.stderr.readline()
    second.send_signal(number)
    _, err = second.communicate(timeout=20)
    assert second.returncode == 128 + number, err
    assert b"Traceback" not in err, err
    out, _ = first.communicate(b"\n", timeout=20)
    assert (first.returncode, out) == (0, b"done\n")
    assert os.listdir(ws) == []


def test_many_at_once_lose_nothing(caller: Caller, ws: Path) -> None:
    """Eight commands that add a line to the same file: all eight lines are there."""
    caller.file(ws / "log", "")
    script = 'sleep 0.01; echo "$1" >>log'
    running = []
    for number in range(8):
        running.append(caller.start("run", "-q", "--", "/bin/sh", "-c", script, "sh", str(number), cwd=ws))
    for process in running:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert sorted((ws / "log").read_text().split()) == [str(number) for number in range(8)]


def test_many_workspaces_at_once(caller: Caller) -> None:
    """Eight commands in eight workspaces at once: all of them succeed, whatever they share on the way."""
    spaces = [caller.workspace(f"w{number}") for number in range(8)]
    for _ in range(3):
        running = [caller.start("run", "--", "/bin/sh", "-c", "echo x >>f", cwd=ws) for ws in spaces]
        for process in running:
            _, err = process.communicate(timeout=60)
            assert (process.returncode, err) == (0, b"")
    assert [(ws / "f").read_text() for ws in spaces] == ["x\n" * 3] * 8
    until(lambda: not caller.traces(), 5)
