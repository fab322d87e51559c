"""From what a person wrote to values of the policy's own kind: absolute paths, bytes, seconds.

This step looks at the file system (links, kinds of files), so that merging need not. Every refusal of an
over-broad entry is here, whichever layer it stands in, and whether or not the layer's grants count.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, cast

import msgspec
from msgspec import UNSET

from casemate.policy import paths
from casemate.policy.model import CACHES, DEGRADE_WORDS, FlagLayer, RawPolicy
from casemate.policy.source import Layer, Source, suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = [
    "FIXED_VARIABLES",
    "REFUSED_WORDS",
    "Context",
    "Task",
    "check",
    "check_variable",
    "flags",
    "flatten",
    "resolve",
    "soft",
]

_MODES = ("none", "allowlist", "full", "host")
# Words that exist in the design or that people will try, with the reason why they are not taken.
REFUSED_WORDS = {
    "protected-names": "the copy-on-write view protects names whether they exist or not, so there is "
    "nothing to give up",
    "network": 'write mode = "host" under [network]; that is the word',
    "cgroup-limits": 'not needed: scope = "auto" already takes the next best scope, and says so',
    "disk-quota": 'not needed: scope = "auto" already measures where no quota is to be had, and says so',
    "seccomp": "the system call filter cannot be given up",
    "boundary": "choose the preset full-access instead",
}
# A file of a stranger must not make a run slow: each entry costs calls here, and mounts later.
_ENTRIES = 1000
_LENGTH = 4096  # PATH_MAX
_VARIABLE = 128 * 1024  # what the kernel takes of one variable

#: Variables that say who and where the command is; the sandbox decides them.
FIXED_VARIABLES = ("HOME", "USER", "LOGNAME")


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What resolving needs to know beside the text."""

    workspace: str
    guard: paths.Guard
    base: str
    """Where relative paths start."""
    full_access: bool = False
    project: bool = False
    """The text is a project's: what it may not ask for at all is refused here."""
    must_exist: bool = False
    """A path that is not there is an error (flags) rather than a note (files)."""


def flatten(raw: RawPolicy) -> dict[str, object]:
    """The fields that are set, by path."""
    found: dict[str, object] = {}
    for part in ("filesystem", "network", "resources", "environment", "isolation"):
        section = getattr(raw, part)
        if section is UNSET:
            continue
        for name, key in zip(section.__struct_fields__, section.__struct_encode_fields__, strict=True):
            value = getattr(section, name)
            if value is not UNSET:
                found[f"{part}.{key}"] = value
    return found


_FLAG_FIELDS = {
    "workspace": "filesystem.workspace",
    "read": "filesystem.read",
    "write": "filesystem.write",
    "deny": "filesystem.deny",
    "tools": "filesystem.tools",
    "cache": "filesystem.cache",
    "protect": "filesystem.protect",
    "network": "network.mode",
    "allow": "network.allow",
    "deny_host": "network.deny",
    "ask": "network.ask",
    "parent_proxy": "network.parent-proxy",
    "publish": "network.publish",
    "sockets": "network.sockets",
    "ssh_agent": "network.ssh-agent",
    "credentials": "network.credentials",
    "requests": "network.requests",
    "memory": "resources.memory",
    "cpu": "resources.cpu",
    "pids": "resources.pids",
    "open_files": "resources.open-files",
    "file_size": "resources.file-size",
    "disk": "resources.disk",
    "timeout": "resources.timeout",
    "output": "resources.output",
    "scope": "resources.scope",
    "pass_": "environment.pass",
    "set": "environment.set",
    "boundary": "isolation.boundary",
    "degrade": "isolation.degrade",
}


def flags(layer: FlagLayer) -> dict[str, object]:
    """The flags that were given, by field path."""
    found: dict[str, object] = {}
    for name, path in _FLAG_FIELDS.items():
        value = getattr(layer, name)
        if value is not UNSET and value not in ((), {}):
            found[path] = value
    # Who names a host means it to be reached; `soft` below says that nothing gets narrower by it.
    if (layer.allow or layer.ssh_agent or layer.ask is True) and layer.network is UNSET:
        found["network.mode"] = "allowlist"
    return found


def soft(layer: FlagLayer) -> frozenset[str]:
    """The fields that ``flags`` gives without having been asked: they count only where they widen."""
    return frozenset(("network.mode",)) if layer.network is UNSET else frozenset()


