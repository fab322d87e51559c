"""The gate of one sandbox: its listeners, its names, its connections, its policy as it stands now.

Who is asking is known from the listener that a connection came to, and from nothing that was said on it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from contextlib import suppress

import msgspec

from casemate.egress.acceptor import Acceptor
from casemate.egress.agent import AgentFilter
from casemate.egress.answers import Answers
from casemate.egress.connection import Connection
from casemate.egress.decide import Decider
from casemate.egress.errors import Refused
from casemate.egress.events import Event, Log
from casemate.egress.handed import Handed
from casemate.egress.inbound import Inbound
from casemate.egress.names import Names, is_synthetic
from casemate.egress.peek import writable
from casemate.egress.proxy import serve_proxy
from casemate.egress.questions import Questions
from casemate.egress.resolver import Lookups
from casemate.policy import hosts
from casemate.policy.rules import HOST_NAME
from casemate.sys.capture import DNS_PORT, connected_to

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from casemate.egress.intercept import Authority
    from casemate.egress.resolver import Resolver
    from casemate.policy.model import Network

__all__ = ["MOST_CONNECTIONS", "Gate"]

#: Connections that one sandbox may have at a time; the next ones are reset.
MOST_CONNECTIONS = 1024
_DIAL_SECONDS = 20.0
_NEXT_ADDRESS_SECONDS = 4.0
_OWN_SECONDS = 5.0
_MOST_TEXT = 500
_RESET = struct.pack("ii", 1, 0)


class Gate:
    """Takes the listeners of one sandbox and serves them until ``close``.

    ``send`` takes messages for the front end, ``own`` gives the host's own addresses. ``secrets`` and
    ``placeholders`` are the credentials by name.
    """

    def __init__(
        self,
        number: int,
        network: Network,
        resolver: Resolver,
        send: Callable[[dict[str, object]], None],
        *,
        own: Callable[[], frozenset[str]],
        secrets: Mapping[str, str],
        placeholders: Mapping[str, str],
        authority: Authority | None,
        approved: Sequence[str] = (),
    ) -> None:
        self.number = number
        self.network = network
        self.secrets, self.placeholders = secrets, placeholders
        self.authority = authority
        self.names = Names()
        self.log = Log()
        self.inbound = Inbound(self._ask_for_socket, self.tell)
        self._agent: AgentFilter | None = None
        self.agents = Handed(self._ask_for_agent, "the ssh agent cannot be reached")
        self._approved: set[str] = {*approved}
        self._look_at_own, self._own, self._own_since = own, own(), time.monotonic()
        self.decider = Decider(network, own=self._own, approved=self._approved)
        self._resolver = Lookups(resolver)
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._acceptors: list[Acceptor] = []
        self._answers: Answers | None = None
        self._connections: dict[asyncio.Task[None], Connection | None] = {}
        self._questions = Questions(self._put_question)

    def begin(self, udp: int, tcp: list[int]) -> None:
        """Serve these descriptors, which are the gate's from now on."""
        self._answers = Answers(self, socket.socket(fileno=udp))
        for descriptor in tcp:
            self._acceptors.append(Acceptor(socket.socket(fileno=descriptor), self._accepted))

    def close(self) -> dict[str, int]:
        """Cut everything; returns the totals."""
        for acceptor in self._acceptors:
            acceptor.close()
        self._acceptors = []
        if self._answers is not None:
            self._answers.close()
        self.inbound.close()
        if self._agent is not None:
            self._agent.close()
        for task in [*self._connections]:
            task.cancel()
        return self.log.totals()

    async def ended(self) -> None:
        """Wait until every connection has been let go after ``close``."""
        if self._connections:
            await asyncio.wait([*self._connections])
        await self.inbound.ended()

    # -- connections -----------------------------------------------------------------------------------

    def _accepted(self, endpoint: socket.socket) -> None:
        if len(self._connections) >= MOST_CONNECTIONS:
            self._reset(endpoint)
            self.tell({"kind": "connect", "verdict": "deny", "host": "", "reason": "too-many-connections"})
            return
        task = self._loop.create_task(self._serve(endpoint))
        self._connections[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._connections.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.tell({"kind": "connect", "verdict": "deny", "host": "", "reason": "gate-error",
                       "detail": type(error).__name__})  # fmt: skip

    async def _serve(self, endpoint: socket.socket) -> None:
        """Find out what a connection is for, and serve it."""
        with endpoint:
            try:
                address, port = connected_to(endpoint)
            except OSError:
                return
            host = self.names.name(address)
            if host is None:
                known = hosts.address(address)
                if known is None or known.is_loopback:
                    self._reset(endpoint)  # loopback stays inside: somebody called the listener itself
                    return
                host = str(known)
            if port == DNS_PORT and self._answers is not None:
                await self._answers.serve_stream(endpoint)
            elif self.names.is_gate(address):
                await serve_proxy(self, endpoint)
            elif is_synthetic(host):
                self.tell({"kind": "connect", "verdict": "deny", "host": host, "port": port,
                           "reason": "unknown-address"})  # fmt: skip
                self._reset(endpoint)
            else:
                await self.serve_host(endpoint, host, port)

    async def serve_host(self, endpoint: socket.socket, host: str, port: int, *, once: bool = False) -> None:
        """Serve a connection whose host is known; closes the socket."""
        connection = Connection(self, endpoint, host, port, once=once)
        task = asyncio.current_task()
        if task in self._connections:
            self._connections[task] = connection
        await connection.serve()

    def _reset(self, endpoint: socket.socket) -> None:
        with suppress(OSError):
            endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        endpoint.close()

    # -- names and addresses ---------------------------------------------------------------------------

    def is_name(self, host: str) -> bool:
        """Whether a host is a name and not an address."""
        return hosts.address(host) is None

    def expect(self, name: str) -> None:
        """A connection to this name is likely to come."""
        if name != HOST_NAME and self.network.parent_proxy is None:
            self._resolver.expect(name)

    async def dial(self, host: str, port: int) -> tuple[socket.socket, str]:
        """Connect to a host that was allowed, at an address that is checked here. Raises Refused.

        The socket is non-blocking; the second value is the address as text.
        """
        if self.network.parent_proxy is not None:
            from casemate.egress.parent import dial_through

            return await dial_through(self.network.parent_proxy, host, port), "parent-proxy"
        last = "it has no address"
        end = self._loop.time() + _DIAL_SECONDS
        for address in await self._checked(host, port):
            try:
                until = min(end, self._loop.time() + _NEXT_ADDRESS_SECONDS)
                return await _connect(address, port, until), address
            except (OSError, TimeoutError) as error:
                last = error.strerror or "it does not answer"
            if self._loop.time() >= end:
                break
        raise Refused("unreachable", f"{host}:{port} cannot be reached: {last}")

    async def _checked(self, host: str, port: int) -> list[str]:
        """The addresses of a host that may be dialled. Raises Refused if there is none."""
        self._know_own()
        if host == HOST_NAME:
            found: tuple[str, ...] = ("127.0.0.1", "::1")
        elif not self.is_name(host):
            found = (host,)
        else:
            try:
                async with asyncio.timeout(_DIAL_SECONDS):
                    found = await self._resolver.addresses(host)
            except (OSError, TimeoutError) as error:
                raise Refused("unresolvable", f"{host} has no address: {error}") from error
        judged = [(address, self.decider.address(host, address, port)) for address in found]
        good = [address for address, decision in judged if decision.verdict == "allow"]
        if not good:
            refused = judged[0][1] if judged else None
            raise Refused(
                refused.reason if refused else "unresolvable",
                f"{host} is at {', '.join(found) or 'no address'}, which the sandbox may not reach",
                rule=refused.rule if refused else "",
                allow=refused.allow_line if refused else "",
            )
        return good

    def _know_own(self) -> None:
        """Look again, once in a while, which addresses are the host's own: they change with its network."""
        if time.monotonic() - self._own_since < _OWN_SECONDS:
            return
        self._own_since = time.monotonic()
        with suppress(OSError):
            found = self._look_at_own()
            if found != self._own:
                self._own = found
                self.decider = Decider(self.network, own=found, approved=self._approved)

    # -- policy ----------------------------------------------------------------------------------------

    def update(self, network: Network) -> None:
        """Go by another policy from now on; connections that it does not allow are cut."""
        self.network = network
        self.decider = Decider(network, own=self._own, approved=self._approved)
        for task, connection in [*self._connections.items()]:
            if connection is None:
                continue  # it will go by the new one
            decision = connection.judged()
            if decision is None:
                continue
            self.tell({"kind": "connect", "verdict": "deny", "host": connection.host, "port": connection.port,
                       "reason": "revoked", "rule": decision.rule, "allow": decision.allow_line})  # fmt: skip
            connection.abort()
            task.cancel()

    async def ask(self, host: str, port: int, protocol: str) -> bool:
        """Put the question whether a host may be reached. No answer is a no."""
        return await self._questions.ask(host, port, protocol)

    def _put_question(self, host: str, port: int, protocol: str) -> None:
        self._send({"event": "question", "id": self.number, "host": host, "port": port, "protocol": protocol})

    def answer(self, host: str, port: int, *, allow: bool, scope: str) -> None:
        """The reviewer's answer. ``once`` holds for the connections that wait; else for the whole life."""
        if not self._questions.is_open(host, port):
            return
        if allow and scope != "once":
            self._approved.add(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
            self.decider = Decider(self.network, own=self._own, approved=self._approved)
        self._questions.answer(host, port, allow=allow, again=scope == "once")

    # -- telling ---------------------------------------------------------------------------------------

    def tell(self, fields: dict[str, object]) -> None:
        """Tell of a decision."""
        known: dict[str, object] = {"verdict": "deny", "time-ns": time.time_ns()}
        for name, value in fields.items():
            # Much of it is the sandbox's own words, of any length.
            known[name.replace("_", "-")] = value[:_MOST_TEXT] if isinstance(value, str) else value
        self.tell_event(msgspec.convert(known, Event))

    def tell_event(self, event: Event) -> None:
        """Tell of a decision, unless there are too many to be of use."""
        if self.log.wants(event):
            self._send({"event": "decision", "id": self.number, "what": msgspec.to_builtins(event)})

    # -- the ssh agent ---------------------------------------------------------------------------------

    def serve_agent(self, listener: socket.socket) -> None:
        """Serve the sandbox's end of an ssh agent."""
        self._agent = AgentFilter(listener, self._connect_agent, self.tell)

    async def _connect_agent(self) -> socket.socket:
        return await self.agents.socket(_DIAL_SECONDS)

    def _ask_for_agent(self, request: int) -> None:
        """Have a connection to the agent made, for ``agents``."""
        self._send({"event": "agent", "id": self.number, "request": request})

    def _ask_for_socket(self, request: int) -> None:
        """Have a socket made inside the sandbox, for ``inbound``."""
        self._send({"event": "dial", "id": self.number, "request": request})


async def _connect(address: str, port: int, until: float) -> socket.socket:
    """A connection that is made at the loop's time ``until`` at the latest. Raises OSError, TimeoutError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    endpoint = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        endpoint.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            endpoint.connect((address, port))
        except BlockingIOError:
            async with asyncio.timeout_at(until):
                await writable(endpoint)
            if number := endpoint.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(number, os.strerror(number)) from None
    except BaseException:
        endpoint.close()
        raise
    return endpoint
