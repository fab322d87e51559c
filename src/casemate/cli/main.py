"""Which command is meant, and what its errors look like."""

from __future__ import annotations

import os
import sys

from casemate.cli.streams import put
from casemate.errors import BusyError, CasemateError, PolicyError, ProtectionUnavailable

__all__ = ["EXIT", "dispatch", "error_text", "exit_code", "line", "tell", "tell_error"]

#: Casemate's own exit codes; the command's own are passed through, and 128 + n is signal n.
EXIT = {"usage": 2, "limit": 123, "timeout": 124, "failed": 125, "refused": 126, "not-found": 127}

USAGE = """usage: casemate COMMAND [OPTION…]

  run [OPTION…] -- CMD [ARG…]   run a command behind the boundary (`casemate run --help`)
  learn [OPTION…] -- CMD        run it with an open network in a view; print the policy it needed
  forward PORT[:INSIDE]         lead a port of this host into the command that runs here
  doctor [--json]               what this host can enforce, what is missing, how to get it
  changes                       changes that wait: for a review, held back, of interrupted commands
  diff [ID] [PATH…]             what applying them would do
  apply [ID] [PATH…]            apply them after you have looked at them, or a part
  discard [ID] [PATH…]          throw them away
  session VERB                  what commands with --session NAME keep: list, snapshot, branch, rollback, …
  init                          write a starter casemate.toml
  trust [--revoke|--list]       let this project's casemate.toml grant what it asks for
  policy show|check|schema|diff what holds, and which layer said so
  daemon start|stop|status      a resident helper that makes `run` start faster
  version
"""


# The module of each command, and whether its own name is its first argument.
_COMMANDS = {
    "run": ("run", False), "init": ("policy_cmds", True), "trust": ("policy_cmds", True),
    "policy": ("policy_cmds", True), "doctor": ("doctor", False), "changes": ("kept", True),
    "diff": ("kept", True), "apply": ("kept", True), "discard": ("kept", True), "learn": ("learn", False),
    "forward": ("forward", False), "session": ("session", False), "daemon": ("daemon", False),
}  # fmt: skip


def dispatch(argv: list[str]) -> int:
    """Run one command line. Errors become one message on stderr and an exit code."""
    name = argv[0] if argv else ""
    if name in ("doctor", "daemon") and argv[1:2] in (["--help"], ["-h"]):
        os.write(1, USAGE.encode())
        return 0
    if name in _COMMANDS:
        return _run_command(name, argv)
    if name in ("version", "--version", "-V"):
        import casemate

        os.write(1, f"casemate {casemate.__version__}\n".encode())
        return 0
    if name in ("help", "--help", "-h"):
        os.write(1, USAGE.encode())
        return 0
    problem = f"casemate: unknown command {name!r}\n\n" if name else ""
    os.write(2, (problem + USAGE).encode())
    return EXIT["usage"]


def _run_command(name: str, argv: list[str]) -> int:
    module, whole = _COMMANDS[name]
    try:
        full = f"casemate.cli.{module}"
        __import__(full)
        code: int = sys.modules[full].main(argv if whole else argv[1:])
        return code
    except CasemateError as error:
        tell_error(error)
        return exit_code(error)
    except BrokenPipeError:
        return 141
    except OSError as error:
        from casemate.sandbox.failures import from_os_error

        failure = from_os_error(error)
        tell_error(failure)
        return exit_code(failure)


def exit_code(error: CasemateError) -> int:
    """The exit code for an error of the tree."""
    if error.code in ("command-not-found", "command-not-executable"):
        return EXIT["not-found"]
    if isinstance(error, (PolicyError, ProtectionUnavailable)):
        return EXIT["usage"] if error.code in ("no-command", "usage") else EXIT["refused"]
    if isinstance(error, BusyError):
        return EXIT["refused"]
    return EXIT["failed"]


def error_text(error: CasemateError) -> str:
    """An error for a person: code and message, where it is, what to do next."""
    lines = [f"casemate: {error.message} [{error.code}]"]
    place = error.details.get("file")
    if place:
        line = error.details.get("line")
        field = error.details.get("field")
        where = f"{place}:{line}" if line else str(place)
        lines.append(f"  at: {where}{f' ({field})' if field else ''}")
    if error.details.get("protection"):
        lines.append(f"  needed: {error.details.get('needed')}")
        lines.append(f"  found: {error.details.get('found')}")
    if error.hint:
        lines.append(f"  hint: {error.hint}")
    return "\n".join(_safe(line) for line in lines) + "\n"


def tell_error(error: CasemateError) -> None:
    """Write an error for a person."""
    put(2, error_text(error).encode("utf-8", "replace"))


def tell(text: str) -> None:
    """One line for a person, on stderr."""
    put(2, line(text).encode("utf-8", "replace"))


def line(text: str) -> str:
    """What ``tell`` writes."""
    return f"casemate: {_safe(text)}\n"


def _safe(text: str) -> str:
    """Text for a terminal: nothing in it may move the cursor."""
    return "".join(c if c.isprintable() or c == " " else c.encode("unicode_escape").decode() for c in text)
