"""Restrictions only tighten: for any layers, adding one that restricts never makes the result wider."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.egress.decide import Decider
from casemate.errors import PolicyError
from casemate.policy import merge, presets, rules, trust
from casemate.policy.load import load
from casemate.policy.model import PRESETS, Credential, FlagLayer, Policy
from casemate.policy.source import Layer, Source
from casemate.settings import Places

if TYPE_CHECKING:
    from collections.abc import Iterator

_PATHS = ("/srv", "/srv/a", "/srv/a/b", "/srv/c", "/data", "/data/x")
_names = st.lists(st.sampled_from(_PATHS), max_size=3).map(tuple)
_size = st.one_of(st.none(), st.integers(1, 1 << 40))
_ALLOW = ("a.org", "*.a.org", "b.a.org:22", "https://c.org", "10.0.0.0/8:5432", "8.8.8.8",
          "host.casemate.internal:80")  # fmt: skip
_DENY = ("a.org", "*.a.org", "10.1.0.0/16", "*:22", "*")
_CREDENTIALS = tuple(
    Credential(name=name, hosts=hosts, source=f"env:{name}", as_="bearer", add=False)
    for name, hosts in (("T", ("a.org",)), ("T", ("*.a.org",)), ("U", ("c.org",)))
)
_HOSTS = ("a.org", "b.a.org", "c.org", "d.org", "10.1.2.3", "10.2.2.3", "8.8.8.8", "8.8.4.4", "127.0.0.1",
          "host.casemate.internal")  # fmt: skip
_REQUESTS = (("GET", "/x"), ("POST", "/y/z"), ("GET", "/z"))
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "filesystem.workspace": st.sampled_from(["read", "write", "direct"]),
    "filesystem.tools": st.booleans(),
    "filesystem.read": _names,
    "filesystem.write": _names,
    "filesystem.deny": _names,
    "filesystem.cache": st.lists(st.sampled_from(["pip", "npm", "go"]), unique=True).map(tuple),
    "filesystem.protect": st.lists(st.sampled_from(["*.lock", "x"]), unique=True).map(tuple),
    "network.mode": st.sampled_from(["none", "allowlist", "full", "host"]),
    "network.allow": st.lists(st.sampled_from(_ALLOW), max_size=4, unique=True).map(tuple),
    "network.deny": st.lists(st.sampled_from(_DENY), max_size=2, unique=True).map(tuple),
    "network.ask": st.booleans(),
    "network.publish": st.lists(st.sampled_from(["80:80", "80:81", "90:90"]), max_size=2).map(tuple),
    "network.sockets": st.lists(st.sampled_from(["/s/a", "/s/b"]), unique=True).map(tuple),
    "network.ssh-agent": st.lists(st.sampled_from(["a.org", "b.a.org:2222"]), unique=True).map(tuple),
    "network.credentials": st.lists(st.sampled_from(_CREDENTIALS), max_size=2).map(tuple),
    "network.requests": st.dictionaries(
        st.sampled_from(["a.org", "*.a.org"]), st.sampled_from([(), ("GET /x",), ("GET /x", "* /y/**")])
    ),
    **{
        f"resources.{name}": _size
        for name in ("memory", "pids", "open-files", "file-size", "disk", "output", "cpu", "timeout")
    },
    "resources.scope": st.sampled_from(["auto", "tree"]),
    "environment.pass": st.lists(st.sampled_from(["A", "B_*"]), unique=True).map(tuple),
    "environment.set": st.dictionaries(st.sampled_from(["A", "B"]), st.sampled_from(["1", "2"])),
    "isolation.boundary": st.sampled_from(["process", "none"]),
    "isolation.degrade": st.lists(st.sampled_from(["ptrace", "landlock"]), unique=True).map(tuple),
}
_values = st.fixed_dictionaries({}, optional=_VALUES)
_SCALARS = [field for field in _VALUES if not isinstance(presets.values("read-only")[field], (tuple, dict))]
# Lists that only the operator adds to.
_OPERATORS = ("network.publish", "network.sockets", "network.ssh-agent", "network.credentials",
              "isolation.degrade")  # fmt: skip


def layer(name: str, values: dict[str, object], *, grants: bool = True, restricts: bool = False) -> Layer:
    """A resolved layer."""
    return Layer(source=Source(name=name), values=values, grants=grants, restricts=restricts)


def preset(name: str) -> Layer:
    """The layer that every other starts from."""
    return layer("preset", presets.values(name))


def flat(policy: Policy) -> dict[str, Any]:
    """The policy's fields by path."""
    found: dict[str, Any] = {}
    for part in ("filesystem", "network", "resources", "environment", "isolation"):
        section = getattr(policy, part)
        for name, key in zip(section.__struct_fields__, section.__struct_encode_fields__, strict=True):
            found[f"{part}.{key}"] = getattr(section, name)
    return found


