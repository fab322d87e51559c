"""The lab's web servers: HTTP/1 read by hand, so that the judge sees the bytes as they came.

Framing is as lenient as servers are that one could smuggle past: bare line feeds end a line, the transfer
coding wins over the length, white space before a colon is ignored.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import zlib
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, urlsplit

from tests.network import zone

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT = 1 << 20
CONNECTIONS = itertools.count(1)
# Here the length wins over the transfer coding. Some servers do it so.
LENGTH_FIRST = 8080
UNAUTHORIZED = (
    b'HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Basic realm="lab"\r\nContent-Length: 0\r\n\r\n'
)
GIT_BACKEND = "/usr/lib/git-core/git-http-backend"


def _chunked(*pieces: str, trailer: str = "") -> list[str]:
    head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Told\r\n\r\n"
    return [head, *(f"{len(piece):x}\r\n{piece}\r\n" for piece in pieces), f"0\r\n{trailer}\r\n"]


# Answers that say again what they were asked with, in every place that an answer has.
ECHOES: dict[str, Callable[[str], list[str]]] = {
    "/split": lambda auth: _chunked("begin " + auth[:20], auth[20:30], auth[30:] + " end"),
    "/bytewise": lambda auth: _chunked(*auth),
    "/trailer": lambda auth: _chunked("body", trailer=f"X-Told: {auth}\r\n"),
    "/hints": lambda auth: [
        f"HTTP/1.1 103 Early Hints\r\nLink: <{auth}>\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    ],
    "/reason": lambda auth: [f"HTTP/1.1 200 {auth}\r\nContent-Length: 0\r\n\r\n"],
    "/cookie": lambda auth: [f"HTTP/1.1 200 OK\r\nSet-Cookie: a={auth}\r\nContent-Length: 0\r\n\r\n"],
    "/header": lambda auth: [f"HTTP/1.1 200 OK\r\n{auth.replace(' ', '-')}: x\r\nContent-Length: 0\r\n\r\n"],
    "/extension": lambda auth: [
        f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;told=\"{auth}\"\r\nok\r\n0\r\n\r\n"
    ],
    "/quoted": lambda auth: _chunked(quote(auth, safe="") + " " + json.dumps(auth.replace("o", "\x01"))),
    "/based": lambda auth: _chunked(base64.b64encode(auth.encode()).decode()),
    "/unended": lambda auth: [f"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{auth}"],
    "/partial": lambda auth: [
        "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 5-9/99\r\n"
        f"Content-Length: {len(auth)}\r\n\r\n{auth}"
    ],
    "/error": lambda auth: [f"HTTP/1.1 500 Oops\r\nContent-Length: {len(auth)}\r\n\r\n{auth}"],
}  # fmt: skip


class Request:
    """One request head: raw, and as a lenient server understands it."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        lines = raw.decode("latin-1").replace("\r\n", "\n").strip("\n").split("\n")
        self.method, _, rest = lines[0].partition(" ")
        self.target = rest.rpartition(" ")[0] or rest
        self.headers: dict[str, str] = {}
        last = ""
        for line in lines[1:]:
            name, _, value = line.partition(":")
            if line[:1] in " \t" and self.headers:  # goes on with the line before
                self.headers[last] = f"{self.headers[last]} {line.strip()}".strip()
                continue
            last = name.strip().lower()
            self.headers.setdefault(last, value.strip())
        self.path = urlsplit(self.target).path or "/"
        self.query = {key: values[0] for key, values in parse_qs(urlsplit(self.target).query).items()}
        self.keep = self.headers.get("connection", "").lower() != "close"


async def _head(reader: asyncio.StreamReader) -> bytes:
    """Up to the empty line; empty at the end of the stream."""
    data = b""
    while True:
        line = await reader.readline()
        data += line
        if not line or len(data) > 65536:
            return data
        if line in (b"\r\n", b"\n") and data.strip():
            return data


async def _body(reader: asyncio.StreamReader, request: Request, port: int) -> bytes:
    chunked = "chunked" in request.headers.get("transfer-encoding", "").lower()
    if chunked and not (port == LENGTH_FIRST and "content-length" in request.headers):
        body = b""
        # As wide as a machine word, as in servers that have forgotten to check.
        while size := int((await reader.readline()).split(b";")[0].strip() or b"0", 16) & 0xFFFFFFFFFFFFFFFF:
            body += await reader.readexactly(size)
            await reader.readline()
        while (await reader.readline()).strip():
            pass
        return body
    length = int(request.headers.get("content-length", "0").split(",")[0] or 0)
    return await reader.readexactly(min(length, 64 * LIMIT))


