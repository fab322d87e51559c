"""No request or answer hides inside of another one: both sides are written anew from what was read."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import h11
import pytest

from tests.unit.egress.flowlab import NAME, OTHER, Gate, gate, network, raw, status, talk

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

HIDDEN = f"GET /hidden HTTP/1.1\r\nHost: {OTHER}\r\n\r\n".encode()


class Recorder:
    """A host that keeps what it gets and answers each request as a strict server would read it."""

    def __init__(self) -> None:
        self.bytes = b""
        self.requests: list[tuple[bytes, bytes, bytes]] = []
        self.lock = threading.Lock()

    def __call__(self, sock: socket.socket) -> None:
        with suppress(h11.RemoteProtocolError):  # cut in the middle
            self._serve(sock)

    def _serve(self, sock: socket.socket) -> None:
        connection = h11.Connection(h11.SERVER)
        body = b""
        method = target = b""
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                data = sock.recv(65536)
                with self.lock:
                    self.bytes += data
                connection.receive_data(data)
            elif isinstance(event, h11.Request):
                method, target, body = event.method, event.target, b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                with self.lock:
                    self.requests.append((method, target, body))
                answer = h11.Response(status_code=200, headers=[("Content-Length", "2")])
                sock.sendall(connection.send(answer) + connection.send(h11.Data(b"ok")))
                connection.send(h11.EndOfMessage())
                if connection.our_state is h11.MUST_CLOSE:
                    return
                connection.start_next_cycle()
            else:
                return


@pytest.fixture
def recorder() -> Recorder:
    """What the host got."""
    return Recorder()


@pytest.fixture
def made(recorder: Recorder) -> Iterator[Gate]:
    """A gate before it."""
    with raw(recorder) as address, gate(address, network()) as found:
        yield found


def post(made: Gate, fields: bytes, body: bytes = b"", *, line: bytes = b"POST /first HTTP/1.1") -> bytes:
    """A request with these fields, as bytes."""
    return line + b"\r\nHost: " + made.host.encode() + b"\r\n" + fields + b"\r\n" + body


# Fields and body, where the body is a request if the fields are read in another way. None may arrive as one.
ATTACKS = {
    "both-lengths": (b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n" + HIDDEN),
    "both-lengths-other-way": (b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n", b"0\r\n\r\n" + HIDDEN),
    "two-lengths": (b"Content-Length: 0\r\nContent-Length: %d\r\n" % len(HIDDEN), HIDDEN),
    "list-of-lengths": (b"Content-Length: 0, %d\r\n" % len(HIDDEN), HIDDEN),
    "length-with-plus": (b"Content-Length: +0\r\n", HIDDEN),
    "length-in-hex": (b"Content-Length: 0x0\r\n", HIDDEN),
    "length-negative": (b"Content-Length: -1\r\n", HIDDEN),
    "length-with-space": (b"Content-Length : 0\r\n", HIDDEN),
    "length-empty": (b"Content-Length: \r\n", HIDDEN),
    "length-underscore": (b"Content-Length: 1_0\r\n", HIDDEN),
    "length-too-long": (b"Content-Length: %d\r\n" % 10**30, HIDDEN),
    "coding-with-tab": (b"Transfer-Encoding:\tchunked\x0b\r\n", b"0\r\n\r\n" + HIDDEN),
    "coding-misspelt": (b"Transfer-Encoding: xchunked\r\n", b"0\r\n\r\n" + HIDDEN),
    "coding-list": (b"Transfer-Encoding: identity, chunked\r\n", b"0\r\n\r\n" + HIDDEN),
    "coding-twice": (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", b"0\r\n\r\n" + HIDDEN),
    "coding-with-space": (b"Transfer-Encoding : chunked\r\n", b"0\r\n\r\n" + HIDDEN),
    "coding-quoted": (b'Transfer-Encoding: "chunked"\r\n', b"0\r\n\r\n" + HIDDEN),
    "nul-in-value": (b"X: a\0b\r\n", HIDDEN),
    "nul-in-name": (b"X\0: a\r\n", HIDDEN),
    "cr-in-value": (b"X: a\rContent-Length: 0\r\n", HIDDEN),
    "no-colon": (b"Just a line\r\n", HIDDEN),
    "space-before-name": (b" Content-Length: 0\r\n", HIDDEN),
    "two-hosts": (f"Host: {OTHER}\r\n".encode(), HIDDEN),
    "length-hidden-by-connection": (b"Connection: content-length\r\nContent-Length: 0\r\n", HIDDEN),
    "chunk-size-negative": (b"Transfer-Encoding: chunked\r\n", b"-1\r\n" + HIDDEN),
    "chunk-size-in-hex": (b"Transfer-Encoding: chunked\r\n", b"0x0\r\n\r\n" + HIDDEN),
    "chunk-size-with-space": (b"Transfer-Encoding: chunked\r\n", b" 0\r\n\r\n" + HIDDEN),
    "chunk-size-huge": (b"Transfer-Encoding: chunked\r\n", b"f" * 40 + b"\r\n" + HIDDEN),
    "chunk-without-end": (b"Transfer-Encoding: chunked\r\n", b"1\r\nxYY0\r\n\r\n" + HIDDEN),
    "chunk-with-bare-lf": (b"Transfer-Encoding: chunked\r\n", b"1\nx\n0\n\n" + HIDDEN),
    "chunk-extension-with-lf": (b"Transfer-Encoding: chunked\r\n", b"1;x\ny\r\nz\r\n0\r\n\r\n" + HIDDEN),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_refused(made: Gate, recorder: Recorder, attack: str) -> None:
    """A request that two servers could read differently ends the connection; nothing hidden in it arrives."""
    found = talk(made.port, post(made, *ATTACKS[attack]), finish=True)
    assert b"HTTP/1.1 200" not in found
    assert b"/hidden" not in recorder.bytes
    assert all(target == b"/first" for _, target, _ in recorder.requests)


def test_control(made: Gate, recorder: Recorder) -> None:
    """The same request with one length, or in chunks, arrives; what follows it is a request of its own."""
    again = post(made, b"Transfer-Encoding: chunked\r\n", b"5;x=y\r\nhello\r\n0\r\n\r\n")
    found = talk(
        made.port, post(made, b"Content-Length: 5\r\n", b"hello") + again + post(made, b""), finish=True
    )
    assert found.count(b"HTTP/1.1 200") == 3
    assert recorder.requests == [(b"POST", b"/first", b"hello")] * 2 + [(b"POST", b"/first", b"")]


@pytest.mark.parametrize(
    ("fields", "body", "arrives"),
    [
        (b"Content-Length: %d\r\n" % len(HIDDEN), HIDDEN, HIDDEN),
        (b"Transfer-Encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN), HIDDEN),
        (b"TRANSFER-ENCODING:   chunKED  \r\n", b"1\r\nx\r\n0\r\nContent-Length: 9\r\n\r\n", b"x"),
        (b"Content-Length: 3\r\nX-Fold: a\r\n b\r\n\tc\r\n", b"abc", b"abc"),
        (b"Content-Length: 3, 3\r\n", b"abc", b"abc"),
    ],
)
def test_made_plain(made: Gate, recorder: Recorder, fields: bytes, body: bytes, arrives: bytes) -> None:
    """What can be read in one way only arrives in the one form that nobody reads differently."""
    assert status(talk(made.port, post(made, fields, body), finish=True)) == 200
    assert recorder.requests == [(b"POST", b"/first", arrives)]
    head = recorder.bytes.partition(b"\r\n\r\n")[0]
    assert b"\r\n " not in head
    assert b"\r\n\t" not in head
    assert head.lower().count(b"content-length") + head.lower().count(b"transfer-encoding") == 1


def test_bare_line_feeds(made: Gate, recorder: Recorder) -> None:
    """Lines that end in a bare LF are read, and written with CR LF; the host sees no other line in them."""
    data = post(made, b"X-Mine: 1\r\n").replace(b"\r\n", b"\n")
    assert status(talk(made.port, data, finish=True)) == 200
    assert b"X-Mine: 1\r\n" in recorder.bytes
    assert b"\n" not in recorder.bytes.replace(b"\r\n", b"")


@pytest.mark.parametrize(
    "line",
    [
        b"POST /first HTTP/1.1 ",
        b"POST  /first HTTP/1.1",
        b"POST /first  HTTP/1.1",
        b"POST\t/first\tHTTP/1.1",
        b"POST /first HTTP/1.1\rX",
        b"POST /fi\xc3\xa4rst HTTP/1.1",
        b"POST /first HTTP/2.0",
        b"POST /first http/1.1",
        b"POST /first",
        b"POST /fir\0st HTTP/1.1",
        b"P\0ST /first HTTP/1.1",
        b"PO(T /first HTTP/1.1",
        b"\r\n\r\nPOST /first HTTP/1.1",
        b"GET http://" + OTHER.encode() + b"/ HTTP/1.1",
        b"CONNECT " + OTHER.encode() + b":80 HTTP/1.1",
        b"PRI * HTTP/2.0",
    ],
)
def test_request_lines(made: Gate, recorder: Recorder, line: bytes) -> None:
    """A first line in any form but the one is refused, and the host hears nothing."""
    found = talk(made.port, post(made, b"", line=line) + HIDDEN, finish=True)
    assert status(found) in (400, 403)
    assert recorder.bytes == b""


EVIL = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
SPLIT = {
    "second-answer": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + EVIL,
    "after-204": b"HTTP/1.1 204 No\r\n\r\n" + EVIL,
    "after-304": b"HTTP/1.1 304 No\r\nContent-Length: 4\r\n\r\nevil",
    "both-lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2\r\nok\r\n0\r\n\r\nevil",
}


@pytest.mark.parametrize("attack", SPLIT)
def test_answers_that_hold_another(attack: str) -> None:
    """What a host sends behind its answer never becomes the answer to the next request."""
    asked = []

    def script(sock: socket.socket) -> None:
        data = sock.recv(65536)
        asked.append(data)
        sock.sendall(
            SPLIT[attack] if b"/first" in data else b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nreal"
        )
        with suppress(OSError):
            sock.recv(1)

    with raw(script) as address, gate(address, network()) as made:
        data = (
            f"GET /first HTTP/1.1\r\nHost: {made.host}\r\n\r\nGET /second HTTP/1.1\r\nHost: {made.host}\r\n"
        )
        found = talk(made.port, f"{data}Connection: close\r\n\r\n".encode())
        assert b"evil" not in found
        assert found.endswith(b"real")
    assert len(asked) == 2


def test_an_answer_in_the_value_of_a_field() -> None:
    """A carriage return or a NUL in an answer's head is an error, and the client gets none of it."""
    for value in (b"a\rSet-Cookie: evil", b"a\0b", b"a\r\n\r\nHTTP/1.1 200 OK\r\nSet-Cookie: evil=1"):

        def script(sock: socket.socket, value: bytes = value) -> None:
            sock.recv(65536)
            sock.sendall(b"HTTP/1.1 204 OK\r\nX: " + value + b"\r\n\r\n")

        with raw(script) as address, gate(address, network()) as made:
            found = talk(
                made.port, f"GET / HTTP/1.1\r\nHost: {made.host}\r\nConnection: close\r\n\r\n".encode()
            )
            assert b"Set-Cookie" not in found
            assert b"\0" not in found
            assert status(found) in (204, 502)


def test_rubbish(made: Gate, recorder: Recorder) -> None:
    """Random bytes, TLS, SSH and the preface of HTTP/2 get an answer or the end; the host hears nothing."""
    for data in (
        os.urandom(1000), b"\x16\x03\x01\x02\x00" + os.urandom(512), b"SSH-2.0-x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9), b"\0" * 100, b"\r\n" * 1000, b"GET" * 50_000,
    ):  # fmt: skip
        assert status(talk(made.port, data, finish=True)) in (0, 400, 403, 431)
    assert recorder.bytes == b""
    assert NAME not in recorder.bytes.decode()
