"""The broker of a sandbox whose workspace is changed directly: it answers the calls that change files.

The sandbox has the workspace as a read-only mount, so the kernel itself refuses every change there, whoever
asks for it and however. Its filter has the calls that could change something wait for this process, which
holds a second, writable mount of the same directory, that no process of the sandbox can reach. A call that
means a place in the workspace is judged and carried out *here*, and the caller gets the result or an open
file; every other call is let through. Letting a call through is therefore always safe, whatever its
arguments point to by then: it can do no more than it could if it had never been looked at.

The one thing that goes out of here with the right to write is an open regular file that was judged.

What comes in is hostile: numbers, paths, descriptors, threads that are killed meanwhile, floods of it all.
One call is answered after the other, and each act is judged and carried out while no other broker acts, on
places that are then still where they were found. The process has the sandbox's uid and no capability, but
(as root) the one to read the memory of processes that do not want to be read; a filter of its own lets it do
little else.
"""

from __future__ import annotations

import errno
import os
import select
import struct
from contextlib import suppress

from casemate.isolation.process.arguments import Arguments
from casemate.isolation.process.deeds import SPECIAL_BITS, Deeds, Elsewhere, Refused
from casemate.isolation.process.masks import Masks
from casemate.isolation.process.reach import AT_FDCWD, Place, Reach
from casemate.isolation.process.record import Record
from casemate.sys.files import chmod_fd
from casemate.sys.syscalls import TABLES, native

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from casemate.isolation.process.deeds import Judge
    from casemate.sys.notify import Listener

__all__ = ["CALLS", "Broker"]

_INT = 0xFFFF_FFFF
_AT_SYMLINK_NOFOLLOW, _AT_REMOVEDIR, _AT_SYMLINK_FOLLOW, _AT_EMPTY_PATH = 0x100, 0x200, 0x400, 0x1000
_UNNAMED = 0o20000000  # what O_TMPFILE is beside O_DIRECTORY
_EXCLUSIVE = os.O_CREAT | os.O_EXCL
_TIMES_SIZE = 32
_TRIES = 30


class _Moved(Exception):
    """A directory has been moved between finding a place in it and being alone with it."""


