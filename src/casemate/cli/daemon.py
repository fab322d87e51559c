"""``casemate daemon``: a resident process that makes ``casemate run`` start faster, with the same guarantees.

It serves its own uid only, over a unix socket in a private directory, with an environment of nothing (each
command brings its caller's). A client's death kills its command. The sandboxes are the keeper's, its child.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys

from casemate.cli import packets, run
from casemate.cli.main import line, tell
from casemate.cli.streams import put
from casemate.cli.thin import socket_path
from casemate.errors import CasemateError
from casemate.sandbox import keeper_client
from casemate.sandbox.command import Begun, settle_command
from casemate.sandbox.denials import TAIL
from casemate.sandbox.failures import from_os_error
from casemate.sandbox.inline import busy
from casemate.sandbox.job import prepare, sweep_live
from casemate.sandbox.live import LiveSocket
from casemate.sandbox.locks import WorkspaceLock
from casemate.settings import places
from casemate.sys.process import close_all_but

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from casemate.sandbox.job import Job
    from casemate.sandbox.result import Result

__all__ = ["main"]

USAGE = """usage: casemate daemon start|stop|status|serve

  start    start it in the background, if it does not run
  stop     end it, and every command that it runs
  status   whether it runs, and for which installation
  serve    run it in the foreground
"""
_PLANS = 4  # plans for which a waiting sandbox is kept ready


def main(argv: list[str]) -> int:
    """Run one of the daemon's verbs."""
    verbs = {"start": _start, "stop": _stop, "status": _status, "serve": _serve}
    if len(argv) != 1 or argv[0] not in verbs:
        os.write(2, USAGE.encode())
        return 2
    return verbs[argv[0]]()


def _ask(words: list[str]) -> list[str] | None:
    """One question to the running daemon; None if there is none."""
    endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with endpoint:
        try:
            endpoint.connect(socket_path(dict(os.environ)))
            packets.send(endpoint, words)
            return packets.receive(endpoint)[0] or None
        except OSError:
            return None


def _status() -> int:
    answer = _ask(["status"])
    if answer is None:
        tell("no daemon runs")
        return 1
    other = "" if answer[2] == packets.identity() else " (another installation: not used)"
    put(1, f"pid {answer[1]}, {answer[2]}{other}\n".encode())
    return 0


def _stop() -> int:
    answer = _ask(["stop"])
    if answer is None:
        tell("no daemon runs")
        return 1
    _wait_until(lambda: _ask(["status"]) is None)
    return 0


def _start() -> int:
    if _ask(["status"]) is not None:
        tell("it runs already")
        return 0
    # A clean environment: only what says where the state lies.
    kept = ("HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CONFIG_HOME")
    environ = {name: os.environ[name] for name in kept if name in os.environ}
    environ.update(PATH="/usr/bin:/bin", LC_ALL="C.UTF-8")
    entry = os.path.join(os.path.dirname(os.path.abspath(__file__)), "entry.py")
    # Nothing else of the caller goes along either: no descriptor, no ignored signal.
    close_all_but([])
    null = os.open("/dev/null", os.O_RDWR)
    os.chdir("/")
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", entry, "daemon", "serve"],
        environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, null, target) for target in (0, 1, 2)],
        setsid=True,
        setsigmask=[],
        setsigdef=range(1, 32),
    )
    if not _wait_until(lambda: _ask(["status"]) is not None):
        tell("the daemon did not come up; `casemate daemon serve` shows why")
        return 125
    return 0


def _wait_until(condition: object) -> bool:
    import time

    assert callable(condition)  # noqa: S101
    for _ in range(200):
        if condition():
            return True
        time.sleep(0.02)
    return False


