"""Lock files that nobody holds are swept; directories are opened as a process with another root would."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

import pytest

from casemate.sys.files import open_in_root
from casemate.sys.locks import ActLock, open_act_lock, paused, sweep

if TYPE_CHECKING:
    from pathlib import Path


def test_sweep(tmp_path: Path) -> None:
    """What nobody holds goes, what somebody holds stays; links and directories are left alone."""
    for name in ("free", "held", "target"):
        (tmp_path / name).write_text("")
    outside = tmp_path / "outside"
    outside.mkdir()
    locks = tmp_path / "locks"
    locks.mkdir()
    for name in ("free", "held"):
        (locks / name).write_text("")
    (locks / "link").symlink_to(tmp_path / "target")
    (locks / "directory").mkdir()
    os.mkfifo(locks / "fifo")
    handle = os.open(locks / "held", os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    sweep(str(locks))
    os.close(handle)
    assert {"held", "link", "directory"} <= set(os.listdir(locks))
    assert "free" not in os.listdir(locks)
    assert (tmp_path / "target").exists()
    link = tmp_path / "link-to-locks"
    link.symlink_to(locks)
    sweep(str(link))
    assert "held" in os.listdir(locks), "a link to a directory is not followed"
    sweep(str(tmp_path / "not-there"))
    sweep(str(locks))
    assert "held" not in os.listdir(locks)


def test_open_in_root(tmp_path: Path) -> None:
    """Links, absolute ones too, start at the given root; no path leads above it."""
    (tmp_path / "tmp" / "x").mkdir(parents=True)
    (tmp_path / "var").mkdir()
    (tmp_path / "var" / "tmp").symlink_to("/tmp")
    (tmp_path / "up").symlink_to("../../../../..")
    root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)

    def inode(path: str) -> int:
        handle = open_in_root(root, path)
        try:
            return os.fstat(handle).st_ino
        finally:
            os.close(handle)

    assert inode("var/tmp/x") == inode("/var/tmp/x") == (tmp_path / "tmp" / "x").stat().st_ino
    assert inode("up") == inode("..") == inode("/") == tmp_path.stat().st_ino
    with pytest.raises(FileNotFoundError):
        open_in_root(root, "etc")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        open_in_root(root, "file")
    os.close(root)


def test_an_act_lock(tmp_path: Path) -> None:
    """One holder at a time, whoever opened it; the file is swept only when nobody has it open any more."""
    path = f"{tmp_path}/locks/acts"
    first, second = open_act_lock(path), open_act_lock(path)
    reading, writing = os.pipe()
    with ActLock(first):
        child = os.fork()
        if child == 0:
            with ActLock(second):
                os.write(writing, b"second")
            os._exit(0)
        os.set_blocking(reading, False)
        with pytest.raises(BlockingIOError):
            os.read(reading, 10)
        os.write(writing, b"first")
    os.waitpid(child, 0)
    assert os.read(reading, 20) == b"firstsecond"
    with paused(path):
        pass
    assert os.path.exists(path), "others have it open"
    os.close(first)
    os.close(second)
    with paused(path):
        assert os.path.exists(path)
    assert not os.path.exists(path)
    os.close(reading)
    os.close(writing)
