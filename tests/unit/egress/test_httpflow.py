"""Plain HTTP through the gate: what passes, and how."""

from __future__ import annotations

import http.client
import socket
import threading
from contextlib import suppress

import pytest

from casemate.egress.exchange import Limits
from tests.unit.egress.flowlab import (
    Gate,
    curl,
    gate,
    head,
    network,
    raw,
    rest,
    status,
    talk,
    until,
    web,
)
from tests.unit.egress.flowsite import DATA, Site, get


def test_every_shape_of_an_answer(plain: Gate) -> None:
    """Lengths, chunks, the end of the connection, no body, HEAD, 204, 304: all on one connection."""
    client = http.client.HTTPConnection("127.0.0.1", plain.port, timeout=20)
    for method, path, code, body in [
        ("GET", "/hello?x=1", 200, f"GET /hello?x=1 {plain.host}".encode()),
        ("GET", "/big", 200, DATA),
        ("HEAD", "/big", 200, b""),
        ("GET", "/chunked", 200, DATA),
        ("GET", "/204", 204, b""),
        ("GET", "/304", 304, b""),
        ("OPTIONS", "*", 200, f"OPTIONS * {plain.host}".encode()),
        ("GET", "/until-close", 200, DATA),
        ("GET", "/close", 200, b"bye"),
        ("DELETE", "/x", 200, f"DELETE /x {plain.host}".encode()),
    ]:
        client.request(method, path, headers={"Host": plain.host})
        answer = client.getresponse()
        assert (answer.status, answer.read() == body) == (code, True), path
        if method == "HEAD":
            assert answer.headers["Content-Length"] == str(len(DATA))
    client.close()
    assert len(plain.targets) == 1
    assert [kind[0] for kind in plain.kinds("request", 10)] == ["allow"] * 10


def test_uploads(plain: Gate) -> None:
    """A body with a length and one in chunks arrive whole, one after the other on one connection."""
    client = http.client.HTTPConnection("127.0.0.1", plain.port, timeout=20)
    for chunked in (False, True, False):
        body = (DATA[at : at + 70_000] for at in range(0, len(DATA), 70_000)) if chunked else DATA
        client.request("POST", "/", body, {"Host": plain.host}, encode_chunked=chunked)
        assert client.getresponse().read() == b"%d whole" % len(DATA)
    client.close()
    until(lambda: plain.targets[0].sent > 3 * len(DATA))


def test_counts(plain: Gate) -> None:
    """What went up and came down is counted as the sandbox sees it."""
    talk(plain.port, get(plain, "/big", "Connection: close"))
    until(lambda: plain.targets[0].received > 0)
    assert len(DATA) < plain.targets[0].received < len(DATA) + 1000
    assert 0 < plain.targets[0].sent < 500


def test_curl_asks_for_leave(plain: Gate) -> None:
    """``Expect: 100-continue`` is passed on and the host's 100 back, before the body is sent."""
    seen = []

    def script(sock: socket.socket) -> None:
        begin = head(sock)
        seen.append(b"100-continue" in begin and begin.endswith(b"\r\n\r\n"))
        sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = b""
        while len(body) < 100_000:
            body += sock.recv(65536)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    with raw(script) as address, gate(address, network()) as made:
        done = curl(made, "-v", "-H", "Expect: 100-continue", "--expect100-timeout", "30", "--data-binary",
                    "x" * 100_000)  # fmt: skip
        assert done.stdout == b"ok", done.stderr
        assert b"100 Continue" in done.stderr
    assert seen == [True]


def test_a_final_answer_instead_of_100() -> None:
    """A host that refuses before the body is heard; the body is not waited for."""

    def script(sock: socket.socket) -> None:
        head(sock)
        sock.sendall(b"HTTP/1.1 417 No\r\nContent-Length: 2\r\n\r\nno")
        rest(sock)

    limits = Limits(late_body=0.2)
    with raw(script) as address, gate(address, network(), limits=limits) as made:
        found = talk(made.port, get(made, "/", "Expect: 100-continue", "Content-Length: 5", method="POST"))
        assert status(found) == 417
        assert found.endswith(b"no")


