"""The ways into a sandbox: ports, unix sockets, the ssh agent; and a host that has less to offer."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cli.harness import PYTHON, Caller, Den, until
from tests.cli.network import ask, free, network
from tests.security.lab import drop_to, give

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cli.network import Service

pytestmark = [pytest.mark.root]

# -- ports into the sandbox ----------------------------------------------------------------------------

_SERVER = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
while True:
    end, _ = server.accept()
    data = end.recv(100)
    end.sendall(b"inside: " + data)
    end.close()
    if data == b"end":
        break
"""


def test_published(caller: Caller, ws: Path, how: str) -> None:
    """-p leads a port of the host's loopback to a server inside, until the command's end. Each connection is
    an event of the result.
    """
    port, report = free(), ws.parent / "report.json"
    process = caller.start(
        "run", "-p", f"{port}:7000", "--report", str(report), "--", PYTHON, "-c", _SERVER, "7000", cwd=ws
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    assert ask(port, b"one") == b"inside: one"
    assert ask(port, b"two", "::1") == b"inside: two"
    assert ask(port, b"end") == b"inside: end"
    assert process.wait(20) == 0
    with pytest.raises(ConnectionRefusedError):
        ask(port, b"gone")
    events = json.loads(report.read_text())["network"]["events"]
    assert [
        (event["kind"], event["verdict"], event["port"], event["rule"], event["sent"], event["received"])
        for event in events
    ] == [("inbound", "allow", 7000, "publish", 8 + size, size) for size in (3, 3, 3)]


def test_published_to_nobody_else(caller: Caller, ws: Path) -> None:
    """Only the loopback has the port; the command inside reaches nothing by it but its own server."""
    port = free()
    script = f"{PYTHON} -c 'import socket; socket.create_connection((\"198.51.100.7\", {port}), 3)'"
    process = caller.start(
        "run", "--no-daemon", "-p", str(port), "--", PYTHON, "-c", _SERVER, str(port), cwd=ws
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    listening = subprocess.run(
        ["ss", "-Hltn", f"sport = :{port}"], capture_output=True, text=True, check=True
    ).stdout
    assert sorted(line.split()[3].rpartition(":")[0] for line in listening.splitlines()) == [
        "127.0.0.1",
        "[::1]",
    ]
    assert ask(port, b"end") == b"inside: end"
    assert process.wait(20) == 0
    assert caller.sh(ws, script, flags=("-p", str(port))).code != 0


def test_a_port_that_is_taken(caller: Caller, ws: Path, how: str, service: Service) -> None:
    """A port that somebody has is said before the command runs."""
    ended = caller.sh(ws, "echo ran >ran", flags=("-p", f"{service.port}:80"))
    assert ended.code == 125
    assert f"port {service.port}".encode() in ended.err
    assert b"port-taken" in ended.err
    assert not (ws / "ran").exists()


def forward(caller: Caller, ws: Path, port: int, inside: int) -> subprocess.Popen[bytes]:
    """A forward to a command that was started just now."""
    forwarding: list[subprocess.Popen[bytes]] = []

    def begun() -> bool:
        made = caller.start("forward", f"{port}:{inside}", cwd=ws)
        assert made.stderr is not None
        line = made.stderr.readline()
        if b"leads to port %d inside" % inside in line:
            forwarding.append(made)
            return True
        assert b"can be spoken to" in line  # it has to run for a moment first
        assert caller.end(made) == 125
        return False

    until(begun, 10, "a forward")
    return forwarding[0]


def test_forward(caller: Caller, ws: Path, how: str) -> None:
    """`casemate forward` leads a port into a command that runs already, and ends with it."""
    process = caller.start("run", "--", PYTHON, "-c", _SERVER, "7000", cwd=ws)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    port = free()
    forwarding = forward(caller, ws, port, 7000)
    assert ask(port, b"one") == b"inside: one"
    threads = [threading.Thread(target=ask, args=(port, b"x")) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert ask(port, b"end") == b"inside: end"
    assert process.wait(20) == 0
    assert forwarding.communicate(timeout=20)[1] == b""
    assert forwarding.returncode == 0
    with pytest.raises(ConnectionRefusedError):
        ask(port, b"gone")


@pytest.mark.slow
def test_forward_to_a_port_without_a_server(caller: Caller, ws: Path) -> None:
    """A connection that nobody inside takes ends, and is told."""
    process = caller.start("run", "--", "/bin/sh", "-c", "echo up; read line", cwd=ws)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    port = free()
    forwarding = forward(caller, ws, port, 7001)
    with contextlib.suppress(ConnectionResetError):
        assert ask(port, b"one") == b""
    process.communicate(b"\n", 20)
    told = forwarding.communicate(timeout=20)[1]
    assert told == b"casemate: a connection to port 7001 inside failed: nothing listens inside\n"


def test_forward_to_nothing(caller: Caller, ws: Path) -> None:
    """Where nothing runs it says so; a port that is none is a question of usage."""
    ended = caller.cli("forward", "7000", cwd=ws)
    assert ended.code == 125
    assert b"no command runs in" in ended.err
    for words in (
        ("forward",),
        ("forward", "x"),
        ("forward", "0"),
        ("forward", "70000"),
        ("forward", "1:2:3"),
    ):
        assert caller.cli(*words, cwd=ws).code == 2


# -- sockets and the ssh agent -------------------------------------------------------------------------


@contextlib.contextmanager
def unix_service(caller: Caller, path: Path) -> Iterator[None]:
    """A unix socket of the caller's that answers."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(8)
    os.chown(path, caller.uid, caller.uid)
    path.chmod(0o777)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = listener.accept()
                end.sendall(b"hello from outside\n")
                end.close()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


_UNIX = (
    "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
    "print(s.recv(99).decode(), end='')"
)


def test_unix_sockets(caller: Caller, ws: Path, how: str) -> None:
    """None by default; one that is named is there, at its own place."""
    path = caller.base / f"s{caller.count}"
    with unix_service(caller, path):
        refused = caller.py(ws, _UNIX, str(path))
        assert refused.code != 0
        ended = caller.py(ws, _UNIX, str(path), flags=("--socket", str(path)))
        assert (ended.code, ended.out) == (0, b"hello from outside\n"), ended


def test_sockets_that_are_as_good_as_root(caller: Caller, ws: Path) -> None:
    """A socket that hands out the host is warned of, loudly; what is no socket is refused."""
    place = caller.base / f"d{caller.count}"
    place.mkdir()
    give(place, caller.uid)
    with unix_service(caller, place / "docker.sock"):
        ended = caller.run(ws, "true", flags=("--socket", str(place / "docker.sock")))
        assert ended.code == 0
        assert b"docker" in ended.err
        assert b"warning" in ended.err.lower() or b"root" in ended.err
    file = caller.file(place / "file", "x")
    ended = caller.run(ws, "true", flags=("--socket", str(file)))
    assert ended.code == 126


@pytest.fixture
def agent(caller: Caller) -> Iterator[str]:
    """An ssh agent of the caller's with one key; the path of its socket."""
    place = Path(str(caller.base)) / f"agent{caller.count}"
    place.mkdir(mode=0o700)
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "the-key", "-f", str(place / "key")], check=True
    )
    give(place, caller.uid)
    path = str(place / "agent")
    words = caller.words(["ssh-agent", "-D", "-a", path], str(place))
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=caller.environment())
    env = {**caller.environment(), "SSH_AUTH_SOCK": path}
    try:
        until(lambda: Path(path).exists())
        subprocess.run([*drop_to(caller.uid), "ssh-add", "-q", str(place / "key")], env=env, check=True)
        yield path
    finally:
        process.terminate()
        process.wait()


