"""The keeper: a launcher in a process of its own, for a library that must not fork.

It is started clean (``python -I -S``, an environment of nothing), holds every sandbox's init by a pidfd,
does one request after the other, and ends, with every sandbox, when its client's socket closes. Requests
are typed and checked; nothing that a sandbox says is parsed here but init's bounded status record.

A large library process cannot do this itself: fork costs it 25 ms per GiB of heap.
"""

from __future__ import annotations

import _socket
import os
import select
import time
from contextlib import suppress

from casemate.errors import CasemateError, SandboxError
from casemate.isolation.process import wire
from casemate.isolation.process.launcher import Launcher, Running
from casemate.isolation.process.spec import Late, Spec
from casemate.isolation.process.watch import watch_site
from casemate.sys.plain import is_object
from casemate.sys.process import close_all_but, pidfd_signal, use_all_descriptors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.isolation.process.outcome import Outcome
    from casemate.isolation.process.site import Site
    from casemate.isolation.process.watch import Watch

__all__ = ["Keeper", "main"]

_KEEP_AFTER = 0.05
_TICK = 0.05
_QUIET = 0.002
_MAX_POOL = 64
_MOST_GARBAGE = 8


class _Run:
    """One command under way, or ended and waiting for its changes to be settled."""

    __slots__ = ("limit", "note", "released", "running", "settled", "site", "started", "told", "watch")

    def __init__(self, site: Site, running: Running, note: str, watch: Watch | None) -> None:
        self.site = site
        self.running: Running | None = running
        self.note = note
        self.watch = watch
        self.started = time.monotonic()
        self.limit = ""
        self.released = False
        self.told = False  # the client knows that it has ended
        self.settled: bool | None = None  # the client's last word (keep), come before init's end


class _Pool:
    """Sandboxes made ahead for one spec: sites without a process, or waiting processes."""

    __slots__ = ("kind", "ready", "size")

    def __init__(self, kind: str, size: int) -> None:
        self.kind = kind
        self.size = size
        self.ready: list[tuple[Site, Running | None, int]] = []


