"""Everything of a sandbox that exists before its process does: group, file systems, rules.

What belongs to one sandbox alone is made here, each part a detached mount held by a descriptor; the child
attaches the parts to its own copy of the template's mount namespace. What all sandboxes of a plan share,
the read-only root, is that template: a mount namespace built once.
"""

from __future__ import annotations

import _socket
import errno
import os
import stat
from contextlib import suppress

from casemate.errors import ProtectionUnavailable, SandboxError
from casemate.isolation.process import filter as seccomp
from casemate.isolation.process import seal, showing, stacks
from casemate.isolation.process.private import HOME, account_files, make_mount_point, new_scratch
from casemate.isolation.process.template import Templates
from casemate.isolation.process.trees import make_directory
from casemate.sys import cgroups, landlock, mounts, namespaces
from casemate.sys.bpf import Prepared as PreparedFilter
from casemate.sys.landlock import EVERYTHING, READ, WRITE_DEVICE, Ruleset
from casemate.sys.native import machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.isolation.process.direct import DirectSite
    from casemate.isolation.process.spec import Direct, Spec, View
    from casemate.isolation.process.template import Template
    from casemate.sys.capture import Capture

__all__ = ["HOME", "Site", "SiteMaker"]

_FLAGS = mounts.NOSUID | mounts.NODEV
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_HIDDEN = mounts.RDONLY | mounts.NOSUID | mounts.NODEV | mounts.NOEXEC


class Site:
    """One sandbox's surroundings. Every descriptor in it is closed by ``Launcher.discard``."""

    __slots__ = (
        "attached",
        "broker",
        "capture",
        "direct",
        "directory",
        "filter",
        "gid",
        "group",
        "joined",
        "kept",
        "lingering",
        "listener",
        "network",
        "parts",
        "pid",
        "places",
        "pts",
        "ruleset",
        "scratch",
        "spec",
        "template",
        "tops",
        "uid",
        "work",
    )

    def __init__(self, spec: Spec, template: Template, uid: int, gid: int, directory: str) -> None:
        self.spec = spec
        self.template = template
        self.uid = uid
        self.gid = gid
        self.directory = directory  # this run's own, on disk; made when something has to lie there
        self.attached: list[str] = []  # where parts of it are in the launcher's own mount namespace
        self.kept = False  # whether the tops outlive this process by now
        self.scratch = -1
        self.pts = -1
        self.parts: list[tuple[int, str]] = []  # detached mount, place inside
        self.work = ""  # what a run of a session has in the session's layers, for as long as it lasts
        self.pid = 0  # of the process that will be its init, where it is there before the site is made
        self.places: list[str] = []  # of its tops: below the scratch, or absolute
        self.tops: list[int] = []  # those, open; once it runs only when it has ended
        self.group: cgroups.Group | None = None
        self.joined: list[tuple[int, int]] = []  # namespaces made ahead: descriptor, kind
        self.lingering: list[int] = []
        self.capture: Capture | None = None  # the gate's listeners inside
        self.direct: DirectSite | None = None
        self.broker = -1  # the broker's end of its socket to init, until there is a broker
        self.listener = -1  # a unix socket inside, for whoever serves it
        self.network = -1  # its network namespace, where it could not be looked up any more when needed
        self.ruleset: Ruleset | None = None
        self.filter: PreparedFilter | None = None

    @property
    def on_disk(self) -> list[str]:
        """The directories on disk that its writes go to."""
        stack = self.spec.stack
        if stack is not None:
            return [f"{stack.store}/{stack.live}"]
        return [self.directory] if self.spec.tops_on_disk and self.places else []

    def open_tops(self) -> None:
        """Open its tops again. No process of the sandbox can reach their names. Raises OSError."""
        for place in self.places[len(self.tops) :]:
            self.tops.append(os.open(place, _DIRECTORY, dir_fd=self.scratch))

    def release(self, *, waiting: bool = False) -> None:
        """Close what only the making of it needs. ``Preconditions:`` its process has what it takes of it.

        Mounts, namespaces and rules live on with that process. With ``waiting`` its command may still be
        given a terminal.
        """
        parts = [(part, place) for part, place in self.parts if waiting and part == self.pts]
        unneeded = [part for part, _ in (*self.parts, *self.joined) if not (waiting and part == self.pts)]
        for descriptor in (*unneeded, *self.tops, *self.lingering):
            os.close(descriptor)
        self.parts, self.joined, self.tops, self.lingering = parts, [], [], []
        if not parts:
            self.pts = -1
        if self.ruleset is not None:
            self.ruleset.close()
            self.ruleset = None


