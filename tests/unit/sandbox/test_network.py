"""Commands of the library behind the gate. ``test_as_user`` runs this as a user."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from casemate.errors import SandboxError
from casemate.policy.model import FlagLayer
from casemate.sandbox import AsyncSandbox
from casemate.sandbox import gates as gates_module
from casemate.sandbox.kept import Kept
from tests.cli.harness import alive, until
from tests.unit.sandbox.test_api import PYTHON, drive
from tests.unit.sandbox.test_pools import keeper as keeper_pid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from casemate.sandbox.gate import GateWorker
    from casemate.sandbox.result import Result

HOST = "host.casemate.internal"
# Says each line that it reads to the host's service, and prints what comes back.
TALK = f"""
import socket, sys
end = socket.create_connection(("{HOST}", int(sys.argv[1])), 20)
print("connected", flush=True)
for line in sys.stdin:
    end.sendall(line.encode())
    print(end.recv(100).decode(), end="", flush=True)
"""


class Echo:
    """A service of the host's loopback that says what it hears. ``heard`` counts connections that spoke."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self.listener.getsockname()[1]
        self.connections: list[socket.socket] = []
        self.heard = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                end, _ = self.listener.accept()
                end.settimeout(30)
                self.connections.append(end)
                threading.Thread(target=self._serve, args=(end,), daemon=True).start()

    def _serve(self, end: socket.socket) -> None:
        with suppress(OSError):
            data = end.recv(65536)
            self.heard += bool(data)
            while data:
                end.sendall(data)
                data = end.recv(65536)
            end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for end in self.connections:
            end.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    """A service of the host."""
    made = Echo()
    yield made
    made.close()


def allow(*rules: str, **more: Any) -> FlagLayer:
    """Flags that allow these hosts."""
    return FlagLayer(allow=rules, **more)


def service(echo: Echo) -> str:
    return f"{HOST}:{echo.port}"


def say(echo: Echo, *lines: str) -> dict[str, Any]:
    """What ``run`` needs for a command that says lines to the service."""
    return {
        "command": [PYTHON, "-c", TALK, str(echo.port)],
        "stdin": "".join(f"{x}\n" for x in lines).encode(),
    }


def workers() -> list[GateWorker]:
    """The workers of this loop."""
    return gates_module.gates()._workers


def descriptors(worker: GateWorker) -> int:
    return len(os.listdir(f"/proc/{worker._pid}/fd")) if os.geteuid() == 0 else 0


def test_reached(ws: Path, environ: dict[str, str], echo: Echo) -> None:
    """A command reaches what its policy names, and its result says so."""

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ, flags=allow(service(echo))) as box:
            result = await box.run(**say(echo, "hello", "again"))
            assert result.stdout == b"connected\nhello\nagain\n", result.stderr
            use = result.network
            assert use.capture in ("sk_lookup", "nftables")
            assert (use.allowed, use.refused, use.sent, use.received, use.lost) == (1, 0, 12, 12, False)
            (event,) = [event for event in use.events if event["kind"] == "connect"]
            assert (event["host"], event["port"], event["rule"]) == (HOST, echo.port, service(echo))

    drive(main())


def test_refused(ws: Path, environ: dict[str, str], echo: Echo) -> None:
    """What it does not name is not reached; the result has the line that would allow it."""

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ, flags=allow(f"{HOST}:1")) as box:
            result = await box.run(**say(echo, "hello"))
            assert result.exit_code == 1
            assert [denial.allow for denial in result.denials if denial.kind == "network"] == [
                f'network.allow = ["{service(echo)}"]'
            ]
            assert result.network.refused >= 1
        async with AsyncSandbox(ws, environ=environ) as box:
            result = await box.run(**say(echo, "hello"))
            assert result.exit_code == 1
            assert result.network.capture == ""
            assert workers() == []

    drive(main())
    assert echo.heard == 0


