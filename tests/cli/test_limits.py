"""Every limit stops what takes more, names itself in the result, and lets a little less pass.

The scope is a control group's as root; as uid 1000 it is the process's or the host's watch (the control
tests say which). What attacks here ends by itself: counts are bounded and everything has a deadline.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.harness import Caller, Ended

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("traceless")]

MIB = 1 << 20

# Touches memory in processes of its own: MiB each, their number; all hold it for a second.
TOUCH = """
import os, sys, time
mib, count = int(sys.argv[1]), int(sys.argv[2])
read, write = os.pipe()
for _ in range(count):
    if os.fork() == 0:
        held = bytearray(mib << 20)
        for at in range(0, len(held), 4096):
            held[at] = 1
        os.write(write, b"t")
        time.sleep(8)
        os._exit(0)
got, end = b"", time.monotonic() + 6
os.set_blocking(read, False)
while len(got) < count and time.monotonic() < end:
    try:
        got += os.read(read, 1)
    except BlockingIOError:
        if os.waitpid(-1, os.WNOHANG)[0]:
            break  # somebody was killed
        time.sleep(0.01)
time.sleep(1)
print("all touched" if len(got) == count else "not all", flush=True)
os._exit(len(got) != count)
"""


def stopped(ended: Ended, limit: str, code: int = 123) -> None:
    """It was ended by that limit, and both the result and a person are told."""
    assert ended.code == code, ended
    assert ended.json["limit"] == limit, ended
    assert f"limit: {limit}".encode() in ended.err, ended


def run(caller: Caller, ws: Path, script: str, *args: str, flags: tuple[str, ...]) -> Ended:
    return caller.py(ws, script, *args, flags=("--json", *flags), timeout=60)


def test_memory_of_one_process(caller: Caller, ws: Path) -> None:
    """One process cannot touch 300 MiB under 200; it can touch 120."""
    ended = run(caller, ws, TOUCH, "300", "1", flags=("--memory", "200M", "--timeout", "20s"))
    assert b"all touched" not in ended.err, ended
    assert ended.code != 0, ended
    if caller.uid == 0:
        stopped(ended, "memory")
    fits = run(caller, ws, TOUCH, "120", "1", flags=("--memory", "200M"))
    assert (fits.code, fits.json["limit"]) == (0, ""), fits


def test_memory_of_the_tree(caller: Caller, ws: Path) -> None:
    """Five processes of 60 MiB do not fit 200 MiB together, each alone would; three of 40 do."""
    ended = run(caller, ws, TOUCH, "60", "5", flags=("--memory", "200M", "--timeout", "20s"))
    assert b"all touched" not in ended.err or ended.code != 0, ended
    stopped(ended, "memory")
    fits = run(caller, ws, TOUCH, "40", "3", flags=("--memory", "200M"))
    assert (fits.code, fits.json["limit"]) == (0, ""), fits
    scope = "tree" if caller.uid == 0 else "watched"
    assert fits.json["scopes"]["memory"] == scope
    # Of the tree where there is a group, else of the command itself.
    assert fits.json["peak-memory"] > (120 if caller.uid == 0 else 4) * MIB


def test_memory_by_files(caller: Caller, ws: Path) -> None:
    """/dev/shm and /tmp are memory or disk: 300 MiB there do not pass 200 of both."""
    script = (
        "import sys\nwith open(sys.argv[1], 'wb') as f:\n"
        "    for _ in range(300): f.write(bytes(1 << 20))\nprint('all')\n"
    )
    for place in ("/dev/shm/x", "/tmp/x", "/home/sandbox/x"):
        flags = ("--memory", "200M", "--disk", "200M", "--timeout", "20s")
        ended = run(caller, ws, script, place, flags=flags)
        assert b"all\n" not in ended.err, ended
        assert (ended.code, ended.json["limit"] in ("memory", "disk")) == (123, True), ended


def test_cpu(caller: Caller, ws: Path) -> None:
    """Two busy processes get half a processor together under --cpu 0.5, and more without it."""
    script = (
        "import os, time\nend = time.monotonic() + 1.0\nchild = os.fork()\n"
        "while time.monotonic() < end: pass\n"
        "if child:\n    os.wait()\n    t = os.times()\n"
        "    print(t.user + t.system + t.children_user + t.children_system, flush=True)\nos._exit(0)\n"
    )
    if caller.uid:
        refused = caller.py(ws, script, flags=("--cpu", "0.5"))
        assert refused.code == 126, refused
        assert b"[protection-unavailable]" in refused.err, refused
        return
    limited, free = (float(caller.py(ws, script, flags=flags).out) for flags in (("--cpu", "0.5"), ()))
    # A share and no duration: half a second per second, and the slice that was running.
    assert limited < 0.8 or limited < free, (limited, free)


FORKS = """
import os, sys, time
made = 0
for _ in range(int(sys.argv[1])):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        time.sleep(4)
        os._exit(0)
    made += 1
