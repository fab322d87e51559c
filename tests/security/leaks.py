"""What a run may leave on the host: nothing. Only this lab's own traces are judged: others work here too.

Kept on purpose, and not a leak: changes that were held back (``held``), for the person to look at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.security.lab import STARTED, processes_with

if TYPE_CHECKING:
    from tests.security.lab import World

# Directories that are made once and kept; they hold nothing of one run.
_PERSISTENT = ("casemate", "run", "locks", "uids", "views", "held", "caches", "trust", "live")
_NODES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx")
_SWITCHES = (
    "kernel/core_pattern", "kernel/hostname", "kernel/pid_max", "vm/memfd_noexec", "user/max_user_namespaces",
    "kernel/printk", "fs/file-max",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The host before a test."""

    first_scene: int
    started: frozenset[int]
    devices: tuple[tuple[str, int, int, int], ...]
    switches: tuple[str, ...]


def snapshot(world: World) -> Snapshot:
    return Snapshot(world.count, frozenset(STARTED), _devices(), _switches())


def _devices() -> tuple[tuple[str, int, int, int], ...]:
    """Owner and mode of the nodes that a caller's descriptors usually lead to."""
    found = []
    for name in _NODES:
        info = os.stat(f"/dev/{name}")
        found.append((name, info.st_uid, info.st_gid, info.st_mode))
    return tuple(found)


def _switches() -> tuple[str, ...]:
    """Global values that an attack might have changed."""
    return tuple(Path("/proc/sys", name).read_text() for name in _SWITCHES)


def state_directories(world: World) -> list[Path]:
    """Where Casemate keeps state for this mode."""
    if world.uid == 0:
        return [Path("/var/lib/casemate"), Path("/run/casemate")]
    return [world.home / ".local/state/casemate"]


def workspace_key(ws: Path) -> str:
    """The end of the names under which state of a workspace is kept."""
    return hashlib.blake2b(os.fsencode(str(ws)), digest_size=10).hexdigest()


def _keys(world: World, since: int) -> list[str]:
    return [workspace_key(world.base / f"s{number}/ws") for number in range(since + 1, world.count + 1)]


def _state(world: World, since: int) -> list[str]:
    """Files of state that belong to the lab's workspaces (as uid 1000 all state is the lab's)."""
    keys = _keys(world, since)
    found = []
    for root in state_directories(world):
        for base, directories, names in os.walk(root):
            if os.path.basename(base) in ("held", "caches"):
                directories[:] = []
                continue
            for name in [*directories, *names]:
                path = os.path.join(base, name)
                if os.path.isdir(path) and name in _PERSISTENT:
                    continue
                if world.uid or any(key in path for key in keys):
                    found.append(path)
    return sorted(found)


def _cgroups(pids: set[int]) -> list[str]:
    """Groups named after a process that the lab started."""
    found = []
    for base, directories, _ in os.walk("/sys/fs/cgroup"):
        if os.path.basename(base) == "casemate":
            for name in directories:
                with contextlib.suppress(ValueError):
                    if int(name.partition("-")[0], 16) in pids:
                        found.append(os.path.join(base, name))
    return sorted(found)


def running_left(world: World, since: int) -> list[str]:
    """Processes and mounts of the lab's sandboxes."""
    mark = world.base.name + "/s"
    own = {world.victim.pid, os.getpid()}
    left = [f"process {pid}: {_name(pid)}" for pid in processes_with(mark) if pid not in own]
    marks = [mark, *_keys(world, since)]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left += [f"mount {line}"] if any(word in line for word in marks) else []
    return left


def left_behind(before: Snapshot, world: World) -> list[str]:
    """Everything of the lab's runs that is there still, and what they changed of the host."""
    left = running_left(world, before.first_scene)
    left += [f"cgroup {path}" for path in _cgroups(STARTED - before.started)]
    left += [f"file {path}" for path in _state(world, before.first_scene)]
    left += [
        f"device {row}, was {old}" for row, old in zip(_devices(), before.devices, strict=True) if row != old
    ]
    left += [f"global value {value!r}" for value in _switches() if value not in before.switches]
    for name in os.listdir("/dev/shm"):
        with contextlib.suppress(OSError):
            if os.lstat(f"/dev/shm/{name}").st_uid >= 0x70000000:
                left.append(f"shared memory {name}")
    return left


def clean(world: World, ws: Path) -> None:
    """Remove what is kept for a workspace that will not come back."""
    key = workspace_key(ws)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place = line.split()[4]
        if key in place:
            subprocess.run(["umount", "--lazy", place], check=False)
    for root in state_directories(world):
        for kind in ("held", "views", "run/views"):
            directory = root / kind
            for path in directory.iterdir() if directory.is_dir() else ():
                if key in path.name:
                    shutil.rmtree(path, ignore_errors=True)


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    return "?"
