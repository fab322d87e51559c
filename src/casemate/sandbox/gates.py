"""The workers of an event loop: shared by all its commands, sharded when there are many."""

from __future__ import annotations

import asyncio
import weakref

from casemate.sandbox.gate import CommandNetwork, GateWorker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from casemate.policy.model import Network
    from casemate.sandbox.gate import Dial, Reviewer
    from casemate.sandbox.review import Saved

__all__ = ["Gates", "close", "gates"]

#: Commands that one worker serves: each has two listeners in it, and connections of its own.
MOST_SHARES = 500

_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Gates] = weakref.WeakKeyDictionary()


class Gates:
    """Workers, started when first needed; they end with the loop's last sandbox, or by themselves."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._workers: list[GateWorker] = []

    async def open(
        self,
        network: Network,
        secrets: Mapping[str, str],
        dial: Dial,
        review: Reviewer | None,
        saved: Saved | None = None,
    ) -> CommandNetwork:
        """A share for one command, ready to be prepared. Raises SandboxError."""
        share = self._worker().open(network, secrets, dial, review, saved)
        try:
            await _until(share, lambda: share.ready)
        except BaseException:
            share.abandon()
            raise
        return share

    @property
    def pids(self) -> list[int]:
        """The workers' processes."""
        return [worker.pid for worker in self._workers]

    def _worker(self) -> GateWorker:
        for worker in self._workers:
            if not worker.lost and worker.shares < MOST_SHARES:
                return worker
        worker = GateWorker()
        self._workers.append(worker)
        self._loop.add_reader(worker.fileno(), self._pump, worker)
        return worker

    def _pump(self, worker: GateWorker) -> None:
        worker.pump()
        if worker.over:
            self._loop.remove_reader(worker.fileno())
            self._workers.remove(worker)
            worker.close()

    async def finish(self, share: CommandNetwork) -> None:
        """Wait until the worker has told everything about a command that has ended."""
        share.ask_end()
        await _until(share, lambda: share.ended)

    def close(self) -> None:
        """End every worker."""
        for worker in self._workers:
            self._loop.remove_reader(worker.fileno())
            worker.close()
        self._workers = []


async def _until(share: CommandNetwork, done: Callable[[], bool]) -> None:
    changed = asyncio.Event()
    share.changed = changed.set
    while not done():
        changed.clear()
        await changed.wait()


def gates() -> Gates:
    """This event loop's workers."""
    loop = asyncio.get_running_loop()
    found = _loops.get(loop)
    if found is None:
        found = _loops[loop] = Gates()
    return found


def close() -> None:
    """End this event loop's workers, if there are any."""
    found = _loops.pop(asyncio.get_running_loop(), None)
    if found is not None:
        found.close()
