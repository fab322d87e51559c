"""May a sandbox reach this? Pure: a policy and facts in, a decision out.

The gate asks at each step with what it knows by then: the name that a query is for (``resolve``), host and
port of a connection, before and after its first bytes (``connect``), the address that it is about to dial
(``address``), and each request that it can read (``request``). What is denied stays denied whatever else
allows it, and the administrator's bound holds for approvals, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from casemate.egress.guard import guard, plain
from casemate.policy import hosts, requests, rules
from casemate.policy.rules import HOST_NAME, Rule

if TYPE_CHECKING:
    from collections.abc import Iterable
    from ipaddress import IPv4Address, IPv6Address

    from casemate.policy.model import Credential, Network, RequestRule

__all__ = ["Decider", "Decision"]

_LOOPBACK = ("127.0.0.1", "::1")
_MOST_KNOWN = 4096


class Decision(msgspec.Struct, frozen=True):
    """One answer.

    ``rule`` is the text of the rule that decided, ``default`` where none did. ``reason`` is a stable word:
    ``rule`` or ``full`` (allowed); ``denied``, ``not-listed``, ``mode-none``, ``above-ceiling``,
    ``bad-name``, ``requests`` (only HTTP can be held to the rules about requests), ``request``,
    ``request-ambiguous``, ``host-service`` (a port of the host that no rule names), ``guarded-…``.
    ``allow_line`` is the line of a policy that would allow it, ``""`` where none would.
    """

    verdict: Literal["allow", "deny", "ask"]
    rule: str
    reason: str
    allow_line: str = ""


class Decider:
    """The decisions of one policy. ``own`` are this host's addresses and nets, ``approved`` further rules.

    Names may come in any spelling; what is neither a name nor an address is denied. Methods raise nothing.
    """

    def __init__(
        self, network: Network, *, own: frozenset[str] = frozenset(), approved: Iterable[str] = ()
    ) -> None:
        self._network = network
        self._mode = network.mode
        self._own = own
        self._deny = rules.parse_all(network.deny, deny=True)
        logins = [rules.parse(host if ":" in host else f"{host}:22") for host in network.ssh_agent]
        self._allow = (*rules.parse_all(network.allow), *logins)
        self._within = None if network.within is None else rules.parse_all(network.within, bound=True)
        self._approved = tuple(rule for text in approved if (rule := self._approval(text)) is not None)
        self._known: dict[tuple[str, int, str], Decision] = {}

    # -- names -----------------------------------------------------------------------------------------

    def resolve(self, name: str) -> Decision:
        """Whether a query for ``name`` gets an answer: a connection to some port of it may be possible."""
        try:
            name = hosts.normalise(name)
        except ValueError:
            return Decision("deny", "default", "bad-name")
        if self._mode in ("none", "host"):
            return Decision("deny", "default", "mode-none", _line(name))
        for rule in self._deny:
            if rule.protocol == "any" and rule.ports == ((1, 65535),) and rules.hits(rule, name, 1):
                return Decision("deny", rule.text, "denied")
        for rule in (*self._allow, *self._approved):
            if rules.names(rule, name):
                return Decision("allow", rule.text, "rule")
        return self._unlisted(name, None, "")

    def connect(self, host: str, port: int, protocol: str = "") -> Decision:
        """Whether a connection to a name or an address is possible.

        ``protocol`` is ``http``, ``https`` (TLS), ``tcp`` (known to be neither) or ``""``: not known yet,
        which allows what may turn out to be allowed and denies only what is denied in any protocol.
        """
        # A policy does not change, and each connection asks some times over.
        key = (host, port, protocol)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            found = self._known[key] = self._connect(host, port, protocol)
        return found

    def _connect(self, host: str, port: int, protocol: str) -> Decision:
        where = _host(host)
        if where is None or not 0 < port < 65536:
            return Decision("deny", "default", "bad-name")
        if self._mode in ("none", "host"):
            return Decision("deny", "default", "mode-none", _line(where, port))
        for rule in self._deny:
            if rules.hits(rule, where, port, protocol):
                return Decision("deny", rule.text, "denied")
        if protocol == "tcp" and isinstance(where, str) and (restricting := self._restrictions(where)):
            return Decision("deny", _request_rule(restricting[0]), "requests")
        if not isinstance(where, str):
            found = self._dialled(where, port, protocol)
            if found.verdict == "deny":
                return found
        allowing = self._allowing(where, port, protocol)
        if allowing is not None:
            return Decision("allow", allowing.text, "rule")
        return self._unlisted(where, port, protocol)

    def address(self, name: str, ip: str, port: int, protocol: str = "") -> Decision:
        """Whether ``ip``, which ``name`` resolved to (or is), may be dialled. The name was decided before."""
        try:
            where = plain(ip)
        except ValueError:
            return Decision("deny", "default", "bad-name")
        for rule in self._deny:
            if rules.hits(rule, where, port, protocol, maybe=True):
                return Decision("deny", rule.text, "denied")
        if _host(name) == HOST_NAME:
            allowing = self._allowing(HOST_NAME, port, protocol)
            if allowing is None or str(where) not in _LOOPBACK:
                return Decision("deny", "default", "host-service", _line(HOST_NAME, port))
            return Decision("allow", allowing.text, "rule")
        return self._dialled(where, port, protocol)

    # -- requests --------------------------------------------------------------------------------------

    def intercept(self, name: str, port: int) -> bool:
        """Whether the gate has to see the requests inside: a rule about them, or a credential, is there."""
        where = _host(name)
        if not isinstance(where, str):
            return False
        if self._restrictions(where):
            return True
        if not self.credentials_for(where):
            return False
        rule = self._allowing(where, port, "https")
        return rule is None or rule.protocol != "tcp"

    def credentials_for(self, name: str) -> tuple[Credential, ...]:
        """The credentials that requests to ``name`` may get."""
        where = _host(name)
        if not isinstance(where, str):
            return ()
        return tuple(
            found for found in self._network.credentials if any(_is_one(where, host) for host in found.hosts)
        )

    def request(self, name: str, method: str, target: str) -> Decision:
        """Whether a request may be sent; ``target`` is in origin form (``/path?query``).

        Every rule about the host has to be met; a host without any gets every request.
        """
        where = _host(name)
        restricting = self._restrictions(where) if isinstance(where, str) else ()
        if not restricting:
            return Decision("allow", "default", "rule")
        path = requests.canonical(target)
        if path is None:
            return Decision("deny", _request_rule(restricting[0]), "request-ambiguous")
        met = ""
        for rule in restricting:
            met = next((text for text in rule.allow if requests.meets(text, method, path)), "")
            if not met:
                return Decision("deny", _request_rule(rule), "request", _request_line(rule, method, path))
        return Decision("allow", met, "rule")

    # -- parts -----------------------------------------------------------------------------------------

    def _approval(self, text: str) -> Rule | None:
        """An approved host and port as a rule; None for what is none, or more than anybody may allow."""
        try:
            rule = rules.parse(text)
        except ValueError:
            return None
        bounds = self._within
        return rule if bounds is None or any(rules.covers(bound, rule) for bound in bounds) else None

    def _restrictions(self, name: str) -> tuple[RequestRule, ...]:
        return tuple(rule for rule in self._network.requests if _is_one(name, rule.host))

    def _allowing(self, where: str | IPv4Address | IPv6Address, port: int, protocol: str) -> Rule | None:
        """The rule that allows. One that looks inside comes before one that does not, where both do."""
        found: Rule | None = None
        for rule in (*self._allow, *self._approved):
            if rules.hits(rule, where, port, protocol, maybe=True):
                if protocol == "tcp" or rule.protocol != "tcp":
                    return rule
                found = found or rule
        return found

    def _dialled(self, where: IPv4Address | IPv6Address, port: int, protocol: str) -> Decision:
        """The guard's word on one address."""
        barrier = guard(where, self._own)
        if barrier is None:
            return Decision("allow", "default", "rule")
        if barrier.net is not None:
            for rule in (*self._allow, *self._approved):
                if rules.within(rule, barrier.net) and rules.hits(
                    rule, where, port, protocol, maybe=True
                ):
                    return Decision("allow", rule.text, "rule")
            # Whoever is shown a line may paste it, and this one would hand out the machine's own keys.
            line = "" if barrier.reason == "guarded-metadata" else _line(where, port)
        else:
            line = _line(HOST_NAME, port) if barrier.reason == "guarded-loopback" else ""
        return Decision("deny", "default", barrier.reason, line)

    def _unlisted(self, where: str | IPv4Address | IPv6Address, port: int | None, protocol: str) -> Decision:
        """What no rule names."""
        if isinstance(where, str) and _is_internal(where):
            reason = "host-service" if where == HOST_NAME else "guarded-loopback"
            return Decision("deny", "default", reason, _line(HOST_NAME, port) if port else "")
        if self._mode == "full":
            return Decision("allow", "default", "full")
        if self._within is not None and not self._bounded(where, port, protocol):
            return Decision("deny", "default", "above-ceiling")
        verdict: Literal["ask", "deny"] = "ask" if self._network.ask else "deny"
        return Decision(verdict, "default", "not-listed", _line(where, port))

    def _bounded(self, where: str | IPv4Address | IPv6Address, port: int | None, protocol: str) -> bool:
        """Whether the administrator lets anybody allow this."""
        bounds = self._within or ()
        if port is None:
            return isinstance(where, str) and any(rules.names(rule, where) for rule in bounds)
        return any(rules.hits(rule, where, port, protocol, maybe=True) for rule in bounds)


