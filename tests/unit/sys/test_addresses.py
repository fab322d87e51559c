"""The host's own addresses, compared with what another program says of the same namespace."""

from __future__ import annotations

import ast
import subprocess
import sys
from ipaddress import ip_network
from pathlib import Path

import casemate
from casemate.sys.addresses import own_addresses

SOURCE = str(Path(casemate.__file__).parents[1])
PROGRAM = "import sys; sys.path.insert(0, sys.argv[1])\n" + (
    "from casemate.sys.addresses import own_addresses; print(sorted(own_addresses()))"
)
SCRIPT = """
ip link set lo up
ip link add d0 type veth peer name d1
ip link set d0 up
ip link set d1 up
ip addr add 192.0.2.7/24 dev d0
ip addr add 192.0.2.9 peer 198.51.100.1 dev d0
ip addr add 2001:db8::7/64 dev d0 nodad
ip route add local 203.0.113.0/28 dev lo
ip route add 198.51.100.128/25 via 192.0.2.254
exec "$@"
"""


def inside(script: str) -> set[str]:
    """What a fresh network namespace takes for its own after this script."""
    argv = ["unshare", "--net", "sh", "-ec", script, "sh", sys.executable, "-I", "-c", PROGRAM, SOURCE]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    return set(ast.literal_eval(done.stdout))


def test_every_address_of_this_host() -> None:
    """What ``ip`` lists of the interfaces is there, as plain text that reads back as addresses and nets."""
    done = subprocess.run(["ip", "-o", "addr"], capture_output=True, text=True, check=True)
    listed = {line.split()[3].partition("/")[0] for line in done.stdout.splitlines()}
    found = own_addresses()
    assert listed <= found
    assert "127.0.0.0/8" in found
    for text in found:
        assert str(ip_network(text)).removesuffix("/32").removesuffix("/128") == text


def test_addresses_that_only_a_route_gives() -> None:
    """Local routes count with their net; a peer's address and routes elsewhere do not."""
    found = inside(SCRIPT)
    assert {"192.0.2.7", "192.0.2.9", "2001:db8::7", "203.0.113.0/28", "127.0.0.1", "::1"} <= found
    assert not found & {"198.51.100.1", "198.51.100.128/25", "192.0.2.0/24", "192.0.2.254"}


def test_a_namespace_without_any() -> None:
    """Control: where nothing is up, nothing is found."""
    assert inside('exec "$@"') == set()
