"""What a command's end is called: its code, the limit that ended it, what it was probably refused."""

from __future__ import annotations

import tomllib
from typing import Any

import msgspec
import pytest

from casemate import settings
from casemate.isolation.plan import plan
from casemate.isolation.process.outcome import Outcome
from casemate.isolation.process.spec import Late
from casemate.policy.model import Effective
from casemate.sandbox import denials, settle
from casemate.sandbox.job import Job, Request
from casemate.sandbox.result import Applied, Denial, NetworkUse
from tests.unit.isolation.test_plan import FILES, RESOURCES, ROOT, USER, changed, policy


def job(facts: Any = ROOT, **how: Any) -> Job:
    """A job with the planner tests' policy and facts."""
    chosen = policy(**how)
    return Job(
        request=Request(argv=("cmd",), workspace="/ws", cwd="/ws", environ={"PATH": "/usr/bin"}),
        effective=Effective(policy=chosen, workspace="/ws", preset="", layers=(), origins={}, notes=()),
        policy=chosen,
        workspace="/ws",
        plan=plan(chosen, "/ws", facts, "/keep"),
        late=Late(["cmd"], {}, "/ws", False),
        places=settings.places({"HOME": "/home/x"}, 1000),
        readable=("/usr", "/etc"),
        notes=(),
        degraded=(),
        began=0.0,
        began_wall_ns=0,
    )


def ended(status: int | None, **events: int) -> Outcome:
    outcome = Outcome()
    outcome.status = status
    outcome.events = dict(events)
    return outcome


def result(outcome: Outcome, of: Job | None = None, *, limit: str = "", full: bool = False) -> Any:
    return settle.result(of or job(), outcome, Applied(), limit=limit, stderr_tail=b"", disk_full=full)


