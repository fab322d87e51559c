"""Unix sockets of the host in what a command may read: seen by their names, connected to by nobody."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.security import daemon
from tests.security.lab import MODES, PATH, PYTHON, drop_to, give
from tests.security.test_older_kernels import DRIVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Runner
    from tests.security.lab import Scene, World

pytestmark = [pytest.mark.security, pytest.mark.root]

# Says by a socket that it may use that it has begun, waits until the other is there, tries every way to it.
CONNECT = """
import json, os, socket, sys, time
path, ready, token = sys.argv[1:]
if ready:
    begun = socket.socket(socket.AF_UNIX)
    begun.connect(ready)
    begun.sendall(b"ready:" + token.encode())
end = time.monotonic() + 20
parent, name = os.path.split(path)
while name not in os.listdir(parent) and time.monotonic() < end:
    time.sleep(0.01)
found = {"seen": name in os.listdir(parent)}
os.chdir(parent)
for way in (path, f"/proc/1/root{path}", f"/proc/self/root{path}", name):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        one = socket.socket(socket.AF_UNIX, kind)
        try:
            one.connect(way)
            one.sendall(b"sent:" + token.encode())
            found[f"{way} {kind}"] = "REACHED"
        except OSError as error:
            found[f"{way} {kind}"] = error.strerror
print("@@" + json.dumps(found))
"""


def connecting(path: Path, token: str, ready: str = "") -> list[str]:
    """The command that tries to reach a socket."""
    return [PYTHON, "-I", "-c", CONNECT, str(path), ready, token]


def found(stdout: str) -> dict[str, object]:
    """What it said: the socket's name was seen, and no way led to it."""
    line = next(line for line in stdout.splitlines() if line.startswith("@@"))
    said: dict[str, object] = json.loads(line[2:])
    assert said.pop("seen") is True, said
    return said


