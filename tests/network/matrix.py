"""Runs rows in batches, one sandbox for many, and says of each what got through.

A batch is a group of rows with one policy. Per mode and group there are three runs: the attacks; the controls
that a policy allows, with that policy; the controls that nothing allows, on the lab host without a sandbox.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.network import rows_connect, rows_http, rows_local, rows_names
from tests.network.row import expand, joined
from tests.security.lab import give

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.cli.harness import Caller
    from tests.network.lab import Lab
    from tests.network.row import Case, Row

ATTACKS = Path(__file__).resolve().parent / "attacks"
PYTHON = "/usr/bin/python3"
ROWS: tuple[Row, ...] = (*rows_connect.ROWS, *rows_names.ROWS, *rows_http.ROWS, *rows_local.ROWS)
BY_ID = {row.id: row for row in ROWS}

# What each group may reach. `also.example` is exact; below `allowed.example` is everything, on every port.
POLICIES: dict[str, dict[str, Any]] = {
    "list": {
        "mode": "allowlist",
        "allow": ["also.example", "*.allowed.example:*", "*.to.example:*"],
        "deny": ["secret.allowed.example"],
    },
    "full": {"mode": "full"},
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What one row came to in one run."""

    row: str
    mode: str
    parts: dict[str, bool]
    invalid: str
    report: dict[str, Any]

    @property
    def held(self) -> bool:
        return not self.invalid and not any(self.parts.values())

    @property
    def leaked(self) -> bool:
        """Everything got through: what a control must show."""
        return not self.invalid and bool(self.parts) and all(self.parts.values())

    def line(self) -> str:
        through = [name for name, value in self.parts.items() if value]
        kept = [name for name, value in self.parts.items() if not value]
        return (
            f"{self.row} [{self.mode}]: got through: {through}; did not: {kept}; {self.invalid}; "
            f"told: {json.dumps(self.report)[:3000]}"
        )


def policy_text(network: dict[str, Any]) -> str:
    """A policy file with this network section; other tables may follow."""
    lines = ["version = 1", "[network]"]
    tables = []
    for key, value in network.items():
        if isinstance(value, dict):
            tables.append((key, value))
        else:
            lines.append(f"{key} = {json.dumps(value)}")
    for key, value in tables:
        if all(isinstance(inner, dict) for inner in value.values()):
            for name, inner in value.items():
                lines.append(f"[network.{key}.{name}]")
                lines += [f"{word} = {json.dumps(what)}" for word, what in inner.items()]
        else:
            lines.append(f"[network.{key}]")
            lines += [f"{json.dumps(word)} = {json.dumps(what)}" for word, what in value.items()]
    return "\n".join(lines) + "\n"


@dataclasses.dataclass
class Batch:
    """What one run of many rows gave."""

    verdicts: dict[str, Verdict]
    seconds: float
    out: str
    err: str


def place(caller: Caller, lab: Lab, cases: Iterable[Case]) -> Path:
    """A workspace with the attack programs and a plan of some rows."""
    plan = [{"id": case.row.id, "act": case.row.act, "tries": case.tries} for case in cases]
    return place_plan(caller, lab, plan)


def place_plan(caller: Caller, lab: Lab, plan: list[dict[str, Any]]) -> Path:
    """A workspace with the attack programs and any plan."""
    ws = caller.workspace()
    shutil.copytree(ATTACKS, ws / ".lab", ignore=shutil.ignore_patterns("__pycache__"))
    text = json.dumps(plan).replace("<sockets>", str(lab.sockets))
    (ws / ".lab/plan.json").write_text(text)
    give(ws, caller.uid)
    return ws


def records(out: str) -> dict[str, dict[str, Any]]:
    """What each act was told, by row."""
    found = {}
    for line in out.splitlines():
        if line.startswith("@@ {"):
            value = json.loads(line[3:])
            found[value["act"]] = value["tries"]
    return found


class Matrix:
    """Runs and remembers batches on one lab."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._done: dict[tuple[str, str, str], Batch] = {}

    def attack(self, caller: Caller, group: str) -> Batch:
        """All rows of a group, under its policy."""
        return self._once(caller, group, "attack")

    def control(self, caller: Caller, row: Row, root: Caller) -> Verdict:
        """The row's control, by the caller or, where a bare host lets only root do it, by root."""
        by = caller if caller.mode in row.control_modes else root
        kind = "bare" if row.control == "bare" else "widened"
        return self._once(by, "all" if kind == "bare" else row.group, kind).verdicts[row.id]

    def _once(self, caller: Caller, group: str, kind: str) -> Batch:
        key = (caller.mode, group, kind)
        if key not in self._done:
            self._done[key] = self.run(caller, self._rows(caller, group, kind), group, kind)
        return self._done[key]

    def _rows(self, caller: Caller, group: str, kind: str) -> list[Row]:
        if kind == "attack":
            return [row for row in ROWS if row.group == group]
        if kind == "bare":
            return [row for row in ROWS if row.control == "bare" and caller.mode in row.control_modes]
        return [row for row in ROWS if row.group == group and row.control != "bare"]

    def run(self, caller: Caller, rows: list[Row], group: str, kind: str) -> Batch:
        """One run of some rows; ``kind`` is ``attack``, ``widened`` (controls by policy) or ``bare``."""
        cases = [row.case(twin=kind != "attack") for row in rows]
        ws = place(caller, self.lab, cases)
        words = (PYTHON, "-I", "-S", str(ws / ".lab/driver.py"), str(ws / ".lab/plan.json"))
        mark, started = self.lab.mark(), time.monotonic()
        if kind == "bare":
            done = self.lab.bare(*words, uid=caller.uid, cwd=str(ws), timeout=60)
            out, err, code = done.stdout.decode(), done.stderr.decode(), done.returncode
        else:
            network = dict(POLICIES[group])
            if kind == "widened":
                more = [rule for case in cases for rule in self._allowed(case)]
                network["allow"] = [*network.get("allow", []), *dict.fromkeys(more)]
            policy = caller.file(ws.parent / "policy.toml", policy_text(network))
            ended = caller.run(ws, *words, flags=("--policy", str(policy), "--no-daemon"), timeout=110)
            out, err, code = (
                ended.out.decode(errors="replace"),
                ended.err.decode(errors="replace"),
                ended.code,
            )
        seconds = time.monotonic() - started
        events = joined(self.lab.since(mark))
        told = records(out)
        verdicts = {}
        for case in cases:
            report = told.get(case.row.id, {})
            crashed = [f"{part}: {value['crash']}" for part, value in report.items() if "crash" in value]
            invalid = "" if report and code == 0 else f"no report; exit {code}: {err[-800:]}"
            invalid = f"crashed: {crashed}" if crashed else invalid
            parts = case.row.parts(case, events, report, kind != "attack")
            verdicts[case.row.id] = Verdict(case.row.id, caller.mode, parts, invalid, report)
        return Batch(verdicts, seconds, out, err)

    def _allowed(self, case: Case) -> list[str]:
        return [expand(rule, case) for rule in case.row.allow] if case.row.control == "policy" else []
