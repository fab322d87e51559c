"""Running a job in this very process, which is then the launcher: what the command line does."""

from __future__ import annotations

import os
import time
from contextlib import suppress

from casemate.errors import BusyError, SandboxError
from casemate.isolation.process.watch import Watch, watch_site
from casemate.sandbox.failures import from_os_error
from casemate.sandbox.locks import WorkspaceLock
from casemate.sandbox.network import needed_at_once, secrets_of, without_secrets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from casemate.isolation.process.launcher import Launcher, Running
    from casemate.isolation.process.site import Site
    from casemate.sandbox.gate import CommandNetwork, Gatekeeper
    from casemate.sandbox.job import Job
    from casemate.sandbox.result import Applied, NetworkUse, Result
    from casemate.sandbox.session import Session

__all__ = ["InlineRun", "busy", "lock_workspace"]

_KEEP_AFTER = 0.05  # seconds; shorter commands lose nothing that is worth a mount


def lock_workspace(job: Job, *, wait: bool, tell: object = None) -> WorkspaceLock | None:
    """Take the workspace's lock. ``tell(holder)`` is called once before waiting. None if nothing is written.

    Raises BusyError if ``wait`` is false and another command holds it.
    """
    if job.plan is None:
        return None
    if not job.request.session and not any(view.writable for view in job.plan.spec.views):
        return None
    lock = WorkspaceLock(job.lock)
    label = f"pid {os.getpid()}: {' '.join(job.request.argv)}"
    if lock.take(wait=False, label=label):
        return lock
    holder = lock.holder()
    if not wait:
        raise busy(job, lock)
    if callable(tell):
        tell(holder)
    lock.take(wait=True, label=label)
    return lock


def busy(job: Job, lock: WorkspaceLock) -> BusyError:
    """What to raise where the lock is somebody else's and waiting is not wanted."""
    holder = lock.holder()
    lock.close()
    what = f"the session {job.request.session}" if job.request.session else f"the view of {job.workspace}"
    return BusyError(
        f"another command holds {what} ({holder})",
        hint="wait for it, or leave out --no-wait",
        workspace=job.workspace,
        holder=holder,
    )


