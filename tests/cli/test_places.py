"""Where a user's own directories lie makes no difference, also not below what every sandbox shows."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cli.harness import Caller
from tests.security.lab import give

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.root]


@pytest.fixture(params=["/opt", "/usr/local", "/srv"])
def housed(request: pytest.FixtureRequest, installation: tuple[Path, Path]) -> Iterator[Caller]:
    """Uid 1000 with HOME and workspaces below a directory that is shown, and (the control) elsewhere."""
    base = Path(tempfile.mkdtemp(prefix="casemate-places-", dir=str(request.param)))
    base.chmod(0o755)
    made = Caller("uid1000", installation[0], base, None)
    made.home.mkdir(mode=0o700)
    give(made.home, made.uid)
    yield made
    made.close()
    made.clean()
    shutil.rmtree(base)


@pytest.mark.parametrize("runtime", ["", "run"])
def test_state_below_what_is_shown(housed: Caller, runtime: str) -> None:
    """A command runs, its change arrives, and the next one runs, wherever state and runtime directory lie."""
    ws = housed.workspace()
    env = {}
    if runtime:
        place = housed.base / runtime
        place.mkdir(mode=0o700)
        give(place, housed.uid)
        env["XDG_RUNTIME_DIR"] = str(place)
    for content in ("one", "two"):
        ended = housed.sh(ws, f"echo {content} >file; cat /proc/self/mounts", env=env)
        assert ended.code == 0, ended
        assert (ws / "file").read_text() == f"{content}\n"
        shown = [line.split()[1] for line in ended.out.decode().splitlines()]
        assert shown.count("/") == 1
        assert [place for place in shown if str(housed.base) in place] == [str(ws)]
    assert not housed.traces()
