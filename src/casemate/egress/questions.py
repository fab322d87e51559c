"""Questions about hosts that no rule names: one for each host and port, few at a time, and not without end.

Whoever answers is a person, or pays for each answer. A command that tries a thousand hosts must not be able
to wear either out, so only some questions are open at a time (the next ones wait for their turn) and the
number of all of them is bounded. No answer is a no, and what was refused once is not asked again.
"""

from __future__ import annotations

import asyncio

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MOST_ASKED", "MOST_OPEN", "Questions"]

#: Questions that wait for an answer at a time, and all that one sandbox may cause.
MOST_OPEN, MOST_ASKED = 8, 256
_SECONDS = 300.0


class _Question:
    """One that has been put. ``end`` is when nobody waits for its answer any more."""

    __slots__ = ("answer", "end")

    def __init__(self, answer: asyncio.Future[bool], end: float) -> None:
        self.answer, self.end = answer, end


class Questions:
    """The questions of one sandbox. ``put`` passes one on; its answer comes by ``answer``."""

    def __init__(self, put: Callable[[str, int, str], None], seconds: float = _SECONDS) -> None:
        self._put, self._seconds = put, seconds
        self._loop = asyncio.get_running_loop()
        self._known: dict[tuple[str, int], _Question] = {}
        self._turns = asyncio.Semaphore(MOST_OPEN)
        self._asked = 0

    async def ask(self, host: str, port: int, protocol: str) -> bool:
        """Whether the host may be reached; waits for the answer."""
        question = self._known.get((host, port))
        if question is not None:
            return await self._answered(question)
        async with self._turns:
            # Meanwhile another connection to the same host may have had its turn.
            question = self._known.get((host, port))
            if question is None:
                if self._asked >= MOST_ASKED:
                    return False
                self._asked += 1
                question = _Question(self._loop.create_future(), self._loop.time() + self._seconds)
                self._known[host, port] = question
                self._put(host, port, protocol)
            return await self._answered(question)

    async def _answered(self, question: _Question) -> bool:
        try:
            async with asyncio.timeout_at(question.end):
                return await asyncio.shield(question.answer)
        except TimeoutError:
            return False

    def is_open(self, host: str, port: int) -> bool:
        """Whether it has been put and not been answered. A late answer counts for the connections to come."""
        question = self._known.get((host, port))
        return question is not None and not question.answer.done()

    def answer(self, host: str, port: int, *, allow: bool, again: bool) -> None:
        """Answer an open one. With ``again`` a yes is for who waits now, and the next one is asked about."""
        question = self._known[host, port]
        question.answer.set_result(allow)
        if allow and again:
            del self._known[host, port]