class Broker(Arguments):
    """Serves one sandbox. ``Preconditions:`` as for ``Deeds``; ``record`` takes lines about what was refused,
    ``lock`` is held for each act: no other broker acts then.
    """

    def __init__(
        self,
        listener: Listener,
        reach: Reach,
        judge: Judge,
        *,
        record: int,
        lock: AbstractContextManager[None],
    ) -> None:
        super().__init__(reach)
        self._listener = listener
        self._record, self._lock = Record(record), lock
        self._deeds = Deeds(reach.tree, judge, self._record.executable)
        self._masks = Masks(reach.proc)
        numbers = TABLES[native()]
        acts: dict[str, Callable[..., int]] = {name: getattr(self, f"_{act}") for name, act in CALLS.items()}
        self._acts = {numbers[name]: act for name, act in acts.items() if name in numbers}

    def serve(self) -> None:
        """Answer until no process of the sandbox is left."""
        poll = select.poll()
        poll.register(self._listener.descriptor, select.POLLIN)
        while True:
            # Waits for a call. None: its caller is gone already, or everybody is.
            call = self._listener.receive()
            if call is not None:
                self._one(call)
            elif any(events & ~select.POLLIN for _, events in poll.poll(0)):
                return

    def _one(self, call: tuple[int, ...]) -> None:
        number = call[0]
        try:
            value = self._made(*call)
        except Elsewhere:
            self._listener.let_through(number)
        except OSError as error:
            if isinstance(error, Refused):
                self._record.refused(error.reason, error.path)
            self._listener.refuse(number, error.errno or errno.EIO)
        except Exception as error:  # a mistake of ours: nobody else's call is to suffer for it
            self._record.refused(f"internal: {type(error).__name__}: {error}", "")
            self._listener.refuse(number, errno.EIO)
        else:
            self._listener.answer(number, value)

    def _made(self, number: int, thread: int, kind: int, *arguments: int) -> int:
        """Make a call; anew, from its arguments on, where another broker has moved what it means."""
        for _ in range(_TRIES):
            with suppress(_Moved):
                return self._acts[kind](number, thread, *arguments)
        raise FileNotFoundError(errno.ENOENT, "moved again and again")

    def _carry_out(self, number: int, act: Callable[[], object], *places: Place) -> int:
        """Do it if the caller still waits: only then were its memory and its directories its own.

        The places were found while others could act. Raises _Moved if one is at another path by now: the
        judge is asked about paths, but the act goes by the open directory.
        """
        try:
            with self._lock:
                if places and self._reach.is_moved():
                    raise Refused("move: the workspace itself was moved", places[0].path)
                for place in places:
                    if not self._reach.holds(place):
                        raise _Moved
                if not self._listener.is_waiting(number):
                    raise Elsewhere
                act()
            return 0
        finally:
            for place in places:
                place.close()

    # -- opening ---------------------------------------------------------------------------------------

    def _open(self, number: int, thread: int, path: int, flags: int, mode: int, *_: int) -> int:
        return self._openat(number, thread, AT_FDCWD, path, flags, mode)

    def _creat(self, number: int, thread: int, path: int, mode: int, *_: int) -> int:
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
        return self._openat(number, thread, AT_FDCWD, path, flags, mode)

    def _openat(self, number: int, thread: int, at: int, path: int, flags: int, mode: int, *_: int) -> int:
        flags &= 0x7FFF_FFFF
        unnamed = flags & _UNNAMED and flags & os.O_DIRECTORY
        if flags & os.O_PATH or (flags & os.O_CREAT and flags & os.O_DIRECTORY and not unnamed):
            raise Elsewhere
        follow = not flags & os.O_NOFOLLOW and flags & _EXCLUSIVE != _EXCLUSIVE
        place = self._inside(thread, at, path, follow=follow)
        handles: list[int] = []

        def act() -> None:
            self._masks.use(thread)
            opened = self._deeds.open_unnamed if unnamed else self._deeds.open
            handles.append(opened(place, flags, mode))

        self._carry_out(number, act, place)
        try:
            return self._listener.give(number, handles[0], close_on_exec=bool(flags & os.O_CLOEXEC))
        finally:
            # Before the caller goes on: it may want to execute what it has written.
            os.close(handles[0])

    # -- names -----------------------------------------------------------------------------------------

    def _mkdir(self, number: int, thread: int, path: int, mode: int, *_: int) -> int:
        return self._mkdirat(number, thread, AT_FDCWD, path, mode)

    def _mkdirat(self, number: int, thread: int, at: int, path: int, mode: int, *_: int) -> int:
        place = self._named(thread, at, path)

        def act() -> None:
            self._masks.use(thread)
            self._deeds.make_directory(place, mode)

        return self._carry_out(number, act, place)

    def _mknod(self, number: int, thread: int, path: int, mode: int, *_: int) -> int:
        return self._mknodat(number, thread, AT_FDCWD, path, mode)

    def _mknodat(self, number: int, thread: int, at: int, path: int, mode: int, *_: int) -> int:
        place = self._named(thread, at, path)

        def act() -> None:
            self._masks.use(thread)
            self._deeds.make_file(place, mode & 0xFFFF)

        return self._carry_out(number, act, place)

    def _unlink(self, number: int, thread: int, path: int, *_: int) -> int:
        return self._unlinkat(number, thread, AT_FDCWD, path, 0)

    def _rmdir(self, number: int, thread: int, path: int, *_: int) -> int:
        return self._unlinkat(number, thread, AT_FDCWD, path, _AT_REMOVEDIR)

    def _unlinkat(self, number: int, thread: int, at: int, path: int, flags: int, *_: int) -> int:
        if flags & _INT & ~_AT_REMOVEDIR:
            raise Elsewhere
        place = self._named(thread, at, path)
        directory = bool(flags & _AT_REMOVEDIR)
        return self._carry_out(number, lambda: self._deeds.remove(place, directory=directory), place)

    def _symlink(self, number: int, thread: int, to: int, path: int, *_: int) -> int:
        return self._symlinkat(number, thread, to, AT_FDCWD, path)

    def _symlinkat(self, number: int, thread: int, to: int, at: int, path: int, *_: int) -> int:
        target = self._text(thread, to)
        place = self._named(thread, at, path)
        return self._carry_out(number, lambda: self._deeds.make_link(place, target), place)

    def _rename(self, number: int, thread: int, old: int, new: int, *_: int) -> int:
        return self._renameat2(number, thread, AT_FDCWD, old, AT_FDCWD, new, 0)

    def _renameat(self, number: int, thread: int, old_at: int, old: int, at: int, new: int, *_: int) -> int:
        return self._renameat2(number, thread, old_at, old, at, new, 0)

    def _renameat2(
        self, number: int, thread: int, old_at: int, old: int, at: int, new: int, flags: int, *_: int
    ) -> int:
        first = self._named(thread, old_at, old)
        try:
            second = self._named(thread, at, new)
        except BaseException:
            first.close()
            raise
        return self._carry_out(number, lambda: self._deeds.rename(first, second, flags & _INT), first, second)

    def _link(self, number: int, thread: int, old: int, new: int, *_: int) -> int:
        return self._linkat(number, thread, AT_FDCWD, old, AT_FDCWD, new, 0)

    def _linkat(
        self, number: int, thread: int, old_at: int, old: int, at: int, new: int, flags: int, *_: int
    ) -> int:
        if flags & _INT & ~(_AT_SYMLINK_FOLLOW | _AT_EMPTY_PATH):
            raise Elsewhere
        path, follow = self._text(thread, old), bool(flags & _AT_SYMLINK_FOLLOW)
        second = self._named(thread, at, new)
        unnamed, first = -1, None
        try:
            if follow or (not path and flags & _AT_EMPTY_PATH):
                unnamed = self._without_name(thread, old_at, path)
            if unnamed < 0:
                first = self._place(thread, old_at, path, follow=follow)
                if first is None and not path:
                    first = self._reach.at_descriptor(thread, old_at & _INT)
                if first is None:
                    raise Elsewhere
        except BaseException:
            second.close()
            raise
        if first is not None:
            return self._carry_out(number, lambda: self._deeds.link(first, second), first, second)
        try:
            return self._carry_out(number, lambda: self._deeds.link_open(unnamed, second), second)
        finally:
            os.close(unnamed)

    # -- content and attributes --------------------------------------------------------------------------

    def _truncate(self, number: int, thread: int, path: int, length: int, *_: int) -> int:
        if length >> 63:
            raise Elsewhere
        place = self._inside(thread, AT_FDCWD, path, follow=True)
        return self._carry_out(number, lambda: self._deeds.truncate(place, length), place)

    def _chmod(self, number: int, thread: int, path: int, mode: int, *_: int) -> int:
        return self._fchmodat2(number, thread, AT_FDCWD, path, mode, 0)

    def _fchmodat(self, number: int, thread: int, at: int, path: int, mode: int, *_: int) -> int:
        return self._fchmodat2(number, thread, at, path, mode, 0)

    def _fchmodat2(self, number: int, thread: int, at: int, path: int, mode: int, flags: int, *_: int) -> int:
        text = self._text_for_mode(thread, path, mode)
        if not text and flags & _AT_EMPTY_PATH:
            return self._fchmod(number, thread, at, mode)
        follow = not flags & _AT_SYMLINK_NOFOLLOW
        place = self._place(thread, at, text, follow=follow)
        if place is not None:
            return self._carry_out(number, lambda: self._deeds.change_mode(place, mode), place)
        if not mode & SPECIAL_BITS:
            raise Elsewhere
        handle = self._reach.anywhere(thread, at & _INT, text, follow=follow)
        return self._special_mode(number, handle, mode)

    def _text_for_mode(self, thread: int, path: int, mode: int) -> bytes:
        try:
            return self._text(thread, path)
        except Elsewhere:
            if mode & SPECIAL_BITS:
                raise PermissionError(errno.EPERM, "a special mode, unread") from None
            raise

    def _fchmod(self, number: int, thread: int, descriptor: int, mode: int, *_: int) -> int:
        if not mode & SPECIAL_BITS:
            if mode & 0o111:
                self._notice_open(thread, descriptor)
            place = self._open_inside(thread, descriptor)
            return self._carry_out(number, lambda: self._deeds.change_mode(place, mode), place)
        return self._special_mode(number, self._reach.handle(thread, descriptor & _INT), mode)

    def _notice_open(self, thread: int, descriptor: int) -> None:
        """Note a file that its caller, who was given it for writing, is about to make executable."""
        with suppress(OSError):
            handle = self._reach.handle(thread, descriptor & _INT)
            try:
                if self._reach.mount_of(handle) == self._reach.writable_mount:
                    place = self._reach.place_of(handle)
                    if place is not None:
                        place.close()
                        self._record.executable(place.path)
            finally:
                os.close(handle)

    def _special_mode(self, number: int, handle: int, mode: int) -> int:
        """A mode with set-id bits is never let through: the caller may have a file of the host open by then.

        On files of the sandbox's own it is set here; on files of the workspace without these bits.
        """
        try:
            if self._reach.mount_of(handle) is not None:
                place = self._reach.place_of(handle)
                if place is None:
                    raise PermissionError(errno.EPERM, "a special mode")
                return self._carry_out(number, lambda: self._deeds.change_mode(place, mode), place)
            return self._carry_out(number, lambda: chmod_fd(handle, mode & 0o7777))
        finally:
            os.close(handle)

    def _chown(self, number: int, thread: int, path: int, uid: int, gid: int, *_: int) -> int:
        return self._fchownat(number, thread, AT_FDCWD, path, uid, gid, 0)

    def _lchown(self, number: int, thread: int, path: int, uid: int, gid: int, *_: int) -> int:
        return self._fchownat(number, thread, AT_FDCWD, path, uid, gid, _AT_SYMLINK_NOFOLLOW)

    def _fchown(self, number: int, thread: int, descriptor: int, uid: int, gid: int, *_: int) -> int:
        place = self._open_inside(thread, descriptor)
        return self._carry_out(number, lambda: self._deeds.change_owner(place, uid & _INT, gid & _INT), place)

    def _fchownat(
        self, number: int, thread: int, at: int, path: int, uid: int, gid: int, flags: int, *_: int
    ) -> int:
        text = self._text(thread, path)
        if not text and flags & _AT_EMPTY_PATH:
            return self._fchown(number, thread, at, uid, gid)
        place = self._place(thread, at, text, follow=not flags & _AT_SYMLINK_NOFOLLOW)
        if place is None:
            raise Elsewhere
        return self._carry_out(number, lambda: self._deeds.change_owner(place, uid & _INT, gid & _INT), place)

    def _utimensat(
        self, number: int, thread: int, at: int, path: int, times: int, flags: int, *_: int
    ) -> int:
        text = self._text(thread, path) if path else b""
        wanted = self._memory(thread, times, _TIMES_SIZE) if times else None
        if not text:
            if path and not flags & _AT_EMPTY_PATH:
                raise Elsewhere
            place: Place | None = self._open_inside(thread, at)
        else:
            place = self._place(thread, at, text, follow=not flags & _AT_SYMLINK_NOFOLLOW)
        if place is None:
            raise Elsewhere
        return self._carry_out(number, lambda: self._deeds.change_times(place, wanted), place)

    def _utimes(self, number: int, thread: int, path: int, times: int, *_: int) -> int:
        return self._futimesat(number, thread, AT_FDCWD, path, times)

    def _futimesat(self, number: int, thread: int, at: int, path: int, times: int, *_: int) -> int:
        wanted = None
        if times:  # two struct timeval
            first, first_us, second, second_us = struct.unpack("=qqqq", self._memory(thread, times, 32))
            if not (0 <= first_us < 1_000_000 and 0 <= second_us < 1_000_000):
                raise OSError(errno.EINVAL, "times")
            wanted = struct.pack("=qqqq", first, first_us * 1000, second, second_us * 1000)
        place = self._inside(thread, at, path, follow=True)
        return self._carry_out(number, lambda: self._deeds.change_times(place, wanted), place)

    def _utime(self, number: int, thread: int, path: int, times: int, *_: int) -> int:
        wanted = None
        if times:  # struct utimbuf: two seconds
            first, second = struct.unpack("=qq", self._memory(thread, times, 16))
            wanted = struct.pack("=qqqq", first, 0, second, 0)
        place = self._inside(thread, AT_FDCWD, path, follow=True)
        return self._carry_out(number, lambda: self._deeds.change_times(place, wanted), place)

    def _access(self, number: int, thread: int, path: int, mode: int, *_: int) -> int:
        return self._faccessat2(number, thread, AT_FDCWD, path, mode, 0)

    def _faccessat(self, number: int, thread: int, at: int, path: int, mode: int, *_: int) -> int:
        return self._faccessat2(number, thread, at, path, mode, 0)

    def _faccessat2(
        self, number: int, thread: int, at: int, path: int, mode: int, flags: int, *_: int
    ) -> int:
        place = self._inside(thread, at, path, follow=not flags & _AT_SYMLINK_NOFOLLOW)
        return self._carry_out(number, lambda: self._deeds.access(place, mode & 7), place)

    # -- extended attributes ---------------------------------------------------------------------------

    def _setxattr(self, number: int, thread: int, path: int, *_: int, follow: bool = True) -> int:
        self._deeds.change_attribute(self._inside(thread, AT_FDCWD, path, follow=follow))
        return 0

    def _lsetxattr(self, number: int, thread: int, path: int, *_: int) -> int:
        return self._setxattr(number, thread, path, follow=False)

    def _fsetxattr(self, number: int, thread: int, descriptor: int, *_: int) -> int:
        self._deeds.change_attribute(self._open_inside(thread, descriptor))
        return 0

    def _setxattrat(self, number: int, thread: int, at: int, path: int, flags: int, *_: int) -> int:
        text = self._text(thread, path) if path else b""
        if not text and flags & _AT_EMPTY_PATH:
            return self._fsetxattr(number, thread, at)
        place = self._place(thread, at, text, follow=not flags & _AT_SYMLINK_NOFOLLOW)
        if place is None:
            raise Elsewhere
        self._deeds.change_attribute(place)
        return 0

    _removexattr, _lremovexattr = _setxattr, _lsetxattr
    _fremovexattr, _removexattrat = _fsetxattr, _setxattrat

    def _umask(self, *_: int) -> int:
        self._masks.forget()
        raise Elsewhere


#: The calls that wait for the broker (some only with certain arguments: see the filter), and who takes each.
CALLS = {
    name: name
    for name in (
        "open creat openat mkdir mkdirat mknod mknodat unlink rmdir unlinkat symlink symlinkat rename "
        "renameat renameat2 link linkat truncate chmod fchmod fchmodat fchmodat2 chown lchown fchown "
        "fchownat utime utimes futimesat utimensat access faccessat faccessat2 umask "
        "setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat"
    ).split()
}
