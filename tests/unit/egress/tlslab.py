"""A TLS host that shows what it gets, and clients for a gate that looks into TLS."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import os
import socket
import zlib
from typing import Any

from tests.unit.egress.flowlab import NAME, SECRET, Certificates, Gate, Handler, gate, network, trusting

DATA = os.urandom(2 << 20)


class Echo(Handler):
    """Shows what it was sent in every way that it can, and keeps it for the test."""

    seen: list[tuple[str, dict[str, str], bytes]] = []

    def do_GET(self) -> None:
        body = self.body()
        self.seen.append((self.path, dict(self.headers.items()), body))
        sent = (
            self.headers.get("Authorization", "") + "|" + self.headers.get("X-Api-Key", "") + "|" + self.path
        )
        if self.path.startswith("/big"):
            self.answer(DATA)
        elif self.path.startswith("/header"):
            self.send_response(302, f"Found {sent.split('|')[0]}")
            self.send_header("Location", f"https://user:{SECRET}@{NAME}/?token={SECRET}")
            self.send_header("Set-Cookie", f"token={SECRET}")
            self.send_header(f"X-{SECRET}", "1")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path.startswith("/drip"):
            self._drip(
                json.dumps({"you": sent, "me": base64.b64encode(f"x:{SECRET}".encode()).decode()}).encode()
            )
        elif self.path.startswith("/coded/"):
            self._coded(self.path.split("/")[2], sent.encode())
        elif self.path.startswith("/range"):
            self.answer(b"whole" if "Range" not in self.headers else b"part")
        else:
            self.answer(f"{sent}|{SECRET}".encode())

    do_POST = do_GET

    def _drip(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for byte in data:
            self.wfile.write(b"1\r\n%c\r\n" % byte)
        self.wfile.write(f"0\r\nX-Token: {SECRET}\r\n\r\n".encode())

    def _coded(self, coding: str, data: bytes) -> None:
        made = {"gzip": gzip.compress, "deflate": zlib.compress}.get(coding, bytes)
        self.answer(made(data * 1000), Content_Encoding=coding)


def looking(address: tuple[str, int], certificates: Certificates, *credentials: Any, **fields: Any) -> Any:
    """A gate that looks into TLS, with one secret for all credentials."""
    secrets = {known.name: SECRET for known in credentials}
    policy = network(credentials=credentials, requests=fields.pop("requests", {}))
    fields.setdefault("ca_file", str(certificates.ca))
    return gate(address, policy, tls=True, secrets=secrets, **fields)


def client(made: Gate) -> http.client.HTTPSConnection:
    """Python's own client, which takes the gate for the host."""
    context = trusting(made)
    connection = http.client.HTTPSConnection(made.name, made.port, context=context, timeout=20)
    sock = socket.create_connection(("127.0.0.1", made.port), 20)
    connection.sock = context.wrap_socket(sock, server_hostname=made.name)
    return connection


def ask(
    made: Gate, path: str = "/", method: str = "GET", body: Any = None, **fields: str
) -> tuple[Any, bytes]:
    """One request on a connection of its own."""
    connection = client(made)
    connection.request(method, path, body, {name.replace("_", "-"): text for name, text in fields.items()})
    answer = connection.getresponse()
    found = answer.read()
    connection.close()
    return answer, found


def made_file(made: Gate) -> str:
    """The gate's certificate as a file, next to the test's own."""
    path = os.path.join(os.path.dirname(made.ca_file), f"{made.port}.pem")
    with open(path, "w", encoding="ascii") as file:
        file.write(made.authority.certificate_pem)
    return path
