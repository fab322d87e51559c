"""``casemate init``, ``casemate trust`` and ``casemate policy ...``: data on stdout, messages on stderr."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

from casemate import settings
from casemate.cli.main import EXIT, exit_code, tell, tell_error
from casemate.errors import CasemateError, PolicyError

if TYPE_CHECKING:
    from casemate.policy.model import Effective

__all__ = ["STARTER", "main"]

_USAGE = {
    "init": "usage: casemate init [DIR]\n\nWrites a starter casemate.toml; never overwrites one.\n",
    "trust": """\
usage: casemate trust [DIR]            let DIR's casemate.toml grant what it asks for, as it is now
       casemate trust --revoke [DIR]   take that back
       casemate trust --list           every workspace whose file is trusted

Prints what the file is granted. Any later change to the file ends the trust.
""",
    "policy": """\
usage: casemate policy show [--json] [OPTION of `casemate run`...]
                                               what a run here would have, and which layer said so
       casemate policy check [--json] [--managed] FILE...
                                               whether files are well-formed and not too broad
       casemate policy schema [--managed|--markdown]
                                               the JSON Schema, or the reference
       casemate policy diff [--json] A B       two files or presets, by what they come to
""",
}

#: What ``init`` writes. Every line that is commented out is a valid one.
STARTER = """\
# What commands of this project may see, change and use when they run under casemate.
#
# Restrictions below always count. Lines marked (trust) widen the sandbox: they count only once you have
# run `casemate trust`, and only as long as this file does not change. `casemate policy show` prints the
# outcome.
version = 1

[filesystem]
# deny = [".env", "secrets"]      # hidden from every command
# protect = ["*.lock"]            # changes to these names are held back, at any depth
# workspace = "read"              # commands cannot change the workspace
# read = ["/srv/reference"]       # (trust) more that can be read
# write = ["../output"]           # (trust) more directories that can be changed
# cache = ["pip", "npm"]          # (trust) package managers' caches, kept for this workspace

[network]
# deny = ["*.tracker.example"]    # never reached, whatever allows it
# mode = "allowlist"              # (trust) what allow names; addresses are never a project's to allow
# allow = ["github.com", "*.example.org:443"]   # (trust)

[resources]
# memory = "4G"                   # lower than the default is a restriction, higher needs (trust)
# pids = 1024
# disk = "2G"
# timeout = "30m"

