"""Copying and comparing file content: sparse stays sparse, nothing large enters memory."""

from __future__ import annotations

import errno
import os

from casemate.sys.files import clone_range

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["copy", "same", "write_all"]

_SMALL = 1 << 17
_PIECE = 1 << 20


def copy(source: int, destination: int, size: int, blocks: int) -> None:
    """Copy ``size`` bytes between two descriptors at their beginning. ``blocks`` is the source's st_blocks.

    Preconditions: the destination is empty; nobody writes to the source.
    """
    if size <= _SMALL and blocks * 512 >= size:
        write_all(destination, _read_all(source, size))
        return
    if clone_range(source, destination):
        return
    if blocks * 512 >= size:
        _copy_piece(source, destination, 0, size)
        return
    os.ftruncate(destination, size)
    for start, end in _extents(source, size):
        _copy_piece(source, destination, start, end)


def _read_all(source: int, size: int) -> bytes:
    data = os.pread(source, size, 0)
    while len(data) < size:
        more = os.pread(source, size - len(data), len(data))
        if not more:
            raise OSError(errno.EIO, "the file became shorter while it was read")
        data += more
    return data


def write_all(destination: int, data: bytes) -> None:
    """Write bytes, however many calls it takes."""
    while data:
        data = data[os.write(destination, data) :]


def _copy_piece(source: int, destination: int, start: int, end: int) -> None:
    """Copy one range inside the kernel."""
    os.lseek(destination, start, os.SEEK_SET)
    while start < end:
        # sendfile crosses file systems of different types; copy_file_range does not, since 5.19.
        done = os.sendfile(destination, source, start, min(end - start, 1 << 30))
        if not done:
            raise OSError(errno.EIO, "the file became shorter while it was read")
        start += done


def _extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """The ranges of a file that hold data."""
    at = 0
    while at < size:
        start = _next_data(descriptor, at, size)
        if start >= size:
            return
        at = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
        yield start, at


def same(one: int, other: int, size: int) -> bool:
    """Whether two files of ``size`` bytes have the same content. Common holes cost nothing."""
    at = 0
    while at < size:
        start = min(_next_data(one, at, size), _next_data(other, at, size))
        if start >= size:
            return True
        end = min(start + _PIECE, size)
        left, right = os.pread(one, end - start, start), os.pread(other, end - start, start)
        if left != right or not left:
            return False
        at = start + len(left)
    return True


def _next_data(descriptor: int, at: int, size: int) -> int:
    try:
        return os.lseek(descriptor, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return size
        if error.errno == errno.EINVAL:  # a file system without holes
            return at
        raise
