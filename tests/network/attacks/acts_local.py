"""Acts that look for another way out than the network: sockets of the host, the kernel's own interfaces."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from typing import Any

import wire

LIBC = ctypes.CDLL(None, use_errno=True)
# Calls by number: libc's wrappers stand between, and some languages have none.
SETNS = 308


def unix(one: dict[str, Any]) -> str:
    """A unix socket, by path or, with a leading NUL, by abstract name."""
    kind = socket.SOCK_DGRAM if one.get("dgram") else socket.SOCK_STREAM
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.settimeout(1)
        sock.connect(one["path"])
        sock.sendall(wire.latin(one["send"]))
        return "" if one.get("dgram") else wire.read(sock).decode("latin-1")[:100]


def vsock(one: dict[str, Any]) -> str:
    """A socket towards a hypervisor or its other guests: that it can be made at all is enough."""
    socket.socket(40, socket.SOCK_STREAM, 0).close()
    return "made"


def netlink(one: dict[str, Any]) -> str:
    """Send an order to the kernel's network configuration; its answer must not be an error."""
    kind, body = _MESSAGES[one["order"]]
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
        sock.settimeout(1)
        sock.bind((0, 0))
        # A request that is acknowledged and may create what it names.
        sock.send(struct.pack("=IHHII", 16 + len(body), kind, 0x405, 1, 0) + body)
        reply = sock.recv(65536)
    code = struct.unpack_from("=i", reply, 16)[0]
    if struct.unpack_from("=H", reply, 4)[0] != 2 or code:
        raise OSError(-code, os.strerror(-code))
    return "done"


def _attribute(kind: int, data: bytes) -> bytes:
    size = 4 + len(data)
    return struct.pack("=HH", size, kind) + data + bytes(-size % 4)


_LO = struct.pack("=I", 1)
_ADDRESS = socket.inet_aton("127.9.8.7")
_MESSAGES = {
    # An address, a route (in the control, each is one that changes nothing that anybody uses).
    "address": (20, struct.pack("=BBBBI", 2, 32, 0, 254, 1) + _attribute(2, _ADDRESS)),
    "route": (
        24,
        struct.pack("=8BI", 2, 32, 0, 0, 254, 3, 254, 2, 0) + _attribute(1, _ADDRESS) + _attribute(4, _LO),
    ),
    "link": (16, struct.pack("=BBHiII", 0, 0, 0, 1, 1, 1)),
}


def ioctl(one: dict[str, Any]) -> str:
    """Set a flag of a device by the old interface (to what it is)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack_from("16xH", fcntl.ioctl(sock, 0x8913, request))[0]
        fcntl.ioctl(sock, 0x8914, struct.pack("16sH14x", b"lo", flags))
    return "set"


def tun(one: dict[str, Any]) -> str:
    """A network device of one's own."""
    with open("/dev/net/tun", "r+b", buffering=0) as file:
        fcntl.ioctl(file, 0x400454CA, struct.pack("16sH22x", b"tun%d", 0x1001))
    return "made"


def join(one: dict[str, Any]) -> str:
    """Enter the network namespace of another process by any path to it."""
    child = os.fork()  # what is joined is left again with it
    if not child:
        found = 1
        for pid in (name for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):
                number = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
                found &= LIBC.syscall(SETNS, number, 0x40000000) != 0
                os.close(number)
        os._exit(found)
    if os.waitpid(child, 0)[1]:
        raise OSError("nobody's could be joined")
    return "joined"


def sysctl(one: dict[str, Any]) -> str:
    """Change a switch of the network (to what it is)."""
    with open("/proc/sys/net/ipv4/ip_forward", "r+", encoding="ascii") as file:
        value = file.read()
        file.seek(0)
        file.write(value)
    return "written"
