"""``casemate learn``: run a command with an open network in a view, and print the policy that it needed."""

from __future__ import annotations

import os

from casemate.cli import run
from casemate.cli.main import line
from casemate.cli.streams import hold_standard_descriptors, put
from casemate.errors import CasemateError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from casemate.sandbox.result import Result

__all__ = ["main", "policy_text"]

HELP = """usage: casemate learn [OPTION…] [--] CMD [ARG…]

Runs CMD once with every public host allowed, in a view whose changes are kept and not applied, and prints the
policy that it needed: the hosts it reached, the paths and limits it was refused. Options are those of
`casemate run`. The command's stdout goes to stderr; the policy is what is printed on stdout.

Read it before you use it: it says what the command did, not what it should do.
"""
_WEB = frozenset((80, 443))


def main(argv: list[str]) -> int:
    """Learn from one run."""
    hold_standard_descriptors()
    if argv[:1] in (["--help"], ["-h"]):
        put(1, HELP.encode())
        return 0
    options = run.parse(argv)
    options.values.setdefault("network", "full")
    options.values.setdefault("apply", "none")
    options.switches |= {"json", "no_daemon"}  # the command's stdout goes to stderr
    try:
        result = run.execute(options, os.getcwd())
    except CasemateError as error:
        end = run.conclude(options, error)
        put(2, end.err.encode("utf-8", "replace"))
        return end.code
    put(1, policy_text(result).encode("utf-8", "replace"))
    if result.network.untold:
        put(2, line(f"{result.network.untold} connections were too many to be looked at one by one").encode())
    return result.exit_code


def policy_text(result: Result) -> str:
    """A policy file in TOML."""
    lines = ["version = 1"]
    outward = [event for event in result.network.events if event.get("kind") != "inbound"]
    allow = _hosts(outward)
    refused = [str(event.get("host")) for event in outward if event.get("verdict") == "deny"]
    lines += ["", "[network]", f'mode = "{"allowlist" if allow else "none"}"']
    if allow:
        lines.append(_list("allow", allow))
    for host in sorted({host for host in refused if host}):
        lines.append(f"# refused while learning: {ascii(host)[1:-1]}")
    found: dict[str, list[str]] = {}
    for denial in result.denials:
        for line_of_policy in denial.allow.split("\n"):
            field, equals, value = line_of_policy.partition(" = ")
            if equals and not field.startswith("network."):
                found.setdefault(field, []).append(value)
    for part in ("filesystem", "resources"):
        fields = {field: values for field, values in found.items() if field.startswith(f"{part}.")}
        if fields:
            lines += ["", f"[{part}]"]
            lines += [_field(field.partition(".")[2], values) for field, values in fields.items()]
    lines += ["", f"# it took {result.peak_memory >> 20} MiB and {result.cpu:.1f} s of processor time"]
    return "\n".join(lines) + "\n"


def _hosts(events: Iterable[dict[str, object]]) -> list[str]:
    """Rules for the hosts that were reached: without ports where those of the web were enough."""
    ports: dict[str, set[int]] = {}
    for event in events:
        if event.get("verdict") == "allow" and event.get("kind") == "connect" and event.get("host"):
            ports.setdefault(str(event["host"]), set()).add(int(str(event.get("port") or 0)))
    rules: list[str] = []
    for host, used in sorted(ports.items()):
        shown = f"[{host}]" if ":" in host else host
        rules += [shown] if used & _WEB else []
        rules += [f"{shown}:{port}" for port in sorted(used - _WEB)]
    return rules


def _list(name: str, values: list[str]) -> str:
    inside = "".join(f'    "{value}",\n' for value in values)
    return f"{name} = [\n{inside}]"


def _field(name: str, values: list[str]) -> str:
    """One field; lists of several refusals become one."""
    if not values[0].startswith("["):
        return f"{name} = {values[-1]}"
    return f"{name} = [{', '.join(dict.fromkeys(value.strip('[]') for value in values))}]"


