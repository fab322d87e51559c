"""The workspace as the command saw it: the top over the lower layer, looked up name by name."""

from __future__ import annotations

import errno
import os
import stat

import msgspec

from casemate.sys.files import mode_beneath, open_beneath
from casemate.workspace.names import join
from casemate.workspace.scan import DIR, FILE, LINK, SPECIAL, WHITEOUT, Change, Changes

__all__ = ["MISSING", "Merged", "Node", "open_content", "read_file", "read_link"]

_LEAF = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class Node(msgspec.Struct, frozen=True, gc=False):
    """One entry of the view."""

    #: Where it is in the view.
    path: str
    #: FILE, LINK, DIR, SPECIAL, or "" where nothing is.
    kind: str
    mode: int = 0
    #: A directory's lower half, or where in the lower layer a file is; None if it is in the top only.
    lower: str | None = None
    #: It is in the top (a directory may be in both).
    top: bool = False


MISSING = Node("", "")


class Merged:
    """Lookups in the view. Nothing is followed; the caller steps through links itself."""

    def __init__(self, top: int, lower: int, changes: Changes) -> None:
        self.top, self.lower = top, lower
        self.index: dict[str, Change] = {entry.path: entry for entry in changes.entries}
        self.root = Node("", DIR, stat.S_IFDIR | 0o700, "", True)
        self._known: dict[str, Node] = {"": self.root}

    def child(self, directory: Node, name: str) -> Node:
        """The entry ``name`` of a directory of the view."""
        path = join(directory.path, name)
        node = self._known.get(path)
        if node is None:
            node = self._known[path] = self._look(directory, path, name)
        return node

    def _look(self, directory: Node, path: str, name: str) -> Node:
        change = self.index.get(path) if directory.top else None
        if change is not None:
            if change.kind == WHITEOUT:
                return MISSING
            return Node(path, change.kind, change.mode, change.source, True)
        if directory.lower is None:
            return MISSING
        below = join(directory.lower, name)
        mode = self.lower_mode(below)
        return Node(path, _kind(mode), mode, below) if mode else MISSING

    def lower_mode(self, path: str) -> int:
        """st_mode of an entry of the lower layer, 0 if there is none."""
        try:
            return mode_beneath(self.lower, path)
        except OSError:
            return 0

    def find(self, path: str) -> Node:
        """The entry at a path through directories only (no link, no "..")."""
        node = self.root
        for name in path.split("/") if path else ():
            if node.kind != DIR:
                return MISSING
            node = self.child(node, name)
        return node

    def read(self, node: Node, limit: int) -> bytes | None:
        """The content of a regular file of the view; None if it is none, or longer than ``limit``."""
        if node.kind != FILE:
            return None
        if node.top:
            return read_file(self.top, node.path, limit)
        return None if node.lower is None else read_file(self.lower, node.lower, limit)

    def target_of(self, node: Node) -> str:
        """What a link of the view says."""
        root, path = (self.top, node.path) if node.top else (self.lower, node.lower or "")
        return read_link(root, path)


def read_file(root: int, path: str, limit: int) -> bytes | None:
    """The content of a regular file, whatever its mode is; None if it is none or too long."""
    try:
        fd = open_content(root, path)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            return None
        data = b""
        while piece := os.read(fd, limit + 1 - len(data)):
            data += piece
            if len(data) > limit:
                return None
        return data
    finally:
        os.close(fd)


def open_content(root: int, path: str) -> int:
    """Open a file of the top (or the workspace) for reading; the command may have taken our right to.

    Preconditions: a scan has seen a regular file there, and nobody has changed the top since.
    """
    try:
        return open_beneath(root, path, _LEAF)
    except PermissionError:
        handle = open_beneath(root, path, os.O_PATH | os.O_NOFOLLOW)
        try:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise
            by_descriptor = f"/proc/self/fd/{handle}"
            os.chmod(by_descriptor, 0o400)
            try:
                return os.open(by_descriptor, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY)
            finally:
                os.chmod(by_descriptor, stat.S_IMODE(status.st_mode))
        finally:
            os.close(handle)


def read_link(root: int, path: str) -> str:
    """What a symbolic link says."""
    fd = open_beneath(root, path, os.O_PATH | os.O_NOFOLLOW)
    try:
        if not stat.S_ISLNK(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "no link", path)
        return os.readlink("", dir_fd=fd)
    finally:
        os.close(fd)


def _kind(mode: int) -> str:
    if stat.S_ISREG(mode):
        return FILE
    if stat.S_ISDIR(mode):
        return DIR
    return LINK if stat.S_ISLNK(mode) else SPECIAL
