"""Making every connection of a network namespace arrive at one listener: routes, sockets, sk_lookup.

Each function acts on the calling process's own network namespace, which has a loopback and nothing else.
They are called before any code of a sandbox runs there; the sockets keep belonging to that namespace
wherever their descriptors go.

- AnyIP: a route ``local 0.0.0.0/0 dev lo`` makes every address local, so each connect() is answered by this
  very namespace, and ``getsockname`` of an accepted connection is the address that was asked for. No packet
  filter, no device, no connection tracking (0.1 ms).
- sk_lookup (Linux 5.9, real root): a program that gives every TCP connection, whatever its port, to one
  socket. Loopback (127/8, ::1, mapped) is left alone, so servers inside keep their ports.
- Without it (a user): nftables' redirect by its C library if there is one, else listed ports only.
"""

from __future__ import annotations

import _socket
import ctypes
import os
import struct

from casemate.sys.namespaces import NET, enter
from casemate.sys.native import LIBC, fail, machine, syscall

__all__ = [
    "DNS_PORT",
    "GATE",
    "GATE_V6",
    "PARTIAL",
    "PROXY_VARIABLES",
    "Capture",
    "connected_to",
    "make",
    "socket_for",
]

#: The gate's own address inside, for DNS and for programs that are told of a proxy.
GATE, GATE_V6 = "198.18.0.1", "fd53:656e:7472:79::1"
DNS_PORT = 53
# What is listened on where no mechanism takes every port; what is above 1023 on the gate's address only, so
# that servers inside keep such ports.
_LISTED, _PROXY_PORT = (22, 80, 443), 3128
#: The mechanism that leaves ports out; programs are told of the gate as a proxy then.
PARTIAL = "listed ports"
PROXY_VARIABLES = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), f"http://{GATE}:{_PROXY_PORT}"),
    **dict.fromkeys(("all_proxy", "ALL_PROXY"), f"socks5h://{GATE}:{_PROXY_PORT}"),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,::1"),
}

_BPF = {"x86_64": 321}.get(machine(), 280)
_MAP_CREATE, _MAP_UPDATE, _PROG_LOAD, _LINK_CREATE = 0, 2, 5, 28
_SOCKMAP, _SK_LOOKUP_PROG, _SK_LOOKUP_ATTACH = 15, 30, 36
_BACKLOG = 4096
_IPV6, _V6ONLY, _RECVPKTINFO, _FREEBIND = 41, 26, 49, 78
_ORIGINAL = 80  # SO_ORIGINAL_DST, IP6T_SO_ORIGINAL_DST
_TCP, _NODELAY = 6, 1


class Capture:
    """The sockets of one network namespace: ``tcp`` and ``udp`` listen, ``link`` keeps the program attached.

    ``mechanism`` is ``sk_lookup``, ``nftables`` or ``listed ports``: only the last leaves ports out. Every
    descriptor is the holder's to close.
    """

    __slots__ = ("link", "mechanism", "tcp", "udp")

    def __init__(self, tcp: list[int], udp: int, link: int, mechanism: str) -> None:
        self.tcp = tcp
        self.udp = udp
        self.link = link
        self.mechanism = mechanism

    @property
    def descriptors(self) -> list[int]:
        """All of them, in the order in which ``from_descriptors`` takes them back."""
        return [self.udp, *self.tcp, *([self.link] if self.link >= 0 else [])]

    @classmethod
    def from_descriptors(cls, mechanism: str, descriptors: list[int]) -> Capture:
        """Take what came over a socket."""
        last = len(descriptors) - (1 if mechanism == "sk_lookup" else 0)
        link = descriptors[last] if last < len(descriptors) else -1
        return cls(descriptors[1:last], descriptors[0], link, mechanism)

    def close(self) -> None:
        """Close every descriptor; connections that were not accepted are refused from here on."""
        for descriptor in self.descriptors:
            if descriptor >= 0:
                os.close(descriptor)
        self.tcp, self.udp, self.link = [], -1, -1

    def give_listeners(self) -> list[int]:
        """The listening descriptors, UDP first, for a gate; they are the caller's to close from here on."""
        given = [self.udp, *self.tcp]
        self.tcp, self.udp = [], -1
        return given


