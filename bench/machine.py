"""The facts about the machine that launch costs depend on. No name, address or path of it is recorded."""

from __future__ import annotations

import os
import platform
from pathlib import Path

__all__ = ["facts", "load"]


def load() -> float:
    """The one-minute load average."""
    return round(os.getloadavg()[0], 2)


def facts() -> dict[str, object]:
    """Processor, kernel, memory, cgroup mode and the kernel switches that move the figures."""
    return {
        "cpu": _first_after("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "uid": os.getuid(),
        "cgroup": _cgroup(),
        "favordynmods": "favordynmods" in _text("/proc/mounts"),
        "tmp_filesystem": _filesystem_of(os.getcwd()),
    }


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _first_after(path: str, key: str) -> str:
    for line in _text(path).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return platform.processor() or "unknown"


def _cgroup() -> str:
    kinds = {line.split()[2] for line in _text("/proc/mounts").splitlines() if " cgroup" in line}
    if "cgroup" in kinds:
        return "v1" if "cgroup2" not in kinds else "v1 with a v2 tree"
    return "v2" if "cgroup2" in kinds else "none"


def _filesystem_of(path: str) -> str:
    best = ("", "unknown")
    for line in _text("/proc/mounts").splitlines():
        _, where, kind = line.split()[:3]
        inside = path == where or path.startswith(where.rstrip("/") + "/")
        if inside and len(where) >= len(best[0]):
            best = (where, kind)
    return best[1]
