"""What runs by way of the daemon: streams, terminals, signals, ends of everybody who takes part."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from tests.cli.harness import PYTHON, alive, daemon_pid, family, until

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from tests.cli.harness import Caller
    from tests.cli.terminal import Terminal

pytestmark = [pytest.mark.root]


def start(caller: Caller, ws: Path, script: str, *flags: str) -> subprocess.Popen[bytes]:
    """The script by way of the daemon, up to the point where it says ``up``."""
    process = caller.start("run", *flags, "--", "/bin/sh", "-c", script, cwd=ws)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == b"up\n", line + (process.stderr.read() if process.stderr else b"")
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        assert file.read() == "", "the client has no sandbox of its own"
    return process


def test_streams(caller: Caller, ws: Path, daemon: int) -> None:
    """Input and both outputs pass whole, with their ends; closed descriptors are no mix-up."""
    data = os.urandom(3 << 20)
    ended = caller.sh(ws, "cat; echo err >&2", stdin=data)
    assert hashlib.sha256(ended.out).digest() == hashlib.sha256(data).digest()
    assert ended.err == b"err\n"
    for closed in ("<&-", ">&-", "<&- >&- 2>&-"):
        before = ("/bin/sh", "-c", f'exec "$0" "$@" {closed}')
        ended = caller.sh(ws, "cat; echo out; : >made; exit 6", before=before)
        assert ended.code == 6, (closed, ended)
        (ws / "made").unlink()
    process = caller.start("run", "--", "/usr/bin/yes", cwd=ws)
    assert process.stdout is not None
    assert process.stdout.read(2) == b"y\n"
    process.stdout.close()
    assert caller.end(process) == 141


def test_terminal(caller: Caller, ws: Path, daemon: int, terminal: Terminal) -> None:
    """A terminal works through the daemon: its own, sized, raw meanwhile, restored; Ctrl-C, Ctrl-D."""
    before = terminal.modes()
    terminal.resize(33, 99)
    terminal.start(ws, "run", "--", "/bin/sh", "-c", "tty; stty size; cat; echo after; exec sleep 60")
    terminal.expect(rb"/dev/pts/\d+\r\n33 99\r\n")
    terminal.type(b"word\r\x04")
    terminal.expect(rb"word\r\nword\r\nafter\r\n")
    terminal.type(b"\x03")
    assert terminal.end() == 130
    assert terminal.modes() == before


def test_signals(caller: Caller, ws: Path, daemon: int) -> None:
    """Signals to the client reach the command, two interrupts kill it, a stop stops it."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        process = start(caller, ws, "echo up; exec sleep 60")
        process.send_signal(number)
        assert caller.end(process) == 128 + number
    process = start(caller, ws, "trap 'echo no' INT; echo up; while :; do sleep 0.05; done")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == b"no\n"
    process.send_signal(signal.SIGINT)
    assert caller.end(process) == 137


def test_death_of_the_client(caller: Caller, ws: Path, daemon: int) -> None:
    """kill -9 of the client ends its command; the changes are kept and offered."""
    process = start(caller, ws, "echo x >made; echo up; sleep 60 & sleep 60")
    until(lambda: any("note.json" in name for name in caller.files()), 10)
    process.kill()
    process.wait()
    until(lambda: not [pid for pid in caller.processes() if not _waits(pid)], 2, "its command is gone")
    caller.end(process)
    assert os.listdir(ws) == []
    ended = caller.sh(ws, "true")
    assert b"interrupted command(s)" in ended.err, ended
    name = caller.cli("changes", "--json", cwd=ws).json["interrupted"][0]["name"]
    assert caller.cli("apply", name, cwd=ws).code == 0
    assert os.listdir(ws) == ["made"]


