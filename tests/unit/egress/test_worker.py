"""The worker as a process: what it may do, what it holds, how it ends, and what is left when it is killed."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from casemate.egress.worker import FIRST_UID
from casemate.policy.model import Credential, Network
from tests.cli.harness import until
from tests.unit.egress.gatelab import ALLOWED, OTHER, Server, echo, exactly, gone, silent
from tests.unit.egress.workerlab import RULE, Sandbox, held, pid, sandbox, settled, status, ticks

if TYPE_CHECKING:
    from casemate.sandbox.gate import GateWorker
    from tests.unit.egress.gatelab import Lab

pytestmark = [pytest.mark.root]


# -- rights --------------------------------------------------------------------------------------------


def test_it_has_no_rights(worker: GateWorker) -> None:
    """A uid that nobody has, no group, no capability now or ever, none of its caller's streams."""
    settled(worker)
    found = status(pid(worker))
    assert found["Uid"].split() == [str(FIRST_UID + pid(worker))] * 4
    assert found["Groups"] == ""
    assert {found[f"Cap{kind}"] for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
    assert found["NoNewPrivs"] == "1"
    place = f"/proc/{pid(worker)}"
    assert [os.readlink(f"{place}/fd/{number}") for number in (0, 1, 2)] == ["/dev/null"] * 3
    assert os.readlink(f"{place}/cwd") == "/"
    assert os.stat(f"{place}/environ").st_uid == 0  # it cannot be dumped, so its files are not its uid's
    names = {word.partition(b"=")[0] for word in Path(f"{place}/environ").read_bytes().split(b"\0") if word}
    assert names <= {b"LC_ALL", b"PATH", b"SSL_CERT_FILE", b"SSL_CERT_DIR", b"LOCALDOMAIN", b"RES_OPTIONS"}


_TRY = """
import fcntl, json, os, resource, socket, sys, threading
from casemate.egress import worker
if sys.argv[1] == "sealed":
    worker._give_up_rights()
def attempt(act):
    try:
        act()
        return True
    except (OSError, RuntimeError):
        return False
def start(kind):
    pid = kind()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
def execute():
    try:
        os.execv("/no/such/program", ["x"])
    except FileNotFoundError:
        pass  # it was looked for
def thread():
    made = threading.Thread(target=socket.getaddrinfo, args=("localhost", 80))
    made.start()
    made.join()
print(json.dumps({
    "write": attempt(lambda: open(sys.argv[2] + "/new", "w").close()),
    "read": attempt(lambda: open(sys.argv[2] + "/secret").close()),
    "program": attempt(lambda: open(worker.__file__).close()),
    "names": attempt(lambda: open("/etc/hosts").close()),
    "process": attempt(lambda: os.readlink(f"/proc/{sys.argv[3]}/exe")),
    "signal": attempt(lambda: os.kill(int(sys.argv[3]), 0)),
    "uid": attempt(lambda: os.setuid(0)),
    "raw": attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close()),
    "fork": attempt(lambda: start(os.fork)),
    "spawn": attempt(lambda: start(lambda: os.posix_spawn("/bin/true", ["true"], {}))),
    "exec": attempt(execute),
    "memory": attempt(lambda: os.close(os.memfd_create("x"))),  # certificates, long messages
    "mode": attempt(lambda: os.chmod(sys.argv[2] + "/secret", 0o644)),
    "limit": attempt(lambda: resource.prlimit(int(sys.argv[3]), resource.RLIMIT_CORE)),
    "priority": attempt(lambda: os.setpriority(os.PRIO_PROCESS, int(sys.argv[3]), 0)),
    "owner": attempt(lambda: fcntl.fcntl(socket.socket(), fcntl.F_SETOWN, int(sys.argv[3]))),
    "packet": attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM).close()),
    "handle": attempt(lambda: os.close(os.pidfd_open(int(sys.argv[3])))),
    "thread": attempt(thread),
    "tcp": attempt(lambda: socket.socket().close()),
}))
"""


def test_what_it_cannot_do(tmp_path: Path) -> None:
    """It writes no file, reads nobody's, reaches no process; control: before it gave its rights up."""
    tmp_path.chmod(0o777)
    (tmp_path / "secret").write_text("x")

    def run(how: str) -> dict[str, bool]:
        (tmp_path / "new").unlink(missing_ok=True)
        done = subprocess.run([sys.executable, "-c", _TRY, how, str(tmp_path), str(os.getpid())],
                              capture_output=True, text=True, check=True, timeout=60)  # fmt: skip
        found: dict[str, bool] = json.loads(done.stdout)
        return found

    assert set(run("free").values()) == {True}
    sealed = run("sealed")
    assert {name for name, done in sealed.items() if done} == {"program", "names", "memory", "thread", "tcp"}


def test_a_terminals_signals_pass_it_by(worker: GateWorker, lab: Lab) -> None:
    """Ctrl-C and a hang-up are for the command: the gate goes on."""
    with lab.server(echo, 9000), sandbox(worker) as made, made.connect() as client:
        assert made.say(client) == b"hello\n"
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
            os.kill(pid(worker), number)
        assert made.say(client) == b"hello\n"


def test_secrets_are_in_its_memory_alone(worker: GateWorker) -> None:
    """A credential's value is in no argument, no variable and no answer, even where it cannot be used."""
    secret = "a-secret-that-nobody-sees"
    credential = Credential(name="T", hosts=(ALLOWED,), source="env:T", as_="bearer", add=False)
    with sandbox(worker, ALLOWED, credentials=(credential,), secrets={"T": secret}) as made:
        assert worker.wait(lambda: made.share.ready)
        assert made.share._placeholders["T"] != secret
        assert "BEGIN CERTIFICATE" in made.share._certificate
        for name in ("cmdline", "environ"):
            assert secret.encode() not in Path(f"/proc/{pid(worker)}/{name}").read_bytes()
    network = Network(mode="allowlist", allow=(ALLOWED,), credentials=(credential,))
    bad = worker.open(network, {"T": "\0" + secret}, lambda made: made(-1), None)
    assert worker.wait(lambda: bad.ready)
    assert bad._failed == "ValueError"


# -- serving -------------------------------------------------------------------------------------------


def test_one_sandbox(worker: GateWorker, lab: Lab) -> None:
    """Connections, events, totals: the whole life of one."""
    with lab.server(echo, 9000), sandbox(worker) as made:
        with made.connect() as client:
            assert made.say(client) == b"hello\n"
        with made.connect(9001) as client:
            assert gone(client) == "reset"
        use = made.share.finish()
        assert (use.capture, use.allowed, use.refused, use.sent, use.received) == ("sk_lookup", 1, 1, 6, 6)
        assert sorted((event["verdict"], event["kind"]) for event in use.events) == [
            ("allow", "connect"), ("allow", "dns"), ("deny", "connect"),
        ]  # fmt: skip
        assert not use.lost
        with pytest.raises(ConnectionRefusedError):
            made.connect()


def test_what_is_looked_into(worker: GateWorker, lab: Lab) -> None:
    """With its filter and without any file it makes certificates that clients believe, and bears words of any
    length, which come shortened to whoever reads of them.
    """
    credential = Credential(name="T", hosts=(ALLOWED,), source="env:T", as_="bearer", add=False)
    how = {"credentials": (credential,), "secrets": {"T": "a-secret-that-nobody-sees"}}
    with lab.server(echo, 443), sandbox(worker, ALLOWED, **how) as made:
        assert worker.wait(lambda: made.share.ready)
        context = ssl.create_default_context(cadata=made.share._certificate)
        with made.connect(443) as plain, context.wrap_socket(plain, server_hostname=ALLOWED) as client:
            client.sendall(b"A" * 66_000 + b" / HTTP/1.1\r\nHost: other.example\r\n\r\n")
            assert b" 403 " in client.recv(100)
        use = made.share.finish()
        assert not use.lost
        (event,) = [event for event in use.events if event["kind"] == "request"]
        assert event["detail"].startswith("AAA")
        assert all(len(str(value)) <= 500 for event in use.events for value in event.values())


def test_sandboxes_do_not_meet(worker: GateWorker, lab: Lab) -> None:
    """Each has its own policy, names and events; the end of one is not the other's."""
    with lab.server(echo, 9000), sandbox(worker) as one, sandbox(worker, f"{OTHER}:9000", ALLOWED) as other:
        with one.connect() as client, other.connect() as refused:
            assert one.say(client) == b"hello\n"
            assert gone(refused) == "reset"
            assert other.share.finish().refused == 1
            assert one.say(client) == b"hello\n"
        assert one.share.finish().refused == 0


def test_update_and_questions(worker: GateWorker, lab: Lab) -> None:
    """A new policy and a reviewer's answer take the way through the channel."""
    asked: list[dict[str, object]] = []

    def review(question: dict[str, object], reply: Any) -> None:
        asked.append(question)
        reply(True, "session")

    with lab.server(echo, 9000), sandbox(worker, ask=True, review=review) as made:
        with made.connect(9000) as client:
            assert made.say(client) == b"hello\n"
            made.share.update(Network(mode="allowlist", ask=True))
            assert gone(client) in ("end", "reset")
        with made.connect(9000) as client:
            client.sendall(b"hello\n")
            assert worker.wait(lambda: bool(asked))
            assert exactly(client, 6) == b"hello\n"
        assert asked == [{"kind": "network", "host": ALLOWED, "port": 9000, "protocol": "tcp"}]


def test_a_reviewer_nobody_named(worker: GateWorker, lab: Lab) -> None:
    """Without a reviewer every question is a no."""
    with lab.server(echo, 9000), sandbox(worker, ALLOWED, ask=True) as made, made.connect(9000) as client:
        client.sendall(b"hello\n")
        assert worker.wait(lambda: any(event["verdict"] == "deny" for event in made.share._events))
        assert gone(client) == "reset"


def test_published(worker: GateWorker, lab: Lab) -> None:
    """A listener of the host leads to a server inside, by a socket that the front end has made."""
    listener = lab.call(lambda: socket.create_server(("127.0.0.1", 0)))
    with listener, sandbox(worker) as made:
        server = Server(made.place.listen(7000), echo)
        undo = made.share.publish(listener.fileno(), 7000)
        where = listener.getsockname()
        with lab.call(lambda: socket.create_connection(where, 10)) as client:
            client.sendall(b"hello\n")
            until(lambda: worker.pump() or server.connections)  # type: ignore[func-returns-value]
            assert exactly(client, 6) == b"hello\n"
        undo()
        server.close()


def test_a_front_end_that_does_not_listen(worker: GateWorker, lab: Lab) -> None:
    """While nobody reads what it says it goes on serving, and says all of it later."""
    count = 1000  # as many refusals as are told one by one
    with lab.server(echo, 9000), sandbox(worker) as made, made.connect() as client:
        from tests.unit.egress import wire

        with made.place.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
            endpoint.connect(("198.18.0.1", 53))
            for number in range(count):
                endpoint.send(wire.query(wire.name(f"{'x' * 50}{number}.evil.example")))
                endpoint.recv(4096)
        assert made.say(client) == b"hello\n"
        use = made.share.finish()
        assert use.refused == count
        assert len([event for event in use.events if event["verdict"] == "deny"]) == count


# -- what it costs -------------------------------------------------------------------------------------


def test_descriptors_of_an_idle_sandbox(worker: GateWorker) -> None:
    """An idle sandbox costs three descriptors at most, and none when it has ended."""
    settled(worker)
    before = held(pid(worker))
    made = [Sandbox(worker, RULE) for _ in range(20)]
    settled(worker)
    assert held(pid(worker)) - before <= 3 * len(made)
    for one in made:
        one.share.finish()
        one.close()
    assert held(pid(worker)) == before


def test_it_is_idle_when_nothing_happens(worker: GateWorker, lab: Lab) -> None:
    """With sandboxes, connections and questions that wait, it uses no processor time at all."""
    with lab.server(silent, 9000), lab.server(silent, 443), sandbox(worker, RULE, ALLOWED, ask=True) as made:
        clients = [made.connect() for _ in range(5)] + [made.connect(443) for _ in range(5)]
        for client in clients[:3]:
            client.sendall(b"hello\n")
        clients[8].sendall(b"\x16\x03\x01\x02")
        clients[9].sendall(b"\x16")
        for client in clients[:2]:
            client.shutdown(socket.SHUT_WR)
        settled(worker)
        # A moment in which nothing is left to do, then a second of it.
        mark = until(lambda: _quiet(pid(worker)), 10)
        assert ticks(pid(worker)) - mark <= 1
        for client in clients:
            client.close()


def _quiet(number: int) -> int:
    """The ticks after a second without any, or 0."""
    before, end = ticks(number), time.monotonic() + 1.0
    while time.monotonic() < end:
        time.sleep(0.05)
    return before if ticks(number) - before <= 1 and before else 0


def test_a_thousand_connections(worker: GateWorker, lab: Lab) -> None:
    """A thousand connections from ten sandboxes at a time all come through; afterwards nothing is left."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit[0], min(8192, limit[1])), limit[1]))
    try:
        with lab.server(echo, 9000):
            settled(worker)
            before = held(pid(worker))
            made = [Sandbox(worker, RULE) for _ in range(10)]
            for one in made:
                one.resolve()
            idle = held(pid(worker))
            clients = [(number, one, one.connect()) for number, one in enumerate(made) for _ in range(100)]
            for number, _, client in clients:
                client.sendall(b"%06d\n" % number)
            for number, _, client in clients:
                assert exactly(client, 7) == b"%06d\n" % number
            assert held(pid(worker)) >= idle + 2000
            for _, _, client in clients:
                client.close()
            until(lambda: held(pid(worker)) == idle)
            for one in made:
                use = one.share.finish()
                assert (use.allowed, use.refused, use.untold) == (100, 0, 0)
                one.close()
            assert held(pid(worker)) == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
