"""Acts with hellos: streams that begin like TLS, in every shape that some server takes."""

from __future__ import annotations

from typing import Any

import acts_proxy
import wire


def _bytes(one: dict[str, Any]) -> dict[str, Any]:
    made = wire.named_hello(one["shape"], wire.latin(one["sni"]), wire.latin(one.get("good", "x.example")))
    text = made.decode("latin-1")
    # Late: only when the server has spoken.
    return {**one, "pieces": ["", text], "answer": True} if one.get("late") else {**one, "send": text}


def hello(one: dict[str, Any]) -> str:
    """Straight to ``to``."""
    return wire.talk(wire.dial(one), _bytes(one))


def tunnelled(one: dict[str, Any]) -> str:
    """Through CONNECT to ``target``."""
    return acts_proxy.connect(_bytes(one))


def socksed(one: dict[str, Any]) -> str:
    """Through SOCKS 5 to ``host`` and ``port``."""
    return acts_proxy.socks(_bytes(one))
