"""The sandbox's root file system: built once in a mount namespace of its own, which every run copies.

Entries, in order; parents are made as needed:

``["bind", source, target]``   the host's directory or file, read-only, with all that is mounted below; no
                               socket in it leads anywhere (see ``showing``)
``["dir", target]``            an empty directory (mode 0755), often a mount point
``["empty", target]``          the same in place of a directory that a bind shows; later entries may lie in it
``["spot", target]``           an empty file, a mount point
``["link", target, to]``       a symbolic link
``["file", target, content]``  a small read-only file; ``target`` may lie below a bind if it exists there
``["hide", target]``           covers what a bind shows: an empty directory or an empty file, mode 0
"""

from __future__ import annotations

import os
import stat

from casemate.errors import SandboxError
from casemate.isolation.process.showing import Showing, make_directory, make_file
from casemate.isolation.process.stacks import Place
from casemate.sys import mounts
from casemate.sys.files import open_in_root

__all__ = ["become_root"]

# name -> (major, minor); the nodes every program expects.
_DEVICES = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
}
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
    "core": "/proc/kcore",
}
_STORE = ".store"
_HIDDEN_ATTRIBUTES = mounts.RDONLY | mounts.NOSUID | mounts.NODEV | mounts.NOEXEC


def become_root(
    entries: list[list[str]], devices: list[str], *, ids: int, attached: bool, place: str
) -> None:
    """Build the root at ``place`` and make it the calling process's; everything is read-only then.

    ``ids`` is for ``Showing``; without it, as a user, device nodes are bound, since a user namespace may not
    make any. ``Preconditions:`` the process is in a mount namespace of its own, and nothing that is bound
    lies below ``place``, which may itself lie below what is bound. Raises SandboxError (``root-failed``) with
    the entry that could not be made.
    """
    mounts.make_private()
    root = mounts.filesystem("tmpfs", mode="0755", size="1m", nr_inodes="4k")
    mounts.attach(root, place)
    # A user's runtime directory may lie below what is bound: the copy must not hold this very root.
    mounts.keep_out_of_copies(root)
    # Small files come from a file system that is let go at the end, so that none of it can be reached.
    os.mkdir(_STORE, 0o700, dir_fd=root)
    store = mounts.filesystem("tmpfs", mode="0755", size="1m")
    mounts.move_mount(store, root, _STORE)
    os.mkdir("nothing", 0o755, dir_fd=store)
    handle = os.open("nothing", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=store)
    showing = Showing(ids, place, Place(handle, f"{place}/{_STORE}/nothing"), attached=attached)
    empties: list[int] = []
    for index, entry in enumerate(entries):
        try:
            if entry[0] == "empty":
                empties.append(_put_empty(root, entry[1].lstrip("/")))
            else:
                _make(root, store, showing, entry, str(index))
        except OSError as error:
            raise SandboxError(
                f"cannot put {entry[-1]} into the sandbox's root: {error}", code="root-failed", entry=entry
            ) from error
    os.close(handle)
    _make_devices(root, devices, make_nodes=ids >= 0)
    mounts.unmount(f"{place}/{_STORE}")
    os.rmdir(_STORE, dir_fd=root)
    for mount in (*empties, root):
        mounts.restrict(mount, mounts.RDONLY | mounts.NOSUID | mounts.NODEV)
    mounts.pivot_into(root)


def _put_empty(root: int, target: str) -> int:
    """Cover a directory by an empty one, which can be written to until the root is done."""
    made = mounts.filesystem("tmpfs", mounts.NOSUID | mounts.NODEV, mode="0755", size="1m", nr_inodes="4k")
    parent, last = _parent(root, target)
    mounts.move_mount(made, parent, last)
    os.close(parent)
    return made


def _make(root: int, store: int, showing: Showing, entry: list[str], name: str) -> None:
    kind, target = entry[0], entry[2 if entry[0] == "bind" else 1].lstrip("/")
    if kind == "dir":
        _ensure_directory(root, target)
        return
    parent, last = _parent(root, target)
    try:
        if kind == "spot":
            make_file(parent, last)
        elif kind == "link":
            os.symlink(entry[2], last, dir_fd=parent)
        elif kind == "bind":
            showing.put(parent, last, entry[1])
        elif kind in ("file", "hide"):
            _cover(parent, last, store, name, None if kind == "hide" else entry[2])
        else:
            raise SandboxError(f"unknown kind of root entry: {kind}", code="bad-request", entry=entry)
    finally:
        os.close(parent)


def _cover(parent: int, last: str, store: int, name: str, content: str | None) -> None:
    """Put a small file at a place, or (without content) something empty over what is there."""
    directory = content is None and stat.S_ISDIR(os.stat(last, dir_fd=parent, follow_symlinks=False).st_mode)
    _stored(store, name, content or "", directory=directory, mode=0 if content is None else 0o444)
    source = mounts.clone_tree(store, name)
    try:
        mounts.restrict(source, _HIDDEN_ATTRIBUTES)
        if content is not None:
            make_file(parent, last)
        mounts.move_mount(source, parent, last)
    finally:
        os.close(source)


def _stored(store: int, name: str, content: str, *, directory: bool, mode: int) -> None:
    if directory:
        os.mkdir(name, mode, dir_fd=store)
        return
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=store)
    try:
        os.write(handle, content.encode("utf-8", "surrogateescape"))
    finally:
        os.close(handle)


def _parent(root: int, path: str) -> tuple[int, str]:
    """The directory that holds ``path``, made if need be, and the last name.

    Links count as they will inside: ``/var/tmp`` leads to the sandbox's own ``/tmp``, never to the host's.
    """
    head, _, last = path.rpartition("/")
    _ensure_directory(root, head)
    return open_in_root(root, head or "."), last


def _ensure_directory(root: int, path: str) -> None:
    if "/" not in path:
        if path:
            make_directory(root, path)
        return
    try:
        os.close(open_in_root(root, path))
    except FileNotFoundError:
        parent, last = _parent(root, path)
        make_directory(parent, last)
        os.close(parent)


def _make_devices(root: int, extra: list[str], *, make_nodes: bool) -> None:
    """/dev with the common nodes and mount points for pts and shm.

    With ``make_nodes`` (real root) the nodes are made; else the host's own are bound, since a user
    namespace may not make any.
    """
    dev = mounts.filesystem("tmpfs", mode="0755", size="64k")
    _ensure_directory(root, "dev")
    mounts.move_mount(dev, root, "dev")
    for name in ("pts", "shm", "mqueue"):
        os.mkdir(name, 0o755, dir_fd=dev)
    for name, to in _DEVICE_LINKS.items():
        os.symlink(to, name, dir_fd=dev)
    for name, number in _DEVICES.items():
        if make_nodes:
            os.mknod(name, stat.S_IFCHR | 0o666, os.makedev(*number), dir_fd=dev)
            os.chmod(name, 0o666, dir_fd=dev)  # noqa: S103 - /dev/null and its like are for everybody
        else:
            _bind_device(dev, name)
    for name in extra:
        _bind_device(dev, name)
    mounts.restrict(dev, mounts.RDONLY | mounts.NOSUID | mounts.NOEXEC)
    os.close(dev)


def _bind_device(dev: int, name: str) -> None:
    os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o444, dir_fd=dev))
    node = mounts.clone_tree(mounts.AT_FDCWD, f"/dev/{name}")
    mounts.move_mount(node, dev, name)
    os.close(node)
