"""The lab tells the truth: what is sent on its host arrives at its internet, is seen, and goes no further."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.network import neighbours, zone
from tests.network.lab import Lab
from tests.network.sniff import parse

if TYPE_CHECKING:
    from tests.cli.harness import Caller

pytestmark = [pytest.mark.security, pytest.mark.root]

PYTHON = "/usr/bin/python3"


def said(lab: Lab, script: str, uid: int = 0) -> str:
    """A shell script on the lab host, which must end well; its stdout."""
    done = lab.bare("sh", "-c", script, uid=uid)
    assert done.returncode == 0, (script, done.stdout, done.stderr)
    return done.stdout.decode()


def test_names_and_pages(lab: Lab) -> None:
    """Names resolve, pages come over both versions and over TLS that is verified, and each step is told."""
    mark = lab.mark()
    assert "hello from allowed.example at 93.184.216.34" in said(lab, "curl -4sS https://allowed.example/one")
    assert "at 2606:2800:220:1::34" in said(lab, "curl -6sS http://allowed.example/two")
    events = lab.since(mark)
    assert {event["name"] for event in events if event["kind"] == "dns"} == {"allowed.example"}
    pages = [(e["target"], e["to"], e["tls"]) for e in events if e["kind"] == "http"]
    assert pages == [("/one", "93.184.216.34", True), ("/two", "2606:2800:220:1::34", False)]
    assert [e["name"] for e in events if e["kind"] == "sni"] == ["allowed.example"]
    packets = [e for e in events if e["kind"] == "packet" and e["proto"] == "tcp"]
    assert [(e["to"], e["port"]) for e in packets] == [("93.184.216.34", 443), ("2606:2800:220:1::34", 80)]
    assert lab.bare("curl", "-sS", "https://untrusted.example/").returncode == 60


@pytest.mark.parametrize(
    "address", ["45.1.2.3", zone.METADATA, "100.100.100.200", "10.1.2.3", "192.168.1.1", "240.1.2.3",
                "[fd00:ec2::254]", "[2a00::5]", "[64:ff9b::a9fe:a9fe]", "[2002:a9fe:a9fe::1]"],
)  # fmt: skip
def test_every_address_exists(lab: Lab, address: str) -> None:
    """Whatever address is dialled on the lab host, there is somebody."""
    mark = lab.mark()
    said(lab, f"curl -sS 'http://{address}:8080/'", uid=1000)
    (event,) = [event for event in lab.since(mark) if event["kind"] == "http"]
    assert event["to"] == address.strip("[]")


def test_names_that_say_where_they_lead(lab: Lab) -> None:
    """Names below to.example lead to what they spell, change if they say so, and pass through an alias."""
    for name, wanted in {
        zone.to("x", "10.1.2.3", "fd00::1"): {"10.1.2.3", "fd00::1"},
        zone.to("x-cname", "10.1.2.3"): {"10.1.2.3"},
        "v6only.example": {"2606:2800:220:1::43"},
    }.items():
        found = said(lab, f"getent ahosts {name}")
        assert {line.split()[0] for line in found.splitlines()} == wanted
    flip = zone.to("flip", "45.0.0.1", "127.0.0.1")
    assert [said(lab, f"getent ahostsv4 {flip}").split()[0] for _ in range(3)] == [
        "45.0.0.1", "127.0.0.1", "45.0.0.1",
    ]  # fmt: skip
    # The host has a search list, as many have: a name that does not exist is tried with that ending, too.
    assert "45.77.250.1" in said(lab, "getent ahosts nobody.example")
    assert lab.bare("getent", "ahosts", "nobody.example.").returncode == 2


def test_anything_that_leaves_is_seen(lab: Lab) -> None:
    """Datagrams, raw packets and connections to ports where nobody listens are told, with what they carry."""
    script = """
