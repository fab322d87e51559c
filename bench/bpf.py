"""A seccomp filter for bwrap, which brings none: the kind that container runtimes and codex load.

Casemate's own filter is used when it can be imported, so that both sides check the same table; else a
plain deny-list of the same length, as a linear chain.
"""

from __future__ import annotations

import importlib
import struct

__all__ = ["INSTRUCTION", "program"]

INSTRUCTION = 8
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _EPERM, _KILL = 0x7FFF0000, 0x00050001, 0x80000000
_X86_64 = 0xC000003E
# Numbers no test command uses; what they are does not matter for the cost, only that each is compared.
_DENIED = (*range(400, 424), *range(425, 434), *range(442, 462), *range(500, 572))


def program() -> bytes:
    """The filter as an array of ``struct sock_filter``."""
    try:
        native = importlib.import_module("casemate.sys.native")
        table = importlib.import_module("casemate.isolation.process.filter")
    except ImportError:
        return _plain()
    return bytes(table.build(native.machine()))


def _plain() -> bytes:
    """Refuse a hundred-odd numbers by one comparison each, as the tools do that build no search tree."""
    lines = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _X86_64), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    for index, number in enumerate(_DENIED):
        lines.append((_EQUAL, len(_DENIED) - index, 0, number))
    lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
