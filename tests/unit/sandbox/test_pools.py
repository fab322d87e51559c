"""Sandboxes made ahead: used once, isolated from each other, replaced; a keeper that dies is reported."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from casemate.errors import SandboxError
from casemate.sandbox import AsyncSandbox
from tests.unit.sandbox.test_api import drive, happened

if TYPE_CHECKING:
    from collections.abc import Callable

PYTHON = "/usr/bin/python3"

# What one command can leave for the next one, if anything were shared; prints what it finds.
LEAVE = """
import fcntl, os, socket, subprocess, sys
me = sys.argv[1]
found = []
for place in ("/tmp", "/dev/shm", os.path.expanduser("~"), "/var/tmp"):
    found += [f"{place}/{n}" for n in sorted(os.listdir(place)) if n.startswith("mine")]
    open(f"{place}/mine-{me}", "w").write(me)
found += sorted(p for p in os.listdir("/proc") if p.isdigit() and int(p) > 2)
found += [n for n in os.environ if n.startswith("ONLY_")]
found.append(len(os.listdir("/proc/self/fd")))
found.append(subprocess.run(["ipcs", "-q"], capture_output=True, text=True).stdout.count("0x"))
s = socket.socket(socket.AF_UNIX)
try:
    s.bind("\\0mine")
    s.listen()
except OSError as error:
    found.append(str(error))
t = socket.socket()
try:
    t.bind(("127.0.0.1", 4711))
    t.listen()
except OSError as error:
    found.append(str(error))
subprocess.run(["ipcmk", "-Q"], capture_output=True)
os.umask(0)
if os.fork() == 0:
    os.setsid()
    import time
    time.sleep(30)
    os._exit(0)
print(found, flush=True)
os._exit(0)
"""


def children(pid: int) -> list[int]:
    """The children of all threads of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def keeper() -> int:
    """The pid of this process's keeper."""
    for pid in children(os.getpid()):
        if b"keeper" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return 0


def inits() -> list[int]:
    """The first processes of the keeper's sandboxes; helpers that make namespaces are gone in a moment."""
    return children(keeper())


@pytest.mark.parametrize(("ready", "kind"), [(0, "slot"), (2, "prefab"), (2, "slot")])
def test_nothing_of_one_command_is_in_the_next(
    ws: Path, environ: dict[str, str], ready: int, kind: str
) -> None:
    """Files, processes, variables, sockets, queues and descriptors of one command are not in the next one."""

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ, ready=ready, kind=kind) as box:
            outputs = set()
            for number in range(5):
                result = await box.run(
                    [PYTHON, "-I", "-S", "-c", LEAVE, str(number)], env={f"ONLY_{number}": "x"}
                )
                assert result.ok, result
                outputs.add(result.stdout.replace(f"ONLY_{number}".encode(), b"ONLY"))
            assert len(outputs) == 1, outputs
            assert b"mine" not in outputs.pop()

    drive(main())


COMMANDS = (
    "cat; echo err >&2; exit 3",
    "pwd; id -u; umask; env | sort",
    "echo x >made",
    "rm made",
    "kill -9 $$",
    "ulimit -a",
    "cat /proc/self/status | grep -E 'Cap|Sec|NoNew'",
    "mount | cut -d' ' -f3 | sort",
)


@pytest.mark.parametrize("kind", ["prefab", "slot"])
def test_same_results(ws: Path, environ: dict[str, str], kind: str) -> None:
    """A sandbox made ahead gives what a fresh one gives: streams, codes, changes, limits."""

    async def results(**options: Any) -> list[Any]:
        found = []
        async with AsyncSandbox(ws, environ=environ, **options) as box:
            for command in COMMANDS:
                result = await box.run(command, stdin=b"in")
                found.append((result.exit_code, result.stdout, result.stderr, result.applied.changes))
        return found

    async def main() -> None:
        fresh = await results()
        ahead = await results(ready=2, kind=kind)
        # As root each sandbox has a uid of its own.
        assert _without_uid(ahead) == _without_uid(fresh)

    drive(main())


def _without_uid(found: list[Any]) -> list[Any]:
    return [item for item in found if not (item[1] or b"").startswith(b"/var/tmp")]


def test_changes_of_the_host_are_seen(ws: Path, environ: dict[str, str]) -> None:
    """What the host changes in the workspace while a sandbox waits is there for its command."""

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ, ready=2) as box:
            for number in range(4):
                (ws / "file").write_text(f"{number}")
                assert (await box.run("cat file; echo -n c >from-command")).stdout == f"{number}".encode()

    drive(main())
    assert (ws / "from-command").read_text() == "c"


