"""The guard list: whatever carries an address of this host, its neighbours or a cloud's metadata is found."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.egress.guard import guard, guarded, plain

DOCUMENTATION = [
    ip_network(net)
    for net in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20")
]

OWN = frozenset({"93.184.218.7", "10.0.0.5", "2606:2800:220:3::1", "93.184.219.0/24", "198.51.100.7"})


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1", "loopback"), ("127.255.255.255", "loopback"), ("::1", "loopback"),
        ("::ffff:127.0.0.1", "loopback"), ("::ffff:7f00:1", "loopback"),
        ("0.0.0.0", "unspecified"), ("0.1.2.3", "unspecified"), ("::", "unspecified"),
        ("::ffff:0.0.0.0", "unspecified"),
        ("10.0.0.0", "private"), ("10.255.255.255", "private"), ("172.16.0.1", "private"),
        ("172.31.255.255", "private"), ("192.168.1.1", "private"), ("fc00::1", "private"),
        ("fdff::1", "private"), ("fec0::1", "private"), ("::ffff:10.0.0.1", "private"),
        ("100.64.0.1", "shared"), ("100.127.255.255", "shared"),
        ("169.254.0.1", "link-local"), ("fe80::1", "link-local"), ("febf::1", "link-local"),
        ("169.254.169.254", "metadata"), ("::ffff:169.254.169.254", "metadata"),
        ("169.254.170.2", "metadata"), ("100.100.100.200", "metadata"), ("168.63.129.16", "metadata"),
        ("192.0.0.192", "metadata"), ("fd00:ec2::254", "metadata"), ("fd20:ce::254", "metadata"),
        ("fe80::a9fe:a9fe", "metadata"), ("fd00:ec2::253", "metadata"), ("fd00:c1::a9fe:a9fe", "metadata"),
        ("fd00:100::100:200", "metadata"), ("169.254.0.23", "metadata"), ("100.96.0.96", "metadata"),
        ("169.254.42.42", "metadata"), ("fd00:42::42", "metadata"), ("fd00:a9fe:a9fe::1", "metadata"),
        ("192.80.8.124", "metadata"), ("::ffff:192.80.8.124", "metadata"),
        ("224.0.0.1", "multicast"), ("239.255.255.255", "multicast"), ("ff02::1", "multicast"),
        ("240.0.0.1", "reserved"), ("255.255.255.254", "reserved"), ("255.255.255.255", "broadcast"),
        ("198.18.0.1", "synthetic"), ("198.19.255.255", "synthetic"),
        ("fd53:656e:7472:79::1", "synthetic"),
        ("192.0.0.8", "reserved"), ("192.88.99.1", "reserved"), ("100::1", "reserved"),
        ("::10.0.0.1", "reserved"), ("::8.8.8.8", "reserved"), ("::ffff:0:808:808", "reserved"),
        ("3ffe::1", "reserved"), ("200::1", "reserved"), ("1fff::1", "reserved"), ("4000::1", "reserved"),
        ("5f00::1", "reserved"), ("8000::1", "reserved"), ("fbff::1", "reserved"), ("fe00::1", "reserved"),
        ("64:ff9b::808:808", "nat64"), ("64:ff9b::a9fe:a9fe", "nat64"), ("64:ff9b::7f00:1", "nat64"),
        ("64:ff9b:1::808:808", "reserved"),
        ("2002:808:808::1", "6to4"), ("2002:7f00:1::1", "6to4"), ("2002:a9fe:a9fe::1", "6to4"),
        ("2001:0:808:808::1", "teredo"), ("2001:0:0:1::f5ff:fffe", "teredo"),
    ],
)  # fmt: skip
def test_what_is_guarded(address: str, reason: str) -> None:
    """Each by its own word, in every spelling that carries it."""
    assert guarded(address) == f"guarded-{reason}"


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "1.1.1.1", "9.255.255.255", "11.0.0.0", "172.15.255.255", "172.32.0.0", "192.167.255.255",
     "192.169.0.0", "100.63.255.255", "100.128.0.0", "169.253.255.255", "169.255.0.0", "198.17.255.255",
     "198.20.0.0", "223.255.255.255", "168.63.129.15", "::ffff:8.8.8.8", "2606:4700::1111", "2001:4860::8888",
     "192.0.2.1", "198.51.100.8", "203.0.113.1", "2001:db8::1", "2003::1", "3ffd::1", "3fff::1", "2000::1",
     "192.80.8.123"],
)  # fmt: skip
def test_what_is_not_guarded(address: str) -> None:
    """Control: public addresses, and those at the edges of the nets."""
    assert guarded(address) == ""


@pytest.mark.parametrize(
    "address",
    ["93.184.218.7", "::ffff:93.184.218.7", "10.0.0.5", "2606:2800:220:3::1", "93.184.219.200",
     "198.51.100.7"],
)
def test_this_hosts_own_addresses_are_guarded(address: str) -> None:
    """Public or private, mapped or in a net of its own; its neighbours are not."""
    assert guarded(address, OWN) == "guarded-own"
    assert guarded("93.184.218.8", OWN) == ""
    assert guarded("10.0.0.6", OWN) == "guarded-private"


def test_only_the_very_address_opens_this_host() -> None:
    """A rule must lie within the net that is given here: for the host's own address that is the address."""
    found = guard(ip_address("10.0.0.5"), OWN)
    assert found is not None
    assert found.net == ip_network("10.0.0.5/32")
    neighbour = guard(ip_address("10.0.0.6"), OWN)
    assert neighbour is not None
    assert neighbour.net == ip_network("10.0.0.0/8")


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", "240.0.0.1", "198.18.0.1", "::1",
                "::8.8.8.8", "64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:a00:1::1", "2002:a9fe:a9fe::1",
                "2001:0:0:1::f5ff:fffe", "3ffe::1", "4000::1", "fbff::1", "192.0.0.8", "fd53:656e:7472:79::1"]
)  # fmt: skip
def test_what_no_rule_opens(address: str) -> None:
    """What TCP cannot mean, and what carries a guarded address past its own guard."""
    found = guard(plain(address))
    assert found is not None
    assert found.net is None


