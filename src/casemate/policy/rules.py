"""Rules about hosts: ``github.com``, ``*.example.org:443``, ``10.0.0.0/8:5432``, ``https://api.example.org``.

::

    [http:// | https:// | tcp://]  HOST  [:PORTS]
    HOST    a name, *.NAME (every name below it, not itself), an IPv4 address or net, [an IPv6 address or
            net]; where it denies or bounds, also * (everything)
    PORTS   PORT, FROM-TO, several of them with commas, or *

Without ports a rule that allows means 80 and 443 (with ``http://`` 80, with ``https://`` 443), a rule that
denies means every port. ``http://`` and ``https://`` narrow a rule to connections that speak it; ``tcp://``
needs a port, narrows nothing, and has the gate pass on what it would otherwise look at (the name inside of
TLS, the host of a request). What is compared has one spelling (``casemate.policy.hosts``), names label by
label, addresses as numbers.

A ``ValueError`` from here carries a sentence for the person; who calls knows entry, file and field.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_network
from typing import TYPE_CHECKING, Literal

import msgspec

from casemate.policy import hosts
from casemate.policy.zones import shared

if TYPE_CHECKING:
    from collections.abc import Sequence
    from ipaddress import IPv6Address

__all__ = [
    "HOST_NAME",
    "SYNTHETIC",
    "Rule",
    "covers",
    "hits",
    "is_guarded_grant",
    "names",
    "overlap",
    "parse",
    "parse_all",
    "parse_host",
    "port_text",
    "within",
]

Protocol = Literal["any", "http", "https", "tcp"]
Ports = tuple[tuple[int, int], ...]

#: The name by which a service on the host's loopback is reached from inside.
HOST_NAME = "host.casemate.internal"
#: Addresses that the gate gives to names; nothing outside has them.
SYNTHETIC = ("198.18.0.0/15", "fd53:656e:7472:79::/64")

_EVERY: Ports = ((1, 65535),)
_WEB: Ports = ((80, 80), (443, 443))
_PROTOCOLS: dict[str, Protocol] = {"http": "http", "https": "https", "tcp": "tcp"}
_DEFAULTS: dict[str, Ports] = {"any": _WEB, "http": ((80, 80),), "https": ((443, 443),)}
_LENGTH = 300
_HOST_PORTS = 100  # of the host's own services: more are never meant
# Schemes that people try, and the port that they mean.
_SCHEMES = {"ssh": 22, "git": 9418, "ftp": 21, "ws": 80, "wss": 443, "postgres": 5432, "postgresql": 5432,
            "mysql": 3306, "redis": 6379, "amqp": 5672, "mongodb": 27017, "ldap": 389, "ldaps": 636,
            "git+ssh": 22, "socks5": 1080, "smtp": 25}  # fmt: skip
_LEAST = {4: 8, 6: 16}
_HOST_ITSELF = f"the sandbox's own loopback needs no rule; a service of the host is {HOST_NAME}:PORT"
# Nets that no connection of a sandbox can mean.
_NOWHERE = tuple(
    (ip_network(net), why)
    for net, why in (
        ("127.0.0.0/8", _HOST_ITSELF),
        ("::1/128", _HOST_ITSELF),
        ("0.0.0.0/8", "this is no destination"),
        ("224.0.0.0/4", "this is multicast, and only TCP leaves a sandbox"),
        ("ff00::/8", "this is multicast, and only TCP leaves a sandbox"),
        ("240.0.0.0/4", "nothing has an address there"),
        ("::/96", "nothing has an address there"),
        *((net, "the gate itself gives addresses from there to names; name the host") for net in SYNTHETIC),
    )
)

_MAPPED = ip_network("::ffff:0:0/96")


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One rule. ``text`` is its canonical form, which ``parse`` reads back; ``ports`` are inclusive ranges.

    ``name`` is set for the kinds ``name`` and ``suffix`` (without ``*.``), ``net`` for the kind ``net``.
    """

    text: str
    protocol: Protocol
    kind: Literal["name", "suffix", "net", "all"]
    name: str = ""
    net: str = ""
    ports: Ports


