"""The doors that a policy opens: they lead where it says, are shut when it says, and there are no others."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.harness import until
from tests.network import neighbours, zone
from tests.network.matrix import policy_text
from tests.security.lab import drop_to

if TYPE_CHECKING:
    from tests.cli.harness import Caller, Ended
    from tests.network.lab import Lab

pytestmark = [pytest.mark.security, pytest.mark.root]


def run(caller: Caller, network: dict[str, Any], script: str, *flags: str, top: str = "") -> Ended:
    """A shell script under a policy."""
    ws = caller.workspace()
    policy = caller.file(ws.parent / "policy.toml", policy_text({"mode": "allowlist", **network}) + top)
    return caller.sh(ws, script, flags=("--policy", str(policy), "--no-daemon", *flags))


def name(prefix: str = "door") -> str:
    """A word that nobody else says."""
    return prefix + secrets.token_hex(5)


def pages(lab: Lab, mark: tuple[int, int], word: str) -> list[str]:
    """The targets with this word that servers were asked for."""
    return [e["target"] for e in lab.since(mark) if e["kind"] == "http" and word in e["target"]]


# A program of the library: opens a sandbox, starts a command, changes the rules, tells when.
LIVE = """
import asyncio, sys
from casemate import AsyncSandbox
from casemate.policy.model import FlagLayer

async def main():
    flags = FlagLayer(network="allowlist", allow=("allowed.example:80,9000",))
    async with AsyncSandbox(workspace=sys.argv[1], flags=flags) as sandbox:
        running = asyncio.ensure_future(sandbox.run(["/usr/bin/python3", "-c", sys.argv[2]]))
        await asyncio.to_thread(sys.stdin.readline)
        await sandbox.change_network(allow=("also.example",))
        print("changed", flush=True)
        result = await running
        print(result.stdout.decode(), flush=True)
asyncio.run(main())
"""
HOLDS = """
import socket, time, urllib.request
with socket.create_connection(("allowed.example", 9000)) as held:
    held.sendall(b"WORD begin\\n")
    held.recv(99)
    held.settimeout(15)
    try:
        gone = held.recv(99) == b""
    except OSError as error:
        gone = not isinstance(error, TimeoutError)
def get(url):
    try:
        return urllib.request.urlopen(url, timeout=5).status
    except OSError as error:
        return "no"