def covers(roots: tuple[str, ...], path: str) -> bool:
    """Whether ``path`` is one of ``roots`` or below one, by a rule of the test's own."""
    parts = path.split("/")
    return any(parts[: len(root.split("/"))] == root.split("/") for root in roots)


def sees(policy: Policy, path: str, *, write: bool) -> bool:
    """Whether ``path`` can be read (or changed) beyond the workspace."""
    files = policy.filesystem
    granted = files.write if write else (*files.read, *files.write)
    return covers(granted, path) and not covers(files.deny, path)


def reaches(policy: Policy) -> set[tuple[object, ...]]:
    """Everything that the policy lets out: connections, requests over them, and questions about them.

    The host's own network has no gate: it reaches all there is.
    """
    if policy.network.mode == "host":
        return {
            (host, port, *request)
            for host in _HOSTS for port in (22, 80, 443, 5432) for request in ((), ("ask",), *_REQUESTS)
        }  # fmt: skip
    decider = Decider(policy.network)
    found: set[tuple[object, ...]] = set()
    for host in _HOSTS:
        for port in (22, 80, 443, 5432):
            verdict = decider.connect(host, port).verdict
            if verdict == "deny":
                continue
            found.add((host, port, "ask"))
            if verdict == "allow":
                found.add((host, port))
                found |= {
                    (host, port, *request)
                    for request in _REQUESTS if decider.request(host, *request).verdict == "allow"
                }  # fmt: skip
    return found


def assert_not_wider(tight: Policy, loose: Policy) -> None:
    """No value of ``tight`` allows what ``loose`` does not."""
    a, b = flat(tight), flat(loose)
    for field in _SCALARS:
        assert merge.rank(field, a[field]) <= merge.rank(field, b[field]), field
    for path in (*_PATHS, *(f"{path}/deep" for path in _PATHS)):
        for write in (False, True):
            assert sees(loose, path, write=write) or not sees(tight, path, write=write), path
    for field in ("filesystem.cache", "environment.pass", "isolation.degrade"):
        assert set(a[field]) <= set(b[field]), field
    for field in _OPERATORS:
        assert set(a[field]) <= set(b[field]), field
    assert reaches(tight) <= reaches(loose)
    assert a["environment.set"].items() <= b["environment.set"].items()
    assert set(a["filesystem.protect"]) >= set(b["filesystem.protect"])
    for path in b["filesystem.deny"]:
        assert covers(a["filesystem.deny"], path)


@given(st.sampled_from(list(PRESETS)), _values, _values, _values)
def test_an_untrusted_project_never_widens(
    name: str, project: dict[str, object], user: dict[str, object], flags: dict[str, object]
) -> None:
    """Whatever a project's file says, without trust the result allows no more than without the file."""
    rest = [layer("user", user), layer("flags", flags)]
    without = merge.merge([preset(name), *rest], None).policy
    mine = layer("project", project, grants=False, restricts=True)
    assert_not_wider(merge.merge([preset(name), mine, *rest], None).policy, without)


@given(st.sampled_from(list(PRESETS)), _values, _values, _values, _values)
def test_another_restricting_layer_never_widens(
    name: str, first: dict[str, object], second: dict[str, object], user: dict[str, object], flags: dict[str,
    object]
) -> None:
    """Restrictions unite: each further one leaves the result as wide or makes it tighter."""
    one = layer("one", first, grants=False, restricts=True)
    two = layer("two", second, grants=False, restricts=True)
    rest = [layer("user", user), layer("flags", flags)]
    assert_not_wider(
        merge.merge([preset(name), one, two, *rest], None).policy,
        merge.merge([preset(name), one, *rest], None).policy,
    )


@given(st.sampled_from(list(PRESETS)), _values, _values)
def test_a_trusted_project_never_touches_words_boundary_secrets_or_names(
    name: str, project: dict[str, object], user: dict[str, object]
) -> None:
    """With trust a project may widen, but not what is never a project's."""
    without = flat(merge.merge([preset(name), layer("user", user)], None).policy)
    trusted = layer("project", project, restricts=True)
    result = flat(merge.merge([preset(name), trusted, layer("user", user)], None).policy)
    for field in ("network.ask", "isolation.boundary"):
        assert merge.rank(field, result[field]) <= merge.rank(field, without[field])
    for field in _OPERATORS:
        assert result[field] == without[field], field
    assert set(result["filesystem.protect"]) >= set(without["filesystem.protect"])


