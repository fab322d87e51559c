"""``casemate run`` behind the gate: what is reached, what is said about it, and what it survives.

The hosts of these tests are services of the machine's own loopback. With a daemon and without, as root and as
uid 1000.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cli.harness import PYTHON, Caller, alive, until
from tests.cli.network import CURL, HOST, children, cmdline, fetch, network, relatives, ticks, worker_of

if TYPE_CHECKING:
    from tests.cli.network import Service

pytestmark = [pytest.mark.root]


# -- reached and refused -------------------------------------------------------------------------------


def test_allowed(caller: Caller, ws: Path, how: str, service: Service) -> None:
    """What --allow names is reached, and the result tells of it in full."""
    ended = fetch(caller, ws, service, "--allow", service.rule)
    assert (ended.code, ended.out, ended.err) == (0, b"hello\n", b""), ended
    assert f"Host: {service.rule}".encode() in service.heads[0]
    ended = fetch(caller, ws, service, "--allow", service.rule, "--json")
    found = network(ended)
    assert found["capture"] in ("sk_lookup", "nftables")
    assert (found["refused"], found["lost"], found["untold"]) == (0, False, 0)
    (event,) = [event for event in found["events"] if event["kind"] == "connect"]
    assert event["verdict"] == "allow"
    assert (event["host"], event["port"], event["rule"]) == (HOST, service.port, service.rule)
    assert event["protocol"] == "http"
    assert event["sent"] > 0
    assert event["received"] > 0


@pytest.mark.parametrize("caller", ["root"], indirect=True)
def test_an_installation_that_only_root_can_read(caller: Caller, ws: Path, service: Service) -> None:
    """The worker, which is not root any more, has loaded what it needs by then: requests that are read, and
    certificates.
    """
    with tempfile.TemporaryDirectory(prefix="casemate-hidden-", dir="/srv") as hidden:
        shutil.copytree(caller.command.parent.parent, f"{hidden}/venv", symlinks=True)
        there = Caller(caller.mode, Path(hidden, "venv/bin/casemate"), caller.base, caller.den)
        for flags in ((), ("--credential", f"T={HOST}")):
            ended = fetch(
                there, ws, service, "--no-daemon", "--allow", service.rule, *flags, env={"T": "hush-hush"}
            )
            assert (ended.code, ended.out) == (0, b"hello\n"), ended


def test_refused(caller: Caller, ws: Path, how: str, service: Service) -> None:
    """What it does not name is not; the summary has the exact line that would allow it, --quiet has none."""
    for flags in (
        (),
        ("--allow", f"{HOST}:1"),
        ("--network", "full"),
        ("--network", "none", "--allow", service.rule),
    ):
        ended = fetch(caller, ws, service, *flags)
        assert ended.code != 0, flags
        assert service.heads == []
        if f"{HOST}:1" in flags:
            assert f'network.allow = ["{service.rule}"]'.encode() in ended.err
    quiet = fetch(caller, ws, service, "--allow", f"{HOST}:1", "--quiet")
    assert b"network.allow" not in quiet.err
    ended = fetch(caller, ws, service, "--allow", f"{HOST}:1", "--json")
    assert [denial["allow"] for denial in ended.json["denials"] if denial["kind"] == "network"] == [
        f'network.allow = ["{service.rule}"]'
    ]


def test_the_line_that_is_shown_works(caller: Caller, ws: Path, service: Service) -> None:
    """Whoever pastes the line of the summary into a policy gets what was refused."""
    ended = fetch(caller, ws, service, "--allow", f"{HOST}:1")
    line = ended.err.decode().partition("would be allowed by: ")[2].splitlines()[0]
    policy = caller.file(ws / "policy.toml", f"version = 1\n{line}\n")
    again = fetch(caller, ws, service, "--policy", str(policy), "--allow", f"{HOST}:1")
    assert again.out == b"hello\n", "what turned the list on is still said"
    policy = caller.file(ws / "policy.toml", f'version = 1\nnetwork.mode = "allowlist"\n{line}\n')
    assert fetch(caller, ws, service, "--policy", str(policy)).out == b"hello\n"


def test_without_a_network(caller: Caller, ws: Path, how: str, service: Service) -> None:
    """By default there is none; what is shown then allows the host, pasted into a policy or as an option."""
    ended = fetch(caller, ws, service)
    assert ended.code != 0
    shown = ended.err.decode().partition("probably denied: network ")[2].splitlines()
    assert shown[0] == (
        f"{service.rule}; would be allowed by --allow {service.rule}, or in a policy by:"
    ), ended
    pasted = "\n".join(line for line in shown if line.startswith("    "))
    flags = shown[0].partition(" by ")[2].partition(",")[0].split()
    assert service.heads == []
    policy = caller.file(ws / "policy.toml", f"version = 1\n{pasted}\n")
    assert fetch(caller, ws, service, "--policy", str(policy)).out == b"hello\n"
    assert fetch(caller, ws, service, *flags).out == b"hello\n"
    ended = fetch(caller, ws, service, "--json")
    (denial,) = [denial for denial in ended.json["denials"] if denial["kind"] == "network"]
    assert denial["what"] == service.rule
    policy = caller.file(ws / "policy.toml", f"version = 1\n{denial['allow']}\n")
    assert fetch(caller, ws, service, "--policy", str(policy)).out == b"hello\n"


PACKAGES = "packages.example.org"


@pytest.mark.parametrize(
    ("command", "rule"),
    [
        (("ssh", "-o", "BatchMode=yes", "git@github.com"), "github.com:22"),
        (("git", "ls-remote", "https://github.com/a/b"), "github.com"),
        (("node", "-e", f"fetch('https://{PACKAGES}/x')"), PACKAGES),
        (("npm", "view", "left-pad", "--fetch-retries=0", f"--registry=https://{PACKAGES}/"), PACKAGES),
        ((PYTHON, "-c", "import socket; socket.create_connection(('index.example.org', 443))"), "HOST"),
    ],
)  # fmt: skip
def test_hosts_that_programs_name(caller: Caller, ws: Path, command: tuple[str, ...], rule: str) -> None:
    """Without a network, the lines have the host that the program spoke of, and ssh's port."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    ended = caller.run(ws, *command, flags=("--json",), timeout=60)
    assert ended.code != 0
    (denial,) = [denial for denial in ended.json["denials"] if denial["kind"] == "network"]
    assert tomllib.loads(denial["allow"])["network"] == {"mode": "allowlist", "allow": [rule]}


