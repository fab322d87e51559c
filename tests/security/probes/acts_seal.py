"""What a sealed process can see of itself and of its neighbours."""

from __future__ import annotations

import ctypes
import os
import resource
from typing import Any

import raw

Params = dict[str, Any]
Result = dict[str, Any]


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError as error:
        return f"errno {error.errno}"


def look(p: Params) -> Result:
    """Status, namespaces, descriptors, mounts, limits, and the neighbours' environments."""
    descriptors = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptors[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
    kinds = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
    limits = {
        name: list(resource.getrlimit(getattr(resource, name)))
        for name in (
            "RLIMIT_NOFILE",
            "RLIMIT_NPROC",
            "RLIMIT_FSIZE",
            "RLIMIT_CORE",
            "RLIMIT_DATA",
            "RLIMIT_AS",
        )
    }
    neighbours = {
        pid: {
            "status": _text(f"/proc/{pid}/status"),
            "environ": _text(f"/proc/{pid}/environ"),
            "owner": os.stat(f"/proc/{pid}").st_uid if os.path.exists(f"/proc/{pid}") else -1,
        }
        for pid in raw.visible_pids()
    }
    return {
        "ok": True,
        "status": _text("/proc/self/status"),
        "uid_map": _text("/proc/self/uid_map").split(),
        "ns": {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in kinds},
        "fds": descriptors,
        "mountinfo": _text("/proc/self/mountinfo"),
        "limits": limits,
        "neighbours": neighbours,
        "pids": raw.visible_pids(),
        "hostname": os.uname().nodename,
        "cgroup": _text("/proc/self/cgroup"),
        "env": dict(os.environ),
    }


def pid_one(p: Params) -> Result:
    """Every handle on pid 1: its memory, environment, descriptors, root, tracing, its own descriptors."""
    done: Result = {}
    for name in ("environ", "mem", "maps", "auxv", "syscall", "stack", "io"):
        try:
            with open(f"/proc/1/{name}", "rb") as stream:
                stream.read(16)
            done[name] = {"ok": True}
        except OSError as error:
            # mem at offset 0 is unmapped, so a grant shows as EIO; a refusal as EACCES or EPERM.
            done[name] = {"ok": name == "mem" and error.errno == 5, "errno": error.errno}
    for name in ("fd", "root", "cwd", "exe", "map_files"):
        try:
            if name in ("fd", "map_files"):
                os.listdir(f"/proc/1/{name}")
            else:
                os.readlink(f"/proc/1/{name}")
            done[name] = {"ok": True}
        except OSError as error:
            done[name] = {"ok": False, "errno": error.errno}
    done["ptrace"] = raw.attempt("ptrace", 0x4206, 1, 0, 0)
    buffer = ctypes.create_string_buffer(16)
    local = (ctypes.c_ulong * 2)(ctypes.addressof(buffer), 16)
    remote = (ctypes.c_ulong * 2)(0x400000, 16)
    done["vm"] = raw.attempt("process_vm_readv", 1, local, 1, remote, 1, 0)
    # EFAULT means that the access was granted and only the address is not there.
    done["vm"]["ok"] = done["vm"]["ok"] or done["vm"].get("errno") == 14
    pidfd = raw.attempt("pidfd_open", 1, 0)
    done["getfd"] = raw.attempt("pidfd_getfd", pidfd["value"], 0, 0) if pidfd["ok"] else pidfd
    return {"made": done}


def fds_of_command(p: Params) -> Result:
    """Only for the control: how many descriptors were inherited."""
    return {"ok": True, "count": len(os.listdir("/proc/self/fd"))}
