"""Id maps of mounts: made once, remembered for a while. Each is a descriptor of the launcher."""

from __future__ import annotations

import os

import pytest

from casemate.isolation.process.stacks import IdMaps

pytestmark = [pytest.mark.root]


def held() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


def test_id_maps_are_bounded() -> None:
    """Id maps are remembered, the last ones of them only, and those that are asked for stay."""
    maps = IdMaps()
    before = held()
    try:
        first = maps.get((0, 0), 70000)
        assert maps.get((0, 0), 70000) == first
        for uid in range(70001, 70004):
            maps.get((0, 0), uid)
            assert maps.get((0, 0), 70000) == first
        assert held() == before + 4
        maps.trim(2)
        assert held() == before + 2
        assert maps.get((0, 0), 70000) == first
    finally:
        maps.trim(0)
    assert held() == before
