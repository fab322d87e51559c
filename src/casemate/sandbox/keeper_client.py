"""The library's side of the keeper: one per event loop, started on first use, gone with the last sandbox."""

from __future__ import annotations

import asyncio
import collections
import os
import socket
import sys
import weakref
from contextlib import suppress

from casemate import errors
from casemate.errors import CasemateError, SandboxError
from casemate.isolation.process import wire
from casemate.isolation.process.outcome import Outcome
from casemate.sys.capture import Capture
from casemate.sys.cgroups import Hierarchies
from casemate.sys.plain import is_list, is_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from casemate.isolation.plan import Plan
    from casemate.isolation.process.spec import Late

__all__ = ["Ended", "KeeperClient", "Started", "release", "shared"]

_BOOT = (
    "import sys; sys.path[:0] = [sys.argv[1]]; "
    "from casemate.isolation.process.keeper import main; sys.exit(main(sys.argv[2:]))"
)
_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, KeeperClient] = weakref.WeakKeyDictionary()


class Ended:
    """The end of one command: what the host saw, and the open tops, which the receiver closes."""

    __slots__ = ("directory", "disk_full", "limit", "outcome", "scratch", "tops", "used")

    def __init__(self, message: dict[str, object], tops: list[int]) -> None:
        outcome = self.outcome = Outcome()
        status = message.get("status")
        outcome.status = status if isinstance(status, int) else None
        failure = message.get("failure")
        outcome.failure = tuple(str(word) for word in failure) if is_list(failure) else None
        outcome.spawned = message.get("spawned") is True
        outcome.events = {name: int(value) for name, value in _numbers(message.get("events")).items()}
        outcome.times = _numbers(message.get("times"))
        usage = message.get("rusage")
        if is_list(usage) and len(usage) == 3:
            user, system, largest = (_number(value) for value in usage)
            outcome.rusage = (user, system, int(largest))
        refused = message.get("refused")
        for row in refused if is_list(refused) else ():
            if is_list(row) and len(row) == 2:
                outcome.refused.append((str(row[0]), str(row[1])))
        executables = message.get("executables")
        outcome.executables = [str(path) for path in executables] if is_list(executables) else []
        free, size = message.get("free"), message.get("size")
        small = isinstance(free, int) and isinstance(size, int) and free * 50 < size and free < (1 << 20)
        self.disk_full = small
        self.scratch = size - free if isinstance(size, int) and isinstance(free, int) else 0
        self.used = int(_number(message.get("used")))  # in tops on disk, when a watcher looked last
        self.limit = str(message.get("limit") or "")
        self.directory = str(message.get("directory") or "")
        self.tops = tops


def _number(value: object) -> float:
    return value if isinstance(value, (int, float)) else 0.0


def _numbers(value: object) -> dict[str, float]:
    return {name: _number(item) for name, item in value.items()} if is_object(value) else {}


class Started:
    """A command that has been started: its number, the future of its end, its terminal's ends.

    ``capture`` has the listeners of its network if a gate is to serve it, ``listener`` is the one that
    ``late.listener`` asked for, or -1.
    """

    __slots__ = ("capture", "ended", "listener", "number", "terminals")

    def __init__(
        self,
        number: int,
        ended: asyncio.Future[tuple[dict[str, object], list[int]]],
        terminals: list[int],
        capture: Capture | None,
        listener: int,
    ) -> None:
        self.number = number
        self.ended = ended
        self.terminals = terminals
        self.capture = capture
        self.listener = listener


