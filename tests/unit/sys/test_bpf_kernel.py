"""The filter in the running kernel: what it refuses, with what error, and what it lets through.

Each act runs in a forked child behind the filter, and once more in a child without it: the control, in
which the same act must succeed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import multiprocessing
import os
import pty
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest

from casemate.isolation.process.filter import WORDS, build
from casemate.sys.bpf import ALLOW, KILL, Errno, Prepared, assemble, install
from casemate.sys.syscalls import AUDIT_ARCH, TABLES, native

NUMBERS = TABLES[native()]
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long

FILTER = build(native())
STRICT = build(native(), strict_memfd=True)
WEAKENED = build(native(), words=WORDS)

RUBBISH = 0xDEADBEEF << 32
NEWUSER, SIGCHLD = 0x10000000, 17

Act = Callable[[], object]


class Outcome(NamedTuple):
    """What became of an act in a child: its value, an error number, or the signal that ended the child."""

    value: object = None
    errno: int = 0
    signal: str = ""


def behind(program: bytes | None, act: Act, *, no_new_privs: bool = True) -> Outcome:
    """Run an act in a forked child behind a program."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            if no_new_privs:
                LIBC.prctl(38, 1, 0, 0, 0)
            try:
                if program is not None:
                    install(program)
                told: tuple[object, int] = (act(), 0)
            except OSError as error:
                told = (None, error.errno or -1)
            os.write(writing, json.dumps(told, default=sorted).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:
        answer = stream.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return Outcome(signal=signal.Signals(os.WTERMSIG(status)).name)
    value, number = json.loads(answer)
    return Outcome(value, number)


def call(name: str | int, *arguments: int | bytes | None) -> int:
    """A raw system call. Raises OSError."""
    number = NUMBERS[name] if isinstance(name, str) else name
    words = [ctypes.c_ulong(word) if isinstance(word, int) else word for word in arguments]
    result: int = LIBC.syscall(ctypes.c_long(number), *words)
    if result == -1:
        raise OSError(ctypes.get_errno(), f"call {name}")
    return result


def clone(flags: int) -> None:
    """Clone by the raw call and wait for the child."""
    child = call("clone", flags, 0, 0, 0, 0)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def clone3() -> None:
    """Clone by the new call and wait for the child."""
    child = call("clone3", struct.pack("@8Q", 0, 0, 0, 0, SIGCHLD, 0, 0, 0), 64)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def on_terminal(command: int) -> None:
    """An ioctl, with a pointer to a few zeros, on a controlling terminal of one's own."""
    _, terminal = pty.openpty()
    os.setsid()
    call("ioctl", terminal, 0x540E, 0)  # TIOCSCTTY
    call("ioctl", terminal, command, bytes(8))


def vmsplice() -> None:
    """Lend some bytes to a pipe."""
    buffer = ctypes.create_string_buffer(8)
    call("vmsplice", os.pipe()[1], struct.pack("@PN", ctypes.addressof(buffer), 8), 1, 0)


def read_own_memory() -> None:
    """Read a process's memory by its pid."""
    buffer = ctypes.create_string_buffer(16)
    vector = struct.pack("@PN", ctypes.addressof(buffer), 8)
    call("process_vm_readv", os.getpid(), vector, 1, vector, 1, 0)


def install_listener() -> None:
    """Install a filter that could hand calls to a supervisor."""
    everything = assemble(AUDIT_ARCH[native()], {}, ALLOW)
    held = ctypes.create_string_buffer(everything, len(everything))
    call("seccomp", 1, 8, struct.pack("@HP", len(everything) // 8, ctypes.addressof(held)))


def make_node(mode: int) -> None:
    """Make a file of some type with device number 0:0."""
    with tempfile.TemporaryDirectory() as directory:
        call("mknodat", -100 & (1 << 64) - 1, f"{directory}/node".encode(), mode | 0o600, 0)


def name_handle() -> None:
    """Ask for the handle of a file, by which it could be opened past every mount."""
    handle = ctypes.create_string_buffer(struct.pack("@Ii", 128, 0) + bytes(128))
    mount = ctypes.create_string_buffer(8)
    with tempfile.NamedTemporaryFile() as file:
        pointers = (ctypes.addressof(handle), ctypes.addressof(mount))
        call("name_to_handle_at", -100 & (1 << 64) - 1, file.name.encode(), *pointers, 0)


REFUSED: dict[str, tuple[Act, int]] = {
    "unshare a user namespace": (lambda: call("unshare", NEWUSER), errno.EPERM),
    "unshare one among harmless flags": (lambda: call("unshare", NEWUSER | 0x400), errno.EPERM),
    "clone a user namespace": (lambda: clone(NEWUSER | SIGCHLD), errno.EPERM),
    "clone one, rubbish above": (lambda: clone(RUBBISH | NEWUSER | SIGCHLD), errno.EPERM),
    "clone by clone3": (clone3, errno.ENOSYS),
    "be traced": (lambda: call("ptrace", 0, 0, 0, 0), errno.EPERM),
    "read memory by pid": (read_own_memory, errno.EPERM),
    "compare processes": (lambda: call("kcmp", os.getpid(), os.getpid(), 0, 0, 1), errno.EPERM),
    "take a descriptor": (lambda: call("pidfd_getfd", os.pidfd_open(os.getpid()), 1, 0), errno.EPERM),
    "add a key": (lambda: call("add_key", b"user", b"casemate", b"x", 1, 2**64 - 2), errno.EPERM),
    "userfaultfd, user mode only": (lambda: call("userfaultfd", 1), errno.EPERM),
    "lend memory to a pipe": (vmsplice, errno.ENOSYS),
    "name a handle": (name_handle, errno.EPERM),
    "netlink other than route": (lambda: call("socket", 16, 3, 15), errno.EPROTONOSUPPORT),
    "set the line discipline": (lambda: on_terminal(0x5423), errno.EPERM),
    "set the line discipline, rubbish above": (lambda: on_terminal(RUBBISH | 0x5423), errno.EPERM),
    "READ_IMPLIES_EXEC": (lambda: call("personality", 0x400000), errno.EPERM),
    "READ_IMPLIES_EXEC, rubbish above": (lambda: call("personality", RUBBISH | 0x400000), errno.EPERM),
    "switch perf events off": (lambda: call("prctl", 31, 0, 0, 0, 0), errno.EPERM),
    "switch them off, rubbish above": (lambda: call("prctl", RUBBISH | 31, 0, 0, 0, 0), errno.EPERM),
    "seccomp with a listener": (install_listener, errno.EINVAL),
    "make a character device": (lambda: make_node(stat.S_IFCHR), errno.EPERM),
}


@pytest.mark.parametrize(("act", "number"), REFUSED.values(), ids=REFUSED)
def test_refused_with_its_errno(act: Act, number: int) -> None:
    """The act fails with the error that the table says; without the filter it succeeds."""
    assert behind(FILTER, act) == Outcome(errno=number)
    control = behind(None, act)
    assert (control.errno, control.signal) == (0, "")


def test_typing_into_the_terminal_is_refused() -> None:
    """TIOCSTI fails with EPERM, whatever stands above the command; the host itself knows the command."""
    for above in (0, RUBBISH):
        assert behind(FILTER, partial(on_terminal, above | 0x5412)).errno == errno.EPERM
    # Hosts with dev.tty.legacy_tiocsti=0 say EIO to callers without CAP_SYS_ADMIN.
    assert behind(None, lambda: on_terminal(0x5412)).errno in (0, errno.EIO)


ALLOWED: dict[str, Act] = {
    "unshare what is one's own": lambda: call("unshare", 0x400 | 0x200 | 0x40000),
    "fork by clone": lambda: clone(SIGCHLD),
    "fork by clone, rubbish above": lambda: clone(RUBBISH | SIGCHLD),
    "ask for the personality": lambda: call("personality", 0xFFFFFFFF),
    "switch address randomisation off": lambda: call("personality", 0x40000),
    "name oneself": lambda: call("prctl", 15, b"name", 0, 0, 0),
    "ask for the seccomp mode": lambda: call("prctl", 21, 0, 0, 0, 0),
    "install another filter": lambda: install(FILTER),
    "window size": lambda: on_terminal(0x5414),
    "make a FIFO": lambda: make_node(stat.S_IFIFO),
    "make a file by mknod": lambda: make_node(stat.S_IFREG),
    "memfd": lambda: os.memfd_create("x"),
    "a TCP option": lambda: socket.socket().setsockopt(socket.IPPROTO_TCP, 1, 1),
    "unix socketpair": lambda: call("socketpair", 1, 1 | 0x80000, 0, bytes(8)),
    "interfaces": lambda: socket.socket(16, 3, 0).bind((0, 0)),
    "random bytes": lambda: os.getrandom(8),
    "pidfd": lambda: os.pidfd_open(os.getpid()),
}


@pytest.mark.parametrize("program", [FILTER, WEAKENED], ids=["no word", "every word"])
@pytest.mark.parametrize("act", ALLOWED.values(), ids=ALLOWED)
def test_allowed(act: Act, program: bytes) -> None:
    """What ordinary programs do succeeds behind the filter."""
    outcome = behind(program, act)
    assert (outcome.errno, outcome.signal) == (0, "")


def open_families() -> list[int]:
    """The address families of which some kind of socket can be opened."""
    found = []
    for family in range(64):
        for kind, protocol in ((1, 0), (2, 0), (5, 0), (3, 0), (3, 1)):
            try:
                os.close(call("socket", RUBBISH | family, RUBBISH | kind, RUBBISH | protocol))
            except OSError:
                continue
            found.append(family)
            break
    return found


def test_only_unix_internet_and_netlink_sockets_open() -> None:
    """Of all families that this host has, those four remain."""
    host, here = behind(None, open_families).value, behind(FILTER, open_families).value
    assert isinstance(host, list)
    assert {1, 2, 16} <= set(host)
    assert here == [family for family in host if family in (1, 2, 10, 16)]


def open_protocols() -> list[str]:
    """The pairs of a type and a protocol of which an internet socket can be opened."""
    found = []
    for kind in (1, 2, 3, 5, 10):
        for protocol in (0, 1, 2, 6, 17, 33, 47, 58, 132, 136, 143, 255, 256, 262):
            try:
                os.close(call("socket", 2, kind | 0x80800, protocol))
            except OSError:
                continue
            found.append(f"{kind} {protocol}")
    return found


def test_only_plain_tcp_udp_and_ping_open() -> None:
    """MPTCP, SCTP, UDPLITE, raw sockets and all others are refused that this host would open."""
    host, here = behind(None, open_protocols).value, behind(FILTER, open_protocols).value
    assert isinstance(host, list)
    assert {"1 0", "1 6", "2 0", "2 17"} <= set(host)
    usual = {"1 0", "1 6", "2 0", "2 17", "2 1", "2 58"}
    assert here == [pair for pair in host if pair in usual]


SAME: dict[str, tuple[Act, int]] = {
    "a number of no table": (lambda: call(400), errno.ENOSYS),
    "a number to come": (lambda: call(0x3FFFFFFF), errno.ENOSYS),
    "an unknown prctl": (lambda: call("prctl", 9999, 0, 0, 0, 0), errno.EINVAL),
    "an unknown family": (lambda: call("socket", 200, 1, 0), errno.EAFNOSUPPORT),
    "an internet socketpair": (lambda: socket.socketpair(socket.AF_INET), errno.EOPNOTSUPP),
    "an unknown protocol": (lambda: call("socket", 2, 1, 253), errno.EPROTONOSUPPORT),
    "an unknown type": (lambda: call("socket", 2, 9, 0), errno.ESOCKTNOSUPPORT),
    "an unknown netlink": (lambda: call("socket", 16, 3, 31), errno.EPROTONOSUPPORT),
}


@pytest.mark.parametrize(("act", "number"), SAME.values(), ids=SAME)
def test_what_the_kernel_lacks_looks_the_same(act: Act, number: int) -> None:
    """Programs that try a newer feature find the error that a kernel without it gives."""
    assert behind(FILTER, act) == behind(None, act) == Outcome(errno=number)


@pytest.mark.skipif(native() != "x86_64", reason="only x86_64 has the x32 range and i386 calls")
def test_x32_calls_do_not_exist() -> None:
    """The x32 twin of a call, and the numbers that old kernels served as x32, give ENOSYS."""
    for number in (0x40000000 | NUMBERS["getpid"], 0x40000000 | 520, 521, 520):
        assert behind(FILTER, partial(call, number, 0, 0)).errno == errno.ENOSYS
    assert behind(FILTER, lambda: call("getpid") > 0).value is True


def i386_getpid() -> int:
    """getpid by the 32-bit entry: mov eax, 20; int 0x80; ret."""
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    result: int = ctypes.CFUNCTYPE(ctypes.c_int)(address)()
    return result


@pytest.mark.skipif(native() != "x86_64", reason="only x86_64 has the x32 range and i386 calls")
def test_a_32_bit_call_kills() -> None:
    """Through int 0x80 the numbers mean other calls: the process dies and the call is not made."""
    assert behind(FILTER, i386_getpid).signal == "SIGSYS"
    # A kernel without 32-bit calls faults instead.
    control = behind(None, i386_getpid)
    assert control.value or control.signal == "SIGSEGV"


def test_memfds_must_be_sealed_against_execution() -> None:
    """Under the strict rule a memfd is either sealed non-executable or does not exist."""
    seal, executable = 8, 16
    assert behind(STRICT, lambda: os.memfd_create("x", os.MFD_CLOEXEC)).errno == errno.ENOSYS
    assert behind(STRICT, lambda: os.memfd_create("x", executable)).errno == errno.EACCES
    for flags in (seal | executable, RUBBISH | executable):
        assert behind(STRICT, partial(call, "memfd_create", b"x", flags)).errno == errno.EACCES
    assert behind(STRICT, lambda: os.memfd_create("x", seal | os.MFD_ALLOW_SEALING)).errno == 0
    weakened = build(native(), words=frozenset({"memfd-exec"}), strict_memfd=True)
    for program in (None, FILTER, weakened):
        assert behind(program, lambda: os.memfd_create("x", executable)).errno == 0


def test_the_words_give_back_what_they_name() -> None:
    """With a word the acts that it is about succeed; the other word's acts stay refused."""
    unshare, trace = REFUSED["unshare a user namespace"][0], REFUSED["be traced"][0]
    for word, works, fails in (("nested-userns", unshare, trace), ("ptrace", trace, unshare)):
        program = build(native(), words=frozenset({word}))
        assert behind(program, works).errno == 0
        assert behind(program, fails).errno == errno.EPERM


def use_many_things() -> int:
    """Threads, processes, pipes, shared memory, a server on loopback, a subprocess."""
    assert subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True).returncode == 0
    thread = threading.Thread(target=os.getpid)
    thread.start()
    thread.join()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        server.accept()[0].close()
    context = multiprocessing.get_context("fork")
    event = context.Event()
    worker = context.Process(target=event.set)
    worker.start()
    worker.join()
    assert event.is_set()
    return worker.exitcode or 0


def test_ordinary_python_runs() -> None:
    """The interpreter's own ways to start threads and processes, to talk and to wait, all work."""
    assert behind(FILTER, use_many_things) == Outcome(value=0)
    assert behind(STRICT, use_many_things) == Outcome(value=0)


def test_the_kernel_takes_the_longest_programs() -> None:
    """Far jumps are right for the kernel too: a rule at the far end of a long program is followed."""
    table = {number: Errno(number % 100 + 1) for number in range(1000, 3670)}
    long = assemble(AUDIT_ARCH[native()], table, ALLOW)
    assert len(long) // 8 > 4000
    assert behind(long, lambda: call(1000)).errno == 1
    assert behind(long, lambda: call(3669)).errno == 70
    assert behind(long, lambda: call("getpid") > 0).value is True


def test_a_killing_rule_kills() -> None:
    """KILL ends the whole process, by a signal it cannot catch."""
    program = assemble(AUDIT_ARCH[native()], {NUMBERS["getppid"]: KILL}, ALLOW)

    def act() -> None:
        signal.signal(signal.SIGSYS, signal.SIG_IGN)
        os.getppid()

    assert behind(program, act).signal == "SIGSYS"
    assert behind(None, act).signal == ""


def test_a_program_the_kernel_refuses_is_an_error() -> None:
    """A failed installation raises; nothing runs on behind a filter that is not there."""
    assert behind(b"", lambda: 0).errno == errno.EINVAL
    assert behind(FILTER[:-8], lambda: 0).errno == errno.EINVAL
    assert behind(FILTER, lambda: 0).errno == 0


def test_a_prepared_program_can_be_installed_in_many_children() -> None:
    """The caller prepares once; each forked child only makes the call."""
    prepared = Prepared(FILTER)

    def act() -> None:
        prepared.install()
        call("unshare", NEWUSER)

    for _ in range(3):
        assert behind(None, act).errno == errno.EPERM
    assert behind(None, lambda: call("unshare", NEWUSER)).errno == 0
