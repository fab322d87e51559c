"""What this host can enforce, found by trying it: each probe acts in a child and leaves nothing."""

from __future__ import annotations

import os

import msgspec

from casemate.isolation.process.launcher import Launcher
from casemate.sys import capture, cgroups, landlock, mounts, namespaces, notify, process
from casemate.sys.native import machine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Offer", "Protection", "probe"]


class Protection(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """One thing that the boundary needs or can do without.

    ``status`` is ``enforced``, ``weaker`` (a smaller scope; ``found`` says which) or ``missing``. What is
    ``required`` and missing keeps every command from running.
    """

    name: str
    status: str
    found: str
    needed: str = ""
    get: str = ""
    required: bool = True


class Offer(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """Everything that was found; ``available`` if no required protection is missing."""

    boundary: str
    available: bool
    mode: str
    kernel: str
    machine: str
    protections: tuple[Protection, ...]


def probe(runtime: str) -> Offer:
    """Try everything. Takes some 20 ms; changes nothing on the host."""
    root = process.is_root()
    found = [
        *_namespaces(root),
        _from_child(
            "detached mounts",
            _try_trees,
            "the mount API of Linux 5.12",
            "a newer kernel",
        ),
        _from_child(
            "overlay views",
            lambda: _try_overlay(runtime),
            "overlayfs with volatile mounts (Linux 5.11 as root, 5.15 rootless)",
            "a newer kernel",
        ),
    ]
    if root:
        get = "ext4, xfs, btrfs or tmpfs"
        found.append(_from_child("own uid per sandbox", _try_idmap, "id-mapped mounts (Linux 5.12)", get))
    found.append(_landlock())
    found.append(_seccomp())
    found.append(_memfd(root))
    found.append(_direct())
    found.append(_capture(root))
    found += _limits(root)
    found.append(_launcher(runtime))
    return Offer(
        boundary="process",
        available=not any(p.required and p.status == "missing" for p in found),
        mode="root" if root else "rootless",
        kernel=os.uname().release,
        machine=machine(),
        protections=tuple(found),
    )


def _in_child(act: Callable[[], str]) -> tuple[bool, str]:
    """Run ``act`` in a child; what it returns, or the error it met."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = "+" + act()
        except BaseException as error:
            text = f"-{error}"
        os.write(write, text.encode("utf-8", "replace")[:1000])
        os._exit(0)
    os.close(write)
    try:
        with os.fdopen(read, "rb") as pipe:
            answer = pipe.read(2000).decode("utf-8", "replace")
    finally:
        os.waitpid(child, 0)
    return answer.startswith("+"), answer[1:] or "the probe died"


def _from_child(
    name: str, act: Callable[[], str], needed: str, get: str, *, required: bool = True
) -> Protection:
    good, text = _in_child(act)
    return Protection(
        name=name,
        status="enforced" if good else "missing",
        found=text,
        needed=needed,
        get="" if good else get,
        required=required,
    )


def _enter() -> None:
    """Get the rights that the launcher works with: root's own, or those of a user namespace."""
    if not process.is_root():
        uid, gid = os.geteuid(), os.getegid()
        namespaces.leave(namespaces.USER | namespaces.MOUNT)
        namespaces.map_single(uid, uid, gid, gid)
    else:
        namespaces.leave(namespaces.MOUNT)
    mounts.make_private()


def _may_enter() -> str:
    _enter()
    return "yes"


def _namespaces(root: bool) -> list[Protection]:
    found: list[Protection] = []
    advice = (
        "run as root, or allow it: kernel.unprivileged_userns_clone=1, user.max_user_namespaces, "
        "on Ubuntu an AppArmor profile with userns"
    )
    if not root:
        found.append(_from_child("user namespaces", _may_enter, "unprivileged user namespaces", advice))
    kinds = {
        "mount": namespaces.MOUNT, "pid": namespaces.PID, "network": namespaces.NET, "ipc": namespaces.IPC,
        "uts": namespaces.UTS, "cgroup": namespaces.CGROUP,
    }  # fmt: skip

    def attempt() -> str:
        _enter()
        for kind in kinds.values():
            namespaces.leave(kind)
        namespaces.loopback_up()
        return ", ".join(kinds)

    get = "CAP_SYS_ADMIN in this container, or run on the host"
    found.append(_from_child("namespaces", attempt, ", ".join(kinds), get))

    def fresh_proc() -> str:
        _enter()
        pid, _ = process.fork_into(namespaces.PID)
        if pid == 0:
            try:
                mounts.filesystem("proc")
            except OSError as error:
                os._exit(error.errno or 1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            raise OSError(code, os.strerror(code), "mount proc")
        return "yes"

    get = "run the container with an unmasked /proc"
    found.append(_from_child("fresh /proc", fresh_proc, "an unmasked /proc outside", get))
    return found


def _try_trees() -> str:
    _enter()
    if not mounts.detached_trees():
        return "not used before Linux 6.15: parts are attached below the run directory while a sandbox lives"
    tree = mounts.filesystem("tmpfs", mode="0755")
    os.mkdir("a", dir_fd=tree)
    mounts.clone_tree(tree, "a")
    return "yes"


def _try_overlay(place: str) -> str:
    _enter()
    os.makedirs(place, 0o700, exist_ok=True)
    mounts.attach(mounts.filesystem("tmpfs", mode="0755"), place)
    layers: list[tuple[str, str | int]] = []
    for option, name in (("lowerdir", "low"), ("upperdir", "up"), ("workdir", "work")):
        os.mkdir(f"{place}/{name}")
        layers.append((option, f"{place}/{name}"))
    if not process.is_root():
        mounts.filesystem("overlay", 0, layers, volatile=True, userxattr=True)
        return "yes; renaming a directory that existed before gives EXDEV to the command (mv copies then)"
    mounts.filesystem("overlay", 0, layers, volatile=True, redirect_dir="on")
    return "yes"


def _try_idmap() -> str:
    _enter()
    mount = mounts.clone_tree(mounts.AT_FDCWD, os.getcwd())
    mounts.idmap(mount, namespaces.id_map([(0, 0x70000000)], [(0, 0x70000000)]))
    return "yes, for the present directory"


def _landlock() -> Protection:
    version = landlock.abi()
    if version == 0:
        return Protection(
            name="landlock",
            status="missing",
            found="none",
            needed="ABI 1 (Linux 5.13)",
            get='boot with lsm=landlock,…, or isolation.degrade = ["landlock"]',
        )
    if version < 6:
        return Protection(
            name="landlock",
            status="weaker",
            found=f"ABI {version}: no scope for signals and abstract sockets",
            needed="ABI 6 (Linux 6.12)",
            get="a newer kernel",
            required=False,
        )
    return Protection(name="landlock", status="enforced", found=f"ABI {version}")


def _seccomp() -> Protection:
    with open("/proc/self/status") as file:
        known = "Seccomp:" in file.read()
    supported = machine() in ("x86_64", "aarch64")
    good = known and supported
    return Protection(
        name="seccomp",
        status="enforced" if good else "missing",
        found="filter mode" if good else f"kernel {known}, machine {machine()}",
        needed="CONFIG_SECCOMP_FILTER on x86_64 or aarch64",
    )


def _direct() -> Protection:
    good = notify.available()
    return Protection(
        name="direct workspaces",
        status="enforced" if good else "missing",
        found="yes: what protects names refuses at once" if good else f"Linux {os.uname().release}",
        needed="seccomp notification that waits for the answer (Linux 5.19)",
        get="" if good else 'a newer kernel, or filesystem.workspace = "write"',
        required=False,
    )


def _memfd(root: bool) -> Protection:
    switch = root and os.path.exists("/proc/sys/vm/memfd_noexec")
    return Protection(
        name="no execution from memory",
        status="enforced",
        found="by the pid namespace"
        if switch
        else "by the filter: memfd_create without MFD_NOEXEC_SEAL is refused "
        "(Linux 6.3 as root does it better)",
    )


def _capture(root: bool) -> Protection:
    """Whether the egress gate gets every connection."""

    def attempt() -> str:
        _enter()
        namespaces.leave(namespaces.NET)
        namespaces.loopback_up()
        return capture.make([], root=root).mechanism

    good, text = _in_child(attempt)
    everything = good and text != "listed ports"
    found = f"by {text}" if everything else text
    if good and not everything:
        found = "partial: only ports that rules name; connections to others fail"
    return Protection(
        name="egress: all ports reach the gate",
        status="enforced" if everything else "weaker" if good else "missing",
        found=found,
        needed="sk_lookup (Linux 5.9, as root), or libnftables and nf_tables in the kernel",
        get="" if everything else "install libnftables1, or run as root",
        required=False,
    )


def _limits(root: bool) -> list[Protection]:
    good, text = _in_child(_controllers)
    words = dict(pair.split("=", 1) for pair in text.split("\n") if "=" in pair) if good else {}
    lesser = {
        "memory": "process (RLIMIT_DATA) and watched",
        "pids": "process (RLIMIT_NPROC of its own)",
        "cpu": "",
    }
    found: list[Protection] = []
    for name, scope in lesser.items():
        if words.get(name) == "tree":
            found.append(Protection(name=f"limit: {name}", status="enforced", found="tree (control group)"))
            continue
        found.append(
            Protection(
                name=f"limit: {name}",
                status="weaker" if scope else "missing",
                found=scope or "none: a policy that sets it is refused",
                needed=f"a writable {name} control group ({words.get(name, text)})",
                get="run as root, or inside `systemd-run --user --scope -p Delegate=yes`",
                required=False,
            )
        )
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    exact = f"tree (tmpfs) up to {total >> 20} MiB, watched above"
    found.append(
        Protection(name="limit: disk", status="enforced", found=exact)
        if root
        else Protection(
            name="limit: disk",
            status="weaker",
            found="watched (the host measures and kills); /tmp and HOME are exact",
            needed="root",
            required=False,
        )
    )
    return found


def _controllers() -> str:
    hierarchies = cgroups.detect()
    lines = [f"{name}=tree" for name in hierarchies.base]
    lines += [f"{name}={reason}" for name, reason in hierarchies.reasons.items()]
    return "\n".join(lines)


def _launcher(runtime: str) -> Protection:
    def attempt() -> str:
        Launcher(runtime).close()
        return "yes"

    return _from_child("launcher", attempt, "all of the above", "see the lines above")
