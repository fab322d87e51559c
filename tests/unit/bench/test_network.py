"""The figures of the gate as they are reported: ratios of one moment, targets, one JSON object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.network import _Bench

KINDS = ("bulk", "http", "tls", "https")


def report(
    *, relay: float = 0.6, connect: float = 0.4, answered: int = 1000, held: float = 4.0
) -> dict[str, Any]:
    """A report of figures that were not measured."""
    made = _Bench(1, 2, Path("/nowhere"), True)
    for kind in KINDS:
        made.note(f"{kind}_direct", 1000.0, 2000.0, 4000.0)
        made.note(f"{kind}_gate", 1000.0 * relay, 2000.0 * relay, 4000.0 * relay)
    made.note("connect_direct", 0.1, 0.1, 0.1)
    made.note("connect_gate", 0.1 + connect, 0.1 + connect, 5.0)
    made.note("run_gate", 5.0)
    made.note("run_none", 4.0)
    made.note("look_up", 1.0)
    made.facts = {"many_asked": 1000, "many_answered": answered}
    made.facts["descriptors_per_sandbox"] = {"worker": 2.0, "keeper": held, "library": 3.0}
    parsed: dict[str, Any] = json.loads(json.dumps(made.report()))
    return parsed


def test_all_met() -> None:
    """Figures that are good enough are called so, and the object has all that was measured."""
    found = report()
    assert found["bench"] == "network"
    assert all(target.get("met", True) for target in found["targets"].values())
    assert found["medians"]["bulk_direct"] == 2000.0
    assert found["samples"]["bulk_gate"] == 3
    assert found["machine"]["cores"] >= 1


@pytest.mark.parametrize(("name", "how"), [
    ("relay_ratio", {"relay": 0.4}), ("tls_ratio", {"relay": 0.4}), ("added_connect_ms", {"connect": 0.6}),
    ("connections_lost", {"answered": 999}), ("descriptors_per_sandbox", {"held": 4.1}),
])  # fmt: skip
def test_one_missed(name: str, how: dict[str, Any]) -> None:
    """A figure that misses its target is called so."""
    assert report(**how)["targets"][name]["met"] is False


def test_ratios_are_of_one_round() -> None:
    """A machine that changes its pace between two rounds changes no ratio."""
    assert report(relay=0.55)["targets"]["relay_ratio"]["value"] == 0.55
