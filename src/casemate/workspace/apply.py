"""The checked step: what a command changed in its view becomes real in the workspace, or is held back."""

from __future__ import annotations

import os
import time

from casemate.errors import WorkspaceError
from casemate.workspace.report import ApplyOptions, ApplyReport, Tally

__all__ = ["apply", "start_time"]


def start_time() -> int:
    """Now, for ``ApplyOptions.started_ns``: taken before the overlay is mounted.

    File times may lag behind this clock by a tick (some ms), never lead. So no change made before counts
    as made after; one made in the tick after, before the command could see the file, may count as before.
    """
    return time.time_ns()


def apply(top_fd: int, target: str, options: ApplyOptions) -> ApplyReport:
    """Apply the changes in the top of an overlay to the workspace at ``target``, its lower layer.

    ``top_fd`` is open for reading; ``target`` is the workspace's real path. Single changes that cannot be
    applied are in the report's ``failed``. Raises WorkspaceError if nothing can be: the workspace is gone
    or is another one, the top cannot be read.

    Preconditions: every process that saw the overlay is dead.
    """
    began = time.perf_counter()
    try:
        empty = _is_empty(top_fd)
        if empty:
            return ApplyReport(ms=(time.perf_counter() - began) * 1e3)
        root = os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise WorkspaceError(
            f"cannot apply to {target}: {error.strerror}", code="workspace-unreadable", path=target
        ) from error
    try:
        status = os.fstat(root)
        if options.expect is not None and options.expect != (status.st_dev, status.st_ino):
            raise WorkspaceError(
                f"{target} is not the directory that the command ran in",
                code="workspace-replaced",
                hint="the changes are kept; move the old directory back, or discard them",
                path=target,
            )
        # Most commands change nothing, and then none of this has to be loaded.
        from casemate.workspace.step import Step

        tally = Tally(options.listed)
        Step(top_fd, root, target, options, tally).run()
        return tally.report((time.perf_counter() - began) * 1e3)
    finally:
        os.close(root)


def _is_empty(directory: int) -> bool:
    with os.scandir(directory) as listing:
        return next(listing, None) is None
