"""Questions about hosts: once for each, few at a time, bounded."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from casemate.egress.questions import MOST_ASKED, MOST_OPEN, Questions
from tests.unit.egress.gatelab import when

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Asked:
    """Questions and what was put of them."""

    def __init__(self, seconds: float = 60) -> None:
        self.put: list[tuple[str, int]] = []
        self.questions = Questions(lambda host, port, _: self.put.append((host, port)), seconds)
        self.tasks: list[asyncio.Task[bool]] = []

    async def ask(self, host: str, port: int = 443) -> asyncio.Task[bool]:
        task = asyncio.get_running_loop().create_task(self.questions.ask(host, port, "https"))
        self.tasks.append(task)
        for _ in range(3):
            await asyncio.sleep(0)
        return task

    def answer(self, host: str, port: int = 443, *, allow: bool = True, again: bool = False) -> None:
        self.questions.answer(host, port, allow=allow, again=again)


def asking(test: Callable[[Asked], Awaitable[None]], seconds: float = 60) -> None:
    """Run a test with questions."""

    async def run() -> None:
        async with asyncio.timeout(10):
            asked = Asked(seconds)
            await test(asked)
            for task in asked.tasks:
                task.cancel()
            await asyncio.gather(*asked.tasks, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize("allow", [True, False])
def test_one_for_each_host_and_port(allow: bool) -> None:
    """All connections to a host and port wait for one answer; another port is another question."""

    async def test(asked: Asked) -> None:
        waiting = [await asked.ask("a.example") for _ in range(5)]
        other = await asked.ask("a.example", 80)
        assert asked.put == [("a.example", 443), ("a.example", 80)]
        asked.answer("a.example", allow=allow)
        assert await asyncio.gather(*waiting) == [allow] * 5
        assert not other.done()

    asking(test)


def test_no_is_not_asked_again() -> None:
    """What was refused stays so, without another question."""

    async def test(asked: Asked) -> None:
        first = await asked.ask("a.example")
        asked.answer("a.example", allow=False)
        assert not await first
        assert not await asked.questions.ask("a.example", 443, "https")
        assert len(asked.put) == 1

    asking(test)


def test_once() -> None:
    """A yes for once is for those that wait; the next one is asked about again. Control: a yes for longer."""

    async def test(asked: Asked) -> None:
        first = await asked.ask("a.example")
        asked.answer("a.example", again=True)
        assert await first
        second = await asked.ask("a.example")
        assert len(asked.put) == 2
        asked.answer("a.example")
        assert await second
        assert await asked.questions.ask("a.example", 443, "https")
        assert len(asked.put) == 2

    asking(test)


def test_no_answer() -> None:
    """Without an answer it is a no, and nobody else waits as long for the same; a late yes still counts."""

    async def test(asked: Asked) -> None:
        assert not await asked.questions.ask("a.example", 443, "https")
        begin = asyncio.get_running_loop().time()
        assert not await asked.questions.ask("a.example", 443, "https")
        assert asyncio.get_running_loop().time() - begin < 0.05
        assert asked.questions.is_open("a.example", 443)
        asked.answer("a.example")
        assert await asked.questions.ask("a.example", 443, "https")
        assert len(asked.put) == 1

    asking(test, seconds=0.1)


def test_few_at_a_time() -> None:
    """A command that tries a thousand hosts puts few questions; the next come when those are answered."""

    async def test(asked: Asked) -> None:
        for number in range(100):
            await asked.ask(f"host{number}.example")
        assert len(asked.put) == MOST_OPEN
        asked.answer("host3.example", allow=False)
        assert not await asked.tasks[3]
        await when(lambda: len(asked.put) > MOST_OPEN)
        assert len(asked.put) == MOST_OPEN + 1

    asking(test)


def test_who_has_waited_for_a_turn_asks_nothing_twice() -> None:
    """Two that waited in the queue for the same host share one question when their turn has come."""

    async def test(asked: Asked) -> None:
        for number in range(MOST_OPEN):
            await asked.ask(f"host{number}.example")
        two = [await asked.ask("late.example") for _ in range(2)]
        for number in range(MOST_OPEN):
            asked.answer(f"host{number}.example", allow=False)
        await when(lambda: asked.questions.is_open("late.example", 443))
        asked.answer("late.example")
        assert await asyncio.gather(*two) == [True, True]
        assert asked.put.count(("late.example", 443)) == 1

    asking(test)


def test_bounded() -> None:
    """After so many questions in all the answer is no without one; what was answered yes before goes on."""

    async def test(asked: Asked) -> None:
        for number in range(MOST_ASKED):
            task = await asked.ask(f"host{number}.example")
            asked.answer(f"host{number}.example")
            assert await task
        assert not await asked.questions.ask("more.example", 443, "https")
        assert len(asked.put) == MOST_ASKED
        assert await asked.questions.ask("host0.example", 443, "https")

    asking(test)


def test_who_goes_leaves_the_question() -> None:
    """A client that does not wait any more takes nothing away: the answer is there for the next one."""

    async def test(asked: Asked) -> None:
        first = await asked.ask("a.example")
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = await asked.ask("a.example")
        assert len(asked.put) == 1
        asked.answer("a.example")
        assert await second

    asking(test)


def test_turns_come_back() -> None:
    """Clients that go away give their turns back, so that the next questions can be put."""

    async def test(asked: Asked) -> None:
        for number in range(MOST_OPEN):
            await asked.ask(f"host{number}.example")
        for task in asked.tasks:
            task.cancel()
        await asyncio.gather(*asked.tasks, return_exceptions=True)
        await asked.ask("next.example")
        assert asked.put[-1] == ("next.example", 443)

    asking(test)
