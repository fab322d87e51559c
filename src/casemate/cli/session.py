"""``casemate session``: what sessions of a workspace there are, and snapshots, branches and layers of one."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import msgspec

from casemate.cli.kept import USAGE as KEPT_USAGE
from casemate.cli.kept import show, tell_applied, tell_missed
from casemate.cli.main import line, tell
from casemate.cli.render import escaped, representable
from casemate.cli.streams import put
from casemate.errors import CasemateError
from casemate.policy.units import format_size
from casemate.sandbox.session import Session, sessions
from casemate.settings import places
from casemate.sys.process import is_root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.cli.kept import CommandLine
    from casemate.sandbox.kept import Kept

__all__ = ["main", "review"]

USAGE = """usage: casemate session list [-C DIR] [--json]
       casemate session snapshot [-C DIR] NAME
       casemate session branch [-C DIR] NAME NEW [--at ID]
       casemate session rollback [-C DIR] NAME ID
       casemate session flatten [-C DIR] NAME [--to ID]
       casemate session discard [-C DIR] NAME
       casemate session gc [-C DIR]

`casemate run --session NAME -- CMD` makes a session, or goes on with one: HOME and the view are as the
command before has left them, and nothing is applied at the end. `casemate diff --session NAME` shows what
there is, `casemate apply --session NAME` applies it; the session then goes on over the changed workspace.

  list       sessions with their snapshots, and what they take on disk
  snapshot   freeze what is there, under a name that is printed
  branch     a new session that goes on from here, or from a snapshot; frozen layers are shared
  rollback   drop everything since a snapshot (`start`: since the beginning, or what was applied last)
  flatten    make one layer of those up to a snapshot (default: all); snapshots before it are gone
  discard    throw a session away
  gc         remove what no session refers to (the other verbs do it, too)

  -C DIR     the workspace (default: the present directory)
  --no-wait  refuse instead of waiting while a command runs in the session
"""
_VERBS = {"list": 0, "snapshot": 1, "branch": 2, "rollback": 2, "flatten": 1, "discard": 1, "gc": 0}
_VALUES = {"branch": "--at", "flatten": "--to"}
_SWITCHES = ("--json", "--no-wait")


class _Words(NamedTuple):
    verb: str
    names: list[str]
    directory: str
    value: str
    switches: set[str]


def _parse(words: list[str]) -> _Words | None:
    """Take the words apart; None if they are not of the usage."""
    verb = words[0] if words else ""
    if verb not in _VERBS:
        return None
    names: list[str] = []
    directory, value = ".", ""
    switches: set[str] = set()
    rest = iter(words[1:])
    for word in rest:
        if word == "-C":
            directory = next(rest, "")
        elif word == _VALUES.get(verb):
            value = next(rest, "")
            if not value:
                return None
        elif word in _SWITCHES and (word != "--json" or verb == "list"):
            switches.add(word)
        elif word.startswith("-"):
            return None
        else:
            names.append(word)
    if len(names) != _VERBS[verb] or not directory:
        return None
    return _Words(verb, names, directory, value, switches)


def main(argv: list[str]) -> int:
    """Run one of the verbs."""
    if argv and argv[0] in ("-h", "--help"):
        put(1, USAGE.encode())
        return 0
    words = _parse(argv)
    if words is None:
        put(2, USAGE.encode())
        return 2
    # A workspace that is gone may have sessions: they can be looked at, and discarded.
    workspace = os.path.realpath(words.directory)
    where = places(dict(os.environ))
    rootless = not is_root()
    found = sessions(where, workspace, rootless=rootless)
    if words.verb == "list":
        return _list(found, as_json="--json" in words.switches)
    if words.verb == "gc":
        count = Session(where, workspace, "any", rootless=rootless).store.collect()
        tell(f"removed: {count} layers")
        return 0
    session = Session(where, workspace, words.names[0], rootless=rootless)
    try:
        session.take(
            wait="--no-wait" not in words.switches,
            tell=lambda holder: put(2, line(f"waiting for a command of the session ({holder})").encode()),
        )
        session.record()
        _act(session, words)
    except CasemateError as error:
        if words.verb != "discard" or error.code != "session-broken":
            raise
        session.discard()
    finally:
        session.close()
    if words.verb != "snapshot":
        session.store.collect()
    return 0


def _act(session: Session, words: _Words) -> None:
    if words.verb == "snapshot":
        put(1, f"{session.snapshot()}\n".encode())
    elif words.verb == "branch":
        session.branch(words.names[1], words.value)
    elif words.verb == "rollback":
        session.roll_back(words.names[1])
    elif words.verb == "flatten":
        session.flatten(words.value)
    else:
        session.discard()


def review(kept: Kept, words: CommandLine) -> int:
    """``diff --session`` and ``apply --session``: what a session has changed, and making it real."""
    session = Session(kept.job.places, kept.job.workspace, words.session or "", rootless=kept.rootless)
    from casemate.sandbox.sessiontops import apply_session, review_session

    try:
        session.take(wait=False)
        if words.verb == "diff":
            with review_session(session, kept.job) as reviews:
                return show(reviews, words, "session", f"session {session.name}")
        if "--overwrite" in words.switches or ("--all" in words.switches and words.chosen is not None):
            put(2, KEPT_USAGE.encode())
            return 2
        applied, missed = apply_session(session, kept.job, words.chosen)
        tell_missed(missed)
        return tell_applied(applied)
    finally:
        session.close()


class _Snapshot(msgspec.Struct, rename="kebab"):
    id: str
    made_ns: int


class _Facts(msgspec.Struct, rename="kebab"):
    """What is told of a session; sizes in bytes."""

    name: str
    made_ns: int = 0
    used: int = 0
    limit: int | None = None
    layers: int = 0
    changed: bool = False
    applying: bool = False
    running: str = ""
    snapshots: tuple[_Snapshot, ...] = ()
    views: tuple[str, ...] = ()
    error: str = ""


def _list(found: list[Session], *, as_json: bool) -> int:
    told = [facts for session in found if (facts := _facts(session)) is not None]
    if as_json:
        put(1, msgspec.json.encode(representable(msgspec.to_builtins(told))) + b"\n")
        return 0
    lines = [text for facts in told for text in _told(facts)]
    put(1, ("\n".join(lines) + "\n").encode() if lines else b"there is no session in this workspace\n")
    return 0


def _facts(session: Session) -> _Facts | None:
    """None for one that was discarded just now."""
    try:
        record = session.record()
    except CasemateError as error:
        return None if error.code == "no-session" else _Facts(session.name, error=error.message)
    return _Facts(
        name=record.name,
        made_ns=record.made_ns,
        used=session.usage(record, exact=True).used,
        limit=record.limit,
        layers=len(record.directories()) - 1,
        changed=session.store.changed(record),
        applying=record.applying,
        running=session.holder(),
        snapshots=tuple(_Snapshot(layer.id, layer.made_ns) for layer in record.snapshots),
        views=record.views,
    )


def _told(facts: _Facts) -> list[str]:
    if facts.error:
        return [f"{facts.name}: {escaped(facts.error)}"]
    limit = "" if facts.limit is None else f" of {format_size(facts.limit)}"
    words = [f"{format_size(facts.used)} used{limit}", f"{facts.layers} layers"]
    if facts.applying:
        words.append("an apply step did not end")
    if facts.running:
        words.append(f"in use by {escaped(facts.running)}")
    lines = [f"{facts.name}: {', '.join(words)}"]
    for item in facts.snapshots:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item.made_ns / 1e9))
        lines.append(f"    {item.id:10} {at}")
    if facts.changed:
        lines.append("    and changes since")
    return lines
