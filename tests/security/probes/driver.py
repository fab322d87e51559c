"""Runs acts inside a sandbox and reports each one: ``driver.py PARAMS.json ACT...``.

Every act runs in a child of its own, so that one which a filter kills is reported as killed. The
report is a line ``@@ {json}`` on stdout. An act that never reports is a broken run, not a held row.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

Act = Callable[[dict[str, object]], "dict[str, object] | None"]


def find(name: str) -> Act:
    """``files.outside_write`` -> the function of that name."""
    module, _, function = name.partition(".")
    found: Act = getattr(__import__(f"acts_{module}"), function)
    return found


def child(name: str, params: dict[str, object], out: int) -> None:
    """The body of the child; never returns."""
    try:
        signal.alarm(25)
        value = find(name)(params) or {}
    except OSError as error:
        value = {"ok": False, "errno": error.errno, "error": str(error)}
    except BaseException as error:
        value = {"ok": False, "crash": f"{type(error).__name__}: {error}"}
    os.write(out, json.dumps(value).encode()[:60000] + b"\n")
    os._exit(0)


def run(name: str, params: dict[str, object]) -> dict[str, object]:
    """One act in one child."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(readable)
        child(name, params, writable)
    os.close(writable)
    _, status = os.waitpid(pid, 0)
    os.set_blocking(readable, False)
    try:
        data = os.read(readable, 65536)
    except BlockingIOError:
        data = b""
    os.close(readable)
    if os.WIFSIGNALED(status):
        return {"ok": False, "signal": os.WTERMSIG(status)}
    if not data:
        return {"ok": False, "crash": "no report"}
    value: dict[str, object] = json.loads(data)
    return value


def main() -> int:
    with open(sys.argv[1], encoding="utf-8") as stream:
        params = json.load(stream)
    if params.get("alive"):
        with open(os.path.join(params["ws"], "alive.txt"), "w", encoding="utf-8") as stream:
            stream.write(params["token"])
    for name in sys.argv[2:]:
        record = {"act": name, **run(name, params)}
        os.write(1, b"\n@@ " + json.dumps(record).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
