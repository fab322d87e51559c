"""What the host's own refusals mean: an OSError on the way to a command, as an error of the tree."""

from __future__ import annotations

import errno
import os

from casemate.errors import CasemateError, ProtectionUnavailable, SandboxError

__all__ = ["from_os_error"]


def from_os_error(error: OSError) -> CasemateError:
    """The error to report for ``error``, met outside of the command."""
    number = error.errno or 0
    what = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
    reason = f"{error.strerror or error}{f' ({what})' if what else ''}"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return SandboxError(
            f"no space is left on the host: {reason}",
            code="disk-full",
            hint="free some space where Casemate keeps its state, or in the workspace",
            errno=number,
            path=what,
        )
    if number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ETOOMANYREFS):
        return SandboxError(
            f"the host has run out of something: {reason}",
            code="host-exhausted",
            hint="raise the caller's limits (`ulimit -a`), or end something",
            errno=number,
            path=what,
        )
    if what.startswith("/"):
        return SandboxError(
            f"Casemate cannot use its own files: {reason}",
            code="state-unusable",
            hint="check owner and mode of the directory, and HOME",
            errno=number,
            path=what,
        )
    return ProtectionUnavailable(
        f"the sandbox's surroundings cannot be made: {reason}",
        hint="run `casemate doctor`",
        protection="namespaces and mounts",
        needed="Linux 6.15 with user namespaces, overlayfs, tmpfs",
        found=str(error),
    )
