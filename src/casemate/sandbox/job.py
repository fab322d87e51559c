"""From a request to a job: policy, facts about the host, plan. Nothing is started here."""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress

import msgspec

from casemate import settings
from casemate.errors import PolicyError, SandboxError
from casemate.isolation.plan import Facts, Plan, plan
from casemate.isolation.process.spec import Direct, Late
from casemate.policy import environment, tools
from casemate.policy.load import load
from casemate.policy.model import Effective, FlagLayer, Policy, degraded
from casemate.policy.paths import guard
from casemate.sandbox.network import RESOLV_CONF, ports_of, wants_capture
from casemate.sys import landlock, loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from casemate.sys.cgroups import Hierarchies
    from casemate.workspace.survey import Firsts

__all__ = [
    "PENDING",
    "Job",
    "Request",
    "direct_lock",
    "kept_count",
    "own_umask",
    "pending_count",
    "prepare",
    "sweep_live",
]

#: Beside a top: it waits because somebody wanted it to.
PENDING = "pending"
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "opt", "nix")
_HOSTS = "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost ip6-loopback\n"
_COVERS = {"/etc/hosts": _HOSTS, "/etc/hostname": "sandbox\n"}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody wants run. ``workspace`` and ``cwd`` are absolute; ``cwd`` lies in the workspace."""

    argv: tuple[str, ...]
    workspace: str
    cwd: str
    environ: dict[str, str]
    preset: str | None = None
    policy_file: str | None = None
    flags: FlagLayer | None = None
    tty: bool = False
    window: tuple[int, ...] = ()
    umask: int = 0o022
    session: str = ""


class Job(msgspec.Struct, kw_only=True):
    """A request that may run, with all that was decided about it. ``plan`` is None for boundary none."""

    request: Request
    effective: Effective
    policy: Policy
    workspace: str
    plan: Plan | None
    late: Late
    places: settings.Places
    readable: tuple[str, ...]
    """What the sandbox may read outside the workspace: where a link may point to."""
    notes: tuple[str, ...]
    degraded: tuple[str, ...]
    began: float
    began_wall_ns: int
    firsts: dict[str, Firsts] = {}
    """Of a session's views: since when their paths are its own."""
    inodes: dict[str, tuple[int, int]] = {}
    """Of the directories that views show: which they were when it began."""

    @property
    def key(self) -> str:
        """The file name under which state of this workspace is kept."""
        return settings.workspace_key(self.workspace)

    @property
    def lock(self) -> str:
        """The file that is locked while the command runs: the workspace's, or that of the session."""
        name = self.request.session
        return f"{self.places.run}/locks/{self.key}" + (f".{name}" if name else "")

    @property
    def saved_hosts(self) -> str:
        """The file of the hosts that were allowed for this workspace by a reviewer."""
        return f"{self.places.state}/hosts/{self.key}.json"

    def check_size(self) -> None:
        """Refuse what execve would refuse with E2BIG. Raises SandboxError (``argument-too-long``)."""
        _check_size(self.late)

    def begin(self) -> None:
        """Its view is made from now on: what was changed before (by those it has waited for) it will see.

        Preconditions: it has its lock.
        """
        self.began_wall_ns = time.time_ns()
        self.inodes = {}
        for view in self.plan.spec.views if self.plan is not None else ():
            with suppress(FileNotFoundError):  # making the view says so
                status = os.stat(view.source)
                self.inodes[view.source] = status.st_dev, status.st_ino

    def note(self) -> str:
        """The text that is kept beside the tops, for whoever finds them."""
        return msgspec.json.encode(
            {
                "version": 1,
                "workspace": self.workspace,
                "argv": [os.fsencode(word).decode("utf-8", "replace") for word in self.request.argv],
                "started-ns": self.began_wall_ns,
                "views": [view.source for view in self.plan.spec.views if view.writable] if self.plan else [],
                "protect": self.policy.filesystem.protect,
                "deny": self.policy.filesystem.deny,
                "readable": self.readable,
            }
        ).decode()


def prepare(request: Request, hierarchies: Hierarchies, *, rootless: bool) -> Job:
    """Decide everything about a run.

    Raises PolicyError and ProtectionUnavailable; the command is named in neither, it has not been looked at.
    """
    began, wall = time.monotonic(), time.time_ns()
    if not request.argv or not request.argv[0]:
        raise PolicyError(
            "no command was given", code="no-command", hint="casemate run -- COMMAND [ARGUMENT…]"
        )
    places = settings.places(request.environ)
    _check_own(places.run, make=True)
    _check_own(places.state, make=False)
    effective = load(
        workspace=request.workspace,
        environ=request.environ,
        preset=request.preset,
        policy_file=request.policy_file,
        flags=request.flags,
        places=places,
    )
    policy, workspace = effective.policy, effective.workspace
    cwd = os.path.realpath(request.cwd)
    if cwd != workspace and not cwd.startswith(f"{workspace.rstrip('/')}/"):
        raise PolicyError(
            f"the working directory {cwd} does not lie in the workspace {workspace}",
            code="cwd-outside",
            hint="start from a directory of the workspace",
            cwd=cwd,
            workspace=workspace,
        )
    job = Job(
        request=request,
        effective=effective,
        policy=policy,
        workspace=workspace,
        plan=None,
        late=Late(
            list(request.argv), {}, cwd, request.tty, umask=request.umask, window=request.window
        ),
        places=places,
        readable=(),
        notes=effective.notes,
        degraded=degraded(policy),
        began=began,
        began_wall_ns=wall,
    )
    if policy.isolation.boundary == "none":
        job.late.env = dict(request.environ)
        return job
    _plan(job, hierarchies, rootless=rootless)
    job.check_size()
    return job


