"""Layers: who may grant, who restricts, who wins, and what is said about it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from casemate.errors import PolicyError
from casemate.policy import trust
from casemate.policy.model import PRESETS, degraded

if TYPE_CHECKING:
    from tests.unit.policy.conftest import Caller

GIB = 1 << 30


def trusted(caller: Caller, text: str) -> None:
    """Write the project's file and trust it."""
    caller.project(text)
    trust.record(caller.places, caller.workspace, text.encode())


# ---------------------------------------------------------------- presets


def test_the_default_preset_lets_a_large_build_pass(caller: Caller) -> None:
    """Without any file: the workspace can be changed, no network, limits for 2 GiB and 2,000 processes."""
    effective = caller.load()
    policy = effective.policy
    assert effective.preset == "workspace-write"
    assert (policy.filesystem.workspace, policy.network.mode) == ("write", "none")
    assert (policy.isolation.boundary, degraded(policy)) == ("process", ())
    limits = policy.resources
    assert limits.memory is not None
    assert limits.disk is not None
    assert limits.pids is not None
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert limits.memory == min(8 * GIB, ram * 3 // 4)
    assert (limits.disk, limits.pids, limits.open_files, limits.output) == (4 * GIB, 4096, 4096, GIB)
    assert limits.cpu == os.cpu_count()
    assert (limits.file_size, limits.timeout, limits.scope) == (4 * GIB, 86400.0, "auto")
    assert limits.cpu == os.cpu_count()
    assert set(effective.origins.values()) == {"preset"}
    assert effective.notes == ()


def test_read_only_holds_against_files_that_write(caller: Caller) -> None:
    """``--preset read-only`` outweighs what the user's file says about writing; flags still count."""
    out = caller.directory("out")
    caller.user(f"version = 1\n[filesystem]\nworkspace = 'write'\nwrite = ['{out}']\n")
    assert caller.load().policy.filesystem.write == (out,)
    effective = caller.load(preset="read-only")
    assert (effective.policy.filesystem.workspace, effective.policy.filesystem.write) == ("read", ())
    assert any("gives way" in note for note in effective.notes)
    assert caller.load(preset="read-only", write=(out,)).policy.filesystem.write == (out,)


def test_full_access_is_loud(caller: Caller) -> None:
    """The preset without a boundary says so first of all, and counts as degraded."""
    effective = caller.load(preset="full-access")
    assert effective.notes[0].startswith("FULL ACCESS")
    assert degraded(effective.policy) == ("network = host", "boundary = none")


def test_no_file_can_take_the_boundary_away(caller: Caller) -> None:
    """``boundary = "none"`` comes with the flag only: from a user's or a project's file it is refused."""
    caller.user("version = 1\n[isolation]\nboundary = 'none'\n")
    with pytest.raises(PolicyError, match="full-access"):
        caller.load()
    os.unlink(caller.places.user)
    trusted(caller, "version = 1\n[isolation]\nboundary = 'none'\n")
    for preset in (None, "full-access"):
        with pytest.raises(PolicyError, match="full-access"):
            caller.load(preset=preset)


def test_a_project_keeps_its_boundary_under_full_access(caller: Caller) -> None:
    """A project's demand for a boundary is a restriction, so full-access gives way to it."""
    caller.project("version = 1\n[isolation]\nboundary = 'process'\n[network]\nmode = 'none'\n")
    effective = caller.load(preset="full-access")
    assert (effective.policy.isolation.boundary, effective.policy.network.mode) == ("process", "none")
    assert not any("FULL ACCESS" in note for note in effective.notes)


def test_an_unknown_preset_is_an_error_with_a_suggestion(caller: Caller) -> None:
    """A misspelt preset never becomes the default."""
    with pytest.raises(PolicyError, match="did you mean 'read-only'") as caught:
        caller.load(preset="readonly")
    assert all(name in caught.value.hint for name in PRESETS)


# ---------------------------------------------------------------- the operator's layers


def test_flags_outweigh_the_user_file_which_outweighs_the_preset(caller: Caller) -> None:
    """Of a single value the last layer's counts, and the origin says whose it was."""
    caller.user("version = 1\n[resources]\nmemory = '2G'\npids = 100\ntimeout = '5m'\n")
    effective = caller.load(memory="3G", timeout="unlimited")
    limits = effective.policy.resources
    assert (limits.memory, limits.pids, limits.timeout) == (3 * GIB, 100, None)
    origins = effective.origins
    assert (origins["resources.memory"], origins["resources.pids"], origins["resources.disk"]) == (
        "flags", "user", "preset",
    )  # fmt: skip


def test_lists_add_up_and_each_entry_knows_its_layer(caller: Caller) -> None:
    """Grants of several layers are united, and an entry that two layers name shows both."""
    one, two = caller.directory("one"), caller.directory("two")
    caller.user(f"version = 1\n[filesystem]\nread = ['{one}']\n")
    effective = caller.load(read=(two, one))
    assert effective.policy.filesystem.read == (one, two)
    assert effective.origins["filesystem.read"] == "user, flags"
    assert effective.origins[f"filesystem.read[{one}]"] == "user, flags"
    assert effective.origins[f"filesystem.read[{two}]"] == "flags"


def test_a_named_policy_file_replaces_the_users(caller: Caller) -> None:
    """``--policy FILE`` counts as the operator's grant, and the user's own file is not read at all."""
    caller.user("version = 1\nnonsense = true\n")
    file = caller.file("p.json", '{"version": 1, "network": {"mode": "host"}}')
    effective = caller.load(policy_file=file)
    assert effective.policy.network.mode == "host"
    assert effective.origins["network.mode"] == "policy"


def test_a_policy_file_in_the_workspace_is_pointed_out(caller: Caller) -> None:
    """A command could change such a file for the next run, so a note says where it lies."""
    inside = caller.file(f"{caller.workspace}/p.toml", "version = 1\n")
    assert any("lies in the workspace" in note for note in caller.load(policy_file=inside).notes)
    outside = caller.file("p.toml", "version = 1\n")
    assert caller.load(policy_file=outside).notes == ()


@pytest.mark.parametrize("layer", ["user", "project", "flags"])
def test_an_empty_list_is_nothing(caller: Caller, layer: str) -> None:
    """``read = []`` gives nothing, takes nothing and means nothing, in every layer and for every list."""
    text = (
        "version = 1\n[filesystem]\nread = []\nwrite = []\ndeny = []\ncache = []\nprotect = []\n"
        "[environment]\npass = []\nset = {}\n[isolation]\ndegrade = []\n"
    )
    plain = caller.load().policy
    if layer == "flags":
        effective = caller.load(
            read=(), write=(), deny=(), cache=(), protect=(), pass_=(), set={}, degrade=()
        )
    else:
        getattr(caller, layer)(text)
        effective = caller.load()
    assert effective.policy == plain
    assert effective.notes == ()
    kept = caller.load(read=(caller.directory("one"),)).policy.filesystem.read
    assert len(kept) == 1


def test_unlimited_and_the_hosts_network_are_said(caller: Caller) -> None:
    """What a person should know of the result is in the notes, with the layer that asked for it."""
    effective = caller.load(memory="unlimited", network="host")
    assert effective.policy.resources.memory is None
    assert any("resources.memory is unlimited (from flags)" in note for note in effective.notes)
    assert any("network.mode is host (from flags)" in note for note in effective.notes)
    assert degraded(effective.policy) == ("network = host",)


@pytest.mark.parametrize("mode", ["none", "allowlist", "full", "host"])
def test_network_modes_are_taken_from_the_operator(caller: Caller, mode: str) -> None:
    """All four can be chosen by a flag."""
    assert caller.load(network=mode).policy.network.mode == mode


def test_an_unknown_network_mode_is_refused_with_a_suggestion(caller: Caller) -> None:
    """A misspelt mode is an error."""
    with pytest.raises(PolicyError, match="did you mean 'none'"):
        caller.load(network="nne")


@pytest.mark.parametrize("word", ["memfd-exec", "ptrace", "nested-userns", "landlock", "parent-proxy"])
def test_degrade_words_are_taken_from_the_operator(caller: Caller, word: str) -> None:
    """Each word gives up one protection and is shown."""
    effective = caller.load(degrade=(word, word))
    assert effective.policy.isolation.degrade == (word,)
    assert degraded(effective.policy) == (word,)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("protected-names = existing", "nothing to give up"), ("network = host", "under \\[network\\]"),
        ("cgroup-limits", "not needed"), ("disk-quota", "not needed"),
        ("parent_proxy", "did you mean 'parent-proxy'"),
        ("seccomp", "cannot be given up"), ("memfd_exec", "did you mean 'memfd-exec'"), ("", "is not one of"),
    ],
)  # fmt: skip
def test_other_degrade_words_are_refused_with_the_reason(caller: Caller, word: str, reason: str) -> None:
    """The list of what can be given up is closed."""
    with pytest.raises(PolicyError, match=reason):
        caller.load(degrade=(word,))


