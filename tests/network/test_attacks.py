"""Every row of the network's attack table is held, as root and as uid 1000, and every row's control succeeds.

Judged at the other end: by the packets, connections, names and words that the lab's internet and the lab
host's own services have seen, never by what the attacking program was told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.network.matrix import POLICIES, ROWS, Matrix

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli.harness import Caller
    from tests.network.row import Row

pytestmark = [pytest.mark.security, pytest.mark.root]


def test_ids_are_unique() -> None:
    """No two rows have one name, and each is in a group that has a policy."""
    assert len({row.id for row in ROWS}) == len(ROWS) >= 50
    assert {row.group for row in ROWS} == set(POLICIES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row(row: Row, caller: Caller, callers: Callable[[str], Caller], matrix: Matrix) -> None:
    """Nothing of the attack gets out; the same, allowed, does."""
    allowed = matrix.control(caller, row, callers("root"))
    assert allowed.leaked, f"the control failed, so the row proves nothing: {allowed.line()}"
    verdict = matrix.attack(caller, row.group).verdicts[row.id]
    assert verdict.held, verdict.line()


@pytest.mark.parametrize("group", POLICIES)
def test_nothing_is_left(group: str, caller: Caller, matrix: Matrix) -> None:
    """After all of it no process, mount, control group or file of a run is there."""
    batch = matrix.attack(caller, group)
    assert batch.verdicts
    assert caller.traces() == []