print("cut" if gone else "held", get("http://allowed.example/WORDafter"), get("http://also.example/WORDnew"))
"""


def test_a_revoked_host_is_cut(lab: Lab, caller: Caller) -> None:
    """Rules change while a command runs: what is revoked is cut at once, what is new is reached."""
    word, ws = name(), caller.workspace()
    python = caller.command.parent / "python3"
    process = subprocess.Popen(
        [*lab.prefix, str(ws), *drop_to(caller.uid), str(python), "-I", "-c", LIVE, str(ws),
         HOLDS.replace("WORD", word)],
        env=caller.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
         text=True,
    )  # fmt: skip
    caller.open.append(process)  # type: ignore[arg-type]
    mark = lab.mark()
    assert lab.until(mark, lambda e: e["kind"] == "bytes" and word in e["data"], 20), process.poll()
    out, err = process.communicate("\n", 30)
    assert out.split() == ["changed", "cut", "no", "200"], (out, err)
    assert pages(lab, mark, word) == [f"/{word}new"]


def test_nothing_of_the_gate_listens_on_the_host(lab: Lab, caller: Caller) -> None:
    """While a command with a gate runs, the host has no socket that listens which it did not have before."""

    def listening() -> set[str]:
        found = lab.bare(
            "sh", "-c", "cat /proc/net/tcp /proc/net/tcp6 /proc/net/udp /proc/net/udp6 /proc/net/raw"
        )
        lines = [line.split() for line in found.stdout.decode().splitlines() if ":" in line.split()[1]]
        return {f"{words[1]} {words[3]}" for words in lines if words[3] in ("0A", "07")}

    before = listening()
    ws, word = caller.workspace(), name()
    process = caller.start(
        "run", "--allow", "allowed.example", "--no-daemon", "--", "sh", "-c",
        f"curl -sS http://allowed.example/{word}; read line", cwd=ws,
    )  # fmt: skip
    mark = lab.mark()
    assert lab.until(mark, lambda e: word in str(e.get("target")), 20)
    now = listening()
    process.communicate(b"\n", 20)
    caller.end(process)
    assert now - before == set()


def test_the_worker_has_no_rights(lab: Lab, caller: Caller) -> None:
    """The process that reads what a sandbox sends has no capability and, as root, a uid of its own."""
    ws, word = caller.workspace(), name()
    process = caller.start(
        "run", "--allow", "allowed.example", "--no-daemon", "--", "sh", "-c",
        f"curl -sS http://allowed.example/{word}; read line", cwd=ws,
    )  # fmt: skip
    mark = lab.mark()
    assert lab.until(mark, lambda e: word in str(e.get("target")), 20)
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (place / "cmdline").read_bytes().split(b"\0")
            if any(b"egress.worker" in w for w in words) and str(caller.command.parent).encode() in words[0]:
                text = (place / "status").read_text()
                found[place.name] = dict(re.findall(r"^(\w+):\s*(.*)$", text, re.MULTILINE))
                found[place.name]["fds"] = str(len(os.listdir(place / "fd")))
    process.communicate(b"\n", 20)
    caller.end(process)
    (status,) = found.values()
    assert {status[key].strip("0") for key in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {""}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert int(status["fds"]) <= 16, status["fds"]
    uids = {int(uid) for uid in status["Uid"].split()}
    assert len(uids) == 1
    assert uids == {1000} if caller.uid else min(uids) > 65536
    until(lambda: not Path(f"/proc/{next(iter(found))}").exists(), 10, "the worker's end")


def test_published_ports_are_the_loopbacks(lab: Lab, caller: Caller) -> None:
    """A published port is reached from the host's loopback, and not from its other addresses."""
    ws = caller.workspace()
    process = caller.start(
        "run", "--no-daemon", "-p", "3100:8000", "--", "/usr/bin/python3", "-m", "http.server", "8000", cwd=ws
    )
    try:
        until(lambda: lab.bare("curl", "-sS", "-m", "3", "http://127.0.0.1:3100/").returncode == 0, 15)
        for place in (zone.HOST4, f"[{zone.HOST6}]"):
            assert lab.bare("curl", "-sS", "-m", "2", f"http://{place}:3100/").returncode != 0
    finally:
        process.terminate()
        caller.end(process)


def test_services_of_the_host(lab: Lab, caller: Caller) -> None:
    """A service of the host's loopback is reached by the name for that and its port, and by nothing else."""
    port, other = neighbours.LOOPBACK, neighbours.EVERY
    word = name()
    script = f"""
    curl -sS -m 3 http://host.casemate.internal:{port}/{word}a || echo no
    curl -sS -m 3 http://host.casemate.internal:{other}/{word}b || echo no
    curl -sS -m 3 http://127.0.0.1:{port}/{word}c || echo no
    curl -sS -m 3 http://{zone.HOST4}:{other}/{word}d || echo no
    """
    mark = lab.mark()
    ended = run(caller, {"allow": [f"host.casemate.internal:{port}"]}, script)
    assert ended.out.startswith(b"a service of the host: loopback"), ended
    seen = "".join(e["data"] for e in lab.since(mark) if e["kind"] == "bytes" and "service" in e)
    assert f"{word}a" in seen
    assert not any(word + letter in seen for letter in "bcd")


def test_named_sockets(lab: Lab, caller: Caller) -> None:
    """A unix socket that the policy names is there, and its neighbours are not."""
    good, bad, word = lab.sockets / "stream.sock", lab.sockets / "docker.sock", name()
    script = f"""
    curl -sS -m 3 --unix-socket {good} http://x/{word}a || echo no
    curl -sS -m 3 --unix-socket {bad} http://x/{word}b 2>/dev/null || echo no
    """
    mark = lab.mark()
    ended = run(caller, {"mode": "none", "sockets": [str(good)]}, script)
    assert ended.out.split(b"\n")[1:] == [b"no", b""], ended
    seen = "".join(e["data"] for e in lab.since(mark) if e["kind"] == "bytes")
    assert f"{word}a" in seen
    assert f"{word}b" not in seen
    warned = run(caller, {"mode": "none", "sockets": [str(bad)]}, "true")
    assert b"docker" in warned.err, warned


