"""What a command changed: one walk over the top of its overlay.

The top is hostile: every name, link, size, mode and attribute in it was chosen by the command. The walk
follows nothing, opens directories only, and is bounded in entries, depth, length of a path and time. It
is a loop over a list, so no depth can exhaust Python's stack.

The result is in terms of the *view*: paths are relative to the workspace. A directory comes before what
is in it, and the entries of one directory stand together.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress

import msgspec

from casemate.sys.files import (
    DIRECTORY,
    birth_ns,
    chmod_fd,
    descriptor_path,
    find_handle,
    open_beneath,
    xattrs,
)
from casemate.workspace.names import join
from casemate.workspace.report import Limits

__all__ = ["DIR", "FILE", "LINK", "MODE", "SPECIAL", "WHITEOUT", "Change", "Changes", "found_at",
           "lock_again", "scan", "unlock"]  # fmt: skip

#: What an entry of the top is. SPECIAL is a FIFO, a socket or a device.
FILE, LINK, DIR, WHITEOUT, SPECIAL = "file", "link", "dir", "whiteout", "special"


# Where the mode of a directory is noted that had to be unlocked. The command could write it, too, and would
# only have chosen the mode once more.
MODE = "user.casemate.mode"


class Change(msgspec.Struct, frozen=True, gc=False):
    """One entry of the top."""

    path: str
    kind: str
    mode: int
    size: int
    mtime_ns: int
    links: int
    #: st_mode of what the workspace has in its place, 0 for nothing.
    lower_mode: int
    #: A file over a file of the same size and time: copied up for its mode, or for nothing.
    alike: bool = False
    #: A directory: where in the workspace its lower half is, None if it has none.
    source: str | None = None
    #: A directory that hides what the workspace has at its own place.
    hides: bool = False
    #: A directory that was renamed, from ``source``; what is in it was not, though its place is another.
    moved: bool = False

    @property
    def what(self) -> str:
        """One word for a person: created, modified, mode, deleted, replaced, renamed, or "" for nothing."""
        before = self.lower_mode
        if self.kind == WHITEOUT:
            return "deleted"
        if self.kind == DIR and self.source is not None:
            if self.moved:
                return "renamed"
            return "" if stat.S_IMODE(self.mode) == stat.S_IMODE(before) else "mode"
        if not before:
            return "created"
        if self.alike:
            return "" if stat.S_IMODE(self.mode) == stat.S_IMODE(before) else "mode"
        return "modified" if stat.S_IFMT(before) == stat.S_IFMT(self.mode) != stat.S_IFDIR else "replaced"


class Changes(msgspec.Struct, kw_only=True):
    """All entries of a top."""

    entries: list[Change]
    #: (path, code): what could not be looked at, and therefore is neither applied nor held.
    skipped: list[tuple[str, str]]
    #: Paths in the workspace that the view hides: deleted, replaced or moved away.
    hidden: set[str]
    #: The walk hit a bound on entries or time: ``entries`` is only a part.
    truncated: bool = False

    def summary(self) -> list[tuple[str, str]]:
        """(what, path) of everything that changed, unjudged: what a diff shows."""
        return [(what, entry.path) for entry in self.entries if (what := entry.what)]


def scan(
    top_fd: int,
    lower_fd: int,
    *,
    prefix: str = "trusted.overlay.",
    redirects: bool = True,
    limits: Limits | None = None,
    started_ns: int | None = None,
    resumed: bool = False,
    lower: dict[str, os.stat_result] | None = None,
) -> Changes:
    """Walk the top of an overlay whose lower layer is the directory ``lower_fd``.

    ``prefix`` is ``user.overlay.`` for an overlay mounted with ``userxattr``. ``redirects`` says that the
    kernel was told to follow renamed directories: only then is the attribute its own word. A directory
    that the workspace has only since ``started_ns`` is not one that the command could have hidden.
    ``resumed``: an apply step has been at work with this top, so directories may have been moved already.
    ``lower`` gets what the workspace has in the place of entries that are no directories.

    Raises OSError if the top itself cannot be read.

    Preconditions: every process that saw the overlay is dead.
    """
    walk = _Walk(top_fd, lower_fd, prefix, redirects, limits or Limits())
    walk.started, walk.resumed, walk.seen = started_ns, resumed, lower
    return walk.run()


class _Walk:
    def __init__(self, top_fd: int, lower_fd: int, prefix: str, redirects: bool, limits: Limits) -> None:
        self.top, self.lower, self.prefix, self.redirects = top_fd, lower_fd, prefix, redirects
        self.limits, self.budget = limits, limits.entries
        self.found = Changes(entries=[], skipped=[], hidden=set())
        # Directories still to be read: their path, and their own place in the lower (None: a new parent).
        self.stack: list[tuple[str, str | None]] = []
        self.sources: set[str] = set()
        self.started: int | None = None
        self.resumed = False
        self.seen: dict[str, os.stat_result] | None = None

    def run(self) -> Changes:
        end = time.monotonic() + self.limits.seconds
        unlock(self.top)
        self._read(self.top, self.lower, "", "", xwhiteouts=False)
        while self.stack and not self.found.truncated:
            self._directory(*self.stack.pop())
            if time.monotonic() > end:
                self.found.truncated = True
        return self.found

    def _skip(self, path: str, code: str) -> None:
        self.found.skipped.append((path, code))

    def _directory(self, path: str, beside: str | None) -> None:
        """Read one directory below the root. ``beside`` is its own place in the lower layer."""
        try:
            fd, mode, mtime_ns = _open_top(self.top, path)
        except OSError as error:
            self._skip(path, errno.errorcode.get(error.errno or 0, "EIO"))
            return
        lower_fd = -1
        try:
            marks = xattrs(fd, self.prefix)
            source = None if marks.get("opaque") == b"y" else beside
            if value := marks.get("redirect"):
                source = self._redirected(path, beside, value)
                if source is None:
                    self._skip(path, "bad-redirect")
                    return
            lower_mode = 0
            if beside is not None:
                lower_fd, lower_mode = self._open_lower(beside)
            if value and self.resumed:
                source = found_at(self.lower, marks.get("origin", b""))
                if source is None:
                    self._skip(path, "moved-before")
                    return
                if source == path:  # the earlier try has moved it
                    beside = path
                    lower_fd, lower_mode = self._reopen(lower_fd, path)
                else:
                    self.found.hidden.add(source)
            if source is None:
                if lower_fd >= 0:
                    lower_mode = 0 if self._is_new(lower_fd) else lower_mode
                    os.close(lower_fd)
                    lower_fd = -1
            elif source != beside:
                lower_fd = self._reopen(lower_fd, source)[0]
            elif lower_fd < 0:
                source = None
            hides = lower_mode != 0 and source != beside
            if hides and beside is not None:
                self.found.hidden.add(beside)
            self.found.entries.append(
                Change(
                    path, DIR, mode, 0, mtime_ns, 1, lower_mode, False, source, hides,
                    source is not None and source != beside,
                )
            )  # fmt: skip
            self._read(fd, lower_fd, path, source, xwhiteouts=marks.get("opaque") == b"x")
        except PermissionError:
            # Only part of what the workspace has there can be seen: not enough to tell what was changed.
            self._skip(path, "EACCES")
        finally:
            os.close(fd)
            if lower_fd >= 0:
                os.close(lower_fd)

    def _redirected(self, path: str, beside: str | None, value: bytes) -> str | None:
        """Where a renamed directory was, or None if the attribute is not one the kernel would write."""
        if not self.redirects or b"\0" in value or len(value) > self.limits.path:
            return None
        text = os.fsdecode(value)
        if text.startswith("/"):
            text = text[1:]
        elif beside is not None and "/" not in text:
            # A single name: beside the lower half of this directory.
            text = join(beside.rpartition("/")[0], text)
        else:
            return None
        if any(part in ("", ".", "..") for part in text.split("/")):
            return None
        if text in self.sources:  # two directories cannot have been the same one
            return None
        self.sources.add(text)
        return text

    def _reopen(self, fd: int, path: str) -> tuple[int, int]:
        if fd >= 0:
            os.close(fd)
        return self._open_lower(path)

    def _is_new(self, lower_fd: int) -> bool:
        return self.started is not None and (birth_ns(lower_fd) or 0) > self.started

    def _open_lower(self, path: str) -> tuple[int, int]:
        """A descriptor (-1 if it is no directory) and the st_mode (0 if there is nothing)."""
        try:
            fd = open_beneath(self.lower, path, os.O_PATH | os.O_NOFOLLOW)
        except PermissionError:
            raise
        except OSError:
            return -1, 0
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            return fd, mode
        os.close(fd)
        return -1, mode

    def _read(self, fd: int, lower_fd: int, path: str, source: str | None, *, xwhiteouts: bool) -> None:
        """Take down the entries of one directory that are no directories; queue those that are."""
        found, limit = self.found, self.limits.path
        base = f"{path}/" if path else ""
        deep = path.count("/") + 2 > self.limits.depth
        with os.scandir(fd) as listing:
            for item in listing:
                self.budget -= 1
                if self.budget < 0:
                    found.truncated = True
                    return
                name = item.name
                full = base + name
                # A character takes four bytes at most: measure only where it may matter.
                if len(full) * 4 > limit and len(os.fsencode(full)) > limit:
                    self._skip(full, "too-deep")
                elif item.is_dir(follow_symlinks=False):
                    if deep:
                        self._skip(full, "too-deep")
                    else:
                        beside = None if source is None else (f"{source}/{name}" if source else name)
                        self.stack.append((full, beside))
                else:
                    status = item.stat(follow_symlinks=False)
                    before = None
                    if lower_fd >= 0:
                        with suppress(FileNotFoundError, NotADirectoryError):
                            before = os.stat(name, dir_fd=lower_fd, follow_symlinks=False)
                            if self.seen is not None:
                                self.seen[full] = before
                    kind = _kind(status)
                    if xwhiteouts and kind == FILE and not status.st_size and self._xwhiteout(fd, name):
                        kind = WHITEOUT
                    if before is None:
                        if kind != WHITEOUT:  # else there is nothing to hide
                            found.entries.append(
                                Change(
                                    full, kind, status.st_mode, status.st_size, status.st_mtime_ns,
                                    status.st_nlink, 0,
                                )
                            )  # fmt: skip
                        continue
                    if kind == WHITEOUT or stat.S_ISDIR(before.st_mode):
                        found.hidden.add(f"{source}/{name}" if source else name)
                    alike = (
                        kind == FILE
                        and stat.S_ISREG(before.st_mode)
                        and status.st_size == before.st_size
                        and status.st_mtime_ns == before.st_mtime_ns
                    )
                    found.entries.append(
                        Change(
                            full, kind, status.st_mode, status.st_size, status.st_mtime_ns,
                            status.st_nlink, before.st_mode, alike,
                        )
                    )  # fmt: skip

    def _xwhiteout(self, directory: int, name: str) -> bool:
        """Whether an empty file is a whiteout of the second form (Linux 6.7)."""
        try:
            fd = open_beneath(directory, name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            return "whiteout" in xattrs(fd, self.prefix)
        finally:
            os.close(fd)


def found_at(lower: int, origin: bytes) -> str | None:
    """Where the workspace has, by now, the directory that the kernel noted when it was renamed."""
    # overlay.origin: version, magic, length, flags, type of the handle, uuid, handle.
    if len(origin) <= 21 or origin[:2] != b"\0\xfb":
        return None
    return find_handle(lower, origin[4], origin[21:])


def _kind(status: os.stat_result) -> str:
    mode = status.st_mode
    if stat.S_ISREG(mode):
        return FILE
    if stat.S_ISLNK(mode):
        return LINK
    return WHITEOUT if stat.S_ISCHR(mode) and status.st_rdev == 0 else SPECIAL


def _open_top(top: int, path: str) -> tuple[int, int, int]:
    """Open a directory of the top for reading, whatever mode the command has given it.

    Returns the descriptor, the mode and the time as the command left them.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = open_beneath(top, path, flags)
        mode = unlock(fd)
    except PermissionError:
        # The top is ours; only the command's mode is in the way.
        handle = open_beneath(top, path, DIRECTORY)
        try:
            mode = unlock(handle)
        finally:
            os.close(handle)
        fd = open_beneath(top, path, flags)
    return fd, stat.S_IFDIR | mode, os.fstat(fd).st_mtime_ns


