"""With a terminal: the command has one of its own, and it behaves like its caller's."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import termios
import time
from typing import TYPE_CHECKING

import pytest

from tests.cli.harness import PYTHON, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.harness import Caller
    from tests.cli.terminal import Terminal

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("traceless")]


def test_the_command_has_a_terminal(caller: Caller, ws: Path, terminal: Terminal) -> None:
    """All three streams are one terminal, the controlling one, and it is not the caller's."""
    before = terminal.modes()
    terminal.start(
        ws, "run", "--", "/bin/sh", "-c", "tty; test -t 0 && test -t 1 && test -t 2 && echo three; exit 4"
    )
    assert terminal.end() == 4
    text = terminal.read().replace(b"\r\n", b"\n")
    assert re.fullmatch(rb"/dev/pts/\d+\nthree\n", text), text
    assert terminal.modes() == before, "the caller's terminal is given back as it was"


def test_no_terminal_when_output_is_redirected(caller: Caller, ws: Path, terminal: Terminal) -> None:
    """``casemate run -- cmd >file`` has no terminal; --tty yes asks for one, --tty no for none."""
    probe = ("--", "/bin/sh", "-c", "test -t 0 && echo in; test -t 1 && echo out; echo done")
    terminal.start(ws, "run", *probe, stdout=subprocess.PIPE)
    assert terminal.process is not None
    assert terminal.process.stdout is not None
    assert terminal.process.stdout.read() == b"done\n"
    assert terminal.end() == 0
    assert caller.cli("run", *probe, cwd=ws).out == b"done\n"
    assert caller.cli("run", "--tty", "yes", *probe, cwd=ws).out == b"in\r\nout\r\ndone\r\n"
    terminal.start(ws, "run", "--tty", "no", *probe)
    assert terminal.end() == 0
    assert terminal.read().replace(b"\r\n", b"\n") == b"done\n"


def test_terminal_without_one_outside(caller: Caller, ws: Path) -> None:
    """--tty yes from pipes: input arrives, its end too (also after half a line), and there is a size."""
    for data, want in ((b"line\n", b"5"), (b"half", b"4")):
        ended = caller.sh(ws, "cat | wc -c; stty size", flags=("--tty", "yes"), stdin=data)
        assert ended.code == 0, ended
        assert ended.out.endswith(want + b"\r\n24 80\r\n"), ended  # before it, the echo


def test_window_size(caller: Caller, ws: Path, terminal: Terminal) -> None:
    """The size is the caller's from the start, and a change arrives with its signal."""
    terminal.resize(31, 97)
    terminal.start(
        ws,
        "run",
        "--",
        "/bin/bash",
        "-c",
        "trap 'stty size; exit' WINCH; stty size; while :; do sleep 0.1; done",
    )
    terminal.expect(rb"31 97")
    terminal.resize(40, 132)
    terminal.expect(rb"40 132")
    assert terminal.end() == 0


def test_raw_mode_while_it_runs_and_after(caller: Caller, ws: Path, terminal: Terminal) -> None:
    """The caller's terminal is raw while the command runs and as it was afterwards, also after a kill."""
    before = terminal.modes()
    terminal.start(ws, "run", "--", "/bin/sh", "-c", "echo up; read x; echo got $x; kill -9 $$")
    terminal.expect(rb"up\r\n")
    assert not terminal.modes()[3] & (termios.ICANON | termios.ECHO | termios.ISIG)
    terminal.type(b"word\r")
    assert terminal.end() == 137
    assert b"word\r\ngot word\r\n" in terminal.read(), "echo and line ends are the inner terminal's work"
    assert terminal.modes() == before


def test_terminal_is_restored_on_an_error(caller: Caller, ws: Path, terminal: Terminal) -> None:
    """When the command cannot be started the terminal is as before, and the message is readable."""
    before = terminal.modes()
    terminal.start(ws, "run", "--", "no-such-program")
    assert terminal.end() == 127
    assert terminal.modes() == before
    assert b"[command-not-found]" in terminal.read()


def test_interrupt(caller: Caller, ws: Path, terminal: Terminal) -> None:
    """Ctrl-C interrupts the command; one that handles it goes on."""
    terminal.start(ws, "run", "--", "/bin/sh", "-c", "echo up; exec sleep 60")
    terminal.expect(rb"up\r\n")
    terminal.type(b"\x03")
    assert terminal.end() == 130


def test_interrupt_that_is_handled(caller: Caller, ws: Path, terminal: Terminal) -> None:
    """A command that answers each Ctrl-C is not killed, however often it is pressed."""
    script = (
        "import signal, time\nn = 0\n"
        "def note(*_):\n    global n\n    n += 1\n    print('answer', n, flush=True)\n"
        "signal.signal(2, note)\nprint('up', flush=True)\n"
        "while n < 4: time.sleep(0.05)\nprint('well', flush=True)\n"
    )
    terminal.start(ws, "run", "--", PYTHON, "-I", "-S", "-c", script)
    terminal.expect(rb"up\r\n")
    for number in range(1, 5):
        terminal.type(b"\x03")
        terminal.expect(b"answer %d\r\n" % number)
    terminal.expect(b"well")
    assert terminal.end() == 0


def test_two_interrupts_kill(caller: Caller, ws: Path, terminal: Terminal) -> None:
    """Two Ctrl-C in a row end a command that does not listen; its echo is not taken for an answer."""
    before = terminal.modes()
    terminal.start(ws, "run", "--", "/bin/sh", "-c", "trap '' INT; echo up; while :; do sleep 1; done")
    terminal.expect(rb"up\r\n")
    terminal.type(b"\x03")
    terminal.expect(rb"\^C")
    assert terminal.process is not None
    assert terminal.process.poll() is None
    terminal.type(b"\x03")
    assert terminal.end() == 137
    assert terminal.modes() == before


