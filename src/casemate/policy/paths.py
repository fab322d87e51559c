"""Which paths a policy may name. Every comparison is between resolved paths, on both sides.

A ``ValueError`` from here carries a sentence for the person; who calls knows the file and the field.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import msgspec

from casemate.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from casemate.settings import Places

__all__ = [
    "BROAD",
    "KERNEL",
    "SYSTEM",
    "SYSTEM_VIEW",
    "Guard",
    "check_deny",
    "check_grant",
    "check_workspace",
    "expand",
    "guard",
    "holds",
    "links_on_the_way",
    "refusal",
    "within_any",
]

#: What every sandbox sees, read-only, without being asked.
SYSTEM_VIEW = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt",
)  # fmt: skip

# Refused themselves; what lies below may be named, unless another rule says otherwise.
BROAD = {
    "/": "it is the whole system",
    "/boot": "it is a system directory",
    "/etc": "it holds the system's settings and secrets",
    "/home": "it holds everybody's home",
    "/root": "it is root's home",
    "/run": "it holds the sockets of the system's services",
    "/tmp": "the sandbox has a /tmp of its own, and the host's is shared by everybody",
    "/usr": "it is a system directory",
    "/var": "it holds the state of the system's services",
    "/var/lib": "it holds the state of the system's services",
    "/var/tmp": "the sandbox has a /var/tmp of its own, and the host's is shared by everybody",
}
# Refused with all that lies below.
KERNEL = {
    "/proc": "it shows and steers the host's processes",
    "/sys": "it shows and steers the host's devices",
    "/dev": "devices are given by the sandbox itself",
}
# May be read; changes to them would be changes to the host's own programs.
SYSTEM = (
    "/bin", "/boot", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/sbin", "/usr/bin", "/usr/include",
    "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/libx32", "/usr/sbin", "/usr/share",
)  # fmt: skip
# Directories of sockets: a bind that cannot be written still lets a program connect.
_SOCKETS = (
    "/run/avahi-daemon", "/run/casemate", "/run/containerd", "/run/crio", "/run/dbus", "/run/docker",
    "/run/libvirt", "/run/lxd", "/run/podman", "/run/snapd", "/run/systemd", "/run/udev",
    "/tmp/.ICE-unix", "/tmp/.X11-unix",
)  # fmt: skip
_SECRETS = (".ssh", ".gnupg")
# A directory larger than this is not searched for sockets any further.
_SCAN = 4096


class Guard(msgspec.Struct, frozen=True, kw_only=True):
    """What no grant and no workspace may hold, resolved once per load."""

    home: str
    homes: tuple[str, ...]
    own: tuple[str, ...]
    """Casemate's state, configuration and run directories."""
    secrets: tuple[str, ...]


def guard(places: Places) -> Guard:
    """Resolve the places that must stay out of reach."""
    homes = tuple(dict.fromkeys(os.path.realpath(path) for path in places.homes))
    own = (places.state, places.config, places.run, os.path.dirname(places.managed))
    # The link ~/.ssh itself lies in a home, which is refused already; where it leads to may not.
    secrets = [os.path.realpath(f"{path}/{name}") for path in homes for name in _SECRETS]
    return Guard(
        home=places.home,
        homes=homes,
        own=tuple(dict.fromkeys(os.path.realpath(path) for path in own)),
        secrets=tuple(secrets),
    )


def holds(outer: str, inner: str) -> bool:
    """Whether ``inner`` is ``outer`` or lies below it. Both are resolved."""
    return inner == outer or outer == "/" or inner.startswith(outer + "/")


def within_any(path: str, roots: Iterable[str]) -> bool:
    """Whether ``path`` is one of ``roots`` or lies below one."""
    return any(holds(root, path) for root in roots)


def expand(text: str, *, base: str, home: str) -> str:
    """The resolved absolute path that ``text`` names. Raises ValueError.

    ``~/`` is the caller's home, ``~name`` is refused, and everything relative starts at ``base``.
    """
    if not text:
        raise ValueError("an empty path names nothing")
    if "\0" in text:
        raise ValueError("a path cannot hold a NUL byte")
    if text == "~" or text.startswith("~/"):
        text = home + text[1:]
    elif text.startswith("~"):
        raise ValueError("~name is not supported; write the whole path")
    try:
        return os.path.realpath(os.path.join(base, text))
    except OSError as error:
        raise ValueError(f"cannot be resolved: {error.strerror}") from None


def links_on_the_way(text: str, *, base: str, home: str, workspace: str) -> list[str]:
    """The symbolic links inside the workspace that lead from ``text`` to what it names.

    ``Preconditions:`` ``expand`` took the text.
    """
    if text == "~" or text.startswith("~/"):
        text = home + text[1:]
    found: list[str] = []
    queue = [os.path.normpath(os.path.join(base, text))]
    while queue and len(found) < 40:
        at = "/"
        for part in queue.pop().split("/"):
            at = os.path.join(os.path.realpath(at), part)
            if os.path.islink(at) and at not in found and holds(workspace, at):
                found.append(at)
                queue.append(os.path.normpath(os.path.join(os.path.dirname(at), os.readlink(at))))
    return found


