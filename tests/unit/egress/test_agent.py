"""The ssh agent behind its filter: a real agent, a real client, and what does not get through."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from casemate.egress import agent as agent_module
from casemate.egress.agent import AgentFilter, permitted
from tests.cli.harness import until
from tests.unit.egress.gatelab import descriptors, exactly, gone

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.unit.egress.gatelab import Lab

FAILURE = b"\0\0\0\1\5"
BIND = b"session-bind@openssh.com"


def message(kind: int, body: bytes = b"") -> bytes:
    """A request as it is sent."""
    return (len(body) + 1).to_bytes(4, "big") + bytes([kind]) + body


def text(data: bytes) -> bytes:
    """A string of the protocol."""
    return len(data).to_bytes(4, "big") + data


class Filtered:
    """An agent at ``agent``, and its filter at ``path``."""

    def __init__(self, lab: Lab, path: Path, agent: Path) -> None:
        self.lab, self.path = lab, path
        self.events: list[dict[str, Any]] = []
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(64)

        async def connect() -> socket.socket:
            endpoint = socket.socket(socket.AF_UNIX)
            try:
                endpoint.connect(str(agent))
            except OSError:
                endpoint.close()
                raise
            return endpoint

        self.filter = lab.call(lambda: AgentFilter(listener, connect, self.events.append))

    def connect(self) -> socket.socket:
        endpoint = socket.socket(socket.AF_UNIX)
        endpoint.settimeout(10)
        endpoint.connect(str(self.path))
        return endpoint

    def add(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """``ssh-add`` through the filter."""
        env = {"PATH": os.environ["PATH"], "SSH_AUTH_SOCK": str(self.path)}
        return subprocess.run(
            ["ssh-add", *argv], env=env, capture_output=True, text=True, check=False, timeout=30
        )


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A real ssh agent with one key: its socket, and the key's file."""
    place = tmp_path_factory.mktemp("agent")
    key, path = place / "key", place / "agent"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    try:
        until(path.exists)
        env = {"PATH": os.environ["PATH"], "SSH_AUTH_SOCK": str(path)}
        subprocess.run(["ssh-add", "-q", str(key)], env=env, check=True)
        yield path, key
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def filtered(lab: Lab, agent: tuple[Path, Path], tmp_path: Path) -> Iterator[Filtered]:
    """The agent behind its filter."""
    made = Filtered(lab, tmp_path / "filter", agent[0])
    yield made
    lab.call(made.filter.close)
    until(lambda: not made.filter._tasks)


def login(
    key: bytes, *, method: bytes = b"publickey", named: bytes | None = None, more: bytes = b""
) -> bytes:
    """What an ssh server has signed for a login by ``key`` (RFC 4252, section 7)."""
    data = text(b"s" * 32) + b"\x32" + text(b"git") + text(b"ssh-connection") + text(method) + b"\1"
    data += text(b"ssh-ed25519") + text(key if named is None else named)
    if method != b"publickey":
        data += text(b"a host key")
    return data + more


def sign(key: bytes, data: bytes) -> bytes:
    """A request to sign."""
    return bytes([13]) + text(key) + text(data) + bytes(4)


def key_of(agent: tuple[Path, Path]) -> bytes:
    """The agent's key as the protocol has it."""
    return base64.b64decode(agent[1].with_suffix(".pub").read_text().split()[1])


@pytest.mark.parametrize("method", [b"publickey", b"publickey-hostbound-v00@openssh.com"])
def test_listing_and_logging_in(filtered: Filtered, agent: tuple[Path, Path], method: bytes) -> None:
    """A client sees the keys and has a login signed by one."""
    public = agent[1].with_suffix(".pub").read_text()
    assert filtered.add("-L").stdout.split()[:2] == public.split()[:2]
    key = key_of(agent)
    with filtered.connect() as client:
        client.sendall(text(sign(key, login(key, method=method))))
        size = int.from_bytes(exactly(client, 4), "big")
        answer = exactly(client, size)
    assert answer[0] == 14, "SSH_AGENT_SIGN_RESPONSE"
    assert filtered.events == [{"kind": "ssh-agent", "verdict": "allow", "host": "", "reason": "rule"}]


