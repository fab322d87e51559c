"""Runs acts and reports each: ``driver.py PLAN.json``, inside a sandbox or, as a control, on the lab host.

The plan is a list of ``{"id", "act", "tries"}``; an act gets one try at a time. All tries run side by side,
since a refusal that is silent costs its time. A report is a line ``@@ {json}``: what each try was told. The
verdict is not taken from it: whether something got through is seen at the other end.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

Act = Callable[[dict[str, Any]], Any]
WIDTH = 64


def find(name: str) -> Act:
    """``tcp.send`` -> the function of that name in ``acts_tcp``."""
    module, _, function = name.partition(".")
    found: Act = getattr(__import__(f"acts_{module}"), function)
    return found


def attempt(act: str, one: dict[str, Any]) -> dict[str, Any]:
    """One try: what it gave, or how it was refused."""
    try:
        return {"got": find(act)(one)}
    except OSError as error:
        return {"refused": f"{type(error).__name__} {error.errno}: {error}"}
    except (ValueError, EOFError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    except BaseException as error:
        return {"crash": f"{type(error).__name__}: {error}"}


def main() -> int:
    with open(sys.argv[1], encoding="utf-8") as stream:
        plan = json.load(stream)
    with ThreadPoolExecutor(WIDTH) as pool:
        running = [
            (row["id"], one.get("part", str(number)), pool.submit(attempt, row["act"], one))
            for row in plan
            for number, one in enumerate(row["tries"])
        ]
        reports: dict[str, dict[str, Any]] = {}
        for row, part, future in running:
            reports.setdefault(row, {})[part] = future.result()
    for row, report in reports.items():
        sys.stdout.write("\n@@ " + json.dumps({"act": row, "tries": report}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
