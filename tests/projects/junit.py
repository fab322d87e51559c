"""Reading what pytest wrote down about a run, and comparing two runs test by test."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class Verdict(NamedTuple):
    """What became of one test; ``why`` does not count in a comparison."""

    outcome: str
    why: str = ""


def verdicts(text: str) -> dict[str, Verdict]:
    """Test id -> its verdict: passed, failed, error, skipped or xfailed.

    Raises ValueError for two tests of one id, since one would hide the other.
    """
    found: dict[str, Verdict] = {}
    for case in ElementTree.fromstring(text).iter("testcase"):  # noqa: S314  our own pytest's, no entities
        name = f"{case.get('classname')}::{case.get('name')}"
        parts = [part for part in case if part.tag in ("failure", "error", "skipped")]
        outcome = Verdict("passed")
        for part in parts:
            word = {"failure": "failed"}.get(part.tag, part.tag)
            if part.get("type") == "pytest.xfail":
                word = "xfailed"
            # A test that passes and then fails to clean up has two entries.
            outcome = Verdict(word, part.get("message") or "")
        if name in found and found[name].outcome == outcome.outcome == "passed":
            raise ValueError(f"two tests have the id {name}")
        found[name] = outcome
    return found


def counts(run: Mapping[str, Verdict]) -> dict[str, int]:
    """Outcome -> how many tests have it."""
    words = [verdict.outcome for verdict in run.values()]
    return {word: words.count(word) for word in sorted(set(words))}


def differences(outside: Mapping[str, Verdict], inside: Mapping[str, Verdict]) -> dict[str, str]:
    """The tests that did not end the same way in both runs: id -> what it was outside and inside."""
    none = Verdict("absent")
    found = {}
    for name in sorted({*outside, *inside}):
        before, after = outside.get(name, none).outcome, inside.get(name, none).outcome
        if before != after:
            found[name] = f"{before} -> {after}"
    return found


def lasting(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str]:
    """The differences that two comparisons both found, in the same direction."""
    return {name: what for name, what in first.items() if second.get(name) == what}
