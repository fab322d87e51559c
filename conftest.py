"""Settings of the whole test suite. Fixtures live in tests/conftest.py."""

from __future__ import annotations

import gc

from hypothesis import settings

pytest_plugins = ("tests.plugins.callers", "tests.plugins.strict_skips")

# The machines are shared and slow: a deadline would test the machine. The same examples in every run,
# so that a red run can be repeated; `--hypothesis-profile=explore` draws new ones.
settings.register_profile("default", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("default")


def pytest_collection_finish() -> None:
    """What collecting has made lives to the end: no collection of garbage looks at it again, which took
    0.6 s of each test that waits for one.
    """
    gc.freeze()
