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
from casemate.workspace.make import Maker, seen_ns
from casemate.workspace.merged import Merged, open_content, read_link
from casemate.workspace.moves import Mover, connected
from casemate.workspace.names import prefixes, printable
from casemate.workspace.remove import Remover
from casemate.workspace.report import CONFLICT, SPECIAL, Held
from casemate.workspace.rulings import TooLong, rulings
from casemate.workspace.scan import DIR, FILE, LINK, WHITEOUT, Change, Changes, scan
from casemate.workspace.select import Choice
from casemate.workspace.target import Changed, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.workspace.judge import Context
    from casemate.workspace.report import ApplyOptions, Tally, Verdict
    from casemate.workspace.rulings import Ruling

__all__ = ["TOO_MUCH", "Step", "was_applied"]

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


def was_applied(top: int) -> bool:
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
        self.resumed = options.resumed or was_applied(top)
        unlocked = None if options.journal is None else options.journal.unlocked
        if unlocked is not None and self.resumed:
            unlocked.restore(root)
        self.changes: Changes = scan(
            top, root, prefix=options.xattrs, redirects=options.redirects, limits=options.limits,
            started_ns=options.started_ns, resumed=self.resumed,
        )  # fmt: skip
        self.merged = Merged(top, root, self.changes)
        self.judge = Judge(self.merged, workspace, options)
        self.store = None if options.hold_dir is None else keeping.Store(options.hold_dir, options.hold_bytes)
        self.target = Target(root, options.hold_dir, self.started, unlocked)
        self.choice = Choice(options.only, options.journal)
        self.remover = Remover(
            self.target, self.judge, self.started, resumed=self.resumed,
            hold=self._hold_deletion, fail=self._fail, choice=self.choice,
        )  # fmt: skip
        self.contexts: dict[str, Context] = {"": self.judge.root}
        self.maker = Maker(
            top, self.target, self.merged, self.remover, self.contexts, tally, self.started, self.resumed,
            options.xattrs, self.choice, options.firsts,
        )  # fmt: skip
        # What passes: directories and files in order; deletions.
        self.makes: list[tuple[Change, Verdict]] = []
        self.deletes: list[Change] = []
        self.moves: list[Change] = []
        # Renames that are held back: what they say of the old place is only known when the others are done.
        self.held_moves: list[tuple[Change, Held]] = []
        # Paths that are dealt with, one way or another.
        self.handled: list[str] = []
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
            self._choose()
            if self.options.begin is not None:
                self.options.begin()
            _mark_applied(self.top)
            self._move_all()
            self._make_all()
            if self.tally.failed_total:
                # A file that could not be made may be the new home of one that would be deleted now.
                for change in self.deletes:
                    if self.choice.wants(change.path):
                        self.tally.fail(change.path, "not deleted, because something else failed")
            else:
                for change in self.deletes:
                    self._delete(change)
            self.remover.restore()
            failed = self.maker.finish()
            for path, error in failed:
                self._fail(path, error)
            if not failed and self.target.unlocked is not None:
                self.target.unlocked.clear()
        finally:
            self.target.close()
            self._close_store()
        self._note()

    def _close_store(self) -> None:
        try:
            if self.store is not None:
                self.store.close()
        except OSError as error:
            self.handled.clear()
            self.tally.fail("", f"what was held back could not be kept: {error.strerror}")

    def _note(self) -> None:
        """Write down what is done, if the top will be needed again."""
        journal = self.options.journal
        if journal is None or (self.tally.complete and self.options.only is None):
            return
        try:
            journal.add(self.handled)
        except OSError as error:
            self.tally.fail("", f"what was applied could not be noted: {error.strerror}")

    # -- deciding --------------------------------------------------------------------------------------

    def _judge_all(self) -> bool:
        """Decide over every change; False if that takes too long."""
        try:
            for ruling in rulings(self.judge, self.changes, self.contexts, self.options.limits):
                self._take(ruling)
        except TooLong:
            return False
        return True

    def _take(self, ruling: Ruling) -> None:
        """Sort one change in."""
        change, verdict, within = ruling.change, ruling.verdict, ruling.within
        wanted, held = self.choice.wants(change.path), verdict.held
        as_it_is = wanted and held is None and verdict.content is None and ruling.error is None
        if not as_it_is or change.moved or change.kind == WHITEOUT:
            self.maker.adopter.spoil(change.path)
        if ruling.error is not None:
            if wanted:
                self._fail(change.path, ruling.error)
        elif held is not None:
            if change.moved:
                self.remover.keep.add(change.source or "")
            if wanted:
                self._hold(change, held, told=within is not None and self.choice.wants(within.path))
        elif change.kind == WHITEOUT:
            # Of a directory that is gone, a part may be wanted.
            if wanted or (change.lower_mode & 0o170000 == 0o040000 and change.path not in self.choice.done):
                self.deletes.append(change)
        else:
            if change.moved:
                self.moves.append(change)
            if wanted or change.kind == DIR:
                self.makes.append((change, verdict))

    def _choose(self) -> None:
        """Add what is needed for what is wanted: directories, and renames of directories."""
        choice = self.choice
        if not choice.partial:
            return
        goals: set[str] = set()
        for change in (*(change for change, _ in self.makes), *self.deletes):
            if choice.wants(change.path):
                if change.kind != WHITEOUT:
                    choice.need(change.path)
                goals.update(prefixes(change.path))
        groups = connected(self.moves)
        more = True
        while more:
            more = False
            for group in groups:
                if any(self._is_move_wanted(move, goals) for move in group):
                    for move in group:
                        if move.path not in choice.extra and move.path not in choice.done:
                            more = True
                            choice.extra.add(move.path)
                            choice.need(move.path)
                            goals.update(prefixes(move.path))
        left = {move.path: move for move in self.moves if move.path not in choice.extra}
        for path, move in left.items():
            self.remover.keep.add(move.source or "")
            self.blocked[path] = None
            if path in choice.done and path in choice.needed:
                # It was moved, or that was thrown away, and by now the host has it somewhere else.
                self.blocked[path] = held = Held(path, CONFLICT, "the host has renamed this directory")
                self.tally.hold(path, held.reason, held.detail)
        self.deletes = [
            change
            for change in self.deletes
            if choice.wants(change.path) or not left.keys() & set(prefixes(change.path))
        ]
        self.moves = [move for move in self.moves if move.path in choice.extra]

    def _is_move_wanted(self, move: Change, goals: set[str]) -> bool:
        """Whether it, or something in it, is wanted at its new place, or something new at its old one."""
        source = move.source or ""
        return move.path in goals or source in goals or self.choice.wants(source)

    def _hold(self, change: Change, held: Held, *, told: bool = False) -> None:
        """Keep a change that is not applied. ``told``: the directory it is in has been reported already."""
        if not told:
            self.tally.hold(held.path if change.kind == DIR else change.path, held.reason, held.detail)
        if change.kind not in _STORED or held.reason == SPECIAL:
            self.handled.append(change.path)  # a socket or the like: nothing of it could be kept
        elif change.moved:
            self.held_moves.append((change, held))
        else:
            self._keep(change, held)

    def _keep(self, change: Change, held: Held, source_now: str = "") -> None:
        if self.store is None:
            self.tally.complete = False
            return
        to = os.fsencode(source_now)
        source = -1
        # What is in conflict is newer on the host already: only what the host does from now on counts.
        since = time.time_ns()
        if held.reason != CONFLICT:
            since = seen_ns(change, self.started, self.options.firsts)
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
            self.handled.append(change.path)
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
        mover = Mover(self.target, self.remover, self.maker, self.moves)
        for change in self.moves:
            directory = change.path.rpartition("/")[0]
            above = next((path for path in prefixes(directory) if path in self.blocked), None)
            if above is not None:
                self.blocked[change.path] = blocking = self.blocked[above]
                self.remover.keep.add(change.source or "")
                if blocking is not None:
                    self.held_moves.append((change, blocking))
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
        # What stays has come along with the directories that were moved above it.
        self.remover.keep |= {mover.translate(path) for path in self.remover.keep}
        for change, held in self.held_moves:
            self._keep(change, held, mover.translate(change.source or ""))

    def _make_all(self) -> None:
        for change, verdict in self.makes:
            path = change.path
            wanted = self.choice.makes_directory(path)
            if self.stopped:
                if wanted:
                    self.tally.fail(path, f"not tried: {self.stopped}")
                continue
            directory = path.rpartition("/")[0]
            if directory in self.blocked or path in self.blocked:
                self._make_nothing(change, directory if directory in self.blocked else path, wanted=wanted)
                continue
            try:
                if self.maker.make(change, verdict):
                    self.handled.append(path)
            except Changed:
                held = Held(path, CONFLICT, "the host changed it as well")
                if change.kind == DIR:
                    self.blocked[path] = held
                self._hold(change, held)
            except OSError as error:
                if change.kind == DIR:
                    self.blocked[path] = None
                self._fail(path, error)

    def _make_nothing(self, change: Change, because: str, *, wanted: bool) -> None:
        held = self.blocked[because]
        if change.kind == DIR:
            self.blocked[change.path] = held
        if not wanted or change.path in self.choice.done:
            return
        if held is None:
            self.tally.fail(change.path, "its directory could not be made")
        elif because != change.path:
            self._keep(change, held)

    def _delete(self, change: Change) -> None:
        path, wanted = change.path, self.choice.wants(change.path)
        before = self.remover.left
        there = self.target.stat(path) is not None
        if there and self.remover.tree(path, self.contexts[path.rpartition("/")[0]]):
            self.tally.change("deleted", path)
        # Else it was moved away, or is gone since an earlier try. What was held back is kept elsewhere.
        if wanted and self.remover.left == before:
            self.handled.append(path)
