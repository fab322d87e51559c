"""A sandbox that uses up what the gate has harms itself at most, and not for long; others are served."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import pytest

from tests.network import neighbours
from tests.network.matrix import PYTHON, place_plan, policy_text, records
from tests.network.row import get

if TYPE_CHECKING:
    from tests.cli.harness import Caller
    from tests.network.lab import Lab

pytestmark = [pytest.mark.security, pytest.mark.root]

NETWORK = {"mode": "allowlist", "allow": ["allowed.example:*", "*.to.example"]}


def page(mark: str, port: int = 80) -> dict[str, Any]:
    """A page that carries a mark."""
    return {"to": ["allowed.example", port], "send": get("allowed.example", mark)}


def words(caller: Caller, lab: Lab, act: str, one: dict[str, Any]) -> tuple[Any, list[str]]:
    """A workspace and the command that runs one act in it."""
    ws = place_plan(caller, lab, [{"id": "flood", "act": act, "tries": [{"part": "it", **one}]}])
    return ws, [PYTHON, "-I", "-S", str(ws / ".lab/driver.py"), str(ws / ".lab/plan.json")]


def flood(caller: Caller, lab: Lab, act: str, one: dict[str, Any]) -> Any:
    """What an act gave in a sandbox."""
    ws, command = words(caller, lab, act, one)
    policy = caller.file(ws.parent / "policy.toml", policy_text(NETWORK))
    ended = caller.run(ws, *command, flags=("--policy", str(policy), "--no-daemon"), timeout=60)
    return told(ended.out, str(ended))


def told(out: bytes, more: str) -> Any:
    report = records(out.decode())["flood"]["it"]
    assert "got" in report, (report, more)
    return report["got"]


def arrived(lab: Lab, mark: tuple[int, int], *pages: str) -> list[str]:
    """Which of the pages were asked for at the server."""
    events = [event for event in lab.since(mark) if event["kind"] == "http"]
    return [page for page in pages if any(page in event["target"] for event in events)]


KINDS = (
    "silent", "half-head", "half-hello", "half-body", "proxy-silent", "proxy-head", "proxy-socks",
    "dns-stream", "unread",
)  # fmt: skip


def test_slow_connections_starve_nobody(lab: Lab, caller: Caller) -> None:
    """While connections of every kind are begun and left open, pages of the same sandbox come at once."""
    marks = [f"slow{secrets.token_hex(4)}{n}" for n in range(3)]
    pages = [page(marks[0]), page(marks[1], 8080), page(marks[2])]
    mark = lab.mark()
    taken = flood(caller, lab, "flood.slow", {"starts": KINDS, "count": 40, "pages": pages})
    assert arrived(lab, mark, *marks) == marks
    assert max(taken) < 2.5, taken


def test_slow_connections_can_starve(lab: Lab, caller: Caller) -> None:
    """Control: a server that takes one client at a time is starved by a single silent one."""
    one = {"to": ["127.0.0.1", neighbours.SLOW], "count": 1,
           "pages": [{"to": ["127.0.0.1", neighbours.SLOW], "send": "hello\n", "seconds": 2}]}  # fmt: skip
    ws, command = words(caller, lab, "flood.slow", one)
    done = lab.bare(*command, uid=caller.uid, cwd=str(ws))
    assert told(done.stdout, str(done))[0] > 1.5


def beside(lab: Lab, caller: Caller, count: int) -> tuple[int, int]:
    """How many of its pages each of two commands got; the first holds ``count`` connections of every kind."""
    name, other = (f"{word}{secrets.token_hex(4)}" for word in ("meanwhile", "other"))
    names = [f"{name}-{number}" for number in range(8)]
    pages = [page(each) for each in names]
    ws, command = words(caller, lab, "flood.slow", {"starts": KINDS, "count": count, "pages": pages})
    policy = caller.file(ws.parent / "policy.toml", policy_text(NETWORK))
    mark = lab.mark()
    process = caller.start("run", "--policy", str(policy), "--no-daemon", "--", *command, cwd=ws)
    assert lab.until(mark, lambda event: names[0] in str(event.get("target")), 20)
    ended = caller.run(
        caller.workspace(), "curl", "-sS", "-m", "4", f"http://allowed.example/{other}",
        flags=("--policy", str(policy), "--no-daemon"),
    )  # fmt: skip
    assert ended.code == 0, ended
    process.communicate(timeout=60)
    caller.end(process)
    return len(arrived(lab, mark, *names)), len(arrived(lab, mark, other))


def test_other_sandboxes_are_served(lab: Lab, caller: Caller) -> None:
    """While one sandbox floods, another command of the same caller gets its page."""
    _, other = beside(lab, caller, 60)
    assert other == 1


def test_other_sandboxes_beside_a_few(lab: Lab, caller: Caller) -> None:
    """Control: beside a sandbox that holds one connection of each kind, both get all their pages."""
    assert beside(lab, caller, 1) == (8, 1)


def exhausted(lab: Lab, caller: Caller, count: int) -> tuple[dict[str, int], list[str]]:
    """How queries for so many names were answered, and which pages came: before, after, of one more name."""
    marks = {f"{word}{secrets.token_hex(4)}": word for word in ("before", "after", "new")}
    before, after, new = marks
    script = f"""
    curl -sS -o /dev/null http://allowed.example/{before}
    "$@"
    curl -sS -o /dev/null http://allowed.example/{after}
    curl -sS -o /dev/null http://new-h2d4dc801.to.example/{new} && echo new
    true
    """
    ws, command = words(caller, lab, "flood.exhaust", {"count": count, "below": "to.example", "pages": []})
    policy = caller.file(ws.parent / "policy.toml", policy_text(NETWORK))
    mark = lab.mark()
    flags = ("--policy", str(policy), "--no-daemon")
    ended = caller.run(ws, "sh", "-c", script, "sh", *command, flags=flags, timeout=60)
    assert ended.code == 0, ended
    came = arrived(lab, mark, *marks)
    assert (b"new" in ended.out.split()) == (new in came), ended
    return told(ended.out, str(ended)), [marks[name] for name in came]


def test_names_run_out(lab: Lab, caller: Caller) -> None:
    """Who asks for too many names gets SERVFAIL for new ones; a name from before is served as before."""
    codes, came = exhausted(lab, caller, 4400)
    assert set(codes) == {"0", "2"}, codes
    assert 1000 <= codes["0"] <= 4200, codes
    assert came == ["before", "after"]


def test_names_within_the_bound(lab: Lab, caller: Caller) -> None:
    """Control: a few hundred names are answered, all of them, and so is one more."""
    codes, came = exhausted(lab, caller, 300)
    assert codes == {"0": 300}
    assert came == ["before", "after", "new"]


def crowded(lab: Lab, caller: Caller, count: int) -> int:
    """How many of so many connections at once reached the server; a page comes when they are gone."""
    name = "after" + secrets.token_hex(4)
    one = {"count": count, "start": [["allowed.example", 9000], "x"], "page": page(name)}
    mark = lab.mark()
    flood(caller, lab, "flood.many", one)
    assert arrived(lab, mark, name) == [name]
    return len([e for e in lab.since(mark) if e["kind"] == "connection" and e.get("port") == 9000])


def test_too_many_connections(lab: Lab, caller: Caller) -> None:
    """Thousands of connections at once are refused at a bound, and when they are gone pages come again."""
    assert 100 < crowded(lab, caller, 1600) <= 1100


def test_connections_within_the_bound(lab: Lab, caller: Caller) -> None:
    """Control: of a hundred at once each one reaches the server."""
    assert crowded(lab, caller, 100) == 100
