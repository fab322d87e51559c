"""One connection from inside a sandbox: which host it is for, whether it may go there, and the way it takes.

The host is known before a byte is read: the address that was dialled stands for a name (or is one that a
rule names itself). What the client then says of the host (SNI, ``Host``) has to agree with it. Nothing is
taken from the socket while it is looked at, so whoever serves the connection in the end finds it whole.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from contextlib import suppress

from casemate.egress import clienthello, sshreply
from casemate.egress.classify import HTTP, OTHER, TLS, UNDECIDED, classify
from casemate.egress.clienthello import HelloError
from casemate.egress.errors import Refused
from casemate.egress.events import Event
from casemate.egress.peek import look, peek, readable, stopped
from casemate.egress.relay import Relay

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from casemate.egress.clienthello import Hello
    from casemate.egress.decide import Decider, Decision
    from casemate.egress.gate import Gate

__all__ = ["Connection", "refuse_plainly"]

#: Seconds for a client to say what it wants where it has to speak first.
HELLO_SECONDS = 15.0
_REFUSAL_LOOK = 0.15
_PROTOCOLS = ("http", "https", "tcp")


class Connection:
    """Serves one accepted socket, non-blocking, that was dialled as ``host``:``port``.

    ``host`` is a name as ``policy.hosts`` spells it, or an address. It is what ``httpflow`` calls a target.
    """

    def __init__(
        self, gate: Gate, endpoint: socket.socket, host: str, port: int, *, once: bool = False
    ) -> None:
        self.gate = gate
        self.endpoint = endpoint
        self.host, self.port = host, port
        self.once = once  # of a proxy's client: each request may be for another host, so one connection each
        self.protocol = "tcp"
        self.settled = False  # the protocol is known, and by it whether the host may be reached
        self.rule = ""
        self.address = ""
        self.tls = False
        self.sent = self.received = 0
        self.approved = False
        self._upstream: socket.socket | None = None
        self._began = time.monotonic()

    # -- as a target of httpflow -----------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The decided host."""
        return self.host

    @property
    def decider(self) -> Decider:
        """The policy as it stands now."""
        return self.gate.decider

    @property
    def secrets(self) -> Mapping[str, str]:
        """Values of credentials, by name."""
        return self.gate.secrets

    @property
    def placeholders(self) -> Mapping[str, str]:
        """What the sandbox sees in their place."""
        return self.gate.placeholders

    async def dial(self) -> socket.socket:
        """A socket to the host, at an address that was checked; non-blocking. Raises Refused."""
        if self._upstream is not None:
            ready, self._upstream = self._upstream, None
            return ready
        return await self._dial()

    def event(self, kind: str, **fields: object) -> None:
        """Tell of a decision inside of this connection."""
        known: dict[str, object] = {"host": self.host, "port": self.port, "protocol": self.protocol}
        self.gate.tell(known | {"kind": kind} | fields)

    # -- the way of a connection -----------------------------------------------------------------------

    async def serve(self) -> None:
        """Serve it to the end; closes the socket. Raises nothing but cancellation."""
        try:
            await self._serve()
        except Refused as refused:
            self._tell_refused(refused)
            await refuse_plainly(self.endpoint, self.protocol, self.port, refused)
        except HelloError as error:
            wrong = Refused(error.code, str(error))
            self._tell_refused(wrong)
            await refuse_plainly(self.endpoint, "https", self.port, wrong)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # one of the two sides has gone
        finally:
            if self._upstream is not None:
                self._upstream.close()
            self.endpoint.close()
            self._tell_end()

    async def _serve(self) -> None:
        decisions = {word: self.decider.connect(self.host, self.port, word) for word in _PROTOCOLS}
        same = len({(found.verdict, found.rule) for found in decisions.values()}) == 1
        if all(found.verdict == "deny" for found in decisions.values()):
            await self._permitted()  # whatever it turns out to be: nobody is kept waiting for a refusal
        allowed = same and decisions["tcp"].verdict == "allow"
        if allowed and decisions["tcp"].rule.startswith("tcp://") and not self.decider.intercept(
            self.host, self.port
        ):  # fmt: skip
            # Nothing that is said makes a difference, so nothing is waited for.
            await self._pass_on(await self._permitted(), b"", intercepted=False)
            return
        early: asyncio.Task[socket.socket] | None = None
        try:
            data = look(self.endpoint)
            if data is None:
                if allowed:
                    # While the client says hello the way is made; an HTTP flow may find it of use as well.
                    early = asyncio.get_running_loop().create_task(self._dial())
                data = await self._first_words(early, must_speak=self.port in (80, 443) or not same)
            self.protocol, data = await self._what(data)
            decision = await self._permitted()
            if early is not None:
                self._upstream, early = await early, None
            # By the policy of this moment: it may have changed while the client, or a person, was waited for.
            intercepted = self.decider.intercept(self.host, self.port)
            await self._pass_on(decision, data, intercepted=intercepted)
        finally:
            if early is not None:
                early.cancel()
                early.add_done_callback(_dropped)

    async def _what(self, data: bytes, *, server_spoke: bool = False) -> tuple[str, bytes]:
        """What a stream is, with as much of it as that takes. Raises Refused where it stays open."""
        found = classify(data, server_spoke=server_spoke) if data else OTHER
        if found != UNDECIDED:
            return found, data
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                while found == UNDECIDED:
                    more = await peek(self.endpoint, len(data) + 1)
                    if len(more) <= len(data):
                        return OTHER, data  # nothing comes after it: no server takes that for a request
                    data = more
                    found = classify(data, server_spoke=server_spoke)
        except TimeoutError:
            why = "what is sent may be the beginning of a request; write tcp:// in the rule if it is none"
            raise Refused("undecided", why) from None
        return found, data

    async def _first_words(self, early: asyncio.Task[socket.socket] | None, *, must_speak: bool) -> bytes:
        """The client's first bytes; empty if it waits for the server to speak."""
        loop = asyncio.get_running_loop()
        if must_speak or early is None:
            async with asyncio.timeout(HELLO_SECONDS):
                return await peek(self.endpoint)
        look = loop.create_task(peek(self.endpoint))
        try:
            await asyncio.wait({look, early}, return_when=asyncio.FIRST_COMPLETED)
            if look.done():
                return look.result()
            # The way is there and the client is silent: whoever speaks first settles it.
            upstream = await asyncio.shield(early)
            server = loop.create_task(readable(upstream))
            try:
                await asyncio.wait({look, server}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await stopped(server)
            return look.result() if look.done() else b""
        finally:
            await stopped(look)

    def judged(self) -> Decision | None:
        """What the policy as it stands now has against this connection, None where that is nothing.

        What a reviewer approved needs no rule; what is denied stays denied.
        """
        decision = self.decider.connect(self.host, self.port, self.protocol if self.settled else "")
        if (there := self._judged_address()) is not None:
            return there
        if decision.verdict == "allow" or (decision.reason == "not-listed" and self.approved):
            if self.protocol != "https" or self.tls or not self.settled:
                return None
            # What nobody looks into is a stream like any other: rules about requests do not go with it.
            opaque = self.decider.connect(self.host, self.port, "tcp")
            return opaque if opaque.reason == "requests" else None
        return decision if self.settled or decision.verdict == "deny" else None

    def _judged_address(self) -> Decision | None:
        """What the policy as it stands now has against the address that was dialled."""
        if not self.address or self.gate.network.parent_proxy is not None:
            return None
        decision = self.decider.address(self.host, self.address, self.port)
        return None if decision.verdict == "allow" else decision

    async def _permitted(self) -> Decision:
        """The decision, if need be the reviewer's. Raises Refused."""
        decision = self.decider.connect(self.host, self.port, self.protocol)
        if decision.verdict == "ask":
            line = decision.allow_line
            if not await self.gate.ask(self.host, self.port, self.protocol):
                raise Refused("not-approved", f"nobody approved {self.host}:{self.port}", allow=line)
            self.approved = True
            decision = self.decider.connect(self.host, self.port, self.protocol)
        self.settled = True
        if decision.verdict != "allow" and not (self.approved and decision.reason == "not-listed"):
            raise Refused(
                decision.reason,
                f"{self.host}:{self.port} is not allowed by the sandbox's policy",
                allow=decision.allow_line,
                rule=decision.rule,
            )
        self.rule = decision.rule
        return decision

    async def _pass_on(self, decision: Decision, data: bytes, *, intercepted: bool) -> None:
        if decision.rule.startswith("tcp://") and not intercepted:
            await self._relay()
        elif self.protocol == "https":
            hello = await self._hello()
            self._check_hello(hello)
            if intercepted:
                self.tls = True
                await self._intercept(hello)
            else:
                await self._relay_tls(hello)
        elif self.protocol == "http":
            if data.startswith(b"PRI "):
                raise Refused("http2-plain", "HTTP/2 without TLS is not spoken here")
            await self._http()
        elif self.port == 80 and data:
            why = "what is sent to port 80 has to be HTTP; write tcp:// in the rule for something else"
            raise Refused("not-http", why)
        else:
            await self._relay(before=None if data else self._late_words)

    async def _hello(self, *, again: bool = False) -> Hello:
        """The whole ClientHello, still unread; ``again`` for a second one."""
        least = 1
        async with asyncio.timeout(HELLO_SECONDS):
            while True:
                data = await peek(self.endpoint, least)
                found = clienthello.parse(data, again=again)
                if not isinstance(found, clienthello.Incomplete):
                    return found
                if len(data) < least:
                    raise HelloError("tls-cut", "a ClientHello ends before it is whole")
                least = max(found.needed, len(data) + 1)

    def _check_hello(self, hello: Hello) -> None:
        """The name that a client gives must be the one that was decided. Raises Refused."""
        name = hello.server_name
        if name is None or name == self.host:
            return
        if self.gate.is_name(self.host):
            raise Refused("sni-differs", f"a connection to {self.host} asks for {name} inside of TLS")
        denied = self.decider.connect(name, self.port, "https")
        if denied.reason == "denied":
            raise Refused("denied", f"{name} is denied", rule=denied.rule)

    async def _relay_tls(self, hello: Hello) -> None:
        """Relay TLS that is not looked into. A server may ask for a second hello (RFC 8446, 4.1.4), and some
        go by the name in that one: it is checked like the first.
        """
        if self._upstream is None:
            self._upstream = await self._dial()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(HELLO_SECONDS):
            first = self.endpoint.recv(hello.size)
            await loop.sock_sendall(self._upstream, first)
            self.sent += len(first)
            data, again = b"", None
            while again is None:
                more = await peek(self._upstream, len(data) + 1)
                if len(more) <= len(data):
                    break  # the server has ended: what it said goes to the client as it is
                data = more
                again = clienthello.asks_again(data)
        await self._relay(before=self._second_hello if again else None)

    async def _second_hello(self) -> None:
        self._check_hello(await self._hello(again=True))

    async def _relay(self, *, before: Callable[[], Awaitable[None]] | None = None) -> None:
        if self._upstream is None:
            self._upstream = await self._dial()
        relay = Relay(self.endpoint, self._upstream)
        try:
            await relay.run(before)
        finally:
            self.sent += relay.up
            self.received += relay.down

    async def _late_words(self) -> None:
        """What a client says after the server has spoken: if that is TLS, for the decided name."""
        found, _ = await self._what(await peek(self.endpoint), server_spoke=True)
        if found == TLS:
            self.protocol = TLS
            self._check_hello(await self._hello())
        elif found == HTTP:
            raise Refused("http-late", "an HTTP request comes after the server has spoken")

    async def _http(self) -> None:
        from casemate.egress.httpflow import serve_stream
        from casemate.egress.streams import SocketStream

        await serve_stream(SocketStream(self._take_endpoint()), self)

    async def _intercept(self, hello: Hello) -> None:
        from casemate.egress.intercept import intercept

        authority = self.gate.authority
        if authority is None:
            raise Refused("no-authority", "this sandbox has no certificate authority")
        await intercept(self._take_endpoint(), hello.server_name, self, authority)

    def _take_endpoint(self) -> socket.socket:
        """Give the socket to a transport, which closes it; a copy stays, for refusals and for revoking."""
        given = self.endpoint
        self.endpoint = given.dup()
        self.endpoint.setblocking(False)
        return given

    # -- outside ---------------------------------------------------------------------------------------

    async def _dial(self) -> socket.socket:
        made, self.address = await self.gate.dial(self.host, self.port)
        if (decision := self._judged_address()) is not None:  # changed while it was connected to
            made.close()
            raise Refused(
                decision.reason,
                f"{self.host} is at {self.address}, which the sandbox may not reach",
                rule=decision.rule,
                allow=decision.allow_line,
            )
        return made

    def abort(self) -> None:
        """Cut it at once: it is not allowed any more."""
        for endpoint in (self.endpoint, self._upstream):
            if endpoint is not None:
                with suppress(OSError):
                    endpoint.shutdown(socket.SHUT_RDWR)

    def _tell_refused(self, refused: Refused) -> None:
        self.gate.tell(
            {
                "kind": "connect",
                "verdict": "deny",
                "host": self.host,
                "port": self.port,
                "protocol": self.protocol,
                "rule": refused.rule,
                "reason": refused.code,
                "allow": refused.allow,
                "detail": str(refused),
            }
        )

    def _tell_end(self) -> None:
        if not self.address:
            return
        self.gate.tell_event(
            Event(
                kind="connect",
                verdict="allow",
                host=self.host,
                port=self.port,
                address=self.address,
                protocol=self.protocol,
                rule=self.rule,
                sent=self.sent,
                received=self.received,
                ms=round((time.monotonic() - self._began) * 1e3, 3),
                time_ns=time.time_ns(),
            )
        )


def _dropped(dialled: asyncio.Task[socket.socket]) -> None:
    """Close what a dialling that nobody waits for any more has come to."""
    if not dialled.cancelled() and dialled.exception() is None:
        dialled.result().close()


async def refuse_plainly(endpoint: socket.socket, protocol: str, port: int, refused: Refused) -> None:
    """End a connection in the way that its client can show to a person, if there is one; else by a reset."""
    text = f"casemate: {refused}"
    if refused.allow:
        text += f"; the policy line that allows it: {refused.allow}"
    last = b""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_REFUSAL_LOOK):
            first = await peek(endpoint) if protocol == "tcp" else b""
            if protocol == "tcp":
                protocol = classify(first) or OTHER
            if sshreply.looks_like_ssh(first):
                protocol = "ssh"
    if protocol == "ssh" or (protocol == "tcp" and port == 22):
        last = sshreply.refusal(text)
    elif protocol == "https":
        last = clienthello.alert(clienthello.FATAL, clienthello.ACCESS_DENIED)
    elif protocol == "http":
        body = f"{text}\n".encode("utf-8", "replace")
        last = b"HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n"
        last += f"X-Casemate-Refused: {refused.code}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    if last:
        await _say_and_close(endpoint, last)
    else:
        with suppress(OSError):
            endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def _say_and_close(endpoint: socket.socket, last: bytes) -> None:
    """Send a last word and wait a moment for the client's end: what it has sent and nobody read would turn
    the close into a reset, which takes the last word away.
    """
    with suppress(OSError, TimeoutError):
        endpoint.send(last)
        endpoint.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(1.0):
            left = 1 << 20
            while left > 0:
                await readable(endpoint)
                data = endpoint.recv(65536)
                if not data:
                    return
                left -= len(data)
