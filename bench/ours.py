"""Casemate as a user meets it: the library without and with a pool, the command without and with a daemon.

The library is measured as a hot loop would use it: one ``AsyncSandbox`` kept open, timed inside a running
event loop from the call to the result (output collected, changes applied). ``Sandbox``, which hands over
to a loop in a thread, is measured beside it. Each variant has an event loop, and so a keeper, of its own:
one keeper would give another variant's waiting sandboxes to whoever asks first.
"""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
import threading
import time
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any, TypeVar

from bench.peers import Absent, BenchError, Peer, Spawned

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from bench.peers import Scratch

__all__ = ["variants"]

INSTALL = "scripts/setup"
T = TypeVar("T")
POOL = 4
# How long a pool is left alone before each run, to make what the run before took.
REFILL_SECONDS = 0.01


def _casemate() -> Any:
    try:
        return importlib.import_module("casemate")
    except ImportError as error:
        raise Absent(f"casemate cannot be imported: {error}") from error


class Library(Peer):
    """``AsyncSandbox`` in a running loop; each run gets a sandbox that is made for it."""

    name = "ours_api"
    what = "AsyncSandbox.run, no pool"
    install = INSTALL
    kind = ""

    def prepare(self, scratch: Scratch) -> None:
        package = _casemate()
        # The loop runs all the time, as a program's would: what a run leaves to do happens between runs.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=self.name, daemon=True)
        self._thread.start()
        options: dict[str, object] = {"ready": POOL, "kind": self.kind} if self.kind else {}
        options["environ"] = scratch.environment()

        async def make() -> Any:
            box = package.AsyncSandbox(str(scratch.workspace), **options)
            await box.open()
            return box

        self._box = self._wait(make())

    def ready(self) -> None:
        if self.kind:
            time.sleep(REFILL_SECONDS)

    def once(self, argv: Sequence[str]) -> float:
        return self._run(argv)[0]

    def output(self, argv: Sequence[str]) -> str:
        return self._run(argv)[1]

    def _run(self, argv: Sequence[str]) -> tuple[float, str]:
        async def timed() -> tuple[float, Any]:
            begin = time.perf_counter()
            result = await self._box.run(list(argv))
            return (time.perf_counter() - begin) * 1000, result

        spent, result = self._wait(timed())
        return spent, _checked(self.name, result)

    def version(self) -> str:
        return f"casemate {_casemate().__version__}" if not self.kind else ""

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self._wait(self._box.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Blocking(Peer):
    """``Sandbox``, for programs without an event loop."""

    name = "ours_api_sync"
    what = "Sandbox.run, no pool"
    install = INSTALL

    def prepare(self, scratch: Scratch) -> None:
        self._box: Any = _casemate().Sandbox(str(scratch.workspace), environ=scratch.environment())

    def once(self, argv: Sequence[str]) -> float:
        begin = time.perf_counter()
        result = self._box.run(list(argv))
        spent = (time.perf_counter() - begin) * 1000
        _checked(self.name, result)
        return spent

    def output(self, argv: Sequence[str]) -> str:
        return _checked(self.name, self._box.run(list(argv)))

    def close(self) -> None:
        self._box.close()


class Prefab(Library):
    name = "ours_prefab"
    what = "AsyncSandbox.run, namespaces, groups and file systems made ahead"
    kind = "prefab"


class Slot(Library):
    name = "ours_slot"
    what = "AsyncSandbox.run, a sealed process waiting"
    kind = "slot"


class Cli(Spawned):
    name = "ours_cli"
    what = "casemate run -- COMMAND, no daemon"
    install = INSTALL

    def command(self, scratch: Scratch) -> Sequence[str | Path]:
        return _command_path(), "run", "--no-daemon", "--"


class CliDaemon(Spawned):
    name = "ours_cli_daemon"
    what = "casemate run -- COMMAND, with the resident daemon"
    install = INSTALL

    def command(self, scratch: Scratch) -> Sequence[str | Path]:
        self.program = _command_path()
        self.found_running = self._control("status").returncode == 0
        if not self.found_running:
            self._control("start")
        status = self._control("status")
        # A daemon of another installation would be passed over without a word.
        if status.returncode or "another installation" in status.stdout:
            raise BenchError(
                f"{self.name}: no usable daemon: {status.stdout.strip()} {status.stderr.strip()}"
            )
        return self.program, "run", "--"

    def ready(self) -> None:
        time.sleep(REFILL_SECONDS)

    def _control(self, word: str) -> subprocess.CompletedProcess[str]:
        argv = [str(self.program), "daemon", word]
        return subprocess.run(argv, env=self.env, check=False, capture_output=True, text=True)

    def close(self) -> None:
        if not self.found_running:
            self._control("stop")


def _checked(name: str, result: Any) -> str:
    """The output of a run that ended well."""
    if result.exit_code != 0 or result.limit:
        raise BenchError(f"{name}: exit {result.exit_code} {result.limit}: {result.stderr!r}")
    return bytes(result.stdout).decode()


def _command_path() -> Path:
    """The installed command: what a shell would find, else the one beside this interpreter."""
    found = which("casemate", path="/usr/local/bin:/usr/bin")
    beside = Path(sys.executable).with_name("casemate")
    if found is not None:
        return Path(found)
    if beside.exists():
        return beside
    raise Absent("the casemate command is not installed")


def variants() -> list[Peer]:
    """Every way Casemate starts a command."""
    return [Library(), Blocking(), Prefab(), Slot(), Cli(), CliDaemon()]
