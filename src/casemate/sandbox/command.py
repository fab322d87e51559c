"""One command of a sandbox that a keeper runs: its pipes, its limits of time and output, its end."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TypeVar

import msgspec

from casemate.errors import CasemateError, SandboxError
from casemate.sandbox import gates, keeper_client, settle
from casemate.sandbox.denials import TAIL
from casemate.sandbox.network import secrets_of, wants_gate, without_secrets
from casemate.sandbox.quota import with_usage
from casemate.sandbox.result import Applied, Result

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from casemate.policy.model import Network
    from casemate.sandbox.gate import CommandNetwork, Reviewer
    from casemate.sandbox.job import Job
    from casemate.sandbox.keeper_client import Ended, KeeperClient, Started

    Sink = Callable[[bytes], object]

__all__ = ["Begun", "Command", "settle_command"]

_CHUNK = 65536
T = TypeVar("T")


class Command:
    """One command under way: its pipes, its limits of time and output, its end."""

    def __init__(
        self,
        keeper: KeeperClient,
        job: Job,
        stdin: bytes,
        timeout: float | None,
        on_stdout: Sink | None,
        on_stderr: Sink | None,
        review: Reviewer | None = None,
        *,
        apply: bool = True,
    ) -> None:
        self._keeper, self._apply = keeper, apply
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
        self._review = review
        self._begun: Begun | None = None
        self._network: Network | None = None

    @property
    def share(self) -> CommandNetwork | None:
        """The command's share in a gate, while it runs."""
        return self._begun.share if self._begun is not None else None

    def update(self, network: Network) -> None:
        """Go by other rules about hosts, from the start if it has not started yet."""
        self._network = network
        if self._begun is not None:
            self._begun.update(network)

    async def run(self) -> Result:
        plan, job, keeper = self._job.plan, self._job, self._keeper
        assert plan is not None  # noqa: S101
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(3)]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        self._input = pipes[0][1]
        self._open = {pipes[1][0]: 1, pipes[2][0]: 2}
        timer: asyncio.TimerHandle | None = None
        try:
            # All that can be done before the keeper is asked: it and the child that it makes want a
            # processor each from then on.
            self._connect()
            begun = self._begun = Begun(keeper)
            if self._network is not None:
                begun.update(self._network)
            try:
                try:
                    await begun.begin(job, theirs, self._review)
                finally:
                    self._number = begun.number
                    for descriptor in theirs:
                        os.close(descriptor)
                if self._timeout is not None:
                    timer = self._loop.call_later(self._timeout, self._end, "timeout")
                message, tops = await begun.ended
            except asyncio.CancelledError:
                if begun.number < 0:
                    raise  # before there was anything to end
                self._end("cancelled")
                ended = begun.ended
                if not ended.done() or ended.cancelled():
                    ended = keeper.expect(self._number)
                await _to_the_end(self._abandoned(ended))
                raise
            await self._drained
            result = await self._settle(keeper_client.Ended(message, tops))
            if self._failed is not None:
                raise self._failed
            return result
        finally:
            if timer is not None:
                timer.cancel()
            if self.share is not None:
                self.share.abandon()  # where it was settled, the gate is done with it already
            self._disconnect()

    async def _abandoned(self, ended: asyncio.Future[tuple[dict[str, object], list[int]]]) -> None:
        with suppress(CasemateError):  # who has cancelled it does not want to know
            message, tops = await ended
            await self._settle(keeper_client.Ended(message, tops))

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
        with suppress(SandboxError):  # a keeper that has died has taken the command along
            self._keeper.kill(self._number)

    async def _settle(self, ended: Ended) -> Result:
        stderr = b"".join(self._output[2])
        result = await settle_command(
            self._keeper, self._job, self._number, ended, limit=self._limit, stderr_tail=stderr[-TAIL:],
            pending=not self._apply, share=self.share,
        )  # fmt: skip
        return msgspec.structs.replace(result, stdout=b"".join(self._output[1]), stderr=stderr)


