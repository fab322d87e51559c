"""How much a directory takes on disk, however hostile the one who filled it."""

from __future__ import annotations

import errno
import os
import stat
import time

__all__ = ["TOO_MUCH", "disk_usage"]

#: Stands for more than there can be.
TOO_MUCH = 1 << 62
_LONG = 2048  # of the 4096 bytes that a path may have
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ENOUGH = 256  # entries between two looks at the clock


class _Place:
    """A directory that paths start from, open as long as one of them is still to be looked at."""

    __slots__ = ("handle",)

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __del__(self) -> None:
        os.close(self.handle)


def disk_usage(top: str, seconds: float | None = None) -> tuple[int, bool]:
    """Bytes of everything below, each file once; and whether that is all of it.

    Iterative, following nothing, deaf to what vanishes meanwhile. However deep it is: a path that gets long
    starts anew from a directory on the way. What is too deep even for that counts as ``TOO_MUCH``. What
    cannot be read, or is not reached within ``seconds``, is not counted.
    """
    total, whole, seen = 0, True, 0
    end = None if seconds is None else time.monotonic() + seconds
    linked: set[tuple[int, int]] = set()
    queue: list[tuple[_Place, str]] = []
    place, path = _Place(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)), top
    while True:
        try:
            handle = os.open(path, _DIRECTORY, dir_fd=place.handle)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                return TOO_MUCH, False
            whole = whole and error.errno == errno.ENOENT
        else:
            here = _Place(handle)
            if len(path) > _LONG:
                place, path = here, "."
            try:
                with os.scandir(handle) as entries:
                    for entry in entries:
                        facts = entry.stat(follow_symlinks=False)
                        seen += 1
                        if stat.S_ISDIR(facts.st_mode):
                            queue.append((place, f"{path}/{entry.name}"))
                        elif facts.st_nlink > 1:
                            if (facts.st_dev, facts.st_ino) in linked:
                                continue
                            linked.add((facts.st_dev, facts.st_ino))
                        total += facts.st_blocks * 512
            except OSError:
                pass  # something has vanished
        if not queue:
            return total, whole
        if end is not None and seen >= _ENOUGH:
            seen = 0
            if time.monotonic() > end:
                return total, False
        place, path = queue.pop()
