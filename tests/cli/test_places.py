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
        # HOME and the runtime directory are covered where they would be seen.
        assert {place for place in shown if str(housed.base) in place} - {
            str(housed.home), f"{housed.base}/run", f"{housed.base}/run/casemate",
        } == {str(ws)}  # fmt: skip
    assert not housed.traces()


def test_home_is_nowhere_shown(housed: Caller) -> None:
    """Nothing of HOME is seen inside, but a workspace in it. Control: what lies beside HOME below a directory
    that is shown, and HOME where it is granted.
    """
    home = housed.home
    secret = housed.file(home / "id_secret", "secret", 0o600)
    ws, beside = home / "project", housed.base / "beside"
    for place in (ws, home / "granted"):
        place.mkdir()
        give(place, housed.uid)
    housed.file(home / "granted" / "file", "granted")
    housed.file(beside, "beside")
    script = f"ls -A {home}; cat {secret} {beside} {home}/granted/file; echo x >made; echo x >{home}/no"
    ended = housed.sh(ws, script, flags=("--read", str(home / "granted")))
    assert ended.out.split()[:2] == [b"granted", b"project"]
    assert b"secret" not in ended.out
    assert ended.out.endswith(b"granted")
    assert (b"beside" in ended.out) == (not str(housed.base).startswith("/srv"))
    assert (ws / "made").exists()
    assert not (home / "no").exists()
    housed.clean()
