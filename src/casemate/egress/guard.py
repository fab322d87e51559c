"""Addresses that the gate does not dial unless a rule names them: this host, its neighbours, what is special.

A name that anybody registered may resolve to any of these, so that an allowed name alone never opens one. A
rule opens a guarded address only if its net lies within the net that is guarded: ``10.1.0.0/16`` opens
private addresses, while ``168.0.0.0/8`` does not open the one in it at which a cloud answers its machines.
Of IPv6 only 2000::/3 is public: what is outside of it and has no row of its own is never dialled.

An IPv6 address that carries an IPv4 one (NAT64, 6to4, Teredo) is guarded by itself, and stays shut for any
rule if what it carries is guarded. Mapped addresses are judged as what they carry.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import msgspec

__all__ = ["Guarded", "guard", "guarded", "plain"]

Address = IPv4Address | IPv6Address
Net = IPv4Network | IPv6Network

# Where clouds tell their machines who they are, and hand out keys.
_METADATA = (
    "169.254.169.254", "169.254.170.2", "169.254.170.23", "169.254.169.253",  # most; AWS's containers, names
    "fd00:ec2::254", "fd00:ec2::23", "fd00:ec2::253",  # AWS
    "fd20:ce::254",  # Google
    "168.63.129.16",  # Azure
    "192.0.0.192", "fd00:c1::a9fe:a9fe",  # Oracle
    "100.100.100.200", "fd00:100::100:200",  # Alibaba
    "169.254.0.23",  # Tencent
    "100.96.0.96",  # Volcano
    "169.254.42.42", "fd00:42::42",  # Scaleway
    "fd00:a9fe:a9fe::1",  # Akamai (Linode)
    "192.80.8.124",  # Equinix (Packet)
    "fe80::a9fe:a9fe",
)  # fmt: skip
# By net; where several hold an address, the first counts.
_NETS = (
    ("127.0.0.0/8", "loopback"), ("::1/128", "loopback"),
    ("0.0.0.0/8", "unspecified"), ("::/128", "unspecified"),
    ("10.0.0.0/8", "private"), ("172.16.0.0/12", "private"), ("192.168.0.0/16", "private"),
    ("fd53:656e:7472:79::/64", "synthetic"), ("fc00::/7", "private"), ("fec0::/10", "private"),
    ("100.64.0.0/10", "shared"),
    ("169.254.0.0/16", "link-local"), ("fe80::/10", "link-local"),
    ("224.0.0.0/4", "multicast"), ("ff00::/8", "multicast"),
    ("255.255.255.255/32", "broadcast"), ("240.0.0.0/4", "reserved"),
    ("198.18.0.0/15", "synthetic"), ("2001:2::/48", "reserved"),
    ("192.0.0.0/24", "reserved"), ("192.88.99.0/24", "reserved"),
    # Where in the second the IPv4 address stands is the network's own choice, so it cannot be judged.
    ("64:ff9b::/96", "nat64"), ("64:ff9b:1::/48", "reserved"),
    ("2002::/16", "6to4"), ("2001::/32", "teredo"),
    ("::/96", "reserved"), ("::ffff:0:0:0/96", "reserved"), ("100::/64", "reserved"),
    ("2001:10::/28", "reserved"), ("3ffe::/16", "reserved"),
    # Not the nets for documentation: nobody's secrets are there, and closed networks use them, their package
    # indexes among others.
    # All that is left outside of 2000::/3, in which the public addresses are.
    ("::/3", "reserved"), ("4000::/2", "reserved"), ("8000::/1", "reserved"),
)  # fmt: skip
# No rule opens these: nothing that TCP could mean is there, or the gate's own addresses are.
_SHUT = frozenset(("loopback", "unspecified", "multicast", "broadcast", "reserved", "synthetic"))
_TABLE: tuple[tuple[Net, str], ...] = (
    *((ip_network(address), "metadata") for address in _METADATA),
    *((ip_network(net), reason) for net, reason in _NETS),
)


class Guarded(msgspec.Struct, frozen=True):
    """Why an address is guarded (``guarded-private``), and the net that a rule must lie within to open it.

    ``net`` is None where no rule opens it.
    """

    reason: str
    net: Net | None


def guarded(address: str, own: frozenset[str] = frozenset()) -> str:
    """Why ``address`` is not dialled by itself (``guarded-private``), or ``""``.

    ``own`` are this host's addresses and nets, as ``casemate.sys.addresses`` gives them. Raises ValueError
    for what is no address.
    """
    found = guard(plain(address), own)
    return found.reason if found is not None else ""


def plain(address: str) -> Address:
    """The address that a text is; of a mapped one the IPv4 address. Raises ValueError."""
    found = ip_address(address)
    if isinstance(found, IPv6Address):
        if found.scope_id is not None:
            raise ValueError("an address with a zone is of one host alone")
        return found.ipv4_mapped or found
    return found


@lru_cache(maxsize=4096)
def guard(address: Address, own: frozenset[str] = frozenset()) -> Guarded | None:
    """Why and how far ``address`` is guarded, or None. ``Preconditions:`` it is ``plain``."""
    found = _by_table(address)
    if found is not None and (found.net is None or found.reason == "guarded-metadata"):
        return found
    carried = _carried(address)
    if found is not None and carried is not None and guard(carried, own) is not None:
        return Guarded(found.reason, None)
    for net in _own_nets(own):
        if net.version == address.version and address in net:
            # A rule has to name the very address: that a net is allowed says nothing about this host in it.
            return Guarded("guarded-own", ip_network(address))
    return found


def _by_table(address: Address) -> Guarded | None:
    for net, reason in _TABLE:
        if net.version == address.version and address in net:
            return Guarded(f"guarded-{reason}", None if reason in _SHUT else net)
    return None


def _carried(address: Address) -> IPv4Address | None:
    """The IPv4 address that an IPv6 one leads to by translation or by a tunnel."""
    if isinstance(address, IPv4Address):
        return None
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    if (six := address.sixtofour) is not None:
        return six
    teredo = address.teredo
    return teredo[1] if teredo is not None else None


_NAT64 = IPv6Network("64:ff9b::/96")


@lru_cache(maxsize=16)
def _own_nets(own: frozenset[str]) -> tuple[Net, ...]:
    return tuple(ip_network(text, strict=False) for text in own)
