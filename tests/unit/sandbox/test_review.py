"""Programs that answer questions about hosts, and what is remembered of their answers."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from casemate.sandbox import review
from casemate.sandbox.review import Program, Saved, question_text
from tests.cli.harness import alive, until

if TYPE_CHECKING:
    from collections.abc import Callable

QUESTION: dict[str, object] = {"kind": "network", "host": "a.example", "port": 443, "protocol": "https"}
Answer = tuple[bool, str]


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], Program]:
    """Makes a reviewer of a shell script."""

    def make(script: str) -> Program:
        path = tmp_path / "reviewer"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return Program([str(path)])

    return make


def answer(made: Program, question: dict[str, object] = QUESTION, seconds: float = 10) -> Answer:
    """The answer to one question."""
    answers: list[Answer] = []
    made.ask(question, lambda allow, scope: answers.append((allow, scope)))
    until(lambda: made.poll() or answers, seconds)  # type: ignore[func-returns-value]
    assert not made.busy
    made.poll()
    assert len(answers) == 1
    return answers[0]


@pytest.mark.parametrize(("said", "found"), [
    ('{"decision": "allow"}', (True, "once")), ('{"decision": "allow", "scope": "once"}', (True, "once")),
    ('{"decision": "allow", "scope": "session"}', (True, "session")),
    ('{"decision": "allow", "scope": "saved", "why": "x"}', (True, "saved")),
    ('{"decision": "deny"}', (False, "once")),
    ('{"decision": "allow", "scope": "for ever"}', (False, "once")),
    ('{"decision": "allow", "scope": 5}', (False, "once")), ('{"decision": true}', (False, "once")),
    ('{"decision": "ALLOW"}', (False, "once")), ('["allow"]', (False, "once")),
    ("allow", (False, "once")),
    ("", (False, "once")), ('{"decision": "allow"} {}', (False, "once")), ("\\377", (False, "once")),
])  # fmt: skip
def test_answers(program: Callable[[str], Program], said: str, found: Answer) -> None:
    """A clear yes is one; anything else is a no."""
    assert answer(program(f"cat >/dev/null; printf '%b' '{said}'")) == found


def test_the_question(program: Callable[[str], Program], tmp_path: Path) -> None:
    """The program gets the question as one line of JSON, and decides by it."""
    made = program(
        f'read line; echo "$line" >>{tmp_path}/asked; '
        "case $line in *a.example*) echo '{\"decision\": \"allow\"}';; *) echo '{}';; esac"
    )
    assert answer(made) == (True, "once")
    assert answer(made, {**QUESTION, "host": "b.example"}) == (False, "once")
    lines = [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]
    assert lines == [{"version": 1, **QUESTION}, {"version": 1, **QUESTION, "host": "b.example"}]


@pytest.mark.parametrize("script", [
    "echo '{\"decision\": \"allow\"}'; exit 1", "echo '{\"decision\": \"allow\"}'; kill -9 $$", "exit 0",
    "head -c 100000 /dev/zero",
])  # fmt: skip
def test_programs_that_fail(program: Callable[[str], Program], script: str) -> None:
    """A yes of a program that fails is none, and neither is an answer without end."""
    assert answer(program(script)) == (False, "once")


def test_no_program(tmp_path: Path) -> None:
    """A program that is not there, or cannot be started, says no at once."""
    (tmp_path / "text").write_text("no program")
    for path in (tmp_path / "nobody", tmp_path / "text", tmp_path):
        answers: list[Answer] = []
        Program([str(path)]).ask(QUESTION, lambda *said, to=answers: to.append(said))  # type: ignore[misc]
        assert answers == [(False, "once")]


def test_nobody_is_waited_for(program: Callable[[str], Program], tmp_path: Path) -> None:
    """Asking and polling never wait: not for a slow program, nor for one that hangs up and runs on."""
    made = program(f"exec >&- ; echo $$ >{tmp_path}/pid; exec sleep 30")
    answers: list[Answer] = []
    began = time.monotonic()
    made.ask(QUESTION, lambda *said: answers.append(said))
    until((tmp_path / "pid").exists)
    for _ in range(20):
        made.poll()
    assert time.monotonic() - began < 2
    assert made.busy
    assert answers == []
    pid = int(until(lambda: (tmp_path / "pid").read_text().strip()))
    made.close()
    assert answers == [(False, "once")]
    assert not alive(pid)


def test_no_answer_in_time(program: Callable[[str], Program], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that says nothing is ended after its time; that is a no."""
    monkeypatch.setattr(review, "_SECONDS", 0.2)
    assert answer(program("exec sleep 30"), seconds=5) == (False, "once")


