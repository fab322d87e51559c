"""Plain HTTP through the gate: what is refused, and how much time and room anybody gets."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from casemate.egress.exchange import Limits
from tests.unit.egress.flowlab import (
    NAME,
    OTHER,
    Gate,
    curl,
    gate,
    head,
    network,
    raw,
    rest,
    status,
    talk,
)
from tests.unit.egress.flowsite import get

if TYPE_CHECKING:
    from collections.abc import Callable


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("host", "code"),
    [("{host}", 200), (OTHER, 403), ("{name}:1", 403), ("{host}, x", 403), ("evil.{host}", 403)],
)
def test_host_must_be_the_decided_one(plain: Gate, host: str, code: int) -> None:
    """A request for another host is refused, and the answer says which and why."""
    shown = host.format(host=plain.host, name=NAME)
    found = talk(plain.port, f"GET / HTTP/1.1\r\nHost: {shown}\r\nConnection: close\r\n\r\n".encode())
    assert status(found) == code
    assert (b"X-Casemate-Refused: host-differs" in found) is (code == 403)
    assert plain.dialled == (1 if code == 200 else 0)


def test_host_of_every_request(plain: Gate) -> None:
    """Later requests on the connection are held to the host as well, pipelined ones too."""
    evil = f"GET /evil HTTP/1.1\r\nHost: {OTHER}\r\n\r\n".encode()
    found = talk(plain.port, get(plain, "/good") + evil + get(plain, "/after"))
    assert found.count(b"HTTP/1.1 200") == 1
    assert found.count(b"HTTP/1.1 403") == 1
    assert b"/evil" not in found.split(b"HTTP/1.1 403")[0]
    assert b"/after" not in found
    assert [kind[:2] for kind in plain.kinds("request", 2)] == [("allow", ""), ("deny", "host-differs")]


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/repos/x", 200),
        ("GET", "/repos/x?y=../../z", 200),
        ("GET", "/%72epos/x", 200),
        ("POST", "/graphql", 200),
        ("GET", "/", 403),
        ("DELETE", "/repos/x", 403),
        ("GET", "/repos/x/y", 403),
        ("GET", "/repos/../admin", 403),
        ("GET", "/repos/%2e%2e/admin", 403),
        ("GET", "/repos/..%2fadmin", 403),
        ("GET", "/repos//x", 403),
        ("GET", "/repos/..;/admin", 403),
        ("GET", "/repos/%252e%252e/", 403),
        ("GET", "/REPOS/x", 403),
    ],
)
def test_rules_about_requests(plain: Gate, method: str, path: str, code: int) -> None:
    """With rules about requests only those pass, however the path is spelt; a refusal shows the line."""
    plain.decider = type(plain.decider)(network(requests={NAME: ("GET /repos/*", "POST /graphql")}))
    found = talk(plain.port, get(plain, path, "Connection: close", "Content-Length: 0", method=method))
    assert status(found) == code
    refused = plain.kinds("request", 1)[0]
    assert refused[:2] == ("allow", "") or refused[1] in ("request", "request-ambiguous")
    assert (b"network.requests" in found) is (refused[1] == "request")


def test_overrides_pass_without_rules(plain: Gate) -> None:
    """A field that stands for another method is refused where there are rules, and only there."""
    asked = get(plain, "/repos/x", "X-HTTP-Method-Override: DELETE", "Connection: close")
    assert status(talk(plain.port, asked)) == 200
    plain.decider = type(plain.decider)(network(requests={NAME: ("GET /repos/*",)}))
    assert b"X-Casemate-Refused: override" in talk(plain.port, asked)


def test_a_refusal_is_heard_while_a_body_comes(plain: Gate) -> None:
    """A refused upload is not read to its end, and its client still hears why."""
    plain.decider = type(plain.decider)(network(requests={NAME: ("GET /**",)}))
    assert b"network.requests" in curl(plain, "-X", "PUT", "--data-binary", "x" * 100_000, path="/up").stdout
    with socket.create_connection(("127.0.0.1", plain.port), 10) as sock:
        sock.sendall(get(plain, "/up", "Content-Length: 3000000", method="PUT") + bytes(500_000))
        assert b"network.requests" in rest(sock)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"", 502),
        (b"SSH-2.0-x\r\n\r\n", 502),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", 502),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 502),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 502),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 200_000 + b"\r\n\r\n", 502),
        (b"HTTP/1.1 200 OK\r\n" + b"a:\n" * 20_000 + b"\r\n", 502),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 2000, 502),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", 200),
    ],
)
def test_answers_that_are_none(answer: bytes, code: int) -> None:
    """A host whose answer is no HTTP/1.1 gives 502 and not its bytes."""

    def script(sock: socket.socket) -> None:
        head(sock)
        sock.sendall(answer)

    with raw(script) as address, gate(address, network()) as made:
        found = talk(made.port, get(made, "/", "Connection: close"))
        assert b"HTTP/1.1 %d " % code in found
        assert code == 200 or b"casemate" in found


@pytest.mark.parametrize(
    "begin",
    [
        b"Content-Length: 100\r\n\r\nhalf of it",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloXX0\r\n\r\n",
    ],
)
def test_a_cut_answer_does_not_look_whole(begin: bytes) -> None:
    """Where a host stops in the middle, the client sees that it is not the end."""

    def script(sock: socket.socket) -> None:
        head(sock)
        sock.sendall(b"HTTP/1.1 200 OK\r\n" + begin)

    with raw(script) as address, gate(address, network()) as made:
        done = curl(made)
        assert done.returncode in (18, 56), done
        assert b"0\r\n\r\n" not in talk(made.port, get(made)).partition(b"\r\n\r\n")[2]


def test_a_host_that_is_not_there() -> None:
    """Without a connection there is an answer that says so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = listener.getsockname()
    with gate(closed, network()) as made:
        found = talk(made.port, get(made))
        assert status(found) == 502
        assert b"Connection refused" in found
        assert made.kinds() == [("deny", "no-connection", "GET /")]


