"""One piece of everyday work: a workspace, and commands in it, behind the boundary and without it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.cli.everyday import IDENTITY, node_path
from tests.security.lab import PATH, drop_to

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.harness import Caller, Ended

# Settings of package managers that a machine may have in its environment; a person's shell would have them.
_SETTINGS = ("PIP_", "UV_", "NPM_CONFIG_", "npm_config_", "SSL_CERT_", "NODE_EXTRA_CA_CERTS", "CARGO_HTTP_")


def settings() -> dict[str, str]:
    """What this machine says about package indexes and certificates, by its environment."""
    return {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}


@lru_cache
def pip_hosts() -> tuple[str, ...]:
    """The hosts of the configured Python index, or of pip's own default."""
    code = """
from pip._internal.configuration import Configuration
from pip._internal.models.index import PyPI
read = Configuration(isolated=False)
read.load()
found = {}
for key, value in read.items():
    found.update(value if isinstance(value, dict) else {key: value})
urls = {key.rpartition(".")[2]: value for key, value in found.items()}
own = f"{PyPI.url} https://{PyPI.file_storage_domain}"
print(urls.get("index-url") or own, urls.get("extra-index-url", ""))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return _hosts(done.stdout.split())


@lru_cache
def npm_hosts() -> tuple[str, ...]:
    """The host of the configured npm registry."""
    done = subprocess.run(
        ["npm", "config", "get", "registry"], capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, "PATH": node_path()},
    )  # fmt: skip
    return _hosts(done.stdout.split())


def _hosts(urls: list[str]) -> tuple[str, ...]:
    found = (urlsplit(url).hostname for url in urls if url.startswith("http"))
    return tuple(dict.fromkeys(host for host in found if host))


@dataclasses.dataclass
class Work:
    """A workspace of a caller's."""

    caller: Caller
    ws: Path

    def file(self, name: str, text: str, mode: int = 0o644) -> Path:
        """Write a file of the caller's into the workspace."""
        path = self.ws / name
        for parent in reversed(path.parents):
            if parent.is_relative_to(self.ws) and not parent.is_dir():
                parent.mkdir()
                os.chown(parent, self.caller.uid, self.caller.uid)
        return self.caller.file(path, text, mode)

    @property
    def report(self) -> dict[str, Any]:
        """What the last run reported."""
        value: dict[str, Any] = json.loads((self.ws.parent / "report.json").read_text())
        return value

    def inside(
        self, script: str, *, allow: tuple[str, ...] = (), flags: tuple[str, ...] = (), path: str = PATH,
        env: dict[str, str] | None = None, code: int = 0, timeout: float = 110, shell: str = "sh",
    ) -> Ended:  # fmt: skip
        """Run a script behind the boundary. It must end with ``code``, and nothing of it be held back."""
        allowed = tuple(word for host in allow for word in ("--allow", host))
        ended = self.caller.run(
            self.ws, shell, "-e", "-c", script, timeout=timeout, env={"PATH": path, **(env or {})},
            flags=("--no-daemon", "--report", str(self.ws.parent / "report.json"), *allowed, *flags),
        )  # fmt: skip
        assert ended.code == code, ended
        assert self.report["applied"]["held"] == [], ended
        assert self.report["degraded"] == [], ended
        return ended

    def host(self, script: str, *, path: str = PATH, env: dict[str, str] | None = None) -> str:
        """Run a script outside, as the caller, in the same workspace; its stdout. It must end well."""
        done = subprocess.run(
            [*drop_to(self.caller.uid), "sh", "-e", "-c", script], cwd=self.ws, stdin=subprocess.DEVNULL,
            env={**self.caller.environment(), "PATH": path, **(env or {})}, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{script}: exit {done.returncode}: {done.stdout} {done.stderr}"
        return done.stdout


def make_work(caller: Caller) -> Work:
    """A fresh workspace, of somebody whom git knows by name."""
    config = caller.home / ".gitconfig"
    if not config.exists():
        caller.file(config, IDENTITY)
    return Work(caller, caller.workspace())


def missing(*programs: str, path: str = PATH) -> list[str]:
    """Which of these programs this machine lacks."""
    return [name for name in programs if shutil.which(name, path=path) is None]