class SiteMaker:
    """Makes the parts of sites; remembers templates, filters and id maps between runs.

    ``runtime`` is a private directory on which a new root is built (in another mount namespace). With
    ``attached`` parts are attached below the run's directory while they are made, as kernels before 6.15
    need it; the host's mount table then shows them for as long as the sandbox lives.
    """

    def __init__(
        self, hierarchies: cgroups.Hierarchies, runtime: str, *, rootless: bool, attached: bool | None = None
    ) -> None:
        self.rootless = rootless
        self.attached = not mounts.detached_trees() if attached is None else attached
        # Without the pid namespace's switch (Linux 6.3; not for the unprivileged) the filter does it.
        self.strict_memfd = rootless or not os.path.exists("/proc/sys/vm/memfd_noexec")
        self.hierarchies = hierarchies
        self._landlock = landlock.abi()
        self._own = (os.geteuid(), os.getegid())
        self._templates = Templates(runtime, rootless=rootless, attached=self.attached)
        self._filters: dict[str, PreparedFilter] = {}
        self._maps = stacks.IdMaps()

    def template(self, spec: Spec, uid: int) -> Template:
        """The template of a spec; built on first use, while what a site of ``uid`` takes is made ready."""
        return self._templates.get(spec, lambda: self._make_ready(spec, uid))

    def _make_ready(self, spec: Spec, uid: int) -> None:
        """Filter and id maps: they take as long as the root, which another process builds at the time."""
        self.filter(spec)
        if not self.rootless:
            # What fails here fails again where the view is made, which says whose map it was.
            with suppress(OSError):
                for view in spec.views:
                    if view.owner is not None:
                        self._maps.get(view.owner, uid, groups=showing.grouped(spec, view))
                if spec.stack is not None:
                    self._maps.get(None, uid)

    def filter(self, spec: Spec) -> PreparedFilter:
        """The seccomp program of a spec, ready to be installed."""
        key = ",".join([*spec.words, "direct" if spec.direct else ""])
        if key not in self._filters:
            words = frozenset(spec.words) & seccomp.WORDS
            program = seccomp.build(
                machine(), words=words, strict_memfd=self.strict_memfd, direct=spec.direct is not None
            )
            self._filters[key] = PreparedFilter(program)
        return self._filters[key]

    def close(self) -> None:
        """Let templates and id maps go."""
        self._templates.close()
        self._maps.trim(0)

    # -- the steps -----------------------------------------------------------------------------------

    def make(self, site: Site, name: str) -> None:
        """Fill in the site. Raises SandboxError, ProtectionUnavailable or OSError; discard it then."""
        self._maps.trim()
        site.filter = self.filter(site.spec)
        self._make_group(site, name)
        self._make_private_parts(site)
        below_home = [target for _, target in site.spec.binds if target.startswith(f"{HOME}/")]
        for target in below_home:
            self._make_directories(site, "home" + target.removeprefix(HOME))
        if site.spec.stack is not None:
            self._make_stacked(site, below_home)
        else:
            for number in range(len(site.spec.views)):
                self._make_view(site, number)
        for source, target in site.spec.binds:
            part = self._host_directory(site, source, self._own)
            self._add(site, part, target)
        for path in site.spec.sockets:
            self._show_socket(site, path)
        if site.spec.direct is not None:
            self._make_direct(site, site.spec.direct)

    def _show_socket(self, site: Site, path: str) -> None:
        """A socket of the host: its owner appears as the sandbox, so that its mode means the same inside."""
        facts = os.stat(path)
        if not stat.S_ISSOCK(facts.st_mode):
            raise SandboxError(f"{path} is no socket any more", code="socket-gone", path=path)
        part = self._host_directory(site, path, (facts.st_uid, facts.st_gid))
        site.parts.append((part, path))
        make_mount_point(site.scratch, path, directory=False)

    def _make_direct(self, site: Site, wanted: Direct) -> None:
        """The writable mount of the workspace, for its broker; covers over what the other leaves usable."""
        from casemate.isolation.process import direct

        view = next(view for view in site.spec.views if view.target == wanted.target)
        tree = self._host_directory(site, view.source, view.owner)
        site.direct = direct.DirectSite(wanted, tree, nested=not self.attached)
        for path in direct.special_files(tree):
            self._hide(site, tree, path, f"{wanted.target}/{path}")
        site.direct.set_beyond(wanted, (target for _, target in site.parts))

    def make_namespaces(self, site: Site) -> None:
        """Make network, IPC and UTS namespaces ahead of the process that will enter them."""
        spec = site.spec
        network = not spec.network_host
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)

        def setup() -> None:
            namespaces.set_hostname(spec.hostname)
            if network:
                namespaces.loopback_up()
            if spec.capture is not None:
                seal.send_capture(theirs.fileno(), spec.capture, root=not self.rootless)

        try:
            kinds = namespaces.IPC | namespaces.UTS | (namespaces.NET if network else 0)
            made = namespaces.make(kinds, setup)
            site.joined = [(descriptor, kind) for kind, descriptor in made.items()]
            if spec.capture is not None:
                site.capture = seal.receive_capture(ours)
        finally:
            ours.close()
            theirs.close()

    def listen(self, site: Site, path: str) -> int:
        """A unix socket that listens below HOME, the sandbox's own; serving it is up to the caller."""
        self._make_directories(site, os.path.dirname(f"home/{path}"))
        endpoint = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        try:
            endpoint.bind(f"/proc/self/fd/{site.scratch}/home/{path}")
            self._give(site, f"home/{path}")
            endpoint.listen(16)
        except BaseException:
            endpoint.close()
            raise
        return endpoint.detach()

    def write_late(self, site: Site, files: dict[str, str]) -> None:
        """Put files below HOME of a sandbox that may be sealed already, in which no command runs yet."""
        for path, content in files.items():
            self._make_directories(site, os.path.dirname(f"home/{path}"))
            self._write(site, f"home/{path}", content, 0o444, give=True)

    def _make_group(self, site: Site, name: str) -> None:
        spec = site.spec
        if not self.hierarchies.base:
            return
        try:
            limits = cgroups.Limits(spec.memory, spec.pids, spec.cpu)
            site.group = cgroups.Group(self.hierarchies, name, limits)
        except OSError as error:
            raise ProtectionUnavailable(
                f"cannot make a control group: {error}",
                hint="run `casemate doctor`",
                protection="limits of scope tree",
                needed="a writable control group",
                found=str(error),
            ) from error

    def _make_private_parts(self, site: Site) -> None:
        """/tmp, /dev/shm, HOME and the account files on one small file system; a /dev/pts."""
        spec = site.spec
        if spec.landlock and self._landlock:
            site.ruleset = Ruleset(self._landlock)
            site.ruleset.allow(site.template.tree, READ)
            site.ruleset.allow(site.template.dev, READ | WRITE_DEVICE)
        scratch = site.scratch = new_scratch(spec, site.directory)
        if self.attached:
            make_directory(f"{site.directory}/scratch")
            mounts.attach(scratch, f"{site.directory}/scratch")
            site.attached.append(f"{site.directory}/scratch")
        places = [("tmp", 0o1777, "/tmp"), ("shm", 0o1777, "/dev/shm"), ("home", 0o700, HOME)]
        if any(view.target.startswith("/var/tmp/") for view in spec.views):
            places.append(("vartmp", 0o1777, "/var/tmp"))  # no link to /tmp then: see the plan
        for name, mode, target in places:
            os.mkdir(name, mode, dir_fd=scratch)
            if mode & 0o1000:
                os.chmod(name, mode, dir_fd=scratch)
            else:
                self._give(site, name)
            if name != "home" or spec.stack is None:
                self._add(site, mounts.clone_tree(scratch, name), target)
        for path, content in spec.home.items():
            self._make_directories(site, os.path.dirname(f"home/{path}"))
            self._write(site, f"home/{path}", content, 0o600, give=True)
        for name, content in account_files(site.uid, site.gid).items():
            self._write(site, name, content, 0o444)
            part = mounts.clone_tree(scratch, name)
            mounts.restrict(part, mounts.RDONLY | _FLAGS)
            site.parts.append((part, f"/etc/{name}"))
        site.pts = mounts.filesystem(
            "devpts",
            mounts.NOSUID | mounts.NOEXEC,
            ptmxmode="0666",
            mode="0620",
            uid=str(site.uid),
            gid=str(site.gid),
        )
        self._add(site, site.pts, "/dev/pts")

    def _add(self, site: Site, part: int, target: str) -> None:
        """A part that the sandbox may write to."""
        site.parts.append((part, target))
        if site.ruleset is not None:
            site.ruleset.allow(part, EVERYTHING)

    def _give(self, site: Site, name: str) -> None:
        if not self.rootless:
            os.chown(name, site.uid, site.gid, dir_fd=site.scratch)

    def _write(self, site: Site, name: str, content: str, mode: int, *, give: bool = False) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        handle = os.open(name, flags, mode, dir_fd=site.scratch)
        try:
            os.write(handle, content.encode("utf-8", "surrogateescape"))
            if give and not self.rootless:
                os.fchown(handle, site.uid, site.gid)
        finally:
            os.close(handle)

    def _make_directories(self, site: Site, path: str) -> None:
        """Make a directory below HOME and its parents, the sandbox's own."""
        parts = path.split("/")
        for depth in range(2, len(parts) + 1):
            name = "/".join(parts[:depth])
            try:
                os.mkdir(name, 0o700, dir_fd=site.scratch)
            except FileExistsError:
                continue
            self._give(site, name)

    # -- views ---------------------------------------------------------------------------------------

    def _make_lower(self, site: Site, number: int) -> int:
        view = site.spec.views[number]
        lower = self._host_directory(site, view.source, view.owner, groups=showing.grouped(site.spec, view))
        make_mount_point(site.scratch, view.target, directory=stat.S_ISDIR(os.fstat(lower).st_mode))
        return lower

    def _make_stacked(self, site: Site, below_home: list[str]) -> None:
        """HOME, with mount points in it, and the views of a session, over its layers."""
        spec, stack = site.spec, site.spec.stack
        assert stack is not None  # noqa: S101
        if not site.pid:
            raise SandboxError("a session's sandbox cannot be made ahead", code="bad-request")
        site.work = stacks.enter(stack, site.pid)
        site.kept = True  # its tops lie where a kill does not reach them, and belong to no single run
        stacked = stacks.Stacked(
            spec, site.scratch, site.directory, -1 if self.rootless else self._maps.get(None, site.uid),
            run=site.work, give=None if self.rootless else (site.uid, site.gid),
            attached=site.attached if self.attached else None,
        )  # fmt: skip
        try:
            for part, path in stacked.homes([target.removeprefix(f"{HOME}/") for target in below_home]):
                self._add(site, part, f"{HOME}/{path}" if path else HOME)
            for number, view in enumerate(spec.views):
                if not view.top:
                    self._make_view(site, number)
                    continue
                lower = self._make_lower(site, number)
                part = stacked.view(number, lower)
                os.close(lower)
                if view.writable:
                    self._add(site, part, view.target)
                else:
                    mounts.restrict(part, mounts.RDONLY)
                    site.parts.append((part, view.target))
        finally:
            stacked.close()

    def _make_view(self, site: Site, number: int) -> None:
        view = site.spec.views[number]
        lower = self._make_lower(site, number)
        if not view.writable:
            part = self._read_only(site, view, lower)
            site.parts.append((part, view.target))
        else:
            try:
                top, work = self._make_top(site, number)
                part = self._overlay(site, number, lower, top, work)
                os.close(work)
            finally:
                os.close(lower)
            self._add(site, part, view.target)
        for path in site.spec.hide:
            if path.startswith(f"{view.target}/"):
                self._hide(site, part, path.removeprefix(f"{view.target}/"), path)

    def _read_only(self, site: Site, view: View, lower: int) -> int:
        """A view without a top; as root its id map is what keeps sockets in it from leading anywhere."""
        directory = stat.S_ISDIR(os.fstat(lower).st_mode)
        if self.rootless and directory and not showing.grouped(site.spec, view):
            return showing.layered_view(
                view.source, lower, site.scratch, site.directory, attached=self.attached
            )
        mounts.restrict(lower, mounts.RDONLY)
        return lower

    def _overlay(self, site: Site, number: int, lower: int, top: int, work: int) -> int:
        place = f"{site.directory}/lower{number}"
        base = site.directory if site.spec.tops_on_disk else f"{site.directory}/scratch"
        if self.attached:
            # Before 6.13 layers are paths; the overlay takes mounts of its own from them.
            make_directory(place)
            mounts.attach(lower, place)
        try:
            return stacks.mount_overlay(
                [stacks.Place(lower, place)],
                stacks.Place(top, f"{base}/up{number}"), stacks.Place(work, f"{base}/work{number}"),
                rootless=self.rootless, attached=self.attached,
            )  # fmt: skip
        finally:
            if self.attached:
                mounts.unmount(place)
                os.rmdir(place)

    def _make_top(self, site: Site, number: int) -> tuple[int, int]:
        """Make the two directories of an overlay's top; return them open."""
        prefix = ""
        if site.spec.tops_on_disk:
            prefix = f"{site.directory}/"
            make_directory(site.directory)
        # The top's own mode is what the merged root directory shows.
        shown = os.stat(site.spec.views[number].source).st_mode & 0o777
        for name in (f"{prefix}up{number}", f"{prefix}work{number}"):
            os.mkdir(name, 0o700, dir_fd=site.scratch)
            os.chmod(name, shown, dir_fd=site.scratch)
            self._give(site, name)
        site.places.append(f"{prefix}up{number}")
        site.open_tops()
        return site.tops[-1], os.open(f"{prefix}work{number}", _DIRECTORY, dir_fd=site.scratch)

    def _host_directory(
        self, site: Site, source: str, owner: tuple[int, int] | None, *, groups: bool = True
    ) -> int:
        """A detached mount of a host directory in which ``owner``'s files appear as the sandbox's."""
        part = mounts.clone_tree(mounts.AT_FDCWD, source)
        try:
            mounts.restrict(part, _FLAGS)
            if owner is not None and not self.rootless:
                mounts.idmap(part, self._maps.get(owner, site.uid, groups=groups))
        except OSError as error:
            os.close(part)
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN):
                raise  # the host has run out of something: the file system is not to blame
            raise ProtectionUnavailable(
                f"cannot show {source} to the sandbox's own uid: {error}",
                hint="its file system takes no id-mapped mounts; ext4, xfs, btrfs and tmpfs do",
                protection="own uid per sandbox",
                needed="id-mapped mounts on the workspace's file system (Linux 5.12)",
                found=str(error),
            ) from error
        return part

    def _hide(self, site: Site, view: int, inside: str, target: str) -> None:
        """Cover what a view shows by something empty that nobody may open."""
        try:
            mode = os.stat(inside, dir_fd=view, follow_symlinks=False).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return  # the apply step holds back whatever is made there
        if stat.S_ISLNK(mode):
            return  # a link on the way to what is hidden: the apply step keeps it as it is
        directory = stat.S_ISDIR(mode)
        name = "hidden-directory" if directory else "hidden-file"
        try:
            if directory:
                os.mkdir(name, 0, dir_fd=site.scratch)
            else:
                self._write(site, name, "", 0)
        except FileExistsError:
            pass
        cover = mounts.clone_tree(site.scratch, name)
        mounts.restrict(cover, _HIDDEN)
        site.parts.append((cover, target))
