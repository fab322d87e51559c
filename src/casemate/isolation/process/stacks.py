"""Overlays over several layers: what the commands of a session see, and where their changes stay.

A session keeps its layers in a store on disk: frozen tops, and one live top that takes what the present
command writes. The store enters the sandbox as one mount, as root an idmapped one: the owner that files have
in the store appears as the uid of the run, which is another one each time.

What earlier commands left in the layers is hostile. Nothing in it is followed here, and what the policy hides
is taken out below the layers, by whiteouts right above the workspace: a cover on a path would miss a
directory that an earlier command has renamed.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from casemate.errors import ProtectionUnavailable, SandboxError
from casemate.isolation.process.ids import STORED
from casemate.sys import mounts, namespaces
from casemate.sys.files import open_beneath
from casemate.sys.process import lives, mark
from casemate.sys.trees import make_directory, remove_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.isolation.process.spec import Spec, Stack

__all__ = [
    "HOME_TOP", "IdMaps", "Place", "Stacked", "enter", "inhabitant", "mount_overlay", "nothing", "owners",
]  # fmt: skip

#: What HOME is called in a layer.
HOME_TOP = "home"
#: In HOME: where the gate puts what the sandbox is to read.
_GATES = ".casemate"
#: In a live layer: begins the name of a directory that says who runs in it, and holds what its overlays need.
_RUN = "run "
_FLAGS = mounts.NOSUID | mounts.NODEV
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


class IdMaps:
    """User namespaces for id-mapped mounts, remembered between runs; each is a descriptor."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, int], int] = {}

    def get(self, owner: tuple[int, int] | None, uid: int, *, groups: bool = True) -> int:
        """One in which ``owner`` is ``uid``; None: the owner of what a session keeps. Without ``groups`` no
        group is any. Raises OSError.
        """
        one, other = owner if owner is not None else (-1, -1)
        key = (one, other if groups else -2, uid)
        made = self._made.pop(key, -1)
        if made < 0:
            pairs = owners(uid), owners(uid)
            if owner is not None:
                pairs = [(owner[0], uid)], [(owner[1], uid)] if groups else namespaces.NO_GROUPS
            made = namespaces.id_map(*pairs)
        self._made[key] = made  # the last in the order
        return made

    def trim(self, most: int = 32) -> None:
        """Let go of those that nobody has asked for longest. A mount that was made with one keeps it alive.

        ``Preconditions:`` none that ``get`` has returned is still to be used.
        """
        while len(self._made) > most:
            os.close(self._made.pop(next(iter(self._made))))


class Place:
    """A directory that an overlay is made of: its descriptor, and where it is attached, if it is."""

    __slots__ = ("handle", "path")

    def __init__(self, handle: int, path: str) -> None:
        self.handle = handle
        self.path = path


def mount_overlay(
    lowers: list[Place], top: Place | None, work: Place | None, *, rootless: bool, attached: bool
) -> int:
    """An overlay, detached; ``lowers`` from the uppermost down. ``attached``: layers are given as paths.

    Raises OSError.
    """
    layers: list[tuple[str, str | int]]
    if not attached:
        layers = [("lowerdir+", place.handle) for place in lowers]
    elif len(lowers) == 1:
        layers = [("lowerdir", _escaped(lowers[0].path))]
    elif mounts.layers_by_path():
        layers = [("lowerdir+", place.path) for place in lowers]
    else:
        return _joined(lowers, top, work, rootless=rootless)
    if top is not None and work is not None:
        for name, place in (("upperdir", top), ("workdir", work)):
            layers.append((name, _escaped(place.path) if attached else place.handle))
    return mounts.filesystem("overlay", _FLAGS, layers, **_words(top is not None, rootless=rootless))


def _words(volatile: bool, *, rootless: bool) -> dict[str, str | bool]:
    if rootless:
        return {"volatile": volatile, "userxattr": True}
    return {"volatile": volatile, "redirect_dir": "on", "metacopy": "off", "index": "off"}


def _joined(lowers: list[Place], top: Place | None, work: Place | None, *, rootless: bool) -> int:
    """All layers in one option, as kernels before 6.7 want it: relative to where they lie, since there is
    little room.
    """
    base = os.path.commonpath([place.path for place in lowers])
    parts = {"lowerdir": lowers}
    if top is not None and work is not None:
        parts |= {"upperdir": [top], "workdir": [work]}
    options: list[str] = []
    for name, places in parts.items():
        options.append(f"{name}={':'.join(_escaped(os.path.relpath(one.path, base)) for one in places)}")
    for key, value in _words(top is not None, rootless=rootless).items():
        options += [key if value is True else f"{key}={value}"] if value else []
    here = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    place = f"{base}/joined"
    os.mkdir(place, 0o700)
    try:
        os.chdir(base)
        return mounts.overlay_of_paths(place, _FLAGS, ",".join(options))
    finally:
        os.fchdir(here)
        os.close(here)
        os.rmdir(place)


