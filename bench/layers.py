"""Figures of sessions: what their layers cost, and what a command of one costs beside a single command."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from casemate.workspace.layers import Store
    from casemate.workspace.records import Record

    Ready = tuple[Callable[[], object], Callable[[], object]]

__all__ = ["branch", "flatten", "roll_back", "run_in_a_session", "run_single", "snapshot"]

_FILES = 50_000


def _session(base: Path, files: int) -> tuple[Store, Record]:
    """A session whose live top holds ``files`` files in directories of 100."""
    from casemate.workspace.layers import Store

    store = Store(str(base / "store"), rootless=os.geteuid() != 0)
    record = msgspec.structs.replace(store.create("s", str(base), time.time_ns()), views=(str(base),))
    store.save(record)
    top = Path(store.layers, record.live, "up0")
    for number in range(-(-files // 100)):
        directory = top / f"d{number}"
        directory.mkdir(parents=True)
        for name in range(min(100, files - 100 * number)):
            (directory / f"f{name}").write_text("text\n")
    os.sync()  # what a measured fsync would write otherwise is not its own
    return store, record


def _put_back(store: Store, record: Record, *other: str) -> None:
    """Make the record what it was, and remove what was made since."""
    for name in other:
        store.discard(name)
    store.save(record)
    for name in set(os.listdir(store.layers)) - set(record.directories()):
        os.rmdir(f"{store.layers}/{name}")


def snapshot(base: Path, _stack: ExitStack) -> Ready:
    """A snapshot of a live top with 50,000 files."""
    store, record = _session(base, _FILES)
    return lambda: store.snapshot(record, time.time_ns()), lambda: _put_back(store, record)


def branch(base: Path, _stack: ExitStack) -> Ready:
    """A branch of a session with 50,000 files in its live top, which is frozen for it."""
    store, record = _session(base, _FILES)
    return lambda: store.branch(record, "t", time.time_ns()), lambda: _put_back(store, record, "t")


def roll_back(base: Path, _stack: ExitStack) -> Ready:
    """A roll-back that drops a live top with 50,000 files; to remove them is not part of it."""
    store, record = _session(base, _FILES)
    return lambda: store.roll_back(record, "start", time.time_ns()), lambda: _put_back(store, record)


def flatten(base: Path, _stack: ExitStack) -> Ready:
    """Two layers of 1,000 files made one."""
    store, record = _session(base, 1000)
    record, _ = store.snapshot(record, time.time_ns())
    frozen = Path(store.layers, record.directories()[0])
    shutil.copytree(frozen / "up0", Path(store.layers, record.live, "up0"))
    names = record.directories()

    def once() -> None:
        with store.merging(record, names, []):
            pass

    return once, store.collect


def _true(base: Path, stack: ExitStack, session: str) -> Ready:
    from casemate import Sandbox
    from casemate.sandbox.session import Session
    from casemate.settings import places

    home, ws = base / "home", base / "ws"
    for path in (home, ws):
        path.mkdir()
    environ = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    box = stack.enter_context(Sandbox(ws, environ=environ, session=session))

    def discard() -> None:
        kept = Session(places(environ), str(ws), session, rootless=os.geteuid() != 0)
        kept.discard()
        kept.store.collect()

    def once() -> None:
        assert box.run(["/bin/true"]).ok

    once()
    if session:
        box.run("echo x >f; mkdir -p ~/.cache; echo x >~/.cache/f")
        box.snapshot()
        stack.callback(discard)
    return once, lambda: None


def run_single(base: Path, stack: ExitStack) -> Ready:
    """``true`` from Python, in no session."""
    return _true(base, stack, "")


def run_in_a_session(base: Path, stack: ExitStack) -> Ready:
    """``true`` from Python in a session with a frozen layer."""
    return _true(base, stack, "bench")
