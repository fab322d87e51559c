"""What a failed command was refused, and what would allow it in a policy.

Mounts and Landlock tell nobody what they refuse, so apart from what the host saw itself this reads the end
of the command's stderr. That text is the command's own word: it is matched against a few fixed shapes,
compared with the policy, bounded, and marked as likely, never as certain.
"""

from __future__ import annotations

from casemate.policy.paths import SYSTEM
from casemate.sandbox.result import Applied, Denial, NetworkUse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from casemate.sandbox.job import Job

__all__ = ["TAIL", "find"]

#: How much of the end of stderr is looked at, in bytes.
TAIL = 16384
_MOST = 8
_LONGEST = 2000
_MOST_REFUSED = 50
_MOST_HOSTS = 20
# What a line has in it that says a host was not reached, and from which a host can be read.
_NETWORK = (
    b"esol", b"onnect", b"getaddrinfo", b"EAI_AGAIN", b"ENOTFOUND", b"ENETUNREACH", b"UnknownHost",
    b"/dev/tcp/", b"ame or service not known", b"etwork is unreachable", b"dial tcp", b"look up", b"lookup",
    b"bad address", b"translate host name",
)  # fmt: skip
_CROSSING = (b"Invalid cross-device link", b"EXDEV")
_REFUSED = (
    b"Permission denied",
    b"Operation not permitted",
    b"Read-only file system",
    b"EACCES",
    b"EROFS",
    b"EPERM",
)
_MISSING = (b"No such file or directory", b"ENOENT", b"not found")
# What a program says where a limit stops it that the kernel counts for nobody.
_LIMITS = {
    "disk": (b"No space left on device", b"ENOSPC"),
    "memory": (b"Cannot allocate memory", b"MemoryError", b"ENOMEM", b"std::bad_alloc"),
    "pids": (b"fork: Resource temporarily unavailable", b"Cannot fork", b"can't start new thread"),
    "file-size": (b"File too large", b"EFBIG"),
    "open-files": (b"Too many open files", b"EMFILE"),
}


def find(
    job: Job,
    applied: Applied,
    stderr_tail: bytes,
    network: NetworkUse | None = None,
    refused: Iterable[tuple[str, str]] = (),
) -> tuple[Denial, ...]:
    """Certain ones first, then likely ones; at most a handful of each. ``refused`` are reasons and paths from
    the broker of a workspace that is changed directly.
    """
    found = [
        Denial(what=path, certain=True, kind=f"held-{reason}", allow="")
        for path, reason in applied.held[:_MOST]
    ]
    for reason, path in [*refused][:_MOST_REFUSED]:
        kind, _, detail = reason.partition(": ")
        what = f"{path} ({detail})" if detail else path
        found.append(Denial(what=what, certain=True, kind=f"refused-{kind}"))
    if job.plan is None:
        return tuple(found)
    found += _refused(network) if network is not None else []
    lines = [line[:_LONGEST] for line in stderr_tail[-TAIL:].split(b"\n")]
    if job.policy.network.mode == "none":
        lines, unreached = _unreached(lines, " ".join(job.request.argv)[:_LONGEST])
        found += unreached
    seen: set[str] = set()
    for line in lines:
        if len(seen) >= _MOST:
            break
        for denial in _likely(job, line):
            if denial.what not in seen:
                seen.add(denial.what)
                found.append(denial)
    return tuple(found)


def _refused(network: NetworkUse) -> list[Denial]:
    """What the gate refused, each host and port once. A host that was connected to needs no word on its
    query.
    """
    found: dict[str, Denial] = {}
    for event in network.events:
        if event.get("verdict") != "deny" or event.get("kind") == "inbound" or len(found) >= _MOST_HOSTS:
            continue
        host, port = str(event.get("host") or event.get("detail") or "?"), event.get("port")
        shown = f"[{host}]" if port and ":" in host else host
        what = f"{shown}:{port}" if port else host
        reason, allow = str(event.get("reason", "")), str(event.get("allow", ""))
        found.setdefault(what, Denial(what=f"{what} ({reason})", certain=True, kind="network", allow=allow))
    return [*found.values()]


