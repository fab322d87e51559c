"""The launcher: makes what a sandbox needs, forks the child that seals itself, ends it without a trace.

It runs in a small, clean process: the command line itself, or a private keeper started for the
library. It never parses what comes out of a sandbox beyond one bounded status record of its own init.

A sandbox that is not prepared ahead is forked *first*: the child makes its namespaces (0.8 ms, most of it
the network's) while this process makes the file systems and the group, and waits for them on a channel.
"""

from __future__ import annotations

import _signal
import _socket
import gc
import os
import stat
import time
from contextlib import suppress

from casemate.errors import ProtectionUnavailable, SandboxError
from casemate.isolation.process import seal
from casemate.isolation.process.ids import UidPool
from casemate.isolation.process.outcome import Outcome, interpret, seal_error
from casemate.isolation.process.porter import Porter
from casemate.isolation.process.site import Site, SiteMaker
from casemate.isolation.process.spec import Late, Spec, encode
from casemate.isolation.process.trees import make_directory, remove_tree
from casemate.sys import capture, cgroups, mounts, namespaces, packets, process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Launcher", "Running"]


class Running:
    """A started sandbox: its init's pid and pidfd, and the pipe on which init reports."""

    __slots__ = ("outcome", "pid", "pidfd", "record", "site", "status")

    def __init__(self, site: Site, pid: int, pidfd: int, status: int) -> None:
        self.site = site
        self.pid = pid
        self.pidfd = pidfd
        self.status = status
        self.record = b""
        self.outcome = Outcome()


