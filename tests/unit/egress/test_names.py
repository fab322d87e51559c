"""The addresses that stand for names."""

from __future__ import annotations

import ipaddress

import pytest

from casemate.egress.names import MOST_NAMES, Names, is_synthetic
from casemate.sys.capture import GATE, GATE_V6


def test_an_address_is_a_name() -> None:
    """Each name gets one address of either family, both mean that name and no other, for good."""
    names = Names()
    given = {f"host{n}.example": names.addresses(f"host{n}.example") for n in range(300)}
    assert len({address for pair in given.values() if pair for address in pair}) == 600
    for name, pair in given.items():
        assert pair is not None
        assert names.addresses(name) == pair
        assert [names.name(address) for address in pair] == [name, name]


def test_addresses_lie_in_the_ranges() -> None:
    """The first and the last address lie in the ranges that nobody uses, and none is the gate's own."""
    names = Names()
    for number in range(MOST_NAMES):
        pair = names.addresses(f"host{number}.example")
        assert pair is not None
        for address in pair:
            assert is_synthetic(address)
            assert not names.is_gate(address)
    assert names.addresses("one.more.example") is None
    last = names.addresses(f"host{MOST_NAMES - 1}.example")
    assert last is not None
    assert ipaddress.ip_address(last[0]) in ipaddress.ip_network("198.18.0.0/15")
    assert ipaddress.ip_address(last[1]) in ipaddress.ip_network("fd53:656e:7472:79::/64")


def test_too_many_names() -> None:
    """Behind the bound there are no more addresses, and those that were given go on meaning what they did."""
    names = Names(most=2)
    first, second = names.addresses("a.example"), names.addresses("b.example")
    assert first
    assert second
    assert names.addresses("c.example") is None
    assert names.addresses("a.example") == first
    assert names.name(second[0]) == "b.example"


@pytest.mark.parametrize(
    "address",
    ["198.18.1.1", "198.18.0.1", "198.18.0.0", "198.19.255.255", "fd53:656e:7472:79::1",
     "fd53:656e:7472:79::101",
     "93.184.216.34", "::1", "198.17.255.255", "198.20.0.0", "no address", "", "fd53:656e:7472:78::100"],
)  # fmt: skip
def test_what_was_not_given(address: str) -> None:
    """An address that was given for no name means none; control: its neighbour that was given does."""
    names = Names()
    assert names.addresses("a.example") == ("198.18.1.0", "fd53:656e:7472:79::100")
    assert names.name("198.18.1.0") == "a.example"
    assert names.name(address) is None


def test_the_gates_own() -> None:
    """The gate's two addresses are its own, and nobody's name."""
    names = Names()
    assert names.is_gate(GATE)
    assert names.is_gate(GATE_V6)
    assert not names.is_gate("198.18.0.2")
    assert names.name(GATE) is None
    assert is_synthetic(GATE)
    assert is_synthetic(GATE_V6)


@pytest.mark.parametrize(("address", "inside"), [
    ("198.18.0.0", True), ("198.19.255.255", True), ("198.17.255.255", False), ("198.20.0.0", False),
    ("fd53:656e:7472:79::ffff", True), ("fd53:656e:7472:7a::1", False), ("2001:db8::1", False),
])  # fmt: skip
def test_the_ranges(address: str, inside: bool) -> None:
    """The edges of the ranges."""
    assert is_synthetic(address) is inside
