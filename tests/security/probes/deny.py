"""``deny.py ERRNO CALL,CALL... -- COMMAND...``: a host on which some system calls are refused.

Stands for a hardened container: installs a small filter that answers the named calls with ERRNO, then
becomes the command. ``clone`` means clone with any namespace flag, ``prctl`` its option that installs
filters. Nothing else changes.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import raw

NUMBERS = {**raw.NR, "seccomp": 317, "landlock_create_ruleset": 444, "close_range": 436}
NAMESPACES = 0x7E020000


def main() -> None:
    code, names = int(sys.argv[1]), [name for name in sys.argv[2].split(",") if name]
    command = sys.argv[4:]
    program = [(0x20, 0, 0, 0)]
    for name in names:
        number = NUMBERS[name]
        if name == "clone":
            program += [
                (0x15, 0, 3, number),
                (0x20, 0, 0, 16),
                (0x45, 0, 1, NAMESPACES),
                (0x06, 0, 0, 0x00050000 | code),
                (0x20, 0, 0, 0),
            ]
        elif name == "prctl":
            # Only the option that installs filters.
            program += [
                (0x15, 0, 3, number),
                (0x20, 0, 0, 16),
                (0x15, 0, 1, 22),
                (0x06, 0, 0, 0x00050000 | code),
                (0x20, 0, 0, 0),
            ]
        else:
            program += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | code)]
    program.append((0x06, 0, 0, 0x7FFF0000))
    data = b"".join(struct.pack("<HBBI", *step) for step in program)
    buffer = ctypes.create_string_buffer(data, len(data))
    fprog = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(buffer)), 16)
    if os.geteuid() != 0:
        raw.LIBC.prctl(38, 1, 0, 0, 0)
    if raw.LIBC.prctl(22, 2, fprog, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the filter was refused")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