class InlineRun:
    """One command, started by this process. ``Preconditions:`` single-threaded."""

    def __init__(
        self, launcher: Launcher, job: Job, lock: WorkspaceLock | None, gate: Gatekeeper | None = None,
        *, apply: bool = True,
    ) -> None:  # fmt: skip
        assert job.plan is not None  # noqa: S101
        self._launcher = launcher
        self._job: Job = job
        self._lock = lock
        self._site: Site | None = None
        self._running: Running | None = None
        self._watch: Watch | None = None
        self._keep, self._apply = False, apply
        self._gate, self._gate_lost = gate, False
        self.network: CommandNetwork | None = None
        self._session: Session | None = None
        self.stdin = self.stdout = self.stderr = -1
        self.terminal = self.slave = -1
        try:
            self._start()
        except BaseException:
            self._clean_up()
            raise

    def _start(self) -> None:
        if self._job.request.session:
            from casemate.sandbox.session import Session

            self._session = Session.of(self._job, rootless=self._launcher.rootless)
            self._job = self._session.enter(self._job)
        job, launcher = self._job, self._launcher
        assert job.plan is not None  # noqa: S101
        job.begin()
        if self._gate is not None and needed_at_once(job.policy.network):
            self._prepare_network()
        stdio = (-1, -1, -1)
        if not job.late.tty:
            pipes = [os.pipe(), os.pipe(), os.pipe()]
            stdio = (pipes[0][0], pipes[1][1], pipes[2][1])
            self.stdin, self.stdout, self.stderr = pipes[0][1], pipes[1][0], pipes[2][0]
        try:
            running, terminals = launcher.launch(job.plan.spec, job.late, stdio)
        except OSError as error:
            raise from_os_error(error) from error
        finally:
            for descriptor in stdio:
                if descriptor >= 0:
                    os.close(descriptor)
        self._running, self._site = running, running.site
        site = running.site
        if terminals:
            self.terminal, self.slave = terminals
        if self.network is not None and site.capture is not None:
            self.network.begin(site.capture, site.listener, job.request.environ)
            site.listener = -1
        self._watch = watch_site(site, job.plan.watch, self._running.pid)
        if not self._apply and site.tops:
            try:  # the changes are to wait: it is refused here, where there are none yet, if they cannot
                launcher.keep(site, job.note())
            except OSError as error:
                raise from_os_error(error) from error

    def _prepare_network(self) -> CommandNetwork:
        """Open the command's share in a gate, before there is a sandbox if need be."""
        from casemate.sandbox.published import Published
        from casemate.sandbox.review import Saved

        assert self._gate is not None  # noqa: S101
        job, network = self._job, self._job.policy.network
        secrets = secrets_of(network, job.request.environ)
        saved = Saved(job.saved_hosts)
        self.network = self._gate.worker().open(network, secrets, self.socket_inside, self._gate.ask, saved)
        job.late.env = without_secrets(job.late.env, secrets)
        self.network.prepare(job.late)
        Published(network.publish).hand_over(self.network)
        return self.network

    @property
    def listeners(self) -> list[int]:
        """The sandbox's listeners that no gate serves yet; when one is readable ``wake`` is to be called."""
        capture = self._site.capture if self._site is not None else None
        return [capture.udp, *capture.tcp] if capture is not None and self.network is None else []

    def wake(self) -> None:
        """Start the gate, since the command has begun to use the network. Most commands never do."""
        site = self._site
        if site is None or site.capture is None or self.network is not None:
            return
        try:
            self._prepare_network().begin(site.capture)
        except (SandboxError, OSError):
            # Somebody has killed what would have become the gate: the command goes on and reaches nothing.
            for descriptor in site.capture.give_listeners():
                if descriptor >= 0:
                    os.close(descriptor)
            self._gate_lost = True

    def _network_use(self) -> NetworkUse | None:
        """What the command did on the network, once it has ended."""
        if self.network is not None:
            return self.network.finish()
        if self._site is None or self._site.capture is None:
            return None
        from casemate.sandbox.result import NetworkUse

        return NetworkUse(capture=self._site.capture.mechanism, lost=self._gate_lost)

    def socket_inside(self, made: Callable[[int], None]) -> None:
        """Call ``made`` with a TCP socket inside the sandbox, or with -1."""
        descriptor = -1
        with suppress(SandboxError):
            if self._running is not None:
                descriptor = self._launcher.socket_inside(self._running)
        made(descriptor)

    @property
    def ended(self) -> int:
        """A descriptor that becomes readable when the sandbox's init has ended."""
        assert self._running is not None  # noqa: S101
        return self._running.pidfd

    @property
    def watched(self) -> bool:
        """Whether ``tick`` has a limit to watch."""
        return self._watch is not None

    def tick(self) -> str:
        """Do what is due between events; returns a watched limit that is exceeded, or ``""``."""
        self._launcher.tidy()
        job, running = self._job, self._running
        assert running is not None  # noqa: S101
        if self._site is not None and not self._site.kept and time.monotonic() - job.began > _KEEP_AFTER:
            with suppress(OSError):  # no room: the command goes on, and it is tried again at its end
                self._launcher.keep(self._site, job.note())
        return self._watch.exceeded() if self._watch is not None else ""

    def signal(self, number: int) -> None:
        """Pass a signal on: init hands it to the command."""
        from casemate.sys.process import pidfd_signal

        if self._running is not None:
            pidfd_signal(self._running.pidfd, number)

    def kill(self) -> None:
        """End every process of the sandbox."""
        if self._running is not None:
            self._launcher.kill(self._running)

    def finish(self, *, limit: str, stderr_tail: bytes) -> Result:
        """Wait for the end, apply the changes, clean up, report. Raises what kept it from running."""
        job, running, site = self._job, self._running, self._site
        assert running is not None  # noqa: S101
        assert site is not None  # noqa: S101
        try:
            from casemate.sandbox import settle
            from casemate.sandbox.result import Applied

            outcome = self._launcher.reap(running)
            self._running = None
            use = self._network_use()
            settle.check_failure(job, outcome)
            full = _is_full(site.scratch)
            if site.tops and any(_not_empty(top) for top in site.tops):
                with suppress(OSError):  # no room for that: the changes are applied all the same
                    self._launcher.keep(site, job.note())
                self._keep = True  # whatever happens before the last change is applied
                applied = self._settle(job, site)
            else:
                applied = Applied()
            self._keep = not applied.complete or bool(applied.pending)
            result = settle.result(
                job, outcome, applied, limit=limit, stderr_tail=stderr_tail, disk_full=full, network=use
            )
            return self._with_usage(result, site)
        finally:
            self._clean_up()

    def _settle(self, job: Job, site: Site) -> Applied:
        """Apply the changes, or let them wait."""
        from casemate.sandbox import settle

        rootless = self._launcher.rootless
        if not self._apply:
            from casemate.sandbox.tops import leave_pending

            return leave_pending(job, site.tops, site.directory, rootless=rootless)
        hold = f"{job.places.state}/held/{job.key}/{os.path.basename(site.directory)}"
        applied, kept = settle.apply_tops(
            job, site.tops, rootless=rootless, hold_base=hold, directory=site.directory
        )
        return _with_kept(applied, kept)

    def _with_usage(self, result: Result, site: Site) -> Result:
        """The result with what the command, or its session, takes on disk."""
        from casemate.sandbox.quota import with_usage

        seen = self._watch.used if self._watch is not None else 0
        if self._session is not None:
            return self._session.leave(self._job, result, seen)
        facts = os.fstatvfs(site.scratch)
        return with_usage(self._job, result, (facts.f_blocks - facts.f_bfree) * facts.f_frsize, seen)

    def _clean_up(self) -> None:
        running, site = self._running, self._site
        if running is not None:
            self._launcher.kill(running)
            self._launcher.reap(running)
            self._running = None
        if site is not None:
            if not self._keep:
                if site.kept:
                    from casemate.sandbox.settle import forget_note

                    forget_note(site.directory)
                self._launcher.forget(site)
            self._launcher.discard(site)
            self._site = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _not_empty(top: int) -> bool:
    with os.scandir(top) as entries:
        return next(entries, None) is not None


def _is_full(scratch: int) -> bool:
    facts = os.fstatvfs(scratch)
    return facts.f_bavail * 50 < facts.f_blocks and facts.f_bavail * facts.f_frsize < (1 << 20)


def _with_kept(applied: Applied, kept: list[str]) -> Applied:
    import msgspec

    return msgspec.structs.replace(applied, kept=kept[0]) if kept else applied