[environment]
# pass = ["MYAPP_*"]              # (trust) variables of the caller that are let through
# set = { MYAPP_ENV = "test" }    # (trust)
"""


def main(argv: list[str]) -> int:
    """Run one of the commands; ``argv`` starts with its name. Returns the exit code."""
    try:
        return _dispatch(argv)
    except CasemateError as error:
        tell_error(error)
        return exit_code(error)


def _dispatch(argv: list[str]) -> int:
    name, rest = (argv[0], argv[1:]) if argv else ("", [])
    if rest[:1] in (["--help"], ["-h"]) and name in _USAGE:
        _out(_USAGE[name])
        return 0
    if name == "init":
        return _init(rest)
    if name == "trust":
        return _trust(rest)
    actions = {"show": _show, "check": _check, "schema": _schema, "diff": _diff}
    if name == "policy" and rest and rest[0] in actions:
        return actions[rest[0]](rest[1:])
    raise _usage(name or "policy", f"there is no command {' '.join(argv[:2])!a}")


def _out(text: str) -> None:
    data = text.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(1, data) :]


def _usage(name: str, message: str) -> PolicyError:
    return PolicyError(message, code="usage", hint=f"casemate {name} --help")


def _take(argv: list[str], name: str, switches: tuple[str, ...]) -> tuple[set[str], list[str]]:
    """Split arguments into known switches and the rest. Raises PolicyError (``usage``)."""
    found: set[str] = set()
    words: list[str] = []
    for at, word in enumerate(argv):
        if word == "--":
            words += argv[at + 1 :]
            break
        if word in switches:
            found.add(word)
        elif word.startswith("-") and word != "-":
            raise _usage(name, f"unknown option {word!a}")
        else:
            words.append(word)
    return found, words


def _directory(words: list[str], name: str) -> str:
    if len(words) > 1:
        raise _usage(name, "at most one directory can be named")
    return os.path.realpath(words[0] if words else ".")


# ---------------------------------------------------------------- init, trust


def _init(argv: list[str]) -> int:
    from casemate.policy.paths import check_workspace

    _, words = _take(argv, "init", ())
    workspace = check_workspace(_directory(words, "init"), settings.places(os.environ))
    file = settings.project_policy(workspace)
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        raise PolicyError(
            f"{file} exists and is left as it is",
            code="policy-exists",
            hint="edit it, or move it away",
            file=file,
        ) from None
    except OSError as error:
        raise CasemateError(f"{file} cannot be written: {error.strerror}", code="write-failed") from None
    try:
        os.write(fd, STARTER.encode())
    finally:
        os.close(fd)
    _out(f"{_plain(file)}\n")
    tell("wrote a starter policy; `casemate policy show` prints what it comes to")
    return 0


def _trust(argv: list[str]) -> int:
    from casemate.policy import trust

    switches, words = _take(argv, "trust", ("--revoke", "--list"))
    if len(switches) > 1:
        raise _usage("trust", "--revoke and --list exclude each other")
    if os.environ.get("CASEMATE_SANDBOX", "none") != "none":
        raise PolicyError(
            "trust is the operator's: a command inside a sandbox cannot give it",
            code="inside-sandbox",
            hint="run it outside",
        )
    places = settings.places(os.environ)
    if "--list" in switches:
        if words:
            raise _usage("trust", "--list takes no directory")
        _out("".join(f"{digest}  {_plain(path)}\n" for path, digest in trust.listed(places)))
        return 0
    workspace = _directory(words, "trust")
    if "--revoke" in switches:
        had = trust.forget(places, workspace)
        tell(f"{workspace}: no longer trusted" if had else f"{workspace}: was not trusted")
        return 0
    return _grant(workspace, places)


def _grant(workspace: str, places: settings.Places) -> int:
    from casemate.policy import load, paths, trust

    workspace = paths.check_workspace(workspace, places)
    file = settings.project_policy(workspace)
    data = load.read_file(file, follow=False)
    if data is None:
        raise PolicyError(f"{file}: no such file", code="policy-missing", hint="casemate init", file=file)
    # What is shown and what is recorded are the same bytes, whatever happens to the file meanwhile.
    grants = load.project_grants(data, workspace=workspace, environ=os.environ, places=places)
    if not grants:
        tell(f"{file}: asks for nothing that needs trust; its restrictions count as they are")
        return 0
    trust.record(places, workspace, data)
    _out("".join(f"{field} = {_value(field, value)}\n" for field, value in grants.items()))
    tell(f"{file}: trusted to grant this, until it changes ({trust.digest(data)[:16]})")
    return 0


# ---------------------------------------------------------------- policy show


def _show(argv: list[str]) -> int:
    from casemate.cli import run
    from casemate.policy.load import load

    # The same options as of `run`, read by the same code: what is shown is what a run would have.
    options = run.parse([*argv, "--", ":"])
    if "help" in options.switches:
        _out(_USAGE["policy"])
        return 0
    if options.argv != (":",):
        raise _usage("policy", f"unexpected argument {options.argv[0]!a}")
    cwd = os.getcwd()
    file = options.values.get("policy")
    effective = load(
        workspace=os.path.join(cwd, options.values.get("workspace_dir", "")),
        environ=os.environ,
        preset=options.values.get("preset"),
        policy_file=None if file is None else os.path.join(cwd, file),
        flags=options.flags(cwd),
    )
    if "json" in options.switches:
        _out(_as_json(effective))
    else:
        _out(_as_toml(effective))
        for note in effective.notes:
            tell(note)
    return 0


def _as_json(effective: Effective) -> str:
    import msgspec

    from casemate.policy.model import degraded

    plain = msgspec.to_builtins(effective)
    plain["degraded"] = list(degraded(effective.policy))
    return _json(plain)


def _json(plain: object) -> str:
    import json

    # Escaped to ASCII, so that no name can write to the terminal, and one that is no text has a form.
    return json.dumps(plain, indent=2) + "\n"


def _as_toml(effective: Effective) -> str:
    """The policy as a file that says the same, each value with the layer that gave it."""
    lines = [f"# workspace: {_plain(effective.workspace)}", f"# preset: {effective.preset}"]
    for layer in effective.layers:
        source = f" {_plain(layer.source)}" if layer.source else ""
        lines.append(f"# layer: {layer.name}{source} ({layer.status})")
    lines.append("version = 1")
    part = ""
    for field, value in _fields(effective).items():
        section, _, key = field.partition(".")
        if section != part:
            lines += ["", f"[{section}]"]
            part = section
        lines += _entry(key, field, _as_written(field, value), effective.origins)
    return "\n".join(lines) + "\n"


def _entry(key: str, field: str, value: object, origins: dict[str, str]) -> list[str]:
    origin = origins.get(field, "")
    if field == "network.within":
        return [] if value is None else [f"# within {_value(field, value)}  # managed"]
    if value is None and not field.startswith("resources."):
        return []  # no text says "none at all"; leaving it out does
    if isinstance(value, list):
        return _list_entry(key, field, cast("list[object]", value), origins)
    return [f"{key} = {_value(field, value)}  # {origin}"]


def _as_written(field: str, value: object) -> object:
    """A value of the policy in the form that a file has for it."""
    if field == "network.credentials":
        items = cast("list[dict[str, object]]", value)
        return {
            str(item["name"]): {"hosts": item["hosts"], "from": item["source"], "as": item["as"],
                                "add": item["add"]}
            for item in items
        }  # fmt: skip
    if field == "network.requests":
        # Of a host that several layers restrict, a file says only what all of them let through.
        found: dict[str, list[str]] = {}
        for item in cast("list[dict[str, object]]", value):
            host, allow = str(item["host"]), cast("list[str]", item["allow"])
            found[host] = [text for text in allow if text in found[host]] if host in found else allow
        return found
    return value


def _list_entry(key: str, field: str, items: list[object], origins: dict[str, str]) -> list[str]:
    origin = origins.get(field, "")
    if len(items) > 1:
        each = [f"    {_value(field, item)},  # {origins.get(f'{field}[{item}]', origin)}" for item in items]
        return [f"{key} = [", *each, "]"]
    return [f"{key} = {_value(field, items)}  # {origin}"]


def _fields(effective: Effective) -> dict[str, object]:
    """Every field of the policy, by its path, as plain data."""
    import msgspec

    found: dict[str, object] = {}
    plain = cast("dict[str, object]", msgspec.to_builtins(effective.policy))
    for part, keys in plain.items():
        if isinstance(keys, dict):
            section = cast("dict[str, object]", keys)
            found.update({f"{part}.{key}": value for key, value in section.items()})
    return found


_SIZES = ("resources.memory", "resources.disk", "resources.file-size", "resources.output")


def _value(field: str, value: object) -> str:
    """``value`` as TOML, in the form that a person would have written."""
    from casemate.policy.units import format_duration, format_size

    if value is None:
        return '"unlimited"' if field.startswith("resources.") else "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and field in _SIZES:
        return f'"{format_size(value)}"'
    if isinstance(value, float) and field == "resources.timeout":
        return f'"{format_duration(value)}"'
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, dict):
        named = cast("dict[str, object]", value)
        pairs = [f"{_key(name)} = {_value(field, item)}" for name, item in named.items()]
        return "{ " + ", ".join(pairs) + " }" if pairs else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(field, item) for item in cast("list[object]", value)) + "]"
    return f'"{_escaped(str(value))}"'


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("_", "").replace("-", "").isalnum()
    return name if bare else f'"{_escaped(name)}"'


def _escaped(text: str) -> str:
    return "".join(
        f"\\{c}" if c in '"\\' else c if c.isprintable() else f"\\u{ord(c):04x}" for c in _whole(text)
    )


def _plain(text: str) -> str:
    """A path for a line of its own: nothing in it may move the cursor or end the line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in _whole(text))


