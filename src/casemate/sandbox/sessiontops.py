"""The changes of a session, shown and applied by the same steps as those that a single command has left.

What a session changed lies in several layers. For a look they are made one for the moment; to be applied they
are made one for good, frozen and nobody else's, so that a step that was killed can go on. What is meant is
chosen before, by a look: words that mean nothing change nothing. That a step is under way is written down
when it makes its first change. Afterwards the session starts anew over the changed workspace: nothing but
HOME is left of its layers.
"""

from __future__ import annotations

import copy
import os
import time
from contextlib import ExitStack, contextmanager, suppress

import msgspec

from casemate.sandbox.tops import Tops
from casemate.workspace.journal import Journal
from casemate.workspace.moved import settle_moves
from casemate.workspace.review import Review
from casemate.workspace.scan import lock_again

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import Any

    from casemate.sandbox.job import Job
    from casemate.sandbox.result import Applied
    from casemate.sandbox.session import Session
    from casemate.sandbox.tops import Reviews, Words
    from casemate.workspace.layers import Store
    from casemate.workspace.records import Record
    from casemate.workspace.select import Selection
    from casemate.workspace.survey import Firsts

__all__ = ["apply_session", "review_session"]


class _SessionTops(Tops):
    """The layers of a session in the place of the directories of runs."""

    def __init__(
        self, session: Session, job: Job, record: Record, directory: str, firsts: list[Firsts]
    ) -> None:
        assert job.plan is not None  # noqa: S101
        spec = copy.copy(job.plan.spec)
        spec.keep_base = session.store.layers
        plan = msgspec.structs.replace(job.plan, spec=spec)
        super().__init__(msgspec.structs.replace(job, plan=plan), rootless=session.rootless)
        name = record.name
        self._called = (f"the session {name}", f"casemate diff --session {name} --stat")
        self._own = dict(zip(record.views, firsts, strict=True))
        self.finished = False
        path = f"{session.store.layers}/{directory}"
        for top in record.tops:  # a layer has those only in which something was changed
            with suppress(FileExistsError):
                os.mkdir(f"{path}/{top}", 0o700)
        note = {
            "version": 1, "workspace": record.workspace, "argv": [f"session {record.name}"],
            "started-ns": record.started_ns, "views": record.views, "protect": record.protect,
            "deny": record.deny, "readable": record.readable,
        }  # fmt: skip
        with open(f"{path}/note.json", "wb") as file:
            file.write(msgspec.json.encode(note))

    def _as_it_ran(self, note: Any) -> Job:
        return msgspec.structs.replace(super()._as_it_ran(note), firsts=self._own)

    def discard(self, name: str, words: Words | None = None) -> int:
        """All of it is dealt with: the layer stays, for HOME is in it."""
        self.finished = True
        return 0


@contextmanager
def review_session(session: Session, job: Job) -> Generator[Reviews, None, None]:
    """What the session would change now, view by view. Preconditions: its lock is held, and the workspace's.

    Raises WorkspaceError.
    """
    record, store = session.record(), session.store
    layers = [layer for layer in record.layers if layer.directory and not layer.spent]
    names = [layer.directory for layer in layers]
    names = [name for name in (*names, record.live) if store.holds(name, record.tops)]
    with ExitStack() as stack:
        if len(names) == 1:
            name = names[0]
        else:
            stack.callback(store.collect)
            name = stack.enter_context(store.merging(record, names, []))
        tops = _SessionTops(session, job, record, name, store.firsts(record, names))
        try:
            yield stack.enter_context(tops.review(name))
        finally:
            if session.rootless and len(names) == 1:
                _lock_again(f"{store.layers}/{name}", record)


def apply_session(session: Session, job: Job, words: Words | None = None) -> tuple[Applied, list[str]]:
    """Apply what the session changed, by the checked step; with ``words`` a part of it. Returns what was
    done, and the words that meant nothing.

    The session goes on over the changed workspace, with what was not applied still in it. Raises
    WorkspaceError, and nothing has been changed then unless the session says that it is ``applying``.
    Preconditions: its lock is held, and the workspace's.
    """
    store = session.store
    only: list[Selection] | None = None
    missed: list[str] = []
    if words is not None:
        with review_session(session, job) as reviews:
            only, missed = reviews.choose(words), reviews.missed
    _check_views(store, session.record())
    record = store.gather(session.record(), time.time_ns())
    name = record.layers[-1].directory
    if not name:
        from casemate.sandbox.result import Applied

        store.end_apply(record, time.time_ns(), complete=True)
        return Applied(), missed
    store.collect()  # of what only old layers had, files can be taken and need not be copied
    tops = _SessionTops(session, job, record, name, store.firsts(record, [name]))
    applied = tops.apply_chosen(name, only, lambda: store.begin_apply(record, *(words or ())))
    path = f"{store.layers}/{name}"
    if not tops.finished:
        _go_on_with(session, record, path)
    store.end_apply(record, time.time_ns(), complete=tops.finished)
    store.collect()
    return applied, missed


def _check_views(store: Store, record: Record) -> None:
    """Refuse to begin where one of the directories is gone: the step would not come to its end."""
    for view, top in zip(record.views, record.tops, strict=True):
        layers = [layer.directory for layer in record.layers if layer.directory and not layer.spent]
        if any(store.holds(layer, [top]) for layer in (*layers, record.live)):
            Review(view).close()


def _go_on_with(session: Session, record: Record, path: str) -> None:
    """A layer of which a part is in the workspace now: its view has to stay what it was."""
    firsts = session.store.firsts(record, [os.path.basename(path)])
    now = time.time_ns()
    for number, (view, own) in enumerate(zip(record.views, firsts, strict=True)):
        for done in Journal(f"{path}/done{number}").done:
            own.known[done] = (now, own.known.get(done, (now, False))[1])
        if not session.rootless:
            settle_moves(f"{path}/up{number}", view, session.store.prefix)
    session.store.write_firsts(os.path.basename(path), firsts)
    if session.rootless:
        _lock_again(path, record)


def _lock_again(path: str, record: Record) -> None:
    for top in record.tops:
        lock_again(f"{path}/{top}")
