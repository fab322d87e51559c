"""The laboratory: a small host inside the host, with canaries, that the attacks run against.

One ``World`` per mode (root, uid 1000) and session, one fresh ``Scene`` (workspace, outside, token) per
run. Everything lies below one directory of /srv, one of /run and one file of /tmp, and goes at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.security.services import Listeners, Victim

REPO = Path(__file__).resolve().parents[2]
PROBES = Path(__file__).resolve().parent / "probes"
PYTHON = "/usr/bin/python3"
MODES = ("root", "uid1000")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What the package itself imports, and what that needs.
DEPENDENCIES = ("msgspec", "h11", "cryptography", "cffi", "_cffi_backend")
NESTED = "sub/repo"
DEEP = "a/b/c/d/e/repo"
# Pids of everything that was started as Casemate: their names mark what they made on the host.
STARTED: set[int] = set()


class MissingPrerequisite(RuntimeError):
    """The suite cannot judge here. This is a failure, never a skip."""


def require_prerequisites() -> None:
    """What must be there before a single row means anything."""
    missing = [tool for tool in ("git", "setpriv", "unshare") if shutil.which(tool) is None]
    if os.geteuid() != 0:
        missing.append("uid 0 (the suite drops to uid 1000 itself)")
    if not os.access(PYTHON, os.X_OK):
        missing.append(PYTHON)
    elif os.path.realpath(PYTHON).startswith("/root/"):
        missing.append("a Python outside /root")
    if missing:
        raise MissingPrerequisite("missing: " + ", ".join(missing))


def _copy_package(name: str, site: Path) -> None:
    """A package, or a module of C, of the environment that runs the tests."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise MissingPrerequisite(f"missing: the Python package {name}")
    source = Path(spec.origin)
    if source.name != "__init__.py":
        shutil.copy(source, site)
    else:
        shutil.copytree(source.parent, site / name, ignore=shutil.ignore_patterns("__pycache__"))


def install_copy(directory: Path) -> Path:
    """An installation of the checkout as it is now, outside /root, for every uid; returns its command."""
    subprocess.run([PYTHON, "-I", "-m", "venv", "--without-pip", str(directory)], check=True)
    site = next((directory / "lib").glob("python3*")) / "site-packages"
    shutil.copytree(REPO / "src/casemate", site / "casemate", ignore=shutil.ignore_patterns("__pycache__"))
    for name in DEPENDENCIES:
        _copy_package(name, site)
    command = directory / "bin" / "casemate"
    shutil.copy(REPO / "bin/casemate", command)
    command.chmod(0o755)
    # Compiled once here: an unprivileged user cannot write the caches, and would compile at every start.
    subprocess.run(
        [PYTHON, "-I", "-m", "compileall", "-q", str(site)], check=False, stdout=subprocess.DEVNULL
    )
    return command


def _git(*args: str, cwd: Path) -> None:
    env = {"PATH": PATH, "HOME": str(cwd), "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@example.invalid", *args],
        cwd=cwd, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def make_template(directory: Path) -> None:
    """A repository with nested ones, and with the files that other programs trust."""
    files = {
        "README.md": "a project\n",
        "src/app.py": "print('hello')\n",
        ".mcp.json": "{}\n",
        ".vscode/settings.json": "{}\n",
        ".claude/settings.json": "{}\n",
        ".bashrc": "# mine\n",
        ".codex/config.toml": "# mine\n",
        "node_modules/.bin/eslint": "#!/bin/sh\necho lint\n",
        "sub/file.txt": "sub\n",
    }
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    (directory / "node_modules/.bin/eslint").chmod(0o755)
    (directory / "mnt").mkdir()
    for place in (".", NESTED, DEEP):
        repository = directory / place
        repository.mkdir(parents=True, exist_ok=True)
        (repository / "tracked.txt").write_text("tracked\n")
        _git("init", "-q", "--template=", "-b", "main", cwd=repository)
        _git("add", "tracked.txt", cwd=repository)
        _git("commit", "-q", "-m", "first", cwd=repository)


def give(path: Path, uid: int) -> None:
    """Hand a tree to a uid, links themselves included."""
    if uid == 0:
        return
    os.lchown(path, uid, uid)
    for base, directories, names in os.walk(path):
        for name in [*directories, *names]:
            os.lchown(os.path.join(base, name), uid, uid)


@dataclasses.dataclass
class World:
    """The lab of one mode."""

    mode: str
    base: Path
    run: Path
    template: Path
    command: Path | None
    listeners: Listeners
    victim: Victim
    secret: str
    tmp_canary: Path
    count: int = 0

    @property
    def uid(self) -> int:
        return 0 if self.mode == "root" else 1000

    @property
    def prefix(self) -> list[str]:
        return drop_to(self.uid)

    @property
    def home(self) -> Path:
        return self.base / "home"

    def environment(self) -> dict[str, str]:
        """The caller's environment, with secrets in it."""
        return {
            "PATH": PATH,
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "USER": "root" if self.uid == 0 else "user",
            "SHELL": "/bin/bash",
            "TERM": "xterm",
            "GITHUB_TOKEN": self.secret,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "LAB_SECRET": self.secret,
        }

    def scene(self) -> Scene:
        self.count += 1
        return Scene.make(self)

    def close(self) -> None:
        self.victim.close()
        self.listeners.close()
        self.tmp_canary.unlink(missing_ok=True)
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.rmtree(self.base)