def test_denied(caller: Caller, ws: Path, how: str, service: Service) -> None:
    """--deny-host wins, whatever allows it."""
    for deny in (HOST, service.rule):
        ended = fetch(caller, ws, service, "--allow", service.rule, "--deny-host", deny)
        assert ended.code != 0
        assert service.heads == []


def test_names_outside(caller: Caller, ws: Path, how: str, service: Service) -> None:
    """A name that no rule has does not exist inside, addresses lead nowhere, and each is told once."""
    script = (
        "curl -sS --max-time 5 http://unlisted.example/; curl -sS --max-time 5 http://unlisted.example/; "
        "curl -sS --max-time 5 http://192.0.2.1/; curl -sS --max-time 5 'http://[2001:db8::1]:8080/'; true"
    )
    ended = caller.sh(ws, script, flags=("--allow", service.rule))
    assert ended.code == 0
    lines = [line for line in ended.err.decode().splitlines() if "would be allowed by" in line]
    assert len(lines) == 3, ended
    for wanted in ('["unlisted.example"]', '["192.0.2.1:80"]', '["[2001:db8::1]:8080"]'):
        assert sum(f"network.allow = {wanted}" in line for line in lines) == 1, lines
    assert any("denied: network [2001:db8::1]:8080 (" in line for line in lines), lines


def test_a_proxys_clients(caller: Caller, ws: Path, service: Service) -> None:
    """Programs that are told of a proxy use the gate as one, by HTTP and by SOCKS."""
    for proxy in ("http://198.18.0.1:3128", "socks5h://198.18.0.1:1080", "socks5://198.18.0.1:1080"):
        ended = caller.run(ws, *CURL, "-x", proxy, f"http://{service.rule}/", flags=("--allow", service.rule))
        assert (ended.code, ended.out) == (0, b"hello\n"), (proxy, ended)
    ended = caller.run(ws, *CURL, "-p", "-x", "http://198.18.0.1:3128", f"http://{service.rule}/",
                       flags=("--allow", service.rule))  # fmt: skip
    assert (ended.code, ended.out) == (0, b"hello\n"), ended


def test_project_files_open_nothing(caller: Caller, ws: Path, service: Service) -> None:
    """A policy in the workspace allows no service of the host, trusted or not."""
    caller.file(
        ws / ".casemate.toml",
        f'version = 1\nnetwork.mode = "allowlist"\nnetwork.allow = ["{service.rule}"]\n',
    )
    ended = fetch(caller, ws, service)
    assert ended.code != 0
    assert service.heads == []


# -- much, long, many ----------------------------------------------------------------------------------

