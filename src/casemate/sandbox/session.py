"""Sessions: HOME and the view stay as a command leaves them, and the next command of the session goes on.

A session belongs to a workspace and has a name. Its layers lie in Casemate's state (``workspace.layers``);
here they meet a command: its plan gets them, its end is noted. Nothing is applied at a command's end.
"""

from __future__ import annotations

import copy
import os
import time

import msgspec

from casemate.errors import BusyError, PolicyError, ProtectionUnavailable, SandboxError, WorkspaceError
from casemate.isolation.plan import digest
from casemate.isolation.process import stacks
from casemate.isolation.process.spec import Stack, View
from casemate.sandbox.locks import WorkspaceLock
from casemate.settings import workspace_key
from casemate.workspace import survey
from casemate.workspace.layers import Store
from casemate.workspace.records import HOME, Record, check_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from casemate.isolation.process.spec import Spec
    from casemate.sandbox.job import Job
    from casemate.sandbox.result import Result
    from casemate.settings import Places

__all__ = ["Session", "Usage", "sessions"]

_PATIENCE = 10.0  # seconds for the last processes of a sandbox whose launcher was killed
#: In a live layer: when the command began at whose end nobody has looked at the layer yet.
_UNNOTED = "unnoted"
_SLACK = 1 << 20
_LOOK = 0.05  # seconds at a command's end for what has to be known of its top


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a session takes on disk: bytes of its frozen layers, those of others among them, and of all."""

    frozen: int
    used: int


class Session:
    """One session. ``take`` its lock first; ``close`` gives it back."""

    def __init__(self, where: Places, workspace: str, name: str, *, rootless: bool) -> None:
        self.name = check_name(name)
        self.workspace = workspace
        self.rootless = rootless
        key = workspace_key(workspace)
        self.store = Store(f"{where.state}/sessions/{key}", rootless=rootless)
        self.lock = WorkspaceLock(f"{where.run}/locks/{key}.{name}")

    @classmethod
    def of(cls, job: Job, *, rootless: bool) -> Session:
        """The session that a job belongs to; its lock is ``job.lock``."""
        return cls(job.places, job.workspace, job.request.session, rootless=rootless)

    def take(self, *, wait: bool = True, tell: Callable[[str], object] | None = None) -> None:
        """Lock it; ``tell(holder)`` is called once before waiting.

        Raises BusyError where it would have to wait and is not to, or where the last processes of a killed
        command do not end.
        """
        label = f"pid {os.getpid()}"
        if not self.lock.take(wait=False, label=label):
            holder = self.lock.holder()
            if not wait:
                self.lock.close()
                raise BusyError(
                    f"another command runs in the session {self.name} ({holder})",
                    hint="wait for its end",
                    session=self.name,
                    holder=holder,
                )
            if tell is not None:
                tell(holder)
            self.lock.take(wait=True, label=label)
        self.recover()

    def close(self) -> None:
        """Give the lock back."""
        self.lock.close()

    def holder(self) -> str:
        """Who has the lock just now, by its own words; ``""`` for nobody."""
        if self.lock.take(wait=False):
            self.lock.close()
            return ""
        return self.lock.holder() or "somebody"

    def record(self) -> Record:
        """What is written down of it. Raises WorkspaceError (``no-session``)."""
        record = self.store.load(self.name)
        if record is None:
            raise WorkspaceError(
                f"there is no session {self.name} in {self.workspace}",
                code="no-session",
                hint="casemate session list",
            )
        return record

    def recover(self) -> None:
        """Clean up after a command whose launcher was killed; its last processes may be there still.

        Preconditions: the lock is held.
        """
        record = self.store.load(self.name)
        if record is None:
            return
        layer = f"{self.store.layers}/{record.live}"
        os.makedirs(layer, 0o700, exist_ok=True)  # what a failure of the machine may have taken
        if not os.path.exists(f"{layer}/{_UNNOTED}"):
            return
        end = time.monotonic() + _PATIENCE
        while pid := stacks.inhabitant(layer):
            if time.monotonic() > end:
                self.lock.close()
                raise BusyError(
                    f"a command of the session {self.name} is still there (pid {pid})",
                    hint="end it, or wait for its end",
                    session=self.name,
                )
            time.sleep(0.01)
        self._note(record)

    # -- a command -----------------------------------------------------------------------------------

    def enter(self, job: Job) -> Job:
        """The job with the session's layers in its plan; the session is made if there is none.

        Raises PolicyError (``session-direct``), ProtectionUnavailable, SandboxError (``session-full``),
        WorkspaceError.
        Preconditions: the lock is held.
        """
        plan = job.plan
        assert plan is not None  # noqa: S101
        self.recover()
        if job.policy.filesystem.workspace == "direct":
            raise PolicyError(
                "a session keeps a view, and a workspace that is changed directly has none",
                code="session-direct",
                hint="leave out --session, or --direct",
            )
        now = time.time_ns()
        record = self.store.load(self.name) or self.store.create(self.name, job.workspace, now)
        self.store.refuse_applying(record)
        record = self._fitting(record, job)
        with open(f"{self.store.layers}/{record.live}/{_UNNOTED}", "w") as file:
            file.write(str(now))
        spec = copy.copy(plan.spec)
        names = dict(zip(record.views, record.tops, strict=True))
        spec.views = [
            View(view.source, view.target, view.writable, view.owner, names.get(view.source, ""))
            for view in spec.views
        ]
        newest = [layer for layer in reversed(record.layers) if layer.directory]
        spec.stack = Stack(
            self.store.layers,
            record.live,
            [layer.directory for layer in newest if not layer.spent],
            [layer.directory for layer in newest],
        )
        scopes, watch = {**plan.scopes}, {**plan.watch}
        self._limit(job, spec, record, scopes, watch)
        changed = msgspec.structs.replace(plan, spec=spec, scopes=scopes, watch=watch, digest=digest(spec))
        return msgspec.structs.replace(job, plan=changed)

    def _fitting(self, record: Record, job: Job) -> Record:
        """The record with this command's views, and with what its policy protects, hides and shows."""
        assert job.plan is not None  # noqa: S101
        views = [view.source for view in job.plan.spec.views if view.writable]
        files = job.policy.filesystem
        fitting = msgspec.structs.replace(
            record,
            views=tuple(dict.fromkeys((*record.views, *views))),
            protect=tuple(dict.fromkeys((*record.protect, *files.protect))),
            deny=tuple(dict.fromkeys((*record.deny, *files.deny))),
            readable=tuple(dict.fromkeys((*record.readable, *job.readable))),
            limit=job.policy.resources.disk,
        )
        if fitting != record:
            self.store.save(fitting)
        return fitting

    def _limit(
        self, job: Job, spec: Spec, record: Record, scopes: dict[str, str], watch: dict[str, int]
    ) -> None:
        limit = job.policy.resources.disk
        # The tops lie in the store: what else is written is memory.
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        spec.tops_on_disk = spec.scratch_image = False
        spec.scratch = memory // 4 if limit is None else max(1 << 20, min(memory // 4, limit))
        if limit is None:
            return
        if job.policy.resources.scope == "tree":
            raise ProtectionUnavailable(
                "the disk limit of a session is measured by the host, and scope = tree wants more",
                hint='use scope = "auto", or disk = "unlimited"',
                protection="resources.disk",
                needed="a file system of its own",
                found="layers that are measured",
            )
        usage = self.usage(record)
        if usage.used >= limit:
            usage = self.usage(record, exact=True)
        if usage.frozen >= limit:
            raise SandboxError(
                f"the frozen layers of the session {self.name} take {usage.frozen} bytes, and {limit} are "
                "allowed: no command can change that",
                code="session-full",
                hint="allow more with --disk, flatten it, roll it back, or discard it",
                used=usage.used,
                limit=limit,
            )
        rest, live = limit - usage.frozen, usage.used - usage.frozen
        largest = rest
        if live >= rest:  # full: a command may still remove something, which takes a little itself
            rest, largest = max(rest + _SLACK, live + _SLACK // 16), _SLACK
        scopes["disk"] = "watched" + ", without caches" * ("without caches" in scopes.get("disk", ""))
        watch["disk"], watch["disk-used"] = rest, live
        spec.rlimits = {**spec.rlimits, "FSIZE": min(largest, spec.rlimits.get("FSIZE", largest))}

    def leave(self, job: Job, result: Result, used: int = 0) -> Result:
        """Note the end of a command; returns its result with what is to be said of the session.

        ``used`` is what a watcher saw last in the live top. Preconditions: no process of it is left.
        """
        record = self.record()
        self._note(record, used)
        disk = {"used": self.usage(record).used}
        if job.policy.resources.disk is not None:
            disk["limit"] = job.policy.resources.disk
        return msgspec.structs.replace(result, session=self.name, disk=disk)

    def _note(self, record: Record, used: int = 0) -> None:
        """Look at the live top after a command, and note what has to be known of it."""
        layer = f"{self.store.layers}/{record.live}"
        try:
            with open(f"{layer}/{_UNNOTED}") as file:
                began_ns = int(file.read(30) or 0)
            survey.note_firsts(layer, record.tops, self.store.prefix, began_ns, _LOOK)
            size = survey.measure(layer, (*record.tops, HOME), _LOOK)
            if not size.exact and used > size.bytes:
                survey.note_size(layer, survey.Size(used, exact=False))
            os.unlink(f"{layer}/{_UNNOTED}")
        except (OSError, ValueError):  # no room even for that: less is known then
            return

    # -- what a person asks for ----------------------------------------------------------------------

    def usage(self, record: Record, *, exact: bool = False) -> Usage:
        """What it takes on disk, as noted, or measured where that is not ``exact``."""
        sizes = [self.store.size(name, exact=exact) for name in record.directories()]
        return Usage(frozen=sum(sizes[:-1]), used=sum(sizes))

    def snapshot(self) -> str:
        """Freeze what is there; returns the snapshot's name. Preconditions: the lock is held."""
        return self.store.snapshot(self.record(), time.time_ns())[1]

    def branch(self, name: str, at: str = "") -> None:
        """A new session with the same layers, as they are now or were ``at`` a snapshot."""
        self.store.branch(self.record(), check_name(name), time.time_ns(), at)

    def roll_back(self, snapshot: str) -> None:
        """Drop what came after a snapshot."""
        self.store.roll_back(self.record(), snapshot, time.time_ns())

    def flatten(self, snapshot: str = "") -> None:
        """Merge the layers up to a snapshot."""
        self.store.flatten(self.record(), snapshot)

    def discard(self) -> None:
        """Throw the session away."""
        self.store.discard(self.name)


def sessions(where: Places, workspace: str, *, rootless: bool) -> list[Session]:
    """All sessions of a workspace, unlocked."""
    store = Store(f"{where.state}/sessions/{workspace_key(workspace)}", rootless=rootless)
    return [Session(where, workspace, name, rootless=rootless) for name in store.names()]
