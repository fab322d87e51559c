"""What was held back, beside what the workspace has: the same list as of a top, from the hold directory."""

from __future__ import annotations

import os

from casemate.sys.files import open_beneath
from casemate.workspace.content import same
from casemate.workspace.merged import read_link
from casemate.workspace.report import CONFLICT
from casemate.workspace.review import OPEN_FILE, Entry, Review, kind_of
from casemate.workspace.scan import DIR, FILE, LINK
from casemate.workspace.store import (
    DELETE,
    DIRECTORY_ENTRY,
    FILE_ENTRY,
    LINK_ENTRY,
    MOVE_ENTRY,
    read_manifest,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.workspace.store import Item

__all__ = ["HeldReview"]

_KINDS = {FILE_ENTRY: FILE, LINK_ENTRY: LINK, DIRECTORY_ENTRY: DIR, MOVE_ENTRY: DIR}


class HeldReview(Review):
    """The changes kept in a hold directory, which stays the caller's; open for as long as the review is.

    Raises WorkspaceError if the workspace cannot be opened.
    """

    def __init__(self, hold: int, workspace: str) -> None:
        super().__init__(workspace)
        self._hold = hold
        self._items: dict[str, Item] = {}
        try:
            for item in read_manifest(hold):
                try:
                    entry = self._entry(item)
                except OSError as error:
                    self.skipped.append((os.fsdecode(item.path), error.strerror or str(error)))
                    continue
                if item.content:
                    self._items[entry.path] = item
                self.entries.append(entry)
        except BaseException:
            self.close()
            raise
        self._forget()
        self.entries.sort(key=lambda entry: os.fsencode(entry.path))

    def _entry(self, item: Item) -> Entry:
        path = os.fsdecode(item.path)
        before = self._stat(*path.rpartition("/")[::2])
        entry = Entry(
            path=path, what="created", kind=_KINDS.get(item.kind, FILE), held=item.reason, detail=item.detail,
            within=bool(item.unit) and item.unit != item.path,
        )  # fmt: skip
        if item.kind == MOVE_ENTRY:
            entry.what, entry.source = "renamed", os.fsdecode(item.to)
            return entry
        if item.kind == LINK_ENTRY:
            entry.to = os.fsdecode(item.to)
        elif item.kind == FILE_ENTRY:
            entry.size, entry.mode = item.size, item.mode
            entry.executable = bool(item.mode & 0o111)
        if before is None:
            entry.what = "deleted" if item.kind == DELETE else "created"
            return entry
        kind = kind_of(before.st_mode)
        entry.mode_before, entry.size_before = before.st_mode & 0o777, before.st_size if kind == FILE else 0
        if kind == LINK:
            entry.to_before = read_link(self._root, path)
        if item.kind == DELETE:
            entry.what, entry.kind = "deleted", kind
        elif kind != entry.kind:
            entry.what, entry.kind_before = "replaced", kind
        elif kind == FILE:
            entry.what = "modified" if not self._is_same(item, path, before.st_size) else "mode"
        else:
            entry.what = "modified" if entry.to != entry.to_before else "touched"
        if item.reason != CONFLICT and kind != DIR and before.st_ctime_ns > item.since_ns:
            entry.detail = "; ".join([*([entry.detail] if entry.detail else []), "the host changed it since"])
        return entry

    def _is_same(self, item: Item, path: str, size: int) -> bool:
        if size != item.size:
            return False
        old = open_beneath(self._root, path, OPEN_FILE)
        with open(old, "rb"), open(self._content(item), "rb") as new:
            return same(new.fileno(), old, size)

    def _content(self, item: Item) -> int:
        return os.open(item.content, OPEN_FILE | os.O_CLOEXEC, dir_fd=self._hold)

    def new(self, entry: Entry) -> int | None:
        """The kept content, open for reading; None if there is none. Raises OSError."""
        item = self._items.get(entry.path)
        return None if item is None or entry.kind != FILE else self._content(item)
