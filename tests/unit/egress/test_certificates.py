"""The authority of a sandbox: who believes it, for which names, and that its key stays in memory."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

import casemate
from casemate.egress import certificates
from casemate.egress.certificates import Authority
from casemate.egress.errors import Refused
from casemate.egress.streams import TlsStream

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = ["api.example.org", "*.wild.example.net"]


def shake(authority: Authority, name: str, *, asks: str | None = None,
          client: Callable[[ssl.SSLContext], None] | None = None) -> ssl.SSLObject:  # fmt: skip
    """A client that trusts the authority, and a server that is ``name``; raises what the client meets."""
    trust = ssl.create_default_context(cadata=authority.certificate_pem)
    trust.set_alpn_protocols(["h2", "http/1.1"])
    trust.verify_flags |= ssl.VERIFY_X509_STRICT
    if client is not None:
        client(trust)
    ways = [ssl.MemoryBIO() for _ in range(4)]
    asking = trust.wrap_bio(ways[0], ways[1], server_hostname=asks or name)
    serving = authority.context_for(name).wrap_bio(ways[2], ways[3], server_side=True)
    for _ in range(6):
        with suppress(ssl.SSLWantReadError):
            asking.do_handshake()
            return asking
        ways[2].write(ways[1].read())
        try:
            with suppress(ssl.SSLWantReadError):
                serving.do_handshake()
        except ssl.SSLError:
            ways[0].write(ways[3].read())
            asking.do_handshake()
        ways[0].write(ways[3].read())
    raise AssertionError("no end to it")


@pytest.mark.parametrize("name", ["api.example.org", "a.wild.example.net", "x.y.wild.example.net"])
@pytest.mark.parametrize("names", [NAMES, None])
def test_clients_believe_it(name: str, names: list[str] | None) -> None:
    """Whoever trusts the authority takes its leaves, by strict rules, and only HTTP/1.1 is agreed on."""
    agreed = shake(Authority(names), name)
    assert agreed.selected_alpn_protocol() == "http/1.1"
    assert agreed.version() == "TLSv1.3"


@pytest.mark.parametrize("address", ["192.0.2.7", "2001:db8::7"])
def test_addresses(address: str) -> None:
    """A host that is named by its address has a leaf for it; its neighbour has none."""
    shake(Authority([address]), address)
    with pytest.raises(Refused, match="not made for"):
        Authority([address]).context_for("192.0.2.8")


def test_names_outside_are_refused_here() -> None:
    """The authority speaks for no name that it was not made for."""
    authority = Authority(NAMES)
    for name in (
        "example.org",
        "wild.example.net",
        "xwild.example.net",
        "api.example.org.evil.net",
        "192.0.2.1",
    ):
        assert not authority.covers(name)
        with pytest.raises(Refused, match="not made for"):
            authority.context_for(name)


@pytest.mark.parametrize(
    "name", ["www.evil.example.com", "xapi.example.org.evil.com", "192.0.2.1", "2001:db8::1"]
)
def test_names_outside_are_refused_by_clients(name: str) -> None:
    """A leaf for another name, made with the stolen key, convinces no client. Control: one for all."""
    authority = Authority(NAMES)
    authority._names = None  # as a thief would
    with pytest.raises(ssl.SSLCertVerificationError, match=r"permitted subtree|excluded subtree"):
        shake(authority, name)
    shake(Authority(), name)


def test_another_authority_is_not_believed() -> None:
    """Each sandbox has an authority of its own: one's leaves are nothing to the other."""
    one, two = Authority(NAMES), Authority(NAMES)
    two.certificate_pem = one.certificate_pem
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(two, "api.example.org")


def test_the_name_in_the_hello_must_be_the_hosts() -> None:
    """A hello for another name ends with the alert for that; an upper-case one is the same name."""

    def unchecked(context: ssl.SSLContext) -> None:
        context.check_hostname = False

    authority = Authority(NAMES)
    with pytest.raises(ssl.SSLError, match="UNRECOGNIZED_NAME"):
        shake(authority, "api.example.org", asks="a.wild.example.net", client=unchecked)
    shake(authority, "api.example.org", asks="API.Example.ORG")