@given(st.sampled_from(list(PRESETS)), _values, _values)
def test_of_the_network_a_trusted_project_opens_named_hosts_and_no_more(
    name: str, project: dict[str, object], user: dict[str, object]
) -> None:
    """The mode up to the allowlist, rules about names; no address and nothing of the host."""
    without = merge.merge([preset(name), layer("user", user)], None).policy
    trusted = layer("project", project, restricts=True)
    result = merge.merge([preset(name), trusted, layer("user", user)], None).policy
    ours, theirs = result.network, without.network
    limit = max(merge.rank("network.mode", theirs.mode), merge.rank("network.mode", "allowlist"))
    assert merge.rank("network.mode", ours.mode) <= limit
    for text in set(ours.allow) - set(theirs.allow):
        assert not rules.is_guarded_grant(rules.parse(text)), text
    if theirs.mode != "none":  # with a network, the user's own addresses are open already
        for host, *rest in reaches(result) - reaches(without):
            assert not str(host)[0].isdigit(), (host, rest)
            assert host != rules.HOST_NAME


_denied = st.lists(st.sampled_from(_DENY), max_size=2, unique=True).map(tuple)


_asked = _VALUES["network.requests"]


@given(st.sampled_from(["allowlist", "full", "host"]), _asked, _asked, _denied, _denied)
def test_what_layers_forbid_is_forbidden_together(
    mode: str, first: dict[str, tuple[str, ...]], second: dict[str, tuple[str, ...]], denied: tuple[str, ...],
    more: tuple[str, ...],
) -> None:
    """Denied hosts and the requests that hosts get: all layers' words hold, and in a mode that holds them."""
    base = {"network.mode": mode, "network.allow": ("a.org", "*.a.org:*", "8.8.8.8")}

    def merged(*, project: dict[str, object], user: dict[str, object]) -> Policy:
        layers = [preset("workspace-write"), layer("project", project, grants=False, restricts=True)]
        return merge.merge([*layers, layer("user", base | user)], None).policy

    mine: dict[str, object] = {"network.requests": first, "network.deny": denied}
    theirs: dict[str, object] = {"network.requests": second, "network.deny": more}
    both = merged(project=mine, user=theirs)
    assert reaches(both) <= reaches(merged(project=mine, user={})) & reaches(merged(project={}, user=theirs))
    if both.network.deny or both.network.requests:
        assert both.network.mode != "host"


@given(st.sampled_from(list(PRESETS)), _values, _values, _values, _values)
def test_a_ceiling_never_widens_and_always_holds(
    name: str, ceiling: dict[str, object], project: dict[str, object], user: dict[str, object],
    flags: dict[str, object]
) -> None:
    """Under a ceiling the result is refused, or it is tighter than without and never above the ceiling."""
    bounds = merge.Bounds(
        source=Source(name="managed"),
        scalars={field: value for field, value in ceiling.items() if field in _SCALARS},
        lists={
            ("network.within" if field == "network.allow" else field): value
            for field, value in ceiling.items()
            if isinstance(value, tuple) and field not in ("network.credentials", "network.ssh-agent")
        },
    )
    layers = [
        preset(name), layer("project", project, restricts=True), layer("user", user), layer("flags", flags),
    ]  # fmt: skip
    without = merge.merge(layers, None).policy
    try:
        result = merge.merge(layers, bounds).policy
    except PolicyError:
        return
    assert_not_wider(result, without)
    for field, value in bounds.scalars.items():
        assert merge.rank(field, flat(result)[field]) <= merge.rank(field, value), field
    if "network.within" in bounds.lists and result.network.mode == "allowlist":
        widest = Decider(merge.merge([preset("read-only"), layer("flags", {
            "network.mode": "allowlist", "network.allow": bounds.lists["network.within"],
        })], None).policy.network)  # fmt: skip
        for host, port, *_ in reaches(result):
            assert widest.connect(str(host), cast("int", port)).verdict == "allow", (host, port)
    for field in ("filesystem.read", "filesystem.write"):
        if field in bounds.lists:
            assert all(covers(bounds.lists[field], path) for path in flat(result)[field])


