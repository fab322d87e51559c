"""``AsyncSandbox`` and ``Sandbox``: results, streams, ends, errors. ``test_as_user`` runs this as a user."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from casemate.errors import CasemateError, PolicyError, SandboxError
from casemate.policy.model import FlagLayer
from casemate.sandbox import AsyncSandbox, Sandbox
from tests.cli.harness import until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

PYTHON = "/usr/bin/python3"


def drive(work: Coroutine[Any, Any, Any], seconds: float = 60) -> Any:
    """Run on a fresh event loop, with an end."""

    async def bounded() -> Any:
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(bounded())


def test_result_of_a_shell_line(ws: Path, environ: dict[str, str]) -> None:
    """A string goes to the shell; output, code, changes and costs come back; the workspace is changed."""

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ) as box:
            result = await box.run("echo out; echo err >&2; echo x >made; pwd >where; exit 3")
            assert (result.exit_code, result.signal, result.limit, result.ok) == (3, 0, "", False)
            assert (result.stdout, result.stderr) == (b"out\n", b"err\n")
            assert set(result.applied.changes) == {"created made", "created where"}
            assert result.boundary == "process"
            assert set(result.phases) == {"total", "plan", "seal", "run", "settle"}
            assert (await box.run(["/bin/true"])).ok

    drive(main())
    assert (ws / "where").read_text() == f"{ws}\n"


def test_an_argument_list_is_no_shell_line(ws: Path, environ: dict[str, str]) -> None:
    """Arguments are passed as they are: words, bytes and paths of any content."""

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ) as box:
            result = await box.run(["/usr/bin/printf", "%s|", "a b", "$HOME", "\udcff", "", "*"])
            assert result.stdout == b"a b|$HOME|\xff||*|"
            result = await box.run([Path("/usr/bin/printf"), b"%s", b"\xfe"])  # type: ignore[list-item]
            assert result.stdout == b"\xfe"

    drive(main())


def test_stdin_env_cwd(ws: Path, environ: dict[str, str]) -> None:
    """stdin arrives and ends, env adds to the environment, cwd is a directory of the workspace."""
    (ws / "inner").mkdir()

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ) as box:
            result = await box.run(
                "cat; echo $A $CALLERS_SECRET; pwd", stdin=b"in\0put", env={"A": "1"}, cwd="inner"
            )
            assert result.stdout == f"in\0put1\n{ws}/inner\n".encode()
            assert (await box.run("echo $A")).stdout == b"\n", (
                "one command's variables are not the next one's"
            )

    drive(main())


def test_large_streams(ws: Path, environ: dict[str, str]) -> None:
    """Megabytes in and out at once, in a command that reads and writes by turns, are whole."""
    data = os.urandom(5 << 20)

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ) as box:
            result = await box.run(["/usr/bin/tee", "/dev/stderr"], stdin=data)
            assert result.exit_code == 0
            assert result.stdout == data
            assert result.stderr == data
            assert (await box.run(["/usr/bin/head", "-c", "3"], stdin=data)).stdout == data[:3]

    drive(main())


async def happened(condition: Callable[[], object]) -> None:
    """Let the loop run until it is true."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        await asyncio.sleep(0.005)


def test_callbacks(ws: Path, environ: dict[str, str]) -> None:
    """on_stdout and on_stderr get output while the command runs."""
    seen: dict[str, list[bytes]] = {"out": [], "err": []}

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ) as box:
            running = asyncio.ensure_future(  # noqa: TID251 - awaited below
                box.run(
                    "echo one; echo e >&2; read x <fifo; echo two",
                    on_stdout=seen["out"].append,
                    on_stderr=seen["err"].append,
                )
            )
            await happened(lambda: b"".join(seen["out"]) == b"one\n")
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    os.mkfifo(ws / "fifo")
    drive(main())
    assert b"".join(seen["err"]) == b"e\n"


