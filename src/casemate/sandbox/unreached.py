"""Which host a line of stderr says could not be reached, as a rule of ``network.allow``.

The line is the command's own word. What it says is read in the shapes in which common programs say it, and
what comes out is a rule that a policy takes, or nothing.
"""

from __future__ import annotations

import re

__all__ = ["unreached"]

_MARKS = (
    "Could not resolve host",
    "Temporary failure in name resolution",
    "Name or service not known",
    "etwork is unreachable",
    "getaddrinfo",
    "EAI_AGAIN",
    "ENOTFOUND",
    "ENETUNREACH",
    "Failed to establish a new connection",
    "NameResolutionError",
    "UnknownHostException",
    "failed to lookup address information",
)
_HOST = r"[\"'`(\u2018\u201c]?(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.-]+)"
_PORT = r"(?::(?P<port>\d{1,5})\b)?"
# Each says by itself that a host was not reached.
_SAID = tuple(
    re.compile(text)
    for text in (
        rf"(?P<ssh>ssh): Could not resolve hostname {_HOST}",
        r"connect to host (?P<host>\S+) port (?P<port>\d+): Network is unreachable",
        r"Failed to connect to (?P<host>\S+) port (?P<port>\d+)",
        rf"unable to look up {_HOST} \(port (?P<port>\d+)\)",
        rf"Could not resolve (?:host|hostname|proxy): {_HOST}",
        r"host='(?P<host>[^']+)', port=(?P<port>\d+)\).{0,1000}(?:NameResolutionError|NewConnectionError)",
        rf"Failed to resolve {_HOST}.{{0,20}}\[Errno",
        r"connect ENETUNREACH (?P<host>\S+):(?P<port>\d+)",
        rf"getaddrinfo (?:ENOTFOUND|EAI_AGAIN) {_HOST}{_PORT}",
        rf"getaddrinfo for (?:host )?{_HOST}(?:\S? port (?P<port>\d+))?",
        rf"UnknownHostException: {_HOST}{_PORT}",
        rf"unable to resolve host address {_HOST}",
        rf"Temporary failure resolving {_HOST}",
        rf"wget: bad address {_HOST}",
        rf"dial tcp: lookup {_HOST}",
        r"dial tcp (?P<host>\S+):(?P<port>\d+): connect: network is unreachable",
        rf"translate host name {_HOST}",
        rf"Resolving {_HOST} .{{0,300}}failed: ",
        rf"/dev/tcp/{_HOST}/(?P<port>\d+): (?:Network is unreachable|Invalid argument)",
        r"(?<![\w.-])(?P<host>[\w-]+(?:\.[\w-]+)+)(?<!error): (?:Temporary failure in|Name or service not)",
        rf"(?:name resolution|service not known) \({_HOST}:(?P<port>\d+)\)",
    )
)
# These name a host, whatever is said of it: they count where a mark is in the line, too.
_JOINED = re.compile(rf"onnect(?:ion)? to (?:host )?{_HOST}:(?P<port>\d+)")
_URL = re.compile(rf"\b(?P<scheme>https?|ssh|git)://(?:[^/\s@]{{1,200}}@)?{_HOST}{_PORT}")
_SSH_PORT = re.compile(r"\bssh (?:.{0,300} )?-p ?(?P<port>\d{1,5})\b")
_USUAL = {"ssh": 22, "git": 9418}
_WEB = ("", "80", "443")


def unreached(line: bytes, command: str = "") -> str | None:
    """The rule that would allow what ``line`` says was not reached; None where it speaks of something else.

    Empty where it names no host, or one that no rule allows. ``command`` is what was run: many programs name
    a host alone and not its port, which stands in the words that they were given.
    """
    text = line.decode("utf-8", "replace")
    marked = any(mark in text for mark in _MARKS)
    for pattern in (*_SAID, _JOINED, _URL) if marked else _SAID:
        found = pattern.search(text)
        if found is not None and (rule := _found(found, f"{text} {command}")):
            return rule
    return "" if marked else None


def _found(match: re.Match[str], text: str) -> str:
    parts = match.groupdict()
    host = parts["host"].rstrip(".-")
    port = parts.get("port") or ""
    if not port:
        for url in _URL.finditer(text):
            if url["host"] == host:
                port = url["port"] or str(_USUAL.get(url["scheme"], ""))
                break
    if not port and parts.get("ssh"):
        given = _SSH_PORT.search(text)
        port = given["port"] if given is not None else "22"
    return _rule(host, port)


def _rule(host: str, port: str) -> str:
    """A rule that parses and that would open this, or ``""``."""
    from casemate.policy import hosts, rules

    address = hosts.address(host)
    if address is not None:
        from casemate.egress.guard import guard, plain

        barrier = guard(plain(str(address)))
        if barrier is not None and (barrier.net is None or barrier.reason == "guarded-metadata"):
            return ""
        host = f"[{address}]" if address.version == 6 else str(address)
    web = port in _WEB
    try:
        return rules.parse(host if web else f"{host}:{port}").text
    except ValueError:
        return ""
