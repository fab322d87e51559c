"""What a command can rely on, and its caller, whatever boundary it runs behind."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from tests.cli.harness import PYTHON, until
from tests.security.lab import give

if TYPE_CHECKING:
    from tests.contract.conftest import Boundary

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("traceless")]


def test_it_says_who_it_is(boundary: Boundary) -> None:
    """The result and the command's environment name the boundary, and the result how each limit holds."""
    ended = boundary.sh("echo $CASEMATE_SANDBOX >&2", "--json")
    assert ended.json["boundary"] == boundary.name
    assert ended.err.decode().strip() == boundary.name
    assert {"memory", "pids", "disk", "open-files", "file-size"} <= set(ended.json["scopes"])
    assert set(ended.json["scopes"].values()) <= {"tree", "process", "watched"}
    assert ended.json["degraded"] == []


def test_its_offer(boundary: Boundary) -> None:
    """Doctor says of every protection what holds, and how to get what does not; available means it runs."""
    done = boundary.caller.cli("doctor", "--json", cwd=boundary.ws)
    offer = done.json
    assert offer["boundary"] == boundary.name
    for protection in offer["protections"]:
        assert protection["status"] in ("enforced", "weaker", "missing"), protection
        assert protection["found"], protection
        if protection["status"] != "enforced":
            assert protection["needed"], protection
    assert (done.code == 0) == offer["available"]
    assert offer["available"] == (boundary.sh("true").code == 0)


def test_ends(boundary: Boundary) -> None:
    """Codes and signals of the command are its result."""
    assert boundary.sh("exit 0").code == 0
    assert boundary.sh("exit 42").code == 42
    ended = boundary.sh("kill -TERM $$", "--json")
    assert (ended.code, ended.json["signal"]) == (143, 15)
    assert boundary.caller.run(boundary.ws, "no-such-program", flags=boundary.flags).code == 127


def test_streams(boundary: Boundary) -> None:
    """stdin, stdout and stderr are apart, binary, and end."""
    data = bytes(range(256)) * 4096
    ended = boundary.sh("cat; echo err >&2", stdin=data)
    assert ended.out == data
    assert ended.err == b"err\n"


def test_a_terminal(boundary: Boundary) -> None:
    """With --tty yes there is one, on all three streams."""
    ended = boundary.sh("test -t 0 && test -t 1 && test -t 2 && tty", "--tty", "yes")
    assert ended.code == 0, ended
    assert ended.out.startswith(b"/dev/pts/"), ended


def test_workspace(boundary: Boundary) -> None:
    """The workspace is at its own path; every kind of change arrives at the end, with owner and mode."""
    caller, ws = boundary.caller, boundary.ws
    for name in ("changed", "deleted", "renamed", "moded"):
        caller.file(ws / name, f"old {name}\n")
    (ws / "dir").mkdir()
    caller.file(ws / "dir" / "inner", "inner\n")
    give(ws, caller.uid)
    script = (
        "pwd; echo new >>changed; rm deleted; mv renamed moved; chmod 700 moded; mkdir -p a/b; "
        "echo x >a/b/c; ln -s a/b/c link; mv dir dir2; umask 022; echo made >made"
    )
    ended = boundary.sh(script)
    assert (ended.code, ended.out) == (0, f"{ws}\n".encode()), ended
    assert (ws / "changed").read_text() == "old changed\nnew\n"
    assert not (ws / "deleted").exists()
    assert not (ws / "renamed").exists()
    assert (ws / "moved").read_text() == "old renamed\n"
    assert (ws / "moded").stat().st_mode & 0o777 == 0o700
    assert (ws / "a/b/c").read_text() == "x\n"
    assert os.readlink(ws / "link") == "a/b/c"
    assert (ws / "dir2" / "inner").read_text() == "inner\n"
    assert not (ws / "dir").exists()
    for path in [ws, *ws.rglob("*")]:
        assert path.lstat().st_uid == caller.uid, path


