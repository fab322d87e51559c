"""The tests of the library once more, by uid 1000 without any capability."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.security.lab import REPO, drop_to

pytestmark = [pytest.mark.root]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_library_as_an_unprivileged_user() -> None:
    """Every test of this directory holds for uid 1000, from a checkout that it can read."""
    place = Path(tempfile.mkdtemp(prefix="casemate-user-tests-", dir="/var/tmp"))
    try:
        place.chmod(0o755)
        for name in ("src", "tests"):
            shutil.copytree(REPO / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("conftest.py", "pyproject.toml"):
            shutil.copy(REPO / name, place / name)
        home = place / "home"
        home.mkdir()
        os.chown(home, 1000, 1000)
        files = ("test_api.py", "test_network.py", "test_pools.py", "test_published.py", "test_sessions.py")
        files += ("test_descriptors.py", "test_waiting.py")
        pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "60"]
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8"}
        env |= {"PYTHONPATH": f"{place}/src", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [*drop_to(1000), *pytest_, *(f"tests/unit/sandbox/{name}" for name in files)],
            cwd=place, env=env, capture_output=True, text=True, timeout=220, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert " passed" in done.stdout, done.stdout
        assert "skipped" not in done.stdout, done.stdout
    finally:
        shutil.rmtree(place)
