"""The rule that a skip in CI is a failure, run on real pytest sessions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.strict_skips import SKIPS_FILE, read_entries

ROOT = Path(__file__).resolve().parents[2]

SUITE = """
import pytest

def test_runs():
    pass

def test_skips():
    pytest.skip("no such device here")

@pytest.mark.xfail(reason="known")
def test_xfails():
    assert False
"""


def run_suite(tmp_path: Path, *options: str, ci: str = "", listed: str = "") -> tuple[int, str]:
    """A pytest session over SUITE, with the plugin and its skips file copied beside it."""
    plugins = tmp_path / "tests" / "plugins"
    plugins.mkdir(parents=True)
    (plugins / "strict_skips.py").write_text((ROOT / "tests/plugins/strict_skips.py").read_text())
    (tmp_path / "tests" / "skips.toml").write_text(listed)
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.plugins.strict_skips", *options],
        cwd=tmp_path,
        env={**os.environ, "CI": ci, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


def test_unlisted_skip_fails_in_ci(tmp_path: Path) -> None:
    """Under CI=true a skipped test fails, and the message says why it was skipped."""
    code, out = run_suite(tmp_path, ci="true")
    assert code == 1
    assert "1 failed, 1 passed, 1 xfailed" in out
    assert "no such device here" in out


def test_listed_skip_passes_in_ci(tmp_path: Path) -> None:
    """Control: the same skip, listed with a reason, is fine."""
    listed = '[[skip]]\ntest = "test_suite.py::test_s*"\nreason = "this machine has no such device"\n'
    code, out = run_suite(tmp_path, ci="true", listed=listed)
    assert (code, "1 passed, 1 skipped, 1 xfailed" in out) == (0, True)


def test_skip_is_free_outside_ci(tmp_path: Path) -> None:
    """Control: on a person's machine a skip is a skip, unless --strict-skips asks."""
    code, out = run_suite(tmp_path)
    assert (code, "1 passed, 1 skipped, 1 xfailed" in out) == (0, True)


def test_option_asks_for_the_same(tmp_path: Path) -> None:
    """--strict-skips judges as CI does."""
    code, _ = run_suite(tmp_path, "--strict-skips")
    assert code == 1


@pytest.mark.parametrize(
    "text",
    [
        '[[skip]]\ntest = "x"\n',
        '[[skip]]\ntest = "x"\nreason = " "\n',
        '[[skip]]\ntest = "x"\nreason = "long enough reason"\nwhen = "now"\n',
        '[[skips]]\ntest = "x"\n',
    ],
)
def test_sloppy_entries_are_refused(text: str) -> None:
    """An entry without a real reason, or with a key nobody reads, is an error."""
    with pytest.raises(ValueError, match=r"entry needs|unknown keys"):
        read_entries(text)


def test_the_list_is_well_formed() -> None:
    """The list that ships can be read, and names test files that exist."""
    for entry in read_entries(SKIPS_FILE.read_text()):
        assert (ROOT / entry.test.split("::")[0]).is_file(), entry