def drop_to(uid: int) -> list[str]:
    """The words before a command that run it as ``uid`` without any privilege."""
    if uid == 0:
        return []
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all", "--"]


def make_world(mode: str, template: Path, command: Path | None) -> World:
    name = f"casemate-attack-{secrets.token_hex(4)}"
    uid = 0 if mode == "root" else 1000
    base, run = Path("/srv") / name, Path("/run") / name
    base.mkdir(mode=0o755)
    run.mkdir(mode=0o755)
    secret = "canary" + secrets.token_hex(12)
    home = base / "home"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    (home / ".ssh/id_rsa").write_text(secret)
    (home / ".aws").mkdir()
    (home / ".aws/credentials").write_text(secret)
    (home / ".bashrc").write_text("# start\n")
    give(home, uid)
    tmp_canary = Path("/tmp") / f"{name}.txt"
    tmp_canary.write_text(secret)
    os.chown(tmp_canary, uid, uid)
    listeners = Listeners(name, run)
    victim = Victim(drop_to(uid), secret[:32], name)
    return World(mode, base, run, template, command, listeners, victim, secret, tmp_canary)


@dataclasses.dataclass
class Scene:
    """One workspace, one outside and one token: what one run may change, and must not."""

    world: World
    ws: Path
    outside: Path
    token: str
    before: dict[str, bytes]

    @classmethod
    def make(cls, world: World) -> Scene:
        place = world.base / f"s{world.count}"
        place.mkdir()
        ws, outside = place / "ws", place / "outside"
        subprocess.run(["cp", "-a", str(world.template), str(ws)], check=True)
        outside.mkdir()
        (outside / "target.txt").write_text("untouched")
        (outside / "hard.txt").write_text("untouched")
        (ws / "out_link").symlink_to(outside / "target.txt")
        (ws / "outdir_link").symlink_to(outside)
        os.link(outside / "hard.txt", ws / "hard.txt")
        shutil.copytree(PROBES, ws / ".lab", ignore=shutil.ignore_patterns("__pycache__"))
        give(place, world.uid)
        (world.home / ".bashrc").write_text("# start\n")
        scene = cls(world, ws, outside, "token" + secrets.token_hex(8), {})
        scene.before = scene.outside_state()
        return scene

    def outside_state(self) -> dict[str, bytes]:
        """Everything outside the workspace that an escape would change."""
        state = {
            str(path): path.read_bytes()
            for path in sorted(self.outside.rglob("*"))
            if path.is_file() and not path.is_symlink()
        }
        state["home"] = b"".join(
            path.read_bytes() for path in (self.world.home / ".bashrc",) if path.is_file()
        )
        return state

    def outside_changed(self) -> list[str]:
        after = self.outside_state()
        names = {*after, *self.before}
        return sorted(name for name in names if after.get(name) != self.before.get(name))

    def carries(self, token: str | None = None) -> list[str]:
        """Files of the host's workspace that hold the token, relative; links are not followed."""
        mark = (token or self.token).encode()
        found = []
        for base, directories, names in os.walk(self.ws):
            directories[:] = [name for name in directories if name != ".lab"]
            for name in names:
                path = Path(base) / name
                if path.is_symlink() or not path.is_file() or path.stat().st_size > 1 << 20:
                    continue
                if mark in path.read_bytes():
                    found.append(str(path.relative_to(self.ws)))
        return sorted(found)

    def params(self, **more: Any) -> Path:
        """Write the parameters of the acts; returns the file's path."""
        world, listeners = self.world, self.world.listeners
        values: dict[str, Any] = {
            "ws": str(self.ws), "outside": str(self.outside), "home": str(world.home), "token": self.token,
            "victim": world.victim.pid, "address": world.victim.address, "victim_only": True,
            "by_user": False, "tmp_canary": str(world.tmp_canary),
            "tmp_new": f"/tmp/{world.base.name}-{self.token}", "sandboxed": False, "alive": True,
            "daemon_name": f"daemon-{self.token}", "process_name": f"p{self.token}"[:15],
            "tcp4": listeners.tcp4, "tcp6": listeners.tcp6, "udp4": listeners.udp4,
            "abstract_stream": listeners.abstract_stream, "abstract_dgram": listeners.abstract_dgram,
            "path_stream": listeners.path_stream, "path_dgram": listeners.path_dgram,
        }  # fmt: skip
        values.update(more)
        path = self.ws / ".lab" / "params.json"
        path.write_text(json.dumps(values))
        path.chmod(0o644)
        return path

    def close(self) -> None:
        from tests.security.leaks import clean

        clean(self.world, self.ws)
        with contextlib.suppress(OSError):
            os.unlink(f"/tmp/{self.world.base.name}-{self.token}")
        shutil.rmtree(self.ws.parent, ignore_errors=True)


def processes_with(mark: str) -> list[int]:
    """Processes of the host whose command line or mounts name ``mark`` (ours excepted)."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        for entry in ("cmdline", "mountinfo"):
            with contextlib.suppress(OSError), open(f"/proc/{name}/{entry}", "rb") as stream:
                if mark.encode() in stream.read():
                    found.append(int(name))
                    break
    return found


def note(text: str) -> None:
    """A word to the person who watches."""
    print(text, file=sys.stderr, flush=True)
