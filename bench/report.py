"""The form that every bench prints: one JSON object, built here and nowhere else.

::

    {"bench": "launch", "unit": "ms", "medians": {peer: ms}, "minima": {...}, "first": {...},
     "workloads": {name: {"medians", "minima", "first", "p90", "samples"}},
     "idle": {"seconds", "medians", "minima", "samples"},
     "ratios": [{"ours", "peer", "ours_ms", "peer_ms", "ratio", "paired", "target", "met"}],
     "machine": {...}, "versions": {peer: text}, "absent": {peer: text}, "seconds": total}

``medians``, ``minima`` and ``first`` at the top are those of the first workload.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from bench.measure import Cell, paired_ratio, summarise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.measure import Samples

__all__ = ["Ratio", "Target", "ratios", "section"]


@dataclass(frozen=True, slots=True)
class Target:
    """A promise: ``ours`` takes at most ``most`` times what ``peer`` takes."""

    ours: str
    peer: str
    most: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """A target with the figures of both sides."""

    ours: str
    peer: str
    ours_ms: float
    peer_ms: float
    ratio: float
    paired: float
    target: float
    met: bool

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def section(samples: Samples, peers: Sequence[str], workload: str) -> dict[str, dict[str, float]]:
    """The figures of one workload, by kind and peer, rounded to microseconds."""
    parts: dict[str, dict[str, float]] = {"medians": {}, "minima": {}, "p90": {}, "first": {}, "samples": {}}
    for peer in peers:
        cell = Cell(peer, workload)
        summary = summarise(samples.flat(cell))
        parts["medians"][peer] = round(summary.median, 3)
        parts["minima"][peer] = round(summary.minimum, 3)
        parts["p90"][peer] = round(summary.p90, 3)
        parts["samples"][peer] = summary.count
        if samples.first[cell]:
            parts["first"][peer] = round(summarise(samples.first[cell]).median, 3)
    return parts


def ratios(samples: Samples, peers: Sequence[str], workload: str, targets: Sequence[Target]) -> list[Ratio]:
    """Every target whose two sides were measured."""
    found = []
    for target in targets:
        if target.ours not in peers or target.peer not in peers:
            continue
        ours, theirs = Cell(target.ours, workload), Cell(target.peer, workload)
        ours_ms = summarise(samples.flat(ours)).median
        peer_ms = summarise(samples.flat(theirs)).median
        found.append(
            Ratio(
                ours=target.ours,
                peer=target.peer,
                ours_ms=round(ours_ms, 3),
                peer_ms=round(peer_ms, 3),
                ratio=round(ours_ms / peer_ms, 3),
                paired=round(paired_ratio(samples.warm[ours], samples.warm[theirs]), 3),
                target=target.most,
                met=ours_ms / peer_ms <= target.most,
            )
        )
    return found
