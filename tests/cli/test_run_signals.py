"""Signals to Casemate reach the command; what Casemate does by itself is to end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from tests.cli.harness import PYTHON, state, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.harness import Caller

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("traceless")]


def start(caller: Caller, ws: Path, script: str, *flags: str) -> subprocess.Popen[bytes]:
    """The script under Casemate, up to the point where it says ``up``."""
    process = caller.start("run", *flags, "--", "/bin/sh", "-c", script, cwd=ws)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == b"up\n", line + (process.stderr.read() if process.stderr else b"")
    return process


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"])
def test_signal_is_forwarded(caller: Caller, ws: Path, name: str) -> None:
    """A signal to Casemate is the command's: by default it dies of it, and so the code is 128 + n."""
    number = getattr(signal, name)
    process = start(caller, ws, "echo up; exec sleep 60")
    process.send_signal(number)
    assert caller.end(process) == 128 + number


def test_signal_that_is_handled(caller: Caller, ws: Path) -> None:
    """A command that handles the signal decides itself: it may clean up, and its changes are applied."""
    script = "trap 'echo cleaned >done; exit 3' TERM; echo up; while :; do sleep 0.05; done"
    process = start(caller, ws, script)
    process.send_signal(signal.SIGTERM)
    assert caller.end(process) == 3
    assert (ws / "done").read_text() == "cleaned\n"


@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_two_interrupts_kill(caller: Caller, ws: Path, second: str) -> None:
    """The first signal that ends programs is the command's to handle; the second one ends it."""
    process = start(caller, ws, "trap 'echo no' INT TERM HUP; echo up; while :; do sleep 0.05; done")
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == b"no\n"
    process.send_signal(getattr(signal, second))
    assert caller.end(process) == 137


def test_ignored_signals_stay_ignored(caller: Caller, ws: Path) -> None:
    """Under nohup a hang-up is nobody's business: neither Casemate nor the command notices."""
    process = caller.start(
        "run", "--", "/bin/sh", "-c", "echo up; read x; echo still here", cwd=ws,
        before=("/bin/sh", "-c", 'trap "" HUP; exec "$0" "$@"'),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(b"go\n", timeout=20)
    assert (process.returncode, out) == (0, b"still here\n")


def test_the_command_starts_with_default_signals(caller: Caller, ws: Path) -> None:
    """Whatever Casemate and its interpreter ignore or block, the command finds nothing of it."""
    ended = caller.run(ws, "/bin/cat", "/proc/self/status")
    masks = [
        int(line.split()[1], 16) for line in ended.out.splitlines() if line[:6] in (b"SigBlk", b"SigIgn")
    ]
    # The C library keeps the two signals after SIGSYS for itself.
    assert [mask & 0x7FFFFFFF for mask in masks] == [0, 0], ended


def test_a_caller_that_ignores_its_children(caller: Caller, ws: Path) -> None:
    """Where SIGCHLD is ignored, which is inherited, a run works all the same, and so do its children."""
    script = "import os, signal, sys; signal.signal(17, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    ended = caller.sh(ws, "sleep 0.01 & wait; exit 6", before=(PYTHON, "-I", "-S", "-c", script))
    assert ended.code == 6, ended


def _uses(pid: int, library: str) -> bool:
    try:
        with open(f"/proc/{pid}/maps") as file:
            return library in file.read()
    except OSError:
        return False


def start_and_wait(caller: Caller, ws: Path, milliseconds: int) -> subprocess.Popen[bytes]:
    """Casemate some milliseconds after it has begun to read its own modules."""
    process = caller.start("run", "--", "/bin/sleep", "60", cwd=ws)
    # Not while the interpreter itself starts: a signal then can break it.
    until(lambda: _uses(process.pid, "msgspec"))
    end = time.monotonic() + milliseconds / 1000
    until(lambda: time.monotonic() >= end)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_at_any_moment(caller: Caller, ws: Path, number: signal.Signals) -> None:
    """A signal while the sandbox is made is not lost, not taken for an error, and leaves nothing."""
    for step in range(0, 75, 5):
        process = start_and_wait(caller, ws, step)
        os.killpg(process.pid, number)
        try:
            _, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            told = "\n".join(map(state, [process.pid, *caller.processes()]))
            process.kill()
            raise AssertionError(f"after {step} ms: lost\n{told}\n{process.communicate()}") from None
        # Before there is anybody to tell, Casemate itself dies of it, as any program would.
        assert process.returncode in (128 + number, -number), (step, process.returncode, err)
        assert b"Traceback" not in err, (step, err)


def test_stop_and_continue(caller: Caller, ws: Path) -> None:
    """A stop of Casemate stops the command and all its processes; they go on with it."""
    script = "(while :; do echo x >>ticks; sleep 0.02; done) & echo up; read x; kill $!; exit 8"
    process = start(caller, ws, script)
    process.send_signal(signal.SIGTSTP)
    until(lambda: os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT), 10)
    inside = [
        pid for pid in caller.processes() if b"casemate-init" not in _cmdline(pid) and pid != process.pid
    ]
    assert len(inside) >= 2
    # D: the parent of a vfork, while its child is stopped.
    until(lambda: all(_state(pid) in "TZD" for pid in inside), 10, "everything inside has stopped")
    process.send_signal(signal.SIGCONT)
    until(lambda: any(_state(pid) not in "TZ" for pid in inside), 10, "it goes on")
    process.communicate(b"go\n", timeout=20)
    assert process.returncode == 8


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


def _cmdline(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b"casemate-init"


def test_the_command_cannot_signal_its_way_out(caller: Caller, ws: Path) -> None:
    """What a command sends to its init comes back to itself; SIGKILL does nothing."""
    script = (
        "import os, signal\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\n"
        "for s in (1, 2, 15, 9): os.kill(1, s)\nprint('init lives', flush=True)\n"
    )
    ended = caller.run(ws, PYTHON, "-I", "-S", "-c", script)
    assert (ended.code, ended.out) == (0, b"init lives\n"), ended
