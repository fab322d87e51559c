"""The way from the command line to the command loads no slow module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import casemate

ENTRY = Path(casemate.__file__).parent / "cli" / "entry.py"

# What each costs at every run, measured cold: from 6 ms (json) to 37 ms (asyncio).
SLOW = {
    "argparse",
    "asyncio",
    "dataclasses",
    "email",
    "http",
    "json",
    "logging",
    "multiprocessing",
    "pathlib",
    "random",
    "shutil",
    "signal",
    "ssl",
    "subprocess",
    "tempfile",
    "threading",
    "tomllib",
    "unittest",
    "urllib",
    "zipfile",
}


def loaded(tmp_path: Path, *arguments: str) -> tuple[int, set[str]]:
    """Exit code of a command line, and every module that its interpreter imported."""
    workspace, home = tmp_path / "workspace", tmp_path / "home"
    workspace.mkdir()
    home.mkdir()
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-X", "importtime", str(ENTRY), *arguments],
        cwd=workspace,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return done.returncode, {line.split("|")[-1].strip() for line in lines}


def test_run_loads_no_slow_module(tmp_path: Path) -> None:
    """A whole ``casemate run``, up to its exit code, imports none of the listed modules."""
    code, modules = loaded(tmp_path, "run", "--", "sh", "-c", "echo x >made; exit 7")
    assert code == 7
    assert {name.split(".")[0] for name in modules} & SLOW == set()
    assert "casemate.workspace.apply" in modules, "the run went all the way"


def test_the_list_can_fail(tmp_path: Path) -> None:
    """Control: an interpreter that does load such a module is seen to."""
    script = tmp_path / "imports.py"
    script.write_text("import json\n")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-X", "importtime", str(script)], capture_output=True, text=True
    )
    assert "json" in {line.split("|")[-1].strip() for line in done.stderr.splitlines()} & SLOW