@pytest.mark.parametrize("name", ["*", "A*", "_*", "*_A", "A_*B", "MY*APP_*", "", "1A", "A-B", "A=B", "HOME",
                                  "USER", "CASEMATE_X", "CASEMATE_*", "Ä_*"])  # fmt: skip
def test_patterns_that_pass_everything_are_refused(caller: Caller, name: str) -> None:
    """Only names and prefixes that end in ``_*`` pass; what the sandbox decides does not."""
    with pytest.raises(PolicyError) as caught:
        caller.load(pass_=(name,))
    assert caught.value.details["field"] == "environment.pass"
    assert caller.load(pass_=("MYAPP_*", "X")).policy.environment.pass_ == ("MYAPP_*", "X")


@pytest.mark.parametrize(
    "pattern", ["*", "**", "?*", "*?*", "[a-z]*", "[!a]", "", ".", "..", "a/b", "/", "a\0"]
)
def test_protecting_everything_is_refused(caller: Caller, pattern: str) -> None:
    """A pattern that matches every name would hold everything back."""
    with pytest.raises(PolicyError):
        caller.load(protect=(pattern,))
    assert caller.load(protect=("*.lock", "[Mm]akefile")).policy.filesystem.protect == (
        "*.lock",
        "[Mm]akefile",
    )