def _serve() -> int:
    path = socket_path(dict(os.environ))
    if not path:
        tell("a daemon needs HOME, XDG_STATE_HOME or XDG_RUNTIME_DIR to be set")
        return 125
    directory = os.path.dirname(path)
    os.umask(0o077)
    os.makedirs(directory, 0o700, exist_ok=True)
    facts = os.lstat(directory)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        tell(f"{directory} is not a private directory of this user")
        return 125
    # The lock, not the socket, says who serves: two that start at once would each find no other.
    lock = WorkspaceLock(f"{directory}/daemon.lock")
    if not lock.take(wait=False, label=str(os.getpid())):
        lock.close()
        tell("a daemon runs already")
        return 125
    try:
        _listen(path)
    finally:
        lock.close()
    return 0


def _listen(path: str) -> None:
    """Serve on a socket of that name until told to stop."""
    if os.path.lexists(path):  # of one that was killed
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    listener.bind(path)
    listener.listen(64)
    os.umask(0o022)
    identity = (os.stat(path).st_ino, os.stat(path).st_dev)
    try:
        asyncio.run(_run(listener))
    except* _Stop:
        pass
    finally:
        listener.close()
        if os.path.exists(path) and (os.stat(path).st_ino, os.stat(path).st_dev) == identity:
            os.unlink(path)


async def _run(listener: socket.socket) -> None:
    await _Daemon(listener).run()