def unlock(directory: int) -> int:
    """Let us work in a directory of the top; returns its mode as the command left it, which is noted there
    in case the step has to be run again.
    """
    mode = stat.S_IMODE(os.fstat(directory).st_mode)
    if os.geteuid() == 0:
        return mode
    path = descriptor_path(directory)
    try:
        noted = int(os.getxattr(path, MODE), 8) & 0o7777
    except (OSError, ValueError):
        noted = None
    if mode & 0o700 != 0o700:
        chmod_fd(directory, mode | 0o700)
        if noted is None:
            with suppress(OSError):
                os.setxattr(path, MODE, b"%o" % mode)
    return mode if noted is None else noted


def lock_again(top: str) -> None:
    """Undo what ``unlock`` did in a top that will be used again. Raises OSError."""
    root = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    found: list[tuple[str, int]] = []
    queue = [""]
    try:
        while queue:
            path = queue.pop()
            fd = open_beneath(root, path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                with suppress(OSError, ValueError):
                    found.append((path, int(os.getxattr(fd, MODE), 8) & 0o7777))
                with os.scandir(fd) as listing:
                    queue += [join(path, item.name) for item in listing if item.is_dir(follow_symlinks=False)]
            finally:
                os.close(fd)
        for path, mode in reversed(found):
            fd = open_beneath(root, path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                os.removexattr(fd, MODE)
                os.fchmod(fd, mode)
            finally:
                os.close(fd)
    finally:
        os.close(root)
