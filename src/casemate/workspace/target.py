"""The real workspace, changed only beneath its own descriptor.

Every directory is opened by ``openat2`` from the root, through no link and no mount; the last name of a
path is used only with calls that do not follow it. So a host process that swaps a directory for a link
makes a step fail, and never leads it out.

Nothing half-written is ever visible: a file is made without a name (O_TMPFILE) and gets one when it is
whole. What replaces a file is exchanged with it, and put back if it was not the file that was judged.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from casemate.sys.files import (
    DIRECTORY,
    EXCHANGE,
    NOREPLACE,
    chmod_fd,
    descriptor_path,
    link_fd,
    mount_id,
    open_beneath,
    rename,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from casemate.workspace.journal import Unlocked

__all__ = ["TEMPORARY", "Changed", "Target", "give", "identity"]

#: Name of a file on its way, if it cannot be kept out of the workspace. A protected name, so that no top
#: can bring one along; a leftover of a crash is removed when the same change is applied again.
TEMPORARY = ".casemate-apply.tmp"

_LEAF = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Changed(Exception):
    """The host changed this entry at the same moment."""


def identity(status: os.stat_result) -> tuple[int, ...]:
    """What changes if the entry is replaced or written to. ctime is no part: a rename changes it."""
    return (status.st_dev, status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns)


def give(fd: int, owner: tuple[int, int]) -> None:
    """Change the owner of an open file (O_PATH, too); where nobody can, it stays ours."""
    try:
        os.chown(descriptor_path(fd), *owner)
    except OSError as error:
        # A user namespace that does not know the owner; a file server that gives nothing away.
        if error.errno not in (errno.EPERM, errno.EINVAL):
            raise


class Target:
    """The workspace as something to write to. ``stage`` is a private directory, used if it can be;
    ``unlocked`` is told which directories are opened.

    What the host changed after ``started_ns`` is its own.
    """

    def __init__(
        self, root: int, stage: int | None, started_ns: int, unlocked: Unlocked | None = None
    ) -> None:
        self.root, self.started = root, started_ns
        self.unlocked = unlocked
        self.super = os.geteuid() == 0
        self._cached: tuple[str, int] = ("", -1)
        self._owner: tuple[str, int, int] = ("", -1, -1)
        # A rename works within one mount only; that the file system is the same is not enough.
        beside = stage is not None and mount_id(stage) is not None and mount_id(stage) == mount_id(root)
        self._stage = stage if beside else None
        # ctime of inodes that we have changed ourselves, by (st_dev, st_ino).
        self._ours: dict[tuple[int, int], int] = {}
        # What the file system has turned out not to support.
        self._exchange = self._unnamed = True

    def close(self) -> None:
        """Let go of the cached directory."""
        self.forget()

    def note(self, status: os.stat_result) -> None:
        """What the entry looks like is our own doing."""
        self._ours[status.st_dev, status.st_ino] = status.st_ctime_ns

    def changed_since(self, status: os.stat_result, moment_ns: int) -> bool:
        """Whether somebody else changed the entry after ``moment_ns``."""
        changed = status.st_ctime_ns
        return changed > moment_ns and self._ours.get((status.st_dev, status.st_ino)) != changed

    def forget(self) -> None:
        """Drop the cached directory: something above it was renamed."""
        if self._cached[1] >= 0:
            os.close(self._cached[1])
        self._cached = ("", -1)

    def directory(self, path: str) -> int:
        """A descriptor of a directory of the workspace, valid until the next call."""
        if not path:
            return self.root
        if self._cached[0] != path or self._cached[1] < 0:
            self.forget()
            self._cached = (path, open_beneath(self.root, path, DIRECTORY))
            if self._stage is None:
                self.remove_leftover(self._cached[1])  # of a run that was killed
        return self._cached[1]

    def stat(self, path: str) -> os.stat_result | None:
        """The entry itself, never what a link points to; None if there is none."""
        directory, _, name = path.rpartition("/")
        try:
            return os.stat(name, dir_fd=self.directory(directory), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, path: str) -> int:
        """Open a regular file for reading. Raises OSError; a link is ELOOP."""
        directory, _, name = path.rpartition("/")
        fd = os.open(name, _LEAF, dir_fd=self.directory(directory))
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "no regular file", path)
        return fd

    # -- making ------------------------------------------------------------------------------------

    def write_file(
        self, path: str, fill: Callable[[int], None], mode: int, mtime_ns: int, before: os.stat_result | None
    ) -> None:
        """Make a regular file; ``fill`` writes the content to a descriptor.

        ``before`` is the entry that it replaces (not a directory). If the host has another one there by
        now, or one where there was none, that one stays and ``Changed`` is raised.
        """
        directory, _, name = path.rpartition("/")
        parent = self.directory(directory)
        fd, stage = self._open_new(parent)
        try:
            fill(fd)
            if self.super:
                owner = self._owner_of(directory, parent)
                give(fd, owner if before is None else (before.st_uid, before.st_gid))
            os.fchmod(fd, mode & 0o777)  # no setuid, setgid, sticky
            os.utime(fd, ns=(mtime_ns, mtime_ns))
            if before is None and stage < 0:
                link_fd(fd, parent, name)
                return
            if stage < 0:
                stage = self.stage(parent)
                self.remove_leftover(stage)
                link_fd(fd, stage, TEMPORARY)
            self.settle(stage, TEMPORARY, parent, name, before)
        except FileExistsError:
            raise Changed from None
        finally:
            os.close(fd)
            if stage >= 0:
                self.remove_leftover(stage)

    def _open_new(self, parent: int) -> tuple[int, int]:
        """A new file without a name, or, with the directory it lies in, one with a temporary name."""
        if self._unnamed:
            try:
                return open_beneath(parent, ".", os.O_TMPFILE | os.O_RDWR, 0o600), -1
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                    raise
                self._unnamed = False
        stage = self.stage(parent)
        self.remove_leftover(stage)
        return open_beneath(stage, TEMPORARY, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), stage

    def write_link(self, path: str, to: str, mtime_ns: int, before: os.stat_result | None) -> None:
        """Make a symbolic link; ``before`` as in ``write_file``."""
        directory, _, name = path.rpartition("/")
        parent = self.directory(directory)
        stage = self.stage(parent)
        self.remove_leftover(stage)
        os.symlink(to, TEMPORARY, dir_fd=stage)
        try:
            os.utime(TEMPORARY, ns=(mtime_ns, mtime_ns), dir_fd=stage, follow_symlinks=False)
            if self.super:
                owner = self._owner_of(directory, parent)
                self._chown(stage, TEMPORARY, owner if before is None else (before.st_uid, before.st_gid))
            self.settle(stage, TEMPORARY, parent, name, before)
        except FileExistsError:
            raise Changed from None
        finally:
            self.remove_leftover(stage)

    def date_link(self, path: str, mtime_ns: int) -> None:
        """Set the time of a link (whatever is there: nothing is followed)."""
        directory, _, name = path.rpartition("/")
        times = (mtime_ns, mtime_ns)
        os.utime(name, ns=times, dir_fd=self.directory(directory), follow_symlinks=False)

    def make_directory(self, path: str) -> os.stat_result:
        """Make a directory that only its owner can use; mode and time come when it is filled."""
        directory, _, name = path.rpartition("/")
        parent = self.directory(directory)
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            raise Changed from None
        if self.super:
            self._chown(parent, name, self._owner_of(directory, parent))
        return os.stat(name, dir_fd=parent, follow_symlinks=False)

    def finish_directory(self, path: str, status: os.stat_result, mode: int, mtime_ns: int | None) -> None:
        """Give a directory its mode and, unless None, its time. Not another one that is there by now."""
        fd = open_beneath(self.root, path, DIRECTORY)
        try:
            if os.path.samestat(os.fstat(fd), status):
                # The host's own setgid or sticky bit stays; the command's never comes.
                chmod_fd(fd, (mode & 0o777) | (stat.S_IMODE(status.st_mode) & 0o7000))
                if mtime_ns is not None:
                    os.utime(descriptor_path(fd), ns=(mtime_ns, mtime_ns))
        finally:
            os.close(fd)

    def unlock(self, path: str, status: os.stat_result) -> bool:
        """Let us work in a directory of ours, whatever its mode; True if it has another one now."""
        mode = status.st_mode & 0o777
        if self.super or mode & 0o700 == 0o700:
            return False
        if self.unlocked is not None:
            with suppress(OSError):  # no room for that: a step that ends restores it all the same
                self.unlocked.note(path, stat.S_IMODE(status.st_mode))
        self.finish_directory(path, status, mode | 0o700, None)
        return True

    def set_attributes(self, path: str, mode: int, mtime_ns: int, before: os.stat_result) -> None:
        """Change the mode or the time of a file in place.

        Preconditions: it has one name only. A second one may lie outside the workspace.
        """
        directory, _, name = path.rpartition("/")
        fd = open_beneath(self.directory(directory), name, os.O_PATH | os.O_NOFOLLOW)
        try:
            status = os.fstat(fd)
            if identity(status) != identity(before) or status.st_nlink != 1:
                raise Changed
            if stat.S_IMODE(status.st_mode) != mode & 0o777:
                chmod_fd(fd, mode & 0o777)
            if status.st_mtime_ns != mtime_ns:
                os.utime(descriptor_path(fd), ns=(mtime_ns, mtime_ns))
        finally:
            os.close(fd)

    # -- moving and removing -----------------------------------------------------------------------

    def move(self, source: str, to: str) -> None:
        """Rename within the workspace; ``to`` must not exist (FileExistsError)."""
        from_directory, _, from_name = source.rpartition("/")
        to_directory, _, to_name = to.rpartition("/")
        fd = open_beneath(self.root, from_directory or ".", DIRECTORY)
        try:
            parent = self.directory(to_directory)
            above = [(at, os.fstat(at)) for at in (fd, parent)]
            rename(fd, from_name, parent, to_name, NOREPLACE)
            for at, before in above:
                if not self.changed_since(before, self.started):
                    self.note(os.fstat(at))
            self.note(os.stat(to_name, dir_fd=parent, follow_symlinks=False))
        finally:
            os.close(fd)
            self.forget()

    def unlink(self, path: str, before: os.stat_result) -> None:
        """Remove an entry that is no directory, if it is still the one that was judged."""
        directory, _, name = path.rpartition("/")
        parent = self.directory(directory)
        now = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if identity(now) != identity(before) or now.st_ctime_ns != before.st_ctime_ns:
            raise Changed
        self._unlink(parent, name)

    def _unlink(self, directory: int, name: str) -> None:
        """Remove a name. An entry that has others gets a new ctime by that: it is our doing."""
        fd = open_beneath(directory, name, os.O_PATH | os.O_NOFOLLOW)
        try:
            os.unlink(name, dir_fd=directory)
            status = os.fstat(fd)
            if status.st_nlink:
                self.note(status)
        finally:
            os.close(fd)

    # -- inside ------------------------------------------------------------------------------------

    def _owner_of(self, directory: str, parent: int) -> tuple[int, int]:
        if self._owner[0] != directory or self._owner[1] < 0:
            status = os.fstat(parent)
            self._owner = (directory, status.st_uid, status.st_gid)
        return self._owner[1:]

    def _chown(self, directory: int, name: str, owner: tuple[int, int]) -> None:
        """Give away what we have just made. In a directory of somebody else it may be swapped by now:
        only what belongs to us and has no other name is given, by its descriptor.
        """
        fd = open_beneath(directory, name, os.O_PATH | os.O_NOFOLLOW)
        try:
            status = os.fstat(fd)
            ours = status.st_uid == os.geteuid() and not stat.S_ISREG(status.st_mode)
            fresh = status.st_nlink == (2 if stat.S_ISDIR(status.st_mode) else 1)
            if not ours or (not fresh and status.st_nlink != 1):
                raise Changed
            give(fd, owner)
        finally:
            os.close(fd)

    def stage(self, parent: int) -> int:
        """Where finished entries wait for their name: in private, or beside it."""
        return parent if self._stage is None else self._stage

    def remove_leftover(self, stage: int) -> None:
        """Remove what has the temporary name: of this step's work, or of one that was killed."""
        with suppress(FileNotFoundError):
            os.unlink(TEMPORARY, dir_fd=stage)

    def settle(
        self, stage: int, temporary: str, parent: int, name: str, before: os.stat_result | None
    ) -> None:
        """Give a finished entry its real name; ``before`` must be there, or nothing (FileExistsError).

        Afterwards ``before`` has the temporary name, unless the file system cannot exchange two entries.
        """
        if before is None:
            rename(stage, temporary, parent, name, NOREPLACE)
            return
        try:
            if self._exchange:
                try:
                    rename(stage, temporary, parent, name, EXCHANGE)
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                        raise
                    self._exchange = False
            if not self._exchange:
                rename(stage, temporary, parent, name)
                return
        except FileNotFoundError:
            raise Changed from None
        taken = os.stat(temporary, dir_fd=stage, follow_symlinks=False)
        if identity(taken) != identity(before):
            rename(stage, temporary, parent, name, EXCHANGE)
            raise Changed
        if taken.st_nlink > 1:
            self._unlink(stage, temporary)
