"""``AsyncSandbox`` and ``Sandbox``: run commands behind the boundary from Python.

The policy is read once, when the sandbox is opened; each command gets a fresh sandbox of that policy and
its changes are applied when it ends.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from contextlib import asynccontextmanager
from typing import Self, TypeVar

import msgspec

from casemate.errors import PolicyError, SandboxError
from casemate.isolation.process.spec import Late
from casemate.policy.model import FlagLayer
from casemate.sandbox import keeper_client
from casemate.sandbox.command import Command
from casemate.sandbox.job import Job, Request, kept_count, own_umask, prepare
from casemate.sandbox.locks import WorkspaceLock
from casemate.sandbox.session import Session
from casemate.settings import places
from casemate.workspace.records import check_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
    from concurrent.futures import Future

    from casemate.sandbox.gate import Reviewer
    from casemate.sandbox.keeper_client import KeeperClient
    from casemate.sandbox.result import Result

    Sink = Callable[[bytes], object]

__all__ = ["AsyncSandbox", "Sandbox"]

T = TypeVar("T")


class AsyncSandbox:
    """A policy and a workspace in which commands run.

    ``preset``, ``policy_file`` and ``flags`` are as on the command line; ``environ`` stands for the
    caller's environment (default: this process's own). ``review`` answers questions about hosts
    (``network.ask``): it is called with the question and a function that takes the answer, a flag and a scope
    (``once``, ``session``, ``saved``). ``ready`` sandboxes are made ahead: ``kind``
    ``prefab`` prepares everything but a process, ``slot`` a sealed process that waits.
    ``session`` names a session of the workspace: its commands find HOME and the view as the one before left
    them, nothing is applied at their end, and none can be made ahead.

    Raises PolicyError when opened with a policy that is wrong, ProtectionUnavailable where the host
    cannot enforce it.
    """

    def __init__(
        self,
        workspace: str | os.PathLike[str] = ".",
        *,
        preset: str | None = None,
        policy_file: str | os.PathLike[str] | None = None,
        flags: FlagLayer | None = None,
        environ: Mapping[str, str] | None = None,
        ready: int = 0,
        kind: str = "slot",
        review: Reviewer | None = None,
        session: str = "",
    ) -> None:
        if session:
            check_name(session)
        if preset == "full-access":
            raise PolicyError(
                "full-access is no sandbox",
                code="full-access",
                hint="use subprocess where you want no boundary",
            )
        if kind not in ("prefab", "slot"):
            raise PolicyError(f"unknown kind {kind!r}", hint="use prefab or slot")
        self._workspace: str = os.path.realpath(os.fspath(workspace))
        self._preset = preset
        self._policy_file: str | None = None
        if policy_file is not None:
            self._policy_file = os.path.realpath(os.fspath(policy_file))
        self._flags = flags
        self._environ = dict(os.environ if environ is None else environ)
        self._ready, self._kind = ready, kind
        self._review = review
        self._session, self._dropped = session, False
        self._running: set[Command] = set()
        self._keeper: KeeperClient | None = None
        self._job: Job | None = None
        self._generation = 0  # of the keeper that has been told what to make ahead
        self._closed = False
        self._opening: asyncio.Lock | None = None
        self._locks: list[WorkspaceLock] = []

    async def __aenter__(self) -> Self:
        """Open it: read the policy, start the keeper."""
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()

    async def open(self) -> Job:
        """Read the policy and start the keeper, once. ``run`` does it too."""
        self._closed = False
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._job is None:
                keeper = keeper_client.shared(places(self._environ).run)
                try:
                    await keeper.ready()
                    job = self._prepare(keeper)
                    await self._fill(keeper, job)
                except BaseException:
                    keeper_client.release(keeper)
                    raise
                self._keeper, self._job = keeper, job
            return self._job

    def _prepare(self, keeper: KeeperClient) -> Job:
        request = Request(
            argv=("true",),
            workspace=self._workspace,
            cwd=self._workspace,
            environ=self._environ,
            preset=self._preset,
            policy_file=self._policy_file,
            flags=self._flags,
            umask=own_umask(),
            session=self._session,
        )
        return prepare(request, keeper.hierarchies, rootless=keeper.rootless)

    async def change_network(self, *, allow: Sequence[str] = (), deny: Sequence[str] = ()) -> None:
        """Go by other rules from now on, running commands included; what they do not allow any more is cut.

        ``allow`` and ``deny`` replace those of ``flags``; files and the administrator's ceiling count as
        before. Raises PolicyError, and then nothing has changed.
        """
        await self.open()
        keeper, before = self._keeper, self._flags
        assert keeper is not None  # noqa: S101
        flags = before if before is not None else FlagLayer()
        self._flags = msgspec.structs.replace(flags, allow=tuple(allow), deny_host=tuple(deny))
        try:
            job = self._prepare(keeper)
        except BaseException:
            self._flags = before
            raise
        self._job = job
        for command in self._running:
            command.update(job.policy.network)
        await self._fill(keeper, job)

    async def _fill(self, keeper: KeeperClient, job: Job) -> None:
        """Have sandboxes made ahead, once for each keeper."""
        self._generation = keeper.generation
        if job.plan is not None and self._ready and not self._session:
            await keeper.pool(job.plan, self._kind, self._ready)

    async def close(self) -> None:
        """Give the keeper back; the last sandbox of an event loop ends it, and every command with it."""
        self._closed = True
        while self._locks:
            self._locks.pop().close()
        if self._dropped and self._job is not None and self._keeper is not None:
            # What a roll-back has let go of takes as long to remove as there is of it.
            self._dropped = False
            session = Session.of(self._job, rootless=self._keeper.rootless)
            await asyncio.to_thread(session.store.collect)
        if self._keeper is not None:
            keeper_client.release(self._keeper)
            self._keeper = None
            self._job = None

    async def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - it kills the sandbox, not the task
        on_stdout: Sink | None = None,
        on_stderr: Sink | None = None,
        apply: bool = True,
    ) -> Result:
        """Run one command and wait for its end. A string goes to ``/bin/sh -c``.

        ``timeout`` is in seconds and can only shorten the policy's. ``on_stdout`` and ``on_stderr`` get
        output as it comes; the result holds it as well. Cancelling kills the command. Without ``apply`` its
        changes wait, under the name ``result.applied.pending`` (see ``casemate.sandbox.kept``).

        Commands in one workspace run one after another, since they share its changes.

        Raises CasemateError when the sandbox could not be made or the program not be started; a command
        that fails is a Result.
        """
        if self._closed:
            raise SandboxError("the sandbox is closed", code="closed", hint="open it again")
        opened = self._job if self._job is not None else await self.open()
        keeper = self._keeper
        assert keeper is not None  # noqa: S101
        assert opened.plan is not None  # noqa: S101
        if not apply and (self._session or opened.policy.filesystem.workspace == "direct"):
            raise PolicyError("there is no view here whose changes could wait", code="no-view")
        job = _job_for(opened, command, env, cwd)

        def renewed() -> Job:
            # A command that has waited for its turn goes by the rules of now, not of when it came.
            latest = self._job
            return job if latest is None or latest is opened else _job_for(latest, command, env, cwd)

        def made(job: Job) -> Command:
            return Command(keeper, job, stdin, timeout, on_stdout, on_stderr, self._review, apply=apply)

        if not self._session and not any(view.writable for view in opened.plan.spec.views):
            await self._revive(keeper, job, locked=False)
            return await self._watched(made(renewed()))
        async with self._holding(job):
            await self._revive(keeper, job, locked=not self._session)
            job = renewed()
            if not self._session:
                return await self._watched(made(job))
            session = Session.of(job, rootless=keeper.rootless)
            job = await asyncio.to_thread(session.enter, job)
            result = await self._watched(made(job))
            return await asyncio.to_thread(session.leave, job, result, result.disk["seen"])

    @asynccontextmanager
    async def _holding(self, job: Job) -> AsyncGenerator[None, None]:
        """Hold the lock of the workspace or the session."""
        # In this loop they queue in order; only the first has to look whether another process is done.
        async with _queue(job.lock):
            lock = await self._locked(job.lock)
            try:
                yield
            finally:
                self._give_back(lock)

    async def snapshot(self) -> str:
        """Freeze the session as it is between two commands; returns the snapshot's name.

        It takes the same time for any tree, as ``branch`` and ``rollback`` do. They raise WorkspaceError
        (``no-session``: there was no command yet; ``too-many-layers``; ``no-snapshot``; ``session-exists``),
        and PolicyError (``session-none``) where the sandbox has no session.
        """
        return await self._with_session(Session.snapshot)

    async def branch(self, name: str, *, at: str = "") -> AsyncSandbox:
        """A new session that goes on from here, or from the snapshot ``at``; its sandbox, not yet opened."""
        check_name(name)
        await self._with_session(lambda session: session.branch(name, at))
        return AsyncSandbox(
            self._workspace, preset=self._preset, policy_file=self._policy_file, flags=self._flags,
            environ=self._environ, review=self._review, session=name,
        )  # fmt: skip

    async def rollback(self, snapshot: str) -> None:
        """Drop everything since a snapshot; ``start`` stands for before the first command."""
        await self._with_session(lambda session: session.roll_back(snapshot))
        self._dropped = True

    async def _with_session(self, act: Callable[[Session], T]) -> T:
        if not self._session:
            raise PolicyError(
                "the sandbox has no session", code="session-none", hint="name one: Sandbox(…, session=NAME)"
            )
        job = await self.open()
        session = Session.of(job, rootless=self._keeper is not None and self._keeper.rootless)

        def settled() -> T:
            session.recover()
            return act(session)

        async with self._holding(job):
            return await asyncio.to_thread(settled)

    async def _watched(self, command: Command) -> Result:
        """Run it; what changes meanwhile reaches it."""
        self._running.add(command)
        try:
            return await command.run()
        finally:
            self._running.discard(command)

    def _give_back(self, lock: WorkspaceLock) -> None:
        if self._closed:
            lock.close()
        else:
            lock.release()
            self._locks.append(lock)

    async def _revive(self, keeper: KeeperClient, job: Job, *, locked: bool) -> None:
        """Start a new keeper where the last one has died, and remove what that one can no longer."""
        if keeper.running() and keeper.generation == self._generation:
            return
        await keeper.ready()
        if keeper.generation != self._generation:
            if locked:
                kept_count(job)
            await self._fill(keeper, job)

    async def _locked(self, path: str) -> WorkspaceLock:
        """Take the workspace's lock; one lock object per command under way, kept for the next ones.

        No thread waits for it: threads that wait for a lock could take the place of the one that is needed
        to give it back.
        """
        lock = self._locks.pop() if self._locks else WorkspaceLock(path)
        pause = 0.005
        try:
            while not lock.take(wait=False, label=f"pid {os.getpid()}"):
                await asyncio.sleep(pause)
                pause = min(0.05, pause * 1.5)
        except BaseException:
            lock.close()
            raise
        return lock


_queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.WeakValueDictionary[str, asyncio.Lock]]
_queues = weakref.WeakKeyDictionary()


def _queue(path: str) -> asyncio.Lock:
    """The queue of a workspace's commands in this event loop, while there are any."""
    loop = asyncio.get_running_loop()
    queues = _queues.get(loop)
    if queues is None:
        queues = _queues[loop] = weakref.WeakValueDictionary()
    lock = queues.get(path)
    if lock is None:
        lock = queues[path] = asyncio.Lock()
    return lock


