"""A workspace that is changed directly: what the command may change is there at once, the rest is refused.

Judged on the host while nothing is held back: what is in the workspace afterwards was there during the run.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.security import matrix
from tests.security.lab import PYTHON, drop_to
from tests.security.rows import ROWS, Row
from tests.security.test_bypass_files import FOLDED, PROTECTED
from tests.security.test_bypass_git import VECTORS, prepare, use_git

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Runner
    from tests.security.lab import Scene, World

pytestmark = [pytest.mark.security, pytest.mark.root]

DIRECT = ("--direct",)
_controls: dict[tuple[str, str], matrix.Verdict] = {}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row(row: Row, mode: str, worlds: Callable[[str], World], no_leaks: None) -> None:
    """Every row of the probe table is held here, too."""
    key = (row.id, matrix.control_modes(row, mode))
    if key not in _controls:
        _controls[key] = matrix.run_row(row, worlds(key[1]), row.control)
    assert _controls[key].leaked, f"the control proves nothing: {_controls[key].line()}"
    verdict = matrix.run_row(row, worlds(mode), "direct")
    assert verdict.held, verdict.line()


def state(top: Any) -> dict[str, tuple[int, int, str | bytes]]:
    """Kind, mode and content of everything below a directory; the probes and ordinary names apart."""
    found: dict[str, tuple[int, int, str | bytes]] = {}
    for base, directories, names in os.walk(top):
        directories[:] = [name for name in directories if name != ".lab"]
        for name in [*directories, *names]:
            path = os.path.join(base, name)
            facts = os.lstat(path)
            content: str | bytes = ""
            if stat.S_ISREG(facts.st_mode):
                with open(path, "rb") as file:
                    content = file.read()
            elif stat.S_ISLNK(facts.st_mode):
                content = os.readlink(path)
            found[os.path.relpath(path, top)] = (facts.st_mode, facts.st_mtime_ns if content else 0, content)
    return found


def test_names(casemate: Runner, scene: Scene) -> None:
    """No protected name comes about, changes or goes, in any case of letters, at the top or deep below; the
    ordinary one beside it does.
    """
    names = [prefix + name for prefix in ("", "fresh/deep/") for name in (*PROTECTED, *FOLDED)]
    before = state(scene.ws)
    outcome = casemate.acts(
        "direct.names", names=[*names, "control.txt", "fresh/deep/control.txt"], flags=DIRECT
    )
    done = outcome.records["direct.names"]["done"]
    through = [name for name, code in done.items() if not code and "control.txt" not in name]
    assert not through, through
    after = state(scene.ws)
    protected = {
        name: value
        for name, value in after.items()
        if any(name == n or name.startswith(f"{n}/") for n in names)
    }
    assert protected == {name: before[name] for name in protected if name in before}, (
        "on the host something changed"
    )
    assert done["write control.txt"] == done["chmod fresh/deep/control.txt"] == 0
    control = casemate.bare("direct.names", names=names).records["direct.names"]["done"]
    assert not [name for name in names if control[f"write {name}"]], "the control did not write"


def test_tricks(casemate: Runner, scene: Scene) -> None:
    """Renames, links, exchanges, truncation, times, modes and attributes do not reach them either."""
    (scene.ws / "alias").symlink_to(".vscode")
    keep = [".git", ".vscode", ".claude", ".mcp.json", "sub/repo/.git"]
    before = {name: state(scene.ws / name) or os.lstat(scene.ws / name).st_mtime_ns for name in keep}
    outcome = casemate.acts("direct.tricks", flags=DIRECT)
    done = outcome.records["direct.tricks"]["done"]
    assert [name for name, code in done.items() if not code] == ["plain rename"], done
    assert {name: state(scene.ws / name) or os.lstat(scene.ws / name).st_mtime_ns for name in keep} == before
    assert (scene.ws / ".mcp.json").read_text() == "{}\n"
    assert (scene.ws / "t3/renamed.json").read_text() == scene.token, "the ordinary rename must arrive"
    assert not os.path.lexists(scene.ws / "t6/.github")
    control = scene.world.scene()
    try:
        (control.ws / "alias").symlink_to(".vscode")
        allowed = casemate.__class__(control).bare("direct.tricks").records["direct.tricks"]["done"]
        # Each stands in the way of a later one, so that only those can be told that come first.
        assert not [
            n
            for n in ("rename a directory to .vscode", "hard link .mcp.json", "remove .claude")
            if allowed[n]
        ]
    finally:
        control.close()


def test_descriptors(casemate: Runner, scene: Scene) -> None:
    """An open file is that file and nothing more: no way leads from it to another, or to its directory."""
    outcome = casemate.acts("direct.descriptors", flags=DIRECT)
    done = outcome.records["direct.descriptors"]["done"]
    allowed = {
        "unnamed file to a plain name",
        "the given one again, by /proc",
        "the given one, linked plainly",
    }
    assert {name for name, code in done.items() if not code} == allowed, done
    assert not os.path.lexists(scene.ws / ".envrc")
    assert (scene.ws / ".mcp.json").read_text() == "{}\n"
    assert not (scene.ws / ".git/hooks").exists() or not list((scene.ws / ".git/hooks").iterdir())
    assert (scene.ws / "unnamed.txt").read_text() == scene.token
    for name in ("openat2", "io_uring", "landlock"):
        assert done[name] == errno.ENOSYS, "callers have to fall back to what is brokered"
    control = casemate.bare("direct.descriptors").records["direct.descriptors"]["done"]
    assert control["make by the open workspace"] == control["reopen the path"] == 0


def test_set_id_bits(casemate: Runner, scene: Scene) -> None:
    """No call puts a set-id or sticky bit on a file of the host; on the sandbox's own files it may."""
    outcome = casemate.acts("direct.modes", flags=DIRECT)
    record = outcome.records["direct.modes"]
    for name in ("prog", "made", "madedir", "src", "node"):
        path = scene.ws / name
        assert path.exists(), f"{name}: {record}"
        assert not path.lstat().st_mode & 0o7000, f"{name}: {oct(path.lstat().st_mode)}"
    assert stat.S_IMODE((scene.ws / "prog").stat().st_mode) == 0o755, "the rest of the mode counts"
    assert record["outside mode"] == 0o2700
    control = scene.world.scene()
    try:
        casemate.__class__(control).bare("direct.modes")
        assert (control.ws / "prog").stat().st_mode & 0o6000
    finally:
        control.close()
        if os.path.isdir("/tmp/own"):
            os.rmdir("/tmp/own")