def test_an_answer_before_the_end_of_the_body() -> None:
    """A host that answers early and closes while the body still comes: its answer arrives nevertheless."""

    def script(sock: socket.socket) -> None:
        head(sock)
        sock.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 9\r\nConnection: close\r\n\r\ntoo large")

    with raw(script) as address, gate(address, network()) as made:
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", made.port), 20) as sock:
                sock.sendall(get(made, "/", "Content-Length: 100000000", method="PUT"))
                writer = threading.Thread(target=_pour, args=(sock,), daemon=True)
                writer.start()
                assert rest(sock).endswith(b"too large")
            writer.join(5)


def _pour(sock: socket.socket) -> None:
    with suppress(OSError):
        for _ in range(1000):
            sock.sendall(bytes(100_000))


def test_old_clients(plain: Gate) -> None:
    """HTTP/1.0 gets a body without chunks and the end of the connection; without Host, too."""
    found = talk(plain.port, get(plain, "/chunked", version="1.0"))
    assert b"ransfer-" not in found.partition(b"\r\n\r\n")[0]
    assert found.partition(b"\r\n\r\n")[2] == DATA
    assert talk(plain.port, b"GET /x HTTP/1.0\r\n\r\n").endswith(f"GET /x {plain.host}".encode())


def test_trailers_pass(plain: Gate) -> None:
    """The fields behind a body pass, but for those that would have counted before it."""
    found = talk(plain.port, get(plain, "/chunked", "Connection: close"))
    assert found.endswith(b"0\r\nX-Sum: 42\r\n\r\n")


def test_trailers_of_requests() -> None:
    """The same for a request's."""
    seen = []

    def script(sock: socket.socket) -> None:
        data = head(sock)
        while b"X-Sum" not in data or not data.endswith(b"\r\n\r\n"):
            data += sock.recv(65536)
        seen.append(data)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    with raw(script) as address, gate(address, network()) as made:
        body = b"3;ext=1\r\nabc\r\n0\r\nX-Sum: 1\r\nAuthorization: evil\r\nHost: evil\r\n\r\n"
        talk(
            made.port, get(made, "/", "Transfer-Encoding: chunked", "Connection: close", method="POST") + body
        )
    assert seen[0].endswith(b"3\r\nabc\r\n0\r\nX-Sum: 1\r\n\r\n")
    assert b"evil" not in seen[0]


def test_early_hints_pass(plain: Gate) -> None:
    """Answers before the answer are passed on, and not to HTTP/1.0."""

    def script(sock: socket.socket) -> None:
        head(sock)
        sock.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 102 Wait\r\n\r\n"
                     b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")  # fmt: skip

    with raw(script) as address, gate(address, network()) as made:
        found = talk(made.port, get(made, "/", "Connection: close"))
        assert found.startswith(b"HTTP/1.1 103")
        assert b"HTTP/1.1 102" in found
        assert found.endswith(b"ok")
        assert status(talk(made.port, get(made, version="1.0"))) == 200


def test_pipelined_requests(plain: Gate) -> None:
    """Requests that come together are answered in order."""
    data = get(plain, "/one") + get(plain, "/two") + get(plain, "/three", "Connection: close")
    found = talk(plain.port, data)
    places = [found.index(f"GET /{word} ".encode()) for word in ("one", "two", "three")]
    assert places == sorted(places)
    assert found.count(b"HTTP/1.1 200") == 3


def test_half_closed_clients(plain: Gate) -> None:
    """A client that says nothing more after its request gets its answer."""
    assert talk(plain.port, get(plain, "/big"), finish=True).endswith(DATA)


def test_an_event_stream_is_not_held_back() -> None:
    """Each piece arrives when it was sent, not when there is more."""
    turn = threading.Event()

    def script(sock: socket.socket) -> None:
        head(sock)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for number in range(3):
            sock.sendall(b"data: %d\n\n" % number)
            assert turn.wait(10)
            turn.clear()

    with raw(script) as address, gate(address, network()) as made:
        with socket.create_connection(("127.0.0.1", made.port), 10) as sock:
            sock.sendall(get(made))
            data = b""
            for number in range(3):
                while b"data: %d\n\n" % number not in data:
                    data += sock.recv(65536)
                turn.set()
        assert b"chunked" in data.lower()


