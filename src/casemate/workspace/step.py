"""The apply step itself: scan, judge, move, make, delete.

The order is: look at everything (``scan``), decide over everything (``judge``), rename directories, make
files, then delete. Deletions come last and only if all else went well, so at no moment is something gone
from both the workspace and the top. Whatever fails or is interrupted is still in the top, and the same
step may be run again: what is already equal is not done twice, nor taken for a change by the host.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress

from casemate.workspace import store as keeping
from casemate.workspace.judge import Judge
from casemate.workspace.make import Maker, born_ns
from casemate.workspace.merged import Merged, open_content, read_link
from casemate.workspace.moves import Mover, judge_move
from casemate.workspace.names import prefixes, printable
from casemate.workspace.remove import Remover
from casemate.workspace.report import (
    CONFLICT,
    OVERLAY,
    PASS,
    SPECIAL,
    Held,
)
from casemate.workspace.scan import DIR, FILE, LINK, WHITEOUT, Change, Changes, scan
from casemate.workspace.target import Changed, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.workspace.judge import Context
    from casemate.workspace.report import ApplyOptions, Tally, Verdict

__all__ = ["TOO_MUCH", "Step"]

_LATEST = (1 << 63) - 1  # ns; a command can set times that no other file system can hold
_APPLIED = "trusted.casemate.applied"
#: The one failure that stands for all changes.
TOO_MUCH = "more changes than can be looked at in the time and number allowed: nothing was applied"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # no further write can succeed
_STORED = {FILE: keeping.FILE_ENTRY, LINK: keeping.LINK_ENTRY, DIR: keeping.DIRECTORY_ENTRY,
           WHITEOUT: keeping.DELETE}  # fmt: skip


def _plain(detail: str) -> str:
    """A detail that can be written as text."""
    return detail if detail.isprintable() else printable(detail)


def _was_applied(top: int) -> bool:
    """Whether an apply step has been at work with this top. Only root's own word counts: a command of the
    same user could have set a user's attribute.
    """
    try:
        return bool(os.getxattr(top, _APPLIED))
    except OSError:
        return False


def _mark_applied(top: int) -> None:
    with suppress(OSError):  # then the caller's ``resumed`` has to do
        os.setxattr(top, _APPLIED, b"y")


class Step:
    """One apply step. Everything it finds out goes into ``tally``."""

    def __init__(self, top: int, root: int, workspace: str, options: ApplyOptions, tally: Tally) -> None:
        self.top, self.root, self.options, self.tally = top, root, options, tally
        self.started = options.started_ns
        self.resumed = options.resumed or _was_applied(top)
        self.changes: Changes = scan(
            top, root, prefix=options.xattrs, redirects=options.redirects, limits=options.limits,
            started_ns=options.started_ns, resumed=self.resumed,
        )  # fmt: skip
        self.merged = Merged(top, root, self.changes)
        self.judge = Judge(self.merged, workspace, options)
        self.store = None if options.hold_dir is None else keeping.Store(options.hold_dir, options.hold_bytes)
        self.target = Target(root, options.hold_dir, self.started)
        self.remover = Remover(
            self.target, self.judge, self.started, resumed=self.resumed,
            hold=self._hold_deletion, fail=self._fail,
        )  # fmt: skip
        self.contexts: dict[str, Context] = {"": self.judge.root}
        self.maker = Maker(
            top, self.target, self.merged, self.remover, self.contexts, tally, self.started, self.resumed,
            options.xattrs,
        )  # fmt: skip
        # What passes: directories and files in order; deletions.
        self.makes: list[tuple[Change, Verdict]] = []
        self.deletes: list[Change] = []
        self.moves: list[Change] = []
        # Directories below which nothing can be made: with the reason if they are in conflict.
        self.blocked: dict[str, Held | None] = {}
        self.stopped = ""

    def run(self) -> None:
        """Do it."""
        if self.changes.truncated:
            self.tally.fail("", TOO_MUCH)
            return
        for path, code in self.changes.skipped:
            self.maker.adopter.spoil(path)
            self.tally.fail(path, code)
        try:
            if not self._judge_all():
                self.tally.fail("", TOO_MUCH)
                return
            _mark_applied(self.top)
            self._move_all()
            self._make_all()
            if self.tally.failed_total:
                # A file that could not be made may be the new home of one that would be deleted now.
                for change in self.deletes:
                    self.tally.fail(change.path, "not deleted, because something else failed")
            else:
                for change in self.deletes:
                    self._delete(change)
            self.remover.restore()
            for path, error in self.maker.finish():
                self._fail(path, error)
        finally:
            self.target.close()
            self._close_store()

    def _close_store(self) -> None:
        try:
            if self.store is not None:
                self.store.close()
        except OSError as error:
            self.tally.fail("", f"what was held back could not be kept: {error.strerror}")

    # -- deciding --------------------------------------------------------------------------------------

    def _judge_all(self) -> bool:
        """Decide over every change; False if that takes too long."""
        end = time.monotonic() + self.options.limits.seconds
        for change in self.changes.entries:
            if time.monotonic() > end:
                return False
            above = self.contexts[change.path.rpartition("/")[0]]
            try:
                if change.kind == DIR:
                    self._judge_directory(change, above)
                    continue
                verdict = self.judge.entry(above, change)
            except OSError as error:
                self.maker.adopter.spoil(change.path)
                self.contexts[change.path] = self.judge.holding(Held(change.path, OVERLAY, "unreadable"))
                self._fail(change.path, error)
                continue
            if verdict.held is not None or verdict.content is not None or change.kind == WHITEOUT:
                self.maker.adopter.spoil(change.path)
            if verdict.held is not None:
                self._hold(change, verdict.held, told=above.held is not None)
            elif change.kind == WHITEOUT:
                self.deletes.append(change)
            else:
                self.makes.append((change, verdict))
        return True

    def _judge_directory(self, change: Change, above: Context) -> None:
        context = self.judge.enter(above, change.path, change)
        moved = change.moved
        if moved and context.held is None:
            held = judge_move(self.judge, change, context, self.changes.hidden, self.options.limits.entries)
            if held is not None:
                context = self.judge.holding(held)
        self.contexts[change.path] = context
        if context.held is not None or moved:
            self.maker.adopter.spoil(change.path)
        if context.held is not None:
            if moved:
                self.remover.keep.add(change.source or "")
            self._hold(change, context.held, told=above.held is not None)
            return
        if moved:
            self.moves.append(change)
        self.makes.append((change, PASS))

    def _hold(self, change: Change, held: Held, *, told: bool = False) -> None:
        """Keep a change that is not applied. ``told``: the directory it is in has been reported already."""
        if not told:
            self.tally.hold(held.path if change.kind == DIR else change.path, held.reason, held.detail)
        if change.kind not in _STORED or held.reason == SPECIAL:
            return  # a socket or the like: nothing of it could be kept
        self._keep(change, held)

    def _keep(self, change: Change, held: Held) -> None:
        if self.store is None:
            self.tally.complete = False
            return
        to = os.fsencode(change.source or "") if change.moved else b""
        source = -1
        # What is in conflict is newer on the host already: only what the host does from now on counts.
        since = time.time_ns() if held.reason == CONFLICT else born_ns(self.top, change, self.started)
        try:
            if change.kind == LINK:
                to = os.fsencode(read_link(self.top, change.path))
            elif change.kind == FILE:
                source = open_content(self.top, change.path)
            item = keeping.Item(
                path=os.fsencode(change.path),
                kind=keeping.MOVE_ENTRY if change.moved else _STORED[change.kind],
                reason=held.reason, detail=_plain(held.detail), unit=os.fsencode(held.path),
                mode=change.mode & 0o777, size=change.size if change.kind == FILE else 0,
                mtime_ns=max(-_LATEST, min(change.mtime_ns, _LATEST)), since_ns=since, to=to,
            )  # fmt: skip
            blocks = os.fstat(source).st_blocks if source >= 0 else 0
            self.store.keep(item, source if source >= 0 else None, blocks)
        except keeping.Full:
            self.tally.fail(change.path, "no room to keep what was held back")
        except OSError as error:
            self._fail(change.path, error)
        finally:
            if source >= 0:
                os.close(source)

    def _hold_deletion(self, held: Held) -> None:
        self.tally.hold(held.path, held.reason, held.detail)
        if self.store is None:
            self.tally.complete = False
            return
        path = os.fsencode(held.path)
        item = keeping.Item(
            path=path, kind=keeping.DELETE, reason=held.reason, detail=_plain(held.detail), unit=path,
            since_ns=time.time_ns() if held.reason == CONFLICT else self.started,
        )  # fmt: skip
        self.store.keep(item)

    def _fail(self, path: str, error: OSError) -> None:
        self.tally.fail(path, error.strerror or str(error))
        if error.errno in _FULL:
            self.stopped = error.strerror or "no room"

    # -- doing -----------------------------------------------------------------------------------------

    def _move_all(self) -> None:
        if not self.moves:
            return
        mover = Mover(self.target, self.remover, self.maker, self.moves)
        for change in self.moves:
            directory = change.path.rpartition("/")[0]
            above = next((path for path in prefixes(directory) if path in self.blocked), None)
            if above is not None:
                self.remover.keep.add(change.source or "")
                self.blocked[change.path] = blocking = self.blocked[above]
                if blocking is not None:
                    self._keep(change, blocking)
                continue
            try:
                held = mover.move(change, self.contexts[directory])
            except Changed:
                held = Held(change.path, CONFLICT, "something is in the way")
            except OSError as error:
                self._fail(change.path, error)
                self.remover.keep.add(change.source or "")
                self.blocked[change.path] = None
                continue
            if held is None:
                self.tally.change("renamed", change.path)
            else:
                self.remover.keep.add(change.source or "")
                self.blocked[change.path] = held
                self._hold(change, held)
        for path in mover.give_back():
            self.tally.fail(path, "set aside for a rename that did not end, and could not be put back")

    def _make_all(self) -> None:
        for change, verdict in self.makes:
            path = change.path
            if self.stopped:
                self.tally.fail(path, f"not tried: {self.stopped}")
                continue
            directory = path.rpartition("/")[0]
            if directory in self.blocked or path in self.blocked:
                self._make_nothing(change, directory if directory in self.blocked else path)
                continue
            try:
                self.maker.make(change, verdict)
            except Changed:
                held = Held(path, CONFLICT, "the host changed it as well")
                if change.kind == DIR:
                    self.blocked[path] = held
                self._hold(change, held)
            except OSError as error:
                if change.kind == DIR:
                    self.blocked[path] = None
                self._fail(path, error)

    def _make_nothing(self, change: Change, because: str) -> None:
        held = self.blocked[because]
        if change.kind == DIR:
            self.blocked[change.path] = held
        if held is None:
            self.tally.fail(change.path, "its directory could not be made")
        elif because != change.path:
            self._keep(change, held)

    def _delete(self, change: Change) -> None:
        if self.target.stat(change.path) is None:
            return  # moved away, or gone since an earlier try
        if self.remover.tree(change.path, self.contexts[change.path.rpartition("/")[0]]):
            self.tally.change("deleted", change.path)