class _Daemon:
    """Accepts clients; each is a task of its own."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._stopping = asyncio.Event()
        self._keeper: keeper_client.KeeperClient | None = None
        self._pools: list[str] = []

    async def run(self) -> None:
        import signal

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._stopping.set)
        run_directory = places(dict(os.environ)).run
        sweep_live(f"{run_directory}/live")
        self._keeper = keeper_client.shared(run_directory)
        await self._keeper.ready()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._accept(group))
                await self._stopping.wait()
                raise _Stop  # which cancels the others
        finally:
            keeper_client.release(self._keeper)

    async def _accept(self, group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            endpoint, _ = await loop.sock_accept(self._listener)
            if _peer(endpoint)[1] == os.getuid():
                group.create_task(self._client(endpoint))
            else:
                endpoint.close()

    async def _client(self, endpoint: socket.socket) -> None:
        client = _Client(self, endpoint)
        try:
            await client.serve()
        except (OSError, CasemateError):
            pass  # the client is gone; its command has been ended
        except Exception as error:  # one client's nonsense is no reason to end the commands of others
            tell(f"a client was let go: {error!r}")
        finally:
            client.close()

    def stop(self) -> None:
        """End the daemon."""
        self._stopping.set()

    @property
    def keeper(self) -> keeper_client.KeeperClient:
        """The keeper of this daemon."""
        assert self._keeper is not None  # noqa: S101
        return self._keeper

    async def warm(self, job: Job) -> None:
        """Keep a waiting sandbox for the plan of a command that has just run: the next is likely the same."""
        plan = job.plan
        if plan is None or plan.digest in self._pools:
            return
        self._pools.append(plan.digest)
        if len(self._pools) > _PLANS:
            await self.keeper.drop_pool(self._pools.pop(0))
        await self.keeper.pool(plan, "slot", 1)


def _peer(endpoint: socket.socket) -> tuple[int, int]:
    """Pid (0 if it cannot be named here) and uid of the other side."""
    data = endpoint.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(data[:4], sys.byteorder), int.from_bytes(data[4:8], sys.byteorder)


def _sees_the_same(pid: int) -> bool:
    """Whether a path means the same file to a client as to the daemon: same mounts, same root."""
    try:
        mine, theirs = os.stat("/proc/self/ns/mnt"), os.stat(f"/proc/{pid}/ns/mnt")
        here, there = os.stat("/"), os.stat(f"/proc/{pid}/root/.")
    except OSError:
        return False
    return mine.st_ino == theirs.st_ino and (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


class _Stop(Exception):
    """The daemon was told to end."""


class _Client:
    """One connection: a question, perhaps a command."""

    def __init__(self, daemon: _Daemon, endpoint: socket.socket) -> None:
        self._daemon = daemon
        self._endpoint = endpoint
        endpoint.setblocking(False)
        self._packets: asyncio.Queue[list[str]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(endpoint.fileno(), self._incoming)

    def _incoming(self) -> None:
        try:
            words, descriptors = packets.receive(self._endpoint)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            words, descriptors = [], []
        for descriptor in descriptors:
            os.close(descriptor)
        if not words:
            self._loop.remove_reader(self._endpoint.fileno())
        self._packets.put_nowait(words)

    def close(self) -> None:
        """Hang up."""
        self._loop.remove_reader(self._endpoint.fileno())
        self._endpoint.close()

    def _tell(self, words: list[str], descriptors: list[int] | None = None) -> None:
        self._endpoint.setblocking(True)
        try:
            packets.send(self._endpoint, words, descriptors)
        finally:
            self._endpoint.setblocking(False)

    async def serve(self) -> None:
        words = await self._packets.get()
        if not words:
            return
        if words[0] == "status":
            self._tell(["status", str(os.getpid()), packets.identity()])
        elif words[0] == "stop":
            self._tell(["stopping"])
            self._daemon.stop()
        elif words[0] == "run" and len(words) >= 7:
            if words[1] != packets.identity() or not _sees_the_same(_peer(self._endpoint)[0]):
                self._tell(["not-mine"])
                return
            await self._run(words)

    async def _run(self, words: list[str]) -> None:
        terminal, *window = map(int, words[2].split())
        mask, cwd, count = int(words[3]), words[4], int(words[5])
        argv = words[6 : 6 + count]
        environ = dict(word.split("=", 1) for word in words[6 + count :] if "=" in word)
        options = run.Options(values={}, lists={}, switches=set())
        try:
            options = run.parse(argv)
            keeper = self._daemon.keeper
            await keeper.ready()
            asked = run.request(
                options,
                cwd=cwd,
                environ=environ,
                terminal=terminal == 1,
                window=tuple(window),
                umask=mask,
            )
            job = prepare(asked, keeper.hierarchies, rootless=keeper.rootless)
            if job.plan is None or job.policy.network.ask:  # whoever answers questions is the caller
                self._tell(["not-mine"])
                return
            run.check_apply(options, job)
            lock = await self._lock(job, options)
            try:
                end = await self._command(job, options, locked=lock is not None)
            finally:
                if lock is not None:
                    lock.close()
        except CasemateError as error:
            self._end(run.conclude(options, error))
            return
        except ConnectionError:
            raise
        except OSError as error:
            self._end(run.conclude(options, from_os_error(error)))
            return
        if end is not None:
            self._end(run.conclude(options, end))
            await self._daemon.warm(job)

    def _end(self, conclusion: run.Conclusion) -> None:
        texts = [data.decode("utf-8", "surrogateescape") for data in (conclusion.out, conclusion.report)]
        self._tell(["end", str(conclusion.code), texts[0], conclusion.err, texts[1]])

    def _foreign_group(self) -> str:
        """A command runs below the daemon's control group: say so where that is not the caller's."""
        pid, _ = _peer(self._endpoint)
        try:
            with open(f"/proc/{pid}/cgroup") as theirs, open("/proc/self/cgroup") as ours:
                same = theirs.read() == ours.read()
        except OSError:
            same = False
        return "" if same else "the command runs below the daemon's control group, not the caller's"

    async def _lock(self, job: Job, options: run.Options) -> WorkspaceLock | None:
        if job.plan is None or not any(view.writable for view in job.plan.spec.views):
            return None
        lock = WorkspaceLock(f"{job.places.run}/locks/{job.key}")
        label = f"pid {os.getpid()}: {' '.join(job.request.argv)}"
        if lock.take(wait=False, label=label):
            return lock
        if "no_wait" in options.switches:
            raise busy(job, lock)
        self._tell(["waiting", run.waiting_note(job, lock.holder())])
        try:
            while not lock.take(wait=False, label=label):
                self._check_client()
                await asyncio.sleep(0.02)
            self._check_client()
        except BaseException:
            lock.close()
            raise
        return lock

    def _check_client(self) -> None:
        if not self._packets.empty():
            raise ConnectionError("the caller has gone")

    async def _command(self, job: Job, options: run.Options, *, locked: bool) -> Result | None:
        """Start it, hand its streams to the client, wait for both ends, settle. None if the client died."""
        plan, keeper = job.plan, self._daemon.keeper
        assert plan is not None  # noqa: S101
        pipes = [] if job.late.tty else [os.pipe2(os.O_CLOEXEC) for _ in range(3)]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]] if pipes else []
        mine = [pipes[0][1], pipes[1][0], pipes[2][0]] if pipes else []
        try:
            begun = Begun(keeper)
            await begun.begin(job, theirs, None)
            number, ended = begun.number, begun.ended
            mine += begun.terminals
            alive = self._hand_out(job, options, mine, tty=bool(begun.terminals), locked=locked)
        finally:
            for descriptor in (*theirs, *mine):
                os.close(descriptor)
        live = self._live(job, begun)
        try:
            if alive:
                alive = await self._follow(number, ended)
            else:
                keeper.kill(number)
            message, tops = await ended
        except BaseException:
            if begun.share is not None:
                begun.share.abandon()  # nobody will ask any more what it has done
            raise
        finally:
            if live is not None:
                self._loop.remove_reader(live.fileno())
                live.close()
        end = keeper_client.Ended(message, tops)
        limit, tail = "", b""
        if alive:
            try:
                self._tell(["ended"])
                words = await self._packets.get()
                while words and words[0] != "relayed":
                    words = await self._packets.get()
                alive = bool(words)
                if alive:
                    limit, tail = words[1], words[2].encode("utf-8", "surrogateescape")
            except OSError:
                alive = False
        if not alive:
            limit = "client-lost"
        if note := self._foreign_group():
            job.notes = (*job.notes, note)
        result = await settle_command(
            keeper, job, number, end, limit=limit, stderr_tail=tail, apply=alive, share=begun.share,
            pending=options.values.get("apply", "all") != "all",
        )  # fmt: skip
        return result if alive else None

    def _live(self, job: Job, begun: Begun) -> LiveSocket | None:
        """Let others lead ports into the command while it runs."""
        try:
            live = LiveSocket(job.places.run, job.key, f"{os.getpid()}-{begun.number}", begun.dial)
        except OSError:
            return None
        self._loop.add_reader(live.fileno(), live.poll)
        return live

    def _hand_out(self, job: Job, options: run.Options, ends: list[int], *, tty: bool, locked: bool) -> bool:
        """Give the client the streams of its command; False if it has gone meanwhile."""
        limits = job.policy.resources
        offer = run.interrupted(job) if locked else ""
        said = () if "quiet" in options.switches else (*job.notes, offer)
        words = [
            "started",
            "terminal" if tty else "pipes",
            "".join(line(note) for note in said if note),
            "" if limits.output is None else str(limits.output),
            "" if limits.timeout is None else str(limits.timeout),
            str(TAIL),
            "2" if "json" in options.switches else "1",
        ]
        try:
            self._tell(words, ends)
        except OSError:
            return False
        return True

    async def _follow(self, number: int, ended: asyncio.Future[tuple[dict[str, object], list[int]]]) -> bool:
        """Do what the client asks until the command has ended; False if the client died, which kills it."""
        keeper = self._daemon.keeper
        asking = self._loop.create_task(self._packets.get())
        try:
            while not ended.done():
                either: list[asyncio.Future[Any]] = [asking, ended]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not asking.done():
                    continue
                words = asking.result()
                if not words:
                    keeper.kill(number)
                    await asyncio.wait({ended})
                    return False
                if words[0] == "signal":
                    keeper.signal(number, int(words[1]))
                elif words[0] == "kill":
                    keeper.kill(number)
                asking = self._loop.create_task(self._packets.get())
            return True
        finally:
            asking.cancel()
