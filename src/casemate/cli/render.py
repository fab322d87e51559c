"""Results for people (stderr) and for programs (JSON). Names out of a sandbox are shown escaped."""

from __future__ import annotations

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import cast

    from casemate.errors import CasemateError
    from casemate.sandbox.result import Result

__all__ = ["armoured", "as_json", "error_as_json", "escaped", "representable", "summary"]

if not TYPE_CHECKING:

    def cast(_kind, value):
        """``typing.cast`` without typing."""
        return value


_SHOWN = 10


def as_json(result: Result) -> bytes:
    """One JSON object. Bytes of names that are not UTF-8 appear as ``\\xNN``."""
    plain = msgspec.to_builtins(result)
    for name in ("stdout", "stderr"):
        plain.pop(name, None)
    return armoured(msgspec.json.encode(representable(plain)))


def error_as_json(error: CasemateError, code: int) -> bytes:
    """The same for what kept a command from running."""
    plain = representable({"error": error.as_dict(), "exit-code": code})
    return armoured(msgspec.json.encode(plain, enc_hook=str))


def representable(value: object) -> object:
    """Plain data in which every text can be encoded: bytes that are not UTF-8 become ``\\xNN``."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        return value
    if isinstance(value, dict):
        items = cast("dict[object, object]", value)
        return {key: representable(item) for key, item in items.items()}
    if isinstance(value, (list, tuple)):
        return [representable(item) for item in cast("list[object]", value)]
    return value


def armoured(data: bytes) -> bytes:
    """The same JSON with every character that is not printable as an escape: it is in a string."""
    if data.isascii() and b"\x7f" not in data:
        return data
    text = data.decode()
    found: list[str] = []
    for character in text:
        if character.isprintable():
            found.append(character)
        else:
            raw = character.encode("utf-16-be")
            found += [f"\\u{raw[at]:02x}{raw[at + 1]:02x}" for at in range(0, len(raw), 2)]
    return "".join(found).encode()


def summary(result: Result) -> list[str]:
    """What a person should know after the command: only what is out of the ordinary. Lines, escaped."""
    lines: list[str] = []
    if result.limit:
        lines.append(f"casemate: ended by the limit: {result.limit}")
    elif result.limits_touched:
        lines.append(f"casemate: limits that were reached: {', '.join(result.limits_touched)}")
    applied = result.applied
    _listed(lines, "held back", [(path, f" ({reason})") for path, reason in applied.held])
    _listed(lines, "could not be applied", [(path, f": {error}") for path, error in applied.failed])
    _listed(lines, "changed executables", [(path, "") for path in applied.executables])
    if applied.kept or applied.failed:
        lines.append("casemate: kept: `casemate changes` shows them, `casemate apply` applies what you name")
    if applied.pending:
        lines.append(
            f"casemate: {applied.pending_changes} change(s) wait: `casemate diff` shows them, "
            "`casemate apply` applies them, `casemate discard` throws them away"
        )
    if result.network.lost:
        lines.append("casemate: network: the gate ended before the command, which reached nothing more then")
    elif result.network.capture == "listed ports" and result.exit_code:
        lines.append("casemate: network: only ports that rules name reached the gate (see `casemate doctor`)")
    for denial in result.denials:
        if denial.kind.startswith("held-"):
            continue
        sure = "denied" if denial.certain else "probably denied"
        what = denial.what if denial.what == denial.kind else f"{denial.kind} {denial.what}"
        allow = denial.allow.split("\n")
        if len(allow) == 1:
            end = f"; would be allowed by: {denial.allow}" if denial.allow else ""
            lines.append(f"casemate: {sure}: {escaped(what)}{escaped(end)}")
        else:
            flags = f" {_flags(allow)}, or in a policy by" if _flags(allow) else ""
            lines.append(f"casemate: {sure}: {escaped(what)}; would be allowed by{escaped(flags)}:")
            lines += [f"    {escaped(line)}" for line in allow]
    return lines


def _flags(allow: list[str]) -> str:
    """The options that say the same as lines about hosts; empty if there are none."""
    for line in allow:
        field, _, hosts = line.partition(" = ")
        if field == "network.allow":
            rules = [host.strip('"') for host in hosts[1:-1].split(", ")]
            return " ".join(f"--allow '{rule}'" if "[" in rule else f"--allow {rule}" for rule in rules)
    return ""


def _listed(lines: list[str], title: str, items: list[tuple[str, str]]) -> None:
    """Paths, as ``casemate apply`` takes them, and a word on each."""
    if not items:
        return
    from casemate.workspace.names import printable

    lines.append(f"casemate: {title}: {len(items)}")
    lines += [f"    {printable(path)}{escaped(word)}" for path, word in items[:_SHOWN]]
    if len(items) > _SHOWN:
        lines.append(f"    … and {len(items) - _SHOWN} more")


def escaped(text: str) -> str:
    """A name for a terminal: nothing in it may move the cursor, and every byte can be told."""
    raw = text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in raw)