# ---------------------------------------------------------------- time and room


def waits(limits: Limits, data: bytes, *, script: Callable[[socket.socket], None] | None = None) -> bytes:
    """What a client gets that says no more than this."""
    with raw(script or rest) as address, gate(address, network(), limits=limits) as made:  # type: ignore[arg-type]
        return talk(made.port, data.replace(b"HOST", made.host.encode()))


def test_slow_heads() -> None:
    """A head that takes too long ends with 408, a connection without a request without a word."""
    limits = Limits(head=0.3, idle=0.3)
    assert status(waits(limits, b"GET / HTTP/1.1\r\nHost: HOST\r\nX-Slow: ")) == 408
    assert waits(limits, b"") == b""


def test_a_head_that_drips() -> None:
    """Each byte does not give more time: the whole head has a limit."""
    limits = Limits(head=0.5)
    with (
        raw(lambda sock: None) as address,
        gate(address, network(), limits=limits) as made,
        socket.create_connection(("127.0.0.1", made.port), 10) as sock,
    ):
        began = time.monotonic()
        with suppress(OSError):
            for byte in b"GET / HTTP/1.1\r\nX: " + b"y" * 1000:
                sock.sendall(bytes((byte,)))
                sock.settimeout(0.05)
                with suppress(TimeoutError):
                    if sock.recv(1000):
                        break
        assert time.monotonic() - began < 5


def test_silent_hosts() -> None:
    """A host that does not answer gives 504; one that stops in the middle ends the connection."""
    limits = Limits(silent=1.0)
    request = b"GET / HTTP/1.1\r\nHost: HOST\r\n\r\n"
    assert status(waits(limits, request)) == 504

    def stops(sock: socket.socket) -> None:
        head(sock)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
        rest(sock)

    assert waits(limits, request, script=stops).endswith(b"half")


