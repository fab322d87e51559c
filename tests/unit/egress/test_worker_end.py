"""The worker's end, and what a sandbox reaches when its gate was told what it does not understand."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from casemate.errors import SandboxError
from casemate.policy.model import Network
from casemate.sandbox import gate as front
from casemate.sandbox.gate import GateWorker
from casemate.sys import packets
from tests.cli.harness import alive, until
from tests.unit.egress.gatelab import OTHER, echo, gone
from tests.unit.egress.workerlab import RULE, held, pid, sandbox, settled

if TYPE_CHECKING:
    from tests.unit.egress.gatelab import Lab

pytestmark = [pytest.mark.root]


_ABOUT_ONE = [
    {"op": "listen"}, {"op": "agent"}, {"op": "publish", "key": 1, "inside": 1}, {"op": "answer"},
    {"op": "update", "network": {"mode": "nonsense"}}, {"op": "update"}, {"op": "dialled"}, {},
]  # fmt: skip
_ABOUT_NOBODY = [
    {"op": "add"}, {}, 5, "x", {"op": "remove", "id": 77}, {"op": "dialled", "id": "1", "request": None},
    {"op": "add", "id": 9, "network": {}, "secrets": {}, "authority": False},
    {"op": "add", "id": 9, "network": {"mode": "allowlist"}, "secrets": [], "authority": False},
]  # fmt: skip


@pytest.mark.parametrize("message", _ABOUT_NOBODY)
def test_bad_requests(worker: GateWorker, lab: Lab, message: object) -> None:
    """A request that cannot be done is said to have failed, takes no descriptor, and harms nobody."""
    with lab.server(echo, 9000), sandbox(worker) as made, made.connect() as client:
        assert made.say(client) == b"hello\n"
        before = held(pid(worker))
        packets.send(worker._socket, json.dumps(message).encode())
        packets.send(worker._socket, json.dumps(message).encode())
        settled(worker)
        assert made.say(client) == b"hello\n"
        assert held(pid(worker)) == before


@pytest.mark.parametrize("message", _ABOUT_ONE)
def test_bad_requests_about_a_sandbox(worker: GateWorker, lab: Lab, message: dict[str, object]) -> None:
    """It reaches nothing from then on, since what was not understood may have been a narrower policy. Its
    neighbour goes on.
    """
    with lab.server(echo, 9000), sandbox(worker) as one, sandbox(worker) as other:
        with one.connect() as client, other.connect() as neighbour:
            assert one.say(client) == other.say(neighbour) == b"hello\n"
            packets.send(worker._socket, json.dumps(message | {"id": one.share._number}).encode())
            assert worker.wait(lambda: one.share.ended)
            assert gone(client) in ("end", "reset")
            with pytest.raises(ConnectionRefusedError):
                one.connect()
            assert other.say(neighbour) == b"hello\n"
        assert one.share.finish().lost
        assert not other.share.finish().lost


def test_an_update_that_cannot_be_sent(
    worker: GateWorker, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker ends: it would go by a policy that holds no more. Control: one that can be sent."""
    with lab.server(echo, 9000), sandbox(worker) as made, made.connect() as client:
        made.share.update(Network(mode="allowlist", allow=(RULE, OTHER)))
        assert made.say(client) == b"hello\n"
        monkeypatch.setattr(packets, "MAX_PACKET", 1)
        monkeypatch.setattr(packets, "_INLINE", 1)
        with pytest.raises(SandboxError, match="has ended"):
            made.share.update(Network(mode="allowlist"))
        assert gone(client) in ("end", "reset")
        assert worker.wait(lambda: worker.over)
        assert made.share.use().lost


# -- the end -------------------------------------------------------------------------------------------


def test_killed(lab: Lab) -> None:
    """When it is killed every connection is cut, nothing more is reached, and each command hears of it."""
    worker = lab.call(GateWorker)
    with lab.server(echo, 9000) as server, sandbox(worker) as one, sandbox(worker) as other:
        with one.connect() as client:
            assert one.say(client) == b"hello\n"
            os.kill(pid(worker), signal.SIGKILL)
            assert gone(client) in ("end", "reset")
        assert gone(server.connections[0]) in ("end", "reset")
        for made in (one, other):
            with pytest.raises(OSError, match=r"refused|reset"), made.connect() as client:
                made.say(client)
        with made.place.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
            endpoint.connect(("198.18.0.1", 53))
            endpoint.send(b"query")
            with pytest.raises(ConnectionRefusedError):
                endpoint.recv(100)
        began = time.monotonic()
        assert [made.share.finish().lost for made in (one, other)] == [True, True]
        assert time.monotonic() - began < 2
        with pytest.raises(SandboxError) as caught:
            worker.open(Network(mode="allowlist"), {}, lambda made: made(-1), None)
        assert caught.value.code == "gate-lost"
    worker.close()


def test_killed_with_words_unread(lab: Lab) -> None:
    """What it had said before it died is not lost, also if its death shows when it is spoken to."""
    worker = lab.call(GateWorker)
    with sandbox(worker) as one, sandbox(worker) as other:
        with one.connect(9001) as client:
            assert gone(client) == "reset"
        settled(worker)
        until(lambda: held(pid(worker)))
        with one.connect(9002) as client:
            assert gone(client) == "reset"
        os.kill(pid(worker), signal.SIGKILL)
        until(lambda: _deaf(worker))
        assert worker.lost
        assert not worker.over
        worker.pump()
        assert worker.over
        assert one.share.ended
        assert other.share.ended
        told = [event for event in one.share.use().events if event["kind"] == "connect"]
        assert [event["port"] for event in told] == [9001, 9002]
    worker.close()


def _deaf(worker: GateWorker) -> bool:
    """Whether it does not hear any more: its last thread ends a moment after the kill."""
    try:
        worker.say({"op": "remove", "id": 99})
    except SandboxError:
        return True
    return False


def test_stopped(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that somebody has stopped does not keep its front end from ending."""
    monkeypatch.setattr(front, "_LAST_SECONDS", 0.2)
    worker = lab.call(GateWorker)
    settled(worker)
    os.kill(pid(worker), signal.SIGSTOP)
    worker.close()
    assert not Path(f"/proc/{pid(worker)}").exists()


_FRONT = """
import sys, time
from casemate.sandbox.gate import GateWorker
worker = GateWorker()
print(worker._pid, flush=True)
time.sleep(60)
"""


def test_the_front_end_is_killed() -> None:
    """The worker ends with its front end, however that ends."""
    process = subprocess.Popen([sys.executable, "-c", _FRONT], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    number = int(process.stdout.readline())
    assert alive(number)
    process.kill()
    process.wait()
    process.stdout.close()
    until(lambda: not alive(number), 5, "the worker's end")


def test_closed(lab: Lab) -> None:
    """A proper end: the process is gone, connections are cut."""
    worker = lab.call(GateWorker)
    with lab.server(echo, 9000), sandbox(worker) as made, made.connect() as client:
        assert made.say(client) == b"hello\n"
        worker.close()
        assert not Path(f"/proc/{pid(worker)}").exists()
        assert gone(client) in ("end", "reset")
