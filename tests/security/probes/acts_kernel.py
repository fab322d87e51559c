"""Acts on kernel interfaces: system calls, devices, /proc and /sys."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import termios
import time
from typing import Any

import raw

Params = dict[str, Any]
Result = dict[str, Any]


def io_uring(p: Params) -> Result:
    return raw.attempt("io_uring_setup", 4, ctypes.create_string_buffer(256))


def userfaultfd(p: Params) -> Result:
    """User-mode-only, which the kernel grants to everybody."""
    return raw.attempt("userfaultfd", 1)


def bpf(p: Params) -> Result:
    """A map of one element."""
    return raw.attempt("bpf", 0, ctypes.create_string_buffer(struct.pack("<IIIII", 2, 4, 4, 1, 0), 120), 120)


def perf(p: Params) -> Result:
    """A software counter of our own process, user mode only."""
    attr = ctypes.create_string_buffer(128)
    struct.pack_into("<IIQ", attr, 0, 1, 112, 0)
    struct.pack_into("<Q", attr, 40, (1 << 5) | (1 << 6))
    return raw.attempt("perf_event_open", attr, 0, -1, -1, 0)


def add_key(p: Params) -> Result:
    """A key in a keyring of this thread only, so nothing stays behind."""
    return raw.attempt("add_key", b"user", b"casemate-probe", b"x", 1, -1)


def keyctl(p: Params) -> Result:
    """The id of the session keyring, and a request for a key."""
    return {
        "get": raw.attempt("keyctl", 0, -3, 1),
        "request": raw.attempt("request_key", b"user", b"casemate-probe", 0, 0),
    }


def mount_old(p: Params) -> Result:
    return raw.attempt("mount", b"tmpfs", f"{p['ws']}/mnt".encode(), b"tmpfs", 0, 0)


def mount_new(p: Params) -> Result:
    """The new mount interface, call by call."""
    return {
        "fsopen": raw.attempt("fsopen", b"tmpfs", 0),
        "open_tree": raw.attempt("open_tree", -100, b"/tmp", 1),
        "fspick": raw.attempt("fspick", -100, b"/proc", 0),
        "mount_setattr": raw.attempt(
            "mount_setattr", -100, f"{p['ws']}/mnt".encode(), 0, ctypes.create_string_buffer(32), 32
        ),
    }


def unshare_user(p: Params) -> Result:
    return raw.attempt("unshare", 0x10000000)


def unshare_each(p: Params) -> Result:
    """Every namespace flag alone, and the pair that a user namespace would make free."""
    flags = {"ns": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000,
             "pid": 0x20000000, "net": 0x40000000, "time": 0x80, "user+net": 0x50000000}  # fmt: skip
    return {
        "made": {
            name: _in_child(lambda flag=flag: raw.attempt("unshare", flag)) for name, flag in flags.items()
        }
    }


def _in_child(function: Any) -> Result:
    """Run where a namespace or a death does not touch the rest."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writable, repr(function()).encode())
        os._exit(0)
    os.close(writable)
    data = os.read(readable, 4096)
    _, status = os.waitpid(pid, 0)
    os.close(readable)
    if os.WIFSIGNALED(status):
        return {"ok": False, "signal": os.WTERMSIG(status)}
    result: Result = ast.literal_eval(data.decode())
    return result