@pytest.mark.parametrize("name", ["HOME", "CASEMATE_SANDBOX", "", "A B", "A=B"])
def test_what_the_sandbox_decides_cannot_be_set(caller: Caller, name: str) -> None:
    """``set`` cannot lie about where a command is."""
    with pytest.raises(PolicyError):
        caller.load(set={name: "x"})
    with pytest.raises(PolicyError, match="NUL"):
        caller.load(set={"A": "x\0"})
    assert caller.load(set={"A": "x"}).policy.environment.set == {"A": "x"}


def test_unknown_caches_are_refused(caller: Caller) -> None:
    """The list of caches is closed."""
    with pytest.raises(PolicyError, match="did you mean 'pip'"):
        caller.load(cache=("pipp",))
    assert caller.load(cache=("pip", "npm")).policy.filesystem.cache == ("pip", "npm")


@pytest.mark.parametrize("flag", ["memory", "disk"])
def test_limits_under_which_nothing_starts_are_refused(caller: Caller, flag: str) -> None:
    """A limit of one byte is a mistake, not a policy."""
    with pytest.raises(PolicyError, match="at least"):
        caller.load(**{flag: "1"})


# ---------------------------------------------------------------- deny


def test_deny_wins_over_grants_of_every_layer(caller: Caller) -> None:
    """What a hidden path covers is taken out of reads and writes, and a note says so."""
    inner = caller.directory("data/secret/deep")
    caller.project(f"version = 1\n[filesystem]\ndeny = ['{caller.root}/data/secret']\n")
    effective = caller.load(read=(inner,), write=(f"{caller.root}/data",))
    assert effective.policy.filesystem.read == ()
    assert effective.policy.filesystem.write == (f"{caller.root}/data",)
    assert any(inner in note and "hidden" in note for note in effective.notes)