import socket
for family, to in ((socket.AF_INET, "45.9.9.9"), (socket.AF_INET6, "2a00::9")):
    socket.socket(family, socket.SOCK_DGRAM).sendto(b"a datagram", (to, 4433))
    with socket.socket(family) as s:
        print(s.connect_ex((to, 4444)))
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, 253)
raw.sendto(b"a raw packet", ("45.9.9.9", 0))
ping = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
ping.sendto(b"\\x08\\0\\xf7\\xff\\0\\0\\0\\0pinging", ("45.9.9.9", 0))
"""
    mark = lab.mark()
    done = lab.bare(PYTHON, "-c", script)
    assert done.stdout.split() == [b"111", b"111"], done.stderr
    seen = {(e["proto"], e["to"], e.get("port"), e["data"]) for e in lab.since(mark) if e["kind"] == "packet"}
    assert seen == {
        ("udp", "45.9.9.9", 4433, "a datagram"), ("udp", "2a00::9", 4433, "a datagram"),
        ("tcp", "45.9.9.9", 4444, ""), ("tcp", "2a00::9", 4444, ""),
        ("253", "45.9.9.9", None, "a raw packet"), ("icmp", "45.9.9.9", None, "pinging"),
    }  # fmt: skip


def test_the_hosts_own_services(lab: Lab) -> None:
    """Loopback, own addresses and unix sockets of the lab host answer there, and tell."""
    mark = lab.mark()
    for place in (f"127.0.0.1:{neighbours.LOOPBACK}", f"[::1]:{neighbours.LOOPBACK}",
                  f"{zone.HOST4}:{neighbours.OWN}", f"127.8.8.8:{neighbours.EVERY}"):  # fmt: skip
        assert "a service of the host" in said(lab, f"curl -sS 'http://{place}/'", uid=1000)
    said(lab, f"curl -sS --unix-socket {lab.sockets}/stream.sock http://x/ --output /dev/null", uid=1000)
    said(lab, "curl -sS --abstract-unix-socket casemate-lab.stream http://x/ --output /dev/null")
    names = [e["service"] for e in lab.since(mark) if e["kind"] == "bytes"]
    assert names == ["loopback4", "loopback6", "own4", "every", "path-stream", "abstract"]


def test_git_server(lab: Lab, tmp_path: Path) -> None:
    """The git server takes a push with the token and no other."""
    lab.repository("lab.git")
    script = f"""
    set -e
    cd {tmp_path}
    git init -q -b main . && echo text >file && git add file
    git -c user.name=t -c user.email=t@example.invalid commit -q -m first
    git push -q "https://x:$TOKEN@git.example/git/lab.git" HEAD:main
    """
    env = {"GIT_TERMINAL_PROMPT": "0", "HOME": str(tmp_path)}
    refused = lab.bare("sh", "-c", script, env={**env, "TOKEN": "wrong"})
    assert refused.returncode != 0
    done = lab.bare("sh", "-c", f"rm -rf {tmp_path}/.git; {script}", env={**env, "TOKEN": lab.token})
    assert done.returncode == 0, done.stderr
    log = subprocess.run(
        ["git", "-C", str(lab.repositories / "lab.git"), "log", "--format=%s", "main"], capture_output=True,
        check=True, env={"PATH": os.environ["PATH"], "GIT_CONFIG_COUNT": "1",
                         "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"},
    )  # fmt: skip
    assert log.stdout == b"first\n"


def test_nothing_of_the_machine_changes() -> None:
    """A lab leaves no device, mount, process or file behind, and the machine never has any of it."""

    def machine() -> tuple[object, ...]:
        names = ("resolv.conf", "hosts", "nsswitch.conf", "hostname")
        texts = [Path("/etc", name).read_bytes() for name in names if Path("/etc", name).exists()]
        mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "net-" in line]
        devices = Path("/proc/net/dev").read_text().count("\n")
        return texts, mounts, devices, os.uname().nodename, Path("/proc/net/route").read_text()

    before = machine()
    made = Lab()
    try:
        assert machine() == before
        assert made.bare("hostname").stdout == b"lab-host\n"
    finally:
        made.close()
    assert machine() == before
    assert not made.base.exists()
    assert made.internet.process.returncode == 0
    assert made.neighbours.process.returncode == 0


def test_the_sandbox_runs_there(caller: Caller, lab: Lab) -> None:
    """On the lab host a command runs as on any other, and by default it has no network at all."""
    ws = caller.workspace()
    mark = lab.mark()
    ended = caller.sh(ws, "echo inside; curl -sS -m 2 http://93.184.216.34/ || echo refused")
    assert (ended.code, ended.out.split()) == (0, [b"inside", b"refused"]), ended
    assert [event for event in lab.since(mark) if event.get("to") == "93.184.216.34"] == []


def test_frames_of_any_kind_are_read() -> None:
    """Frames are told by protocol, and what the kernel says by itself is left out."""
    ether = b"\0" * 12
    v6 = b"\x60\0\0\0\0\x08\x3a\xff" + b"\x20" * 32
    assert parse(ether + b"\x86\xdd" + v6 + b"\x87" + b"\0" * 7) is None
    assert parse(ether + b"\x86\xdd" + v6 + b"\x80" + b"\0" * 7) is not None
    assert parse(ether + b"\x08\x06" + b"\0" * 28) is None
    other = parse(ether + b"\x88\xcc" + b"\0" * 28)
    assert other is not None
    assert other["proto"] == "88cc"
