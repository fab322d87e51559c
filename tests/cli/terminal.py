"""A terminal of the host with Casemate as its session's leader."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import termios
from typing import TYPE_CHECKING, Any

from tests.cli.harness import state, until

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from tests.cli.harness import Caller


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A terminal of the host with Casemate as its session's leader."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.master, self.slave = pty.openpty()
        self.text = b""
        self.process: subprocess.Popen[bytes] | None = None
        self.resize(24, 80)

    def start(self, ws: Path, *argv: str, **how: Any) -> None:
        how = {"stdin": self.slave, "stdout": self.slave, "stderr": self.slave, **how}
        self.process = self.caller.start(*argv, cwd=ws, preexec_fn=_take_terminal, **how)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def type(self, data: bytes) -> None:
        os.write(self.master, data)

    def read(self) -> bytes:
        """Take what there is; returns all that has come so far."""
        while select.select([self.master], [], [], 0)[0]:
            try:
                data = os.read(self.master, 65536)
            except OSError:
                break
            if not data:
                break
            self.text += data
        return self.text

    def expect(self, pattern: bytes, seconds: float = 15) -> re.Match[bytes]:
        """Wait for output that matches."""
        try:
            found = until(lambda: re.search(pattern, self.read(), re.DOTALL), seconds)
        except AssertionError:
            pids = [self.process.pid if self.process else 0, *self.caller.processes()]
            told = "\n".join(state(pid) for pid in pids)
            raise AssertionError(f"no {pattern!r} in {self.text[-500:]!r}\n{told}") from None
        assert isinstance(found, re.Match)
        return found

    def end(self, seconds: float = 15) -> int:
        """Wait for the end, reading on."""
        assert self.process is not None
        until(lambda: [self.read(), self.process.poll()][1] is not None, seconds, "its end")  # type: ignore[union-attr]
        return self.caller.end(self.process)

    def modes(self) -> list[Any]:
        return termios.tcgetattr(self.slave)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for end in (self.master, self.slave):
            with contextlib.suppress(OSError):
                os.close(end)
