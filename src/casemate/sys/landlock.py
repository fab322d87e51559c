"""Landlock: a second wall behind the mounts, by ABI (Linux 5.13 is 1, 6.12 is 6, 6.15 is 7)."""

from __future__ import annotations

import os
import struct

from casemate.sys.native import syscall

__all__ = ["EVERYTHING", "READ", "WRITE_DEVICE", "Ruleset", "abi"]

_CREATE, _ADD, _RESTRICT = 444, 445, 446

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15

READ = _EXECUTE | _READ_FILE | _READ_DIR
WRITE_DEVICE = _WRITE_FILE | _TRUNCATE | _IOCTL_DEV
EVERYTHING = (1 << 16) - 1
# Device nodes are never made inside a sandbox, whatever else a rule grants.
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11

_SCOPE_ABSTRACT_UNIX, _SCOPE_SIGNAL = 1, 2
_FILE_ONLY = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV


def abi() -> int:
    """The kernel's Landlock ABI; 0 where there is none."""
    try:
        return syscall("landlock abi", _CREATE, None, 0, 1)
    except OSError:
        return 0


def _handled(version: int) -> int:
    """The file-system rights this ABI knows: REFER came with 2, TRUNCATE with 3, IOCTL_DEV with 5."""
    bits = 13 if version < 2 else 14 if version < 3 else 15 if version < 5 else 16
    return (1 << bits) - 1


class Ruleset:
    """A ruleset that handles every right of the ABI; what no rule grants is refused.

    It also scopes abstract unix sockets and signals to the sandbox from ABI 6 on.
    """

    def __init__(self, version: int, descriptor: int = -1) -> None:
        """A new ruleset for this ABI, or one that another process made."""
        self.version = version
        self._known = _handled(version)
        if descriptor >= 0:
            self.descriptor = descriptor
            return
        scoped = _SCOPE_ABSTRACT_UNIX | _SCOPE_SIGNAL if version >= 6 else 0
        block = struct.pack("=QQQ", self._known, 0, scoped)
        size = 24 if version >= 6 else 16 if version >= 4 else 8
        self.descriptor = syscall("landlock_create_ruleset", _CREATE, block, size, 0)

    def allow(self, path: int, rights: int, *, directory: bool = True) -> None:
        """Grant rights on the file or on all beneath the directory behind a descriptor."""
        rights &= self._known & ~(_MAKE_CHAR | _MAKE_BLOCK)
        if not directory:
            rights &= _FILE_ONLY
        syscall("landlock_add_rule", _ADD, self.descriptor, 1, struct.pack("=Qi", rights, path), 0)

    def enforce(self) -> None:
        """Restrict the calling thread and all it starts. ``no_new_privs`` must be set already."""
        syscall("landlock_restrict_self", _RESTRICT, self.descriptor, 0)

    def close(self) -> None:
        """Let the descriptor go."""
        os.close(self.descriptor)