def test_one_worker_for_all(workspaces: Callable[[], Path], environ: dict[str, str], echo: Echo) -> None:
    """Commands of several sandboxes share a worker: nothing of them stays there, it ends with the last."""

    async def main() -> int:
        boxes = [AsyncSandbox(workspaces(), environ=environ, flags=allow(service(echo))) for _ in range(8)]
        await boxes[0].run(**say(echo, "first"))
        (worker,) = workers()
        before = descriptors(worker)
        results = await asyncio.gather(*(box.run(**say(echo, str(n))) for n, box in enumerate(boxes)))
        assert [result.stdout for result in results] == [f"connected\n{n}\n".encode() for n in range(8)]
        assert workers() == [worker]
        assert worker.shares == 0
        assert worker.faults == []
        assert descriptors(worker) == before
        for box in boxes:
            await box.close()
        return worker._pid

    assert not alive(drive(main()))


def test_sharded(
    workspaces: Callable[[], Path], environ: dict[str, str], echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When one worker has many there is another one."""
    monkeypatch.setattr(gates_module, "MOST_SHARES", 2)

    async def main() -> None:
        boxes = [AsyncSandbox(workspaces(), environ=environ, flags=allow(service(echo))) for _ in range(5)]
        results = await asyncio.gather(*(box.run(**say(echo, "x")) for box in boxes))
        assert all(result.ok for result in results)
        assert len(workers()) == 3
        for box in boxes:
            await box.close()

    drive(main())


class Talk:
    """A command under way whose output is heard while it runs."""

    def __init__(self, box: AsyncSandbox, command: str, tasks: asyncio.TaskGroup) -> None:
        self.said = b""
        self._heard = asyncio.Event()
        self.task = tasks.create_task(box.run(command, on_stdout=self._hear))

    def _hear(self, data: bytes) -> None:
        self.said += data
        self._heard.set()

    async def heard(self, what: bytes) -> None:
        while what not in self.said:
            self._heard.clear()
            await asyncio.wait_for(self._heard.wait(), 20)


# A line a moment, so that a command can be looked at while it talks; it ends when its connection does.
TICK = f"""
import socket, sys, time
end = socket.create_connection(("{HOST}", int(sys.argv[1])), 20)
said = False
try:
    while True:
        end.sendall(b"tick\\n")
        if not end.recv(100):
            break
        if not said:
            print("connected", flush=True)
        said = True
        time.sleep(0.01)
except OSError:
    pass
print("cut", flush=True)
try:
    socket.create_connection(("{HOST}", int(sys.argv[1])), 5)
    print("reached", flush=True)
except OSError:
    print("refused", flush=True)
open("made", "w").close()
"""


def ticking(box: AsyncSandbox, echo: Echo, tasks: asyncio.TaskGroup) -> Talk:
    """A command that talks until it is cut, and then does the rest of its work."""
    return Talk(box, f"{PYTHON} -c '{TICK}' {echo.port}", tasks)


def test_the_worker_is_killed(ws: Path, environ: dict[str, str], echo: Echo) -> None:
    """The run goes on without it: nothing more is reached, the changes are applied, the result says so."""

    async def main() -> None:
        async with (
            AsyncSandbox(ws, environ=environ, flags=allow(service(echo))) as box,
            asyncio.TaskGroup() as tasks,
        ):
            talk = ticking(box, echo, tasks)
            await talk.heard(b"connected\n")
            (worker,) = workers()
            os.kill(worker._pid, signal.SIGKILL)
            result: Result = await talk.task
            assert result.exit_code == 0, result.stderr
            assert talk.said == b"connected\ncut\nrefused\n"
            assert result.network.lost
            assert any("gate ended" in note for note in result.notes)
            assert result.applied.changes == ("created made",)
            assert workers() == []
            assert not alive(worker._pid)
            # The next command has a new one.
            assert (await box.run(**say(echo, "hello"))).ok

    drive(main())


def test_the_worker_is_killed_between_two_commands(ws: Path, environ: dict[str, str], echo: Echo) -> None:
    """A worker that died while nobody needed it is replaced without a word."""

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ, flags=allow(service(echo))) as box:
            for _ in range(3):
                result = await box.run(**say(echo, "hello"))
                assert result.ok, result.stderr
                assert not result.network.lost
                (worker,) = workers()
                os.kill(worker._pid, signal.SIGKILL)
                await asyncio.to_thread(until, lambda pid=worker._pid: not alive(pid))

    drive(main())


MANY = """
import os
for number in range(4000):
    with open(f"f{number}", "w") as file:
        file.write(str(number))
"""


@pytest.mark.parametrize("victim", ["worker", "keeper"])
def test_killed_while_changes_are_applied(
    ws: Path, environ: dict[str, str], echo: Echo, victim: str
) -> None:
    """The changes are all there, and nobody says that the command had no network: it had ended."""

    def kill(pid: int) -> int:
        until(lambda: len(os.listdir(ws)) > 10)
        os.kill(pid, signal.SIGKILL)
        return len(os.listdir(ws))

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ, flags=allow(service(echo))) as box:
            assert (await box.run(**say(echo, "hello"))).ok
            pid = workers()[0].pid if victim == "worker" else keeper_pid()
            task = asyncio.get_running_loop().create_task(box.run([PYTHON, "-c", MANY]))
            count = await asyncio.to_thread(kill, pid)
            result = await task
            assert 0 < count < 4000, "the control: it was killed while changes were applied"
            assert (result.ok, result.applied.complete, result.network.lost) == (True, True, False)
            assert result.applied.created == 4000
            assert all((ws / f"f{number}").read_text() == str(number) for number in range(4000))
            assert (await box.run(**say(echo, "hello"))).ok

    drive(main())


def test_cancelled_at_any_moment(ws: Path, environ: dict[str, str], echo: Echo) -> None:
    """However early a command is cancelled, it is ended, its gate forgotten, and the next one runs."""

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ, flags=allow(service(echo))) as box:
            await box.run("true")
            (worker,) = workers()
            before = descriptors(worker)
            for turns in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144):
                task = asyncio.get_running_loop().create_task(box.run("echo x >left; sleep 30"))
                for _ in range(turns):
                    await asyncio.sleep(0 if turns < 20 else 0.0005)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert worker.shares == 0, turns
            result = await box.run(**say(echo, "hello"))
            assert result.stdout == b"connected\nhello\n"
            await asyncio.to_thread(until, lambda: descriptors(worker) == before)
            assert worker.faults == []

    drive(main())


def test_rules_that_change(ws: Path, environ: dict[str, str], echo: Echo) -> None:
    """Rules that change reach a running command: what they do not allow any more is cut."""

    async def main() -> None:
        async with (
            AsyncSandbox(ws, environ=environ, flags=allow(service(echo))) as box,
            asyncio.TaskGroup() as tasks,
        ):
            talk = ticking(box, echo, tasks)
            await talk.heard(b"connected\n")
            await box.change_network(allow=("example.org",))
            result: Result = await talk.task
            assert talk.said == b"connected\ncut\nrefused\n"
            assert "revoked" in [event.get("reason") for event in result.network.events]
            await box.change_network(allow=(service(echo),))
            assert (await box.run(**say(echo, "hello"))).ok

    drive(main())


def test_rules_that_change_while_commands_wait(ws: Path, environ: dict[str, str], echo: Echo) -> None:
    """A command that waits for its turn, or is just starting, goes by the rules of when it runs."""

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ, flags=allow(service(echo))) as box:
            loop = asyncio.get_running_loop()
            await box.run("true")
            for turns in (0, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20):
                first = loop.create_task(box.run("sleep 0.05"))
                second = loop.create_task(box.run(**say(echo, "hello")))
                for _ in range(turns):
                    await asyncio.sleep(0)
                await box.change_network(allow=(f"{HOST}:1",))
                assert (await first).ok
                assert (await second).exit_code == 1, turns
                await box.change_network(allow=(service(echo),))
            assert (await box.run(**say(echo, "hello"))).ok

    drive(main())
    assert echo.heard == 1


# Speaks twice at a time to a host that no rule names, and waits for both ends.
TWICE = """
import socket, sys
ends = [socket.create_connection(("unlisted.example", int(sys.argv[1])), 20) for _ in (1, 2)]
for end in ends:
    end.sendall(b"hello\\n")
for end in ends:
    try:
        end.recv(1)
    except ConnectionResetError:
        pass
"""


def test_questions(ws: Path, environ: dict[str, str], echo: Echo) -> None:
    """A question goes to the reviewer, once for a host and port; the host's own services are no question."""
    asked: list[dict[str, object]] = []

    def review(question: dict[str, object], reply: Callable[[bool, str], None]) -> None:
        asked.append(question)
        asyncio.get_running_loop().call_later(0.05, reply, False, "once")

    async def main() -> None:
        flags = allow("example.org", ask=True)
        async with AsyncSandbox(ws, environ=environ, flags=flags, review=review) as box:
            assert (await box.run(**say(echo, "hello"))).exit_code == 1
            assert asked == []
            result = await box.run([PYTHON, "-c", TWICE, "7777"])
            assert asked == [{"kind": "network", "host": "unlisted.example", "port": 7777, "protocol": "tcp"}]
            assert "not-approved" in [event.get("reason") for event in result.network.events]

    drive(main())


def test_published(ws: Path, environ: dict[str, str]) -> None:
    """A server inside is reached from the host's loopback while it runs, and not afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as spare:
        port = spare.getsockname()[1]

    def ask() -> bytes:
        with socket.create_connection(("127.0.0.1", port), 10) as client:
            client.sendall(b"hello")
            client.shutdown(socket.SHUT_WR)
            return client.recv(100)

    script = (
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 7000))\n"
        "for _ in range(3):\n"
        "    end, _ = server.accept()\n"
        "    end.sendall(b'inside: ' + end.recv(100))\n"
        "    end.close()\n"
    )

    async def main() -> None:
        flags = FlagLayer(publish=(f"{port}:7000",))
        async with AsyncSandbox(ws, environ=environ, flags=flags) as box:
            task = asyncio.get_running_loop().create_task(box.run([PYTHON, "-c", script]))
            found: list[bytes] = []
            while len(found) < 3:
                with suppress(OSError):
                    found.append(await asyncio.to_thread(ask))
                await asyncio.sleep(0.01)
            assert found == [b"inside: hello"] * 3
            assert (await task).ok
            with pytest.raises(ConnectionRefusedError):
                await asyncio.to_thread(ask)

    drive(main())


def test_a_port_that_is_taken(ws: Path, environ: dict[str, str]) -> None:
    """A port that somebody has keeps the command from running, and nothing is left of it."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            flags = FlagLayer(publish=(f"{taken.getsockname()[1]}:7000",))
            async with AsyncSandbox(ws, environ=environ, flags=flags) as box:
                with pytest.raises(SandboxError) as caught:
                    await box.run("true")
                assert caught.value.code == "port-taken"
                assert all(worker.shares == 0 for worker in workers())

    drive(main())


def test_the_keeper_is_killed(ws: Path, environ: dict[str, str], echo: Echo) -> None:
    """A keeper that dies takes its command along, and the gate forgets it; the next one runs."""

    async def main() -> None:
        async with AsyncSandbox(ws, environ=environ, flags=allow(service(echo))) as box:
            await box.run("true")
            (worker,) = workers()
            before = descriptors(worker)
            async with asyncio.TaskGroup() as tasks:
                seen = asyncio.Event()
                talk = tasks.create_task(_failing(box, echo, seen))
                await asyncio.wait_for(seen.wait(), 20)
                keeper = box._keeper
                assert keeper is not None
                os.kill(keeper._pid, signal.SIGKILL)
                assert await talk == "keeper-lost"
            assert worker.shares == 0
            await asyncio.to_thread(until, lambda: descriptors(worker) == before)
            result = await box.run(**say(echo, "hello"))
            assert result.ok, result.stderr

    drive(main())
    with Kept(str(ws), environ) as kept:  # a killed command's work is kept, if it had come that far
        for item in kept.interrupted():
            kept.discard_interrupted(item.name)


async def _failing(box: AsyncSandbox, echo: Echo, seen: asyncio.Event) -> str:
    """The code of what ends a command that would go on."""
    try:
        await box.run(f"{PYTHON} -c '{TICK}' {echo.port}", on_stdout=lambda _: seen.set())
    except SandboxError as error:
        return error.code
    return "it ended"
