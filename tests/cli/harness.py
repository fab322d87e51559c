"""Starting the real command line as root or as uid 1000, and judging on the host what it left behind.

Root's state directories are fixed paths that other users of the machine share. So root's runs happen in a
``Den``: a mount namespace of their own in which those directories are empty, and everything left in them
is ours. An unprivileged caller's state lies below its home, which is a directory of the test.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.security.lab import PATH, drop_to, give, processes_with

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MODES = ("root", "uid1000")
PYTHON = "/usr/bin/python3"
STATE = ("/run/casemate", "/var/lib/casemate")
# Directories that are made once and kept; they hold nothing of one run.
_KEPT = {"casemate", "run", "locks", "uids", "views", "held", "caches", "trust", "wheels", "live"}

_DEN = """
size=$1
shift
# Sandboxes of others that run just now: this copy of their mounts must not hold them.
for mount in $(awk '$2 ~ "/casemate/" {print $2}' /proc/self/mounts); do umount -l "$mount"; done
for place in "$@"; do
    mkdir -p "$place" && mount -t tmpfs -o mode=0755,size=$size den "$place" || exit 1
done
echo ready
read line
"""


def until(condition: Callable[[], Any], seconds: float = 10.0, what: str = "") -> Any:
    """Poll until ``condition()`` is true; returns what it gave. Fails the test at the deadline."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {seconds} s: {what or condition}"
        select.select([], [], [], 0.01)
    return value


class Den:
    """A mount namespace, held open by a process that does nothing, with empty file systems at ``places``."""

    def __init__(self, places: tuple[str, ...] = STATE, size: str = "512m") -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", _DEN, "den", size, *places],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"ready\n"
        self.root = f"/proc/{self._holder.pid}/root"

    @property
    def prefix(self) -> list[str]:
        """The words before a command that run it inside, in the present directory."""
        enter = ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", "--"]
        return [*enter, "/bin/sh", "-c", 'cd -- "$0" && exec "$@"']

    def mounts(self) -> list[str]:
        """Its mount points."""
        text = Path(f"/proc/{self._holder.pid}/mountinfo").read_text()
        return [line.split()[4] for line in text.splitlines()]

    def close(self) -> None:
        """Let it go, with all that is mounted in it."""
        self._holder.communicate(b"\n")


@dataclasses.dataclass(frozen=True, repr=False)
class Ended:
    """How a run of the command line came back."""

    code: int
    out: bytes
    err: bytes
    pid: int = 0

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        value: dict[str, Any] = json.loads(self.out)
        return value

    def __repr__(self) -> str:
        told = self.err[-1500:].decode(errors="replace")
        return f"exit {self.code}; stdout {self.out[-900:]!r}; stderr {told}"


