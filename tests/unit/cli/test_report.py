"""The report's place is settled before the command runs; nothing that appears there later is followed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from casemate.cli.report import ReportFile

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def mask() -> None:
    """The usual umask."""
    os.umask(0o022)


def test_new_and_old_files(tmp_path: Path, mask: None) -> None:
    """A file is made, or replaced as a whole; nothing else is left beside it."""
    target = tmp_path / "report"
    for data in (b"first, longer", b"second"):
        ReportFile(str(target)).write(data)
        assert target.read_bytes() == data
    assert os.listdir(tmp_path) == ["report"]
    assert target.stat().st_mode & 0o777 == 0o644


def test_relative_paths_and_directories_that_move(tmp_path: Path, mask: None) -> None:
    """The directory is the one that was there, wherever it is by now; a new one of its name is not meant."""
    (tmp_path / "sub").mkdir()
    report = ReportFile(f"{tmp_path}/sub/../sub/report")
    (tmp_path / "sub").rename(tmp_path / "moved")
    (tmp_path / "sub").mkdir()
    report.write(b"x")
    assert (tmp_path / "moved" / "report").read_bytes() == b"x"
    assert os.listdir(tmp_path / "sub") == []


def test_links_that_appear_later(tmp_path: Path, mask: None) -> None:
    """A link in the report's place is replaced; what it leads to stays."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    for exists in (True, False):
        target = tmp_path / f"report{exists}"
        if exists:
            target.write_text("old")
        report = ReportFile(str(target))
        target.unlink(missing_ok=True)
        target.symlink_to(victim)
        report.write(b"x")
        assert victim.read_text() == "untouched"
        assert not target.is_symlink()
        assert target.read_bytes() == b"x"


def test_links_of_the_callers_own(tmp_path: Path, mask: None) -> None:
    """A link that was there is followed, and stays."""
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)
    ReportFile(str(link)).write(b"x")
    assert link.is_symlink()
    assert real.read_bytes() == b"x"


def test_a_directory_in_its_place(tmp_path: Path, mask: None) -> None:
    """What cannot be replaced is an error, and leaves no half of a report."""
    report = ReportFile(str(tmp_path / "report"))
    (tmp_path / "report").mkdir()
    with pytest.raises(IsADirectoryError):
        report.write(b"x")
    assert os.listdir(tmp_path) == ["report"]


def test_places_that_cannot_be(tmp_path: Path, mask: None) -> None:
    """A directory that is not there is an error before anything runs."""
    for path in ("no/such/report", "", "file/report"):
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError):  # noqa: PT011 - whichever
            ReportFile(f"{tmp_path}/{path}")


def test_descriptors_and_pipes(tmp_path: Path, mask: None) -> None:
    """A report can go to an open descriptor by its name, to a pipe and to /dev/null."""
    read, write = os.pipe()
    for name in (f"/dev/fd/{write}", f"/proc/self/fd/{write}"):
        ReportFile(name).write(b"x")
        assert os.read(read, 9) == b"x"
    ReportFile("/dev/null").write(b"x")
    os.mkfifo(tmp_path / "fifo")
    other = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    ReportFile(str(tmp_path / "fifo")).write(b"y")
    assert os.read(other, 9) == b"y"
    for number in (read, write, other):
        os.close(number)


def test_the_mode_is_the_callers(tmp_path: Path) -> None:
    """The file has the mode that the caller's umask gives."""
    old = os.umask(0o077)
    try:
        report = ReportFile(str(tmp_path / "report"))
        os.umask(0o022)
        report.write(b"x")
    finally:
        os.umask(old)
    assert (tmp_path / "report").stat().st_mode & 0o777 == 0o600
