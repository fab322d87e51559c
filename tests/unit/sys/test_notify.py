"""Calls that wait for an answer, in the running kernel: a child calls, this process answers."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from casemate.sys import notify
from casemate.sys.bpf import ALLOW, NOTIFY, Arg, Prepared, When, assemble
from casemate.sys.process import no_new_privileges
from casemate.sys.syscalls import AUDIT_ARCH, TABLES, native

if TYPE_CHECKING:
    from collections.abc import Callable

NUMBERS = TABLES[native()]


def program() -> Prepared:
    """mkdir always waits, open for writing too."""
    rules = {NUMBERS["mkdir"]: NOTIFY, NUMBERS["openat"]: When(Arg(2, 0, mask=0o3), ALLOW, NOTIFY)}
    return Prepared(assemble(AUDIT_ARCH[native()], rules, ALLOW))


class Child:
    """A process behind the program that makes some calls; its end says what came of them."""

    def __init__(self, act: Callable[[], int]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            code = 255
            try:
                no_new_privileges()
                listener = notify.install(program())
                socket.send_fds(theirs, [b"x"], [listener])
                os.close(listener)
                code = act()
            finally:
                os._exit(code)
        theirs.close()
        with ours:
            _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        self.listener = notify.Listener(fds[0])

    def end(self) -> int:
        os.close(self.listener.descriptor)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def code_of(act: Callable[[], object]) -> int:
    """The errno with which something fails, or 0."""
    try:
        act()
    except OSError as error:
        return error.errno or 255
    return 0


def test_available() -> None:
    """This kernel can."""
    assert notify.available()


def test_answers() -> None:
    """A call returns the value, the error or what the kernel says, as it was answered."""

    def act() -> int:
        codes = [code_of(lambda: os.mkdir("/nowhere/x", 0o751)) for _ in range(3)]
        return 0 if codes == [0, errno.EXDEV, errno.ENOENT] else codes[0] or 1

    child = Child(act)
    for answer in ("answer", "refuse", "let_through"):
        call = child.listener.receive()
        assert call is not None
        number, thread, kind, path, mode, *_ = call
        assert (thread, kind, mode) == (child.pid, NUMBERS["mkdir"], 0o751)
        assert notify.read_text(thread, path) == b"/nowhere/x"
        assert child.listener.is_waiting(number)
        if answer == "answer":
            child.listener.answer(number, 0)
        elif answer == "refuse":
            child.listener.refuse(number, errno.EXDEV)
        else:
            child.listener.let_through(number)
        assert not child.listener.is_waiting(number)
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == 0
    assert child.listener.receive() is None, "nobody is left"
    os.close(child.listener.descriptor)


@pytest.mark.parametrize("close_on_exec", [True, False])
def test_a_descriptor(close_on_exec: bool) -> None:
    """An open file is put into the caller's table before the call returns its number."""

    def act() -> int:
        handle = os.open("/nowhere", os.O_WRONLY)
        os.write(handle, b"given")
        wrong = os.get_inheritable(handle) == close_on_exec
        return 1 if wrong else 0

    read, write = os.pipe()
    child = Child(act)
    call = child.listener.receive()
    assert call is not None
    number = child.listener.give(call[0], write, close_on_exec=close_on_exec)
    os.close(write)
    child.listener.answer(call[0], number)
    assert os.read(read, 10) == b"given"
    os.close(read)
    # Python opens with O_CLOEXEC; what counts is what was asked for when it was given.
    assert child.end() == 0


def test_a_caller_that_is_killed() -> None:
    """Answers to nobody do no harm, before and after the call was read."""
    child = Child(lambda: code_of(lambda: os.mkdir("/nowhere/x")))
    call = child.listener.receive()
    assert call is not None
    os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
    assert not child.listener.is_waiting(call[0])
    child.listener.answer(call[0], 0)
    child.listener.refuse(call[0], 1)
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
        child.listener.give(call[0], 0, close_on_exec=True)
    assert child.listener.receive() is None
    with pytest.raises(OSError, match=os.strerror(errno.ESRCH)):
        notify.read_text(child.pid, call[3])
    os.close(child.listener.descriptor)


def test_without_an_answerer() -> None:
    """When the listener is closed the calls fail: nothing is let through by that."""
    child = Child(lambda: code_of(lambda: os.mkdir("/nowhere/x")))
    assert child.end() == errno.ENOSYS


def test_signals_do_not_restart() -> None:
    """Once its call has been read, a caller is not woken by a signal that it handles."""

    def act() -> int:
        signal.signal(signal.SIGUSR1, lambda *_: None)
        return code_of(lambda: os.mkdir("/nowhere/x"))

    child = Child(act)
    call = child.listener.receive()
    assert call is not None
    for _ in range(5):
        os.kill(child.pid, signal.SIGUSR1)
    waiting = threading.Event()
    waiting.wait(0.05)  # time for a wrong restart to show
    assert child.listener.is_waiting(call[0])
    child.listener.answer(call[0], 0)
    assert child.end() == 0


def test_only_one_listener() -> None:
    """A process behind a listener can have no second one."""

    def act() -> int:
        return code_of(lambda: notify.install(program()))

    child = Child(act)
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == errno.EBUSY
    os.close(child.listener.descriptor)


def at(content: bytes, offset: int) -> tuple[mmap.mmap, int]:
    """Two pages of memory, the second of which cannot be read, and the address of what was put into them."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    memory[offset : offset + len(content)] = content
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + page), page, 0) == 0
    return memory, address + offset


def test_texts() -> None:
    """Texts of every length, up to the last byte before memory that is not there."""
    page, me = mmap.PAGESIZE, os.getpid()
    for length in (0, 1, 511, 512, 513, 1000, notify.PATH_MAX - 1):
        text = bytes(1 + n % 255 for n in range(length))
        memory, address = at(text + b"\0", page - length - 1)
        assert notify.read_text(me, address) == text, length
        del memory
    for length in (1, 600):
        memory, address = at(b"x" * length, page - length)  # no end before the wall
        with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
            notify.read_text(me, address)
        del memory
    buffer = ctypes.create_string_buffer(b"y" * 5000)
    with pytest.raises(OSError, match=os.strerror(errno.ENAMETOOLONG)):
        notify.read_text(me, ctypes.addressof(buffer))


@pytest.mark.parametrize("address", [0, 8, 1 << 47, 0xFFFF_8000_0000_0000, (1 << 64) - 1])
def test_bad_addresses(address: int) -> None:
    """Where nothing can be read there is an error, and the buffer's old content is never given out."""
    notify.read_text(os.getpid(), ctypes.addressof(ctypes.create_string_buffer(b"old")))
    with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
        notify.read_text(os.getpid(), address)
    with pytest.raises(OSError, match=os.strerror(errno.EFAULT)):
        notify.read_memory(os.getpid(), address, 16)