@pytest.mark.slow
def test_races(casemate: Runner, scene: Scene) -> None:
    """A path that changes while it is looked at, and directories that are swapped, lead nowhere else."""
    before = state(scene.ws / ".git")
    outcome = casemate.acts("direct.race", "direct.swap", seconds=4, flags=DIRECT, how={"timeout": 120})
    raced, swapped = outcome.records["direct.race"], outcome.records["direct.swap"]
    assert raced["calls"] > 100, raced
    assert swapped["made"] > 100, swapped
    assert raced["won"] == 0, raced
    after = state(scene.ws / ".git")
    assert after == before
    assert not os.path.lexists(scene.ws / ".envrc")
    assert not scene.outside_changed()
    control = casemate.bare("direct.race", seconds=1).records["direct.race"]
    assert control["won"] > 0, "the control never won"


def test_git_runs_nothing(casemate: Runner, scene: Scene) -> None:
    """None of the ways to make git run a program comes about."""
    marks = prepare(scene)
    outcome = casemate.acts("git.vectors", run=f"{scene.ws.parent}/mark.sh", flags=DIRECT)
    laid = outcome.records["git.vectors"]["laid"]
    assert set(laid) == set(VECTORS)
    use_git(scene, scene.ws / "g")
    ran = {path.name for path in marks.iterdir()}
    assert not ran, f"git ran a program by way of {sorted(ran)}; {outcome.brief()}"
    control = scene.world.scene()
    try:
        marks = prepare(control)
        casemate.__class__(control).bare("git.vectors", run=f"{control.ws.parent}/mark.sh")
        use_git(control, control.ws / "g")
        assert {path.name for path in marks.iterdir()} == set(VECTORS)
    finally:
        control.close()


