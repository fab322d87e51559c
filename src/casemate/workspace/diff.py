"""What a kept top would do to its workspace, for somebody to look at before it does: scan and judge, without
doing.

The verdicts are the apply step's own, of the same pass. What the step finds out only while it works is
looked up here ahead of it: whether the host has changed an entry since, whether a content is the same after
all (a command can set a file's time back), what goes with a directory that is deleted or replaced.
"""

from __future__ import annotations

import os
import stat

from casemate.sys.files import DIRECTORY, open_beneath
from casemate.workspace.content import same
from casemate.workspace.doomed import Doomed
from casemate.workspace.judge import Judge
from casemate.workspace.make import seen_ns
from casemate.workspace.merged import Merged, open_content, read_link
from casemate.workspace.names import join
from casemate.workspace.renames import pair
from casemate.workspace.report import CONFLICT, Held
from casemate.workspace.review import OPEN_FILE, Entry, Review, kind_of
from casemate.workspace.rulings import TooLong, rulings
from casemate.workspace.scan import DIR, FILE, LINK, WHITEOUT, Change, scan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from casemate.workspace.judge import Context
    from casemate.workspace.report import ApplyOptions
    from casemate.workspace.rulings import Ruling

__all__ = ["TopReview"]


class TopReview(Review):
    """The changes of one top, which stays the caller's; it has to be open for as long as the review is.

    Raises WorkspaceError if the workspace cannot be opened, OSError if the top cannot be read.

    Preconditions: every process that saw the overlay is dead.
    """

    def __init__(self, top: int, workspace: str, options: ApplyOptions) -> None:
        super().__init__(workspace)
        self._top, self._options = top, options
        self._new: tuple[str, int] = ("\0", -1)  # the directory of the top that was opened last
        self._done = options.journal.done if options.journal is not None else set[str]()
        try:
            self._look(workspace)
        except BaseException:
            self.close()
            raise

    def _look(self, workspace: str) -> None:
        options = self._options
        self._seen: dict[str, os.stat_result] = {}
        self._changes = changes = scan(
            self._top, self._root, prefix=options.xattrs, redirects=options.redirects, limits=options.limits,
            started_ns=options.started_ns, resumed=options.resumed, lower=self._seen,
        )  # fmt: skip
        self.skipped, self.truncated = list(changes.skipped), changes.truncated
        self._merged = Merged(self._top, self._root, changes)
        self._judge = Judge(self._merged, workspace, options)
        self._contexts: dict[str, Context] = {"": self._judge.root}
        # Of a directory of the view: where in the workspace its old content is, None for nowhere.
        self._lower: dict[str, str | None] = {"": ""}
        self._replacing: set[str] = set()
        # Directories that could not be made where the command has them.
        self._blocked: set[str] = set()
        self._moved = {change.source for change in changes.entries if change.moved and change.source}
        self._doomed = Doomed(self._root, self._judge, options, self._moved)
        try:
            for ruling in rulings(self._judge, changes, self._contexts, options.limits):
                self._add(ruling)
        except TooLong:
            self.truncated = True
        self._forget()
        self._seen.clear()
        self.entries = pair(self, sorted(self.entries, key=lambda entry: os.fsencode(entry.path)))

    def _add(self, ruling: Ruling) -> None:
        change = ruling.change
        done = change.path in self._done
        if ruling.error is not None:
            if not done:
                self.skipped.append((change.path, ruling.error.strerror or str(ruling.error)))
            if change.kind == DIR:
                self._lower[change.path] = None
            return
        try:
            if change.kind == DIR:
                entry = self._directory(change, done=done)
            elif done:
                return
            elif change.kind == WHITEOUT:
                entry = self._deletion(change.path, ruling.verdict.held)
            else:
                entry = self._leaf(change, ruling)
        except OSError as error:
            self.skipped.append((change.path, error.strerror or str(error)))
            self._lower.setdefault(change.path, None)
            return
        if entry is None or done:
            return
        held = ruling.verdict.held
        if change.path.rpartition("/")[0] in self._blocked:
            self._blocked.add(change.path)
            entry.held, entry.detail, entry.within = CONFLICT, "", True
        elif held is not None:
            entry.held, entry.detail, entry.within = held.reason, held.detail, ruling.within is not None
        self.entries.append(entry)

    # -- directories ---------------------------------------------------------------------------------------

    def _directory(self, change: Change, *, done: bool) -> Entry | None:
        path = change.path
        above, _, name = path.rpartition("/")
        entry = Entry(path=path, what="created", kind=DIR, mode=change.mode & 0o777)
        lower, there, place = self._lower[above], 0, ""
        if lower is not None and (change.moved or change.source is None):
            place = join(lower, name)
            # What is moved away makes room for something new.
            there = 0 if place in self._moved else self._merged.lower_mode(place)
        if change.source is not None:
            self._lower[path] = change.source
            entry.mode_before = change.lower_mode & 0o777
            if change.moved:
                self._renamed(change, entry, place, there)
                return entry
            entry.what = "mode"
            # In a repository modes of directories are git's own matter: the step leaves them.
            git = self._contexts[path].git is not None
            return None if git or entry.mode == entry.mode_before else entry
        is_dir = stat.S_ISDIR(there)
        self._lower[path] = place if is_dir else None
        if change.hides or above in self._replacing:
            self._replacing.add(path)
            if is_dir and not done:
                self._implied(path, place)
        if is_dir:
            entry.what, entry.mode_before = "mode", there & 0o777
            git = self._contexts[path].git is not None
            return None if git or entry.mode == entry.mode_before else entry
        if there:
            entry.what, entry.kind_before = "replaced", kind_of(there)
            status = None if lower is None else self._stat(lower, name)
            newer = status is not None and status.st_ctime_ns > self._options.started_ns
            if path not in self._replacing or newer:
                self._block(entry, "the host changed it as well")
        return entry

    def _renamed(self, change: Change, entry: Entry, place: str, there: int) -> None:
        """Fill in a renamed directory; ``there`` is what the workspace has where it goes to."""
        entry.what, entry.source, entry.mode_before = "renamed", change.source or "", 0
        entry.entries, _ = self._doomed.measure(entry.source)
        if not there:
            return
        above = entry.path.rpartition("/")[0]
        entry.kind_before = kind_of(there)
        status = self._stat(*place.rpartition("/")[::2])
        in_the_way = not change.hides and above not in self._replacing
        if status is not None and not in_the_way:
            held, inside = self._doomed.judge(entry.path, place, status, self._contexts[above])
            in_the_way = held is not None or bool(inside)
            entry.replaces = self._doomed.entries + 1
        if in_the_way:
            self._block(entry, "something is in the way")

    def _block(self, entry: Entry, detail: str) -> None:
        self._blocked.add(entry.path)
        entry.held, entry.detail = CONFLICT, detail

    def _implied(self, path: str, place: str) -> None:
        """Add what goes with a directory that another one replaces; the workspace has it at ``place``."""
        fd = open_beneath(self._root, place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            names = sorted(os.listdir(fd))
        finally:
            os.close(fd)
        for name in names:
            entry = join(path, name)
            if entry in self._merged.index or entry in self._done:
                continue
            found = self._deletion(entry, None)
            if found is not None:
                self.entries.append(found)

    def _deletion(self, path: str, held: Held | None) -> Entry | None:
        """One deletion; what is held back of a directory's content is listed for itself."""
        directory, name = path.rpartition("/")[::2]
        above = self._lower.get(directory)
        if above is None:
            return None
        source = join(above, name)
        status = self._seen.get(path) or self._stat(above, name)
        if status is None or source in self._moved:
            return None  # gone already; or the old place of a directory that is renamed
        kind = kind_of(status.st_mode)
        entry = Entry(path=path, what="deleted", kind=kind, source=source if source != path else "")
        entry.mode_before = status.st_mode & 0o777
        entry.size_before = status.st_size if kind == FILE else 0
        if kind == LINK:
            entry.to_before = read_link(self._root, source)
        if held is None:
            held, inside = self._doomed.judge(path, source, status, self._contexts[directory])
            if kind == DIR and held is None:
                entry.entries, entry.size_before = self._doomed.entries, self._doomed.bytes
            self.entries += [
                Entry(
                    path=item.path, what="deleted", kind=FILE, held=item.reason, detail=item.detail,
                    source="" if source == path else join(source, item.path[len(path) + 1 :]),
                )
                for item in inside
            ]  # fmt: skip
        if held is not None:
            entry.held, entry.detail = held.reason, held.detail
        return entry

    # -- files and links -----------------------------------------------------------------------------------

    def _leaf(self, change: Change, ruling: Ruling) -> Entry | None:
        path = change.path
        directory, _, name = path.rpartition("/")
        above = self._lower[directory]
        before = self._seen.get(path)
        if before is None and above is not None:
            before = self._stat(above, name)
        entry = Entry(path=path, what="created", kind=change.kind)
        if change.kind == FILE:
            entry.mode, entry.size = change.mode & 0o777, change.size
            entry.executable = bool(change.mode & 0o111) and ruling.verdict.content is None
        elif change.kind == LINK:
            entry.to = read_link(self._top, path)
            entry.executable = ruling.verdict.executable
        source = join(above or "", name)
        if before is None or (source in self._moved and stat.S_ISDIR(before.st_mode)):
            return entry
        entry.source = source if source != path else ""
        kind = kind_of(before.st_mode)
        entry.mode_before, entry.size_before = before.st_mode & 0o777, before.st_size if kind == FILE else 0
        if kind == LINK:
            entry.to_before = read_link(self._root, source)
        if kind != change.kind:
            entry.what, entry.kind_before = "replaced", kind
        elif kind == LINK:
            same_time = before.st_mtime_ns == change.mtime_ns
            entry.what = "modified" if entry.to != entry.to_before else "" if same_time else "touched"
        elif kind == FILE:
            entry.what = self._file(change, before, source)
        if not entry.what:
            return None
        entry.executable = entry.executable and entry.what != "touched"
        if ruling.verdict.held is None and self._in_conflict(change, before, entry):
            entry.held, entry.detail = CONFLICT, "the host changed it as well"
        return entry

    def _file(self, change: Change, before: os.stat_result, source: str) -> str:
        """What happens to a file that is one before and after."""
        if before.st_size != change.size or not self._is_same(change.path, source, change.size):
            return "modified"
        if before.st_mode & 0o777 != change.mode & 0o777:
            return "mode"
        return "" if before.st_mtime_ns == change.mtime_ns else "touched"

    def _is_same(self, path: str, source: str, size: int) -> bool:
        new = open_content(self._top, path)
        try:
            old = open_beneath(self._root, source, OPEN_FILE)
            try:
                return same(new, old, size)
            finally:
                os.close(old)
        except OSError:
            return False
        finally:
            os.close(new)

    def _in_conflict(self, change: Change, before: os.stat_result, entry: Entry) -> bool:
        """Whether the step would find that the host's version is newer."""
        if entry.what == "touched":
            return False  # nothing of the host's is lost
        started = self._options.started_ns
        directory = change.path.rpartition("/")[0]
        if stat.S_ISDIR(before.st_mode):
            replaced = stat.S_ISDIR(change.lower_mode) or directory in self._replacing
            return not replaced or before.st_ctime_ns > started
        return before.st_ctime_ns > seen_ns(change, started, self._options.firsts)

    def names(self) -> Iterator[str]:
        """What is done counts, too: a step that was killed may be run again by the same words."""
        yield from super().names()
        for change in self._changes.entries:
            yield change.path

    def new(self, entry: Entry) -> int | None:
        """The new content, open for reading; None if there is none. Raises OSError."""
        if entry.what == "deleted" or entry.kind != FILE:
            return None
        directory, _, name = entry.path.rpartition("/")
        if self._new[0] != directory:
            self._close_new()
            self._new = (directory, open_beneath(self._top, directory or ".", DIRECTORY))
        try:
            return os.open(name, OPEN_FILE | os.O_CLOEXEC, dir_fd=self._new[1])
        except PermissionError:
            return open_content(self._top, entry.path)

    def close(self) -> None:
        """Let go of the workspace."""
        self._close_new()
        super().close()

    def _close_new(self) -> None:
        if self._new[1] >= 0:
            os.close(self._new[1])
        self._new = ("\0", -1)
