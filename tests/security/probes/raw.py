"""Raw system calls for the probes: stdlib and ctypes only, x86_64, no wrapper of libc in between."""

from __future__ import annotations

import ctypes
import os
import struct
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long

NR = {
    "sendto": 44, "clone": 56, "rename": 82, "ptrace": 101, "syslog": 103, "personality": 135,
    "setpriority": 141, "modify_ldt": 154, "pivot_root": 155, "prctl": 157, "adjtimex": 159,
    "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167,
    "reboot": 169, "sethostname": 170, "iopl": 172, "ioperm": 173, "init_module": 175,
    "quotactl": 179, "clock_settime": 227, "kexec_load": 246, "add_key": 248, "request_key": 249,
    "keyctl": 250, "migrate_pages": 256, "mknodat": 259, "unshare": 272, "move_pages": 279,
    "inotify_init1": 294, "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303,
    "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310,
    "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "renameat2": 316,
    "memfd_create": 319, "bpf": 321, "execveat": 322, "userfaultfd": 323, "pidfd_send_signal": 424,
    "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431,
    "fsmount": 432, "fspick": 433, "pidfd_open": 434, "clone3": 435, "openat2": 437,
    "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "memfd_secret": 447,
    "statmount": 457, "listmount": 458, "lookup_dcookie": 212, "vhangup": 153, "sysfs": 139,
    "getpid": 39, "ioctl": 16, "socket": 41, "socketpair": 53, "open": 2, "io_setup": 206,
    "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240, "kill": 62, "tgkill": 234,
}  # fmt: skip


def syscall(name: str, *args: object) -> int:
    """Make the call; an error is raised as OSError with its errno."""
    return nr_call(NR[name], *args)


def nr_call(number: int, *args: object) -> int:
    """The same by number; integers go in as full 64-bit registers."""
    values: list[object] = []
    for arg in args:
        if isinstance(arg, int):
            values.append(ctypes.c_ulong(arg & 0xFFFFFFFFFFFFFFFF))
        elif isinstance(arg, bytes):
            values.append(ctypes.c_char_p(arg))
        else:
            values.append(arg)
    ctypes.set_errno(0)
    result = LIBC.syscall(ctypes.c_long(number), *values)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)


def attempt(name: str, *args: object) -> dict[str, object]:
    """Make the call and say what came of it."""
    try:
        return {"ok": True, "value": syscall(name, *args)}
    except OSError as error:
        return {"ok": False, "errno": error.errno}


def int80(number: int, a: int = 0, b: int = 0, c: int = 0) -> int:
    """A 32-bit system call from 64-bit code, which a filter for one table only would miss."""
    code = (
        b"\x53"  # push rbx
        + b"\xb8" + struct.pack("<I", number)
        + b"\xbb" + struct.pack("<I", a)
        + b"\xb9" + struct.pack("<I", b)
        + b"\xba" + struct.pack("<I", c)
        + b"\xcd\x80\x5b\xc3"
    )  # fmt: skip
    LIBC.mmap.restype = ctypes.c_void_p
    LIBC.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    page = LIBC.mmap(None, 4096, 7, 0x22, -1, 0)
    if page in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "no executable page")
    ctypes.memmove(page, code, len(code))
    function = ctypes.CFUNCTYPE(ctypes.c_int)(page)
    return int(function())


def visible_pids() -> list[int]:
    """Every process number that /proc shows here."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def tiny_elf(code: int) -> bytes:
    """A static x86_64 program that exits with ``code``."""
    text = b"\xbf" + struct.pack("<I", code) + b"\xb8\x3c\0\0\0\x0f\x05"
    head = b"\x7fELF\2\1\1" + b"\0" * 9
    head += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, 0x400078, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    head += struct.pack("<IIQQQQQQ", 1, 5, 0, 0x400000, 0x400000, 120 + len(text), 120 + len(text), 4096)
    return head + text


def say(text: str) -> None:
    """One line straight to the host, past any buffer."""
    os.write(1, (text + "\n").encode())
    sys.stdout.flush()
