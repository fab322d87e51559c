"""``AsyncSandbox`` and ``Sandbox``: run commands behind the boundary from Python.

The policy is read once, when the sandbox is opened; each command gets a fresh sandbox of that policy and
its changes are applied when it ends.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Self, TypeVar

import msgspec

from casemate.errors import PolicyError, SandboxError
from casemate.isolation.process.spec import Late
from casemate.sandbox import keeper_client, settle
from casemate.sandbox.denials import TAIL
from casemate.sandbox.job import Job, Request, own_umask, prepare
from casemate.sandbox.locks import WorkspaceLock
from casemate.sandbox.result import Applied, Result
from casemate.settings import places

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from concurrent.futures import Future

    from casemate.policy.model import FlagLayer
    from casemate.sandbox.keeper_client import Ended, KeeperClient

    Sink = Callable[[bytes], object]

__all__ = ["AsyncSandbox", "Sandbox", "settle_command"]

_CHUNK = 65536
T = TypeVar("T")


class AsyncSandbox:
    """A policy and a workspace in which commands run.

    ``preset``, ``policy_file`` and ``flags`` are as on the command line; ``environ`` stands for the
    caller's environment (default: this process's own). ``ready`` sandboxes are made ahead: ``kind``
    ``prefab`` prepares everything but a process, ``slot`` a sealed process that waits.

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
    ) -> None:
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
        self._keeper: KeeperClient | None = None
        self._job: Job | None = None
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
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if self._job is None:
                keeper = keeper_client.shared(places(self._environ).run)
                try:
                    await keeper.ready()
                    request = Request(
                        argv=("true",),
                        workspace=self._workspace,
                        cwd=self._workspace,
                        environ=self._environ,
                        preset=self._preset,
                        policy_file=self._policy_file,
                        flags=self._flags,
                        umask=own_umask(),
                    )
                    job = prepare(request, keeper.hierarchies, rootless=keeper.rootless)
                    if job.plan is not None and self._ready:
                        await keeper.pool(job.plan, self._kind, self._ready)
                except BaseException:
                    keeper_client.release(keeper)
                    raise
                self._keeper, self._job = keeper, job
            return self._job

    async def close(self) -> None:
        """Give the keeper back; the last sandbox of an event loop ends it."""
        while self._locks:
            self._locks.pop().close()
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
    ) -> Result:
        """Run one command and wait for its end. A string goes to ``/bin/sh -c``.

        ``timeout`` is in seconds and can only shorten the policy's. ``on_stdout`` and ``on_stderr`` get
        output as it comes; the result holds it as well. Cancelling kills the command.

        Commands in one workspace run one after another, since they share its changes.

        Raises CasemateError when the sandbox could not be made or the program not be started; a command
        that fails is a Result.
        """
        opened = self._job if self._job is not None else await self.open()
        keeper = self._keeper
        if keeper is None or opened.plan is None:
            raise SandboxError("the sandbox is closed", code="closed")
        job = _job_for(opened, command, env, cwd)
        writes = any(view.writable for view in opened.plan.spec.views)
        lock = await self._locked(job) if writes else None
        try:
            return await _Command(keeper, job, stdin, timeout, on_stdout, on_stderr).run()
        finally:
            if lock is not None:
                lock.release()
                self._locks.append(lock)

    async def _locked(self, job: Job) -> WorkspaceLock:
        """Take the workspace's lock; one lock object per command under way, kept for the next ones."""
        lock = self._locks.pop() if self._locks else WorkspaceLock(f"{job.places.run}/locks/{job.key}")
        label = f"pid {os.getpid()}"
        if not lock.take(wait=False, label=label):
            waiting = asyncio.ensure_future(asyncio.to_thread(lock.take, wait=True, label=label))  # noqa: TID251
            try:
                await asyncio.shield(waiting)
            except asyncio.CancelledError:
                # The thread cannot be told to stop; what it gets is given back at once.
                waiting.add_done_callback(lambda _: lock.close())
                raise
        return lock


def _job_for(
    opened: Job,
    command: str | Sequence[str],
    env: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
) -> Job:
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else [*command]
    if not argv or not argv[0]:
        raise PolicyError("no command was given", code="no-command")
    if any("\0" in text for text in argv) or (env and any("\0" in k or "\0" in v for k, v in env.items())):
        raise PolicyError("an argument or variable holds a NUL byte", code="bad-argument")
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


