"""The laboratory of the gate's tests: a host and an internet, made once for each file of tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from casemate.sandbox.gate import GateWorker
from tests.unit.egress.gatelab import Lab

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def world() -> Iterator[Lab]:
    """A host, its cable, and what is at the other end."""
    made = Lab()
    yield made
    made.close()


@pytest.fixture
def lab(world: Lab) -> Iterator[Lab]:
    """The same for one test: nothing may have gone wrong unseen in the gate's loop when it is over."""
    world.faults.clear()
    yield world
    assert world.faults == []


@pytest.fixture
def worker(lab: Lab) -> Iterator[GateWorker]:
    """A worker on the lab's host. Whatever was done to it, it met nothing that it did not expect."""
    made = lab.call(GateWorker)
    yield made
    made.pump()
    faults = made.faults
    made.close()
    assert faults == []
