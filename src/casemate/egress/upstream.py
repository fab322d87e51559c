"""The gate's own connection to a host: dialled by the gate, and verified where it is TLS."""

from __future__ import annotations

import asyncio
import os
import ssl
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from casemate.egress.errors import Refused
from casemate.egress.streams import SocketStream, Stream, TlsStream

if TYPE_CHECKING:
    import socket

__all__ = ["Dialler", "connect", "system_bundle"]

_HANDSHAKE_SECONDS = 15.0
# Where distributions keep the one file of all authorities.
_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
)


class Dialler(Protocol):
    """What is needed of a target to connect to it."""

    @property
    def name(self) -> str:
        """The decided host."""
        ...

    @property
    def tls(self) -> bool:
        """Whether it is spoken to by TLS."""
        ...

    async def dial(self) -> socket.socket:
        """A connected, checked, non-blocking socket. Raises Refused, OSError, TimeoutError."""
        ...


def system_bundle() -> str:
    """The file with the authorities that this host trusts; ``""`` where there is none in a known place.

    ``SSL_CERT_FILE`` in this process's own environment, which is the operator's, comes before any other.
    """
    paths = (os.environ.get("SSL_CERT_FILE"), *_BUNDLES, ssl.get_default_verify_paths().cafile)
    return next((path for path in paths if path and os.path.isfile(path)), "")


async def connect(target: Dialler, trust: str = "") -> Stream:
    """A stream to the target. Raises Refused, OSError, TimeoutError.

    With TLS its certificate has been verified for the decided name, against the file ``trust``, or against
    what the host trusts.
    """
    sock = await target.dial()
    if not target.tls:
        return SocketStream(sock)
    try:
        stream = TlsStream(
            sock,
            _trusting(trust or system_bundle()),
            server=False,
            name=target.name,
        )
        async with asyncio.timeout(_HANDSHAKE_SECONDS):
            await stream.handshake()
    except ssl.SSLCertVerificationError as error:
        sock.close()
        why = error.verify_message.rstrip(".") or "it cannot be verified"
        raise Refused("certificate", f"the certificate of {target.name} was refused: {why}") from None
    except ssl.SSLError as error:
        sock.close()
        why = (error.reason or "it ended").lower().replace("_", " ")
        raise Refused("host-tls", f"{target.name} does not speak TLS as it should: {why}") from None
    except BaseException:
        sock.close()
        raise
    return stream


def _trusting(bundle: str) -> ssl.SSLContext:
    """A context for this bundle as it is now: workers live long, and authorities come and go."""
    changed = os.stat(bundle).st_mtime_ns if bundle else 0
    return _context(bundle, os.environ.get("SSL_CERT_DIR", ""), changed)


@lru_cache(maxsize=16)
def _context(bundle: str, directory: str, changed: int) -> ssl.SSLContext:
    del changed  # a part of the key only
    # Not ssl.create_default_context: that one writes session keys to a file that an environment variable
    # names.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Python tells OpenSSL to take a cut connection for an ended one.
    context.options &= ~getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
    context.set_alpn_protocols(["http/1.1"])
    if bundle or directory:
        context.load_verify_locations(cafile=bundle or None, capath=directory or None)
    else:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    return context
