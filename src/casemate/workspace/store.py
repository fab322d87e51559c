"""The directory that keeps what was held back: contents in numbered files, and a manifest."""

from __future__ import annotations

import os
from contextlib import suppress

import msgspec

from casemate.workspace.content import copy, same, write_all
from casemate.workspace.names import printable

__all__ = [
    "DELETE",
    "DIRECTORY_ENTRY",
    "FILE_ENTRY",
    "LINK_ENTRY",
    "MOVE_ENTRY",
    "Full",
    "Item",
    "Store",
    "forget",
    "read_manifest",
]

#: What an item would do to the workspace.
FILE_ENTRY, LINK_ENTRY, DIRECTORY_ENTRY, DELETE, MOVE_ENTRY = "file", "link", "dir", "delete", "move"

_MANIFEST = "manifest.jsonl"
_MOST = 100_000  # items: each may be a file of its own


class Item(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the manifest. ``path`` and ``to`` are bytes: names need not be text."""

    path: bytes
    kind: str
    reason: str
    detail: str = ""
    #: The path for a person to read.
    shown: str = ""
    #: The entry in whose name a person consents: itself, or the directory that was held as a whole.
    unit: bytes = b""
    mode: int = 0
    size: int = 0
    mtime_ns: int = 0
    #: The host's entry wins if it changed after this moment.
    since_ns: int = 0
    #: Name of the file in the directory that has the content.
    content: str = ""
    #: What a link says; where a moved directory was.
    to: bytes = b""


class Full(Exception):
    """There is no room for this content: the top must be kept instead."""


class Store:
    """Writes held items into a directory. Content is there before the manifest names it."""

    def __init__(self, directory: int, limit: int) -> None:
        self.directory, self.limit = directory, limit
        self._encoder = msgspec.json.Encoder()
        self._known = {(item.path, item.kind): item for item in read_manifest(directory)}
        self._remove_orphans()
        self._used = sum(self._room(item.content) for item in self._known.values() if item.content)
        self._number = 0
        self._lines: list[bytes] = []
        self._superseded: list[str] = []

    def _remove_orphans(self) -> None:
        """Remove contents that no line names: of a step that was killed before it could write the manifest.
        What they are of is still in the top.
        """
        named = {item.content for item in self._known.values()}
        for name in os.listdir(self.directory):
            if name.isdecimal() and name not in named:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self.directory)

    def keep(self, item: Item, source: int | None = None, blocks: int = 0) -> None:
        """Keep one item; ``source`` is a descriptor with its content, ``blocks`` its st_blocks.

        Raises ``Full`` or OSError; then nothing of it was kept.
        """
        known = self._known.get((item.path, item.kind))
        if known is not None and self._is_kept(known, item, source):
            return  # from an earlier try with the same top
        if len(self._known) >= _MOST:
            raise Full
        name = ""
        if source is not None:
            # What it takes, not what it says: a sparse file is small.
            room = min(item.size, blocks * 512)
            if self._used + room > self.limit:
                raise Full
            name = self._write(source, item.size, blocks)
            self._used += room
        kept = msgspec.structs.replace(item, content=name, shown=printable(os.fsdecode(item.path)))
        self._lines.append(self._encoder.encode(kept))
        self._known[kept.path, kept.kind] = kept
        if known is not None and known.content:
            self._superseded.append(known.content)

    def _is_kept(self, known: Item, item: Item, source: int | None) -> bool:
        if (known.mode, known.size, known.mtime_ns, known.to, known.reason) != (
            item.mode, item.size, item.mtime_ns, item.to, item.reason,
        ):  # fmt: skip
            return False
        if source is None:
            return True
        try:
            fd = os.open(known.content, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.directory)
        except OSError:
            return False
        try:
            return same(source, fd, item.size)
        finally:
            os.close(fd)

    def _room(self, name: str) -> int:
        try:
            status = os.stat(name, dir_fd=self.directory, follow_symlinks=False)
        except OSError:
            return 0
        return min(status.st_size, status.st_blocks * 512)

    def _write(self, source: int, size: int, blocks: int) -> str:
        while True:
            self._number += 1
            name = f"{self._number:06d}"
            try:
                fd = os.open(
                    name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600, dir_fd=self.directory
                )
            except FileExistsError:
                continue
            break
        try:
            copy(source, fd, size, blocks)
        except BaseException:
            os.unlink(name, dir_fd=self.directory)
            raise
        finally:
            os.close(fd)
        return name

    def close(self) -> None:
        """Write the manifest out."""
        if self._lines:
            lines, self._lines = self._lines, []
            _write(self.directory, _MANIFEST, os.O_APPEND, lines)
        for name in self._superseded:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.directory)


def _write(directory: int, name: str, flags: int, lines: list[bytes]) -> None:
    data = b"".join(line + b"\n" for line in lines)
    fd = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | flags, 0o600, dir_fd=directory)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)


def read_manifest(directory: int) -> list[Item]:
    """The items kept in a directory; of two for the same path and kind the later one counts."""
    try:
        fd = os.open(_MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return []
    with open(fd, "rb") as file:
        data = file.read()
    decoder = msgspec.json.Decoder(Item)
    items: dict[tuple[bytes, str], Item] = {}
    for line in data.splitlines():
        try:
            item = decoder.decode(line)
        except msgspec.DecodeError:
            continue  # the last line of a run that was killed
        items[item.path, item.kind] = item
    return list(items.values())


def forget(directory: int, items: list[Item]) -> int:
    """Take items off the manifest, then delete their content; returns how many they were."""
    gone = {(item.path, item.kind) for item in items}
    if not gone:
        return 0
    kept = [item for item in read_manifest(directory) if (item.path, item.kind) not in gone]
    if kept:
        encode = msgspec.json.Encoder().encode
        _write(directory, f"{_MANIFEST}.new", os.O_TRUNC, [encode(item) for item in kept])
        os.rename(f"{_MANIFEST}.new", _MANIFEST, src_dir_fd=directory, dst_dir_fd=directory)
    else:
        os.unlink(_MANIFEST, dir_fd=directory)
    for item in items:
        if item.content:
            with suppress(FileNotFoundError):
                os.unlink(item.content, dir_fd=directory)
    return len(items)
