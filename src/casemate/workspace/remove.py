"""Deleting from the workspace what the command deleted, except what is protected or has changed since."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from casemate.sys.files import open_beneath
from casemate.workspace.names import join
from casemate.workspace.report import CONFLICT, Held
from casemate.workspace.target import Changed, Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from casemate.workspace.judge import Context
    from casemate.workspace.scan import Change
    from casemate.workspace.select import Choice

    class Judging(Protocol):
        """The part of a judge that deleting needs."""

        def enter(self, context: Context, path: str, change: Change | None) -> Context: ...
        def deletion(self, context: Context, path: str, mode: int) -> Held | None: ...


__all__ = ["Remover"]

_CHANGED = "the host changed it; the command deleted it"


class Remover:
    """Removes entries and trees. ``hold`` and ``fail`` take what could not be removed."""

    def __init__(
        self,
        target: Target,
        judge: Judging,
        started_ns: int,
        *,
        resumed: bool,
        hold: Callable[[Held], None],
        fail: Callable[[str, OSError], None],
        choice: Choice | None = None,
    ) -> None:
        self.target, self.judge, self.started = target, judge, started_ns
        self.resumed = resumed
        self.hold, self.fail = hold, fail
        self.choice = choice if choice is not None and choice.partial else None
        #: Paths that a held-back rename still needs.
        self.keep: set[str] = set()
        self._unlocked: list[tuple[str, os.stat_result]] = []
        # Directories in which something may be removed, but which stay themselves.
        self._through: set[str] = set()
        #: How many entries are gone, and how many are left, though nothing held them back.
        self.removed = self.left = 0

    def tree(self, path: str, context: Context, *, whole: bool = False) -> bool:
        """Remove an entry with everything in it; True if nothing is left. ``context`` is its directory's.

        Of that, only what is chosen goes, unless it has to go as a ``whole`` for something that is.
        """
        if whole and self.choice is not None:
            choice, self.choice = self.choice, None
            try:
                return self.tree(path, context)
            finally:
                self.choice = choice
        status = self.target.stat(path)
        if status is None:
            return True
        if not self._may_go(path, status, context):
            return False
        if not stat.S_ISDIR(status.st_mode):
            return self._unlink(path, status)
        self._walk(path, self.judge.enter(context, path, None))
        return self.target.stat(path) is None

    def _walk(self, top: str, context: Context) -> None:
        # (path, context, None) is still to be read; (path, context, True) has been, and can go.
        stack: list[tuple[str, Context, bool]] = [(top, context, False)]
        while stack:
            path, context, seen = stack.pop()
            try:
                if seen:
                    if path not in self._through:
                        self._rmdir(path)
                    continue
                stack.append((path, context, True))
                self._unlock(path)
                for name in self._names(path):
                    entry = join(path, name)
                    status = self.target.stat(entry)
                    if status is None or not self._may_go(entry, status, context):
                        continue
                    if stat.S_ISDIR(status.st_mode):
                        stack.append((entry, self.judge.enter(context, entry, None), False))
                    else:
                        self._unlink(entry, status)
            except OSError as error:
                self.left += 1
                self.fail(path, error)

    def children(self, path: str, context: Context, stay: Callable[[str], bool]) -> None:
        """Remove what is in a directory, except the names that are to stay."""
        for name in self._names(path):
            if not stay(name):
                self.tree(join(path, name), context)

    def _may_go(self, path: str, status: os.stat_result, context: Context) -> bool:
        if path in self.keep:
            self.left += 1
            return False
        through = self.choice is not None and not self.choice.wants(path)
        if through:
            self.left += 1
            if self.choice is None or path in self.choice.done or not stat.S_ISDIR(status.st_mode):
                return False
            self._through.add(path)
            return self.judge.deletion(context, path, status.st_mode) is None
        held = self.judge.deletion(context, path, status.st_mode)
        if held is None and self._changed(status):
            held = Held(path, CONFLICT, _CHANGED)
        if held is not None:
            self.hold(held)
        return held is None

    def _changed(self, status: os.stat_result) -> bool:
        if not self.target.changed_since(status, self.started):
            return False
        # An earlier, interrupted try has removed entries itself: that sets both times of a directory. A
        # directory that the host moved here has a new ctime only.
        own = self.resumed and stat.S_ISDIR(status.st_mode) and status.st_ctime_ns == status.st_mtime_ns
        return not own

    def _names(self, path: str) -> list[str]:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = open_beneath(self.target.root, path, flags)
        except PermissionError:
            self._unlock(path)
            fd = open_beneath(self.target.root, path, flags)
        try:
            return os.listdir(fd)
        finally:
            os.close(fd)

    def _unlock(self, path: str) -> None:
        status = self.target.stat(path)
        if status is not None and self.target.unlock(path, status):
            self._unlocked.append((path, status))

    def restore(self) -> None:
        """Give directories that could not be emptied their own mode back."""
        for path, status in reversed(self._unlocked):
            with suppress(OSError):
                self.target.finish_directory(path, status, status.st_mode, None)

    def _unlink(self, path: str, status: os.stat_result) -> bool:
        try:
            self.target.unlink(path, status)
        except FileNotFoundError:
            pass
        except Changed:
            self.hold(Held(path, CONFLICT, _CHANGED))
            return False
        except OSError as error:
            self.left += 1
            self.fail(path, error)
            return False
        self.removed += 1
        return True

    def _rmdir(self, path: str) -> None:
        directory, _, name = path.rpartition("/")
        try:
            os.rmdir(name, dir_fd=self.target.directory(directory))
            self.removed += 1
        except OSError:
            if not self._names(path):
                raise  # else: what stays in it has been named already, or the host has just put it there
