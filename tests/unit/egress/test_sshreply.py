"""The refusal that an SSH client shows."""

from __future__ import annotations

import pytest

from casemate.egress import sshreply


@pytest.mark.parametrize(
    "text",
    ["", "a.example is not allowed", "x" * 9999, "é" * 9999, "a\nb\x1b[31m\0", *("y" * n for n in range(9))],
)
def test_the_packet_is_one_that_ssh_takes(text: str) -> None:
    """Padded to the block size with at least four bytes; reason, text and language as RFC 4253 has them."""
    version, _, packet = sshreply.refusal(text).partition(b"\r\n")
    assert version == b"SSH-2.0-casemate"
    assert len(packet) % 8 == 0
    assert len(packet) >= 16
    assert int.from_bytes(packet[:4], "big") == len(packet) - 4
    padding = packet[4]
    assert 4 <= padding < 12
    payload = packet[5 : len(packet) - padding]
    assert payload[:5] == b"\1\0\0\0\1"
    length = int.from_bytes(payload[5:9], "big")
    shown = payload[9 : 9 + length].decode()
    assert payload[9 + length :] == bytes(4)
    assert length <= 1024
    assert shown.isprintable()
    assert shown == "".join(char if char.isprintable() else " " for char in text)[: len(shown)]
    assert shown or not text


def test_looks_like_ssh() -> None:
    """By as many of the four bytes as there are."""
    for first in (b"S", b"SSH", b"SSH-", b"SSH-2.0-OpenSSH_9.2\r\n"):
        assert sshreply.looks_like_ssh(first)
    for first in (b"", b"GET ", b"\x16\3\1", b"SSL-", b"ssh-"):
        assert not sshreply.looks_like_ssh(first)
