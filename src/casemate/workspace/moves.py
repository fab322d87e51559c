"""Renamed directories: the top says where each was, the workspace is made to agree by real renames.

The kernel writes such a note instead of copying a directory's content. A rename is carried out whole or
not at all: what is in the directory moves along, so all of it is judged at its new place first.
"""

from __future__ import annotations

import os
import stat

from casemate.sys.files import open_beneath
from casemate.workspace.merged import read_link
from casemate.workspace.names import join, printable
from casemate.workspace.report import CONFLICT, MOVE, Held

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.workspace.judge import Context, Judge
    from casemate.workspace.remove import Remover
    from casemate.workspace.scan import Change
    from casemate.workspace.target import Target

__all__ = ["Mover", "judge_move"]


def judge_move(judge: Judge, change: Change, context: Context, hidden: set[str], most: int) -> Held | None:
    """Why a directory may not be moved to where the top has it, or None.

    ``context`` is the directory's own, at its new place.
    """
    source = change.source or ""
    path = change.path

    def no(detail: str) -> Held:
        return Held(path, MOVE, f"moved from {printable(source)}: {detail}")

    if not any(prefix in hidden for prefix in _prefixes(source)):
        return no("it is still there as well")
    above = judge.root()
    for prefix in reversed(list(_prefixes(source))):
        above = judge.enter(above, prefix, None)
        if above.held is not None or above.git is not None:
            return no("it is protected there")
    if context.git is not None:
        return no("it would become part of a repository")
    lower = judge.merged.lower
    stack = [(source, path, context)]
    while stack:
        old, new, context = stack.pop()
        try:
            fd = open_beneath(lower, old, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            return no(f"unreadable: {error.strerror}")
        try:
            with os.scandir(fd) as listing:
                for item in listing:
                    most -= 1
                    entry = join(new, item.name)
                    if most < 0 or len(os.fsencode(entry)) > 4000:
                        return no("too large to be judged")
                    if item.is_dir(follow_symlinks=False):
                        inner = judge.enter(context, entry, None)
                        if inner.held is not None or inner.git is not None:
                            return no(f"holds {printable(entry)}")
                        stack.append((join(old, item.name), entry, inner))
                        continue
                    rule = judge.protected.match(new, item.name)
                    if rule is not None and not rule.ask:
                        return no(f"holds {printable(entry)}")
                    if item.is_symlink() and not _link_may_move(judge, path, entry, join(old, item.name)):
                        return no(f"the link {printable(entry)} would lead elsewhere")
        finally:
            os.close(fd)
    return None


def _link_may_move(judge: Judge, top: str, entry: str, old: str) -> bool:
    try:
        to = read_link(judge.merged.lower, old)
    except OSError:
        return False
    ups = 0
    for name in to.split("/"):
        if name == "..":
            ups += 1
        elif name not in ("", "."):
            break
    # How far up the link's own directory is from the directory that moves.
    inside = entry.count("/") - top.count("/") - 1
    if to.startswith("/") or (ups <= inside and ".." not in to.split("/")[ups:]):
        return True  # means the same at every place
    return judge.links.judge(entry, to)[0] is None


class Mover:
    """Carries renames out. Directories trade places where one stands in another's way."""

    def __init__(self, target: Target, remover: Remover, pending: set[str]) -> None:
        self.target, self.remover = target, remover
        #: Sources that are still to be moved.
        self.pending = pending
        self._done: list[tuple[str, str, bool]] = []

    def move(self, change: Change, parent: Context) -> Held | None:
        """Rename one directory of the workspace; ``parent`` is the context of the directory it goes to.

        Raises OSError. Preconditions: the directories above its new place exist.
        """
        source = change.source or ""
        here = self._translate(source)
        self.pending.discard(source)
        if here == change.path:
            return None
        now = self.target.stat(here)
        there = self.target.stat(change.path)
        if now is None or not stat.S_ISDIR(now.st_mode):
            if there is not None and stat.S_ISDIR(there.st_mode):
                return None  # an earlier, interrupted try has moved it
            return Held(change.path, CONFLICT, f"moved from {printable(source)}, which the host removed")
        exchange = False
        if there is not None:
            exchange = any(self._translate(other) == change.path for other in self.pending)
            if not exchange and not (change.hides and self.remover.tree(change.path, parent)):
                return Held(change.path, CONFLICT, f"moved from {printable(source)}, something is in the way")
        self.target.move(here, change.path, exchange=exchange)
        self._done.append((here, change.path, exchange))
        return None

    def _translate(self, path: str) -> str:
        """Where a path of the workspace is after the moves so far."""
        for source, to, exchange in self._done:
            if path == source or path.startswith(source + "/"):
                path = to + path[len(source) :]
            elif exchange and (path == to or path.startswith(to + "/")):
                path = source + path[len(to) :]
        return path


def _prefixes(path: str) -> list[str]:
    found: list[str] = []
    while path:
        found.append(path)
        path = path.rpartition("/")[0]
    return found
