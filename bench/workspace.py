"""``python -m bench.workspace``: what it costs to look at changes, to apply them, and to keep them.

One function makes each figure ready and returns what is timed; ``FIGURES`` lists them with what they promise.
All run in this process, interleaved over rounds. A figure that changes something gets it made anew each time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench import layers, machine
from bench.measure import Cell, Limits, collect, summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bench.measure import Samples

__all__ = ["FIGURES", "Figure", "build", "main"]

#: Prepares a directory of its own; returns what is timed and what puts it back afterwards.
Ready = tuple["Callable[[], object]", "Callable[[], object]"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing that is measured. ``most`` is what is promised in ms, None for a figure to compare with."""

    name: str
    what: str
    most: float | None
    prepare: Callable[[Path, ExitStack], Ready]


# -- a top of 1,000 changes ----------------------------------------------------------------------------------

_LINES = (20, 100)  # of one file
_MODIFIED, _CREATED, _DELETED, _MODES, _RENAMED = 550, 250, 100, 60, 20  # a rename is two entries


def _text(chance: random.Random) -> list[str]:
    count = chance.randint(*_LINES)
    return [f"    value_{chance.randrange(10_000)} = call({chance.randrange(100)})\n" for _ in range(count)]


def make_changes(base: Path) -> tuple[Path, Path, int]:
    """A workspace of 4,000 files, and a top over it as a command's overlay leaves it: 1,000 changes.

    Returns both, and the moment of the command's start.
    """
    chance = random.Random(1)
    ws, top = base / "ws", base / "top"
    paths = [f"pkg{number % 80}/mod{number}.py" for number in range(4000)]
    for number in range(80):
        (ws / f"pkg{number}").mkdir(parents=True)
        (top / f"pkg{number}").mkdir(parents=True)
    for path in paths:
        (ws / path).write_text("".join(_text(chance)))
    started = time.time_ns()
    chosen = iter(chance.sample(paths, _MODIFIED + _DELETED + _MODES + _RENAMED))
    for _ in range(_MODIFIED):
        path = next(chosen)
        lines = (ws / path).read_text().splitlines(keepends=True)
        for place in chance.sample(range(len(lines)), chance.randint(1, 2)):
            lines[place : place + chance.randint(0, 1)] = [f"    changed_{place} = True\n"]
        (top / path).write_text("".join(lines))
    for number in range(_CREATED):
        (top / f"pkg{number % 80}/new{number}.py").write_text("".join(_text(chance)))
    for _ in range(_DELETED):
        os.mknod(top / next(chosen), stat.S_IFCHR, os.makedev(0, 0))
    for _ in range(_MODES):
        path = next(chosen)
        shutil.copy2(ws / path, top / path)
        (top / path).chmod(0o755)
    for number in range(_RENAMED):
        path = next(chosen)
        shutil.copy2(ws / path, top / f"pkg{number}/renamed{number}.py")
        os.mknod(top / path, stat.S_IFCHR, os.makedev(0, 0))
    return ws, top, started


def _options(started: int, hold: int | None) -> object:
    from casemate.workspace.report import ApplyOptions

    user = os.geteuid() != 0
    return ApplyOptions(
        started_ns=started, xattrs="user.overlay." if user else "trusted.overlay.", redirects=not user,
        hold_dir=hold, readable_roots=("/usr",),
    )  # fmt: skip


def _nothing() -> None:
    """Nothing has to be put back."""


def diff_list(base: Path, stack: ExitStack) -> Ready:
    """The list alone: scan, verdicts, comparison with the workspace, renames."""
    from casemate.workspace.diff import TopReview

    ws, path, started = make_changes(base)
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    stack.callback(os.close, top)
    options = _options(started, None)

    def once() -> None:
        with TopReview(top, str(ws), options) as review:  # type: ignore[arg-type]
            assert len(review.entries) == _MODIFIED + _CREATED + _DELETED + _MODES + _RENAMED
            assert sum(entry.what == "renamed" for entry in review.entries) == _RENAMED

    return once, _nothing


def diff_texts(base: Path, stack: ExitStack) -> Ready:
    """What ``casemate diff`` shows: the list with its lines counted, and every unified diff."""
    from casemate.cli.diff import Page
    from casemate.sandbox.tops import Reviews
    from casemate.workspace.diff import TopReview
    from casemate.workspace.textdiff import Budget

    ws, path, started = make_changes(base)
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    stack.callback(os.close, top)
    options = _options(started, None)

    def once() -> None:
        with TopReview(top, str(ws), options) as review:  # type: ignore[arg-type]
            reviews = Reviews("bench", (), ExitStack())
            reviews.views.append((str(ws), review))
            page = Page(reviews)
            listed, texts = page.listing(), list(page.texts(Budget(lines=1_000_000)))
            assert len(listed) == 501, len(listed)  # the rest is one line
            assert len(texts) == _MODIFIED + _CREATED + _DELETED

    return once, _nothing


def diff_of_two_trees(base: Path, _stack: ExitStack) -> Ready:
    """The same by ``diff -ruN`` of two complete trees: what a person would have without an overlay."""
    ws, top, _ = make_changes(base)
    merged = base / "merged"
    shutil.copytree(ws, merged)
    for entry in sorted(top.rglob("*")):
        target = merged / entry.relative_to(top)
        if stat.S_ISCHR(entry.lstat().st_mode):
            target.unlink()
        elif entry.is_file():
            shutil.copy2(entry, target)

    def once() -> None:
        done = subprocess.run(["diff", "-ruN", str(ws), str(merged)], stdout=subprocess.PIPE, check=False)
        assert done.returncode == 1

    return once, _nothing


