"""A caller of its own for each test: a home, a workspace, and places that nothing else uses."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
import pytest

from casemate.policy.load import load
from casemate.policy.model import Effective, FlagLayer
from casemate.settings import Places

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Caller(msgspec.Struct, frozen=True):
    """Somebody who runs commands."""

    root: str
    places: Places
    workspace: str
    environ: dict[str, str]

    def file(self, path: str, text: str | bytes, mode: int = 0o644) -> str:
        """Write a file; a relative path starts at the caller's root."""
        full = os.path.join(self.root, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "wb") as stream:
            stream.write(text.encode() if isinstance(text, str) else text)
        os.chmod(full, mode)
        return full

    def directory(self, path: str) -> str:
        """Make a directory."""
        full = os.path.join(self.root, path)
        os.makedirs(full, exist_ok=True)
        return full

    def user(self, text: str) -> str:
        """Write the user's policy file."""
        return self.file(self.places.user, text)

    def managed(self, text: str) -> str:
        """Write the administrator's file."""
        return self.file(self.places.managed, text)

    def project(self, text: str) -> str:
        """Write the project's policy file."""
        return self.file(f"{self.workspace}/casemate.toml", text)

    def load(
        self, *, preset: str | None = None, policy_file: str | None = None, **flags: object
    ) -> Effective:
        """Load the policy with these flags."""
        return load(
            workspace=self.workspace,
            environ=self.environ,
            preset=preset,
            policy_file=policy_file,
            flags=FlagLayer(**flags) if flags else None,  # type: ignore[arg-type]
            places=self.places,
        )


def make_caller(root: str) -> Caller:
    """A caller below ``root``."""
    home = f"{root}/home"
    workspace = f"{root}/work/project"
    for path in (home, workspace, f"{root}/etc/casemate", f"{home}/.ssh"):
        os.makedirs(path, exist_ok=True)
    places = Places(
        home=home,
        homes=(home,),
        config=f"{home}/.config/casemate",
        managed=f"{root}/etc/casemate/managed.toml",
        user=f"{home}/.config/casemate/policy.toml",
        state=f"{root}/state/casemate",
        run=f"{root}/run/casemate",
    )
    return Caller(root, places, workspace, {"HOME": home, "PATH": "/usr/bin:/bin"})


@pytest.fixture
def caller(tmp_path: Path) -> Caller:
    """One caller."""
    return make_caller(os.path.realpath(tmp_path))


@pytest.fixture
def new_caller(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Caller]:
    """Makes further callers."""
    return lambda: make_caller(os.path.realpath(tmp_path_factory.mktemp("caller")))
