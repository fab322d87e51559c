"""Messages between a keeper and its client, and what init reports: whole, bounded, and never a crash."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from casemate.isolation.process import wire
from casemate.isolation.process.outcome import Outcome, interpret
from casemate.sandbox import settle
from casemate.sys import packets

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any]]:
    """Two ends of a socket of packets."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=10), json_values, max_size=5))
def test_message_round_trip(message: dict[str, Any]) -> None:
    """Any object arrives as it was sent."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        wire.send(ours, message)
        assert wire.receive(theirs) == (message, [])


@pytest.mark.parametrize("size", [0, 65_000, 65_535, 65_536, 65_537, 1 << 20, (16 << 20) - 100])
def test_sizes(pair: tuple[Any, Any], size: int) -> None:
    """Small messages travel in the packet, large ones in an anonymous file: all of them arrive whole."""
    ours, theirs = pair
    payload = os.urandom(1) * size
    packets.send(ours, payload)
    assert packets.receive(theirs) == (payload, [])
    assert not _waiting(theirs)


def test_too_large(pair: tuple[Any, Any]) -> None:
    """What is larger than the bound is refused on the way out, and nothing of it is sent."""
    ours, theirs = pair
    with pytest.raises(OSError, match="too large"):
        packets.send(ours, bytes(packets.MAX_PACKET + 1))
    assert not _waiting(theirs)


@pytest.mark.parametrize(("count", "size"), [(1, 10), (64, 10), (200, 10), (1, 200_000), (64, 200_000)])
def test_descriptors(pair: tuple[Any, Any], count: int, size: int) -> None:
    """Descriptors arrive in order, close-on-exec, beside a message of any size."""
    ours, theirs = pair
    read, write = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    try:
        packets.send(ours, b"x" * size, [write] * count)
        payload, handles = packets.receive(theirs)
        assert payload == b"x" * size
        assert len(handles) == count
        assert not any(os.get_inheritable(handle) for handle in handles)
        for number, handle in enumerate(handles):
            os.write(handle, bytes([number % 256]))
            os.close(handle)
        assert os.read(read, 1000) == bytes(number % 256 for number in range(count))
    finally:
        os.close(read)
        os.close(write)
    assert len(os.listdir("/proc/self/fd")) == before - 2


def test_the_end(pair: tuple[Any, Any]) -> None:
    """The other side's end is no message; an empty message is one."""
    ours, theirs = pair
    packets.send(ours, b"")
    assert packets.receive(theirs) == (b"", [])
    ours.close()
    assert packets.receive(theirs) == (None, [])


def test_nonsense_leaks_no_descriptor(pair: tuple[Any, Any]) -> None:
    """A packet that is no message is an error; the descriptors that came along are closed."""
    ours, theirs = pair
    handle = os.open("/dev/null", os.O_RDONLY)
    before = len(os.listdir("/proc/self/fd"))
    for packet, handles in (
        (b"x", [handle]),
        (b"s", []),
        (b"sx", [handle]),
        (b"s", [handle] * 2),
        (b"", [handle]),
    ):
        data = b"".join(number.to_bytes(4, "little") for number in handles)
        ours.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, data)] if handles else [])
        try:
            payload, got = packets.receive(theirs)
        except ValueError:
            continue
        # A descriptor of something empty passes as an empty message's file.
        assert (packet, payload) == (b"s", b"")
        for number in got:
            os.close(number)
    for payload in (b"", b"[]", b"1", b"null", b"{", b'{"a":}', b"\xff", b'"text"'):
        packets.send(ours, payload, [handle])
        with pytest.raises(ValueError):  # noqa: PT011 - JSON's own error is one, too
            wire.receive(theirs)
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(handle)


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=10), min_size=1
    )
)
@example(["", ""])
@example(["\udcff", "a\nb"])
def test_words_round_trip(words: list[str]) -> None:
    """Lists of words come back as they were, empty words and bytes that are no UTF-8 included."""
    assert packets.split(packets.join(words)) == words


def test_words_with_nul() -> None:
    """A word with a NUL would become two: it is refused."""
    with pytest.raises(ValueError, match="NUL"):
        packets.join(["a", "b\0c"])


def _waiting(endpoint: Any) -> bool:
    endpoint.setblocking(False)
    try:
        return bool(endpoint.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        endpoint.setblocking(True)


# -- what init reports ---------------------------------------------------------------------------------


def test_record_of_an_end() -> None:
    """The records of a command that ran: started, ended, status, costs."""
    outcome = Outcome()
    interpret(b"S\x0012.5\nW\x00768\x0013.25\x000.5\x000.25\x002048\n", outcome)
    assert (outcome.spawned, outcome.status, outcome.failure) == (True, 768, None)
    assert outcome.times == {"spawned": 12.5, "ended": 13.25}
    assert outcome.rusage == (0.5, 0.25, 2048 * 1024)


@pytest.mark.parametrize(
    ("record", "failure"),
    [
        (b"X\x002\x00name", ("X", "2", "name")),
        (b"C\x0013\x00/ws/a b", ("C", "13", "/ws/a b")),
        (b"F\x00mounts\x002\x00what\x00OSError: text", ("F", "mounts", "2", "what", "OSError: text")),
        (b"X\x002\x00bad-\xff", ("X", "2", "bad-\udcff")),
    ],
)
def test_record_of_a_failure(record: bytes, failure: tuple[str, ...]) -> None:
    """The records of what kept a command from running."""
    outcome = Outcome()
    interpret(record, outcome)
    assert (outcome.failure, outcome.status, outcome.spawned) == (failure, None, False)


hostile = st.lists(
    st.one_of(
        st.binary(max_size=30),
        st.sampled_from(
            (b"S", b"W", b"X", b"C", b"F", b"\0", b"\n", b"1", b"-1", b"nan", b"inf", b"1e999", b"9" * 30)
        ),
    ),
    max_size=20,
).map(b"".join)


class _Job:
    """As much of a job as an error message needs."""

    class request:
        argv = ("true",)
        environ = {"PATH": "/usr/bin"}


@given(hostile)
@example(b"W\x00x\x00y\x00z\x00a\x00b\n")
@example(b"W\x00" + b"9" * 400 + b"\x001\x001\x001\x001\n")
@example(b"W\x000\x00nan\x00inf\x00-1\x001e400\n")
@example(b"X")
@example(b"X\x00")
@example(b"C")
@example(b"C\x00" + b"9" * 30)
@example(b"F\x00a\x00b")
@example("X\x00²\x00n".encode())
def test_a_hostile_record(record: bytes) -> None:
    """Init is inside: whatever it writes, the host has bounded numbers, or an error of the tree."""
    from casemate.errors import SandboxError

    outcome = Outcome()
    interpret(record, outcome)
    assert outcome.status is None or 0 <= outcome.status <= 0xFFFF
    if outcome.status is not None:
        os.WIFSIGNALED(outcome.status), os.WEXITSTATUS(outcome.status), os.WTERMSIG(outcome.status)
    for value in (*outcome.times.values(), *outcome.rusage):
        assert 0 <= value < 1e19
    if outcome.failure is not None:
        with pytest.raises(SandboxError) as caught:
            settle.check_failure(_Job, outcome)  # type: ignore[arg-type]
        assert caught.value.message
