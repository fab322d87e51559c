"""What is watched on disk: how much is there already counts, and looks come when they are due."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from casemate.isolation.process import watch as module
from casemate.isolation.process.watch import Watch

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

MIB = 1 << 20


def fill(path: Path, size: int) -> None:
    path.write_bytes(os.urandom(size))
    os.sync()  # blocks that are only promised count as used, too; this makes them so for every file system


def test_what_is_there_already_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for all of the directory, and a look is due when a share of what is left was written."""
    monkeypatch.setattr(module, "_PAUSE", 1000.0)
    fill(tmp_path / "a", 6 * MIB)
    watch = Watch({"disk": 10 * MIB, "disk-used": 6 * MIB}, [str(tmp_path)], os.getpid())
    assert (watch.exceeded(), watch.used) == ("", 6 * MIB)
    fill(tmp_path / "b", 5 * MIB)
    assert watch.exceeded() == "disk"
    assert watch.used >= 11 * MIB
    (tmp_path / "b").unlink()
    other = Watch({"disk": 20 * MIB}, [str(tmp_path)], os.getpid())
    assert other.exceeded() == ""


def test_a_look_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the free space of the host goes up and down, it looks now and then."""
    fill(tmp_path / "a", 2 * MIB)
    monkeypatch.setattr(module, "_free", lambda path: 1 << 40)
    watch = Watch({"disk": MIB}, [str(tmp_path)], os.getpid())
    assert watch.exceeded() == ""
    monkeypatch.setattr(module.time, "monotonic", lambda: 1e9)
    assert watch.exceeded() == "disk"


def test_nothing_to_watch(tmp_path: Path) -> None:
    """Without a limit, or without a directory, nothing is exceeded."""
    fill(tmp_path / "a", MIB)
    assert Watch({}, [str(tmp_path)], os.getpid()).exceeded() == ""
    assert Watch({"disk": 1}, [], os.getpid()).exceeded() == ""