def test_two_halves_make_no_repository(casemate: Runner, scene: Scene) -> None:
    """Two runs, each of which makes half a repository, do not add up to one."""
    marks = prepare(scene)
    for half in ("git.first_half", "git.second_half"):
        casemate.acts(half, run=f"{scene.ws.parent}/mark.sh", flags=DIRECT)
    use_git(scene, scene.ws / "halves")
    assert not list(marks.iterdir())
    casemate.bare("git.first_half", "git.second_half", run=f"{scene.ws.parent}/mark.sh")
    use_git(scene, scene.ws / "halves")
    assert [path.name for path in marks.iterdir()] == ["halves"], "the control did not run"


def test_what_the_host_made_git_run(casemate: Runner, scene: Scene) -> None:
    """Files of the workspace that the host's own configuration, or a hook that is a link, makes git run."""
    (scene.ws / "tools").mkdir()
    for name in ("tools/clean.sh", "tools/hook.sh", "tools/other.sh"):
        (scene.ws / name).write_text("#!/bin/sh\n")
    hooks = scene.ws / ".git/hooks"
    hooks.mkdir(exist_ok=True)
    (hooks / "pre-commit").symlink_to("../../tools/hook.sh")
    with (scene.ws / ".git/config").open("a") as file:
        file.write('[filter "x"]\n\tclean = tools/clean.sh %f\n')
    subprocess.run(["chown", "-R", f"{scene.world.uid}", str(scene.ws / "tools"), str(hooks)], check=True)
    script = "for f in clean hook other; do echo changed >>tools/$f.sh; done"
    casemate("/bin/sh", "-c", script, flags=DIRECT)
    changed = [
        name
        for name in ("clean", "hook", "other")
        if "changed" in (scene.ws / f"tools/{name}.sh").read_text()
    ]
    assert changed == ["other"]


def test_hard_links(casemate: Runner, scene: Scene) -> None:
    """A file that has a name outside of the workspace keeps its content, mode and times; one that the command
    has linked itself can be written by each of its names.
    """
    facts = (scene.outside / "hard.txt").stat()
    script = (
        "echo x >hard.txt; chmod 777 hard.txt; touch -d @1 hard.txt; true >>hard.txt; mv hard.txt moved.txt;"
        " echo x >moved.txt; echo a >one; ln one two; echo b >two; rm one; echo c >two; cat two"
    )
    outcome = casemate("/bin/sh", "-c", script, flags=DIRECT)
    after = (scene.outside / "hard.txt").stat()
    assert (scene.outside / "hard.txt").read_text() == "untouched"
    assert (after.st_mode, after.st_mtime_ns) == (facts.st_mode, facts.st_mtime_ns)
    assert outcome.stdout.endswith("c\n"), outcome.brief()
    assert "hard-link" in str(outcome.report["denials"])
    control = scene.world.scene()
    try:
        casemate.__class__(control).bare("files.hardlink_existing")
        assert control.outside_changed()
    finally:
        control.close()


def test_hostile_callers(casemate: Runner, scene: Scene) -> None:
    """Bad pointers, lengths, descriptors and flags, callers that are killed and floods of calls get an error
    or nothing, and the next call is served.
    """
    outcome = casemate.acts("direct.hostile", flags=DIRECT, how={"timeout": 120})
    record = outcome.records["direct.hostile"]
    fine = {"not UTF-8", "a newline", "odd flags", "rubbish above"}
    assert {name for name, code in record["done"].items() if not code} <= fine, record
    assert {"not UTF-8", "a newline", "rubbish above"} <= {
        n for n, code in record["done"].items() if not code
    }
    assert record["done"]["null"] == record["done"]["into an unreadable page"] == errno.EFAULT
    assert record["done"]["too long"] == errno.ENAMETOOLONG
    assert record["flood"] == [0], record
    assert (scene.ws / "after.txt").read_text() == scene.token
    assert "refused-internal" not in str(outcome.report["denials"]), outcome.report["denials"]


def test_signals(casemate: Runner) -> None:
    """A signal in the middle of a call neither fails it nor makes it happen twice; a handler that wants no
    restarts may see it fail with EINTR, before it has been made.
    """
    record = casemate.acts("direct.interrupted", flags=DIRECT).records["direct.interrupted"]
    assert record["ok"], record
    assert record["signals"] > 50, record
    assert record["interruptions"][0] == 0, record


