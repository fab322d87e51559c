"""Making one directory, file or link of the top real in the workspace."""

from __future__ import annotations

import errno
import os
import stat

from casemate.sys.files import xattrs
from casemate.workspace.adopt import Adopter
from casemate.workspace.content import copy, same, write_all
from casemate.workspace.merged import open_content, read_link
from casemate.workspace.scan import DIR, LINK, WHITEOUT
from casemate.workspace.target import Changed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.workspace.judge import Context
    from casemate.workspace.merged import Merged
    from casemate.workspace.remove import Remover
    from casemate.workspace.report import Tally, Verdict
    from casemate.workspace.scan import Change
    from casemate.workspace.select import Choice
    from casemate.workspace.survey import Firsts
    from casemate.workspace.target import Target

__all__ = ["Maker", "seen_ns"]


def seen_ns(change: Change, started_ns: int, firsts: Firsts | None) -> int:
    """The moment after which a change by the host at this path need not have been seen by the command.

    That is when its view was made. When the entry was made, or copied up, says nothing: a program reads long
    before it writes, and the overlay goes on showing what it has looked up once (that there is nothing, too)
    after the host has put another file in its place.
    """
    if change.kind == WHITEOUT or firsts is None:
        return started_ns
    return firsts.since(change.path, started_ns)


