"""Questions about hosts that no rule names: a program or a person answers, for as long as the answer says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.cli.harness import daemon_pid, until
from tests.cli.terminal import Terminal
from tests.security.lab import give

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cli.harness import Caller, Ended
    from tests.network.lab import Lab

pytestmark = [pytest.mark.security, pytest.mark.root]

GET = "curl -fsS --max-time 20 -o /dev/null -w '%{{http_code}}\\n' http://{}/"


class Reviewer:
    """A program that answers by a shell's case on the host's name; ``asked`` are its questions so far."""

    def __init__(self, caller: Caller, cases: str) -> None:
        self.place = caller.base / f"reviewer{caller.count}"
        self.place.mkdir()
        self.program = self.place / "program"
        log = self.place / "asked"
        self.program.write_text(
            f'#!/bin/sh\nread -r line\necho "$line" >>{log}\ncase $line in {cases} esac\necho "{{}}"\n'
        )
        self.program.chmod(0o755)
        give(self.place, caller.uid)
        self._log = log

    @property
    def asked(self) -> list[str]:
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [f"{q['host']}:{q['port']}" for q in map(json.loads, lines)]


def yes(scope: str) -> str:
    """What a program writes that approves."""
    return f'echo \'{{"decision": "allow", "scope": "{scope}"}}\'; exit 0'


def run(caller: Caller, ws: Path, reviewer: Reviewer, script: str, *flags: str) -> Ended:
    """A script whose hosts the program decides about."""
    words = ("--ask", "--allow", "also.example", "--reviewer", str(reviewer.program), *flags)
    return caller.sh(ws, script, flags=words)


@pytest.fixture
def ws(caller: Caller) -> Path:
    """A workspace."""
    return caller.workspace()


def test_a_program_decides(lab: Lab, caller: Caller, ws: Path) -> None:
    """It is asked about what no rule names, once for a host and port, and about nothing that one does."""
    reviewer = Reviewer(caller, f"*allowed.example*) {yes('session')};;")
    hosts = ("allowed.example", "allowed.example", "also.example", "other.example", "other.example")
    script = "; ".join(GET.format(host) for host in (*hosts, "allowed.example:8080"))
    mark = lab.mark()
    ended = run(caller, ws, reviewer, script, "--json")
    assert ended.err.count(b"200\n") == 4, ended
    assert reviewer.asked == ["allowed.example:80", "other.example:80", "allowed.example:8080"]
    events = lab.since(mark)
    assert not [e for e in events if e["kind"] == "dns" and "other" in e["name"]]
    reasons = [e.get("reason") for e in ended.json["network"]["events"] if e["host"] == "other.example"]
    assert "not-approved" in reasons


def test_once(caller: Caller, ws: Path) -> None:
    """A yes for once is asked about again."""
    reviewer = Reviewer(caller, f"*) {yes('once')};;")
    ended = run(caller, ws, reviewer, f"{GET.format('allowed.example')}; {GET.format('allowed.example')}")
    assert ended.out == b"200\n200\n", ended
    assert reviewer.asked == ["allowed.example:80"] * 2


def test_saved(caller: Caller, ws: Path) -> None:
    """A yes for good holds for the next command in this workspace, and in no other."""
    reviewer = Reviewer(caller, f"*) {yes('saved')};;")
    for _ in range(2):
        assert run(caller, ws, reviewer, GET.format("allowed.example")).out == b"200\n"
    assert reviewer.asked == ["allowed.example:80"]
    assert run(caller, caller.workspace(), reviewer, GET.format("allowed.example")).out == b"200\n"
    assert len(reviewer.asked) == 2
    # What is denied stays so, whatever was saved.
    ended = run(caller, ws, reviewer, GET.format("allowed.example"), "--deny-host", "allowed.example")
    assert ended.code != 0
    assert len(reviewer.asked) == 2


def test_programs_that_are_no_use(caller: Caller, ws: Path) -> None:
    """One that fails, says rubbish or is not there is a no, and keeps nobody waiting; the command goes on."""
    for case in ("*) exit 3;;", "*) echo rubbish; exit 0;;", "*) kill -9 $$;;"):
        ended = run(caller, ws, Reviewer(caller, case), f"{GET.format('allowed.example')}; echo on")
        assert ended.out.endswith(b"on\n"), ended
        assert b"200" not in ended.out
        caller.count += 1
    gone = Reviewer(caller, "*) exit 0;;")
    gone.program.unlink()
    assert run(caller, ws, gone, f"{GET.format('allowed.example')}; echo on").out.endswith(b"on\n")


def test_the_command_is_killed_while_it_asks(caller: Caller, ws: Path) -> None:
    """A question whose command has ended is given up, with its program."""
    reviewer = Reviewer(caller, "*) exec sleep 60;;")
    flags = ("--ask", "--allow", "also.example", "--reviewer", str(reviewer.program), "--timeout", "2s")
    ended = caller.sh(ws, GET.format("allowed.example"), flags=flags)
    assert ended.code == 124, ended
    assert reviewer.asked == ["allowed.example:80"]


@pytest.fixture
def resident(caller: Caller) -> Iterator[None]:
    """A daemon on the lab host."""
    assert caller.cli("daemon", "start", cwd="/").code == 0
    assert daemon_pid(caller)
    yield
    caller.cli("daemon", "stop", cwd="/")


def test_beside_a_daemon(caller: Caller, ws: Path, resident: None) -> None:
    """A resident daemon changes nothing of it: who asks is answered by the caller's own program."""
    reviewer = Reviewer(caller, f"*) {yes('once')};;")
    assert run(caller, ws, reviewer, GET.format("allowed.example")).out == b"200\n"
    assert reviewer.asked == ["allowed.example:80"]


@pytest.fixture
def terminal(caller: Caller) -> Iterator[Terminal]:
    """A terminal on the lab host."""
    made = Terminal(caller)
    yield made
    made.close()


ANSWERS = {"yes": True, "session": True, "y": False, "": False, "yes please": False}


@pytest.mark.parametrize(("answer", "reached"), ANSWERS.items())
def test_a_person_decides(caller: Caller, ws: Path, terminal: Terminal, answer: str, reached: bool) -> None:
    """Whoever sits at the terminal is asked; the next line is the answer, and no input of the command."""
    script = f'{GET.format("allowed.example")}; read -r line; echo "got <$line>"'
    terminal.start(ws, "run", "--no-daemon", "--ask", "--allow", "also.example", "--", "sh", "-c", script)
    terminal.expect(rb"wants to reach allowed\.example:80.*\? ")
    terminal.type(answer.encode() + b"\r")
    terminal.expect(rb"200\r\n" if reached else rb"40\d|error|curl")
    terminal.type(b"input\r")
    terminal.expect(rb"got <input>")
    assert terminal.end() == 0
    assert (b"200\r\n" in terminal.text) is reached


def test_nobody_decides_any_more(caller: Caller, ws: Path, terminal: Terminal) -> None:
    """A command that ends while its question is on the screen leaves a terminal as it was."""
    script = f"({GET.format('allowed.example')}) & sleep 1; exit 5"
    terminal.start(ws, "run", "--no-daemon", "--ask", "--allow", "also.example", "--", "sh", "-c", script)
    modes = terminal.modes()
    terminal.expect(rb"wants to reach allowed\.example:80")
    assert terminal.end() == 5
    until(lambda: terminal.modes() == modes)
