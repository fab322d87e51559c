"""What the first bytes of a stream are taken for."""

from __future__ import annotations

import pytest

from casemate.egress.classify import HTTP, OTHER, TLS, UNDECIDED, classify


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"\x16\x03\x01\x02\x00\x01", TLS), (b"\x16\x04\x00", TLS), (b"\x16", TLS),
        (b"GET / HTTP/1.1\r\n", HTTP), (b"get / http/1.1\r\n", HTTP), (b"GET  /", HTTP), (b"GET /x\r\n",
         HTTP),
        (b"\r\n\r\nGET / HTTP/1.1\r\n", HTTP), (b"GET\t/\tHTTP/1.1\r\n", HTTP), (b"PRI * HTTP/2.0\r\n", HTTP),
        (b"FROB / HTTP/1.1\r\n", HTTP), (b" \tPOST / HTTP/1.0\n", HTTP),
        (b"G", UNDECIDED), (b"GET", UNDECIDED), (b"\r\n", UNDECIDED), (b"FROB /", UNDECIDED), (b" ",
         UNDECIDED),
        (b"SSH-2.0-OpenSSH_9\r\n", OTHER), (b"EHLO there\r\n", OTHER), (b"*1\r\n$4\r\nPING\r\n", OTHER),
        (b"PING\r\n", OTHER), (b"\x00\x00\x00\x08\x04\xd2\x16\x2f", OTHER), (b"\x10\x24\x00", OTHER),
        (b"NICK me\r\n", OTHER), (b"AMQP\0\0\x09\x01", OTHER), (b'{"id": 1}', OTHER), (b"caf\xc3\xa9 /",
         OTHER),
        (b"a" * 40, UNDECIDED), (b"FROB /\x01", UNDECIDED), (b"FROB /\x01 HTTP/1.1\r\n", HTTP),
        (b"F" * 40 + b" / HTTP/1.1\r\n", HTTP), (b"FR(OB / HTTP/1.1\r\n", HTTP),
        # A proxy's word on its client, with a request behind it.
        (b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\nGET / HTTP/1.1\r\n", HTTP), (b"PROXY", UNDECIDED),
        (b"\r\n\r\n\0\r\nQUIT\n\x21\x11", HTTP), (b"\r\n\r\n\0\r\nQU", UNDECIDED),
        (b"\r\n\r\n\0\r\nquit\n", OTHER),
        # What does not come to an end is refused as a request that has none.
        (b"FROB " + b"x" * 9000, HTTP), (b"a" * 9000, HTTP), (b"\r\n" * 4200, HTTP),
    ],
)  # fmt: skip
def test_first_bytes(data: bytes, found: str) -> None:
    """Whatever a lenient server reads as a request is one; what could become one is not decided yet."""
    assert classify(data) == found


@pytest.mark.parametrize("data", [b"HEAD 12\r\n", b"POST\r\n", b"DELETE inbox\r\n", b"a1 LOGIN me pw\r\n"])
def test_commands_of_other_protocols(data: bytes) -> None:
    """Where the server has spoken first, words that are called like methods are no requests."""
    assert classify(data, server_spoke=True) == OTHER


def test_a_request_stays_one_after_a_greeting() -> None:
    """Control: a request line that says its version is HTTP whoever spoke first."""
    assert classify(b"GET / HTTP/1.1\r\n", server_spoke=True) == HTTP


@pytest.mark.parametrize(
    "text", [b"GET / HTTP/1.1\r\n", b"FROB\t/\tHTTP/1.1\r\n", b"\r\n\r\nget / http/1.0\r\n"]
)
def test_no_beginning_of_a_request_is_something_else(text: bytes) -> None:
    """However a request is cut, no part of it is passed on as another protocol."""
    assert OTHER not in {classify(text[:end]) for end in range(1, len(text) + 1)}
