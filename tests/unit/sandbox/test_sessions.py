"""Sessions from Python. ``test_as_user`` runs this as a user."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from casemate.errors import PolicyError, SandboxError, WorkspaceError
from casemate.policy.model import FlagLayer
from casemate.sandbox import AsyncSandbox, Sandbox
from casemate.sandbox.session import Session, sessions
from casemate.settings import places
from tests.cli.harness import until
from tests.unit.sandbox.test_api import drive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOTLESS = os.geteuid() != 0


@pytest.fixture(autouse=True)
def swept(workspaces: Callable[[], Path], ws: Path, environ: dict[str, str]) -> Iterator[None]:
    """Every session of the workspace is discarded in the end; nothing is left of it then."""
    yield
    where = places(environ)
    for session in sessions(where, str(ws), rootless=ROOTLESS):
        session.take()
        session.discard()
        session.close()
    Session(where, str(ws), "any", rootless=ROOTLESS).store.collect()
    assert sessions(where, str(ws), rootless=ROOTLESS) == []
    if ROOTLESS:
        assert not Path(where.state, "sessions").exists()


def text(box: Sandbox, script: str) -> str:
    result = box.run(script)
    assert result.ok, result
    return result.stdout.decode()


def test_snapshot_branch_rollback(ws: Path, environ: dict[str, str]) -> None:
    """Commands of a session go on from each other; snapshots, branches and roll-backs are what they say."""
    with Sandbox(ws, environ=environ, session="a") as box:
        assert text(box, "echo 1 >f; echo 1 >~/h; ls") == "f\n"
        first = box.snapshot()
        assert text(box, "echo 2 >>f; cat f ~/h") == "1\n2\n1\n"
        with box.branch("b") as twin, box.branch("c", at=first) as old:
            assert text(twin, "echo b >>f; cat f ~/h") == "1\n2\nb\n1\n"
            assert text(old, "cat f") == "1\n"
        assert text(box, "cat f") == "1\n2\n"
        box.rollback(first)
        assert text(box, "cat f ~/h") == "1\n1\n"
        result = box.run("true")
        assert (result.session, set(result.disk)) == ("a", {"used", "limit"})
        assert result.applied.changes == ()
        box.rollback("start")
        assert text(box, "ls; ls ~") == ""
        with pytest.raises(WorkspaceError) as caught:
            box.rollback(first)
        assert caught.value.code == "no-snapshot"
        with pytest.raises(WorkspaceError) as caught:
            box.branch("b")
        assert caught.value.code == "session-exists"
    assert os.listdir(ws) == []
    with Sandbox(ws, environ=environ, session="b") as box:
        assert text(box, "cat f") == "1\n2\nb\n", "it is there for another process, too"


def test_without_a_session(ws: Path, environ: dict[str, str]) -> None:
    """Names that are none, layers of no session, and a session without a command are errors that say so."""
    for name in ("../x", "a b", ".x"):
        with pytest.raises(PolicyError) as wrong:
            Sandbox(ws, environ=environ, session=name)
        assert wrong.value.code == "session-name"
    with Sandbox(ws, environ=environ) as box:
        for act in (box.snapshot, lambda: box.branch("x"), lambda: box.rollback("start")):
            with pytest.raises(PolicyError) as caught:
                act()
            assert caught.value.code == "session-none"
    with Sandbox(ws, environ=environ, session="a") as box, pytest.raises(WorkspaceError) as none:
        box.snapshot()
    assert none.value.code == "no-session"


def test_one_after_the_other(ws: Path, environ: dict[str, str]) -> None:
    """Commands of one session in one loop queue; those of two sessions run beside each other."""

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ, session="a") as box:
            async with asyncio.TaskGroup() as group:
                for number in range(6):
                    group.create_task(box.run(f"echo {number} >>log; sleep 0.02; echo {number} >>log"))
            lines = (await box.run("cat log")).stdout.split()
            assert lines[::2] == lines[1::2]
            assert sorted(lines[::2]) == [b"0", b"1", b"2", b"3", b"4", b"5"]
            other = await box.branch("b")
            async with other:
                up = asyncio.Event()
                first = asyncio.get_running_loop().create_task(
                    box.run("echo up; sleep 60", on_stdout=lambda _: up.set())
                )
                await asyncio.wait_for(up.wait(), 20)
                second = await other.run("cat log | wc -l")
                assert second.stdout.strip() == b"12"
                assert not first.done()
                first.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await first

    drive(main())


def test_a_command_that_is_cancelled(ws: Path, environ: dict[str, str]) -> None:
    """What a command did until it was cancelled is in the session, and the next one goes on."""

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ, session="a") as box:
            seen = asyncio.Event()
            task = asyncio.get_running_loop().create_task(
                box.run("echo 1 >f; echo up; sleep 60", on_stdout=lambda _: seen.set())
            )
            await asyncio.wait_for(seen.wait(), 20)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await box.run("cat f")).stdout == b"1\n"

    drive(main())


def test_death_of_the_keeper(ws: Path, environ: dict[str, str]) -> None:
    """kill -9 of the keeper loses nothing of a session: the next command goes on with a new one."""

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ, session="a") as box:
            await box.run("echo 0 >f; echo 0 >~/h")
            assert box._keeper is not None
            for number in range(1, 4):
                seen = asyncio.Event()
                task = asyncio.get_running_loop().create_task(
                    box.run(f"echo {number} >>f; echo up; sleep 60", on_stdout=lambda _, s=seen: s.set())
                )
                await asyncio.wait_for(seen.wait(), 20)
                os.kill(box._keeper._pid, signal.SIGKILL)
                with pytest.raises(SandboxError) as caught:
                    await task
                assert caught.value.code == "keeper-lost"
            assert (await box.run("cat f ~/h")).stdout == b"0\n1\n2\n3\n0\n"
            assert await box.snapshot()

    drive(main())


OWNER = """
import sys
from casemate.sandbox import Sandbox
with Sandbox(sys.argv[1], environ=dict(HOME=sys.argv[2], PATH="/usr/bin:/bin"), session="a") as box:
    box.run("echo 1 >>f; echo up; sleep 60", on_stdout=lambda _: print("up", flush=True))
