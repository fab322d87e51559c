"""Tops of overlays for tests: from a real mount (root), or written by hand as a mount would leave them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from casemate.workspace import adopt, target
from casemate.workspace.apply import apply, start_time
from casemate.workspace.report import ApplyOptions, ApplyReport

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MOUNT = """
set -e
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2,workdir=$3,$5" "$4"
cd "$4"; shift 5
exec "$@"
"""


#: The exit code of a process that ``die_at`` has ended.
DIED = 9
#: Who applies: root, or a person without any capability.
WHO = ("root", "user") if os.geteuid() == 0 else ("user",)
_PR_SET_DUMPABLE = 4


@contextlib.contextmanager
def acting_as(who: str) -> Iterator[None]:
    """Do what follows as root, or as uid 1000 with all its powers gone."""
    if who == "root" or os.geteuid() != 0:
        yield
        return
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(1000)
    os.seteuid(1000)
    # A change of uid makes /proc/self root's; a process that was started by the user has its own.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def be_the_user() -> None:
    """In a new process: give up for good what ``acting_as`` has only laid aside."""
    os.seteuid(0)
    os.setgroups([])
    os.setresgid(1000, 1000, 1000)
    os.setresuid(1000, 1000, 1000)


@contextlib.contextmanager
def acting_as_root_again() -> Iterator[None]:
    """Inside ``acting_as``: for a moment with the powers of the one who runs the tests."""
    os.seteuid(0)
    try:
        yield
    finally:
        os.seteuid(1000)
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


@contextlib.contextmanager
def stage_for(who: str, *, near: bool = True, where: str = "/var/tmp") -> Iterator[Stage]:
    """A stage of ``who``; unless ``near``, the top is on another file system (a tmpfs)."""
    places = [Path(tempfile.mkdtemp(dir=where, prefix="casemate-stage-"))]
    if not near:
        places.append(Path(tempfile.mkdtemp(dir="/dev/shm", prefix="casemate-stage-")))
    if who == "user" and os.geteuid() == 0:
        for place in places:
            os.chown(place, 1000, 1000)
    try:
        with acting_as(who):
            yield Stage(places[0] / "stage", places[-1])
    finally:
        for place in places:
            remove(place)


@contextlib.contextmanager
def guarded(who: str, near: bool) -> Iterator[Stage]:
    """A stage, and the promise that within it nothing outside of the workspace changes, and nothing hangs."""
    with stage_for(who, near=near) as made:
        before = outside(made)
        with limited(30):
            yield made
        assert outside(made) == before, "something outside of the workspace changed"


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Fail if it hangs."""

    def late(*_: object) -> None:
        raise TimeoutError("the apply step hangs")

    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def outside(stage: Stage) -> list[tuple[object, ...]]:
    """Everything about the directory beside the workspace that an attack could change."""
    found: list[tuple[object, ...]] = []
    for path in (stage.outside, *stage.outside.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found.append((str(path), status.st_mode, status.st_uid, status.st_mtime_ns, status.st_ino, content))
    return sorted(found, key=repr)


#: What changes a workspace in an apply: names of functions, and where they are looked up.
_OF_APPLY: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (os, ("mkdir", "unlink", "rmdir", "symlink", "fchmod", "utime", "chown", "chmod")),
    (target, ("rename", "link_fd", "chmod_fd")),
    (adopt, ("rename",)),
)


def die_at(step: int, changes: Sequence[tuple[Any, tuple[str, ...]]] = _OF_APPLY) -> None:
    """End this process before the given change to the file system (the first is 1)."""
    done = 0

    def counted(call: Any) -> Any:
        def change(*args: Any, **how: Any) -> Any:
            nonlocal done
            done += 1
            if done == step:
                os._exit(DIED)
            return call(*args, **how)

        return change

    for module, names in changes:
        for name in names:
            setattr(module, name, counted(getattr(module, name)))


def remove(path: Path) -> None:
    """Delete a tree, however deep it is."""
    subprocess.run(["chmod", "-R", "u+rwx", str(path)], check=False, stderr=subprocess.DEVNULL)
    subprocess.run(["rm", "-rf", str(path)], check=False)
    shutil.rmtree(path, ignore_errors=True)