def make(ports: list[int], *, root: bool) -> Capture:
    """Capture what leaves the calling process's network namespace.

    ``ports`` are listened on beside the usual ones where not every port can be had. Raises OSError; the
    namespace is to be given up then.
    """
    _any_address()
    if root:
        # Bound to a mapped address the socket serves both families, and loopback of neither.
        tcp = [_listener(1, f"::ffff:{GATE}")]
        return Capture(tcp, _dns_socket(), _attach_lookup(tcp[0]), "sk_lookup")
    # No program inside may take port 1; connections to it over loopback are refused by the gate.
    if _redirect(1):
        return Capture([_listener(1)], _dns_socket(), -1, "nftables")
    wanted = {*_LISTED, DNS_PORT, *(port for port in ports if 0 < port < 65536 and port != _PROXY_PORT)}
    tcp = [_listener(port) for port in sorted(wanted)]
    tcp.append(_listener(_PROXY_PORT, f"::ffff:{GATE}"))
    return Capture(tcp, _dns_socket(), -1, PARTIAL)


def connected_to(endpoint: _socket.socket) -> tuple[str, int]:
    """The address and port that an accepted connection was made to, before any redirection.

    An IPv4 address is in its own form, not mapped. Raises OSError.
    """
    address, port = endpoint.getsockname()[:2]
    loopback = address == "::1" or address.startswith("::ffff:127.")
    if loopback:  # redirected, or really that
        try:
            if address == "::1":
                data = endpoint.getsockopt(_IPV6, _ORIGINAL, 28)
                return _socket.inet_ntop(_socket.AF_INET6, data[8:24]), int.from_bytes(data[2:4], "big")
            data = endpoint.getsockopt(0, _ORIGINAL, 16)
            return _socket.inet_ntop(_socket.AF_INET, data[4:8]), int.from_bytes(data[2:4], "big")
        except OSError:
            pass
    return address.removeprefix("::ffff:"), port


def socket_for(namespace: int) -> int:
    """Enter a network namespace and make a TCP socket there; the caller stays in it.

    Raises OSError: also if what was made does not belong to that very namespace, after which the calling
    process must do nothing else but end.
    """
    wanted = os.fstat(namespace)
    enter(namespace, NET)
    endpoint = _socket.socket(_socket.AF_INET6, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC, 0)
    endpoint.setblocking(False)
    endpoint.setsockopt(_IPV6, _V6ONLY, 0)
    own = LIBC.ioctl(endpoint.fileno(), ctypes.c_ulong(0x894C))  # SIOCGSKNS
    if own < 0:
        raise fail("SIOCGSKNS")
    found = os.fstat(own)
    os.close(own)
    if (found.st_dev, found.st_ino) != (wanted.st_dev, wanted.st_ino):
        raise OSError(1, "the socket belongs to another network namespace", "SIOCGSKNS")
    return endpoint.detach()


def _any_address() -> None:
    """Make every IPv4 and IPv6 address one of this namespace's own. Raises OSError."""
    endpoint = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_RAW | _socket.SOCK_CLOEXEC, 0)
    try:
        for family in (_socket.AF_INET, _socket.AF_INET6):
            # rtmsg: family, prefix 0, no tos, table local (255), protocol static, scope host, type local.
            body = struct.pack("=BBBBBBBBI", family, 0, 0, 0, 255, 4, 254, 2, 0)
            body += struct.pack("=HHI", 8, 4, 1)  # RTA_OIF: lo has index 1 in each new namespace
            # RTM_NEWROUTE; REQUEST, ACK, CREATE, EXCL.
            endpoint.send(struct.pack("=IHHII", 16 + len(body), 24, 0x605, 1, 0) + body)
            (number,) = struct.unpack_from("=i", endpoint.recv(4096), 16)
            if number:
                raise OSError(-number, os.strerror(-number), f"local route, family {family}")
    finally:
        endpoint.close()


