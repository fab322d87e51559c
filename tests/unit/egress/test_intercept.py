"""TLS that is looked into: real clients on one side, a real TLS host on the other, a secret that stays
between.
"""

from __future__ import annotations

import base64
import gc
import os
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING

import pytest

from casemate.egress.certificates import Authority
from casemate.egress.exchange import Limits
from casemate.egress.upstream import _trusting, system_bundle  # pyright: ignore[reportPrivateUsage]
from tests.unit.egress.flowlab import (
    NAME,
    OTHER,
    SECRET,
    Certificates,
    Gate,
    Handler,
    credential,
    curl,
    head,
    node,
    raw,
    rest,
    trusting,
    web,
)
from tests.unit.egress.tlslab import DATA, Echo, ask, client, looking, made_file

if TYPE_CHECKING:
    from pathlib import Path


# ---------------------------------------------------------------- clients


def test_curl(made: Gate) -> None:
    """curl gets through with the token, and sees its placeholder in the answer."""
    stand_in = made.placeholders["TOKEN"]
    done = curl(made, "-v", "-H", f"Authorization: Bearer {stand_in}")
    assert Echo.seen[0][1]["Authorization"] == f"Bearer {SECRET}"
    assert done.stdout.decode() == f"Bearer {stand_in}||/|{stand_in}"
    assert b"ALPN: server accepted http/1.1" in done.stderr
    assert made.kinds("credential") == [("allow", "filled", "TOKEN")]


def test_curl_logs_in(made: Gate) -> None:
    """``curl -u`` gets through: the placeholder as a password, in base64."""
    stand_in = made.placeholders["TOKEN"]
    done = curl(made, "-u", f"me:{stand_in}", "--data-binary", "@-", "-X", "POST")
    assert Echo.seen[0][1]["Authorization"] == "Basic " + base64.b64encode(f"me:{SECRET}".encode()).decode()
    assert done.stdout.decode().startswith("Basic " + base64.b64encode(f"me:{stand_in}".encode()).decode())


def test_urllib(made: Gate) -> None:
    """Python's urllib gets through."""
    program = (
        "import socket, ssl, sys, urllib.request\n"
        "name, port, ca, token = sys.argv[1:]\n"
        "real = socket.getaddrinfo\n"
        "socket.getaddrinfo = lambda host, *rest, **more: real('127.0.0.1', *rest, **more)\n"
        "fields = {'Authorization': f'token {token}'}\n"
        "asked = urllib.request.Request(f'https://{name}:{port}/x', headers=fields)\n"
        "context = ssl.create_default_context(cafile=ca)\n"
        "print(urllib.request.urlopen(asked, context=context).read().decode())\n"
    )
    values = [made.name, str(made.port), made_file(made), made.placeholders["TOKEN"]]
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, *values], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith(f"token {made.placeholders['TOKEN']}||/x"), done.stderr
    assert Echo.seen[0][1]["Authorization"] == f"token {SECRET}"


NODE = """
const https = require('https'), [name, port, token] = process.argv.slice(1);
const lookup = (host, options, done) => options.all ? done(null, [{address: '127.0.0.1', family: 4}])
                                                    : done(null, '127.0.0.1', 4);
const agent = new https.Agent({keepAlive: true, lookup});
function ask(path, body) {
  return new Promise((done, fail) => {
    const asked = https.request({host: name, port, path, agent, lookup, method: body ? 'POST' : 'GET',
      headers: {authorization: 'Bearer ' + token}}, answer => {
      let text = ''; answer.on('data', piece => text += piece); answer.on('end', () => done(text));
    });
    asked.on('error', fail);
    if (body) for (let i = 0; i < 10; i++) asked.write(body);
    asked.end();
  });
}
(async () => {
  console.log(await ask('/one')); console.log(await ask('/two', 'x'.repeat(10000))); agent.destroy();
})();
"""


def test_node(made: Gate) -> None:
    """node gets through by its own variable for authorities, on one connection, chunked uploads included."""
    stand_in = made.placeholders["TOKEN"]
    done = subprocess.run(
        [node(), "-e", NODE, made.name, str(made.port), stand_in],
        env={"NODE_EXTRA_CA_CERTS": made_file(made), "PATH": os.environ["PATH"]},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        f"Bearer {stand_in}||/{word}|{stand_in}" for word in ("one", "two")
    ], done.stderr
    assert [len(body) for _, _, body in Echo.seen] == [0, 100_000]
    assert len(made.targets) == 1


def test_many_requests_on_one_connection(made: Gate) -> None:
    """One connection of a client is one to the host, for a hundred requests and large answers."""
    connection = client(made)
    for number in range(100):
        connection.request("GET", "/big" if number % 25 == 0 else f"/{number}")
        assert (connection.getresponse().read() == DATA) is (number % 25 == 0)
    connection.close()
    assert made.dialled == 1


