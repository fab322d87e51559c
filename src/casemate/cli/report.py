"""Where the report goes: settled before the command runs, which may put links in its way afterwards.

A report inside the workspace would otherwise be written, with Casemate's rights, through whatever link the
command has left under that name.
"""

from __future__ import annotations

import os
import stat

__all__ = ["ReportFile"]


class ReportFile:
    """One file to be written once. Raises OSError when it is clear already that it cannot be."""

    def __init__(self, path: str) -> None:
        self._name = ""
        self._handle = -1
        mask = os.umask(0o022)
        os.umask(mask)
        self._mode = 0o666 & ~mask
        try:
            kind = os.stat(path).st_mode
        except FileNotFoundError:
            kind = stat.S_IFREG
        flags = os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC
        number = _descriptor(path)
        if number is not None:
            self._handle = os.dup(number)
            return
        if not stat.S_ISREG(kind):  # a pipe, a terminal, /dev/fd/3
            self._handle = os.open(path, flags)
            return
        directory, self._name = os.path.split(os.path.realpath(path))
        if os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
            self._handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        else:
            self._name = ""
            self._handle = os.open(path, flags)

    def close(self) -> None:
        """Leave it: nothing will be written."""
        os.close(self._handle)

    def write(self, data: bytes) -> None:
        """Write it, complete or not at all where it is a plain file; then close. Raises OSError."""
        try:
            if not self._name:
                if stat.S_ISREG(os.fstat(self._handle).st_mode):
                    os.ftruncate(self._handle, 0)
                _write(self._handle, data)
                return
            # Made anew and renamed over what is there now: a link is replaced and never followed.
            temporary = f".casemate-report-{os.getpid()}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            handle = os.open(temporary, flags, 0o600, dir_fd=self._handle)
            try:
                _write(handle, data)
                os.fchmod(handle, self._mode)
                os.rename(temporary, self._name, src_dir_fd=self._handle, dst_dir_fd=self._handle)
            except OSError:
                os.unlink(temporary, dir_fd=self._handle)
                raise
            finally:
                os.close(handle)
        finally:
            os.close(self._handle)


def _descriptor(path: str) -> int | None:
    """The number of one of our own descriptors, if ``path`` names it: it may not be openable by name."""
    path = {"/dev/stdout": "/dev/fd/1", "/dev/stderr": "/dev/fd/2"}.get(path, path)
    for directory in ("/dev/fd/", "/proc/self/fd/"):
        if path.startswith(directory) and path[len(directory) :].isdecimal():
            return int(path[len(directory) :])
    return None


def _write(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
