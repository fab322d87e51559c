"""``casemate doctor``: what this host can enforce, at which scope, what is missing, how to get it."""

from __future__ import annotations

import os

import msgspec

from casemate.isolation.process.offer import probe
from casemate.policy.model import DEGRADE_WORDS
from casemate.settings import places

__all__ = ["main"]

_MARKS = {"enforced": "ok", "weaker": "weaker", "missing": "MISSING"}


def main(argv: list[str]) -> int:
    """Print the offer of the process boundary; exit code 1 if it is not available here."""
    if argv not in ([], ["--json"]):
        os.write(2, b"usage: casemate doctor [--json]\n")
        return 2
    offer = probe(places(dict(os.environ)).run)
    if argv:
        data = msgspec.to_builtins(offer)
        data["degrade-words"] = DEGRADE_WORDS
        os.write(1, msgspec.json.encode(data) + b"\n")
        return 0 if offer.available else 1
    lines = [f"process boundary on Linux {offer.kernel} ({offer.machine}), as {offer.mode}"]
    width = max(len(p.name) for p in offer.protections)
    for protection in offer.protections:
        lines.append(f"  {_MARKS[protection.status]:8} {protection.name:{width}}  {protection.found}")
        if protection.status != "enforced":
            if protection.needed:
                lines.append(f"  {'':8} {'':{width}}  needs: {protection.needed}")
            if protection.get:
                lines.append(f"  {'':8} {'':{width}}  get it: {protection.get}")
    lines.append("protections that a policy may give up, by word:")
    lines += [f"  {word:16} {meaning}" for word, meaning in DEGRADE_WORDS.items()]
    verdict = "available" if offer.available else "NOT available: commands are refused"
    lines.append(f"the process boundary is {verdict} here")
    os.write(1, ("\n".join(lines) + "\n").encode())
    return 0 if offer.available else 1
