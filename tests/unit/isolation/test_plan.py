"""The planner is pure: the same policy and facts give the same plan, whole values compared."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from casemate.errors import ProtectionUnavailable
from casemate.isolation.plan import Facts, Plan, plan
from casemate.isolation.process.spec import Direct
from casemate.policy.model import Environment, Filesystem, Isolation, Network, Policy, Resources

MIB = 1 << 20
GIB = 1 << 30

RESOURCES = Resources(
    memory=512 * MIB, cpu=None, pids=100, open_files=200, file_size=300 * MIB, disk=256 * MIB, timeout=None,
    output=None, scope="auto",
)  # fmt: skip
FILES = Filesystem(workspace="write", read=(), write=(), deny=(), tools=True, cache=(), protect=())

ROOT = Facts(
    rootless=False,
    loop=True,
    layout={"usr": "", "bin": "usr/bin", "etc": ""},
    memory_total=8 * GIB,
    processors=2,
    controllers=frozenset(("memory", "pids", "cpu")),
    controller_reasons={},
    landlock=7,
    owners={"/ws": (1000, 1001)},
    files=frozenset(),
    tools=("/opt/tool/bin",),
    extra_read=("/usr/share/extra", "/srv/index"),
    caches=(("/state/caches/k/pip", "/home/sandbox/.cache/pip"),),
    home_files={".gitconfig": "[user]\n"},
    covers={"/etc/hosts": "127.0.0.1 localhost\n"},
    gate_ports=None,
    sockets=(),
    devices=(),
)
DIRECT = Direct(
    target="/ws", judge="m:J", paths=["/p"], protect=["x"], readable=["/usr"], git_path="/usr/bin", lock="/l"
)
USER = msgspec.structs.replace(
    ROOT, rootless=True, loop=False, controllers=frozenset(), controller_reasons={"memory": "not writable"}
)


def policy(
    resources: Resources = RESOURCES,
    files: Filesystem = FILES,
    mode: Any = "none",
    degrade: tuple[str, ...] = (),
) -> Policy:
    return Policy(
        filesystem=files,
        network=Network(mode=mode),
        resources=resources,
        environment=Environment(pass_=(), set={}),
        isolation=Isolation(boundary="process", degrade=degrade),
    )


def changed(value: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(value, **fields)


def same(found: Plan, spec: dict[str, Any], **rest: Any) -> None:
    """The whole plan is this."""
    assert found.spec.as_dict() == spec
    assert {"scopes": found.scopes, "watch": found.watch, "degraded": found.degraded} == rest


SPEC: dict[str, Any] = {
    "root": [
        ["bind", "/usr", "/usr"],
        ["link", "/bin", "usr/bin"],
        ["bind", "/etc", "/etc"],
        ["dir", "/proc"],
        ["dir", "/tmp"],
        ["dir", "/home/sandbox"],
        ["dir", "/run"],
        ["dir", "/var/lib"],
        ["dir", "/mnt"],
        ["dir", "/srv"],
        ["link", "/var/tmp", "/tmp"],
        ["link", "/var/run", "/run"],
        ["file", "/etc/hosts", "127.0.0.1 localhost\n"],
        ["bind", "/opt/tool/bin", "/opt/tool/bin"],
        ["bind", "/srv/index", "/srv/index"],
        ["dir", "/ws"],
    ],
    "views": [["/ws", "/ws", True, (1000, 1001), ""]],
    "home": {".gitconfig": "[user]\n"},
    "binds": [("/state/caches/k/pip", "/home/sandbox/.cache/pip")],
    "scratch": 256 * MIB,
    "keep_base": "/keep",
    "tops_on_disk": False,
    "scratch_image": False,
    "rlimits": {"CORE": 0, "NOFILE": 200, "NPROC": 102, "FSIZE": 300 * MIB},
    "memory": 512 * MIB,
    "pids": 101,
    "cpu": None,
    "words": [],
    "landlock": True,
    "memfd_exec": False,
    "network_host": False,
    "require_group": False,
    "hostname": "sandbox",
    "devices": [],
    "hide": [],
    "capture": None,
    "sockets": [],
    "direct": None,
    "stack": None,
}
SCOPES = {
    "open-files": "process", "memory": "tree", "pids": "tree", "disk": "tree, without caches",
    "file-size": "process",
}  # fmt: skip


def test_root() -> None:
    """As root with every controller: all limits hold for the tree, the workspace is an overlay in memory."""
    same(plan(policy(), "/ws", ROOT, "/keep"), SPEC, scopes=SCOPES, watch={}, degraded=())


def test_rootless() -> None:
    """Without controllers memory and disk are watched, processes counted by the kernel's own limit."""
    spec = SPEC | {
        "tops_on_disk": True,
        "memory": None,
        "pids": None,
        "rlimits": {"CORE": 0, "NOFILE": 200, "NPROC": 101, "DATA": 512 * MIB, "FSIZE": 256 * MIB},
    }
    same(
        plan(policy(), "/ws", USER, "/keep"), spec,
        scopes=SCOPES | {"memory": "watched", "pids": "process", "disk": "watched, without caches"},
        watch={"memory": 512 * MIB, "disk": 256 * MIB}, degraded=(),
    )  # fmt: skip


