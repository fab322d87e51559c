"""Where a path of a stopped process leads, if that is a place in its workspace.

The answer is a directory opened beneath the workspace, through no link, with the very path that is judged
afterwards: what is acted on and what was judged cannot be two things. How the answer was found (through
links, ``..`` and the caller's own directories) therefore decides only whether a call does what its caller
meant, never what it may do. Whatever is not understood counts as elsewhere: the kernel makes the call then,
through the sandbox's own mount of the workspace, which is read-only.
"""

from __future__ import annotations

import errno
import os
import stat

from casemate.sys.files import mount_id, open_beneath, open_in_root, stat_block

__all__ = ["AT_FDCWD", "Place", "Reach"]

AT_FDCWD = 0xFFFF_FF9C  # as the lower half of a register
_MOST_LINKS = 40  # as the kernel
_DIRECTORY = os.O_PATH | os.O_DIRECTORY
_ITSELF = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
# A process's own descriptors by name. Their links lead nowhere for anybody but the process itself.
_STREAMS = {b"/dev/stdin": b"0", b"/dev/stdout": b"1", b"/dev/stderr": b"2"}
_DEVICES = (b"/dev/null", b"/dev/tty", b"/dev/pts/")
_OWN = (b"/proc/self/", b"/proc/thread-self/")
_DESCRIPTORS = (b"/proc/self/fd/", b"/proc/thread-self/fd/", b"/dev/fd/")


