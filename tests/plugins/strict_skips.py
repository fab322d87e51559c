"""A skip in CI is a failure, unless tests/skips.toml lists the test with a reason.

A test that is skipped everywhere proves nothing and looks green. So under ``CI=true`` (or
``--strict-skips``) a skipped test or module counts as failed when no entry of the list covers it.
"""

from __future__ import annotations

import os
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

SKIPS_FILE = Path(__file__).resolve().parents[1] / "skips.toml"


class Entry(NamedTuple):
    """One allowed skip: a pattern over test ids, and why."""

    test: str
    reason: str


def read_entries(text: str) -> list[Entry]:
    """The entries of a skips file; raises ValueError for an unknown key or an empty reason."""
    data = tomllib.loads(text)
    if unknown := set(data) - {"skip"}:
        raise ValueError(f"unknown keys: {sorted(unknown)}")
    entries = []
    for row in data.get("skip", []):
        if set(row) != {"test", "reason"} or not row["test"].strip() or len(row["reason"].strip()) < 10:
            raise ValueError(f"an entry needs exactly `test` and a real `reason`: {row}")
        entries.append(Entry(row["test"], row["reason"]))
    return entries


class StrictSkips:
    """Turns unlisted skips into failures."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries

    def _allowed(self, nodeid: str) -> bool:
        return any(nodeid == entry.test or fnmatchcase(nodeid, entry.test) for entry in self.entries)

    def _judge(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.outcome != "skipped" or hasattr(report, "wasxfail") or self._allowed(report.nodeid):
            return
        where = report.longrepr
        reason = where[2] if isinstance(where, tuple) else str(where)
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped and tests/skips.toml does not list it: {reason}"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self._judge(report)
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        self._judge(report)
        return report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strict-skips",
        action="store_true",
        default=False,
        help="a skip that tests/skips.toml does not list is a failure (always so under CI=true)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--strict-skips") or os.environ.get("CI", "").lower() in ("1", "true", "yes"):
        entries = read_entries(SKIPS_FILE.read_text()) if SKIPS_FILE.exists() else []
        config.pluginmanager.register(StrictSkips(entries), "casemate-strict-skips")
