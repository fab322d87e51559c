"""Whatever is sent: the host gets whole requests for itself or nothing, and nobody gets a secret."""

from __future__ import annotations

import asyncio
import base64
import re
import socket
import string
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

import h11
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from casemate.egress.credentials import Book, placeholder
from casemate.egress.decide import Decider
from casemate.egress.errors import Refused
from casemate.egress.exchange import Limits
from casemate.egress.httpflow import serve_stream
from casemate.egress.httphead import read_request
from casemate.egress.redact import Redactor, variants
from casemate.egress.streams import SocketStream
from casemate.policy.model import Credential, Network

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME, OTHER = "api.example.org", "evil.example.net"
LIMITS = Limits(head=0.2, idle=0.2, silent=0.5, late_body=0.05)
SECRET = "ghp_9fKq2LmZx7RtUvWy4BnCdEaHs1Jg3PoQi5Yb"

# ---------------------------------------------------------------- redaction

SECRETS = st.text(
    string.ascii_letters + string.digits + "-_.~+/=&%?#:@ \"'<>\\", min_size=8, max_size=48
).filter(lambda text: text == text.strip())


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """``data`` cut at these places."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(places)]


@given(
    SECRETS,
    st.lists(st.binary(max_size=12), max_size=6),
    st.lists(st.integers(0, 400), max_size=12),
    st.data(),
)
def test_no_form_of_a_secret_passes(
    secret: str, between: list[bytes], cuts: list[int], data: st.DataObject
) -> None:
    """In any text, in any pieces: what comes out has the same length and none of the forms in it."""
    stand_in = placeholder(secret)
    pairs = variants(secret.encode(), stand_in.encode())
    forms = [pattern for pattern, _ in pairs]
    text = b"".join(part + data.draw(st.sampled_from(forms)) for part in between)
    stream = Redactor(pairs)
    found = b"".join(stream.feed(piece) for piece in pieces(text, cuts)) + stream.end()
    assert len(found) == len(text)
    assert found == Redactor(pairs).whole(text)
    assert secret.encode() not in found


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
    st.text("ab", max_size=40),
    st.lists(st.integers(0, 40), max_size=20),
)
@example(["ab", "abb"], "abab", [1, 2, 3])
def test_a_stream_is_what_the_whole_is(patterns: list[str], text: str, cuts: list[int]) -> None:
    """However patterns overlap and the text is cut, a stream gives what the whole text gives."""
    pairs = [(known.encode(), b"*" * len(known)) for known in patterns]
    stream = Redactor(pairs)
    found = b"".join(stream.feed(piece) for piece in pieces(text.encode(), cuts)) + stream.end()
    assert found == Redactor(pairs).whole(text.encode())
    assert not any(known.encode() in found for known in patterns)


@given(SECRETS)
def test_placeholders(secret: str) -> None:
    """A placeholder never holds its secret, and goes unchanged through URLs and headers."""
    made = placeholder(secret)
    assert re.fullmatch(r"[A-Za-z0-9_-]{16,}", made)
    assert secret not in made
    assert len(made) == (len(secret) if len(secret) >= 16 else 24)


# ---------------------------------------------------------------- credentials

STAND_IN = placeholder(SECRET)
PARTS = st.one_of(
    st.sampled_from(
        [STAND_IN, STAND_IN[:-1], "Bearer ", "Basic ", "token ", "key=", "&", "?", ":", ",", " "]
    ),
    st.text(string.ascii_letters, max_size=4),
    st.builds(
        lambda user: base64.b64encode(f"{user}:{STAND_IN}".encode()).decode(), st.text("ab", max_size=3)
    ),
)
VALUES = st.lists(PARTS, max_size=4).map("".join)
FIELDS = st.lists(
    st.tuples(st.sampled_from([b"Authorization", b"X-Key", b"Cookie", b"X-Other"]), VALUES.map(str.encode)),
    max_size=4,
)
PLACES = st.sampled_from(["bearer", "basic", "basic:me", "header:X-Key", "query:key"])


def decoded(value: bytes) -> bytes:
    """What basic credentials hold."""
    with suppress(ValueError):
        return base64.b64decode(value[6:] + b"==") if value.startswith(b"Basic ") else b""
    return b""


@given(PLACES, st.booleans(), VALUES, FIELDS, st.booleans())
def test_a_value_goes_to_its_own_place_only(
    place: str, add: bool, query: str, fields: list[tuple[bytes, bytes]], mine: bool
) -> None:
    """Wherever placeholders stand: the value appears in the one place of the credential, and for its host
    only.
    """
    known = Credential(name="T", hosts=(NAME,), source="env:T", as_=place, add=add)
    book = Book(NAME if mine else OTHER, (known,), {"T": SECRET}, {"T": STAND_IN}, trusted=True)
    filled = book.fill(f"/path?{query.replace(' ', '+')}".encode(), fields)
    real = SECRET.encode()
    allowed = {"header": known.argument.lower().encode(), "query": b""}.get(known.kind, b"authorization")
    for name, value in filled.headers:
        shown = value + b"|" + decoded(value)
        assert real not in shown or (mine and name.lower() == allowed)
    assert real not in filled.target or (mine and known.kind == "query")
    assert b"/path?" in filled.target
    if not mine:
        assert filled.headers == fields
        assert filled.used == ()
    assert not book.redactor() or real not in book.redactor().whole(b"\n".join(v for _, v in filled.headers))


# ---------------------------------------------------------------- heads

AUTHORITIES = st.one_of(
    st.sampled_from([NAME, NAME.upper(), f"{NAME}.", f"{NAME}:443", f"{NAME}:80", OTHER, f"{NAME}@{OTHER}",
                     f"{OTHER}#{NAME}", f"[{NAME}]", "127.0.0.1", "[::1]", "", ":443"]),
    st.text(string.ascii_letters + "-._:@[]%/,", max_size=20),
)  # fmt: skip


@given(AUTHORITIES, st.one_of(st.none(), AUTHORITIES))
def test_only_requests_for_the_host_pass(host: str, absolute: str | None) -> None:
    """Of all spellings only those of the decided host pass, and what passes is in origin form without it."""
    target = "/x" if absolute is None else f"https://{absolute}/x"
    assume(target.isascii())
    request = h11.Request(method="GET", target=target, headers=[("Host", host.strip())])
    try:
        head = read_request(request, NAME, 443, tls=True)
    except Refused:
        return
    own = {NAME, f"{NAME}.", f"{NAME}:443", f"{NAME}.:443", f"{NAME}:", f"{NAME}.:"}
    assert host.strip().lower() in own
    assert absolute is None or absolute.lower() in own
    assert head.target == b"/x"
    assert not any(name.lower() == b"host" for name, _ in head.fields)


# ---------------------------------------------------------------- the flow


class Target:
    """A host of these tests: reads like a strict server, keeps what it got."""

    name, port, tls, once = NAME, 80, False, False

    def __init__(self) -> None:
        self.decider = Decider(Network(mode="allowlist", allow=(NAME,)))
        self.secrets: Mapping[str, str] = {}
        self.placeholders: Mapping[str, str] = {}
        self.sent = self.received = 0
        self.requests: list[tuple[bytes, bytes, bytes, bytes]] = []
        self.wrong: list[str] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def event(self, kind: str, **fields: object) -> None:
        assert kind == "request"

    async def dial(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        self.tasks.add(asyncio.get_running_loop().create_task(self._serve(theirs)))
        return ours

    async def _serve(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        connection = h11.Connection(h11.SERVER)
        body = b""
        asked: h11.Request | None = None
        with sock:
            while True:
                try:
                    event = connection.next_event()
                except h11.RemoteProtocolError as error:
                    if "closed" not in str(error) and "without sending" not in str(error):
                        self.wrong.append(str(error))
                    return
                if event is h11.NEED_DATA:
                    try:
                        connection.receive_data(await loop.sock_recv(sock, 65536))
                    except OSError:
                        return
                elif isinstance(event, h11.Request):
                    asked, body = event, b""
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    assert asked is not None
                    hosts = [value for name, value in asked.headers if name == b"host"]
                    self.requests.append((asked.method, asked.target, b",".join(hosts), body))
                    answer = h11.Response(status_code=200, headers=[("Content-Length", "2")])
                    data = connection.send(answer) + connection.send(h11.Data(b"ok"))
                    connection.send(h11.EndOfMessage())
                    try:
                        await loop.sock_sendall(sock, data)
                    except OSError:
                        return
                    if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                        return
                    connection.start_next_cycle()
                else:
                    return


async def conversation(parts: list[bytes]) -> tuple[Target, bytes]:
    """Send these bytes to a flow, each part by itself, and no more; what the host and the client got."""
    target = Target()
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    loop = asyncio.get_running_loop()
    flow = loop.create_task(serve_stream(SocketStream(theirs), target, limits=LIMITS))
    found = b""
    with ours:
        try:
            for part in parts:
                await loop.sock_sendall(ours, part)
                await asyncio.sleep(0)
            ours.shutdown(socket.SHUT_WR)
            while data := await loop.sock_recv(ours, 65536):
                found += data
        except OSError:
            pass
        await asyncio.wait_for(flow, 10)
    for task in target.tasks:
        task.cancel()
    await asyncio.gather(*target.tasks, return_exceptions=True)
    return target, found


HOST = b" HTTP/1.1\r\nHost: " + NAME.encode() + b"\r\n"


def get(path: str) -> bytes:
    """A request without a body."""
    return f"GET /{path}".encode() + HOST + b"\r\n"


def post(body: bytes) -> bytes:
    """A request with a length."""
    return b"POST /p" + HOST + b"Content-Length: %d\r\n\r\n" % len(body) + body


def put(chunks: list[bytes]) -> bytes:
    """A request in chunks."""
    body = b"".join(b"%x;e=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"PUT /c" + HOST + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\nX-T: 1\r\n\r\n"


REQUESTS = st.lists(
    st.one_of(
        st.builds(get, st.text("ab", max_size=3)),
        st.builds(post, st.binary(max_size=30)),
        st.builds(put, st.lists(st.binary(min_size=1, max_size=10), max_size=3)),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60)
@given(REQUESTS, st.lists(st.integers(0, 600), max_size=8))
def test_pieces_make_no_difference(requests: list[bytes], cuts: list[int]) -> None:
    """Requests arrive one by one and whole, in whatever pieces they were sent."""
    data = b"".join(requests)
    whole, _ = asyncio.run(conversation([data]))
    cut, answers = asyncio.run(conversation(pieces(data, cuts)))
    assert cut.requests == whole.requests
    assert cut.wrong == []
    assert len(cut.requests) == len(requests)
    assert answers.count(b"HTTP/1.1 200") == len(requests)


TOKENS = [
    b"GET ", b"POST ", b"/", b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t",
    b":", b"Host: " + NAME.encode(), b"Host: " + OTHER.encode(), b"Content-Length: ", b"0", b"5", b"-1",
    b"Transfer-Encoding: chunked", b"ffffffffffffffff", b"Connection: close", b"Connection: upgrade",
    b"\xff", b"Upgrade: h2c", b"hello", b"Expect: 100-continue", b"\r\n\r\n", b"http://", b"https://",
    b"@", b"#", b";", b"chunked", b"PRI * ",
]  # fmt: skip


@settings(max_examples=150)
@given(
    REQUESTS,
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 12), st.sampled_from(TOKENS)), max_size=4),
)
def test_what_the_host_gets(requests: list[bytes], edits: list[tuple[int, int, bytes]]) -> None:
    """However requests are spoilt: the host reads whole requests, each for itself by its one name, and no
    error.
    """
    data = bytearray(b"".join(requests))
    for place, length, token in edits:
        start = place % (len(data) + 1)
        data[start : start + length] = token
    target, found = asyncio.run(conversation([bytes(data)]))
    assert target.wrong == []
    assert all(host == NAME.encode() for _, _, host, _ in target.requests)
    assert all(path.startswith(b"/") for _, path, _, _ in target.requests)
    assert OTHER.encode() not in b"".join(host for _, _, host, _ in target.requests)
    assert found == b"" or found.startswith(b"HTTP/1.1 ")


@settings(max_examples=60)
@given(st.binary(max_size=300))
@example(b"\x16\x03\x01\x00\x05hello")
@example(b"SSH-2.0-x\r\n")
def test_rubbish(data: bytes) -> None:
    """Arbitrary bytes end in an answer or in silence; nothing reaches the host."""
    target, found = asyncio.run(conversation([data]))
    assert target.requests == []
    assert found == b"" or found.startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize("size", [1, 3])
def test_single_bytes(size: int) -> None:
    """A request that comes in single bytes is one request."""
    data = b"POST /x" + HOST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    target, _ = asyncio.run(conversation(parts))
    assert target.requests == [(b"POST", b"/x", NAME.encode(), b"hello")]
