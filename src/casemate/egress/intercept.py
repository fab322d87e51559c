"""A TLS connection that a rule has to look into: the gate answers as the host, and asks the host itself.

Only HTTP/1.1 is offered to either side, so there is one flow and one place where rules and credentials apply.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING

from casemate.egress.certificates import Authority
from casemate.egress.errors import Refused
from casemate.egress.httpflow import LIMITS, serve_stream
from casemate.egress.streams import TlsStream

if TYPE_CHECKING:
    import socket

    from casemate.egress.httpflow import Limits, Target

__all__ = ["Authority", "intercept"]

# What a client says when it does not take the certificate. OpenSSL reports the alert by this name.
_DISTRUST = ("UNKNOWN_CA", "CERTIFICATE_UNKNOWN", "BAD_CERTIFICATE")


async def intercept(
    sock: socket.socket,
    hello_name: str | None,
    target: Target,
    authority: Authority,
    *,
    limits: Limits = LIMITS,
    trust: str = "",
) -> None:
    """Serve a connection whose ClientHello has not been read yet, to its end; closes ``sock``.

    ``hello_name`` is the name in it, if any; ``trust`` a file of authorities for the host's own certificate,
    for those that this machine trusts. Raises Refused, with nothing read, where it is not the target's or
    ``authority`` was not made for the target.
    """
    if hello_name not in (None, "", target.name):
        raise Refused("sni-differs", f"a connection to {target.name} asks for {hello_name} inside of TLS")
    try:
        context = authority.context_for(target.name)
    except OSError as error:
        raise Refused("gate-error", f"no certificate could be made: {error.strerror}") from error
    stream = TlsStream(sock, context, server=True)
    try:
        async with asyncio.timeout(limits.handshake):
            await stream.handshake()
    except (OSError, TimeoutError) as error:
        _tell(error, target)
        with suppress(OSError):
            stream.close()
        return
    except BaseException:
        stream.abort()
        raise
    await serve_stream(stream, target, limits=limits, trust=trust)


def _tell(error: OSError | TimeoutError, target: Target) -> None:
    """What kept a client from shaking hands, if it said so."""
    if not isinstance(error, ssl.SSLError):
        return
    word = error.reason or ""
    if any(known in word for known in _DISTRUST):
        reason = "client-distrust"
        detail = (
            "the client does not trust the sandbox's authority: it pins certificates, or has its own list"
        )
    elif "UNRECOGNIZED_NAME" in word or "CALLBACK" in word:
        reason, detail = "sni-differs", "the name inside of TLS is not the host's"
    else:
        reason, detail = "tls-failed", word.lower().replace("_", " ")
    target.event("request", verdict="deny", reason=reason, detail=detail)