print("made", made, flush=True)
os._exit(0 if made == int(sys.argv[1]) else 1)
"""


def test_pids(caller: Caller, ws: Path) -> None:
    """Under --pids 60 there are no 200 processes; 50 are no problem."""
    ended = run(caller, ws, FORKS, "200", flags=("--pids", "60"))
    made = int(ended.err.split(b"made ")[1].split()[0])
    assert 40 < made <= 59, ended
    if caller.uid == 0:
        stopped(ended, "pids")
    else:  # the kernel tells nobody
        assert (ended.code, ended.json["scopes"]["pids"]) == (1, "process"), ended
    fits = run(caller, ws, FORKS, "50", flags=("--pids", "60"))
    assert (fits.code, fits.json["limits-touched"]) == (0, []), fits


def test_threads_are_tasks(caller: Caller, ws: Path) -> None:
    """Threads count like processes."""
    script = (
        "import sys, threading\nmade = 0\nstop = threading.Event()\n"
        "try:\n    for _ in range(int(sys.argv[1])):\n"
        "        threading.Thread(target=stop.wait, args=(8,), daemon=True).start()\n        made += 1\n"
        "except RuntimeError: pass\n"
        "stop.set()\nprint('made', made, flush=True)\nimport os; os._exit(made != int(sys.argv[1]))\n"
    )
    ended = run(caller, ws, script, "200", flags=("--pids", "60"))
    assert ended.code != 0, ended
    assert 40 < int(ended.err.split(b"made ")[1].split()[0]) <= 59, ended
    assert run(caller, ws, script, "50", flags=("--pids", "60")).code == 0


def test_two_sandboxes_do_not_share_a_count(caller: Caller, ws: Path) -> None:
    """A process limit is one sandbox's own: two of them with 45 of 60 processes each run side by side."""
    other = caller.workspace()
    script = FORKS.replace("os._exit(0 if", "sys.stdin.read(); os._exit(0 if")
    process = caller.start(
        "run", "--pids", "60", "--", "/usr/bin/python3", "-I", "-S", "-c", script, "45", cwd=other
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"made 45\n"
    fits = run(caller, ws, FORKS, "45", flags=("--pids", "60"))
    assert fits.code == 0, fits
    process.communicate(b"", timeout=20)
    assert process.returncode == 0


def test_open_files(caller: Caller, ws: Path) -> None:
    """Under --open-files 100 a process cannot open 150; 90 it can."""
    script = "import os, sys\nfor _ in range(int(sys.argv[1])): os.dup(0)\nprint('all')\n"
    ended = run(caller, ws, script, "150", flags=("--open-files", "100"))
    assert ended.code == 1, ended
    assert b"Too many open files" in ended.err, ended
    assert run(caller, ws, script, "90", flags=("--open-files", "100")).code == 0


def test_file_size(caller: Caller, ws: Path) -> None:
    """A file cannot grow past --file-size: the writer gets SIGXFSZ, and the limit is named."""
    flags = ("--json", "--file-size", "1M")
    ended = caller.sh(ws, "exec head -c 3000000 /dev/zero >big", flags=flags)
    stopped(ended, "file-size")
    assert (ws / "big").stat().st_size <= MIB
    fits = caller.sh(ws, "exec head -c 1000000 /dev/zero >fits", flags=flags)
    assert (fits.code, (ws / "fits").stat().st_size) == (0, 1_000_000), fits


def test_disk_in_one_file(caller: Caller, ws: Path) -> None:
    """The workspace's view cannot hold more than --disk in one file; the limit is named."""
    flags = ("--json", "--disk", "20M", "--timeout", "20s")
    ended = caller.sh(ws, "exec head -c 60000000 /dev/zero >big", flags=flags)
    stopped(ended, "disk")
    fits = caller.sh(ws, "exec head -c 12000000 /dev/zero >fits", flags=flags)
    assert (fits.code, fits.json["limit"]) == (0, ""), fits
    assert (ws / "fits").stat().st_size == 12_000_000


def test_disk_in_many_files(caller: Caller, ws: Path) -> None:
    """... nor in many, unlinked ones included."""
    script = (
        "import os, sys, time\nheld = []\n"
        "for n in range(60):\n"
        "    f = open(f'f{n}', 'wb', buffering=0)\n    f.write(bytes(1 << 20))\n    held.append(f)\n"
        "    if sys.argv[1] == 'unlink': os.unlink(f'f{n}')\n    time.sleep(0.02)\n"
        "print('all')\n"
    )
    for how in ("keep", "unlink"):
        ended = run(caller, ws, script, how, flags=("--disk", "20M", "--timeout", "20s"))
        assert b"all\n" not in ended.err, ended
        if how == "keep" or caller.uid:
            stopped(ended, "disk")
        else:  # where the space is back when the command has ended, only its own words are left
            assert ended.code == 1, ended
            assert [row["what"] for row in ended.json["denials"]] == ["disk"], ended


def test_wall_time(caller: Caller, ws: Path) -> None:
    """--timeout ends the tree with 124 and is named; a quicker command is not touched."""
    started = time.monotonic()
    ended = caller.sh(ws, "sleep 40 & sleep 40", flags=("--json", "--timeout", "1s"))
    stopped(ended, "timeout", 124)
    assert time.monotonic() - started < 20
    assert caller.sh(ws, "sleep 0.2", flags=("--timeout", "20s")).code == 0


def test_output(caller: Caller, ws: Path) -> None:
    """--output counts both streams together and is named."""
    script = "head -c 300000 /dev/zero; head -c 300000 /dev/zero >&2"
    ended = caller.sh(ws, script, flags=("--report", "../r.json", "--output", "500K"))
    assert ended.code == 123, ended.code
    assert len(ended.out) + ended.err.count(0) == 500 << 10
    fits = caller.sh(ws, script, flags=("--output", "600K"))
    assert (fits.code, len(fits.out), len(fits.err)) == (0, 300_000, 300_000)


def test_unlimited_is_a_word(caller: Caller, ws: Path) -> None:
    """``unlimited`` turns a limit off, and the scopes say so."""
    flags = tuple(
        word for name in ("memory", "pids", "disk", "file-size", "open-files", "output", "timeout")
        for word in (f"--{name}", "unlimited")
    )  # fmt: skip
    ended = caller.sh(ws, "true", flags=("--json", *flags))
    assert ended.code == 0, ended
    assert not {"memory", "pids", "disk", "file-size", "open-files"} & set(ended.json["scopes"]), ended


def test_a_limit_that_was_only_touched(caller: Caller, ws: Path) -> None:
    """A command that met a limit and went on to succeed keeps its 0."""
    script = FORKS.replace("os._exit(0 if", "os._exit(0 if 1 or")
    ended = run(caller, ws, script, "200", flags=("--pids", "60"))
    assert (ended.code, ended.json["limit"]) == (0, ""), ended