def make(scene: Scene, path: Path, kind: int = socket.SOCK_STREAM) -> Path:
    """A socket of the caller's own that is open to everybody."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scene.world.listeners.add_path(str(path), kind)
    os.chown(path, scene.world.uid, scene.world.uid)
    return path


@pytest.fixture
def below_opt(scene: Scene) -> Iterator[Path]:
    """A directory of the system that every sandbox may read."""
    place = Path("/opt") / f"{scene.world.base.name}-{scene.token}"
    place.mkdir()
    yield place
    shutil.rmtree(place)


def place_of(where: str, scene: Scene, below_opt: Path) -> tuple[Path, tuple[str, ...], dict[str, str]]:
    """A directory for the socket; the flags and variables that let a command read it."""
    if where == "opt":
        return below_opt / "service/run", (), {}
    if where == "read":
        given = scene.ws.parent / "given"
        (given / "deep/run").mkdir(parents=True)
        (given / "file").write_text("given")
        give(given, scene.world.uid)
        return given / "deep/run", ("--read", str(given)), {}
    kit = scene.ws.parent / "kit"
    (kit / "bin").mkdir(parents=True)
    (kit / "lib/run").mkdir(parents=True)
    (kit / "bin/tool").write_text("#!/bin/sh\necho a tool\n")
    (kit / "bin/tool").chmod(0o755)
    give(kit, scene.world.uid)
    path = f"{kit}/bin:{scene.world.environment()['PATH']}"
    return kit / ("bin" if where == "tool" else "lib/run"), (), {"PATH": path}


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=["stream", "datagram"])
@pytest.mark.parametrize("where", ["opt", "read", "tool", "library"])
def test_what_is_there(casemate: Runner, scene: Scene, below_opt: Path, where: str, kind: int) -> None:
    """A socket below a directory of the system, `--read` or PATH is out of reach, unless it is named."""
    directory, flags, env = place_of(where, scene, below_opt)
    path = make(scene, directory / "service", kind)
    command = connecting(path, scene.token)
    outcome = casemate(*command, flags=flags, env=env)
    assert outcome.code == 0, outcome.brief()
    assert "REACHED" not in found(outcome.stdout).values(), outcome.brief()
    got = scene.world.listeners.got
    assert not got("sent:" + scene.token)
    named = casemate(*command, flags=(*flags, "--socket", str(path)), env=env)
    assert "REACHED" in found(named.stdout).values(), named.brief()
    assert got("sent:" + scene.token, wait=2.0), "the control did not arrive"


@pytest.mark.parametrize("where", ["opt", "read", "tool", "library"])
def test_what_comes_later(casemate: Runner, scene: Scene, below_opt: Path, where: str) -> None:
    """A socket that a program of the host makes there while the command runs is out of reach as well."""
    directory, flags, env = place_of(where, scene, below_opt)
    directory.mkdir(parents=True, exist_ok=True)
    path, ready = directory / "late", make(scene, scene.world.run / f"{scene.token}.ready")
    got = scene.world.listeners.got

    def later() -> None:
        if got("ready:" + scene.token, wait=30.0):
            make(scene, path)

    helper = threading.Thread(target=later)
    helper.start()
    command = connecting(path, scene.token, str(ready))
    outcome = casemate(*command, flags=(*flags, "--socket", str(ready)), env=env)
    helper.join()
    assert outcome.code == 0, outcome.brief()
    assert "REACHED" not in found(outcome.stdout).values(), outcome.brief()
    assert not got("sent:" + scene.token)
    flags = (*flags, "--socket", str(ready), "--socket", str(path))
    assert casemate(*command, flags=flags, env=env).code == 0
    assert got("sent:" + scene.token, wait=2.0), "the control did not arrive"


@pytest.mark.parametrize("preset", ["read-only", "session"])
def test_a_workspace_that_is_only_read(casemate: Runner, scene: Scene, preset: str) -> None:
    """A socket in a workspace of which there is no view of its own, and one in that of a session."""
    path = make(scene, scene.ws / "deep/service")
    flags = ("--preset", preset) if preset == "read-only" else ("--session", scene.token)
    if preset == "session":
        assert casemate("/bin/true", flags=flags).code == 0
        flags = (*flags, "--preset", "read-only")
    outcome = casemate(*connecting(path, scene.token), flags=flags)
    assert outcome.code == 0, outcome.brief()
    assert "REACHED" not in found(outcome.stdout).values(), outcome.brief()
    control = subprocess.run([*drop_to(scene.world.uid), *connecting(path, scene.token)], check=True)
    assert control.returncode == 0
    assert scene.world.listeners.got("sent:" + scene.token, wait=2.0), "the control did not arrive"


# Below what everybody may read: a file system that has no id maps, and one that a user cannot be without.
_MOUNTS = """
set -e
place=$1; shift
mount -t tmpfs -o mode=755 none "$place"
mkdir "$place/upper" "$place/work" "$place/lower" "$place/merged" "$place/with space"
echo below >"$place/lower/file"
mount -t overlay -o "lowerdir=$place/lower,upperdir=$place/upper,workdir=$place/work" none "$place/merged"
mount -t tmpfs -o mode=755 none "$place/with space"
"$0" -I -c "
import os, socket, sys, time
for place in sys.argv[1:]:
    one = socket.socket(socket.AF_UNIX)
    one.bind(place)
    one.listen(8)
    os.chmod(place, 0o666)
    os.set_inheritable(one.detach(), True)
os.execvp('/bin/sh', ['sh', '-c', 'exec sleep 60'])
" "$place/merged/service" "$place/with space/service" "$place/service" </dev/null >/dev/null 2>&1 &
server=$!
trap 'kill $server' EXIT
while ! [ -S "$place/service" ]; do sleep 0.05; done
"$@"
"""


def test_what_is_mounted_below(casemate: Runner, scene: Scene, below_opt: Path) -> None:
    """Mounts of the host in what can be read are seen, whatever their kind; their sockets lead nowhere."""
    command = str(scene.world.command)
    paths = [below_opt / name / "service" for name in ("merged", "with space", ".")]
    script = "import socket, sys\n" + (
        "print(open(sys.argv[1]).read(), end='')\n"
        "for path in sys.argv[2:]:\n"
        "    try:\n"
        "        socket.socket(socket.AF_UNIX).connect(path); print('REACHED')\n"
        "    except OSError as error:\n"
        "        print('refused')\n"
    )
    inner = [PYTHON, "-I", "-c", script, f"{below_opt}/merged/file", *map(str, paths)]

    def run(*words: str) -> list[str]:
        drop = drop_to(scene.world.uid)
        argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNTS, PYTHON, str(below_opt)]
        ran = subprocess.run(
            [*argv, *drop, *words, *inner], env=scene.world.environment(), cwd=scene.ws,
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        return ran.stdout.split()

    assert run(command, "run", "--") == ["below", "refused", "refused", "refused"]
    assert run() == ["below", "REACHED", "REACHED", "REACHED"]


# A program with sandboxes that are made ahead; a command in the first of them and in one made later.
_POOL = """
import json, sys
sys.path[:0] = [sys.argv[1]]
from casemate.sandbox import Sandbox
kind, workspace, environ, command = sys.argv[2], sys.argv[3], json.loads(sys.argv[4]), json.loads(sys.argv[5])
with Sandbox(workspace, environ=environ, ready=2 if kind != "fresh" else 0,
             kind=kind if kind != "fresh" else "slot") as box:
    for _ in range(4):
        result = box.run(command)
        assert result.ok, result
        sys.stdout.write(result.stdout.decode())
