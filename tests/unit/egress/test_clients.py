"""Everyday programs with a token that they never see: git over HTTPS, pip with a private index, npm."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from typing import TYPE_CHECKING

import pytest

from tests.unit.egress.flowlab import (
    NAME,
    SECRET,
    Certificates,
    Gate,
    Handler,
    credential,
    gate,
    network,
    node,
    web,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

REAL = "Basic " + base64.b64encode(f"x-access-token:{SECRET}".encode()).decode()


class Protected(Handler):
    """Lets nobody in without the real token."""

    refused = 0

    def admitted(self) -> bool:
        """Whether the request brings the token; else it is answered."""
        given = self.headers.get("Authorization", "")
        plain = base64.b64decode(given[6:]).decode() if given.startswith("Basic ") else given
        if plain.endswith((f":{SECRET}", f"Bearer {SECRET}")):
            return True
        body = b"who are you?"
        self.body()
        self.answer(body, 401, WWW_Authenticate='Basic realm="x"')
        return False


class Git(Protected):
    """The real ``git http-backend``."""

    root = ""

    def do_GET(self) -> None:
        if not self.admitted():
            return
        path, _, query = self.path.partition("?")
        body = self.body()
        done = subprocess.run(
            ["git", "http-backend"],
            input=body,
            env={
                "PATH": os.environ["PATH"],
                "GIT_PROJECT_ROOT": self.root,
                "GIT_HTTP_EXPORT_ALL": "1",
                "PATH_INFO": path,
                "QUERY_STRING": query,
                "REQUEST_METHOD": self.command,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "CONTENT_LENGTH": str(len(body)),
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
                "REMOTE_USER": "me",
                "GIT_CONFIG_NOSYSTEM": "1",
                "HOME": self.root,
            },
            capture_output=True,
            timeout=60,
            check=False,
        )
        begin, _, text = done.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in begin.decode().split("\r\n"))
        status = int(fields.pop("Status", "200 OK").split()[0])
        self.answer(text, status, **{name.replace("-", "_"): value for name, value in fields.items()})

    do_POST = do_GET


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """The authority of the internet of these tests."""
    return Certificates(tmp_path_factory.mktemp("ca"), NAME)


def open_gate(
    address: tuple[str, int], certificates: Certificates, *, add: bool
) -> AbstractContextManager[Gate]:
    """A gate that holds the token for the host."""
    policy = network(credentials=(credential(place="basic", add=add),))
    return gate(address, policy, tls=True, ca_file=str(certificates.ca), secrets={"TOKEN": SECRET})


def trust_file(made: Gate, directory: Path) -> str:
    """The gate's certificate as a file."""
    path = directory / "gate.pem"
    path.write_text(made.authority.certificate_pem)
    return str(path)


# ---------------------------------------------------------------- git


@pytest.fixture
def repositories(tmp_path: Path) -> Path:
    """A directory with one bare repository that may be pushed to, and a commit to push."""
    served = tmp_path / "served"
    run(tmp_path, "git", "init", "-q", "--bare", "-b", "main", str(served / "project.git"))
    run(served / "project.git", "git", "config", "http.receivepack", "true")
    work = tmp_path / "work"
    run(tmp_path, "git", "init", "-q", "-b", "main", str(work))
    (work / "large.bin").write_bytes(os.urandom(3 << 20))  # more than http.postBuffer: it is sent in chunks
    run(work, "git", "add", ".")
    run(work, "git", "commit", "-q", "-m", "first")
    return served


