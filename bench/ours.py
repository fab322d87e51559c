"""Casemate as a user meets it: the library without and with a pool, the command without and with a daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.peers import Peer

__all__ = ["variants"]


def variants() -> list[Peer]:
    """Every way Casemate starts a command, cheapest promise last."""
    return []
