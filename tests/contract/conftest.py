"""Every boundary, started as every kind of caller: what a new boundary has to be added to."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.conftest import caller, traceless

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cli.harness import Caller, Ended

__all__ = ["caller", "traceless"]

BOUNDARIES = ("process",)


@dataclasses.dataclass(frozen=True)
class Boundary:
    """One boundary as one caller uses it, in one workspace."""

    name: str
    caller: Caller
    ws: Path
    policy: Path

    def sh(self, script: str, *flags: str, **how: Any) -> Ended:
        """Run a shell script behind it."""
        return self.caller.sh(how.pop("ws", self.ws), script, flags=(*self.flags, *flags), **how)

    def py(self, script: str, *args: str, flags: tuple[str, ...] = (), **how: Any) -> Ended:
        """Run a Python script behind it."""
        return self.caller.py(self.ws, script, *args, flags=(*self.flags, *flags), **how)

    @property
    def flags(self) -> tuple[str, ...]:
        """What chooses it."""
        return ("--policy", str(self.policy))


@pytest.fixture(params=BOUNDARIES)
def boundary(request: pytest.FixtureRequest, caller: Caller) -> Iterator[Boundary]:
    """Each boundary in turn, with a fresh workspace."""
    ws = caller.workspace()
    text = f'version = 1\n[isolation]\nboundary = "{request.param}"\n'
    policy = caller.file(ws.parent / "boundary.toml", text)
    yield Boundary(str(request.param), caller, ws, policy)
    caller.close()
