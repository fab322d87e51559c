"""Where a symbolic link from the top would lead on the host.

A link passes if it stays in the workspace, or leads to a place that the policy let the sandbox read and
not write; and if it does not lead to a protected name, which would be that name by another way. Nor may it
be a part of a protected path itself, which what it leads to would come to have.

It is judged as written and as resolved, through every link on the way: in the workspace as the command
left it, and in the workspace as it is, since other changes may be held back. How it is written matters
because the workspace goes on changing: ``..`` may only stand at the beginning of a relative link. There
it means the real parents of the link's own directory; after a name, it would mean something else once
that name becomes a link itself.
"""

from __future__ import annotations

import os
import stat

from casemate.workspace.merged import Merged, Node
from casemate.workspace.names import join
from casemate.workspace.report import LINK_OUTSIDE, LINK_PROTECTED
from casemate.workspace.scan import DIR, LINK, Changes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.workspace.protected import Protected

__all__ = ["Links"]

_MOST_LINKS = 40  # as the kernel: then it says ELOOP


class _Stop(Exception):
    """The verdict is no: (reason, detail)."""


class Links:
    """Judges links of one view. ``workspace`` is the absolute path that links may name it by."""

    def __init__(
        self, merged: Merged, protected: Protected, workspace: str, readable: tuple[str, ...]
    ) -> None:
        nothing = Changes(entries=[], skipped=[], hidden=set())
        self.worlds = (merged, Merged(merged.top, merged.lower, nothing))
        self.protected = protected
        self.workspace = workspace.rstrip("/")
        self.readable = tuple(root.rstrip("/") or "/" for root in readable)

    def judge(self, path: str, to: str) -> tuple[tuple[str, str] | None, int]:
        """The reason for holding a link back, if there is one, and the st_mode of what it leads to."""
        above, _, name = path.rpartition("/")
        if rule := self.protected.way(above, name):
            return (LINK_PROTECTED, f"would be a way to {rule.pattern}"), 0
        parts = to.split("/")
        names = [part for part in parts if part not in ("", ".")]
        ups = 0
        while ups < len(names) and names[ups] == "..":
            ups += 1
        if ".." in names[ups:] or (to.startswith("/") and ups) or not to:
            return (LINK_OUTSIDE, "'..' after a name"), 0
        absolute = "/" + "/".join(names) if to.startswith("/") else ""
        if absolute and not self._names_workspace(absolute) and not self.is_readable(absolute):
            return (LINK_OUTSIDE, "an absolute path that the sandbox may not read"), 0
        modes: list[int] = []
        for world in self.worlds:
            walk = _Walk(self, world)
            try:
                if absolute:
                    modes.append(walk.host("/", names))
                else:
                    modes.append(walk.view(path.rpartition("/")[0], names))
            except _Stop as stop:
                reason, detail = stop.args
                return (reason, detail), 0
        return None, modes[0]

    def _names_workspace(self, path: str) -> bool:
        return path == self.workspace or path.startswith(self.workspace + "/")

    def is_readable(self, path: str) -> bool:
        return any(root == "/" or path == root or path.startswith(root + "/") for root in self.readable)


class _Walk:
    """One resolution. Raises ``_Stop`` where it ends badly."""

    def __init__(self, links: Links, world: Merged) -> None:
        self.links, self.world = links, world
        self.budget = _MOST_LINKS

    def view(self, directory: str, names: list[str]) -> int:
        """Resolve ``names`` from a directory of the workspace; returns the st_mode, 0 if nothing is there."""
        here = [self.world.root]
        for name in directory.split("/") if directory else ():
            node = self.world.child(here[-1], name)
            # A new directory: if it is not made, the link in it is not made either.
            here.append(node if node.kind == DIR else Node(join(here[-1].path, name), DIR))
        todo = names[::-1]
        while todo:
            name = todo.pop()
            if name == "..":
                if len(here) == 1:
                    raise _Stop(LINK_OUTSIDE, "leads out of the workspace")
                here.pop()
                continue
            self._check(here[-1].path, name)
            node = self.world.child(here[-1], name)
            if node.kind == LINK:
                if not self.budget:
                    # Links in a circle, or too many for the kernel: it leads nowhere. Each of them is
                    # judged for itself as well, so none can come to lead out later.
                    return 0
                self.budget -= 1
                to = self.world.target_of(node)
                more = [part for part in to.split("/") if part not in ("", ".")]
                if to.startswith("/"):
                    return self.host("/", more + todo[::-1])
                todo.extend(more[::-1])
            elif node.kind == DIR:
                here.append(node)
            elif not todo:
                return node.mode
            else:
                return self._beyond(join(here[-1].path, name), todo)
        return here[-1].mode

    def _check(self, directory: str, name: str) -> None:
        if rule := self.links.protected.match(directory, name):
            raise _Stop(LINK_PROTECTED, f"leads to {rule.pattern}")

    def _beyond(self, path: str, todo: list[str]) -> int:
        """The rest of a path after a name where no directory is (yet)."""
        for later in reversed(todo):
            if later == "..":
                raise _Stop(LINK_OUTSIDE, "'..' after a name that is no directory")
            self._check(path, later)
            path = join(path, later)
        return 0

    def host(self, start: str, names: list[str]) -> int:
        """Resolve an absolute path on the host, until it ends or enters the workspace."""
        here, mode = start, 0
        todo = names[::-1]
        while todo:
            if here == self.links.workspace:
                return self.view("", todo[::-1])
            name = todo.pop()
            if name == "..":
                here = here.rpartition("/")[0] or "/"
                continue
            path = f"{here.rstrip('/')}/{name}"
            try:
                mode = os.lstat(path).st_mode
            except OSError:
                # Nothing there: the path can only be judged as it is written.
                if ".." in todo:
                    raise _Stop(LINK_OUTSIDE, "'..' after a name that is no directory") from None
                here, mode = "/".join([path, *reversed(todo)]), 0
                break
            if stat.S_ISLNK(mode):
                if not self.budget:
                    raise _Stop(LINK_OUTSIDE, "too many links")
                self.budget -= 1
                to = os.readlink(path)
                here = "/" if to.startswith("/") else here
                todo.extend(part for part in reversed(to.split("/")) if part not in ("", "."))
            else:
                here = path
        if here == self.links.workspace:
            return stat.S_IFDIR | 0o700
        if not self.links.is_readable(here):
            raise _Stop(LINK_OUTSIDE, "leads to a path that the sandbox may not read")
        return mode
