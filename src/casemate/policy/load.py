"""Finds the layers, checks them and merges them. This is what a run calls."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from casemate import settings
from casemate.errors import PolicyError
from casemate.policy import merge, paths, presets, resolve
from casemate.policy.model import PRESETS, Effective, FlagLayer, LayerInfo, RawPolicy
from casemate.policy.source import Layer, Source

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MAX_FILE", "load", "open_policy", "project_grants", "read_file", "standalone"]

#: No policy that a person wrote is larger.
MAX_FILE = 1 << 20

_FULL_ACCESS = (
    "FULL ACCESS: there is no boundary. The command has your files, your network and your rights, "
    "and no limit holds"
)


def load(
    *,
    workspace: str,
    environ: Mapping[str, str],
    preset: str | None = None,
    policy_file: str | None = None,
    flags: FlagLayer | None = None,
    places: settings.Places | None = None,
) -> Effective:
    """The policy for a command in ``workspace``.

    Layers, by weight: preset, project, user (or ``policy_file`` in its place), flags; above all of them
    the managed ceiling. Raises PolicyError: the workspace is refused, a file is malformed, or a layer asks
    for what it may not have.
    """
    where = settings.places(environ) if places is None else places
    root = paths.check_workspace(workspace, where)
    guard = paths.guard(where)
    managed = _managed(where, root, guard)
    name, clamp = _choose(preset, managed)
    full = name == "full-access"
    context = resolve.Context(workspace=root, guard=guard, base=root, full_access=full)

    layers = [Layer(source=Source(name="preset"), values=presets.values(name))]
    infos = [LayerInfo(name="preset", source=name, status="chosen" if preset else "default")]
    if managed is not None:
        infos.append(LayerInfo(name="managed", source=where.managed, status="bounds and restricts"))
        layers.append(_restrictions(managed))
    project, info = _project(root, where, context)
    if project is not None:
        layers.append(project)
        infos.append(info)
    operator = _operator(policy_file, where, context)
    if operator is not None:
        layers.append(operator)
        infos.append(LayerInfo(name=operator.name, source=operator.source.file, status="counts"))
    if preset == "read-only":
        layers = [layers[0], *(_without_writes(layer) for layer in layers[1:])]
    if flags is not None and (given := resolve.flags(flags)):
        base = os.path.join(root, flags.cwd)
        context = resolve.Context(workspace=root, guard=guard, base=base, full_access=full, must_exist=True)
        asked = Source(name="flags")
        layers.append(resolve.resolve(given, asked, context, grants=True, soft=resolve.soft(flags)))
        infos.append(LayerInfo(name="flags", source="", status="counts"))

    merged = merge.merge(layers, managed)
    notes = [*([_FULL_ACCESS] if merged.policy.isolation.boundary == "none" else []), *clamp]
    if operator is not None and paths.holds(root, os.path.realpath(operator.source.file)):
        notes.append(
            f"{operator.source.file} lies in the workspace: a command that runs there can change it "
            "for the next run"
        )
    return Effective(
        policy=merged.policy,
        workspace=root,
        preset=name,
        layers=tuple(infos),
        origins=merged.origins,
        notes=(*notes, *merged.notes),
    )


def _choose(preset: str | None, managed: merge.Bounds | None) -> tuple[str, list[str]]:
    """The preset's name, and what to say about it."""
    if managed is None or "presets" not in managed.lists:
        name = preset or presets.DEFAULT
        _check_full(name, managed)
        return name, []
    allowed = managed.lists["presets"]
    if preset is None:
        if presets.DEFAULT in allowed:
            return presets.DEFAULT, []
        if "read-only" in allowed:
            return "read-only", [f"the preset is read-only: {managed.source.file} allows no wider default"]
    elif preset in allowed:
        _check_full(preset, managed)
        return preset, []
    else:
        presets.values(preset)  # an unknown name is a different mistake
    raise PolicyError(
        f"the preset {preset or presets.DEFAULT} is not allowed by the administrator",
        code="policy-above-ceiling",
        hint=f"{managed.source.file} allows: {', '.join(allowed) or 'none'}",
        field="preset",
    )


