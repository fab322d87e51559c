"""DNS inside a sandbox: answers of the gate's own, never a query of the sandbox's outside.

An allowed name gets addresses that stand for it; whatever is not allowed does not exist. Records that could
lead around the names (HTTPS and SVCB with keys for an encrypted hello, SRV and MX with other hosts) have no
data.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from casemate.egress import dns
from casemate.egress.dns import DnsError, Framer, Query
from casemate.egress.peek import readable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.egress.gate import Gate

__all__ = ["Answers"]

_TTL = 60  # seconds; the addresses hold for the sandbox's life, so it does not matter
_AT_ONCE = 64
_IDLE_SECONDS = 20.0
_PKTINFO = 50  # IPV6_PKTINFO, which the listener has asked for


class Answers:
    """Answers queries on a UDP socket that was made inside the sandbox, and on streams."""

    def __init__(self, gate: Gate, endpoint: socket.socket) -> None:
        self._gate = gate
        self._endpoint = endpoint
        endpoint.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(endpoint, self._incoming)

    def close(self) -> None:
        """Stop answering."""
        self._loop.remove_reader(self._endpoint)
        self._endpoint.close()

    def _incoming(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                data, ancillary, flags, sender = self._endpoint.recvmsg(dns.MAX_QUERY, 64)
            except OSError:
                return
            asked = b"".join(data for *kind, data in ancillary if kind == [socket.IPPROTO_IPV6, _PKTINFO])
            # Loopback stays inside: nobody who listens there is to be mistaken for the gate.
            if flags & socket.MSG_TRUNC or not asked or _is_loopback(asked[:16]):
                continue
            answer = self.answer(data)
            if answer:
                with suppress(OSError):  # no room: a resolver asks again
                    self._endpoint.sendmsg([answer], [(socket.IPPROTO_IPV6, _PKTINFO, asked)], 0, sender)

    async def serve_stream(self, endpoint: socket.socket) -> None:
        """Answer queries over TCP until the client ends."""
        framer = Framer()
        with suppress(OSError, TimeoutError, DnsError):
            while True:
                async with asyncio.timeout(_IDLE_SECONDS):
                    await readable(endpoint)
                data = endpoint.recv(65536)
                if not data:
                    return
                for message in framer.feed(data):
                    answer = self.answer(message)
                    if answer:
                        async with asyncio.timeout(_IDLE_SECONDS):
                            await self._loop.sock_sendall(endpoint, dns.framed(answer))

    def answer(self, message: bytes) -> bytes:
        """The answer to one message; empty for what gets none."""
        try:
            query = dns.parse_query(message)
        except DnsError:
            return b""
        if query.qclass != dns.IN:
            return dns.negative(query, dns.REFUSED)
        if query.qtype == dns.PTR:
            return self._pointer(query)
        if query.name is None:
            return dns.negative(query, dns.NXDOMAIN)
        decision = self._gate.decider.resolve(query.name)
        if decision.verdict == "deny":
            self._gate.tell(
                {"kind": "dns", "host": query.name, "rule": decision.rule, "reason": decision.reason,
                 "allow": decision.allow_line}
            )  # fmt: skip
            return dns.negative(query, dns.NXDOMAIN, explain=f"casemate: {query.name} is not allowed here")
        if query.qtype not in (dns.A, dns.AAAA, dns.ANY):
            return dns.negative(query, dns.NOERROR)
        addresses = self._gate.names.addresses(query.name)
        if addresses is None:
            self._gate.tell({"kind": "dns", "host": query.name, "reason": "too-many-names"})
            why = "casemate: this sandbox has asked for too many names"
            return dns.negative(query, dns.SERVFAIL, explain=why)
        if decision.verdict == "allow":
            self._gate.tell({"kind": "dns", "verdict": "allow", "host": query.name, "rule": decision.rule})
            self._gate.expect(query.name)
        return dns.reply(query, addresses, _TTL)

    def _pointer(self, query: Query) -> bytes:
        name = self._gate.names.name(_reversed(query.name or ""))
        return dns.negative(query, dns.NXDOMAIN) if name is None else dns.pointer(query, name, _TTL)


def _is_loopback(packed: bytes) -> bool:
    address = socket.inet_ntop(socket.AF_INET6, packed)
    return address == "::1" or address.startswith("::ffff:127.")


def _reversed(name: str) -> str:
    """The address that a name below in-addr.arpa or ip6.arpa stands for, or something that is none."""
    if name.endswith(".in-addr.arpa"):
        return ".".join(reversed(name.removesuffix(".in-addr.arpa").split(".")))
    digits = "".join(reversed(name.removesuffix(".ip6.arpa").split(".")))
    return ":".join(digits[at : at + 4] for at in range(0, 32, 4)) if len(digits) == 32 else ""
