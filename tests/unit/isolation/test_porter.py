"""The porter: sockets inside other networks, made by a process that is nowhere else."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from casemate.errors import SandboxError
from casemate.isolation.process.porter import Porter
from tests.cli.harness import alive, until
from tests.unit.sys.netns import Network, network

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.root]


@pytest.fixture(scope="module")
def place() -> Iterator[Network]:
    """A network as a sandbox has one."""
    with network() as made:
        yield made


def namespace(pid: int) -> int:
    """A descriptor of a process's network."""
    return os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)


# The porter forks a process of one thread, which that of the tests is not.
_CALLER = """
import json, os, socket, sys
from casemate.errors import SandboxError
from casemate.isolation.process.porter import Porter
from casemate.sys import packets
channel = socket.socket(fileno=int(sys.argv[1]))
porter = Porter()
while (asked := packets.receive(channel))[0] is not None:
    what, handles = asked
    if what == b"end":
        porter.close()
        packets.send(channel, b"ended")
        continue
    try:
        made = porter.socket(handles[0])
        packets.send(channel, f"{porter._pid}".encode(), [made])
        os.close(made)
    except SandboxError as error:
        packets.send(channel, f"{error.code} {error}".encode())
    for handle in handles:
        os.close(handle)
"""


class Caller:
    """A launcher that has a porter."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = ours
        self.channel.settimeout(10)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CALLER, str(theirs.fileno())], pass_fds=[theirs.fileno()],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        theirs.close()
        self.porter = 0

    def ask(self, descriptor: int) -> socket.socket:
        """A socket in the network behind a descriptor."""
        from casemate.sys import packets

        packets.send(self.channel, b"socket", [descriptor])
        payload, handles = packets.receive(self.channel)
        assert payload is not None
        if not handles:
            code, _, text = payload.decode().partition(" ")
            raise SandboxError(text, code=code)
        self.porter = int(payload)
        made = socket.socket(fileno=handles[0])
        made.settimeout(5)
        return made

    def inside(self, pid: int) -> socket.socket:
        """A socket in a process's network."""
        where = namespace(pid)
        try:
            return self.ask(where)
        finally:
            os.close(where)

    def end(self) -> None:
        from casemate.sys import packets

        packets.send(self.channel, b"end")
        packets.receive(self.channel)

    def close(self) -> None:
        self.channel.close()
        self.process.wait(10)


@pytest.fixture
def caller() -> Iterator[Caller]:
    """One, ended afterwards; its porter ends with it."""
    made = Caller()
    yield made
    made.close()
    until(lambda: not made.porter or not alive(made.porter), 5, "the porter's end")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_socket_inside(caller: Caller, place: Network, address: str) -> None:
    """It reaches a server on the loopback there, of either family, and not the one here."""
    with place.listen(address, 7000) as server, socket.create_server(("127.0.0.1", 0)) as here:
        with caller.inside(place.pid) as made:
            made.connect((address if ":" in address else f"::ffff:{address}", 7000))
            server.accept()[0].close()
        with caller.inside(place.pid) as made, pytest.raises(ConnectionRefusedError):
            made.connect(("::ffff:127.0.0.1", here.getsockname()[1]))


def test_many_networks(caller: Caller, place: Network) -> None:
    """One porter serves one network after the other, and mixes none up."""
    with network() as other, place.listen("127.0.0.1", 7001) as one, other.listen("127.0.0.1", 7001) as two:
        for _ in range(10):
            for where, server in ((place, one), (other, two)):
                with caller.inside(where.pid) as made:
                    made.connect(("::ffff:127.0.0.1", 7001))
                    server.settimeout(5)
                    server.accept()[0].close()
        first = caller.porter
        with caller.inside(place.pid):
            assert caller.porter == first


def test_not_the_hosts_own(caller: Caller, place: Network) -> None:
    """It makes none in the host's network, and what it is asked next is served by a new one."""
    with pytest.raises(SandboxError) as caught:
        caller.inside(os.getpid())
    assert caught.value.code == "inside-unreachable"
    assert "the host's own" in str(caught.value)
    with caller.inside(place.pid):
        pass


def test_what_is_no_network(caller: Caller, place: Network, tmp_path: Path) -> None:
    """A descriptor of anything else gives no socket; the next request is served."""
    (tmp_path / "file").write_text("x")
    for path in (str(tmp_path / "file"), "/dev/null", f"/proc/{place.pid}/ns/mnt"):
        handle = os.open(path, os.O_RDONLY)
        with pytest.raises(SandboxError) as caught:
            caller.ask(handle)
        os.close(handle)
        assert caught.value.code == "inside-unreachable"
    with caller.inside(place.pid):
        pass


def test_it_holds_nothing(caller: Caller, place: Network) -> None:
    """Between two requests it holds its channel and no network, no socket, none of the launcher's files."""
    for _ in range(20):
        caller.inside(place.pid).close()
    found = {number: os.readlink(f"/proc/{caller.porter}/fd/{number}")
             for number in os.listdir(f"/proc/{caller.porter}/fd")}  # fmt: skip
    kept = [link for number, link in found.items() if int(number) > 2]
    assert len(kept) == 1, found
    assert kept[0].startswith("socket:")


def test_killed(caller: Caller, place: Network) -> None:
    """A porter that is killed is an error for who asks next, and is there again for the one after."""
    caller.inside(place.pid).close()
    os.kill(caller.porter, signal.SIGKILL)
    until(lambda: not alive(caller.porter))
    with pytest.raises(SandboxError):
        caller.inside(place.pid)
    with caller.inside(place.pid):
        pass


def test_it_ends_with_its_launcher(caller: Caller, place: Network) -> None:
    """However the launcher ends the porter does, too; a proper end leaves not even a zombie."""
    caller.inside(place.pid).close()
    first = caller.porter
    caller.end()
    assert not Path(f"/proc/{first}").exists()
    caller.inside(place.pid).close()
    assert caller.porter != first
    caller.process.kill()
    caller.process.wait()
    until(lambda: not alive(caller.porter), 5)


def test_never_started() -> None:
    """One that was never asked has nothing to end."""
    Porter().close()
