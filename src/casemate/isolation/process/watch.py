"""What no kernel limit covers here, measured from the host: bytes on disk and memory of a process tree.

Used where a tree-wide limit cannot be had (no control group, no quota). It looks every few tens of
milliseconds, so a fast writer overshoots by what it writes in between; the offer calls it ``watched``.
"""

from __future__ import annotations

import os
import stat
import time

from casemate.sys.usage import TOO_MUCH, disk_usage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.isolation.process.site import Site

__all__ = ["Watch", "watch_site"]

_SHARE = 4  # of the room that is left: what may be written between two looks
_PAUSE, _PATIENCE = 1.0, 20  # a look is due after a second, or 20 times what the last one took
_MEASURED, _PATIENCE_DIRECT = 5.0, 400  # a workspace: seconds to measure it, and how seldom


class Watch:
    """Watches one sandbox. ``tops`` are the directories its writes go to; ``pid`` is its init; ``scratch``
    is its own file system where that lies in memory, else -1. Beside the limits ``disk-used`` says what is in
    the tops already.
    """

    def __init__(
        self, limits: dict[str, int], tops: list[str], pid: int, scratch: int = -1, patience: int = _PATIENCE
    ) -> None:
        self._limits = limits
        self._patience = patience
        self._tops = tops
        self._pid = pid
        self._scratch = scratch
        self._free = [_free(top) for top in tops]
        self._next = time.monotonic() + _PAUSE
        self.used = limits.get("disk-used", 0)
        """Bytes in the tops when it looked last."""

    def exceeded(self) -> str:
        """The name of a limit that is exceeded right now, or ``""``."""
        limit = self._limits.get("memory")
        if limit is not None and self._memory_exceeds(limit):
            return "memory"
        limit = self._limits.get("disk")
        if limit is not None and self._tops and self._look_due(limit) and self._look() > limit:
            return "disk"
        return ""

    def _memory_exceeds(self, limit: int) -> bool:
        tree = _tree(self._pid)
        files = _in_files(self._scratch)
        # Cheap and too high: pages that forked processes share are counted once for each of them.
        if sum(_resident(pid) for pid in tree) + files <= limit:
            return False
        shares = [_proportional(pid) for pid in tree]
        # What is mapped of the files is in both numbers.
        return sum(own for own, _ in shares) + max(sum(shared for _, shared in shares), files) > limit

    def _look_due(self, limit: int) -> bool:
        """Whether it is worth the walk: the file system's free space, one cheap call, has shrunk by a share
        of what is left; or, since others write and delete there too, it was long ago.
        """
        now = [_free(top) for top in self._tops]
        shrunk = sum(before - free for before, free in zip(self._free, now, strict=True))
        return shrunk > max(0, limit - self.used) // _SHARE or time.monotonic() > self._next

    def _look(self) -> int:
        began = time.monotonic()
        self._free = [_free(top) for top in self._tops]
        self.used = sum(disk_usage(top)[0] for top in self._tops) + _unlinked(self._pid)
        now = time.monotonic()
        self._next = now + max(_PAUSE, self._patience * (now - began))
        return self.used


def watch_site(site: Site, limits: dict[str, int], pid: int) -> Watch | None:
    """What watches a sandbox that has just been started; None without a limit to watch.

    A workspace that is changed directly is measured now: what it holds is no part of the limit.
    """
    if not limits:
        return None
    scratch = -1 if site.spec.scratch_image else site.scratch
    if site.spec.direct is None or "disk" not in limits:
        return Watch(limits, site.on_disk, pid, scratch)
    before, whole = disk_usage(site.spec.direct.target, _MEASURED)
    if not whole:
        before = TOO_MUCH  # so large a tree cannot be measured again and again
    limits = {**limits, "disk": limits["disk"] + before, "disk-used": before}
    return Watch(limits, [*site.on_disk, site.spec.direct.target], pid, scratch, _PATIENCE_DIRECT)


def _free(path: str) -> int:
    try:
        facts = os.statvfs(path)
    except FileNotFoundError:
        return 0  # the host has moved a workspace away; nothing can be changed in it then
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