def test_nothing_but_logins_is_signed(filtered: Filtered, agent: tuple[Path, Path], tmp_path: Path) -> None:
    """A file (or a commit) is not signed, though the same agent would; the control is the agent itself."""
    (tmp_path / "data").write_text("to be signed")
    (tmp_path / "key.pub").write_text(agent[1].with_suffix(".pub").read_text())
    public, data = str(tmp_path / "key.pub"), str(tmp_path / "data")
    command = ["ssh-keygen", "-Y", "sign", "-n", "git", "-f", public, data]
    codes = []
    for path in (filtered.path, agent[0]):
        env = {"PATH": os.environ["PATH"], "SSH_AUTH_SOCK": str(path)}
        done = subprocess.run(command, env=env, capture_output=True, check=False, timeout=30)
        codes.append(done.returncode)
    assert codes[0] != 0
    assert codes[1] == 0
    assert {event["reason"] for event in filtered.events} == {"agent-request"}


@pytest.mark.parametrize("act", ["remove", "lock", "add"])
def test_the_agent_is_not_changed(
    filtered: Filtered, agent: tuple[Path, Path], tmp_path: Path, act: str
) -> None:
    """Keys are neither removed nor added, and the agent is not locked; the key is there afterwards."""
    if act == "remove":
        done = filtered.add("-D")
    elif act == "lock":
        with filtered.connect() as client:
            client.sendall(message(22, text(b"password")))
            assert exactly(client, 5) == FAILURE
        done = filtered.add("-d", str(agent[1]))
    else:
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True
        )
        done = filtered.add(str(tmp_path / "other"))
    assert done.returncode != 0
    assert filtered.add("-L").stdout.split()[:2] == agent[1].with_suffix(".pub").read_text().split()[:2]
    assert {event["reason"] for event in filtered.events} == {"agent-request"}


@pytest.mark.parametrize(("request_", "passes"), [
    (bytes([11]), True), (sign(b"k", login(b"k")), True), (bytes([27]) + text(BIND), True),
    (bytes([13]) + b"x", False), (sign(b"k", b"anything"), False),
    (sign(b"k", login(b"k", more=b"x")), False),
    (sign(b"k", login(b"k", named=b"other")), False), (sign(b"k", login(b"k"))[:-1], False),
    (sign(b"k", login(b"k", method=b"password")), False), (sign(b"k", text(b"") + login(b"k")), False),
    (sign(b"k", b"SSHSIG" + login(b"k")), False),
    (b"", False), (bytes([1]), False), (bytes([9]), False), (bytes([17]), False), (bytes([18]), False),
    (bytes([19]), False), (bytes([20]), False), (bytes([22]), False), (bytes([23]), False),
    (bytes([25]), False),
    (bytes([26]), False), (bytes([27]), False), (bytes([27]) + text(b"other@example.org"), False),
    (bytes([27]) + text(BIND + b".evil"), False), (bytes([27]) + text(BIND[:-1]), False),
    (bytes([255]), False),
    (bytes([27]) + BIND, False),
])  # fmt: skip
def test_what_may_pass(request_: bytes, passes: bool) -> None:
    """Listing, logins, and what binds a login to its host; nothing else, whatever it is called."""
    assert permitted(request_) is passes


def test_refusals_go_on(filtered: Filtered) -> None:
    """A refused request is answered, and the next one on the same connection is served."""
    with filtered.connect() as client:
        client.sendall(message(19) + message(11))
        assert exactly(client, 5) == FAILURE
        length = int.from_bytes(exactly(client, 4), "big")
        assert exactly(client, length)[:1] == bytes([12])


@pytest.mark.parametrize(
    "rubbish", [b"\0\0\0\0", b"\xff\xff\xff\xff", (300 << 10).to_bytes(4, "big") + bytes(100)]
)
def test_rubbish(filtered: Filtered, rubbish: bytes) -> None:
    """A message without content, or one too long, ends its connection; others go on."""
    with filtered.connect() as client, filtered.connect() as other:
        client.sendall(rubbish)
        assert gone(client) in ("end", "reset")
        other.sendall(message(11))
        assert exactly(other, 5)[4:] == bytes([12])


