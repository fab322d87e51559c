"""``casemate changes``, ``diff``, ``apply`` and ``discard``: what waits for a person in this workspace."""

from __future__ import annotations

import os

import msgspec

from casemate.cli.diff import Page, as_json, is_colourful
from casemate.cli.main import tell
from casemate.cli.render import armoured, escaped, representable
from casemate.cli.streams import put
from casemate.sandbox.kept import Kept, Words
from casemate.workspace.names import printable
from casemate.workspace.textdiff import Budget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.sandbox.kept import Reviews
    from casemate.sandbox.result import Applied

__all__ = ["CommandLine", "main", "show", "tell_applied", "tell_missed"]

USAGE = """usage: casemate changes [-C DIR] [--json]
       casemate diff    [-C DIR] [ID] [PATH…] [--only GLOB]… [--stat] [--json]
       casemate apply   [-C DIR] [ID] [PATH…] [--only GLOB]… [--all] [--overwrite]
       casemate discard [-C DIR] [ID] [PATH…] [--only GLOB]… [--all]

`changes` lists what waits: changes of `run --apply ask|none`, of interrupted commands, and what was held
back, with the reason. `diff` shows what applying would do, `apply` does it by the checked step (what is
protected is held back), `discard` throws away.
ID is a name from that list; it may be left out where only one is meant. Of held-back changes name the
paths, or say --all.
  PATH          an exact path, or a directory with all in it; what you name exactly is applied even if
                it is protected; the rest waits on
  --only GLOB   the changes that match, and the directories they need: '*.py', 'src/**', '/docs/*.md'
                (may be repeated); the rest waits on. What was held back is not applied by a pattern
  --session NAME   of diff and apply: what a session has changed, instead of what is kept
  --all         all of it
  --stat        the list without the texts
  -C DIR        the workspace (default: the present directory)
  --overwrite   of held-back changes: also replace what the host has changed as well (conflicts)
  --            what follows are names, even if they begin with a hyphen
"""
_SWITCHES = {
    "changes": {"--json"},
    "diff": {"--json", "--stat"},
    "apply": {"--all", "--overwrite"},
    "discard": {"--all"},
}
_SHOWN = 50
_PENDING = "pending"


class CommandLine:
    """A command line of one of the verbs, taken apart; ``wrong`` if it is none."""

    def __init__(self, verb: str, words: list[str]) -> None:
        self.verb = verb
        self.switches: set[str] = set()
        self.names: list[str] = []
        self.globs: list[str] = []
        self.directory = "."
        self.session: str | None = None
        self.wrong = False
        rest = iter(words)
        for word in rest:
            if word == "--":
                self.names += rest
            elif word == "-C":
                self.directory = next(rest, "")
            elif word.partition("=")[0] == "--session" and verb in ("diff", "apply"):
                self.session = word.partition("=")[2] or next(rest, "")
            elif word == "--only" and verb != "changes":
                self._only(next(rest, None))
            elif word.startswith("--only=") and verb != "changes":
                self._only(word.removeprefix("--only="))
            elif word in _SWITCHES[verb]:
                self.switches.add(word)
            elif word.startswith("-"):
                self.wrong = True
            else:
                self.names.append(word)
        self.wrong = self.wrong or (verb == "changes" and bool(self.names))

    def _only(self, glob: str | None) -> None:
        if glob:
            self.globs.append(glob)
        else:
            self.wrong = True

    @property
    def chosen(self) -> Words | None:
        """What is to be left in, once the ID has been taken off the names."""
        return Words(tuple(self.globs), tuple(self.names)) if self.globs or self.names else None


def main(argv: list[str]) -> int:
    """Run one of the verbs."""
    verb = argv[0]
    if argv[1:2] in (["-h"], ["--help"]):
        put(1, USAGE.encode())
        return 0
    words = CommandLine(verb, argv[1:])
    if words.wrong:
        put(2, USAGE.encode())
        return 2
    if not os.path.isdir(words.directory):
        tell(f"no such directory: {escaped(words.directory)}")
        return 2
    with Kept(os.path.realpath(words.directory), dict(os.environ)) as kept:
        if words.session is not None:
            from casemate.cli.session import review

            return review(kept, words)
        if verb == "changes":
            return _changes(kept, as_json="--json" in words.switches)
        name, state = _which(kept, words)
        if not name:
            return 2 if state == "many" else 1
        if verb == "diff":
            return _diff(kept, name, state, words)
        if state == "held":
            return _held(kept, name, words)
        if words.chosen is not None and "--all" in words.switches:
            tell("name what you mean, or say --all")
            return 2
        if "--overwrite" in words.switches:
            tell("--overwrite is for held-back changes: what the host has changed too is held back first")
            return 2
        return _top(kept, name, words)


def _which(kept: Kept, words: CommandLine) -> tuple[str, str]:
    """The name that is meant, taken off ``words.names``, and what it stands for; ("", why) for none."""
    known = kept.names()
    if words.names and words.names[0] in known:
        name = words.names.pop(0)
        return name, known[name]
    tops = [name for name, state in known.items() if state != "held"]
    # What is thrown away has to be clear beyond doubt; what is held back has to be named anyway.
    candidates = tops if len(tops) == 1 and words.verb != "discard" else list(known)
    if not known:
        tell("nothing is kept for this workspace")
        return "", "none"
    if len(candidates) > 1:
        if words.names:
            tell(f"nothing is kept under the name {escaped(words.names[0])}")
        listed = ", ".join(map(escaped, candidates))
        tell(f"several are kept, name one: {listed}; `casemate changes` shows them")
        return "", "many" if not words.names else "unknown"
    name = candidates[0]
    if words.names and known[name] == "held" and words.names[0] not in _paths(kept, name):
        tell(f"nothing is kept under the name {escaped(words.names[0])}; `casemate changes` lists what is")
        return "", "unknown"
    return name, known[name]


