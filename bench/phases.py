"""``python -m bench.phases``: where the time of one start goes, in the launcher and in the sealing child.

For whoever works on the launcher: no peers, no targets. It drives the process launcher directly, in a
process as slim as the keeper (``phases_driver``), with a plan like the default policy's. It prints, per
phase, the median and minimum in microseconds, then the cost of each function of ``casemate.sys`` per run.
Times of the child come back over its own status pipe. The timers themselves cost about 0.3 us each.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from bench.render import table

__all__ = ["main"]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.phases", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--ahead", action="store_true", help="make the namespaces ahead")
    parser.add_argument("command", nargs="?", default="/usr/bin/true")
    options = parser.parse_args()
    figures: dict[str, list[float]] = defaultdict(list)
    calls: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="casemate-bench-", dir=os.path.expanduser("~")) as place:
        for name in ("workspace", "run"):
            os.mkdir(f"{place}/{name}")
        argv = [
            sys.executable, "-I", "-S", str(Path(__file__).with_name("phases_driver.py")), *_paths(),
            f"{place}/workspace", f"{place}/run", str(options.rounds), "ahead" if options.ahead else "",
            options.command,
        ]  # fmt: skip
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    for line in done.stdout.splitlines():
        for word in line.split("\t"):
            name, _, rest = word.rpartition("=")
            calls[name], _, spent = rest.partition(":")
            figures[name].append(float(spent))
    rows = [
        [name, calls[name], f"{median(seen):.0f}", f"{min(seen):.0f}", ""] for name, seen in figures.items()
    ]
    plain = [row for row in rows if row[0][:2] not in ("L ", "C ")]
    functions = sorted((row for row in rows if row not in plain), key=lambda row: -float(row[2]))
    print(table(["phase", "", "median us", "min us", ""], [[row[0], "", *row[2:]] for row in plain]))
    print("\nFunctions per run; L in the launcher, C in the child until sealed; totals overlap.\n")
    print(table(["function", "calls", "median us", "min us", ""], functions[:45]))
    return 0


def _paths() -> list[str]:
    """Where this interpreter finds Casemate and its one dependency."""
    found = []
    for name in ("casemate", "msgspec"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise SystemExit(f"phases: {name} cannot be imported")
        found.append(str(Path(spec.origin).parents[1]))
    return found


if __name__ == "__main__":
    sys.exit(main())
