"""The resident process in which sandlock is measured: argv as one JSON line in, one JSON line out.

Runs under the interpreter that has sandlock installed, so it imports nothing of this project.
"""

from __future__ import annotations

import importlib
import json
import sys
import time


def main() -> None:
    sandlock = importlib.import_module("sandlock")
    workspace = sys.argv[1]
    for line in sys.stdin:
        begin = time.perf_counter()
        box = sandlock.Sandbox(
            fs_readable=["/usr", "/lib", "/lib64", "/bin", "/etc", "/proc", "/dev/null"],
            fs_writable=[workspace, "/dev/null"],
            max_memory="512M",
            max_processes=64,
            cwd=workspace,
        )
        result = box.run(json.loads(line))
        spent = time.perf_counter() - begin
        answer = {
            "ms": spent * 1000,
            "code": result.exit_code,
            "stdout": result.stdout.decode(errors="replace"),
            "error": result.error or "",
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