def _check_full(name: str, managed: merge.Bounds | None) -> None:
    if name != "full-access" or managed is None:
        return
    for field, value in (("isolation.boundary", "none"), ("network.mode", "host")):
        ceiling = managed.scalars.get(field)
        if ceiling is not None and merge.rank(field, ceiling) < merge.rank(field, value):
            raise PolicyError(
                f"the preset full-access is not allowed by the administrator ({field} is at most {ceiling})",
                code="policy-above-ceiling",
                hint=f"the ceiling is set by {managed.source.file}",
                field="preset",
            )


def _without_writes(layer: Layer) -> Layer:
    """``layer`` as it counts below the chosen preset read-only: a file's writes do not outweigh it."""
    dropped = {
        field: value
        for field, value in layer.values.items()
        if value and (field == "filesystem.write" or (field == "filesystem.workspace" and value != "read"))
    }
    if not dropped or not layer.grants:
        return layer
    kept = {field: value for field, value in layer.values.items() if field not in dropped}
    note = f"{layer.source.file}: {', '.join(dropped)} gives way to the preset read-only"
    return Layer(
        source=layer.source,
        values=kept,
        grants=layer.grants,
        restricts=layer.restricts,
        notes=(*layer.notes, note),
        soft=layer.soft,
    )


# ---------------------------------------------------------------- layers


def _managed(where: settings.Places, workspace: str, guard: paths.Guard) -> merge.Bounds | None:
    data = read_file(where.managed, owned=True)
    if data is None:
        return None
    from casemate.policy import managed, parse

    source, file = parse.managed(data, where.managed)
    return managed.bounds(file, source, workspace=workspace, guard=guard)


def _restrictions(bounds: merge.Bounds) -> Layer:
    """What the administrator hides and protects, as a layer of its own."""
    return Layer(
        source=bounds.source,
        values={
            field: bounds.lists[field] for field in ("filesystem.deny", "filesystem.protect", "network.deny")
        },
        grants=False,
        restricts=True,
    )


def _operator(policy_file: str | None, where: settings.Places, context: resolve.Context) -> Layer | None:
    if policy_file is not None:
        source, raw = open_policy(policy_file, name="policy", owned=True)
    else:
        data = read_file(where.user, owned=True)
        if data is None:
            return None
        from casemate.policy import parse

        source, raw = parse.policy(data, where.user, name="user")
    return resolve.resolve(resolve.flatten(raw), source, context, grants=True)


def _project(
    workspace: str, where: settings.Places, context: resolve.Context
) -> tuple[Layer | None, LayerInfo]:
    file = settings.project_policy(workspace)
    info = LayerInfo(name="project", source=file, status="restrictions only")
    data = read_file(file, follow=False)
    if data is None:
        return None, info
    from casemate.policy import parse, trust

    source, raw = parse.policy(data, file, name="project")
    trusted = trust.is_trusted(where, workspace, data)
    if trusted:
        info = LayerInfo(name="project", source=file, status="trusted")
    context = resolve.Context(
        workspace=context.workspace,
        guard=context.guard,
        base=context.base,
        full_access=context.full_access,
        project=True,
    )
    return resolve.resolve(resolve.flatten(raw), source, context, grants=trusted, restricts=True), info


