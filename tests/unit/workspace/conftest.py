"""Stages for the tests of the workspace."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.workspace.tops import Stage

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """A workspace and a top on the same file system."""
    return Stage(tmp_path / "stage")


@pytest.fixture
def far_stage(tmp_path: Path) -> Iterator[Stage]:
    """A workspace, and a top on another file system (a tmpfs)."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="casemate-top-") as top:
        yield Stage(tmp_path / "stage", Path(top))
