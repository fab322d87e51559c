"""What was held back, after the fact: list it, take it with consent, or throw it away.

``take`` obeys every rule of the apply step but the one that a person has waived by naming a path: nothing
outside the workspace is touched, no link followed, no half-written file shown, and what the host changed too,
before or since, is not overwritten unless that is asked for as well.
"""

from __future__ import annotations

import os
import stat
import time

import msgspec

from casemate.errors import WorkspaceError
from casemate.sys.files import DIRECTORY
from casemate.workspace.content import copy, same
from casemate.workspace.judge import ORDINARY
from casemate.workspace.remove import Remover
from casemate.workspace.report import CONFLICT, ApplyReport, Held, Tally
from casemate.workspace.store import (
    DELETE,
    DIRECTORY_ENTRY,
    FILE_ENTRY,
    LINK_ENTRY,
    MOVE_ENTRY,
    Item,
    forget,
    read_manifest,
)
from casemate.workspace.target import Changed, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from casemate.workspace.judge import Context
    from casemate.workspace.scan import Change

__all__ = ["Unit", "discard", "take", "units"]


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """What a person decides about: one entry, or a directory that was held back as a whole."""

    path: str
    reason: str
    detail: str
    #: file, link, dir, delete or move.
    kind: str
    entries: int
    size: int


def units(hold_dir: int) -> list[Unit]:
    """What is kept in a hold directory, by path."""
    found: list[Unit] = []
    for path, items in _groups(read_manifest(hold_dir)).items():
        head = _head(path, items)
        found.append(
            Unit(
                path=os.fsdecode(path), reason=head.reason, detail=head.detail, kind=head.kind,
                entries=len(items), size=sum(item.size for item in items),
            )
        )  # fmt: skip
    return sorted(found, key=lambda unit: os.fsencode(unit.path))


def _groups(items: list[Item]) -> dict[bytes, list[Item]]:
    groups: dict[bytes, list[Item]] = {}
    for item in items:
        groups.setdefault(item.unit or item.path, []).append(item)
    return groups


def _head(path: bytes, items: list[Item]) -> Item:
    """The item that stands for its unit: one in conflict, or the unit's own entry."""
    own = [item for item in items if item.path == path] or items
    return next((item for item in (*own, *items) if item.reason == CONFLICT), own[0])


def discard(hold_dir: int, paths: Iterable[str] | None = None) -> int:
    """Throw away the units at ``paths`` (None: all); returns how many entries that were."""
    return forget(hold_dir, _chosen(read_manifest(hold_dir), paths))


def take(
    hold_dir: int, target: str, paths: Iterable[str] | None = None, *, overwrite: bool = False
) -> ApplyReport:
    """Apply the units at ``paths`` (None: all): the caller has the consent of a person for each.

    ``overwrite`` also replaces what the host changed too, or after it was held back: to name a path is no
    consent to that. What has been applied is no longer held. Raises WorkspaceError if the workspace cannot be
    opened.
    """
    began = time.perf_counter()
    try:
        root = os.open(target, DIRECTORY)
    except OSError as error:
        raise WorkspaceError(
            f"cannot apply to {target}: {error.strerror}", code="workspace-unreadable", path=target
        ) from error
    tally = Tally(1000)
    try:
        chosen = _chosen(read_manifest(hold_dir), paths)
        if not overwrite:
            chosen = _without_conflicts(chosen, tally)
        done = _Take(hold_dir, root, tally, overwrite).run(chosen)
        forget(hold_dir, done)
    finally:
        os.close(root)
    return tally.report((time.perf_counter() - began) * 1e3)


def _chosen(items: list[Item], paths: Iterable[str] | None) -> list[Item]:
    if paths is None:
        return items
    wanted = {os.fsencode(path) for path in paths}
    return [item for item in items if item.path in wanted or item.unit in wanted]


def _without_conflicts(items: list[Item], tally: Tally) -> list[Item]:
    found: list[Item] = []
    for path, unit in _groups(items).items():
        head = _head(path, unit)
        if head.reason == CONFLICT:
            tally.hold(os.fsdecode(path), CONFLICT, head.detail)
        else:
            found += unit
    return found


class _Consent:
    """A judge that has been told yes."""

    def enter(self, context: Context, path: str, change: Change | None) -> Context:
        """No directory is special."""
        return context

    def deletion(self, context: Context, path: str, mode: int) -> Held | None:
        """Nothing is protected."""
        return None