class Web:
    """Answers requests on any address; every request is an event."""

    def __init__(self, say: Callable[..., None], repositories: str, token: str) -> None:
        self.say, self.repositories, self.token = say, repositories, token

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to its end."""
        tls = writer.get_extra_info("ssl_object")
        place = local(writer)
        facts = {"conn": next(CONNECTIONS), "to": place[0], "port": place[1], "tls": tls is not None}
        if tls is not None:
            facts["sni"] = getattr(tls, "lab_name", None)
        self.say("connection", **facts)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError, asyncio.LimitOverrunError):
            while raw := await _head(reader):
                request = Request(raw)
                body = await _body(reader, request, place[1])
                self.say(
                    "http", **facts, method=request.method, target=request.target, head=text(raw),
                    host=request.headers.get("host", ""), body=text(body[:65536]), size=len(body),
                )  # fmt: skip
                if request.headers.get("upgrade", "").lower() == "websocket":
                    await self._upgraded(reader, writer, facts)
                    break
                if request.path.startswith("/git/"):
                    await self._git(request, body, writer)
                else:
                    await self._answer(request, body, place[0], writer)
                if not request.keep:
                    break
        writer.close()

    async def _upgraded(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, facts: dict[str, object]
    ) -> None:
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        while data := await reader.read(65536):
            self.say("bytes", **facts, data=text(data))
            writer.write(data)
            await writer.drain()

    async def _answer(self, request: Request, body: bytes, place: str, writer: asyncio.StreamWriter) -> None:
        status, more, answer = "200 OK", "", f"hello from {request.headers.get('host')} at {place}\n".encode()
        if place == zone.METADATA:
            answer = zone.METADATA_SECRET.encode()
        elif request.path == "/echo":
            answer = request.raw + body
        elif request.path == "/encoded":
            more, answer = "Content-Encoding: gzip\r\n", zlib.compress(request.raw, wbits=31)
        elif request.path == "/redirect":
            status, more = "302 Found", f"Location: {request.query['to']}\r\n"
        elif request.path == "/location":
            status, more = "302 Found", f"Location: /{request.headers.get('authorization', '')}\r\n"
        elif request.path in ECHOES:
            auth = request.headers.get("authorization", "")
            for piece in ECHOES[request.path](auth):
                writer.write(piece.encode("latin-1"))
                await writer.drain()
                await asyncio.sleep(0.05)
            return
        elif request.path == "/big":
            await self._big(int(request.query["n"]), writer)
            return
        elif request.path == "/expect":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(answer)}\r\n{more}\r\n".encode("latin-1")
        writer.write(head + (b"" if request.method == "HEAD" else answer))
        await writer.drain()

    async def _big(self, count: int, writer: asyncio.StreamWriter) -> None:
        """So many bytes, as fast as they are taken."""
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {count}\r\n\r\n".encode())
        block = bytes(65536)
        while count > 0:
            writer.write(block[:count])
            await writer.drain()
            count -= len(block)

    async def _git(self, request: Request, body: bytes, writer: asyncio.StreamWriter) -> None:
        """git's own server program behind a check of the token."""
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "basic":
            value = base64.b64decode(value).decode("latin-1").partition(":")[2]
        if value != self.token:
            writer.write(UNAUTHORIZED)
            return
        env = {
            "PATH": os.environ["PATH"], "GIT_PROJECT_ROOT": self.repositories, "GIT_HTTP_EXPORT_ALL": "1",
            "REMOTE_USER": "lab", "PATH_INFO": request.path.removeprefix("/git"),
            "REQUEST_METHOD": request.method,
            "QUERY_STRING": urlsplit(request.target).query, "CONTENT_LENGTH": str(len(body)),
            "CONTENT_TYPE": request.headers.get("content-type", ""),
            "HTTP_CONTENT_ENCODING": request.headers.get("content-encoding", ""),
            "GIT_PROTOCOL": request.headers.get("git-protocol", ""),
        }  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            GIT_BACKEND, env=env, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate(body)
        head, _, answer = out.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        status = next((line[8:] for line in lines if line.lower().startswith("status: ")), "200 OK")
        lines = [line for line in lines if not line.lower().startswith("status:")]
        lines = [f"HTTP/1.1 {status}", *lines, f"Content-Length: {len(answer)}", "", ""]
        writer.write("\r\n".join(lines).encode("latin-1") + answer)
        await writer.drain()


def local(writer: asyncio.StreamWriter) -> tuple[str, int]:
    """The address that the peer has dialled, without the mapped form."""
    name = writer.get_extra_info("sockname")
    return str(name[0]).removeprefix("::ffff:"), int(name[1])


def text(data: bytes) -> str:
    """Bytes as they go into an event."""
    return data.decode("latin-1")
