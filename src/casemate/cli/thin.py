"""The client of a resident daemon: no import beyond built-in modules, so that it starts at once."""

from __future__ import annotations

__all__ = ["try_daemon"]


def try_daemon(argv: list[str]) -> int | None:
    """Have the daemon run it; None when there is none (or it speaks another version): run it here then."""
    return None
