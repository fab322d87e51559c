"""The acts of a broker: what a command may do in its workspace, done for it, each after it was judged.

Every act takes places (a directory opened beneath the workspace and a name in it), asks the judge about the
very paths of these places, and uses the same descriptors and names. Nothing here follows a link. The kernel
checks modes and owners: the acting process has the sandbox's uid and gid and no right over files.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

from casemate.sys.files import chmod_fd, descriptor_path, open_beneath, rename
from casemate.sys.native import machine, syscall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from casemate.isolation.process.reach import Place

    class Judge(Protocol):
        """Says no with a reason, or ""; see casemate.workspace.live for what each is asked."""

        def write(self, path: str, *, new: bool) -> str: ...
        def make_directory(self, path: str) -> str: ...
        def touch_directory(self, path: str) -> str: ...
        def closed(self, path: str) -> str: ...
        def link(self, path: str, to: str) -> str: ...
        def remove(self, path: str, *, directory: bool) -> str: ...
        def move(self, old: str, new: str, mode: int) -> str: ...
        def content(self, path: str) -> bool: ...
        def accepts(self, path: str, data: bytes) -> str: ...
        def gone(self, path: str, *, whole: bool) -> None: ...


__all__ = ["SPECIAL_BITS", "Deeds", "Elsewhere", "Refused"]

#: Set-uid, set-gid and the sticky bit: never set on a file of the host.
SPECIAL_BITS = 0o7000
HARD_LINK = "hard-link: it has other names, which may be protected or outside of the workspace"
_LONGEST_CONTENT = 1 << 18
_MOST_NAMES = 20_000  # of all files with several; a path takes up to 4 KiB
_NOREPLACE, _EXCHANGE = 1, 2
_UTIMENSAT = {"x86_64": 280}.get(machine(), 88)
_AT_SYMLINK_NOFOLLOW = 0x100
_ACCESS_MODE = os.O_RDONLY | os.O_WRONLY | os.O_RDWR
_LEAF = os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC


class Refused(PermissionError):
    """An act that the judge refuses: EACCES for the command, a line of the report for its operator."""

    def __init__(self, reason: str, path: str) -> None:
        super().__init__(errno.EACCES, reason, path)
        self.reason = reason
        self.path = path


class Elsewhere(Exception):
    """Nothing that has to be done for the caller: the kernel may make the call itself."""


class _Twins:
    """Files with several names of which all are known, since the sandbox itself has given them.

    Any other file with more than one name may have one where the sandbox could not write: in a protected
    place, or outside of the workspace. Such a file keeps its content and its mode.
    """

    def __init__(self, tree: int) -> None:
        self._tree = tree
        self._names: dict[tuple[int, int], set[str]] = {}
        self._count = 0

    def alone(self, facts: os.stat_result) -> bool:
        """Whether every name of the file is a known one."""
        if facts.st_nlink <= 1:
            return True
        names = self._names.get((facts.st_dev, facts.st_ino), set())
        found = sum(self._is(name, facts) for name in names)
        return found == facts.st_nlink

    def _is(self, name: str, facts: os.stat_result) -> bool:
        with suppress(OSError):
            handle = open_beneath(self._tree, name, os.O_PATH | os.O_NOFOLLOW)
            try:
                return os.path.samestat(os.fstat(handle), facts)
            finally:
                os.close(handle)
        return False

    def linked(self, old: str, new: str, facts: os.stat_result) -> None:
        """A file that was ``alone`` has got a second name."""
        if self._count < _MOST_NAMES:
            self._names.setdefault((facts.st_dev, facts.st_ino), {old}).add(new)
            self._count += 2

    def moved(self, old: str, new: str, facts: os.stat_result) -> None:
        """A name is another one now; of a directory, the names of all that is in it."""
        if stat.S_ISDIR(facts.st_mode):
            root = f"{old}/"
            for names in self._names.values():
                for name in [name for name in names if name.startswith(root)]:
                    names.remove(name)
                    names.add(f"{new}/{name[len(root) :]}")
        elif (mine := self._names.get((facts.st_dev, facts.st_ino))) is not None:
            mine.discard(old)
            mine.add(new)

    def forget(self) -> None:
        """Know nothing any more: files with several names are not written then."""
        self._names.clear()
        self._count = 0

    def removed(self, path: str, facts: os.stat_result) -> None:
        """A name is gone."""
        key = (facts.st_dev, facts.st_ino)
        names = self._names.get(key)
        if names is not None:
            names.discard(path)
            if len(names) < 2:
                del self._names[key]
                self._count -= 2


class Deeds:
    """Acts below one workspace; ``executable`` is told of files that can be executed, and of links.

    ``Preconditions:`` the process has the sandbox's ids, and the file mode mask of the caller of the act
    under way.
    """

    def __init__(self, tree: int, judge: Judge, executable: Callable[[str], None]) -> None:
        self._judge = judge
        self._twins = _Twins(tree)
        self._executable = executable

    # -- files ---------------------------------------------------------------------------------------

    def open(self, place: Place, flags: int, mode: int) -> int:
        """Open (or make) a regular file for writing; returns our descriptor.

        ``flags`` are the caller's. Raises Refused, Elsewhere (directories, special files, and what is only
        opened for reading) or OSError.
        """
        if place.slash and flags & os.O_CREAT:
            raise IsADirectoryError(errno.EISDIR, "a slash after it", place.path)
        facts = place.facts()
        if facts is None:
            if not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, "not there", place.path)
            self._check(self._judge.write(place.path, new=True), place)
        else:
            if flags & os.O_CREAT and flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, "exists", place.path)
            if stat.S_ISLNK(facts.st_mode):
                raise OSError(errno.ELOOP, "a link", place.path)
            if not stat.S_ISREG(facts.st_mode) or place.slash:
                raise Elsewhere
            if flags & _ACCESS_MODE == os.O_RDONLY and not flags & os.O_TRUNC:
                raise Elsewhere
            self._check_file(place, facts)
        handle = os.open(place.name, flags | _LEAF, mode & 0o777, dir_fd=place.parent)
        # Looked at again: the host may have changed it meanwhile.
        opened = os.fstat(handle)
        if not stat.S_ISREG(opened.st_mode) or not self._twins.alone(opened):
            os.close(handle)
            raise Refused(HARD_LINK, place.path)
        self._notice(place.path, opened.st_mode)
        return handle

    def _notice(self, path: str, mode: int) -> None:
        """A file can be executed that was made, changed or moved."""
        if mode & 0o111:
            self._executable(path)

    def open_unnamed(self, place: Place, flags: int, mode: int) -> int:
        """O_TMPFILE: a file without a name, in a directory; a name is given to it by ``link_open``."""
        self._check(self._judge.write(_join(place.path, "unnamed"), new=True), place)
        directory = os.open(
            place.name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place.parent
        )
        try:
            return os.open(".", flags | os.O_CLOEXEC, mode & 0o777, dir_fd=directory)
        finally:
            os.close(directory)

    def truncate(self, place: Place, length: int) -> None:
        """Set the size of a file."""
        facts = self._existing(place)
        if not stat.S_ISREG(facts.st_mode):
            raise Elsewhere
        self._check_file(place, facts)
        handle = os.open(place.name, os.O_WRONLY | os.O_NONBLOCK | _LEAF, dir_fd=place.parent)
        try:
            os.ftruncate(handle, length)
        finally:
            os.close(handle)

    def _existing(self, place: Place) -> os.stat_result:
        facts = place.facts()
        if facts is None:
            raise FileNotFoundError(errno.ENOENT, "not there", place.path)
        if place.slash and not stat.S_ISDIR(facts.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "a slash after it", place.path)
        return facts

    def _check_file(self, place: Place, facts: os.stat_result) -> None:
        """May content and attributes of an existing file change?"""
        self._check(self._judge.write(place.path, new=False), place)
        if not self._twins.alone(facts):
            raise Refused(HARD_LINK, place.path)

    def _check(self, reason: str, place: Place, shown: str = "") -> None:
        if reason:
            raise Refused(reason, shown or place.path)

    # -- names ---------------------------------------------------------------------------------------

    def make_directory(self, place: Place, mode: int) -> None:
        """mkdir."""
        if place.facts() is not None:
            raise FileExistsError(errno.EEXIST, "exists", place.path)
        self._check(self._judge.make_directory(place.path), place)
        os.mkdir(place.name, mode & 0o777, dir_fd=place.parent)

    def _free(self, place: Place) -> None:
        """Something that is no directory can be made there."""
        if place.facts() is not None:
            raise FileExistsError(errno.EEXIST, "exists", place.path)
        if place.slash:
            raise FileNotFoundError(errno.ENOENT, "a slash after it", place.path)

    def make_file(self, place: Place, mode: int) -> None:
        """mknod of a regular file. Nothing else is made: a pipe would be one to the host's programs, too."""
        self._free(place)
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            raise Refused("special: a socket, pipe or device", place.path)
        self._check(self._judge.write(place.path, new=True), place)
        os.mknod(place.name, stat.S_IFREG | mode & 0o777, dir_fd=place.parent)

    def make_link(self, place: Place, to: bytes) -> None:
        """symlink."""
        if not to:
            raise FileNotFoundError(errno.ENOENT, "no link", place.path)
        self._free(place)
        self._check(self._judge.link(place.path, os.fsdecode(to)), place)
        os.symlink(to, place.name, dir_fd=place.parent)
        self._executable(place.path)  # perhaps: what it leads to may become one yet

    def remove(self, place: Place, *, directory: bool) -> None:
        """unlink, or rmdir."""
        facts = self._existing(place)
        is_directory = stat.S_ISDIR(facts.st_mode)
        if is_directory != directory:
            number = errno.ENOTDIR if directory else errno.EISDIR
            raise OSError(number, os.strerror(number), place.path)
        reason = self._judge.remove(place.path, directory=directory)
        if reason and directory and self._holds_something(place):
            # As the kernel would say of any directory that is not empty; many programs just try.
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), place.path)
        self._check(reason, place)
        if directory:
            os.rmdir(place.name, dir_fd=place.parent)
            self._judge.gone(place.path, whole=False)
        else:
            os.unlink(place.name, dir_fd=place.parent)
            self._twins.removed(place.path, facts)

    def _holds_something(self, place: Place) -> bool:
        handle = os.open(
            place.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place.parent
        )
        try:
            with os.scandir(handle) as entries:
                return next(entries, None) is not None
        finally:
            os.close(handle)

    def link(self, old: Place, new: Place) -> None:
        """A second name for a file (or a link)."""
        facts = self._existing(old)
        self._free(new)
        if stat.S_ISDIR(facts.st_mode):
            raise PermissionError(errno.EPERM, "a directory", old.path)
        if stat.S_ISLNK(facts.st_mode):
            to = os.readlink(old.name, dir_fd=old.parent)
            self._check(self._judge.link(new.path, os.fsdecode(to)), new)
        elif stat.S_ISREG(facts.st_mode):
            self._check(self._judge.write(old.path, new=False), old)
            self._check(self._judge.write(new.path, new=True), new)
        else:
            raise Refused("special: a socket, pipe or device", new.path)
        alone = self._twins.alone(facts)
        os.link(old.name, new.name, src_dir_fd=old.parent, dst_dir_fd=new.parent, follow_symlinks=False)
        if stat.S_ISREG(facts.st_mode):
            self._notice(new.path, facts.st_mode)
            if alone:
                self._twins.linked(old.path, new.path, facts)

    def link_open(self, handle: int, new: Place) -> None:
        """A first name for a file that was opened without one; ``handle`` is from the caller's own table."""
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink:
            raise Elsewhere
        self._free(new)
        self._check(self._judge.write(new.path, new=True), new)
        os.link(descriptor_path(handle), new.name, dst_dir_fd=new.parent, follow_symlinks=True)
        self._notice(new.path, facts.st_mode)

    def rename(self, old: Place, new: Place, flags: int) -> None:
        """renameat2: with RENAME_NOREPLACE and RENAME_EXCHANGE, not with RENAME_WHITEOUT."""
        if flags & ~(_NOREPLACE | _EXCHANGE) or flags == _NOREPLACE | _EXCHANGE:
            raise OSError(errno.EINVAL, "flags", old.path)
        facts, there = self._existing(old), new.facts()
        if not old.path or not new.path:
            raise OSError(errno.EBUSY, "the workspace itself", old.path)
        directory = stat.S_ISDIR(facts.st_mode)
        if there is not None and flags & _NOREPLACE:
            raise FileExistsError(errno.EEXIST, "exists", new.path)
        if new.slash and not directory:
            raise NotADirectoryError(errno.ENOTDIR, "a slash after it", new.path)
        if there is not None and os.path.samestat(there, facts):
            return  # two names of one file: nothing happens
        content = stat.S_ISREG(facts.st_mode) and self._judge.content(new.path)
        both = f"{old.path} -> {new.path}"
        self._check(self._judge.move(old.path, new.path, facts.st_mode), old, both)
        if flags & _EXCHANGE:
            if there is None:
                raise FileNotFoundError(errno.ENOENT, "not there", new.path)
            if content or (stat.S_ISREG(there.st_mode) and self._judge.content(old.path)):
                raise Refused("git-repository: not exchanged", new.path)
            self._check(self._judge.move(new.path, old.path, there.st_mode), new, both)
        elif content:
            self._replace_content(old, new)
            return
        elif there is not None:
            self._check(self._judge.remove(new.path, directory=stat.S_ISDIR(there.st_mode)), new)
        rename(old.parent, old.name, new.parent, new.name, flags)
        if stat.S_ISREG(facts.st_mode):
            self._notice(new.path, facts.st_mode)
        if flags & _EXCHANGE:
            if there is not None and stat.S_ISREG(there.st_mode):
                self._notice(old.path, there.st_mode)
            self._twins.forget()
        else:
            if there is not None:
                self._twins.removed(new.path, there)
            self._twins.moved(old.path, new.path, facts)
        if directory or (there is not None and stat.S_ISDIR(there.st_mode)):
            for path in (old.path, new.path):
                self._judge.gone(path, whole=True)

    def _replace_content(self, old: Place, new: Place) -> None:
        """A rename whose result must have a content that was judged: made anew, since somebody may still
        have the renamed file open for writing.
        """
        handle = os.open(old.name, os.O_RDONLY | os.O_NONBLOCK | _LEAF, dir_fd=old.parent)
        try:
            facts = os.fstat(handle)
            data = b""
            while piece := os.read(handle, _LONGEST_CONTENT + 1 - len(data)):
                data += piece
        finally:
            os.close(handle)
        if not stat.S_ISREG(facts.st_mode) or len(data) > _LONGEST_CONTENT:
            raise Refused("git-repository: too long", new.path)
        self._check(self._judge.accepts(new.path, data), new)
        os.unlink(old.name, dir_fd=old.parent)
        self._twins.removed(old.path, facts)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _LEAF
        handle = os.open(old.name, flags, 0o600, dir_fd=old.parent)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
            os.fchmod(handle, facts.st_mode & 0o777)
        finally:
            os.close(handle)
        rename(old.parent, old.name, new.parent, new.name)

    # -- attributes ------------------------------------------------------------------------------------

    def _check_attributes(self, place: Place) -> os.stat_result:
        facts = self._existing(place)
        if stat.S_ISDIR(facts.st_mode):
            self._check(self._judge.touch_directory(place.path), place)
        elif stat.S_ISREG(facts.st_mode):
            self._check_file(place, facts)
        elif stat.S_ISLNK(facts.st_mode):
            self._check(self._judge.write(place.path, new=False), place)
        else:
            raise Elsewhere
        return facts

    def change_mode(self, place: Place, mode: int) -> None:
        """chmod. Special bits are not set; those that are there may stay."""
        facts = self._check_attributes(place)
        if not place.path:
            if stat.S_IMODE(facts.st_mode) == mode & 0o7777:  # cp -a and the like
                return
            raise Refused("the workspace itself", place.path)
        if stat.S_ISLNK(facts.st_mode):
            raise OSError(errno.EOPNOTSUPP, "a link", place.path)
        if stat.S_ISREG(facts.st_mode):
            self._notice(place.path, mode)
        handle = os.open(place.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place.parent)
        try:
            chmod_fd(handle, mode & 0o777 | facts.st_mode & mode & SPECIAL_BITS)
        finally:
            os.close(handle)
        if stat.S_ISDIR(facts.st_mode):
            self._judge.gone(place.path, whole=False)

    def change_owner(self, place: Place, uid: int, gid: int) -> None:
        """chown: to itself, since the sandbox has no right to more."""
        self._check_attributes(place)
        os.chown(place.name, _id(uid), _id(gid), dir_fd=place.parent, follow_symlinks=False)

    def change_times(self, place: Place, times: bytes | None) -> None:
        """utimensat; ``times`` are two ``struct timespec``, None for now."""
        self._check_attributes(place)
        name = place.name
        syscall("utimensat", _UTIMENSAT, place.parent, name, times, _AT_SYMLINK_NOFOLLOW)

    def change_attribute(self, place: Place) -> None:
        """setxattr, removexattr: refused as by a file system without them, not as by a read-only one."""
        try:
            self._existing(place)
            raise OSError(errno.EOPNOTSUPP, "an extended attribute", place.path)
        finally:
            place.close()

    def access(self, place: Place, mode: int) -> None:
        """access(2) with W_OK in ``mode``: what would be refused is refused here, too, without a report."""
        facts = self._existing(place)
        directory = stat.S_ISDIR(facts.st_mode)
        reason = self._judge.closed(place.path) if directory else self._judge.write(place.path, new=False)
        if not os.access(place.name, mode, dir_fd=place.parent):
            raise PermissionError(errno.EACCES, "not permitted", place.path)
        if reason or (stat.S_ISREG(facts.st_mode) and not self._twins.alone(facts)):
            raise PermissionError(errno.EACCES, reason, place.path)


def _id(number: int) -> int:
    return -1 if number == 0xFFFF_FFFF else number


def _join(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name