def run(where: Path, *argv: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    """A program with an identity for git and nobody's configuration."""
    full = {
        "PATH": os.environ["PATH"], "HOME": str(where), "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0", "GIT_AUTHOR_NAME": "n", "GIT_AUTHOR_EMAIL": "e@example.org",
        "GIT_COMMITTER_NAME": "n", "GIT_COMMITTER_EMAIL": "e@example.org", **env,
    }  # fmt: skip
    done = subprocess.run(argv, cwd=where, env=full, capture_output=True, text=True, timeout=120, check=False)
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.fixture
def git_host(repositories: Path, certificates: Certificates) -> Iterator[tuple[str, int]]:
    """A host that serves the repositories to whoever has the token."""
    handler = type("Served", (Git,), {"root": str(repositories)})
    with web(handler, certificates.context) as address:
        yield address


def git_options(made: Gate, directory: Path) -> list[str]:
    """git finds the gate under the host's name, and trusts it."""
    return [
        "-c",
        f"http.curloptResolve={made.host}:127.0.0.1",
        "-c",
        f"http.sslCAInfo={trust_file(made, directory)}",
    ]


@pytest.mark.parametrize("way", ["added", "url", "header"])
def test_git(git_host: tuple[str, int], certificates: Certificates, tmp_path: Path, way: str) -> None:
    """Push, clone and fetch over HTTPS work with a token that the gate holds: added by the gate, or as a
    placeholder in the URL or in an extra header.
    """
    work = tmp_path / "work"
    with open_gate(git_host, certificates, add=way == "added") as made:
        stand_in = made.placeholders["TOKEN"]
        user = f"x-access-token:{stand_in}@" if way == "url" else ""
        url = f"https://{user}{made.host}/project.git"
        options = git_options(made, tmp_path)
        if way == "header":
            options += ["-c", f"http.extraHeader=Authorization: Bearer {stand_in}"]
        pushed = run(work, "git", *options, "push", url, "main")
        run(tmp_path, "git", *options, "clone", "-q", url, "copy")
        run(work, "git", "commit", "-q", "--allow-empty", "-m", "second")
        run(work, "git", *options, "push", "-q", url, "main")
        run(tmp_path / "copy", "git", *options, "fetch", "-q", url, "main")
        copy = run(tmp_path / "copy", "git", "log", "--format=%s", "FETCH_HEAD").stdout
        assert copy == "second\nfirst\n"
        assert (tmp_path / "copy" / "large.bin").read_bytes() == (work / "large.bin").read_bytes()
        assert ("allow", "filled", "TOKEN") in made.kinds("credential")
        assert SECRET not in pushed.stderr + repr(made.events)


def test_git_without_the_token(git_host: tuple[str, int], certificates: Certificates, tmp_path: Path) -> None:
    """Control: with a placeholder that is not this sandbox's, or none, the host lets nobody in."""
    with open_gate(git_host, certificates, add=False) as made:
        options = git_options(made, tmp_path)
        for user in ("", "x-access-token:ghp_casemateOfAnotherSandbox000000000000@"):
            url = f"https://{user}{made.host}/project.git"
            done = run(tmp_path / "work", "git", *options, "push", url, "main", check=False)
            assert done.returncode != 0
            assert "uthentication" in done.stderr or "could not read" in done.stderr


# ---------------------------------------------------------------- package managers


def wheel() -> bytes:
    """A wheel with one module."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("private_thing.py", "VALUE = 42\n")
        archive.writestr(
            "private_thing-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: private-thing\nVersion: 1.0\n",
        )
        archive.writestr(
            "private_thing-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("private_thing-1.0.dist-info/RECORD", "private_thing.py,,\n")
    return packed.getvalue()


class Index(Protected):
    """A private index of Python packages."""

    package = wheel()

    def do_GET(self) -> None:
        if not self.admitted():
            return
        if self.path.endswith(".whl"):
            self.answer(self.package)
        elif self.path == "/simple/private-thing/":
            digest = hashlib.sha256(self.package).hexdigest()
            link = f'<a href="/files/private_thing-1.0-py3-none-any.whl#sha256={digest}">private_thing</a>'
            self.answer(link.encode(), Content_Type="text/html")
        else:
            self.answer(b"", 404)


# Programs of this test find the gate by any name.
PIP = """
import socket, sys
real = socket.getaddrinfo
socket.getaddrinfo = lambda host, *rest, **more: real("127.0.0.1", *rest, **more)
from pip._internal.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_pip(certificates: Certificates, tmp_path: Path) -> None:
    """pip installs from a private index with the placeholder in the index's URL, as PIP_INDEX_URL has it."""
    with web(Index, certificates.context) as address, open_gate(address, certificates, add=False) as made:
        done = run(
            tmp_path, sys.executable, "-I", "-c", PIP, "install", "--target", str(tmp_path / "to"),
            "--no-deps", "--disable-pip-version-check", "--no-cache-dir", "--isolated",
            "--cert", trust_file(made, tmp_path), "--index-url",
            f"https://me:{made.placeholders['TOKEN']}@{made.host}/simple/", "private-thing",
        )  # fmt: skip
        assert (tmp_path / "to" / "private_thing.py").read_text() == "VALUE = 42\n"
        assert SECRET not in done.stdout + done.stderr


class Registry(Protected):
    """A private registry of npm packages."""

    def do_GET(self) -> None:
        if not self.admitted():
            return
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for name, text in [("package/package.json", '{"name":"private-thing","version":"1.0.0"}'),
                               ("package/index.js", "module.exports = 42\n")]:  # fmt: skip
                entry = tarfile.TarInfo(name)
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text.encode()))
        if self.path.endswith(".tgz"):
            self.answer(packed.getvalue())
        elif self.path == "/private-thing":
            where = f"https://{self.headers['Host']}/private-thing-1.0.0.tgz"
            self.answer(
                f'{{"name":"private-thing","dist-tags":{{"latest":"1.0.0"}},"versions":{{"1.0.0":{{"name":'
                f'"private-thing","version":"1.0.0","dist":{{"tarball":"{where}"}}}}}}}}'.encode(),
                Content_Type="application/json",
            )
        else:
            self.answer(b"{}", 404)


def test_npm(certificates: Certificates, tmp_path: Path) -> None:
    """npm installs from a private registry with the placeholder as its _authToken.

    Its own setting names the authority: where the system's npmrc has one, it wins over node's variable.
    """
    patch = tmp_path / "patch.js"
    patch.write_text(
        textwrap.dedent("""
            const dns = require('dns'), real = dns.lookup;
            dns.lookup = (host, options, done) => real('127.0.0.1', options, done);
        """)
    )
    project = tmp_path / "project"
    project.mkdir()
    (project / "package.json").write_text('{"name":"p","version":"1.0.0"}')
    with web(Registry, certificates.context) as address, open_gate(address, certificates, add=False) as made:
        (project / ".npmrc").write_text(
            f"registry=https://{made.host}/\n//{made.host}/:_authToken={made.placeholders['TOKEN']}\n"
        )
        done = run(
            project, node("npm"), "install", "--no-audit", "--no-fund", "--no-update-notifier",
            "--fetch-retries=0", "private-thing",
            NPM_CONFIG_CAFILE=trust_file(made, tmp_path), NODE_OPTIONS=f"--require {patch}",
            PATH=f"{os.path.dirname(node())}:{os.environ['PATH']}",
        )  # fmt: skip
        assert (project / "node_modules/private-thing/index.js").read_text() == "module.exports = 42\n"
        assert SECRET not in done.stdout + done.stderr
        assert SECRET not in (project / "package-lock.json").read_text()
