"""Names to addresses, by the host's own hosts file and name server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from casemate.egress.resolver import Lookups, Resolver
from tests.cli.harness import until
from tests.network import zone
from tests.unit.egress.gatelab import ADDRESSES, BOTH, when

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.unit.egress.gatelab import Lab


@pytest.fixture
def make(lab: Lab) -> Iterator[Callable[..., Resolver]]:
    """Makes resolvers in the lab's host."""
    made: list[Resolver] = []

    def new(remembered: float = 5.0) -> Resolver:
        resolver = lab.call(lambda: Resolver(remembered))
        made.append(resolver)
        return resolver

    yield new
    for resolver in made:
        lab.call(resolver.close)


def test_the_hosts_own_means(lab: Lab, make: Callable[..., Resolver]) -> None:
    """The hosts file and the name server are both asked, as the host itself would."""
    resolver = make()
    with lab.names() as asked:
        assert set(lab.run(resolver.addresses(BOTH))) == set(ADDRESSES[BOTH])
        assert asked == []
        assert lab.run(resolver.addresses("v4only.example")) == ("93.184.216.42",)
        assert set(asked) == {"v4only.example"}


def test_one_question_for_many(lab: Lab, make: Callable[..., Resolver]) -> None:
    """A hundred connections to one host ask once, and the next ones not at all for a moment."""
    resolver = make()
    with lab.names() as asked:

        async def many() -> list[tuple[str, ...]]:
            return await asyncio.gather(*(resolver.addresses("v4only.example") for _ in range(100)))

        assert set(lab.run(many())) == {("93.184.216.42",)}
        assert len(asked) <= 2  # A and AAAA
        lab.run(resolver.addresses("v4only.example"))
        assert len(asked) <= 2


def test_remembered_for_a_moment_only(lab: Lab, make: Callable[..., Resolver]) -> None:
    """What a name leads to may change: after its moment it is asked for anew."""
    resolver = make(remembered=0.05)
    name = zone.to("flip", "93.184.216.50", "93.184.216.51")
    with lab.names():
        first = lab.run(resolver.addresses(name))
        assert len(first) == 1
        until(lambda: lab.run(resolver.addresses(name)) != first)


def test_what_cannot_be_resolved(lab: Lab, make: Callable[..., Resolver]) -> None:
    """A name that is not there raises OSError, and that is not remembered."""
    resolver = make()
    with lab.names() as asked:
        for _ in range(2):
            with pytest.raises(OSError, match=r".+"):
                lab.run(resolver.addresses("no.such.name.invalid"))
        assert asked.count("no.such.name.invalid") >= 2
    with pytest.raises(OSError, match=r".+"):
        lab.run(resolver.addresses("nobody.answers.example"))


def test_ahead(lab: Lab, make: Callable[..., Resolver]) -> None:
    """A name that is expected is known when it is needed; one that cannot be resolved does no harm."""
    resolver = make()
    with lab.names() as asked:
        lookups = lab.call(lambda: Lookups(resolver))
        lab.call(lambda: [lookups.expect("v4only.example") for _ in range(10)])
        until(lambda: "v4only.example" in resolver._known)
        count = len(asked)
        assert count <= 2
        assert lab.run(resolver.addresses("v4only.example")) == ("93.184.216.42",)
        assert len(asked) == count
        lab.call(lambda: lookups.expect("no.such.name.invalid"))
        until(lambda: not lookups._tasks and not resolver._asking)


def test_who_gives_up(lab: Lab, make: Callable[..., Resolver]) -> None:
    """One that is cancelled takes nothing from the others that wait for the same name."""
    resolver = make()
    with lab.names():

        async def two() -> tuple[str, ...]:
            loop = asyncio.get_running_loop()
            first, second = (loop.create_task(resolver.addresses("v4only.example")) for _ in range(2))
            await asyncio.sleep(0)
            first.cancel()
            found = await second
            assert first.cancelled()
            return found

        assert lab.run(two()) == ("93.184.216.42",)


def test_closed_while_asked(lab: Lab, make: Callable[..., Resolver]) -> None:
    """Nobody waits for a name server that does not answer when the end has come."""
    resolver = make()

    async def end() -> None:
        task = asyncio.get_running_loop().create_task(resolver.addresses("nobody.answers.example"))
        await asyncio.sleep(0)
        resolver.close()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    lab.run(end())


def test_names_that_nobody_answers_are_in_nobodys_way(lab: Lab, make: Callable[..., Resolver]) -> None:
    """A sandbox that asks for many dead names waits for itself; another one's name is looked up at once."""
    resolver = make()

    async def race() -> tuple[str, ...]:
        loop = asyncio.get_running_loop()
        greedy, other = Lookups(resolver), Lookups(resolver)
        dead = [loop.create_task(greedy.addresses(f"n{number}.silent.example")) for number in range(200)]
        try:
            async with asyncio.timeout(2):
                return await other.addresses("v4only.example")
        finally:
            for task in dead:
                task.cancel()

    with lab.names(silent="silent.example"):
        assert lab.run(race()) == ("93.184.216.42",)


def test_who_gives_up_gives_no_turn_back(lab: Lab, make: Callable[..., Resolver]) -> None:
    """A lookup goes on when its client has gone, so its turn is not free before it has ended; then it is."""
    resolver = make()
    with lab.names():

        async def give_up() -> tuple[int, int]:
            loop = asyncio.get_running_loop()
            hostile = Lookups(resolver)
            most = 0
            for number in range(30):
                task = loop.create_task(hostile.addresses(f"slow-{number}.to.example"))
                for _ in range(5):
                    await asyncio.sleep(0)
                most = max(most, len(resolver._asking))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await when(lambda: not resolver._asking and not hostile._turns.locked())
            return most, len(await hostile.addresses("v4only.example"))

        most, found = lab.run(give_up())
    assert most <= 4
    assert found == 1