@lru_cache(maxsize=4096)
def parse(text: str, *, deny: bool = False, bound: bool = False) -> Rule:
    """Read one rule. Raises ValueError.

    ``deny``: the rule takes away, so no port means every port, and nothing is too broad. ``bound``: it
    limits what others may allow, so nothing is too broad either, but no port means 80 and 443, as there.
    """
    if len(text) > _LENGTH:
        raise ValueError("this is longer than a host and its ports can be")
    protocol, rest = _scheme(text)
    host, length, ports_text = _split(rest, text)
    ports = _ports(ports_text) if ports_text is not None else _EVERY if deny else _DEFAULTS.get(protocol, ())
    if not ports:
        raise ValueError("tcp:// needs a port: write tcp://HOST:PORT")
    kind, name, net = _host(host, length)
    if not deny and kind == "name":
        _check_name(name, ports if ports_text is not None else ())
    if kind == "net" and _subnet(_network(net), _MAPPED):
        raise ValueError("a mapped address is the IPv4 one: write that")
    if not (deny or bound):
        _check_breadth(kind, name, net)
    shown = {"name": name, "suffix": f"*.{name}", "net": _net_text(net), "all": "*"}[kind]
    usual = _EVERY if deny else _DEFAULTS.get(protocol, ())
    return Rule(
        text=f"{'' if protocol == 'any' else f'{protocol}://'}{shown}"
        f"{'' if ports == usual else f':{port_text(ports)}'}",
        protocol=protocol,
        kind=kind,
        name=name,
        net=net,
        ports=ports,
    )


def parse_all(texts: Sequence[str], *, deny: bool = False, bound: bool = False) -> tuple[Rule, ...]:
    """``parse`` for each of ``texts``. Raises ValueError."""
    return tuple(parse(text, deny=deny, bound=bound) for text in texts)


def parse_host(text: str, *, broad: bool = False) -> str:
    """A host without a port, as ``name`` or ``*.name`` in its one spelling. Raises ValueError.

    ``broad`` takes a ``*.name`` of any breadth: where the entry restricts.
    """
    if len(text) > _LENGTH:
        raise ValueError("this is longer than a host can be")
    if "://" in text or "/" in text or ":" in text or "@" in text:
        raise ValueError("write the host alone, without a protocol, a port or a path")
    kind, name, net = _host(text, None)
    if kind == "all":
        raise ValueError("`*` is every host; name those that are meant")
    if kind == "net":
        raise ValueError("write a host's name; an address has none of its own")
    if not broad:
        _check_breadth(kind, name, net)
    return name if kind == "name" else f"*.{name}"


def hits(
    rule: Rule, host: str | IPv4Address | IPv6Address, port: int, protocol: str = "", *, maybe: bool = False
) -> bool:
    """Whether ``rule`` is about this connection.

    ``host`` is a normalised name or an address (no mapped one). ``protocol`` is ``http``, ``https``, ``tcp``
    (known to be neither), or ``""``: not known yet, which a rule with a protocol of its own is about only
    where ``maybe`` is enough.
    """
    if not any(low <= port <= high for low, high in rule.ports):
        return False
    if rule.protocol in ("http", "https") and protocol != rule.protocol and (protocol or not maybe):
        return False
    if rule.kind == "all":
        return True
    if isinstance(host, str):
        if rule.kind == "name":
            return rule.name == host
        return rule.kind == "suffix" and hosts.matches(host, rule.name)
    return rule.kind == "net" and host in _network(rule.net)


def names(rule: Rule, name: str) -> bool:
    """Whether ``rule`` is about some port of this name."""
    return rule.kind == "all" or (
        rule.name == name if rule.kind == "name" else rule.kind == "suffix" and hosts.matches(name, rule.name)
    )


def within(rule: Rule, net: IPv4Network | IPv6Network) -> bool:
    """Whether a rule names addresses, and only such as lie in ``net``."""
    return rule.kind == "net" and _subnet(_network(rule.net), net)


