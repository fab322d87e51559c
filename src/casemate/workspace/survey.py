"""What a layer of a session holds: how much, and since when each of its paths hides what the host has there.

A session lasts for days, and the host goes on working below it. What the host changed in a file after the
beginning of the command that made the session's version must be a conflict: that command need not have seen
it. What it changed before must not. The time of the entry itself does not tell: a program reads long before
it writes, and one that replaces a file makes a new entry. So whoever ends a command notes the paths that are
new in the live top, with the moment at which that command began; what was noted stays. Below a directory that
only the session has nothing is noted: all of it is as old as that. Where a top is too large for all of this,
whatever the host changed since the session began counts as a conflict.
"""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress

import msgspec

from casemate.sys.files import open_beneath, xattrs
from casemate.sys.usage import disk_usage
from casemate.workspace.names import join, prefixes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "Firsts",
    "Size",
    "firsts_of",
    "measure",
    "measured",
    "note_firsts",
    "note_size",
    "write_firsts",
]

#: Files of a layer, beside its tops.
_FIRSTS, _SIZE = "firsts", "size"
_MOST = 20_000  # paths that are noted
_PATH = 4000
_COMPLETE, _PARTIAL = b"complete", b"partial"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK


class _Cut(Exception):
    """The walk took too long, or met something that it may not read."""


class Size(msgspec.Struct, frozen=True):
    """Bytes on disk, and whether that is all of them: a walk may have been cut short."""

    bytes: int
    exact: bool


class Firsts:
    """Since when the paths of one view are the session's own.

    ``known`` maps a path to the moment at which the command began that made it so (ns; 0: unknown), and
    whether with all that is below it.
    """

    def __init__(self, *, complete: bool = True) -> None:
        self.complete = complete
        self.known: dict[str, tuple[int, bool]] = {}

    def add(self, path: str, since_ns: int, hides: bool) -> None:
        """Note one; what was known before is older and counts."""
        before = self.known.get(path)
        if before is not None:
            since_ns, hides = min(since_ns, before[0]), hides or before[1]
        self.known[path] = (since_ns, hides)

    def merge(self, other: Firsts) -> None:
        """Take in those of another layer of the same view."""
        self.complete = self.complete and other.complete
        for path, (since_ns, hides) in other.known.items():
            self.add(path, since_ns, hides)

    def since(self, path: str, started_ns: int) -> int:
        """The moment after which a change by the host at this path need not have been seen by the session;
        that of the session itself, ``started_ns``, where no more is known.
        """
        if not self.complete:
            return started_ns
        moments: list[int] = []
        for above in prefixes(path):
            found = self.known.get(above)
            if found is not None and (found[1] or above == path):
                moments.append(found[0])
        return max(min(moments, default=started_ns), started_ns)


def note_firsts(layer: str, tops: Sequence[str], prefix: str, since_ns: int, seconds: float) -> None:
    """Note what is new in the tops of a layer by the command that began at ``since_ns`` (0: unknown).

    ``prefix`` is that of overlayfs' attributes. Where it takes longer than ``seconds``, or holds too much,
    the notes are incomplete from then on. Raises OSError if nothing can be written. Preconditions: nobody
    writes to the layer.
    """
    new = not os.path.exists(f"{layer}/{_FIRSTS}")
    firsts = firsts_of(layer, tops)
    before = [(one.complete, dict(one.known)) for one in firsts]
    end = time.monotonic() + seconds
    for top, one in zip(tops, firsts, strict=True):
        one.complete = one.complete or new
        try:
            _note(f"{layer}/{top}", one, prefix, since_ns, end)
        except _Cut:
            one.complete = False
    if new or [(one.complete, one.known) for one in firsts] != before:
        write_firsts(layer, firsts)


