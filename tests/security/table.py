"""``python -m tests.security.table``: prints the attack table as text, or as JSON with ``--json``.

``--engine bwrap`` measures the peer instead; ``--row ID`` (repeatable) and ``--mode`` narrow the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.security import lab, matrix
from tests.security.rows import BY_ID, ROWS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.security.matrix import Verdict


@contextlib.contextmanager
def worlds(engine: str, modes: list[str]) -> Iterator[dict[str, lab.World]]:
    """A lab per mode, and one installation for both."""
    lab.require_prerequisites()
    with contextlib.ExitStack() as stack:
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="casemate-install-", dir="/srv"))
        )
        directory.chmod(0o755)
        template = directory / "template"
        template.mkdir()
        lab.make_template(template)
        command = lab.install_copy(directory / "venv") if (lab.REPO / "bin/casemate").exists() else None
        made = {}
        for mode in modes:
            made[mode] = lab.make_world(mode, template, command)
            stack.callback(made[mode].close)
        yield made


def _mark(verdict: Verdict, control: bool) -> str:
    if verdict.invalid:
        return "invalid"
    if control:
        return "succeeds" if verdict.leaked else "FAILS"
    return "held" if verdict.held else "LEAKS"


def main() -> int:
    parser = argparse.ArgumentParser(prog="attack-table", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", choices=["casemate", "bwrap"], default="casemate")
    parser.add_argument("--mode", choices=lab.MODES, action="append")
    parser.add_argument("--row", choices=list(BY_ID), action="append", metavar="ID")
    parser.add_argument("--no-control", action="store_true")
    parser.add_argument(
        "--verbose", action="store_true", help="the evidence of every cell that is not as wanted"
    )
    options = parser.parse_args()
    modes = options.mode or list(lab.MODES)
    rows = [BY_ID[name] for name in options.row] if options.row else list(ROWS)
    results = []
    # The control of a row may have to run as a mode that was not asked for, so both labs are made.
    with worlds(options.engine, list(lab.MODES)) as made:
        for row in rows:
            cells: dict[str, Verdict] = {}
            if not options.no_control:
                # Shown as the mode in which the bare host lets it happen.
                cells["control"] = matrix.run_row(row, made[matrix.control_modes(row, modes[0])], row.control)
            for mode in modes:
                cells[mode] = matrix.run_row(row, made[mode], options.engine)
            results.append((row, cells))
            if not options.json:
                marks = "  ".join(f"{_mark(cell, name == 'control'):9}" for name, cell in cells.items())
                print(f"{row.id:20} {marks} {row.title}", flush=True)
            for name, cell in cells.items():
                wanted = cell.leaked if name == "control" else cell.held
                if options.verbose and not wanted:
                    print("    " + cell.line(), file=sys.stderr, flush=True)
    held = {mode: sum(cells[mode].held for _, cells in results) for mode in modes}
    if options.json:
        print(json.dumps({
            "engine": options.engine, "rows": len(results), "held": held,
            "table": [{"id": row.id, "title": row.title,
                       **{name: {"result": _mark(cell, name == "control"), "parts": cell.parts,
                                 "seconds": round(cell.seconds, 3)} for name, cell in cells.items()}}
                      for row, cells in results],
        }, indent=1))  # fmt: skip
    else:
        print("; ".join(f"{mode}: held {count}/{len(results)}" for mode, count in held.items()))
    proved = options.no_control or all(cells["control"].leaked for _, cells in results)
    return 0 if proved and all(count == len(results) for count in held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