_MUCH = """
import hashlib, os, socket, sys, threading
end = socket.create_connection(("host.casemate.internal", int(sys.argv[1])), 30)
data = os.urandom(1 << 20)
def send():
    for _ in range(32):
        end.sendall(data)
    end.shutdown(socket.SHUT_WR)
threading.Thread(target=send).start()
there, back, size = hashlib.sha256(data * 32), hashlib.sha256(), 0
while piece := end.recv(1 << 16):
    back.update(piece)
    size += len(piece)
print(size, there.hexdigest() == back.hexdigest())
"""


def test_much(caller: Caller, ws: Path, how: str, service: Service) -> None:
    """Thirty-two megabytes there and back arrive as they were sent."""
    ended = caller.py(ws, _MUCH, str(service.port), flags=("--allow", service.rule, "--json"))
    assert ended.code == 0
    assert ended.err.startswith(f"{32 << 20} True".encode()), ended
    found = network(ended)
    assert (found["sent"], found["received"]) == (32 << 20, 32 << 20)


_MANY = """
import socket, sys
ends = [socket.create_connection(("host.casemate.internal", int(sys.argv[1])), 30) for _ in range(300)]
for number, end in enumerate(ends):
    end.sendall(b"%06d\\n" % number)
print(all(end.recv(100) == b"%06d\\n" % number for number, end in enumerate(ends)))
"""


def test_many(caller: Caller, ws: Path, how: str, service: Service) -> None:
    """Three hundred connections at a time, each with its own words."""
    ended = caller.py(ws, _MANY, str(service.port), flags=("--allow", service.rule, "--json"))
    assert ended.err == b"True\n", ended
    assert network(ended)["allowed"] == 300


def test_idle(caller: Caller, ws: Path, service: Service) -> None:
    """While the command does nothing, neither do the command line, its gate and its reviewer's place."""
    script = f"exec 3<>/dev/tcp/{HOST}/{service.port}; echo hello >&3; head -n 1 <&3; sleep 30"
    process = caller.start("run", "--no-daemon", "--allow", service.rule, "--", "bash", "-c", script, cwd=ws)
    assert process.stdout is not None
    assert process.stdout.readline() == b"hello\n"
    worker_of(process.pid)
    until(lambda: all(map(alive, relatives(process.pid))))  # what was only needed to start is gone
    before = {pid: ticks(pid) for pid in relatives(process.pid) if alive(pid)}
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        time.sleep(0.05)
    used = {pid: ticks(pid) - spent for pid, spent in before.items() if alive(pid)}
    process.send_signal(signal.SIGTERM)
    caller.end(process)
    assert len(used) >= 3
    assert all(spent <= 3 for spent in used.values()), used


# -- ends ----------------------------------------------------------------------------------------------

_TALK = """
import socket, sys, time
where = ("host.casemate.internal", int(sys.argv[1]))
end = socket.create_connection(where, 20)
said = False
try:
    while True:
        end.sendall(b"tick\\n")
        if not end.recv(100):
            break
        if not said:
            print("connected", flush=True)
        said = True
        time.sleep(0.01)
except OSError:
    pass
print("cut", flush=True)
try:
    socket.create_connection(where, 5)
    print("reached", flush=True)
except OSError:
    print("refused", flush=True)
open("made", "w").write("work")
sys.exit(7)
"""


def test_the_worker_is_killed(caller: Caller, ws: Path, service: Service, traceless: None) -> None:
    """kill -9 of the gate: the command goes on and reaches nothing more; its code and work are its own."""
    argv = (
        "run",
        "--no-daemon",
        "--report",
        "report.json",
        "--allow",
        service.rule,
        "--",
        PYTHON,
        "-c",
        _TALK,
    )
    process = caller.start(*argv, str(service.port), cwd=ws)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"connected\n"
    os.kill(worker_of(process.pid), signal.SIGKILL)
    out, err = process.communicate(timeout=30)
    assert out == b"cut\nrefused\n"
    assert process.returncode == 7
    assert (ws / "made").read_text() == "work"
    assert b"the gate ended" in err
    assert json.loads((ws / "report.json").read_text())["network"]["lost"] is True


_LATE = """
import socket, sys, time
print("up", flush=True)
sys.stdin.readline()
began = time.monotonic()
for _ in range(2):
    try:
        end = socket.create_connection(("198.18.1.0", int(sys.argv[1])), 20)
        end.recv(1)
        print("reached" if time.monotonic() - began > 15 else "ended")
    except OSError:
        print("refused")
sys.exit(7)
"""