@dataclasses.dataclass
class Caller:
    """Somebody who calls ``casemate``: root in a den, or uid 1000 without any capability."""

    mode: str
    command: Path
    base: Path
    den: Den | None
    started: list[int] = dataclasses.field(default_factory=list)
    open: list[subprocess.Popen[bytes]] = dataclasses.field(default_factory=list)
    old_groups: frozenset[str] = dataclasses.field(default_factory=lambda: frozenset(_all_groups()))
    count: int = 0

    @property
    def uid(self) -> int:
        return 0 if self.mode == "root" else 1000

    @property
    def home(self) -> Path:
        return self.base / "home"

    @property
    def root(self) -> str:
        """What to put before a path to see it as the caller does."""
        return self.den.root if self.den else ""

    @property
    def state(self) -> Path:
        """The directory that survives a reboot."""
        return Path(
            f"{self.root}/var/lib/casemate"
            if not self.uid
            else f"{self.root}{self.home}/.local/state/casemate"
        )

    @property
    def runtime(self) -> Path:
        """The directory of locks and sockets."""
        return self.state / "run" if self.uid else Path(f"{self.root}/run/casemate")

    def environment(self) -> dict[str, str]:
        return {
            "PATH": PATH, "HOME": str(self.home), "LANG": "C.UTF-8", "TERM": "xterm",
            "USER": "root" if self.uid == 0 else "user", "SHELL": "/bin/bash", "CALLERS_SECRET": "hush",
        }  # fmt: skip

    def workspace(self, name: str = "ws") -> Path:
        """A fresh, empty directory of the caller's."""
        self.count += 1
        path = self.base / f"t{self.count}" / name
        path.mkdir(parents=True)
        give(path.parent, self.uid)
        return path

    def file(self, path: Path, content: str | bytes, mode: int = 0o644) -> Path:
        """Write a file of the caller's."""
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        path.chmod(mode)
        os.chown(path, self.uid, self.uid)
        return path

    def words(self, argv: list[str | bytes], cwd: str) -> list[str | bytes]:
        """The whole command line of the host that runs ``argv`` as this caller."""
        return [*([*self.den.prefix, cwd] if self.den else []), *drop_to(self.uid), *argv]

    def start(self, *argv: str | bytes, cwd: Path | str, env: Mapping[str, str] | None = None,
              before: tuple[str, ...] = (), **how: Any) -> subprocess.Popen[bytes]:  # fmt: skip
        """``casemate ARGV`` in the background; ``before`` are words between the caller and the command."""
        for name in ("stdin", "stdout", "stderr"):
            how.setdefault(name, subprocess.PIPE)
        process = subprocess.Popen(
            self.words([*before, str(self.command), *argv], str(cwd)),
            cwd=cwd, env={**self.environment(), **(env or {})}, **{"start_new_session": True, **how},
        )  # fmt: skip
        self.started.append(process.pid)
        self.open.append(process)
        return process

    def cli(
        self, *argv: str | bytes, cwd: Path | str, stdin: bytes = b"", timeout: float = 40, **how: Any
    ) -> Ended:
        """``casemate ARGV``, to its end."""
        process = self.start(*argv, cwd=cwd, **how)
        try:
            out, err = process.communicate(stdin, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"no end after {timeout} s: {out[-500:]!r} {err[-500:]!r}") from None
        return Ended(process.returncode, out or b"", err or b"", process.pid)

    def run(self, cwd: Path, *command: str | bytes, flags: tuple[str, ...] = (), **how: Any) -> Ended:
        """``casemate run FLAGS -- COMMAND``."""
        return self.cli("run", *flags, "--", *command, cwd=cwd, **how)

    def sh(self, cwd: Path, script: str, *, flags: tuple[str, ...] = (), **how: Any) -> Ended:
        """``casemate run FLAGS -- /bin/sh -c SCRIPT``."""
        return self.run(cwd, "/bin/sh", "-c", script, flags=flags, **how)

    def py(self, cwd: Path, script: str, *args: str, flags: tuple[str, ...] = (), **how: Any) -> Ended:
        """``casemate run FLAGS -- python3 -c SCRIPT``."""
        return self.run(cwd, PYTHON, "-I", "-S", "-c", script, *args, flags=flags, **how)

    # -- what is left --------------------------------------------------------------------------------

    def processes(self) -> list[int]:
        """Processes that have to do with one of the caller's workspaces: sandboxes and their callers."""
        return processes_with(f"{self.base}/t")

    def files(self) -> list[str]:
        """Files of state; directories that are only places do not count."""
        found = []
        for root in {self.state, self.runtime}:
            for base, directories, names in os.walk(root):
                if os.path.basename(base) in ("held", "caches", "trust"):
                    directories[:] = []
                    continue
                found += [os.path.join(base, name) for name in names]
                found += [os.path.join(base, name) for name in directories if name not in _KEPT]
        return sorted(found)

    def groups(self, pids: set[int]) -> list[str]:
        """Control groups that were made by these processes, with the tasks in them."""
        found = []
        for path in _all_groups():
            with contextlib.suppress(ValueError, OSError):
                # A pid may have been somebody else's before, whose group is there still.
                if int(path.rpartition("/")[2].partition("-")[0], 16) in pids and path not in self.old_groups:
                    found.append(f"{path} {Path(path, 'tasks').read_text().split()}")
        return sorted(found)

    def traces(self, pids: set[int] | None = None) -> list[str]:
        """Everything that is there still: processes, mounts, groups, files."""
        mounts = [place for place in self.den.mounts() if "/casemate/" in place] if self.den else []
        left = [f"process {pid} {_cmdline(pid)}" for pid in self.processes()]
        left += [f"mount {place}" for place in mounts]
        left += [f"group {path}" for path in self.groups(set(self.started) if pids is None else pids)]
        return left + [f"file {path}" for path in self.files()]

    def end(self, process: subprocess.Popen[bytes], seconds: float = 10) -> int:
        """Wait for the end of a background run and close its pipes; its code."""
        try:
            return process.wait(seconds)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    def groups_cleaned_by(self, ws: Path) -> None:
        """A run removes the empty control groups of launchers that were killed."""
        until(lambda: self.run(ws, "true", flags=("--no-daemon",)).code == 0)

    def close(self) -> None:
        """End what a test that failed has left running, and close every pipe."""
        while self.open:
            process = self.open.pop()
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    def clean(self) -> None:
        """Remove the state of all runs: for tests that leave some on purpose."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.den:
            for place in sorted((p for p in self.den.mounts() if "/casemate/" in p), reverse=True):
                subprocess.run([*self.den.prefix, "/", "umount", "-l", place], check=False)
        for root in {self.state, self.runtime}:
            for path in root.iterdir() if root.is_dir() else ():
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def _all_groups() -> list[str]:
    """The groups of every sandbox on this machine."""
    found = []
    for base, directories, _ in os.walk("/sys/fs/cgroup"):
        if os.path.basename(base) == "casemate":
            found += [f"{base}/{name}" for name in directories]
            directories[:] = []
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent (a slow init) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def state(pid: int) -> str:
    """What a process does just now, for a message."""
    told = []
    for name in ("stat", "wchan", "syscall"):
        with contextlib.suppress(OSError):
            told.append(Path(f"/proc/{pid}/{name}").read_text().strip()[:200])
    return f"{pid}: {_cmdline(pid)[:80]}: " + "; ".join(told)


def _cmdline(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:200]
    return "?"


def daemon_pid(caller: Caller) -> int:
    """The running daemon's pid, or 0."""
    found = re.match(rb"pid (\d+), ", caller.cli("daemon", "status", cwd="/").out)
    return int(found[1]) if found else 0


def family(pid: int) -> list[int]:
    """The daemon and its keeper."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [pid, *(int(word) for word in file.read().split())]