@pytest.mark.parametrize(
    "address", ["64:ff9b::808:808", "2002:808:808::1", "10.0.0.1", "fd00::1", "169.254.1.1"]
)
def test_what_a_rule_can_open(address: str) -> None:
    """Control: with a net to lie within."""
    found = guard(plain(address))
    assert found is not None
    assert found.net is not None
    assert plain(address) in found.net


@pytest.mark.parametrize(
    "text", ["", "localhost", "127.1", "0177.0.0.1", "1.2.3.4/32", "fe80::1%eth0", "[::1]", "1 "]
)
def test_what_is_no_address_raises(text: str) -> None:
    """The caller must not take such a text for an address that is fine."""
    with pytest.raises(ValueError, match=r"."):
        guarded(text)


@given(st.ip_addresses(v=4))
def test_every_carrier_of_a_guarded_address_is_guarded(inner: IPv4Address) -> None:
    """Mapped, translated and tunnelled forms are never looser than the address itself."""
    number = int(inner)
    assert guarded(str(IPv6Address((0xFFFF << 32) | number))) == guarded(str(inner))
    for outer in (
        IPv6Address((0x64FF9B << 96) | number),
        IPv6Address((0x2002 << 112) | (number << 80) | 1),
        IPv6Address((0x20010000 << 96) | (number ^ 0xFFFFFFFF)),
        IPv6Address(number),
        IPv6Address((0xFFFF << 48) | number),
    ):
        found = guard(outer)
        assert found is not None, outer
        if guarded(str(inner)):
            assert found.net is None, outer


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "169.254.42.42", "100.96.0.96", "192.80.8.124", "fd00:ec2::253", "fd00:42::42"],
)
def test_only_the_very_address_opens_metadata(address: str) -> None:
    """No net around it does, however narrow."""
    found = guard(plain(address))
    assert found is not None
    assert found.net == ip_network(address)


@given(st.ip_addresses())
def test_what_the_library_calls_special_is_guarded(address: IPv4Address | IPv6Address) -> None:
    """An independent table agrees, but for the nets for documentation and a block of public services."""
    if any(net.version == address.version and address in net for net in DOCUMENTATION):
        return
    if isinstance(address, IPv6Address) and address in ip_network("2001::/23"):
        return
    special = address.is_private or address.is_multicast or address.is_link_local or address.is_loopback
    special = special or (address.version == 6 and address not in ip_network("2000::/3"))
    if address.version == 6 and address.ipv4_mapped is not None:  # is what it carries
        return
    assert guarded(str(address)) or not special
