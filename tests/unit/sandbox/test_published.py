"""Ports of the host that are taken for a command before it runs."""

from __future__ import annotations

import os
import socket

import pytest

from casemate.errors import SandboxError
from casemate.sandbox.published import Published


def free() -> int:
    """A port that nobody has just now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Share:
    """Takes what is handed over."""

    def __init__(self) -> None:
        self.given: list[tuple[int, int]] = []

    def publish(self, descriptor: int, inside: int) -> None:
        self.given.append((os.dup(descriptor), inside))


def test_both_loopbacks() -> None:
    """A port is taken on both loopback addresses and on no other, and let go in the end."""
    port = free()
    made = Published([f"{port}:80"])
    assert len(made.descriptors) == 2
    for address in ("127.0.0.1", "::1"):
        socket.create_connection((address, port), 5).close()
    with socket.create_server(("127.0.0.2", port)):
        pass  # still free
    made.close()
    made.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)


def test_taken() -> None:
    """A port that somebody has is an error that names it, and nothing stays taken of the others."""
    one = free()
    before = len(os.listdir("/proc/self/fd"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SandboxError) as caught:
            Published([f"{one}:80", f"{port}:81"])
        assert caught.value.code == "port-taken"
        assert str(port) in str(caught.value)
    assert len(os.listdir("/proc/self/fd")) == before
    Published([f"{one}:80"]).close()


def test_taken_on_the_other_loopback() -> None:
    """A port that is taken on ::1 alone is taken."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as other:
        with pytest.raises(SandboxError) as caught:
            Published([f"{other.getsockname()[1]}:80"])
        assert caught.value.code == "port-taken"


def test_just_ended() -> None:
    """A port whose last connection has just ended can be taken again."""
    port = free()
    for _ in range(2):
        made = Published([f"{port}:80"])
        with socket.create_connection(("127.0.0.1", port), 5) as client:
            with socket.socket(fileno=os.dup(made.descriptors[0])) as listener:
                listener.accept()[0].close()
            assert client.recv(1) == b""
        made.close()


def test_handed_over() -> None:
    """What a gate gets it has, with the port inside; here nothing is left of it."""
    port, share = free(), Share()
    made = Published([f"{port}:7000"])
    made.hand_over(share)  # type: ignore[arg-type]
    assert made.descriptors == []
    assert [inside for _, inside in share.given] == [7000, 7000]
    socket.create_connection(("127.0.0.1", port), 5).close()
    for descriptor, _ in share.given:
        os.close(descriptor)
