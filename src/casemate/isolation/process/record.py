"""What a broker notes for its operator: lines in an anonymous file, each once, and only so many.

A newline in a name would begin another line: such a name is shown changed.
"""

from __future__ import annotations

import os
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.isolation.process.outcome import Outcome

__all__ = ["Record", "read"]

_MOST_REFUSED, _MOST_EXECUTABLES = 200, 1000
_LONGEST = 4096
_LIMIT = 8 << 20


class Record:
    """The writing side."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._refused: set[tuple[str, str]] = set()
        self._executables: set[str] = set()

    def refused(self, reason: str, path: str) -> None:
        """An act was refused."""
        if (reason, path) not in self._refused and len(self._refused) < _MOST_REFUSED:
            self._refused.add((reason, path))
            self._note("refused", reason, path)

    def executable(self, path: str) -> None:
        """A file that can be executed, or a link, came about."""
        if path not in self._executables and len(self._executables) < _MOST_EXECUTABLES:
            self._executables.add(path)
            self._note("executable", path)

    def _note(self, *words: str) -> None:
        line = "\0".join(word[:_LONGEST].replace("\n", "\\n") for word in words)
        with suppress(OSError):
            os.write(self._descriptor, line.encode("utf-8", "surrogateescape") + b"\n")


def read(descriptor: int, outcome: Outcome) -> None:
    """The reading side: all that was noted so far."""
    outcome.refused, outcome.executables = [], []
    for line in os.pread(descriptor, _LIMIT, 0).decode("utf-8", "surrogateescape").split("\n"):
        kind, *words = line.split("\0")
        if kind == "refused" and len(words) == 2:
            outcome.refused.append((words[0], words[1]))
        elif kind == "executable" and len(words) == 1:
            outcome.executables.append(words[0])
