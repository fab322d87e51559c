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
    """The file with the authorities that this host trusts; ``""`` where there is none in a known place."""
    default = ssl.get_default_verify_paths().cafile
    return next((path for path in (*_BUNDLES, default or "") if path and os.path.isfile(path)), "")


async def connect(target: Dialler) -> Stream:
    """A stream to the target. Raises Refused, OSError, TimeoutError.

    With TLS its certificate has been verified for the decided name, against ``target.ca_file`` where the
    operator names one and else against what the host trusts.
    """
    sock = await target.dial()
    if not target.tls:
        return SocketStream(sock)
    ca_file: str = getattr(target, "ca_file", "")
    try:
        stream = TlsStream(sock, _context(ca_file), server=False, name=target.name)
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


@lru_cache(maxsize=16)
def _context(ca_file: str) -> ssl.SSLContext:
    # Not ssl.create_default_context: that one writes session keys to a file that an environment variable
    # names.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Python tells OpenSSL to take a cut connection for an ended one.
    context.options &= ~getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
    context.set_alpn_protocols(["http/1.1"])
    bundle = ca_file or system_bundle()
    if bundle:
        context.load_verify_locations(cafile=bundle)
    else:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    return context