"""


def test_death_of_the_owner(ws: Path, environ: dict[str, str]) -> None:
    """kill -9 of the process that uses the library: the next one waits for the last of its command, and goes
    on with what that has left.
    """
    for number in range(1, 4):
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(ws), environ["HOME"]], stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")},
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.kill()
        process.wait()
        process.stdout.close()
        with Sandbox(ws, environ=environ, session="a") as box:
            assert text(box, "wc -l <f").strip() == str(number)
    until(lambda: not _inside(ws), 5)


def _inside(ws: Path) -> list[str]:
    found = []
    for pid in os.listdir("/proc"):
        if pid.isdigit() and int(pid) != os.getpid():
            try:
                found += [pid] if str(ws) in Path(f"/proc/{pid}/mountinfo").read_text() else []
            except OSError:
                continue
    return found


def test_the_limit(ws: Path, environ: dict[str, str]) -> None:
    """Layers count against the limit of the policy, and a full session starts nothing."""
    small: Any = FlagLayer(disk="8M")
    with Sandbox(ws, environ=environ, session="a", flags=small) as box:
        result = box.run("head -c 5M /dev/zero >a")
        assert result.ok, result
        assert 5 << 20 <= result.disk["used"] < 6 << 20
        box.snapshot()
        result = box.run("head -c 5M /dev/zero >b || kill -XFSZ $$; sleep 10")
        assert (result.limit, result.ok) == ("disk", False), result
        result = box.run("head -c 5M /dev/zero >c")
        assert not result.ok, "no file of more than 1 MiB in a full one"
        assert result.disk["used"] < 10 << 20, result
        result = box.run("rm a b c; ls; echo small >d")
        assert (result.ok, result.stdout) == (True, b""), "a full session can be tidied"
        assert 5 << 20 <= result.disk["used"] < 6 << 20, "a frozen layer is still there"
    with Sandbox(ws, environ=environ, session="a", flags=FlagLayer(disk="4M")) as box:
        with pytest.raises(SandboxError) as caught:
            box.run("true")
        assert caught.value.code == "session-full"


def test_usage_of_a_single_command(ws: Path, environ: dict[str, str]) -> None:
    """A command outside of sessions says what it used of the disk, too."""
    with Sandbox(ws, environ=environ, flags=FlagLayer(disk="64M")) as box:
        result = box.run("head -c 3M /dev/zero >big")
    assert result.disk["limit"] == 64 << 20
    assert 3 << 20 <= result.disk["used"] < 8 << 20
    assert result.session == ""
