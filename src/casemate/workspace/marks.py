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

__all__ = ["LISTED", "Strict", "completes", "is_marked", "look_into", "mark"]

#: How a directory is opened to list it.
LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_OPENED = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
_MARKS = frozenset({"head", "objects", "refs", "commondir"})


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
    if name[0] in "HhOoRrCc" or name[0] > "~":
        folded = fold(name)
        if folded in _MARKS:
            return folded
    return ""


def is_marked(marks: set[str]) -> bool:
    """Whether git takes a directory with these marks for a repository."""
    return "head" in marks and (marks >= {"objects", "refs"} or "commondir" in marks)


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
    """Whether a directory has a ``HEAD``, and a ``.git``; one that is not there has neither.

    Raises OSError where that cannot be said.
    """
    try:
        handle = open_beneath(tree, directory or ".", _OPENED)
    except (FileNotFoundError, NotADirectoryError):
        return False, False
    try:
        return _has(handle, "HEAD"), _has(handle, ".git")
    finally:
        os.close(handle)


def _has(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
