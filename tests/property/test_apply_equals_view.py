"""After the apply step the workspace is what the command saw in its view, whatever it did there."""

from __future__ import annotations

import json
import random
import sys

import pytest

from tests.unit.workspace.tops import WHO, Stage, stage_for

# Runs inside the view: random work, then a picture of the tree.
WORK = r"""
import json, os, random, stat, sys, shutil
R = random.Random(int(sys.argv[1]))
NAMES = ["a", "b", "c", "d", "e", "f"]

def somewhere(missing=None):
    path = "."
    for _ in range(R.randint(0, 3)):
        inner = [n for n in os.listdir(path) if stat.S_ISDIR(os.lstat(f"{path}/{n}").st_mode)]
        if not inner: break
        path += "/" + R.choice(inner)
    return f"{path}/{R.choice(NAMES)}"

def write(p):
    with open(p, R.choice(["w", "a", "r+"])) as f: f.write("x" * R.randint(0, 50) + str(R.random()))
def symlink(p): os.symlink(R.choice(NAMES), p)
def chmod(p):
    modes = [0o755, 0o700, 0o555] if os.path.isdir(p) else [0o600, 0o755]
    if not os.path.islink(p): os.chmod(p, R.choice(modes))
def remove(p):
    if os.path.isdir(p) and not os.path.islink(p): shutil.rmtree(p)
    else: os.unlink(p)
def rename(p): os.rename(p, somewhere())
def replace(p): remove(p); R.choice([write, os.mkdir, symlink])(p)
def tree(p): os.makedirs(f"{p}/{R.choice(NAMES)}/{R.choice(NAMES)}"); write(f"{p}/z")
def hardlink(p): os.link(p, somewhere(), follow_symlinks=False)
def touch(p): os.utime(p, ns=(1, R.randint(1, 10**18)), follow_symlinks=False)
def swap(p):
    q = somewhere(); os.rename(p, "tmp"); os.rename(q, p); os.rename("tmp", q)

ACTS = [write, write, symlink, chmod, remove, rename, rename, rename, replace, tree, os.mkdir, hardlink,
        touch, swap]
for _ in range(int(sys.argv[2])):
    try: R.choice(ACTS)(somewhere())
    except OSError: pass
if os.path.lexists("tmp"): remove("tmp")

def picture(top):
    found = {}
    for path, dirs, files in os.walk(top):
        for name in dirs + files:
            p = f"{path}/{name}"; s = os.lstat(p); kind = stat.S_IFMT(s.st_mode)
            what = [kind, stat.S_IMODE(s.st_mode)]
            if kind == stat.S_IFLNK: what = [kind, os.readlink(p), s.st_mtime_ns]
            elif kind == stat.S_IFREG: what += [open(p).read(), s.st_mtime_ns]
            found[os.path.relpath(p, top)] = what
    return found
print(json.dumps(picture(sys.argv[3])))
"""


def prepare(stage: Stage, seed: int) -> None:
    """A workspace with something in it."""
    stage.run(sys.executable, "-I", "-S", "-c", WORK, str(seed), "60", ".")
    report = stage.apply()
    assert report.complete
    assert not report.held


def check(stage: Stage, seed: int) -> None:
    """Work in a view, apply, compare."""
    for directory in (stage.upper, stage.work):
        stage.clean(directory)
    stage.started = 0
    seen = json.loads(stage.run(sys.executable, "-I", "-S", "-c", WORK, str(seed), "25", "."))
    report = stage.apply()
    assert not report.held, report.held
    assert report.complete, report.failed
    there = json.loads(stage.bare(sys.executable, "-I", "-S", "-c", WORK, "0", "0", str(stage.ws)))
    assert there == seen
    again = stage.apply(resumed=True)
    assert not again.held, again.held
    assert again.total == 0, again.changed


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("seed", range(4))
def test_workspace_equals_view(seed: int, who: str, near: bool) -> None:
    """Random work in a real overlay, of root or rootless: afterwards the workspace has the same tree, and a
    second step nothing to do.
    """
    with stage_for(who, near=near) as stage:
        prepare(stage, seed)
        for round_ in range(3):
            check(stage, 1000 * seed + round_)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_workspace_equals_view_at_length(seed: int) -> None:
    """The same, many times."""
    test_workspace_equals_view(seed, WHO[seed // 2 % len(WHO)], bool(seed % 2))


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_many_points_and_run_again(seed: int, near: bool) -> None:
    """However often and wherever the step is killed: run again, it ends where an undisturbed one does."""
    chance = random.Random(seed)
    with stage_for("root", near=near) as stage:
        seen = work_for_killing(stage, seed)
        for _ in range(4):
            stage.die(chance.randint(1, 20))
        finish(stage, seen)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("seed", [12, 21, 27, 58])
def test_killed_at_every_point_and_run_again(seed: int, near: bool) -> None:
    """The same for each single change that the step makes."""
    step = 1
    died = True
    while died:
        with stage_for("root", near=near) as stage:
            seen = work_for_killing(stage, seed)
            died = stage.die(step)
            finish(stage, seen)
        step += 1


def work_for_killing(stage: Stage, seed: int) -> object:
    """Much random work in a view; returns what the command saw at last."""
    prepare(stage, seed)
    stage.clean(stage.upper)
    stage.started = 0
    return json.loads(stage.run(sys.executable, "-I", "-S", "-c", WORK, str(seed + 7), "60", "."))


def finish(stage: Stage, seen: object) -> None:
    """Run the step to its end and compare."""
    report = stage.apply(resumed=True)
    assert not report.held, report.held
    assert report.complete, report.failed
    assert json.loads(stage.bare(sys.executable, "-I", "-S", "-c", WORK, "0", "0", str(stage.ws))) == seen