@pytest.mark.parametrize(
    ("outcome", "how", "expected"),
    [
        (ended(0), {}, (0, 0, "", ())),
        (ended(7 << 8), {}, (7, 0, "", ())),
        (ended(9), {}, (137, 9, "", ())),
        (ended(0x80 | 11), {}, (139, 11, "", ())),
        (ended(None), {}, (137, 9, "", ())),
        (ended(None), {"limit": "timeout"}, (137, 9, "timeout", ())),
        (ended(9, oom_kill=1), {}, (137, 9, "memory", ("memory",))),
        (ended(1 << 8, oom_kill=1), {}, (1, 0, "memory", ("memory",))),
        (ended(0, oom_kill=1), {}, (0, 0, "", ("memory",))),
        (ended(25), {}, (153, 25, "file-size", ("file-size",))),
        (ended(153 << 8), {}, (153, 0, "file-size", ("file-size",))),
        (ended(1 << 8, pids_max=3), {}, (1, 0, "pids", ("pids",))),
        (ended(0, pids_max=3), {}, (0, 0, "", ("pids",))),
        (ended(1 << 8), {"full": True}, (1, 0, "disk", ("disk",))),
        (ended(1 << 8, oom_kill=1, pids_max=1), {"full": True}, (1, 0, "memory", ("memory", "disk", "pids"))),
        (ended(9, oom_kill=1), {"limit": "timeout"}, (137, 9, "timeout", ("memory",))),
    ],
)
def test_what_ended_it(outcome: Outcome, how: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """Code, signal, limit and what was touched, from what the host saw."""
    found = result(outcome, **how)
    assert (found.exit_code, found.signal, found.limit, found.limits_touched) == expected


def test_a_file_that_is_too_large_for_the_disk() -> None:
    """Where the disk is only watched, the writer's own limit stands for the disk's."""
    assert result(ended(25), job(USER)).limit == "disk"
    small = changed(RESOURCES, file_size=1 << 20)
    assert result(ended(25), job(USER, resources=small)).limit == "file-size"


def found(text: bytes, of: Job | None = None) -> list[tuple[str, str, str]]:
    return [(d.kind, d.what, d.allow) for d in denials.find(of or job(), Applied(), text)]


ALLOWLIST = 'network.mode = "allowlist"\n'
READ_ONLY = {"files": changed(FILES, workspace="read")}


@pytest.mark.parametrize(
    ("text", "how", "expected"),
    [
        (b"cat: /data/x: No such file or directory", {}, []),
        (b"touch: cannot touch '/srv/out/x': Read-only file system", {},
         [("write", "/srv/out/x", 'filesystem.write = ["/srv/out"]')]),
        (b"touch: cannot touch '/usr/bin/x': Read-only file system", {}, [("write", "/usr/bin/x", "")]),
        (b"/bin/sh: 1: cannot create made: Read-only file system", {}, []),
        (b"/bin/sh: 1: cannot create made: Read-only file system", READ_ONLY,
         [("write", "/ws", 'filesystem.workspace = "write"')]),
        (b"/bin/sh: 1: cannot create /ws/a: Read-only file system", READ_ONLY,
         [("write", "/ws/a", 'filesystem.workspace = "write"')]),
        (b"curl: (6) Could not resolve host: example.invalid", {},
         [("network", "example.invalid", f'{ALLOWLIST}network.allow = ["example.invalid"]')]),
        (b"ssh: Could not resolve hostname a.invalid: x\nEAI_AGAIN\ngetaddrinfo EAI_AGAIN b.invalid", {},
         [("network", "a.invalid:22, b.invalid",
           f'{ALLOWLIST}network.allow = ["a.invalid:22", "b.invalid"]')]),
        (b"connect: Network is unreachable", {},
         [("network", "network", f'{ALLOWLIST}network.allow = ["HOST"]')]),
        (b"curl: (6) Could not resolve host: example.invalid", {"mode": "host"}, []),
        (b"head: write error: No space left on device", {},
         [("limit", "disk", "resources.disk = 536870912")]),
        (b"MemoryError", {}, [("limit", "memory", "resources.memory = 1073741824")]),
        (b"sh: 0: Cannot fork", {}, [("limit", "pids", "resources.pids = 200")]),
        (b"OSError: [Errno 24] Too many open files: 'x'", {},
         [("limit", "open-files", "resources.open-files = 400")]),
        (b"File too large", {"resources": changed(RESOURCES, file_size=None)}, []),
        (b"everything is fine", {}, []),
        (b"open('/proc/1/mem'): Permission denied", {}, []),
    ],
)  # fmt: skip
def test_likely_denials(text: bytes, how: dict[str, Any], expected: list[tuple[str, str, str]]) -> None:
    """What the end of stderr points to, and the lines of policy that would allow it."""
    assert found(text, job(**how)) == expected


def test_denials_are_bounded() -> None:
    """A command that says a lot gets a handful of answers, each once, however long its lines are."""
    text = b"".join(b"rm: cannot remove '/srv/d%d/x': Permission denied\n" % (n % 50) for n in range(5000))
    rows = found(b"x" * 100_000 + b": Permission denied /srv/early/x\n" + text)
    assert 0 < len(rows) <= 12
    assert len(set(rows)) == len(rows)
    assert found(b"/\xff\xfe\x1b[2J/x: Permission denied\n" * 3) == []


@pytest.mark.parametrize(
    ("host", "port", "what"),
    [
        ("2a00:77::1", 65535, "[2a00:77::1]:65535"), ("2a00:77::1", None, "2a00:77::1"),
        ("10.1.2.3", 80, "10.1.2.3:80"), ("a.example", 22, "a.example:22"), ("a.example", None, "a.example"),
    ],
)  # fmt: skip
def test_what_the_gate_refused(host: str, port: int | None, what: str) -> None:
    """Host and port as a rule spells them: an IPv6 address stands in brackets before a port."""
    event: dict[str, object] = {"verdict": "deny", "kind": "connect", "host": host, "reason": "not-listed"}
    event |= {"port": port} if port else {}
    told = denials.find(job(mode="allowlist"), Applied(), b"", NetworkUse(events=(event, event)))
    assert told == (Denial(what=f"{what} (not-listed)", certain=True, kind="network"),)


def test_hosts_are_one_bounded_list() -> None:
    """What goes into one list of a policy is one denial, however many hosts a command speaks of."""
    text = b"".join(b"curl: (6) Could not resolve host: h%d.invalid\n" % n for n in range(500))
    ((kind, what, allow),) = found(text)
    assert (kind, len(what.split(", "))) == ("network", 8)
    read = tomllib.loads(allow)["network"]
    assert (read["mode"], read["allow"]) == ("allowlist", what.split(", "))


def test_held_changes_are_certain() -> None:
    """What the apply step held back is no guess."""
    applied = Applied(held=((".envrc", "protected"),))
    assert denials.find(job(), applied, b"") == (
        Denial(what=".envrc", certain=True, kind="held-protected", allow=""),
    )


def test_results_are_plain_data() -> None:
    """A result is frozen, and made of what JSON can hold."""
    value = result(ended(0))
    with pytest.raises(AttributeError):
        value.exit_code = 1
    assert msgspec.to_builtins(value)["exit-code"] == 0
