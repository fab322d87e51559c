"""The server's side of SOCKS5 (RFC 1928), bytes only: greeting, password if one insists, one request.

Only CONNECT is there: BIND would open a port on the host's side, and UDP has no way out. Whoever asks by name
is resolved by the gate (``socks5h``). A user name and a password are read and forgotten: who a connection
belongs to is known from the listener that it came to.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Final

import msgspec

from casemate.egress.malformed import Malformed
from casemate.policy import hosts

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "CONNECTION_REFUSED", "FAILED", "HOST_UNREACHABLE", "NETWORK_UNREACHABLE", "NOT_ALLOWED", "SUCCEEDED",
    "TIMED_OUT", "Connect", "Refusal", "Send", "Socks5", "SocksError", "answer", "looks_like_socks",
]  # fmt: skip

#: Answers to a request (RFC 1928, 6). There is none for a timeout: "TTL expired" is what clients show it as.
SUCCEEDED: Final = 0
FAILED: Final = 1
NOT_ALLOWED: Final = 2
NETWORK_UNREACHABLE: Final = 3
HOST_UNREACHABLE: Final = 4
CONNECTION_REFUSED: Final = 5
TIMED_OUT: Final = 6
_NO_SUCH_COMMAND: Final = 7
_NO_SUCH_ADDRESS: Final = 8

_VERSION, _SOCKS4 = 5, 4
_PASSWORD_VERSION = 1
_ANYBODY, _PASSWORD, _NO_METHOD = 0, 2, 0xFF
_CONNECT = 1
_IPV4, _NAME, _IPV6 = 1, 3, 4
#: Bytes that a client may send before it has the answer to its request, besides the request.
_MAX_EARLY = 64 << 10


class SocksError(Malformed):
    """Not SOCKS5, or a request that is not served."""


class Send(msgspec.Struct, frozen=True, gc=False):
    """Bytes for the client; the conversation goes on."""

    data: bytes


class Connect(msgspec.Struct, frozen=True, gc=False):
    """The request. It is for the caller to decide, and to send ``answer(...)``.

    ``host`` is a name as ``policy.hosts`` spells it, or an address as ``ipaddress`` writes it if
    ``is_address``.
    """

    host: str
    port: int
    is_address: bool


class Refusal(msgspec.Struct, frozen=True):
    """The conversation is over: send ``data`` (it may be empty), then close."""

    data: bytes
    error: SocksError


class Socks5:
    """One conversation. After a ``Connect`` or a ``Refusal`` nothing is read any more."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._step: Callable[[], Send | Connect | Refusal | None] = self._greeting
        self._over = False

    @property
    def leftover(self) -> bytes:
        """What came behind the request: the client's first bytes for the host, in a hurry."""
        return bytes(self._held)

    def receive(self, data: bytes) -> list[Send | Connect | Refusal]:
        """Take bytes of the client: what is to be done now, in order. Raises nothing, whatever they are."""
        self._held += data
        if self._over:
            if len(self._held) <= _MAX_EARLY:
                return []
            self._held.clear()
            error = SocksError("socks-early", "a SOCKS client sends much before it has an answer")
            return [Refusal(answer(FAILED), error)]
        done: list[Send | Connect | Refusal] = []
        while not self._over:
            try:
                event = self._step()
            except SocksError as error:
                event = Refusal(b"", error)
            if event is None:
                break
            self._over = not isinstance(event, Send)
            done.append(event)
        return done

    def _take(self, count: int) -> bytes | None:
        """The next ``count`` bytes, or None as long as they are not there."""
        if len(self._held) < count:
            return None
        taken = bytes(self._held[:count])
        del self._held[:count]
        return taken

    def _greeting(self) -> Send | Refusal | None:
        """Version and the ways to prove who one is."""
        held = self._held
        if held and held[0] == _SOCKS4:
            # 91, rejected, in the form of version 4: that client waits for it.
            error = SocksError("socks-version-4", "the proxy speaks SOCKS5, not SOCKS4")
            return Refusal(b"\x00\x5b" + bytes(6), error)
        if held and held[0] != _VERSION:
            raise SocksError("socks-version", "the stream is not SOCKS5")
        if len(held) < 2:
            return None
        greeting = self._take(2 + held[1])
        if greeting is None:
            return None
        methods = greeting[2:]
        if _ANYBODY in methods:
            self._step = self._request
            return Send(bytes((_VERSION, _ANYBODY)))
        if _PASSWORD in methods:
            self._step = self._login
            return Send(bytes((_VERSION, _PASSWORD)))
        error = SocksError("socks-method", "a SOCKS client insists on a way of logging in that is not there")
        return Refusal(bytes((_VERSION, _NO_METHOD)), error)

    def _login(self) -> Send | Refusal | None:
        """User name and password (RFC 1929); any will do."""
        held = self._held
        if held and held[0] != _PASSWORD_VERSION:
            raise SocksError("socks-login", "a SOCKS login has an unknown version")
        if len(held) < 2 or len(held) < 3 + held[1]:
            return None
        if self._take(3 + held[1] + held[2 + held[1]]) is None:
            return None
        self._step = self._request
        return Send(bytes((_PASSWORD_VERSION, 0)))

    def _request(self) -> Connect | Refusal | None:
        """Command, address and port. Read to its end before anything is said about it."""
        held = self._held
        if held and held[0] != _VERSION:
            raise SocksError("socks-version", "a SOCKS request has another version than its greeting")
        if len(held) < 5:
            return None
        kind = held[3]
        size = {_IPV4: 4, _IPV6: 16, _NAME: 1 + held[4]}.get(kind)
        if size is None:
            error = SocksError("socks-address-type", "a SOCKS request has an unknown type of address")
            return Refusal(answer(_NO_SUCH_ADDRESS), error)
        request = self._take(4 + size + 2)
        if request is None:
            return None
        if request[1] != _CONNECT:
            error = SocksError("socks-command", "only CONNECT is there: no BIND, and no UDP")
            return Refusal(answer(_NO_SUCH_COMMAND), error)
        port = int.from_bytes(request[-2:], "big")
        if request[2] != 0 or port == 0:
            error = SocksError("socks-request", "a SOCKS request has port 0, or a reserved byte in use")
            return Refusal(answer(FAILED), error)
        where = request[4:-2]
        if kind != _NAME:
            return Connect(str(ipaddress.ip_address(where)), port, is_address=True)
        try:
            text = where[1:].decode("ascii")
            address = hosts.address(text)
            name = hosts.normalise(text) if address is None else str(address)
        except UnicodeDecodeError:
            error = SocksError("socks-name", "a name in a SOCKS request is not ASCII")
            return Refusal(answer(NOT_ALLOWED), error)
        except ValueError as wrong:
            return Refusal(answer(NOT_ALLOWED), SocksError("socks-name", str(wrong)))
        return Connect(name, port, is_address=address is not None)


def answer(code: int) -> bytes:
    """The answer to a request. The address in it is all zeros: which one was used is nobody's business
    inside."""
    return bytes((_VERSION, code, 0, _IPV4)) + bytes(6)


def looks_like_socks(first_bytes: bytes) -> bool:
    """Whether a stream begins like SOCKS, of either version: both are answered by ``Socks5``."""
    return first_bytes[:1] in (b"\4", b"\5")
