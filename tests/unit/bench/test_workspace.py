"""The bench of the workspace: its top has the changes that it is said to have, and the report its form."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from bench.measure import Cell, Samples
from bench.workspace import FIGURES, build

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["diff_1000_list", "diff_1000"])
def test_a_figure_measures_what_it_says(name: str, tmp_path: Path) -> None:
    """What is timed finds the thousand changes (it asserts so itself), and can be repeated."""
    (figure,) = (figure for figure in FIGURES if figure.name == name)
    with ExitStack() as stack:
        once, put_back = figure.prepare(tmp_path, stack)
        for _ in range(2):
            once()
            put_back()


def test_the_form_of_the_report() -> None:
    """Medians by figure, and whether what is promised was met."""
    samples = Samples()
    for figure in FIGURES:
        samples.warm[Cell(figure.name, "ms")] = [[1.0, 3.0], [2.0, 1000.0]]
        samples.first[Cell(figure.name, "ms")] = [5.0]
    report = build(FIGURES, samples, {"cores": 2})
    medians, targets = report["medians"], report["targets"]
    assert isinstance(medians, dict)
    assert isinstance(targets, dict)
    assert set(medians) == {figure.name for figure in FIGURES}
    assert medians["diff_1000"] == 2.5
    assert targets["diff_1000"] == {"most": 50.0, "met": True}
    assert report["unit"] == "ms"
