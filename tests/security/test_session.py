"""The attack table in a session whose changes are applied afterwards: nothing comes through that way."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.security import matrix
from tests.security.engines import Casemate, Outcome, Request
from tests.security.lab import drop_to
from tests.security.rows import ROWS, Row

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.security.lab import World

pytestmark = [pytest.mark.security, pytest.mark.root, pytest.mark.slow]


class InASession(Casemate):
    """Casemate with ``--session``, then a snapshot, a second command, and ``apply``."""

    name = "session"

    def argv(self, request: Request) -> list[str]:
        words = super().argv(request)
        at = words.index("--")
        return [*words[:at], "--session", "table", *words[at:]]

    def run(self, request: Request) -> Outcome:
        outcome = super().run(request)
        self._cli(request, "session", "snapshot", "table")
        self._cli(request, "run", "--session", "table", "--", "/bin/sh", "-c", "ls -laR . ~ >/dev/null; :")
        applied = self._cli(request, "apply", "--session", "table")
        told = "casemate: changed executable: "
        outcome.applied["executables"] = [
            line.removeprefix(told) for line in applied.splitlines() if line.startswith(told)
        ]
        outcome.stderr += applied
        self._cli(request, "session", "discard", "table")
        return outcome

    def _cli(self, request: Request, *words: str) -> str:
        world = request.scene.world
        uid = world.uid if request.uid is None else request.uid
        done = subprocess.run(
            [*drop_to(uid), str(world.command), *words], env=world.environment(), cwd=request.scene.ws,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.stdout + done.stderr


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is one of the matrix."""
    engines: dict[str, Any] = {"session": InASession()}
    monkeypatch.setitem(matrix.ENGINES, "session", engines["session"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row(row: Row, mode: str, worlds: Callable[[str], World], no_leaks: None) -> None:
    """The attack does not get through (its control is in test_matrix)."""
    verdict = matrix.run_row(row, worlds(mode), "session")
    assert verdict.held, verdict.line()
