"""How a sandbox ended: what its own init has reported, and what the host saw itself."""

from __future__ import annotations

from casemate.errors import SandboxError

__all__ = ["Outcome", "interpret", "seal_error"]


class Outcome:
    """How a sandbox ended, as the host knows it."""

    __slots__ = ("events", "executables", "failure", "refused", "rusage", "spawned", "status", "times")

    def __init__(self) -> None:
        self.status: int | None = None  # raw wait status of the command
        self.failure: tuple[str, ...] | None = None  # a record of init: kind, then its fields
        self.spawned = False
        self.events: dict[str, int] = {}
        self.times: dict[str, float] = {}
        # By the broker of a workspace that is changed directly; paths are relative to it.
        self.refused: list[tuple[str, str]] = []  # reason, path
        self.executables: list[str] = []  # files that were executable then, and links; perhaps gone by now
        self.rusage: tuple[float, float, int] = (0.0, 0.0, 0)  # user s, system s, largest process in bytes


def interpret(record: bytes, outcome: Outcome) -> None:
    """Read init's records: spawned, exec failure, bad directory, failed step, wait status.

    Init is inside: what is malformed counts as not said, and numbers are bounded.
    """
    for line in record.decode("utf-8", "surrogateescape").split("\n"):
        kind, *fields = line.split("\0")
        try:
            if kind == "S" and fields:
                outcome.times["spawned"] = _number(fields[0])
                outcome.spawned = True
            elif kind == "W" and len(fields) == 5:
                ended, user, system, largest = (_number(field) for field in fields[1:])
                outcome.status = int(fields[0]) & 0xFFFF
                outcome.times["ended"] = ended
                outcome.rusage = (user, system, int(largest) * 1024)
            elif kind in ("X", "C", "F"):
                outcome.failure = (kind, *fields)
        except ValueError:
            continue


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e15:  # not a number is neither
        raise ValueError(text)
    return value


def seal_error(outcome: Outcome) -> SandboxError:
    """What the child reported before it could be given its surroundings."""
    step, _, what, text = (*(outcome.failure or ())[1:], "", "", "", "")[:4]
    return SandboxError(
        f"the sandbox could not be sealed at step {step or 'unknown'}: {text or what}",
        code="seal-failed",
        hint="run `casemate doctor`; nothing of the command has run",
        step=step,
    )
