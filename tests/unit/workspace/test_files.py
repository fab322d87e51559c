"""The calls that Python lacks: what they refuse, and that they do what they are for."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from typing import TYPE_CHECKING

import pytest

from casemate.sys import files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    """A directory with a tree, links and an outside beside it."""
    (tmp_path / "in/dir").mkdir(parents=True)
    (tmp_path / "in/dir/file").write_text("x")
    (tmp_path / "out").write_text("outside")
    os.symlink("../out", tmp_path / "in/link")
    os.symlink("dir", tmp_path / "in/dirlink")
    fd = os.open(tmp_path / "in", files.DIRECTORY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("link", os.strerror(errno.ELOOP)),
        ("dirlink/file", os.strerror(errno.ELOOP)),
        ("../out", os.strerror(errno.EXDEV)),
        ("dir/../../out", os.strerror(errno.EXDEV)),
        ("/etc/passwd", os.strerror(errno.EXDEV)),
        ("dir/fi\0le", "a name holds a NUL byte"),
        ("missing", os.strerror(errno.ENOENT)),
        ("dir/file/x", os.strerror(errno.ENOTDIR)),
    ],
)
def test_open_beneath_refuses(root: int, path: str, reason: str) -> None:
    """No link, no way up, no absolute path, no NUL."""
    with pytest.raises(OSError, match=reason):
        files.open_beneath(root, path, os.O_RDONLY)


def test_open_beneath_opens(root: int) -> None:
    """The control: a path through directories, the directory itself, a link as such; closed on exec."""
    for path, flags in (("dir/file", os.O_RDONLY), (".", os.O_RDONLY), ("link", os.O_PATH | os.O_NOFOLLOW)):
        fd = files.open_beneath(root, path, flags)
        assert not os.get_inheritable(fd)
        os.close(fd)


@pytest.mark.root
def test_open_beneath_does_not_enter_mounts(root: int, tmp_path: Path) -> None:
    """A mount inside is not entered."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mount(b"tmpfs", os.fsencode(tmp_path / "in/dir"), b"tmpfs", 0, None) == 0
    try:
        with pytest.raises(OSError, match="cross-device"):
            files.open_beneath(root, "dir", os.O_RDONLY)
    finally:
        libc.umount2(os.fsencode(tmp_path / "in/dir"), 2)


def test_rename(root: int, tmp_path: Path) -> None:
    """Not over what is there; both at once."""
    for name in ("a", "b"):
        (tmp_path / "in" / name).write_text(name)
    with pytest.raises(FileExistsError):
        files.rename(root, "a", root, "b", files.NOREPLACE)
    files.rename(root, "a", root, "b", files.EXCHANGE)
    assert (tmp_path / "in/a").read_text() == "b"
    files.rename(root, "a", root, "c", files.NOREPLACE)
    assert (tmp_path / "in/c").read_text() == "b"


def test_birth(root: int) -> None:
    """The birth of a file lies before now and not long ago; it does not move with the content."""
    born = files.birth_ns(root, "dir/file")
    assert born is not None
    assert 0 <= time.time_ns() - born < 60 * 10**9
    fd = files.open_beneath(root, "dir/file", os.O_WRONLY)
    os.write(fd, b"more")
    assert files.birth_ns(fd) == born
    os.close(fd)


def test_unnamed_file_gets_a_name(root: int, tmp_path: Path) -> None:
    """A file of O_TMPFILE appears whole, and not over another."""
    fd = files.open_beneath(root, ".", os.O_TMPFILE | os.O_RDWR, 0o600)
    os.write(fd, b"whole")
    files.chmod_fd(fd, 0o640)
    files.link_fd(fd, root, "named")
    with pytest.raises(FileExistsError):
        files.link_fd(fd, root, "named")
    os.close(fd)
    assert (tmp_path / "in/named").read_bytes() == b"whole"


def test_mounts_are_told_apart(root: int) -> None:
    """One mount has one number, another one another."""
    shm, dir_ = os.open("/dev/shm", os.O_PATH), files.open_beneath(root, "dir", os.O_PATH)
    assert files.mount_id(root) == files.mount_id(dir_) is not None
    assert files.mount_id(shm) != files.mount_id(root)
    os.close(shm)
    os.close(dir_)


def test_attributes(root: int) -> None:
    """Only those with the prefix, without it."""
    fd = files.open_beneath(root, "dir", os.O_RDONLY)
    os.setxattr(fd, "user.overlay.redirect", b"x")
    os.setxattr(fd, "user.other", b"y")
    assert files.xattrs(fd, "user.overlay.") == {"redirect": b"x"}
    os.close(fd)
