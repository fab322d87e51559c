"""What a command took of the disk that it was allowed."""

from __future__ import annotations

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.sandbox.job import Job
    from casemate.sandbox.result import Result

__all__ = ["with_usage"]


def with_usage(job: Job, result: Result, scratch: int, seen: int) -> Result:
    """The result with ``disk``: bytes used, and allowed.

    ``scratch`` is what was used of the command's own file system, ``seen`` what a watcher saw last in its
    tops on disk: of a command that ended before anybody looked, that is what was applied.
    """
    if job.plan is None:
        return result
    used = scratch
    if job.plan.spec.tops_on_disk:
        used += max(seen, result.applied.bytes)
    limit = job.policy.resources.disk
    disk = {"used": used} if limit is None else {"used": used, "limit": limit}
    return msgspec.structs.replace(result, disk=disk)
