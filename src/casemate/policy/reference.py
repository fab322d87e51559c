"""What is published about the policy: its JSON Schema and its reference in Markdown.

Both are made from the types and tables that the code itself uses, so neither can say something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec

from casemate.policy import environment, paths, presets, resolve
from casemate.policy.model import (
    CACHES,
    DEGRADE_WORDS,
    PRESETS,
    Ceiling,
    ManagedFile,
    ManagedFilesystem,
    ManagedNetwork,
    RawCredential,
    RawEnvironment,
    RawFilesystem,
    RawIsolation,
    RawNetwork,
    RawPolicy,
    RawResources,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["json_schema", "markdown"]

_RULE = r"^([A-Za-z]+://)?(\[[0-9A-Fa-f:.]+(/[0-9]+)?\](/[0-9]+)?|[^\s/@]+|[0-9A-Fa-f:.]+/[0-9]+)(:[0-9*,-]+)?$"
_FORM = r"^(bearer|basic(:[^:]+)?|header:[A-Za-z0-9_.~-]+|query:[A-Za-z0-9_.~-]+)$"
_PROXY = r"^[hH][tT][tT][pP]://[^\s/@]+:[0-9]+/?$"
_SOURCE = r"^(env|env:[A-Za-z_][A-Za-z0-9_]*|file:~?/.*)$"
_PORTS = r"^[0-9]{1,5}(:[0-9]{1,5})?$"
_SIZE = r"^(unlimited|[0-9]{1,19}(\.[0-9]{1,6})?\s?[kmgtKMGT]?(i?[bB])?)$"
_COUNT = r"^(unlimited|[0-9]{1,19})$"
_CPU = r"^(unlimited|[0-9]{1,6}(\.[0-9]{1,6})?)$"
_DURATION = r"^(unlimited|[0-9]{1,12}(\.[0-9]{1,6})?|([0-9]{1,12}(\.[0-9]{1,6})?(ms|s|m|h|d))+)$"
_PASSED = r"^([A-Za-z_][A-Za-z0-9_]*|_?[A-Za-z][A-Za-z0-9_]*_\*)$"

_Schema = dict[str, object]


def json_schema(*, managed: bool = False) -> _Schema:
    """The JSON Schema of a policy file, or of the administrator's.

    What it refuses, ``load`` refuses too. Over-broad paths are a matter of the host, which no schema knows.
    """
    schema: _Schema = msgspec.json.schema(ManagedFile if managed else RawPolicy)
    definitions = cast("dict[str, dict[str, dict[str, _Schema]]]", schema["$defs"])

    def field(part: str, name: str, change: Callable[[_Schema], None]) -> None:
        if part in definitions and name in definitions[part]["properties"]:
            change(definitions[part]["properties"][name])

    for name, pattern, least in (
        ("memory", _SIZE, 4 << 20), ("file-size", _SIZE, 0), ("disk", _SIZE, 4096), ("output", _SIZE, 0),
        ("pids", _COUNT, 1), ("open-files", _COUNT, 8), ("cpu", _CPU, 0.01), ("timeout", _DURATION, 0.001),
    ):  # fmt: skip
        field("RawResources", name, _text_or_number(pattern, least))
    field("RawNetwork", "mode", lambda at: at.update(enum=["none", "allowlist", "full", "host"]))
    # No more of a rule than any schema can say: one word without a path, a user or a space.
    for part, name in (("RawNetwork", "allow"), ("RawNetwork", "deny"), ("ManagedNetwork", "deny"),
                       ("Ceiling", "network-allow")):  # fmt: skip
        field(part, name, _items({"pattern": _RULE}))
    for part, name in (("RawNetwork", "ssh-agent"), ("RawCredential", "hosts")):
        field(part, name, _items({"pattern": r"^[^\s/@]+$"}))
    for part, name, pattern in (("RawNetwork", "parent-proxy", _PROXY), ("RawCredential", "from", _SOURCE),
                                ("RawCredential", "as", _FORM)):  # fmt: skip
        field(part, name, _matching(pattern))
    field("RawNetwork", "publish", _items({"pattern": _PORTS, "minimum": 1, "maximum": 65535}))
    field("RawNetwork", "sockets", _items({"minLength": 1}))
    names: _Schema = {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"}
    for part, name in (("RawNetwork", "credentials"), ("RawEnvironment", "set")):
        field(part, name, lambda at: at.update(propertyNames=names))
    for part in ("RawFilesystem", "Ceiling"):
        field(part, "cache", _items({"enum": list(CACHES)}))
    for part in ("RawFilesystem", "ManagedFilesystem"):
        field(part, "protect", _items({"pattern": "^[^/]*[^/*?]+[^/]*$"}))
        field(part, "deny", _items({"pattern": r"^[^*?\[]+$"}))
    for part in ("RawFilesystem", "Ceiling"):
        for name in ("read", "write"):
            field(part, name, _items({"minLength": 1}))
    for part in ("RawEnvironment", "Ceiling"):
        field(part, "pass", _items({"pattern": _PASSED}))
    for part in ("RawIsolation", "Ceiling"):
        field(part, "degrade", _items({"enum": list(DEGRADE_WORDS)}))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Casemate policy", **schema}


def _text_or_number(pattern: str, least: float) -> Callable[[_Schema], None]:
    def change(at: _Schema) -> None:
        for option in cast("list[_Schema]", at["anyOf"]):
            if option["type"] == "string":
                option["pattern"] = pattern
            else:
                option["minimum"] = least

    return change


def _matching(pattern: str) -> Callable[[_Schema], None]:
    def change(at: _Schema) -> None:
        at["pattern"] = pattern

    return change


def _items(constraint: _Schema) -> Callable[[_Schema], None]:
    def change(at: _Schema) -> None:
        cast("_Schema", at["items"]).update(constraint)

    return change


# ---------------------------------------------------------------- Markdown

_SECTIONS: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    ("filesystem", RawFilesystem),
    ("network", RawNetwork),
    ("network.credentials.NAME", RawCredential),
    ("resources", RawResources),
    ("environment", RawEnvironment),
    ("isolation", RawIsolation),
)

_INTRO = """\
# The policy

