"""The built-in policies that every other layer starts from."""

from __future__ import annotations

import os

from casemate.errors import PolicyError
from casemate.policy.model import PRESETS

__all__ = ["DEFAULT", "values"]

DEFAULT = "workspace-write"

_GIB = 1 << 30


def _memory() -> int:
    """Three quarters of the machine, at most 8 GiB: a large build fits, and the host stays usable."""
    try:
        ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 4 * _GIB
    return min(8 * _GIB, ram * 3 // 4)


def values(name: str) -> dict[str, object]:
    """Every field of the preset ``name``, by its path. Raises PolicyError for an unknown name."""
    if name not in PRESETS:
        from casemate.policy.source import suggestion

        raise PolicyError(
            f"there is no preset {name!a}{suggestion(name, PRESETS)}",
            hint=f"presets: {', '.join(PRESETS)}",
            field="preset",
        )
    full = name == "full-access"
    return {
        "filesystem.workspace": "read" if name == "read-only" else "write",
        "filesystem.read": (),
        "filesystem.write": (),
        "filesystem.deny": (),
        "filesystem.tools": True,
        "filesystem.cache": (),
        "filesystem.protect": (),
        "network.mode": "host" if full else "none",
        "network.allow": (),
        "network.deny": (),
        "network.ask": False,
        "network.parent-proxy": None,
        "network.publish": (),
        "network.sockets": (),
        "network.ssh-agent": (),
        "network.credentials": (),
        "network.requests": (),
        # Without a boundary nothing could hold a limit, so full-access promises none.
        "resources.memory": None if full else _memory(),
        "resources.cpu": None if full else float(os.cpu_count() or 1),
        "resources.pids": None if full else 4096,
        "resources.open-files": None if full else 4096,
        "resources.file-size": None if full else 4 * _GIB,
        "resources.disk": None if full else 4 * _GIB,
        # A forgotten server ends after a day.
        "resources.timeout": None if full else 86400.0,
        "resources.output": None if full else _GIB,
        "resources.scope": "auto",
        "environment.pass": (),
        "environment.set": {},
        "isolation.boundary": "none" if full else "process",
        "isolation.degrade": (),
    }
