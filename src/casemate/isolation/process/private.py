"""Small things of the private file system of a sandbox."""

from __future__ import annotations

import os

__all__ = ["HOME", "account_files", "make_mount_point"]

HOME = "/home/sandbox"


def make_mount_point(scratch: int, target: str, *, directory: bool) -> None:
    """Make a mount point that lies below /tmp or /var/tmp, which are new and empty in each sandbox."""
    for place, name in (("/tmp/", "tmp/"), ("/var/tmp/", "vartmp/")):
        if target.startswith(place):
            _make(scratch, name + target.removeprefix(place), directory=directory)


def _make(scratch: int, path: str, *, directory: bool) -> None:
    parts = path.split("/")
    for depth in range(2, len(parts) + (1 if directory else 0)):
        try:
            os.mkdir("/".join(parts[:depth]), 0o755, dir_fd=scratch)
        except FileExistsError:
            continue
    if not directory:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o444, dir_fd=scratch))


def account_files(uid: int, gid: int) -> dict[str, str]:
    """A passwd and a group file in which the sandbox's uid has a name (node and ssh insist on one)."""
    return {
        "passwd": (
            "root:x:0:0:root:/root:/usr/sbin/nologin\n"
            "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
            f"sandbox:x:{uid}:{gid}:sandbox:{HOME}:/bin/bash\n"
        ),
        "group": f"root:x:0:\nnogroup:x:65534:\nsandbox:x:{gid}:\n",
    }