def test_the_ssh_agent(caller: Caller, ws: Path, how: str, agent: str) -> None:
    """Inside the keys can be listed and nothing be changed; the real socket is not there."""
    env = {"SSH_AUTH_SOCK": agent}
    flags = ("--ssh-agent", "host.example.org")
    ended = caller.sh(ws, "ssh-add -l; echo $SSH_AUTH_SOCK; ssh-add -D; ssh-add -l", flags=flags, env=env)
    assert ended.out.count(b"the-key (ED25519)") == 2, ended
    assert agent.encode() not in ended.out
    ended = caller.py(ws, _UNIX, agent, flags=flags, env=env)
    assert ended.code != 0
    plain = caller.sh(ws, "ssh-add -l", env=env)
    assert plain.code != 0


# -- a host that has less ------------------------------------------------------------------------------


@pytest.fixture
def poor(installation: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    """Uid 1000 on a host without nftables' library."""
    base = Path(str(tmp_path_factory.mktemp("poor")))
    for place in (base, *base.parents):
        if place != Path("/"):
            place.chmod(place.stat().st_mode | 0o011)
    den = Den((str(base / "unused"),))
    found = "$(find /lib /usr/lib /lib64 -name 'libnftables.so*' 2>/dev/null)"
    hide = f"for f in {found}; do mount --bind /dev/null $f; done"
    subprocess.run([*den.prefix, "/", "sh", "-c", hide], check=False)
    made = Caller("uid1000", installation[0], base, den)
    made.home.mkdir(mode=0o700)
    give(made.home, made.uid)
    yield made
    made.close()
    made.clean()
    den.close()


def test_listed_ports(poor: Caller, service: Service) -> None:
    """Without nftables the ports that rules name are had and no others: the result and the doctor say so."""
    ws = poor.workspace()
    other = f"curl -sS --max-time 5 http://192.0.2.1:{free()}/"
    ended = poor.sh(
        ws, f"curl -sS http://{service.rule}/; {other}; true", flags=("--allow", service.rule, "--json")
    )
    assert b"hello" in ended.err, ended
    found = network(ended)
    assert found["capture"] == "listed ports"
    assert any("partial" in note for note in ended.json["notes"])
    doctor = poor.cli("doctor", cwd=ws)
    assert b"partial" in doctor.out
    for proxy in ("http", "socks5h"):
        line = f"curl -sS -x {proxy}://198.18.0.1:3128 http://{service.rule}/"
        assert poor.sh(ws, line, flags=("--allow", service.rule)).out == b"hello\n"