def test_entries_that_others_cover_are_left_out(caller: Caller) -> None:
    """One directory is bound once: the outermost, and as writable if anybody may write it."""
    outer, inner = caller.directory("a"), caller.directory("a/b")
    assert caller.load(read=(inner, outer)).policy.filesystem.read == (outer,)
    both = caller.load(read=(inner,), write=(outer,)).policy.filesystem
    assert (both.read, both.write) == ((), (outer,))


# ---------------------------------------------------------------- the project

PROJECT = """version = 1
[filesystem]
workspace = "read"
read = ["{root}/data"]
deny = [".env"]
protect = ["*.lock"]
cache = ["pip"]
[network]
mode = "host"
[resources]
memory = "1G"
pids = 100000
[environment]
pass = ["TOKEN"]
set = {{ A = "1" }}
[isolation]
degrade = ["ptrace"]
"""


def test_an_untrusted_project_only_restricts(caller: Caller) -> None:
    """Hidden paths, protected names and lower limits count; nothing that would allow more does."""
    caller.directory("data")
    caller.project(PROJECT.format(root=caller.root))
    effective = caller.load()
    policy = effective.policy
    assert policy.filesystem.deny == (f"{caller.workspace}/.env",)
    assert policy.filesystem.protect == ("*.lock",)
    assert policy.filesystem.workspace == "read"
    assert policy.resources.memory == GIB
    assert effective.origins["resources.memory"] == "project"
    assert (policy.filesystem.read, policy.filesystem.cache, policy.network.mode) == ((), (), "none")
    assert (policy.environment.pass_, policy.environment.set, policy.isolation.degrade) == ((), {}, ())
    assert policy.resources.pids == 4096
    (note,) = [note for note in effective.notes if "casemate trust" in note]
    for field in ("filesystem.read", "resources.pids", "environment.pass", "network.mode"):
        assert field in note
    assert [layer.status for layer in effective.layers if layer.name == "project"] == ["restrictions only"]


def test_a_trusted_project_grants_but_never_network_words_or_boundary(caller: Caller) -> None:
    """Trust makes its grants count, except those that are never a project's."""
    data = caller.directory("data")
    trusted(caller, PROJECT.format(root=caller.root))
    effective = caller.load()
    policy = effective.policy
    assert (policy.filesystem.read, policy.filesystem.cache) == ((data,), ("pip",))
    assert (policy.environment.pass_, policy.environment.set) == (("TOKEN",), {"A": "1"})
    assert policy.resources.pids == 100000
    assert (policy.network.mode, policy.isolation.degrade) == ("none", ())
    assert any("network.mode" in note and "never grants" in note for note in effective.notes)
    assert [layer.status for layer in effective.layers if layer.name == "project"] == ["trusted"]


def test_trust_is_for_exactly_this_content_and_this_workspace(caller: Caller) -> None:
    """One more byte, or the same file in another workspace, and the grants are gone; back, and they count."""
    text = "version = 1\n[filesystem]\ncache = ['pip']\n"
    trusted(caller, text)
    assert caller.load().policy.filesystem.cache == ("pip",)
    caller.project(text + "\n")
    assert caller.load().policy.filesystem.cache == ()
    caller.project(text)
    assert caller.load().policy.filesystem.cache == ("pip",)
    other = caller.directory("work/other")
    caller.file(f"{other}/casemate.toml", text)
    assert not trust.is_trusted(caller.places, other, text.encode())
    trust.forget(caller.places, caller.workspace)
    assert caller.load().policy.filesystem.cache == ()


