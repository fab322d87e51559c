"""How directories of the host are shown so that no socket in them leads to a program outside.

A read-only mount keeps nobody from connecting to a socket in it: the kernel wants the right to write to the
socket's inode, which a read-only mount does not take away, and finds the socket by this inode. So either

- *by ids* (root): the mount has an id map in which no group is any. Nobody has the right to write to what
  has an owner or a group that a mount cannot name (EACCES). Users are who they are, or the sandbox's own in a
  view; groups appear as nobody's.
- *layered*: an overlay over the directory and an empty one. Its inodes are its own, and no socket is bound to
  one of them (ECONNREFUSED). What the host replaces meanwhile may be seen late.

Both hold for sockets that are made later. Not taken: covers over the sockets that are there, since
/proc/net/unix shows neither those of other network namespaces nor where relative names lie; Landlock, which
has no right about connecting to a path (Linux 6.18); BPF at the control group, which sees the text of an
address and not what it leads to.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from casemate.errors import ProtectionUnavailable
from casemate.isolation.process import stacks
from casemate.isolation.process.stacks import Place
from casemate.sys import mounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.isolation.process.spec import Spec, View

__all__ = ["Showing", "grouped", "layered", "layered_view", "make_directory", "make_file"]

_ATTRIBUTES = mounts.RDONLY | mounts.NOSUID | mounts.NODEV
_UNABLE = (errno.EINVAL, errno.EPERM)
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC)


def layered(tree: int, empty: Place, place: str, *, rootless: bool, attached: bool) -> int:
    """A read-only overlay over a detached mount that has none below it; detached, too.

    ``place`` is where that is attached meanwhile, where layers have to be ``attached``. Raises OSError.
    """
    if attached:
        os.mkdir(place, 0o700)
        mounts.attach(tree, place)
    try:
        made = stacks.mount_overlay(
            [Place(tree, place), empty], None, None, rootless=rootless, attached=attached
        )
    finally:
        if attached:
            mounts.unmount(place)
            os.rmdir(place)
    mounts.restrict(made, _ATTRIBUTES)
    return made


def layered_view(path: str, lower: int, scratch: int, directory: str, *, attached: bool) -> int:
    """The same for one sandbox of a user, over an empty directory of its private file system: ``path``,
    mounted as ``lower``, which is closed.

    Raises ProtectionUnavailable, or OSError where the host is short of something.
    """
    empty = stacks.nothing(scratch, directory)
    try:
        return layered(lower, empty, f"{directory}/lower", rootless=True, attached=attached)
    except OSError as error:
        if error.errno in _SHORT:
            raise
        raise ProtectionUnavailable(
            f"cannot show {path} so that sockets in it lead nowhere: {error}",
            hint="its file system takes no overlay; ext4, xfs, btrfs and tmpfs do",
            protection="sockets of the host",
            needed="a file system that can be the lower layer of an overlay",
            found=str(error),
        ) from error
    finally:
        os.close(empty.handle)
        os.close(lower)


def grouped(spec: Spec, view: View) -> bool:
    """Whether a view's groups mean something inside: not where their absence is what keeps sockets
    from leading out. In a workspace that is changed directly those that are there are covered.
    """
    return view.writable or (spec.direct is not None and spec.direct.target == view.target)


class Showing:
    """Puts directories and files of the host into a root that is being built.

    ``ids`` comes from ``namespaces.no_groups``, or is -1 for a user, who cannot have id maps. ``root`` is
    where the root is attached, ``empty`` an empty directory in it.
    """

    def __init__(self, ids: int, root: str, empty: Place, *, attached: bool) -> None:
        self._ids, self._root, self._empty, self._attached = ids, root, empty, attached
        self._known: list[str] | None = None

    def put(self, parent: int, name: str, path: str) -> None:
        """Show ``path``, with all that is mounted below it, as ``name``. Raises OSError.

        What is mounted below it and can be shown in neither way is an empty directory then.
        """
        tree = mounts.clone_tree(mounts.AT_FDCWD, path, recursive=True)
        try:
            mode = os.fstat(tree).st_mode
            if stat.S_ISDIR(mode):
                make_directory(parent, name)
                self._put_directory(parent, name, tree, path)
            elif stat.S_ISREG(mode):
                make_file(parent, name)
                mounts.restrict(tree, _ATTRIBUTES)
                mounts.move_mount(tree, parent, name)
            elif stat.S_ISSOCK(mode):
                make_file(parent, name)  # nothing of it, but where one that the policy names can appear
        finally:
            os.close(tree)

    def _put_directory(self, parent: int, name: str, tree: int, path: str) -> None:
        if path.startswith("/sys/"):  # the kernel's own: no socket can be made there
            mounts.restrict(tree, _ATTRIBUTES, recursive=True)
            mounts.move_mount(tree, parent, name)
        elif self._by_ids(tree):
            mounts.move_mount(tree, parent, name)
        elif self._has_mounts(path):
            self._put_entries(parent, name, path)
        else:
            rootless = self._ids < 0
            place = f"{self._root}/.lower"
            made = layered(tree, self._empty, place, rootless=rootless, attached=self._attached)
            try:
                mounts.move_mount(made, parent, name)
            finally:
                os.close(made)

    def _by_ids(self, tree: int) -> bool:
        if self._ids < 0:
            return False
        try:
            mounts.restrict(tree, _ATTRIBUTES, recursive=True, ids=self._ids)
        except OSError as error:  # a file system, of the tree or below it, that has no id maps
            if error.errno not in _UNABLE:
                raise
            return False
        return True

    def _put_entries(self, parent: int, name: str, path: str) -> None:
        """Make a directory anew in which something is mounted: an overlay would not show that, and a user
        may not have a tree without it, since that would show what is below.
        """
        mode = f"{stat.S_IMODE(os.stat(path).st_mode):o}"
        made = mounts.filesystem("tmpfs", _ATTRIBUTES & ~mounts.RDONLY, mode=mode, size="8m")
        try:
            with suppress(PermissionError):  # what the caller cannot list stays empty
                for entry in sorted(os.listdir(path)):
                    self._put_entry(made, entry, f"{path}/{entry}")
            mounts.restrict(made, _ATTRIBUTES)
            mounts.move_mount(made, parent, name)
        finally:
            os.close(made)

    def _put_entry(self, parent: int, name: str, path: str) -> None:
        if os.path.islink(path):
            os.symlink(os.readlink(path), name, dir_fd=parent)
            return
        try:
            self.put(parent, name, path)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EACCES):  # gone by now, or not the caller's to look at
                return
            if error.errno not in _UNABLE or not os.path.ismount(path):
                raise

    def _has_mounts(self, path: str) -> bool:
        if self._known is None:
            with open("/proc/self/mountinfo", "rb") as file:
                known = [_unescaped(line.split(b" ", 5)[4]) for line in file]
            self._known = [place for place in known if not f"{place}/".startswith(f"{self._root}/")]
        below = os.path.realpath(path) + "/"
        return any(place.startswith(below) for place in self._known)


def _unescaped(text: bytes) -> str:
    for escape, plain in ((b"\\040", b" "), (b"\\011", b"\t"), (b"\\012", b"\n"), (b"\\134", b"\\")):
        text = text.replace(escape, plain)
    return os.fsdecode(text)


def make_directory(parent: int, name: str) -> None:
    """Make one if nothing is there, as a bind may show it."""
    with suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=parent)


def make_file(parent: int, name: str) -> None:
    """Make an empty one if nothing is there, as a bind may show it."""
    with suppress(FileExistsError):
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444, dir_fd=parent))
