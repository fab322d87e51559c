"""A host that answers in every shape, and what the tests of flows share."""

from __future__ import annotations

import os

from tests.unit.egress.flowlab import Gate, Handler

DATA = os.urandom(3 << 20)


class Site(Handler):
    """Answers of every shape."""

    def do_GET(self) -> None:
        if self.path == "/big":
            self.answer(DATA)
        elif self.path == "/chunked":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.send_header("Trailer", "X-Sum")
            self.end_headers()
            for at in range(0, len(DATA), 50_000):
                piece = DATA[at : at + 50_000]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\nX-Sum: 42\r\nContent-Length: 7\r\n\r\n")
        elif self.path == "/until-close":
            self.close_connection = True
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(DATA)
        elif self.path == "/204":
            self.send_response(204)
            self.end_headers()
        elif self.path == "/304":
            self.send_response(304)
            self.send_header("Content-Length", "12345")
            self.end_headers()
        elif self.path == "/close":
            self.close_connection = True
            self.answer(b"bye", Connection="close")
        else:
            self.answer(f"{self.command} {self.path} {self.headers.get('Host')}".encode())

    do_HEAD = do_OPTIONS = do_DELETE = do_GET

    def do_POST(self) -> None:
        body = self.body()
        self.answer(b"%d %s" % (len(body), b"whole" if body == DATA else b"other"))

    do_PUT = do_POST


def get(made: Gate, path: str = "/", *fields: str, method: str = "GET", version: str = "1.1") -> bytes:
    """A request as bytes."""
    lines = [f"{method} {path} HTTP/{version}", f"Host: {made.host}", *fields, "", ""]
    return "\r\n".join(lines).encode()
