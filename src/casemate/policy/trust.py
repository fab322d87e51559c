"""The hashes that ``casemate trust`` recorded: one file per workspace, below the state directory.

A file holds the SHA-256 of exactly the content that was trusted, and the workspace's path. Both must
match, so neither a changed file nor a copied one is trusted.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from casemate.errors import CasemateError
from casemate.settings import Places, workspace_key

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["Trusted", "digest", "forget", "is_trusted", "listed", "record"]

_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
# A path and a digest.
_MAX = 8192

#: One record: the workspace and the digest.
Trusted = tuple[str, str]


def digest(content: bytes) -> str:
    """The hash by which content is known."""
    from hashlib import sha256

    return sha256(content).hexdigest()


def is_trusted(places: Places, workspace: str, content: bytes) -> bool:
    """Whether exactly this content was trusted for exactly this workspace. Any doubt is a no."""
    try:
        with _store(places, create=False) as store:
            found = _read(store, workspace_key(workspace))
    except OSError:
        return False
    return found is not None and found == (workspace, digest(content))


def record(places: Places, workspace: str, content: bytes) -> None:
    """Trust ``content`` for ``workspace``, in place of what was trusted there before.

    Raises CasemateError when the state directory cannot be used.
    """
    name = workspace_key(workspace)
    line = f"{digest(content)} {workspace}\n"
    temporary = f".{name}.{os.getpid()}"
    try:
        with _store(places, create=True) as store:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=store)
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=store)
            try:
                os.write(fd, os.fsencode(line))
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, name, src_dir_fd=store, dst_dir_fd=store)
    except OSError as error:
        raise CasemateError(
            f"the trust cannot be recorded in {places.trust}: {error.strerror}",
            code="state-unusable",
            hint="the directory must be yours, and writable by nobody else",
        ) from None


def forget(places: Places, workspace: str) -> bool:
    """Take back the trust in ``workspace``; whether there was any."""
    try:
        with _store(places, create=False) as store:
            os.unlink(workspace_key(workspace), dir_fd=store)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise CasemateError(
            f"the trust cannot be taken back in {places.trust}: {error.strerror}", code="state-unusable"
        ) from None
    return True


def listed(places: Places) -> list[Trusted]:
    """Every record, by workspace."""
    try:
        with _store(places, create=False) as store:
            found = [_read(store, name) for name in os.listdir(store) if not name.startswith(".")]
    except OSError:
        return []
    return sorted(item for item in found if item is not None)


@contextlib.contextmanager
def _store(places: Places, *, create: bool) -> Generator[int]:
    """The open directory of the records; only one that nobody else can write is used."""
    if create:
        os.makedirs(places.state, mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(places.trust, 0o700)
    fd = os.open(places.trust, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
    try:
        facts = os.fstat(fd)
        if facts.st_uid not in (0, os.geteuid()) or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(1, "others can write it")
        yield fd
    finally:
        os.close(fd)


def _read(store: int, name: str) -> Trusted | None:
    try:
        fd = os.open(name, os.O_RDONLY | _FLAGS, dir_fd=store)
    except OSError:
        return None
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid not in (0, os.geteuid()):
            return None
        data = os.read(fd, _MAX)
    except OSError:
        return None
    finally:
        os.close(fd)
    # A path may hold spaces and newlines, so only the first space and the last newline count.
    hexdigest, space, path = data.partition(b" ")
    if not space or not path.endswith(b"\n"):
        return None
    return os.fsdecode(path[:-1]), hexdigest.decode("ascii", "replace")
