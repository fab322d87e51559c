"""What is written down of a session: its layers, and what has to be known when its changes are applied."""

from __future__ import annotations

import msgspec

from casemate.errors import PolicyError

__all__ = ["HOME", "START", "VERSION", "Layer", "Record", "check_name"]

VERSION = 1
#: What HOME is called in a layer.
HOME = "home"
#: The snapshot of every session: what it was before its first command, and after its changes were applied.
START = "start"


class Layer(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """A frozen layer, and the name of the snapshot that is the state with it on top.

    ``directory`` is empty where nothing had changed. Of a ``spent`` layer only HOME counts: its changes are
    in the workspace.
    """

    id: str
    directory: str = ""
    made_ns: int = 0
    spent: bool = False


class Record(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """A session. ``views`` are the host's directories that its tops ``up0``, ``up1``, … belong to.

    What the host changes after ``started_ns`` may be in conflict with it. ``protect``, ``deny`` and
    ``readable`` are what its commands' policies protected, hid and showed; ``limit`` is the last one's limit
    of bytes. ``applying``: an apply step has begun, of what ``globs`` and ``paths`` name (without any: of
    all), and its end was not seen. ``resumed``: one has been at work with what is in the tops.
    """

    version: int
    name: str
    workspace: str
    live: str
    started_ns: int
    made_ns: int
    layers: tuple[Layer, ...] = ()
    views: tuple[str, ...] = ()
    protect: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    limit: int | None = None
    applying: bool = False
    globs: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    resumed: bool = False

    @property
    def snapshots(self) -> list[Layer]:
        """What can be rolled back to, oldest first."""
        return [layer for layer in self.layers if not layer.spent]

    @property
    def tops(self) -> list[str]:
        """What the tops of the views are called."""
        return [f"up{number}" for number in range(len(self.views))]

    def directories(self) -> list[str]:
        """Every layer's directory, oldest first, the live one last."""
        return [*(layer.directory for layer in self.layers if layer.directory), self.live]


def check_name(name: str) -> str:
    """A session's name: letters, digits, ``-``, ``_`` and ``.``. Raises PolicyError (``session-name``)."""
    plain = name.isascii() and all(c.isalnum() or c in "-_." for c in name)
    if not plain or not name[:1].isalnum() or len(name) > 64:
        raise PolicyError(
            f"{name!a} is no name for a session",
            code="session-name",
            hint="use letters, digits, '-', '_' and '.', up to 64 of them",
        )
    return name
