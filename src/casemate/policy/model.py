"""The policy's types: closed, frozen, and in two forms.

``RawPolicy`` is a file as a person wrote it: every field may be missing (``UNSET``), sizes and paths are
text. ``Policy`` is what comes out of ``load``: every field has a value, paths are absolute and free of
links, sizes are bytes, times are seconds, and ``None`` is "unlimited". An unknown field is an error
in both.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

__all__ = [
    "CACHES",
    "DEGRADE_WORDS",
    "PRESETS",
    "Boundary",
    "Ceiling",
    "Credential",
    "Effective",
    "Environment",
    "Filesystem",
    "FlagLayer",
    "Isolation",
    "LayerInfo",
    "ManagedFile",
    "ManagedFilesystem",
    "ManagedNetwork",
    "Network",
    "NetworkMode",
    "Policy",
    "RawCredential",
    "RawEnvironment",
    "RawFilesystem",
    "RawIsolation",
    "RawNetwork",
    "RawPolicy",
    "RawResources",
    "RequestRule",
    "Resources",
    "Scope",
    "WorkspaceMode",
    "degraded",
]

WorkspaceMode = Literal["write", "read", "direct"]
NetworkMode = Literal["none", "allowlist", "full", "host"]
Boundary = Literal["process", "none"]
Scope = Literal["auto", "tree"]

#: Presets by name, and what each is for.
PRESETS: dict[str, str] = {
    "read-only": "the workspace can be read and not changed; no network",
    "workspace-write": "the workspace is a copy-on-write view, applied at the end; no network (the default)",
    "full-access": "no boundary at all: the command has the caller's files, network and rights",
}

#: The closed list of protections that can be given up, each by its own word, and what that opens.
DEGRADE_WORDS: dict[str, str] = {
    "memfd-exec": "programs may run from anonymous memory, and no file need exist for what runs",
    "ptrace": "processes of the sandbox may trace one another (debuggers, strace)",
    "nested-userns": "the command may make user namespaces of its own (nested sandboxes, Chromium)",
    "landlock": "runs without the Landlock layer where the kernel has none; the other layers stay",
    "parent-proxy": "a proxy resolves names and dials in the gate's place, so no address is checked here",
}

#: Package managers whose cache can be kept per workspace.
CACHES: tuple[str, ...] = ("pip", "npm", "cargo", "uv", "yarn", "pnpm", "go", "maven", "gradle", "ccache")


class _Closed(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True, rename="kebab"):
    """What every part of a file is: closed, frozen, with keys in kebab-case."""


class _Resolved(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True, rename="kebab"):
    """What every part of the resolved policy is: the same, and printed in full."""


# ---------------------------------------------------------------- as written

_Size = int | str
_Count = int | str
_Duration = int | float | str
_Names = tuple[str, ...]


class RawFilesystem(_Closed, frozen=True, kw_only=True):
    """What the command sees and what it may change."""

    workspace: Annotated[
        WorkspaceMode | UnsetType,
        Meta(
            description="`write`: a copy-on-write view whose changes are applied at the end. "
            "`read`: it cannot be changed. `direct`: changes are made at once, for servers and watchers, and "
            "what protects names refuses instead of holding back; never a project's to choose."
        ),
    ] = UNSET
    read: Annotated[
        _Names | UnsetType,
        Meta(description="More paths that can be read. Relative ones start at the workspace, `~/` at home."),
    ] = UNSET
    write: Annotated[
        _Names | UnsetType,
        Meta(description="More directories that can be changed; each is a view, applied at the end."),
    ] = UNSET
    deny: Annotated[
        _Names | UnsetType,
        Meta(description="Paths that are hidden, whatever else names them. A restriction."),
    ] = UNSET
    tools: Annotated[
        bool | UnsetType,
        Meta(description="Whether the bin and lib of tool directories found on PATH can be read."),
    ] = UNSET
    cache: Annotated[
        tuple[str, ...] | UnsetType,
        Meta(description="Package managers whose cache is kept between runs, per workspace."),
    ] = UNSET
    protect: Annotated[
        _Names | UnsetType,
        Meta(description="More names or patterns, at any depth, whose changes are held back. A restriction."),
    ] = UNSET


class RawCredential(_Closed, frozen=True, kw_only=True):
    """A secret outside: the variable has a placeholder, and the gate puts the value into requests."""

    hosts: Annotated[
        _Names,
        Meta(description="The hosts that get the value: `api.example.org`, or `*.example.org`. No ports."),
    ]
    from_: Annotated[
        str | UnsetType,
        Meta(description="`env`: the variable of the same name (the default), `env:OTHER`, `file:/path`."),
    ] = msgspec.field(default=UNSET, name="from")
    as_: Annotated[
        str | UnsetType,
        Meta(description="Its place: `bearer` (the default), `basic[:USER]`, `header:NAME` or `query:KEY`."),
    ] = msgspec.field(default=UNSET, name="as")
    add: Annotated[
        bool | UnsetType,
        Meta(description="Also add it to requests that bring none of their own. Default: only replace."),
    ] = UNSET


class RawNetwork(_Closed, frozen=True, kw_only=True):
    """What the command reaches beside its own loopback."""

    mode: Annotated[
        str | UnsetType,
        Meta(
            description="`none`: nothing. `allowlist`: what `allow` names. `full`: every public address, "
            "through the gate. `host`: the host's own network, which counts as degraded."
        ),
    ] = UNSET
    allow: Annotated[
        _Names | UnsetType,
        Meta(description="Hosts that can be reached: `HOST`, `*.HOST`, an address or a net, with `:PORT`."),
    ] = UNSET
    deny: Annotated[
        _Names | UnsetType,
        Meta(description="Hosts that cannot, whatever allows them; no port is every port. A restriction."),
    ] = UNSET
    ask: Annotated[
        bool | UnsetType,
        Meta(description="Ask about hosts that no rule names, once for each host and port. No answer is no."),
    ] = UNSET
    parent_proxy: Annotated[
        str | UnsetType,
        Meta(description="A proxy that everything goes through: `http://HOST:PORT`. Needs its degrade word."),
    ] = UNSET
    publish: Annotated[
        tuple[int | str, ...] | UnsetType,
        Meta(description="Ports inside that the host's loopback reaches: `3000`, or `80:3000` (host first)."),
    ] = UNSET
    sockets: Annotated[
        _Names | UnsetType,
        Meta(description="Unix sockets of the host that can be connected to, by path."),
    ] = UNSET
    ssh_agent: Annotated[
        _Names | UnsetType,
        Meta(description="Hosts to log in to with the keys of your ssh-agent; port 22 of each is allowed."),
    ] = UNSET
    credentials: Annotated[
        dict[str, RawCredential] | UnsetType,
        Meta(description="Secrets that the gate holds, by the variable that stands for them inside."),
    ] = UNSET
    requests: Annotated[
        dict[str, _Names] | UnsetType,
        Meta(description="The only HTTP requests that a host gets: `METHOD /path`. A restriction."),
    ] = UNSET


class RawResources(_Closed, frozen=True, kw_only=True):
    """What the command may use. Every limit is on unless it says `unlimited`.

    Sizes are bytes, or text such as `512M` or `2G` (powers of 1024); durations are seconds, or text such as
    `90s`, `10m` or `1h30m`.
    """

    memory: Annotated[_Size | UnsetType, Meta(description="Memory of the whole process tree.")] = UNSET
    cpu: Annotated[
        int | float | str | UnsetType,
        Meta(description="Processors' worth of time, such as `1.5`; `unlimited`: all there are."),
    ] = UNSET
    pids: Annotated[_Count | UnsetType, Meta(description="Processes and threads at one time.")] = UNSET
    open_files: Annotated[_Count | UnsetType, Meta(description="Open files of one process.")] = UNSET
    file_size: Annotated[_Size | UnsetType, Meta(description="Size of one file the command writes.")] = UNSET
    disk: Annotated[_Size | UnsetType, Meta(description="What the command may write in all.")] = UNSET
    timeout: Annotated[_Duration | UnsetType, Meta(description="Wall time; then the tree is killed.")] = UNSET
    output: Annotated[_Size | UnsetType, Meta(description="Bytes on stdout and stderr together.")] = UNSET
    scope: Annotated[
        Scope | UnsetType,
        Meta(
            description="`auto`: a limit on the tree where the host can, else per process or watched. "
            "`tree`: refuse to run where the host cannot."
        ),
    ] = UNSET


class RawEnvironment(_Closed, frozen=True, kw_only=True):
    """Variables beside the fixed short list."""

    pass_: Annotated[
        _Names | UnsetType,
        Meta(description="The caller's variables to let through: names, or patterns such as `MYAPP_*`."),
    ] = msgspec.field(default=UNSET, name="pass")
    set: Annotated[
        dict[str, str] | UnsetType,
        Meta(description="Variables with the value given here."),
    ] = UNSET


class RawIsolation(_Closed, frozen=True, kw_only=True):
    """The boundary, and which protections may be missing."""

    boundary: Annotated[
        Literal["auto", "process", "none"] | UnsetType,
        Meta(description="`process`, or `auto` for the strongest there is; `none` only with `full-access`."),
    ] = UNSET
    degrade: Annotated[
        _Names | UnsetType,
        Meta(description="Protections given up on purpose, one word each; every result shows them."),
    ] = UNSET


class RawPolicy(_Closed, frozen=True, kw_only=True):
    """A policy file: of a user, of a project, or named by `--policy`."""

    version: Annotated[Literal[1], Meta(description="The format's version.")]
    filesystem: RawFilesystem | UnsetType = UNSET
    network: RawNetwork | UnsetType = UNSET
    resources: RawResources | UnsetType = UNSET
    environment: RawEnvironment | UnsetType = UNSET
    isolation: RawIsolation | UnsetType = UNSET


class Ceiling(_Closed, frozen=True, kw_only=True):
    """The most that anybody may be granted. A field left out sets no ceiling; an empty list allows none."""

    presets: Annotated[
        tuple[Literal["read-only", "workspace-write", "full-access"], ...] | UnsetType,
        Meta(description="Presets that may be chosen."),
    ] = UNSET
    workspace: Annotated[
        WorkspaceMode | UnsetType, Meta(description="`read`: never changed. `write`: never directly.")
    ] = UNSET
    read: Annotated[_Names | UnsetType, Meta(description="Directories below which `read` may reach.")] = UNSET
    write: Annotated[
        _Names | UnsetType, Meta(description="Directories below which `write` may reach.")
    ] = UNSET
    tools: Annotated[bool | UnsetType, Meta(description="`false`: no tool directories.")] = UNSET
    cache: Annotated[_Names | UnsetType, Meta(description="Caches that may be kept.")] = UNSET
    network: Annotated[
        tuple[NetworkMode, ...] | UnsetType,
        Meta(description="Network modes that may be chosen; the widest of them is the ceiling."),
    ] = UNSET
    network_allow: Annotated[
        _Names | UnsetType,
        Meta(description="What `allow` may name at most. It makes `allowlist` the widest mode."),
    ] = UNSET
    sockets: Annotated[_Names | UnsetType, Meta(description="Unix sockets that may be named.")] = UNSET
    pass_: Annotated[
        _Names | UnsetType,
        Meta(description="Variables that may be let through."),
    ] = msgspec.field(default=UNSET, name="pass")
    degrade: Annotated[_Names | UnsetType, Meta(description="Degrade words that may be used.")] = UNSET
    boundary: Annotated[
        Boundary | UnsetType, Meta(description="The weakest boundary allowed; `process` bars `none`.")
    ] = UNSET
    resources: Annotated[
        RawResources | UnsetType,
        Meta(description='The highest value of each limit; `scope = "tree"` demands it.'),
    ] = UNSET


class ManagedFilesystem(_Closed, frozen=True, kw_only=True):
    """What the administrator hides and protects on top of everybody else."""

    deny: Annotated[_Names | UnsetType, Meta(description="Paths that are hidden.")] = UNSET
    protect: Annotated[_Names | UnsetType, Meta(description="More protected names.")] = UNSET


class ManagedNetwork(_Closed, frozen=True, kw_only=True):
    """What the administrator keeps out of reach of everybody."""

    deny: Annotated[_Names | UnsetType, Meta(description="Hosts that cannot be reached.")] = UNSET


class ManagedFile(_Closed, frozen=True, kw_only=True):
    """The administrator's file. It grants nothing: it bounds what others grant, and restricts."""

    version: Annotated[Literal[1], Meta(description="The format's version.")]
    ceiling: Ceiling | UnsetType = UNSET
    filesystem: ManagedFilesystem | UnsetType = UNSET
    network: ManagedNetwork | UnsetType = UNSET


