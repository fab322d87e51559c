"""Asks the running kernel about BPF programs, through a process of its own (kernel_bpf.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def ask(*requests: list[object]) -> list[object]:
    """The kernel's answers, from a process of its own."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("kernel_bpf.py"))],
        input="".join(json.dumps(request) + "\n" for request in requests),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]