class Keeper:
    """Serves one client. ``Preconditions:`` single-threaded, started clean."""

    def __init__(self, endpoint: _socket.socket, runtime: str) -> None:
        self._socket = endpoint
        self._launcher = Launcher(runtime)
        self._specs: dict[str, tuple[Spec, dict[str, int]]] = {}
        self._pools: dict[str, _Pool] = {}
        self._runs: dict[int, _Run] = {}
        self._by_pidfd: dict[int, int] = {}
        self._by_status: dict[int, int] = {}
        self._poll = select.poll()
        self._poll.register(endpoint.fileno(), select.POLLIN)
        self._refill: list[str] = []
        self._garbage: list[Site] = []

    def serve(self) -> None:
        """Serve until the client is gone, then end every sandbox."""
        hierarchies = self._launcher.hierarchies
        self._tell(
            {
                "event": "hello",
                "rootless": self._launcher.rootless,
                "controllers": sorted(hierarchies.base),
                "reasons": hierarchies.reasons,
                "version": hierarchies.version,
            }
        )
        try:
            while self._once():
                pass
        finally:
            self._end_all()

    def _once(self) -> bool:
        busy = any(run.running is not None for run in self._runs.values())
        # Making sandboxes ahead waits for a quiet moment: it would keep a command's end waiting.
        pause = _TICK if busy and self._needs_ticks() else None if busy or not self._refill else _QUIET
        if self._garbage:
            pause = 0.0  # whatever else is waiting comes first
        events = self._poll.poll(None if pause is None else pause * 1000)
        for descriptor, _ in events:
            if descriptor == self._socket.fileno():
                if not self._request():
                    return False
            elif descriptor in self._by_status:
                self._reported(self._by_status[descriptor])
            elif descriptor in self._by_pidfd:
                self._ended(self._by_pidfd[descriptor])
        if self._garbage and (not events or len(self._garbage) > _MOST_GARBAGE):
            self._launcher.discard(self._garbage.pop(0))
        elif not events and not busy and self._refill:
            key = self._refill.pop()
            self._fill(key)
            pool = self._pools.get(key)
            if pool is not None and len(pool.ready) < pool.size:
                self._refill.append(key)  # more than the one that was used have gone
        self._tick()
        self._launcher.tidy(wait=True)
        return True

    def _needs_ticks(self) -> bool:
        now = time.monotonic()
        return any(
            run.running is not None and (run.watch is not None or not run.site.kept or now - run.started < 1)
            for run in self._runs.values()
        )

    def _tick(self) -> None:
        now = time.monotonic()
        for run in self._runs.values():
            if run.running is None:
                continue
            if now - run.started > _KEEP_AFTER:
                if not run.released and run.running.record:
                    # Of most commands it is closed after the answer, with all the rest.
                    run.released = True
                    run.site.release()
                if not run.site.kept:
                    with suppress(OSError):  # no room: the command goes on; it is tried again at its end
                        self._launcher.keep(run.site, run.note)
            if run.watch is not None and not run.limit and (limit := run.watch.exceeded()):
                run.limit = limit
                self._launcher.kill(run.running)

    # -- requests ---------------------------------------------------------------------------------

    def _request(self) -> bool:
        """Take one request; False at the client's end."""
        message, descriptors = wire.receive(self._socket)
        if message is None:
            return False
        number = message.get("id")
        try:
            self._dispatch(message, descriptors)
        except CasemateError as error:
            self._tell({"event": "error", "id": number, "kind": type(error).__name__, **error.as_dict()})
        except OSError as error:
            self._tell(
                {
                    "event": "error",
                    "id": number,
                    "kind": "SandboxError",
                    "code": "sandbox-failed",
                    "message": f"the sandbox could not be made: {error}",
                    "hint": "run `casemate doctor`",
                    "details": {"errno": error.errno},
                }
            )
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _dispatch(self, message: dict[str, object], descriptors: list[int]) -> None:
        operation = message.get("op")
        if operation == "plan":
            self._plan(message)
        elif operation == "start":
            self._start(message, descriptors)
        elif operation == "pool":
            self._set_pool(message)
        elif operation == "signal":
            run = self._runs.get(_integer(message, "id"))
            if run is not None and run.running is not None:
                pidfd_signal(run.running.pidfd, _integer(message, "signal"))
        elif operation == "kill":
            run = self._runs.get(_integer(message, "id"))
            if run is not None and run.running is not None:
                self._launcher.kill(run.running)
        elif operation == "inside":
            self._socket_inside(message)
        elif operation == "keep":
            run = self._runs.get(_integer(message, "id"))
            if run is not None:
                self._launcher.keep(run.site, run.note)
                self._tell({"event": "kept", "id": message.get("id"), "directory": run.site.directory})
        elif operation == "settled":
            self._settled(_integer(message, "id"), keep=message.get("keep") is True)
        else:
            raise SandboxError(f"unknown request {operation!r}", code="bad-request")

    def _socket_inside(self, message: dict[str, object]) -> None:
        run = self._runs.get(_integer(message, "of"))
        if run is None or run.running is None:
            raise SandboxError("the command has ended", code="inside-unreachable")
        made = self._launcher.socket_inside(run.running)
        self._tell({"event": "inside", "id": message.get("id")}, [made])
        os.close(made)

    def _plan(self, message: dict[str, object]) -> None:
        watch = message.get("watch")
        if not is_object(watch):
            raise SandboxError("malformed request: watch", code="bad-request")
        limits = {name: _integer(watch, name) for name in watch}
        self._specs[str(message.get("key"))] = (Spec.from_dict(message.get("spec")), limits)

    def _start(self, message: dict[str, object], descriptors: list[int]) -> None:
        number = _integer(message, "id")
        key = str(message.get("key"))
        spec, limits = self._specs[key]
        late = Late.from_dict(message.get("late"))
        if late.tty:
            stdio = (-1, -1, -1)
        elif len(descriptors) == 3:
            stdio = (descriptors[0], descriptors[1], descriptors[2])
        else:
            raise SandboxError("malformed request: three streams were expected", code="bad-request")
        running, extra = self._begin(key, spec, late, stdio)
        site = running.site
        watch = watch_site(site, limits, running.pid)
        self._runs[number] = _Run(site, running, str(message.get("note", "")), watch)
        self._by_pidfd[running.pidfd] = number
        self._by_status[running.status] = number
        self._poll.register(running.pidfd, select.POLLIN)
        self._poll.register(running.status, select.POLLIN)
        terminals = len(extra)
        if site.capture is not None:
            extra += site.capture.give_listeners()
        if site.listener >= 0:
            extra.append(site.listener)
            site.listener = -1
        if extra:
            mechanism = site.capture.mechanism if site.capture is not None else ""
            self._tell({"event": "started", "id": number, "terminals": terminals, "capture": mechanism,
                        "listener": bool(late.listener)}, extra)  # fmt: skip
            for descriptor in extra:
                os.close(descriptor)
        if key in self._pools:
            self._refill.append(key)

    def _begin(
        self, key: str, spec: Spec, late: Late, stdio: tuple[int, int, int]
    ) -> tuple[Running, list[int]]:
        """Start a command in a sandbox that was made ahead, if there is one, else in a new one."""
        pool = self._pools.get(key)
        while pool is not None and pool.ready:
            site, running, channel = pool.ready.pop(0)
            try:
                if running is None:
                    return self._launcher.start(site, late, stdio)
                return running, self._launcher.hand_over(running, channel, late, stdio)
            except BrokenPipeError:  # somebody killed the waiting one
                assert running is not None  # noqa: S101
                self._launcher.reap(running)
                self._launcher.forget(site)
                self._launcher.discard(site)
            except BaseException:
                if running is not None:
                    self._launcher.kill(running)
                    self._launcher.reap(running)
                self._launcher.forget(site)
                self._launcher.discard(site)
                raise
        return self._launcher.launch(spec, late, stdio)

    def _reported(self, number: int) -> None:
        """Init has written a record: the command runs, or has ended."""
        run = self._runs[number]
        running = run.running
        assert running is not None  # noqa: S101
        more = self._launcher.read_status(running)
        if not running.site.lingering:
            self._launcher.linger(running)
        outcome = self._launcher.early_outcome(running) if not run.told else None
        if outcome is not None and self._opened(run):
            self._tell_end(number, run, outcome)
        if not more:
            del self._by_status[running.status]
            self._poll.unregister(running.status)

    def _ended(self, number: int) -> None:
        """Init is gone, and with it every process of the sandbox."""
        run = self._runs[number]
        running = run.running
        assert running is not None  # noqa: S101
        self._poll.unregister(running.pidfd)
        del self._by_pidfd[running.pidfd]
        if self._by_status.pop(running.status, None) is not None:
            self._poll.unregister(running.status)
        outcome = self._launcher.reap(running)
        run.running = None
        if run.told:
            if run.settled is not None:
                self._finish(number, run, keep=run.settled)
        elif self._opened(run):
            self._tell_end(number, run, outcome)
        else:
            self._tell({"event": "error", "id": number, "kind": "SandboxError", "code": "sandbox-failed",
                        "message": "the changes of an ended command cannot be opened",
                        "hint": "what is left of them is kept; see `casemate changes`"})  # fmt: skip
            with suppress(OSError):
                self._launcher.keep(run.site, run.note)
            self._finish(number, run, keep=True)

    def _opened(self, run: _Run) -> bool:
        """Open the tops of a run that has ended; False where that cannot be done just now."""
        try:
            run.site.open_tops()
        except OSError:
            return False
        return True

    def _tell_end(self, number: int, run: _Run, outcome: Outcome) -> None:
        run.told = True
        facts = os.fstatvfs(run.site.scratch)
        self._tell(
            {
                "event": "ended",
                "id": number,
                "status": outcome.status,
                "failure": outcome.failure,
                "spawned": outcome.spawned,
                "events": outcome.events,
                "times": outcome.times,
                "rusage": outcome.rusage,
                "refused": outcome.refused,
                "executables": outcome.executables,
                "limit": run.limit,
                "used": run.watch.used if run.watch is not None else 0,
                "directory": run.site.directory,
                "free": facts.f_bavail * facts.f_frsize,
                "size": facts.f_blocks * facts.f_frsize,
            },
            list(run.site.tops),
        )

    def _settled(self, number: int, *, keep: bool) -> None:
        run = self._runs.get(number)
        if run is None or not run.told:
            raise SandboxError("settled is only for a command that has ended", code="bad-request")
        if run.running is not None:
            run.settled = keep  # as soon as init is gone
            return
        self._finish(number, run, keep=keep)

    def _finish(self, number: int, run: _Run, *, keep: bool) -> None:
        del self._runs[number]
        if not keep:
            self._launcher.forget(run.site)
        # Taking it apart takes up to a millisecond, most of it waiting in the kernel: not before an answer.
        self._garbage.append(run.site)

    # -- pools ------------------------------------------------------------------------------------

    def _set_pool(self, message: dict[str, object]) -> None:
        key, kind = str(message.get("key")), str(message.get("kind"))
        size = _integer(message, "size")
        if key not in self._specs or kind not in ("prefab", "slot") or not 0 <= size <= _MAX_POOL:
            raise SandboxError("malformed request: pool", code="bad-request")
        pool = self._pools.setdefault(key, _Pool(kind, size))
        pool.kind, pool.size = kind, size
        while len(pool.ready) > size:
            self._let_go(*pool.ready.pop())
        while len(pool.ready) < pool.size:
            self._fill(key)
        self._tell({"event": "pooled", "id": message.get("id")})

    def _fill(self, key: str) -> None:
        pool = self._pools.get(key)
        if pool is None or len(pool.ready) >= pool.size:
            return
        spec, _ = self._specs[key]
        try:
            site = self._launcher.prepare(spec)
            self._launcher.tidy(wait=True)  # this is nobody's way to a command
            if pool.kind == "slot":
                running, channel = self._launcher.start_waiting(site)
                pool.ready.append((site, running, channel))
            else:
                pool.ready.append((site, None, -1))
        except (CasemateError, OSError):
            pool.size = 0  # the next start makes its own, and says what is wrong

    def _end_all(self) -> None:
        """The client is gone: no sandbox outlives it; tops with work in them stay for the next run."""
        for pool in self._pools.values():
            for site, running, channel in pool.ready:
                self._let_go(site, running, channel)
        for run in self._runs.values():
            if run.running is not None:
                self._launcher.kill(run.running)
                self._launcher.reap(run.running)
            if run.settled is False:
                self._launcher.forget(run.site)
            elif not self._opened(run) or not all(_empty(top) for top in run.site.tops):
                with suppress(OSError):
                    self._launcher.keep(run.site, run.note)
            else:
                self._launcher.forget(run.site)
            self._launcher.discard(run.site)
        for site in self._garbage:
            self._launcher.discard(site)
        self._garbage.clear()
        self._launcher.close()

    def _let_go(self, site: Site, running: Running | None, channel: int) -> None:
        """End a sandbox that was never used."""
        if running is not None:
            os.close(channel)
            self._launcher.kill(running)
            self._launcher.reap(running)
        self._launcher.forget(site)
        self._launcher.discard(site)

    def _tell(self, message: dict[str, object], descriptors: list[int] | None = None) -> None:
        try:
            wire.send(self._socket, message, descriptors)
        except OSError:
            return  # the client is gone; the next receive says so


