"""Layers into one policy. Pure: what it is given is resolved already, and nothing here looks at the host.

Two rules make the whole of it. A **grant** counts only from a layer whose grants count, and within the
ceiling; scalars of a later layer replace those of an earlier one, lists add up. A **restriction** counts
from every layer: hidden paths, protected names, denied hosts and the requests that hosts get add up, and a
layer that ``restricts`` bounds every scalar. So another restricting layer can never make the result wider.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import msgspec

from casemate.policy.model import Policy, RequestRule
from casemate.policy.paths import within_any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from casemate.errors import PolicyError
    from casemate.policy.model import Credential
    from casemate.policy.source import Layer, Source

__all__ = ["Bounds", "Merged", "build", "merge", "rank", "widening"]

_RESOURCES = ("memory", "cpu", "pids", "open-files", "file-size", "disk", "timeout", "output")
_SCALARS = (
    "filesystem.workspace",
    "filesystem.tools",
    "network.mode",
    "network.ask",
    *(f"resources.{name}" for name in _RESOURCES),
    "resources.scope",
    "isolation.boundary",
)
_GRANTED = (
    "filesystem.read",
    "filesystem.write",
    "filesystem.cache",
    "network.allow",
    "network.publish",
    "network.sockets",
    "network.ssh-agent",
    "environment.pass",
    "isolation.degrade",
)
_RESTRICTED = ("filesystem.deny", "filesystem.protect", "network.deny")
# Never a project's to widen, trusted or not. Of the mode it may have as much as `allowlist`, of the list of
# hosts no address and nothing of the host itself.
_NEVER_PROJECT = (
    "network.ask",
    "network.parent-proxy",
    "network.publish",
    "network.sockets",
    "network.ssh-agent",
    "network.credentials",
    "isolation.boundary",
    "isolation.degrade",
)
_RANKS: dict[object, float] = {"read": 0, "write": 1, "direct": 2, "tree": 0, "auto": 1}
_MODES: dict[object, float] = {"none": 0, "allowlist": 1, "full": 2, "host": 3}
# What only the gate does.
_GATES = ("network.allow", "network.ask", "network.ssh-agent", "network.credentials")


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """The managed ceiling, resolved. A missing key sets no ceiling; an empty tuple allows nothing."""

    source: Source
    scalars: dict[str, object]
    lists: dict[str, tuple[str, ...]]


class Merged(msgspec.Struct, frozen=True, kw_only=True):
    """What ``merge`` found."""

    policy: Policy
    origins: dict[str, str]
    notes: tuple[str, ...]


def rank(field: str, value: object) -> float:
    """How much ``value`` allows: a smaller number is tighter, and unlimited is infinite."""
    if field == "isolation.boundary":
        return 1 if value == "none" else 0
    if field == "network.mode":
        return _MODES[value]
    if value is None:
        return math.inf
    if isinstance(value, str):
        return _RANKS[value]
    return cast("float", value)


def merge(layers: Sequence[Layer], bounds: Bounds | None) -> Merged:
    """Merge ``layers``, the first being the preset, in the order of their weight.

    Raises PolicyError when a layer of the operator asks for more than ``bounds`` allows.
    """
    state = _State(layers, bounds)
    for field in _SCALARS:
        state.scalar(field)
    for field in _GRANTED:
        state.granted(field)
    state.variables()
    state.credentials()
    state.parent_proxy()
    for field in _RESTRICTED:
        state.restricted(field)
    state.hide()
    state.requests()
    state.outward()
    state.summarise()
    return Merged(policy=build(state.values), origins=state.origins, notes=tuple(dict.fromkeys(state.notes)))


def widening(base: Layer, layer: Layer) -> dict[str, object]:
    """What trusting ``layer`` allows beyond ``base``, by field."""
    found: dict[str, object] = {}
    for field, value in layer.values.items():
        if _never(field, value) or field in _RESTRICTED or field == "network.requests":
            continue
        if field == "network.allow":
            value = tuple(name for name in cast("tuple[str, ...]", value) if not _is_guarded(name))
        if field in _SCALARS:
            if rank(field, value) > rank(field, base.values[field]):
                found[field] = value
        elif value:
            found[field] = value
    return found


def build(values: Mapping[str, object]) -> Policy:
    """The policy whose fields are ``values``, by path; every one must be there."""
    nested: dict[str, dict[str, object]] = {}
    for field, value in values.items():
        part, _, key = field.partition(".")
        nested.setdefault(part, {})[key] = value
    return msgspec.convert(nested, Policy)


class _State:
    """The result as it grows."""

    def __init__(self, layers: Sequence[Layer], bounds: Bounds | None) -> None:
        self.layers = layers
        self.bounds = bounds
        self.values: dict[str, object] = {}
        self.origins: dict[str, str] = {}
        self.notes: list[str] = [note for layer in layers for note in layer.notes]
        self.ignored: dict[str, list[str]] = {}

    def scalar(self, field: str) -> None:
        """The last granting layer's value, then every bound."""
        value, origin = self.layers[0].values[field], self.layers[0].name
        weak = True  # the preset's own value gives way to a ceiling without an error
        for layer in self.layers[1:]:
            if field not in layer.values or not layer.grants:
                continue
            if layer.restricts and _never(field, layer.values[field]):
                continue
            if field in layer.soft and rank(field, layer.values[field]) <= rank(field, value):
                continue
            value, origin, weak = layer.values[field], layer.name, layer.restricts
            self._within_ceiling(field, value, layer)
        for layer in self.layers[1:]:
            if not layer.restricts or field not in layer.values:
                continue
            bound = layer.values[field]
            if rank(field, bound) < rank(field, value):
                if origin != self.layers[0].name:
                    self.notes.append(
                        f"{field}: {layer.name} lowers {_show(value)} (from {origin}) to {_show(bound)}"
                    )
                value, origin = bound, layer.name
            elif rank(field, bound) > rank(field, value) and (not layer.grants or _never(field, bound)):
                self.ignored.setdefault(layer.name, []).append(field)
        ceiling = self._ceiling(field)
        if ceiling is not None and rank(field, ceiling[0]) < rank(field, value):
            if weak and origin != self.layers[0].name:
                self.notes.append(f"{field}: {origin} asks for more than the managed ceiling allows")
            value, origin = ceiling[0], "managed"
        self.values[field] = value
        self.origins[field] = origin

    def _ceiling(self, field: str) -> tuple[object] | None:
        if self.bounds is None or field not in self.bounds.scalars:
            return None
        return (self.bounds.scalars[field],)

    def _within_ceiling(self, field: str, value: object, layer: Layer) -> None:
        ceiling = self._ceiling(field)
        if ceiling is None or layer.restricts or rank(field, value) <= rank(field, ceiling[0]):
            return
        allowed = f" ({_show(ceiling[0])})"
        raise self._above(field, _show(value), layer, allowed)

    def _above(self, field: str, what: str, layer: Layer, allowed: str = "") -> PolicyError:
        file = self.bounds.source.file if self.bounds else ""
        return layer.source.error(
            field,
            f"{what} is more than the administrator allows{allowed}",
            code="policy-above-ceiling",
            hint=f"the ceiling is set by {file}",
        )

    def granted(self, field: str) -> None:
        """What the layers that may grant name together."""
        found: dict[str, list[str]] = {}
        for layer in self.layers:
            names = cast("tuple[str, ...]", layer.values.get(field, ()))
            if names and (not layer.grants or (layer.restricts and field in _NEVER_PROJECT)):
                self.ignored.setdefault(layer.name, []).append(field)
                continue
            for name in names:
                if field == "network.allow" and layer.restricts and _is_guarded(name):
                    self.ignored.setdefault(layer.name, []).append(f"{field} ({name})")
                elif self._allowed(field, name, layer):
                    found.setdefault(name, []).append(layer.name)
        if field == "network.publish":  # one port of the host has one meaning: the last one
            last = {name.partition(":")[0]: name for name in found}
            found = {name: found[name] for name in found if last[name.partition(":")[0]] == name}
        self._keep(field, found)

    def _allowed(self, field: str, name: str, layer: Layer) -> bool:
        key = "network.within" if field in ("network.allow", "network.ssh-agent") else field
        if self.bounds is None or key not in self.bounds.lists:
            return True
        allowed = self.bounds.lists[key]
        if field in ("filesystem.read", "filesystem.write"):
            inside = within_any(name, allowed)
        elif key == "network.within":
            inside = _reached(name if field == "network.allow" or ":" in name else f"{name}:22", allowed)
        elif field == "environment.pass":
            inside = _covered(name, allowed)
        else:
            inside = name in allowed
        if inside:
            return True
        if layer.restricts:
            self.notes.append(
                f"{field}: {name} (from {layer.name}) is above the managed ceiling and left out"
            )
            return False
        raise self._above(field, name, layer)

    def _keep(self, field: str, found: dict[str, list[str]]) -> None:
        names = sorted(found) if field == "isolation.degrade" else list(found)
        self.values[field] = tuple(names)
        where: dict[str, None] = {}
        for name in names:
            where.update(dict.fromkeys(found[name]))
            self.origins[f"{field}[{name}]"] = ", ".join(found[name])
        self.origins[field] = ", ".join(where) or self.layers[0].name

    def variables(self) -> None:
        """``environment.set``: a later layer's value replaces an earlier one's."""
        field = "environment.set"
        found: dict[str, str] = {}
        where: dict[str, list[str]] = {}
        for layer in self.layers:
            values = cast("dict[str, str]", layer.values.get(field, {}))
            if values and not layer.grants:
                self.ignored.setdefault(layer.name, []).append(field)
                continue
            found.update(values)
            where.update({name: [layer.name] for name in values})
        self._keep(field, where)
        self.values[field] = found

    def credentials(self) -> None:
        """``network.credentials``: the operator's; a later layer's replaces an earlier one's of the name."""
        field = "network.credentials"
        found: dict[str, Credential] = {}
        where: dict[str, list[str]] = {}
        for layer in self.layers:
            values = cast("tuple[Credential, ...]", layer.values.get(field, ()))
            if values and (not layer.grants or layer.restricts):
                self.ignored.setdefault(layer.name, []).append(field)
                continue
            for value in values:
                found[value.name] = value
                where[value.name] = [layer.name]
        self._keep(field, where)
        self.values[field] = tuple(found.values())

    def parent_proxy(self) -> None:
        """``network.parent-proxy``: the operator's, and only with its word."""
        field = "network.parent-proxy"
        chosen = self.layers[0]
        for layer in self.layers[1:]:
            if field not in layer.values:
                continue
            if not layer.grants or layer.restricts:
                self.ignored.setdefault(layer.name, []).append(field)
            else:
                chosen = layer
        self.values[field], self.origins[field] = chosen.values[field], chosen.name
        words = cast("tuple[str, ...]", self.values["isolation.degrade"])
        if self.values[field] is not None and "parent-proxy" not in words:
            raise chosen.source.error(
                field,
                "the proxy resolves and dials, so that the gate cannot check addresses any more",
                code="policy-word-missing",
                hint='say so with isolation.degrade = ["parent-proxy"], or leave the proxy out',
            )

    def requests(self) -> None:
        """``network.requests``: what every layer says, each to be met."""
        found: list[RequestRule] = []
        where: dict[str, list[str]] = {}
        for layer in self.layers:
            values = cast("dict[str, tuple[str, ...]]", layer.values.get("network.requests") or {})
            for host, allow in values.items():
                found.append(RequestRule(host=host, allow=allow, layer=layer.name))
                where.setdefault(host, []).append(layer.name)
        self._keep("network.requests", where)
        self.values["network.requests"] = tuple(found)
        bounds = self.bounds
        self.values["network.within"] = None if bounds is None else bounds.lists.get("network.within")

    def outward(self) -> None:
        """The mode that can hold what was said of hosts, and what has no effect in it."""
        held = [field for field in ("network.deny", "network.requests") if self.values[field]]
        if self.values["isolation.boundary"] == "none":
            self.notes += [f"{field} does not hold: there is no boundary" for field in held]
            return
        mode = self.values["network.mode"]
        if mode == "host" and held:
            names = ", ".join(f"{field} (from {self.origins[field]})" for field in held)
            self.notes.append(f"network.mode: {names} lowers host to full, since only the gate can hold it")
            mode = self.values["network.mode"] = "full"
        idle = {"none": _GATES, "host": (*_GATES, "network.publish"), "full": ("network.ask",)}
        for field in idle.get(str(mode), ()):
            if self.values[field]:
                origin = self.origins[field]
                self.notes.append(f"{field} (from {origin}) has no effect: network.mode is {mode}")
        passed = cast("tuple[str, ...]", self.values["environment.pass"])
        for credential in cast("tuple[Credential, ...]", self.values["network.credentials"]):
            if _covered(credential.name, passed):
                self.notes.append(
                    f"environment.pass names {credential.name}: inside it holds the placeholder all the same"
                )
            if mode == "allowlist":
                self._check_reach(credential)

    def _check_reach(self, credential: Credential) -> None:
        from casemate.policy import rules

        allowed = rules.parse_all(cast("tuple[str, ...]", self.values["network.allow"]))
        for host in credential.hosts:
            asked = rules.parse(host, deny=True)
            if not any(rules.overlap(rule, asked) for rule in allowed):
                self.notes.append(
                    f"network.credentials.{credential.name}: no rule of network.allow reaches {host}"
                )

    def restricted(self, field: str) -> None:
        """What all layers name together."""
        found: dict[str, list[str]] = {}
        for layer in self.layers:
            for name in cast("tuple[str, ...]", layer.values.get(field, ())):
                found.setdefault(name, []).append(layer.name)
        self._keep(field, found)

    def hide(self) -> None:
        """Take out what a hidden path covers, and what another entry says already."""
        deny = cast("tuple[str, ...]", self.values["filesystem.deny"])
        write = self._drop("filesystem.write", deny, "is hidden by a deny entry")
        read = self._drop("filesystem.read", deny, "is hidden by a deny entry")
        self.values["filesystem.write"] = _outermost(write)
        # A directory that can be written can be read as well.
        self.values["filesystem.read"] = tuple(
            path for path in _outermost(read) if not within_any(path, write)
        )

    def _drop(self, field: str, roots: tuple[str, ...], why: str) -> tuple[str, ...]:
        kept: list[str] = []
        for path in cast("tuple[str, ...]", self.values[field]):
            if within_any(path, roots):
                self.notes.append(f"{field}: {path} (from {self.origins[f'{field}[{path}]']}) {why}")
                del self.origins[f"{field}[{path}]"]
            else:
                kept.append(path)
        return tuple(kept)

    def summarise(self) -> None:
        """Say what a person must know of the result."""
        for layer in self.layers:
            fields = self.ignored.get(layer.name)
            if not fields:
                continue
            reason = "a project never grants these" if layer.grants else "its grants are not trusted"
            where = layer.source.file or layer.name
            note = f"{where}: {', '.join(fields)} would allow more and is not counted: {reason}"
            if not layer.grants and any(field not in _NEVER_PROJECT for field in fields):
                note += "; read the file, then run: casemate trust"
            self.notes.append(note)
        for name in _RESOURCES:
            field = f"resources.{name}"
            if self.values[field] is None and self.layers[0].values[field] is not None:
                self.notes.append(f"{field} is unlimited (from {self.origins[field]})")
        if self.values["network.mode"] == "host" and self.values["isolation.boundary"] != "none":
            self.notes.append(
                f"network.mode is host (from {self.origins['network.mode']}): "
                "the command reaches everything that this host reaches"
            )
        if self.values["filesystem.workspace"] == "direct" and self.values["isolation.boundary"] != "none":
            self.notes.append(
                f"filesystem.workspace is direct (from {self.origins['filesystem.workspace']}): "
                "what the command changes is changed at once, and stays"
            )


def _never(field: str, value: object) -> bool:
    """Whether a project never grants this, trusted or not."""
    most = {"network.mode": "allowlist", "filesystem.workspace": "write"}.get(field)
    return field in _NEVER_PROJECT or (most is not None and rank(field, value) > rank(field, most))


def _is_guarded(text: str) -> bool:
    from casemate.policy import rules

    return rules.is_guarded_grant(rules.parse(text))


def _reached(text: str, within: tuple[str, ...]) -> bool:
    """Whether one of the bounds takes in all that the rule allows."""
    from casemate.policy import rules

    rule = rules.parse(text)
    return any(rules.covers(outer, rule) for outer in rules.parse_all(within, bound=True))


def _outermost(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(
        name for name in names if not any(other != name and within_any(name, (other,)) for other in names)
    )


def _covered(name: str, allowed: tuple[str, ...]) -> bool:
    for pattern in allowed:
        if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
            return True
    return False


def _show(value: object) -> str:
    return "unlimited" if value is None else str(value)