def test_a_projects_limits_hold_against_everybody(caller: Caller) -> None:
    """No flag lifts a project's restriction, trusted or not, and a note says who lowered what."""
    text = "version = 1\n[resources]\nmemory = '1G'\n[network]\nmode = 'none'\n"
    for prepare in (caller.project, lambda text: trusted(caller, text)):
        prepare(text)
        effective = caller.load(memory="4G", network="host")
        assert effective.policy.resources.memory == GIB
        assert effective.policy.network.mode == "none"
        assert any("project lowers" in note for note in effective.notes)
    os.unlink(f"{caller.workspace}/casemate.toml")
    free = caller.load(memory="4G", network="host").policy
    assert (free.resources.memory, free.network.mode) == (4 * GIB, "host")


def test_a_project_cannot_make_a_run_slow(caller: Caller) -> None:
    """Lists and entries have bounds, so that a stranger's file is refused in a moment."""
    for text in (
        "deny = [" + "'x'," * 1001 + "]", f"protect = ['{'[' * 500_000}']", f"deny = ['{'/a' * 3000}']",
    ):  # fmt: skip
        caller.project(f"version = 1\n[filesystem]\n{text}\n")
        with pytest.raises(PolicyError, match=r"possible|longer") as caught:
            caller.load()
        assert str(caught.value.details["field"]).startswith("filesystem.")
    caller.project(f"version = 1\n[filesystem]\ndeny = {[f'x{number}' for number in range(1000)]}\n")
    assert len(caller.load().policy.filesystem.deny) == 1000
    with pytest.raises(PolicyError, match="kernel"):
        caller.load(set={"A": "x" * (128 * 1024)})


def test_an_over_broad_project_is_refused_even_untrusted(caller: Caller) -> None:
    """A file that asks for the world is an error and not something to skip over in silence."""
    caller.project("version = 1\n\n[filesystem]\nread = ['/']\n")
    with pytest.raises(PolicyError, match="too broad") as caught:
        caller.load()
    assert caught.value.details["line"] == 4
    assert caught.value.details["file"] == f"{caller.workspace}/casemate.toml"


def test_paths_that_only_an_untrusted_project_names_are_not_looked_for(caller: Caller) -> None:
    """No note tells whether a path exists that the project may not have anyway."""
    caller.project("version = 1\n[filesystem]\nread = ['/srv/no/such']\n")
    assert not any("does not exist" in note for note in caller.load().notes)


# ---------------------------------------------------------------- the ceiling


def test_the_ceiling_bounds_the_operator_with_an_error(caller: Caller) -> None:
    """Asking for more than the administrator allows is refused at file and line; as much passes."""
    inside, outside = caller.directory("allowed/x"), caller.directory("other")
    caller.managed(
        f"version = 1\n[ceiling]\nread = ['{caller.root}/allowed']\nwrite = []\nnetwork = ['none']\n"
        "cache = ['pip']\n"
        "degrade = []\npass = ['APP_*']\nworkspace = 'write'\n[ceiling.resources]\nmemory = '2G'\npids = 64\n"
    )
    for flags in (
        {"read": (outside,)}, {"write": (inside,)}, {"network": "host"}, {"cache": ("npm",)},
        {"degrade": ("ptrace",)}, {"pass_": ("OTHER",)}, {"pass_": ("APPX",)}, {"memory": "3G"},
        {"pids": "unlimited"},
    ):  # fmt: skip
        with pytest.raises(PolicyError, match="administrator allows") as caught:
            caller.load(**flags)  # type: ignore[arg-type]
        assert caught.value.code == "policy-above-ceiling"
    policy = caller.load(
        read=(inside,), network="none", cache=("pip",), pass_=("APP_ONE", "APP_X_*"), memory="2G", pids="64"
    ).policy
    assert policy.filesystem.read == (inside,)
    assert policy.environment.pass_ == ("APP_ONE", "APP_X_*")
    caller.user("version = 1\n[resources]\n\nmemory = '3G'\n")
    with pytest.raises(PolicyError, match="administrator") as caught:
        caller.load()
    assert (caught.value.details["file"], caught.value.details["line"]) == (caller.places.user, 4)


