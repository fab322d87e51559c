"""What a run pays for its policy: only the modules that its files need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.unit.policy.conftest import Caller

SOURCE = str(Path(__file__).parents[3] / "src")
HEAVY = {"tomllib", "json", "difflib", "hashlib", "argparse", "subprocess", "logging", "dataclasses",
"asyncio"}
PROGRAM = """
import sys
import msgspec
before = set(sys.modules)
sys.path.insert(0, sys.argv[1])
from casemate.policy import environment, load, paths, tools
from casemate.settings import Places
import ast
places = Places(**ast.literal_eval(sys.argv[2]))
effective = load.load(workspace=sys.argv[3], environ={"HOME": places.home}, places=places)
found = tools.discover("/usr/bin:/bin", places.home, workspace=sys.argv[3], guard=paths.guard(places))
environment.collect({"HOME": places.home}, effective.policy, found, workspace=sys.argv[3])
print("\\n".join(sorted(set(sys.modules) - before)))
"""


def loaded(caller: Caller) -> set[str]:
    """The modules that loading the policy brings in, beside msgspec's own."""
    import msgspec

    places = repr(msgspec.structs.asdict(caller.places))
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM, SOURCE, places, caller.workspace],
        capture_output=True, text=True, check=True, env={"PATH": os.environ.get("PATH", "")},
    )  # fmt: skip
    return set(done.stdout.split())


def test_a_run_without_files_imports_nothing_heavy(caller: Caller) -> None:
    """No parser, no hash, no fuzzy matching unless a file is there; with one, its parser is loaded."""
    bare = loaded(caller)
    assert not bare & HEAVY
    assert "casemate.policy.load" in bare
    assert "casemate.policy.parse" not in bare
    caller.user("version = 1\n")
    assert "tomllib" in loaded(caller)
    assert json  # the control's own import does not reach the child
