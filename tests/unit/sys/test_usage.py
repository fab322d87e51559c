"""Bytes below a directory, whoever filled it; and what names a process for good."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from casemate.sys.process import lives, mark
from casemate.sys.usage import disk_usage
from tests.cli.harness import until

if TYPE_CHECKING:
    from pathlib import Path


def test_every_file_once(tmp_path: Path) -> None:
    """Blocks count, not lengths; several names are one file; links are not followed."""
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / "d/e/f").write_bytes(b"x" * 50_000)
    os.link(tmp_path / "d/e/f", tmp_path / "g")
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 30)
    os.symlink("/usr", tmp_path / "l")
    size, whole = disk_usage(str(tmp_path))
    assert whole
    assert 50_000 <= size < 80_000


def test_deeper_than_a_path(tmp_path: Path) -> None:
    """A tree deeper than any path is counted to its bottom, with few descriptors."""
    here = os.getcwd()
    try:
        os.chdir(tmp_path)
        for _ in range(600):
            os.mkdir("d" * 20)
            os.chdir("d" * 20)
        with open("f", "wb") as file:
            file.write(b"x" * 300_000)
    finally:
        os.chdir(here)
    size, whole = disk_usage(str(tmp_path))
    assert whole
    assert size >= 300_000
    subprocess.run(["rm", "-rf", str(tmp_path / ("d" * 20))], check=True)


def test_no_time(tmp_path: Path) -> None:
    """Where the time is up it says that this is not all; what is not there is nothing."""
    for number in range(30):
        (tmp_path / f"d{number}").mkdir()
        for name in range(20):
            (tmp_path / f"d{number}/f{name}").touch()
    assert not disk_usage(str(tmp_path), 0)[1]
    assert disk_usage(str(tmp_path))[1]
    assert disk_usage(str(tmp_path / "nothing")) == (0, True)


def test_processes_are_named_for_good() -> None:
    """A process lives under its mark until it has ended, collected by its parent or not; another with the
    same pid is another.
    """
    child = subprocess.Popen(["sleep", "60"])
    try:
        name = mark(child.pid)
        assert lives(name)
        pid, _, started = name.partition(" ")
        assert not lives(f"{pid} {int(started) + 1}")
        child.kill()
        until(lambda: not lives(name), 5)  # a zombie by now
    finally:
        child.wait()
    assert not lives(name)
    assert mark(child.pid) == ""
    assert lives(mark(os.getpid()))


@pytest.mark.parametrize("text", ["", " ", "x", "1", "-1 5", "99999999999999999 1", "1 x", "²  1"])
def test_marks_that_are_none(text: str) -> None:
    """Rubbish names no process."""
    assert not lives(text)
