"""The internet of the lab, one process in a network namespace: ``python -m tests.network.internet CONFIG``.

It prints one JSON object a line: what was asked, connected, sent. Lines on its input are orders:
``{"sync": n}`` is answered when everything that had arrived by then has been told. It ends with its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import sys
import time
from typing import Any

from tests.network import zone
from tests.network.sniff import Sniffer
from tests.network.web import CONNECTIONS, Web, local, text


class Say:
    """Events on stdout. The pipe's reader is a thread of the judge that never waits."""

    def __call__(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, "time": round(time.monotonic(), 4), **fields}) + "\n"
        data = line.encode()
        while data:
            data = data[os.write(1, data) :]


class Names(asyncio.DatagramProtocol):
    """The authoritative server, over UDP and TCP."""

    def __init__(self, answers: zone.Zone, say: Say, place: str) -> None:
        self.zone, self.say, self.place = answers, say, place
        self.transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def answer(self, data: bytes, over: str) -> bytes | None:
        try:
            question = zone.Question(data)
        except (ValueError, IndexError):
            self.say("dns", over=over, to=self.place, name="", raw=text(data))
            return None
        self.say("dns", over=over, to=self.place, name=question.name, type=question.kind, raw=text(data))
        return self.zone.reply(question)

    def datagram_received(self, data: bytes, address: Any) -> None:
        assert self.transport is not None
        if (answer := self.answer(data, "udp")) is not None:
            self.transport.sendto(answer, address)

    async def stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                size = int.from_bytes(await reader.readexactly(2), "big")
                answer = self.answer(await reader.readexactly(size), "tcp")
                if answer is None:
                    break
                writer.write(len(answer).to_bytes(2, "big") + answer)
                await writer.drain()
        writer.close()


class Plain:
    """Servers that speak no HTTP: each connection and all that it brings is an event."""

    def __init__(self, say: Say, answers: zone.Zone) -> None:
        self.say, self.zone = say, answers

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Anything is taken and logged; a line says that somebody is there."""
        place, port = local(writer)
        facts = {"conn": next(CONNECTIONS), "to": place, "port": port}
        self.say("connection", **facts)
        with contextlib.suppress(OSError):
            if port == 22:
                writer.write(b"SSH-2.0-OpenSSH_9.2 lab\r\n")
            total = 0
            while data := await reader.read(65536):
                if port == zone.SOURCE:
                    await self._pour(writer, int(data.split()[0]))
                    break
                if port == zone.ECHO:
                    writer.write(data)
                elif not total and port not in (22, zone.RAW, zone.SINK):
                    writer.write(b"here\n")
                if total < 65536 and port != zone.SINK:
                    self.say("bytes", **facts, data=text(data))
                total += len(data)
                await writer.drain()
            self.say("end", **facts, total=total)
        writer.close()

    async def _pour(self, writer: asyncio.StreamWriter, count: int) -> None:
        block = bytes(65536)
        for _ in range(count // len(block)):
            writer.write(block)
            await writer.drain()

    async def proxy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A forward proxy that knows CONNECT only: somebody's parent proxy."""
        place, port = local(writer)
        try:
            head = text(await reader.readuntil(b"\r\n\r\n"))
        except asyncio.IncompleteReadError as error:
            head = text(error.partial)
        self.say("proxy", conn=next(CONNECTIONS), to=place, port=port, head=head)
        if not head.startswith("CONNECT "):
            writer.close()
            return
        name, _, number = head.split(" ")[1].rpartition(":")
        found = self.zone.addresses(name, zone.A) or (name,)
        try:
            far = await asyncio.open_connection(found[0], int(number))
        except OSError:
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy(reader, far[1]))
            group.create_task(_copy(far[0], writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


def context(config: dict[str, str], name: str) -> ssl.SSLContext:
    """TLS with the certificate of the lab, or the one that nobody trusts for the name that says so."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(config[f"{name}.crt"], config[f"{name}.key"])
    made.set_alpn_protocols(["http/1.1"])
    return made


def listen(port: int, kind: int = socket.SOCK_STREAM, address: str = "::") -> socket.socket:
    """A socket for every address of both versions, or for one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, kind)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    if kind == socket.SOCK_STREAM:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_FASTOPEN, 16)
    made.bind((address, port))
    made.setblocking(False)
    return made


async def main(config: dict[str, str]) -> None:
    """Serve until the input ends."""
    loop, say, answers = asyncio.get_running_loop(), Say(), zone.Zone()
    trusted, untrusted = context(config, "leaf"), context(config, "untrusted")

    def named(tls: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        tls.lab_name = name  # type: ignore[attr-defined]
        say("sni", name=name)
        if name == "untrusted.example":
            tls.context = untrusted

    trusted.sni_callback = named
    web, plain = Web(say, config["repositories"], config["token"]), Plain(say, answers)
    for port in zone.WEB:
        await asyncio.start_server(web.serve, sock=listen(port), backlog=1024)
    for port in zone.WEB_TLS:
        await asyncio.start_server(web.serve, sock=listen(port), ssl=trusted, backlog=1024)
    for port in (22, zone.ECHO, zone.SOURCE, zone.SINK, *zone.PLAIN):
        await asyncio.start_server(plain.accept, sock=listen(port), backlog=1024)
    await asyncio.start_server(plain.proxy, sock=listen(zone.PROXY))
    for place in zone.RESOLVERS:
        names = Names(answers, say, place)
        udp = listen(53, socket.SOCK_DGRAM, place)
        await loop.create_datagram_endpoint(lambda names=names: names, sock=udp)  # type: ignore[misc]
    await asyncio.start_server(Names(answers, say, "any").stream, sock=listen(53))
    sniffer = Sniffer(config["device"], say)
    loop.add_reader(sniffer.socket, sniffer.drain)
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    say("ready")
    while line := await orders.readline():
        # Some turns of the loop, for what the kernel has queued and what tasks have half done.
        for _ in range(50):
            await asyncio.sleep(0)
        sniffer.drain()
        say("synced", **json.loads(line))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
