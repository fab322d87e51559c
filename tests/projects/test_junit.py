"""The comparison of two test runs sees what it is there to see."""

from __future__ import annotations

import pytest

from tests.projects.junit import Verdict, counts, differences, lasting, verdicts

RUN = """<testsuites><testsuite>
<testcase classname="a.T" name="good"/>
<testcase classname="a.T" name="bad"><failure message="no">trace</failure></testcase>
<testcase classname="a.T" name="left"><skipped type="pytest.skip" message="not here"/></testcase>
<testcase classname="a.T" name="known"><skipped type="pytest.xfail" message="some day"/></testcase>
<testcase classname="a.T" name="broken"><error message="set up">trace</error></testcase>
</testsuite></testsuites>"""


def test_verdicts() -> None:
    """Each of pytest's outcomes is told from the others."""
    read = verdicts(RUN)
    assert {name: verdict.outcome for name, verdict in read.items()} == {
        "a.T::good": "passed",
        "a.T::bad": "failed",
        "a.T::left": "skipped",
        "a.T::known": "xfailed",
        "a.T::broken": "error",
    }
    assert counts(read) == {"error": 1, "failed": 1, "passed": 1, "skipped": 1, "xfailed": 1}


def test_same_id_twice() -> None:
    """Two tests under one id are refused: one could hide the other."""
    with pytest.raises(ValueError, match="two tests"):
        verdicts('<s><testcase classname="a" name="b"/><testcase classname="a" name="b"/></s>')


def test_differences() -> None:
    """A test that fails, is skipped, is missing or is new in one run is a difference; its message is not."""
    run = verdicts(RUN)
    assert differences(run, {**run, "a.T::bad": Verdict("failed", "another message")}) == {}
    other = {**run, "a.T::good": Verdict("failed", "boom"), "a.T::new": Verdict("passed")}
    del other["a.T::left"]
    assert differences(run, other) == {
        "a.T::good": "passed -> failed",
        "a.T::left": "skipped -> absent",
        "a.T::new": "absent -> passed",
    }


def test_lasting() -> None:
    """What comes back in the same direction lasts; what comes once, or turns round, is chance."""
    first = {"a": "passed -> failed", "b": "passed -> failed", "c": "passed -> failed"}
    second = {"a": "passed -> failed", "b": "failed -> passed", "d": "passed -> failed"}
    assert lasting(first, second) == {"a": "passed -> failed"}
