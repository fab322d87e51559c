"""``casemate forward``: a port of this host's loopback leads into a command that runs."""

from __future__ import annotations

import _signal
import os
import socket

from casemate.cli.main import line, tell
from casemate.cli.streams import put
from casemate.sandbox import live
from casemate.sandbox.published import Published
from casemate.settings import places, workspace_key
from casemate.sys import packets

__all__ = ["main"]

USAGE = """usage: casemate forward [-C DIR] PORT[:INSIDE]

Connections to PORT of this host's loopback reach port INSIDE (default: the same) of the command that runs in
the workspace, until Ctrl-C or its end. `casemate run -p PORT[:INSIDE]` does it from the start.
  -C DIR        the workspace (default: the present directory)
"""


def main(argv: list[str]) -> int:
    """Forward one port."""
    directory, words = ".", [*argv]
    if words[:1] in (["-h"], ["--help"]):
        os.write(1, USAGE.encode())
        return 0
    if words[:1] == ["-C"] and len(words) > 1:
        directory, words = words[1], words[2:]
    entry = words[0] if len(words) == 1 else ""
    outside, colon, inside = entry.partition(":")
    inside = inside if colon else outside
    if not all(port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536 for port in (outside, inside)):
        os.write(2, USAGE.encode())
        return 2
    if not os.path.isdir(directory):
        tell(f"no such directory: {directory}")
        return 2
    workspace = os.path.realpath(directory)
    endpoint = live.find(places(dict(os.environ)).run, workspace_key(workspace))
    if endpoint is None:
        tell(f"no command runs in {workspace} that can be spoken to (one has to run for a moment first)")
        return 125
    with endpoint:
        return _forward(endpoint, f"{outside}:{inside}", int(inside))


def _forward(endpoint: socket.socket, entry: str, inside: int) -> int:
    import asyncio

    published = Published([entry])
    put(2, line(f"127.0.0.1:{entry.partition(':')[0]} leads to port {inside} inside").encode())
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    asyncio.run(_serve(endpoint, published, inside))
    return 0


async def _serve(endpoint: socket.socket, published: Published, inside: int) -> None:
    """Relay until the command has ended."""
    import asyncio

    from casemate.egress.inbound import Inbound

    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def told(event: dict[str, object]) -> None:
        if event.get("verdict") != "allow":
            tell(f"a connection to port {inside} inside failed: {event.get('detail') or event.get('reason')}")

    inbound = Inbound(lambda number: packets.send(endpoint, str(number).encode()), told)
    for number, descriptor in enumerate(published.descriptors):
        inbound.publish(number, socket.socket(fileno=os.dup(descriptor)), inside)
    published.close()
    endpoint.setblocking(False)

    def incoming() -> None:
        try:
            payload, handles = packets.receive(endpoint)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            payload, handles = None, []
        if payload is None:
            ended.set()
        else:
            inbound.made(int(payload), handles[0] if handles else -1)

    loop.add_reader(endpoint, incoming)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(endpoint)
        inbound.close()
