"""Packets: what is sent arrives whole with its descriptors, or the receiver says that it did not."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import time
from typing import TYPE_CHECKING

import pytest

from casemate.sys import packets

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(10)
        theirs.settimeout(10)
        yield ours, theirs


@pytest.mark.parametrize("size", [0, 1, (64 << 10) - 1, 64 << 10, 3 << 20])
def test_a_message_arrives_whole(ends: tuple[socket.socket, socket.socket], size: int) -> None:
    """Messages of any size arrive as they were, with descriptors of the same files, in their order."""
    message = bytes(range(1, 256)) * (size // 255 + 1)
    pipe = os.pipe()
    packets.send(ends[0], message[:size], list(pipe))
    got, handles = packets.receive(ends[1])
    assert got == message[:size]
    assert [os.fstat(handle).st_ino for handle in handles] == [os.fstat(end).st_ino for end in pipe]
    assert not any(os.get_inheritable(handle) for handle in handles)
    for handle in (*pipe, *handles):
        os.close(handle)


def test_the_end_is_no_message(ends: tuple[socket.socket, socket.socket]) -> None:
    """The other side's end is told from an empty message."""
    packets.send(ends[0], b"")
    ends[0].close()
    assert packets.receive(ends[1]) == (b"", [])
    assert packets.receive(ends[1]) == (None, [])


def test_a_message_has_a_bound(ends: tuple[socket.socket, socket.socket]) -> None:
    """Too large a message is refused by its sender; one of the largest size is taken."""
    with pytest.raises(OSError, match="too large"):
        packets.send(ends[0], bytes(packets.MAX_PACKET + 1))
    packets.send(ends[0], bytes(packets.MAX_PACKET))
    got, _ = packets.receive(ends[1])
    assert got is not None
    assert len(got) == packets.MAX_PACKET


@pytest.mark.parametrize("packet", [b"x", b"s", b"w" * 65537], ids=["foreign", "no file", "cut off"])
def test_nonsense_is_said_to_be_none(ends: tuple[socket.socket, socket.socket], packet: bytes) -> None:
    """A foreign packet, one whose file is missing and one that was cut off are no messages."""
    ends[0].send(packet)
    with pytest.raises(ValueError, match="message"):
        packets.receive(ends[1])


def test_nonsense_leaves_no_descriptor_open(ends: tuple[socket.socket, socket.socket]) -> None:
    """The descriptors of a packet that is refused are closed: its pipe has no reader any more."""
    read, write = os.pipe()
    socket.send_fds(ends[0], [b"x"], [read])
    os.close(read)
    os.write(write, b"held by the packet under way")  # control
    with pytest.raises(ValueError, match="message"):
        packets.receive(ends[1])
    with pytest.raises(BrokenPipeError):
        os.write(write, b"held by nobody")
    os.close(write)


@pytest.mark.parametrize("words", [[""], ["", ""], ["a", "", "b c\n", "é\udcff"]])
def test_words_come_back(words: list[str]) -> None:
    """Words come back as they were: empty ones, and bytes that are not UTF-8."""
    assert packets.split(packets.join(words)) == words


@pytest.mark.parametrize("word", ["a\0b", "\0", "\ud800"])
def test_what_is_no_word_is_refused(word: str) -> None:
    """A NUL would shift every word after it, and half a character stands for no byte: neither is sent."""
    with pytest.raises(ValueError, match=r"NUL|surrogates"):
        packets.join(["fine", word])


@pytest.mark.parametrize("number", [0, 2000])
def test_readable(number: int) -> None:
    """Whether there is something to read is known of a descriptor of any number, at once or after a while."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit[0], 4096), limit[1]))
    read, write = os.pipe()
    moved = fcntl.fcntl(read, fcntl.F_DUPFD_CLOEXEC, number)
    try:
        assert not packets.readable(moved)
        began = time.monotonic()
        assert not packets.readable(moved, 0.05)
        assert time.monotonic() - began >= 0.04
        os.write(write, b"x")
        assert packets.readable(moved, 5)
        os.read(moved, 1)
        assert not packets.readable(moved)
        os.close(write)
        write = -1
        assert packets.readable(moved)
    finally:
        for end in (read, write, moved):
            if end >= 0:
                os.close(end)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
