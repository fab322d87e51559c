"""Who works: root and uid 1000, on this machine (for its package indexes) or on the lab's host."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cli.harness import Caller, Den, until
from tests.everyday.work import Work, make_work
from tests.network import conftest as network
from tests.security.lab import give

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

lab = network.lab
callers = network.callers


@pytest.fixture(scope="session")
def workers(installation: tuple[Path, Path]) -> Iterator[Callable[[str], Caller]]:
    """Root in a den or uid 1000, on this machine, made when first asked for."""
    made: dict[str, Caller] = {}
    bases = []

    def get(mode: str) -> Caller:
        if mode not in made:
            base = Path(tempfile.mkdtemp(prefix="casemate-everyday-", dir="/srv"))
            base.chmod(0o755)
            bases.append(base)
            made[mode] = Caller(mode, installation[0], base, Den(size="2g") if mode == "root" else None)
            made[mode].home.mkdir(mode=0o700)
            give(made[mode].home, made[mode].uid)
        return made[mode]

    yield get
    for caller in made.values():
        caller.close()
        caller.clean()
        if caller.den is not None:
            caller.den.close()
    for base in bases:
        shutil.rmtree(base)


def _worked(caller: Caller) -> Iterator[Work]:
    yield make_work(caller)
    caller.close()
    until(lambda: not caller.traces(), 10, "nothing of the work's runs is left")


@pytest.fixture
def work(workers: Callable[[str], Caller], mode: str) -> Iterator[Work]:
    """A workspace on this machine; nothing of its runs is left afterwards."""
    yield from _worked(workers(mode))


@pytest.fixture
def lab_work(callers: Callable[[str], Caller], mode: str) -> Iterator[Work]:
    """A workspace on the lab's host."""
    yield from _worked(callers(mode))
