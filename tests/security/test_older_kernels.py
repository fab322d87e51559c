"""The ways around features of new kernels: chosen by hand here, since this machine's kernel has them all."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.security.lab import PATH, PYTHON

pytestmark = pytest.mark.security

# Runs one command through a launcher that attaches the parts of a sandbox below the run's directory, as
# kernels before 6.15 need it (`attached`), or not (the control of the test, not of the attack).
DRIVER = """
import json, os, sys
sys.path[:0] = [sys.argv[1]]
from casemate.isolation.process.launcher import Launcher
from casemate.sandbox import inline
from casemate.sandbox.job import Request, prepare
from casemate.settings import places
attached, workspace, argv = sys.argv[2] != "detached", sys.argv[3], sys.argv[4:]
if sys.argv[2] == "joined":
    from casemate.sys import mounts
    mounts.layers_by_path = lambda: False
environ = dict(os.environ)
launcher = Launcher(places(environ).run, attached=attached)
session = environ.pop("SESSION", "")
request = Request(argv=tuple(argv), workspace=workspace, cwd=workspace, environ=environ, session=session)
job = prepare(request, launcher.hierarchies, rootless=launcher.rootless)
run = inline.InlineRun(launcher, job, inline.lock_workspace(job, wait=True))
if environ.get("DIE"):
    os.read(run.stdout, 1)
    os.kill(os.getpid(), 9)
os.close(run.stdin)
out = open(run.stdout, "rb").read().decode()
err = open(run.stderr, "rb").read().decode()
result = run.finish(limit="", stderr_tail=err.encode())
launcher.close()
print(json.dumps({"out": out, "err": err, "code": result.exit_code, "changes": result.applied.changes}))
"""
_INSIDE = """
import json, os
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
mounts = [line.split() for line in open("/proc/self/mounts")]
open("made", "w").write("inside")
try:
    os.listdir("/root/.ssh" if os.getuid() else "/var/lib/casemate")
    peek = "seen"
except OSError as error:
    peek = error.strerror