def _whole(text: str) -> str:
    # Bytes that are no UTF-8 appear as \udcNN in Python's paths and nowhere else.
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


# ---------------------------------------------------------------- policy check, schema, diff


def _check(argv: list[str]) -> int:
    switches, files = _take(argv, "policy", ("--json", "--managed"))
    if not files:
        raise _usage("policy", "name at least one file")
    results: list[dict[str, object]] = []
    for file in files:
        try:
            notes = _check_one(file, managed="--managed" in switches)
            results.append({"file": file, "ok": True, "notes": list(notes)})
        except PolicyError as error:
            results.append({"file": file, "ok": False, "error": error.as_dict()})
            if "--json" not in switches:
                tell_error(error)
            continue
        if "--json" not in switches:
            _out(f"{_plain(file)}: ok\n")
            for note in notes:
                tell(note)
    if "--json" in switches:
        _out(_json(results))
    return 0 if all(result["ok"] for result in results) else EXIT["refused"]


def _check_one(file: str, *, managed: bool) -> tuple[str, ...]:
    from casemate.policy import load

    if not managed:
        return load.standalone(os.path.abspath(file), workspace=os.getcwd(), environ=os.environ).notes
    from casemate.policy import managed as bounds
    from casemate.policy import parse, paths

    data = load.read_file(file)
    if data is None:
        raise PolicyError(f"{file}: no such file", code="policy-missing", file=file)
    source, parsed = parse.managed(data, file)
    places = settings.places(os.environ)
    workspace = paths.check_workspace(os.getcwd(), places)
    bounds.bounds(parsed, source, workspace=workspace, guard=paths.guard(places))
    return ()


def _schema(argv: list[str]) -> int:
    from casemate.policy import reference

    switches, words = _take(argv, "policy", ("--managed", "--markdown"))
    if words or len(switches) > 1:
        raise _usage("policy", "schema takes --managed or --markdown")
    if "--markdown" in switches:
        _out(reference.markdown())
    else:
        _out(_json(reference.json_schema(managed="--managed" in switches)))
    return 0


def _diff(argv: list[str]) -> int:
    from casemate.policy.load import standalone
    from casemate.policy.model import PRESETS

    switches, words = _take(argv, "policy", ("--json",))
    if len(words) != 2:
        raise _usage("policy", "diff takes two files or presets")
    sides: list[dict[str, object]] = []
    for what in words:
        chosen = what if what in PRESETS else os.path.abspath(what)
        sides.append(_fields(standalone(chosen, workspace=os.getcwd(), environ=os.environ)))
    left, right = sides
    changed = {field: (left[field], right[field]) for field in left if left[field] != right[field]}
    if "--json" in switches:
        _out(_json({field: {"from": a, "to": b} for field, (a, b) in changed.items()}))
        return 0
    for field, (a, b) in changed.items():
        _out(f"{field}: {_value(field, a)} -> {_value(field, b)}\n")
    if not changed:
        tell("both come to the same policy")
    return 0
