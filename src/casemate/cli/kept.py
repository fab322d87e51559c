"""``casemate changes``, ``apply`` and ``discard``: what waits for a person in this workspace."""

from __future__ import annotations

import os
from typing import NamedTuple

import msgspec

from casemate.cli.main import tell
from casemate.cli.render import escaped, representable
from casemate.sandbox.kept import Kept

__all__ = ["main"]

USAGE = """usage: casemate changes [-C DIR] [--json]
       casemate apply [-C DIR] ID [PATH…] [--all] [--overwrite]
       casemate discard [-C DIR] ID [PATH…] [--all]

`changes` lists what was held back (with the reason) and what interrupted commands left.
ID is a name from that list. Of held-back changes name the paths, or say --all; an interrupted
command's changes are applied as at its end: what is protected is held back.
  -C DIR        the workspace (default: the present directory)
  --overwrite   also replace what has changed on the host since
  --            what follows are names, even if they begin with a hyphen
"""
_SWITCHES = {"changes": {"--json"}, "apply": {"--all", "--overwrite"}, "discard": {"--all"}}
_SHOWN = 50


class _Words(NamedTuple):
    switches: set[str]
    names: list[str]
    directory: str


def _parse(verb: str, words: list[str]) -> _Words | None:
    """Take the words apart; None if they are not of the usage."""
    switches: set[str] = set()
    names: list[str] = []
    directory = "."
    rest = iter(words)
    for word in rest:
        if word == "--":
            names += rest
        elif word == "-C":
            directory = next(rest, "")
        elif word in _SWITCHES[verb]:
            switches.add(word)
        elif word.startswith("-"):
            return None
        else:
            names.append(word)
    if (verb == "changes") != (not names):
        return None
    return _Words(switches, names, directory)


def main(argv: list[str]) -> int:
    """Run one of the three verbs."""
    verb, words = argv[0], argv[1:]
    if words and words[0] in ("-h", "--help"):
        os.write(1, USAGE.encode())
        return 0
    parsed = _parse(verb, words)
    if parsed is None:
        os.write(2, USAGE.encode())
        return 2
    switches, names, directory = parsed
    if not os.path.isdir(directory):
        tell(f"no such directory: {escaped(directory)}")
        return 2
    kept = Kept(os.path.realpath(directory), dict(os.environ))
    try:
        if verb == "changes":
            return _changes(kept, as_json="--json" in switches)
        name, paths = names[0], names[1:]
        if any(item.name == name for item in kept.interrupted()):
            if paths or switches:
                tell("an interrupted command's changes are applied or discarded as a whole")
                return 2
            return _interrupted(kept, verb, name)
        held = {item.name: item.units for item in kept.held()}
        if name not in held:
            tell(f"nothing is kept under the name {escaped(name)}; `casemate changes` lists what is")
            return 1
        if bool(paths) == ("--all" in switches):
            tell("name the paths that you have looked at, or say --all")
            return 2
        chosen = paths or None
        if verb == "discard":
            tell(f"discarded: {kept.discard_held(name, chosen)} entries")
            return 0
        overwrite = "--overwrite" in switches
        if chosen is None and not overwrite:
            # What the host changed too is nobody's by default: it has to be named, or --overwrite said.
            wanted: list[str] = []
            for unit in held[name]:
                if unit.reason == "conflict":
                    tell(f"the host changed it too, so name it or say --overwrite: {escaped(unit.path)}")
                else:
                    wanted.append(unit.path)
            if not wanted:
                return 1
            chosen = wanted
        report = kept.apply_held(name, chosen, overwrite=overwrite)
        for what, path in report.changed:
            os.write(1, f"{what} {escaped(path)}\n".encode())
        for failure in report.failed:
            tell(f"could not be applied: {escaped(failure.path)}: {failure.error}")
        for item in report.held:
            tell(f"still held back: {escaped(item.path)} ({item.reason})")
        return 0 if not report.failed and not report.held else 1
    finally:
        kept.close()


def _interrupted(kept: Kept, verb: str, name: str) -> int:
    if verb == "discard":
        kept.discard_interrupted(name)
        tell(f"discarded: {name}")
        return 0
    applied = kept.apply_interrupted(name)
    for line in applied.changes:
        os.write(1, f"{escaped(line)}\n".encode())
    for path, reason in applied.held:
        tell(f"held back: {escaped(path)} ({reason})")
    for path, error in applied.failed:
        tell(f"could not be applied: {escaped(path)}: {error}")
    return 0 if applied.complete else 1


def _changes(kept: Kept, *, as_json: bool) -> int:
    interrupted, held = kept.interrupted(), kept.held()
    if as_json:
        data = {
            "interrupted": [msgspec.to_builtins(item) for item in interrupted],
            "held": [msgspec.to_builtins(item) for item in held],
        }
        os.write(1, msgspec.json.encode(representable(data)) + b"\n")
        return 0
    lines: list[str] = []
    for item in interrupted:
        lines.append(f"interrupted {item.name}: {escaped(' '.join(item.argv))}")
        lines += [f"    {what:9} {escaped(path)}" for what, path in item.changes[:_SHOWN]]
        if len(item.changes) > _SHOWN:
            lines.append(f"    … and {len(item.changes) - _SHOWN} more")
    for entry in held:
        lines.append(f"held back {entry.name} in {escaped(entry.view)}:")
        for unit in entry.units[:_SHOWN]:
            detail = f": {escaped(unit.detail)}" if unit.detail else ""
            lines.append(f"    {unit.kind:9} {escaped(unit.path)} ({unit.reason}{detail})")
        if len(entry.units) > _SHOWN:
            lines.append(f"    … and {len(entry.units) - _SHOWN} more")
    os.write(1, ("\n".join(lines) + "\n").encode() if lines else b"nothing is kept for this workspace\n")
    return 0
