"""``run --apply ask`` at a terminal: what is shown, what each answer does, and what is no answer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.harness import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.harness import Caller
    from tests.cli.terminal import Terminal

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("traceless")]

ASKS = rb"apply them\? y\(es\)[^\r\n]*: "
WORK = "echo 2 >>mod; echo n >new.py; echo x >.envrc; exit 7"


@pytest.fixture
def project(caller: Caller, ws: Path) -> Path:
    """A workspace with one file."""
    caller.file(ws / "mod", "1\n")
    return ws


def begin(terminal: Terminal, ws: Path, script: str = WORK, *flags: str) -> None:
    """Run a command, up to the question."""
    terminal.start(ws, "run", "--apply", "ask", *flags, "--", "/bin/sh", "-c", script)
    terminal.expect(ASKS)


def say(terminal: Terminal, answer: bytes) -> None:
    """Answer the question that is open; what was printed before is forgotten."""
    terminal.text = b""
    terminal.type(answer)


def waiting(caller: Caller, ws: Path) -> list[str]:
    """The paths that wait."""
    found: list[dict[str, Any]] = caller.cli("changes", "--json", cwd=ws).json["pending"]
    return [path for item in found for _, path in item["changes"]]


def forget(caller: Caller, ws: Path) -> None:
    """Throw away all that is kept."""
    found = caller.cli("changes", "--json", cwd=ws).json
    for item in (*found["pending"], *found["interrupted"]):
        assert caller.cli("discard", item["name"], cwd=ws).code == 0
    for item in found["held"]:
        assert caller.cli("discard", item["name"], "--all", cwd=ws).code == 0


def test_yes(caller: Caller, project: Path, terminal: Terminal) -> None:
    """List and diff are shown, yes applies, what is protected is held back; the code is the command's."""
    before = terminal.modes()
    begin(terminal, project)
    text = terminal.read()
    for line in (rb"3 change\(s\) wait for", rb"modified.*mod", rb"\+\+\+ b/new.py", rb"back: protected"):
        assert re.search(line, text), (line, text)
    assert (project / "mod").read_text() == "1\n"
    say(terminal, b"y\n")
    assert terminal.end() == 7
    assert (project / "mod").read_text() == "1\n2\n"
    assert sorted(os.listdir(project)) == ["mod", "new.py"]
    assert terminal.modes() == before
    assert waiting(caller, project) == []
    forget(caller, project)


@pytest.mark.parametrize("answer", [b"n\n", b"q\n", b"\n", b"\x04", b"\x03"])
def test_not_now(caller: Caller, project: Path, terminal: Terminal, answer: bytes) -> None:
    """No, quit, an empty line, the end of input and Ctrl-C leave everything to wait, and say how to go on."""
    begin(terminal, project)
    say(terminal, answer)
    assert terminal.end() == 7
    assert b"`casemate apply` applies them" in terminal.read(), terminal.text
    assert (project / "mod").read_text() == "1\n"
    assert waiting(caller, project) == [".envrc", "mod", "new.py"]
    forget(caller, project)


def test_diff_and_select(caller: Caller, project: Path, terminal: Terminal) -> None:
    """``d`` shows the texts, ``s`` applies what is named and asks about the rest; a word that means nothing
    applies nothing.
    """
    begin(terminal, project, "for n in $(seq 100); do echo $n; done >long; " + WORK)
    assert b"+++ b/long" not in terminal.read(), "a long diff is not shown unasked"
    say(terminal, b"d\n")
    terminal.expect(rb"\+\+\+ b/long.*\+100[^0-9].*" + ASKS)
    say(terminal, b"s\n")
    terminal.expect(rb"as --only takes them: ")
    say(terminal, b"nosuch\n")
    terminal.expect(rb"nothing has changed under nosuch.*" + ASKS)
    assert sorted(os.listdir(project)) == ["mod"]
    say(terminal, b"s\n")
    terminal.expect(rb"as --only takes them: ")
    say(terminal, b"'*.py' long\n")
    terminal.expect(rb"2 change\(s\) wait for an answer.*" + ASKS)
    assert sorted(os.listdir(project)) == ["long", "mod", "new.py"]
    assert (project / "mod").read_text() == "1\n"
    say(terminal, b"q\n")
    assert terminal.end() == 7
    assert waiting(caller, project) == [".envrc", "mod"]
    forget(caller, project)


