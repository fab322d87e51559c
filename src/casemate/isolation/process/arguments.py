"""What the arguments of a stopped call mean: texts and numbers in its caller's memory, places, open files.

Everything is read once. What cannot be read, or does not mean the workspace, is ``Elsewhere``: the kernel
makes the call then, and says what is wrong with it.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress

from casemate.isolation.process.deeds import Elsewhere
from casemate.sys.notify import read_memory, read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.isolation.process.reach import Place, Reach

__all__ = ["Arguments"]

_INT = 0xFFFF_FFFF  # how much of a register the kernel reads of an int


class Arguments:
    """Reads arguments by way of a ``Reach``."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    def _text(self, thread: int, pointer: int) -> bytes:
        """The text that an argument points to, read once. What cannot be read is the kernel's to say."""
        try:
            return read_text(thread, pointer)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise
            raise Elsewhere from None

    def _place(self, thread: int, at: int, path: bytes, *, follow: bool) -> Place | None:
        return self._reach.place(thread, at & _INT, path, follow=follow)

    def _inside(self, thread: int, at: int, pointer: int, *, follow: bool) -> Place:
        """The place in the workspace of a file that a call means. Raises Elsewhere."""
        place = self._place(thread, at, self._text(thread, pointer), follow=follow)
        if place is None:
            raise Elsewhere
        return place

    def _named(self, thread: int, at: int, pointer: int) -> Place:
        """The place in the workspace of a name that a call makes, moves or removes. Raises Elsewhere."""
        text = self._text(thread, pointer)
        place = self._reach.place(thread, at & _INT, text, follow=False, naming=True)
        if place is None:
            raise Elsewhere
        return place

    def _open_inside(self, thread: int, number: int) -> Place:
        """The place of a file that the caller has open by way of its own, read-only mount. Raises Elsewhere.

        What it has open by way of ours was given to it for writing: the kernel does the rest.
        """
        try:
            handle = self._reach.handle(thread, number & _INT)
        except OSError:
            raise Elsewhere from None
        try:
            mount = self._reach.mount_of(handle)
            if mount is None or mount == self._reach.writable_mount:
                raise Elsewhere
            place = self._reach.place_of(handle)
        finally:
            os.close(handle)
        if place is None:
            raise Elsewhere
        return place

    def _memory(self, thread: int, address: int, size: int) -> bytes:
        with suppress(OSError):
            data = read_memory(thread, address, size)
            if len(data) == size:
                return data
        raise Elsewhere

    def _without_name(self, thread: int, at: int, path: bytes) -> int:
        """A file that the caller has got here without a name (O_TMPFILE), as our descriptor; or -1."""
        try:
            if path:
                handle = self._reach.anywhere(thread, at & _INT, path, follow=True)
            else:
                handle = self._reach.handle(thread, at & _INT)
        except OSError:
            return -1
        if os.fstat(handle).st_nlink == 0 and self._reach.mount_of(handle) == self._reach.writable_mount:
            return handle
        os.close(handle)
        return -1
