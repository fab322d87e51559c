"""Control groups of both versions, as far as a limit per sandbox needs them.

A group is made below the caller's own, so limits set above keep counting. A sandbox's first process
puts *itself* in by writing ``0`` to ``tasks`` (version 1): for the calling thread alone the kernel
skips the global thread-group lock, whose first taker after 100 ms of idling waits 5 to 11 ms for a
grace period (measured on 6.18, through ``cgroup.procs`` of the same hierarchies).
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

__all__ = ["Group", "Hierarchies", "Limits", "detect", "remove_leftovers"]

_V1 = ("memory", "pids", "cpu")


class Limits:
    """What a group enforces: bytes, processes, and cores as a fraction; ``None`` is no limit."""

    __slots__ = ("cpu", "memory", "pids")

    def __init__(self, memory: int | None, pids: int | None, cpu: float | None) -> None:
        self.memory = memory
        self.pids = pids
        self.cpu = cpu


class Hierarchies:
    """Where groups can be made: controller name -> the directory of the caller's own group."""

    __slots__ = ("base", "reasons", "version")

    def __init__(self, version: int, base: dict[str, str], reasons: dict[str, str]) -> None:
        self.version = version
        self.base = base
        self.reasons = reasons

    def parents(self) -> list[str]:
        """The directories below which groups are made, one per hierarchy."""
        return sorted({f"{path}/casemate" for path in self.base.values()})


def _read(path: str) -> str:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(handle, 65536).decode()
    finally:
        os.close(handle)


def _write(path: str, text: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)


def _own() -> dict[str, str]:
    """The caller's group per controller, from ``/proc/self/cgroup``; version 2 under the empty name."""
    own: dict[str, str] = {}
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            own[name] = path.rstrip("/")
    return own


def detect() -> Hierarchies:
    """Find the hierarchies in which the caller may make groups, and say why not where it may not."""
    base: dict[str, str] = {}
    reasons: dict[str, str] = {}
    try:
        own = _own()
        mounts = _read("/proc/self/mounts").splitlines()
    except OSError as error:
        return Hierarchies(0, {}, dict.fromkeys(_V1, f"no control groups: {error}"))
    unified = ""
    for line in mounts:
        _, where, kind, options, *_ = line.split(" ")
        if kind == "cgroup2" and not unified:
            unified = where
        if kind == "cgroup":
            for name in set(options.split(",")) & set(_V1):
                base.setdefault(name, where + own.get(name, ""))
    if base:
        for name in list(base):
            if not os.access(base[name], os.W_OK | os.X_OK):
                reasons[name] = f"{base[name]} is not writable"
                del base[name]
        for name in _V1:
            if name not in base:
                reasons.setdefault(name, "the controller is not mounted")
        return Hierarchies(1, base, reasons)
    if unified:
        return _detect_unified(unified + own.get("", ""))
    return Hierarchies(0, {}, dict.fromkeys(_V1, "no control groups are mounted"))


def _detect_unified(group: str) -> Hierarchies:
    """Version 2: the own group must hand its controllers down, which it can only if it is ours.

    A process may not sit in a group that hands controllers to children, so a writable own group is
    split: the caller moves to a leaf next to the sandboxes' groups.
    """
    reasons: dict[str, str] = {}
    try:
        offered = _read(f"{group}/cgroup.controllers").split()
        handed = _read(f"{group}/cgroup.subtree_control").split()
    except OSError as error:
        return Hierarchies(0, {}, dict.fromkeys(_V1, f"{group}: {error.strerror}"))
    wanted = [name for name in _V1 if name in offered]
    for name in _V1:
        if name not in offered:
            reasons[name] = f"the controller is not delegated to {group}"
    missing = [name for name in wanted if name not in handed]
    if missing:
        try:
            if os.path.exists(f"{group}/cgroup.type"):  # not the root group, which may hold processes
                leaf = f"{group}/casemate-self"
                os.makedirs(leaf, exist_ok=True)
                _write(f"{leaf}/cgroup.procs", "0")
            _write(f"{group}/cgroup.subtree_control", " ".join(f"+{name}" for name in missing))
        except OSError as error:
            for name in missing:
                reasons[name] = f"{group} cannot hand {name} down: {error.strerror}"
            wanted = [name for name in wanted if name in handed]
    if not os.access(group, os.W_OK | os.X_OK):
        return Hierarchies(2, {}, dict.fromkeys(_V1, f"{group} is not writable"))
    return Hierarchies(2, dict.fromkeys(wanted, group), reasons)


def _settings(version: int, limits: Limits) -> dict[str, tuple[str, str]]:
    """Controller -> (file, value) for each limit that is asked for."""
    chosen: dict[str, tuple[str, str]] = {}
    if limits.memory is not None:
        name = "memory.limit_in_bytes" if version == 1 else "memory.max"
        chosen["memory"] = (name, str(limits.memory))
    if limits.pids is not None:
        chosen["pids"] = ("pids.max", str(limits.pids))
    if limits.cpu is not None:
        quota = max(1000, round(limits.cpu * 100_000))
        chosen["cpu"] = ("cpu.cfs_quota_us", str(quota)) if version == 1 else ("cpu.max", f"{quota} 100000")
    return chosen


