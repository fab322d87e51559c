"""``python -m tests.network.table``: prints the network's attack table as text, or as JSON with ``--json``.

``--mode`` and ``--row ID`` (repeatable) narrow it; ``--verbose`` shows the evidence of what is not as wanted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.network.lab import Lab
from tests.network.matrix import BY_ID, ROWS, Matrix
from tests.security.lab import MODES, install_copy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cli.harness import Caller
    from tests.network.matrix import Verdict


@contextlib.contextmanager
def callers() -> Iterator[tuple[Lab, dict[str, Caller]]]:
    """A lab, an installation, and who calls there."""
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="casemate-install-", dir="/srv"))
        Path(name).chmod(0o755)
        command = install_copy(Path(name) / "venv")
        lab = Lab()
        stack.callback(lab.close)
        made = {mode: lab.caller(mode, command) for mode in MODES}
        for caller in made.values():
            stack.callback(caller.clean)
            stack.callback(caller.close)
        yield lab, made


def _mark(verdict: Verdict, control: bool) -> str:
    if verdict.invalid:
        return "invalid"
    if control:
        return "succeeds" if verdict.leaked else "FAILS"
    return "held" if verdict.held else "LEAKS"


def main() -> int:
    parser = argparse.ArgumentParser(prog="network-table", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mode", choices=MODES, action="append")
    parser.add_argument("--row", choices=list(BY_ID), action="append", metavar="ID")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    modes = options.mode or list(MODES)
    rows = [BY_ID[name] for name in options.row] if options.row else list(ROWS)
    table = []
    with callers() as (lab, made):
        matrix = Matrix(lab)
        for row in rows:
            cells = {"control": matrix.control(made[modes[0]], row, made["root"])}
            cells |= {mode: matrix.attack(made[mode], row.group).verdicts[row.id] for mode in modes}
            table.append((row, cells))
            if not options.json:
                marks = "  ".join(f"{_mark(cell, name == 'control'):9}" for name, cell in cells.items())
                print(f"{row.id:20} {marks} {row.title}", flush=True)
            for name, cell in cells.items():
                if options.verbose and not (cell.leaked if name == "control" else cell.held):
                    print("    " + cell.line(), file=sys.stderr, flush=True)
    held = {mode: sum(cells[mode].held for _, cells in table) for mode in modes}
    if options.json:
        print(json.dumps({
            "rows": len(table), "held": held,
            "table": [{"id": row.id, "title": row.title,
                       **{name: {"result": _mark(cell, name == "control"), "parts": cell.parts}
                          for name, cell in cells.items()}} for row, cells in table],
        }, indent=1))  # fmt: skip
    else:
        parts = sum(len(cells[modes[0]].parts) for _, cells in table)
        print(
            "; ".join(f"{mode}: held {count}/{len(table)}" for mode, count in held.items()), f"({parts} acts)"
        )
    proved = all(cells["control"].leaked for _, cells in table)
    return 0 if proved and all(count == len(table) for count in held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
