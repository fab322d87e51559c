"""The store of sessions: records survive a kill at any point, and what nobody needs is collected."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from casemate.errors import PolicyError, WorkspaceError
from casemate.workspace.layers import Store
from casemate.workspace.records import HOME, START, Record, check_name
from tests.unit.workspace.tops import DIED, WHO, acting_as, die_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHANGES = ((os, (
    "mkdir", "rename", "unlink", "link", "mknod", "setxattr", "fchmod", "utime", "rmdir", "write", "fsync",
    "chmod", "open",
)),)  # fmt: skip


@pytest.fixture(params=WHO)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store of root or of a user."""
    if request.param == "user" and os.geteuid() == 0:
        for path in (tmp_path, *tmp_path.parents):
            if path == Path("/tmp"):
                break
            path.chmod(path.stat().st_mode | 0o011)
        os.chown(tmp_path, 1000, 1000)
    with acting_as(request.param):
        yield Store(str(tmp_path / "store"), rootless=request.param == "user")


def put(store: Store, record: Record, **files: str) -> None:
    """Files of the live top, or (``home__…``) of HOME."""
    for name, content in files.items():
        top, _, rest = name.rpartition("home__")
        path = Path(store.layers, record.live, HOME if top or name != rest else "up0", rest or name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def start(store: Store, name: str = "s") -> Record:
    """A session with one view."""
    record = msgspec.structs.replace(store.create(name, "/ws", 1), views=("/ws",))
    store.save(record)
    return record


def tree(store: Store, record: Record) -> dict[str, str]:
    """What the layers hold together: no deletions here, so the newest counts."""
    found: dict[str, str] = {}
    for directory in record.directories():
        for path in sorted(Path(store.layers, directory).glob("*/*")):
            if path.parent.name in ("up0", HOME) and path.is_file():
                found[f"{path.parent.name}/{path.name}"] = path.read_text()
    return found


def load(store: Store, name: str = "s") -> Record:
    record = store.load(name)
    assert record is not None
    return record


def killed_at_every_point(act: Callable[[], object], check: Callable[[], None]) -> int:
    """Do ``act`` in a process that dies before its first change, its second, …; ``check`` after each."""
    step = 1
    while True:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                die_at(step, CHANGES)
                act()
                os._exit(0)
            os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, DIED)
        check()
        if code == 0:
            return step
        step += 1


def prepared(store: Store) -> Record:
    """A session with two frozen layers and something in its live one."""
    record = start(store)
    put(store, record, a="1", b="1", home__h="1")
    record, _ = store.snapshot(record, 2)
    put(store, record, b="2", home__h="2")
    record, _ = store.snapshot(record, 3)
    put(store, record, c="3")
    return record


@pytest.mark.slow
def test_killed_anywhere(store: Store) -> None:
    """Snapshot, flatten, branch and apply, killed before any single change they make: the session holds what
    it did, its record is the old one or the new one, and all the rest is collected.
    """
    prepared(store)
    want = {"up0/a": "1", "up0/b": "2", "up0/c": "3", "home/h": "2"}

    def whole() -> None:
        assert tree(store, load(store)) == want
        store.collect()
        assert tree(store, load(store)) == want
        needed = {name for other in store.names() for name in load(store, other).directories()}
        assert set(os.listdir(store.layers)) == needed
        there = sorted(["layers", *(f"{n}.json" for n in store.names())])
        assert sorted(os.listdir(store.directory)) == there

    acts = (
        lambda: store.snapshot(load(store), 4),
        lambda: store.branch(load(store), f"t{len(store.names())}", 5),
        lambda: store.flatten(load(store)),
    )
    for act in acts:
        assert killed_at_every_point(act, whole) > 3
    for name in store.names():
        if name != "s":
            killed_at_every_point(lambda name=name: store.discard(name), whole)  # type: ignore[misc]
    assert store.names() == ["s"]
    killed_at_every_point(lambda: store.gather(load(store), 6), whole)
    killed_at_every_point(lambda: store.begin_apply(load(store)), whole)
    assert load(store).applying


def test_roll_back_killed_anywhere(store: Store) -> None:
    """A roll-back has happened or not."""
    record = prepared(store)
    to = record.layers[1].id
    old, new = tree(store, record), {"up0/a": "1", "up0/b": "1", "home/h": "1"}
    seen = []

    def either() -> None:
        seen.append(tree(store, load(store)))
        assert seen[-1] in (old, new)
        store.collect()
        assert tree(store, load(store)) == seen[-1]

    killed_at_every_point(lambda: store.roll_back(load(store), to, 4), either)
    assert seen[0] == old
    assert seen[-1] == new


def test_collecting_killed_anywhere(store: Store) -> None:
    """Garbage that is half removed is removed the next time, and nothing else."""
    record = prepared(store)
    store.branch(record, "t", 5)
    store.discard("s")
    want = tree(store, load(store, "t"))

    def same() -> None:
        assert tree(store, load(store, "t")) == want

    killed_at_every_point(store.collect, same)
    assert set(os.listdir(store.layers)) == set(load(store, "t").directories())
    store.discard("t")
    killed_at_every_point(store.collect, lambda: None)
    store.collect()
    assert not os.path.exists(store.directory)


