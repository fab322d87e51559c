"""Ways out that were found by an attacker on hire, each with what shows that it would work."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.security.lab import PYTHON, REPO, drop_to, give

if TYPE_CHECKING:
    from tests.conftest import Runner
    from tests.security.lab import Scene

pytestmark = [pytest.mark.security, pytest.mark.root]

STRANGER = 1234


def as_stranger(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run something as a user who has nothing to do with the command or its caller."""
    return subprocess.run(
        [*drop_to(STRANGER), *argv], capture_output=True, text=True, check=False, timeout=20
    )


def test_a_setuid_file_in_a_cache_is_out_of_reach(casemate: Runner, scene: Scene) -> None:
    """A command owns what is in a cache, modes included: nobody else of the host may get there."""
    ran = casemate(
        "/bin/sh", "-c",
        'chmod 777 "$PIP_CACHE_DIR" && cp /usr/bin/id "$PIP_CACHE_DIR/x" && chmod 6755 "$PIP_CACHE_DIR/x"',
        flags=("--cache", "pip"),
    )  # fmt: skip
    assert ran.code == 0, ran.brief()
    state = Path("/var/lib/casemate") if scene.world.uid == 0 else scene.world.home / ".local/state/casemate"
    (made,) = (state / "caches").glob("ws-*/pip/x")
    try:
        facts = made.stat()
        assert facts.st_mode & stat.S_ISUID, "the control: the command can make one, and it is the caller's"
        assert facts.st_uid == scene.world.uid
        elsewhere = scene.ws.parent / "x"
        shutil.copy(made, elsewhere)
        os.chown(elsewhere, scene.world.uid, scene.world.uid)
        elsewhere.chmod(0o4755)
        scene.ws.parent.chmod(0o755)
        control = as_stranger(str(elsewhere))
        assert f"euid={scene.world.uid}" in control.stdout, "the control: within reach it gives the uid away"
        assert as_stranger("/bin/sh", "-c", f"exec {made}").returncode == 126
        assert stat.S_IMODE((state / "caches").stat().st_mode) == 0o700
    finally:
        shutil.rmtree(made.parent.parent)


@pytest.mark.parametrize("mode", ["uid1000"])  # root's own has a fixed place
def test_a_runtime_directory_of_somebody_else_is_refused(casemate: Runner, scene: Scene) -> None:
    """In a place that all may write to, a stranger's directory (and the links in it) is not taken for ours:
    what a link in it leads to was swept as if it held old locks.
    """
    place, precious = scene.ws.parent / "runtime", scene.ws.parent / "precious"
    for directory, mode in ((place, 0o1777), (precious, 0o755)):
        directory.mkdir()
        directory.chmod(mode)
    (precious / "thesis").write_text("years of work")
    give(precious, scene.world.uid)
    scene.ws.parent.chmod(0o755)
    trap = f"mkdir -m 777 {place}/casemate && ln -s {precious} {place}/casemate/locks"
    assert as_stranger("/bin/sh", "-c", trap).returncode == 0
    env = {"XDG_RUNTIME_DIR": str(place)}
    ran = casemate("/bin/echo", "ran", env=env)
    assert ran.code == 125, ran.brief()
    assert ran.report["error"]["code"] == "state-unusable"
    assert "ran" not in ran.stdout
    assert (precious / "thesis").read_text() == "years of work"
    shutil.rmtree(place / "casemate")
    control = casemate("/bin/echo", "ran", env=env)
    assert control.code == 0, control.brief()
    assert (place / "casemate").stat().st_uid == scene.world.uid


LEASE = """
import fcntl, os, sys
handle = os.open(sys.argv[1], os.O_RDONLY)
for kind in (fcntl.F_WRLCK, fcntl.F_RDLCK):
    try:
        fcntl.fcntl(handle, fcntl.F_SETLEASE, kind)
    except OSError as error:
        print("refused", error.errno)
    else:
        print("leased")
"""


def test_no_lease_keeps_the_host_waiting(casemate: Runner, scene: Scene) -> None:
    """Whoever holds a lease makes every open() of the file wait: a sandbox gets none on what it may read."""
    shown = scene.ws.parent / "shown"
    shown.mkdir()
    (shown / "file").write_text("the host's")
    give(shown, scene.world.uid)
    argv = (PYTHON, "-I", "-S", "-c", LEASE, str(shown / "file"))
    control = subprocess.run(
        [*drop_to(scene.world.uid), *argv], capture_output=True, text=True, check=False, timeout=20
    )
    assert "leased" in control.stdout, control
    ran = casemate(*argv, flags=("--read", str(shown)))
    assert ran.stdout == "refused 22\nrefused 22\n", ran.brief()
    handle = os.open(shown / "file", os.O_RDWR | os.O_NONBLOCK)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)


FILL = 'head -c 400M /dev/zero > "$1/zeros" && sleep 1 && echo lives'


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm", "/home/sandbox"])
def test_files_in_memory_count_as_memory(casemate: Runner, place: str) -> None:
    """The memory limit holds for what a command writes to the file systems that lie in memory, too."""
    command = ("/bin/sh", "-c", FILL, "sh", place)
    ran = casemate(*command, flags=("--memory", "200M"))
    assert ran.report["limit"] == "memory", ran.brief()
    assert "lives" not in ran.stdout
    control = casemate(*command, flags=("--memory", "1G"))
    assert "lives" in control.stdout, control.brief()