@pytest.mark.parametrize("stream", ["on_stdout", "on_stderr"])
def test_a_callback_that_raises(ws: Path, environ: dict[str, str], stream: str) -> None:
    """What a callback raises ends the command and comes out of ``run``; the sandbox can be used on."""

    def bad(_: bytes) -> None:
        raise RuntimeError("mine")

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ) as box:
            with pytest.raises(RuntimeError, match="mine"):
                await box.run("echo x; echo x >&2; sleep 60", **{stream: bad})  # type: ignore[arg-type]
            assert (await box.run("true")).ok

    drive(main())


def test_timeout(ws: Path, environ: dict[str, str]) -> None:
    """timeout ends the tree, is named, and only shortens the policy's."""

    async def main() -> None:
        flags = FlagLayer(timeout="0.3s")
        async with AsyncSandbox(ws, environ=environ, flags=flags) as box:
            for seconds in (0.1, 60.0, None):
                result = await box.run("sleep 60 & sleep 60", timeout=seconds)
                assert (result.limit, result.signal) == ("timeout", 9)

    drive(main())


def test_cancelling_kills(ws: Path, environ: dict[str, str]) -> None:
    """A cancelled run has ended its command when it is over; what was changed before is applied."""

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ) as box:
            seen: list[bytes] = []
            running = asyncio.ensure_future(  # noqa: TID251 - awaited below
                box.run("echo x >made; echo up; trap '' TERM INT; sleep 60", on_stdout=seen.append)
            )
            await happened(lambda: seen)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert (ws / "made").exists()
            assert (await box.run("cat made")).stdout == b"x\n", "the workspace is free again"

    drive(main())


def test_cancelling_again_and_again(ws: Path, environ: dict[str, str]) -> None:
    """Cancelled at every step, several times, also while changes are applied: no hang, no loss, no leak."""
    script = "i=0; while [ $i -lt 300 ]; do echo $i >f$i; i=$((i+1)); done"

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ) as box:
            for step in range(20):
                running = asyncio.ensure_future(box.run(script))  # noqa: TID251 - awaited below
                for _ in range(4):
                    await asyncio.sleep(0.004 * step)
                    running.cancel()
                    await asyncio.sleep(0)
                    running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running
                assert (await box.run("true")).ok

    drive(main())
    for path in ws.iterdir():
        # Whole, or as the shell had just made it when it was killed.
        assert path.read_text() in (f"{path.name[1:]}\n", "")


def test_the_loop_ends_meanwhile(ws: Path, environ: dict[str, str]) -> None:
    """``asyncio.run`` that ends with commands under way ends them, without a hang."""

    async def main() -> None:
        box = AsyncSandbox(ws, environ=environ)
        await box.open()
        started = asyncio.Event()
        running = asyncio.ensure_future(  # noqa: TID251 - the loop's end cancels it
            box.run("echo up; sleep 60", on_stdout=lambda _: started.set())
        )
        await started.wait()
        running.add_done_callback(lambda _: asyncio.ensure_future(box.close()))  # noqa: TID251
        del running

    began = time.monotonic()
    drive(main())
    assert time.monotonic() - began < 30


def test_errors_are_of_the_tree(ws: Path, environ: dict[str, str]) -> None:
    """What keeps a command from running is an error with a code; the sandbox can be used on."""
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (["no-such-program"], {}, "command-not-found"),
        ([], {}, "no-command"),
        ([""], {}, "no-command"),
        (["true", "a\0b"], {}, "bad-argument"),
        ("true", {"env": {"A": "a\0b"}}, "bad-argument"),
        ("true", {"env": {"": "x"}}, "bad-argument"),
        ("true", {"env": {"A=B": "x"}}, "bad-argument"),
        ("true", {"cwd": "/"}, "cwd-outside"),
        ("true", {"cwd": "../.."}, "cwd-outside"),
        ("true", {"cwd": "not-there"}, "cwd-unusable"),
        (["true", "x" * 140_000], {}, "argument-too-long"),
        (["true", *(["x" * 100_000] * 30)], {}, "argument-too-long"),
    ]

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ) as box:
            for command, options, code in cases:
                with pytest.raises(CasemateError) as caught:
                    await box.run(command, **options)
                assert caught.value.code == code, (command, caught.value)
            assert (await box.run("true")).ok
            assert (await box.run(["true", *(["x" * 100_000] * 10)])).ok

    drive(main())


