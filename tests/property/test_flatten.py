"""Layers that are made one show what they showed together, and applied give the same workspace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from casemate.workspace.flatten import flatten
from tests.property.test_apply_equals_view import WORK, prepare
from tests.unit.workspace.tops import WHO, Stage, be_the_user, stage_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_MOUNT = """
set -e
mount -t overlay overlay -o "lowerdir=$1,$2" "$3"
cd "$3"; shift 3
exec "$@"
"""


def inside(stage: Stage, lowers: Sequence[Path], upper: Path | None, *argv: str) -> str:
    """Run a command over several layers, the newest first, with or without a top of its own."""
    words = ["userxattr" if stage.user else "redirect_dir=on,index=off,metacopy=off"]
    if upper is not None:
        stage.clean(stage.work)
        words += ["volatile", f"upperdir={upper}", f"workdir={stage.work}"]
    done = subprocess.run(
        ["unshare", *(["-Ur"] if stage.user else []), "-m", "--propagation", "private", "sh", "-c", _MOUNT,
         "sh", ":".join(map(str, lowers)), ",".join(words), str(stage.view), *argv],
        preexec_fn=be_the_user if stage.user and os.getuid() == 0 else None,
        env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def work(stage: Stage, lowers: Sequence[Path], upper: Path, seed: int, count: int) -> object:
    """Random work in a new top; returns what is seen at last."""
    argv = (sys.executable, "-I", "-S", "-c", WORK, str(seed), str(count), ".")
    return json.loads(inside(stage, lowers, upper, *argv))


def seen(stage: Stage, lowers: Sequence[Path]) -> object:
    """What layers show. (With a top: an overlay wants one, or two layers.)"""
    spare = stage.base / "spare"
    stage.clean(spare)
    return work(stage, lowers, spare, 0, 0)


def merged(stage: Stage, layers: Sequence[Path], name: str) -> Path:
    """The layers, the newest first, as one."""
    target = layers[0].parent / name
    target.mkdir()
    opened = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in (*layers, target)]
    try:
        flatten(opened[:-1], opened[-1], prefix=stage.prefix, redirects=not stage.user)
    finally:
        for handle in opened:
            os.close(handle)
    return target


def modes(layers: Sequence[Path]) -> list[tuple[str, int]]:
    """Every directory of the layers with its mode."""
    found = []
    for layer in layers:
        for path, _, _ in os.walk(layer):
            found.append((path, os.lstat(path).st_mode))
    return found


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("seed", range(8))
def test_merged_layers_show_the_same(seed: int, who: str) -> None:
    """Random work in five layers, of root or rootless: any of them made one show the same, and applied give
    the same workspace.
    """
    with stage_for(who) as stage:
        prepare(stage, seed)
        layers: list[Path] = []
        picture: object = None
        for number in range(5):
            upper = stage.upper.parent / f"layer{number}"
            upper.mkdir()
            picture = work(stage, [*layers, stage.ws], upper, 100 * seed + number, 15)
            layers.insert(0, upper)
        before = modes(layers)
        half = merged(stage, layers[2:], "half")
        assert seen(stage, [*layers[:2], half, stage.ws]) == picture
        whole = merged(stage, layers, "whole")
        assert seen(stage, [whole, stage.ws]) == picture
        again = merged(stage, [*layers[:2], half], "again")
        assert seen(stage, [again, stage.ws]) == picture
        assert modes(layers) == before
        stage.started = 0
        shutil.rmtree(stage.upper)
        stage.upper = again
        report = stage.apply()
        assert not report.held, report.held
        assert report.complete, report.failed
        there = json.loads(stage.bare(sys.executable, "-I", "-S", "-c", WORK, "0", "0", str(stage.ws)))
        assert there == picture


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_merged_layers_show_the_same_at_length(seed: int) -> None:
    """The same, many times."""
    test_merged_layers_show_the_same(seed, WHO[seed % len(WHO)])