class Place:
    """A name in an open directory of the workspace.

    ``path`` is relative to the workspace; the workspace itself is "" and has the name ".". ``slash``: the
    caller wrote a slash after it, or a dot, so that it can only be a directory.
    """

    __slots__ = ("name", "parent", "path", "slash")

    def __init__(self, parent: int, name: bytes, path: str, *, slash: bool) -> None:
        self.parent = parent
        self.name = name
        self.path = path
        self.slash = slash

    def facts(self) -> os.stat_result | None:
        """What is there, a link itself included; None for nothing."""
        try:
            return os.stat(self.name, dir_fd=self.parent, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def close(self) -> None:
        """Let the directory go."""
        os.close(self.parent)


class Reach:
    """Finds places. All descriptors are the caller's and stay open.

    ``tree`` is the workspace, mounted so that it can be written, and ``host`` the same directory as the host
    has it; ``root`` is the sandbox's root directory,
    ``proc`` the /proc in which its threads have the numbers that are used here. ``target`` is the workspace's
    path inside; ``beyond`` are the paths below it at which something else is mounted.
    """

    def __init__(self, tree: int, host: int, root: int, proc: int, target: str, beyond: list[str]) -> None:
        self.tree, self.root, self.proc = tree, root, proc
        self._host, self._at = host, self._path_of(host)
        self._block = stat_block()
        self._target = os.fsencode(target).rstrip(b"/")
        self._prefix = self._target + b"/"
        self._beyond = tuple(os.fsencode(path) for path in beyond)
        self._below = tuple(path + b"/" for path in self._beyond)
        # How the two mounts look among a process's descriptors: which they are, and what paths begin with.
        shown = open_in_root(root, self._target)
        try:
            self._writable = self._path_of(tree).rstrip(b"/") + b"/"
            self._mounts = {mount_id(shown): self._prefix, mount_id(tree): self._writable}
            self.writable_mount = mount_id(tree)
        finally:
            os.close(shown)

    def is_moved(self) -> bool:
        """Whether the workspace has another path on the host: other names may have been judged for that."""
        return self._path_of(self._host) != self._at

    def holds(self, place: Place) -> bool:
        """Whether a place still is where it was found: somebody may have moved a directory above it."""
        above = os.fsencode(place.path).rpartition(b"/")[0]
        try:
            return self._path_of(place.parent).rstrip(b"/") == (self._writable + above).rstrip(b"/")
        except OSError:
            # Its path from the root is too long to be told.
            again = self._open(self._prefix + os.fsencode(place.path))
            if again is None:
                return False
            try:
                return os.path.samestat(os.fstat(again.parent), os.fstat(place.parent))
            finally:
                again.close()

    def _path_of(self, descriptor: int) -> bytes:
        return os.readlink(b"self/fd/%d" % descriptor, dir_fd=self.proc)

    # -- by path -------------------------------------------------------------------------------------

    def place(self, thread: int, at: int, path: bytes, *, follow: bool, naming: bool = False) -> Place | None:
        """The place that a path means to a thread; None for elsewhere.

        ``follow``: a link at its end is followed. ``naming``: the call makes, moves or removes the name
        itself; no such name is ``.`` or ``..``. Raises OSError only where nobody could do it (EMFILE).
        """
        if not path:
            return None
        if path.startswith(_DEVICES):
            return None  # what is written to most often; nothing there leads into a workspace
        dot = path.rstrip(b"/").rpartition(b"/")[2] in (b".", b"..")
        if dot and naming:
            return None
        slash = dot or path.endswith(b"/")
        if slash and not naming:
            follow = True
        try:
            if path.startswith(_OWN):
                at, path = _own_base(path, at)
            text = path if path[:1] == b"/" else self._base(thread, at) + b"/" + path
            for _ in range(_MOST_LINKS):
                found = self._step(thread, text, follow=follow)
                if not isinstance(found, bytes):
                    if found is not None:
                        found.slash = slash
                    return found
                text = found
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
        return None

    def _base(self, thread: int, at: int) -> bytes:
        name = b"%d/cwd" % thread if at == AT_FDCWD else b"%d/fd/%d" % (thread, at)
        base = os.readlink(name, dir_fd=self.proc)
        if base[:1] != b"/":  # a pipe, a socket
            raise NotADirectoryError(errno.ENOTDIR, "no path", base)
        return base

    def _step(self, thread: int, text: bytes, *, follow: bool) -> Place | bytes | None:
        """The place of an absolute path, the path that a link at its end stands for, or None."""
        parts = [part for part in text.split(b"/") if part and part != b"."]
        text = b"/" + b"/".join(parts)
        if follow and (number := _descriptor(text)):
            return self.at_descriptor(thread, int(number))
        place: Place | None = None
        if b".." not in parts and (text == self._target or text.startswith(self._prefix)):
            place = self._open(text)
        if place is None:
            # Links or ".." on the way: the directory as the sandbox itself would find it.
            real = self._real(text, parts, follow=follow)
            if real is None:
                return None
            text, to = real
            if to is not None:
                return to
            place = self._open(text)
        if place is None or not follow or not place.path:
            return place
        try:
            to = os.readlink(place.name, dir_fd=place.parent)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):  # no link
                return place
            place.close()
            raise
        place.close()
        return to if to[:1] == b"/" else text.rpartition(b"/")[0] + b"/" + to

    def _open(self, text: bytes) -> Place | None:
        """The place of a path without ``..`` in the workspace, if no link is on the way to its last name."""
        if text == self._target:
            return Place(os.dup(self.tree), b".", "", slash=False)
        if not text.startswith(self._prefix):
            return None
        path = text[len(self._prefix) :]
        if self._beyond and (path in self._beyond or path.startswith(self._below)):
            return None
        above, _, name = path.rpartition(b"/")
        try:
            parent = open_beneath(self.tree, above or b".", _DIRECTORY)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENOENT, errno.EACCES, errno.EXDEV):
                return None
            raise
        return Place(parent, name, os.fsdecode(path), slash=False)

    def _real(self, text: bytes, parts: list[bytes], *, follow: bool) -> tuple[bytes, bytes | None] | None:
        """The path with its directory resolved; outside of the workspace also what a link at its end says."""
        if not parts:
            return None
        above, name = text.rpartition(b"/")[0], parts[-1]
        if name == b"..":
            above, name = text, b""
        handle = open_in_root(self.root, above or b"/")
        try:
            if self.mount_of(handle) is not None:
                real = self._path_of(handle)
                return real + b"/" + name if name else real, None
            if not follow or not name:
                return None
            to = os.readlink(name, dir_fd=handle)
            return text, to if to[:1] == b"/" else self._path_of(handle).rstrip(b"/") + b"/" + to
        finally:
            os.close(handle)

    # -- by descriptor -------------------------------------------------------------------------------

    def handle(self, thread: int, number: int) -> int:
        """A thread's own open file, as a descriptor that only names it. Raises OSError."""
        return os.open(b"%d/fd/%d" % (thread, number), os.O_PATH | os.O_CLOEXEC, dir_fd=self.proc)

    def mount_of(self, handle: int) -> int | None:
        """The mount through which a file was opened, if it is one of the workspace's two; else None."""
        mount = mount_id(handle, self._block)
        return mount if mount in self._mounts else None

    def place_of(self, handle: int) -> Place | None:
        """The place of an open file of the workspace; None if it has none any more."""
        mount = mount_id(handle, self._block)
        prefix = self._mounts.get(mount)
        if prefix is None:
            return None
        path = self._path_of(handle)
        inside = path[len(prefix) :] if path.startswith(prefix) else b""
        if path + b"/" != prefix and not inside:
            return None
        place = self._open(self._prefix + inside if inside else self._target)
        if place is None:
            return None
        there, here = place.facts(), os.fstat(handle)
        if there is None or not os.path.samestat(there, here):
            place.close()
            return None
        return place

    def at_descriptor(self, thread: int, number: int) -> Place | None:
        """The place of the file behind one of a thread's descriptors. Raises OSError if there is none."""
        handle = self.handle(thread, number)
        try:
            return self.place_of(handle)
        finally:
            os.close(handle)

    def anywhere(self, thread: int, at: int, path: bytes, *, follow: bool) -> int:
        """A descriptor that only names what a path means to a thread, in the workspace or not.

        Raises OSError where that is not to be found (a way through /proc may be such a one).
        """
        text = path if path[:1] == b"/" else self._base(thread, at) + b"/" + path
        number = _descriptor(text) if follow else b""
        if number:
            return self.handle(thread, int(number))
        above, _, name = text.rstrip(b"/").rpartition(b"/")
        parent = open_in_root(self.root, above or b"/")
        try:
            handle = os.open(name or b".", _ITSELF, dir_fd=parent)
        finally:
            os.close(parent)
        if follow and stat.S_ISLNK(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(errno.ELOOP, "a link", path)
        return handle


def _own_base(path: bytes, at: int) -> tuple[int, bytes]:
    """The directory and the path from there that ``/proc/self/fd/N/…`` or ``/proc/self/cwd/…`` stand for."""
    parts = path.split(b"/", 5)
    if len(parts) == 6 and parts[3] == b"fd" and parts[4].isdigit() and len(parts[4]) < 8:
        return int(parts[4]), parts[5] or b"."
    if len(parts) > 4 and parts[3] == b"cwd":
        return AT_FDCWD, b"/".join(parts[4:]) or b"."
    return at, path


def _descriptor(text: bytes) -> bytes:
    """The number in a path that names one of the caller's own descriptors, else nothing."""
    number = _STREAMS.get(text, b"")
    if not number:
        for directory in _DESCRIPTORS:
            if text.startswith(directory):
                number = text[len(directory) :]
    return number if number.isdigit() and len(number) < 8 else b""