class KeeperClient:
    """Talks to one keeper from one event loop."""

    def __init__(self, runtime: str) -> None:
        self._runtime = runtime
        self._socket: socket.socket | None = None
        self._pid = 0
        self._number = 0
        self._waiting: dict[int | None, asyncio.Future[tuple[dict[str, object], list[int]]]] = {}
        self._known: set[str] = set()
        self._outgoing: collections.deque[tuple[dict[str, object], list[int]]] = collections.deque()
        self.users = 0
        self.generation = 0
        """Counts the keepers that this client has had: what one was told, the next does not know."""
        self.hierarchies = Hierarchies(0, {}, {})
        self.rootless = False
        self._starting: asyncio.Lock = asyncio.Lock()

    def running(self) -> bool:
        """Whether there is a keeper; one that has died is noticed here, not by the command that meets it."""
        if self._socket is not None:
            with suppress(BlockingIOError):
                if self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
                    self._lost()
        return self._socket is not None

    async def ready(self) -> None:
        """Start the keeper if it is not there. Raises what it could not do (ProtectionUnavailable, …)."""
        async with self._starting:
            if self._socket is not None:
                return
            ours = self._socket = self._spawn()
            self.generation += 1
            hello = self.expect(None)
            asyncio.get_running_loop().add_reader(ours.fileno(), self._incoming)
            message, _ = await hello
            controllers, reasons = message.get("controllers"), message.get("reasons")
            base = {str(name): "" for name in controllers} if is_list(controllers) else {}
            why = {name: str(text) for name, text in reasons.items()} if is_object(reasons) else {}
            version = message.get("version")
            self.hierarchies = Hierarchies(version if isinstance(version, int) else 0, base, why)
            self.rootless = message.get("rootless") is True

    def _spawn(self) -> socket.socket:
        """Start the process; returns this side's end of its socket."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = __file__.rsplit("/", 3)[0]
        handle = os.dup(theirs.fileno())
        os.set_inheritable(handle, True)
        argv = [sys.executable, "-I", "-S", "-c", _BOOT, root, str(handle), self._runtime]
        try:
            # Nothing of the library's environment goes along: the keeper's children are sandboxes.
            environ = {"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"}
            self._pid = os.posix_spawn(
                sys.executable, argv, environ, setsigmask=[], setsigdef=range(1, 32)
            )
        finally:
            os.close(handle)
            theirs.close()
        ours.setblocking(False)
        return ours

    def expect(self, number: int | None) -> asyncio.Future[tuple[dict[str, object], list[int]]]:
        """The future of the next message about a command; a cancelled one may be replaced."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[dict[str, object], list[int]]] = loop.create_future()
        self._waiting[number] = future
        return future

    def _incoming(self) -> None:
        assert self._socket is not None  # noqa: S101
        try:
            message, descriptors = wire.receive(self._socket)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            message, descriptors = None, []
        if message is None:
            self._lost()
            return
        number = message.get("id")
        key = number if isinstance(number, int) else None
        future = self._waiting.pop(key, None)
        if future is None or future.cancelled():
            for descriptor in descriptors:
                os.close(descriptor)
        elif message.get("event") == "error":
            future.set_exception(_as_error(message))
        else:
            future.set_result((message, descriptors))

    def _lost(self) -> None:
        """The keeper has died, and every sandbox with it."""
        self.close("the keeper process has ended, and its sandboxes with it", code="keeper-lost")

    def _send(self, message: dict[str, object], descriptors: list[int] | None = None) -> None:
        if self._socket is None:
            raise SandboxError("the keeper process is not there", code="keeper-lost")
        if not self._outgoing:
            try:
                wire.send(self._socket, message, descriptors)
                return
            except BlockingIOError:
                asyncio.get_running_loop().add_writer(self._socket.fileno(), self._flush)
            except OSError as error:
                raise SandboxError(f"the keeper cannot be reached: {error}", code="keeper-lost") from error
        # The socket is full. To wait for room here could be to wait for ever: the keeper may wait in turn
        # for its answers to be read.
        self._outgoing.append((message, [os.dup(descriptor) for descriptor in descriptors or ()]))

    def _flush(self) -> None:
        while self._outgoing and self._socket is not None:
            message, descriptors = self._outgoing[0]
            try:
                wire.send(self._socket, message, descriptors)
            except BlockingIOError:
                return
            except OSError:
                self._lost()
                return
            self._outgoing.popleft()
            for descriptor in descriptors:
                os.close(descriptor)
        if self._socket is not None:
            asyncio.get_running_loop().remove_writer(self._socket.fileno())

    def know(self, plan: Plan) -> str:
        """Tell the keeper a plan once; returns the key by which later requests name it."""
        key = plan.digest
        if key not in self._known:
            self._send({"op": "plan", "key": key, "spec": plan.spec.as_dict(), "watch": plan.watch})
            self._known.add(key)
        return key

    async def pool(self, plan: Plan, kind: str, size: int) -> None:
        """Have ``size`` sandboxes of this plan ready: ``prefab`` (no process) or ``slot`` (waiting)."""
        self._number += 1
        future = self.expect(self._number)
        self._send({"op": "pool", "id": self._number, "key": self.know(plan), "kind": kind, "size": size})
        await future

    async def drop_pool(self, key: str) -> None:
        """Let the sandboxes made ahead for a plan go."""
        self._number += 1
        future = self.expect(self._number)
        self._send({"op": "pool", "id": self._number, "key": key, "kind": "slot", "size": 0})
        await future

    async def start(
        self, plan: Plan, late: Late, stdio: list[int], note: str
    ) -> Started:
        """Start a command."""
        self._number += 1
        number = self._number
        future = self.expect(number)
        message: dict[str, object] = {
            "op": "start",
            "id": number,
            "key": self.know(plan),
            "late": late.as_dict(),
            "note": note,
        }
        try:
            self._send(message, stdio)
        except CasemateError:
            self._waiting.pop(number, None)
            raise
        if not late.tty and plan.spec.capture is None:
            return Started(number, future, [], None, -1)
        message, handles = await future
        count = message.get("terminals")
        terminals = handles[: count if isinstance(count, int) else 0]
        rest = handles[len(terminals) :]
        listener = rest.pop() if message.get("listener") is True else -1
        capture = Capture(rest[1:], rest[0], -1, str(message.get("capture"))) if rest else None
        return Started(number, self.expect(number), terminals, capture, listener)

    async def socket_inside(self, number: int) -> int:
        """A TCP socket inside a running command's sandbox, not connected. Raises SandboxError."""
        self._number += 1
        future = self.expect(self._number)
        self._send({"op": "inside", "id": self._number, "of": number})
        _, handles = await future
        return handles[0]

    def signal(self, number: int, signal: int) -> None:
        """Pass a signal on to a command."""
        self._send({"op": "signal", "id": number, "signal": signal})

    def kill(self, number: int) -> None:
        """End every process of a sandbox."""
        self._send({"op": "kill", "id": number})

    async def keep(self, number: int) -> None:
        """Make an ended command's tops outlive the keeper."""
        future = self.expect(number)
        self._send({"op": "keep", "id": number})
        await future

    def settled(self, number: int, *, keep: bool) -> None:
        """The changes have been dealt with; the keeper may throw the rest away (or not: ``keep``)."""
        with suppress(SandboxError):  # one that has died meanwhile has thrown it away
            self._send({"op": "settled", "id": number, "keep": keep})

    def close(self, why: str = "the sandbox was closed while the command ran", code: str = "closed") -> None:
        """Let the keeper go: it ends its sandboxes and itself. Whoever waits for one is told ``why``."""
        if self._socket is None:
            return
        with suppress(RuntimeError):
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._socket.fileno())
            loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._socket = None
        self._known.clear()
        while self._outgoing:
            for descriptor in self._outgoing.popleft()[1]:
                os.close(descriptor)
        with suppress(ChildProcessError):  # the program waits for its children itself, or ignores them
            os.waitpid(self._pid, 0)
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(SandboxError(why, code=code, hint="the next run starts a new keeper"))


def _as_error(message: dict[str, object]) -> CasemateError:
    kind = getattr(errors, str(message.get("kind")), SandboxError)
    details = message.get("details")
    extra = dict(details) if is_object(details) else {}
    for name in ("code", "hint", "message"):
        extra.pop(name, None)
    make: Callable[..., CasemateError] = kind if issubclass(kind, CasemateError) else SandboxError
    code, hint = str(message.get("code")), str(message.get("hint") or "")
    return make(str(message.get("message")), code=code, hint=hint, **extra)


def shared(runtime: str) -> KeeperClient:
    """This event loop's keeper client; call ``release`` when done with it."""
    loop = asyncio.get_running_loop()
    client = _loops.get(loop)
    if client is None:
        client = _loops[loop] = KeeperClient(runtime)
    client.users += 1
    return client


def release(client: KeeperClient) -> None:
    """One user less; the last one ends the keeper."""
    client.users -= 1
    if client.users == 0:
        from casemate.sandbox import gates

        client.close()
        gates.close()
        _loops.pop(asyncio.get_running_loop(), None)