class Group:
    """One sandbox's group in every hierarchy that is needed."""

    __slots__ = ("_refused", "directories", "name", "version")

    def __init__(self, hierarchies: Hierarchies, name: str, limits: Limits) -> None:
        self.name = name
        self.version = hierarchies.version
        self.directories: dict[str, str] = {}
        self._refused = -1  # forks that the limit refused, as of the moment when the group was killed
        settings = _settings(self.version, limits)
        try:
            for controller, base in hierarchies.base.items():
                if controller not in settings and controller != "memory":
                    continue
                directory = f"{base}/casemate/{name}"
                try:
                    self._make(directory)
                except FileExistsError:
                    if directory not in self.directories.values():
                        raise
                self.directories[controller] = directory
                if controller in settings:
                    file, value = settings[controller]
                    _write(f"{directory}/{file}", value)
        except OSError:
            self.remove()
            raise

    def _make(self, directory: str) -> None:
        """Make a directory and its parent, which every other launcher may remove at any moment."""
        for _ in range(100):
            try:
                os.mkdir(directory)
                return
            except FileNotFoundError:
                parent = os.path.dirname(directory)
                # It looks twice, and is told that it exists when it has vanished again in between.
                with suppress(FileExistsError):
                    os.makedirs(parent, exist_ok=True)
            if self.version == 2:
                try:
                    _write(f"{parent}/cgroup.subtree_control", "+memory +pids +cpu")
                except FileNotFoundError:
                    continue
        raise FileNotFoundError(2, "the parent group vanishes again and again", directory)

    def entrances(self) -> list[int]:
        """Descriptors to which a new process writes ``0`` to put itself into the group."""
        name = "tasks" if self.version == 1 else "cgroup.procs"
        places = set(self.directories.values())
        return [os.open(f"{place}/{name}", os.O_WRONLY | os.O_CLOEXEC) for place in sorted(places)]

    def processes(self) -> list[int]:
        """The pids in the group, as seen from the caller."""
        for directory in self.directories.values():
            try:
                return [int(word) for word in _read(f"{directory}/cgroup.procs").split()]
            except OSError:
                continue
        return []

    def population(self) -> int:
        """How many tasks the group holds, from the pids controller; -1 where there is none."""
        directory = self.directories.get("pids")
        if directory is None:
            return -1
        try:
            return int(_read(f"{directory}/pids.current"))
        except (OSError, ValueError):
            return -1

    def kill(self) -> None:
        """SIGKILL every process of the group: at once on version 2, by rounds on version 1.

        Killing only the init of a pid namespace lets a fork bomb run on until init gets a core:
        0.1 to 1.5 s with 300 processes, 0.1 s this way (measured on 6.18). A low quota slows dying,
        so it is lifted first; and from here on nobody can fork, which is no event of the limit.
        """
        if self.version == 2:
            for directory in set(self.directories.values()):
                _write(f"{directory}/cgroup.kill", "1")
            return
        if "cpu" in self.directories:
            with suppress(OSError):
                _write(f"{self.directories['cpu']}/cpu.cfs_quota_us", "-1")
        if "pids" in self.directories and self._refused < 0:
            self._refused = self._refused_forks()
            with suppress(OSError):
                _write(f"{self.directories['pids']}/pids.max", "0")
        for _ in range(100):
            pids = self.processes()
            for pid in pids:
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
            if not pids:
                return
            time.sleep(0.001)  # the dying need the processor

    def events(self, *, failed: bool = True) -> dict[str, int]:
        """What the host saw: ``peak`` (bytes), and, of a command that failed, ``oom_kill`` and ``pids_max``
        (refused forks). A command that ended well had no limit that ended it, and each file costs 30 us.
        """
        seen: dict[str, int] = {}
        memory, pids = self.directories.get("memory"), self.directories.get("pids")
        try:
            if memory and self.version == 1:
                seen["peak"] = int(_read(f"{memory}/memory.max_usage_in_bytes"))
                if failed:
                    seen["oom_kill"] = _field(_read(f"{memory}/memory.oom_control"), "oom_kill")
            elif memory:
                seen["peak"] = int(_read(f"{memory}/memory.peak"))
                if failed:
                    seen["oom_kill"] = _field(_read(f"{memory}/memory.events"), "oom_kill")
        except (OSError, ValueError):
            pass
        if pids and failed:
            seen["pids_max"] = self._refused if self._refused >= 0 else self._refused_forks()
        return seen

    def _refused_forks(self) -> int:
        try:
            return _field(_read(f"{self.directories['pids']}/pids.events"), "max")
        except (OSError, ValueError):
            return 0

    def remove(self) -> bool:
        """Remove the group's directories; False while a process is still leaving one."""
        for controller, directory in list(self.directories.items()):
            try:
                os.rmdir(directory)
            except FileNotFoundError:
                pass
            except OSError:
                return False
            del self.directories[controller]
        return True


def remove_leftovers(parent: str) -> None:
    """Remove groups whose launcher (the pid in their name) is dead, and the parent if it is empty then."""
    try:
        names = os.listdir(parent)
    except OSError:
        return
    for name in names:
        pid, dash, _ = name.partition("-")
        try:
            if dash and not os.path.exists(f"/proc/{int(pid, 16)}"):
                os.rmdir(f"{parent}/{name}")
        except (OSError, ValueError):
            continue
    try:
        os.rmdir(parent)
    except OSError:
        return


def _field(text: str, name: str) -> int:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