def test_the_ceiling_lowers_presets_and_trims_projects(caller: Caller) -> None:
    """A preset comes down to the ceiling; what a trusted project asks above it is left out with a note."""
    data = caller.directory("data")
    caller.managed(
        "version = 1\n[ceiling]\nread = []\nworkspace = 'read'\ntools = false\n"
        "[ceiling.resources]\nmemory = '1G'\nscope = 'tree'\n"
    )
    trusted(caller, f"version = 1\n[filesystem]\nread = ['{data}']\n[resources]\nmemory = '64G'\n")
    effective = caller.load()
    policy = effective.policy
    assert (policy.resources.memory, policy.resources.scope) == (GIB, "tree")
    assert effective.origins["resources.memory"] == "managed"
    assert (policy.filesystem.read, policy.filesystem.workspace, policy.filesystem.tools) == (
        (),
        "read",
        False,
    )
    assert any("above the managed ceiling" in note for note in effective.notes)


def test_the_administrator_chooses_the_presets(caller: Caller) -> None:
    """A preset that is not allowed is refused, and the default gives way to a tighter one that is."""
    caller.managed("version = 1\n[ceiling]\npresets = ['read-only']\n")
    effective = caller.load()
    assert effective.preset == "read-only"
    assert effective.notes
    with pytest.raises(PolicyError, match="not allowed"):
        caller.load(preset="full-access")
    caller.managed("version = 1\n[ceiling]\npresets = []\n")
    with pytest.raises(PolicyError, match="not allowed"):
        caller.load()


@pytest.mark.parametrize("ceiling", ["boundary = 'process'", "network = ['none']"])
def test_a_ceiling_of_boundary_or_network_bars_full_access(caller: Caller, ceiling: str) -> None:
    """full-access is more than its name: whatever it includes must be allowed."""
    caller.managed(f"version = 1\n[ceiling]\n{ceiling}\n")
    with pytest.raises(PolicyError, match="not allowed"):
        caller.load(preset="full-access")
    caller.managed("version = 1\n[ceiling]\nboundary = 'none'\nnetwork = ['none', 'host']\n")
    assert caller.load(preset="full-access").policy.isolation.boundary == "none"


def test_the_administrator_hides_and_protects(caller: Caller) -> None:
    """Restrictions of the managed file count on top of everybody's, and its grants do not exist."""
    data = caller.directory("data")
    caller.managed(f"version = 1\n[filesystem]\ndeny = ['{data}']\nprotect = ['*.key']\n")
    effective = caller.load(read=(data,), protect=("*.lock",))
    assert effective.policy.filesystem.deny == (data,)
    assert effective.policy.filesystem.read == ()
    assert effective.policy.filesystem.protect == ("*.key", "*.lock")
    caller.managed(f"version = 1\n[filesystem]\nread = ['{data}']\n")
    with pytest.raises(PolicyError, match="unknown field"):
        caller.load()


def test_errors_in_the_managed_file_name_their_field(caller: Caller) -> None:
    """A mistake in the ceiling is found at its own path and line."""
    caller.managed("version = 1\n[ceiling]\ncache = ['pip']\n[ceiling.resources]\nmemory = '2X'\n")
    with pytest.raises(PolicyError, match="not a size") as caught:
        caller.load()
    assert (caught.value.details["field"], caught.value.details["line"]) == ("ceiling.resources.memory", 5)


def test_errors_in_values_name_file_line_and_field(caller: Caller) -> None:
    """Whatever is refused after parsing still says where it stands."""
    caller.user("version = 1\n[resources]\n\ntimeout = 'soon'\n")
    with pytest.raises(PolicyError, match="not a duration") as caught:
        caller.load()
    details = caught.value.details
    assert (details["file"], details["line"], details["field"]) == (
        caller.places.user,
        4,
        "resources.timeout",
    )