def test_a_parent_proxy_needs_its_word(lab: Lab, caller: Caller) -> None:
    """Through another proxy only where the policy says so twice; then all goes through it, and it is told."""
    word = name()
    network = {"allow": ["allowed.example"], "parent-proxy": f"http://proxy.example:{zone.PROXY}"}
    mark = lab.mark()
    refused = run(caller, network, f"curl -sS http://allowed.example/{word}a")
    assert refused.code == 126, refused
    assert pages(lab, mark, word) == []
    report = caller.workspace().parent / "report.json"
    ended = run(
        caller, network,
        f"curl -sS http://allowed.example/{word}b; curl -sS http://other.example/{word}c || true",
        "--report", str(report), top='[isolation]\ndegrade = ["parent-proxy"]\n',
    )  # fmt: skip
    assert ended.code == 0, ended
    assert pages(lab, mark, word) == [f"/{word}b"]
    asked = [e["head"].split()[1] for e in lab.since(mark) if e["kind"] == "proxy"]
    assert asked == ["allowed.example:80"]
    assert json.loads(report.read_text())["degraded"] == ["parent-proxy"]


def test_a_question_without_an_answer_is_a_no(lab: Lab, caller: Caller) -> None:
    """Where the policy asks and nobody is there to answer, nothing is reached, looked up or kept waiting."""
    word = name()
    mark = lab.mark()
    ended = run(
        caller, {"allow": ["also.example"], "ask": True}, f"curl -sS -m 8 http://other.example/{word} || true"
    )
    assert ended.code == 0, ended
    assert [e for e in lab.since(mark) if e["kind"] == "dns" and "other.example" in e["name"]] == []
    assert pages(lab, mark, word) == []


def test_learning_says_what_was_needed(lab: Lab, caller: Caller) -> None:
    """learn lets a command reach what it wants and prints the rules with which the same command works."""
    word = name()
    script = f"curl -sS http://other.example/{word}a; curl -sS https://also.example/{word}b"
    mark = lab.mark()
    ended = caller.cli("learn", "--", "sh", "-c", script, cwd=caller.workspace())
    assert ended.code == 0, ended
    assert len(pages(lab, mark, word)) == 2
    text = (ended.out + ended.err).decode()
    rules = re.findall(r'"((?:other|also)\.example[^"]*)"', text)
    assert {rule.partition(":")[0] for rule in rules} == {"other.example", "also.example"}, text
    again = run(caller, {"allow": sorted(set(rules))}, script)
    assert again.code == 0, again
    assert len(pages(lab, mark, word)) == 4


def test_every_decision_is_told(lab: Lab, caller: Caller) -> None:
    """The report has each connection with name, address, rule, bytes and time, each refusal with its line."""
    ws = caller.workspace()
    report = ws.parent / "report.json"
    ended = caller.sh(
        ws, "curl -sS http://allowed.example/big?n=100000 | wc -c; curl -sS -m 3 http://93.184.216.35/; true",
        flags=("--allow", "allowed.example", "--no-daemon", "--report", str(report)),
    )  # fmt: skip
    assert ended.out.startswith(b"100000"), ended
    network = json.loads(report.read_text())["network"]
    allowed = [e for e in network["events"] if e["verdict"] == "allow" and e["kind"] == "connect"]
    refused = [e for e in network["events"] if e["verdict"] == "deny"]
    assert len(allowed) == len(refused) == 1, network
    event = allowed[0]
    assert (event["host"], event["port"], event["rule"]) == ("allowed.example", 80, "allowed.example")
    assert event["address"] in zone.NAMES["allowed.example"]
    assert event["received"] >= 100000
    assert event["sent"] > 50
    assert event["ms"] > 0
    assert (refused[0]["host"], refused[0]["port"]) == ("93.184.216.35", 80)
    assert refused[0]["allow"] == 'network.allow = ["93.184.216.35:80"]'


def test_the_answer_of_a_refusal_does_not_wait(lab: Lab, caller: Caller) -> None:
    """What is refused is refused at once, not after a time that a person notices; so is a datagram."""
    script = """
import socket, time
def timed(act):
    start = time.monotonic()
    try:
        act()
    except OSError:
        pass
    return time.monotonic() - start
def tcp():
    with socket.create_connection(("45.1.1.1", 4444), 5) as s:
        s.settimeout(5)
        s.sendall(b"x")
        s.recv(9)
def udp():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(5)
        s.connect(("45.1.1.1", 443))
        s.send(b"x")
        s.recv(9)
def name():
    socket.getaddrinfo("other.example", 80)
print(max(timed(act) for act in (tcp, udp, name)))
"""
    ws = caller.workspace()
    ended = caller.py(ws, script, flags=("--allow", "allowed.example", "--no-daemon"))
    assert float(ended.out) < 1.0, ended