class Maker:
    """Makes entries that have been judged. Each method raises ``Changed`` where the host's entry wins,
    and OSError where the host refuses.
    """

    def __init__(
        self, top: int, target: Target, merged: Merged, remover: Remover, contexts: dict[str, Context],
        tally: Tally, started_ns: int, resumed: bool, prefix: str, choice: Choice,
        firsts: Firsts | None,
    ) -> None:  # fmt: skip
        self.top, self.target, self.merged, self.remover = top, target, merged, remover
        self.contexts, self.tally = contexts, tally
        self.started, self.resumed, self.prefix = started_ns, resumed, prefix
        self.choice, self.firsts = choice, firsts
        self.adopter = Adopter(top, target, merged)
        # Directories that take the place of what is on the host.
        self.replacing: set[str] = set()
        # Directories that are not wanted, and not there.
        self._absent: set[str] = set()
        # Directories made before their turn, for a rename into them.
        self._early: dict[str, os.stat_result] = {}
        # (path, which it is, mode, mtime or None) of directories, for when they are filled.
        self._unfinished: list[tuple[str, os.stat_result, int, int | None]] = []

    def make(self, change: Change, verdict: Verdict) -> bool:
        """Make one entry; its directory is there. False if something of the change is left to be done:
        of a directory that is only needed for what is in it, or from which not all may be removed.
        """
        if change.path.rpartition("/")[0] in self.adopter.adopted:
            self._adopted(change, verdict)
        elif change.kind == DIR:
            left = self.remover.left
            return self._make_directory(change) and self.remover.left == left
        elif change.kind == LINK:
            self._make_link(change, verdict)
        else:
            self._make_file(change, verdict)
        return True

    def make_above(self, path: str) -> None:
        """Make the directories that a rename goes into, if the command has made them too."""
        if not path:
            return
        self.make_above(path.rpartition("/")[0])
        status = self.target.stat(path)
        if status is None or not stat.S_ISDIR(status.st_mode):
            change = self.merged.index[path]
            self._make_way(change, status, self._replaces(change))
            self._early[path] = self.target.make_directory(path)

    def _replaces(self, change: Change) -> bool:
        """Whether a directory takes the place of what the workspace had there, with everything in it."""
        replaces = not change.moved and (
            change.hides or (change.source is None and change.path.rpartition("/")[0] in self.replacing)
        )
        if replaces:
            self.replacing.add(change.path)
        return replaces

    def _make_way(self, change: Change, status: os.stat_result | None, replaces: bool) -> None:
        """Remove what is no directory from where one belongs."""
        if status is not None:
            if not replaces or self._host_is_newer(change, status):
                raise Changed
            self.target.unlink(change.path, status)

    def finish(self) -> list[tuple[str, OSError]]:
        """Give the directories their modes and times; returns what failed."""
        failed: list[tuple[str, OSError]] = []
        for path, status, mode, mtime_ns in reversed(self._unfinished):
            try:
                self.target.finish_directory(path, status, mode, mtime_ns)
            except OSError as error:
                failed.append((path, error))
        return failed

    def _adopted(self, change: Change, verdict: Verdict) -> None:
        """The entry came along with its directory."""
        if change.kind == DIR:
            self.adopter.adopted.add(change.path)
        self._made(change, None)
        if verdict.executable or (change.kind != DIR and change.kind != LINK and change.mode & 0o111):
            self.tally.executable(change.path)

    def _may_adopt(self, path: str) -> bool:
        """Not out of a directory that replaces another: what it does not have counts as deleted, should
        the step have to be run again.
        """
        return path.rpartition("/")[0] not in self.replacing

    def _make_directory(self, change: Change) -> bool:
        path, mode = change.path, change.mode & 0o777
        wanted, needed = self.choice.wants(path), self.choice.makes_directory(path)
        status = None if path.rpartition("/")[0] in self._absent else self.target.stat(path)
        replaces = self._replaces(change)
        if (status is None or not stat.S_ISDIR(status.st_mode)) and not needed:
            self._absent.add(path)
            return False
        if status is not None and not stat.S_ISDIR(status.st_mode):
            self._make_way(change, status, replaces)
            status = None
        if path in self._early:
            self._unfinished.append((path, self._early[path], mode, change.mtime_ns))
            self.tally.change("created", path)
            return True
        if status is None:
            if self._may_adopt(path) and self.adopter.directory(change):
                self.adopter.adopted.add(path)
            else:
                made = self.target.make_directory(path)
                self._unfinished.append((path, made, mode, change.mtime_ns))
            self.tally.change("replaced" if change.hides else "created", path)
            return True
        before = status.st_mode & 0o777
        # A directory that only the top has, and here it is all the same: made by an interrupted try.
        ours = wanted and self.resumed and change.source is None and not change.lower_mode
        keep = mode if wanted and (change.moved or ours) else before
        asked = wanted and mode != change.lower_mode & 0o777 and self.contexts[path].git is None
        if asked and (replaces or before == change.lower_mode & 0o777):
            keep = mode
            if before != mode and not change.hides:
                self.tally.change("mode", path)
        if self.target.unlock(path, status):
            before = -1
        if replaces and path not in self.choice.done:
            index, removed = self.merged.index, self.remover.removed
            self.remover.children(path, self.contexts[path], lambda name: f"{path}/{name}" in index)
            if self.remover.removed > removed:
                self.tally.change("replaced", path)
        if keep != before or ours:
            self._unfinished.append((path, status, keep, change.mtime_ns if ours else None))
        return wanted

    def _clear(self, change: Change) -> os.stat_result | None:
        """The host's entry that a file or link replaces, if there is one; a directory is removed first."""
        status = self.target.stat(change.path)
        if status is None:
            return None
        if not stat.S_ISDIR(status.st_mode):
            return status
        directory = change.path.rpartition("/")[0]
        if not stat.S_ISDIR(change.lower_mode) and directory not in self.replacing:
            raise Changed
        if not self.remover.tree(change.path, self.contexts[directory], whole=True):
            raise Changed
        return None

    def _make_link(self, change: Change, verdict: Verdict) -> None:
        to = read_link(self.top, change.path)
        before = self._clear(change)
        newer = before is not None and self._host_is_newer(change, before)
        if before is not None and stat.S_ISLNK(before.st_mode) and self._host_link(change.path) == to:
            if not newer:
                self.target.date_link(change.path, change.mtime_ns)
            return
        if newer:
            raise Changed
        self.target.write_link(change.path, to, change.mtime_ns, before)
        self._made(change, before)
        if verdict.executable:
            self.tally.executable(change.path)

    def _host_link(self, path: str) -> str:
        directory, _, name = path.rpartition("/")
        return read_link(self.target.directory(directory), name)

    def _make_file(self, change: Change, verdict: Verdict) -> None:
        content = verdict.content
        source = open_content(self.top, change.path)
        try:
            status = os.fstat(source)
            if status.st_size and not status.st_blocks and "metacopy" in xattrs(source, self.prefix):
                raise OSError(errno.ENODATA, "the top has the file's attributes, but not its content")
            size = status.st_size if content is None else len(content)
            before = self._clear(change)
            if before is not None and os.path.samestat(before, status):
                self.adopter.forget(change.path)
                return
            if before is not None and self._is_equal(change, before, source, size, content):
                return
            if before is not None and self._host_is_newer(change, before):
                raise Changed

            def fill(fd: int) -> None:
                if content is None:
                    copy(source, fd, size, status.st_blocks)
                else:
                    write_all(fd, content)

            may_adopt = content is None and self._may_adopt(change.path)
            if not may_adopt or not self.adopter.file(change, before):
                self.target.write_file(change.path, fill, change.mode, change.mtime_ns, before)
            self.tally.bytes += min(size, status.st_blocks * 512)
            self._made(change, before)
            # A judged file (a sample hook) is none that somebody starts.
            if change.mode & 0o111 and content is None:
                self.tally.executable(change.path)
        finally:
            os.close(source)

    def _is_equal(
        self, change: Change, before: os.stat_result, source: int, size: int, content: bytes | None
    ) -> bool:
        """Whether the host has this content already: copied up for its mode only, or made by an earlier
        try. Then at most the mode is changed.
        """
        if not stat.S_ISREG(before.st_mode) or before.st_size != size:
            return False
        # After an interrupted try the time need not be the command's: not every file system can hold it.
        # And where the host has come to the same content by itself, there is nothing to be in conflict about.
        other_time = before.st_mtime_ns != change.mtime_ns
        if other_time and not self.resumed and not self._host_is_newer(change, before):
            return False
        try:
            fd = self.target.read(change.path)
        except OSError:
            return False
        try:
            equal = os.pread(fd, size + 1, 0) == content if content is not None else same(source, fd, size)
        finally:
            os.close(fd)
        if not equal:
            return False
        mode = change.mode & 0o777
        same_mode, same_time = before.st_mode & 0o777 == mode, before.st_mtime_ns == change.mtime_ns
        if same_mode and same_time:
            return True
        if self._host_is_newer(change, before):
            return same_mode  # another mode may be the host's choice as well as the command's: a conflict
        if before.st_nlink > 1 or not (same_mode or same_time):
            # By a new file: another name of this one may lie outside of the workspace; and of two changes
            # a step that is killed would leave one undone.
            return False
        self.target.set_attributes(change.path, mode, change.mtime_ns, before)
        if not same_mode:
            self.tally.change("mode", change.path)
            if mode & 0o111:
                self.tally.executable(change.path)
        return True

    def _made(self, change: Change, before: os.stat_result | None) -> None:
        what = "created"
        if before is not None or stat.S_ISDIR(change.lower_mode):
            same_kind = before is not None and stat.S_IFMT(before.st_mode) == stat.S_IFMT(change.mode)
            what = "modified" if same_kind else "replaced"
        self.tally.change(what, change.path)

    def _host_is_newer(self, change: Change, status: os.stat_result) -> bool:
        """Whether the host changed its entry since, so that the command need not have seen it."""
        return self.target.changed_since(status, seen_ns(change, self.started, self.firsts))
