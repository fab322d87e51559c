"""What no kernel limit covers here, measured from the host: bytes on disk and memory of a process tree.

Used where a tree-wide limit cannot be had (no control group, no quota). It looks every few tens of
milliseconds, so a fast writer overshoots by what it writes in between; the offer calls it ``watched``.
"""

from __future__ import annotations

import errno
import os
import stat

__all__ = ["Watch"]

_LONG = 2048  # of the 4096 bytes that a path may have
_TOO_MUCH = 1 << 62
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Watch:
    """Watches one sandbox. ``tops`` are the directories its writes go to; ``pid`` is its init; ``scratch``
    is its own file system where that lies in memory, else -1.
    """

    def __init__(self, limits: dict[str, int], tops: list[str], pid: int, scratch: int = -1) -> None:
        self._limits = limits
        self._tops = tops
        self._pid = pid
        self._scratch = scratch
        self._free_at_start = [_free(top) for top in tops]

    def exceeded(self) -> str:
        """The name of a limit that is exceeded right now, or ``""``."""
        limit = self._limits.get("memory")
        if limit is not None:
            tree = _tree(self._pid)
            files = _in_files(self._scratch)
            # Cheap and too high: pages that forked processes share are counted once for each of them.
            most = sum(_resident(pid) for pid in tree) + files
            if most > limit:
                shares = [_proportional(pid) for pid in tree]
                # What is mapped of the files is in both numbers.
                if sum(own for own, _ in shares) + max(sum(shared for _, shared in shares), files) > limit:
                    return "memory"
        limit = self._limits.get("disk")
        if limit is not None and self._tops:
            # The file system's free space is one cheap call; only when it has shrunk by a quarter of the
            # limit is it worth the walk. Others may write there too, so it decides nothing by itself.
            shrunk = sum(
                before - _free(top) for top, before in zip(self._tops, self._free_at_start, strict=True)
            )
            if shrunk > limit // 4:
                used = sum(_size(top) for top in self._tops) + _unlinked(self._pid)
                if used > limit:
                    return "disk"
        return ""


def _free(path: str) -> int:
    facts = os.statvfs(path)
    return facts.f_bfree * facts.f_frsize


def _tree(pid: int) -> list[int]:
    """Init and everything below it; what loses its parent becomes a child of init, so nothing escapes."""
    found: list[int] = []
    queue = [pid]
    while queue and len(found) < 65536:
        current = queue.pop()
        found.append(current)
        try:
            for thread in os.listdir(f"/proc/{current}/task"):
                with open(f"/proc/{current}/task/{thread}/children") as file:
                    queue += [int(word) for word in file.read().split()]
        except OSError:
            continue
    return found


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            fields = file.read().split()
    except OSError:
        return 0
    return int(fields[1]) * 4096 if len(fields) > 1 else 0


def _in_files(scratch: int) -> int:
    """What a file system in memory takes: its content, and about 1 KiB for each of its files."""
    if scratch < 0:
        return 0
    facts = os.fstatvfs(scratch)
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize + (facts.f_files - facts.f_ffree) * 1024


def _proportional(pid: int) -> tuple[int, int]:
    """The process's share of its own memory, swapped out or not, and of what lies in files of memory."""
    own, shared = 0, 0
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            for line in file:
                if line.startswith(("Pss_Anon:", "SwapPss:")):
                    own += int(line.split()[1]) * 1024
                elif line.startswith("Pss_Shmem:"):
                    shared += int(line.split()[1]) * 1024
    except OSError:
        pass
    return own, shared


class _Place:
    """A directory that paths start from, open as long as one of them is still to be looked at."""

    __slots__ = ("handle",)

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __del__(self) -> None:
        os.close(self.handle)


def _size(top: str) -> int:
    """Blocks of everything below; iterative, following nothing, deaf to what vanishes meanwhile.

    However deep it is: a path that gets long starts anew from a directory on the way. What is too deep even
    for that counts as more than there can be.
    """
    total = 0
    queue: list[tuple[_Place, str]] = []
    place, path = _Place(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)), top
    while True:
        try:
            handle = os.open(path, _DIRECTORY, dir_fd=place.handle)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                return _TOO_MUCH
        else:
            here = _Place(handle)
            if len(path) > _LONG:
                place, path = here, "."
            try:
                with os.scandir(handle) as entries:
                    for entry in entries:
                        facts = entry.stat(follow_symlinks=False)
                        total += facts.st_blocks * 512
                        if stat.S_ISDIR(facts.st_mode):
                            queue.append((place, f"{path}/{entry.name}"))
            except OSError:
                pass
        if not queue:
            return total
        place, path = queue.pop()


def _unlinked(pid: int) -> int:
    """Files that are open in the sandbox and have no name any more."""
    seen: dict[tuple[int, int], int] = {}
    for process in _tree(pid):
        try:
            for number in os.listdir(f"/proc/{process}/fd"):
                try:
                    facts = os.stat(f"/proc/{process}/fd/{number}")
                except OSError:
                    continue
                if facts.st_nlink == 0 and stat.S_ISREG(facts.st_mode):
                    seen[facts.st_dev, facts.st_ino] = facts.st_blocks * 512
        except OSError:
            continue
    return sum(seen.values())
