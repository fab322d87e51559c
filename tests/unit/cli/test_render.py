"""What people and programs are shown: names out of a sandbox move no cursor and break no report."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from casemate.cli import main, render
from casemate.errors import BusyError, PolicyError, ProtectionUnavailable, SandboxError
from casemate.sandbox.result import Applied, Denial, Result

name = st.text(max_size=10) | st.binary(max_size=10).map(lambda raw: raw.decode("utf-8", "surrogateescape"))


@given(name)
def test_escaped(text: str) -> None:
    """Any name is one printable line, and plain ones stay as they are."""
    shown = render.escaped(text)
    assert shown.isprintable()
    if text.isprintable() and not any(0xDC00 <= ord(c) < 0xE000 for c in text):
        assert shown == text


@given(st.lists(name, max_size=3), st.lists(st.tuples(name, name), max_size=3), name)
def test_any_result_is_json(names: list[str], pairs: list[tuple[str, str]], what: str) -> None:
    """Whatever names a result holds, its report is one line of valid JSON, and its summary is printable."""
    result = Result(
        exit_code=1, limit="memory",
        applied=Applied(
            changes=tuple(names), held=tuple(pairs), failed=tuple(pairs), executables=tuple(names)
        ),
        denials=(Denial(what=what, certain=False, kind="read", allow=what),), notes=(what,),
    )  # fmt: skip
    data = render.as_json(result)
    assert b"\n" not in data
    assert json.loads(data)["exit-code"] == 1
    assert all(line.isprintable() for line in render.summary(result))


@given(name, name)
def test_any_error_is_told(message: str, value: str) -> None:
    """Whatever an error holds, it is valid JSON, and a message of printable lines with its code."""
    error = SandboxError(message, code="some-code", hint=value, path=value, set={1, 2}, none=None)
    assert json.loads(render.error_as_json(error, 125))["error"]["code"] == "some-code"
    text = main.error_text(error)
    assert "[some-code]" in text
    assert all(line.isprintable() for line in text.rstrip("\n").split("\n"))


def test_exit_codes() -> None:
    """Each kind of error has its exit code."""
    not_found = ("command-not-found", "command-not-executable")
    for error, code in (
        (PolicyError("x"), 126),
        *((PolicyError("x", code=usage), 2) for usage in ("usage", "no-command")),
        (ProtectionUnavailable("x"), 126),
        (BusyError("x"), 126),
        (SandboxError("x"), 125),
        *((SandboxError("x", code=word), 127) for word in not_found),
    ):
        assert main.exit_code(error) == code


def test_summary_of_nothing_unusual() -> None:
    """A command that just worked needs no words."""
    assert render.summary(Result(exit_code=0, applied=Applied(created=3, changes=("created a",)))) == []


def test_lines_that_would_allow() -> None:
    """One line stands behind what was denied; several stand alone, below the option."""
    one = Denial(what="a:22 (not-listed)", certain=True, kind="network", allow='network.allow = ["b"]')
    assert render.summary(Result(exit_code=1, denials=(one,))) == [
        'casemate: denied: network a:22 (not-listed); would be allowed by: network.allow = ["b"]'
    ]
    lines = 'network.mode = "allowlist"\nnetwork.allow = ["a.example", "[2606:4700::1]:8080"]'
    more = Denial(what="a.example, [2606:4700::1]:8080", certain=False, kind="network", allow=lines)
    assert render.summary(Result(exit_code=1, denials=(more,))) == [
        "casemate: probably denied: network a.example, [2606:4700::1]:8080; would be allowed by "
        "--allow a.example --allow '[2606:4700::1]:8080', or in a policy by:",
        '    network.mode = "allowlist"',
        '    network.allow = ["a.example", "[2606:4700::1]:8080"]',
    ]
    other = Denial(what="x", certain=False, kind="write", allow='a = 1\nb = "\x1b[2J"')
    assert render.summary(Result(exit_code=1, denials=(other,))) == [
        "casemate: probably denied: write x; would be allowed by:", "    a = 1", '    b = "\\x1b[2J"'
    ]  # fmt: skip


def test_long_lists_are_cut() -> None:
    """A person is shown the first few of many, and how many more there are; the report has them all."""
    result = Result(exit_code=0, applied=Applied(executables=tuple(f"bin/{n}" for n in range(25))))
    lines = render.summary(result)
    assert lines[0] == "casemate: changed executables: 25"
    assert lines[-1].strip() == "… and 15 more"
    assert len(json.loads(render.as_json(result))["applied"]["executables"]) == 25
