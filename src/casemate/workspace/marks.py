"""The names by which git knows a repository, looked for in directories as a command has left them.

A command can take away everybody's right to list its directories, or to reach what is in them. What cannot
be looked at here is an error, never an empty directory: otherwise a repository could be put together out of
sight, and be shown once it is complete.
"""

from __future__ import annotations

import os

from casemate.sys.files import mode_beneath, open_beneath
from casemate.workspace.merged import Merged
from casemate.workspace.protected import fold
from casemate.workspace.report import GIT_REPOSITORY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FILES", "LISTED", "Strict", "completes", "is_marked", "look_into", "mark", "recognised"]

#: How a directory is opened to list it.
LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_OPENED = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
# Of a directory with objects and refs, what makes git run something once any other directory names it.
_ACTIVE = ("config", "config.worktree", "hooks", "remotes", "branches")
_MARKS = frozenset({"head", "objects", "refs", "commondir", *_ACTIVE})
#: Marks that are none if they are directories: many projects have a directory called config.
FILES = frozenset({"config", "config.worktree"})


class Strict(Merged):
    """A view in which what may not be looked at is a PermissionError, and not missing."""

    def lower_mode(self, path: str) -> int:
        """As of every view, but raises PermissionError."""
        try:
            return mode_beneath(self.lower, path)
        except PermissionError:
            raise
        except OSError:
            return 0


def mark(name: str) -> str:
    """The folded name if it is one of the marks, whatever its case; "" for another name."""
    if name[0] in "BbCcHhOoRr" or name[0] > "~":
        folded = fold(name)
        if folded in _MARKS:
            return folded
    return ""


def recognised(has: Callable[[str], bool]) -> bool:
    """Whether git takes a directory for a repository, or for the common directory of one.

    A common directory needs no ``HEAD``: any directory with a ``HEAD`` and a ``commondir`` file can make git
    run what is configured in it. What is in a directory counts, not what leads to it: by that, whatever
    leads where and in whatever order, git finds no configuration and no hook that was not judged as one.
    """
    if has("objects") and has("refs"):
        return any(map(has, ("HEAD", "commondir", *_ACTIVE)))
    return has("HEAD") and has("commondir")


def is_marked(marks: set[str]) -> bool:
    """``recognised``, by the folded names of what is in a directory."""
    return recognised(lambda name: name.lower() in marks)


def completes(tree: int, directory: str, name: str) -> str:
    """Why a name that is one of the marks may not come to a directory below ``tree``: git would take it for a
    repository then, or might. "" if it may.
    """
    try:
        handle = open_beneath(tree, directory or ".", LISTED)
        try:
            with os.scandir(handle) as entries:
                marks = {mark(name), *(mark(entry.name) for entry in entries)}
        finally:
            os.close(handle)
    except OSError as error:
        return f"{GIT_REPOSITORY}: {name}, where the other names cannot be listed: {error.strerror}"
    return f"{GIT_REPOSITORY}: {name} would make the directory one" if is_marked(marks) else ""


def look_into(tree: int, directory: str) -> tuple[bool, bool]:
    """Whether a directory may be a repository, and whether it has a ``.git``; one that is not there: neither.

    Raises OSError where that cannot be said.
    """
    try:
        handle = open_beneath(tree, directory or ".", _OPENED)
    except (FileNotFoundError, NotADirectoryError):
        return False, False
    try:
        return _has(handle, "HEAD") or _has(handle, "objects"), _has(handle, ".git")
    finally:
        os.close(handle)


def _has(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