@given(st.sampled_from(list(PRESETS)), _values, _values)
def test_nothing_hidden_is_granted_and_no_entry_is_covered_by_another(
    name: str, user: dict[str, object], flags: dict[str, object]
) -> None:
    """In the result deny has won, and every bind is needed."""
    files = merge.merge([preset(name), layer("user", user), layer("flags", flags)], None).policy.filesystem
    for path in (*files.read, *files.write):
        assert not covers(files.deny, path)
    for path in files.read:
        others = (*(p for p in files.read if p != path), *files.write)
        assert not covers(others, path)


# ---------------------------------------------------------------- through the files


@pytest.fixture(scope="module")
def places() -> Iterator[tuple[Places, str]]:
    """A caller and a workspace that outlive the examples."""
    with tempfile.TemporaryDirectory() as base:
        root = os.path.realpath(base)
        home, workspace = f"{root}/home", f"{root}/w/p"
        os.makedirs(home)
        os.makedirs(workspace)
        for name in ("d1", "d2"):
            os.makedirs(f"{root}/{name}")
        yield (
            Places(
                home=home, homes=(home,), config=f"{home}/.c", managed=f"{root}/m/managed.toml",
                user=f"{home}/.c/policy.toml", state=f"{root}/state", run=f"{root}/run",
            ),
            workspace,
        )  # fmt: skip


_texts = {
    "filesystem": st.fixed_dictionaries(
        {},
        optional={
            "workspace": st.sampled_from(["read", "write", "direct"]),
            "read": st.lists(st.sampled_from(["../../d1", "../../d2"]), max_size=2),
            "write": st.lists(st.sampled_from(["../../d1", "../../d2"]), max_size=2),
            "deny": st.lists(st.sampled_from([".env", "../../d1"]), max_size=2),
            "cache": st.lists(st.sampled_from(["pip"]), max_size=1),
            "tools": st.booleans(),
        },
    ),
    "network": st.fixed_dictionaries(
        {},
        optional={
            "mode": st.sampled_from(["none", "allowlist", "full", "host"]),
            "allow": st.lists(st.sampled_from(["a.org", "*.A.org", "10.0.0.0/8:22"]), max_size=2),
            "deny": st.lists(st.sampled_from(["b.org", "*"]), max_size=2),
            "ask": st.booleans(),
            "publish": st.just([3000]),
            "ssh-agent": st.just(["a.org"]),
        },
    ),
    "resources": st.fixed_dictionaries(
        {}, optional={"memory": st.sampled_from(["1G", "900G", "unlimited"]), "pids": st.integers(1, 9999)}
    ),
    "environment": st.fixed_dictionaries({}, optional={"pass": st.just(["TOKEN"]),
    "set": st.just({"A": "1"})}),
    "isolation": st.fixed_dictionaries({}, optional={"degrade": st.just(["ptrace"])}),
}


def toml(tree: dict[str, dict[str, object]]) -> str:
    """The file that says this."""
    import json

    lines = ["version = 1"]
    for part, keys in tree.items():
        lines.append(f"[{part}]")
        for key, value in keys.items():
            shown = "{ A = '1' }" if isinstance(value, dict) else json.dumps(value)
            lines.append(f"{key} = {shown}")
    return "\n".join(lines) + "\n"


@given(tree=st.fixed_dictionaries({}, optional=_texts), name=st.sampled_from(list(PRESETS)),
asked=st.booleans())
def test_a_project_file_that_nobody_trusts_never_widens(
    places: tuple[Places, str], tree: dict[str, dict[str, object]], name: str, asked: bool
) -> None:
    """The same through real files: an untrusted one only tightens, also after another content was trusted."""
    where, workspace = places
    file = f"{workspace}/casemate.toml"
    flags = FlagLayer(read=("../../d2",), memory="2G") if asked else None

    def effective() -> Policy:
        return load(
            workspace=workspace, environ={"HOME": where.home}, preset=name, flags=flags, places=where
        ).policy

    if os.path.exists(file):
        os.unlink(file)
    without = effective()
    text = toml(tree)
    trust.record(where, workspace, (text + "#").encode())
    with open(file, "w") as stream:
        stream.write(text)
    tight, loose = effective(), without
    a, b = flat(tight), flat(loose)
    for field in _SCALARS:
        assert merge.rank(field, a[field]) <= merge.rank(field, b[field]), field
    for field in ("filesystem.read", "filesystem.write", "filesystem.cache", "environment.pass", *_OPERATORS):
        assert set(a[field]) <= set(b[field]), field
    assert reaches(tight) <= reaches(loose)
    assert a["environment.set"] == b["environment.set"]