def test_a_link_out_of_the_workspace_is_no_way_out(ws: Path, environ: dict[str, str]) -> None:
    """A cwd that is a link to the outside leads to the sandbox's own view of that place, or nowhere."""
    (ws / "link").symlink_to("/root")

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ) as box:
            with pytest.raises(SandboxError) as caught:
                await box.run("pwd", cwd="link")
            assert caught.value.code == "cwd-unusable"

    drive(main())


def test_wrong_policies(ws: Path, environ: dict[str, str]) -> None:
    """A policy that is wrong is told at ``open``; full-access is no sandbox."""
    with pytest.raises(PolicyError) as caught:
        AsyncSandbox(ws, preset="full-access")
    assert caught.value.code == "full-access"
    with pytest.raises(PolicyError):
        AsyncSandbox(ws, kind="nonsense")

    async def main() -> None:
        for options in (
            {"preset": "nonsense"},
            {"policy_file": "/no/such/file"},
            {"flags": FlagLayer(read=("/",))},
            {"flags": FlagLayer(boundary="none")},
        ):
            with pytest.raises(PolicyError):
                async with AsyncSandbox(ws, environ=environ, **options):  # type: ignore[arg-type]
                    raise AssertionError("it must not open")
        with pytest.raises(PolicyError):
            await AsyncSandbox("/", environ=environ).open()

    drive(main())


def test_closed(ws: Path, environ: dict[str, str]) -> None:
    """After ``close`` nothing runs; a command under way is ended and told why; it can be opened again."""

    async def main() -> None:
        box = AsyncSandbox(ws, environ=environ)
        started = asyncio.Event()
        running = asyncio.ensure_future(  # noqa: TID251 - awaited below
            box.run("echo up; sleep 60", on_stdout=lambda _: started.set())
        )
        await started.wait()
        await box.close()
        with pytest.raises(SandboxError) as caught:
            await running
        assert caught.value.code == "closed"
        with pytest.raises(SandboxError) as caught:
            await box.run("true")
        assert caught.value.code == "closed"
        await box.open()
        assert (await box.run("true")).ok
        await box.close()
        await box.close()

    drive(main())


def test_one_workspace_is_a_queue(ws: Path, environ: dict[str, str]) -> None:
    """Twenty commands at once in one workspace run one after the other; each sees what came before."""

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ) as box:
            script = 'n=$(cat n 2>/dev/null || echo 0); echo $((n+1)) >n; echo "$1" >>log'
            await asyncio.gather(*(box.run(["/bin/sh", "-c", script, "sh", str(i)]) for i in range(20)))

    drive(main())
    assert (ws / "n").read_text() == "20\n"
    assert sorted(map(int, (ws / "log").read_text().split())) == list(range(20))


def test_two_objects_for_one_workspace(ws: Path, environ: dict[str, str]) -> None:
    """Sandboxes of one workspace queue as well, whatever object they come from."""

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ) as one, AsyncSandbox(ws, environ=environ) as two:
            await asyncio.gather(*(box.run("echo x >>log") for box in (one, two) * 5))

    drive(main())
    assert (ws / "log").read_text() == "x\n" * 10