class Launcher:
    """One per process. ``Preconditions:`` single-threaded; for rootless use, no other user namespace."""

    def __init__(
        self, runtime: str, *, hierarchies: cgroups.Hierarchies | None = None, attached: bool | None = None
    ) -> None:
        # What is made here has the modes that are asked for; the command has its caller's mask.
        os.umask(0o022)
        # A caller that ignores its children has its descendants ignore theirs.
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        self.rootless = not process.is_root()
        if not self.rootless and not process.has_admin():
            raise ProtectionUnavailable(
                "root has no CAP_SYS_ADMIN here, and a sandbox with the host's uid 0 would be none",
                hint="run as an ordinary user, or give the container CAP_SYS_ADMIN",
                protection="namespaces",
                needed="CAP_SYS_ADMIN, or a uid other than 0",
                found="uid 0 without it",
            )
        self._pool = None if self.rootless else UidPool(f"{runtime}/uids")
        # Root in a container may be kept from looking at other uids' processes, too.
        self._holds_networks = self.rootless or not process.has_ptrace()
        self._counter = 0
        self._own_uid, self._own_gid = os.geteuid(), os.getegid()
        self._alive_read, self._alive_write = os.pipe()
        os.set_blocking(self._alive_read, False)
        self.hierarchies = cgroups.detect() if hierarchies is None else hierarchies
        if self.rootless:
            self._enter_user_namespace()
        process.drop_bounding_set()
        self._start_block = process.StartBlock()
        self._porter = Porter()
        self._maker = SiteMaker(self.hierarchies, runtime, rootless=self.rootless, attached=attached)

    def _enter_user_namespace(self) -> None:
        try:
            namespaces.leave(namespaces.USER | namespaces.MOUNT)
            namespaces.map_single(self._own_uid, self._own_uid, self._own_gid, self._own_gid)
            mounts.make_private()
            namespaces.halve_inotify()
        except OSError as error:
            raise ProtectionUnavailable(
                f"this host lets user {self._own_uid} make no user namespace: {error}",
                hint="run `casemate doctor`; on Ubuntu 24.04 an AppArmor profile has to allow it",
                protection="namespaces",
                needed="unprivileged user namespaces",
                found=str(error),
            ) from error

    def _new_site(self, spec: Spec) -> tuple[Site, str]:
        uid = self._pool.take() if self._pool else self._own_uid
        gid = uid if self._pool else self._own_gid
        try:
            template = self._maker.template(spec, uid)
        except BaseException:
            if self._pool is not None:
                self._pool.give_back(uid)
            raise
        self._counter += 1
        name = f"{os.getpid():x}-{self._counter:x}"
        return Site(spec, template, uid, gid, f"{spec.keep_base}/{name}-{time.time_ns():x}"), name

    # -- starting ------------------------------------------------------------------------------------

    def prepare(self, spec: Spec) -> Site:
        """Make a sandbox's surroundings ahead of need: all but a process.

        Raises SandboxError, ProtectionUnavailable or OSError; nothing is left behind then.
        """
        if spec.direct is not None:
            # What it has to cover is what is there when the command starts.
            raise SandboxError("a directly changed workspace cannot be made ahead", code="bad-request")
        site, name = self._new_site(spec)
        try:
            self._maker.make(site, name)
            self._maker.make_namespaces(site)
            if self._holds_networks:
                for made in (made for made, kind in site.joined if kind == namespaces.NET):
                    site.network = os.dup(made)
        except BaseException:
            self.forget(site)
            self.discard(site)
            raise
        return site

    def launch(self, spec: Spec, late: Late, stdio: tuple[int, int, int]) -> tuple[Running, list[int]]:
        """Make a sandbox and start its command.

        The caller keeps ``stdio`` and closes it. With a terminal it is -1 each, and the terminal's master
        and slave are returned. Raises as ``prepare`` does.
        """
        site, name = self._new_site(spec)
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)
        running: Running | None = None
        try:
            running = self._fork(site, None, stdio, theirs.fileno(), None, launchers_end=ours.fileno())
            theirs.close()
            site.pid = running.pid
            self._maker.make(site, name)
            if spec.capture is not None:
                site.capture = seal.receive_capture(ours)
            terminals = self._ready(site, late, stdio)
            self._start_broker(site)
            self._hold_network(site, running)
            seal.send_surroundings(ours, self._surroundings(site), late)
        except BaseException as error:
            theirs.close()
            ours.close()
            if running is not None:
                process.pidfd_signal(running.pidfd, 9)
                outcome = self.reap(running)
                self.forget(site)
                self.discard(site)
                if isinstance(error, (BrokenPipeError, ConnectionResetError)):
                    raise seal_error(outcome) from error  # the child met something first
            else:
                self.forget(site)
                self.discard(site)
            raise
        ours.close()
        return running, terminals

    def _hold_network(self, site: Site, running: Running) -> None:
        """Keep the sandbox's network, in which something may have to be reached later, without privilege.

        Before, the child may still be in the host's own; later, when it is sealed, a user's launcher cannot
        look at it any more. Just now the child makes it, or has made it and waits for its surroundings.
        """
        if site.spec.network_host or not self._holds_networks:
            return
        while site.network < 0 and not packets.readable(running.pidfd):
            try:
                site.network = namespaces.network_of(running.pid)
            except OSError as error:
                if error.errno != 1:  # it has ended
                    return
                time.sleep(0.0001)

    def start(self, site: Site, late: Late, stdio: tuple[int, int, int]) -> tuple[Running, list[int]]:
        """Start the command of ``late`` in a prepared site; otherwise as ``launch``."""
        terminals = self._ready(site, late, stdio)
        return self._fork(site, late, stdio, -1, None), terminals

    def start_waiting(self, site: Site) -> tuple[Running, int]:
        """Start a sandbox that seals itself and waits; returns it and the channel for ``hand_over``."""
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)

        def receive() -> tuple[Late, tuple[int, int, int]]:
            payload, descriptors = packets.receive(theirs)
            if payload is None:
                os._exit(0)  # it was never needed
            late = Late.from_words(packets.split(payload))
            theirs.close()
            stdio = (descriptors[0], descriptors[1], descriptors[2]) if descriptors else (-1, -1, -1)
            return late, stdio

        running = self._fork(site, None, (-1, -1, -1), theirs.fileno(), receive)
        theirs.close()
        site.release(waiting=True)
        return running, ours.detach()

    def hand_over(
        self, running: Running, channel: int, late: Late, stdio: tuple[int, int, int]
    ) -> list[int]:
        """Give a waiting sandbox its command; it can be done once. Returns the terminal's ends if any."""
        terminals = self._ready(running.site, late, stdio)
        running.outcome.times["fork"] = time.monotonic()
        endpoint = _socket.socket(fileno=channel)
        try:
            packets.send(endpoint, encode(late.as_words()), [d for d in stdio if d >= 0])
        finally:
            endpoint.close()
        return terminals

    def _ready(self, site: Site, late: Late, stdio: tuple[int, int, int]) -> list[int]:
        """What a command needs of its sandbox beside what all have; returns its terminal's ends if any."""
        terminals = self._open_terminal(site, late) if late.tty else []
        self._give_streams(site, stdio)
        if site.capture is not None and site.capture.mechanism == capture.PARTIAL:
            late.env = {**capture.PROXY_VARIABLES, **late.env}
        if late.files:
            self._maker.write_late(site, late.files)
        if late.listener:
            site.listener = self._maker.listen(site, late.listener)
        return terminals

    def _open_terminal(self, site: Site, late: Late) -> list[int]:
        """Make a pty in the sandbox's own devpts: master and slave.

        Whoever reads the master keeps the slave open until the sandbox has ended: a master without any
        slave reads as ended, which is also how it looks before the command has opened its own.
        """
        import fcntl
        import struct

        flags = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC
        master = os.open("ptmx", flags, dir_fd=site.pts)
        fcntl.ioctl(master, 0x40045431, struct.pack("i", 0))  # TIOCSPTLCK: unlock
        number = struct.unpack("I", fcntl.ioctl(master, 0x80045430, b"\0\0\0\0"))[0]  # TIOCGPTN
        slave = fcntl.ioctl(master, 0x5441, flags)  # TIOCGPTPEER: needs no path
        if late.window:  # from the start: a change would come with a signal
            fcntl.ioctl(master, 0x5414, struct.pack("4H", *late.window))  # TIOCSWINSZ
        late.pts = f"/dev/pts/{number}"
        return [master, slave]

    def _give_streams(self, site: Site, stdio: tuple[int, int, int]) -> None:
        """Let the sandbox's uid open its own /dev/stdout. Pipes only: nothing of the host's is given away."""
        for descriptor in stdio:
            if descriptor < 0:
                continue
            if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                raise SandboxError("a sandbox's streams have to be pipes of its own", code="bad-request")
            if not self.rootless:
                os.fchown(descriptor, site.uid, site.gid)

    def _start_broker(self, site: Site) -> None:
        """Start the broker of the workspace, if there is to be one; init waits for it."""
        if site.direct is not None:
            alive = (self._alive_read, self._alive_write)
            ids = None if self.rootless else (site.uid, site.gid)
            site.direct.start(site.spec, ids, alive=alive, channel=site.broker)
            site.broker = -1

    def _surroundings(self, site: Site) -> seal.Surroundings:
        return seal.Surroundings(
            entrances=site.group.entrances() if site.group else [],
            parts=site.parts,
            ruleset=site.ruleset,
        )

    def _fork(
        self,
        site: Site,
        late: Late | None,
        stdio: tuple[int, int, int],
        channel: int,
        receive: Callable[[], tuple[Late, tuple[int, int, int]]] | None,
        launchers_end: int = -1,
    ) -> Running:
        parts = seal.Parts(site.spec, site.uid, site.gid, self.rootless)
        parts.template = site.template.namespace
        parts.filter = self._maker.filter(site.spec)
        parts.strict_memfd = self._maker.strict_memfd
        parts.start_block = self._start_block
        parts.joined = site.joined
        parts.alive_read, parts.alive_write = self._alive_read, self._alive_write
        parts.stdio = stdio
        parts.channel, parts.launchers_end = channel, launchers_end
        if site.spec.direct is not None:
            from casemate.isolation.process import direct  # before the fork: init needs it, too

            site.broker, parts.broker = direct.channel()
        status_read, parts.status = os.pipe()
        if site.parts:
            parts.surroundings = self._surroundings(site)
        try:
            # The child must not walk the heap: each page it touches is a copy.
            gc.freeze()
            began = time.monotonic()
            pid, pidfd = process.fork_into(namespaces.PID)
            if pid == 0:
                seal.become_init(parts, late, receive)
        except OSError as error:
            os.close(status_read)
            raise SandboxError(
                f"cannot start the sandbox's first process: {error}",
                hint="run `casemate doctor`",
                errno=error.errno,
            ) from error
        finally:
            os.close(parts.status)
            if parts.broker >= 0:
                os.close(parts.broker)
            if parts.surroundings is not None:
                for descriptor in parts.surroundings.entrances:
                    os.close(descriptor)
        running = Running(site, pid, pidfd, status_read)
        running.outcome.times["fork"] = began
        return running

    # -- ending --------------------------------------------------------------------------------------

    def tidy(self, *, wait: bool = False) -> None:
        """Collect the helpers that have ended since; with ``wait`` also those that are about to."""
        namespaces.reap_helpers(wait=wait)

    def read_status(self, running: Running) -> bool:
        """Take what init has written; False at its end. At most 8 KiB are ever kept."""
        chunk = os.read(running.status, 4096)
        running.record = (running.record + chunk)[:8192]
        return bool(chunk)

    def linger(self, running: Running) -> None:
        """Hold a running sandbox's mount namespace.

        Whoever drops the last reference waits for the unmounting (an RCU grace period): with this it is
        ``discard``, and not init on its way out, for which somebody is waiting.
        """
        try:
            handle = os.open(f"/proc/{running.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        running.site.lingering.append(handle)

    def kill(self, running: Running) -> None:
        """End every process of the sandbox, init last."""
        if running.site.group is not None:
            with suppress(OSError):
                running.site.group.kill()
        process.pidfd_signal(running.pidfd, 9)

    def reap(self, running: Running) -> Outcome:
        """Wait for init, whose end is the end of every process of its pid namespace; read the facts.

        Blocks until then; call it once init has reported or was killed.
        """
        while self.read_status(running):
            pass
        os.waitpid(running.pid, 0)
        if running.site.direct is not None:
            running.site.direct.stop()
        outcome = self._look(running)
        os.close(running.pidfd)
        os.close(running.status)
        return outcome

    def early_outcome(self, running: Running) -> Outcome | None:
        """The outcome before init is gone, if the host itself sees that nothing else is left.

        Init's own exit takes half a millisecond (its memory, its namespaces). When its group holds one
        process only, that is init, which runs none of the sandbox's code: nothing can change any more.
        """
        group = running.site.group
        if b"W\0" not in running.record or group is None or group.population() != 1:
            return None
        if running.site.spec.stack is not None:
            return None  # the next command may have the same tops: this one has to be gone
        return self._look(running)

    def _look(self, running: Running) -> Outcome:
        outcome = running.outcome
        interpret(running.record, outcome)
        if running.site.direct is not None:
            running.site.direct.report(outcome)
        if running.site.group is not None:
            outcome.events = running.site.group.events(failed=outcome.status != 0)
        return outcome

    def socket_inside(self, running: Running) -> int:
        """A TCP socket inside a running sandbox, not connected yet. Raises SandboxError.

        ``Preconditions:`` it has spawned its command, so that it is in a network of its own if it has one.
        """
        held = running.site.network
        if held >= 0:
            return self._porter.socket(held)
        try:
            network = namespaces.network_of(running.pid)
        except OSError as error:
            raise SandboxError(
                f"nothing inside this sandbox can be reached: {error}", code="inside-unreachable"
            ) from error
        try:
            return self._porter.socket(network)
        finally:
            os.close(network)

    def keep(self, site: Site, note: str) -> None:
        """Make the tops outlive this process: from here on a kill loses nothing of the command's work.

        The run's directory gets ``note`` and, where the tops lie on the sandbox's own file system, a
        mount of it. Commands that end within a moment never pay for this. Raises OSError where there is no
        room for that, and may be tried again.
        """
        if site.kept or not site.places:
            return
        make_directory(site.directory)
        if not site.spec.tops_on_disk and not site.attached:
            make_directory(f"{site.directory}/scratch")
            mounts.move_mount(site.scratch, mounts.AT_FDCWD, f"{site.directory}/scratch")
            site.attached.append(f"{site.directory}/scratch")
        # Last: where the note is, the work is.
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(f"{site.directory}/note.json", flags, 0o600)
        try:
            os.write(handle, note.encode("utf-8", "surrogateescape"))
        finally:
            os.close(handle)
        site.kept = True

    def forget(self, site: Site) -> None:
        """Remove the run's directory with all that is in it."""
        while site.attached:
            try:
                mounts.unmount(site.attached.pop())
            except OSError:
                continue
        if site.work:
            remove_tree(site.work)
        site.kept = False
        if site.directory:
            remove_tree(site.directory)
            with suppress(OSError):
                os.rmdir(os.path.dirname(site.directory))

    def discard(self, site: Site) -> None:
        """Let go of all that was made. Every process must be dead; tops are gone after this."""
        site.release()
        for descriptor in (site.scratch, site.network, site.listener, site.broker):
            if descriptor >= 0:
                os.close(descriptor)
        if site.direct is not None and site.spec.direct is not None:
            site.direct.close(site.spec.direct)
            site.direct = None
        if site.capture is not None:
            site.capture.close()
            site.capture = None
        site.scratch = site.network = site.listener = site.broker = -1
        site.places = []
        if site.group is not None:
            for _ in range(200):
                if site.group.remove():
                    break
                time.sleep(0.005)
            site.group = None
        if self._pool is not None and site.uid >= 0:
            self._pool.give_back(site.uid)
            site.uid = -1

    def close(self) -> None:
        """Release locks, templates and the parent groups where they are empty."""
        if self._pool is not None:
            self._pool.close()
        self._porter.close()
        self._maker.close()
        namespaces.reap_helpers(wait=True)
        for parent in self.hierarchies.parents():
            cgroups.remove_leftovers(parent)