def test_an_apply_that_ends(store: Store) -> None:
    """After an apply step only HOME is left of the layers; after one that left something, all of it."""
    record = store.gather(prepared(store), 4)
    assert not record.applying, "nothing has happened yet"
    record = store.begin_apply(record, ["*.py", "a b"], ["x\x1b", "-y"])
    for act in (
        lambda: store.snapshot(record, 5), lambda: store.branch(record, "t", 5),
        lambda: store.roll_back(record, START, 5), lambda: store.flatten(record),
    ):  # fmt: skip
        with pytest.raises(WorkspaceError) as caught:
            act()
        assert caught.value.code == "session-applying"
        words = r"--only '*.py' --only 'a b' -- 'x\x1b' -y"
        assert caught.value.hint == f"casemate apply --session s {words} goes on with it"
    assert store.gather(load(store), 5) == record
    part = store.end_apply(record, 5, complete=False)
    assert (part.globs, part.paths) == ((), ())
    assert (part.applying, part.resumed, part.started_ns) == (False, True, 1)
    assert tree(store, part) == {"up0/a": "1", "up0/b": "2", "up0/c": "3", "home/h": "2"}
    put(store, part, d="4")
    done = store.end_apply(store.begin_apply(store.gather(part, 6)), 7, complete=True)
    store.collect()
    assert tree(store, done) == {"home/h": "2"}
    assert (done.applying, done.resumed, done.started_ns) == (False, False, 7)
    assert [layer.id for layer in done.snapshots] == [START]
    for number in range(20):
        put(store, done, e=str(number), home__h=str(number))
        done = store.end_apply(store.gather(done, 8), 9, complete=True)
    assert tree(store, done)["home/h"] == "19"
    assert len(done.layers) < 12, "homes are merged, too"


def test_a_branch_that_is_refused(store: Store) -> None:
    """A name that is taken already leaves no snapshot behind; the control: another one makes one."""
    record = prepared(store)
    for name, made in (("s", 0), ("t", 1)):
        count = len(load(store).snapshots)
        with contextlib.nullcontext() if made else pytest.raises(WorkspaceError, match="already"):
            store.branch(load(store), name, 5)
        assert len(load(store).snapshots) == count + made
    assert record.snapshots == load(store).snapshots[:-1]


def test_what_is_applied_is_nobody_elses(store: Store) -> None:
    """The layer that an apply step takes apart is not one that a branch still needs."""
    record = start(store)
    put(store, record, a="1")
    record, twin = store.branch(record, "t", 2)
    want = tree(store, twin)
    record = store.begin_apply(store.gather(record, 3))
    (layer,) = [layer for layer in record.layers if layer.directory]
    assert layer.directory not in twin.directories()
    Path(store.layers, layer.directory, "up0", "a").unlink()
    store.end_apply(record, 4, complete=True)
    store.collect()
    assert tree(store, load(store, "t")) == want
    assert tree(store, load(store)) == {}


def test_broken_records(store: Store) -> None:
    """A record that cannot be read is said to be so; until it is discarded nothing is garbage."""
    prepared(store)
    start(store, "t")
    path = Path(store.directory, "s.json")
    data = path.read_bytes()
    layers = set(os.listdir(store.layers))
    for bad in (b"", b"{", data[: len(data) // 2], data.replace(b'"version":1', b'"version":9'), b"[]"):
        path.write_bytes(bad)
        with pytest.raises(WorkspaceError) as caught:
            store.load("s")
        assert caught.value.code == "session-broken"
        with pytest.raises(WorkspaceError):
            store.collect()
    assert set(os.listdir(store.layers)) == layers
    assert load(store, "t")
    store.discard("s")
    store.collect()
    assert set(os.listdir(store.layers)) == set(load(store, "t").directories())


def test_a_layer_in_the_making_is_no_garbage(store: Store) -> None:
    """What is being merged is left alone by others who collect; afterwards it is garbage."""
    record = prepared(store)
    names = record.directories()[:-1]
    with store.merging(record, names, names) as made:
        assert store.collect() == 0
        assert sorted(path.name for path in Path(store.layers, made, "up0").iterdir()) == ["a", "b"]
    assert store.collect() == 1


def test_the_store_is_private(store: Store) -> None:
    """Commands own what is in layers, set-id files perhaps: nobody else gets at them."""
    record = prepared(store)
    for path in (store.directory, f"{store.layers}/{record.live}"):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    os.chmod(store.directory, 0o755)
    store.save(record)
    assert stat.S_IMODE(os.stat(store.directory).st_mode) == 0o700


def test_names() -> None:
    """Names are plain words."""
    assert [check_name(name) for name in ("a", "A-1_b.c", "x" * 64)] == ["a", "A-1_b.c", "x" * 64]
    for name in ("", ".a", "-a", "a/b", "a b", "é", "x" * 65, "a\n", ".."):
        with pytest.raises(PolicyError):
            check_name(name)