class _Take:
    def __init__(self, hold_dir: int, root: int, tally: Tally, overwrite: bool) -> None:
        self.hold_dir, self.root, self.tally = hold_dir, root, tally
        self.overwrite = overwrite
        # Directories that have been made, for when they are filled.
        self.filled: list[tuple[str, os.stat_result, Item]] = []
        self.target = Target(root, hold_dir, time.time_ns())

    def run(self, items: list[Item]) -> list[Item]:
        """Apply items; returns those that are done."""
        order = {MOVE_ENTRY: 0, DIRECTORY_ENTRY: 1, FILE_ENTRY: 2, LINK_ENTRY: 2, DELETE: 3}
        done: list[Item] = []
        try:
            for item in sorted(items, key=lambda item: (order.get(item.kind, 2), item.path)):
                path = os.fsdecode(item.path)
                try:
                    finished = self._one(item, path)
                except Changed:
                    self.tally.hold(path, CONFLICT, "the host changed it after it was held back")
                except OSError as error:
                    self.tally.fail(path, error.strerror or str(error))
                else:
                    if finished:
                        done.append(item)
            for path, status, item in reversed(self.filled):
                self.target.finish_directory(path, status, item.mode, item.mtime_ns)
        finally:
            self.target.close()
        return done

    def _one(self, item: Item, path: str) -> bool:
        self._make_above(path.rpartition("/")[0])
        if item.kind == DELETE:
            return self._delete(item, path)
        before = self.target.stat(path)
        if item.kind == MOVE_ENTRY:
            return self._move(os.fsdecode(item.to), path, before)
        if item.kind == DIRECTORY_ENTRY:
            if before is None:
                self.filled.append((path, self.target.make_directory(path), item))
                self.tally.change("created", path)
            elif not stat.S_ISDIR(before.st_mode):
                raise Changed
            return True
        if before is not None and self._is_there(item, path, before):
            return True
        if before is not None and (stat.S_ISDIR(before.st_mode) or self._is_newer(item, before)):
            raise Changed
        if item.kind == LINK_ENTRY:
            self.target.write_link(path, os.fsdecode(item.to), item.mtime_ns, before)
        else:
            self._file(item, path, before)
        self.tally.change("created" if before is None else "modified", path)
        return True

    def _move(self, source: str, path: str, before: os.stat_result | None) -> bool:
        if before is not None and stat.S_ISDIR(before.st_mode) and self.target.stat(source) is None:
            return True  # an earlier try was killed before it could say so
        self.target.move(source, path)
        self.tally.change("renamed", path)
        return True

    def _is_there(self, item: Item, path: str, before: os.stat_result) -> bool:
        """Whether the workspace has just this already, of an earlier try that was killed."""
        if item.kind == LINK_ENTRY:
            directory, _, name = path.rpartition("/")
            if not stat.S_ISLNK(before.st_mode):
                return False
            return os.readlink(name, dir_fd=self.target.directory(directory)) == os.fsdecode(item.to)
        if not stat.S_ISREG(before.st_mode) or before.st_mode & 0o777 != item.mode:
            return False
        try:
            with open(self._content(item), "rb") as source, open(self.target.read(path), "rb") as there:
                size = os.fstat(source.fileno()).st_size
                return before.st_size == size and same(source.fileno(), there.fileno(), size)
        except OSError:
            return False

    def _content(self, item: Item) -> int:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(item.content, flags, dir_fd=self.hold_dir)

    def _file(self, item: Item, path: str, before: os.stat_result | None) -> None:
        source = self._content(item)
        try:
            status = os.fstat(source)
            self.target.write_file(
                path, lambda fd: copy(source, fd, status.st_size, status.st_blocks), item.mode,
                item.mtime_ns, before,
            )  # fmt: skip
            self.tally.bytes += status.st_size
        finally:
            os.close(source)
        if item.mode & 0o111:
            self.tally.executable(path)

    def _make_above(self, path: str) -> None:
        if path and self.target.stat(path) is None:
            self._make_above(path.rpartition("/")[0])
            self.target.finish_directory(path, self.target.make_directory(path), 0o755, None)

    def _delete(self, item: Item, path: str) -> bool:
        since = time.time_ns() if self.overwrite else item.since_ns
        remover = Remover(
            self.target, _Consent(), since, resumed=False, hold=self._hold,
            fail=lambda where, error: self.tally.fail(where, error.strerror or str(error)),
        )  # fmt: skip
        if self.target.stat(path) is None:
            return True
        gone = remover.tree(path, ORDINARY)
        remover.restore()
        if not gone:
            return False
        self.tally.change("deleted", path)
        return True

    def _hold(self, held: Held) -> None:
        self.tally.hold(held.path, held.reason, held.detail)

    def _is_newer(self, item: Item, status: os.stat_result) -> bool:
        return not self.overwrite and status.st_ctime_ns > item.since_ns
