"""What a run comes back with: plain, frozen data, the same for Python, ``--json`` and the daemon."""

from __future__ import annotations

import msgspec

__all__ = ["Applied", "Denial", "NetworkUse", "Result"]


class Denial(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """Something the command was refused.

    ``certain`` is what the host itself saw; the rest is read out of the command's stderr and may be
    wrong. ``allow`` is the line of a policy that would permit it, if one would, or the lines.
    """

    what: str
    certain: bool
    kind: str
    allow: str = ""


class Applied(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """What became of the changes. Paths are relative to their view and may hold any bytes but ``/`` and NUL
    between slashes (surrogate escapes for what is not UTF-8).

    ``held`` pairs a path with the reason; its content is kept for ``casemate apply``. ``complete`` is
    false when something could not be written: the rest is kept as well. ``pending`` is the name under which
    changes wait for a review, ``pending_changes`` how many, where they were not to be applied.
    """

    created: int = 0
    modified: int = 0
    deleted: int = 0
    changes: tuple[str, ...] = ()
    held: tuple[tuple[str, str], ...] = ()
    conflicts: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    executables: tuple[str, ...] = ()
    bytes: int = 0
    complete: bool = True
    kept: str = ""
    pending: str = ""
    pending_changes: int = 0


class NetworkUse(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """What the egress gate decided for one command.

    ``capture`` says what brought connections to it: ``sk_lookup`` or ``nftables`` (every port), ``listed
    ports`` (the others fail), or ``""`` where there was no gate. ``events`` are
    ``casemate.egress.events.Event`` as plain data, bounded; ``untold`` counts what is not among them.
    ``sent`` and ``received`` are bytes. ``lost``: the gate ended before the command did, which could reach
    nothing from then on.
    """

    capture: str = ""
    events: tuple[dict[str, object], ...] = ()
    allowed: int = 0
    refused: int = 0
    sent: int = 0
    received: int = 0
    untold: int = 0
    lost: bool = False


class Result(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """How a command ended.

    ``exit_code`` is its own (128 + n after signal n); ``limit`` names the limit that ended it (such as
    ``memory`` or ``timeout``) or is empty. ``stdout`` and ``stderr`` are filled by the Python API only.
    ``phases`` are milliseconds, ``peak_memory`` bytes, ``cpu`` seconds. ``boundary`` and ``degraded`` say
    what was enforced, ``scopes`` how each limit was. ``disk`` holds bytes: ``used``, and ``limit`` where
    there is one; of a whole ``session`` where the command belongs to one.
    """

    exit_code: int
    signal: int = 0
    limit: str = ""
    limits_touched: tuple[str, ...] = ()
    stdout: bytes = b""
    stderr: bytes = b""
    applied: Applied = Applied()
    denials: tuple[Denial, ...] = ()
    network: NetworkUse = NetworkUse()
    boundary: str = "process"
    degraded: tuple[str, ...] = ()
    scopes: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    phases: dict[str, float] = {}
    peak_memory: int = 0
    cpu: float = 0.0
    disk: dict[str, int] = {}
    session: str = ""

    @property
    def ok(self) -> bool:
        """Whether the command ended with 0 and no limit ended it."""
        return self.exit_code == 0 and not self.limit
