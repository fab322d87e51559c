"""From a policy and facts about the host to the specification of one sandbox: no I/O, no surprise.

The same input gives the same ``Spec``, whose digest keys templates and waiting sandboxes.
"""

from __future__ import annotations

import msgspec

from casemate.errors import ProtectionUnavailable
from casemate.isolation.process.spec import Spec, View

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from casemate.isolation.process.spec import Direct
    from casemate.policy.model import Policy

__all__ = ["Facts", "Plan", "digest", "plan"]

#: HOME inside, and the name that the sandbox's uid has there.
HOME = "/home/sandbox"

_TEMPORARY = ("/tmp/", "/var/tmp/")
_MIN_SCRATCH = 64 << 20


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner has to know about the host and the case.

    ``layout`` is what the top of the host's file system looks like: name -> link target, or ``""`` for a
    directory. ``loop`` says whether a file system in a file can be had, ``controllers`` are those in which
    groups can be made. ``owners`` maps each view's source to the uid and gid that own it, ``files`` are
    those of them that are no directories. ``covers`` maps files of the system to what they hold inside.
    ``gate_ports`` is None where no gate is wanted, else what it listens on if not all ports can be had.
    ``sockets`` are unix sockets of the host to be seen at their own place. ``direct`` is used where the
    policy wants the workspace changed directly. ``private`` are places of the caller's own, resolved, which
    may lie below what ``layout`` shows. Sizes are bytes.
    """

    rootless: bool
    loop: bool
    layout: dict[str, str]
    memory_total: int
    processors: int
    controllers: frozenset[str]
    controller_reasons: dict[str, str]
    landlock: int
    owners: dict[str, tuple[int, int]]
    files: frozenset[str]
    tools: tuple[str, ...]
    extra_read: tuple[str, ...]
    caches: tuple[tuple[str, str], ...]
    home_files: dict[str, str]
    covers: dict[str, str]
    gate_ports: tuple[int, ...] | None
    sockets: tuple[str, ...]
    devices: tuple[str, ...]
    direct: Direct | None = None
    private: tuple[str, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A specification and what a person should know about it.

    ``scopes`` says for each limit how it is enforced: ``tree`` (control group or file system), ``process``
    (rlimit) or ``watched`` (the host measures and kills). ``watch`` holds what has to be watched, in bytes.
    """

    spec: Spec
    scopes: dict[str, str]
    watch: dict[str, int]
    degraded: tuple[str, ...]
    digest: str
    """Names the specification: same digest, same sandbox but for its command."""


def plan(policy: Policy, workspace: str, facts: Facts, keep_base: str) -> Plan:
    """Decide the whole sandbox.

    ``keep_base`` is the directory of this workspace's runs. Raises ProtectionUnavailable with the
    protection, what it needs and what was found.
    """
    scopes: dict[str, str] = {}
    watch: dict[str, int] = {}
    resources = policy.resources
    rlimits = {"CORE": 0}
    if resources.open_files is not None:
        rlimits["NOFILE"] = resources.open_files
        scopes["open-files"] = "process"
    _limit_tree(policy, facts, rlimits, scopes, watch)
    scratch, scratch_image, tops_on_disk = _disk(policy, facts, scopes, watch)
    sizes = [size for size in (resources.file_size, watch.get("disk")) if size is not None]
    if sizes:
        rlimits["FSIZE"] = min(sizes)
    if resources.file_size is not None:
        scopes["file-size"] = "process"
    if not facts.landlock and "landlock" not in policy.isolation.degrade:
        raise ProtectionUnavailable(
            "this kernel has no Landlock",
            hint='boot with lsm=landlock,… or give it up with isolation.degrade = ["landlock"]',
            protection="landlock",
            needed="ABI 1 (Linux 5.13) or later",
            found="none",
        )
    if facts.caches and "disk" in scopes:
        scopes["disk"] += ", without caches"
    direct = _direct(policy, facts, scopes, watch, rlimits)
    views = _views(policy, workspace, facts)
    root, hide = _root(policy, facts, views)
    words, degraded = _degraded(policy)
    spec = Spec(
        root=root,
        views=views,
        home=dict(facts.home_files),
        binds=[*facts.caches],
        scratch=scratch,
        keep_base=keep_base,
        tops_on_disk=tops_on_disk,
        scratch_image=scratch_image,
        rlimits=rlimits,
        memory=resources.memory if "memory" in facts.controllers else None,
        pids=resources.pids + 1 if resources.pids and "pids" in facts.controllers else None,
        cpu=resources.cpu if "cpu" in facts.controllers and (resources.cpu or 0) < facts.processors else None,
        words=words,
        landlock=facts.landlock > 0 and "nested-userns" not in policy.isolation.degrade,
        memfd_exec="memfd-exec" in policy.isolation.degrade,
        network_host=policy.network.mode == "host",
        require_group=resources.scope == "tree",
        devices=[*facts.devices],
        hide=hide,
        capture=None if facts.gate_ports is None else [*facts.gate_ports],
        sockets=[*facts.sockets],
        direct=direct,
    )
    return Plan(spec=spec, scopes=scopes, watch=watch, degraded=tuple(degraded), digest=digest(spec))


