"""Who calls. Tests with callers run as root and as uid 1000; the default run has one of them, to be short,
the slow tests the other: people call the command line as themselves, and attacks are tried from where most
is possible.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT, USER = "root", "uid1000"
DEFAULT = {"cli": USER, "everyday": USER, "network": ROOT, "security": ROOT}
_TESTS = Path(__file__).resolve().parents[1]


@pytest.hookimpl(tryfirst=True)  # the tests to run are chosen by their marks after this
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the repeats by the other caller as slow."""
    for item in items:
        if not isinstance(item, pytest.Function) or not item.path.is_relative_to(_TESTS):
            continue
        usual = DEFAULT.get(item.path.relative_to(_TESTS).parts[0])
        params = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if usual is not None and any(value in (ROOT, USER) and value != usual for value in params):
            item.add_marker(pytest.mark.slow)
