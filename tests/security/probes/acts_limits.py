"""Acts that use up a resource. Each says how far it came while it goes."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
from typing import Any

import raw

Params = dict[str, Any]
Result = dict[str, Any]
MIB = 1 << 20


def forks(p: Params) -> Result:
    """``count`` children alive at once, each with a name the host can count."""
    name = p["process_name"].encode()
    children: list[int] = []
    error = 0
    for _ in range(p["count"]):
        try:
            pid = os.fork()
        except OSError as failure:
            error = failure.errno or -1
            break
        if pid == 0:
            raw.LIBC.prctl(15, ctypes.c_char_p(name), 0, 0, 0)
            signal.alarm(20)
            signal.pause()
            os._exit(0)
        children.append(pid)
    raw.say(f"@@forks {len(children)} errno {error}")
    # The host counts while they live. It says so by making a file that only it can make; without one
    # (inside a sandbox no new file of the host may appear) they live for a fixed time.
    time.sleep(p["hold"])
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)
    return {"ok": len(children) >= p["count"], "made": len(children), "errno": error}


def touch(p: Params) -> Result:
    """Anonymous memory, page by page; ``split`` processes share the sum."""
    split = p.get("split", 1)
    each = p["mib"] // split
    pids = []
    for index in range(split):
        pid = os.fork()
        if pid == 0:
            try:
                area = mmap.mmap(-1, each * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                for done in range(0, each, 32):
                    for page in range(done * MIB, min(done + 32, each) * MIB, 4096):
                        area[page] = 1
                    raw.say(f"@@touched {index} {min(done + 32, each)}")
                time.sleep(p["hold"])
            except (OSError, MemoryError, ValueError):
                os._exit(3)
            os._exit(0)
        pids.append(pid)
    status = [os.waitpid(pid, 0)[1] for pid in pids]
    return {"ok": not any(status), "status": status}


def write_file(p: Params) -> Result:
    """``mib`` of real blocks through one descriptor per file named."""
    block = os.urandom(MIB)
    wrote = 0
    error = 0
    for path in p["files"]:
        try:
            fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            for _ in range(p["mib"] // len(p["files"])):
                wrote += os.write(fd, block)
            os.close(fd)
        except OSError as failure:
            error = failure.errno or -1
            break
    raw.say(f"@@wrote {wrote // MIB} errno {error}")
    time.sleep(p["hold"])
    return {"ok": wrote >= p["mib"] * MIB, "wrote": wrote // MIB, "errno": error}


def open_files(p: Params) -> Result:
    """As many descriptors as asked for."""
    opened = []
    try:
        for _ in range(p["count"]):
            opened.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as failure:
        return {"ok": False, "made": len(opened), "errno": failure.errno}
    return {"ok": True, "made": len(opened)}


def spin_output(p: Params) -> Result:
    """Bytes on stdout."""
    block = b"x" * 65535 + b"\n"
    for _ in range(p["mib"] * 16):
        os.write(1, block)
    return {"ok": True}