def _paths(kept: Kept, name: str) -> set[str]:
    found = {unit.path for entry in kept.held() if entry.name == name for unit in entry.units}
    return found | {printable(path) for path in found}


# -- diff ----------------------------------------------------------------------------------------------------


def _diff(kept: Kept, name: str, state: str, words: CommandLine) -> int:
    with kept.review(name) as reviews:
        command = f": {escaped(' '.join(reviews.argv))}" if reviews.argv else ""
        return show(reviews, words, state, f"{name} ({state}){command}")


def show(reviews: Reviews, words: CommandLine, state: str, title: str) -> int:
    """Print what ``words`` leave of a review."""
    if words.chosen is not None:
        reviews.select(words.chosen)
        tell_missed(reviews.missed)
    stat = "--stat" in words.switches
    if "--json" in words.switches:
        put(1, as_json(reviews, state, texts=not stat) + b"\n")
        return 0
    page = Page(reviews, colour=is_colourful(1, dict(os.environ)), fold=words.chosen is None)
    put(1, "".join(f"{line}\n" for line in (title, *page.listing(lines_changed=True))).encode())
    if not stat:
        one = reviews.count() == 1
        budget = Budget(lines_each=20_000) if one else Budget()
        for lines in page.texts(budget):
            put(1, "".join(f"{line}\n" for line in lines).encode())
    return 0


# -- tops ----------------------------------------------------------------------------------------------------


def _top(kept: Kept, name: str, words: CommandLine) -> int:
    if words.verb == "discard":
        count = kept.discard_interrupted(name, words.chosen)
        tell_missed(kept.tops.missed)
        tell(f"discarded: {name}" if words.chosen is None else f"discarded: {count} change(s)")
        return 0
    applied = kept.apply_interrupted(name, words.chosen)
    tell_missed(kept.tops.missed)
    return tell_applied(applied)


def tell_missed(words: list[str]) -> None:
    """Say which words meant nothing, where others did."""
    for word in words:
        tell(f"nothing has changed under {escaped(word)}")


def tell_applied(applied: Applied) -> int:
    """Say what was done; 0 if all of it could be."""
    put(1, "".join(f"{printable(line)}\n" for line in applied.changes).encode())
    for path, reason in applied.held:
        tell(f"held back: {printable(path)} ({reason})")
    for path, error in applied.failed:
        tell(f"could not be applied: {printable(path)}: {error}")
    for path in applied.executables:
        tell(f"changed executable: {printable(path)}")
    if applied.pending and applied.complete:
        tell(f"{applied.pending_changes} more change(s) wait")
    return 0 if applied.complete else 1


# -- what was held back --------------------------------------------------------------------------------------


def _held(kept: Kept, name: str, words: CommandLine) -> int:
    paths = [*words.names]
    if words.globs and words.verb == "apply":
        tell("a pattern is no consent to what was held back: name the paths, or say --all")
        return 2
    if words.globs:
        with kept.review(name) as reviews:
            reviews.select(Words(tuple(words.globs)))
            listed = {entry.path for _, review in reviews.views for entry in review.entries}
        # Whole units only: of a directory that was held back as one, a part is not to be had.
        paths += sorted(listed & _paths(kept, name) - {*paths})
        if not paths:
            tell("nothing that was held back as such matches; `casemate changes` lists what was")
            return 1
    if bool(paths) == ("--all" in words.switches):
        tell("name the paths that you have looked at, or say --all")
        return 2
    chosen = paths or None
    if words.verb == "discard":
        tell(f"discarded: {kept.discard_held(name, chosen)} entries")
        return 0
    report = kept.apply_held(name, chosen, overwrite="--overwrite" in words.switches)
    for what, path in report.changed:
        put(1, f"{what} {printable(path)}\n".encode())
    for failure in report.failed:
        tell(f"could not be applied: {printable(failure.path)}: {failure.error}")
    for item in report.held:
        tell(f"still held back: {printable(item.path)} ({item.reason})")
    if report.conflicts:
        tell("what the host has changed as well is replaced only with --overwrite")
    return 0 if not report.failed and not report.held else 1


# -- changes -------------------------------------------------------------------------------------------------


def _changes(kept: Kept, *, as_json: bool) -> int:
    tops, held = kept.interrupted(), kept.held()
    if as_json:
        data = {
            "pending": [msgspec.to_builtins(item) for item in tops if item.state == _PENDING],
            "interrupted": [msgspec.to_builtins(item) for item in tops if item.state != _PENDING],
            "held": [msgspec.to_builtins(item) for item in held],
        }
        put(1, armoured(msgspec.json.encode(representable(data))) + b"\n")
        return 0
    lines: list[str] = []
    for item in tops:
        lines.append(f"{item.state} {item.name}: {escaped(' '.join(item.argv))}")
        lines += [f"    {what:9} {printable(path)}" for what, path in item.changes[:_SHOWN]]
        if len(item.changes) > _SHOWN:
            lines.append(f"    … and {len(item.changes) - _SHOWN} more")
    for entry in held:
        lines.append(f"held back {entry.name} in {printable(entry.view)}:")
        for unit in entry.units[:_SHOWN]:
            detail = f": {escaped(unit.detail)}" if unit.detail else ""
            lines.append(f"    {unit.kind:9} {printable(unit.path)} ({unit.reason}{detail})")
        if len(entry.units) > _SHOWN:
            lines.append(f"    … and {len(entry.units) - _SHOWN} more")
    put(1, ("\n".join(lines) + "\n").encode() if lines else b"nothing is kept for this workspace\n")
    return 0