def test_in_small_pieces(filtered: Filtered) -> None:
    """However a message is cut, it is the same one."""
    with filtered.connect() as client:
        for byte in message(11):
            client.sendall(bytes([byte]))
        assert exactly(client, 5)[4:] == bytes([12])


def test_bounded(filtered: Filtered) -> None:
    """Few connections at a time are served; the next is ended at once, and gets a place when one is free."""
    held = [filtered.connect() for _ in range(agent_module._AT_ONCE)]
    for client in held:
        client.sendall(message(11))
        assert exactly(client, 5)[4:] == bytes([12])
    with filtered.connect() as client:
        assert gone(client) in ("end", "reset")
    held.pop().close()
    until(lambda: len(filtered.filter._tasks) < agent_module._AT_ONCE)
    with filtered.connect() as client:
        client.sendall(message(11))
        assert exactly(client, 5)[4:] == bytes([12])
    for client in held:
        client.close()


@contextmanager
def no_agent(lab: Lab, tmp_path: Path) -> Iterator[Filtered]:
    """A filter whose agent is not there."""
    made = Filtered(lab, tmp_path / "filter", tmp_path / "nobody")
    yield made
    lab.call(made.filter.close)


def test_no_agent(lab: Lab, tmp_path: Path) -> None:
    """Without an agent the client's connection ends, and nothing is left of it."""
    with no_agent(lab, tmp_path) as filtered:
        before = descriptors()
        for _ in range(20):
            with filtered.connect() as client:
                assert gone(client) in ("end", "reset")
        until(lambda: descriptors() == before)


def test_the_end(lab: Lab, agent: tuple[Path, Path], tmp_path: Path) -> None:
    """The end cuts connections, idle ones and those in the middle of a message."""
    before = descriptors()
    made = Filtered(lab, tmp_path / "filter", agent[0])
    idle, busy = made.connect(), made.connect()
    busy.sendall(message(11)[:3])
    until(lambda: len(made.filter._tasks) == 2)
    lab.call(made.filter.close)
    for client in (idle, busy):
        assert gone(client) in ("end", "reset")
        client.close()
    until(lambda: descriptors() == before)


def test_the_gate_asks_for_connections(lab: Lab, agent: tuple[Path, Path], tmp_path: Path) -> None:
    """In a gate each client is one request to the front end; what comes too late is closed, none is kept."""
    path = tmp_path / "filter"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(8)

    def agents() -> list[dict[str, Any]]:
        return [m for m in [*served.said] if m["event"] == "agent"]

    with lab.gate("allowed.example") as served:
        lab.call(lambda: served.gate.serve_agent(listener))
        for number in range(1, 4):
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(10)
                client.connect(str(path))
                until(lambda number=number: len(agents()) == number)  # type: ignore[misc]
                request = agents()[-1]["request"]
                if number == 2:
                    lab.call(lambda r=request: served.gate.agents.made(r, -1))  # type: ignore[misc]
                    assert gone(client) in ("end", "reset")
                    continue
                endpoint = socket.socket(socket.AF_UNIX)
                endpoint.connect(str(agent[0]))
                given = endpoint.detach()
                lab.call(lambda r=request, g=given: served.gate.agents.made(r, g))  # type: ignore[misc]
                client.sendall(message(11))
                assert exactly(client, 5)[4:] == bytes([12])
        until(lambda: not served.gate.agents.waiting)
        spare = socket.socket(socket.AF_UNIX).detach()
        lab.call(lambda: served.gate.agents.made(1, spare))
        with pytest.raises(OSError, match=r"Bad file"):
            os.fstat(spare)


def test_clients_in_a_thread_each(filtered: Filtered) -> None:
    """Eight clients at a time get each their own answers."""
    found: list[bytes] = []

    def ask() -> None:
        with filtered.connect() as client:
            for _ in range(20):
                client.sendall(message(11))
                length = int.from_bytes(exactly(client, 4), "big")
                found.append(exactly(client, length))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == 160
    assert len({*found}) == 1