def test_semantics(casemate: Runner, scene: Scene) -> None:
    """Masks, modes, times, errors and links are as on a directory of one's own, and so is the owner."""
    record = casemate.acts("direct.semantics", flags=DIRECT).records["direct.semantics"]
    assert record["modes"] == {
        "masked": 0o640, "maskeddir": 0o750, "masked2": 0o644, "masked3": 0o600, "masked4": 0o644,
    }  # fmt: skip
    assert record["times"] == [1_500_000_000, 2_500_000_001]
    assert record["directory times"] == 6
    assert record["mode"] == 0o711
    assert record["access"] == [True, True, True, False, False, True]
    done = record["done"]
    wanted = {
        "exclusive": errno.EEXIST, "missing": errno.ENOENT, "no such file": errno.ENOENT,
        "a directory": errno.EISDIR, "unlink a directory": errno.EISDIR, "rmdir a file": errno.ENOTDIR,
        "rmdir a full one": errno.ENOTEMPTY, "mkdir again": errno.EEXIST, "not a directory": errno.ENOTDIR,
        "no replace": errno.EEXIST, "to another file system": errno.EXDEV,
        "from another file system": errno.EXDEV, "into itself": errno.EINVAL, "no follow": errno.ELOOP,
    }  # fmt: skip
    assert {name: done[name] for name in wanted} == wanted
    assert not [name for name, code in done.items() if code and name not in wanted], done
    for name in ("masked", "maskeddir", "sym", "made_by_link", "by_tmp.txt", "src/up.txt"):
        assert os.lstat(scene.ws / name).st_uid == scene.world.uid, name
    assert (scene.ws / "masked").read_text() == "through"


def test_random_acts(casemate: Runner) -> None:
    """Thousands of random acts end as on an ordinary file system: the same errors, the same trees."""
    outcome = casemate.acts("fuzz.same", flags=DIRECT, seeds=list(range(30)), count=120, how={"timeout": 240})
    assert outcome.records["fuzz.same"]["different"] == []
    assert "refused-internal" not in str(outcome.report["denials"]), outcome.report["denials"]


def test_random_registers(casemate: Runner, scene: Scene) -> None:
    """Rubbish in every register of every call that waits: nothing protected changes, the broker goes on."""
    with (scene.ws / ".git/config").open("a") as file:
        file.write("[alias]\n\tmine = !true\n")  # without it, any harmless configuration could take its place
    before = {name: state(scene.ws / name) for name in (".git", ".vscode", ".claude")}
    outcome = casemate.acts("fuzz.registers", flags=DIRECT, seed=7, calls=12_000, how={"timeout": 240})
    record = outcome.records["fuzz.registers"]
    assert record.get("calls") == 12_000, record
    assert {name: state(scene.ws / name) for name in (".git", ".vscode", ".claude")} == before
    assert not os.path.lexists(scene.ws / ".envrc")
    assert (scene.ws / "after").read_text() == scene.token
    assert not scene.outside_changed()
    assert "refused-internal" not in str(outcome.report["denials"]), outcome.report["denials"]


