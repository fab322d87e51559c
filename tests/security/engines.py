"""What the attacks run under: nothing (the control), bubblewrap (a peer), or Casemate."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import termios
import time
from typing import TYPE_CHECKING, Any

from tests.security.lab import PYTHON, STARTED, Scene, drop_to

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclasses.dataclass
class Outcome:
    """What came back from one run."""

    argv: list[str]
    code: int
    stdout: str
    stderr: str
    seconds: float
    report: dict[str, Any]
    tty_input: str = ""
    tty_identity: list[int] = dataclasses.field(default_factory=list)
    tty_canonical: bool = True

    @property
    def records(self) -> dict[str, dict[str, Any]]:
        """What each act reported, by its name."""
        found = {}
        for line in self.stdout.splitlines():
            text = line.strip("\r\0 ")
            if text.startswith("@@ {"):
                with contextlib.suppress(ValueError):
                    record = json.loads(text[3:])
                    found[record["act"]] = record
        return found

    @property
    def applied(self) -> dict[str, Any]:
        """What became of the changes, from the report."""
        value: dict[str, Any] = self.report.get("applied", {})
        return value

    def says(self, word: str) -> list[str]:
        """The progress lines ``@@word ...``."""
        return [line.strip() for line in self.stdout.splitlines() if line.strip().startswith("@@" + word)]

    def brief(self) -> str:
        names = ("exit-code", "limit", "error", "applied")
        keep = {name: self.report[name] for name in names if name in self.report}
        return (
            f"exit {self.code} after {self.seconds:.2f} s; report {json.dumps(keep)[:600]}; "
            f"stdout {self.stdout[-700:]!r}; stderr {self.stderr[-500:]!r}"
        )


@dataclasses.dataclass
class Request:
    """One run: what to start, and how."""

    scene: Scene
    argv: list[str]
    flags: tuple[str, ...] = ()
    tty: bool = False
    pass_fds: tuple[int, ...] = ()
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    cwd: Path | None = None
    timeout: float = 60.0
    uid: int | None = None
    stdin: int = subprocess.DEVNULL
    stdout: int = subprocess.PIPE


def acts_command(scene: Scene, acts: Sequence[str], **params: Any) -> list[str]:
    """The command that runs ``acts`` in the scene's workspace."""
    return [PYTHON, "-I", str(scene.ws / ".lab/driver.py"), str(scene.params(**params)), *acts]


class Engine:
    """Starts a command for a scene and brings back what came of it."""

    name = "?"
    sandboxed = True

    def argv(self, request: Request) -> list[str]:
        raise NotImplementedError

    def report(self, request: Request) -> dict[str, Any]:
        return {}

    def run(self, request: Request) -> Outcome:
        scene = request.scene
        uid = scene.world.uid if request.uid is None else request.uid
        argv = [*drop_to(uid), *self.argv(request)]
        env = {**scene.world.environment(), **request.env}
        started = time.monotonic()
        runner = _run_tty if request.tty else _run_pipes
        outcome = runner(argv, env, str(request.cwd or scene.ws), request)
        outcome.seconds = time.monotonic() - started
        outcome.report = self.report(request)
        return outcome


class Nothing(Engine):
    """No sandbox: shows that an act, allowed, succeeds. Global state is only ever written back."""

    name = "control"
    sandboxed = False

    def argv(self, request: Request) -> list[str]:
        return request.argv


class PrivateMounts(Nothing):
    """No sandbox but a mount namespace of its own, so that mounts made by a control vanish."""

    def argv(self, request: Request) -> list[str]:
        return ["unshare", "--mount", *request.argv]


class Bwrap(Engine):
    """A plain bubblewrap: the peer that shows which rows a simple sandbox leaks."""

    name = "bwrap"
    extra: tuple[str, ...] = ()

    def argv(self, request: Request) -> list[str]:
        ws = str(request.scene.ws)
        return [
            "bwrap", "--ro-bind", "/", "/", "--bind", ws, ws, "--dev", "/dev", "--proc", "/proc",
            *(word.replace("{ws}", ws) for word in self.extra), "--die-with-parent", "--chdir", ws,
            *request.argv,
        ]  # fmt: skip