def _escaped(path: str) -> str:
    return path.replace("\\", "\\\\").replace(":", "\\:")


def nothing(scratch: int, directory: str) -> Place:
    """An empty directory of a sandbox's private file system, for the caller to close."""
    with suppress(FileExistsError):
        os.mkdir("nothing", 0o755, dir_fd=scratch)
    return Place(os.open("nothing", _OPEN, dir_fd=scratch), f"{directory}/scratch/nothing")


def owners(uid: int) -> list[tuple[int, int]]:
    """On disk, seen: what ``STORED`` owns is the sandbox's; root's own, such as whiteouts, stays root's."""
    return [(0, 0), (STORED, uid)]


def enter(stack: Stack, pid: int) -> str:
    """Note who is about to use the live top; returns what the run has to remove in the end.

    Raises SandboxError (``session-busy``) if somebody else still uses it.
    """
    layer = f"{stack.store}/{stack.live}"
    if inhabitant(layer):
        raise SandboxError(
            "a command of the session is still there", code="session-busy", hint="wait for its end"
        )
    place = f"{layer}/{_RUN}{mark(pid)}"
    os.mkdir(place, 0o700)
    return place


def inhabitant(layer: str) -> str:
    """The pid of the command that runs in a live layer, if one does; what those that were killed left there
    is removed.

    Whoever starts commands holds the session's lock, but the kernel drops that with its holder, a moment
    before the last process of its sandbox is gone.
    """
    found = ""
    for name in os.listdir(layer):
        if not name.startswith(_RUN):
            continue
        if lives(name.removeprefix(_RUN)):
            found = name.split(" ")[1]
        else:
            remove_tree(f"{layer}/{name}")
    return found


