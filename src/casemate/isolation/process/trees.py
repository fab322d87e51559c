"""Removing what a sandbox has left on disk."""

from __future__ import annotations

from contextlib import suppress

from casemate.sys import mounts
from casemate.sys.trees import make_directory, remove_tree

__all__ = ["make_directory", "remove_run", "remove_tree"]


def remove_run(directory: str) -> None:
    """Remove the directory of a run that is over, with the mounts in it: of its private file system, and of a
    session's layers, which stay.
    """
    for name in ("scratch", "store"):
        with suppress(OSError):
            mounts.unmount(f"{directory}/{name}")
    remove_tree(directory)
