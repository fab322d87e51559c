"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import casemate
from tests.repo.tree import ROOT

README = (ROOT / "README.md").read_text()
ENTRY = Path(casemate.__file__).parent / "cli" / "entry.py"

A_TEST = """
import unittest

class Sum(unittest.TestCase):
    def test_sum(self):
        open("ran", "w").write("yes")
        self.assertEqual(1 + 1, 2)
"""


def test_python_example(tmp_path: Path) -> None:
    """The Python example runs the workspace's tests and reports how they ended."""
    (example,) = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    workspace, home = tmp_path / "workspace", tmp_path / "home"
    workspace.mkdir()
    home.mkdir()
    (workspace / "test_sum.py").write_text(A_TEST)
    where = str(Path(casemate.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {where!r})\n{example}"],
        cwd=workspace,
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "0  ()\n"), done.stderr
    assert (workspace / "ran").read_text() == "yes"


def test_commands_exist() -> None:
    """Every ``casemate`` command in the README is one that the command line knows."""
    known = subprocess.run(
        [sys.executable, "-I", "-S", str(ENTRY), "--help"], capture_output=True, text=True, check=True
    ).stdout
    commands = set(re.findall(r"(?:`|^    )casemate ([a-z]+)", README, re.MULTILINE))
    assert {"run", "doctor"} <= commands
    assert {name for name in commands if f"\n  {name} " not in known} == set()


def test_two_commands_set_it_up() -> None:
    """Setting up is two commands: one for git, one for the script, which exists."""
    section = README.split("## Set up", 1)[1].split("## ", 1)[0]
    commands = [line.strip() for line in section.splitlines() if line.startswith("    ")]
    assert len(commands) == 2
    assert commands[-1] == "scripts/setup"