def _job_for(
    opened: Job,
    command: str | Sequence[str],
    env: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
) -> Job:
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else [os.fsdecode(word) for word in command]
    if not argv or not argv[0]:
        raise PolicyError("no command was given", code="no-command")
    if any("\0" in text for text in argv) or (env and any("\0" in k or "\0" in v for k, v in env.items())):
        raise PolicyError("an argument or variable holds a NUL byte", code="bad-argument")
    if env and any(not name or "=" in name for name in env):
        raise PolicyError("a variable needs a name, and no name holds a =", code="bad-argument")
    where = opened.workspace
    if cwd is not None:
        where = os.path.normpath(os.path.join(opened.workspace, os.fspath(cwd)))
        if where != opened.workspace and not where.startswith(f"{opened.workspace.rstrip('/')}/"):
            raise PolicyError(
                f"the working directory {where} does not lie in the workspace",
                code="cwd-outside",
                hint="give a directory of the workspace",
                cwd=where,
            )
    late = Late(argv, {**opened.late.env, **env} if env else opened.late.env, where, False)
    late.umask = opened.late.umask
    request = msgspec.structs.replace(opened.request, argv=tuple(argv))
    job = msgspec.structs.replace(
        opened, request=request, late=late, began=time.monotonic(), began_wall_ns=time.time_ns()
    )
    job.check_size()
    return job