def test_a_body_that_stops() -> None:
    """A client that stops in the middle of a body does not hold the host for ever."""
    limits = Limits(silent=0.4)
    found = waits(limits, b"POST / HTTP/1.1\r\nHost: HOST\r\nContent-Length: 10\r\n\r\nhalf")
    assert status(found) in (0, 504)


def test_progress_is_no_silence() -> None:
    """A transfer that lasts longer than the limit of silence, and moves, is not ended."""
    limits = Limits(silent=3.0)

    def script(sock: socket.socket) -> None:
        head(sock)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n")
        gone = threading.Event()
        for _ in range(30):
            sock.sendall(b".")
            gone.wait(0.15)

    assert waits(
        limits, b"GET / HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n", script=script
    ).endswith(b"." * 30)


@pytest.mark.parametrize(
    "head_bytes",
    [
        b"X: " + b"y" * 300_000 + b"\r\n",
        b"X: y\r\n" * 100_000,
        b"X: y\r\n" * 300,
        b"x" * 300_000,
    ],
)
def test_large_heads(plain: Gate, head_bytes: bytes) -> None:
    """A head that is too long, or has too many fields, is refused before the host hears of it."""
    found = talk(
        plain.port, b"GET / HTTP/1.1\r\nHost: " + plain.host.encode() + b"\r\n" + head_bytes + b"\r\n"
    )
    assert status(found) in (400, 403, 431)
    assert plain.dialled == 0


def test_large_heads_that_are_fine(plain: Gate) -> None:
    """Control: 40 KiB of cookies and 90 fields pass (the host takes no more than 100)."""
    assert status(talk(plain.port, get(plain, "/", "Cookie: " + "c" * 40_000, "Connection: close"))) == 200
    assert status(talk(plain.port, get(plain, "/", *["X: y"] * 90, "Connection: close"))) == 200


def test_a_slow_reader_stops_the_host() -> None:
    """What a client does not read is not collected: the host cannot send on."""
    sent = [0]
    done = threading.Event()

    def script(sock: socket.socket) -> None:
        head(sock)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 200000000\r\n\r\n")
        sock.settimeout(1.0)
        with suppress(OSError):
            while sent[0] < 200_000_000:
                sent[0] += sock.send(bytes(1 << 20))
        done.set()

    with (
        raw(script) as address,
        gate(address, network()) as made,
        socket.create_connection(("127.0.0.1", made.port), 10) as sock,
    ):
        sock.sendall(get(made))
        assert done.wait(20)
        assert sent[0] < 50_000_000


def test_a_slow_host_stops_the_client() -> None:
    """The same the other way: a body that the host does not read is not collected."""
    over = threading.Event()

    def script(sock: socket.socket) -> None:
        head(sock)
        over.wait(20)

    with (
        raw(script) as address,
        gate(address, network()) as made,
        socket.create_connection(("127.0.0.1", made.port), 10) as sock,
    ):
        sock.sendall(get(made, "/", "Content-Length: 200000000", method="PUT"))
        sock.settimeout(1.0)
        sent = 0
        with suppress(TimeoutError):
            while sent < 200_000_000:
                sent += sock.send(bytes(1 << 20))
        over.set()
        assert sent < 50_000_000


def test_one_connection_does_not_hold_up_others(plain: Gate) -> None:
    """While tiny chunks keep one connection busy, another one is answered."""
    stop = threading.Event()

    def busy() -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", plain.port), 10) as sock:
            sock.sendall(get(plain, "/", "Transfer-Encoding: chunked", method="POST"))
            while not stop.is_set():
                sock.sendall(b"1\r\nx\r\n" * 10_000)

    thread = threading.Thread(target=busy, daemon=True)
    thread.start()
    try:
        worst = 0.0
        for _ in range(20):
            began = time.monotonic()
            assert status(talk(plain.port, get(plain, "/", "Connection: close"))) == 200
            worst = max(worst, time.monotonic() - began)
        assert worst < 5.0
    finally:
        stop.set()
        thread.join(10)
