"""Which changes of a kept top have been dealt with: applied, held back elsewhere, or thrown away.

The top itself stays as the command left it: taking entries out of it would change what the others mean (in a
directory that replaces another, what is missing counts as deleted). So the paths stand in a file beside it.
It is written after the fact. A step that is killed before finds its own work again by its content, and a
line that was cut short counts as not there.

A second file beside it says, before the fact, which directories of the workspace a step opens to itself.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from casemate.sys.files import DIRECTORY, chmod_fd, open_beneath
from casemate.workspace.content import write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Journal", "Unlocked"]


class Journal:
    """The paths of one top that are done with. ``path`` is a file that need not be there yet."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.done: set[str] = set()
        self.unlocked = Unlocked(f"{path}.unlocked")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        with open(fd, "rb") as file:
            lines = file.read().split(b"\0")
        self.done.update(map(os.fsdecode, lines[:-1]))  # what follows the last NUL was cut short

    def add(self, paths: Iterable[str]) -> None:
        """Note more paths. Raises OSError."""
        new = [path for path in paths if path not in self.done]
        if not new:
            return
        fd = os.open(
            self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            self._end_the_last_line(fd)
            write_all(fd, b"".join(os.fsencode(path) + b"\0" for path in new))
            os.fsync(fd)
        finally:
            os.close(fd)
        self.done.update(new)

    @staticmethod
    def _end_the_last_line(fd: int) -> None:
        """Cut off what a killed writer has left of a path: it would become the beginning of another one."""
        size = os.fstat(fd).st_size
        data = os.pread(fd, size, 0) if size else b""
        whole = data.rfind(b"\0") + 1
        if whole != size:
            os.ftruncate(fd, whole)


class Unlocked:
    """Directories of the workspace that a step works in although their mode does not let it, with that mode.

    A step that ends gives them their modes back itself; for one that was killed the next one does.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def note(self, path: str, mode: int) -> None:
        """A directory is about to be opened. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self.path, flags, 0o600)
        try:
            write_all(fd, b"%o %s\0" % (mode, os.fsencode(path)))
        finally:
            os.close(fd)

    def restore(self, root: int) -> None:
        """Give the directories below ``root`` back what a killed step has left open."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return
        with open(fd, "rb") as file:
            lines = file.read().split(b"\0")[:-1]
        modes: dict[bytes, int] = {}
        for line in lines:
            mode, _, path = line.partition(b" ")
            with suppress(ValueError):
                modes.setdefault(path, int(mode, 8) & 0o7777)
        for path, before in modes.items():
            with suppress(OSError):
                handle = open_beneath(root, path or b".", DIRECTORY)
                try:
                    # Another mode than the one that the step gave it is the host's.
                    if stat.S_IMODE(os.fstat(handle).st_mode) == before | 0o700:
                        chmod_fd(handle, before)
                finally:
                    os.close(handle)
        self.clear()

    def clear(self) -> None:
        """None of them is open any more."""
        with suppress(OSError):
            os.unlink(self.path)
