"""Taking connections, also where there is no descriptor left for one."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

from casemate.egress.acceptor import Acceptor
from tests.unit.egress.gatelab import Lab, exactly

# Everything but so many descriptors is in use, and more clients come than that.
_STARVED = """
import asyncio, json, os, resource, socket, sys, time
from casemate.egress.acceptor import Acceptor

async def main():
    loop = asyncio.get_running_loop()
    faults = []
    loop.set_exception_handler(lambda _, context: faults.append(str(context)))
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    clients = []
    for _ in range(10):
        client = socket.socket()
        client.setblocking(False)
        try:
            client.connect(listener.getsockname())
        except BlockingIOError:
            pass
        clients.append(client)
    taken, held = [], []
    try:
        while True:
            held.append(os.dup(0))
    except OSError:
        pass
    for _ in range(3):
        os.close(held.pop())
    acceptor = Acceptor(listener, taken.append)
    end = loop.time() + 0.5
    while loop.time() < end:
        await asyncio.sleep(0.05)
    before, busy = len(taken), time.process_time()
    end = loop.time() + 0.5
    while loop.time() < end:
        await asyncio.sleep(0.05)
    busy = time.process_time() - busy
    for one in held:
        os.close(one)
    while len(taken) < 10:
        await asyncio.sleep(0.01)
    acceptor.close()
    print(json.dumps({"before": before, "busy": busy, "after": len(taken), "faults": faults}))

asyncio.run(asyncio.wait_for(main(), 20))
"""


def test_no_descriptor_left() -> None:
    """Without a descriptor for the next connection nothing spins, and with one again the rest is taken."""
    done = subprocess.run(
        [sys.executable, "-c", _STARVED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["before"] == 3
    assert said["after"] == 10
    assert said["busy"] < 0.1
    assert said["faults"] == []


def test_taken_and_refused(lab: Lab) -> None:
    """Connections are handed over, ready for the loop; after the close the next one is refused."""
    listener = lab.call(lambda: socket.create_server(("127.0.0.1", 0)))
    where = listener.getsockname()
    taken: list[socket.socket] = []

    def take(endpoint: socket.socket) -> None:
        assert not endpoint.getblocking()
        taken.append(endpoint)
        endpoint.send(b"hello")

    acceptor = lab.call(lambda: Acceptor(listener, take))
    client = lab.call(lambda: socket.create_connection(where, 5))
    assert exactly(client, 5) == b"hello"
    lab.call(acceptor.close)
    other = lab.call(socket.socket)
    assert other.connect_ex(where) == 111
    for end in (client, other, *taken):
        end.close()