def test_unlimited() -> None:
    """What is unlimited has no scope, no rlimit and nothing to watch; core files stay off."""
    nothing = Resources(
        memory=None, cpu=None, pids=None, open_files=None, file_size=None, disk=None, timeout=None,
        output=None, scope="tree",
    )  # fmt: skip
    for facts in (ROOT, USER):
        spec = SPEC | {
            "memory": None, "pids": None, "rlimits": {"CORE": 0}, "scratch": 2 * GIB, "tops_on_disk": True,
            "require_group": True,
        }  # fmt: skip
        same(plan(policy(nothing), "/ws", facts, "/keep"), spec, scopes={}, watch={}, degraded=())


@pytest.mark.parametrize("name", ["memory", "pids"])
def test_scope_tree_is_refused_without_a_controller(name: str) -> None:
    """``scope = tree`` is a demand: without the controller nothing is planned, and the refusal names it."""
    facts = changed(ROOT, controllers=ROOT.controllers - {name}, controller_reasons={name: "because"})
    assert plan(policy(), "/ws", facts, "/keep").scopes[name] in ("process", "watched"), "the control"
    with pytest.raises(ProtectionUnavailable) as caught:
        plan(policy(changed(RESOURCES, scope="tree")), "/ws", facts, "/keep")
    assert caught.value.details == {
        "protection": f"resources.{name}", "needed": f"a writable {name} control group", "found": "because"
    }  # fmt: skip


def test_cpu() -> None:
    """A share of the processors needs its controller in any scope; more than there are needs nothing."""
    half = policy(changed(RESOURCES, cpu=0.5))
    found = plan(half, "/ws", ROOT, "/keep")
    assert (found.spec.cpu, found.scopes["cpu"]) == (0.5, "tree")
    with pytest.raises(ProtectionUnavailable) as caught:
        plan(half, "/ws", USER, "/keep")
    assert caught.value.details["protection"] == "resources.cpu"
    for count in (2.0, 64.0):
        found = plan(policy(changed(RESOURCES, cpu=count)), "/ws", USER, "/keep")
        assert (found.spec.cpu, found.scopes["cpu"]) == (None, "tree")


def test_landlock_that_is_missing() -> None:
    """A kernel without Landlock is refused unless the word gives it up; then the plan says so."""
    facts = changed(ROOT, landlock=0)
    with pytest.raises(ProtectionUnavailable) as caught:
        plan(policy(), "/ws", facts, "/keep")
    assert caught.value.details["protection"] == "landlock"
    same(
        plan(policy(degrade=("landlock",)), "/ws", facts, "/keep"), SPEC | {"landlock": False},
        scopes=SCOPES, watch={}, degraded=("landlock",),
    )  # fmt: skip