class Begun:
    """A command under way: its number, the future of its end, its terminal's ends, its share in a gate."""

    __slots__ = ("_keeper", "_latest", "_tasks", "ended", "number", "share", "terminals")

    def __init__(self, keeper: KeeperClient) -> None:
        self._keeper = keeper
        self._tasks: set[asyncio.Task[None]] = set()
        self.number = -1
        self.ended: asyncio.Future[tuple[dict[str, object], list[int]]]
        self.terminals: list[int] = []
        self.share: CommandNetwork | None = None
        self._latest: Network | None = None

    def update(self, network: Network) -> None:
        """Go by other rules about hosts, now or as soon as there is a gate; a lost one needs none."""
        self._latest = network
        if self.share is not None:
            with suppress(SandboxError):
                self.share.update(network)

    async def begin(self, job: Job, streams: list[int], review: Reviewer | None) -> None:
        """Start the command, and the gate that its policy asks for. Raises what kept it from starting.

        A cancellation that comes when the keeper has been asked takes effect when the command runs:
        ``number`` is its number then, and it is the caller's to end.
        """
        job.begin()
        network = job.policy.network
        if not wants_gate(network):
            await self._start(job, streams)
            return
        from casemate.sandbox.published import Published
        from casemate.sandbox.review import Saved

        secrets = secrets_of(network, job.request.environ)
        published = Published(network.publish)
        try:
            saved = Saved(job.saved_hosts)
            share = self.share = await gates.gates().open(network, secrets, self.dial, review, saved)
            if self._latest is not None:
                share.update(self._latest)
            job.late.env = without_secrets(job.late.env, secrets)
            share.prepare(job.late)
            published.hand_over(share)
            await self._start(job, streams)
        except BaseException:
            if self.share is not None and self.number < 0:
                self.share.abandon()
            raise
        finally:
            published.close()

    async def _start(self, job: Job, streams: list[int]) -> None:
        assert job.plan is not None  # noqa: S101
        starting = self._started(
            self._keeper.start(job.plan, job.late, streams, job.note()), job.request.environ
        )
        if job.plan.spec.capture is None and not job.late.tty:
            await starting  # nothing in it waits
        else:
            await _to_the_end(starting)

    async def _started(
        self, starting: Coroutine[object, object, Started], environ: Mapping[str, str]
    ) -> None:
        started = await starting
        self.number, self.ended, self.terminals = started.number, started.ended, started.terminals
        if self.share is not None and started.capture is not None:
            self.share.begin(started.capture, started.listener, environ)

    def dial(self, made: Callable[[int], None]) -> None:
        """Call ``made`` with a TCP socket inside the sandbox, or with -1."""
        task = asyncio.get_running_loop().create_task(self._dial(made))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _dial(self, made: Callable[[int], None]) -> None:
        try:
            made(await self._keeper.socket_inside(self.number))
        except CasemateError:
            made(-1)


async def settle_command(
    keeper: KeeperClient,
    job: Job,
    number: int,
    ended: Ended,
    *,
    limit: str,
    stderr_tail: bytes,
    apply: bool = True,
    pending: bool = False,
    share: CommandNetwork | None = None,
) -> Result:
    """Apply an ended command's changes, let the keeper clean up, and say how it went.

    Without ``apply`` the changes are kept for the next run to offer; ``pending`` ones wait for a review. A
    cancellation takes effect when all is settled. Raises what kept the command from running.
    """
    use = None
    if share is not None:  # before the apply, which takes its time: a gate that ends meanwhile was not lost
        await _to_the_end(gates.gates().finish(share))
        use = share.use()
    if any(_not_empty(top) for top in ended.tops):
        settling = _settle_changes(keeper, job, number, ended, apply=apply, pending=pending)
        applied = await _to_the_end(settling)
    else:
        applied = Applied()
        _settled(keeper, number, ended, keep=False)
    settle.check_failure(job, ended.outcome)
    result = settle.result(
        job,
        ended.outcome,
        applied,
        limit=limit or ended.limit,
        stderr_tail=stderr_tail,
        disk_full=ended.disk_full,
        network=use,
    )
    if job.request.session:  # what that takes is looked at by the one who holds its lock
        return msgspec.structs.replace(result, disk={"seen": ended.used})
    return with_usage(job, result, ended.scratch, ended.used)


async def _settle_changes(
    keeper: KeeperClient, job: Job, number: int, ended: Ended, *, apply: bool, pending: bool
) -> Applied:
    keep, applied = ended.outcome.failure is None, Applied()
    try:
        if keep:
            try:
                await keeper.keep(number)
            except SandboxError:  # a keeper that dies just now: the changes are here still
                if pending:
                    raise
            if apply:
                applied = await _apply(keeper, job, ended, pending=pending)
                keep = not applied.complete or bool(applied.pending)
    finally:
        if not keep:
            settle.forget_note(ended.directory)
        _settled(keeper, number, ended, keep=keep)
    return applied


def _settled(keeper: KeeperClient, number: int, ended: Ended, *, keep: bool) -> None:
    for top in ended.tops:
        os.close(top)
    keeper.settled(number, keep=keep)


async def _apply(keeper: KeeperClient, job: Job, ended: Ended, *, pending: bool) -> Applied:
    hold = f"{job.places.state}/held/{job.key}/{os.path.basename(ended.directory)}"
    # The thread's own: an event loop that is torn down does not wait for it.
    tops = [os.dup(top) for top in ended.tops]

    def apply() -> tuple[Applied, list[str]]:
        try:
            if pending:
                from casemate.sandbox.tops import leave_pending

                return leave_pending(job, tops, ended.directory, rootless=keeper.rootless), []
            return settle.apply_tops(
                job, tops, rootless=keeper.rootless, hold_base=hold, directory=ended.directory
            )
        finally:
            for top in tops:
                os.close(top)

    applied, kept = await asyncio.to_thread(apply)
    return msgspec.structs.replace(applied, kept=kept[0]) if kept else applied


async def _to_the_end(work: Coroutine[object, object, T]) -> T:
    """Await it whatever happens: what cancels the caller meanwhile takes effect afterwards."""
    task = asyncio.get_running_loop().create_task(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
            cancelled = True
        except Exception:
            break  # the task's own: result() raises it
    if cancelled:
        task.exception()
        raise asyncio.CancelledError
    return task.result()


def _not_empty(top: int) -> bool:
    with os.scandir(top) as entries:
        return next(entries, None) is not None