NESTED = """
import os, sys, time
os.mkdir(sys.argv[1])
os.chdir(sys.argv[1])
for _ in range(500):
    os.mkdir("d" * 10)
    os.chdir("d" * 10)
for number in range(6):
    with open(str(number), "wb") as file:
        file.write(os.urandom(1 << 20) * 40)
    time.sleep(0.15)
time.sleep(0.5)
print("lives")
"""


def test_no_depth_hides_from_the_disk_limit(casemate: Runner) -> None:
    """What lies deeper than a path can be long counts like the rest."""
    command = (PYTHON, "-I", "-S", "-c", NESTED)
    ran = casemate(*command, "tried", flags=("--disk", "100M"), timeout=30)
    assert "lives" not in ran.stdout, ran.brief()
    # Where the file system itself has this size, the command meets its end.
    assert ran.report.get("limit") == "disk" or "No space left" in ran.stderr, ran.brief()
    control = casemate(*command, "control", flags=("--disk", "1G"), timeout=30)
    assert "lives" in control.stdout, control.brief()


FULL = """
import asyncio, os, sys
sys.path[:0] = sys.argv[3:]
from casemate.sandbox.api import AsyncSandbox

async def main():
    async with AsyncSandbox(sys.argv[1]) as one, AsyncSandbox(sys.argv[2]) as two:
        first = asyncio.create_task(one.run("echo work > kept; sleep 1; echo more > added"))
        await asyncio.sleep(0.4)
        handle = os.open("/var/lib/fill", os.O_CREAT | os.O_WRONLY)
        try:
            while FILL and os.write(handle, bytes(4096)):
                pass
        except OSError:
            pass
        second = asyncio.create_task(two.run("sleep 0.3; echo other > other"))
        print("second", type((await asyncio.gather(second, return_exceptions=True))[0]).__name__)
        result = await first
        print("first", result.exit_code, result.applied.created, result.applied.complete)

asyncio.run(main())
"""


@pytest.mark.parametrize("mode", ["root"])  # a small file system in the place of /var/lib
def test_a_full_state_directory_ends_no_other_command(scene: Scene) -> None:
    """One command that cannot be kept for want of room takes no other one with it."""
    import msgspec

    paths = [str(REPO / "src"), str(Path(msgspec.__file__).parent.parent)]
    seen = {}
    for fill in ("True", "False"):
        spaces = [scene.ws.parent / f"{name}-{fill}" for name in ("one", "two")]
        for space in spaces:
            space.mkdir()
        script = 'mount -t tmpfs -o size=256k none /var/lib && mkdir -m 700 /var/lib/casemate && exec "$@"'
        argv = [PYTHON, "-I", "-c", FULL.replace("FILL", fill), *map(str, spaces), *paths]
        ran = subprocess.run(
            ["unshare", "-m", "/bin/sh", "-c", script, "sh", *argv],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        seen[fill] = (ran.stdout, sorted(path.name for path in spaces[0].iterdir()), ran.stderr[-500:])
    assert seen["False"][:2] == ("second Result\nfirst 0 2 True\n", ["added", "kept"]), seen
    assert seen["True"][0].endswith("first 0 2 True\n"), seen
    assert seen["True"][1] == ["added", "kept"], seen


@pytest.mark.parametrize("how", ["mkdir -p new && mv private new/place", "mv private other"])
def test_a_denied_path_stays_denied_when_its_directory_is_renamed(
    casemate: Runner, scene: Scene, how: str
) -> None:
    """What is denied stays so: a rename above it must not give it another path in the next run."""
    (scene.ws / "private/deep").mkdir(parents=True)
    (scene.ws / "private/deep/secret").write_text(scene.token)
    give(scene.ws, scene.world.uid)
    deny = ("--deny", "private/deep/secret")
    control = casemate("/bin/cat", "private/deep/secret")
    assert scene.token in control.stdout, control.brief()
    casemate("/bin/sh", "-c", how, flags=deny)
    again = casemate("/bin/grep", "-rs", ".", ".", flags=deny)
    assert scene.token not in again.stdout, again.brief()


def test_a_denied_path_stays_denied_when_a_link_on_the_way_is_led_elsewhere(
    casemate: Runner, scene: Scene
) -> None:
    """A link of the workspace through which a denied path was named is not changed by a command."""
    for name in ("confA", "confB"):
        (scene.ws / name).mkdir()
    (scene.ws / "confA/secret").write_text(scene.token)
    (scene.ws / "conf").symlink_to("confA")
    give(scene.ws, scene.world.uid)
    deny = ("--deny", "conf/secret")
    control = casemate("/bin/cat", "conf/secret")
    assert scene.token in control.stdout, control.brief()
    casemate("/bin/ln", "-sfn", "confB", "conf", flags=deny)
    again = casemate("/bin/cat", "confA/secret", flags=deny)
    assert scene.token not in again.stdout, again.brief()
    assert (scene.ws / "conf").readlink() == type(scene.ws)("confA")