def resolve(
    written: Mapping[str, object],
    source: Source,
    context: Context,
    *,
    grants: bool,
    restricts: bool = False,
    soft: frozenset[str] = frozenset(),
) -> Layer:
    """Check and resolve the fields in ``written``. Raises PolicyError with file, line and field."""
    values: dict[str, object] = {}
    notes: list[str] = []
    for field, value in written.items():
        try:
            values[field] = _RESOLVERS[field](Task(field, value, context, grants, notes))
        except ValueError as error:
            raise source.error(field, str(error)) from None
    return Layer(
        source=source,
        values=values,
        grants=grants,
        restricts=restricts,
        notes=tuple(f"{source.file or source.name}: {note}" for note in notes),
        soft=soft,
    )


def check(field: str, value: object, context: Context) -> object:
    """One field's value, resolved. Raises ValueError with a sentence that does not name the field."""
    return _RESOLVERS[field](Task(field, value, context, True, []))


class Task:
    """One field on its way."""

    __slots__ = ("context", "field", "grants", "notes", "value")

    def __init__(self, field: str, value: object, context: Context, grants: bool, notes: list[str]) -> None:
        self.field = field
        self.value = value
        self.context = context
        self.grants = grants
        self.notes = notes

    @property
    def names(self) -> tuple[str, ...]:
        """The entries of a list. Raises ValueError for more, or longer ones, than a sandbox could use."""
        names = cast("tuple[str, ...]", self.value)
        if len(names) > _ENTRIES:
            raise ValueError(f"{len(names)} entries are more than the {_ENTRIES} that are possible")
        for name in names:
            if len(name) > _LENGTH:
                raise ValueError(f"{_show(name)} is longer than a path can be")
        return names


def _one_of(words: tuple[str, ...]) -> Callable[[Task], object]:
    def resolver(task: Task) -> object:
        if task.value not in words:
            known = ", ".join(words)
            raise ValueError(f"{_show(task.value)} is not one of {known}{suggestion(str(task.value), words)}")
        return task.value

    return resolver


def _read(task: Task) -> object:
    return _grants(task, write=False)


def _write(task: Task) -> object:
    return _grants(task, write=True)


def _grants(task: Task, *, write: bool) -> tuple[str, ...]:
    context = task.context
    found: list[str] = []
    for text in task.names:
        try:
            path = paths.expand(text, base=context.base, home=context.guard.home)
            paths.check_grant(path, write=write, guard=context.guard, workspace=context.workspace)
        except ValueError as error:
            raise ValueError(f"{_show(text)}: {error}") from None
        if not task.grants:
            found.append(path)
            continue
        if not os.path.exists(path):
            if context.must_exist:
                raise ValueError(f"{_show(text)}: {path} does not exist")
            task.notes.append(f"{task.field}: {path} does not exist and is left out")
            continue
        found.append(path)
    return _unique(found)


def _deny(task: Task) -> object:
    found: list[str] = []
    for text in task.names:
        if any(c in text for c in "*?["):
            raise ValueError(f"{_show(text)}: patterns are not supported here; name the path")
        try:
            path = paths.expand(text, base=task.context.base, home=task.context.guard.home)
            paths.check_deny(path, workspace=task.context.workspace)
        except ValueError as error:
            raise ValueError(f"{_show(text)}: {error}") from None
        found.append(path)
        # The links of the workspace on the way are denied too: led elsewhere by one command, they would show
        # the next one what they led to before.
        found += paths.links_on_the_way(text, base=task.context.base, home=task.context.guard.home,
                                        workspace=task.context.workspace)
    return _unique(found)


def _switch(task: Task) -> object:
    return task.value


def _cache(task: Task) -> object:
    for name in task.names:
        if name not in CACHES:
            raise ValueError(f"{_show(name)} is not one of {', '.join(CACHES)}{suggestion(name, CACHES)}")
    return _unique(task.names)


def _protect(task: Task) -> object:
    for pattern in task.names:
        if "/" in pattern or "\0" in pattern or pattern in ("", ".", ".."):
            raise ValueError(f"{_show(pattern)}: a protected name is one file name or pattern, at any depth")
        # A bracket matches one character out of a set, so it says nothing for sure either.
        if not re.sub(r"\[[^\]]*\]|[*?]", "", pattern):
            raise ValueError(f"{_show(pattern)}: this matches every name, so nothing could be applied")
    return _unique(task.names)


def _network(task: Task) -> object:
    # A module of its own, so that a run without a network does not load it.
    from casemate.policy import network

    return network.RESOLVERS[task.field](task)


def _mode(task: Task) -> object:
    if task.value == "proxy":
        raise ValueError(
            '"proxy" is not needed: every connection meets the gate, whatever a program knows of proxies; '
            'write "allowlist"'
        )
    return _one_of(_MODES)(task)


