"""Everyday work with a network, on the lab's host: what is allowed works, what is refused says what would."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest

from tests.cli.harness import until
from tests.everyday.work import make_work
from tests.network import zone

if TYPE_CHECKING:
    from tests.everyday.work import Work
    from tests.network.lab import Lab

pytestmark = [pytest.mark.root]


def test_curl(lab: Lab, lab_work: Work) -> None:
    """curl gets an allowed page, over TLS that it verifies itself; of a refused one the line is said."""
    ended = lab_work.inside(
        "curl -sS https://allowed.example/x http://allowed.example/y; ! curl -sS https://other.example/",
        allow=("allowed.example",),
    )
    assert ended.out.count(b"hello from allowed.example") == 2
    assert b'network.allow = ["other.example' in ended.err, ended
    denials = lab_work.report["denials"]
    assert any("other.example" in str(denial) and denial["certain"] for denial in denials), denials
    by_address = lab_work.inside("curl -sS -m 5 http://93.184.216.35/", allow=("allowed.example",))
    assert b'network.allow = ["93.184.216.35:80"]' in by_address.out
    assert b'network.allow = ["93.184.216.35:80"]' in by_address.err


def test_git_push(lab: Lab, lab_work: Work) -> None:
    """git clone and push over HTTPS with a token that is outside: git asks for nothing and stores nothing."""
    name = f"work-{secrets.token_hex(4)}.git"
    lab.repository(name)
    flags = ("--credential", "GIT_TOKEN:basic+add=git.example")
    ended = lab_work.inside(
        f"""
        git clone -q https://git.example/git/{name} clone 2>/dev/null
        cd clone; echo text >file; git add file; git commit -q -m pushed; git push -q origin HEAD:main
        git fetch -q; git status -sb; grep -r "$GIT_TOKEN" .git || echo nowhere
        """,
        allow=("git.example",), flags=flags, env={"GIT_TOKEN": lab.token},
    )  # fmt: skip
    assert b"nowhere" in ended.out
    assert (lab.repositories / name / "refs/heads/main").is_file()
    assert lab.token.encode() not in ended.out + ended.err


def test_jvm_network(lab: Lab, lab_work: Work) -> None:
    """A JVM program that was never told of a proxy: sockets and URLs by name, and a refusal it can show."""
    lab_work.file(
        "Net.java",
        """
import java.net.*; import java.io.*;
public class Net {
    public static void main(String[] a) throws Exception {
        try (Socket s = new Socket("allowed.example", 9000)) {
            s.getOutputStream().write("echo me\\n".getBytes());
            System.out.println(new BufferedReader(new InputStreamReader(s.getInputStream())).readLine());
        }
        System.out.print(new String(new URL("http://allowed.example/page").openStream().readAllBytes()));
        try { new Socket("other.example", 80).close(); System.out.println("reached"); }
        catch (UnknownHostException e) { System.out.println("unknown"); }
        try (Socket s = new Socket("93.184.216.35", 80)) {
            s.getOutputStream().write("GET / HTTP/1.0\\r\\n\\r\\n".getBytes());
            System.out.println(new BufferedReader(new InputStreamReader(s.getInputStream())).readLine());
        } catch (IOException e) { System.out.println("refused"); }
    }
}
""",
    )
    ended = lab_work.inside("javac -nowarn Net.java 2>&1; java Net", allow=("allowed.example:80,443,9000",))
    lines = ended.out.decode().splitlines()
    assert lines[0] == "echo me"
    assert lines[1].startswith("hello from allowed.example")
    assert lines[2] == "unknown"
    assert lines[3] in ("refused", "HTTP/1.1 403 Forbidden")


def test_ssh(lab: Lab, lab_work: Work) -> None:
    """ssh to a host whose port 22 no rule has ends at once, and says why and what would allow it."""
    lab_work.inside("command -v ssh")
    mark = lab.mark()
    ended = lab_work.inside(
        "ssh -o BatchMode=yes -o StrictHostKeyChecking=no me@allowed.example true",
        allow=("allowed.example",),
        code=255,
    )
    assert b"casemate" in ended.err
    assert b'network.allow = ["allowed.example:22"]' in ended.err, ended
    by_address = lab_work.inside(
        "ssh -o BatchMode=yes me@93.184.216.35 true", allow=("allowed.example",), code=255
    )
    assert b'network.allow = ["93.184.216.35:22"]' in by_address.err, by_address
    assert [event for event in lab.since(mark) if event.get("port") == 22] == []


SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"{open('page').read().strip()} for {self.path}".encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *words): pass
print("listening", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


def test_dev_server(lab: Lab, lab_work: Work) -> None:
    """A server inside is reached from the host's loopback and a second command, and from nowhere else."""
    caller = lab_work.caller
    lab_work.file("server.py", SERVER)
    lab_work.file("page", "a page\n")
    process = caller.start(
        "run", "--no-daemon", "-p", "3000:8000", "--", "python3", "server.py", cwd=lab_work.ws
    )
    try:
        found = until(lambda: lab.bare("curl", "-sS", "-m", "5", "http://127.0.0.1:3000/host").stdout, 15)
        assert found == b"a page for /host"
        second = make_work(caller).inside(
            "curl -sS http://host.casemate.internal:3000/second", allow=("host.casemate.internal:3000",)
        )
        assert second.out == b"a page for /second"
        refused = lab.bare("curl", "-sS", "-m", "2", f"http://{zone.HOST4}:3000/")
        assert refused.returncode != 0
    finally:
        process.terminate()
        caller.end(process)
