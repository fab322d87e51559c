"""Callers of the command line: root and uid 1000, each with a home and state of its own."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cli.harness import MODES, Caller, Den, alive, daemon_pid, family, until
from tests.cli.network import Service
from tests.cli.terminal import Terminal
from tests.security.lab import give

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", params=MODES)
def caller(request: pytest.FixtureRequest, installation: tuple[Path, Path]) -> Iterator[Caller]:
    """Who calls: root, or uid 1000 without any capability."""
    base = Path(tempfile.mkdtemp(prefix="casemate-cli-", dir="/srv"))
    base.chmod(0o755)
    den = Den() if request.param == "root" else None
    made = Caller(str(request.param), installation[0], base, den)
    made.home.mkdir(mode=0o700)
    give(made.home, made.uid)
    yield made
    made.clean()
    if den is not None:
        den.close()
    shutil.rmtree(base)


@pytest.fixture
def ws(caller: Caller) -> Iterator[Path]:
    """A fresh workspace; nothing that was started in it runs on after the test."""
    yield caller.workspace()
    caller.close()


@pytest.fixture
def traceless(caller: Caller) -> Iterator[None]:
    """No process, mount, control group or file of state is left when the test is over."""
    yield
    try:
        until(lambda: not caller.traces(), 5)
    except AssertionError:
        left = caller.traces()
        caller.clean()
        pytest.fail("left behind:\n" + "\n".join(left))


@pytest.fixture
def tidy(caller: Caller) -> Iterator[None]:
    """For tests that leave state on purpose: it is removed afterwards."""
    yield
    caller.clean()


@pytest.fixture
def daemon(caller: Caller) -> Iterator[int]:
    """A running daemon; its pid. When it has been stopped nothing of it is left."""
    assert caller.cli("daemon", "start", cwd="/").code == 0
    pid = daemon_pid(caller)
    assert pid
    relatives = family(pid)
    caller.started += relatives
    yield pid
    caller.cli("daemon", "stop", cwd="/")
    try:
        until(lambda: not any(map(alive, relatives)), 10, "the daemon's end")
        until(lambda: not caller.traces(), 5)
    except AssertionError:
        left = caller.traces()
        caller.clean()
        pytest.fail("left behind:\n" + "\n".join(left))


@pytest.fixture
def terminal(caller: Caller) -> Iterator[Terminal]:
    """A terminal of 24 x 80."""
    made = Terminal(caller)
    yield made
    made.close()


@pytest.fixture
def service() -> Iterator[Service]:
    """A server of the machine's own loopback."""
    made = Service()
    yield made
    made.close()


@pytest.fixture(params=["alone", "daemon"])
def how(request: pytest.FixtureRequest, caller: Caller) -> str:
    """Without a resident daemon, and with one. Either leaves nothing behind."""
    request.getfixturevalue("daemon" if request.param == "daemon" else "traceless")
    return str(request.param)
