"""Ends: however a run ends, nobody outlives it and nothing of it stays; what a kill leaves is offered.

Whatever forks here is bounded in number by --pids, in time by a deadline of its own, and ends by itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.cli.harness import PYTHON, state, until

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from tests.cli.harness import Caller

pytestmark = [pytest.mark.root]

# Fork in all directions up to a number that --pids sets, ignoring what can be ignored, for six seconds.
BOMB = """
import os, signal, sys, time
open("/proc/self/comm", "w").write(sys.argv[1])
for number in (1, 2, 3, 15):
    signal.signal(number, signal.SIG_IGN)
end = time.monotonic() + 6
print("up", flush=True)
while time.monotonic() < end:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        time.sleep(0.001)
os._exit(0)
"""


def named(name: str) -> list[int]:
    """Living processes of that name, which are ours: it is random."""
    found = []
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
                head, _, rest = file.read().rpartition(")")
                if head.endswith(f"({name}") and rest.split()[0] != "Z":
                    found.append(int(pid))
    return found


@pytest.fixture
def mark() -> str:
    """A name for processes that nobody else has."""
    return f"cm{secrets.token_hex(5)}"


def start(caller: Caller, ws: Path, script: str, *flags: str) -> subprocess.Popen[bytes]:
    """The shell script under Casemate, up to the point where it says ``up``."""
    process = caller.start("run", *flags, "--", "/bin/sh", "-c", script, cwd=ws)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == b"up\n", line + (process.stderr.read() if process.stderr else b"")
    return process


@pytest.mark.usefixtures("traceless")
def test_fork_bomb_is_gone(caller: Caller, ws: Path, mark: str) -> None:
    """Of 300 processes that fork on, none is left when Casemate is told twice to stop."""
    process = caller.start("run", "--pids", "300", "--", PYTHON, "-I", "-S", "-c", BOMB, mark, cwd=ws)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    until(lambda: len(named(mark)) >= 290, 6, "the bomb is there: the control")
    process.send_signal(signal.SIGTERM)
    until(lambda: process.poll() is None)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    until(lambda: process.send_signal(signal.SIGINT) or not named(mark), 15, "everybody is gone")
    seconds = time.monotonic() - began
    caller.end(process)
    print(f"fork bomb of 300 as {caller.mode}: gone after {seconds:.3f} s", file=sys.stderr)
    assert named(mark) == []
    # The promise is 0.5 s with a control group and 3 s without; the machine is shared, so five times that.
    assert seconds < (2.5 if caller.uid == 0 else 15)


@pytest.mark.slow
@pytest.mark.usefixtures("traceless")
def test_fork_bomb_and_time_limit(caller: Caller, ws: Path, mark: str) -> None:
    """The time limit ends a fork bomb, too, and the result says so."""
    ended = caller.py(ws, BOMB, mark, flags=("--pids", "300", "--timeout", "1s"))
    assert ended.code == 124, ended
    assert named(mark) == []


@pytest.mark.usefixtures("traceless")
def test_daemons_end_with_the_command(caller: Caller, ws: Path, mark: str) -> None:
    """What has detached itself in any way is dead when the command is over."""
    script = (
        "import os, signal, sys, time\n"
        "open('/proc/self/comm', 'w').write(sys.argv[1])\n"
        "for sig in (1, 2, 15): signal.signal(sig, signal.SIG_IGN)\n"
        "def daemon(times):\n"
        "    if os.fork(): return\n"
        "    for _ in range(times):\n"
        "        os.setsid() if os.getpid() != os.getsid(0) else None\n"
        "        if os.fork(): os._exit(0)\n"
        "    for fd in (0, 1, 2): os.close(fd)\n"
        "    time.sleep(30)\n    os._exit(0)\n"
        "for times in (0, 1, 2, 3): daemon(times)\n"
        "time.sleep(0.2)\nprint('up', flush=True)\nsys.stdin.read()\nos._exit(7)\n"
    )
    process = caller.start("run", "--", PYTHON, "-I", "-S", "-c", script, mark, cwd=ws)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    assert len(named(mark)) == 5, "the control"
    process.communicate(b"", timeout=20)
    assert process.returncode == 7
    assert named(mark) == []


@pytest.mark.usefixtures("tidy")
def test_kill_leaves_nobody_and_keeps_the_work(caller: Caller, ws: Path, mark: str) -> None:
    """kill -9 of Casemate: no process after two seconds; the changes are kept, offered, and applied."""
    caller.file(ws / "old", "old")
    script = f"echo new >made; rm old; printf {mark} >/proc/self/comm; echo up; sleep 60 & sleep 60"
    process = start(caller, ws, script)
    until(lambda: any("note.json" in name for name in caller.files()), 10, "the work is kept by now")
    assert len(caller.processes()) > 1
    process.kill()
    process.wait(10)
    until(lambda: not caller.processes(), 2, "nobody is left")
    caller.end(process)
    assert sorted(os.listdir(ws)) == ["old"]
    after = caller.sh(ws, "ls; echo own >own")
    assert after.code == 0, after
    assert b"the changes of 1 interrupted command(s) in this workspace are kept" in after.err, after
    assert after.out == b"old\n", "a new run does not see them"
    quiet = caller.sh(ws, "true", flags=("--quiet",))
    assert quiet.err == b""
    listed = caller.cli("changes", "--json", cwd=ws).json["interrupted"]
    assert len(listed) == 1, listed
    assert sorted(map(tuple, listed[0]["changes"])) == [("created", "made"), ("deleted", "old")], listed
    applied = caller.cli("apply", listed[0]["name"], cwd=ws)
    assert applied.code == 0, applied
    assert sorted(os.listdir(ws)) == ["made", "own"]
    assert caller.sh(ws, "true").err == b"", "an offer that was taken is not made again"
    assert not caller.traces(), caller.traces()


@pytest.mark.usefixtures("tidy")
def test_kept_work_can_be_thrown_away(caller: Caller, ws: Path) -> None:
    """What is kept is gone after ``discard``, and nothing else of it is left."""
    process = start(caller, ws, "mkdir -m 0 locked; echo x >made; echo up; sleep 60")
    until(lambda: any("note.json" in name for name in caller.files()), 10)
    process.kill()
    caller.end(process)
    until(lambda: not caller.processes(), 2)
    name = caller.cli("changes", "--json", cwd=ws).json["interrupted"][0]["name"]
    assert caller.cli("discard", name, cwd=ws).code == 0
    assert caller.sh(ws, "true").err == b""
    assert os.listdir(ws) == []
    assert not caller.traces(), caller.traces()


@pytest.mark.slow
@pytest.mark.usefixtures("tidy")
def test_kill_at_any_moment(caller: Caller, ws: Path) -> None:
    """kill -9 while the sandbox is made, runs or ends: nobody is left, and the next run finds no obstacle."""
    for step in range(0, 96, 6):
        process = caller.start("run", "--", "/bin/sh", "-c", "echo x >made; exec sleep 0.02", cwd=ws)
        until(lambda process=process: "entry.py" in state(process.pid) or process.poll() is not None)  # type: ignore[misc]
        end = time.monotonic() + 0.02 + step / 1000
        until(lambda end=end: time.monotonic() >= end)  # type: ignore[misc]
        process.kill()
        process.wait(10)
        try:
            until(lambda: not caller.processes(), 2)
        except AssertionError:
            told = "\n".join(map(state, caller.processes()))
            raise AssertionError(f"killed after {step} ms:\n{told}") from None
        caller.end(process)
    after = caller.sh(ws, "echo y >made")
    assert after.code == 0, after
    assert (ws / "made").read_text() == "y\n"
    for item in caller.cli("changes", "--json", cwd=ws).json["interrupted"]:
        assert caller.cli("discard", item["name"], cwd=ws).code == 0
    assert caller.sh(ws, "true").code == 0
    assert not caller.traces(), caller.traces()


def one_of_each(caller: Caller, ws: Path, number: int) -> None:
    """A run that ends in one of the ways there are."""
    kinds = (
        ("true", (), 0),
        (f"echo {number} >file{number % 7}; mkdir -p d{number % 3}; rm -f file{(number + 3) % 7}", (), 0),
        ("exit 3", ("--quiet",), 3),
        ("kill -9 $$", (), 137),
        ("sleep 30", ("--timeout", "0.1s"), 124),
        ("yes", ("--output", "10K"), 123),
        ("(setsid sleep 30 >/dev/null 2>&1 &); echo x >.envrc", (), 0),
        ("exec no-such-program", ("--read", "/no/such/path"), 126),
        ("head -c 9000000 /dev/zero >big; exit 1", ("--disk", "4M"), 123),
        ("mkdir -p a/b/c; chmod 0 a/b; sleep 0.1", (), 0),
        ("chmod 700 a/b 2>/dev/null; rm -rf a big", (), 0),
        ("echo x", ("--preset", "read-only"), 0),
    )
    script, flags, code = kinds[number % len(kinds)]
    ended = caller.sh(ws, script, flags=flags)
    assert ended.code == code, (number, script, ended)


def many(caller: Caller, count: int) -> None:
    spaces = [caller.workspace(f"ws{number}") for number in range(4)]
    before = namespaces_held(caller)
    for number in range(count):
        one_of_each(caller, spaces[number // 12 % 4], number)
    until(lambda: not caller.traces(), 5, "\n".join(caller.traces()))
    assert namespaces_held(caller) == before
    # What was held back is kept on purpose, for a person.
    held = [name for name in os.listdir(caller.state / "held")] if (caller.state / "held").is_dir() else []
    assert all(re.match(r"ws\d-", name) for name in held), held
    caller.clean()


def namespaces_held(caller: Caller) -> int:
    """Namespaces that are mounted somewhere: the only ones that could be there without a process."""
    places = ["/proc/self/mountinfo", *([f"{caller.den.root}/proc/self/mountinfo"] if caller.den else [])]
    count = 0
    for place in places:
        with open(place) as file:
            count += sum(" - nsfs " in line for line in file)
    return count


@pytest.mark.slow
def test_many_runs_leave_nothing(caller: Caller) -> None:
    """96 runs that end in twelve ways leave no process, mount, namespace, group, lock or file."""
    many(caller, 96)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_very_many_runs_leave_nothing(caller: Caller) -> None:
    """The same with 2,000 runs in all modes together."""
    many(caller, 996)
