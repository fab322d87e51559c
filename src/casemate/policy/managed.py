"""The administrator's file into bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from msgspec import UNSET

from casemate.policy import paths, resolve
from casemate.policy.merge import Bounds, rank
from casemate.policy.model import (
    Ceiling,
    ManagedFile,
    RawEnvironment,
    RawFilesystem,
    RawIsolation,
    RawNetwork,
    RawPolicy,
)

if TYPE_CHECKING:
    from casemate.policy.source import Source

__all__ = ["bounds"]


def bounds(file: ManagedFile, source: Source, *, workspace: str, guard: paths.Guard) -> Bounds:
    """Resolve the ceiling and the restrictions. Raises PolicyError with file, line and field."""
    ceiling = Ceiling() if file.ceiling is UNSET else file.ceiling
    context = resolve.Context(workspace=workspace, guard=guard, base=workspace, full_access=True)
    lists: dict[str, tuple[str, ...]] = {}
    for name in ("read", "write"):
        roots = getattr(ceiling, name)
        if roots is not UNSET:
            lists[f"filesystem.{name}"] = _roots(roots, f"ceiling.{name}", source, context)
    if ceiling.presets is not UNSET:
        lists["presets"] = ceiling.presets
    scalars: dict[str, object] = {}
    if ceiling.network is not UNSET:
        scalars["network.mode"] = max(
            ceiling.network, key=lambda mode: rank("network.mode", mode), default="none"
        )
    if ceiling.network_allow is not UNSET:
        lists["network.within"] = _within(ceiling.network_allow, source, context)
        # Nothing holds a host's name in a wider mode.
        if rank("network.mode", scalars.get("network.mode", "host")) > rank("network.mode", "allowlist"):
            scalars["network.mode"] = "allowlist"
    if ceiling.sockets is not UNSET:
        lists["network.sockets"] = _roots(ceiling.sockets, "ceiling.sockets", source, context)
    if ceiling.boundary is not UNSET:
        scalars["isolation.boundary"] = ceiling.boundary
    if ceiling.workspace is not UNSET:
        scalars["filesystem.workspace"] = ceiling.workspace
    if ceiling.tools is not UNSET:
        scalars["filesystem.tools"] = ceiling.tools
    # What is left has the same form as in any policy, so it is checked in the same way.
    same = RawPolicy(
        version=1,
        filesystem=RawFilesystem(cache=ceiling.cache),
        resources=ceiling.resources,
        environment=RawEnvironment(pass_=ceiling.pass_),
        isolation=RawIsolation(degrade=ceiling.degrade),
    )
    for field, value in _resolved(same, source, context, "ceiling.").items():
        if isinstance(value, tuple):
            lists[field] = value
        else:
            scalars[field] = value
    lists |= {"filesystem.deny": (), "filesystem.protect": (), "network.deny": ()}
    files, network = RawFilesystem(), RawNetwork()
    if file.filesystem is not UNSET:
        files = RawFilesystem(deny=file.filesystem.deny, protect=file.filesystem.protect)
    if file.network is not UNSET:
        network = RawNetwork(deny=file.network.deny)
    own = RawPolicy(version=1, filesystem=files, network=network)
    for field, value in _resolved(own, source, context, "").items():
        lists[field] = cast("tuple[str, ...]", value)
    return Bounds(source=source, scalars=scalars, lists=lists)


def _resolved(raw: RawPolicy, source: Source, context: resolve.Context, prefix: str) -> dict[str, object]:
    # `resources.memory` stands at `ceiling.resources.memory`, but `environment.pass` at `ceiling.pass`.
    def shown(field: str) -> str:
        return prefix + (field if field.startswith("resources.") else field.partition(".")[2])

    found: dict[str, object] = {}
    for field, value in resolve.flatten(raw).items():
        if not prefix:
            found |= resolve.resolve({field: value}, source, context, grants=True).values
            continue
        try:
            found[field] = resolve.check(field, value, context)
        except ValueError as error:
            raise source.error(shown(field), str(error)) from None
    return found


def _within(texts: tuple[str, ...], source: Source, context: resolve.Context) -> tuple[str, ...]:
    try:
        return cast("tuple[str, ...]", resolve.check("network.within", texts, context))
    except ValueError as error:
        raise source.error("ceiling.network-allow", str(error)) from None


def _roots(roots: tuple[str, ...], field: str, source: Source, context: resolve.Context) -> tuple[str, ...]:
    # A root may be as broad as the administrator likes: it grants nothing by itself.
    found: list[str] = []
    for text in roots:
        try:
            found.append(paths.expand(text, base=context.base, home=context.guard.home))
        except ValueError as error:
            raise source.error(field, f"{text!a}: {error}") from None
    return tuple(found)
