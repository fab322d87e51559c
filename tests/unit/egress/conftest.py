"""The laboratory of the gate's tests: a host and an internet, made once for each file of tests, and gates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from casemate.sandbox.gate import GateWorker
from tests.unit.egress.flowlab import NAME, OTHER, Certificates, Gate, credential, gate, network, web
from tests.unit.egress.flowsite import Site
from tests.unit.egress.gatelab import Lab
from tests.unit.egress.tlslab import Echo, looking

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


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """The authority of the internet of these tests."""
    return Certificates(tmp_path_factory.mktemp("ca"), NAME, OTHER)


@pytest.fixture(scope="module")
def host(certificates: Certificates) -> Iterator[tuple[str, int]]:
    """A TLS host that shows what it gets."""
    with web(Echo, certificates.context) as address:
        yield address


@pytest.fixture
def made(host: tuple[str, int], certificates: Certificates) -> Iterator[Gate]:
    """A gate with a token for the host."""
    Echo.seen.clear()
    with looking(host, certificates, credential()) as found:
        yield found


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[str, int]]:
    """The host behind the gate."""
    with web(Site) as address:
        yield address


@pytest.fixture
def plain(site: tuple[str, int]) -> Iterator[Gate]:
    """A gate before it."""
    with gate(site, network()) as made:
        yield made
