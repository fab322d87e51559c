"""Stages for the tests of the workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.workspace.tops import WHO, Stage, stage_for

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def stage() -> Iterator[Stage]:
    """A workspace and a top on the same file system, of whoever runs the tests."""
    with stage_for(WHO[0]) as made:
        yield made


@pytest.fixture(params=[(who, near) for who in WHO for near in (True, False)], ids=str)
def any_stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """Applied by root and by a user; with the top near (renames) and far (copies)."""
    who, near = request.param
    with stage_for(who, near=near) as made:
        yield made
