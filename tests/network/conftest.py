"""One lab for all tests of the network, and one caller a mode on its host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.network.lab import Lab
from tests.network.matrix import Matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.cli.harness import Caller


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """The lab host and its internet. What cannot be made here fails the test."""
    made = Lab()
    yield made
    made.close()


@pytest.fixture(scope="session")
def callers(lab: Lab, installation: tuple[Path, Path]) -> Iterator[Callable[[str], Caller]]:
    """Root or uid 1000 on the lab host, made when first asked for."""
    made: dict[str, Caller] = {}

    def get(mode: str) -> Caller:
        if mode not in made:
            made[mode] = lab.caller(mode, installation[0])
        return made[mode]

    yield get
    for caller in made.values():
        caller.close()
        caller.clean()


@pytest.fixture
def caller(callers: Callable[[str], Caller], mode: str) -> Iterator[Caller]:
    """Who calls ``casemate`` on the lab host; nothing that a test has started runs on after it."""
    made = callers(mode)
    yield made
    made.close()


@pytest.fixture(scope="session")
def matrix(lab: Lab) -> Matrix:
    """Batches of attacks, each run once."""
    return Matrix(lab)
