"""What a review consists of, wherever the new version of an entry lies: the list, and how contents differ."""

from __future__ import annotations

import os
import stat

import msgspec

from casemate.errors import WorkspaceError
from casemate.sys.files import DIRECTORY, open_beneath
from casemate.workspace.names import prefixes
from casemate.workspace.scan import DIR, FILE, LINK, SPECIAL
from casemate.workspace.textdiff import TextDiff, compare, is_binary

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from casemate.workspace.select import Selection
    from casemate.workspace.textdiff import Budget

__all__ = ["OPEN_FILE", "Difference", "Entry", "Review", "kind_of"]

_LARGE = 1 << 20  # bytes of one version; more is not compared line by line
#: Flags to open a regular file of a tree that is not trusted.
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class Entry(msgspec.Struct, kw_only=True, omit_defaults=True, rename="kebab", gc=False):
    """One change, for a person to decide about. Paths are Python file names: show them escaped only."""

    path: str
    #: created, modified, deleted, renamed, replaced (by another kind), mode, or touched (only its time).
    what: str
    #: file, link, dir or special: what is there afterwards, or was before it is deleted.
    kind: str
    kind_before: str = ""
    #: Where the old version is in the workspace, if that is not ``path``; of a rename it is where it was.
    source: str = msgspec.field(default="", name="from")
    mode: int = 0
    mode_before: int = 0
    size: int = 0
    size_before: int = 0
    #: What a link says.
    to: str = ""
    to_before: str = ""
    #: A new or changed file that can be executed, or a link to one.
    executable: bool = False
    #: Why it would be held back; empty if it would be applied.
    held: str = ""
    detail: str = ""
    #: It is held back with the directory that it is in.
    within: bool = False
    #: How many entries go with a directory that is deleted or moved; ``size_before`` is of all their files.
    entries: int = 0
    #: Of a renamed file the path of the deletion that is the other half of it.
    whiteout: str = ""
    #: How many entries the directory had in whose place another one is moved.
    replaces: int = 0


class Difference(msgspec.Struct, frozen=True):
    """How the content of one entry changes: a text, or a word for why there is none."""

    text: TextDiff | None = None
    #: binary, large, unreadable, or empty.
    why: str = ""


class Review:
    """The changes that wait, and the workspace that they are for, which is held open until ``close``.

    Raises WorkspaceError if the workspace cannot be opened.
    """

    def __init__(self, workspace: str) -> None:
        self.workspace = workspace
        #: By path.
        self.entries: list[Entry] = []
        #: (path, code): what could not be looked at.
        self.skipped: list[tuple[str, str]] = []
        #: There is more than the limits allow: nothing of it can be applied.
        self.truncated = False
        self._cached: tuple[str, int] = ("\0", -1)
        self._root = -1
        try:
            self._root = os.open(workspace, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise WorkspaceError(
                f"cannot look at {workspace}: {error.strerror}", code="workspace-unreadable", path=workspace
            ) from error

    def __enter__(self) -> Self:
        """It is open already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Let go of the workspace."""
        self._forget()
        if self._root >= 0:
            os.close(self._root)
        self._root = -1

    def count(self) -> int:
        """How many changes there are; what could not be looked at counts, too."""
        return len(self.entries) + len(self.skipped) + self.truncated

    def counts(self) -> dict[str, int]:
        """How many changes of each kind there are, and how many of them would be held back (``held``)."""
        found: dict[str, int] = {}
        for entry in self.entries:
            what = "held" if entry.held else entry.what
            found[what] = found.get(what, 0) + 1
        return found

    def select(self, only: Selection | None) -> None:
        """Leave what is not chosen out of the list; a rename is chosen by either name."""
        if only is not None:
            self.entries = [
                entry
                for entry in self.entries
                if any(list(map(only.matches, {entry.path, entry.source, entry.whiteout} - {""})))
            ]

    def names(self) -> Iterator[str]:
        """Every path that a person may mean, by old names and new."""
        for entry in self.entries:
            yield from {entry.path, entry.source, entry.whiteout} - {""}

    def could_hold(self, path: str) -> bool:
        """Whether a path lies in something that is listed as a whole: a deleted or renamed directory."""
        above = set(prefixes(path))
        return any(entry.path in above for entry in self.entries if entry.kind == DIR)

    # -- looking at the workspace --------------------------------------------------------------------------

    def _stat(self, directory: str, name: str) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=self._place(directory), follow_symlinks=False)
        except OSError:
            return None

    def _place(self, path: str) -> int:
        """A directory of the workspace, open until another one is asked for. Raises OSError."""
        if self._cached[0] != path:
            self._forget()
            fd = open_beneath(self._root, path or ".", DIRECTORY)
            self._cached = (path, fd)
        return self._cached[1]

    def _forget(self) -> None:
        if self._cached[1] >= 0:
            os.close(self._cached[1])
        self._cached = ("\0", -1)

    # -- contents ------------------------------------------------------------------------------------------

    def old(self, entry: Entry) -> int | None:
        """The old content, open for reading; None if there is none. Raises OSError."""
        if entry.what == "created" or (entry.kind_before or entry.kind) != FILE:
            return None
        directory, _, name = (entry.source or entry.path).rpartition("/")
        return os.open(name, OPEN_FILE | os.O_CLOEXEC, dir_fd=self._place(directory))

    def new(self, entry: Entry) -> int | None:
        """The new content, open for reading; None if there is none. Raises OSError."""
        raise NotImplementedError

    def difference(self, entry: Entry, budget: Budget) -> Difference:
        """How the content changes, as far as ``budget`` goes."""
        if entry.what in ("mode", "touched") or max(entry.size, entry.size_before) > _LARGE:
            return Difference(why="" if entry.what in ("mode", "touched") else "large")
        try:
            old, new = _read(self.old(entry), entry.size_before), _read(self.new(entry), entry.size)
        except OSError:
            return Difference(why="unreadable")
        if old == new:  # both of them none: a directory or a link
            return Difference()
        if is_binary(old or b"") or is_binary(new or b""):
            return Difference(why="binary")
        return Difference(compare(old or b"", new or b"", budget))


def _read(fd: int | None, size: int) -> bytes | None:
    """All of a regular file that is not too large. ``size`` is what it had when it was looked at."""
    if fd is None:
        return None
    try:
        data = os.read(fd, size + 1)
        if len(data) != size or not size:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError("no regular file")
            while piece := os.read(fd, _LARGE + 1 - len(data)):
                data += piece
        if len(data) > _LARGE:
            raise OSError("too large")
        return data
    finally:
        os.close(fd)


def kind_of(mode: int) -> str:
    """file, link, dir or special."""
    if stat.S_ISREG(mode):
        return FILE
    if stat.S_ISDIR(mode):
        return DIR
    return LINK if stat.S_ISLNK(mode) else SPECIAL