def _waits(pid: int) -> bool:
    """Whether it is the init of a sandbox that was made ahead: it has no child."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return not file.read()
    except OSError:
        return True


def test_death_of_the_client_at_any_moment(caller: Caller, ws: Path, daemon: int) -> None:
    """Killed clients neither leave a command nor a lock behind, whatever the moment."""
    for step in range(12):
        process = caller.start("run", "--", "/bin/sleep", "60", cwd=ws)
        end = os.times().elapsed + 0.01 + step * 0.006
        until(lambda end=end: os.times().elapsed >= end)  # type: ignore[misc]
        process.kill()
        caller.end(process)
    until(lambda: not [pid for pid in caller.processes() if not _waits(pid)], 3)
    assert caller.sh(ws, "true", flags=("--no-wait",)).code == 0
    for item in caller.cli("changes", "--json", cwd=ws).json["interrupted"]:
        caller.cli("discard", item["name"], cwd=ws)
    assert daemon_pid(caller) == daemon


def test_death_of_the_daemon(caller: Caller, ws: Path) -> None:
    """kill -9 of the daemon ends every command; the clients say so, and the work is kept."""
    assert caller.cli("daemon", "start", cwd="/").code == 0
    relatives = family(daemon_pid(caller))
    caller.started += relatives
    process = start(caller, ws, "echo x >made; echo up; sleep 60")
    until(lambda: any("note.json" in name for name in caller.files()), 10)
    os.kill(relatives[0], signal.SIGKILL)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 125, err
    assert b"[daemon-lost]" in err, err
    assert b"Traceback" not in err, err
    until(lambda: not caller.processes(), 2, "nobody is left")
    until(lambda: not any(map(alive, relatives)), 5)
    name = caller.cli("changes", "--json", cwd=ws).json["interrupted"][0]["name"]
    assert caller.cli("apply", name, cwd=ws).code == 0
    assert os.listdir(ws) == ["made"]
    caller.clean()
    caller.groups_cleaned_by(ws)


def test_death_of_the_keeper(caller: Caller, ws: Path, daemon: int) -> None:
    """kill -9 of the daemon's keeper ends the commands, is told, and the next command has a new one."""
    keeper = family(daemon)[1]
    process = start(caller, ws, "echo up; sleep 60")
    os.kill(keeper, signal.SIGKILL)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 125, err
    assert b"[keeper-lost]" in err, err
    until(lambda: not caller.processes(), 2)
    ended = caller.sh(ws, "echo x >made")
    assert ended.code == 0, ended
    assert (ws / "made").exists()
    again = family(daemon)
    assert len(again) == 2
    assert again[1] != keeper
    caller.started.append(again[1])
    for item in caller.cli("changes", "--json", cwd=ws).json["interrupted"]:
        caller.cli("discard", item["name"], cwd=ws)
    caller.groups_cleaned_by(ws)


def test_stop_ends_every_command(caller: Caller, ws: Path) -> None:
    """``daemon stop`` while commands run ends them; nobody is left and the clients are told."""
    assert caller.cli("daemon", "start", cwd="/").code == 0
    relatives = family(daemon_pid(caller))
    caller.started += relatives
    others = [caller.workspace() for _ in range(3)]
    running = [start(caller, place, "echo up; trap '' TERM INT HUP; sleep 60") for place in (ws, *others)]
    assert caller.cli("daemon", "stop", cwd="/").code == 0
    for process in running:
        _, err = process.communicate(timeout=20)
        assert process.returncode == 125, err
        assert b"Traceback" not in err, err
    until(lambda: not caller.processes(), 3)
    until(lambda: not any(map(alive, relatives)), 5)
    caller.clean()


def test_many_clients_at_once(caller: Caller, daemon: int) -> None:
    """Twelve clients in four workspaces: each gets its own output, code and changes."""
    spaces = [caller.workspace(f"w{number}") for number in range(4)]
    results: dict[int, tuple[int, bytes]] = {}

    def run(number: int) -> None:
        script = f"echo {number}; echo {number} >>log; exit {number}"
        ended = caller.sh(spaces[number % 4], script, flags=("-q",), timeout=60)
        results[number] = (ended.code, ended.out)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: (number, b"%d\n" % number) for number in range(12)}
    for index, place in enumerate(spaces):
        assert sorted(map(int, (place / "log").read_text().split())) == [index, index + 4, index + 8]


