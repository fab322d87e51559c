"""The C library by ctypes: one handle, one error rule.

``PyDLL`` keeps the interpreter lock during a call: it is cheaper than ``CDLL`` and safe in a child
that was forked from a process with threads, since no lock has to be taken again after the call.
None of the calls made here may block for long.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["LIBC", "fail", "machine", "syscall"]

LIBC = ctypes.PyDLL(None, use_errno=True)
# A handle of its own, since a prototype belongs to a handle's function object: with one, ctypes converts
# the arguments in C. The six are declared as pointers, which take integers, bytes and None alike.
_syscall = ctypes.PyDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long] + [ctypes.c_void_p] * 6

_MACHINE = os.uname().machine


_PADDING = (None,) * 6


def machine() -> str:
    """The kernel's name of this machine's instruction set, such as ``x86_64``."""
    return _MACHINE


def fail(what: str) -> OSError:
    """The OSError for the call that has just failed; ``what`` names it, with its main argument."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)


def syscall(what: str, number: int, *arguments: object) -> int:
    """Make a raw system call.

    An argument is an integer, bytes (passed as a pointer), a ctypes buffer or ``None``. Raises OSError, with
    ``what`` as its file name.
    """
    result: int = _syscall(number, *arguments, *_PADDING[len(arguments) :])
    if result < 0:
        raise fail(what)
    return result