def test_what_would_be_the_gate_is_killed(
    caller: Caller, ws: Path, service: Service, traceless: None
) -> None:
    """The same for what has not become the gate yet: connections fail at once, and the run goes on."""
    flags = ("--no-daemon", "--report", "report.json", "--allow", service.rule)
    process = caller.start("run", *flags, "--", PYTHON, "-c", _LATE, str(service.port), cwd=ws)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    pid = next(pid for pid in relatives(process.pid) if children(pid))
    for child in children(pid):
        if not cmdline(child).startswith(b"casemate-init"):
            os.kill(child, signal.SIGKILL)
    out, _ = process.communicate(b"\n", timeout=30)
    assert (process.returncode, out.split()) in ((7, [b"refused"] * 2), (7, [b"ended", b"refused"])), out
    assert json.loads((ws / "report.json").read_text())["network"]["lost"] is True


def test_the_daemons_worker_is_killed(caller: Caller, ws: Path, daemon: int, service: Service) -> None:
    """The same below a daemon, whose next command has a new gate."""
    process = caller.start(
        "run", "--allow", service.rule, "--", PYTHON, "-c", _TALK, str(service.port), cwd=ws
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"connected\n"
    os.kill(worker_of(daemon), signal.SIGKILL)
    out, err = process.communicate(timeout=30)
    assert (out, process.returncode) == (b"cut\nrefused\n", 7)
    assert b"the gate ended" in err
    assert fetch(caller, ws, service, "--allow", service.rule).out == b"hello\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_caller_is_ended(caller: Caller, ws: Path, service: Service, tidy: None, number: int) -> None:
    """However the command line ends, its gate ends with it and the connection is cut."""
    flags = ("--no-daemon", "--allow", service.rule)
    process = caller.start("run", *flags, "--", PYTHON, "-c", _TALK, str(service.port), cwd=ws)
    assert process.stdout is not None
    assert process.stdout.readline() == b"connected\n"
    family = relatives(process.pid)
    worker_of(process.pid)
    pid = next(pid for pid in family if b"casemate" in cmdline(pid))
    os.kill(pid, number)
    caller.end(process)
    until(lambda: not any(map(alive, family)), 5, "their end")


def test_no_gate_no_process(caller: Caller, ws: Path, service: Service) -> None:
    """Without a policy for the network there is no worker; with one that nobody uses there is none either."""
    for flags in ((), ("--allow", service.rule)):
        process = caller.start("run", "--no-daemon", *flags, "--", "sh", "-c", "echo up; sleep 30", cwd=ws)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        names = [cmdline(pid) for pid in relatives(process.pid)]
        assert not any(b"casemate.egress.worker" in name for name in names)
        process.terminate()
        caller.end(process)


# -- errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flags", "said"), [
    (("--allow", "*"), b"full"), (("--allow", "*.com"), b"*.com"), (("--allow", "0.0.0.0/0"), b"0.0.0.0/0"),
    (("--allow", "a b"), b"a b"), (("--allow", HOST), b"port"), (("-p", "0"), b"0"), (("-p", "x"), b"x"),
    (("--network", "some"), b"some"),
    (("--credential", "TOKEN=example.org", "--allow", "example.org"), b"TOKEN"),
    (("--parent-proxy", "http://proxy.example:3128", "--allow", "example.org"), b"parent-proxy"),
    (("--socket", "/nowhere/at/all"), b"/nowhere/at/all"),
])  # fmt: skip
def test_what_cannot_be_asked(
    caller: Caller, ws: Path, how: str, flags: tuple[str, ...], said: bytes
) -> None:
    """A rule that is none, or is too broad, is refused before anything runs, and the message says which."""
    ended = caller.sh(ws, "echo ran >ran", flags=flags)
    assert ended.code in (2, 125, 126), ended
    assert said in ended.err, ended
    assert not (ws / "ran").exists()
    assert b"Traceback" not in ended.err


def test_the_daemons_keeper_is_killed(caller: Caller, ws: Path, daemon: int, service: Service) -> None:
    """A keeper that dies takes its command along; the gate forgets it, and the next command has both."""
    assert fetch(caller, ws, service, "--allow", service.rule).out == b"hello\n"
    worker = worker_of(daemon)

    def held() -> int:
        return len(os.listdir(f"/proc/{worker}/fd"))

    before = held()
    process = caller.start(
        "run", "--allow", service.rule, "--", PYTHON, "-c", _TALK, str(service.port), cwd=ws
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"connected\n"
    (keeper,) = [pid for pid in children(daemon) if pid != worker]
    os.kill(keeper, signal.SIGKILL)
    assert caller.end(process) == 125
    until(lambda: held() <= before, 5, "the gate's descriptors")
    assert fetch(caller, ws, service, "--allow", service.rule).out == b"hello\n"
    caller.started += children(daemon)
    caller.cli("discard", "--all", cwd=ws)
