"""Hostile text: files, paths and settings of any content end in a policy or in a PolicyError."""

from __future__ import annotations

import os
import string
import tempfile
import tomllib
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from casemate.errors import PolicyError
from casemate.policy import parse, paths, registries, resolve, units
from casemate.policy.credentials import clean
from casemate.policy.lines import find, nesting
from casemate.policy.source import Source
from casemate.settings import Places, workspace_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TOML = st.lists(
    st.one_of(
        st.sampled_from(
            ["version = 1\n", "[filesystem]\n", "[resources]\n", "[[x]]\n", "read = ", "memory = ", "[", "]",
            "{", "}", "=",
             ".", ",", "\n", '"', '"""', "'", "'''", "#", "\\", "1", "nan", "inf", "true", "2020-01-01", "a",
             " ", "\t",
             "\r\n", "\u0007", "é", "'x'", '"/srv"', "0x1", "1_000", "9" * 30, "-1", "1e400"]
        ),
        st.text(max_size=4),
    ),
    max_size=40,
).map("".join)  # fmt: skip


@pytest.fixture(scope="module")
def context() -> Iterator[resolve.Context]:
    """What resolving needs, with a home and a workspace that exist."""
    with tempfile.TemporaryDirectory() as base:
        root = os.path.realpath(base)
        for name in ("home/.ssh", "home/data", "w/p/sub", "state", "c", "srv"):
            os.makedirs(f"{root}/{name}")
        os.symlink(f"{root}/home", f"{root}/w/p/link")
        os.symlink("/", f"{root}/srv/all")
        places = Places(
            home=f"{root}/home", homes=(f"{root}/home",), config=f"{root}/c",
            managed=f"{root}/m/managed.toml",
            user=f"{root}/c/policy.toml", state=f"{root}/state", run=f"{root}/run",
        )  # fmt: skip
        yield resolve.Context(workspace=f"{root}/w/p", guard=paths.guard(places), base=f"{root}/w/p")


def refusal(act: Callable[[], object], kind: type[Exception] = PolicyError) -> Exception | None:
    """The error of ``kind`` that ``act`` ends in, if any; every other one fails the test."""
    try:
        act()
    except kind as error:
        return error
    return None


def shown(error: Exception | None) -> bool:
    """Whether a terminal can show the error as it is, and a person learns something."""
    return error is None or (str(error) != "" and str(error).isprintable() and len(str(error)) < 1000)


@given(st.binary(max_size=300), st.sampled_from(["p.toml", "p.json"]))
@example(b"\xef\xbb\xbfversion = 1", "p.toml")
@example(b'{"version": 1, "resources": {"cpu": 1e999}}', "p.json")
@example(b'{"\\ud800": 1, "version": 1}', "p.json")
def test_any_bytes_are_a_policy_or_a_policy_error(data: bytes, file: str) -> None:
    """No content of a file makes anything else than a PolicyError, whose text a terminal can show."""
    for parser in (lambda: parse.policy(data, file, name="user"), lambda: parse.managed(data, file)):
        assert shown(refusal(parser))


@given(_TOML, st.booleans())
def test_text_like_a_policy_is_one_or_a_policy_error(
    context: resolve.Context, text: str, versioned: bool
) -> None:
    """The same for text that gets further, up to resolved values."""
    data = (f"version = 1\n{text}" if versioned else text).encode("utf-8", "surrogatepass")

    def whole() -> None:
        source, raw = parse.policy(data, "p.toml", name="user")
        resolve.resolve(resolve.flatten(raw), source, context, grants=True)

    assert shown(refusal(whole))


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
_FIELDS = (
    "workspace", "read", "deny", "mode", "memory", "cpu", "pids", "timeout", "pass", "set", "degrade",
    "scope",
)  # fmt: skip


@given(
    st.dictionaries(
        st.sampled_from(["filesystem", "network", "resources", "environment", "isolation"]),
        st.dictionaries(st.sampled_from(_FIELDS), _json, max_size=3) | _json,
    )
)
def test_any_tree_of_json_is_a_policy_or_a_policy_error(
    context: resolve.Context, tree: dict[str, object]
) -> None:
    """Values of every kind in every field: taken, or refused at a field."""
    import json

    data = json.dumps({"version": 1, **tree}).encode()

    def whole() -> None:
        source, raw = parse.policy(data, "p.json", name="user")
        resolve.resolve(resolve.flatten(raw), source, context, grants=True)

    error = refusal(whole)
    assert shown(error)
    assert error is None or cast("PolicyError", error).details["file"] == "p.json"


