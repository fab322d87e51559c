"""A program, run alone: asks the running kernel what it makes of classic BPF programs.

Reads one JSON request a line. ``["load", [program, ...]]`` answers with the errno that each program (in
hex) gets from seccomp; ``["run", program, [[nr, a0..a5], ...]]`` loads it in a child and answers with the
errno of each call, or with "killed".
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2

libc = ctypes.CDLL(None, use_errno=True)


class SockFprog(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def load(program: bytes) -> int:
    """0, or the errno of the kernel's refusal."""
    fprog = SockFprog(len(program) // 8, program)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return ctypes.get_errno()
    if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(fprog), 0, 0):
        return ctypes.get_errno()
    return 0


def call(numbers: list[int]) -> int:
    """The errno of one system call; 0 when it succeeded."""
    ctypes.set_errno(0)
    nr, *args = (ctypes.c_ulong(value) for value in numbers)
    return ctypes.get_errno() if libc.syscall(nr, *args) == -1 else 0


def in_child(work: object) -> str:
    """What ``work()`` returns, as JSON, from a child of ours; "killed" if it did not live to tell."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        os.write(write_end, json.dumps(work()).encode())  # type: ignore[operator]
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        text = answer.read().decode()
    os.waitpid(child, 0)
    return text or json.dumps("killed")


def main() -> None:
    for line in sys.stdin:
        kind, *rest = json.loads(line)
        if kind == "load":
            programs = [bytes.fromhex(text) for text in rest[0]]
            answer = in_child(lambda programs=programs: [load(program) for program in programs])
        else:
            program, calls = bytes.fromhex(rest[0]), rest[1]
            answer = in_child(
                lambda program=program, calls=calls: load(program) or [call(numbers) for numbers in calls]
            )
        print(answer, flush=True)


if __name__ == "__main__":
    main()