def _likely(job: Job, line: bytes) -> list[Denial]:
    if any(mark in line for mark in _CROSSING) and job.plan is not None and job.plan.spec.tops_on_disk:
        what = "a directory that existed before, which is no one move here: use mv, then git add -A"
        return [Denial(what=what, certain=False, kind="rename")]
    for name, marks in _LIMITS.items():
        most = getattr(job.policy.resources, name.replace("-", "_"))
        if most is not None and any(mark in line for mark in marks):
            return [Denial(what=name, certain=False, kind="limit", allow=f"resources.{name} = {most * 2}")]
    refused = any(mark in line for mark in _REFUSED)
    if not refused and not any(mark in line for mark in _MISSING):
        return []
    denials: list[Denial] = []
    read_only = job.policy.filesystem.workspace == "read"
    write = 'filesystem.workspace = "write"'
    views = [view.target for view in job.plan.spec.views] if job.plan else []
    paths = _paths(_without_program(job, line))
    for path in paths:
        inside = _within(path, views)
        if not inside and _within(path, ("/proc", "/dev", "/sys", "/tmp")):
            continue
        readable = inside or _within(path, job.readable)
        if refused and inside and read_only:
            denials.append(Denial(what=path, certain=False, kind="write", allow=write))
        elif refused and not inside:
            parent = path.rsplit("/", 1)[0] or "/"
            # System directories are never written: there is no line that would allow it.
            broad = parent == "/" or _within(job.workspace, (parent,))
            allow = "" if broad or _within(path, SYSTEM) else f'filesystem.write = ["{parent}"]'
            denials.append(Denial(what=path, certain=False, kind="write", allow=allow))
        elif not refused and not readable and _within(path, job.places.homes):
            allow = f'filesystem.read = ["{path}"]'
            denials.append(Denial(what=path, certain=False, kind="read", allow=allow))
    if refused and not paths and read_only and any(mark in line for mark in (b"Read-only", b"EROFS")):
        denials.append(Denial(what=job.workspace, certain=False, kind="write", allow=write))
    return denials


def _unreached(lines: list[bytes], command: str) -> tuple[list[bytes], list[Denial]]:
    """The lines that are about something else, and all hosts that a command without a network did not reach.

    They are one denial, since they go into one list of a policy.
    """
    spoken = [line for line in lines if any(mark in line for mark in _NETWORK)]
    if not spoken:
        return lines, []
    from casemate.sandbox.unreached import unreached  # late: its expressions take longer than all of this

    found = {line: rule for line in dict.fromkeys(spoken) if (rule := unreached(line, command)) is not None}
    if not found:
        return lines, []
    named = [*dict.fromkeys(rule for rule in found.values() if rule)][:_MOST]
    inside = ", ".join(f'"{rule}"' for rule in named or ["HOST"])
    # By default there is no network at all, in which a list of hosts has no effect.
    allow = f'network.mode = "allowlist"\nnetwork.allow = [{inside}]'
    what = ", ".join(named) or "network"
    rest = [line for line in lines if line not in found]
    return rest, [Denial(what=what, certain=False, kind="network", allow=allow)]


def _within(path: str, roots: Iterable[str]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)


def _without_program(job: Job, line: bytes) -> bytes:
    """``line`` without the name of the program that speaks, which is no path that it was refused."""
    first, colon, rest = line.partition(b": ")
    name = first.decode("utf-8", "replace")
    known = (*SYSTEM, *job.readable)
    return rest if colon and name.startswith("/") and _within(name, known) else line


def _paths(line: bytes) -> list[str]:
    """Absolute paths named in a line, free of control characters; at most four."""
    paths: list[str] = []
    text = line.decode("utf-8", "replace")
    for word in text.replace("'", " ").replace('"', " ").replace("`", " ").replace("(", " ").split():
        word = word.rstrip(":,;.)]}>").lstrip("<[{")
        start = word.find("/")
        if start < 0 or (start > 0 and word[start - 1] not in "=:"):
            continue
        path = word[start:]
        # No backslash: between quotes in a policy's line it would be read as something else.
        if 1 < len(path) < 400 and path.isprintable() and "//" not in path and "\\" not in path:
            paths.append(path)
    return paths[:4]