def test_nothing_shows_before_the_end(boundary: Boundary) -> None:
    """While the command runs the workspace on the host is as it was."""
    process = boundary.caller.start(
        "run", *boundary.flags, "--", "/bin/sh", "-c", "echo x >made; echo up; read x", cwd=boundary.ws
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    assert os.listdir(boundary.ws) == []
    process.communicate(b"\n", timeout=20)
    assert os.listdir(boundary.ws) == ["made"]


def test_protected_names_are_held(boundary: Boundary) -> None:
    """What starts programs elsewhere is held back and listed; the rest arrives."""
    ended = boundary.sh("echo x >.envrc; mkdir .vscode; echo x >.vscode/tasks.json; echo y >plain", "--json")
    assert os.listdir(boundary.ws) == ["plain"], ended
    assert {row[0].split("/")[0] for row in ended.json["applied"]["held"]} == {".envrc", ".vscode"}


def test_the_callers_files_are_not_there(boundary: Boundary) -> None:
    """No home, no neighbour, no secret; --read shows exactly what it names."""
    caller = boundary.caller
    other = caller.workspace("other")
    caller.file(other / "canary", "canary")
    home = caller.file(caller.home / "canary", "canary")
    script = f"cat {other}/canary; cat {home}; ls -A ~; ls /root /srv/nothing"
    ended = boundary.sh(script)
    assert b"canary" not in ended.out, ended
    shown = boundary.sh(f"cat {other}/canary", "--read", str(other))
    assert shown.out == b"canary", shown


def test_writes_elsewhere_go_nowhere(boundary: Boundary) -> None:
    """What is written outside of the workspace is refused, or the sandbox's own."""
    mark = f"casemate-contract-{os.getpid()}"
    places = (
        "/etc",
        "/usr/lib",
        "/opt",
        "/var/lib",
        "/",
        "/tmp",
        "/var/tmp",
        "/dev/shm",
        "/home/sandbox",
        "/run",
    )
    script = "; ".join(f"echo x >{place}/{mark}" for place in places) + "; cat /tmp/" + mark
    ended = boundary.sh(script)
    assert ended.out == b"x\n", "its own /tmp can be written: the control"
    assert not [place for place in places if os.path.exists(f"{place}/{mark}")]


def test_environment(boundary: Boundary) -> None:
    """The caller's variables stay outside; what a program needs is there."""
    ended = boundary.sh("env; id -un")
    lines = ended.out.decode().splitlines()
    values = dict(line.split("=", 1) for line in lines[:-1])
    assert "CALLERS_SECRET" not in values
    assert (values["HOME"], values["USER"], values["TMPDIR"]) == ("/home/sandbox", "sandbox", "/tmp")
    assert values["PATH"]
    assert lines[-1] == "sandbox"


def test_rights(boundary: Boundary) -> None:
    """No capability, no new privileges, a filter, and not the host's root."""
    ended = boundary.sh("cat /proc/self/status; id -u")
    fields = dict(line.split(":", 1) for line in ended.out.decode().splitlines() if ":" in line)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(fields[name], 16) == 0, name
    assert fields["NoNewPrivs"].strip() == "1"
    assert fields["Seccomp"].strip() == "2"
    assert ended.out.split()[-1] != b"0"


def test_processes_of_the_host_are_not_seen(boundary: Boundary) -> None:
    """/proc shows the sandbox's own processes and nobody else's."""
    ended = boundary.sh(f"ls /proc | grep '^[0-9]' | wc -l; kill -0 {os.getpid()} && echo reached")
    assert int(ended.out.split()[0]) <= 6, ended
    assert b"reached" not in ended.out, ended


def test_network(boundary: Boundary) -> None:
    """A listener of the host is not reached, the sandbox's own loopback works; the word ``host`` opens it."""
    script = (
        "import socket, sys, threading\nl = socket.create_server(('127.0.0.1', 0))\n"
        "threading.Thread(target=lambda: l.accept()[0].send(b'own'), daemon=True).start()\n"
        "print(socket.create_connection(l.getsockname()).recv(9))\n"
        "try: print(socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5).recv(9))\n"
        "except OSError as error: print(error)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reached: list[int] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                reached.append(1)
                connection.send(b"host")
                connection.close()

        threading.Thread(target=serve, daemon=True).start()
        port = str(listener.getsockname()[1])
        inside = boundary.py(script, port)
        assert inside.out.startswith(b"b'own'\n"), inside
        assert reached == [], inside
        outside = boundary.py(script, port, flags=("--network", "host"))
        assert outside.out == b"b'own'\nb'host'\n", outside
        assert reached == [1]
        listener.shutdown(socket.SHUT_RDWR)


def test_limits(boundary: Boundary) -> None:
    """Time, output, processes and open files are limited, and below the limit nothing happens."""
    flags = ("--timeout", "10s", "--output", "100K", "--pids", "50", "--open-files", "60")
    assert boundary.sh("sleep 0.1; head -c 90000 /dev/zero", *flags).code == 0
    assert boundary.sh("sleep 60", "--timeout", "0.3s").code == 124
    assert boundary.sh("head -c 110000 /dev/zero", *flags).code == 123
    forks = (
        "import os, time\nmade = 0\ntry:\n    for _ in range(100):\n"
        "        if os.fork() == 0: time.sleep(3); os._exit(0)\n        made += 1\n"
        "except OSError: print('refused', flush=True)\nos._exit(0)\n"
    )
    assert boundary.py(forks, flags=flags).out == b"refused\n"
    assert boundary.py(forks.replace("range(100)", "range(40)"), flags=flags).out == b""
    files = "import os\nfor _ in range(%d): os.dup(0)\n"
    assert boundary.py(files % 100, flags=flags).code == 1
    assert boundary.py(files % 50, flags=flags).code == 0


def test_the_whole_tree_is_dead_afterwards(boundary: Boundary) -> None:
    """What the command leaves running does not run on, whatever it did to get away."""
    script = (
        "(setsid sleep 60 >/dev/null 2>&1 &); (trap '' TERM HUP INT; sleep 60 >/dev/null 2>&1 &) & "
        "echo up; read x"
    )
    process = boundary.caller.start("run", *boundary.flags, "--", "/bin/sh", "-c", script, cwd=boundary.ws)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    until(lambda: len(boundary.caller.processes()) >= 4)
    process.communicate(b"\n", timeout=20)
    assert process.returncode == 0
    until(lambda: boundary.caller.processes() == [], 2)


def test_two_at_once_do_not_meet(boundary: Boundary) -> None:
    """Two sandboxes at a time share no process, file, socket or name."""
    other = boundary.caller.workspace()
    hold = (
        "import os, socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.bind('\\0meeting')\ns.listen()\n"
        "t = socket.create_server(('127.0.0.1', 4712))\n"
        "open('/tmp/meeting', 'w')\nopen('/dev/shm/meeting', 'w')\n"
        "print('up', flush=True)\nsys.stdin.read()\n"
    )
    process = boundary.caller.start("run", *boundary.flags, "--", PYTHON, "-I", "-S", "-c", hold, cwd=other)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    look = (
        "import os, socket\nprint(os.path.exists('/tmp/meeting'), os.path.exists('/dev/shm/meeting'))\n"
        "for kind, name in ((socket.AF_UNIX, '\\0meeting'), (socket.AF_INET, ('127.0.0.1', 4712))):\n"
        "    try: socket.socket(kind).connect(name); print('met')\n    except OSError: print('alone')\n"
        "print(sum(b'meeting' in open(f'/proc/{p}/cmdline', 'rb').read() for p in os.listdir('/proc')\n"
        "          if p.isdigit() and int(p) != os.getpid()))\n"
    )
    ended = boundary.py(look)
    process.communicate(b"", timeout=20)
    assert ended.out.split() == [b"False", b"False", b"alone", b"alone", b"0"], ended
