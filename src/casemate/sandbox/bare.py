"""Boundary ``none``: the command as the caller would start it. Asked for by an explicit flag only."""

from __future__ import annotations

import _signal
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


_TERMINALS = (_signal.SIGINT, _signal.SIGQUIT)  # the terminal sends them to the command as well
_FORWARDED = (_signal.SIGTERM, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2)


def run(job: Job, *, stdout_to: int = 1) -> Result:
    """Run the command with the caller's own streams, files, network and rights. Nothing is enforced."""
    outcome = Outcome()
    outcome.times["fork"] = time.monotonic()
    os.chdir(job.late.cwd)
    argv = job.late.argv
    os.umask(job.late.umask)
    # One that comes before there is a handler waits for it: the command would be left behind.
    mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, (*_TERMINALS, *_FORWARDED))
    try:
        pid = os.posix_spawnp(
            argv[0], argv, job.late.env, file_actions=[(os.POSIX_SPAWN_DUP2, stdout_to, 1)], setsigmask=mask
        )
        for number in _TERMINALS:
            _signal.signal(number, _signal.SIG_IGN)
        for number in _FORWARDED:
            if _signal.getsignal(number) != _signal.SIG_IGN:
                _signal.signal(number, lambda signal, _: os.kill(pid, signal))
    except OSError as error:
        outcome.failure = ("X", str(error.errno), argv[0])
        settle.check_failure(job, outcome)
        raise
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, mask)
    outcome.times["spawned"] = time.monotonic()
    _, status, usage = os.wait4(pid, 0)
    outcome.status = status
    outcome.times["ended"] = time.monotonic()
    outcome.rusage = (usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024)
    return settle.result(job, outcome, Applied(), limit="", stderr_tail=b"", disk_full=False)