def covers(outer: Rule, inner: Rule) -> bool:
    """Whether everything that ``inner`` is about, ``outer`` is about, too."""
    if outer.protocol in ("http", "https") and inner.protocol != outer.protocol:
        return False
    for low, high in inner.ports:
        if not any(first <= low and high <= last for first, last in outer.ports):
            return False
    if outer.kind == "all":
        return True
    if outer.kind == "net":
        return inner.kind == "net" and _subnet(_network(inner.net), _network(outer.net))
    if outer.kind == "suffix":
        below = hosts.matches(inner.name, outer.name)
        return (inner.kind == "name" and below) or (
            inner.kind == "suffix" and (below or inner.name == outer.name)
        )
    return inner.kind == "name" and inner.name == outer.name


def overlap(one: Rule, other: Rule) -> bool:
    """Whether some name lies in the reach of both; addresses and ports are not looked at."""
    if one.kind == "suffix" and other.kind == "suffix":
        inside = hosts.matches(one.name, other.name) or hosts.matches(other.name, one.name)
        return inside or one.name == other.name
    for outer, inner in ((one, other), (other, one)):
        if outer.kind == "suffix" and inner.kind == "name" and hosts.matches(inner.name, outer.name):
            return True
    return one.kind == other.kind == "name" and one.name == other.name


def is_guarded_grant(rule: Rule) -> bool:
    """Whether the rule opens what the gate guards: addresses and the host itself. Never a project's."""
    return rule.kind in ("net", "all") or rule.name == HOST_NAME


def port_text(ports: Ports) -> str:
    """Ports as a rule says them."""
    if ports == _EVERY:
        return "*"
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in ports)


# ---------------------------------------------------------------- parts


def _scheme(text: str) -> tuple[Protocol, str]:
    scheme, found, rest = text.partition("://")
    if not found:
        return "any", text
    word = scheme.lower()
    if known := _PROTOCOLS.get(word):
        return known, rest
    if word in ("udp", "quic"):
        raise ValueError("only TCP leaves a sandbox")
    if word in _SCHEMES:
        raise ValueError(f"the gate does not know {word}:// from others; write HOST:{_SCHEMES[word]}")
    raise ValueError("before :// stands http, https or tcp")


def _split(rest: str, text: str) -> tuple[str, str | None, str | None]:
    """Host, prefix length and ports; what is not there is None."""
    if "@" in rest:
        raise ValueError("a rule has no user; write HOST, or HOST:PORT")
    length: str | None = None
    if rest.startswith("["):
        host, bracket, after = rest[1:].partition("]")
        if not bracket or ":" not in host:
            raise ValueError("between [ and ] stands an IPv6 address: write [2001:db8::1]:443")
        host, slash, inside = host.partition("/")
        length = inside if slash else None
        if after.startswith("/") and not slash:
            length, colon, ports = after[1:].partition(":")
            return f"[{host}]", length, ports if colon else None
        if after and not after.startswith(":"):
            raise ValueError("after ] stands a colon and the port: write [2001:db8::1]:443")
        return f"[{host}]", length, after[1:] if after else None
    head, slash, tail = rest.partition("/")
    if slash:
        if hosts.address(head) is None or "/" in tail:
            raise ValueError(_no_url(head, text))
        length, colon, ports = tail.partition(":")
        return head, length, ports if colon else None
    if rest.count(":") > 1:
        raise ValueError("an IPv6 address stands in brackets: write [2001:db8::1]:443")
    host, colon, ports = rest.partition(":")
    return host, None, ports if colon else None


def _no_url(head: str, text: str) -> str:
    host, _, port = head.partition(":")
    try:
        host = hosts.normalise(host)
    except ValueError:
        return "only an address has a prefix length: write 10.0.0.0/8"
    if port.isascii() and port.isdigit():
        host += f":{port}"
    scheme = text.partition("://")[0].lower() + "://" if "://" in text else ""
    return f"a rule is about a host and not about a URL: write {scheme}{host}; network.requests knows paths"