@given(_TOML)
def test_what_measures_nesting_never_misses_a_deep_key(text: str) -> None:
    """A text that is TOML has no key deeper than the measure says, so the guard before the parser holds."""
    try:
        tree = tomllib.loads(text)
    except (ValueError, RecursionError):
        return

    def depth(value: object) -> int:
        if isinstance(value, dict):
            return 1 + max((depth(item) for item in value.values()), default=0)
        return max((depth(item) for item in value), default=0) if isinstance(value, list) else 0

    # Each level of the tree comes from a part of a dotted key, a header or a brace.
    assert depth(tree) <= 1 + nesting(text) * (1 + text.count("{") + text.count("["))


@given(_TOML, st.sampled_from(["version", "filesystem.read", "resources.memory", "a.b[0]"]), st.booleans())
def test_the_line_of_an_error_lies_in_the_file(text: str, field: str, json: bool) -> None:
    """The search for a line never fails and never points past the end."""
    line = find(text, field, json=json)
    assert line is None or 1 <= line <= text.count("\n") + 1


# ---------------------------------------------------------------- paths

_path = st.lists(
    st.sampled_from(["..", ".", "", "link", "sub", "data", ".ssh", "all", "~", "srv", "home", "etc", "proc",
    "*", "é"]),
    max_size=8,
).map("/".join)


@given(st.sampled_from(["", "/", "~/", "~", "//", "../../"]), _path, st.booleans())
def test_no_spelling_reaches_what_is_refused(
    context: resolve.Context, start: str, rest: str, write: bool
) -> None:
    """Whatever dots, links and tildes a grant is made of, what is granted holds nothing that is private."""
    guard = context.guard
    try:
        path = paths.expand(start + rest, base=context.base, home=guard.home)
        paths.check_grant(path, write=write, guard=guard, workspace=context.workspace)
    except ValueError:
        return
    assert path == os.path.realpath(path)
    assert path != "/"
    assert path not in ("/etc", "/root", "/home", "/var", "/run", "/tmp")
    for inner in (*guard.homes, *guard.secrets, *guard.own, "/etc"):
        assert os.path.commonpath([path, inner]) != path
    assert os.path.commonpath([path, "/proc"]) != "/proc"


@given(st.text(max_size=40))
def test_any_text_is_a_path_or_a_value_error(context: resolve.Context, text: str) -> None:
    """No text that a flag or a file can hold makes anything else than an error with a reason."""

    def grant() -> None:
        path = paths.expand(text, base=context.base, home=context.guard.home)
        paths.check_grant(path, write=True, guard=context.guard, workspace=context.workspace)

    error = refusal(grant, ValueError)
    assert error is None or str(error)


@given(st.text(max_size=60), st.text(max_size=60))
def test_workspace_keys_are_injective_file_names(one: str, two: str) -> None:
    """Keys are equal only for equal paths, and are plain names."""
    assume(all(not 0xD800 <= ord(c) < 0xE000 for c in one + two))
    assert (workspace_key(f"/{one}") == workspace_key(f"/{two}")) == (one == two)
    assert set(workspace_key(f"/{one}")) <= set(string.ascii_letters + string.digits + "-_")


# ---------------------------------------------------------------- credentials

_secret = st.text(
    alphabet=string.ascii_letters + string.digits + "@:/?#%\\ ,|;=&$!~[]{}'\"\t\n", min_size=1, max_size=16
).map(lambda text: f"S3cr{text}eT")


@given(
    st.sampled_from(["https://", "http://", "sparse+https://", "git+ssh://", "corp=https://", "//", "",
    "https:/"]),
    st.sampled_from(["user:", "", "u%20:"]),
    _secret,
    st.sampled_from(["@host/simple", "@host:8080/x", "@[::1]/x", "@host", "@host/x https://b/y",
    "@host,direct"]),
)
@example("https://", "", "S3cr/@eT", "@host/x")
@example("https://", "user:", "S3cr 1eT", "@host/x")
@example("", "user:", "S3cr,/eT", "@host/simple")
@example("https://", "user:", "S3cr/@x@eT", "@host/x")
def test_a_secret_in_front_of_a_host_never_passes(scheme: str, user: str, secret: str, rest: str) -> None:
    """Whatever characters a password is made of, neither it nor its ends are in what is passed."""
    cleaned = clean(f"{scheme}{user}{secret}{rest}")
    if cleaned is not None:
        assert "S3cr" not in cleaned
        assert "eT" not in cleaned