def test_interrupt_as_a_key(caller: Caller, ws: Path, terminal: Terminal) -> None:
    """In raw mode Ctrl-C is a key like any other: an editor gets both of two."""
    script = (
        "import os, tty\ntty.setraw(0)\nos.write(1, b'up\\r\\n')\n"
        "got = b''\nwhile len(got) < 3: got += os.read(0, 1)\nos.write(1, repr(got).encode())\n"
    )
    terminal.start(ws, "run", "--", PYTHON, "-I", "-S", "-c", script)
    terminal.expect(rb"up\r\n")
    terminal.type(b"\x03")
    terminal.type(b"\x03\x1a")
    terminal.expect(rb"b'\\x03\\x03\\x1a'")
    assert terminal.end() == 0


def test_end_of_input(caller: Caller, ws: Path, terminal: Terminal) -> None:
    """Ctrl-D ends the command's input and not more."""
    terminal.start(ws, "run", "--", "/bin/sh", "-c", "echo up; cat; echo after; cat; echo end")
    terminal.expect(rb"up\r\n")
    terminal.type(b"one\r\x04")
    terminal.expect(rb"one\r\none\r\nafter\r\n")
    terminal.type(b"\x04")
    assert terminal.end() == 0
    assert terminal.read().endswith(b"end\r\n")


def test_job_control_of_a_shell(caller: Caller, ws: Path, terminal: Terminal) -> None:
    """An interactive shell has job control: Ctrl-Z stops its child, fg brings it back, exit ends all."""
    terminal.start(
        ws, "run", "--env", "PS1=$ ", "--env", "HISTFILE=", "--", "/bin/bash", "--norc", "--noprofile", "-i"
    )
    # What is typed before bash is ready gets lost, with any terminal.
    until(lambda: terminal.type(b"\r") or terminal.read().count(b"$ ") > 2)
    terminal.type(b"echo mark$((20+2)); cat\r")
    terminal.expect(rb"mark22")
    terminal.type(b"hello\r")
    terminal.expect(rb"hello\r\nhello\r\n")
    terminal.type(b"\x1a")
    terminal.expect(rb"Stopped")
    terminal.type(b"jobs; echo mark$((20+3))\r")
    terminal.expect(rb"mark23")
    terminal.type(b"fg\r")
    terminal.expect(rb"fg\r\n.*cat\r\n$")
    terminal.type(b"again\r")
    terminal.expect(rb"again\r\nagain\r\n")
    terminal.type(b"\x03")
    terminal.expect(rb"\^C.*\$ $")
    terminal.type(b"exit 9\r")
    assert terminal.end() == 9
    assert b"no job control" not in terminal.read()


def test_stop_and_go_on(caller: Caller, ws: Path, terminal: Terminal) -> None:
    """A stop of Casemate (SIGTSTP) stops the command, gives the terminal back, and SIGCONT undoes both."""
    before = terminal.modes()
    terminal.start(
        ws, "run", "--", "/bin/sh", "-c", "echo up; while [ ! -e go ]; do sleep 0.02; done; echo went"
    )
    terminal.expect(rb"up\r\n")
    assert terminal.process is not None
    pid = terminal.process.pid
    terminal.process.send_signal(signal.SIGTSTP)
    until(lambda: os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT), 10, "Casemate has stopped")
    assert terminal.modes() == before
    assert any(_state(process) == "T" for process in caller.processes()), "the command has stopped"
    terminal.process.send_signal(signal.SIGCONT)
    until(lambda: not terminal.modes()[3] & termios.ICANON, 10, "the terminal is raw again")
    terminal.type(b"x")
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == 143
    assert terminal.modes() == before


def _state(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]
    return ""


def test_hang_up(caller: Caller, ws: Path, terminal: Terminal) -> None:
    """When the terminal is closed the command is told and ends, and so does Casemate."""
    terminal.start(ws, "run", "--", "/bin/sh", "-c", "echo up; exec sleep 60")
    terminal.expect(rb"up\r\n")
    os.close(terminal.master)
    os.close(terminal.slave)
    assert terminal.process is not None
    process = terminal.process
    until(lambda: process.poll() is not None, 15, "the end")
    assert caller.end(process) == 128 + signal.SIGHUP


def test_much_output(caller: Caller, ws: Path, terminal: Terminal) -> None:
    """Output of some hundred KiB arrives whole and in order."""
    terminal.start(ws, "run", "--", "/usr/bin/seq", "1", "40000")
    assert terminal.end(40) == 0
    assert terminal.read().split() == [str(n).encode() for n in range(1, 40001)]


def test_much_input(caller: Caller, ws: Path, terminal: Terminal) -> None:
    """A large paste into a program that reads slowly arrives whole."""
    script = (
        "import os, time, tty\ntty.setraw(0)\nos.write(1, b'up\\r\\n')\ntotal = 0\n"
        "while total < 200000: total += len(os.read(0, 1000))\nos.write(1, b'sum %d' % total)\n"
    )
    terminal.start(ws, "run", "--", PYTHON, "-I", "-S", "-c", script)
    terminal.expect(rb"up\r\n")
    os.set_blocking(terminal.master, False)
    left = b"p" * 200_000
    end = time.monotonic() + 30
    while left and time.monotonic() < end:
        select.select([terminal.master], [terminal.master], [], 1)
        with contextlib.suppress(BlockingIOError):
            left = left[os.write(terminal.master, left[:4096]) :]
        terminal.read()
    terminal.expect(rb"sum 200000")
    assert terminal.end() == 0