class Stacked:
    """Builds the overlays of one sandbox of a session.

    ``id_map`` is a user namespace that maps ``owners``, or -1; ``run`` comes from ``enter``. ``directory`` is
    the run's own, for what has to be attached; ``attached`` gets what the run has to let go of then.
    """

    def __init__(
        self, spec: Spec, scratch: int, directory: str, id_map: int, *, run: str,
        give: tuple[int, int] | None, attached: list[str] | None,
    ) -> None:  # fmt: skip
        assert spec.stack is not None  # noqa: S101
        self._spec, self._stack = spec, spec.stack
        self._scratch, self._directory = scratch, directory
        self._give, self._attached = give, attached
        self._run = os.path.basename(run)
        self._open: list[int] = []
        self._mount = mounts.clone_tree(mounts.AT_FDCWD, self._stack.store)
        try:
            mounts.restrict(self._mount, _FLAGS)
            if id_map >= 0:
                mounts.idmap(self._mount, id_map)
            if attached is not None:
                make_directory(f"{directory}/store")
                mounts.attach(self._mount, f"{directory}/store")
                attached.append(f"{directory}/store")
        except OSError as error:
            os.close(self._mount)
            raise ProtectionUnavailable(
                f"cannot show the layers of the session to the sandbox's own uid: {error}",
                hint="keep Casemate's state on ext4, xfs, btrfs or (Linux 6.3) tmpfs",
                protection="own uid per sandbox",
                needed="id-mapped mounts on the file system of Casemate's state (Linux 5.19)",
                found=str(error),
            ) from error

    def close(self) -> None:
        """Let go of the layers; the overlays hold them themselves."""
        for descriptor in (*self._open, self._mount):
            os.close(descriptor)
        self._open.clear()

    def homes(self, mount_points: list[str]) -> list[tuple[int, str]]:
        """HOME with directories to mount on, and what is mounted in it: mounts with their paths in HOME.

        What the policy puts into HOME lies below all layers, so that it is always the present one. What the
        gate wants read lies above them: no earlier command can have replaced it.

        Raises SandboxError (``session-home``).
        """
        bottom = Place(self._opened("home", self._scratch), f"{self._directory}/scratch/home")
        home = self._overlay(HOME_TOP, [*self._frozen(HOME_TOP), bottom], writable=True)
        found = [(home, "")]
        try:
            for path in mount_points:
                self._make_directories(home, path)
            if self._spec.capture is not None:
                self._make_directories(home, _GATES)
                with suppress(FileExistsError):
                    os.mkdir(f"home/{_GATES}", 0o755, dir_fd=self._scratch)
                found.append((mounts.clone_tree(self._scratch, f"home/{_GATES}"), _GATES))
        except BaseException:
            for part, _ in found:
                os.close(part)
            raise
        return found

    def _make_directories(self, home: int, path: str) -> None:
        """Make a mount point in HOME, where earlier commands may have put anything; no link is followed."""
        parts = path.split("/")
        for depth in range(1, len(parts) + 1):
            name = "/".join(parts[:depth])
            try:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=home)
                    if self._give is not None:
                        os.chown(name, *self._give, dir_fd=home)
                os.close(open_beneath(home, name, _OPEN))
            except OSError as error:
                raise SandboxError(
                    f"~/{name} of the session is no directory, but ~/{path} has to be one: {error}",
                    code="session-home",
                    hint="remove it by a command of the session without a cache and network",
                    path=name,
                ) from error

    def view(self, number: int, lower: int) -> int:
        """A view over ``lower``, a detached mount of the host's directory."""
        view = self._spec.views[number]
        lowers = self._frozen(view.top)
        if not view.writable:
            with suppress(FileNotFoundError):
                lowers.insert(0, self._place(self._stack.live, view.top))
        mask = self._mask(number, lower)
        if mask is not None:
            lowers.append(mask)
        if not view.writable:
            # It may be the only layer, and sockets in it must lead nowhere: see ``showing``.
            lowers.append(nothing(self._scratch, self._directory))
            self._open.append(lowers[-1].handle)
        if self._attached is None:
            return self._overlay(view.top, [*lowers, Place(lower, "")], writable=view.writable)
        place = f"{self._directory}/lower{number}"
        make_directory(place)
        mounts.attach(lower, place)
        try:
            return self._overlay(view.top, [*lowers, Place(lower, place)], writable=view.writable)
        finally:
            mounts.unmount(place)
            os.rmdir(place)

    def _overlay(self, top: str, lowers: list[Place], *, writable: bool) -> int:
        upper = work = None
        if writable:
            # The top's own mode is what the merged root directory shows.
            shown = os.fstat(lowers[0].handle).st_mode & 0o777
            upper = self._made(self._stack.live, top, shown)
            work = self._made(f"{self._stack.live}/{self._run}", top, 0o700)
        return mount_overlay(
            lowers, upper, work, rootless=self._give is None, attached=self._attached is not None
        )

    def _frozen(self, top: str) -> list[Place]:
        """The frozen tops of one view, the newest first; a layer need not have one for each."""
        found: list[Place] = []
        for layer in self._stack.homes if top == HOME_TOP else self._stack.layers:
            with suppress(FileNotFoundError):
                found.append(self._place(layer, top))
        return found

    def _place(self, layer: str, name: str) -> Place:
        path = f"{layer}/{name}"
        return Place(self._opened(path, self._mount), f"{self._directory}/store/{path}")

    def _opened(self, path: str, base: int) -> int:
        handle = os.open(path, _OPEN, dir_fd=base)
        self._open.append(handle)
        return handle

    def _made(self, directory: str, name: str, mode: int) -> Place:
        """A directory of the live layer that is the sandbox's own, made if need be."""
        path = f"{directory}/{name}"
        with suppress(FileExistsError):
            os.mkdir(path, 0o700, dir_fd=self._mount)
            if self._give is None:
                os.chmod(path, mode, dir_fd=self._mount)
        place = self._place(directory, name)
        if self._give is not None and os.fstat(place.handle).st_uid != self._give[0]:
            os.chmod(path, mode, dir_fd=self._mount)
            os.chown(path, *self._give, dir_fd=self._mount)
        return place

    # -- what is hidden ------------------------------------------------------------------------------

    def _mask(self, number: int, lower: int) -> Place | None:
        """A layer right above the host's directory that takes out what the policy hides; None for nothing."""
        prefix = f"{self._spec.views[number].target}/"
        hidden = {path.removeprefix(prefix) for path in self._spec.hide if path.startswith(prefix)}
        name = f"mask{number}"
        made: dict[str, os.stat_result] = {}
        for path in sorted(hidden):
            if not any(path.startswith(f"{above}/") for above in hidden):
                self._hide(name, path, lower, made)
        if not made:
            return None
        for path in reversed(made):
            facts = made[path]
            os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns), dir_fd=self._scratch)
        return Place(self._opened(name, self._scratch), f"{self._directory}/scratch/{name}")

    def _hide(self, name: str, path: str, lower: int, made: dict[str, os.stat_result]) -> None:
        """Whiteout of one path, with the directories that it is in; nothing where nothing is, or a link."""
        parts = path.split("/")
        above = [os.fstat(lower)]
        for depth in range(1, len(parts) + 1):
            try:
                facts = os.stat("/".join(parts[:depth]), dir_fd=lower, follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                return  # the apply step holds back whatever is made there
            last = depth == len(parts)
            if stat.S_ISLNK(facts.st_mode) or not (last or stat.S_ISDIR(facts.st_mode)):
                return  # a link on the way to what is hidden: the apply step keeps it as it is
            above.append(facts)
        for depth, facts in enumerate(above[:-1]):
            directory = "/".join((name, *parts[:depth]))
            if directory not in made:
                os.mkdir(directory, 0o700, dir_fd=self._scratch)
                if self._give is not None:
                    os.chown(directory, facts.st_uid, facts.st_gid, dir_fd=self._scratch)
                os.chmod(directory, stat.S_IMODE(facts.st_mode), dir_fd=self._scratch)
                made[directory] = facts
        os.mknod(f"{name}/{path}", stat.S_IFCHR, os.makedev(0, 0), dir_fd=self._scratch)
