"""What is wrong with a file, where, and what was probably meant."""

from __future__ import annotations

import re

import pytest

from casemate.errors import PolicyError
from casemate.policy import parse
from casemate.policy.lines import find


def refused(text: str | bytes, file: str = "p.toml") -> PolicyError:
    """The error for a file of this content."""
    data = text.encode() if isinstance(text, str) else text
    with pytest.raises(PolicyError) as caught:
        parse.policy(data, file, name="user")
    return caught.value


def test_a_whole_file_is_read() -> None:
    """Every field of the format is taken, in TOML and in JSON alike."""
    toml = b"""
version = 1
[filesystem]
workspace = "write"
read = ["~/data"]
write = ["/srv/out"]
deny = [".env"]
tools = true
cache = ["pip"]
protect = ["*.lock"]
[network]
mode = "none"
[resources]
memory = "8G"
cpu = 2.0
pids = 4096
open-files = 4096
file-size = "4G"
disk = "4G"
timeout = "unlimited"
output = "1G"
scope = "auto"
[environment]
pass = ["LANG"]
set = { CI = "1" }
[isolation]
boundary = "auto"
degrade = ["memfd-exec"]
"""
    json = b"""{"version": 1,
 "filesystem": {"workspace": "write", "read": ["~/data"], "write": ["/srv/out"], "deny": [".env"],
                "tools": true,
                "cache": ["pip"], "protect": ["*.lock"]},
 "network": {"mode": "none"},
 "resources": {"memory": "8G", "cpu": 2.0, "pids": 4096, "open-files": 4096, "file-size": "4G", "disk": "4G",
               "timeout": "unlimited", "output": "1G", "scope": "auto"},
 "environment": {"pass": ["LANG"], "set": {"CI": "1"}},
 "isolation": {"boundary": "auto", "degrade": ["memfd-exec"]}}"""
    assert parse.policy(toml, "p.toml", name="user")[1] == parse.policy(json, "p.json", name="user")[1]


@pytest.mark.parametrize(
    ("text", "field", "line", "suggested"),
    [
        ("version = 1\n[filesystem]\n\nwirte = ['/x']\n", "filesystem.wirte", 4, "write"),
        ("version = 1\n[filesistem]\nread = []\n", "filesistem", 2, "filesystem"),
        ("version = 1\n# resources.memry\nresources.memry = '1G'\n", "resources.memry", 3, "memory"),
        ("version = 1\nresources = { open_files = 1 }\n", "resources.open_files", 2, "open-files"),
        ("version = 1\n[environment]\nset = {}\npas = ['A']", "environment.pas", 4, "pass"),
        ("version = 1\nx = '''\n[filesystem]\nwirte = 1\n'''\n", "x", 2, ""),
    ],
)
def test_a_misspelt_key_is_named_with_its_line_and_a_suggestion(
    text: str, field: str, line: int, suggested: str
) -> None:
    """An unknown field is an error that says where it stands and what it looks like."""
    error = refused(text)
    assert (error.details["field"], error.details["line"], error.details["file"]) == (field, line, "p.toml")
    assert f"did you mean {suggested!r}?" in error.message if suggested else "mean" not in error.message


def test_a_misspelt_key_in_json_is_named_too() -> None:
    """The same in JSON, where the key may also stand inside strings and lists before it."""
    error = refused(
        '{"version": 1,\n "environment": {"set": {"wirte": "filesystem"}},\n "filesystem": {\n'
        '  "read": ["wirte", "{"],\n  "wirte": []}}',
        "p.json",
    )
    assert (error.details["field"], error.details["line"]) == ("filesystem.wirte", 5)
    assert "did you mean 'write'?" in error.message