class BwrapCarveOut(Bwrap):
    """A bubblewrap whose .git is read-only: the carve-out that a nested user namespace undoes."""

    extra = ("--ro-bind", "{ws}/.git", "{ws}/.git")


class Casemate(Engine):
    """The real command line, from an installation outside /root."""

    name = "casemate"

    def argv(self, request: Request) -> list[str]:
        command = request.scene.world.command
        if command is None:
            raise RuntimeError("this lab has no installation")
        report = self._report_path(request)
        with contextlib.suppress(FileNotFoundError):
            report.unlink()
        return [str(command), "run", "--report", str(report), *request.flags, "--", *request.argv]

    def _report_path(self, request: Request) -> Path:
        # Beside the workspace, never inside it: the command must not be able to write its own report.
        return request.scene.ws.parent / "report.json"

    def report(self, request: Request) -> dict[str, Any]:
        try:
            value: dict[str, Any] = json.loads(self._report_path(request).read_text())
        except (OSError, ValueError):
            return {}
        return value


def _run_pipes(argv: list[str], env: dict[str, str], cwd: str, request: Request) -> Outcome:
    process = subprocess.Popen(
        argv, env=env, cwd=cwd, stdin=request.stdin, stdout=request.stdout, stderr=subprocess.PIPE,
        pass_fds=request.pass_fds, start_new_session=True,
    )  # fmt: skip
    STARTED.add(process.pid)
    try:
        out, err = process.communicate(timeout=request.timeout)
    except subprocess.TimeoutExpired:
        _kill_group(process)
        out, err = process.communicate()
        err += b"\n(the harness ended it: timeout)"
    return Outcome(
        argv, process.returncode, (out or b"").decode(errors="replace"), err.decode(errors="replace"), 0.0, {}
    )


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


# An interactive shell in short: leads the session, runs the command, then looks at what is queued as input
# for itself. The leader must outlive the command, since a terminal is hung up when its leader exits.
LEADER = """
import os, subprocess, sys, termios, tty
report = int(sys.argv[1])
os.set_inheritable(report, False)
code = subprocess.call(sys.argv[2:], close_fds=False)
state = termios.tcgetattr(0)
tty.setraw(0, termios.TCSANOW)
os.set_blocking(0, False)
try:
    queued = os.read(0, 4096)
except BlockingIOError:
    queued = b""
os.write(report, b"%d %s" % (bool(state[3] & termios.ICANON), queued))
os._exit(code if code >= 0 else 128 - code)
"""


def _run_tty(argv: list[str], env: dict[str, str], cwd: str, request: Request) -> Outcome:
    """Run with a terminal of the host as controlling terminal, and look at its input queue afterwards."""
    master, slave = pty.openpty()
    info = os.fstat(slave)
    queue_read, queue_write = os.pipe()
    process = subprocess.Popen(
        [PYTHON, "-I", "-S", "-c", LEADER, str(queue_write), *argv],
        env=env, cwd=cwd, stdin=slave, stdout=slave, stderr=slave, pass_fds=(queue_write, *request.pass_fds),
        start_new_session=True, preexec_fn=_take_terminal,
    )  # fmt: skip
    os.close(slave)
    os.close(queue_write)
    output = b""
    end = time.monotonic() + request.timeout
    while True:
        ready, _, _ = select.select([master], [], [], 0.05)
        data = b""
        if ready:
            with contextlib.suppress(OSError):
                data = os.read(master, 65536)
            output += data
        if not data and process.poll() is not None:
            break
        if time.monotonic() > end:
            _kill_group(process)
            process.wait()
            output += b"\n(the harness ended it: timeout)"
            break
    with open(queue_read, "rb") as stream:
        canonical, _, queued = stream.read().partition(b" ")
    os.close(master)
    return Outcome(
        argv, process.returncode, output.decode(errors="replace"), "", 0.0, {},
        queued.decode(errors="replace"), [info.st_dev, info.st_ino, info.st_rdev], canonical == b"1",
    )  # fmt: skip


ENGINE = Casemate()
