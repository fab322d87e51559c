"""Where Casemate keeps things, and the few numbers every part agrees on.

Nothing here reads a configuration file. ``places`` turns an environment and a uid into absolute paths;
everything else takes the ``Places`` it gave, so that a test can hand in its own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "PROJECT_FILE",
    "SANDBOX_HOME",
    "SANDBOX_USER",
    "UID_BASE",
    "UID_COUNT",
    "Places",
    "config_dir",
    "home",
    "homes",
    "managed_policy",
    "places",
    "project_policy",
    "run_dir",
    "state_dir",
    "user_policy",
    "workspace_key",
]

#: The project's policy file, at the top of the workspace.
PROJECT_FILE = "casemate.toml"
#: Who a command is inside the sandbox, and where it lives.
SANDBOX_USER = "sandbox"
SANDBOX_HOME = "/home/sandbox"
#: Uids a root host hands out: base + i. Far above the ranges of /etc/login.defs and /etc/subuid.
UID_BASE = 0x70000000
UID_COUNT = 0x00100000

_MANAGED = "/etc/casemate/managed.toml"


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """Every path outside the workspace that Casemate reads or writes. All are absolute."""

    home: str
    """The caller's home, as ``~`` in a policy means it."""
    homes: tuple[str, ...]
    """Each directory that counts as a home of the caller: ``$HOME`` and the password database's."""
    config: str
    """Directory of the caller's own configuration."""
    managed: str
    """The administrator's file: the ceiling."""
    user: str
    """The caller's own policy file."""
    state: str
    """Directory that survives a reboot."""
    run: str
    """Directory that need not survive a reboot."""

    @property
    def trust(self) -> str:
        """Directory of the hashes that ``casemate trust`` recorded."""
        return f"{self.state}/trust"


def _absolute(environ: Mapping[str, str], name: str) -> str | None:
    # The XDG specification says that a relative value must be ignored.
    value = environ.get(name, "")
    return os.path.normpath(value) if value.startswith("/") and "\0" not in value else None


def _passwd_home(uid: int) -> str | None:
    import pwd

    try:
        found = pwd.getpwuid(uid).pw_dir
    except KeyError:
        return None
    return os.path.normpath(found) if found.startswith("/") else None


def home(environ: Mapping[str, str], uid: int | None = None) -> str:
    """The caller's home: ``$HOME`` when absolute, else the password database's, else ``/``."""
    uid = os.getuid() if uid is None else uid
    return _absolute(environ, "HOME") or _passwd_home(uid) or "/"


def homes(environ: Mapping[str, str], uid: int | None = None) -> tuple[str, ...]:
    """Every home of the caller. A changed ``$HOME`` must not make the real one grantable."""
    uid = os.getuid() if uid is None else uid
    found = [home(environ, uid), _passwd_home(uid) or ""]
    # `/` is what daemons and unknown uids have; it is refused everywhere anyway.
    return tuple(dict.fromkeys(path for path in found if path not in ("", "/")))


def config_dir(environ: Mapping[str, str], uid: int | None = None) -> str:
    """``$XDG_CONFIG_HOME/casemate`` or ``~/.config/casemate``."""
    base = _absolute(environ, "XDG_CONFIG_HOME") or f"{home(environ, uid)}/.config"
    return os.path.normpath(f"{base}/casemate")


def state_dir(environ: Mapping[str, str], uid: int | None = None) -> str:
    """``/var/lib/casemate`` for root, else ``$XDG_STATE_HOME/casemate`` or ``~/.local/state/casemate``."""
    uid = os.getuid() if uid is None else uid
    if uid == 0:
        return "/var/lib/casemate"
    base = _absolute(environ, "XDG_STATE_HOME") or f"{home(environ, uid)}/.local/state"
    return os.path.normpath(f"{base}/casemate")


def run_dir(environ: Mapping[str, str], uid: int | None = None) -> str:
    """``/run/casemate`` for root, else ``$XDG_RUNTIME_DIR/casemate`` or ``run`` in the state directory."""
    uid = os.getuid() if uid is None else uid
    if uid == 0:
        return "/run/casemate"
    base = _absolute(environ, "XDG_RUNTIME_DIR")
    return f"{base}/casemate" if base else f"{state_dir(environ, uid)}/run"


def managed_policy() -> str:
    """The administrator's file. A fixed path: no variable may move a ceiling."""
    return _MANAGED


def user_policy(environ: Mapping[str, str], uid: int | None = None) -> str:
    """The caller's own policy file."""
    return f"{config_dir(environ, uid)}/policy.toml"


def project_policy(workspace: str) -> str:
    """The policy file of the project in ``workspace``."""
    return f"{workspace}/{PROJECT_FILE}"


def places(environ: Mapping[str, str], uid: int | None = None) -> Places:
    """All of the above for one caller."""
    return Places(
        home=home(environ, uid),
        homes=homes(environ, uid),
        config=config_dir(environ, uid),
        managed=managed_policy(),
        user=user_policy(environ, uid),
        state=state_dir(environ, uid),
        run=run_dir(environ, uid),
    )


def workspace_key(workspace: str) -> str:
    """A short, stable file name for a workspace, for state that belongs to it.

    The readable tail is for people; the digest of the whole path is what keeps two apart.
    """
    # The C module behind hashlib: hashlib itself loads OpenSSL, which costs more than the rest of a run's
    # policy work.
    try:
        from _blake2 import blake2b
    except ImportError:  # an interpreter without it
        from hashlib import blake2b
    digest = blake2b(os.fsencode(workspace), digest_size=10).hexdigest()
    name = os.path.basename(workspace)
    tail = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in name)
    return f"{tail[:40] or 'root'}-{digest}"
