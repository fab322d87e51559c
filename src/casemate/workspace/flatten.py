"""Several tops of an overlay made one: over the same directory it shows what all of them showed.

It follows the kernel's own lookup (fs/overlayfs/namei.c): a name is looked up from the newest top down; a
whiteout, a directory marked opaque or something that is no directory ends it; a renamed directory goes on
under its old name, beside itself or, where the attribute is a path, from the root of everything below.

Files are not copied but linked: the tops are frozen, so nobody writes to what they share. Directories are
made anew. The tops are hostile, and nothing in them is followed.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress

import msgspec

from casemate.errors import WorkspaceError
from casemate.sys.files import DIRECTORY, chmod_fd, descriptor_path, open_beneath, xattrs
from casemate.workspace.content import copy
from casemate.workspace.merged import open_content, read_link
from casemate.workspace.names import join, printable
from casemate.workspace.scan import MODE, unlock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

__all__ = ["flatten"]

_READ = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK
_DEPTH, _PATH = 256, 4000
#: What the apply step notes at the root of a top.
_APPLIED = "trusted.casemate.applied"


class _Spot(msgspec.Struct, frozen=True):
    """A directory of one of the tops."""

    top: int
    path: str


class _Parts(msgspec.Struct, frozen=True):
    """What a directory of the merged view is made of: spots, the newest first, and where its lower half is in
    the directory below all tops (None: it has none).
    """

    spots: tuple[_Spot, ...]
    base: str | None


class _Look:
    """One lookup of a directory's name through the tops."""

    __slots__ = ("name", "stop")

    def __init__(self, name: str) -> None:
        self.name = name  # with a slash in front: from the root of everything that is below
        self.stop = False


class _Unfinished(msgspec.Struct, frozen=True):
    """A directory that gets its attributes when it has been filled."""

    path: str
    parts: _Parts
    redirect: bytes | None = None
    opaque: bool = False


def flatten(tops: Sequence[int], target: int, *, prefix: str, redirects: bool) -> int:
    """Make the empty directory ``target`` what all ``tops`` (open, the newest first) are together.

    ``prefix`` and ``redirects`` as for ``scan``. Returns how many entries were looked at. Raises
    WorkspaceError (``session-too-deep``) for trees that no path reaches, and OSError.

    Preconditions: nobody writes to the tops.
    """
    work = _Flattening(tops, target, prefix, redirects)
    try:
        work.run()
    finally:
        work.lock()
    return work.seen