def test_waiting_with_a_word(caller: Caller, ws: Path, daemon: int) -> None:
    """A command that waits for another one in the same workspace says so, and can be told to stop."""
    first = start(caller, ws, "echo first >file; echo up; read x")
    second = caller.start("run", "--", "/bin/cat", "file", cwd=ws)
    assert second.stderr is not None
    assert b"waiting for another command" in second.stderr.readline()
    third = caller.start("run", "--", "/bin/sh", "-c", ": >ran", cwd=ws)
    assert third.stderr is not None
    assert b"waiting for another command" in third.stderr.readline()
    third.send_signal(signal.SIGINT)
    _, err = third.communicate(timeout=20)
    assert third.returncode in (130, -2), err
    assert b"Traceback" not in err, err
    first.communicate(b"\n", timeout=20)
    out, _ = second.communicate(timeout=20)
    assert (second.returncode, out) == (0, b"first\n")
    assert os.listdir(ws) == ["file"]


def test_successive_runs_see_nothing_of_each_other(caller: Caller, ws: Path, daemon: int) -> None:
    """A sandbox that waited for its command is used once: nothing of the one before is in it."""
    script = (
        "import os, sys\n"
        "for place in ('/tmp', '/dev/shm', os.path.expanduser('~')):\n"
        "    print(place, sorted(os.listdir(place)))\n"
        "    open(f'{place}/mine', 'w').write(sys.argv[1])\n"
        "print(os.environ.get('ONE'), os.environ.get('TWO'), len(os.listdir('/proc/self/fd')))\n"
        "print(sorted(p for p in os.listdir('/proc') if p.isdigit()))\n"
        "if os.fork() == 0:\n    os.setsid(); import time; time.sleep(30)\n"
    )
    first = caller.run(ws, PYTHON, "-I", "-S", "-c", script, "a", flags=("--env", "ONE=1"))
    second = caller.run(ws, PYTHON, "-I", "-S", "-c", script, "b", flags=("--env", "ONE=1"))
    assert second.code == 0, second
    assert second.out == first.out, (first, second)
    assert b"mine" not in second.out


def test_umask_and_directory_are_the_clients(caller: Caller, ws: Path, daemon: int) -> None:
    """Umask, working directory and environment are those of each client."""
    inner = ws / "inner"
    inner.mkdir()
    os.chown(inner, caller.uid, caller.uid)
    for mask in ("077", "002"):
        before = ("/bin/sh", "-c", f'umask {mask}; exec "$0" "$@"')
        ended = caller.sh(inner, "umask; pwd", flags=("-C", str(ws)), before=before)
        assert ended.out == f"0{mask}\n{inner}\n".encode(), ended


def test_nonsense_does_not_end_it(caller: Caller, ws: Path, daemon: int) -> None:
    """Whatever a program of the same user sends, the daemon serves on."""
    probe = (
        "import os, socket, sys\n"
        "for data in (b'', b'w', b'x', b's', b'wrun', b'wrun\\0' * 9, b'w' + os.urandom(300),\n"
        "             b'wstatus\\0\\0', b'wrun\\0' + sys.argv[2].encode() + b'\\0x\\0y\\0z\\0w\\0v'):\n"
        "    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n    s.settimeout(5)\n"
        "    s.connect(sys.argv[1])\n    s.send(data)\n"
        "    try: s.recv(1000)\n    except OSError: pass\n    s.close()\n"
    )
    status = caller.cli("daemon", "status", cwd="/").out.decode()
    identity = status.partition(", ")[2].strip()
    path = str(caller.runtime / "daemon.sock").removeprefix(caller.root)
    process = caller.start("version", cwd="/", before=(PYTHON, "-I", "-S", "-c", probe, path, identity))
    _, err = process.communicate(timeout=40)
    assert process.returncode == 0, err
    assert daemon_pid(caller) == daemon
    assert caller.sh(ws, "echo fine").out == b"fine\n"
