"""Sessions against a model: whatever is done to the layers, a session shows what a plain copy would."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from casemate.errors import WorkspaceError
from casemate.workspace import survey
from casemate.workspace.layers import MOST_LAYERS, Store
from casemate.workspace.records import START
from tests.property.test_apply_equals_view import WORK, prepare
from tests.property.test_flatten import inside
from tests.unit.workspace.tops import WHO, Stage, stage_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from casemate.workspace.records import Record


class Model:
    """Sessions of one workspace, each with the tree that it should show, and those of its snapshots."""

    def __init__(self, stage: Stage, seed: int) -> None:
        self.stage, self.chance = stage, random.Random(seed)
        self.store = Store(str(stage.base / "store"), rootless=stage.user)
        self.spare = stage.base / "spare"
        self.now: dict[str, Any] = {}
        self.snapshots: dict[str, dict[str, Any]] = {}
        self.host = self.look([stage.ws])
        self.begin("s0")

    def record(self, name: str) -> Record:
        record = self.store.load(name)
        assert record is not None
        return record

    def begin(self, name: str) -> None:
        record = self.store.create(name, str(self.stage.ws), time.time_ns())
        self.store.save(record.__class__(**{**_fields(record), "views": (str(self.stage.ws),)}))
        self.now[name], self.snapshots[name] = self.host, {START: self.host}

    def lowers(self, record: Record) -> list[Path]:
        """The frozen tops of the view, the newest first, and the workspace."""
        names = [layer.directory for layer in reversed(record.layers) if layer.directory and not layer.spent]
        found = [Path(self.store.layers, name, "up0") for name in names]
        return [*(path for path in found if path.is_dir()), self.stage.ws]

    def look(self, lowers: list[Path]) -> Any:
        self.stage.clean(self.spare)
        return self.run(lowers, self.spare, 0, 0)

    def run(self, lowers: list[Path], upper: Path, seed: int, count: int) -> Any:
        argv = (sys.executable, "-I", "-S", "-c", WORK, str(seed), str(count), ".")
        return json.loads(inside(self.stage, lowers, upper, *argv))

    def live(self, record: Record) -> Path:
        path = Path(self.store.layers, record.live, "up0")
        path.mkdir(exist_ok=True)
        return path

    # -- what can be done ------------------------------------------------------------------------------

    def work(self, name: str) -> None:
        """A command: random work."""
        record = self.record(name)
        seed = self.chance.randrange(10**6)
        self.now[name] = self.run(self.lowers(record), self.live(record), seed, self.chance.randint(0, 12))
        layer = f"{self.store.layers}/{record.live}"
        survey.note_firsts(layer, record.tops, self.store.prefix, 0, 10)

    def snapshot(self, name: str) -> None:
        _, made = self.store.snapshot(self.record(name), time.time_ns())
        self.snapshots[name][made] = self.now[name]

    def branch(self, name: str) -> None:
        if len(self.now) > 3:
            return
        twin = f"s{len(self.now)}-{self.chance.randrange(10**6)}"
        record = self.record(name)
        at = self.chance.choice(["", *(layer.id for layer in record.snapshots)])
        record, made = self.store.branch(record, twin, time.time_ns(), at)
        new = {layer.id for layer in record.snapshots} - set(self.snapshots[name])
        self.snapshots[name].update(dict.fromkeys(new, self.now[name]))
        self.snapshots[twin] = {layer.id: self.snapshots[name][layer.id] for layer in made.snapshots}
        self.now[twin] = self.snapshots[name][at] if at else self.now[name]

    def roll_back(self, name: str) -> None:
        record = self.record(name)
        to = self.chance.choice([layer.id for layer in record.snapshots])
        record = self.store.roll_back(record, to, time.time_ns())
        kept = {layer.id for layer in record.snapshots}
        self.snapshots[name] = {i: tree for i, tree in self.snapshots[name].items() if i in kept}
        self.now[name] = self.snapshots[name][to]

    def flatten(self, name: str) -> None:
        record = self.record(name)
        record = self.store.flatten(record, self.chance.choice([layer.id for layer in record.snapshots]))
        kept = {layer.id for layer in record.snapshots}
        self.snapshots[name] = {i: tree for i, tree in self.snapshots[name].items() if i in kept}

    def apply(self, name: str) -> None:
        """Apply one session; the others would have another workspace below them: they go."""
        for other in [*self.now]:
            if other != name:
                self.store.discard(other)
                del self.now[other], self.snapshots[other]
        record = self.store.begin_apply(self.store.gather(self.record(name), time.time_ns()))
        directory = record.layers[-1].directory
        top = Path(self.store.layers, directory, "up0")
        if directory and top.is_dir():
            self.stage.upper = top
            self.stage.started = record.started_ns
            report = self.stage.apply(resumed=True, firsts=self.store.firsts(record, [directory])[0])
            assert not report.held, report.held
            assert report.complete, report.failed
        self.store.end_apply(record, time.time_ns(), complete=True)
        assert self.look([self.stage.ws]) == self.now[name]
        self.host = self.now[name]
        self.snapshots[name] = {START: self.host}

    def collect(self, _: str) -> None:
        self.store.collect()

    def check(self) -> None:
        """Every session shows what it should, now and at each of its snapshots."""
        for name, tree in self.now.items():
            record = self.record(name)
            assert self.look([self.live(record), *self.lowers(record)]) == tree, name
            assert {layer.id for layer in record.snapshots} == set(self.snapshots[name])
        name = self.chance.choice([*self.now])
        record = self.record(name)
        layer = self.chance.choice(record.snapshots)
        at = record.__class__(
            **{**_fields(record), "layers": record.layers[: record.layers.index(layer) + 1]}
        )
        assert self.look(self.lowers(at)) == self.snapshots[name][layer.id], (name, layer)


def _fields(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def walk(seed: int, who: str, steps: int) -> Iterator[str]:
    """Random operations, each checked; names them as it goes."""
    with stage_for(who) as stage:
        prepare(stage, seed)
        model = Model(stage, seed)
        acts = [model.work] * 6 + [model.snapshot] * 3 + [
            model.branch, model.branch, model.roll_back, model.flatten, model.collect, model.apply,
        ]  # fmt: skip
        for _ in range(steps):
            act = model.chance.choice(acts)
            name = model.chance.choice([*model.now])
            act(name)
            yield f"{act.__name__} {name}"
            model.check()
        for name in [*model.now]:
            model.store.discard(name)
        model.store.collect()
        assert not (stage.base / "store").exists()


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_sessions_are_like_plain_copies(seed: int, who: str) -> None:
    """Work, snapshots, branches, roll-backs, flattening and applying in any order: each session and each
    snapshot show what a copy of the tree would; and nothing is left of sessions that are discarded.
    """
    done = [*walk(seed, who, 20)]
    assert len(done) == 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_sessions_are_like_plain_copies_at_length(seed: int) -> None:
    """The same, many times."""
    assert [*walk(seed, WHO[seed % len(WHO)], 40)]


def test_layers_are_bounded(tmp_path: Path) -> None:
    """A snapshot that would be one layer too many is refused by name, and flattening makes room."""
    store = Store(str(tmp_path / "store"), rootless=os.geteuid() != 0)
    record = store.create("s", str(tmp_path), 1)
    for number in range(MOST_LAYERS):
        Path(store.layers, record.live, "home").mkdir()
        Path(store.layers, record.live, "home", f"f{number}").touch()
        record, _ = store.snapshot(record, number)
    Path(store.layers, record.live, "home").mkdir()
    Path(store.layers, record.live, "home", "more").touch()
    with pytest.raises(WorkspaceError) as caught:
        store.snapshot(record, 1)
    assert caught.value.code == "too-many-layers"
    assert store.load("s") == record
    record = store.flatten(record)
    assert len(record.directories()) == 2
    record, _ = store.snapshot(record, 2)
    record = store.flatten(record)
    names = os.listdir(Path(store.layers, record.layers[-1].directory, "home"))
    assert sorted(names) == sorted(["more", *(f"f{number}" for number in range(MOST_LAYERS))])
