"""Interleaving and statistics of the benches."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from bench.measure import Cell, Limits, collect, orders, paired_ratio, summarise

CELLS = [Cell(peer, workload) for peer in ("a", "b", "c", "d") for workload in ("true", "python")]


class Clock:
    """A clock that only the visits move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_every_round_visits_every_cell_once() -> None:
    """No peer gets more runs than another."""
    for order in islice(orders(CELLS, seed=3), 50):
        assert sorted(order) == sorted(CELLS)


def test_order_changes_from_round_to_round() -> None:
    """No cell always follows the same other cell, whose teardown would then always fall on it."""
    before: dict[Cell, set[Cell]] = {cell: set() for cell in CELLS}
    for order in islice(orders(CELLS, seed=3), 100):
        for ahead, cell in pairwise(order):
            before[cell].add(ahead)
    assert all(len(seen) == len(CELLS) - 1 for seen in before.values())


def test_order_is_that_of_the_seed() -> None:
    """The same seed repeats a run, another seed does not."""
    same = [list(islice(orders(CELLS, seed=7), 5)) for _ in range(2)]
    assert same[0] == same[1]
    assert list(islice(orders(CELLS, seed=8), 5)) != same[0]


def test_rounds_end_before_the_time_is_over() -> None:
    """A round that would not fit any more is not begun, and none is cut short."""
    clock = Clock()

    def visit(cell: Cell) -> tuple[list[float], list[float]]:
        clock.now += 1.0
        return [5.0], [1.0, 2.0]

    samples = collect(CELLS, visit, Limits(seconds=20.0, least=1), clock=clock)
    assert samples.rounds == 2
    assert clock.now == 16.0
    assert all(samples.warm[cell] == [[1.0, 2.0], [1.0, 2.0]] for cell in CELLS)
    assert all(samples.first[cell] == [5.0, 5.0] for cell in CELLS)


@pytest.mark.parametrize(("limits", "rounds"), [(Limits(0.5, least=3), 3), (Limits(1e9, most=4), 4)])
def test_bounds_of_the_rounds(limits: Limits, rounds: int) -> None:
    """A slow machine still gets the least number of rounds, a fast one not more than the most."""
    clock = Clock()

    def visit(cell: Cell) -> tuple[list[float], list[float]]:
        clock.now += 1.0
        return [], [1.0]

    assert collect(CELLS, visit, limits, clock=clock).rounds == rounds


def test_summary_of_known_figures() -> None:
    """Median, minimum and 90th percentile are those of the definition."""
    summary = summarise([float(n) for n in range(10, 0, -1)])
    assert (summary.median, summary.minimum, summary.p90, summary.count) == (5.5, 1.0, 9.0, 10)
    single = summarise([3.0])
    assert (single.median, single.minimum, single.p90, single.count) == (3.0, 3.0, 3.0, 1)


def test_nothing_measured_is_an_error() -> None:
    """An empty cell is never reported as a figure."""
    with pytest.raises(ValueError, match="without a single figure"):
        summarise([])
    with pytest.raises(ValueError, match="no round"):
        paired_ratio([], [])


def test_paired_ratio_ignores_the_drift_of_the_machine() -> None:
    """When everything takes ten times longer in some rounds, the ratio within the rounds stays."""
    ours = [[1.0, 1.0], [10.0, 10.0], [1.0, 1.0]]
    theirs = [[2.0], [20.0], [2.0]]
    assert paired_ratio(ours, theirs) == 0.5


def test_paired_ratio_needs_the_same_rounds() -> None:
    """Bursts of different rounds are never compared."""
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        paired_ratio([[1.0], [1.0]], [[1.0]])