@pytest.mark.parametrize(
    ("text", "field", "line"),
    [
        ("version = 1\n[filesystem]\nread = '/srv'\n", "filesystem.read", 3),
        ("version = 1\n[filesystem]\nread = ['/a',\n 3]\n", "filesystem.read[1]", 3),
        ("version = 1\n[filesystem]\ntools = 1\n", "filesystem.tools", 3),
        ("version = 1\n[filesystem]\nworkspace = 'rw'\n", "filesystem.workspace", 3),
        ("version = 1\n[resources]\npids = 1.5\n", "resources.pids", 3),
        ("version = 1\n[resources]\npids = true\n", "resources.pids", 3),
        ("version = 1\n[resources]\nmemory = [1]\n", "resources.memory", 3),
        ("version = 1\n[environment]\nset = { A = 1 }\n", "environment.set", 3),
        ("version = 1\nnetwork = 'none'\n", "network", 2),
        ("version = 1\n[isolation]\nboundary = 'vm'\n", "isolation.boundary", 3),
        ("version = 1\n[resources]\ntimeout = 2020-01-01\n", "resources.timeout", 3),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_its_line(text: str, field: str, line: int) -> None:
    """A wrong type is an error at its field, in words and without a trace of Python's own."""
    error = refused(text)
    assert str(error.details["field"]).startswith(field)
    assert error.details["line"] == line
    assert "`str`" not in error.message


@pytest.mark.parametrize(
    ("data", "file", "words"),
    [
        (b"", "p.toml", "version"),
        (b"[filesystem]\nread = []\n", "p.toml", "version"),
        (b"version = 2\n", "p.toml", "version 2|'2'"),
        (b"version = '1'\n", "p.toml", "version"),
        (b"version = true\n", "p.toml", "version"),
        (b"version = 1\nversion = 1\n", "p.toml", "line 2|:2:"),
        (b"version = 1\n[network]\n[network]\n", "p.toml", ":3:"),
        (b"version = \n", "p.toml", ":1:"),
        (b"version = 1\nx = '", "p.toml", ":2:"),
        (b"version = 1\n\xff\n", "p.toml", ":2: is not UTF-8"),
        (b"version = 1\n\0\n", "p.toml", ":2: holds a NUL"),
        (b"version = " + b"9" * 5000, "p.toml", "not TOML"),
        (b"version = 1\nx = " + b"[" * 50_000, "p.toml", "too deeply"),
        (b"version = 1\n" + b"a." * 100_000 + b"a = 1", "p.toml", "too many parts"),
        (b"version = 1\n[" + b"a." * 100_000 + b"a]", "p.toml", "too many parts"),
        (b'version = 1\nx = {y="""a"""", ' + b"a." * 100_000 + b'a="", }', "p.toml", "too many parts"),
        (b"version = 1\n" + b'"\\' * 500_000, "p.toml", "not TOML"),
        (b"version = 1\n" + b'x = """\\' * 140_000, "p.toml", "not TOML"),
        (b"version = 1\n" + b"\n" * 1_000_000 + b"x = 1\n", "p.toml", "unknown field"),
        (b"version = 1\n" + b"[a.a.a.a.a.a.a.a.a.a.a.a.a.a.a]\n" * 30_000, "p.toml", "not TOML"),
        (b"{", "p.json", ":1: is not JSON"),
        (b"[]", "p.json", "one JSON object"),
        (b'{"version": 1, "version": 1}', "p.json", "'version' twice"),
        (b'{"version": 1, "network": {"mode": "none", "mode": "host"}}', "p.json", "'mode' twice"),
        (b'{"version": 1, "resources": {"cpu": NaN}}', "p.json", "NaN"),
        (b'{"version": 1, "resources": {"memory": ' + b"9" * 5000 + b"}}", "p.json", "not JSON"),
        (b"[" * 100_000, "p.json", "too deeply"),
        (b'{"a":' * 100_000, "p.json", "too deeply|not JSON"),
    ],
)
def test_broken_files_are_clear_errors(data: bytes, file: str, words: str) -> None:
    """Whatever a file holds, the answer is one short error: no traceback, no hang, no megabytes."""
    error = refused(data, file)
    assert re.search(words, error.message), error.message
    assert len(error.message) < 400
    assert error.details["file"] == file


def test_text_from_a_file_cannot_steer_the_terminal() -> None:
    """Names that a hostile file chose are shown escaped."""
    error = refused('version = 1\n"\\u001b]0;owned\\u0007" = 1\n')
    assert "\x1b" not in error.message
    assert "\\x1b" in error.message


@pytest.mark.parametrize(
    ("text", "field", "line"),
    [
        ("a = 1\n[b]\nc = 2\n", "b.c", 3),
        ("[b]\n\n# c = 0\nc = 2 # x\n", "b.c", 4),
        ("[b]\nx = [\n 'c = 1',\n]\nc = 2\n", "b.c", 5),
        ('[b]\nx = """\nc = 1\n"""\nc = 2\n', "b.c", 5),
        ("b.c = 2\n", "b.c", 1),
        ("b = { c = 2 }\n", "b.c", 1),
        ('"b"."c" = 2\n', "b.c", 1),
        ("[ b . c ]\nd = 1\n", "b.c.d", 2),
        ("[b]\nc = 1\n", "x.y", None),
    ],
)
def test_lines_are_found_in_toml(text: str, field: str, line: int | None) -> None:
    """Strings, comments and lists that look like keys do not mislead the search."""
    assert find(text, field, json=False) == line


@pytest.mark.parametrize("text", ['"\\', '"""\\', "'''", '{"', "[", '"a" '])
@pytest.mark.parametrize("json", [False, True])
def test_the_search_for_a_line_is_linear(text: str, json: bool) -> None:
    """A quarter of a megabyte made to confuse is searched in a moment; in its square it would take hours."""
    assert find(text * (200_000 // len(text)), "filesystem.read", json=json) is None
