"""Boundary ``none``: the command as the caller would start it. Asked for by an explicit flag only."""

from __future__ import annotations

import os
import time

from casemate.isolation.process.outcome import Outcome
from casemate.sandbox import settle
from casemate.sandbox.result import Applied

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.sandbox.job import Job
    from casemate.sandbox.result import Result

__all__ = ["run"]


def run(job: Job) -> Result:
    """Run the command with the caller's own streams, files, network and rights. Nothing is enforced."""
    outcome = Outcome()
    outcome.times["fork"] = time.monotonic()
    os.chdir(job.late.cwd)
    argv = job.late.argv
    try:
        pid = os.posix_spawnp(argv[0], argv, job.late.env)
    except OSError as error:
        outcome.failure = ("X", str(error.errno), argv[0])
        settle.check_failure(job, outcome)
        raise
    outcome.times["spawned"] = time.monotonic()
    while True:
        try:
            _, status, usage = os.wait4(pid, 0)
            break
        except KeyboardInterrupt:
            continue  # the terminal has sent it to the command as well
    outcome.status = status
    outcome.times["ended"] = time.monotonic()
    outcome.rusage = (usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024)
    return settle.result(job, outcome, Applied(), limit="", stderr_tail=b"", disk_full=False)