@given(_secret, st.sampled_from(["?token=", "?a=b&key=", "#", "?"]))
def test_a_secret_in_a_query_never_passes(secret: str, before: str) -> None:
    """Queries and fragments go as a whole."""
    cleaned = clean(f"https://host/simple{before}{secret.replace('@', '')}")
    assert cleaned is None or "S3cr" not in cleaned


@given(st.text(max_size=80))
def test_cleaning_is_stable(text: str) -> None:
    """What was cleaned once has nothing left to clean, whatever it was."""
    cleaned = clean(text)
    assert cleaned is None or clean(cleaned) == cleaned


_key = st.sampled_from(
    ["index-url", "extra_index_url", "cert", "client-cert", "_auth", "//h/:_authToken", "registry",
    "@c:registry", "token",
     "name", "helper", "index", "[global]", "[user]", "[registries.c]", '[source."x"]', "[", "x"]
)  # fmt: skip


@given(st.lists(st.tuples(_key, st.sampled_from([" = ", "=", ": ", "\n  ", ""]), _secret), max_size=8))
def test_settings_files_never_leak_what_stands_before_a_host(lines: list[tuple[str, str, str]]) -> None:
    """Any file of settings: the copies hold no part of a password in a URL and no private key's value."""
    private = ("client-cert", "_auth", "//h/:_authToken", "token", "helper")
    text = "\n".join(
        f"{key}{sep}{secret}" if key in private else f'{key}{sep}"https://u:{secret}@h/x"'
        for key, sep, secret in lines
        if "\n" not in secret and '"' not in secret and "'" not in secret
    )
    ini, _ = registries.pip_conf(text, lambda value: value)
    outputs = [registries.render_ini(ini), registries.npmrc(text, str)[0], registries.cargo_config(text,
    str)[0]]
    for output in outputs:
        assert b"S3cr" not in output, output


@given(st.text(max_size=40))
def test_git_values_survive_a_round(name: str) -> None:
    """A name goes into a .gitconfig and comes out again, less the characters that have no place in one."""
    assume(all(not 0xD800 <= ord(c) < 0xE000 for c in name))
    kept = "".join(c for c in name if c in "\n\t" or (ord(c) >= 32 and ord(c) != 127))
    data = registries.git_config([], [], {"GIT_AUTHOR_NAME": kept})
    assert registries.git_config([data.decode()], [], {}) == data


# ---------------------------------------------------------------- units


@given(st.one_of(st.text(max_size=12), st.integers(), st.floats()))
def test_units_are_read_or_refused_with_a_sentence(value: str | float) -> None:
    """Any text or number is a value in its bounds or a ValueError in printable ASCII."""
    for parser in (
        lambda v: units.parse_size(v, least=1),
        lambda v: units.parse_count(v, least=1),
        units.parse_cpu,
        units.parse_duration,
    ):
        if isinstance(value, float) and parser not in (units.parse_cpu, units.parse_duration):
            continue
        found: list[float | None] = []
        assert shown(refusal(lambda take=parser, found=found: found.append(take(value)), ValueError))
        assert all(number is None or 0 < number < 2**63 for number in found)


@given(st.integers(0, 2**63 - 1))
def test_sizes_print_as_they_are_read(size: int) -> None:
    """Every size has a text that comes back to it."""
    assert units.parse_size(units.format_size(size), least=0) == size


@given(word=st.text(max_size=8))
def test_errors_of_values_are_printable(context: resolve.Context, word: str) -> None:
    """A wrong word from anywhere is shown escaped."""
    for field in ("network.mode", "filesystem.workspace", "isolation.boundary", "resources.scope"):
        values = {field: word}
        source = Source(name="flags")
        assert shown(refusal(lambda v=values, s=source: resolve.resolve(v, s, context, grants=True)))
