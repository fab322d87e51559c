"""Names to addresses, on the host's side and by the host's own means (its hosts file, its resolver).

Only names that are allowed come here, so no other is ever asked for outside. What is answered is checked by
the caller each time it is used; it is remembered for a moment only, so that a page with a hundred connections
to one host asks once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import time
from contextlib import suppress

__all__ = ["Lookups", "Resolver"]

_REMEMBERED = 5.0  # seconds
_MOST = 4096
_AT_ONCE = 64
_AT_ONCE_EACH = 4


class Resolver:
    """Shared by all sandboxes of a worker: what one is told, another may be told as well.

    An answer is good for ``remembered`` seconds.
    """

    def __init__(self, remembered: float = _REMEMBERED) -> None:
        self._remembered = remembered
        self._pool = concurrent.futures.ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="resolver")
        self._known: dict[str, tuple[float, tuple[str, ...]]] = {}
        self._asking: dict[str, asyncio.Future[tuple[str, ...]]] = {}

    async def addresses(self, name: str) -> tuple[str, ...]:
        """The addresses of a name, in the order of the host's preference. Raises OSError."""
        known = self._known.get(name)
        if known is not None and known[0] > time.monotonic():
            return known[1]
        asking = self._asking.get(name)
        if asking is None:
            loop = asyncio.get_running_loop()
            asking = loop.run_in_executor(self._pool, _look_up, name)
            self._asking[name] = asking
            asking.add_done_callback(lambda done: self._answered(name, done))
        return await asyncio.shield(asking)

    def knows(self, name: str) -> bool:
        """Whether ``addresses`` has an answer, or has asked already."""
        known = self._known.get(name)
        return name in self._asking or (known is not None and known[0] > time.monotonic())

    def _answered(self, name: str, done: asyncio.Future[tuple[str, ...]]) -> None:
        self._asking.pop(name, None)
        if done.cancelled() or done.exception() is not None:
            return
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[name] = (time.monotonic() + self._remembered, done.result())

    def close(self) -> None:
        """Let the threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Lookups:
    """One sandbox's share of a resolver: few lookups at a time, so that its own wait and not others'."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver
        self._turns = asyncio.Semaphore(_AT_ONCE_EACH)
        self._tasks: set[asyncio.Task[object]] = set()

    async def addresses(self, name: str) -> tuple[str, ...]:
        """As ``Resolver.addresses``."""
        if self._resolver.knows(name):
            return await self._resolver.addresses(name)
        await self._turns.acquire()
        # The turn is over with the lookup, not with whoever waits for it: nobody can call a lookup off.
        looking = asyncio.get_running_loop().create_task(self._resolver.addresses(name))
        self._tasks.add(looking)
        looking.add_done_callback(self._looked)
        return await asyncio.shield(looking)

    def _looked(self, looking: asyncio.Task[tuple[str, ...]]) -> None:
        self._tasks.discard(looking)
        self._turns.release()
        if not looking.cancelled():
            looking.exception()  # whoever waits for it is told; perhaps nobody does any more

    def expect(self, name: str) -> None:
        """Look a name up ahead: somebody has just asked for its address and is about to connect.

        Not where others wait: what is guessed must not be in the way of what is needed.
        """
        if self._turns.locked() or self._resolver.knows(name):
            return
        task = asyncio.get_running_loop().create_task(self._ahead(name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ahead(self, name: str) -> None:
        with suppress(OSError):
            await self.addresses(name)


def _look_up(name: str) -> tuple[str, ...]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))
