"""Which changes of a kept top have been dealt with: applied, held back elsewhere, or thrown away.

The top itself stays as the command left it: taking entries out of it would change what the others mean (in a
directory that replaces another, what is missing counts as deleted). So the paths stand in a file beside it.
It is written after the fact. A step that is killed before finds its own work again by its content, and a
line that was cut short counts as not there.
"""

from __future__ import annotations

import os

from casemate.workspace.content import write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Journal"]


class Journal:
    """The paths of one top that are done with. ``path`` is a file that need not be there yet."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.done: set[str] = set()
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