def test_a_client_that_trusts_nobody_new(made: Gate) -> None:
    """A client with a list of its own fails, as it should, and the event says why."""
    done = subprocess.run(
        ["curl", "-sS", "--noproxy", "*", "--resolve", f"{made.host}:127.0.0.1", f"https://{made.host}/"],
        capture_output=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 60
    assert made.kinds("request", 1)[0][:2] == ("deny", "client-distrust")


@pytest.mark.parametrize("protocols", [["h2"], ["h2", "http/1.1"], []])
def test_protocols(made: Gate, protocols: list[str]) -> None:
    """Only HTTP/1.1 is agreed on, whatever is offered."""
    context = trusting(made)
    if protocols:
        context.set_alpn_protocols(protocols)
    with (
        socket.create_connection(("127.0.0.1", made.port), 10) as plain,
        context.wrap_socket(plain, server_hostname=NAME) as sock,
    ):
        assert sock.selected_alpn_protocol() == ("http/1.1" if "http/1.1" in protocols else None)


# ---------------------------------------------------------------- the host is the decided one


@pytest.mark.parametrize("host_field", [OTHER, f"{NAME}:1", "", f"x.{NAME}"])
def test_host_inside(made: Gate, host_field: str) -> None:
    """A request inside of TLS for another host is refused on every request, and the host hears nothing."""
    connection = client(made)
    connection.request("GET", "/good")
    assert connection.getresponse().read()
    connection.putrequest("GET", "/evil", skip_host=True)
    connection.putheader("Host", host_field)
    connection.endheaders()
    answer = connection.getresponse()
    assert (answer.status, answer.headers["X-Casemate-Refused"]) == (403, "host-differs")
    assert NAME.encode() in answer.read()
    connection.close()
    assert [path for path, _, _ in Echo.seen] == ["/good"]


@pytest.mark.parametrize("asked", [OTHER, "xn--" + NAME, f"a.{NAME}"])
def test_name_in_the_hello(made: Gate, asked: str) -> None:
    """A hello for another name gets no certificate. Control: the host's own, in capitals, and none at all."""
    for name, fine in [(asked, False), (NAME.upper(), True), (None, True)]:
        context = ssl._create_unverified_context()  # noqa: S323
        expected = nullcontext() if fine else pytest.raises(ssl.SSLError, match="UNRECOGNIZED_NAME")
        with socket.create_connection(("127.0.0.1", made.port), 10) as plain, expected:
            context.wrap_socket(plain, server_hostname=name).close()
    assert made.dialled == 0


@pytest.mark.parametrize("method", ["CONNECT", "TRACE"])
def test_methods(made: Gate, method: str) -> None:
    """Inside of TLS there is no tunnel and no echo."""
    connection = client(made)
    connection.putrequest(method, f"{NAME}:443" if method == "CONNECT" else "/", skip_host=True)
    connection.putheader("Host", made.host)
    connection.endheaders()
    assert connection.getresponse().status == 403
    connection.close()
    assert Echo.seen == []


def test_rules_about_requests(host: tuple[str, int], certificates: Certificates) -> None:
    """Method and path are held to the rules inside of TLS; a refusal names the policy line."""
    Echo.seen.clear()
    with looking(host, certificates, requests={NAME: ("GET /repos/*", "POST /graphql")}) as made:
        for method, path, code in [
            ("GET", "/repos/x?y=1", 200), ("POST", "/graphql", 200), ("GET", "/user", 403),
            ("DELETE", "/repos/x", 403), ("GET", "/repos/%2e%2e/user", 403), ("GET", "/repos/..%5cuser", 403),
        ]:  # fmt: skip
            answer, found = ask(made, path, method)
            assert answer.status == code, (method, path)
            assert code == 200 or b"api.example.org" in found
        answer, _ = ask(made, "/repos/x", X_HTTP_Method_Override="DELETE")
        assert answer.headers["X-Casemate-Refused"] == "override"
    assert [path for path, _, _ in Echo.seen] == ["/repos/x?y=1", "/graphql"]


# ---------------------------------------------------------------- the host is who it says


def test_the_hosts_certificate_is_verified(
    host: tuple[str, int], certificates: Certificates, tmp_path: Path
) -> None:
    """A host whose certificate nobody vouches for, or for another name, gets no request and no secret."""
    Echo.seen.clear()
    stranger = Certificates(tmp_path, NAME)
    wrong = Authority([OTHER])
    (tmp_path / "wrong.pem").write_text(wrong.certificate_pem)
    with looking(host, certificates, credential(), ca_file=str(stranger.ca)) as made:
        answer, found = ask(made, Authorization=f"Bearer {made.placeholders['TOKEN']}")
        assert (answer.status, answer.headers["X-Casemate-Refused"]) == (502, "certificate")
        assert b"api.example.org" in found
        assert SECRET.encode() not in found
    with (
        web(Echo, wrong.context_for(OTHER)) as address,
        looking(address, certificates, credential(), ca_file=str(tmp_path / "wrong.pem")) as made,
    ):
        assert ask(made)[0].status == 502
    with looking(host, certificates, credential()) as made:
        assert ask(made)[0].status == 200
    assert len(Echo.seen) == 1


def test_a_host_without_tls(certificates: Certificates) -> None:
    """A host that does not speak TLS gets no request in the clear."""
    seen = []

    def script(sock: socket.socket) -> None:
        seen.append(sock.recv(65536))
        sock.sendall(b"HTTP/1.1 400 No\r\n\r\n")

    with raw(script) as address, looking(address, certificates, credential(add=True)) as made:
        answer, _ = ask(made)
        assert (answer.status, answer.headers["X-Casemate-Refused"]) == (502, "host-tls")
    assert SECRET.encode() not in b"".join(seen)


def test_the_systems_authorities_are_the_default(
    host: tuple[str, int], certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a setting the host's own bundle counts; the operator's SSL_CERT_FILE comes before it."""
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    assert os.path.isfile(system_bundle())
    context = _trusting(system_bundle())
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    assert len(context.get_ca_certs()) > 10
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    assert system_bundle() == str(certificates.ca)
    with looking(host, certificates, credential(), ca_file="") as made:
        assert ask(made)[0].status == 200
    monkeypatch.setenv("SSL_CERT_FILE", "/nonexistent")
    with looking(host, certificates, credential(), ca_file="") as made:
        assert ask(made)[0].status == 502


# ---------------------------------------------------------------- ends


def test_a_cut_connection_is_no_end(certificates: Certificates) -> None:
    """Where the end of the connection ends an answer, a cut one is seen as cut. Control: a proper end."""
    for proper in (False, True):

        def script(plain: socket.socket, proper: bool = proper) -> None:
            with certificates.context.wrap_socket(plain, server_side=True) as sock, suppress(OSError):
                head(sock)
                sock.sendall(b"HTTP/1.1 200 OK\r\n\r\nas much as there is")
                sock.unwrap() if proper else sock.shutdown(socket.SHUT_RDWR)

        with raw(script) as address, looking(address, certificates, requests={NAME: ("GET /**",)}) as made:
            done = curl(made)
            assert done.stdout == b"as much as there is"
            assert (done.returncode == 0) is proper, done.stderr


def test_slow_handshakes(host: tuple[str, int], certificates: Certificates) -> None:
    """A client that does not finish its handshake is let go."""
    with (
        looking(host, certificates, credential(), limits=Limits(handshake=0.3)) as made,
        socket.create_connection(("127.0.0.1", made.port), 10) as sock,
    ):
        sock.sendall(b"\x16\x03\x01\x02\x00\x01")
        assert rest(sock) == b""


def test_rubbish_instead_of_a_handshake(made: Gate) -> None:
    """Rubbish, plain HTTP and half a hello end the connection, and nothing is left behind."""
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(3000),
        b"\x16\x03\x01\x00\x05hello",
        b"\x15\x03\x03\0\2\2\x28",
    ):
        with socket.create_connection(("127.0.0.1", made.port), 10) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            rest(sock)
    assert made.dialled == 0
    assert ask(made)[0].status == 200


def test_large_transfers_in_bounded_memory(certificates: Certificates) -> None:
    """128 MiB down and 64 MiB up, through TLS on both sides and the search for a secret, take little room."""
    size_down, size_up = 128 << 20, 64 << 20
    block = os.urandom(1 << 20)

    class Large(Handler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(size_down))
            self.end_headers()
            for _ in range(size_down >> 20):
                self.wfile.write(block)

        def do_PUT(self) -> None:
            left = int(self.headers["Content-Length"])
            while left:
                left -= len(self.rfile.read(min(left, 1 << 20)))
            self.answer(b"taken")

    with web(Large, certificates.context) as address, looking(address, certificates, credential()) as made:
        ask(made, "/", "PUT", b"warm up")
        gc.collect()
        before = resident()
        highest = [before]
        stop = threading.Event()
        watching = threading.Thread(target=_watch, args=(highest, stop), daemon=True)
        watching.start()
        connection = client(made)
        connection.request("GET", "/")
        answer = connection.getresponse()
        size = 0
        while data := answer.read(1 << 20):
            size += len(data)
        assert size == size_down
        connection.putrequest("PUT", "/")
        connection.putheader("Content-Length", str(size_up))
        connection.endheaders()
        for _ in range(size_up >> 20):
            connection.send(block)
        assert connection.getresponse().read() == b"taken"
        connection.close()
        stop.set()
        watching.join(5)
    assert highest[0] - before < 32 << 20


def _watch(highest: list[int], stop: threading.Event) -> None:
    while not stop.wait(0.01):
        highest[0] = max(highest[0], resident())


def resident() -> int:
    """Bytes of this process that lie in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