def test_workspaces_run_side_by_side(workspaces: Callable[[], Path], environ: dict[str, str]) -> None:
    """Commands in different workspaces run at the same time: each waits for the other's start."""
    one, two, shared = workspaces(), workspaces(), workspaces()

    async def main() -> None:
        seen: list[str] = []
        both = asyncio.Event()

        def note(name: str) -> Callable[[bytes], None]:
            def sink(_: bytes) -> None:
                seen.append(name)
                if set(seen) == {"one", "two"}:
                    both.set()

            return sink

        async with AsyncSandbox(one, environ=environ) as a, AsyncSandbox(two, environ=environ) as b:
            runs = [
                asyncio.ensure_future(box.run("echo up; sleep 60", on_stdout=note(name)))  # noqa: TID251
                for box, name in ((a, "one"), (b, "two"))
            ]
            await both.wait()
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)

    drive(main())
    assert shared.is_dir()


def test_many_sandboxes_in_one_loop(workspaces: Callable[[], Path], environ: dict[str, str]) -> None:
    """Forty workspaces and two hundred reading commands at once: all end well."""
    spaces = [workspaces() for _ in range(40)]

    async def main() -> None:
        boxes = [AsyncSandbox(space, environ=environ) for space in spaces]
        results = await asyncio.gather(*(box.run(f"echo {n} >f") for n, box in enumerate(boxes)))
        assert all(result.ok for result in results)
        reader = AsyncSandbox(spaces[0], environ=environ, preset="read-only")
        payload = {"PAYLOAD": "p" * 20_000}
        results = await asyncio.gather(*(reader.run("cat f", env=payload) for _ in range(200)))
        assert [result.stdout for result in results] == [b"0\n"] * 200
        for box in (*boxes, reader):
            await box.close()

    drive(main(), 110)
    assert [(space / "f").read_text() for space in spaces] == [f"{n}\n" for n in range(40)]


def test_synchronous(ws: Path, environ: dict[str, str]) -> None:
    """``Sandbox`` waits: the same results, the same errors."""
    with Sandbox(ws, environ=environ) as box:
        result = box.run("cat; echo x >made", stdin=b"in")
        assert (result.stdout, result.ok) == (b"in", True)
        with pytest.raises(CasemateError):
            box.run(["no-such-program"])
        assert box.run("exit 4").exit_code == 4
    assert (ws / "made").exists()
    with pytest.raises(SandboxError):
        box.run("true")


def test_synchronous_from_threads(workspaces: Callable[[], Path], environ: dict[str, str]) -> None:
    """Threads share sandboxes, or have one each."""
    spaces = [workspaces() for _ in range(4)]
    found: dict[tuple[int, int], bytes] = {}

    def work(number: int) -> None:
        with Sandbox(spaces[number % 4], environ=environ) as box:
            for turn in range(3):
                found[number, turn] = box.run(f"echo {number} {turn}").stdout

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {(n, t): f"{n} {t}\n".encode() for n in range(8) for t in range(3)}


def test_the_library_inherits_nothing(ws: Path, environ: dict[str, str]) -> None:
    """The keeper holds no descriptor of its program, and none of its environment, whatever is inheritable."""
    read, write = os.pipe()
    os.set_inheritable(write, True)

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ, ready=1) as box:
            os.close(write)
            os.set_blocking(read, False)
            until(lambda: _ended(read), 5, "nobody else holds the other end")
            keeper = next(pid for pid in _children() if b"keeper" in _read(f"/proc/{pid}/cmdline"))
            text = _read(f"/proc/{keeper}/environ")
            assert b"hush" not in text
            assert b"PYTEST" not in text
            assert os.readlink(f"/proc/{keeper}/cwd") == "/"
            assert (await box.run("true")).ok

    try:
        drive(main())
    finally:
        os.close(read)


def _ended(read: int) -> bool:
    try:
        return os.read(read, 1) == b""
    except BlockingIOError:
        return False


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


def _children() -> list[int]:
    return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def test_a_program_that_ignores_its_children(ws: Path, environ: dict[str, str]) -> None:
    """Where SIGCHLD is ignored, closing works all the same."""
    old = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with Sandbox(ws, environ=environ) as box:
            assert box.run("true").ok
    finally:
        signal.signal(signal.SIGCHLD, old)