def _direct(
    policy: Policy, facts: Facts, scopes: dict[str, str], watch: dict[str, int], rlimits: dict[str, int]
) -> Direct | None:
    """How the workspace is changed directly, if it is. It lies on the host's disk: its growth is watched."""
    if policy.filesystem.workspace != "direct":
        return None
    if "nested-userns" in policy.isolation.degrade:
        raise ProtectionUnavailable(
            "a workspace that is changed directly and nested-userns do not go together",
            hint="paths are looked up as in this sandbox, not as in one within it; leave out one of them",
            protection="direct workspace",
            needed="no mount and no root directory but the sandbox's own",
            found="the word nested-userns",
        )
    if facts.direct is None:
        raise ProtectionUnavailable(
            "this kernel cannot have the workspace changed directly",
            hint='use filesystem.workspace = "write", whose changes are applied at the end',
            protection="direct workspace",
            needed="seccomp notification that waits for the answer (Linux 5.19)",
            found="none",
        )
    if "NPROC" in rlimits and not facts.rootless:
        rlimits["NPROC"] += 1  # the broker has the sandbox's uid
    limit = policy.resources.disk
    if limit is not None:
        if "disk" not in watch:
            scopes["disk"] += ", the workspace watched"
        watch["disk"] = limit
        rlimits["FSIZE"] = min(limit, rlimits.get("FSIZE", limit))
    return facts.direct


def _degraded(policy: Policy) -> tuple[list[str], list[str]]:
    """The words that the filter knows, and all that a person should know is given up."""
    given_up = policy.isolation.degrade
    words = [word for word in given_up if word in ("memfd-exec", "nested-userns", "ptrace")]
    degraded = [*given_up]
    if "nested-userns" in given_up and "landlock" not in degraded:
        degraded.append("landlock")  # it refuses every mount, and nested sandboxes make some
    if policy.network.mode == "host":
        words.append("network-host")
        degraded.append("network = host")
    return words, degraded


def digest(spec: Spec) -> str:
    """What names a specification."""
    from _blake2 import blake2b

    text = repr(sorted(spec.as_dict().items()))
    return blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def _limit_tree(
    policy: Policy, facts: Facts, rlimits: dict[str, int], scopes: dict[str, str], watch: dict[str, int]
) -> None:
    """Memory, processes and processors: by control group, else the next scope that there is."""
    resources = policy.resources
    cpu = resources.cpu
    if cpu is not None and cpu >= facts.processors:
        scopes["cpu"] = "tree"  # nobody can use more than there are
        cpu = None
    asked = {"memory": resources.memory, "pids": resources.pids, "cpu": cpu}
    for name, value in asked.items():
        if value is None:
            continue
        if name in facts.controllers:
            scopes[name] = "tree"
            continue
        reason = facts.controller_reasons.get(name, "the controller is not there")
        if resources.scope == "tree" or name == "cpu":
            raise ProtectionUnavailable(
                f"the {name} limit cannot hold for the whole process tree: {reason}",
                hint=(
                    "leave resources.cpu out, or run as root or in a delegated systemd scope"
                    if name == "cpu"
                    else 'use scope = "auto", run as root, or in a delegated systemd scope'
                ),
                protection=f"resources.{name}",
                needed=f"a writable {name} control group",
                found=reason,
            )
        scopes[name] = "watched" if name == "memory" else "process"
    if resources.pids is not None:
        # As root each sandbox has a uid of its own, rootless a user namespace of its own: the count is
        # this sandbox's alone (per user namespace since Linux 5.14). Init is one more; and one more again
        # where there is a group, which has to bite first, since it alone says that it did.
        rlimits["NPROC"] = resources.pids + (2 if "pids" in facts.controllers else 1)
    if resources.memory is not None and scopes.get("memory") == "watched":
        rlimits["DATA"] = resources.memory
        watch["memory"] = resources.memory