def _bound(kind: int, port: int, address: str = "::") -> _socket.socket:
    endpoint = _socket.socket(_socket.AF_INET6, kind | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK, 0)
    try:
        endpoint.setsockopt(_IPV6, _V6ONLY, 0)
        # AnyIP makes IPv6 addresses reachable, yet none to bind or to answer from without this.
        endpoint.setsockopt(_IPV6, _FREEBIND, 1)
        if kind == _socket.SOCK_STREAM:
            # An accepted connection holds the port that it was made to, of this very network: a server inside
            # has to be able to listen there all the same.
            endpoint.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            # Inherited by connections: whoever wrote something knows why not more of it.
            endpoint.setsockopt(_TCP, _NODELAY, 1)
        endpoint.bind((address, port))
    except BaseException:
        endpoint.close()
        raise
    return endpoint


def _listener(port: int = 0, address: str = "::") -> int:
    """A TCP listener for both families. Raises OSError."""
    endpoint = _bound(_socket.SOCK_STREAM, port, address)
    try:
        endpoint.listen(_BACKLOG)
    except BaseException:
        endpoint.close()
        raise
    return endpoint.detach()


def _dns_socket() -> int:
    """A UDP socket for both families on port 53 that is told which address was asked. Raises OSError."""
    endpoint = _bound(_socket.SOCK_DGRAM, DNS_PORT)
    endpoint.setsockopt(_IPV6, _RECVPKTINFO, 1)
    return endpoint.detach()


def _redirect(port: int) -> bool:
    """Have the kernel send every TCP connection but loopback's to ``port``; False where it cannot.

    By the C library of nftables and not by its program: a program started here would not have the
    capabilities that this process has in its user namespace.
    """
    try:
        library = ctypes.PyDLL("libnftables.so.1")
    except OSError:
        return False
    library.nft_ctx_new.restype = ctypes.c_void_p
    address: int | None = library.nft_ctx_new(ctypes.c_uint32(0))
    if not address:
        return False
    context = ctypes.c_void_p(address)
    library.nft_ctx_buffer_error(context)  # to memory instead of stderr
    rules = (
        "table inet casemate { chain out { type nat hook output priority -100; policy accept; "
        "ip daddr 127.0.0.0/8 accept; ip6 daddr ::1 accept; ip6 daddr ::ffff:127.0.0.0/104 accept; "
        f"meta l4proto tcp redirect to :{port}; }}; }}"
    )
    return not library.nft_run_cmd_from_buffer(context, rules.encode())


# -- sk_lookup ---------------------------------------------------------------------------------------------
# struct bpf_sk_lookup: family at 8, protocol at 12, local_ip4 at 40, local_ip6[4] at 44; addresses as on
# the wire, read as words of this machine.
_FAMILY, _PROTOCOL, _LOCAL_IP4, _LOCAL_IP6 = 8, 12, 40, 44
_LOAD, _JUMP_EQUAL, _JUMP_NOT_EQUAL, _AND = 0x61, 0x15, 0x55, 0x57
_ONE = struct.unpack("=I", b"\0\0\0\1")[0]
_MAPPED = struct.unpack("=I", b"\0\0\xff\xff")[0]
_FIRST_BYTE = struct.unpack("=I", b"\xff\0\0\0")[0]
_LOOPBACK = struct.unpack("=I", b"\x7f\0\0\0")[0]


_THE_MAP = -1

