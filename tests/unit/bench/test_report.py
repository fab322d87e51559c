"""The printed forms of a bench: JSON object and table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from bench import launch
from bench.measure import Cell, Samples
from bench.peers import Peer, Scratch
from bench.render import render, table

if TYPE_CHECKING:
    from collections.abc import Sequence


class Known(Peer):
    """A peer that exists only as a name; nothing here starts it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.what = f"what {name} is"

    def prepare(self, scratch: Scratch) -> None:
        raise NotImplementedError

    def once(self, argv: Sequence[str]) -> float:
        raise NotImplementedError

    def output(self, argv: Sequence[str]) -> str:
        raise NotImplementedError


FACTS: dict[str, object] = {
    "cpu": "some processor",
    "cores": 2,
    "memory_gib": 24.0,
    "kernel": "6.18",
    "cgroup": "v1",
    "uid": 0,
    "python": "3.11.2",
    "load_before": 0.1,
    "load_after": 0.2,
}


def _report(cost: dict[str, float], absent: dict[str, str] | None = None) -> dict[str, Any]:
    warm, idle = Samples(), Samples()
    for name, figure in cost.items():
        for index, workload in enumerate(launch.WORKLOADS):
            cell = Cell(name, workload)
            warm.warm[cell] = [[figure + 100 * index, figure + 100 * index]] * 3
            warm.first[cell] = [2 * figure]
        idle.warm[Cell(name, "true")] = [[3 * figure]]
    present = {name: Known(name) for name in cost}
    report = launch.build(present, absent or {}, warm, idle, FACTS) | {"seconds": 1.0, "quick": True}
    parsed: dict[str, Any] = json.loads(json.dumps(report))
    return parsed


def test_medians_hold_every_name_of_the_contract() -> None:
    """``medians`` has one number per peer, those of ``true``, under the agreed names."""
    cost = {name: float(rank) for rank, name in enumerate(launch.NAMES, 1)}
    report = _report(cost)
    assert report["medians"] == cost
    assert report["minima"] == cost
    assert report["first"] == {name: 2 * figure for name, figure in cost.items()}
    assert report["workloads"]["python"]["medians"] == {name: c + 100 for name, c in cost.items()}
    assert report["idle"]["medians"] == {name: 3 * figure for name, figure in cost.items()}


def test_every_target_comes_with_both_figures() -> None:
    """A ratio is never printed without the two numbers it was made of and what was promised."""
    cost = dict.fromkeys(launch.NAMES, 10.0) | {"bwrap_full": 5.0, "ours_slot": 2.0}
    report = _report(cost)
    found = {(r["ours"], r["peer"]): r for r in report["ratios"]}
    assert set(found) == {(t.ours, t.peer) for t in launch.TARGETS}
    slot = found["ours_slot", "bwrap_full"]
    assert slot == {
        "ours": "ours_slot", "peer": "bwrap_full", "ours_ms": 2.0, "peer_ms": 5.0,
        "ratio": 0.4, "paired": 0.4, "target": 0.5, "met": True,
    }  # fmt: skip
    assert found["ours_api", "bwrap_full"]["met"] is False
    text = render(report)
    assert "2.00 / 5.00" in text
    assert "<= 0.5" in text
    assert "MISSED" in text


def test_absent_peer_is_named_with_the_way_to_get_it() -> None:
    """A peer that is not there leaves no number behind, only the reason."""
    report = _report({"bare": 1.0}, absent={"srt": "nothing there (to install: scripts/setup-peers)"})
    assert report["medians"] == {"bare": 1.0}
    assert report["ratios"] == []
    assert "Absent: srt: nothing there (to install: scripts/setup-peers)" in render(report)


def test_table_is_aligned() -> None:
    """Figures stand below each other, whatever their length."""
    lines = table(["", "ms", ""], [["a", "1.00", "x"], ["long", "100.00", "y"]]).splitlines()
    assert lines == ["            ms", "  a       1.00  x", "  long  100.00  y"]


def test_targets_name_known_peers() -> None:
    """No target waits for a peer that the run does not know."""
    assert {name for t in launch.TARGETS for name in (t.ours, t.peer)} <= set(launch.NAMES)


@pytest.mark.parametrize("argument", ["--help", "--no-such-option"])
def test_options(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command explains itself and refuses what it does not know, before anything is measured."""
    with pytest.raises(SystemExit) as ended:
        launch.main([argument])
    said = capsys.readouterr()
    assert (ended.value.code, bool(said.err)) == ((0, False) if argument == "--help" else (2, True))