def _note(top: str, firsts: Firsts, prefix: str, since_ns: int, end: float) -> None:
    known = firsts.known

    def add(path: str, *, hides: bool) -> None:
        before = known.get(path)
        if before is not None and (before[1] or not hides):
            return
        if len(known) >= _MOST:
            raise _Cut
        firsts.add(path, since_ns, hides)

    queue: list[str] = []
    for path, fd, facts, name in _walk(top, queue, end):
        if name:
            full = join(path, name)
            if stat.S_ISDIR(facts.st_mode):
                queue.append(full)
            else:
                add(full, hides=True)
        elif path:
            marks = xattrs(fd, prefix)
            whole = marks.get("opaque") == b"y" or "origin" not in marks
            add(path, hides=whole)
            if whole and "redirect" not in marks:
                queue.append("")  # nothing more of this one


def _walk(top: str, queue: list[str], end: float) -> Iterator[tuple[str, int, os.stat_result, str]]:
    """(directory, its descriptor, facts, name) of every entry, and of each directory, without a name, before
    those. The receiver queues the directories that it wants; an empty path queued after a directory skips it.
    """
    try:
        root = os.open(top, _DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _Cut from error
    path = ""
    try:
        while True:
            if time.monotonic() > end:
                raise _Cut
            try:
                fd = open_beneath(root, path or ".", _DIRECTORY)
            except OSError as error:
                raise _Cut from error
            try:
                yield path, fd, os.fstat(fd), ""
                if queue and not queue[-1]:
                    queue.pop()
                else:
                    with os.scandir(fd) as listing:
                        for entry in listing:
                            yield path, fd, entry.stat(follow_symlinks=False), entry.name
            finally:
                os.close(fd)
            if not queue:
                return
            path = queue.pop()
            if len(path) * 4 > _PATH and len(os.fsencode(path)) > _PATH:
                raise _Cut
    finally:
        os.close(root)


def measure(layer: str, tops: Sequence[str], seconds: float | None = None) -> Size:
    """Measure the tops of a layer, and note it. Gives up after ``seconds``: then there is more."""
    total, exact = 0, True
    end = None if seconds is None else time.monotonic() + seconds
    for top in tops:
        found, whole = disk_usage(f"{layer}/{top}", None if end is None else end - time.monotonic())
        total, exact = total + found, exact and whole
    size = Size(total, exact)
    note_size(layer, size)
    return size


def note_size(layer: str, size: Size) -> None:
    """Keep a size for ``measured``."""
    _replace(f"{layer}/{_SIZE}", b"%d %s" % (size.bytes, b"exact" if size.exact else b"about"))


def measured(layer: str) -> Size | None:
    """What was noted last; None if nothing was."""
    try:
        with open(f"{layer}/{_SIZE}", "rb") as file:
            size, word = file.read(100).split()
        return Size(int(size), word == b"exact")
    except (OSError, ValueError):
        return None


def firsts_of(layer: str, tops: Sequence[str]) -> list[Firsts]:
    """What was noted of a layer, per top; a layer without notes is not complete."""
    found = [Firsts(complete=False) for _ in tops]
    try:
        with open(f"{layer}/{_FIRSTS}", "rb") as file:
            head, *lines = file.read().split(b"\0")
    except OSError:
        return found
    for one in found:
        one.complete = head == _COMPLETE
    for line in lines:
        with suppress(ValueError):
            hides, since, number, path = line.split(b" ", 3)
            if int(number) < len(found):
                found[int(number)].known[os.fsdecode(path)] = (int(since), hides == b"h")
    return found


def write_firsts(layer: str, firsts: Sequence[Firsts]) -> None:
    """Note them for a layer. Raises OSError."""
    lines = [_COMPLETE if all(one.complete for one in firsts) else _PARTIAL]
    for number, one in enumerate(firsts):
        for path, (since, hides) in one.known.items():
            lines.append(b"%s %d %d %s" % (b"h" if hides else b"o", since, number, os.fsencode(path)))
    _replace(f"{layer}/{_FIRSTS}", b"\0".join(lines) + b"\0")


def _replace(path: str, data: bytes) -> None:
    """Write a file anew. It need not survive a failure of the machine: without it less is known."""
    fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
    os.rename(f"{path}.new", path)
