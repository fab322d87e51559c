"""HTTP/1 through the gate: each request is read, judged, and written anew for the host; each answer likewise.

The same for plain HTTP and for what comes out of intercepted TLS. Both sides are spoken by h11, so what one
side reads is what the other side wrote. Bodies are passed on piece by piece, each after the one before was
taken.

Refusals are answers of 403 (400 and the like for what is no HTTP, 502 where the host fails) that name the
host, the reason and the policy line that would allow it; the connection ends with them. Events are
``request`` for each request and ``credential`` for placeholders: which were filled, which went where they do
not belong.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Protocol

import h11

from casemate.egress import upstream
from casemate.egress.credentials import Book
from casemate.egress.errors import Refused
from casemate.egress.exchange import LIMITS, Broken, Exchange, Failed, Gone, Limits, Peer
from casemate.egress.httphead import check_overrides, host_text, is_crowded, read_request, values
from casemate.egress.streams import linger

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from casemate.egress.decide import Decider
    from casemate.egress.httphead import Fields, Head
    from casemate.egress.streams import Stream

__all__ = ["LIMITS", "Limits", "Target", "serve_stream"]

_HEAD_PIECE = 16 << 10
_SAFE = ("GET", "HEAD", "OPTIONS")
_SHOWN = 300
_TITLES = {
    400: b"Bad Request",
    403: b"Forbidden",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    501: b"Not Implemented",
    502: b"Bad Gateway",
    504: b"Gateway Timeout",
}
_LOST = (Broken, Gone, OSError, TimeoutError, h11.ProtocolError)


class Target(Protocol):
    """What the gate knows of a connection. ``sent`` and ``received`` count bytes as the sandbox sees them."""

    sent: int
    received: int

    @property
    def name(self) -> str:
        """The decided host: a name as ``policy.hosts`` spells it, or an address."""
        ...

    @property
    def port(self) -> int:
        """The port that was asked for."""
        ...

    @property
    def tls(self) -> bool:
        """Whether the host is to be spoken to by TLS."""
        ...

    @property
    def once(self) -> bool:
        """Whether the connection ends after one request: a proxy's client may want another host next."""
        ...

    @property
    def decider(self) -> Decider:
        """The policy as it stands now."""
        ...

    @property
    def secrets(self) -> Mapping[str, str]:
        """Values of credentials, by name."""
        ...

    @property
    def placeholders(self) -> Mapping[str, str]:
        """What the sandbox sees in their place."""
        ...

    async def dial(self) -> socket.socket:
        """A connected, checked, non-blocking socket. Raises Refused, OSError, TimeoutError."""
        ...

    def event(self, kind: str, **fields: object) -> None:
        """Tell of a decision."""
        ...


async def serve_stream(stream: Stream, target: Target, *, limits: Limits = LIMITS, trust: str = "") -> None:
    """Serve a connection to its end, and close it. Raises nothing but cancellation.

    ``trust`` is a file of authorities for the host's certificate; without it those that this machine trusts
    count.
    """
    await _Flow(stream, target, limits, trust).run()


