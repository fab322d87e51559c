"""Runs rows and says what was held: a run is valid, its parts got through or not, its control succeeded."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
from typing import TYPE_CHECKING, Any

from tests.security import daemon
from tests.security.engines import (
    Bwrap,
    BwrapCarveOut,
    Casemate,
    Engine,
    Nothing,
    PrivateMounts,
    Request,
    acts_command,
)
from tests.security.judge import Seen
from tests.security.services import Census

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.security.lab import Scene, World
    from tests.security.rows import Row

ENGINES: dict[str, Engine] = {
    "bare": Nothing(),
    "private-mounts": PrivateMounts(),
    "bwrap": Bwrap(),
    "bwrap-carve-out": BwrapCarveOut(),
    "casemate": Casemate(),
    "defaults": Casemate(),
    "direct": Casemate(),
    "degrade-memfd": Casemate(),
    "daemon": daemon.ENGINE,
}
DEGRADE_MEMFD = 'version = 1\n[isolation]\ndegrade = ["memfd-exec"]\n'


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of one row under one engine."""

    row: str
    mode: str
    engine: str
    parts: dict[str, bool]
    invalid: str
    evidence: str
    seconds: float

    @property
    def held(self) -> bool:
        return not self.invalid and not any(self.parts.values())

    @property
    def leaked(self) -> bool:
        """Every part got through: what a control must show."""
        return not self.invalid and all(self.parts.values())

    def line(self) -> str:
        through = [name for name, value in self.parts.items() if value]
        return (
            f"{self.row} [{self.mode}, {self.engine}]: got through {through}; {self.invalid}; {self.evidence}"
        )


@contextlib.contextmanager
def secret_fd(scene: Scene, wanted: bool) -> Iterator[tuple[int, ...]]:
    """A descriptor of the caller's, inheritable, on a file with the canary."""
    if not wanted:
        yield ()
        return
    descriptor = os.open(scene.world.home / ".ssh/id_rsa", os.O_RDONLY)
    # The lowest free one from 77 up: this process has others, which are not to be closed.
    leaking = fcntl.fcntl(descriptor, fcntl.F_DUPFD, 77)
    os.close(descriptor)
    try:
        yield (leaking,)
    finally:
        os.close(leaking)


def _flags(row: Row, engine_name: str, scene: Scene) -> tuple[str, ...]:
    if engine_name in ("casemate", "daemon", "session"):
        return row.flags
    if engine_name == "direct":
        return (*row.flags, "--direct")
    if engine_name == "degrade-memfd":
        policy = scene.ws.parent / "policy.toml"
        policy.write_text(DEGRADE_MEMFD)
        policy.chmod(0o644)
        return ("--policy", str(policy))
    return ()


def _validity(row: Row, seen: Seen) -> str:
    """Why the run says nothing, or the empty string."""
    outcome, scene, engine = seen.outcome, seen.scene, seen.engine
    records = outcome.records
    for act in row.acts:
        record = records.get(act)
        if record is None and not row.may_die:
            return f"{act} did not report"
        if record is not None and "crash" in record:
            return f"{act} crashed: {record['crash']}"
    if row.may_die and not records and not outcome.says("") and not seen.watched.get("most"):
        return "the probe did not start"
    if engine.sandboxed and row.alive and isinstance(engine, Casemate):
        alive = scene.ws / "alive.txt"
        if not alive.is_file() or alive.read_text() != scene.token:
            return "an ordinary change of the same run was not applied"
        if not outcome.report:
            return "there is no report"
    return ""


def run_row(row: Row, world: World, engine_name: str) -> Verdict:
    """One row, one engine, one fresh scene."""
    engine = ENGINES[engine_name]
    scene = world.scene()
    try:
        params: dict[str, Any] = dict(row.params)
        params.update(sandboxed=isinstance(engine, Casemate), files=[str(scene.ws / "big.bin")])
        argv = acts_command(scene, row.acts, **params)
        world.victim.signals()
        watched: dict[str, Any] = {}
        with secret_fd(scene, row.fd) as fds:
            request = Request(
                scene, argv, _flags(row, engine_name, scene), tty=row.tty, pass_fds=fds, timeout=row.seconds
            )
            if row.census:
                with Census(f"p{scene.token}") as census:
                    outcome = engine.run(request)
                watched["most"] = census.most
            else:
                outcome = engine.run(request)
        seen = Seen(scene, outcome, engine, watched)
        parts = row.judge(seen)
        invalid = _validity(row, seen)
        evidence = f"watched {watched}; {outcome.brief()}"
        return Verdict(row.id, world.mode, engine_name, parts, invalid, evidence, outcome.seconds)
    finally:
        scene.close()


def control_modes(row: Row, mode: str) -> str:
    """Who runs the control for a mode: the same uid where the bare host lets it, else root."""
    return mode if mode in row.control_modes else row.control_modes[0]
