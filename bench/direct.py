"""``python -m bench.direct``: what a call costs in a workspace that is changed directly.

The same small program makes the same calls without a sandbox, in a view, and directly; the runs are
interleaved, and each call's median over all of them is reported, in microseconds. The workspace lies where
``--place`` says: on a file system in memory the calls themselves cost least, so the broker shows most.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from shutil import which
from statistics import median
from typing import TYPE_CHECKING

from bench import machine

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ENGINES", "main"]

ENGINES = {"bare": None, "view": (), "direct": ("--direct",)}

PROGRAM = r"""
import json, os, time
now = time.perf_counter_ns
N = 400
os.makedirs("d", exist_ok=True)
found = {}
def measure(name, act):
    figures = []
    for number in range(N):
        path = f"d/f{number}"
        began = now()
        act(path)
        figures.append(now() - began)
    found[name] = figures
def opened(path, flags):
    os.close(os.open(path, flags, 0o644))
measure("stat", lambda path: os.stat("/etc/passwd"))
measure("open to read", lambda path: opened("/etc/passwd", os.O_RDONLY))
measure("open /dev/null to write", lambda path: opened("/dev/null", os.O_WRONLY))
measure("create", lambda path: opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
measure("open to write", lambda path: opened(path, os.O_WRONLY))
measure("access", lambda path: os.access(path, os.W_OK))
measure("chmod", lambda path: os.chmod(path, 0o600))
measure("rename", lambda path: os.rename(path, path + "r"))
measure("unlink", lambda path: os.unlink(path + "r"))
measure("symlink", lambda path: os.symlink("w", path))
measure("unlink a link", lambda path: os.unlink(path))
measure("mkdir", lambda path: os.mkdir(path))
measure("rmdir", lambda path: os.rmdir(path))
handle = os.open("d/w", os.O_WRONLY | os.O_CREAT)
data = bytes(4096)
measure("write 4 KiB", lambda path: os.pwrite(handle, data, 0))
os.mkdir("/tmp/casemate-bench")
os.chdir("/tmp/casemate-bench")
os.mkdir("d")
measure("create in /tmp", lambda path: opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
measure("unlink in /tmp", lambda path: os.unlink(path))
os.rmdir("d")
os.chdir("/")
os.rmdir("/tmp/casemate-bench")
print(json.dumps(found))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit code says whether all could be measured, never whether it was fast."""
    parser = argparse.ArgumentParser(prog="python -m bench.direct", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=7, help="how often each is run")
    parser.add_argument("--place", type=Path, help="a directory that the workspace is made in")
    options = parser.parse_args(arguments)
    casemate = which("casemate")
    if casemate is None:
        sys.stderr.write("bench: casemate is not installed: scripts/setup\n")
        return 1
    before = machine.load()
    samples: dict[tuple[str, str], list[int]] = defaultdict(list)
    place = options.place or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place.mkdir(parents=True, exist_ok=True)
    for _ in range(options.rounds):
        for engine, flags in ENGINES.items():
            with tempfile.TemporaryDirectory(prefix="casemate-bench-", dir=place) as workspace:
                words = [] if flags is None else [casemate, "run", "--no-daemon", "--quiet", *flags, "--"]
                done = subprocess.run(
                    [*words, "/usr/bin/python3", "-I", "-S", "-c", PROGRAM],
                    cwd=workspace, capture_output=True, check=True,
                )  # fmt: skip
                for call, figures in json.loads(done.stdout).items():
                    samples[engine, call] += figures
    calls = list(dict.fromkeys(call for _, call in samples))
    table = {
        call: {engine: round(median(samples[engine, call]) / 1000, 2) for engine in ENGINES} for call in calls
    }
    facts = machine.facts() | {"load_before": before, "load_after": machine.load()}
    if options.json:
        print(json.dumps({"bench": "direct", "unit": "us", "medians": table, "machine": facts}))
        return 0
    print(f"{'median, us':28s}" + "".join(f"{engine:>10s}" for engine in ENGINES))
    for call, row in table.items():
        print(f"{call:28s}" + "".join(f"{row[engine]:10.2f}" for engine in ENGINES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
