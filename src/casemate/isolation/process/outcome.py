"""How a sandbox ended: what its own init has reported, and what the host saw itself."""

from __future__ import annotations

from casemate.errors import SandboxError

__all__ = ["Outcome", "interpret", "seal_error"]


class Outcome:
    """How a sandbox ended, as the host knows it."""

    __slots__ = ("events", "failure", "rusage", "spawned", "status", "times")

    def __init__(self) -> None:
        self.status: int | None = None  # raw wait status of the command
        self.failure: tuple[str, ...] | None = None  # a record of init: kind, then its fields
        self.spawned = False
        self.events: dict[str, int] = {}
        self.times: dict[str, float] = {}
        self.rusage: tuple[float, float, int] = (0.0, 0.0, 0)  # user s, system s, largest process in bytes


def interpret(record: bytes, outcome: Outcome) -> None:
    """Read init's records: spawned, exec failure, bad directory, failed step, wait status."""
    for line in record.decode("utf-8", "surrogateescape").split("\n"):
        kind, *fields = line.split("\0")
        if kind == "S" and fields:
            outcome.spawned = True
            outcome.times["spawned"] = float(fields[0])
        elif kind == "W" and len(fields) == 5:
            outcome.status = int(fields[0])
            outcome.times["ended"] = float(fields[1])
            outcome.rusage = (float(fields[2]), float(fields[3]), int(fields[4]) * 1024)
        elif kind in ("X", "C", "F"):
            outcome.failure = (kind, *fields)


def seal_error(outcome: Outcome) -> SandboxError:
    """What the child reported before it could be given its surroundings."""
    step, _, what, text = (*(outcome.failure or ())[1:], "", "", "", "")[:4]
    return SandboxError(
        f"the sandbox could not be sealed at step {step or 'unknown'}: {text or what}",
        code="seal-failed",
        hint="run `casemate doctor`; nothing of the command has run",
        step=step,
    )