class _Flow:
    """One client's connection."""

    def __init__(self, stream: Stream, target: Target, limits: Limits, trust: str) -> None:
        self._target, self._limits, self._trust = target, limits, trust
        self._client = Peer(stream, h11.SERVER, limits.head_bytes)
        self._host: Peer | None = None
        self._book: Book | None = None
        self._decider: Decider | None = None
        self._filled: set[str] = set()

    async def run(self) -> None:
        """Serve to the end. Raises nothing but cancellation."""
        stream = self._client.stream
        try:
            while await self._one():
                pass
            if self._client.written:
                await linger(stream)
            stream.close()
        except _LOST:
            stream.abort()
        except BaseException:
            stream.abort()
            raise
        finally:
            self._drop()
            self._target.sent += self._client.read
            self._target.received += self._client.written

    def _drop(self) -> None:
        if self._host is not None:
            self._host.stream.close()
            self._host = None

    # ------------------------------------------------------------ one request

    async def _one(self) -> bool:
        """Serve one request; returns whether another may follow."""
        try:
            request = await self._request()
        except h11.RemoteProtocolError as error:
            self._target.event("request", verdict="deny", reason="no-http")
            await self._refuse(error.error_status_hint, "no-http", "this is not a request of HTTP/1.1")
            return False
        except TimeoutError:
            if self._client.http.trailing_data[0]:
                self._target.event("request", verdict="deny", reason="slow-head")
                await self._refuse(408, "slow-head", "the head of a request did not come in time")
            return False
        if request is None:
            return False
        began = time.monotonic()
        what = f"{_cut(request.method.decode('ascii'))} {_shown(request.target)}"
        try:
            rule, status, more = await self._serve(request)
        except Refused as refused:
            self._target.event("request", verdict="deny", rule=refused.rule, reason=refused.code,
                               allow=refused.allow, detail=what)  # fmt: skip
            status = 502 if refused.code in ("certificate", "host-tls") else 403
            await self._refuse(status, refused.code, str(refused), allow=refused.allow, method=request.method)
            return False
        except Failed as failed:
            if failed.retry:
                raise Gone from None  # as if the client's own connection had been closed between two requests
            self._target.event("request", verdict="deny", reason=failed.code, detail=what)
            text = f"{self._target.name} could not be asked: {failed}"
            await self._refuse(failed.status, failed.code, text, method=request.method)
            return False
        except Broken as broken:
            self._target.event("request", verdict="deny", reason="cut", detail=f"{what}: {broken}")
            raise
        ms = round((time.monotonic() - began) * 1e3, 3)
        self._target.event("request", verdict="allow", rule=rule, detail=f"{what} {status}", ms=ms)
        return more

    async def _request(self) -> h11.Request | None:
        """The next request's head, None at the end. Raises h11.RemoteProtocolError, TimeoutError, OSError."""
        http = self._client.http
        begun = bool(http.trailing_data[0])
        async with asyncio.timeout(self._limits.head if begun else self._limits.idle) as timer:
            while True:
                if is_crowded(http.trailing_data[0]):
                    raise h11.RemoteProtocolError("too many header fields", error_status_hint=431)
                event = http.next_event()
                if isinstance(event, h11.Request):
                    return event
                if isinstance(event, h11.ConnectionClosed):
                    return None
                if await self._client.fill(_HEAD_PIECE) and not begun:
                    begun = True
                    timer.reschedule(asyncio.get_running_loop().time() + self._limits.head)

    async def _serve(self, request: h11.Request) -> tuple[str, int, bool]:
        """The rule that let a request pass, the answer's status, and whether the connection can go on."""
        target = self._target
        head = read_request(request, target.name, target.port, tls=target.tls)
        rule = self._permit(head)
        outgoing = self._outgoing(head)
        bare = not values(head.fields, b"transfer-encoding") and not any(
            int(length) for length in values(head.fields, b"content-length")
        )
        while True:
            host = await self._connected()
            exchange = Exchange(
                self._client, host, head, self._credentials(), limits=self._limits, last=target.once
            )
            try:
                await exchange.run(outgoing, bare=bare)
                break
            except Failed as failed:
                self._drop()
                if not (failed.retry and bare and head.method in _SAFE):
                    raise
            finally:
                self._tell_astray(exchange.in_body, "placeholder-in-body")
        if exchange.switched:
            await exchange.tunnel()
            return rule, exchange.status, False
        if not host.next_cycle():
            self._drop()
        return rule, exchange.status, self._client.next_cycle()

    def _permit(self, head: Head) -> str:
        """Returns the rule that lets a request pass; raises Refused where none does."""
        path = "/" if head.target == b"*" else head.target.decode("latin-1")
        decision = self._target.decider.request(self._target.name, head.method, path)
        if decision.verdict != "allow":
            what = f"{_cut(head.method)} {_shown(head.target)}"
            raise Refused(
                decision.reason,
                f"{what} is not among the requests that {self._target.name} may get",
                rule=decision.rule,
                allow=decision.allow_line,
            )
        if decision.rule != "default":
            check_overrides(head.fields)
        return decision.rule

    # ------------------------------------------------------------ towards the host

    async def _connected(self) -> Peer:
        """The connection of the last request if it is still good, else a new one."""
        if self._host is not None and self._host.stream.stale():
            self._drop()
        if self._host is None:
            try:
                stream = await upstream.connect(self._target, self._trust)
            except TimeoutError:
                raise Failed(504, "no-connection", "it did not take the connection in time") from None
            except OSError as error:
                # Not its own text, which may hold the address that was dialled.
                why = os.strerror(error.errno) if error.errno and error.errno > 0 else type(error).__name__
                raise Failed(502, "no-connection", why) from None
            self._host = Peer(stream, h11.CLIENT, self._limits.head_bytes)
        return self._host

    def _credentials(self) -> Book:
        """The credentials that count here, by the policy as it stands now."""
        target, decider = self._target, self._target.decider
        if self._book is None or self._decider is not decider:
            self._decider = decider
            # Without TLS only where the policy says http:// of this very host.
            plain = decider.connect(target.name, target.port, "http").rule.startswith("http://")
            self._book = Book(
                target.name,
                decider.credentials_for(target.name),
                target.secrets,
                target.placeholders,
                trusted=target.tls or plain,
            )
        return self._book

    def _outgoing(self, head: Head) -> h11.Request:
        """The request as the host gets it. Raises Refused."""
        target, book = self._target, self._credentials()
        host = host_text(target.name, target.port, tls=target.tls)
        fields: Fields = [(b"Host", host.encode()), *head.fields]
        if book:
            # An answer must be readable to be kept free of values, and whole: else one could be asked for in
            # halves.
            fields = [(name, value) for name, value in fields if not _asks_for_less(name.lower())]
            fields.append((b"Accept-Encoding", b"identity"))
        filled = book.fill(head.target, fields)
        for name in filled.used:
            if name not in self._filled:  # once for a connection
                self._filled.add(name)
                target.event("credential", verdict="allow", reason="filled", detail=name)
        self._tell_astray(filled.astray, "placeholder-astray")
        try:
            return h11.Request(method=head.method, target=filled.target, headers=filled.headers)
        except h11.LocalProtocolError:
            # Its text may hold a value.
            raise Refused("no-http", "a request cannot be passed on as it is") from None

    def _tell_astray(self, names: tuple[str, ...], reason: str) -> None:
        """Placeholders that stay what they are: whoever wonders why a login fails can read it."""
        book = self._credentials()
        for name in names:
            if reason == "placeholder-astray" and book.belongs(name):
                reason = "placeholder-misplaced"
            self._target.event("credential", verdict="deny", reason=reason, detail=name)

    # ------------------------------------------------------------ refusals

    async def _refuse(
        self, status: int, code: str, text: str, *, allow: str = "", method: bytes = b"GET"
    ) -> None:
        """Answer in the gate's own name, and end the connection. Raises OSError, h11.LocalProtocolError."""
        client = self._client
        lines = f"casemate: {text}\n" + (f"The policy line that allows it: {allow}\n" if allow else "")
        body = lines.encode("utf-8", "replace")
        fields = [
            (b"Content-Type", b"text/plain; charset=utf-8"),
            (b"Content-Length", b"%d" % len(body)),
            (b"Connection", b"close"),
            (b"X-Casemate-Refused", code.encode()),
        ]
        answer = client.http.send(
            h11.Response(status_code=status, headers=fields, reason=_TITLES.get(status, b"Refused"))
        )
        if method != b"HEAD":
            answer += client.http.send(h11.Data(body))
        answer += client.http.send(h11.EndOfMessage())
        async with asyncio.timeout(self._limits.head):
            await client.write(answer)


def _shown(target: bytes) -> str:
    """A target as an event and an answer show it: without its query, which may hold anything."""
    return _cut(target.partition(b"?")[0].decode("latin-1"))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _asks_for_less(name: bytes) -> bool:
    """Whether a field asks for another form of the answer, or parts: ranges go by several names."""
    if name in (b"accept-encoding", b"sec-websocket-extensions"):
        return True
    return name.endswith(b"range") and name != b"content-range"
