"""The policy that ``casemate learn`` prints."""

from __future__ import annotations

import tomllib

from casemate.cli.learn import policy_text
from casemate.sandbox.result import Denial, NetworkUse, Result


def test_lines_of_denials() -> None:
    """Lines about files and limits are taken over; of hosts those count that were reached."""
    reached = {"kind": "connect", "verdict": "allow", "host": "a.example", "port": 443}
    lines = (
        'network.mode = "allowlist"\nnetwork.allow = ["b.example"]',
        'filesystem.write = ["/srv/out"]',
        'filesystem.write = ["/srv/more"]',
        "resources.memory = 1024",
    )
    denials = tuple(Denial(what="x", certain=False, kind="x", allow=allow) for allow in lines)
    text = policy_text(Result(exit_code=0, denials=denials, network=NetworkUse(events=(reached,))))
    read = tomllib.loads(text)
    assert read["network"] == {"mode": "allowlist", "allow": ["a.example"]}
    assert read["filesystem"] == {"write": ["/srv/out", "/srv/more"]}
    assert read["resources"] == {"memory": 1024}