def _check_own(directory: str, *, make: bool) -> None:
    """See that one of Casemate's own directories is this user's.

    In a place that others can write to (a runtime directory in /tmp), somebody may have made it first, and
    put links to other directories into it. A link of this user's own is as good as a directory.
    """
    try:
        if make:
            os.makedirs(directory, 0o700, exist_ok=True)
        ours = os.lstat(directory).st_uid == os.geteuid()
        facts = os.stat(directory)
        if ours and stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid():
            if facts.st_mode & 0o022:
                os.chmod(directory, stat.S_IMODE(facts.st_mode) & ~0o022)
            return
        problem = "it is no directory of this user's"
    except FileNotFoundError:
        if not make:
            return
        problem = "it is a link to nowhere"
    except OSError as error:
        problem = error.strerror or str(error)
    raise SandboxError(
        f"Casemate's own directory {directory} cannot be used: {problem}",
        code="state-unusable",
        hint="check XDG_RUNTIME_DIR and XDG_STATE_HOME",
        path=directory,
    )


def _plan(job: Job, hierarchies: Hierarchies, *, rootless: bool) -> None:
    request, policy, places, workspace = job.request, job.policy, job.places, job.workspace
    gate = wants_capture(policy.network)
    layout = _layout()
    shown = tuple(f"/{name}" for name, link in layout.items() if not link)
    found = tools.discover(
        request.environ.get("PATH", ""),
        places.home,
        environ=request.environ,
        workspace=workspace,
        visible=(*shown, *policy.filesystem.read, *policy.filesystem.write),
        deny=policy.filesystem.deny,
        enabled=policy.filesystem.tools,
    )
    world = environment.collect(request.environ, policy, found, workspace=workspace, home=places.home)
    caches = tuple(
        (f"{places.state}/caches/{job.key}/{name}", path) for name, path in world.caches
    )
    if caches:
        # Commands own what is in a cache, modes included: a setuid file there must be out of others' reach.
        store = f"{places.state}/caches"
        os.makedirs(store, 0o700, exist_ok=True)
        os.chmod(store, 0o700)
    for source, _ in caches:
        os.makedirs(source, 0o700, exist_ok=True)
    owners: dict[str, tuple[int, int]] = {}
    files: list[str] = []
    for path in (workspace, *policy.filesystem.read, *policy.filesystem.write):
        status = os.stat(path)
        owners[path] = (status.st_uid, status.st_gid)
        if not stat.S_ISDIR(status.st_mode):
            files.append(path)
    readable = (*shown, *found.binds, *world.binds, *policy.filesystem.read)
    facts = Facts(
        rootless=rootless,
        loop=not rootless and not loop.available(),
        layout=layout,
        memory_total=_memory_total(),
        processors=os.cpu_count() or 1,
        controllers=frozenset(hierarchies.base),
        controller_reasons=hierarchies.reasons,
        landlock=landlock.abi(),
        owners=owners,
        files=frozenset(files),
        tools=found.binds,
        extra_read=world.binds,
        caches=caches,
        home_files={name: data.decode("utf-8", "surrogateescape") for name, data in world.home_files.items()},
        covers=_covers(world.masks, gate=gate),
        gate_ports=tuple(ports_of(policy.network)) if gate else None,
        sockets=policy.network.sockets,
        devices=(),
        direct=_direct(job, readable),
        private=_private(places),
    )
    job.plan = plan(policy, workspace, facts, f"{places.state}/views/{job.key}")
    job.late.env = world.env
    job.readable = readable
    job.notes = (*job.notes, *found.notes, *world.notes)
    job.degraded = job.plan.degraded


def _private(places: settings.Places) -> tuple[str, ...]:
    """The caller's homes and Casemate's own directories, resolved; not where a system user is at home in a
    directory of the system itself, such as /usr/sbin.
    """
    bounds = guard(places)
    found = {path for path in (*bounds.homes, *bounds.own) if os.path.isdir(path)}
    return tuple(sorted(p for p in found if os.stat(p).st_uid or p.startswith(("/opt/", "/usr/local/"))))