"""


@pytest.mark.parametrize("kind", ["fresh", "prefab", "slot"])
def test_in_sandboxes_made_ahead(
    installation: tuple[Path, Path], scene: Scene, below_opt: Path, kind: str
) -> None:
    """The library's sandboxes, made ahead or not, reach no socket of the host either."""
    site = next((installation[0].parent.parent / "lib").glob("python3*")) / "site-packages"
    path = make(scene, below_opt / "service")
    command = connecting(path, scene.token)
    environ = scene.world.environment()
    ran = subprocess.run(
        [*drop_to(scene.world.uid), PYTHON, "-I", "-c", _POOL, str(site), kind, str(scene.ws),
         json.dumps(environ), json.dumps(command)],
        env=environ, cwd=scene.ws, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert len(lines) == 4
    assert all("REACHED" not in found(line).values() for line in lines), lines
    assert not scene.world.listeners.got("sent:" + scene.token)
    subprocess.run([*drop_to(scene.world.uid), *command], check=True, capture_output=True)
    assert scene.world.listeners.got("sent:" + scene.token, wait=2.0), "the control did not arrive"


@pytest.mark.parametrize("caller", MODES)
def test_by_way_of_a_daemon(worlds: Callable[[str], World], caller: str) -> None:
    """A command of the resident daemon reaches none, below /opt or `--read`, but one that is named."""
    world = worlds(caller)
    scene = world.scene()
    with contextlib.ExitStack() as stack:
        stack.callback(scene.close)
        daemon.ENGINE.daemons[caller] = served = daemon.Daemon(world)
        stack.callback(served.close)
        below = Path("/opt") / f"{world.base.name}-{scene.token}"
        stack.callback(shutil.rmtree, below)
        for where in ("opt", "read"):
            directory, flags, env = place_of(where, scene, below)
            path = make(scene, directory / "service")
            token = f"{scene.token}-{where}"
            request = daemon.Request(scene, connecting(path, token), flags, env=env)
            outcome = daemon.ENGINE.run(request)
            assert outcome.code == 0, outcome.brief()
            assert "REACHED" not in found(outcome.stdout).values(), outcome.brief()
            request.flags = (*flags, "--socket", str(path))
            assert daemon.ENGINE.run(request).code == 0
            assert world.listeners.got("sent:" + token, wait=2.0), "the control did not arrive"
        assert "pid" in served.status()


@pytest.mark.parametrize("way", ["attached", "joined"])
def test_as_on_older_kernels(
    installation: tuple[Path, Path], scene: Scene, below_opt: Path, way: str
) -> None:
    """A root that is made the way of older kernels shows no socket that leads anywhere."""
    site = next((installation[0].parent.parent / "lib").glob("python3*")) / "site-packages"
    path = make(scene, below_opt / "service")
    command = connecting(path, scene.token)
    ran = subprocess.run(
        [*drop_to(scene.world.uid), PYTHON, "-I", "-c", DRIVER, str(site), way, str(scene.ws), *command],
        env={"PATH": PATH, "HOME": str(scene.world.home)}, cwd=scene.ws,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "REACHED" not in found(str(json.loads(ran.stdout)["out"])).values(), ran.stdout
    subprocess.run([*drop_to(scene.world.uid), *command], check=True, capture_output=True)
    assert scene.world.listeners.got("sent:" + scene.token, wait=2.0), "the control did not arrive"
