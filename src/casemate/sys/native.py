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
_syscall = LIBC.syscall
_syscall.restype = ctypes.c_long

_MACHINE = os.uname().machine


def machine() -> str:
    """The kernel's name of this machine's instruction set, such as ``x86_64``."""
    return _MACHINE


def fail(what: str) -> OSError:
    """The OSError for the call that has just failed; ``what`` names it, with its main argument."""
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)


def syscall(what: str, number: int, *arguments: object) -> int:
    """Make a raw system call.

    Integers are passed as C longs, bytes as pointers, ``None`` as a null pointer; ctypes objects go
    through. Raises OSError, with ``what`` as its file name.
    """
    converted: list[object] = []
    for argument in arguments:
        if type(argument) is int:
            converted.append(ctypes.c_long(argument))
        elif argument is None:
            converted.append(ctypes.c_void_p(None))
        else:
            converted.append(argument)
    result: int = _syscall(ctypes.c_long(number), *converted)
    if result < 0:
        raise fail(what)
    return result
