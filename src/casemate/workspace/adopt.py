"""Taking files from the top by renaming them, where the top is on the same mount as the workspace.

A renamed file is the command's own inode. That is allowed only because every process that might hold it
open is dead, and only for files with a single name: another one would stay in the top, which may yet be
mounted again. Owner, mode and attributes are made those of a file that was copied; where that does not
work, the file is copied.
"""

from __future__ import annotations

import os
import stat

from casemate.sys.files import (
    DIRECTORY,
    NOREPLACE,
    chmod_fd,
    descriptor_path,
    mount_id,
    open_beneath,
    rename,
)
from casemate.workspace.names import join
from casemate.workspace.scan import DIR, FILE, LINK
from casemate.workspace.target import TEMPORARY, Changed, give

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.workspace.merged import Merged
    from casemate.workspace.scan import Change
    from casemate.workspace.target import Target

__all__ = ["Adopter"]

# Attributes that can be taken off. Others (a security label, a capability, an access list) mean: copy.
_OURS = ("user.", "trusted.overlay.")


class Adopter:
    """Renames from the top into the workspace what can be renamed."""

    def __init__(self, top: int, target: Target, merged: Merged) -> None:
        self.top, self.target, self.merged = top, target, merged
        number = mount_id(top)
        self.usable = number is not None and number == mount_id(target.root)
        # The last directory looked at, and who owns what is made in it.
        self._parent: tuple[str, tuple[int, int] | None] = ("\0", None)
        #: Directories that were taken as a whole.
        self.adopted: set[str] = set()
        #: Directories with something in them that may not pass just as it is.
        self.spoiled: set[str] = set()

    def spoil(self, path: str) -> None:
        """An entry is not to be taken as it is, so none of the directories above it can be."""
        if self.usable:
            while path:
                path = path.rpartition("/")[0]
                if path in self.spoiled:
                    return
                self.spoiled.add(path)

    def directory(self, change: Change) -> bool:
        """Take a whole new directory; False: it has to be made and filled entry by entry.

        Raises ``Changed`` if the host has an entry of that name by now.
        """
        path = change.path
        if not self.usable or path in self.spoiled or change.source is not None:
            return False
        owner = self._owner(path)
        return owner is not None and self._clean_tree(path, owner) and self._take(path, None)

    def file(self, change: Change, before: os.stat_result | None) -> bool:
        """Take one file, in the place of ``before``; False: it has to be copied.

        Raises ``Changed`` as ``Target.write_file`` does.
        """
        if not self.usable or change.links != 1:
            return False
        owner = self._owner(change.path)
        if owner is None:
            return False
        if before is not None:
            owner = (before.st_uid, before.st_gid)
        fd = open_beneath(self.top, change.path, os.O_PATH | os.O_NOFOLLOW)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or not self._clean(fd, status, owner):
                return False
        finally:
            os.close(fd)
        return self._take(change.path, before)

    def _owner(self, path: str) -> tuple[int, int] | None:
        """Who is to own a new entry; None if the directory hands down more (its group, an access list):
        only a file made there gets that.
        """
        directory = path.rpartition("/")[0]
        if self._parent[0] != directory:
            self._parent = (directory, self._handed_down(self.target.directory(directory)))
        return self._parent[1]

    def _handed_down(self, parent: int) -> tuple[int, int] | None:
        status = os.fstat(parent)
        if "system.posix_acl_default" in os.listxattr(descriptor_path(parent)):
            return None
        if self.target.super:
            return status.st_uid, status.st_gid
        return None if status.st_mode & stat.S_ISGID else (os.geteuid(), os.getegid())

    def _clean_tree(self, top: str, owner: tuple[int, int]) -> bool:
        stack = [top]
        while stack:
            path = stack.pop()
            fd = open_beneath(self.top, path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(fd)
                # Another mode: the scan had to unlock it. Its own would keep us from working in it here.
                if self.merged.index[path].mode & 0o777 != status.st_mode & 0o777:
                    return False
                if not self._clean(fd, status, owner):
                    return False
                with os.scandir(fd) as listing:
                    for item in listing:
                        entry = join(path, item.name)
                        change = self.merged.index.get(entry)
                        # What the scan left out (a whiteout over nothing) must not come along.
                        if change is None or change.kind not in (FILE, LINK, DIR) or change.links != 1:
                            return False
                        if change.kind == DIR:
                            stack.append(entry)
                        elif not self._clean_entry(fd, item.name, owner):
                            return False
            finally:
                os.close(fd)
        return True

    def _clean_entry(self, directory: int, name: str, owner: tuple[int, int]) -> bool:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            return self._clean(fd, os.fstat(fd), owner)
        finally:
            os.close(fd)

    def _clean(self, fd: int, status: os.stat_result, owner: tuple[int, int]) -> bool:
        """Make one entry look as if we had made it; False if that cannot be."""
        # A link's magic name in /proc leads to the link itself: nothing is followed beyond it.
        path = descriptor_path(fd)
        mode = wanted = stat.S_IMODE(status.st_mode)
        if not stat.S_ISLNK(status.st_mode):
            wanted = mode & 0o777
        try:
            names = os.listxattr(path)
            if not all(name.startswith(_OURS) for name in names):
                return False
            if names and not self.target.super and not mode & 0o200:
                mode |= 0o200  # a file's own attributes are written like its content
                chmod_fd(fd, mode)
            for name in names:
                os.removexattr(path, name)
            if (status.st_uid, status.st_gid) != owner:
                if not self.target.super:
                    return False
                give(fd, owner)
            if mode != wanted:
                chmod_fd(fd, wanted)
        except OSError:
            return False
        return True

    def _take(self, path: str, before: os.stat_result | None) -> bool:
        directory, _, name = path.rpartition("/")
        source = open_beneath(self.top, directory or ".", DIRECTORY)
        try:
            parent = self.target.directory(directory)
            if before is None:
                rename(source, name, parent, name, NOREPLACE)
                return True
            # By a second name: an exchange would leave the old file in the top, under this name.
            stage = self.target.stage(parent)
            self.target.remove_leftover(stage)
            try:
                os.link(name, TEMPORARY, src_dir_fd=source, dst_dir_fd=stage, follow_symlinks=False)
                self.target.settle(stage, TEMPORARY, parent, name, before)
            finally:
                self.target.remove_leftover(stage)
            os.unlink(name, dir_fd=source)
            return True
        except FileExistsError:
            raise Changed from None
        except OSError:
            return False
        finally:
            os.close(source)

    def forget(self, path: str) -> None:
        """The workspace has this very file: an interrupted try had still to take its name off the top."""
        directory, _, name = path.rpartition("/")
        source = open_beneath(self.top, directory or ".", DIRECTORY)
        try:
            os.unlink(name, dir_fd=source)
        finally:
            os.close(source)