def test_the_pool_is_refilled(ws: Path, environ: dict[str, str]) -> None:
    """After use there are as many waiting sandboxes as before, never more than asked for."""

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ, ready=3) as box:
            assert len(inits()) == 3
            for _ in range(4):
                assert (await box.run("true")).ok
            await happened(lambda: len(inits()) == 3)

    drive(main())


def test_a_waiting_sandbox_that_was_killed_is_replaced(ws: Path, environ: dict[str, str]) -> None:
    """Killed while it waits, it is passed over: the command runs, and the pool fills up again."""

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ, ready=3) as box:
            waiting = inits()
            for pid in waiting:
                os.kill(pid, signal.SIGKILL)
            await happened(lambda: not any(map(_alive, waiting)))
            for _ in range(3):
                assert (await box.run("echo x")).stdout == b"x\n"
            await happened(lambda: len(inits()) == 3)

    drive(main())


def test_a_policy_is_never_served_by_another_ones_pool(ws: Path, environ: dict[str, str]) -> None:
    """Two sandboxes of different policies on one keeper do not take each other's waiting sandboxes."""

    async def main() -> None:
        one = AsyncSandbox(ws, environ=environ, ready=2)
        two = AsyncSandbox(ws, environ=environ, ready=2, preset="read-only")
        for _ in range(3):
            assert (await one.run("echo x >f")).ok
            assert not (await two.run("echo x >g 2>/dev/null")).ok
        await one.close()
        await two.close()

    drive(main())
    assert sorted(path.name for path in ws.iterdir()) == ["f"]


def test_death_of_the_keeper(ws: Path, environ: dict[str, str]) -> None:
    """Its death ends the command, is reported, and the next command has a new keeper with its pool."""

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ, ready=2) as box:
            started = asyncio.Event()
            running = asyncio.ensure_future(  # noqa: TID251 - awaited below
                box.run("echo up; sleep 60", on_stdout=lambda _: started.set())
            )
            await started.wait()
            old = keeper()
            children = inits()
            os.kill(old, signal.SIGKILL)
            with pytest.raises(SandboxError) as caught:
                await running
            assert caught.value.code == "keeper-lost"
            await happened(lambda: not any(_alive(pid) for pid in children))
            assert (await box.run("echo x >made")).ok
            assert keeper() not in (0, old)
            await happened(lambda: len(inits()) == 2)

    drive(main())
    assert (ws / "made").exists()


def test_death_of_an_idle_keeper(ws: Path, environ: dict[str, str]) -> None:
    """One that died between two commands is not noticed by the caller at all."""

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ) as box:
            assert (await box.run("true")).ok
            for _ in range(3):
                old = keeper()
                os.kill(old, signal.SIGKILL)
                await happened(lambda old=old: not _alive(old))
                assert (await box.run("true")).ok

    drive(main())


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# A program that uses the library; it is killed while its command runs.
PROGRAM = """
import json, os, sys
sys.path[:0] = json.loads(sys.argv[1])
from casemate.sandbox import Sandbox
box = Sandbox(sys.argv[2], environ=json.loads(sys.argv[3]), ready=2)
box.run("echo x >made; echo up; trap '' TERM INT HUP; sleep 60 & sleep 60",
        on_stdout=lambda data: os.write(1, data))
"""


def test_death_of_the_library(workspaces: Callable[[], Path], environ: dict[str, str]) -> None:
    """kill -9 of the program ends its keeper and every sandbox within two seconds; the work is kept."""
    import json
    import subprocess
    import sys

    from tests.cli.harness import until

    ws = workspaces()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(sys.path), str(ws), json.dumps(environ)],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    family = children(process.pid)
    for pid in family:
        family += children(pid)
    assert len(family) >= 4, "keeper, inits, the shell and its child"
    process.kill()
    process.wait()
    process.stdout.close()
    until(lambda: not any(map(_alive, family)), 2, "everybody has ended")
    assert list(ws.iterdir()) == []
    kept = [line for line in _kept(environ, ws)]
    assert len(kept) == 1, kept
    _discard(environ, ws, kept[0])


def _kept(environ: dict[str, str], ws: Path) -> list[str]:
    from casemate.sandbox.kept import Kept

    kept = Kept(str(ws), environ)
    try:
        return [item.name for item in kept.interrupted() if item.changes == (("created", "made"),)]
    finally:
        kept.close()


def _discard(environ: dict[str, str], ws: Path, name: str) -> None:
    from casemate.sandbox.kept import Kept

    kept = Kept(str(ws), environ)
    kept.discard_interrupted(name)
    kept.close()