def _disk(
    policy: Policy, facts: Facts, scopes: dict[str, str], watch: dict[str, int]
) -> tuple[int, bool, bool]:
    """The size of the private file system, whether it lies in a file, and whether the tops lie beside it.

    A tmpfs holds the limit exactly and costs nothing to throw away, but is memory: it takes the tops
    only up to a quarter of the machine's. Above that root gets a file system in a file. Rootless tops
    must survive a kill of the launcher, which a mount of an unprivileged namespace does not, so they are
    directories and watched.
    """
    limit = policy.resources.disk
    share = facts.memory_total // 4
    writable = policy.filesystem.workspace == "write" or bool(policy.filesystem.write)
    if limit is None:
        return share, False, writable
    if not facts.rootless and limit <= share:
        scopes["disk"] = "tree"
        return max(limit, 1 << 20 if writable else _MIN_SCRATCH), False, False
    if not facts.rootless and facts.loop:
        scopes["disk"] = "tree"
        return limit, True, False
    scopes["disk"] = "watched"
    watch["disk"] = limit
    return min(share, limit), False, writable


def _views(policy: Policy, workspace: str, facts: Facts) -> list[View]:
    wanted = [(workspace, policy.filesystem.workspace == "write")]
    wanted += [(path, True) for path in policy.filesystem.write]
    wanted += [(path, False) for path in policy.filesystem.read]
    # What else is shown lies in the root, but the places for temporary files are each sandbox's own.
    named = [path for path, _ in wanted]
    for path in dict.fromkeys((*facts.tools, *facts.extra_read)):
        if path.startswith(_TEMPORARY) and not _within(path, named):
            wanted.append((path, False))
    return [View(path, path, writable, facts.owners.get(path)) for path, writable in wanted]


def _root(policy: Policy, facts: Facts, views: list[View]) -> tuple[list[list[str]], list[str]]:
    """The entries of the root, and the denied paths that lie below views (covered later)."""
    root: list[list[str]] = []
    for name, link in facts.layout.items():
        root.append(["link", f"/{name}", link] if link else ["bind", f"/{name}", f"/{name}"])
    root += [["dir", path] for path in ("/proc", "/tmp", HOME, "/run", "/var/lib", "/mnt", "/srv")]
    inside = [view.target for view in views]
    # One private directory under both names, unless something of the host is to be seen below the second.
    beside = any(target.startswith("/var/tmp/") for target in inside)
    root.append(["dir", "/var/tmp"] if beside else ["link", "/var/tmp", "/tmp"])
    root.append(["link", "/var/run", "/run"])
    root += [["file", path, content] for path, content in facts.covers.items()]
    shown = {entry[2]: True for entry in root if entry[0] == "bind"}
    # Somebody's HOME below /opt, say, is no part of the system: nothing of it is seen but what is granted.
    for path in sorted(facts.private):
        if _is_shown(path, shown):
            root.append(["empty", path])
            shown[path] = False
    for path in (*facts.tools, *facts.extra_read):
        if not path.startswith(_TEMPORARY) and not _is_shown(path, shown):
            root.append(["bind", path, path])
            shown[path] = True
    for view in views:
        # Mount points below /tmp are made in each sandbox; what a bind shows is there.
        if not view.target.startswith(_TEMPORARY) and not _is_shown(view.target.rpartition("/")[0], shown):
            root.append(["spot" if view.source in facts.files else "dir", view.target])
    root += [["spot", path] for path in facts.sockets if not path.startswith(_TEMPORARY)]
    root += [["dir", target] for _, target in facts.caches if not target.startswith(f"{HOME}/")]
    hide: list[str] = []
    for path in policy.filesystem.deny:
        if _within(path, inside):
            hide.append(path)
        elif _is_shown(path, shown):
            root.append(["hide", path])
    return root, hide


def _is_shown(path: str, shown: dict[str, bool]) -> bool:
    """Whether the root shows the host's own at a path: by the nearest of ``shown``, at it or above."""
    while path:
        if path in shown:
            return shown[path]
        path = path.rpartition("/")[0]
    return False


def _within(path: str, roots: Iterable[str]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)
