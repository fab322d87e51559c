"""The front end's side of the egress gate: the worker process, and what it has to say about one command.

``GateWorker`` is the process and its channel, ``CommandNetwork`` one command's share in it. Neither waits for
anything but where its name says so: the command line polls the channel beside its streams, the library's loop
watches it, and both call ``pump``.
"""

from __future__ import annotations

import _socket
import json
import os
import time
from contextlib import suppress

import msgspec

from casemate.errors import SandboxError
from casemate.sandbox.network import needs_authority
from casemate.sandbox.result import NetworkUse
from casemate.sandbox.seed import GateSeed, spawn
from casemate.sys import packets
from casemate.sys.plain import is_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Protocol

    from casemate.isolation.process.spec import Late
    from casemate.policy.model import Network
    from casemate.sandbox.review import Saved
    from casemate.sys.capture import Capture

    Reply = Callable[[bool, str], None]
    Reviewer = Callable[[dict[str, object], Reply], None]
    Dial = Callable[[Callable[[int], None]], None]

    class Gatekeeper(Protocol):
        """Who starts a worker when one is needed, and answers its questions."""

        def worker(self) -> GateWorker: ...

        def ask(self, question: dict[str, object], reply: Reply) -> None: ...

__all__ = ["CommandNetwork", "GateWorker", "rule_text"]

_MOST_EVENTS = 20_000
_MOST_FAULTS = 20
_SECONDS = 30.0
_LAST_SECONDS = 3.0

#: Where programs look for certificate authorities beside the system's own place.
TRUST_VARIABLES = (
    "SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "GIT_SSL_CAINFO",
    "NODE_EXTRA_CA_CERTS", "CARGO_HTTP_CAINFO", "NPM_CONFIG_CAFILE", "AWS_CA_BUNDLE", "NIX_SSL_CERT_FILE",
    "DENO_CERT", "BUNDLE_SSL_CA_CERT", "HTTPLIB2_CA_CERTS", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
)  # fmt: skip
_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/cert.pem")
_BUNDLE = ".casemate/ca-bundle.pem"
_AGENT = ".casemate/ssh-agent"


class GateWorker:
    """The process, and a channel to it. ``fileno`` is readable when ``pump`` has something to do."""

    def __init__(self, seed: GateSeed | None = None) -> None:
        self._socket, self._pid = spawn() if seed is None else seed.grow()
        self._number = 0
        self._shares: dict[int, CommandNetwork] = {}
        self.lost = False  # it has ended: nothing can be said any more
        self.over = False  # and all that it had said by then has been taken
        self.faults: list[str] = []  # errors in it that nobody has expected: kind and place

    @property
    def pid(self) -> int:
        """The process."""
        return self._pid

    @property
    def shares(self) -> int:
        """How many commands it serves."""
        return len(self._shares)

    def fileno(self) -> int:
        """The channel, for poll."""
        return self._socket.fileno()

    def open(
        self,
        network: Network,
        secrets: Mapping[str, str],
        dial: Dial,
        review: Reviewer | None,
        saved: Saved | None = None,
    ) -> CommandNetwork:
        """A share for one command.

        ``dial`` makes a socket inside its sandbox and calls back with it, or with -1; ``review`` answers
        questions, and calls back too.

        Raises SandboxError when the worker is gone.
        """
        self._number += 1
        share = CommandNetwork(self, self._number, network, secrets, dial, review, saved)
        self._shares[self._number] = share
        return share

    def forget(self, number: int) -> None:
        """A share is over."""
        self._shares.pop(number, None)

    def say(self, message: dict[str, object], descriptors: list[int] | None = None) -> None:
        """Tell the worker something. Raises SandboxError (``gate-lost``)."""
        try:
            packets.send(self._socket, json.dumps(message, separators=(",", ":")).encode(), descriptors)
        except OSError as error:
            self.lost = True
            with suppress(OSError):  # it ends: what it was not told may be a narrower policy
                self._socket.shutdown(_socket.SHUT_RDWR)
            raise SandboxError(f"the egress gate has ended: {error}", code="gate-lost") from error

    def pump(self) -> None:
        """Take everything that the worker has said by now; never waits."""
        while not self.over and packets.readable(self._socket.fileno()):
            self._take()

    def wait(self, done: Callable[[], bool]) -> bool:
        """Pump until ``done``; False if the worker is lost or too slow."""
        end = time.monotonic() + _SECONDS
        while not done() and not self.over and (left := end - time.monotonic()) > 0:
            if packets.readable(self._socket.fileno(), left):
                self._take()
        return done()

    def _take(self) -> None:
        try:
            payload, handles = packets.receive(self._socket)
        except (OSError, ValueError):
            payload, handles = None, []
        for handle in handles:  # it sends none
            os.close(handle)
        message: object = None
        if payload is not None:
            # It parses what is hostile, so one day it may be hostile itself: nonsense is its end.
            with suppress(ValueError, RecursionError):
                message = json.loads(payload)
        if message is None:
            self.lost = self.over = True
            for share in [*self._shares.values()]:
                share.lost()
            return
        if is_object(message):
            if message.get("event") == "fault" and len(self.faults) < _MOST_FAULTS:
                self.faults.append(f"{message.get('error')} at {message.get('place')}")
            number = message.get("id")
            told = self._shares.get(number) if isinstance(number, int) else None
            if told is not None:
                told.take(message)

    def close(self) -> None:
        """End the worker. It does that by itself when the channel closes, unless somebody has stopped it."""
        self._socket.close()
        end = time.monotonic() + _LAST_SECONDS
        while not os.waitpid(self._pid, os.WNOHANG)[0]:
            if time.monotonic() > end:
                os.kill(self._pid, 9)
                os.waitpid(self._pid, 0)
                return
            time.sleep(0.0005)


