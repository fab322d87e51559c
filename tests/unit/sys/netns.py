"""A network namespace with the gate's listeners in it, as root or as uid 1000 makes one, held by a process.

``python -m tests.unit.sys.netns FD UID HIDE PORTS``: sends the listeners over FD, then makes sockets on
demand, so that a test has them all in its own process. With HIDE nftables' C library cannot be loaded.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from casemate.sys import capture, mounts, namespaces, packets, process

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NFTABLES = "libnftables.so.1"


class Network:
    """The namespace. ``capture`` are the listeners, as the launcher gets them."""

    def __init__(self, uid: int = 0, *, hide: bool = False, ports: Sequence[int] = ()) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [str(theirs.fileno()), str(uid), str(int(hide)), ",".join(map(str, ports))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *words], pass_fds=[theirs.fileno()], cwd=os.getcwd(),
            env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        theirs.close()
        self._channel = ours
        self._channel.settimeout(30)
        payload, handles = packets.receive(ours)
        assert payload is not None, "it could not be made"
        self.capture = capture.Capture.from_descriptors(payload.decode(), handles)

    @property
    def pid(self) -> int:
        return self._process.pid

    def socket(
        self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM, proto: int = 0
    ) -> socket.socket:
        """A socket in there; waits for five seconds at most."""
        packets.send(self._channel, f"{int(family)} {int(kind)} {proto}".encode())
        payload, handles = packets.receive(self._channel)
        assert payload == b"made", payload
        made = socket.socket(fileno=handles[0])
        made.settimeout(5)
        return made

    def connect(self, address: str, port: int, **how: int) -> socket.socket:
        made = self.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, **how)
        try:
            made.connect((address, port))
        except BaseException:
            made.close()
            raise
        return made

    def listen(self, address: str, port: int) -> socket.socket:
        made = self.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, port))
        made.listen(8)
        return made

    def close(self) -> None:
        self.capture.close()
        self._channel.close()
        self._process.wait(10)


@contextlib.contextmanager
def network(uid: int = 0, *, hide: bool = False, ports: Sequence[int] = ()) -> Iterator[Network]:
    """One, ended afterwards."""
    made = Network(uid, hide=hide, ports=ports)
    try:
        yield made
    finally:
        made.close()


def _hide() -> None:
    """Put something that is no library over the one of nftables, for this process alone."""
    namespaces.leave(namespaces.MOUNT)
    mounts.make_private()
    places = ["/lib", "/usr/lib", "/lib64", "/usr/lib64"]
    found = {
        os.path.realpath(os.path.join(base, name))
        for place in places
        for base, _, names in os.walk(place)
        for name in names
        if name.startswith("libnftables.so")
    }
    for path in found:
        tree = mounts.clone_tree(mounts.AT_FDCWD, "/dev/null")
        mounts.move_mount(tree, mounts.AT_FDCWD, path)
        os.close(tree)


def main(argv: list[str]) -> None:
    channel = socket.socket(fileno=int(argv[0]))
    uid, ports = int(argv[1]), [int(word) for word in argv[3].split(",") if word]
    if argv[2] == "1":
        _hide()
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        process.set_dumpable(True)
        namespaces.leave(namespaces.USER)
        namespaces.map_single(uid, uid, uid, uid)
    namespaces.leave(namespaces.NET)
    namespaces.loopback_up()
    made = capture.make(ports, root=not uid)
    packets.send(channel, made.mechanism.encode(), made.descriptors)
    made.close()
    while (asked := packets.receive(channel)[0]) is not None:
        family, kind, proto = map(int, asked.split())
        try:
            with socket.socket(family, kind, proto) as endpoint:
                packets.send(channel, b"made", [endpoint.fileno()])
        except OSError as error:
            packets.send(channel, str(error).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
