"""Compressed answers are read in bounded pieces, or refused."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib

import pytest

from casemate.egress.decode import Decoder

TEXT = b"".join(b"line %d of what was said\n" % number for number in range(5000))


def raw_deflate(data: bytes) -> bytes:
    """Deflate without the zlib format around it, as some servers send it."""
    machine = zlib.compressobj(wbits=-15)
    return machine.compress(data) + machine.flush()


CODED = {
    "gzip": gzip.compress(TEXT),
    "x-gzip": gzip.compress(TEXT[:1000]) + gzip.compress(TEXT[1000:]),
    "deflate": zlib.compress(TEXT),
}


@pytest.mark.parametrize("coding", CODED)
@pytest.mark.parametrize("size", [1, 2, 7, 1000, 1 << 20])
def test_what_was_said(coding: str, size: int) -> None:
    """Each coding gives back the text in whatever pieces it comes, members of gzip one after the other."""
    decoder = Decoder(coding)
    data = CODED[coding]
    found = b"".join(b"".join(decoder.feed(data[at : at + size])) for at in range(0, len(data), size))
    decoder.end()
    assert found == TEXT


def test_the_bare_form_of_deflate() -> None:
    """ "deflate" is read with and without the zlib format around it."""
    decoder = Decoder("deflate")
    assert b"".join(decoder.feed(raw_deflate(TEXT))) == TEXT
    decoder.end()


def test_an_empty_body() -> None:
    """Nothing at all is no error: some servers name a coding for an empty body."""
    decoder = Decoder("gzip")
    assert list(decoder.feed(b"")) == []
    decoder.end()


@pytest.mark.parametrize("coding", CODED)
def test_cut_short(coding: str) -> None:
    """An end that comes too early is an error and not an end."""
    decoder = Decoder(coding)
    list(decoder.feed(CODED[coding][:-3]))
    with pytest.raises(ValueError, match="early"):
        decoder.end()


@pytest.mark.parametrize("data", [b"plain text", b"\x1f\x8b\x08junk after the head", CODED["gzip"] + b"junk"])
def test_not_compressed(data: bytes) -> None:
    """What is not compressed as it says, or has something behind it, is an error."""

    def read() -> None:
        decoder = Decoder("gzip")
        list(decoder.feed(data))
        decoder.end()

    with pytest.raises(ValueError, match="compressed"):
        read()


def test_something_behind_deflate() -> None:
    """Something behind the end of a zlib stream is an error."""
    with pytest.raises(ValueError, match="follows"):
        list(Decoder("deflate").feed(CODED["deflate"] + b"x"))


def test_a_bomb_comes_in_pieces() -> None:
    """64 MiB of zeros in 64 KiB take no more memory than a few pieces, and all of them come."""
    bomb = gzip.compress(bytes(64 << 20), 9)
    tracemalloc.start()
    try:
        total, largest = 0, 0
        for piece in Decoder("gzip").feed(bomb):
            total += len(piece)
            largest = max(largest, len(piece))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total == 64 << 20
    assert largest <= 64 << 10
    assert peak < 2 << 20
