"""Which records are told, and what is counted."""

from __future__ import annotations

import msgspec

from casemate.egress import events
from casemate.egress.events import MOST_KINDS, Event, Log


def refusal(host: str, port: int = 443, reason: str = "not-listed", kind: str = "connect") -> Event:
    """A refusal."""
    return Event(kind=kind, verdict="deny", host=host, port=port, reason=reason)


def test_each_kind_of_refusal_once() -> None:
    """The same host, port and reason is told once however often it is tried; each other one by itself."""
    log = Log()
    assert [log.wants(refusal("a.example")) for _ in range(3)] == [True, False, False]
    assert log.wants(refusal("b.example"))
    assert log.wants(refusal("a.example", port=80))
    assert log.wants(refusal("a.example", reason="denied"))
    assert log.wants(refusal("a.example", kind="dns"))
    assert (log.refused, log.untold) == (7, 2)


def test_refusals_are_bounded() -> None:
    """A program that tries endlessly many hosts makes a bounded number of records and a count of the rest."""
    log = Log()
    told = sum(log.wants(refusal(f"host{n}.example")) for n in range(MOST_KINDS * 3))
    assert told == MOST_KINDS
    assert log.totals()["refused"] == MOST_KINDS * 3
    assert log.totals()["untold"] == MOST_KINDS * 2
    assert len(log._kinds) == MOST_KINDS


def test_connections_are_all_told() -> None:
    """Every connection that was made is told up to the bound; bytes are counted beyond it, too."""
    log = Log()
    made = Event(kind="connect", verdict="allow", host="a.example", port=443, sent=10, received=20)
    many = events._MOST_ALLOWED + 5
    assert sum(log.wants(made) for _ in range(many)) == many - 5
    assert log.totals() == {
        "allowed": many, "refused": 0, "sent": 10 * many, "received": 20 * many, "untold": 5
    }  # fmt: skip


def test_form() -> None:
    """A record is plain data with words in kebab-case, and leaves out what says nothing."""
    plain = msgspec.to_builtins(Event(kind="connect", verdict="allow", host="a.example", port=443, time_ns=5))
    assert plain == {"kind": "connect", "verdict": "allow", "host": "a.example", "port": 443, "time-ns": 5}
