"""Small things of the private file system of a sandbox."""

from __future__ import annotations

import os

from casemate.isolation.process.trees import make_directory
from casemate.sys import loop, mounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.isolation.process.spec import Spec

__all__ = ["HOME", "account_files", "make_mount_point", "new_scratch"]

HOME = "/home/sandbox"
_FLAGS = mounts.NOSUID | mounts.NODEV


def new_scratch(spec: Spec, directory: str) -> int:
    """The file system itself, detached: in memory, or in a file below the run's directory. Raises OSError."""
    if not spec.scratch_image:
        return mounts.filesystem("tmpfs", _FLAGS, mode="0711", size=str(spec.scratch))
    make_directory(directory)
    scratch = loop.make(f"{directory}/scratch.img", spec.scratch, _FLAGS)
    handle = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=scratch)
    os.fchmod(handle, 0o711)
    os.close(handle)
    return scratch


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
