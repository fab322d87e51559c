"""The front end's side of a gate: what a command gets before it starts, what is kept of events, the seed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from casemate.errors import SandboxError
from casemate.isolation.process.spec import Late
from casemate.policy.model import Credential, Network, RequestRule
from casemate.sandbox import gate as gate_module
from casemate.sandbox.gate import TRUST_VARIABLES, GateWorker, rule_text
from tests.cli.harness import alive, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from casemate.sandbox.gate import CommandNetwork

SECRET = "a-secret-that-stays-outside"
HOST = "allowed.example"


@pytest.fixture
def worker() -> Iterator[GateWorker]:
    """A worker of this host's; nothing is connected anywhere in these tests."""
    made = GateWorker()
    yield made
    made.close()
    assert made.faults == []


def share(worker: GateWorker, **fields: Any) -> CommandNetwork:
    """One command's share."""
    secrets = fields.pop("secrets", {})
    network = Network(mode="allowlist", allow=(HOST,), **fields)
    return worker.open(network, secrets, lambda made: made(-1), None)


def late() -> Late:
    """A command that has not started."""
    return Late(["true"], {"HOME": "/home/sandbox", "PATH": "/usr/bin"}, "/", False)


def credential() -> Credential:
    return Credential(name="TOKEN", hosts=(HOST,), source="env:TOKEN", as_="bearer", add=False)


def test_a_command_that_needs_nothing(worker: GateWorker) -> None:
    """Rules about hosts alone leave the command's environment and HOME as they are."""
    command = late()
    share(worker).prepare(command)
    assert command.env == {"HOME": "/home/sandbox", "PATH": "/usr/bin"}
    assert command.files == {}
    assert not command.listener


def test_placeholders_and_trust(worker: GateWorker) -> None:
    """A credential puts its placeholder in, and an authority beside those of the host; never its value."""
    command = late()
    made = share(worker, credentials=(credential(),), secrets={"TOKEN": SECRET})
    made.prepare(command)
    assert command.env["TOKEN"] not in ("", SECRET)
    place = "/home/sandbox/.casemate/ca-bundle.pem"
    assert {command.env[name] for name in TRUST_VARIABLES} == {place}
    told = (Path(__file__).parents[3] / "docs/credentials.md").read_text()
    assert [name for name in TRUST_VARIABLES if f"`{name}`" not in told] == []
    (text,) = command.files.values()
    assert text.count("BEGIN CERTIFICATE") > 1
    assert SECRET not in repr((command.env, command.files))
    other = late()
    share(worker, credentials=(credential(),), secrets={"TOKEN": SECRET}).prepare(other)
    assert other.env["TOKEN"] != command.env["TOKEN"]
    assert other.files != command.files


def test_rules_about_requests_need_trust_alone(worker: GateWorker) -> None:
    """A rule about requests needs the authority and no placeholder."""
    command = late()
    rule = RequestRule(host=HOST, allow=("GET /",), layer="user")
    share(worker, requests=(rule,)).prepare(command)
    assert "SSL_CERT_FILE" in command.env
    assert "TOKEN" not in command.env


def test_an_ssh_agent(worker: GateWorker) -> None:
    """An agent's socket is announced where its filter will listen."""
    command = late()
    share(worker, ssh_agent=("host.example",)).prepare(command)
    assert command.listener
    assert command.env["SSH_AUTH_SOCK"] == f"/home/sandbox/{command.listener}"


def test_a_gate_that_cannot(worker: GateWorker) -> None:
    """Where the gate cannot do what the policy asks, the command does not start; the error shows no value."""
    made = share(worker, credentials=(credential(),), secrets={"TOKEN": f"\0{SECRET}"})
    with pytest.raises(SandboxError) as caught:
        made.prepare(late())
    assert caught.value.code == "gate-failed"
    assert SECRET not in str(caught.value)


def test_events_are_bounded(worker: GateWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events beyond the bound are dropped here, too, whatever the worker says; others' are not taken."""
    monkeypatch.setattr(gate_module, "_MOST_EVENTS", 3)
    made = share(worker)
    for number in range(5):
        made.take({"event": "decision", "id": 1, "what": {"kind": "dns", "port": number}})
    made.take({"event": "decision", "id": 1, "what": "no object"})
    made.take({"event": "nonsense"})
    made.take({})
    assert [event["port"] for event in made.use().events] == [0, 1, 2]


def test_totals_that_are_none(worker: GateWorker) -> None:
    """What the worker says is taken for what it may be: numbers that are numbers."""
    made = share(worker)
    made.take({"event": "removed", "totals": {"allowed": 3, "refused": "many", "sent": True, "untold": None}})
    use = made.use()
    assert (use.allowed, use.refused, use.sent, use.untold) == (3, 0, 0, 0)


@pytest.mark.parametrize(("host", "text"), [
    ("a.example", "a.example:443"), ("10.0.0.1", "10.0.0.1:443"), ("2001:db8::1", "[2001:db8::1]:443"),
])  # fmt: skip
def test_rule_text(host: str, text: str) -> None:
    """A rule for one host and port, as a policy has it."""
    assert rule_text(host, 443) == text


# The seed wants a process of one thread, which that of the tests is not.
_SEED = """
import os, sys, time
from casemate.sandbox.gate import GateWorker
from casemate.sandbox.seed import GateSeed
seed = GateSeed()
print(seed._pid, flush=True)
what = sys.stdin.readline().strip()
if what == "grow":
    worker = GateWorker(seed)
    print(worker.pid, flush=True)
    sys.stdin.readline()
    worker.close()
elif what == "close":
    seed.close()
    seed.close()
print(os.path.exists(f"/proc/{seed._pid}"), flush=True)
sys.stdin.readline()
"""


class Seeded:
    """A front end with a seed, and the seed's process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", _SEED], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)  # fmt: skip
        self.seed = int(self.hear())

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def seeded() -> Iterator[Seeded]:
    """One, ended afterwards; its seed ends with it."""
    made = Seeded()
    yield made
    made.close()
    until(lambda: not alive(made.seed), 5, "the seed's end")


def test_a_seed_grows(seeded: Seeded) -> None:
    """The process that waited becomes the worker, under its own number, and ends like one."""
    seeded.say("grow")
    assert int(seeded.hear()) == seeded.seed
    until(lambda: b"casemate.egress.worker" in Path(f"/proc/{seeded.seed}/cmdline").read_bytes())
    seeded.say("end")
    assert seeded.hear() == "False"


def test_a_seed_that_was_not_needed(seeded: Seeded) -> None:
    """One that nobody needed ends without a word."""
    seeded.say("close")
    assert seeded.hear() == "False"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_seed_without_a_front_end(seeded: Seeded, number: int) -> None:
    """One whose front end is killed ends with it."""
    os.kill(seeded.process.pid, number)
    seeded.process.wait()
    until(lambda: not alive(seeded.seed), 5, "the seed's end")