def test_degrade_words() -> None:
    """Every word reaches the filter or the seal, and every one of them is shown."""
    same(
        plan(policy(mode="host", degrade=("memfd-exec", "ptrace")), "/ws", ROOT, "/keep"),
        SPEC | {"words": ["memfd-exec", "ptrace", "network-host"], "memfd_exec": True, "network_host": True},
        scopes=SCOPES, watch={}, degraded=("memfd-exec", "ptrace", "network = host"),
    )  # fmt: skip
    nested = plan(policy(degrade=("nested-userns",)), "/ws", ROOT, "/keep")
    assert (nested.spec.words, nested.spec.landlock) == (["nested-userns"], False)
    assert nested.degraded == ("nested-userns", "landlock"), "what goes with it is said, too"


def test_views() -> None:
    """The workspace comes first, then what else is written, then what is read; mount points where needed."""
    files = changed(FILES, write=("/srv/out",), read=("/data/ref", "/usr/src/ref", "/data/file"))
    facts = changed(ROOT, owners={"/ws": (1, 2), "/srv/out": (3, 4)}, files=frozenset(("/data/file",)))
    found = plan(policy(files=files), "/ws", facts, "/keep").spec
    assert [view.as_list() for view in found.views] == [
        ["/ws", "/ws", True, (1, 2), ""],
        ["/srv/out", "/srv/out", True, (3, 4), ""],
        ["/data/ref", "/data/ref", False, None, ""],
        ["/usr/src/ref", "/usr/src/ref", False, None, ""],
        ["/data/file", "/data/file", False, None, ""],
    ]
    # What lies below a bind is there already.
    assert found.root[-4:] == [
        ["dir", "/ws"],
        ["dir", "/srv/out"],
        ["dir", "/data/ref"],
        ["spot", "/data/file"],
    ]


def test_read_only_workspace() -> None:
    """Nothing to write: no overlay, no tops, and a small scratch is enough."""
    spec = SPEC | {"views": [["/ws", "/ws", False, (1000, 1001), ""]], "scratch": 64 * MIB}
    small = changed(RESOURCES, disk=MIB)
    same(
        plan(policy(small, changed(FILES, workspace="read")), "/ws", ROOT, "/keep"), spec,
        scopes=SCOPES, watch={}, degraded=(),
    )  # fmt: skip
    rootless = plan(policy(small, changed(FILES, workspace="read")), "/ws", USER, "/keep").spec
    assert rootless.tops_on_disk is False


def test_deny() -> None:
    """What is hidden is covered where it shows: in the root, in the view, or nowhere."""
    files = changed(FILES, deny=("/ws/.env", "/usr/lib/secret", "/not/shown"))
    found = plan(policy(files=files), "/ws", ROOT, "/keep").spec
    assert found.hide == ["/ws/.env"]
    assert [entry for entry in found.root if entry[0] == "hide"] == [["hide", "/usr/lib/secret"]]


@pytest.mark.parametrize(
    ("facts", "disk", "expected"),
    [
        (ROOT, 2 * GIB, (2 * GIB, False, False, "tree")),
        (ROOT, 2 * GIB + 1, (2 * GIB + 1, True, False, "tree")),
        (changed(ROOT, loop=False), 3 * GIB, (2 * GIB, False, True, "watched")),
        (USER, 1 * GIB, (1 * GIB, False, True, "watched")),
        (USER, 3 * GIB, (2 * GIB, False, True, "watched")),
    ],
)
def test_disk(facts: Facts, disk: int, expected: tuple[int, bool, bool, str]) -> None:
    """Up to a quarter of the memory in memory, above it in a file as root, else on disk and watched."""
    found = plan(policy(changed(RESOURCES, disk=disk)), "/ws", facts, "/keep")
    spec = found.spec
    assert (spec.scratch, spec.scratch_image, spec.tops_on_disk) == expected[:3]
    assert found.scopes["disk"] == f"{expected[3]}, without caches"
    assert found.watch.get("disk") == (disk if expected[3] == "watched" else None)
    assert spec.rlimits["FSIZE"] == (min(disk, 300 * MIB) if expected[3] == "watched" else 300 * MIB)