@pytest.mark.parametrize("rubbish", [b"yy\n", b"y n\n", b"\x1b]lyes\x1b\\y\n", b"y\x07\n", b"Y\n", b"y!\n"])
def test_what_is_no_answer(caller: Caller, project: Path, terminal: Terminal, rubbish: bytes) -> None:
    """Only the words themselves count: a terminal's answers to escapes that were printed before do not."""
    begin(terminal, project)
    say(terminal, rubbish)
    terminal.expect(rb"that is no answer.*" + ASKS)
    assert (project / "mod").read_text() == "1\n"
    say(terminal, b"yes\n")
    assert terminal.end() == 7
    assert (project / "mod").read_text() == "1\n2\n"
    forget(caller, project)


def test_typed_before_the_question(caller: Caller, project: Path, terminal: Terminal) -> None:
    """What was typed while the command ran, for it or too early, answers nothing."""
    terminal.start(project, "run", "--apply", "ask", "--", "/bin/sh", "-c", "echo up; read x; echo 2 >>mod")
    terminal.expect(rb"up")
    terminal.type(b"y\ny\ny\ny\n")
    terminal.expect(ASKS)
    assert (project / "mod").read_text() == "1\n"
    say(terminal, b"n\n")
    assert terminal.end() == 0
    assert waiting(caller, project) == ["mod"]
    forget(caller, project)


def test_the_terminal_is_put_in_order(caller: Caller, project: Path, terminal: Terminal) -> None:
    """A command that leaves its text invisible, or the screen in a corner, does not hide the question."""
    script = r"printf '\033[8m\033[30;40m\033[5;6r\033(0\016\033[?25l'; echo 2 >>mod"
    begin(terminal, project, script)
    text = terminal.read()
    order = b"\x0f\x1b(B\x1b[m\x1b[?1049l\x1b[?69l\x1b[?6l\x1b[4l\x1b[r"
    order += b"\x1b]104\x07\x1b]110\x07\x1b]111\x07\x1b[?7h\x1b[?25h\x1b[999;1H"
    assert text.index(b"\x1b[8m") < text.index(order) < text.index(b"wait for an answer")
    say(terminal, b"y\n")
    assert terminal.end() == 0
    assert (project / "mod").read_text() == "1\n2\n"


def test_hostile_changes_at_the_question(caller: Caller, project: Path, terminal: Terminal) -> None:
    """Names and lines that would move the cursor or paint an answer are shown as escapes there, too."""
    script = r"printf 'a\033[2A\033[2Kcasemate: nothing to apply\n' >new; : >\"$(printf 'n\033[2J')\""
    begin(terminal, project, script)
    text = terminal.read()
    text = text[text.index(b"wait for an answer") :]
    assert rb"a\x1b[2A\x1b[2Kcasemate" in text, text
    assert b"\x1b[2" not in text
    say(terminal, b"q\n")
    assert terminal.end() == 0
    forget(caller, project)


def test_nothing_to_ask(caller: Caller, project: Path, terminal: Terminal) -> None:
    """A command that changed nothing is followed by no question."""
    terminal.start(project, "run", "--apply", "ask", "--", "/bin/cat", "mod")
    assert terminal.end() == 0
    assert b"apply them" not in terminal.read()


def test_json_stays_alone_on_stdout(caller: Caller, project: Path, terminal: Terminal) -> None:
    """With --json the question is on the terminal, the one object on stdout, and it tells what was done."""
    words = ("run", "--apply", "ask", "--json", "--", "/bin/sh", "-c", "echo 2 >>mod; echo n >new")
    terminal.start(project, *words, stdout=subprocess.PIPE)
    terminal.expect(ASKS)
    say(terminal, b"s\n")
    terminal.expect(rb"as --only takes them: ")
    say(terminal, b"new\n")
    terminal.expect(ASKS)
    say(terminal, b"y\n")
    assert terminal.process is not None
    assert terminal.process.stdout is not None
    out = terminal.process.stdout.read()
    assert terminal.end() == 0
    assert out.count(b"\n") == 1
    assert b'"created":1,"modified":1,"deleted":0,"changes":["created new","modified mod"]' in out, out
    assert b'"pending":""' in out or b'"pending"' not in out


def test_killed_at_the_question(caller: Caller, project: Path, terminal: Terminal) -> None:
    """kill -9 while the question is open loses nothing."""
    begin(terminal, project)
    assert terminal.process is not None
    # The leader of the terminal's session is the shell that entered the den; its child may be Casemate.
    os.killpg(terminal.process.pid, signal.SIGKILL)
    until(lambda: terminal.process is not None and terminal.process.poll() is not None)
    assert waiting(caller, project) == [".envrc", "mod", "new.py"]
    assert caller.cli("apply", cwd=project).code == 0
    assert (project / "mod").read_text() == "1\n2\n"
    forget(caller, project)
    caller.groups_cleaned_by(project)
