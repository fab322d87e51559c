"""How each row is judged: by what changed, arrived or was seen on the host.

A judge returns which parts of the attack got through. What only the inside can know (did a system call
succeed) is taken from the act's own record; a missing or crashed record makes the run invalid, never held.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.security.lab import processes_with

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.security.engines import Engine, Outcome
    from tests.security.lab import Scene


@dataclasses.dataclass
class Seen:
    """All that a judge may look at."""

    scene: Scene
    outcome: Outcome
    engine: Engine
    watched: dict[str, Any]

    def record(self, act: str) -> dict[str, Any]:
        return self.outcome.records.get(act, {})


Parts = dict[str, bool]
if TYPE_CHECKING:
    Judge = Callable[[Seen], Parts]


def data_holds_secret(*acts: str) -> Judge:
    """The canary came out in an act's record."""

    def judge(seen: Seen) -> Parts:
        secret = seen.scene.world.secret
        return {act.partition(".")[2]: secret[:32] in str(seen.record(act).get("data", "")) for act in acts}

    return judge


def shadow(seen: Seen) -> Parts:
    """The bytes read inside are the host's."""
    truth = hashlib.sha256(Path("/etc/shadow").read_bytes()).hexdigest()
    return {"read": seen.record("files.read_shadow").get("sha") == truth}


def outside_write(seen: Seen) -> Parts:
    changed = seen.scene.outside_changed()
    return {
        "existing": any(name.endswith("target.txt") for name in changed),
        "new": any(name.endswith("new.txt") for name in changed),
        "home": "home" in changed,
    }


def outside_any(seen: Seen) -> Parts:
    """Anything outside the workspace differs."""
    return {"outside": bool(seen.scene.outside_changed())}


def symlinks_out(seen: Seen) -> Parts:
    changed = " ".join(seen.scene.outside_changed())
    return {name: name + ".txt" in changed for name in ("target", "through", "made", "made2")}


def planted(*names: str) -> Judge:
    """The token is in these files of the host's workspace."""

    def judge(seen: Seen) -> Parts:
        carried = seen.scene.carries()
        return {name: name in carried for name in names}

    return judge


def planted_hook(seen: Seen) -> Parts:
    """The token is in any hook or git configuration of the host's workspace."""
    carried = [name for name in seen.scene.carries() if "/hooks/" in "/" + name or name.endswith("config")]
    return {"planted": bool(carried)}


def envrc_and_bin(seen: Seen) -> Parts:
    """.envrc must not arrive; a changed executable may arrive if the report names it."""
    carried = seen.scene.carries()
    listed = str(seen.outcome.applied.get("executables", []))
    return {
        ".envrc": ".envrc" in carried,
        "eslint": "node_modules/.bin/eslint" in carried and "node_modules/.bin/eslint" not in listed,
    }


def record_ok(*acts: str) -> Judge:
    """The call itself succeeded."""

    def judge(seen: Seen) -> Parts:
        return {act.partition(".")[2]: bool(seen.record(act).get("ok")) for act in acts}

    return judge


def keys_ok(act: str, *keys: str, below: str = "") -> Judge:
    """The named parts of one act's record succeeded."""

    def judge(seen: Seen) -> Parts:
        record = seen.record(act)
        inner = record.get(below, {}) if below else record
        return {key: bool(inner.get(key, {}).get("ok")) for key in keys}

    return judge


def host_pids(seen: Seen) -> Parts:
    """A process of the host was seen: the victim's command line names the lab."""
    data = str(seen.record("procs.host_pids").get("data", "")).replace(str(seen.scene.ws), "")
    return {"victim": seen.scene.world.base.name in data}


def kill_and_renice(seen: Seen) -> Parts:
    victim = seen.scene.world.victim
    parts = {"signal": victim.signals() > 0, "renice": victim.nice() != 0}
    victim.restore()
    return parts


def arrived(**marks: str) -> Judge:
    """A listener of the host received the mark followed by this run's token."""

    def judge(seen: Seen) -> Parts:
        wanted = {name: mark + seen.scene.token for name, mark in marks.items()}
        wait = 0.0 if seen.engine.sandboxed else 1.0
        got = seen.scene.world.listeners.got(*wanted.values(), wait=wait)
        return {name: mark in got for name, mark in wanted.items()}

    return judge


def tiocsti(seen: Seen) -> Parts:
    record = seen.record("kernel.tiocsti")
    inside = record.get("ttys", [])
    return {
        "injected": "INJECT" in seen.outcome.tty_input,
        "plain": bool(record.get("plain")),
        "high": bool(record.get("high")),
        "host-tty": seen.outcome.tty_identity in inside,
    }


def memfd(seen: Seen) -> Parts:
    record = seen.record("kernel.memfd_exec")
    return {"exec": any(record.get(name, {}).get("ok") for name in ("plain", "cloexec", "exec"))}


def forks(seen: Seen) -> Parts:
    """All 600 were alive at once, counted on the host."""
    return {"600": seen.watched["most"] >= 600}


def touched(seen: Seen) -> Parts:
    """The whole GiB was touched. The lines come out while it happens."""
    best: dict[str, int] = {}
    for line in seen.outcome.says("touched"):
        _, index, mib = line.split()
        best[index] = max(best.get(index, 0), int(mib))
    return {"1GiB": sum(best.values()) >= 1024}


def written(seen: Seen) -> Parts:
    """400 MiB arrived on the host."""
    big = seen.scene.ws / "big.bin"
    size = big.stat().st_blocks * 512 if big.exists() else 0
    return {"400MiB": size >= 400 << 20}


def inherited(seen: Seen) -> Parts:
    data = str(seen.record("procs.inherited_fds").get("data", ""))
    return {"fd": seen.scene.world.secret in data}


def daemon(seen: Seen) -> Parts:
    """A process of that name is on the host after the run."""
    name = f"daemon-{seen.scene.token}"
    end = time.monotonic() + (1.0 if not seen.engine.sandboxed else 0.3)
    alive: list[int] = []
    while time.monotonic() < end:
        alive = [pid for pid in processes_with(name) if _cmdline(pid).startswith(name)]
        if bool(alive) != seen.engine.sandboxed:
            break
        time.sleep(0.02)
    for pid in alive:
        os.kill(pid, 9)
    return {"alive": bool(alive)}


def _cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def shared_tmp(seen: Seen) -> Parts:
    scene = seen.scene
    new = Path(f"/tmp/{scene.world.base.name}-{scene.token}")
    return {
        "read": scene.world.secret in str(seen.record("files.shared_tmp").get("data", "")),
        "write": new.exists(),
    }


def root_powers(seen: Seen) -> Parts:
    """Clock, kernel log and capabilities."""
    clock, dmesg = seen.record("kernel.clock"), seen.record("kernel.dmesg")
    status = seen.record("procs.privileges").get("status", {})
    caps = [status.get(name, "?") for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")]
    return {
        "clock": bool(clock.get("tick", {}).get("ok") or clock.get("settime", {}).get("ok")),
        "dmesg": bool(dmesg.get("syslog", {}).get("ok") or dmesg.get("kmsg", {}).get("ok")),
        "caps": not all(value.strip("0") == "" for value in caps),
    }


def mounts(seen: Seen) -> Parts:
    parts = {"mount": bool(seen.record("kernel.mount_old").get("ok"))}
    parts.update(keys_ok("kernel.mount_new", "fsopen", "open_tree", "fspick", "mount_setattr")(seen))
    return parts
