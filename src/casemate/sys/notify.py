"""Seccomp's user notification: calls of other processes that wait for this one to answer them.

A filter of which some rules return ``NOTIFY`` is installed with a *listener*. A process that makes such a
call stops in the kernel; whoever holds the listener reads the number and the registers of the call and
answers with a result, an error, a descriptor, or "let it through". The registers cannot change any more;
what pointers among them point to can, at any time, so it is copied once and never read again.

The calls go through ``PyDLL`` with prepared buffers: an answer costs the caller some 20 us, and ``struct``
and ctypes are most of it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from casemate.sys.native import fail, machine, syscall

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.sys.bpf import Prepared

__all__ = ["PATH_MAX", "Listener", "available", "install", "read_memory", "read_text"]

PATH_MAX = 4096

_SECCOMP = {"x86_64": 317}.get(machine(), 277)
_PROCESS_VM_READV = {"x86_64": 310}.get(machine(), 270)
_SET_MODE_FILTER = 1
# Once its call has been read, the caller wakes up for fatal signals only (Linux 5.19). Without that a
# signal would make it start the call anew when it has been carried out already.
_NEW_LISTENER, _WAIT_KILLABLE_RECV = 8, 32
_FLAGS = _NEW_LISTENER | _WAIT_KILLABLE_RECV

_RECV, _SEND, _ID_VALID, _ADDFD, _SET_FLAGS = 0xC0502100, 0xC0182101, 0x40082102, 0x40182103, 0x40082104
_SYNC_WAKE_UP = 1  # the answering process gives up its processor to the caller at once (Linux 6.6)
_CONTINUE = 1

# struct seccomp_notif: u64 id, u32 pid, u32 flags, then struct seccomp_data: int nr, u32 arch, u64
# instruction_pointer, u64 args[6].
_CALL = struct.Struct("=QI4xi12x6Q")
_CALL_SIZE = 80
_RESPONSE = struct.Struct("=QqiI")  # id, value, error, flags
_DESCRIPTOR = struct.Struct("=QIIII")  # id, flags, ours, theirs (chosen by the kernel), O_CLOEXEC
_PAIR = struct.Struct("=QQ")
_LOCAL, _REMOTE = struct.Struct("=QQ"), struct.Struct("=QQQQ")  # one struct iovec, and two
_ZEROS = bytes(_CALL_SIZE)

_libc = ctypes.PyDLL(None, use_errno=True)
# One prototype per call, on function objects of their own.
_ioctl = ctypes.PyDLL(None, use_errno=True).ioctl
_ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]
_readv = ctypes.PyDLL(None, use_errno=True).syscall
_readv.restype = ctypes.c_long
_readv.argtypes = [
    ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong,
    ctypes.c_ulong,
]  # fmt: skip

_page = os.sysconf("SC_PAGE_SIZE")
_USUAL = 512  # what nearly every path fits in
_memory = ctypes.create_string_buffer(PATH_MAX + 1)  # the last byte stays zero
_buffer = ctypes.addressof(_memory)
_local = ctypes.create_string_buffer(_LOCAL.size)
_remote = ctypes.create_string_buffer(_REMOTE.size)


def available() -> bool:
    """Whether this kernel can do it as it is used here (Linux 5.19)."""
    try:
        # The flags are looked at before the program, which is not there.
        syscall("seccomp", _SECCOMP, _SET_MODE_FILTER, _FLAGS, None)
    except OSError as error:
        return error.errno == errno.EFAULT
    return False


def install(program: Prepared) -> int:
    """Put the calling thread behind the program, as ``Prepared.install``; returns the listener (O_CLOEXEC).

    Raises OSError: EBUSY if the thread's filters have a listener already.
    """
    return syscall("seccomp with a listener", _SECCOMP, _SET_MODE_FILTER, _FLAGS, program.header)


class Listener:
    """The answering side. ``Preconditions:`` one thread."""

    __slots__ = ("_call", "_given", "_response", "descriptor")

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._call = ctypes.create_string_buffer(_CALL_SIZE)
        self._response = ctypes.create_string_buffer(_RESPONSE.size)
        self._given = ctypes.create_string_buffer(_DESCRIPTOR.size)
        _ioctl(descriptor, _SET_FLAGS, _SYNC_WAKE_UP)  # older kernels say EINVAL

    def receive(self) -> tuple[int, ...] | None:
        """The next call: its id, the caller's thread id, the call's number, six arguments.

        None if the caller has been killed meanwhile, or nobody is left who could call.
        """
        ctypes.memmove(self._call, _ZEROS, _CALL_SIZE)  # the kernel insists on it
        if _ioctl(self.descriptor, _RECV, self._call) < 0:
            if ctypes.get_errno() in (errno.ENOENT, errno.EINTR):
                return None
            raise fail("seccomp receive")
        return _CALL.unpack_from(self._call)

    def is_waiting(self, call: int) -> bool:
        """Whether the caller still waits: if so, what was opened below its /proc directory is its own."""
        _PAIR.pack_into(self._given, 0, call, 0)
        result: int = _ioctl(self.descriptor, _ID_VALID, self._given)
        return result == 0

    def give(self, call: int, descriptor: int, *, close_on_exec: bool) -> int:
        """Put a copy of a descriptor into the caller's table; returns its number there.

        The caller goes on waiting for ``answer``. Raises OSError: EMFILE where its table is full, ENOENT
        if it is gone.
        """
        flags = os.O_CLOEXEC if close_on_exec else 0
        _DESCRIPTOR.pack_into(self._given, 0, call, 0, descriptor, 0, flags)
        number: int = _ioctl(self.descriptor, _ADDFD, self._given)
        if number < 0:
            raise fail("seccomp give")
        return number

    def answer(self, call: int, value: int) -> None:
        """The call returns ``value`` without having been made."""
        self._send(call, value, 0, 0)

    def refuse(self, call: int, number: int) -> None:
        """The call fails with an error number."""
        self._send(call, 0, -number, 0)

    def let_through(self, call: int) -> None:
        """The kernel makes the call itself.

        It reads the arguments' memory again then: nothing may depend on what was seen there.
        """
        self._send(call, 0, 0, _CONTINUE)

    def _send(self, call: int, value: int, error: int, flags: int) -> None:
        _RESPONSE.pack_into(self._response, 0, call, value, error, flags)
        if _ioctl(self.descriptor, _SEND, self._response) < 0 and ctypes.get_errno() != errno.ENOENT:
            raise fail("seccomp answer")


def read_memory(thread: int, address: int, size: int) -> bytes:
    """Up to ``size`` bytes (4096 at most) of another process, up to the first page that is not there.

    Raises OSError: EFAULT if nothing can be read, EPERM if we may not, ESRCH if the thread is gone.
    """
    got = _read(thread, address, size)
    data: bytes = _memory.raw[:got]
    return data


def read_text(thread: int, address: int) -> bytes:
    """The text that ends with the first zero byte. Raises as ``read_memory``, and ENAMETOOLONG."""
    for size in (_USUAL, PATH_MAX):
        got = _read(thread, address, size)
        text: bytes = _memory.value  # up to the first zero, which may be one of an earlier, longer reading
        if len(text) < got:
            return text
        if got < size:  # up to a page that is not there
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT), "path")
    raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), "path")


def _read(thread: int, address: int, size: int) -> int:
    """Read into the buffer; returns how many bytes.

    In two pieces, the first of which ends with its page: the next one need not exist.
    """
    address &= 0xFFFF_FFFF_FFFF_FFFF
    room = min(_page - address % _page, size)
    _LOCAL.pack_into(_local, 0, _buffer, size)
    _REMOTE.pack_into(_remote, 0, address, room, address + room & 0xFFFF_FFFF_FFFF_FFFF, size - room)
    got: int = _readv(_PROCESS_VM_READV, thread, _local, 1, _remote, 2, 0)
    if got < 0:
        raise fail("process_vm_readv")
    return got