def clone_user(p: Params) -> Result:
    """clone3 and clone, each with the user namespace flag; the child leaves at once."""
    args = ctypes.create_string_buffer(struct.pack("<8Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0), 64)
    result: Result = {}
    for name, call in (
        ("clone3", lambda: raw.LIBC.syscall(ctypes.c_long(435), args, ctypes.c_ulong(64))),
        ("clone", lambda: raw.LIBC.syscall(ctypes.c_long(56), ctypes.c_ulong(0x10000000 | 17), 0, 0, 0, 0)),
        (
            "clone-high",
            lambda: raw.LIBC.syscall(
                ctypes.c_long(56), ctypes.c_ulong((1 << 40) | 0x10000000 | 17), 0, 0, 0, 0
            ),
        ),
    ):
        ctypes.set_errno(0)
        pid = call()
        if pid == 0:
            os._exit(0)
        code = ctypes.get_errno()
        if pid > 0:
            os.waitpid(pid, 0)
        result[name] = {"ok": pid > 0, "errno": code if pid < 0 else 0}
    return result


def setns_all(p: Params) -> Result:
    """Join the namespaces of pid 1 and of the host's victim."""
    made: Result = {}
    for pid in (1, p["victim"]):
        for kind in ("mnt", "net", "pid", "user", "cgroup", "ipc", "uts"):
            try:
                descriptor = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
            except OSError as error:
                made[f"{pid}/{kind}"] = {"ok": False, "errno": error.errno}
                continue
            made[f"{pid}/{kind}"] = _in_child(lambda fd=descriptor: raw.attempt("setns", fd, 0))
    return {"made": made}


def tiocsti(p: Params) -> Result:
    """Push input into every terminal in reach, also with bits set above the 32 the kernel reads."""
    result: Result = {"plain": False, "high": False, "linux": False, "ttys": []}
    descriptors = [0, 1, 2]
    with contextlib.suppress(OSError):
        descriptors.append(os.open("/dev/tty", os.O_RDWR))
    for fd in descriptors:
        if not os.isatty(fd):
            continue
        info = os.fstat(fd)
        result["ttys"].append([info.st_dev, info.st_ino, info.st_rdev])
        for name, request in (("plain", 0x5412), ("high", (1 << 32) | 0x5412)):
            for char in p["inject"]:
                if raw.attempt("ioctl", fd, request, ctypes.create_string_buffer(char.encode()))["ok"]:
                    result[name] = True
        if raw.attempt("ioctl", fd, 0x541C, ctypes.create_string_buffer(b"\x06"))["ok"]:
            result["linux"] = True
    return result


def memfd_exec(p: Params) -> Result:
    """Run a program that has no file: by descriptor and by its /proc name, with each flag."""
    result: Result = {}
    for name, flags in (("plain", 0), ("cloexec", 1), ("exec", 0x10)):
        result[name] = {"ok": False}
        try:
            fd = raw.syscall("memfd_create", b"casemate", flags)
            os.write(fd, raw.tiny_elf(42))
        except OSError as error:
            result[name]["errno"] = error.errno
            continue
        for how in ("execveat", "proc"):
            pid = os.fork()
            if pid == 0:
                try:
                    if how == "proc":
                        # A second, read-only descriptor: a writable one makes exec fail with ETXTBSY.
                        os.execv(f"/proc/self/fd/{fd}", ["x"])
                    argv = (ctypes.c_char_p * 2)(b"x", None)
                    raw.syscall("execveat", fd, b"", argv, 0, 0x1000)
                finally:
                    os._exit(1)
            _, status = os.waitpid(pid, 0)
            if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 42:
                result[name]["ok"] = True
    return result


def kvm(p: Params) -> Result:
    os.open("/dev/kvm", os.O_RDWR)
    return {"ok": True}


def core_pattern(p: Params) -> Result:
    """Write the same value back. Nothing changes, but it shows who may change it."""
    path = "/proc/sys/kernel/core_pattern"
    with open(path, "rb") as stream:
        value = stream.read()
    descriptor = os.open(path, os.O_WRONLY)
    os.write(descriptor, value)
    return {"ok": True}


def sysctls(p: Params) -> Result:
    """The same for other switches of the kernel; a value that cannot be read is not tried."""
    done: Result = {}
    for path in p["sysctls"]:
        try:
            with open(path, "rb") as stream:
                value = stream.read()
        except OSError as error:
            done[path] = {"ok": False, "errno": error.errno, "absent": error.errno == errno.ENOENT}
            continue
        try:
            descriptor = os.open(path, os.O_WRONLY)
            os.write(descriptor, value)
            done[path] = {"ok": True}
        except OSError as error:
            done[path] = {"ok": False, "errno": error.errno}
    return {"made": done}


def open_writable(p: Params) -> Result:
    """Which of the listed paths open for writing (nothing is written)."""
    done: Result = {}
    for path in p["paths"]:
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            done[path] = {"ok": True}
        except OSError as error:
            done[path] = {"ok": False, "errno": error.errno}
    return {"made": done}


def clock(p: Params) -> Result:
    """Set the tick to the value it has; inside a sandbox also try to set the time."""
    timex = ctypes.create_string_buffer(208)
    raw.syscall("adjtimex", timex)
    tick = struct.unpack_from("<q", timex, 88)[0]
    struct.pack_into("<I", timex, 0, 0x4000)
    struct.pack_into("<q", timex, 88, tick)
    result = {"tick": raw.attempt("adjtimex", timex), "settime": {"ok": False}}
    if p["sandboxed"]:
        now = time.clock_gettime_ns(time.CLOCK_REALTIME)
        spec = ctypes.create_string_buffer(struct.pack("<qq", now // 10**9, now % 10**9), 16)
        result["settime"] = raw.attempt("clock_settime", 0, spec)
    return result


def dmesg(p: Params) -> Result:
    """Read (not clear) the kernel's log."""
    buffer = ctypes.create_string_buffer(4096)
    result = {"syslog": raw.attempt("syslog", 3, buffer, 4096), "kmsg": {"ok": False}}
    try:
        os.close(os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK))
        result["kmsg"] = {"ok": True}
    except OSError as error:
        result["kmsg"] = {"ok": False, "errno": error.errno}
    return result


def calls(p: Params) -> Result:
    """Calls given as data: [name, [arguments]]; strings are passed as C strings, 'buf:N' as zeroes."""
    done: Result = {}
    for label, name, args in p["calls"]:
        values = [
            ctypes.create_string_buffer(int(a[4:])) if isinstance(a, str) and a.startswith("buf:")
            else a.encode() if isinstance(a, str) else a
            for a in args
        ]  # fmt: skip
        done[label] = _in_child(lambda n=name, v=values: raw.attempt(n, *v))
    return {"made": done}


def other_tables(p: Params) -> Result:
    """getpid by the x32 numbers and by int 0x80: neither table belongs to the policy."""

    def x32() -> Result:
        try:
            return {"ok": raw.nr_call(0x40000000 | 39) > 0}
        except OSError as error:
            return {"ok": False, "errno": error.errno}

    def i386() -> Result:
        value = raw.int80(20)
        return {"ok": value > 0, "value": value}

    return {"x32": _in_child(x32), "int80": _in_child(i386)}


def handles(p: Params) -> Result:
    """A file handle opened without a path, as in the escape from early containers."""
    handle = ctypes.create_string_buffer(struct.pack("<Ii", 128, 0), 136)
    mount_id = ctypes.c_int(0)
    named = raw.attempt("name_to_handle_at", -100, p["ws"].encode(), handle, ctypes.byref(mount_id), 0)
    here = os.open(p["ws"], os.O_RDONLY)
    # Without a handle from the kernel, one of the usual form for the root inode of ext4.
    if not named["ok"]:
        handle = ctypes.create_string_buffer(struct.pack("<IiII", 8, 1, 2, 0), 136)
    return {"named": named, "opened": raw.attempt("open_by_handle_at", here, handle, 0)}


def make_devices(p: Params) -> Result:
    """Device nodes for memory, the host's disk and its console, and opening them."""
    done: Result = {}
    for name, mode, major, minor in (
        ("mem", 0o20600, 1, 1),
        ("disk", 0o60600, 254, 0),
        ("kmsg", 0o20600, 1, 11),
    ):
        path = f"{p['ws']}/node-{name}"
        try:
            os.mknod(path, mode, os.makedev(major, minor))
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            done[name] = {"ok": True}
        except OSError as error:
            done[name] = {"ok": False, "errno": error.errno}
    return {"made": done}


def device_list(p: Params) -> Result:
    """What /dev holds: name, kind, numbers."""
    found = []
    for base, _, names in os.walk("/dev"):
        for name in names:
            info = os.lstat(os.path.join(base, name))
            if info.st_mode & 0o170000 in (0o20000, 0o60000):
                found.append(
                    [
                        os.path.join(base, name),
                        oct(info.st_mode),
                        os.major(info.st_rdev),
                        os.minor(info.st_rdev),
                    ]
                )
    return {"ok": True, "devices": sorted(found)}


def cgroup_release_agent(p: Params) -> Result:
    """Every cgroup file system in sight: is one writable, is a release agent?"""
    writable = []
    with open("/proc/self/mountinfo", encoding="utf-8") as stream:
        mounts = [line.split(" - ") for line in stream]
    for left, right in mounts:
        if right.split()[0] not in ("cgroup", "cgroup2"):
            continue
        place = left.split()[4]
        for name in ("release_agent", "notify_on_release", "cgroup.procs", "tasks", "cgroup.subtree_control"):
            if os.access(f"{place}/{name}", os.W_OK):
                writable.append(f"{place}/{name}")
        if not p["mkdir"]:
            continue
        try:
            os.mkdir(f"{place}/casemate-probe")
            os.rmdir(f"{place}/casemate-probe")
            writable.append(place)
        except OSError:
            pass
    return {"ok": bool(writable), "writable": writable, "cgroup": open("/proc/self/cgroup").read()}


def watch_everything(p: Params) -> Result:
    """fanotify needs privilege; inotify may watch only what is visible."""
    return {"fanotify": raw.attempt("fanotify_init", 0, 0), "inotify": raw.attempt("inotify_init1", 0)}


def terminal_of_host(p: Params) -> Result:
    """Any way to a terminal that is not ours: /dev/tty, consoles, other ptys, stealing the session."""
    done: Result = {}
    for path in [
        "/dev/tty0",
        "/dev/tty1",
        "/dev/console",
        "/dev/ttyS0",
        *[f"/dev/pts/{i}" for i in range(6)],
    ]:
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK)
            info = os.fstat(fd)
            done[path] = {"ok": True, "dev": info.st_dev, "ino": info.st_ino, "rdev": info.st_rdev}
            if os.isatty(fd):
                done[path]["attr"] = bool(termios.tcgetattr(fd))
                try:
                    fcntl.ioctl(fd, termios.TIOCSCTTY, 1)
                    done[path]["stolen"] = True
                except OSError:
                    done[path]["stolen"] = False
            os.close(fd)
        except (OSError, termios.error) as error:
            done[path] = {"ok": False, "error": str(error)}
    return {"made": done}