def _integer(message: dict[str, object], name: str) -> int:
    value = message.get(name)
    if type(value) is not int:
        raise SandboxError(f"malformed request: {name}", code="bad-request", field=name)
    return value


def _empty(top: int) -> bool:
    with os.scandir(top) as entries:
        return next(entries, None) is None


def main(argv: list[str]) -> int:
    """``keeper FD RUNTIME``: serve the socket that was inherited as FD."""
    import _signal
    import gc

    gc.disable()  # nothing here makes cycles, and a collection in a child would copy what it walks over
    for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP):
        # A terminal's Ctrl-C is for the client to handle; its end is what ends the keeper.
        _signal.signal(number, _signal.SIG_IGN)
    descriptor, runtime = int(argv[0]), argv[1]
    # Nothing of the library's process stays open here, nor does its directory stay in use.
    close_all_but([descriptor])
    os.chdir("/")
    use_all_descriptors()  # one that is started takes some twenty
    os.set_inheritable(descriptor, False)
    endpoint = _socket.socket(fileno=descriptor)
    try:
        keeper = Keeper(endpoint, runtime)
    except CasemateError as error:
        wire.send(endpoint, {"event": "error", "id": None, "kind": type(error).__name__, **error.as_dict()})
        return 125
    keeper.serve()
    return 0
