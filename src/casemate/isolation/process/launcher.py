"""The launcher: makes what a sandbox needs, forks the child that seals itself, ends it without a trace.

It runs in a small, clean process: the command line itself, or a private keeper started for the
library. It never parses what comes out of a sandbox beyond one bounded status record of its own init.
"""

from __future__ import annotations

import os
import stat
import time

from casemate.errors import ProtectionUnavailable, SandboxError
from casemate.isolation.process import filter as seccomp
from casemate.isolation.process import rootfs, seal, wire
from casemate.isolation.process.ids import UidPool
from casemate.isolation.process.spec import Late, Spec
from casemate.sys import cgroups, landlock, mounts, namespaces, process
from casemate.sys.bpf import Prepared as PreparedFilter
from casemate.sys.landlock import EVERYTHING, READ, WRITE_DEVICE, Ruleset
from casemate.sys.native import machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Launcher", "Outcome", "Running", "Site", "remove_tree"]

_HOME = "home/sandbox"


class Site:
    """Everything of one sandbox that exists before its process does (and can be made ahead of need)."""

    __slots__ = (
        "directory",
        "filter",
        "gid",
        "group",
        "joined",
        "kept",
        "lingering",
        "ruleset",
        "scratch",
        "spec",
        "tops",
        "tree",
        "uid",
    )

    def __init__(self, spec: Spec, uid: int, gid: int) -> None:
        self.spec = spec
        self.uid = uid
        self.gid = gid
        self.tree = -1
        self.scratch = -1
        self.tops: list[int] = []
        self.lingering: list[int] = []
        self.group: cgroups.Group | None = None
        self.joined: list[tuple[int, int]] = []
        self.ruleset: Ruleset | None = None
        self.filter: PreparedFilter | None = None
        self.directory = ""  # this run's own, on disk
        self.kept = False  # whether the tops outlive this process by now