def apply_all(base: Path, stack: ExitStack) -> Ready:
    """Applying the 1,000 changes by the checked step."""
    from casemate.workspace.apply import apply

    saved = base / "saved"
    saved.mkdir()
    make_changes(saved)
    work = base / "work"

    def reset() -> None:
        shutil.rmtree(work, ignore_errors=True)
        subprocess.run(["cp", "-a", str(saved), str(work)], check=True)

    def once() -> None:
        top = os.open(work / "top", os.O_RDONLY | os.O_DIRECTORY)
        try:
            # The copies are newer than the command: without a start nothing is in conflict.
            report = apply(top, str(work / "ws"), _options(time.time_ns(), None))  # type: ignore[arg-type]
        finally:
            os.close(top)
        assert report.complete
        assert report.total == _MODIFIED + _CREATED + _DELETED + _MODES + 2 * _RENAMED, report.counts

    stack.callback(shutil.rmtree, work, True)
    reset()
    return once, reset


FIGURES = (
    Figure("diff_1000_list", "list of a top with 1,000 changes over 4,000 files", 50.0, diff_list),
    Figure("diff_1000", "the list and every unified diff", 50.0, diff_texts),
    Figure("diff_ru", "diff -ruN of the two complete trees", None, diff_of_two_trees),
    Figure("apply_1000", "applying them", None, apply_all),
    Figure("snapshot_50k", "a snapshot of a session with 50,000 changed files", 5.0, layers.snapshot),
    Figure("branch_50k", "a branch of it", 5.0, layers.branch),
    Figure("rollback_50k", "a roll-back that drops them", 5.0, layers.roll_back),
    Figure("flatten_2x1000", "two layers of 1,000 files made one", None, layers.flatten),
    Figure("run_session", "true from Python in a session", None, layers.run_in_a_session),
    Figure("run_single", "true from Python in none", None, layers.run_single),
)


# -- measuring -----------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit code says whether all could be measured, never whether it was fast."""
    parser = argparse.ArgumentParser(prog="python -m bench.workspace", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="under 30 seconds in all")
    parser.add_argument("--only", action="append", default=[], metavar="FIGURE", help="measure only this one")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    figures = [figure for figure in FIGURES if not options.only or figure.name in options.only]
    before = machine.load()
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="casemate-bench-", dir=_place())))
        ready = {}
        for figure in figures:
            (base / figure.name).mkdir()
            ready[figure.name] = figure.prepare(base / figure.name, stack)
        limits = Limits(12, least=3) if options.quick else Limits(90, least=10)
        samples = collect(
            [Cell(figure.name, "ms") for figure in figures], lambda cell: _visit(ready[cell.peer]), limits
        )
        facts = machine.facts() | {"load_before": before, "load_after": machine.load()}
        result = build(figures, samples, facts)
    result["quick"] = options.quick
    result["seconds"] = round(time.monotonic() - begin, 1)
    print(json.dumps(result) if options.json else _table(result))
    return 0


def _place() -> Path:
    """Where the trees lie: not on a file system in memory, which a workspace seldom is on."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def _visit(ready: Ready) -> tuple[list[float], list[float]]:
    """One run that is kept apart (caches), two that count."""
    once, put_back = ready
    figures: list[float] = []
    for _ in range(3):
        begin = time.perf_counter()
        once()
        figures.append((time.perf_counter() - begin) * 1e3)
        put_back()
    return figures[:1], figures[1:]


def build(figures: Sequence[Figure], samples: Samples, facts: Mapping[str, object]) -> dict[str, object]:
    """The report: the form of ``bench.report``, with a target for each figure that promises one."""
    summaries = {figure.name: summarise(samples.flat(Cell(figure.name, "ms"))) for figure in figures}
    return {
        "bench": "workspace",
        "unit": "ms",
        "medians": {name: round(summary.median, 3) for name, summary in summaries.items()},
        "minima": {name: round(summary.minimum, 3) for name, summary in summaries.items()},
        "p90": {name: round(summary.p90, 3) for name, summary in summaries.items()},
        "samples": {name: summary.count for name, summary in summaries.items()},
        "first": {
            figure.name: round(summarise(samples.first[Cell(figure.name, "ms")]).median, 3)
            for figure in figures
        },
        "targets": {
            figure.name: {"most": figure.most, "met": summaries[figure.name].median <= figure.most}
            for figure in figures
            if figure.most is not None
        },
        "what": {figure.name: figure.what for figure in figures},
        "machine": dict(facts),
    }


def _table(result: Mapping[str, object]) -> str:
    from bench.render import table

    def of(key: str) -> Mapping[str, float]:
        found = result[key]
        assert isinstance(found, dict)
        return found

    targets, what = result["targets"], result["what"]
    assert isinstance(targets, dict)
    assert isinstance(what, dict)
    rows = []
    for name, median in of("medians").items():
        target = targets.get(name)
        told = "" if target is None else f"<= {target['most']:g} {'met' if target['met'] else 'MISSED'}"
        figures = [f"{of(key)[name]:.2f}" for key in ("minima", "p90", "first")]
        rows.append([name, f"{median:.2f}", *figures, str(of("samples")[name]), told, what[name]])
    return table(["", "median", "min", "p90", "first", "n", "target", ""], rows)


if __name__ == "__main__":
    sys.exit(main())
