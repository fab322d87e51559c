"""Shared fixtures: the laboratory of the attack suite, the real command line, and the leak check.

A missing prerequisite fails the test (see tests/skips.toml for what may be skipped, and why).
"""

from __future__ import annotations

import dataclasses
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.security import lab, leaks
from tests.security.engines import ENGINE, Outcome, Request, acts_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Whoever started the tests may ignore these (nohup, a shell's `&`), and what the tests start would then
# ignore them, too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def installation() -> Iterator[tuple[Path, Path]]:
    """An installation that every uid can start, and the template of the workspaces."""
    lab.require_prerequisites()
    if shutil.which("bwrap") is None:
        pytest.fail(
            "bwrap is missing: the control of the carve-out row needs it (apt-get install bubblewrap)"
        )
    directory = Path(tempfile.mkdtemp(prefix="casemate-install-", dir="/srv"))
    directory.chmod(0o755)
    try:
        template = directory / "template"
        template.mkdir()
        lab.make_template(template)
        yield lab.install_copy(directory / "venv"), template
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="session")
def worlds(installation: tuple[Path, Path]) -> Iterator[Callable[[str], lab.World]]:
    """The lab of a mode, made when first asked for."""
    made: dict[str, lab.World] = {}

    def get(mode: str) -> lab.World:
        if mode not in made:
            made[mode] = lab.make_world(mode, installation[1], installation[0])
        return made[mode]

    yield get
    for world in made.values():
        world.close()


@pytest.fixture(params=lab.MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """Who calls: root, or uid 1000 without any capability."""
    return str(request.param)


@pytest.fixture
def world(worlds: Callable[[str], lab.World], mode: str) -> lab.World:
    """The lab of the mode: listeners on loopback, a victim process, canary secrets, a home."""
    return worlds(mode)


@pytest.fixture
def scene(world: lab.World) -> Iterator[lab.Scene]:
    """A fresh workspace on the host with an outside beside it."""
    made = world.scene()
    yield made
    made.close()


@pytest.fixture
def host_workspace(scene: lab.Scene) -> Path:
    """The workspace's path on the host."""
    return scene.ws


@dataclasses.dataclass
class Runner:
    """The real command line, started as the mode's uid in the scene's workspace."""

    scene: lab.Scene

    def __call__(self, *argv: str, flags: tuple[str, ...] = (), **how: Any) -> Outcome:
        """``casemate run FLAGS -- ARGV``."""
        return ENGINE.run(Request(self.scene, list(argv), flags, **how))

    def acts(self, *names: str, flags: tuple[str, ...] = (), how: dict[str, Any] | None = None,
             **params: Any) -> Outcome:  # fmt: skip
        """Run attack acts inside. Each must report: a run that says nothing holds nothing."""
        params.setdefault("sandboxed", True)
        outcome = self(*acts_command(self.scene, names, **params), flags=flags, **(how or {}))
        check_reports(outcome, names)
        return outcome

    def bare(self, *names: str, how: dict[str, Any] | None = None, **params: Any) -> Outcome:
        """The same acts without a sandbox: the control."""
        from tests.security.engines import Nothing

        request = Request(self.scene, acts_command(self.scene, names, **params), **(how or {}))
        outcome = Nothing().run(request)
        check_reports(outcome, names)
        return outcome


def check_reports(outcome: Outcome, names: tuple[str, ...]) -> None:
    """Every act of a run must have reported without a crash."""
    for name in names:
        record = outcome.records.get(name)
        assert record is not None, f"{name} did not report: {outcome.brief()}"
        assert "crash" not in record, f"{name}: {record['crash']}"


@pytest.fixture
def casemate(scene: lab.Scene) -> Runner:
    """Runs the real command line in the mode and parses its report."""
    return Runner(scene)


@pytest.fixture
def no_leaks(world: lab.World) -> Iterator[None]:
    """Nothing stays behind: no process, mount, namespace, cgroup, uid lock or file of state."""
    before = leaks.snapshot(world)
    yield
    end = time.monotonic() + 5
    while (left := leaks.left_behind(before, world)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left, "\n".join(left)