def _host(text: str) -> str | IPv4Address | IPv6Address | None:
    """A name in its one spelling, an address (of a mapped one the IPv4 address), or None."""
    address = hosts.address(text)
    if address is not None:
        return plain(str(address))
    try:
        return hosts.normalise(text)
    except ValueError:
        return None


def _is_one(name: str, host: str) -> bool:
    return hosts.matches(name, host[2:]) if host.startswith("*.") else name == host


def _is_internal(name: str) -> bool:
    """Names that mean this host, whoever resolves them."""
    return name in ("localhost", "casemate.internal") or name.endswith((".localhost", ".casemate.internal"))


def _request_rule(rule: RequestRule) -> str:
    return f'network.requests."{rule.host}" ({rule.layer})'


def _request_line(rule: RequestRule, method: str, path: str) -> str:
    """The line that lets exactly this request through. What the sandbox sent is no wildcard in it."""
    word = method.isascii() and method.isalpha() and method.isupper() and len(method) <= 20
    if not word or len(path) > 200:
        return ""
    shown = path.replace("*", "%2A").replace('"', "%22")
    return f'network.requests."{rule.host}" = ["{method} {shown}"]'


def _line(where: str | IPv4Address | IPv6Address, port: int | None = None) -> str:
    """The line of a policy that names exactly this."""
    shown = where if isinstance(where, str) else f"[{where}]" if where.version == 6 else str(where)
    return f'network.allow = ["{shown}{f":{port}" if port else ""}"]'