def standalone(
    what: str, *, workspace: str, environ: Mapping[str, str], places: settings.Places | None = None
) -> Effective:
    """The policy of one file over the default preset, or of one preset: no other layer takes part.

    This is what ``policy check`` and ``policy diff`` look at. Raises PolicyError.
    """
    where = settings.places(environ) if places is None else places
    root = paths.check_workspace(workspace, where)
    preset = what if what in PRESETS else presets.DEFAULT
    layers = [Layer(source=Source(name="preset"), values=presets.values(preset))]
    infos = [LayerInfo(name="preset", source=preset, status="chosen" if preset == what else "default")]
    if preset != what:
        context = resolve.Context(workspace=root, guard=paths.guard(where), base=root)
        source, raw = open_policy(what, name="policy")
        layers.append(resolve.resolve(resolve.flatten(raw), source, context, grants=True))
        infos.append(LayerInfo(name="policy", source=what, status="counts"))
    merged = merge.merge(layers, None)
    return Effective(
        policy=merged.policy,
        workspace=root,
        preset=preset,
        layers=tuple(infos),
        origins=merged.origins,
        notes=merged.notes,
    )


def project_grants(
    data: bytes, *, workspace: str, environ: Mapping[str, str], places: settings.Places | None = None
) -> dict[str, object]:
    """What a project file of this content is granted once it is trusted, by field. Raises PolicyError."""
    from casemate.policy import parse

    where = settings.places(environ) if places is None else places
    root = paths.check_workspace(workspace, where)
    context = resolve.Context(workspace=root, guard=paths.guard(where), base=root, project=True)
    source, raw = parse.policy(data, settings.project_policy(root), name="project")
    layer = resolve.resolve(resolve.flatten(raw), source, context, grants=True, restricts=True)
    return merge.widening(Layer(source=Source(name="preset"), values=presets.values(presets.DEFAULT)), layer)


def open_policy(file: str, *, name: str, owned: bool = False) -> tuple[Source, RawPolicy]:
    """Read and parse a policy file that must exist. Raises PolicyError."""
    data = read_file(file, owned=owned)
    if data is None:
        raise PolicyError(f"{file}: no such file", code="policy-missing", file=file)
    from casemate.policy import parse

    return parse.policy(data, file, name=name)


# ---------------------------------------------------------------- files


def read_file(file: str, *, follow: bool = True, owned: bool = False) -> bytes | None:
    """The content of a policy file, or None if there is none. Raises PolicyError; never blocks.

    ``owned``: a file that grants must belong to root or the caller and be writable by nobody else.
    ``follow=False``: the file lies where a sandboxed command may have put a link.
    """
    if "\0" in file:
        raise PolicyError("a file's name cannot hold a NUL byte", field="policy")
    # Non-blocking, or a FIFO would hold the run until somebody writes to it.
    mode = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        fd = os.open(file, mode if follow else mode | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(file, error, follow) from None
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise PolicyError(f"{file}: is not a regular file", code="policy-unreadable", file=file)
        if owned:
            _check_owner(file, facts)
        if facts.st_size > MAX_FILE:
            raise _too_large(file)
        data = b""
        while chunk := os.read(fd, MAX_FILE + 1 - len(data)):
            data += chunk
            if len(data) > MAX_FILE:
                raise _too_large(file)
        return data
    except OSError as error:
        raise _unreadable(file, error, follow) from None
    finally:
        os.close(fd)


def _check_owner(file: str, facts: os.stat_result) -> None:
    if facts.st_uid not in (0, os.geteuid()):
        raise PolicyError(
            f"{file}: belongs to uid {facts.st_uid}, and only root or you may grant",
            code="policy-owner",
            hint=f"chown it to yourself after reading it: {file}",
            file=file,
        )
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PolicyError(
            f"{file}: others can write it, so it cannot grant anything",
            code="policy-owner",
            hint=f"chmod go-w {file}",
            file=file,
        )


def _too_large(file: str) -> PolicyError:
    return PolicyError(f"{file}: is larger than 1 MiB", code="policy-too-large", file=file)


def _unreadable(file: str, error: OSError, follow: bool) -> PolicyError:
    import errno

    if error.errno == errno.ELOOP and not follow:
        reason = "is a symbolic link, which a project's policy cannot be"
    else:
        reason = f"cannot be read: {error.strerror}"
    return PolicyError(f"{file}: {reason}", code="policy-unreadable", file=file)
