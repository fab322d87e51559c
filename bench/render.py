"""The readable form of a report: tables for a terminal, nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["render", "table"]


def render(report: Mapping[str, Any]) -> str:
    """The whole report as text."""
    parts = [f"{report['bench']}: wall time in {report['unit']}, one interleaved run", _machine(report)]
    described: Mapping[str, str] = report["what"]
    for name, figures in report["workloads"].items():
        parts.append(f"\n{report['commands'][name]}\n" + _figures(figures, described))
    idle = report.get("idle")
    if idle:
        title = f"\n{report['commands'][idle['workload']]}, each run after {idle['seconds']:g} s idle\n"
        parts.append(title + _figures(idle, described))
    if report["ratios"]:
        title = "\nTargets (medians; paired = median of the ratios within each round)\n"
        parts.append(title + _ratios(report))
    if report["versions"]:
        parts.append("\nVersions: " + "; ".join(text for text in report["versions"].values() if text))
    for peer, reason in report["absent"].items():
        parts.append(f"Absent: {peer}: {reason}")
    parts.append(f"Took {report['seconds']:.1f} s.")
    return "\n".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first and the last to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    last = len(head) - 1
    lines = []
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _machine(report: Mapping[str, Any]) -> str:
    facts: Mapping[str, Any] = report["machine"]
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, Linux {facts['kernel']}, "
        f"cgroup {facts['cgroup']}, uid {facts['uid']}, Python {facts['python']}, "
        f"load {facts['load_before']} before and {facts['load_after']} after"
    )


def _figures(figures: Mapping[str, Any], described: Mapping[str, str]) -> str:
    first: Mapping[str, float] = figures.get("first", {})
    rows = [
        [
            peer,
            f"{median:.2f}",
            f"{figures['minima'][peer]:.2f}",
            f"{figures['p90'][peer]:.2f}",
            f"{first[peer]:.2f}" if peer in first else "-",
            str(figures["samples"][peer]),
            described.get(peer, ""),
        ]
        for peer, median in figures["medians"].items()
    ]
    return table(["", "median", "min", "p90", "first", "n", ""], rows)


def _ratios(report: Mapping[str, Any]) -> str:
    rows = [
        [
            f"{r['ours']} / {r['peer']}",
            f"{r['ours_ms']:.2f} / {r['peer_ms']:.2f}",
            f"{r['ratio']:.2f}",
            f"{r['paired']:.2f}",
            f"<= {r['target']:g}",
            "met" if r["met"] else "MISSED",
        ]
        for r in report["ratios"]
    ]
    return table(["pair", "ms", "ratio", "paired", "target", ""], rows)
