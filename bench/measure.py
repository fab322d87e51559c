"""Interleaving and statistics: the part of every bench that knows nothing about sandboxes.

A run is a sequence of rounds. In each round every cell (a peer and a workload) is visited once, in an
order drawn anew for each round: a drift of the machine then meets all peers alike, and no peer is always
the one that runs in the wake of the dearest (a peer's teardown goes on after its command has ended).

A visit is a short burst: first one run that is kept apart, then the measured ones. The first run of a
burst pays for what the other peers did to the caches and, on cgroup v1 and v2, for a grace period of the
kernel that the first attach of a process after a pause waits for (5-11 ms). Both figures are reported:
``medians`` are those of the measured runs, ``first`` those of the runs kept apart.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Cell", "Limits", "Samples", "Summary", "collect", "orders", "paired_ratio", "summarise"]


@dataclass(frozen=True, order=True, slots=True)
class Cell:
    """One thing that is measured: a peer running a workload."""

    peer: str
    workload: str


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a section may take: rounds go on until ``seconds`` are used up, within the bounds."""

    seconds: float
    least: int = 3
    most: int = 1000


@dataclass(frozen=True, slots=True)
class Summary:
    """What is reported of one cell, in milliseconds."""

    median: float
    minimum: float
    p90: float
    count: int


@dataclass(slots=True)
class Samples:
    """All figures of a section: per cell, one list per round."""

    warm: dict[Cell, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    first: dict[Cell, list[float]] = field(default_factory=lambda: defaultdict(list))
    rounds: int = 0

    def flat(self, cell: Cell) -> list[float]:
        """Every measured figure of a cell."""
        return [figure for burst in self.warm[cell] for figure in burst]


def orders(cells: Sequence[Cell], seed: int) -> Iterator[list[Cell]]:
    """Yield one permutation of ``cells`` per round, for ever; the same seed gives the same orders."""
    draw = random.Random(seed)
    while True:
        order = list(cells)
        draw.shuffle(order)
        yield order


def collect(
    cells: Sequence[Cell],
    visit: Callable[[Cell], tuple[list[float], list[float]]],
    limits: Limits,
    *,
    seed: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> Samples:
    """Run rounds over ``cells`` until the limits say stop; ``visit`` gives (kept apart, measured).

    A round is never cut short, so every cell has the same number of bursts. A new round starts only if
    the longest one so far would still fit.
    """
    samples = Samples()
    begin = clock()
    longest = 0.0
    for order in orders(cells, seed):
        start = clock()
        if samples.rounds >= limits.most:
            break
        if samples.rounds >= limits.least and start - begin + longest > limits.seconds:
            break
        for cell in order:
            apart, measured = visit(cell)
            samples.first[cell].extend(apart)
            samples.warm[cell].append(measured)
        samples.rounds += 1
        longest = max(longest, clock() - start)
    return samples


def summarise(figures: Sequence[float]) -> Summary:
    """Median, minimum and 90th percentile (the nearest figure at or above it)."""
    ranked = sorted(figures)
    if not ranked:
        raise ValueError("a cell without a single figure cannot be summarised")
    position = -(-9 * len(ranked) // 10) - 1
    return Summary(median=median(ranked), minimum=ranked[0], p90=ranked[position], count=len(ranked))


def paired_ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Median over the rounds of (our median in the round / theirs in the same round).

    The two runs of a pair stand close together in time, so this ratio suffers less than the ratio of the
    medians when the machine changes its pace during the run.
    """
    pairs = [median(a) / median(b) for a, b in zip(ours, theirs, strict=True) if a and b]
    if not pairs:
        raise ValueError("no round holds both peers")
    return median(pairs)
