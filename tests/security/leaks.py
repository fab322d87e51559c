"""What a run may leave on the host: nothing. Judged by this lab's own marks, since others work here too."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tests.security.lab import processes_with

if TYPE_CHECKING:
    from tests.security.lab import World


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The host before a test."""

    state: frozenset[str]
    cgroups: frozenset[str]
    shared_memory: frozenset[str]
    devices: tuple[tuple[str, int, int, int], ...]
    switches: tuple[str, ...]


def state_directories(world: World) -> list[Path]:
    """Where Casemate keeps state for this mode."""
    if world.uid == 0:
        return [Path("/var/lib/casemate"), Path("/run/casemate")]
    return [world.home / ".local/state/casemate"]


def _files(roots: list[Path]) -> frozenset[str]:
    found: set[str] = set()
    for root in roots:
        for base, directories, names in os.walk(root):
            found.update(os.path.join(base, name) for name in [*directories, *names])
    return frozenset(found)


def _cgroups() -> frozenset[str]:
    """Groups of runs, in every hierarchy (not their common parent, which is kept)."""
    found: set[str] = set()
    for base, directories, _ in os.walk("/sys/fs/cgroup"):
        if os.path.basename(base) == "casemate":
            found.update(os.path.join(base, name) for name in directories)
    return frozenset(found)


def snapshot(world: World) -> Snapshot:
    return Snapshot(
        _files(state_directories(world)), _cgroups(), _files([Path("/dev/shm")]), _devices(), _switches()
    )


def _devices() -> tuple[tuple[str, int, int, int], ...]:
    """Owner and mode of the nodes that a caller's descriptors usually lead to."""
    found = []
    for name in ("null", "zero", "full", "random", "urandom", "tty", "ptmx"):
        info = os.stat(f"/dev/{name}")
        found.append((name, info.st_uid, info.st_gid, info.st_mode))
    return tuple(found)


def _switches() -> tuple[str, ...]:
    """Global values that an attack might have changed."""
    names = (
        "kernel/core_pattern",
        "kernel/hostname",
        "kernel/pid_max",
        "vm/memfd_noexec",
        "user/max_user_namespaces",
    )
    return tuple(Path("/proc/sys", name).read_text() for name in names)


def _populated(cgroup: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(Path(cgroup, "cgroup.procs").read_text())
    return False


def _of_running(path: str) -> bool:
    """State of a run that still lives is not left behind (other runs may share root's state)."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    if path.encode() in Path(f"/proc/{name}/mountinfo").read_bytes():
                        return True
    return False


def running_left(world: World) -> list[str]:
    """Processes and mounts of the lab's sandboxes."""
    left = []
    mark = world.base.name + "/s"
    own = {world.victim.pid, os.getpid()}
    left += [f"process {pid}: {_name(pid)}" for pid in processes_with(mark) if pid not in own]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    left += [f"mount {line}" for line in mounts if mark in line]
    return left


def left_behind(before: Snapshot, world: World) -> list[str]:
    """Everything that is there now, was not there before, and belongs to no living run."""
    left = running_left(world)
    left += [f"cgroup {path}" for path in sorted(_cgroups() - before.cgroups) if not _populated(path)]
    state = sorted(_files(state_directories(world)) - before.state)
    left += [f"file {path}" for path in state if not _expected(path) and not _of_running(path)]
    left += [f"device {row}" for row in _devices() if row not in before.devices]
    left += [f"global value {value!r}" for value in _switches() if value not in before.switches]
    left += [f"shared memory {path}" for path in sorted(_files([Path("/dev/shm")]) - before.shared_memory)]
    return left


def _expected(path: str) -> bool:
    """Directories that are made once and kept; they hold nothing of one run."""
    return os.path.isdir(path) and os.path.basename(path) in ("casemate", "run", "locks", "uids", "views")


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    return "?"