class _Command:
    """One command under way: its pipes, its limits of time and output, its end."""

    def __init__(
        self,
        keeper: KeeperClient,
        job: Job,
        stdin: bytes,
        timeout: float | None,
        on_stdout: Sink | None,
        on_stderr: Sink | None,
    ) -> None:
        self._keeper = keeper
        self._job = job
        self._stdin = memoryview(stdin)
        limits = [value for value in (timeout, job.policy.resources.timeout) if value is not None]
        self._timeout = min(limits) if limits else None
        self._sinks = {1: on_stdout, 2: on_stderr}
        self._output: dict[int, list[bytes]] = {1: [], 2: []}
        self._left = job.policy.resources.output
        self._limit = ""
        self._number = -1
        self._open: dict[int, int] = {}
        self._input = -1
        self._loop = asyncio.get_running_loop()
        self._drained: asyncio.Future[None] = self._loop.create_future()
        self._failed: BaseException | None = None

    async def run(self) -> Result:
        plan, job, keeper = self._job.plan, self._job, self._keeper
        assert plan is not None  # noqa: S101
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(3)]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        self._input = pipes[0][1]
        self._open = {pipes[1][0]: 1, pipes[2][0]: 2}
        timer: asyncio.TimerHandle | None = None
        try:
            try:
                self._number, ended, _ = await keeper.start(plan, job.late, theirs, job.note())
            finally:
                for descriptor in theirs:
                    os.close(descriptor)
            self._connect()
            if self._timeout is not None:
                timer = self._loop.call_later(self._timeout, self._end, "timeout")
            try:
                message, tops = await ended
            except asyncio.CancelledError:
                self._end("cancelled")
                message, tops = await self._keeper.expect(self._number)
                await self._settle(keeper_client.Ended(message, tops))
                raise
            await self._drained
            result = await self._settle(keeper_client.Ended(message, tops))
            if self._failed is not None:
                raise self._failed
            return result
        finally:
            if timer is not None:
                timer.cancel()
            self._disconnect()

    def _connect(self) -> None:
        for descriptor in self._open:
            os.set_blocking(descriptor, False)
            self._loop.add_reader(descriptor, self._readable, descriptor)
        os.set_blocking(self._input, False)
        self._writable()

    def _disconnect(self) -> None:
        for descriptor in self._open:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self._open = {}
        self._close_input()

    def _readable(self, descriptor: int) -> None:
        stream = self._open[descriptor]
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
            del self._open[descriptor]
            if not self._open and not self._drained.done():
                self._drained.set_result(None)
            return
        if self._left is not None:
            if len(data) > self._left:
                data = data[: self._left]
                self._end("output")
            self._left -= len(data)
        self._output[stream].append(data)
        sink = self._sinks[stream]
        if sink is not None and data:
            try:
                sink(data)
            except Exception as error:
                self._failed = error
                self._sinks[stream] = None
                self._end("callback")

    def _writable(self) -> None:
        try:
            while self._stdin:
                self._stdin = self._stdin[os.write(self._input, self._stdin[:_CHUNK]) :]
        except BlockingIOError:
            self._loop.add_writer(self._input, self._writable)
            return
        except OSError:  # the command has closed its stdin
            pass
        self._close_input()

    def _close_input(self) -> None:
        if self._input >= 0:
            self._loop.remove_writer(self._input)
            os.close(self._input)
            self._input = -1

    def _end(self, limit: str) -> None:
        if not self._limit:
            self._limit = limit
        self._keeper.kill(self._number)

    async def _settle(self, ended: Ended) -> Result:
        stderr = b"".join(self._output[2])
        result = await settle_command(
            self._keeper, self._job, self._number, ended, limit=self._limit, stderr_tail=stderr[-TAIL:]
        )
        return msgspec.structs.replace(result, stdout=b"".join(self._output[1]), stderr=stderr)


async def settle_command(
    keeper: KeeperClient,
    job: Job,
    number: int,
    ended: Ended,
    *,
    limit: str,
    stderr_tail: bytes,
    apply: bool = True,
) -> Result:
    """Apply an ended command's changes, let the keeper clean up, and say how it went.

    Without ``apply`` the changes are kept for the next run to offer. Raises what kept the command from
    running.
    """
    keep = False
    try:
        settle.check_failure(job, ended.outcome)
        applied = Applied()
        if any(_not_empty(top) for top in ended.tops):
            await keeper.keep(number)
            keep = True
            if apply:
                hold = f"{job.places.state}/held/{job.key}/{os.path.basename(ended.directory)}"
                applied, kept = await asyncio.to_thread(
                    settle.apply_tops, job, ended.tops, rootless=keeper.rootless, hold_base=hold
                )
                if kept:
                    applied = msgspec.structs.replace(applied, kept=kept[0])
                keep = not applied.complete
    finally:
        for top in ended.tops:
            os.close(top)
        keeper.settled(number, keep=keep)
    return settle.result(
        job,
        ended.outcome,
        applied,
        limit=limit or ended.limit,
        stderr_tail=stderr_tail,
        disk_full=ended.disk_full,
    )


def _not_empty(top: int) -> bool:
    with os.scandir(top) as entries:
        return next(entries, None) is not None


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

    def run(self, command: str | Sequence[str], **options: object) -> Result:
        """Run one command and wait for its end; see ``AsyncSandbox.run``."""
        return _wait(self._async.run(command, **options))  # type: ignore[arg-type]


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