def _direct(job: Job, readable: tuple[str, ...]) -> Direct | None:
    """How the workspace is changed directly, where that is wanted and the kernel can do it."""
    if job.policy.filesystem.workspace != "direct":
        return None
    from casemate.sys import notify

    if not notify.available():
        return None
    root = f"{job.workspace.rstrip('/')}/"
    denied = [f"/{path[len(root) :]}" for path in job.policy.filesystem.deny if path.startswith(root)]
    return Direct(
        target=job.workspace,
        judge="casemate.workspace.live:LiveJudge",
        # A keeper knows only where Casemate itself is.
        paths=[os.path.dirname(os.path.dirname(msgspec.__file__))],
        protect=[*job.policy.filesystem.protect, *denied],
        readable=[*readable],
        git_path="/usr/bin:/usr/local/bin",
        lock=direct_lock(job.places),
    )


def direct_lock(where: settings.Places) -> str:
    """The file that is locked by whoever changes a workspace for a sandbox, for the time of that change."""
    return f"{where.run}/locks/changes"


def kept_count(job: Job) -> int:
    """How many interrupted commands left changes in this workspace.

    What a launcher left that was killed before there was anything to keep is removed.
    ``Preconditions:`` the workspace's lock is held, so whatever was kept belongs to nobody alive.
    """
    if job.plan is None:
        return 0
    sweep_live(f"{job.places.run}/live")
    base = job.plan.spec.keep_base
    try:
        names = os.listdir(base)
    except FileNotFoundError:
        return 0
    count = 0
    for name in names:
        if os.path.exists(f"{base}/{name}/note.json"):
            count += 1
        elif not _alive(name):
            from casemate.isolation.process.trees import remove_run

            remove_run(f"{base}/{name}")
    if not count:
        with suppress(OSError):
            os.rmdir(base)
    return count


def sweep_live(base: str) -> None:
    """Remove the sockets of commands whose front end was killed (``sandbox.live``), in any workspace."""
    try:
        keys = os.listdir(base)
    except FileNotFoundError:
        return
    for key in keys:
        place = f"{base}/{key}"
        with suppress(OSError):
            for name in os.listdir(place):
                if not os.path.exists(f"/proc/{name.partition('-')[0]}"):
                    os.unlink(f"{place}/{name}")
            os.rmdir(place)


def pending_count(job: Job) -> int:
    """Of those that ``kept_count`` counts, how many came to their end and wait because that was asked for."""
    if job.plan is None:
        return 0
    base = job.plan.spec.keep_base
    try:
        names = os.listdir(base)
    except FileNotFoundError:
        return 0
    return sum(os.path.exists(f"{base}/{name}/{PENDING}") for name in names)


def _alive(name: str) -> bool:
    """Whether the launcher is there whose pid a directory is named after (a waiting sandbox has one)."""
    try:
        return os.path.exists(f"/proc/{int(name.partition('-')[0], 16)}")
    except ValueError:
        return True  # not one of ours: left alone


def own_umask() -> int:
    """This process's file mode mask, read without changing it."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022


def _layout() -> dict[str, str]:
    """The system's top directories: name -> link target, or ``""`` for a real directory."""
    layout: dict[str, str] = {}
    for name in _SYSTEM:
        try:
            mode = os.lstat(f"/{name}").st_mode
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(mode):
            layout[name] = os.readlink(f"/{name}")
        elif stat.S_ISDIR(mode):
            layout[name] = ""
    if os.path.isdir("/sys/devices/system/cpu"):
        # What nproc, node and the JVM read to count processors; nothing of it can be changed here.
        layout["sys/devices/system"] = ""
    return layout


def _covers(masks: Mapping[str, bytes], *, gate: bool) -> dict[str, str]:
    """Files of the system whose content is replaced inside; only what is there can be covered."""
    wanted = {**_COVERS, **{path: data.decode("utf-8", "surrogateescape") for path, data in masks.items()}}
    found = {path: text for path, text in wanted.items() if _regular(path)}
    if gate:
        # Often a link to a place that the sandbox does not have: the file is made there then.
        found[os.path.realpath("/etc/resolv.conf")] = RESOLV_CONF
    return found


def _regular(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _memory_total() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_size(late: Late) -> None:
    """Refuse what execve would refuse with E2BIG, with the sizes in the message.

    The kernel takes a quarter of the stack limit for all strings together and 128 KiB for each one.
    """
    characters = sum(map(len, late.argv)) + sum(map(len, late.env)) + sum(map(len, late.env.values()))
    if characters < 30000:  # at most four bytes each: nothing to count
        return
    strings = [*late.argv, *(f"{name}={value}" for name, value in late.env.items())]
    for text in strings:
        size = len(os.fsencode(text)) + 1
        if size > 131072:
            raise SandboxError(
                f"one argument or variable has {size} bytes; the kernel takes 131072",
                code="argument-too-long",
                hint="pass it by a file or on stdin",
                bytes=size,
            )
    total = sum(len(os.fsencode(text)) + 9 for text in strings)
    if total > 2 << 20:
        raise SandboxError(
            f"arguments and environment have {total} bytes together; the kernel takes about {2 << 20}",
            code="argument-too-long",
            hint="pass it by a file or on stdin",
            bytes=total,
        )
