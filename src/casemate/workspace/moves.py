"""Renamed directories: the top says where each was, the workspace is made to agree by real renames.

The kernel writes such a note instead of copying a directory's content. A rename is carried out whole or
not at all: what is in the directory moves along, so all of it is judged at its new place first.
"""

from __future__ import annotations

import os
import stat

from casemate.sys.files import open_beneath
from casemate.workspace.merged import read_link
from casemate.workspace.names import join, prefixes, printable
from casemate.workspace.report import CONFLICT, MOVE, Held
from casemate.workspace.target import TEMPORARY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.workspace.judge import Context, Judge
    from casemate.workspace.make import Maker
    from casemate.workspace.remove import Remover
    from casemate.workspace.scan import Change
    from casemate.workspace.target import Target

__all__ = ["Mover", "connected", "judge_move"]


def judge_move(judge: Judge, change: Change, context: Context, hidden: set[str], most: int) -> Held | None:
    """Why a directory may not be moved to where the top has it, or None.

    ``context`` is the directory's own, at its new place.
    """
    source = change.source or ""
    path = change.path

    def no(detail: str) -> Held:
        return Held(path, MOVE, f"moved from {printable(source)}: {detail}")

    if not any(prefix in hidden for prefix in prefixes(source)):
        return no("it is still there as well")
    above = judge.root
    if source.startswith(TEMPORARY):
        source_parts: list[str] = []  # set aside by an earlier, interrupted try
    else:
        source_parts = prefixes(source)
    for prefix in reversed(source_parts):
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
                    # What is protected by its path (a denied file) would no longer be, at another one.
                    rule = judge.protected.match(old, item.name)
                    if rule is not None and not rule.ask:
                        return no(f"holds {printable(join(old, item.name))}")
                    if item.is_dir(follow_symlinks=False):
                        inner = judge.enter(context, entry, None)
                        if inner.held is not None or inner.git is not None:
                            return no(f"holds {printable(entry)}")
                        stack.append((join(old, item.name), entry, inner))
                        continue
                    rule = judge.protected.match(new, item.name)
                    if rule is not None and not rule.ask:
                        return no(f"holds {printable(entry)}")
                    if item.is_symlink() and judge.protected.way(new, item.name):
                        return no(f"the link {printable(entry)} would be a way to a protected name")
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


def connected(moves: list[Change]) -> list[list[Change]]:
    """Renames in groups: those of a group can only be made together, since one needs, or makes, the place
    that another one is about.
    """
    groups: list[list[Change]] = []
    for move in moves:
        joined = [group for group in groups if any(_meet(move, other) for other in group)]
        groups = [group for group in groups if group not in joined]
        groups.append([move, *(other for group in joined for other in group)])
    return groups


def _meet(one: Change, other: Change) -> bool:
    places = ((a, b) for a in (one.path, one.source or "") for b in (other.path, other.source or ""))
    return any(a == b or a.startswith(b + "/") or b.startswith(a + "/") for a, b in places)


class Mover:
    """Carries renames out, in the order of the walk: directories above come before those in them.

    A directory that stands where another one belongs, and has a place of its own to go to, is set aside
    under a temporary name first. A run that is killed then finds it there again by its file handle.
    """

    def __init__(self, target: Target, remover: Remover, maker: Maker, moves: list[Change]) -> None:
        self.target, self.remover, self.maker = target, remover, maker
        # Sources that are still to be moved.
        self._pending = {change.source or "" for change in moves}
        self._aside: set[str] = set()
        self._done: list[tuple[str, str]] = []

    def move(self, change: Change, parent: Context) -> Held | None:
        """Rename one directory of the workspace; ``parent`` is the context of the directory it goes to.

        Raises OSError.
        """
        source, path = change.source or "", change.path
        index = self.maker.merged.index
        for above in reversed(prefixes(path)[1:]):
            if index[above].hides:
                self._clear(above, within=False)
        self._clear(path, within=True)
        self._pending.discard(source)
        self.maker.make_above(path.rpartition("/")[0])
        here = self.translate(source)
        if (now := self.target.stat(here)) is None or not stat.S_ISDIR(now.st_mode):
            return Held(path, CONFLICT, f"moved from {printable(source)}, which the host removed")
        there = self.target.stat(path) is not None
        replaces = change.hides or self._is_replaced(path)
        if there and not (replaces and self.remover.tree(path, parent, whole=True)):
            return Held(path, CONFLICT, f"moved from {printable(source)}, something is in the way")
        self._rename(here, path)
        self._aside.discard(source)
        return None

    def _is_replaced(self, path: str) -> bool:
        """Whether a directory above takes the place of what the workspace has there, with all in it."""
        for above in prefixes(path)[1:]:
            change = self.maker.merged.index[above]
            if change.source is not None:
                return False
            if change.hides:
                return True
        return False

    def _clear(self, path: str, *, within: bool) -> None:
        """Set aside what is at ``path`` (or ``within`` it) and is to be moved somewhere else."""
        for source in sorted(self._pending - self._aside):
            here = self.translate(source)
            if here == path or (within and here.startswith(path + "/")):
                number = len(self._done)
                while self.target.stat(f"{TEMPORARY}.{number}") is not None:
                    number += 1
                self._rename(here, f"{TEMPORARY}.{number}")
                self._aside.add(source)

    def _rename(self, here: str, to: str) -> None:
        self.target.move(here, to)
        self._done.append((here, to))

    def give_back(self) -> list[str]:
        """Put back what was set aside and could not be moved on; returns where it is if that fails."""
        left: list[str] = []
        for source in sorted(self._aside):
            here = self.translate(source)
            try:
                self._rename(here, source)
            except OSError:
                left.append(here)
        self._aside.clear()
        return left

    def translate(self, path: str) -> str:
        """Where a path of the workspace is after the renames so far."""
        for source, to in self._done:
            if path == source or path.startswith(source + "/"):
                path = to + path[len(source) :]
        return path