def check_grant(path: str, *, write: bool, guard: Guard, workspace: str) -> None:
    """Refuse a resolved path that is too broad to read (or to write). Raises ValueError with the reason.

    A path that does not exist passes: it grants nothing, and the caller decides what to say.
    """
    reason = refusal(path, guard)
    if reason is None and write:
        reason = _not_for_writing(path, workspace)
    if reason is None:
        reason = _not_a_plain_thing(path, write)
    if reason is not None:
        raise ValueError(f"{path} is too broad or not for a sandbox: {reason}")


def refusal(path: str, guard: Guard) -> str | None:
    """Why a resolved path may not enter a sandbox at all, or None. Looks at names only, so it is cheap."""
    return BROAD.get(path) or _not_for_anyone(path, guard)


def _not_for_anyone(path: str, guard: Guard) -> str | None:
    for root, reason in KERNEL.items():
        if holds(root, path):
            return reason
    for home in guard.homes:
        if path == home:
            return "it is your home; name the directories you mean"
        if holds(path, home):
            return "it holds your home"
    for secret in guard.secrets:
        if holds(path, secret):
            return f"it holds {secret}"
    for own in guard.own:
        if holds(path, own) or holds(own, path):
            return f"it reaches Casemate's own files in {own}"
    if path.startswith("/run/user/") and path.count("/") == 3:
        return "it holds the sockets of a login session"
    for sockets in _SOCKETS:
        if holds(sockets, path):
            return "it holds sockets of services that run outside the sandbox"
    return None


def _not_for_writing(path: str, workspace: str) -> str | None:
    for root in SYSTEM:
        if holds(root, path):
            return "system directories are never written"
    if path != workspace and holds(path, workspace):
        return "it holds the workspace"
    return None


def _not_a_plain_thing(path: str, write: bool) -> str | None:
    if os.path.basename(path).endswith((".sock", ".socket")):
        return "a socket leads to a program that runs outside the sandbox"
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return None
    if stat.S_ISDIR(mode):
        found = _socket_in(path)
        return f"it holds the socket {found}, which leads to a program outside the sandbox" if found else None
    if stat.S_ISSOCK(mode):
        return "a socket leads to a program that runs outside the sandbox"
    if not stat.S_ISREG(mode):
        return "it is neither a directory nor a regular file"
    return "only directories can be written; name the one that holds it" if write else None


def _socket_in(path: str) -> str | None:
    # Told here, since who names such a directory may want the socket. No socket in it leads anywhere inside.
    try:
        with os.scandir(path) as entries:
            for count, entry in enumerate(entries):
                if count >= _SCAN:
                    break
                # All three answers come with the listing; only what is left costs a call.
                if entry.is_symlink() or entry.is_dir() or entry.is_file():
                    continue
                if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                    return ascii(entry.name)[1:-1]
    except OSError:
        pass
    return None


def check_deny(path: str, *, workspace: str) -> None:
    """Refuse to hide what a sandbox cannot be without. Raises ValueError."""
    if holds(path, workspace):
        what = "is the workspace" if path == workspace else "holds the workspace"
        raise ValueError(f"{path} cannot be hidden: it {what}")
    if path in KERNEL:
        raise ValueError(f"{path} cannot be hidden: the sandbox has one of its own")


def check_workspace(workspace: str, places: Places) -> str:
    """The resolved workspace. Raises PolicyError when it is missing, unreadable or too broad."""
    if "\0" in workspace or not workspace:
        raise _refused(workspace, "it is not a path")
    try:
        path = os.path.realpath(workspace, strict=True)
        mode = os.stat(path).st_mode
    except OSError as error:
        raise PolicyError(
            f"the workspace {workspace} cannot be reached: {error.strerror}",
            code="workspace-missing",
            hint="name a directory that exists, or change into one",
            workspace=workspace,
        ) from None
    if not stat.S_ISDIR(mode):
        raise _refused(path, "it is not a directory")
    bounds = guard(places)
    # /usr and the like hold workspaces in containers (/usr/src/app), so only the directories themselves
    # and the programs' own are refused.
    reason = refusal(path, bounds)
    if reason is None and path in ("/opt", "/srv", "/mnt", "/media", "/usr/local"):
        reason = "it is a system directory; use one below it"
    if reason is None and within_any(path, SYSTEM):
        reason = "system directories are never written"
    if reason is not None:
        raise _refused(path, reason)
    if not os.access(path, os.R_OK | os.X_OK, effective_ids=True):
        raise PolicyError(
            f"the workspace {path} cannot be read by you",
            code="workspace-unreadable",
            hint="check the directory's owner and mode",
            workspace=path,
        )
    return path


def _refused(workspace: str, reason: str) -> PolicyError:
    return PolicyError(
        f"{workspace or 'the empty path'} cannot be a workspace: {reason}",
        code="workspace-refused",
        hint="use the project's own directory",
        workspace=workspace,
        reason=reason,
    )