class Sandbox:
    """The same for programs without an event loop: each method waits. Takes what ``AsyncSandbox`` takes."""

    def __init__(self, workspace: str | os.PathLike[str] = ".", **options: object) -> None:
        self._async = AsyncSandbox(workspace, **options)  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        """Open it: read the policy, start the keeper."""
        _wait(self._async.open())
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Close it; the keeper ends with the last sandbox."""
        _wait(self._async.close())

    def change_network(self, *, allow: Sequence[str] = (), deny: Sequence[str] = ()) -> None:
        """Go by other rules from now on; see ``AsyncSandbox.change_network``."""
        _wait(self._async.change_network(allow=allow, deny=deny))

    def run(self, command: str | Sequence[str], **options: object) -> Result:
        """Run one command and wait for its end; see ``AsyncSandbox.run``."""
        return _wait(self._async.run(command, **options))  # type: ignore[arg-type]

    def snapshot(self) -> str:
        """Freeze the session; see ``AsyncSandbox.snapshot``."""
        return _wait(self._async.snapshot())

    def branch(self, name: str, *, at: str = "") -> Sandbox:
        """A new session that goes on from here; see ``AsyncSandbox.branch``."""
        twin = object.__new__(Sandbox)
        twin._async = _wait(self._async.branch(name, at=at))
        return twin

    def rollback(self, snapshot: str) -> None:
        """Drop everything since a snapshot; see ``AsyncSandbox.rollback``."""
        _wait(self._async.rollback(snapshot))


_background: asyncio.AbstractEventLoop | None = None
_background_lock = threading.Lock()


def _wait(work: Coroutine[object, object, T]) -> T:
    """Run on the one background loop of this process."""
    global _background
    with _background_lock:
        if _background is None:
            loop = _background = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="casemate", daemon=True).start()
    future: Future[T] = asyncio.run_coroutine_threadsafe(work, _background)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
