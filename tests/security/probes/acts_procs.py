"""Acts on processes, environments and descriptors."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import raw

if TYPE_CHECKING:
    from collections.abc import Callable

Params = dict[str, Any]
Result = dict[str, Any]


def environ_of_all(p: Params) -> Result:
    """The environment of every process in sight except this one's own family."""
    found = {}
    for pid in raw.visible_pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as stream:
                found[pid] = stream.read(8192).decode(errors="replace")
        except OSError as error:
            found[pid] = f"errno {error.errno}"
    return {"one": found.get(1, ""), "data": "\n".join(found.values())}


def own_environ(p: Params) -> Result:
    """What the command itself was given."""
    return {"data": "\n".join(f"{key}={value}" for key, value in os.environ.items())}


def host_pids(p: Params) -> Result:
    """The command lines of every process in sight."""
    lines = []
    for pid in raw.visible_pids():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as stream:
                lines.append(stream.read(4096).replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return {"data": "\n".join(lines)}


def _targets(p: Params) -> list[int]:
    mine = {os.getpid(), os.getppid()}
    return [p["victim"], *(pid for pid in raw.visible_pids()[:30] if pid not in mine)]


def ptrace_peek(p: Params) -> Result:
    """Attach and read the word at the victim's secret."""
    seen = b""
    for pid in _targets(p) if p["victim_only"] is False else [p["victim"]]:
        try:
            raw.syscall("ptrace", 16, pid, 0, 0)
        except OSError:
            continue
        os.waitpid(pid, 0x40000000)
        for offset in range(0, 32, 8):
            word = ctypes.c_ulong(0)
            try:
                raw.syscall("ptrace", 2, pid, p["address"] + offset, ctypes.byref(word))
                seen += word.value.to_bytes(8, "little")
            except OSError:
                break
        raw.syscall("ptrace", 17, pid, 0, 0)
    return {"data": seen.decode(errors="replace")}


def vm_readv(p: Params) -> Result:
    """process_vm_readv at the victim's secret."""
    buffer = ctypes.create_string_buffer(64)
    local = (ctypes.c_ulong * 2)(ctypes.addressof(buffer), 32)
    remote = (ctypes.c_ulong * 2)(p["address"], 32)
    data = ""
    for pid in _targets(p):
        if raw.attempt("process_vm_readv", pid, local, 1, remote, 1, 0)["ok"]:
            data += buffer.raw.decode(errors="replace")
    return {"data": data}


def proc_mem(p: Params) -> Result:
    """/proc/PID/mem at the victim's secret."""
    data = ""
    for pid in _targets(p):
        try:
            descriptor = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
            data += os.pread(descriptor, 32, p["address"]).decode(errors="replace")
        except OSError:
            continue
    return {"data": data}


def signal_victim(p: Params) -> Result:
    """kill, tgkill and a pidfd against the victim's number."""
    tried = [
        raw.attempt("kill", p["victim"], signal.SIGUSR1),
        raw.attempt("tgkill", p["victim"], p["victim"], signal.SIGUSR1),
    ]
    descriptor = raw.attempt("pidfd_open", p["victim"], 0)
    if descriptor["ok"]:
        tried.append(raw.attempt("pidfd_send_signal", descriptor["value"], signal.SIGUSR1, 0, 0))
    return {"tried": tried}


def renice(p: Params) -> Result:
    """setpriority by process, by group and by user."""
    return {
        "process": raw.attempt("setpriority", 0, p["victim"], 7),
        "group": raw.attempt("setpriority", 1, p["victim"], 7),
        "user": raw.attempt("setpriority", 2, os.getuid(), 7) if p["by_user"] else "not tried",
    }


def inherited_fds(p: Params) -> Result:
    """What every open descriptor above 2 yields."""
    data, seen = "", []
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number < 3:
            continue
        try:
            seen.append([number, os.readlink(f"/proc/self/fd/{number}")])
            data += os.pread(number, 4096, 0).decode(errors="replace")
        except OSError:
            continue
    return {"data": data, "fds": seen}


def daemon(p: Params) -> Result:
    """A process of its own session, without any of our descriptors, that outlives us."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            null = os.open("/dev/null", os.O_RDWR)
            for number in range(3):
                os.dup2(null, number)
            os.closerange(3, 256)
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            os.execv("/bin/sleep", [p["daemon_name"], "60"])
        os._exit(0)
    os.wait()
    return {"ok": True}


def privileges(p: Params) -> Result:
    """The capability sets, ids and flags of this process."""
    with open("/proc/self/status", encoding="utf-8") as stream:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in stream if ":\t" in line)
    with open("/proc/self/uid_map", encoding="utf-8") as stream:
        uid_map = stream.read().split()
    keep = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
    return {"ok": True, "status": {key: status.get(key, "") for key in keep}, "uid_map": uid_map}


def owner_signal(p: Params) -> Result:
    """Ask the kernel to send SIGUSR1 to the victim whenever a socket becomes readable."""
    one, two = socket.socketpair()
    try:
        fcntl.fcntl(one, 8, p["victim"])  # F_SETOWN
        fcntl.fcntl(one, 10, signal.SIGUSR1)  # F_SETSIG
        fcntl.fcntl(one, fcntl.F_SETFL, fcntl.fcntl(one, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    except OSError as error:
        return {"ok": False, "errno": error.errno}
    two.send(b"x")
    return {"ok": True}


def setuid_program(p: Params) -> Result:
    """The uid that a setuid-root program of the host has here, and whether the own can be changed."""
    done = {}
    for path in p["programs"]:
        try:
            ran = subprocess.run([path, "-u"], capture_output=True, text=True, timeout=10, check=False)
            done[path] = ran.stdout.strip()
        except OSError as error:
            done[path] = f"errno {error.errno}"
    for name, call in (("setuid", os.setuid), ("setgid", os.setgid)):
        try:
            call(0)
            done[name] = "done"
        except OSError as error:
            done[name] = f"errno {error.errno}"
    return {"ok": True, "uid": os.getuid(), "ran": done}


def threads(p: Params) -> Result:
    """Many threads of one process, which count as tasks like processes do."""
    stop = threading.Event()
    started: list[threading.Thread] = []
    error = ""
    threading.stack_size(65536)
    for _ in range(p["count"]):
        thread = threading.Thread(target=stop.wait, daemon=True)
        try:
            thread.start()
        except RuntimeError as failure:
            error = str(failure)
            break
        started.append(thread)
    made = len(started)
    stop.set()
    return {"ok": made >= p["count"], "made": made, "error": error}


def standard_descriptors(p: Params) -> Result:
    """What stdin (kept as 9) and stdout are good for besides reading and writing a stream."""
    done: Result = {}

    def attempt(name: str, call: Callable[[], object]) -> None:
        try:
            done[name] = {"ok": True, "data": str(call())[:200]}
        except OSError as error:
            done[name] = {"ok": False, "errno": error.errno}

    attempt("stdin-read-before", lambda: os.pread(9, 100, 0))
    attempt("stdin-overwrite", lambda: os.pwrite(9, b"OVERWRITTEN", 0))
    attempt("stdin-truncate", lambda: os.ftruncate(9, 0))
    attempt("stdout-reread", lambda: os.pread(1, 100, 0))
    attempt("stdout-overwrite", lambda: os.pwrite(1, b"OVERWRITTEN", 0))
    attempt("stdout-truncate", lambda: os.ftruncate(1, 0))
    with open(f"{p['ws']}/descriptors.json", "w", encoding="utf-8") as stream:
        json.dump(done, stream)
    return {"ok": True}