class FlagLayer(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line (or the API's caller) asks for; text is as in a file.

    Relative paths start at ``cwd``, or at the workspace when that is empty. Tuples add to what the files
    give; a scalar replaces it. ``allow`` without ``network`` makes ``none`` an ``allowlist``.
    """

    cwd: str = ""
    workspace: str | UnsetType = UNSET
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    tools: bool | UnsetType = UNSET
    cache: tuple[str, ...] = ()
    protect: tuple[str, ...] = ()
    network: str | UnsetType = UNSET
    allow: tuple[str, ...] = ()
    deny_host: tuple[str, ...] = ()
    ask: bool | UnsetType = UNSET
    parent_proxy: str | UnsetType = UNSET
    publish: tuple[int | str, ...] = ()
    sockets: tuple[str, ...] = ()
    ssh_agent: tuple[str, ...] = ()
    credentials: dict[str, RawCredential] = msgspec.field(default_factory=dict[str, RawCredential])
    requests: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict[str, tuple[str, ...]])
    memory: int | str | UnsetType = UNSET
    cpu: int | float | str | UnsetType = UNSET
    pids: int | str | UnsetType = UNSET
    open_files: int | str | UnsetType = UNSET
    file_size: int | str | UnsetType = UNSET
    disk: int | str | UnsetType = UNSET
    timeout: int | float | str | UnsetType = UNSET
    output: int | str | UnsetType = UNSET
    scope: str | UnsetType = UNSET
    pass_: tuple[str, ...] = ()
    set: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    boundary: str | UnsetType = UNSET
    degrade: tuple[str, ...] = ()


# ---------------------------------------------------------------- resolved


class Filesystem(_Resolved, frozen=True, kw_only=True):
    """Absolute paths without links. ``read``, ``write`` and ``deny`` never overlap: deny has won already."""

    workspace: WorkspaceMode
    read: tuple[str, ...]
    write: tuple[str, ...]
    deny: tuple[str, ...]
    tools: bool
    cache: tuple[str, ...]
    protect: tuple[str, ...]


class Credential(_Resolved, frozen=True, kw_only=True):
    """A secret outside. ``hosts`` are names or ``*.name``; ``source`` is ``env:NAME`` or ``file:/path``;
    ``as`` is ``bearer``, ``basic``, ``basic:USER``, ``header:NAME`` or ``query:KEY``.
    """

    name: str
    hosts: tuple[str, ...]
    source: str
    as_: str = msgspec.field(name="as")
    add: bool

    @property
    def kind(self) -> str:
        """``bearer``, ``basic``, ``header`` or ``query``."""
        return self.as_.partition(":")[0]

    @property
    def argument(self) -> str:
        """The user of ``basic``, the name of ``header``, the key of ``query``; else ``""``."""
        return self.as_.partition(":")[2]


class RequestRule(_Resolved, frozen=True, kw_only=True):
    """The only requests that ``host`` (a name or ``*.name``) gets, says ``layer``; each rule must be met."""

    host: str
    allow: tuple[str, ...]
    layer: str


class Network(_Resolved, frozen=True, kw_only=True):
    """``none`` is a network namespace with a loopback of its own; ``host`` is the host's.

    ``allow`` and ``deny`` are rules in canonical text (``casemate.policy.rules``), ``within`` the
    administrator's bound of what may be allowed, None for no bound. ``publish`` is ``HOST-PORT:PORT-INSIDE``,
    ``sockets`` absolute paths without links, ``ssh_agent`` hosts (or ``host:port``) that are allowed, too.
    """

    mode: NetworkMode
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    ask: bool = False
    parent_proxy: str | None = None
    publish: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()
    ssh_agent: tuple[str, ...] = ()
    credentials: tuple[Credential, ...] = ()
    requests: tuple[RequestRule, ...] = ()
    within: tuple[str, ...] | None = None


class Resources(_Resolved, frozen=True, kw_only=True):
    """Bytes, counts and seconds; ``None`` is unlimited (for ``cpu``: every processor there is)."""

    memory: int | None
    cpu: float | None
    pids: int | None
    open_files: int | None
    file_size: int | None
    disk: int | None
    timeout: float | None
    output: int | None
    scope: Scope


class Environment(_Resolved, frozen=True, kw_only=True):
    """``pass`` holds names and ``PREFIX_*`` patterns; ``set`` holds what wins over everything passed."""

    pass_: tuple[str, ...] = msgspec.field(name="pass")
    set: dict[str, str]


class Isolation(_Resolved, frozen=True, kw_only=True):
    """``boundary`` has been decided: ``auto`` is gone. ``degrade`` is sorted and free of doubles."""

    boundary: Boundary
    degrade: tuple[str, ...]


class Policy(_Resolved, frozen=True, kw_only=True):
    """The policy of one sandbox, every field decided."""

    version: Literal[1] = 1
    filesystem: Filesystem
    network: Network
    resources: Resources
    environment: Environment
    isolation: Isolation


class LayerInfo(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """One layer that took part. ``status`` says what counted of it."""

    name: str
    source: str
    status: str


class Effective(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """A policy and where it came from.

    ``origins`` maps a field path (``resources.memory``) to the layers that decided it, and, for the entries
    of a list, ``filesystem.read[/srv/ref]`` to the layers that named it. ``notes`` is what a person must
    see.
    """

    policy: Policy
    workspace: str
    preset: str
    layers: tuple[LayerInfo, ...]
    origins: dict[str, str]
    notes: tuple[str, ...]


def degraded(policy: Policy) -> tuple[str, ...]:
    """Everything this policy gives up, as the words that ``doctor`` and every result show."""
    words: list[str] = list(policy.isolation.degrade)
    if policy.network.mode == "host":
        words.append("network = host")
    if policy.isolation.boundary == "none":
        words.append("boundary = none")
    return tuple(words)
