"""Running the same everyday command behind the boundary and without it, and comparing what came of it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.security.lab import PATH, drop_to

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.harness import Caller, Ended

IDENTITY = """[user]
	name = Some One
	email = some.one@example.invalid
[init]
	defaultBranch = trunk
[core]
	pager = false
"""


def need(*programs: str, path: str = PATH) -> None:
    """Skip where a program is missing. In CI a skip that tests/skips.toml does not list is a failure."""
    missing = [name for name in programs if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"not on this machine: {' '.join(missing)}")


def node_path() -> str:
    """A PATH with node and npm: the system's, or those beside the interpreter that runs the tests."""
    return f"{PATH}:{os.path.dirname(sys.executable)}"


def tree(directory: Path, *, leave_out: tuple[str, ...] = ()) -> dict[str, str]:
    """What a directory holds: path -> kind, mode, and content (a hash) or target. Links are not followed."""
    found: dict[str, str] = {}
    for base, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if name not in leave_out]
        for name in [*directories, *names]:
            path = os.path.join(base, name)
            facts = os.lstat(path)
            text = stat.filemode(facts.st_mode)
            if stat.S_ISLNK(facts.st_mode):
                text += f" -> {os.readlink(path).replace(str(directory), '@')}"
            elif stat.S_ISREG(facts.st_mode):
                with open(path, "rb") as file:
                    text += " " + hashlib.file_digest(file, "sha256").hexdigest()[:16]
            found[os.path.relpath(path, directory)] = text
    return found


def owners(directory: Path) -> set[tuple[int, int]]:
    """Who owns what is there."""
    paths = [directory, *directory.rglob("*")]
    return {(facts.st_uid, facts.st_gid) for facts in map(os.lstat, paths)}


@dataclasses.dataclass
class Pair:
    """A workspace for runs inside, and a twin of it for the same commands outside; ``flags`` for the runs."""

    caller: Caller
    ws: Path
    twin: Path
    flags: tuple[str, ...] = ()

    def file(self, name: str, text: str, mode: int = 0o644) -> None:
        """Write the same file into both."""
        for directory in (self.ws, self.twin):
            path = directory / name
            if not path.parent.is_dir():
                path.parent.mkdir()
                os.chown(path.parent, self.caller.uid, self.caller.uid)
            self.caller.file(path, text, mode)

    def host(self, *argv: str, cwd: Path | None = None, path: str = PATH) -> str:
        """Run a command on the host as the caller, in the workspace; its stdout. It must succeed."""
        done = self._host(argv, cwd or self.ws, path)
        assert done.returncode == 0, f"{argv}: exit {done.returncode}: {done.stdout} {done.stderr}"
        return done.stdout

    def _host(self, argv: tuple[str, ...], cwd: Path, path: str = PATH) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*drop_to(self.caller.uid), *argv], cwd=cwd, env={**self.caller.environment(), "PATH": path},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def inside(self, *argv: str, path: str = PATH, env: dict[str, str] | None = None) -> Ended:
        """Run a command behind the boundary, in the workspace. It must succeed, and hold nothing back."""
        ended = self.caller.run(
            self.ws, *argv, env={"PATH": path, **(env or {})}, timeout=90,
            flags=("--no-daemon", "--report", str(self.report), *self.flags),
        )  # fmt: skip
        assert ended.code == 0, ended
        assert b"held back" not in ended.err, ended
        return ended

    @property
    def report(self) -> Path:
        return self.ws.parent / "report.json"

    def same(self, *argv: str) -> str:
        """Run a command on both sides. Exit code, stdout and stderr must be equal; the stdout inside."""
        outside = self._host(argv, self.twin)
        ended = self.caller.run(self.ws, *argv, flags=("--no-daemon", "--quiet", *self.flags), timeout=90)
        # The directories have names of one length, since some programs pad their columns.
        out = ended.out.decode().replace(str(self.ws), str(self.twin))
        err = ended.err.decode().replace(str(self.ws), str(self.twin))
        assert (ended.code, out, err) == (outside.returncode, outside.stdout, outside.stderr)
        return out

    def same_tree(self, *, leave_out: tuple[str, ...] = ()) -> None:
        """Both directories hold the same files, and all of the workspace belongs to the caller."""
        assert tree(self.ws, leave_out=leave_out) == tree(self.twin, leave_out=leave_out)
        assert owners(self.ws) == {(self.caller.uid, self.caller.uid)}


def make_pair(caller: Caller, flags: tuple[str, ...] = ()) -> Pair:
    """Two fresh, empty directories, and a caller that git knows by name."""
    config = caller.home / ".gitconfig"
    if not config.exists():
        caller.file(config, IDENTITY)
    return Pair(caller, caller.workspace("inner"), caller.workspace("outer"), flags)
