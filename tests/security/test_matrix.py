"""Every row of the probe table is held, as root and as uid 1000, and every row's control succeeds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.security import matrix
from tests.security.rows import ROWS, Row

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.security.lab import World

pytestmark = [pytest.mark.security, pytest.mark.root]
_controls: dict[tuple[str, str], matrix.Verdict] = {}


def control(row: Row, mode: str, worlds: Callable[[str], World]) -> matrix.Verdict:
    """The row's control for a mode, run once."""
    key = (row.id, matrix.control_modes(row, mode))
    if key not in _controls:
        _controls[key] = matrix.run_row(row, worlds(key[1]), row.control)
    return _controls[key]


def test_the_table_has_its_45_rows() -> None:
    """The table is complete and its ids are unique."""
    assert len(ROWS) == 45
    assert len({row.id for row in ROWS}) == 45


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row(row: Row, mode: str, worlds: Callable[[str], World], no_leaks: None) -> None:
    """The attack does not get through; allowed, it does."""
    allowed = control(row, mode, worlds)
    assert allowed.leaked, f"the control failed, so the row proves nothing: {allowed.line()}"
    verdict = matrix.run_row(row, worlds(mode), "casemate")
    assert verdict.held, verdict.line()