def _size(least: int) -> Callable[[Task], object]:
    def resolver(task: Task) -> object:
        from casemate.policy.units import parse_size

        return parse_size(cast("int | str", task.value), least=least)

    return resolver


def _count(least: int) -> Callable[[Task], object]:
    def resolver(task: Task) -> object:
        from casemate.policy.units import parse_count

        return parse_count(cast("int | str", task.value), least=least)

    return resolver


def _cpu(task: Task) -> object:
    from casemate.policy.units import parse_cpu

    return parse_cpu(cast("float | str", task.value))


def _timeout(task: Task) -> object:
    from casemate.policy.units import parse_duration

    return parse_duration(cast("float | str", task.value))


_NAME = r"[A-Za-z_][A-Za-z0-9_]*"


def check_variable(name: str) -> None:
    """Refuse a variable name that no shell could use or that the sandbox decides. Raises ValueError."""
    if re.fullmatch(_NAME, name) is None:
        raise ValueError(f"{_show(name)} is not a variable's name")
    if name in FIXED_VARIABLES or name.startswith("CASEMATE_"):
        raise ValueError(f"{name} is decided by the sandbox")


def _pass(task: Task) -> object:
    for name in task.names:
        if "*" not in name:
            check_variable(name)
            continue
        prefix = name.removesuffix("*")
        # At least a letter and an underscore: `*`, `A*` or `_*` would take in what nobody had in mind.
        if re.fullmatch(r"_?[A-Za-z][A-Za-z0-9_]*_", prefix) is None:
            raise ValueError(f"{_show(name)} is too broad; write names, or a prefix such as MYAPP_*")
        if prefix.startswith("CASEMATE_"):
            raise ValueError("CASEMATE_ variables are decided by the sandbox")
    return _unique(task.names)


def _set(task: Task) -> object:
    found = dict(cast("dict[str, str]", task.value))
    if len(found) > _ENTRIES:
        raise ValueError(f"{len(found)} variables are more than the {_ENTRIES} that are possible")
    for name, value in found.items():
        check_variable(name)
        if "\0" in value:
            raise ValueError(f"the value of {name} holds a NUL byte")
        if len(name) + len(value) >= _VARIABLE - 2:
            raise ValueError(f"the value of {name} is longer than the kernel takes")
    return found


def _boundary(task: Task) -> object:
    if task.value == "auto":
        return "process"
    if task.value == "none" and (task.context.project or not task.context.full_access):
        raise ValueError('"none" comes only with the preset full-access, given as a flag')
    return _one_of(("process", "none"))(task)


def _degrade(task: Task) -> object:
    for word in task.names:
        if word in DEGRADE_WORDS:
            continue
        bare = re.split(r"\s*=", word, maxsplit=1)[0]
        if bare in REFUSED_WORDS:
            raise ValueError(f"{_show(word)} is refused: {REFUSED_WORDS[bare]}")
        raise ValueError(
            f"{_show(word)} is not one of {', '.join(DEGRADE_WORDS)}{suggestion(word, DEGRADE_WORDS)}"
        )
    return tuple(sorted(set(task.names)))


_MIB = 1 << 20

_RESOLVERS: dict[str, Callable[[Task], object]] = {
    "filesystem.workspace": _one_of(("write", "read", "direct")),
    "filesystem.read": _read,
    "filesystem.write": _write,
    "filesystem.deny": _deny,
    "filesystem.tools": _switch,
    "filesystem.cache": _cache,
    "filesystem.protect": _protect,
    "network.mode": _mode,
    "network.ask": _switch,
    # The least values are those below which nothing starts at all.
    "resources.memory": _size(4 * _MIB),
    "resources.cpu": _cpu,
    "resources.pids": _count(1),
    "resources.open-files": _count(8),
    "resources.file-size": _size(0),
    "resources.disk": _size(4096),
    "resources.timeout": _timeout,
    "resources.output": _size(0),
    "resources.scope": _one_of(("auto", "tree")),
    "environment.pass": _pass,
    "environment.set": _set,
    "isolation.boundary": _boundary,
    "isolation.degrade": _degrade,
    **dict.fromkeys(
        (f"network.{name}" for name in ("allow", "deny", "parent-proxy", "publish", "sockets", "ssh-agent",
                                        "credentials", "requests", "within")),
        _network,
    ),
}


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _show(value: object) -> str:
    text = str(value)
    return ascii(text if len(text) <= 120 else text[:117] + "...")