class CommandNetwork:
    """What one command does on the network: its listeners go to the worker, its events come back."""

    def __init__(
        self,
        worker: GateWorker,
        number: int,
        network: Network,
        secrets: Mapping[str, str],
        dial: Dial,
        review: Reviewer | None,
        saved: Saved | None,
    ) -> None:
        self._worker = worker
        self._number = number
        self._network = network
        self._dial, self._review, self._saved = dial, review, saved
        self._events: list[dict[str, object]] = []
        self._totals: dict[str, int] = {}
        self._added = self._ending = self._removed = False
        self._published = 0
        self._agent = ""
        self._certificate = ""
        self._placeholders: dict[str, str] = {}
        self._mechanism = ""
        self._failed = ""
        authority = needs_authority(network)
        worker.say(
            {
                "op": "add",
                "id": number,
                "network": msgspec.to_builtins(network),
                "secrets": dict(secrets),
                "authority": authority,
                "approved": list(saved.rules()) if saved is not None else [],
            }
        )
        self._authority = authority
        self.changed: Callable[[], None] = _nobody

    @property
    def ready(self) -> bool:
        """Whether all that a command needs from the gate before its start is there, or never will be."""
        return not self._authority or self._added or bool(self._failed)

    @property
    def ended(self) -> bool:
        """Whether the worker has told everything; after ``ask_end``."""
        return self._removed or bool(self._failed)

    def prepare(self, late: Late) -> None:
        """Put placeholders and trust into a command that has not started. Waits until ``ready``.

        Raises SandboxError if the gate cannot do what the policy asks of it.
        """
        if self._network.ssh_agent:
            late.listener = _AGENT
            late.env = {**late.env, "SSH_AUTH_SOCK": f"{late.env.get('HOME', '/home/sandbox')}/{_AGENT}"}
        if not self._authority:
            return
        if not self._worker.wait(lambda: self.ready) or self._failed:
            raise SandboxError(
                f"the egress gate cannot look inside of TLS: {self._failed or 'it did not answer'}",
                code="gate-failed",
                hint="run `casemate doctor`",
            )
        late.files = {**late.files, _BUNDLE: _system_bundle() + self._certificate}
        place = f"{late.env.get('HOME', '/home/sandbox')}/{_BUNDLE}"
        late.env = {**late.env, **dict.fromkeys(TRUST_VARIABLES, place), **self._placeholders}

    def begin(self, capture: Capture, listener: int = -1, environ: Mapping[str, str] | None = None) -> None:
        """Hand the sandbox's listeners over; the command may connect from now on.

        ``listener`` is the sandbox's end of the ssh agent that ``environ``, the caller's, names.
        """
        if listener >= 0:
            self.serve_agent(listener, (environ or {}).get("SSH_AUTH_SOCK", ""))
            os.close(listener)
        self._mechanism = capture.mechanism
        given = capture.give_listeners()
        try:
            self._worker.say({"op": "listen", "id": self._number}, given)
        finally:
            for descriptor in given:
                os.close(descriptor)

    def publish(self, listener: int, inside: int) -> Callable[[], None]:
        """Lead connections that come to a listener on the host to a port inside; returns what ends that."""
        self._published += 1
        key = self._published
        self._worker.say({"op": "publish", "id": self._number, "key": key, "inside": inside}, [listener])

        def undo() -> None:
            with suppress(SandboxError):
                self._worker.say({"op": "unpublish", "id": self._number, "key": key})

        return undo

    def update(self, network: Network) -> None:
        """Change the policy of the running command; connections it does not allow any more are cut."""
        self._network = network
        self._worker.say({"op": "update", "id": self._number, "network": msgspec.to_builtins(network)})

    def take(self, message: dict[str, object]) -> None:
        """One message of the worker's about this command. ``changed`` is called when it made a difference."""
        event = message.get("event")
        if event == "decision" and is_object(what := message.get("what")):
            if len(self._events) < _MOST_EVENTS:
                self._events.append(what)
        elif event == "question":
            self._ask(message)
        elif event == "dial":
            self._make_socket(message)
        elif event == "agent":
            self._connect_agent(message)
        elif event == "added":
            self._added = True
            self._certificate = str(message.get("certificate") or "")
            names = message.get("placeholders")
            self._placeholders = {key: str(value) for key, value in names.items()} if is_object(names) else {}
        elif event == "failed":
            self._failed = str(message.get("error") or "unknown")
        elif event == "removed":
            self._removed = True
            totals = message.get("totals")
            self._totals = {k: v for k, v in totals.items() if type(v) is int} if is_object(totals) else {}
        self.changed()

    def _ask(self, message: dict[str, object]) -> None:
        question: dict[str, object] = {
            "kind": "network",
            "host": str(message.get("host")),
            "port": message.get("port"),
            "protocol": str(message.get("protocol")),
        }

        def reply(allow: bool, scope: str) -> None:
            if allow and scope == "saved" and self._saved is not None:
                with suppress(OSError):  # then it holds for this command
                    self._saved.add(rule_text(str(question["host"]), question["port"]))
            answer = {"host": question["host"], "port": question["port"], "allow": allow, "scope": scope}
            with suppress(SandboxError):
                self._worker.say({"op": "answer", "id": self._number, **answer})

        if self._review is None or not _is_host(str(question["host"]), question["port"]):
            reply(False, "once")
        else:
            self._review(question, reply)

    def serve_agent(self, listener: int, path: str) -> None:
        """Serve a unix listener of the sandbox by the ssh agent at ``path``, through the worker's filter."""
        self._agent = path
        self._worker.say({"op": "agent", "id": self._number}, [listener])

    def _connect_agent(self, message: dict[str, object]) -> None:
        handles: list[int] = []
        with suppress(OSError):
            endpoint = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
            handles.append(endpoint.detach())
            agent = _socket.socket(fileno=os.dup(handles[0]))
            agent.setblocking(False)  # one that takes nobody just now must not hold up the command's streams
            try:
                agent.connect(self._agent)
            except OSError:
                os.close(handles.pop())
                raise
            finally:
                agent.close()
        try:
            answer = {"op": "agent-connected", "id": self._number, "request": message.get("request")}
            with suppress(SandboxError):
                self._worker.say(answer, handles)
        finally:
            for handle in handles:
                os.close(handle)

    def _make_socket(self, message: dict[str, object]) -> None:
        request = message.get("request")

        def made(descriptor: int) -> None:
            handles = [descriptor] if descriptor >= 0 else []
            try:
                with suppress(SandboxError):
                    self._worker.say({"op": "dialled", "id": self._number, "request": request}, handles)
            finally:
                for handle in handles:
                    os.close(handle)

        self._dial(made)

    def lost(self) -> None:
        """The worker has died; whatever the command tries from now on fails."""
        if not self._removed:
            self._failed = "the gate has ended"
        self.changed()

    def finish(self) -> NetworkUse:
        """End this command's share and say what it did. Waits for the last events."""
        self.ask_end()
        self._worker.wait(lambda: self.ended)
        return self.use()

    def ask_end(self) -> None:
        """Tell the worker, once, that the command has ended."""
        if not self._worker.lost and not self._ending:
            self._ending = True
            with suppress(SandboxError):
                self._worker.say({"op": "remove", "id": self._number})

    def abandon(self) -> None:
        """The command will not run, or nobody asks any more how it did: the worker forgets it."""
        self.ask_end()
        self._worker.forget(self._number)

    def use(self) -> NetworkUse:
        """What the command did, as far as it is known by now."""
        self._worker.forget(self._number)
        return NetworkUse(
            capture=self._mechanism,
            events=tuple(self._events),
            allowed=self._totals.get("allowed", 0),
            refused=self._totals.get("refused", 0),
            sent=self._totals.get("sent", 0),
            received=self._totals.get("received", 0),
            untold=self._totals.get("untold", 0),
            lost=bool(self._failed) or (self._worker.lost and not self._removed),
        )


def _is_host(host: str, port: object) -> bool:
    """Whether a question is about a host as the policy spells it: that is what a person is shown."""
    from casemate.policy import hosts

    try:
        known = hosts.address(host) is not None or hosts.normalise(host) == host
    except ValueError:
        return False
    return known and type(port) is int and 0 < port < 65536


def rule_text(host: str, port: object) -> str:
    """The policy's rule for one host and port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _nobody() -> None:
    """Nobody wants to be told."""


def _system_bundle() -> str:
    """The host's certificate authorities, as one text."""
    import ssl

    for path in (ssl.get_default_verify_paths().cafile, *_BUNDLES):
        if path and os.path.isfile(path):
            with open(path, encoding="ascii", errors="ignore") as file:
                return file.read() + "\n"
    return ""
