"""Settings of the whole test suite. Fixtures live in tests/conftest.py."""

from __future__ import annotations

from hypothesis import settings

pytest_plugins = ("tests.plugins.strict_skips",)

# The machines are shared and slow: a deadline would test the machine. The same examples in every run,
# so that a red run can be repeated; `--hypothesis-profile=explore` draws new ones.
settings.register_profile("default", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("default")
