"""``python -m bench.launch``: what it costs to run one command, ours beside the peers, in one run.

Two workloads: ``true`` (the cost of the sandbox itself) and ``python3 -c pass`` (what a typical command
adds to it: page faults, path look-ups, a filter checked on each system call). A second section runs
``true`` after a second of idling, which a tight loop hides: caches are cold then, and on a kernel without
``favordynmods`` the first attach to a cgroup after a pause waits for a grace period.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench import machine, ours, peers, render, report
from bench.measure import Cell, Limits, Samples, collect
from bench.peers import Absent, BenchError, Scratch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.peers import Peer

__all__ = ["NAMES", "TARGETS", "WORKLOADS", "build", "main"]

WORKLOADS: Mapping[str, tuple[str, ...]] = {
    "true": ("/usr/bin/true",),
    "python": ("/usr/bin/python3", "-c", "pass"),
}
TARGETS = (
    report.Target("ours_api", "bwrap_full", 1.0),
    report.Target("ours_prefab", "bwrap_full", 0.9),
    report.Target("ours_slot", "bwrap_full", 0.5),
    report.Target("ours_cli", "codex", 1.2),
    report.Target("ours_cli_daemon", "codex", 0.5),
)
NAMES = (
    "bare",
    "bwrap_full",
    "nsjail",
    "codex",
    "srt",
    "sandlock",
    "ours_api",
    "ours_prefab",
    "ours_slot",
    "ours_cli",
    "ours_cli_daemon",
)
IDLE_SECONDS = 1.0
# The quick run leaves out, after idling, the peers that no target names.
QUICK_IDLE = frozenset({name for t in TARGETS for name in (t.ours, t.peer)})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and say by the exit code whether all could be measured (never whether it was fast)."""
    parser = argparse.ArgumentParser(prog="python -m bench.launch", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="under 50 seconds in all")
    parser.add_argument("--require-all", action="store_true", help="an absent peer is an error")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    here = os.getcwd()
    # Not below /tmp: several peers put a file system of their own there.
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Scratch(Path(tempfile.mkdtemp(prefix="casemate-bench-", dir=cache)))
    present: dict[str, Peer] = {}
    try:
        _furnish(scratch)
        os.chdir(scratch.workspace)
        before = machine.load()
        absent: dict[str, str] = {}
        for known in (peers.comparison(), ours.variants()):
            absent |= _prepare(known, scratch, present)
            if absent and options.require_all:
                for name, reason in absent.items():
                    print(f"bench: {name} is absent: {reason}", file=sys.stderr)
                return 1
        warm, idle = _measure(present, quick=options.quick)
        facts = machine.facts() | {"load_before": before, "load_after": machine.load()}
        result = build(present, absent, warm, idle, facts)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    finally:
        for peer in present.values():
            peer.close()
        os.chdir(here)
        shutil.rmtree(scratch.root, ignore_errors=True)
    result["quick"] = options.quick
    result["seconds"] = round(time.monotonic() - begin, 1)
    print(json.dumps(result) if options.json else render.render(result))
    return 0


def build(
    present: Mapping[str, Peer],
    absent: Mapping[str, str],
    warm: Samples,
    idle: Samples,
    facts: Mapping[str, object],
) -> dict[str, object]:
    """The report (form: ``bench.report``)."""
    names = list(present)
    workloads = {name: report.section(warm, names, name) for name in WORKLOADS}
    idlers = sorted({cell.peer for cell in idle.warm}, key=names.index)
    return {
        "bench": "launch",
        "unit": "ms",
        "medians": workloads["true"]["medians"],
        "minima": workloads["true"]["minima"],
        "first": workloads["true"]["first"],
        "ratios": [r.as_dict() for r in report.ratios(warm, names, "true", TARGETS)],
        "workloads": workloads,
        "idle": {"seconds": IDLE_SECONDS, "workload": "true", **report.section(idle, idlers, "true")},
        "commands": {name: " ".join(argv) for name, argv in WORKLOADS.items()},
        "what": {name: peer.what for name, peer in present.items()},
        "versions": {name: peer.version() for name, peer in present.items()},
        "absent": dict(absent),
        "machine": dict(facts),
    }


def _furnish(scratch: Scratch) -> None:
    """A small workspace: a few folders with files, as a project has."""
    for folder in ("src", "tests", "docs"):
        below = scratch.workspace / folder
        below.mkdir(parents=True)
        for number in range(8):
            (below / f"file{number}.txt").write_text("text\n" * 50)


def _prepare(known: Sequence[Peer], scratch: Scratch, present: dict[str, Peer]) -> dict[str, str]:
    """Make every peer ready and look inside it once; gives the absent ones with the reason."""
    absent = {}
    for peer in known:
        try:
            peer.prepare(scratch)
        except Absent as reason:
            absent[peer.name] = f"{reason} (to install: {peer.install})"
            continue
        present[peer.name] = peer
        try:
            peer.verify()
        except BenchError as error:
            # Somebody else's tool may not work on this host; ours has no such excuse.
            if peer.name.startswith("ours_"):
                raise
            absent[peer.name] = f"does not work here: {error}"
            present.pop(peer.name).close()
    return absent


def _measure(present: Mapping[str, Peer], *, quick: bool) -> tuple[Samples, Samples]:
    """The interleaved section, then the one after idling."""

    def burst(cell: Cell) -> tuple[list[float], list[float]]:
        peer = present[cell.peer]
        figures = []
        for _ in range(peer.apart + peer.runs):
            peer.ready()
            figures.append(peer.once(WORKLOADS[cell.workload]))
        return figures[: peer.apart], figures[peer.apart :]

    def rested(cell: Cell) -> tuple[list[float], list[float]]:
        peer = present[cell.peer]
        peer.ready()
        time.sleep(IDLE_SECONDS)
        return [], [peer.once(WORKLOADS[cell.workload])]

    cells = [Cell(peer, workload) for peer in present for workload in WORKLOADS]
    warm = collect(cells, burst, Limits(20, least=4) if quick else Limits(150, least=10))
    resting = [Cell(name, "true") for name in present if not quick or name in QUICK_IDLE]
    idle = collect(resting, rested, Limits(22, least=2) if quick else Limits(150, least=5), seed=2)
    return warm, idle


if __name__ == "__main__":
    sys.exit(main())