@pytest.mark.parametrize("place", ["/tmp", "/var/tmp"])
def test_places_for_temporary_files(place: str) -> None:
    """Below /tmp and /var/tmp nothing is put into the shared root: such paths are views of each sandbox."""
    facts = changed(ROOT, tools=(f"{place}/tool/bin", f"{place}/ws/bin"), extra_read=(f"{place}/index",))
    found = plan(policy(), f"{place}/ws", facts, "/keep").spec
    assert [view.as_list() for view in found.views] == [
        [f"{place}/ws", f"{place}/ws", True, None, ""],
        [f"{place}/tool/bin", f"{place}/tool/bin", False, None, ""],
        [f"{place}/index", f"{place}/index", False, None, ""],
    ]
    assert not [entry for entry in found.root if entry[-1].startswith(f"{place}/")]
    assert (["dir", "/var/tmp"] in found.root) == (place == "/var/tmp")
    assert (["link", "/var/tmp", "/tmp"] in found.root) == (place == "/tmp")


def test_digest() -> None:
    """Equal specifications have one digest; any difference that a sandbox has, and no other, changes it."""
    base = plan(policy(), "/ws", ROOT, "/keep")
    assert base.digest == plan(policy(), "/ws", ROOT, "/keep").digest
    assert base.digest == plan(policy(changed(RESOURCES, timeout=5.0, output=7)), "/ws", ROOT, "/keep").digest
    others = [
        plan(policy(), "/other", ROOT, "/keep"),
        plan(policy(), "/ws", ROOT, "/keep2"),
        plan(policy(), "/ws", USER, "/keep"),
        plan(policy(mode="host"), "/ws", ROOT, "/keep"),
        plan(policy(degrade=("ptrace",)), "/ws", ROOT, "/keep"),
        plan(policy(files=changed(FILES, deny=("/ws/x",))), "/ws", ROOT, "/keep"),
        plan(policy(changed(RESOURCES, memory=1)), "/ws", ROOT, "/keep"),
        plan(policy(), "/ws", changed(ROOT, home_files={}), "/keep"),
        plan(policy(), "/ws", changed(ROOT, owners={"/ws": (0, 0)}), "/keep"),
    ]
    assert len({item.digest for item in (base, *others)}) == len(others) + 1


def test_direct() -> None:
    """A workspace that is changed directly is a read-only view with a broker; what it grows by is watched,
    and the broker counts as one process more where it has the sandbox's uid.
    """
    files = changed(FILES, workspace="direct")
    found = plan(policy(files=files), "/ws", changed(ROOT, direct=DIRECT), "/keep")
    spec = {
        **SPEC,
        "views": [["/ws", "/ws", False, (1000, 1001), ""]],
        "direct": DIRECT.as_dict(),
        "rlimits": {**SPEC["rlimits"], "NPROC": SPEC["rlimits"]["NPROC"] + 1, "FSIZE": 256 * MIB},
        "scratch": 256 * MIB,
    }
    scopes = {**SCOPES, "disk": "tree, without caches, the workspace watched"}
    same(found, spec, scopes=scopes, watch={"disk": 256 * MIB}, degraded=())
    user = plan(policy(files=files), "/ws", changed(USER, direct=DIRECT), "/keep")
    assert user.scopes["disk"] == "watched, without caches"
    assert user.spec.rlimits["NPROC"] == 101


def test_direct_where_it_cannot_be() -> None:
    """Not on a kernel that cannot do it, and not with user namespaces inside."""
    files = changed(FILES, workspace="direct")
    with pytest.raises(ProtectionUnavailable, match="cannot have the workspace changed directly"):
        plan(policy(files=files), "/ws", ROOT, "/keep")
    with pytest.raises(ProtectionUnavailable, match="nested-userns"):
        plan(policy(files=files, degrade=("nested-userns",)), "/ws", changed(ROOT, direct=DIRECT), "/keep")
    unlimited = changed(RESOURCES, disk=None)
    found = plan(policy(unlimited, files), "/ws", changed(ROOT, direct=DIRECT), "/keep")
    assert "disk" not in found.watch