print(json.dumps({
    "caps": [status[name].strip() for name in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")],
    "seccomp": status["Seccomp"].strip(), "nnp": status["NoNewPrivs"].strip(),
    "writable": sorted(m[1] for m in mounts if m[3].startswith("rw") and m[2] in ("tmpfs", "overlay")),
    "peek": peek, "root": sorted(os.listdir("/")),
}))
"""


def _run(tmp: Path, site: Path, way: str, uid: int) -> dict[str, object]:
    workspace, home = tmp / f"ws-{way}", tmp / f"home-{way}"
    for directory in (tmp, workspace, home):
        directory.mkdir(exist_ok=True)
        os.chown(directory, uid, uid)
    driver = tmp / "driver.py"
    driver.write_text(DRIVER)
    env = {"PATH": PATH, "HOME": str(home)}
    drop = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid else []
    done = subprocess.run(
        [*drop, PYTHON, "-I", str(driver), str(site), way, str(workspace), PYTHON, "-c", _INSIDE],
        env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    assert answer["code"] == 0, answer
    assert (workspace / "made").read_text() == "inside"
    answer["inside"] = json.loads(str(answer["out"]))
    return answer


@pytest.mark.root
@pytest.mark.parametrize("uid", [0, 1000], ids=["root", "uid1000"])
def test_attached_parts_make_the_same_sandbox(installation: tuple[Path, Path], uid: int) -> None:
    """Made the way of older kernels a sandbox is sealed alike, its changes arrive, and no mount stays."""
    site = next((installation[0].parent.parent / "lib").glob("python3*")) / "site-packages"
    with tempfile.TemporaryDirectory(dir="/srv", prefix="casemate-older-") as name:
        tmp = Path(name)
        tmp.chmod(0o755)
        new, old = (_run(tmp, site, way, uid) for way in ("detached", "attached"))
        inside = old["inside"]
        assert isinstance(inside, dict)
        assert inside["caps"] == ["0000000000000000"] * 5
        assert (inside["seccomp"], inside["nnp"]) == ("2", "1")
        assert inside["peek"] != "seen"
        expected = new["inside"]
        assert isinstance(expected, dict)
        for answer, way in ((expected, "detached"), (inside, "attached")):
            answer["writable"] = [path.replace(f"ws-{way}", "ws") for path in answer["writable"]]
        assert inside == expected
        assert old["changes"] == new["changes"] == ["created made"]
        with open("/proc/self/mounts") as mounts:
            assert name not in mounts.read()
    with open("/proc/self/mounts") as mounts:
        left = [line for line in mounts if "/casemate/views/ws-attached" in line]
    assert left == []


@pytest.mark.root
@pytest.mark.parametrize("uid", [0, 1000], ids=["root", "uid1000"])
def test_layers_as_paths(installation: tuple[Path, Path], uid: int) -> None:
    """A session whose commands get their layers as paths, as older kernels need it, and as descriptors: each
    goes on from the one before, what is hidden stays hidden, and no mount stays.
    """
    site = next((installation[0].parent.parent / "lib").glob("python3*")) / "site-packages"
    drop = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid else []
    with tempfile.TemporaryDirectory(dir="/srv", prefix="casemate-older-") as name:
        tmp = Path(name)
        workspace, home = tmp / "ws:a\\b", tmp / "home"
        for directory in (tmp, workspace, home):
            directory.mkdir(exist_ok=True)
            os.chown(directory, uid, uid)
            directory.chmod(0o755)
        (tmp / "driver.py").write_text(DRIVER)
        (workspace / "f").write_text("0\n")
        os.chown(workspace / "f", uid, uid)
        env = {"PATH": PATH, "HOME": str(home)}

        def session(*words: str) -> None:
            argv = [*drop, str(installation[0]), "session", words[0], *words[1:]]
            done = subprocess.run(argv, env=env, cwd=workspace, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr

        for number in range(1, 7):
            script = "cat f ~/h 2>/dev/null; mv d d$$ 2>/dev/null; mkdir -p d; echo $1 >>f; echo $1 >>~/h"
            done = subprocess.run(
                [*drop, PYTHON, "-I", str(tmp / "driver.py"), str(site),
                 ("attached", "joined", "detached")[number % 3], str(workspace), "/bin/sh", "-c", script,
                 "sh", str(number)],
                env=env | {"SESSION": "s"}, capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            before = [str(one) for one in range(1, number)]
            assert json.loads(done.stdout)["out"].split() == ["0", *before, *before], done.stdout
            session("snapshot", "s")
        assert (workspace / "f").read_text() == "0\n"
        session("discard", "s")
        with open("/proc/self/mounts") as mounts:
            assert name not in mounts.read()
    with open("/proc/self/mounts") as mounts:
        assert [line for line in mounts if "/casemate/" in line and "/ws_a_b-" in line] == []


@pytest.mark.root
@pytest.mark.parametrize("uid", [0, 1000], ids=["root", "uid1000"])
def test_killed_with_layers_attached(installation: tuple[Path, Path], uid: int) -> None:
    """What cleans up after a launcher that was killed while it had a session's layers attached does not enter
    them: the session is all there, and no mount stays.
    """
    site = next((installation[0].parent.parent / "lib").glob("python3*")) / "site-packages"
    drop = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid else []
    with tempfile.TemporaryDirectory(dir="/srv", prefix="casemate-older-") as name:
        tmp = Path(name)
        workspace, home = tmp / "wsdie", tmp / "home"
        for directory in (tmp, workspace, home):
            directory.mkdir(exist_ok=True)
            os.chown(directory, uid, uid)
            directory.chmod(0o755)
        (tmp / "driver.py").write_text(DRIVER)
        env = {"PATH": PATH, "HOME": str(home)}

        def run(script: str, **more: str) -> subprocess.CompletedProcess[str]:
            argv = [*drop, PYTHON, "-I", str(tmp / "driver.py"), str(site), "attached", str(workspace)]
            return subprocess.run(
                [*argv, "/bin/sh", "-c", script], env=env | more, capture_output=True, text=True, timeout=60,
                check=False,
            )  # fmt: skip

        def cli(*words: str) -> subprocess.CompletedProcess[str]:
            argv = [*drop, str(installation[0]), *words]
            return subprocess.run(argv, env=env, cwd=workspace, capture_output=True, text=True, check=False)

        assert run("echo 1 >f; echo 1 >~/h", SESSION="s").returncode == 0
        assert cli("session", "snapshot", "s").returncode == 0
        killed = run("echo 2 >>f; echo up; sleep 60", SESSION="s", DIE="yes")
        assert killed.returncode == -9, killed
        single = cli("run", "--", "/bin/sh", "-c", "ls")  # which cleans up
        assert (single.returncode, single.stdout) == (0, ""), single
        again = run("cat f ~/h", SESSION="s")
        assert json.loads(again.stdout)["out"] == "1\n2\n1\n", again
        assert cli("session", "discard", "s").returncode == 0
    with open("/proc/self/mounts") as mounts:
        assert [line for line in mounts if "/casemate/" in line and "/wsdie-" in line] == []


@pytest.mark.root
def test_a_large_top_lies_in_a_file_of_exact_size(casemate: object, host_workspace: Path) -> None:
    """A disk limit above what memory may hold is a file system of that size; nothing of it stays."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    size = total // 4 // (1 << 20) + 512
    assert callable(casemate)
    script = "df -k --output=size . | tail -1; echo made > made-in-a-file"
    done = casemate("/bin/sh", "-c", script, flags=("--disk", f"{size}M"))
    assert done.code == 0, done
    seen = int(done.stdout.split()[0]) >> 10
    # The kernel's own tables take a little; as an unprivileged user the host's file system shows.
    if os.stat(host_workspace).st_uid == 0:
        assert size * 0.95 < seen <= size
    assert (host_workspace / "made-in-a-file").read_text() == "made\n"
    with open("/proc/self/mounts") as mounts:
        assert "/dev/loop" not in mounts.read()
