"""Tops that are used again after an apply step, which has renamed directories in the workspace, too."""

from __future__ import annotations

import os

from casemate.sys.files import open_beneath, xattrs
from casemate.workspace.names import join
from casemate.workspace.scan import found_at

__all__ = ["settle_moves"]

_READ = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK


def settle_moves(top: str, view: str, prefix: str) -> None:
    """Take the redirection off the directories of a top that the workspace has at their new place.

    It would lead to where nothing is any more. ``prefix`` is that of overlayfs' attributes. Raises OSError.
    Preconditions: nobody uses the top; the caller may open files by handle.
    """
    root = os.open(top, _READ | os.O_CLOEXEC)
    try:
        lower = os.open(view, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            queue = [""]
            while queue:
                _settle(root, lower, queue.pop(), queue, prefix)
        finally:
            os.close(lower)
    finally:
        os.close(root)


def _settle(root: int, lower: int, path: str, queue: list[str], prefix: str) -> None:
    fd = open_beneath(root, path or ".", _READ)
    try:
        marks = xattrs(fd, prefix)
        if "redirect" in marks and found_at(lower, marks.get("origin", b"")) == path:
            os.removexattr(fd, f"{prefix}redirect")
        with os.scandir(fd) as listing:
            queue += [join(path, item.name) for item in listing if item.is_dir(follow_symlinks=False)]
    finally:
        os.close(fd)