<!-- Generated by `casemate policy schema --markdown`; change the code, not this file. -->

A policy says what a command may see, change and use. It is TOML, or JSON where the file's name ends in
`.json`. It is closed (an unknown field is an error) and says `version = 1`. `casemate policy show` prints
the one that a run would have, and which layer gave each value; `casemate policy schema` prints the JSON
Schema.

```toml
version = 1

[filesystem]
read = ["~/data"]          # more that can be read
deny = [".env"]            # hidden, whatever else names it
cache = ["pip"]            # kept between runs of this workspace

[network]
mode = "allowlist"
allow = ["github.com", "*.example.org:443", "10.1.0.0/16:5432"]

[resources]
memory = "4G"
timeout = "30m"
```

## Layers

| layer | file | its grants | its restrictions |
|---|---|---|---|
| managed | `/etc/casemate/managed.toml` | none; it sets the ceiling of everybody else's | count |
| preset | built in, chosen by `--preset` | count | - |
| project | `casemate.toml` at the top of the workspace | only while `casemate trust` holds the hash of \
exactly this content; of the network `allowlist` and names of hosts; never an address, a credential, a \
socket, a degrade word or a boundary | count |
| user | `~/.config/casemate/policy.toml`, or the file that `--policy` names in its place | count | count |
| flags | the command line, the API's arguments | count | count |

A **grant** makes the sandbox wider. Lists add up over the layers; of a single value the last layer's
counts, in the order above. A **restriction** makes it tighter and counts from everywhere: `deny` and
`protect` add up, and no layer lifts a project's or the administrator's lower limit, `network.mode = "none"`,
`workspace = "read"` or stronger boundary. `deny` wins over `read`, `write`, tools and settings, denied hosts
win over allowed ones, and a request to a host has to meet what every layer says of that host. The preset
`read-only`, chosen by a flag, outweighs what files say about writing.

An empty list is nothing: `read = []` gives nothing and takes nothing away. Relative paths start at the
workspace (on the command line, at the current directory), `~/` is your home. A path that does not exist is
an error on the command line, and left out with a note in a file.

A user's or the administrator's file must belong to root or to you and be writable by nobody else. A project's
file cannot be a symbolic link. Grants above the ceiling are an error in your own file or flags; a project's
are left out with a note; a preset's limits are lowered in silence.

## Presets

