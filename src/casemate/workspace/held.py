"""What was held back: kept in a private directory until a person takes it or throws it away."""

from __future__ import annotations

import errno
import os

import msgspec

from casemate.workspace.content import copy
from casemate.workspace.names import printable

__all__ = ["DELETE", "DIRECTORY_ENTRY", "FILE_ENTRY", "LINK_ENTRY", "MOVE_ENTRY", "Item", "Store"]

#: What an item would do to the workspace.
FILE_ENTRY, LINK_ENTRY, DIRECTORY_ENTRY, DELETE, MOVE_ENTRY = "file", "link", "dir", "delete", "move"

_MANIFEST = "manifest.jsonl"


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
        self._used = sum(item.size for item in self._known.values())
        self._number = 0
        self._lines: list[bytes] = []

    def keep(
        self, item: Item, source: int | None = None, blocks: int = 0, content: bytes | None = None
    ) -> None:
        """Keep one item; ``source`` is a descriptor with its content, or ``content`` the bytes themselves.

        Raises ``Full`` or OSError; then nothing of it was kept.
        """
        known = self._known.get((item.path, item.kind))
        if known is not None and (known.mode, known.size, known.mtime_ns, known.to, known.reason) == (
            item.mode, item.size, item.mtime_ns, item.to, item.reason,
        ):  # fmt: skip
            return  # from an earlier try with the same top
        name = ""
        if source is not None or content is not None:
            if self._used + item.size > self.limit:
                raise Full
            name = self._write(source, item.size, blocks, content)
            self._used += item.size
        kept = msgspec.structs.replace(item, content=name, shown=printable(os.fsdecode(item.path)))
        self._lines.append(self._encoder.encode(kept))
        self._known[kept.path, kept.kind] = kept

    def _write(self, source: int | None, size: int, blocks: int, content: bytes | None) -> str:
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
            if source is not None:
                copy(source, fd, size, blocks)
            elif content:
                os.write(fd, content)
        except BaseException:
            os.unlink(name, dir_fd=self.directory)
            raise
        finally:
            os.close(fd)
        return name

    def close(self) -> None:
        """Write the manifest out."""
        if not self._lines:
            return
        data = b"\n".join(self._lines) + b"\n"
        fd = os.open(
            _MANIFEST, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW, 0o600, dir_fd=self.directory
        )
        try:
            while data:
                data = data[os.write(fd, data) :]
        finally:
            os.close(fd)
        self._lines = []


def read_manifest(directory: int) -> list[Item]:
    """The items kept in a directory; of two for the same path and kind the later one counts."""
    try:
        fd = os.open(_MANIFEST, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
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


def is_full(error: OSError) -> bool:
    """Whether an error means that no further write can succeed."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
