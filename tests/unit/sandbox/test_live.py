"""The socket by which a running command is reached: who may speak, what is served, what it survives."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from casemate.sandbox import live
from casemate.sandbox.live import LiveSocket, find
from casemate.sys import packets
from tests.cli.harness import until
from tests.security.lab import drop_to

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY = "workspace"


class Served:
    """A live socket whose events are served by a thread, as a command line's loop does."""

    def __init__(self, run: Path, name: str = "1", dial: Callable[..., None] | None = None) -> None:
        self.dialled = 0
        self.turns = 0
        self.live = LiveSocket(str(run), KEY, name, dial or self._dial)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _dial(self, made: Callable[[int], None]) -> None:
        self.dialled += 1
        made(socket.socket(socket.AF_INET6).detach())

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self.live.fileno(), select.POLLIN)
        while not self._end.is_set():
            if poll.poll(20):
                self.turns += 1
                self.live.poll()

    def close(self) -> None:
        self._end.set()
        self._thread.join(10)
        self.live.close()


@contextmanager
def served(run: Path, name: str = "1", dial: Callable[..., None] | None = None) -> Iterator[Served]:
    """One, ended afterwards."""
    made = Served(run, name, dial)
    try:
        yield made
    finally:
        made.close()


def caller(run: Path) -> socket.socket:
    """A connection, as ``casemate forward`` makes it."""
    found = find(str(run), KEY)
    assert found is not None
    found.settimeout(5)
    return found


def ask(endpoint: socket.socket, number: int = 1) -> int:
    """A socket inside, or -1."""
    packets.send(endpoint, str(number).encode())
    payload, handles = packets.receive(endpoint)
    assert payload == str(number).encode()
    return handles[0] if handles else -1


def test_sockets_inside(tmp_path: Path) -> None:
    """A caller gets as many as it asks for, each under the number that it gave."""
    with served(tmp_path) as made, caller(tmp_path) as endpoint:
        for number in (1, 7, 12345678901234567890):
            handle = ask(endpoint, number)
            assert os.fstat(handle).st_mode >> 12 == 0o14
            os.close(handle)
        assert made.dialled == 3


def test_none_can_be_made(tmp_path: Path) -> None:
    """Where no socket can be made the answer has none."""
    with served(tmp_path, dial=lambda made: made(-1)), caller(tmp_path) as endpoint:
        assert ask(endpoint) == -1


@pytest.mark.parametrize("rubbish", [b"", b"-1", b"1x", b"\0", b"socket", b"9" * 100 + b" "])
def test_rubbish(tmp_path: Path, rubbish: bytes) -> None:
    """What is no request ends its caller's connection and nobody else's; what came with it is closed."""
    with served(tmp_path) as made, caller(tmp_path) as endpoint, caller(tmp_path) as other:
        until(lambda: len(made.live._callers) == 2)
        before = len(os.listdir("/proc/self/fd"))
        packets.send(endpoint, rubbish, [0])
        assert endpoint.recv(100) == b""
        handle = ask(other)
        os.close(handle)
        assert made.dialled == 1
        until(lambda: len(os.listdir("/proc/self/fd")) < before)


def test_many_callers(tmp_path: Path) -> None:
    """Behind the bound a caller is sent away at once; nothing spins for it, and a place is given again."""
    with served(tmp_path) as made:
        callers = [caller(tmp_path) for _ in range(live._MOST)]
        for endpoint in callers:
            os.close(ask(endpoint))
        more = [caller(tmp_path) for _ in range(3)]
        for endpoint in more:
            assert endpoint.recv(10) == b""
        before, end = made.turns, time.monotonic() + 0.2
        while time.monotonic() < end:
            time.sleep(0.02)
        assert made.turns - before <= 1
        callers.pop().close()
        until(lambda: len(made.live._callers) < live._MOST)
        with caller(tmp_path) as endpoint:
            os.close(ask(endpoint))
        for endpoint in (*callers, *more):
            endpoint.close()


_OTHER = """
import socket, sys
endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
endpoint.settimeout(5)
endpoint.connect(sys.argv[1])
try:
    endpoint.sendall(b"w1")
    print(len(endpoint.recv(100)))
except (BrokenPipeError, ConnectionResetError):
    print(0)
"""


@pytest.mark.root
@pytest.mark.parametrize(("uid", "answered"), [(0, True), (1000, False)])
def test_other_users(uid: int, answered: bool) -> None:
    """A process of another user gets nothing, even if it can reach the socket; control: one of this user."""
    with tempfile.TemporaryDirectory(prefix="casemate-live-", dir="/var/tmp") as place:
        run = Path(place)
        with served(run) as made:
            socket_ = run / "live" / KEY / "1"
            for path in (run, run / "live", run / "live" / KEY, socket_):
                path.chmod(0o777)
            done = subprocess.run([*drop_to(uid), "/usr/bin/python3", "-c", _OTHER, str(socket_)],
                                  capture_output=True, text=True, check=False, timeout=20)  # fmt: skip
            assert done.stdout.strip() == ("2" if answered else "0"), done.stderr
            assert made.dialled == int(answered)


def test_private(tmp_path: Path) -> None:
    """The directory is the user's alone; at the end the socket is gone, and the directory with it."""
    with served(tmp_path):
        assert (tmp_path / "live" / KEY).stat().st_mode & 0o777 == 0o700
    assert not (tmp_path / "live" / KEY).exists()
    assert find(str(tmp_path), KEY) is None


def test_the_newest_is_found(tmp_path: Path) -> None:
    """Of several the newest is found; what one that was killed has left is removed, and taken over."""
    with served(tmp_path, "1") as first:
        place = tmp_path / "live" / KEY
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(str(place / "2"))
        os.utime(place / "1", (1, 1))
        with caller(tmp_path) as endpoint:
            os.close(ask(endpoint))
        assert first.dialled == 1
        assert sorted(os.listdir(place)) == ["1"]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(str(place / "3"))
        with served(tmp_path, "3") as second:
            with caller(tmp_path) as endpoint:
                os.close(ask(endpoint))
            assert (first.dialled, second.dialled) == (1, 1)


def test_a_caller_that_goes(tmp_path: Path) -> None:
    """One that has gone before its socket is there does no harm; a socket that is late is closed."""
    waiting: list[Callable[[int], None]] = []
    with served(tmp_path, dial=waiting.append) as made:
        endpoint = caller(tmp_path)
        packets.send(endpoint, b"1")
        until(lambda: waiting)
        endpoint.close()
        until(lambda: not made.live._callers)
        late = socket.socket().detach()
        waiting[0](late)
        with pytest.raises(OSError, match=r"Bad file"):
            os.fstat(late)