# Give a TCP connection that is not for loopback to the socket at index 0 of the map. Operation, destination,
# source, offset (or the place to go to), value; texts are places.
_STEER: tuple[tuple[int, int, int, int | str, int] | str, ...] = (
    (0xBF, 6, 1, 0, 0),  # r6 = context
    (_LOAD, 2, 6, _PROTOCOL, 0),
    (_JUMP_NOT_EQUAL, 2, 0, "pass", _TCP),
    (_LOAD, 2, 6, _FAMILY, 0),
    (_JUMP_EQUAL, 2, 0, "six", _socket.AF_INET6),
    (_LOAD, 2, 6, _LOCAL_IP4, 0),
    (_AND, 2, 0, 0, _FIRST_BYTE),
    (_JUMP_EQUAL, 2, 0, "pass", _LOOPBACK),
    (0x05, 0, 0, "steer", 0),
    "six",
    (_LOAD, 2, 6, _LOCAL_IP6, 0),
    (_JUMP_NOT_EQUAL, 2, 0, "steer", 0),
    (_LOAD, 2, 6, _LOCAL_IP6 + 4, 0),
    (_JUMP_NOT_EQUAL, 2, 0, "steer", 0),
    (_LOAD, 2, 6, _LOCAL_IP6 + 8, 0),
    (_LOAD, 3, 6, _LOCAL_IP6 + 12, 0),
    (_JUMP_EQUAL, 2, 0, "mapped", _MAPPED),
    (_JUMP_NOT_EQUAL, 2, 0, "steer", 0),
    (_JUMP_EQUAL, 3, 0, "pass", _ONE),
    (0x05, 0, 0, "steer", 0),
    "mapped",
    (_AND, 3, 0, 0, _FIRST_BYTE),
    (_JUMP_EQUAL, 3, 0, "pass", _LOOPBACK),
    "steer",
    (0x62, 10, 0, -4, 0),  # *(u32 *)(fp - 4) = 0
    (0xBF, 2, 10, 0, 0),
    (0x07, 2, 0, 0, -4),
    (0x18, 1, 1, 0, _THE_MAP),
    (0, 0, 0, 0, 0),
    (0x85, 0, 0, 0, 1),  # bpf_map_lookup_elem
    (_JUMP_EQUAL, 0, 0, "drop", 0),
    (0xBF, 7, 0, 0, 0),
    (0xBF, 1, 6, 0, 0),
    (0xBF, 2, 0, 0, 0),
    (0xB7, 3, 0, 0, 0),
    (0x85, 0, 0, 0, 124),  # bpf_sk_assign
    (0xBF, 8, 0, 0, 0),
    (0xBF, 1, 7, 0, 0),
    (0x85, 0, 0, 0, 86),  # bpf_sk_release
    (_JUMP_NOT_EQUAL, 8, 0, "drop", 0),
    "pass",
    (0xB7, 0, 0, 0, 1),
    (0x95, 0, 0, 0, 0),
    "drop",  # no listener any more: refuse, rather than let something else in the sandbox answer
    (0xB7, 0, 0, 0, 0),
    (0x95, 0, 0, 0, 0),
)


def _program(map_descriptor: int) -> bytes:
    """The instructions of ``_STEER`` with this map."""
    places: dict[str, int] = {}
    count = 0
    for line in _STEER:
        if isinstance(line, str):
            places[line] = count
        else:
            count += 1
    packed: list[bytes] = []
    for line in _STEER:
        if isinstance(line, str):
            continue
        operation, to, source, offset, value = line
        if isinstance(offset, str):
            offset = places[offset] - len(packed) - 1
        value = map_descriptor if value == _THE_MAP else value
        packed.append(struct.pack("=BBhI", operation, to | source << 4, offset, value & 0xFFFFFFFF))
    return b"".join(packed)


def _bpf(what: str, command: int, attributes: bytes) -> int:
    return syscall(f"bpf {what}", _BPF, command, attributes, len(attributes))


def _attach_lookup(tcp: int) -> int:
    """Steer this namespace's TCP connections to the listener ``tcp``; returns the link that holds it so.

    Raises OSError (EPERM without CAP_BPF and CAP_NET_ADMIN of the host's own user namespace).
    """
    table = _bpf("map", _MAP_CREATE, struct.pack("=5I", _SOCKMAP, 4, 8, 1, 0))
    program = namespace = -1
    try:
        key, value = ctypes.create_string_buffer(4), ctypes.create_string_buffer(struct.pack("=Q", tcp), 8)
        places = struct.pack("=IIQQQ", table, 0, ctypes.addressof(key), ctypes.addressof(value), 0)
        _bpf("map update", _MAP_UPDATE, places)
        code = _program(table)
        text = ctypes.create_string_buffer(code, len(code))
        licence = ctypes.create_string_buffer(b"Apache-2.0")
        attributes = struct.pack(
            "=IIQQIIQII16sII",
            _SK_LOOKUP_PROG, len(code) // 8, ctypes.addressof(text), ctypes.addressof(licence),
            0, 0, 0, 0, 0, b"casemate", 0, _SK_LOOKUP_ATTACH,
        )  # fmt: skip
        program = _bpf("program", _PROG_LOAD, attributes)
        namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        link = struct.pack("=IIII", program, namespace, _SK_LOOKUP_ATTACH, 0) + bytes(16)
        return _bpf("link", _LINK_CREATE, link)
    finally:
        for descriptor in (table, program, namespace):
            if descriptor >= 0:
                os.close(descriptor)

