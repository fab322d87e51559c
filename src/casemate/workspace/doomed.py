"""What of the workspace would go with a directory that is deleted, and what of that would be held back."""

from __future__ import annotations

import os
import stat

from casemate.sys.files import open_beneath
from casemate.workspace.names import join
from casemate.workspace.report import CONFLICT, Held

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.workspace.judge import Context, Judge
    from casemate.workspace.report import ApplyOptions

__all__ = ["Doomed"]

_MOST = 200_000  # entries that are looked at in all
_LISTED = 1000


class Doomed:
    """Walks trees of the workspace as the step would when it deletes them. ``spared`` are the old places of
    renamed directories.
    """

    def __init__(self, root: int, judge: Judge, options: ApplyOptions, spared: set[str]) -> None:
        self._root, self._judge, self._spared = root, judge, spared
        self._started, self._resumed = options.started_ns, options.resumed
        self._journal = options.journal.done if options.journal is not None else set[str]()
        self._left = _MOST
        #: Of the tree that was judged last: how many entries are in it, and the bytes of its files.
        self.entries = self.bytes = 0

    def judge(
        self, path: str, source: str, status: os.stat_result, context: Context
    ) -> tuple[Held | None, list[Held]]:
        """Why the entry itself may not go, or what in it may not. ``path`` is where the view had it,
        ``source`` where the workspace does, ``context`` the context of its directory.
        """
        self.entries = self.bytes = 0
        held = self._held(path, status, context)
        if held is not None or not stat.S_ISDIR(status.st_mode):
            return held, []
        inside: list[Held] = []
        stack = [(path, source, self._judge.enter(context, path, None))]
        while stack and self._left > 0:
            here, there, context = stack.pop()
            try:
                fd = open_beneath(
                    self._root, there, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK
                )
            except OSError:
                continue
            try:
                with os.scandir(fd) as listing:
                    for item in listing:
                        self._left -= 1
                        entry, old = join(here, item.name), join(there, item.name)
                        if old in self._spared or entry in self._journal:
                            continue
                        status = item.stat(follow_symlinks=False)
                        held = self._held(entry, status, context)
                        if held is not None:
                            inside += [held] if len(inside) < _LISTED else []
                            continue
                        self.entries += 1
                        if stat.S_ISDIR(status.st_mode):
                            stack.append((entry, old, self._judge.enter(context, entry, None)))
                        elif stat.S_ISREG(status.st_mode):
                            self.bytes += status.st_size
            finally:
                os.close(fd)
        return None, inside

    def _held(self, path: str, status: os.stat_result, context: Context) -> Held | None:
        held = self._judge.deletion(context, path, status.st_mode)
        if held is None and status.st_ctime_ns > self._started:
            # As the step has it: what an earlier, interrupted try has emptied is its own doing.
            own = self._resumed and stat.S_ISDIR(status.st_mode) and status.st_ctime_ns == status.st_mtime_ns
            if not own:
                return Held(path, CONFLICT, "the host changed it; the command deleted it")
        return held

    def measure(self, source: str) -> tuple[int, int]:
        """How many entries a directory of the workspace has, and the bytes of its files."""
        entries = size = 0
        stack = [source]
        while stack and self._left > 0:
            there = stack.pop()
            try:
                fd = open_beneath(
                    self._root, there, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK
                )
            except OSError:
                continue
            try:
                with os.scandir(fd) as listing:
                    for item in listing:
                        self._left -= 1
                        entries += 1
                        status = item.stat(follow_symlinks=False)
                        if stat.S_ISDIR(status.st_mode):
                            stack.append(join(there, item.name))
                        elif stat.S_ISREG(status.st_mode):
                            size += status.st_size
            finally:
                os.close(fd)
        return entries, size