def test_sockets_of_the_host(casemate: Runner, scene: Scene) -> None:
    """A unix socket and a pipe that the host has in the workspace are out of reach."""
    listeners = scene.world.listeners
    path = scene.ws / "dev.sock"
    listeners.add_path(str(path), socket.SOCK_STREAM)
    os.mkfifo(scene.ws / "pipe")
    os.chown(scene.ws / "pipe", scene.world.uid, scene.world.uid)
    reader = os.open(scene.ws / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        where: dict[str, Any] = {"path_stream": str(path), "path_dgram": str(path)}
        casemate.acts("net.path_unix", flags=DIRECT, **where)
        assert not listeners.got("ps:" + scene.token)
        casemate("/bin/sh", "-c", "echo x >pipe", flags=DIRECT, timeout=20)
        assert os.read(reader, 10) == b""
        casemate.bare("net.path_unix", **where)
        assert listeners.got("ps:" + scene.token, wait=1.0), "the control did not arrive"
    finally:
        os.close(reader)


def test_nothing_stays(casemate: Runner, scene: Scene) -> None:
    """No placeholder, no temporary file: a command that changes nothing leaves the workspace as it was."""
    before = state(scene.ws)
    outcome = casemate("/bin/sh", "-c", "cat README.md; git status", flags=DIRECT)
    assert outcome.code == 0, outcome.brief()
    after = state(scene.ws)
    # Git refreshes its index where it may.
    assert {k: v for k, v in after.items() if k != ".git/index"} == {
        k: v for k, v in before.items() if k != ".git/index"
    }


_OLDER = """
import json, os, sys
sys.path[:0] = [sys.argv[1]]
from casemate.isolation.process.launcher import Launcher
from casemate.policy.model import FlagLayer
from casemate.sandbox import inline
from casemate.sandbox.job import Request, prepare
from casemate.settings import places
environ = dict(os.environ)
launcher = Launcher(places(environ).run, attached=True)
request = Request(argv=tuple(sys.argv[3:]), workspace=sys.argv[2], cwd=sys.argv[2], environ=environ,
                  flags=FlagLayer(workspace="direct"))
job = prepare(request, launcher.hierarchies, rootless=launcher.rootless)
run = inline.InlineRun(launcher, job, None)
os.close(run.stdin)
out, err = open(run.stdout).read(), open(run.stderr).read()
result = run.finish(limit="", stderr_tail=err.encode())
launcher.close()
kinds = [denial.kind for denial in result.denials]
print(json.dumps({"out": out, "err": err, "code": result.exit_code, "kinds": kinds}))
"""


def test_on_older_kernels(installation: tuple[Any, Any], scene: Scene) -> None:
    """Where detached mounts cannot be nested (before Linux 6.15) it holds as well."""
    site = next((installation[0].parent.parent / "lib").glob("python3*")) / "site-packages"
    script = "echo a >one; exec 3>>one; echo b >/dev/fd/3; chmod 600 one; cat one; echo x >.envrc; mkdir d"
    argv = [PYTHON, "-I", "-c", _OLDER, str(site), str(scene.ws), "/bin/sh", "-c", script]
    done = subprocess.run(
        [*drop_to(scene.world.uid), *argv],
        cwd=scene.ws, env=scene.world.environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["out"], answer["code"]) == ("b\n", 0), answer
    assert answer["kinds"] == ["refused-protected"]
    assert (scene.ws / "d").is_dir()
    assert stat.S_IMODE((scene.ws / "one").stat().st_mode) == 0o600
    with open("/proc/self/mounts") as mounts:
        assert str(scene.ws) not in mounts.read()


_LATER_MOUNT = """
set -e
mount -t tmpfs lab "$1"; mount --make-shared "$1"; mkdir -p "$1/ws/sub"; cd "$1/ws"
"$2" run $3 -- /bin/sh -c 'echo up; while [ ! -e go ]; do sleep 0.02; done; cat sub/secret
cut -d" " -f5 /proc/self/mountinfo' >"$1/out" 2>&1 &
while ! grep -q '^up$' "$1/out"; do sleep 0.02; done
mount -t tmpfs later "$1/ws/sub"; echo topsecret >"$1/ws/sub/secret"; : >go
wait
cat "$1/out" "$1/ws/sub/secret"
"""


@pytest.mark.parametrize("flags", ["--direct", "--preset read-only"])
def test_mounts_that_come_later(worlds: Callable[[str], World], flags: str) -> None:
    """What the host mounts below the workspace while a command runs does not appear inside, even where the
    host shares its mounts; what was there before stays.
    """
    world = worlds("root")
    scene = world.scene()
    try:
        assert world.command is not None
        place = scene.ws.parent / "shared"
        place.mkdir()
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", _LATER_MOUNT, "sh", str(place), str(world.command), flags],
            env=world.environment(), capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said = done.stdout.split()
        assert f"{place}/ws" in said, done.stdout
        assert said.count("topsecret") == 1, "on the host only"
        assert f"{place}/ws/sub" not in said
    finally:
        scene.close()