def test_several_at_a_time(program: Callable[[str], Program]) -> None:
    """Questions are answered as their programs end, each its own."""
    made = program('read line; case $line in *slow*) sleep 0.3;; esac; echo \'{"decision": "allow"}\'')
    answers: list[str] = []
    for host in ("slow.example", "quick.example"):
        made.ask({**QUESTION, "host": host}, lambda *_, host=host: answers.append(host))  # type: ignore[misc]
    until(lambda: made.poll() or len(answers) == 2)  # type: ignore[func-returns-value]
    assert answers == ["quick.example", "slow.example"]


def _children() -> set[int]:
    """This process's children, dead ones that nobody has waited for among them."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def test_nothing_is_left(program: Callable[[str], Program]) -> None:
    """No descriptor and no process stays of questions that were answered, failed or given up."""
    before, others = len(os.listdir("/proc/self/fd")), _children()
    for script in ('echo \'{"decision": "allow"}\'', "exit 3", "echo no"):
        answer(program(script))
    made = program("exec sleep 30")
    for _ in range(3):
        made.ask(QUESTION, lambda *_: None)
    made.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert _children() <= others


def test_question_text() -> None:
    """A person reads host and port."""
    assert question_text(QUESTION) == "the command wants to reach a.example:443"


# -- what is remembered --------------------------------------------------------------------------------


def test_saved(tmp_path: Path) -> None:
    """Rules are remembered in their order, each once, in a file that is the user's alone."""
    saved = Saved(str(tmp_path / "state" / "hosts.json"))
    assert saved.rules() == ()
    for rule in ("a.example:443", "b.example:443", "a.example:443"):
        saved.add(rule)
    assert Saved(str(tmp_path / "state" / "hosts.json")).rules() == ("a.example:443", "b.example:443")
    assert (tmp_path / "state" / "hosts.json").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert os.listdir(tmp_path / "state") == ["hosts.json"]


@pytest.mark.parametrize("content", ["", "{}", "5", "not json", "[", '{"a": 1}', "\x00"])
def test_what_cannot_be_read_allows_nothing(tmp_path: Path, content: str) -> None:
    """A broken file allows nothing, and is made good by the next answer."""
    path = tmp_path / "hosts.json"
    path.write_text(content)
    saved = Saved(str(path))
    assert saved.rules() == ()
    saved.add("a.example:443")
    assert saved.rules() == ("a.example:443",)


def test_saved_is_bounded(tmp_path: Path) -> None:
    """The oldest are forgotten behind the bound."""
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps([f"h{n}.example:443" for n in range(review._MOST_SAVED)]))
    saved = Saved(str(path))
    saved.add("new.example:443")
    rules = saved.rules()
    assert len(rules) == review._MOST_SAVED
    assert rules[-1] == "new.example:443"
    assert rules[0] == "h1.example:443"


def test_no_link_is_followed(tmp_path: Path) -> None:
    """What stands in the way of the new file is not written to."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = tmp_path / "hosts.json"
    Path(f"{path}.{os.getpid()}").symlink_to(victim)
    with pytest.raises(OSError, match=r".+"):
        Saved(str(path)).add("a.example:443")
    assert victim.read_text() == "precious"