def _ports(text: str) -> Ports:
    if text == "*":
        return _EVERY
    found: list[tuple[int, int]] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        low = _port(first)
        high = _port(last) if dash else low
        if low > high:
            raise ValueError(f"the ports {part} run backwards; write {last}-{first}")
        found.append((low, high))
    merged: list[tuple[int, int]] = []
    for low, high in sorted(found):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def _port(text: str) -> int:
    # No sign, no space, no digit of another script, no leading zero: one spelling.
    if text.isascii() and text.isdigit() and len(text) <= 5 and text[0] != "0" and int(text) <= 65535:
        return int(text)
    raise ValueError("after the colon stands a port (1-65535), a range 8000-8010, a list 80,443 or * (all)")


def _host(host: str, length: str | None) -> tuple[Literal["name", "suffix", "net", "all"], str, str]:
    """Kind, name and net."""
    if host == "*":
        return "all", "", ""
    if host.startswith("*."):
        return "suffix", hosts.normalise(host[2:]), ""
    if "*" in host:
        raise ValueError("`*` stands for whole labels at the front: write *.example.org")
    if host.startswith("."):
        raise ValueError(f"for the names below it write *.{hosts.normalise(host[1:])}")
    address = hosts.address(host)
    if address is None:
        if host.startswith("["):
            why = "a zone is of this host alone; write the address without it" if "%" in host else "not IPv6"
            raise ValueError(f"between [ and ] stands an IPv6 address: {why}")
        return "name", hosts.normalise(host), ""
    if length is None:
        return "net", "", f"{address}/{address.max_prefixlen}"
    digits = length.isascii() and length.isdigit() and len(length) <= 3
    if not digits or int(length) > address.max_prefixlen:
        raise ValueError(f"after the slash stands the number of bits, up to {address.max_prefixlen}")
    network = ip_network((address, int(length)), strict=False)
    if network.network_address != address:
        raise ValueError(f"the address has bits beyond its prefix; write {_net_text(str(network))}")
    return "net", "", str(network)


def _net_text(net: str) -> str:
    """A net as a rule says it: a single address has no length, IPv6 has brackets."""
    if not net:
        return ""
    network = _network(net)
    single = network.prefixlen == network.max_prefixlen
    shown = str(network.network_address) if single else net
    return f"[{shown}]" if network.version == 6 else shown


def _check_name(name: str, ports: Ports) -> None:
    if name == "localhost" or hosts.matches(name, "localhost"):
        raise ValueError(_HOST_ITSELF)
    if name == HOST_NAME:
        if not 0 < sum(high - low + 1 for low, high in ports) <= _HOST_PORTS:
            raise ValueError(f"{HOST_NAME} needs the port of the one service that is meant")
    elif hosts.matches(name, "casemate.internal"):
        raise ValueError(f"below casemate.internal there is only {HOST_NAME}")


def _check_breadth(kind: str, name: str, net: str) -> None:
    if kind == "all":
        raise ValueError('`*` is every host; network.mode = "full" is the word for that')
    if kind == "suffix":
        if name in ("casemate.internal", HOST_NAME):
            raise ValueError(f"below casemate.internal there is only {HOST_NAME}; write it with its port")
        if name == "localhost":
            raise ValueError(_HOST_ITSELF)
        why = shared(name)
        if why:
            raise ValueError(f"`*.{name}` is too broad: {why}; name the hosts, or write *.YOURS.{name}")
    if kind == "net":
        network = _network(net)
        for nowhere, why in _NOWHERE:
            if _subnet(network, nowhere):
                raise ValueError(f"{_net_text(net)} cannot be allowed: {why}")
        least = _LEAST[network.version]
        if network.prefixlen < least:
            raise ValueError(
                f"a net of {network.prefixlen} bits is too broad: it takes {least} or more; "
                'network.mode = "full" is the word for everything'
            )


@lru_cache(maxsize=4096)
def _network(net: str) -> IPv4Network | IPv6Network:
    return ip_network(net)


def _subnet(inner: IPv4Network | IPv6Network, outer: IPv4Network | IPv6Network) -> bool:
    if isinstance(inner, IPv4Network) and isinstance(outer, IPv4Network):
        return inner.subnet_of(outer)
    if isinstance(inner, IPv6Network) and isinstance(outer, IPv6Network):
        return inner.subnet_of(outer)
    return False