class _Flattening:
    def __init__(self, tops: Sequence[int], target: int, prefix: str, redirects: bool) -> None:
        self.tops, self.target, self.prefix, self.redirects = tops, target, prefix, redirects
        self.seen = 0
        self._super = os.geteuid() == 0
        self._roots = tuple(_Spot(number, "") for number in range(len(tops)))
        # Modes of the tops' directories as the command left them; and which are another now, so that we can
        # work in them.
        self._modes: dict[_Spot, int] = {}
        self._unlocked: list[_Spot] = []
        self._unfinished: list[_Unfinished] = []

    def run(self) -> None:
        """Do it."""
        root = _Parts(self._roots, "")
        self._unfinished.append(_Unfinished("", root))
        queue = [("", root)]
        while queue:
            path, parts = queue.pop()
            if path.count("/") > _DEPTH or len(os.fsencode(path)) > _PATH:
                raise WorkspaceError(
                    f"the layers hold a directory that is too deep to be merged: {printable(path[:60])}…",
                    code="session-too-deep",
                    hint="remove it by a command of the session, or roll back to a snapshot without it",
                )
            here = open_beneath(self.target, path or ".", DIRECTORY)
            try:
                self._directory(here, path, parts, queue)
            finally:
                os.close(here)
        for directory in reversed(self._unfinished):
            self._finish(directory)

    def lock(self) -> None:
        """Give the tops' directories back the modes that they had."""
        for spot in reversed(self._unlocked):
            with suppress(OSError):
                handle = open_beneath(self.tops[spot.top], spot.path or ".", DIRECTORY)
                try:
                    os.removexattr(descriptor_path(handle), MODE)
                    chmod_fd(handle, self._modes[spot])
                finally:
                    os.close(handle)

    def _directory(self, here: int, path: str, parts: _Parts, queue: list[tuple[str, _Parts]]) -> None:
        """Make the entries of one directory; directories among them are queued."""
        known: set[str] = set()
        whiteouts = self._is_merged(parts)
        for number, spot in enumerate(parts.spots):
            with self._reading(spot) as fd:
                xwhiteouts = xattrs(fd, self.prefix).get("opaque") == b"x"
                with os.scandir(fd) as listing:
                    for entry in listing:
                        name = entry.name
                        if name in known:
                            continue
                        known.add(name)
                        if entry.is_dir(follow_symlinks=False):
                            child = self._resolve(parts, number, name)
                            self._make_directory(here, join(path, name), parts, child)
                            queue.append((join(path, name), child))
                        elif not self._is_whiteout(fd, entry, xwhiteouts=xwhiteouts):
                            self._link(fd, here, name)
                        elif whiteouts:
                            os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=here)
        self.seen += len(known)

    @contextmanager
    def _reading(self, spot: _Spot) -> Generator[int, None, None]:
        """A directory of a top, open, whatever mode the command has given it; those above it have been."""
        handle = open_beneath(self.tops[spot.top], spot.path or ".", DIRECTORY)
        try:
            if spot not in self._modes:
                self._modes[spot] = unlock(handle)
                if stat.S_IMODE(os.fstat(handle).st_mode) != self._modes[spot]:
                    self._unlocked.append(spot)
            fd = os.open(".", _READ | os.O_CLOEXEC, dir_fd=handle)
        finally:
            os.close(handle)
        try:
            yield fd
        finally:
            os.close(fd)

    def _is_whiteout(self, fd: int, entry: os.DirEntry[str], *, xwhiteouts: bool) -> bool:
        facts = entry.stat(follow_symlinks=False)
        if stat.S_ISCHR(facts.st_mode):
            return facts.st_rdev == 0
        if not xwhiteouts or not stat.S_ISREG(facts.st_mode) or facts.st_size:
            return False
        with suppress(OSError):
            file = open_beneath(fd, entry.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                return "whiteout" in xattrs(file, self.prefix)
            finally:
                os.close(file)
        return False

    def _link(self, source: int, here: int, name: str) -> None:
        try:
            os.link(name, name, src_dir_fd=source, dst_dir_fd=here, follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
            _copy(source, here, name)

    def _make_directory(self, here: int, path: str, parts: _Parts, child: _Parts) -> None:
        name = path.rpartition("/")[2]
        os.mkdir(name, 0o700, dir_fd=here)
        natural = None if parts.base is None else join(parts.base, name)
        moved = child.base is not None and child.base != natural
        redirect = b"/" + os.fsencode(child.base) if moved and child.base is not None else None
        opaque = natural is not None and child.base is None
        self._unfinished.append(_Unfinished(path, child, redirect, opaque))

    def _finish(self, directory: _Unfinished) -> None:
        """Give a directory the attributes of its newest part, and those that say what it is made of now."""
        spots, path = directory.parts.spots, directory.path
        fd = open_beneath(self.target, path or ".", _READ)
        try:
            with self._reading(spots[0]) as newest:
                facts = os.fstat(newest)
                for name in os.listxattr(newest):
                    if not name.startswith(self.prefix) and name != MODE:
                        os.setxattr(fd, name, os.getxattr(newest, name))
            if directory.opaque:
                os.setxattr(fd, f"{self.prefix}opaque", b"y")
            if directory.redirect is not None:
                os.setxattr(fd, f"{self.prefix}redirect", directory.redirect)
            if not path:
                self._inherit(fd, _APPLIED, spots)
            elif directory.parts.base is not None:
                # Which one it was below all tops: the oldest part was copied from there.
                self._inherit(fd, f"{self.prefix}origin", spots[-1:])
            if self._super:
                os.fchown(fd, facts.st_uid, facts.st_gid)
            os.fchmod(fd, self._modes[spots[0]])
            os.utime(fd, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        finally:
            os.close(fd)

    def _is_merged(self, parts: _Parts) -> bool:
        """Whether there was a directory below all tops: the oldest part was copied from it then. In one that
        stands alone the kernel would list a whiteout, and nothing be there.
        """
        if parts.base is None:
            return False
        with self._reading(parts.spots[-1]) as oldest:
            return not parts.spots[-1].path or "origin" in xattrs(oldest, self.prefix)

    def _inherit(self, fd: int, name: str, spots: Sequence[_Spot]) -> None:
        """Take over an attribute that the first of several parts has."""
        for spot in spots:
            with self._reading(spot) as part, suppress(OSError):
                os.setxattr(fd, name, os.getxattr(part, name))
                return

    # -- looking up ----------------------------------------------------------------------------------

    def _resolve(self, parent: _Parts, first: int, name: str) -> _Parts:
        """What the directory ``name`` is made of, which part ``first`` of its parent is the first to have."""
        spots, base = parent.spots, parent.base
        found: list[_Spot] = []
        look = _Look(name)
        at = first
        while at < len(spots) and not look.stop:
            here = spots[at].top
            spot = self._look(spots[at], look)
            if spot is not None:
                found.append(spot)
            if look.name.startswith("/") and spots is not self._roots:
                spots, at = self._roots, here
            at += 1
        if look.stop:
            base = None
        elif look.name.startswith("/"):
            base = look.name[1:]
        elif base is not None:
            base = join(base, look.name)
        return _Parts(tuple(found), base)

    def _look(self, spot: _Spot, look: _Look) -> _Spot | None:
        """Look into one top; ``look`` gets the name for those below, or the word that there is nothing more.

        Every directory of a path counts, not only the last.
        """
        absolute = look.name.startswith("/")
        names = look.name[1:].split("/") if absolute else [look.name]
        at = "" if absolute else spot.path
        below: list[str] = []
        for number, name in enumerate(names):
            at = join(at, name)
            marks = self._marks(spot.top, at)
            if marks is None:  # something that is no directory, a whiteout least of all
                look.stop = True
                return None
            if not marks:
                look.name = "/".join((*([""] if absolute else []), *below, *names[number:]))
                return None
            below.append(name)
            redirect = marks.get("redirect", b"") if self.redirects else b""
            if marks.get("opaque") == b"y":
                look.stop = True
            elif redirect:
                look.stop = False
                parts = os.fsdecode(redirect).split("/")
                rooted = parts[0] == "" and len(parts) > 1
                if any(part in ("", ".", "..") for part in parts[rooted:]) or not (rooted or len(parts) == 1):
                    raise OSError(errno.EINVAL, "a redirection that the kernel would not write", at)
                below, absolute = (parts[1:], True) if rooted else ([*below[:-1], *parts], absolute)
        look.name = "/".join((*([""] if absolute else []), *below))
        return _Spot(spot.top, at)

    def _marks(self, top: int, path: str) -> dict[str, bytes] | None:
        """Overlayfs' attributes of a directory, never none at all; empty if nothing is there, None if
        something else is.
        """
        try:
            handle = open_beneath(self.tops[top], path, os.O_PATH | os.O_NOFOLLOW)
        except FileNotFoundError:
            return {}
        except NotADirectoryError:
            return None
        try:
            if not stat.S_ISDIR(os.fstat(handle).st_mode):
                return None
        finally:
            os.close(handle)
        with self._reading(_Spot(top, path)) as fd:
            return {"": b"", **xattrs(fd, self.prefix)}


def _copy(source: int, here: int, name: str) -> None:
    """Copy an entry that has as many names as its file system allows."""
    facts = os.stat(name, dir_fd=source, follow_symlinks=False)
    times = (facts.st_atime_ns, facts.st_mtime_ns)
    if stat.S_ISLNK(facts.st_mode):
        os.symlink(read_link(source, name), name, dir_fd=here)
    elif stat.S_ISREG(facts.st_mode):
        old = open_content(source, name)
        new = open_beneath(here, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            copy(old, new, facts.st_size, facts.st_blocks)
            for attribute in os.listxattr(old):
                os.setxattr(new, attribute, os.getxattr(old, attribute))
            if os.geteuid() == 0:
                os.fchown(new, facts.st_uid, facts.st_gid)
            os.fchmod(new, stat.S_IMODE(facts.st_mode))
        finally:
            os.close(old)
            os.close(new)
    else:
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK), name)
    os.utime(name, ns=times, dir_fd=here, follow_symlinks=False)
