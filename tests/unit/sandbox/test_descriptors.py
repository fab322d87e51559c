"""Descriptors that are held for a running sandbox. ``test_as_user`` runs this as a user."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from casemate.policy.model import FlagLayer
from casemate.sandbox import AsyncSandbox
from casemate.sandbox.gates import gates
from tests.unit.sandbox.test_api import drive
from tests.unit.sandbox.test_pools import keeper

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

COUNT = 10
GATE, NONE = FlagLayer(network="allowlist", allow=("example.com",)), FlagLayer(network="none")
DIRECT = FlagLayer(network="none", workspace="direct")


def held(pid: int) -> int:
    """How many descriptors a process has."""
    return len(os.listdir(f"/proc/{pid}/fd"))


async def settled(pids: Mapping[str, int], wanted: Mapping[str, int]) -> dict[str, int]:
    """What processes hold as soon as it is no more than wanted, or after a while."""
    for _ in range(200):
        now = {name: held(pid) for name, pid in pids.items()}
        if all(now[name] <= wanted[name] for name in now):
            break
        await asyncio.sleep(0.02)
    return now


@pytest.mark.parametrize(("flags", "most"), [
    pytest.param(GATE, {"library": 3, "keeper": 4, "worker": 2}, id="gate"),
    pytest.param(NONE, {"library": 3, "keeper": 4}, id="no network", marks=pytest.mark.slow),
    pytest.param(DIRECT, {"library": 3, "keeper": 5}, id="direct", marks=pytest.mark.slow),
])  # fmt: skip
def test_few_descriptors(
    workspaces: Callable[[], Path], environ: dict[str, str], flags: FlagLayer, most: dict[str, int]
) -> None:
    """Ten sandboxes at once take few descriptors each in the library's process, the keeper and the gate."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            made = [AsyncSandbox(workspaces(), environ=environ, flags=flags) for _ in range(COUNT)]
            boxes = [await stack.enter_async_context(box) for box in made]
            # What is made once and kept (templates, id maps, the gate) is there after this.
            await asyncio.gather(*(box.run(["/bin/sleep", "0.2"]) for box in boxes))
            pids = dict(zip(most, (os.getpid(), keeper(), *gates().pids), strict=True))
            if os.getuid():
                pids.pop("worker", 0)  # a user cannot look at it: it is not dumpable
            idle = await settled(pids, dict.fromkeys(pids, 0))
            up = [asyncio.Event() for _ in boxes]
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(box.run("echo; exec sleep 60", on_stdout=_setter(event)))
                    for box, event in zip(boxes, up, strict=True)
                ]
                await asyncio.gather(*(event.wait() for event in up))
                busy = await settled(pids, {name: idle[name] + most[name] * COUNT for name in pids})
                for task in tasks:
                    assert not task.done()
                    task.cancel()
            for name in pids:
                assert COUNT <= busy[name] - idle[name] <= most[name] * COUNT, (name, idle, busy)
            after = await settled(pids, idle)
            assert all(after[name] <= idle[name] for name in pids), (idle, after)

    drive(main())


def _setter(event: asyncio.Event) -> Callable[[bytes], None]:
    return lambda _: event.set()


def test_changes_of_a_workspace_that_was_closed(
    workspaces: Callable[[], Path], environ: dict[str, str]
) -> None:
    """What a longer command has changed is found at its end, even without any right left to look at it."""

    async def main() -> None:
        async with AsyncSandbox(workspaces(), environ=environ) as box:
            result = await box.run(["/bin/sh", "-c", "echo done >file; chmod 0 .; sleep 0.3"])
            assert result.ok, result
            assert result.applied.changes == ("created file",), result

    drive(main())