class Stage:
    """A workspace, the top over it, a place for what is held back, and a directory outside."""

    def __init__(self, base: Path, top_base: Path | None = None) -> None:
        self.base = base
        self.ws = base / "ws"
        self.hold = base / "hold"
        self.outside = base / "outside"
        self.upper = (top_base or base) / "top"
        self.work = (top_base or base) / "work"
        self.view = base / "view"
        for directory in (self.ws, self.hold, self.outside, self.upper, self.work, self.view):
            directory.mkdir(parents=True)
        for name in ("secret", "other", "f1"):
            (self.outside / name).write_text("untouched\n")
            (self.outside / name).chmod(0o600)
        self.user = os.geteuid() != 0
        self.started = 0

    # -- the workspace and the top by hand ---------------------------------------------------------

    def lower(self, **files: str | bytes) -> None:
        """Files of the workspace; a name with ``__`` stands for a slash."""
        for name, content in files.items():
            write(self.ws / name.replace("__", "/"), content)

    def start(self) -> None:
        """The moment before the command runs. Everything made so far is older, and what comes is younger: the
        clock of files is up to a tick behind.
        """
        self.started = start_time()
        probe = self.base / "clock"
        while True:
            probe.write_bytes(b"")
            if probe.stat().st_ctime_ns > self.started:
                break
        probe.unlink()

    def put(self, path: str, content: str | bytes = "", mode: int = 0o644) -> Path:
        """A regular file of the top."""
        file = self.upper / path
        write(file, content)
        file.chmod(mode)
        return file

    def link(self, path: str, to: str) -> None:
        """A symbolic link of the top."""
        (self.upper / path).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(to, self.upper / path)

    def whiteout(self, path: str) -> None:
        """A whiteout of the top; needs no capability since Linux 5.8."""
        (self.upper / path).parent.mkdir(parents=True, exist_ok=True)
        os.mknod(self.upper / path, stat.S_IFCHR, os.makedev(0, 0))

    def mark(self, path: str, name: str, value: bytes) -> None:
        """An attribute of overlayfs on a directory of the top."""
        (self.upper / path).mkdir(parents=True, exist_ok=True)
        os.setxattr(self.upper / path, self.prefix + name, value)

    @property
    def prefix(self) -> str:
        """Whose attributes this overlay uses."""
        return "user.overlay." if self.user else "trusted.overlay."

    # -- the real thing ------------------------------------------------------------------------------

    def run(self, *argv: str, env: dict[str, str] | None = None, check: bool = True) -> str:
        """Run a command in a real overlay over the workspace, in a private mount namespace: as root, or as
        the root of a user namespace that knows only the user.
        """
        if not self.started:
            self.start()
        done = subprocess.run(
            ["unshare", *(["-Ur"] if self.user else []), "-m", "--propagation", "private", "sh", "-c", _MOUNT,
             "sh", str(self.ws), str(self.upper), str(self.work), str(self.view),
             "volatile," + ("userxattr" if self.user else "redirect_dir=on,index=off,metacopy=off"), *argv],
            preexec_fn=be_the_user if self.user and os.getuid() == 0 else None,
            env={"PATH": os.environ["PATH"], **(env or {})}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0 or not check, done.stderr + done.stdout
        self.clean(self.work)
        return done.stdout

    @staticmethod
    def clean(directory: Path) -> None:
        """Empty a directory."""
        remove(directory)
        directory.mkdir()

    @staticmethod
    def bare(*argv: str) -> str:
        """Run a command without any view."""
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    def sh(self, script: str, **how: Any) -> str:
        """``run`` a shell script."""
        return self.run("sh", "-ec", script, **how)

    def options(self, **more: Any) -> ApplyOptions:
        """Options that fit this stage."""
        made: dict[str, Any] = {
            "started_ns": self.started or start_time(), "xattrs": self.prefix, "redirects": not self.user,
            "hold_dir": os.open(self.hold, os.O_RDONLY | os.O_DIRECTORY), "readable_roots": ("/usr",),
        }  # fmt: skip
        made.update(more)
        return ApplyOptions(**made)

    def apply(self, **more: Any) -> ApplyReport:
        """Apply the top to the workspace."""
        top = os.open(self.upper, os.O_RDONLY | os.O_DIRECTORY)
        options = self.options(**more)
        try:
            return apply(top, str(self.ws), options)
        finally:
            os.close(top)
            if options.hold_dir is not None:
                os.close(options.hold_dir)

    def die(self, step: int) -> bool:
        """Apply in a process that is ended before its change number ``step``; False if there are fewer."""
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                die_at(step)
                self.apply(resumed=True)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == DIED

    # -- looking ---------------------------------------------------------------------------------------

    def text(self, path: str) -> str:
        """The content of a file of the workspace."""
        return (self.ws / path).read_text()

    def exists(self, path: str) -> bool:
        """Whether the workspace has an entry there (a dangling link counts)."""
        return os.path.lexists(self.ws / path)


def write(file: Path, content: str | bytes) -> None:
    """Write a file and the directories above it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)


def held(report: ApplyReport) -> dict[str, str]:
    """path -> reason."""
    return {item.path: item.reason for item in report.held}


def paths(report: ApplyReport) -> Sequence[tuple[str, str]]:
    """(path, what) in order of path."""
    return sorted((path, what) for what, path in report.changed)
