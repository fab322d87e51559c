"""A real worker and the sandboxes that it serves, for the tests of it."""

from __future__ import annotations

import os
import socket
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from casemate.policy.model import Network
from tests.unit.egress import wire
from tests.unit.egress.gatelab import ALLOWED, Inside, exactly

if TYPE_CHECKING:
    from collections.abc import Iterator

    from casemate.sandbox.gate import CommandNetwork, GateWorker

RULE = f"{ALLOWED}:9000"


class Sandbox:
    """One sandbox's network, served by a worker."""

    def __init__(self, worker: GateWorker, *allow: str, **fields: Any) -> None:
        self.worker = worker
        self.place = Inside()
        fields.setdefault("mode", "allowlist")
        secrets = fields.pop("secrets", {})
        review = fields.pop("review", None)
        self.share: CommandNetwork = worker.open(Network(allow=allow, **fields), secrets, self.dial, review)
        self.share.begin(self.place.capture)

    def dial(self, made: Any) -> None:
        made(self.place.made())

    def connect(self, port: int = 9000, address: str = "198.18.1.0") -> socket.socket:
        return self.place.connect(address, port)

    def say(self, client: socket.socket) -> bytes:
        client.sendall(b"hello\n")
        return exactly(client, 6)

    def resolve(self) -> None:
        """Have the first name's address given out."""
        with self.place.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
            endpoint.connect(("198.18.0.1", 53))
            endpoint.send(wire.query(wire.name(ALLOWED)))
            assert endpoint.recv(4096)[3] & 15 == 0

    def close(self) -> None:
        self.share.abandon()
        self.place.close()


@contextmanager
def sandbox(worker: GateWorker, *allow: str, **fields: Any) -> Iterator[Sandbox]:
    """A sandbox by the rules ``allow``, whose first name has its address."""
    made = Sandbox(worker, *(allow or (RULE,)), **fields)
    try:
        if fields.get("mode", "allowlist") == "allowlist":
            made.resolve()
        yield made
    finally:
        made.close()


def pid(worker: GateWorker) -> int:
    return worker._pid


def status(number: int) -> dict[str, str]:
    """What the kernel says of a process."""
    lines = Path(f"/proc/{number}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def held(number: int) -> int:
    """How many descriptors a process has."""
    return len(os.listdir(f"/proc/{number}/fd"))


def ticks(number: int) -> int:
    """How much processor time a process has used, in hundredths of a second."""
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def settled(worker: GateWorker) -> None:
    """Everything that the worker was told by now has been done."""
    with _share(worker) as share:
        share.ask_end()
        assert worker.wait(lambda: share.ended)


@contextmanager
def _share(worker: GateWorker) -> Iterator[CommandNetwork]:
    share = worker.open(Network(mode="allowlist"), {}, lambda made: made(-1), None)
    yield share
    worker.forget(share._number)
