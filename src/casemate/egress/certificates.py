"""The certificate authority of one sandbox: made when it starts, known to it alone, gone with the worker.

Its key never leaves memory. Its certificate names the hosts whose connections may be looked into and is worth
nothing for any other, so even a stolen key could not speak for the rest of the world.
"""

from __future__ import annotations

import os
import ssl
from collections import OrderedDict
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import TYPE_CHECKING

from casemate.egress.errors import Refused
from casemate.policy import hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder, GeneralName, Name

__all__ = ["DAYS", "Authority"]

#: How long an authority and its leaves are valid.
DAYS = 7
# Clocks of containers and virtual machines differ by a little.
_SLACK = timedelta(hours=1)
_CONTEXTS = 512
_NEVER = "nothing.invalid"
_MFD_NOEXEC_SEAL = 0x0008
_EVERY_ADDRESS = (IPv4Network("0.0.0.0/0"), IPv6Network("::/0"))


class Authority:
    """Speaks TLS in the name of hosts, towards one sandbox.

    ``names`` are the hosts it may speak for: names, ``*.name`` for all below, addresses. None: any host.
    """

    certificate_pem: str

    def __init__(self, names: Iterable[str] | None = None, *, days: float = DAYS) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        self._names = None if names is None else frozenset(names)
        self._key = ec.generate_private_key(ec.SECP256R1())
        # One key for all leaves: whoever has one has this process's memory.
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _name("Casemate sandbox authority", os.urandom(6).hex())
        self._begin = datetime.now(UTC) - _SLACK
        self._end = self._begin + _SLACK + timedelta(days=days)
        self._identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        self._certificate = self._made()
        self.certificate_pem = self._certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")
        self._contexts: OrderedDict[str, ssl.SSLContext] = OrderedDict()

    def __repr__(self) -> str:
        return f"Authority({'any host' if self._names is None else sorted(self._names)})"

    def covers(self, name: str) -> bool:
        """Whether clients that trust this authority would take its word for ``name``."""
        if self._names is None or name in self._names:
            return True
        return any(known.startswith("*.") and hosts.matches(name, known[2:]) for known in self._names)

    def context_for(self, name: str) -> ssl.SSLContext:
        """What a TLS server needs to be ``name`` (normalised, or an address). Made once, then kept.

        HTTP/1.1 is the one protocol on offer. Raises Refused for a name that this authority was not made for.
        """
        if context := self._contexts.get(name):
            self._contexts.move_to_end(name)
            return context
        if not self.covers(name):
            raise Refused("authority", f"the sandbox's certificate authority was not made for {name}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.set_alpn_protocols(["http/1.1"])
        context.sni_callback = _only(name)
        _load(context, self._leaf(name))
        self._contexts[name] = context
        if len(self._contexts) > _CONTEXTS:
            self._contexts.popitem(last=False)
        return context

    # ------------------------------------------------------------ making certificates

    def _builder(self, subject: Name, key: EllipticCurvePrivateKey) -> CertificateBuilder:
        from cryptography import x509

        public = key.public_key()
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._begin)
            .not_valid_after(self._end)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(self._identifier, critical=False)
        )

    def _made(self) -> Certificate:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import ExtendedKeyUsageOID

        builder = (
            self._builder(self._subject, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        )
        if self._names is not None:
            builder = builder.add_extension(_constraints(self._names), critical=True)
        return builder.sign(self._key, hashes.SHA256())

    def _leaf(self, name: str) -> bytes:
        """Certificate and key, as PEM."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.x509.oid import ExtendedKeyUsageOID

        address = hosts.address(name)
        shown: GeneralName = x509.DNSName(name) if address is None else x509.IPAddress(address)
        leaf = (
            # Not the bare name: of an address OpenSSL would take it for a DNS name, against the constraints.
            self._builder(_name("Casemate sandbox", f"gate for {name}"), self._leaf_key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([shown]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return leaf.public_bytes(serialization.Encoding.PEM) + self._leaf_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )


def _name(organization: str, common: str) -> Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization),
            x509.NameAttribute(NameOID.COMMON_NAME, common[:64]),
        ]
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _constraints(names: Iterable[str]) -> x509.NameConstraints:
    """Only these names. A kind that is not mentioned would be unbounded, so each is."""
    from cryptography import x509

    permitted: list[GeneralName] = []
    addresses = False
    for name in sorted(names):
        address = hosts.address(name)
        if address is None:
            permitted.append(x509.DNSName(name.removeprefix("*.")))
        else:
            permitted.append(x509.IPAddress(ip_network(address)))
            addresses = True
    if len(permitted) == 0 or all(isinstance(name, x509.IPAddress) for name in permitted):
        permitted.append(x509.DNSName(_NEVER))
    excluded = None if addresses else [x509.IPAddress(network) for network in _EVERY_ADDRESS]
    return x509.NameConstraints(permitted_subtrees=permitted, excluded_subtrees=excluded)


def _only(name: str) -> Callable[[ssl.SSLObject | ssl.SSLSocket, str | None, ssl.SSLContext], int | None]:
    """Refuses a hello for any other name. The gate has compared it before; the bytes it saw are these."""

    def check(_tls: ssl.SSLObject | ssl.SSLSocket, asked: str | None, _context: ssl.SSLContext) -> int | None:
        return None if asked is None or _same(asked, name) else ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME

    return check


def _same(asked: str, name: str) -> bool:
    try:
        return hosts.normalise(asked) == name
    except ValueError:
        return asked == name


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Certificate and key into a context. The ssl module reads files only, so this one lies in memory."""
    descriptor = _memory_file()
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _memory_file() -> int:
    try:
        # Where vm.memfd_noexec is 2, nothing else is allowed; before Linux 6.3 the flag is unknown.
        return os.memfd_create("casemate", os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError:
        return os.memfd_create("casemate", os.MFD_CLOEXEC)
