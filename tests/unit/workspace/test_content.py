"""Copying and comparing content."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from casemate.workspace.content import copy, same

PLACES = ["/var/tmp", "/dev/shm"]


def make(path: Path, seed: int) -> int:
    """A file of up to some MiB with data, zeros and holes at random; returns a descriptor."""
    chance = random.Random(seed)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    size = chance.choice([0, 1, 4096, 100_000, 131_072, 131_073, 3_000_000])
    os.ftruncate(fd, size)
    for _ in range(chance.randint(0, 6)):
        if size:
            at = chance.randrange(size)
            os.pwrite(fd, chance.randbytes(min(chance.choice([1, 5000, 200_000]), size - at)), at)
    return fd


@pytest.fixture
def places() -> list[Path]:
    """Two directories on different file systems."""
    import tempfile

    return [Path(tempfile.mkdtemp(dir=place, prefix="casemate-content-")) for place in PLACES]


@pytest.mark.parametrize("seed", range(30))
def test_copy_is_the_same(seed: int, places: list[Path]) -> None:
    """A copy has the content and takes no more room; between file systems as within one."""
    try:
        for here, there in ((places[0], places[0]), (places[1], places[0]), (places[0], places[1])):
            source = make(here / "source", seed)
            target = os.open(there / "target", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            status = os.fstat(source)
            copy(source, target, status.st_size, status.st_blocks)
            os.fsync(target)
            os.fsync(source)
            assert (here / "source").read_bytes() == (there / "target").read_bytes()
            assert os.fstat(target).st_blocks <= os.fstat(source).st_blocks + 64
            assert same(source, target, status.st_size)
            if status.st_size:
                at = random.Random(seed).randrange(status.st_size)
                byte = os.pread(target, 1, at)
                os.pwrite(target, bytes([byte[0] ^ 1]), at)
                assert not same(source, target, status.st_size)
            os.close(source)
            os.close(target)
    finally:
        for place in places:
            for file in place.iterdir():
                file.unlink()
            place.rmdir()