def test_old_protocols_are_refused() -> None:
    """Nothing below TLS 1.2 is spoken; 1.2 is."""

    def only(version: ssl.TLSVersion) -> Callable[[ssl.SSLContext], None]:
        def limit(context: ssl.SSLContext) -> None:
            context.set_ciphers("DEFAULT:@SECLEVEL=0")
            context.minimum_version = context.maximum_version = version

        return limit

    with pytest.warns(DeprecationWarning, match="TLS"), pytest.raises(ssl.SSLError):
        shake(Authority(NAMES), "api.example.org", client=only(ssl.TLSVersion.TLSv1_1))
    shake(Authority(NAMES), "api.example.org", client=only(ssl.TLSVersion.TLSv1_2))


def test_what_the_certificate_says() -> None:
    """P-256, seven days, may sign leaves only, bounded to the names."""
    found = x509.load_pem_x509_certificate(Authority(NAMES).certificate_pem.encode())
    key = found.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"
    assert (found.not_valid_after_utc - found.not_valid_before_utc).days == 7
    basic = found.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (basic.value.ca, basic.value.path_length, basic.critical) == (True, 0, True)
    bounds = found.extensions.get_extension_for_class(x509.NameConstraints)
    assert bounds.critical
    permitted = bounds.value.permitted_subtrees
    assert permitted is not None
    assert {name.value for name in permitted} == {"api.example.org", "wild.example.net"}


def test_contexts_are_kept() -> None:
    """The second connection to a name costs nothing; the number that is kept is bounded."""
    authority = Authority()
    first = authority.context_for("a.example.org")
    assert authority.context_for("a.example.org") is first
    for number in range(600):
        authority.context_for(f"n{number}.example.org")
    assert authority.context_for("a.example.org") is not first


def test_no_key_in_a_file_or_in_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making leaves opens no file on a disk for writing, leaves no descriptor, and nothing prints a key."""
    opened: list[tuple[object, object]] = []
    watching = True
    sys.addaudithook(lambda event, values: opened.append((values[0], values[1]))
                     if watching and event == "open" else None)  # fmt: skip
    authority = Authority(NAMES)
    before = len(os.listdir("/proc/self/fd"))
    authority.context_for("api.example.org")
    after = len(os.listdir("/proc/self/fd"))
    watching = False
    written = [path for path, mode in opened if mode and str(mode).strip("rbt") and not isinstance(path, int)]
    assert written == []
    assert before == after
    assert "PRIVATE" not in authority.certificate_pem
    assert "Key" not in repr(authority)


_WITHOUT_RIGHTS = """
    import os, sys, resource
    sys.path.insert(0, {source!r})
    from casemate.sys import landlock, process
    from casemate.egress.certificates import Authority
    if os.geteuid() == 0:
        os.setgroups([]); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
    process.drop_capabilities(); process.set_dumpable(False); process.no_new_privileges()
    version = landlock.abi()
    if version:
        rules = landlock.Ruleset(version)
        for path in ("/etc", "/usr", "/lib", "/opt", "/proc/self", {source!r}, *sys.path):
            try:
                handle = os.open(path, os.O_PATH)
            except OSError:
                continue
            rules.allow(handle, landlock.READ, directory=os.path.isdir(path))
        rules.enforce()
    Authority(["api.example.org"]).context_for("api.example.org")
    print("made")
"""


def test_works_without_any_right(tmp_path: Path) -> None:
    """A process that has given up its uid, capabilities, dumps and files can still load what it made."""
    copy = tmp_path / "src"
    shutil.copytree(Path(casemate.__file__).parent, copy / "casemate")
    for directory in (copy, *tmp_path.parents):
        if directory.stat().st_uid == os.getuid() and str(directory).startswith("/tmp"):
            directory.chmod(directory.stat().st_mode | 0o055)
    program = textwrap.dedent(_WITHOUT_RIGHTS).format(source=str(copy))
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "made\n", done.stderr


def test_a_stream_over_a_socket() -> None:
    """Both ends of a connection read what the other wrote, more than the socket holds, and its end."""
    sent = os.urandom(3 << 20)

    async def run() -> bytes:
        authority = Authority(NAMES)
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        trust = ssl.create_default_context(cadata=authority.certificate_pem)
        server = TlsStream(ours, authority.context_for("api.example.org"), server=True)
        client = TlsStream(theirs, trust, server=False, name="api.example.org")
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(server.handshake())
            group.create_task(client.handshake())

        async def write() -> None:
            await server.write(sent)
            await server.end()

        found = bytearray()
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            group.create_task(write())
            assert not client.gone()
            while data := await client.read():
                found += data
        assert not client.cut
        assert client.gone()
        server.close()
        client.close()
        return bytes(found)

    assert asyncio.run(run()) == sent
    assert certificates.DAYS == 7