"""


def markdown() -> str:
    """The reference, as docs/policy.md holds it."""
    parts = [_INTRO, _table(("preset", "what it is for"), PRESETS.items()), _defaults(), "\n## Fields\n"]
    for name, kind in _SECTIONS:
        parts.append(f"\n### [{name}]\n\n{_doc(kind)}\n\n")
        parts.append(_fields(kind))
    parts.append(_words())
    parts.append(_refusals())
    parts.append("\n## The administrator's file\n\n")
    parts.append(f"{_doc(ManagedFile)}\n\n### [ceiling]\n\n{_doc(Ceiling)}\n\n")
    parts.append(_fields(Ceiling))
    parts.append(f"\n### [filesystem] of the administrator's file\n\n{_doc(ManagedFilesystem)}\n\n")
    parts.append(_fields(ManagedFilesystem))
    parts.append(f"\n### [network] of the administrator's file\n\n{_doc(ManagedNetwork)}\n\n")
    parts.append(_fields(ManagedNetwork))
    parts.append(_environment())
    return "".join(parts)


def _doc(kind: type[msgspec.Struct]) -> str:
    return "\n".join(line.strip() for line in (kind.__doc__ or "").strip().splitlines())


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| `" + row[0] + "` | " + " | ".join(row[1:]) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _fields(kind: type[msgspec.Struct]) -> str:
    schema = json_schema(managed=kind in (Ceiling, ManagedFilesystem, ManagedNetwork))
    definitions = cast("dict[str, dict[str, dict[str, _Schema]]]", schema["$defs"])
    rows: list[tuple[str, str, str]] = []
    for name, facts in definitions[kind.__name__]["properties"].items():
        rows.append((name, _type(facts), str(facts.get("description", ""))))
    return _table(("field", "type", "meaning"), rows)


def _type(facts: _Schema) -> str:
    if "anyOf" in facts:
        found = [_type(option) for option in cast("list[_Schema]", facts["anyOf"])]
        return " or ".join(dict.fromkeys(found))
    if "enum" in facts:
        return " or ".join(f"`{word}`" for word in cast("list[str]", facts["enum"]))
    if "allOf" in facts or "$ref" in facts:
        return "table"
    if facts.get("type") == "array":
        return "list of " + _type(cast("_Schema", facts["items"]))
    if isinstance(facts.get("additionalProperties"), dict):
        return "table of " + _type(cast("_Schema", facts["additionalProperties"])).removesuffix("s")
    words = {"string": "text", "integer": "number", "number": "number", "boolean": "true or false"}
    return words.get(str(facts.get("type")), "table")


def _defaults() -> str:
    rows: list[tuple[str, ...]] = []
    columns = [presets.values(name) for name in PRESETS]
    for field in columns[0]:
        if field == "resources.memory":
            bounded = "8G, at most 3/4 of the machine's"
            shown = [bounded, bounded, "unlimited"]
        else:
            shown = [_value(field, column[field]) for column in columns]
        rows.append((field, *shown))
    return "\nEvery field, by preset:\n\n" + _table(("field", *PRESETS), rows)


def _value(field: str, value: object) -> str:
    from casemate.policy.units import format_duration, format_size

    if field == "network.parent-proxy":
        return "nothing"
    if field == "resources.cpu":
        return "all processors"
    if value is None:
        return "unlimited"
    if isinstance(value, float):
        return format_duration(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        sized = field in ("resources.disk", "resources.output", "resources.file-size")
        return format_size(value) if sized else str(value)
    if isinstance(value, str):
        return f"`{value}`"
    return "nothing"


def _words() -> str:
    text = "\n## Degrade words\n\nA protection is required unless its word is given. Every result shows "
    text += 'the words in force; `network.mode = "host"` and the preset `full-access` count as such.\n\n'
    text += _table(("word", "what it opens"), DEGRADE_WORDS.items())
    text += "\nKnown and refused:\n\n"
    return text + _table(("word", "why"), resolve.REFUSED_WORDS.items())


def _refusals() -> str:
    text = "\n## What is refused as too broad\n\nIn `read` and `write`, and as a workspace:\n\n"
    text += _table(("path", "why"), paths.BROAD.items())
    text += "\nwith all that lies below:\n\n"
    text += _table(("path", "why"), paths.KERNEL.items())
    text += (
        "\nand your home, what holds it, `~/.ssh` or `~/.gnupg`, Casemate's own state and configuration, "
        "sockets, devices, and the directories of sockets (`/run/user/UID`, `/run/docker`, ...). `write` "
        "takes directories only, and none of the system's "
        f"({', '.join(f'`{path}`' for path in paths.SYSTEM)}) or one that holds the workspace.\n\n"
        "`deny` cannot name the workspace, what holds it, `/proc`, `/sys` or `/dev`. `protect` takes one "
        "file name or pattern with at least one character that is no wildcard. `pass` takes names, or a "
        "prefix that ends in `_*`.\n"
    )
    return text


def _environment() -> str:
    def listed(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in sorted(names))

    return (
        "\n## The environment inside\n\nIt starts empty. `PATH` is rebuilt from what the sandbox sees; "
        "`HOME`, `USER`, `LOGNAME`, `SHELL`, `TMPDIR` and `CASEMATE_SANDBOX` are decided.\n\n"
        f"Passed as they are: `LC_*`, {listed(environment.PLAIN)}.\n\n"
        "Passed without credentials, and left out where they cannot be told apart; the paths in them are "
        "bound read-only: `CARGO_REGISTRIES_*_INDEX`, `npm_config_@SCOPE:registry`, "
        f"{listed(environment.INDEX)}.\n\n"
        f"Certificates, bound read-only: {listed(environment.CERTIFICATES)}.\n\n"
        f"Passed where the sandbox sees what they name: {listed(environment.ROOTS)}.\n\n"
        f'With `network.mode = "host"` also: {listed(environment.PROXIES | environment.NO_PROXY)}.\n\n'
        "The caches:\n\n"
        + _table(
            ("cache", "mounted at", "variables"),
            (
                (name, ", ".join(f"`{at}`" for _, at in mounts), listed(variables) or "-")
                for name, (mounts, variables) in environment.CACHES.items()
            ),
        )
    )