def test_the_hosts_connection_is_used_again(plain: Gate) -> None:
    """One connection of a client takes one to the host; after the host has closed it, another one."""
    client = http.client.HTTPConnection("127.0.0.1", plain.port, timeout=20)
    for path, dialled in [("/1", 1), ("/2", 1), ("/close", 1), ("/3", 2), ("/4", 2)]:
        client.request("GET", path, headers={"Host": plain.host})
        client.getresponse().read()
        assert plain.dialled == dialled
    client.close()


def test_a_host_that_closes_idle_connections() -> None:
    """A request on a connection that the host closes at that moment is sent again if it is harmless."""
    served = []

    def script(sock: socket.socket) -> None:
        served.append(head(sock).split(b" ")[0])
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        if len(served) == 1:
            head(sock)  # read, and no word

    with raw(script) as address, gate(address, network()) as made:
        client = http.client.HTTPConnection("127.0.0.1", made.port, timeout=20)
        for _ in range(2):
            client.request("GET", "/", headers={"Host": made.host})
            assert client.getresponse().read() == b"ok"
        client.close()
    assert served == [b"GET", b"GET"]


def test_a_change_is_not_sent_twice() -> None:
    """A request that changes something is not sent again: the client's connection ends, as it would have."""
    served = []

    def script(sock: socket.socket) -> None:
        served.append(head(sock).split(b" ")[0])
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        served.append(head(sock).split(b" ")[0])

    with raw(script) as address, gate(address, network()) as made:
        client = http.client.HTTPConnection("127.0.0.1", made.port, timeout=20)
        client.request("GET", "/", headers={"Host": made.host})
        client.getresponse().read()
        client.request("POST", "/", b"x", {"Host": made.host})
        with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
            client.getresponse()
        client.close()
    assert served == [b"GET", b"POST"]


def test_websocket() -> None:
    """After the handshake bytes pass both ways unread, those that came with it, too."""

    def script(sock: socket.socket) -> None:
        begin = head(sock)
        assert b"Upgrade: websocket" in begin
        sock.sendall(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\nfirst\0"
        )
        while data := sock.recv(65536):
            sock.sendall(data.upper())

    with raw(script) as address, gate(address, network()) as made:
        with socket.create_connection(("127.0.0.1", made.port), 10) as sock:
            sock.sendall(get(made, "/ws", "Connection: Upgrade", "Upgrade: websocket",
                             "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==") + b"early\0")  # fmt: skip
            found = b""
            while b"EARLY\0" not in found:
                found += sock.recv(65536)
            assert status(found) == 101
            assert b"first\0" in found
            sock.sendall(b"\x01later")
            assert sock.recv(100) == b"\x01LATER"
        assert made.kinds("request", 1) == [("allow", "", "GET /ws 101")]


def test_upgrades_to_something_else_do_not_pass() -> None:
    """An upgrade to HTTP/2 is asked for in vain: the host never hears of it; one of its own is an error."""
    seen = []

    def script(sock: socket.socket) -> None:
        seen.append(head(sock))
        if b"/forced" in seen[-1]:
            sock.sendall(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
        else:
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    with raw(script) as address, gate(address, network()) as made:
        assert talk(made.port, get(made, "/", *upgrade), finish=True).endswith(b"ok")
        assert status(talk(made.port, get(made, "/forced", *upgrade))) == 502
    assert all(b"h2c" not in data and b"pgrade" not in data for data in seen)


def test_a_proxys_client_has_one_request() -> None:
    """Where each request may be for another host, the connection ends with the answer, and the answer says
    so.
    """
    with web(Site) as address, gate(address, network()) as made:
        made.target_once = True
        found = talk(made.port, get(made, "/one") + get(made, "/two"))
    assert found.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" in found.lower()
