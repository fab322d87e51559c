"""Private directories: made where others remove theirs, and removed whatever a sandbox has put into them."""

from __future__ import annotations

import os
from contextlib import suppress

from casemate.sys.files import open_beneath

__all__ = ["make_directory", "remove_tree"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def make_directory(path: str) -> None:
    """Make a private directory and its parents.

    Whoever ends a run removes parents that are empty then, perhaps just now, so it is tried again.
    """
    for _ in range(20):
        with suppress(FileNotFoundError):
            os.makedirs(path, 0o700, exist_ok=True)
            return
    os.makedirs(path, 0o700, exist_ok=True)


def remove_tree(path: str) -> None:
    """Remove a directory that held a sandbox's files, whatever modes it gave them and however deep they are.

    Goes down by descriptors and up by ``..``, which in a private directory of dead processes leads where
    it came from; holds two descriptors at any depth, follows no link and enters no other mount.
    """
    try:
        parent = os.open(os.path.dirname(path), _DIRECTORY)
    except OSError:
        return
    names = [os.path.basename(path)]
    current, depth = parent, 0
    stack: list[list[str]] = []
    try:
        while True:
            if not names:
                if depth == 0:
                    return
                above = os.open("..", _DIRECTORY, dir_fd=current)
                os.close(current)
                current, depth, names = above, depth - 1, stack.pop()
                _remove(names.pop(), current, directory=True)
                continue
            name = names[-1]
            if _remove(name, current, directory=False):
                names.pop()
                continue
            try:
                os.chmod(name, 0o700, dir_fd=current)  # it is no link: unlink would have taken that
                below = open_beneath(current, name, _DIRECTORY | os.O_NOFOLLOW)
            except OSError:
                names.pop()
                continue
            stack.append(names)
            os.close(current)
            current, depth, names = below, depth + 1, os.listdir(below)
    finally:
        os.close(current)


def _remove(name: str, directory_fd: int, *, directory: bool) -> bool:
    """Remove an entry; False if it is a directory with something in it. What cannot be removed is left."""
    try:
        if directory:
            os.rmdir(name, dir_fd=directory_fd)
        else:
            os.unlink(name, dir_fd=directory_fd)
    except IsADirectoryError:
        return False
    except OSError:
        return True
    return True
