"""What the gate decided and what came of it, one record each, for whoever runs the sandbox.

Records of refusals are bounded: a program that tries a million hosts makes as many of them as fit, and a
count of the rest.
"""

from __future__ import annotations

import msgspec

__all__ = ["MOST_KINDS", "Event", "Log"]

#: Different refusals (by kind, host, port and reason), and different allowed names, that are told one by one.
MOST_KINDS = 1000
#: Connections of one sandbox that are told one by one.
_MOST_ALLOWED = 20_000


class Event(msgspec.Struct, frozen=True, kw_only=True, rename="kebab", omit_defaults=True):
    """One decision of the gate.

    ``kind`` is ``connect``, ``dns`` (an allowed name: that it was asked for outside), ``request`` (inside
    of HTTP), ``credential``, ``ssh-agent`` or ``inbound`` (from the host to the published ``port`` inside);
    ``verdict`` is ``allow`` or ``deny``. ``host`` is what was asked for, a name or an address; ``address``
    what was dialled. ``rule`` is the policy's entry that decided, ``reason`` a stable word, ``allow`` the
    policy line that would permit it. ``sent`` and ``received`` are bytes as the sandbox sees it, ``ms`` how
    long the connection stood.
    """

    kind: str
    verdict: str
    host: str
    port: int = 0
    address: str = ""
    protocol: str = ""
    rule: str = ""
    reason: str = ""
    allow: str = ""
    detail: str = ""
    sent: int = 0
    received: int = 0
    ms: float = 0.0
    time_ns: int = 0


class Log:
    """Counts, and decides which records are passed on."""

    def __init__(self) -> None:
        self.allowed = self.refused = self.sent = self.received = self.untold = 0
        self._kinds: set[tuple[str, str, int, str]] = set()
        self._names: set[str] = set()

    def wants(self, event: Event) -> bool:
        """Whether a record is to be told: every connection that was made, each kind of refusal once, and each
        allowed name once.
        """
        if event.verdict == "allow" and event.kind == "dns":
            known = event.host in self._names
            told = not known and len(self._names) < MOST_KINDS
            self._names.add(event.host) if told else None
            self.untold += not told and not known
            return told
        if event.verdict == "allow":
            self.allowed += 1
            self.sent += event.sent
            self.received += event.received
            told = self.allowed <= _MOST_ALLOWED
        else:
            self.refused += 1
            key = (event.kind, event.host, event.port, event.reason)
            told = key not in self._kinds and len(self._kinds) < MOST_KINDS
            self._kinds.add(key) if told else None
        self.untold += not told
        return told

    def totals(self) -> dict[str, int]:
        """The sums at the end."""
        return {
            "allowed": self.allowed,
            "refused": self.refused,
            "sent": self.sent,
            "received": self.received,
            "untold": self.untold,
        }