class Outcome:
    """How a sandbox ended, as the host knows it."""

    __slots__ = ("events", "failure", "rusage", "spawned", "status", "times")

    def __init__(self) -> None:
        self.status: int | None = None  # raw wait status of the command
        self.failure: tuple[str, ...] | None = None  # a record of init: kind, then its fields
        self.spawned = False
        self.events: dict[str, int] = {}
        self.times: dict[str, float] = {}
        self.rusage: tuple[float, float, int] = (0.0, 0.0, 0)  # user s, system s, largest process in bytes


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

    def __init__(self, runtime: str) -> None:
        # What is made here has the modes that are asked for; the command has its caller's mask.
        os.umask(0o022)
        self.rootless = os.geteuid() != 0
        self._pool = None if self.rootless else UidPool(f"{runtime}/uids")
        self._templates: dict[str, int] = {}
        self._filters: dict[str, PreparedFilter] = {}
        self._maps: dict[tuple[int, int, int], int] = {}
        self._counter = 0
        self._landlock = landlock.abi()
        self.hierarchies = cgroups.detect()
        self._own_uid, self._own_gid = os.geteuid(), os.getegid()
        self._alive_read, self._alive_write = os.pipe()
        os.set_blocking(self._alive_read, False)
        if self.rootless:
            self._enter_user_namespace()
        process.drop_bounding_set()
        self._start_block = process.StartBlock()

    def _enter_user_namespace(self) -> None:
        try:
            namespaces.leave(namespaces.USER | namespaces.MOUNT)
            namespaces.map_single(self._own_uid, self._own_uid, self._own_gid, self._own_gid)
        except OSError as error:
            raise ProtectionUnavailable(
                f"this host lets user {self._own_uid} make no user namespace: {error}",
                hint="run `casemate doctor`; on Ubuntu 24.04 an AppArmor profile has to allow it",
                protection="namespaces",
                needed="unprivileged user namespaces",
                found=str(error),
            ) from error
        mounts.make_private()

    # -- making ------------------------------------------------------------------------------------

    def prepare(self, spec: Spec, *, ahead: bool = False) -> Site:
        """Make a sandbox's surroundings: group, file systems, rules. ``ahead`` adds the namespaces.

        Raises SandboxError or ProtectionUnavailable; nothing is left behind then.
        """
        uid = self._pool.take() if self._pool else self._own_uid
        gid = uid if self._pool else self._own_gid
        site = Site(spec, uid, gid)
        self._counter += 1
        name = f"{os.getpid():x}-{self._counter:x}"
        site.directory = f"{spec.keep_base}/{name}-{time.time_ns():x}"
        try:
            self._make_group(site, name)
            self._make_tree(site)
            key = ",".join(spec.words)
            if key not in self._filters:
                program = seccomp.build(machine(), words=frozenset(spec.words), strict_memfd=self.rootless)
                self._filters[key] = PreparedFilter(program)
            site.filter = self._filters[key]
            if ahead:
                self._make_namespaces(site)
        except BaseException:
            self.forget(site)
            self.discard(site)
            raise
        return site

    def _make_group(self, site: Site, name: str) -> None:
        spec = site.spec
        if not self.hierarchies.base:
            return
        limits = cgroups.Limits(spec.memory, spec.pids, spec.cpu)
        try:
            site.group = cgroups.Group(self.hierarchies, name, limits)
        except OSError as error:
            raise ProtectionUnavailable(
                f"cannot make a control group: {error}",
                hint="run `casemate doctor`; `scope = \"auto\"` does without groups where none can be made",
                protection="limits of scope tree",
                needed="a writable control group",
                found=str(error),
            ) from error

    def _template(self, spec: Spec) -> int:
        key = repr((spec.root, spec.devices))
        if key not in self._templates:
            self._templates[key] = rootfs.build(spec.root, spec.devices, make_nodes=not self.rootless)
        return self._templates[key]

    def _make_tree(self, site: Site) -> None:
        """Clone the template and put into it what belongs to this sandbox alone."""
        spec = site.spec
        tree = site.tree = mounts.clone_tree(self._template(spec), recursive=True)
        rules = None
        if spec.landlock and self._landlock:
            rules = site.ruleset = Ruleset(self._landlock)
            rules.allow(tree, READ)
            dev = os.open("dev", os.O_PATH | os.O_CLOEXEC, dir_fd=tree)
            rules.allow(dev, READ | WRITE_DEVICE)
            os.close(dev)
        flags = mounts.NOSUID | mounts.NODEV
        scratch = site.scratch = mounts.filesystem("tmpfs", flags, mode="0711", size=str(spec.scratch))
        for name, mode in (("tmp", 0o1777), ("shm", 0o1777), ("home", 0o700)):
            os.mkdir(name, 0o700, dir_fd=scratch)
            os.chmod(name, mode, dir_fd=scratch)
        self._own(site, scratch, "home")
        for name, target in (("tmp", "tmp"), ("shm", "dev/shm"), ("home", _HOME)):
            self._attach(site, mounts.clone_tree(scratch, name), target, rules)
        self._fill_home(site)
        for name, content in _account_files(site.uid, site.gid).items():
            self._write(site, scratch, name, content, 0o444, owned=False)
            part = mounts.clone_tree(scratch, name)
            mounts.restrict(part, mounts.RDONLY | flags)
            mounts.move_mount(part, tree, f"etc/{name}")
            os.close(part)
        pts = mounts.filesystem(
            "devpts", mounts.NOSUID | mounts.NOEXEC,
            ptmxmode="0666", mode="0620", uid=str(site.uid), gid=str(site.gid),
        )
        self._attach(site, pts, "dev/pts", rules)
        for number, view in enumerate(spec.views):
            self._attach_view(site, number, rules)
        for path in spec.hide:
            self._hide(site, path.lstrip("/"))
        for source, target in spec.binds:
            part = self._host_directory(site, source, (self._own_uid, self._own_gid))
            self._attach(site, part, target.lstrip("/"), rules)

    def _hide(self, site: Site, path: str) -> None:
        """Cover what a view shows at ``path`` by something empty that nobody may open."""
        try:
            mode = os.stat(path, dir_fd=site.tree, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return  # the apply step holds back whatever is made there
        name = "hidden-directory" if stat.S_ISDIR(mode) else "hidden-file"
        try:
            if stat.S_ISDIR(mode):
                os.mkdir(name, 0, dir_fd=site.scratch)
            else:
                self._write(site, site.scratch, name, "", 0, owned=False)
        except FileExistsError:
            pass
        cover = mounts.clone_tree(site.scratch, name)
        mounts.restrict(cover, mounts.RDONLY | mounts.NOSUID | mounts.NODEV | mounts.NOEXEC)
        mounts.move_mount(cover, site.tree, path)
        os.close(cover)

    def _own(self, site: Site, directory: int, name: str) -> None:
        if not self.rootless:
            os.chown(name, site.uid, site.gid, dir_fd=directory)

    def _write(
        self, site: Site, directory: int, name: str, content: str, mode: int, *, owned: bool = True
    ) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        handle = os.open(name, flags, mode, dir_fd=directory)
        try:
            os.write(handle, content.encode("utf-8", "surrogateescape"))
            if owned and not self.rootless:
                os.fchown(handle, site.uid, site.gid)
        finally:
            os.close(handle)

    def _fill_home(self, site: Site) -> None:
        made: set[str] = set()
        for name, content in site.spec.home.items():
            path = f"home/{name}"
            parts = name.split("/")[:-1]
            for depth in range(1, len(parts) + 1):
                parent = "home/" + "/".join(parts[:depth])
                if parent not in made:
                    made.add(parent)
                    self._make_directory(site, parent)
            self._write(site, site.scratch, path, content, 0o600)

    def _make_directory(self, site: Site, path: str) -> None:
        try:
            os.mkdir(path, 0o700, dir_fd=site.scratch)
        except FileExistsError:
            return
        self._own(site, site.scratch, path)

    def _attach(self, site: Site, part: int, target: str, rules: Ruleset | None, rights: int = EVERYTHING) -> None:
        try:
            if rules is not None:
                rules.allow(part, rights)
            mounts.move_mount(part, site.tree, target)
        finally:
            os.close(part)

    def _host_directory(self, site: Site, source: str, owner: tuple[int, int] | None) -> int:
        """A detached mount of a host directory in which ``owner``'s files appear as the sandbox's."""
        part = mounts.clone_tree(mounts.AT_FDCWD, source)
        try:
            mounts.restrict(part, mounts.NOSUID | mounts.NODEV)
            if owner is not None and not self.rootless:
                mounts.idmap(part, self._id_map(owner, site.uid))
        except OSError as error:
            os.close(part)
            raise ProtectionUnavailable(
                f"cannot show {source} to the sandbox's own uid: {error}",
                hint="its file system does not take id-mapped mounts; put the workspace on ext4, xfs, btrfs or tmpfs",
                protection="own uid per sandbox",
                needed="id-mapped mounts on the workspace's file system (Linux 5.12)",
                found=str(error),
            ) from error
        return part

    def _id_map(self, owner: tuple[int, int], uid: int) -> int:
        key = (*owner, uid)
        if key not in self._maps:
            self._maps[key] = namespaces.id_map([(owner[0], uid)], [(owner[1], uid)])
        return self._maps[key]

    def _attach_view(self, site: Site, number: int, rules: Ruleset | None) -> None:
        view = site.spec.views[number]
        lower = self._host_directory(site, view.source, view.owner)
        target = view.target.lstrip("/")
        _make_below_tmp(site.tree, target)
        if not view.writable:
            mounts.restrict(lower, mounts.RDONLY)
            mounts.move_mount(lower, site.tree, target)
            os.close(lower)
            return
        try:
            top, work = self._make_top(site, number)
            options: dict[str, str | int | bool] = {"lowerdir": lower, "upperdir": top, "workdir": work}
            options["volatile"] = True
            if self.rootless:
                options["userxattr"] = True
            else:
                options["redirect_dir"] = "on"
            part = mounts.filesystem("overlay", mounts.NOSUID | mounts.NODEV, **options)
            os.close(work)
            self._attach(site, part, target, rules)
        finally:
            os.close(lower)

    def _make_top(self, site: Site, number: int) -> tuple[int, int]:
        """Make the two directories of an overlay's top; return them open."""
        base, prefix = site.scratch, ""
        if site.spec.tops_on_disk:
            prefix = f"{site.directory}/"
            os.makedirs(site.directory, 0o700, exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        handles: list[int] = []
        # The top's own mode is what the merged root directory shows.
        shown = os.stat(site.spec.views[number].source).st_mode & 0o777
        for name in (f"{prefix}up{number}", f"{prefix}work{number}"):
            os.mkdir(name, 0o700, dir_fd=base)
            os.chmod(name, shown, dir_fd=base)
            self._own(site, base, name)
            handles.append(os.open(name, flags, dir_fd=base))
        site.tops.append(handles[0])
        return handles[0], handles[1]

    def _make_namespaces(self, site: Site) -> None:
        """Make network, IPC and UTS namespaces ahead of the process that will enter them."""
        network = not site.spec.network_host

        def setup() -> None:
            namespaces.set_hostname(site.spec.hostname)
            if network:
                namespaces.loopback_up()

        kinds = namespaces.IPC | namespaces.UTS | (namespaces.NET if network else 0)
        site.joined = [(descriptor, kind) for kind, descriptor in namespaces.make(kinds, setup).items()]

    # -- running -----------------------------------------------------------------------------------

    def open_terminal(self, site: Site) -> tuple[int, int, str]:
        """Make a pty in the sandbox's own devpts: master, slave, and the slave's path inside.

        Whoever reads the master keeps the slave open until the sandbox has ended: a master without any
        slave reads as ended, which is also how it looks before the command has opened its own.
        """
        import fcntl
        import struct

        flags = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC
        master = os.open("dev/pts/ptmx", flags, dir_fd=site.tree)
        fcntl.ioctl(master, 0x40045431, struct.pack("i", 0))  # TIOCSPTLCK: unlock
        number = struct.unpack("I", fcntl.ioctl(master, 0x80045430, b"\0\0\0\0"))[0]  # TIOCGPTN
        slave = fcntl.ioctl(master, 0x5441, flags)  # TIOCGPTPEER: needs no path
        return master, slave, f"/dev/pts/{number}"

    def start(self, site: Site, late: Late, stdio: tuple[int, int, int]) -> Running:
        """Start the command of ``late``. The caller keeps ``stdio`` (-1 each with a terminal) and closes it."""
        self._give(site, stdio)
        return self._fork(site, late, stdio, -1, None)

    def start_waiting(self, site: Site) -> tuple[Running, int]:
        """Start a sandbox that seals itself and waits; returns it and the channel for ``hand_over``."""
        import _socket

        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)

        def receive() -> tuple[Late, tuple[int, int, int]]:
            message, descriptors = wire.receive(theirs)
            if message is None:
                os._exit(0)  # it was never needed
            late = Late.from_dict(message)
            theirs.close()
            stdio = (descriptors[0], descriptors[1], descriptors[2]) if descriptors else (-1, -1, -1)
            return late, stdio

        running = self._fork(site, None, (-1, -1, -1), theirs.fileno(), receive)
        theirs.close()
        return running, ours.detach()

    def hand_over(self, running: Running, channel: int, late: Late, stdio: tuple[int, int, int]) -> None:
        """Give a waiting sandbox its command; it can be done once."""
        import _socket

        self._give(running.site, stdio)
        running.outcome.times["fork"] = time.monotonic()
        endpoint = _socket.socket(fileno=channel)
        try:
            wire.send(endpoint, late.as_dict(), [d for d in stdio if d >= 0])
        finally:
            endpoint.close()

    def _give(self, site: Site, stdio: tuple[int, int, int]) -> None:
        """Let the sandbox's uid open its own /dev/stdout."""
        if not self.rootless:
            for descriptor in stdio:
                if descriptor >= 0:
                    os.fchown(descriptor, site.uid, site.gid)

    def _fork(
        self,
        site: Site,
        late: Late | None,
        stdio: tuple[int, int, int],
        channel: int,
        receive: Callable[[], tuple[Late, tuple[int, int, int]]] | None,
    ) -> Running:
        parts = seal.Parts(site.spec, site.uid, site.gid, self.rootless)
        parts.tree = site.tree
        parts.ruleset = site.ruleset
        parts.filter = site.filter
        parts.start_block = self._start_block
        parts.joined = site.joined
        parts.alive_read, parts.alive_write = self._alive_read, self._alive_write
        parts.stdio = stdio
        parts.channel = channel
        status_read, parts.status = os.pipe()
        parts.entrances = site.group.entrances() if site.group else []
        kinds = namespaces.PID | namespaces.MOUNT
        if not site.joined:
            kinds |= namespaces.IPC | namespaces.UTS | (0 if site.spec.network_host else namespaces.NET)
        try:
            began = time.monotonic()
            pid, pidfd = process.fork_into(kinds)
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
            for descriptor in parts.entrances:
                os.close(descriptor)
        # Whoever drops the last reference to a mount namespace waits for its unmounting (0.5 ms, an RCU
        # grace period): not init on its way out, which somebody is waiting for, but ``discard``.
        try:
            site.lingering.append(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            pass
        running = Running(site, pid, pidfd, status_read)
        running.outcome.times["fork"] = began
        return running

    def read_status(self, running: Running) -> bool:
        """Take what init has written; False at its end. At most 8 KiB are ever kept."""
        chunk = os.read(running.status, 4096)
        running.record = (running.record + chunk)[:8192]
        return bool(chunk)

    def kill(self, running: Running) -> None:
        """End every process of the sandbox, init last."""
        if running.site.group is not None:
            try:
                running.site.group.kill()
            except OSError:
                pass
        process.pidfd_signal(running.pidfd, 9)

    def reap(self, running: Running) -> Outcome:
        """Wait for init, whose end is the end of every process of its pid namespace; read the facts.

        Blocks until then; call it once init has reported or was killed.
        """
        while self.read_status(running):
            pass
        _, _, usage = os.wait4(running.pid, 0)
        outcome = running.outcome
        outcome.rusage = (usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024)
        _interpret(running.record, outcome)
        if running.site.group is not None:
            outcome.events = running.site.group.events(failed=outcome.status != 0)
        os.close(running.pidfd)
        os.close(running.status)
        return outcome

    def keep(self, site: Site, note: str) -> None:
        """Make the tops outlive this process: from here on a kill loses nothing of the command's work.

        The run's directory gets ``note`` and, where the tops lie on the sandbox's own file system, a
        mount of it. Commands that end within a moment never pay for this.
        """
        if site.kept:
            return
        os.makedirs(site.directory, 0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        handle = os.open(f"{site.directory}/note.json", flags, 0o600)
        try:
            os.write(handle, note.encode("utf-8", "surrogateescape"))
        finally:
            os.close(handle)
        site.kept = True
        if not site.spec.tops_on_disk and site.tops:
            os.makedirs(f"{site.directory}/scratch", 0o700, exist_ok=True)
            mounts.move_mount(site.scratch, mounts.AT_FDCWD, f"{site.directory}/scratch")

    def forget(self, site: Site) -> None:
        """Remove the run's directory with all that is in it."""
        if site.kept and not site.spec.tops_on_disk and site.tops:
            try:
                mounts.unmount(f"{site.directory}/scratch")
            except OSError:
                pass
        site.kept = False
        if site.directory:
            remove_tree(site.directory)
            try:
                os.rmdir(os.path.dirname(site.directory))
            except OSError:
                pass

    def discard(self, site: Site) -> None:
        """Let go of all that ``prepare`` made. Every process must be dead; tops are gone after this."""
        descriptors = [site.tree, site.scratch, *site.tops, *site.lingering]
        descriptors += [handle for handle, _ in site.joined]
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)
        site.tree = site.scratch = -1
        site.tops, site.joined, site.lingering = [], [], []
        if site.ruleset is not None:
            site.ruleset.close()
            site.ruleset = None
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
        for descriptor in [*self._templates.values(), *self._maps.values()]:
            os.close(descriptor)
        self._templates.clear()
        self._maps.clear()
        for parent in self.hierarchies.parents():
            cgroups.remove_leftovers(parent)


def _make_below_tmp(tree: int, target: str) -> None:
    """Make the mount point of a view that lies below /tmp, which is new and empty in each sandbox."""
    parts = target.split("/")
    if parts[0] != "tmp":
        return
    for depth in range(2, len(parts) + 1):
        try:
            os.mkdir("/".join(parts[:depth]), 0o755, dir_fd=tree)
        except FileExistsError:
            continue


def remove_tree(path: str) -> None:
    """Remove a directory that held a sandbox's files, whatever modes the sandbox gave them."""
    import shutil

    def open_up(function: object, name: str, _error: object) -> None:
        parent = os.path.dirname(name)
        os.chmod(parent, 0o700)
        if os.path.isdir(name) and not os.path.islink(name):
            os.chmod(name, 0o700)
            shutil.rmtree(name, ignore_errors=True)
        elif callable(function):
            try:
                function(name)
            except OSError:
                return

    if os.path.lexists(path):
        shutil.rmtree(path, onerror=open_up)


def _account_files(uid: int, gid: int) -> dict[str, str]:
    """A passwd and a group file in which the sandbox's uid has a name (node and ssh insist on one)."""
    return {
        "passwd": (
            "root:x:0:0:root:/root:/usr/sbin/nologin\n"
            "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
            f"sandbox:x:{uid}:{gid}:sandbox:/{_HOME}:/bin/bash\n"
        ),
        "group": f"root:x:0:\nnogroup:x:65534:\nsandbox:x:{gid}:\n",
    }


def _interpret(record: bytes, outcome: Outcome) -> None:
    """Read init's records: spawned, exec failure, bad directory, failed step, wait status."""
    for line in record.decode("utf-8", "surrogateescape").split("\n"):
        kind, *fields = line.split("\0")
        if kind == "S" and fields:
            outcome.spawned = True
            outcome.times["spawned"] = float(fields[0])
        elif kind == "W" and len(fields) == 2:
            outcome.status = int(fields[0])
            outcome.times["ended"] = float(fields[1])
        elif kind in ("X", "C", "F"):
            outcome.failure = (kind, *fields)
