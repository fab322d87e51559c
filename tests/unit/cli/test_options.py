"""The command line of run: options come off the front, the command stays as it is."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate import settings
from casemate.cli import run, thin
from casemate.cli.options import LISTS, SWITCHES, VALUES, split
from casemate.errors import PolicyError

words = st.lists(
    st.sampled_from([*VALUES, *LISTS, *SWITCHES, "--", "-", "x", "--nope", "-z", "--env=A=b", ""]), max_size=8
)


@given(words)
def test_splitting_never_fails(line: list[str]) -> None:
    """Any words are split: the command is the end of the line, unchanged, or there is a problem to tell."""
    found = split(line)
    assert line[len(line) - len(found.argv) :] == found.argv
    if not found.problem and found.argv and "--" not in line:
        assert not found.argv[0].startswith("-") or found.argv[0] == "-"


@given(st.lists(st.text(max_size=5), min_size=1, max_size=5))
def test_after_the_dashes_everything_is_the_command(command: list[str]) -> None:
    """What follows ``--`` is never an option."""
    found = split(["--json", "--", *command])
    assert (found.argv, found.switches, found.problem) == (command, {"json"}, "")


def test_a_line_in_parts() -> None:
    """Values, repeated values, lists, switches and the command of one line."""
    found = split(
        [
            "--memory",
            "1G",
            "--json",
            "--env",
            "A=1",
            "--env=B=2=3",
            "--memory=2G",
            "-q",
            "-C",
            "..",
            "cmd",
            "--json",
        ]
    )
    assert found.values == {"memory": "2G", "workspace_dir": ".."}
    assert found.lists == {"env": ["A=1", "B=2=3"]}
    assert found.switches == {"json", "quiet"}
    assert (found.argv, found.problem) == (["cmd", "--json"], "")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (["--memory"], "--memory needs a value"),
        (["--env"], "--env needs a value"),
        (["--memroy", "1"], "unknown option --memroy; did you mean --memory?"),
        (["--qqqqqqqqqqqqqq"], "unknown option --qqqqqqqqqqqqqq"),
        (["--json=1", "x"], "unknown option --json; did you mean --json?"),
        (["-x"], "unknown option -x"),
    ],
)
def test_problems(line: list[str], problem: str) -> None:
    """What is wrong is said with the option's name, and the nearest one that there is."""
    assert split(line).problem.startswith(problem)
    with pytest.raises(PolicyError) as caught:
        run.parse(line)
    assert caught.value.code == "usage"


def test_the_help_knows_every_option() -> None:
    """Each option is in the help, and each word of the help that looks like an option is one."""
    known = {*VALUES, *LISTS, *SWITCHES}
    told = set(re.findall(r"(?<![\w-])(--?[a-zA-Z][a-z-]*)", run.HELP))
    assert told - known == set()
    assert known - told - {"-h", "-q", "--help", "--workspace", "-C"} == set()


def test_policy_flags() -> None:
    """Flags become the policy's flag layer, field by field."""
    options = run.parse(
        [
            "--read",
            "a",
            "--read",
            "b",
            "--memory",
            "1G",
            "--env",
            "NAME",
            "--env",
            "SET=v=w",
            "--env",
            "E=",
            "x",
        ]
    )
    flags = options.flags("/here")
    assert (flags.cwd, flags.read, flags.memory) == ("/here", ("a", "b"), "1G")
    assert (flags.pass_, flags.set) == (("NAME",), {"SET": "v=w", "E": ""})


@pytest.mark.parametrize(
    ("line", "terminal", "tty"),
    [
        (["x"], True, True), (["x"], False, False), (["--tty", "yes", "x"], False, True),
        (["--tty", "no", "x"], True, False), (["--json", "x"], True, False),
        (["--json", "--tty", "yes", "x"], True, True),
    ],
)  # fmt: skip
def test_when_there_is_a_terminal(line: list[str], terminal: bool, tty: bool) -> None:
    """A terminal of its own: if the caller has one, but not with --json; or as --tty says."""
    asked = run.request(run.parse(line), cwd="/usr", environ={}, terminal=terminal, umask=0o22, window=())
    assert asked.tty == tty


def test_where_it_starts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The workspace is the present directory or -C; the command starts where its caller is, or at its top."""
    top = os.path.realpath(tmp_path_factory.mktemp("top"))
    os.mkdir(f"{top}/inner")
    for argv, cwd, want in (
        (["x"], top, (top, top)),
        (["-C", top, "x"], f"{top}/inner", (top, f"{top}/inner")),
        (["-C", "..", "x"], f"{top}/inner", (top, f"{top}/inner")),
        (["-C", top, "x"], "/usr", (top, top)),
    ):
        asked = run.request(run.parse(argv), cwd=cwd, environ={}, terminal=False, umask=0, window=())
        assert (asked.workspace, asked.cwd) == want


@pytest.mark.parametrize(
    "environ",
    [
        {"HOME": "/home/x"},
        {"HOME": "/home/x/", "XDG_STATE_HOME": "/state"},
        {"HOME": "/home/x", "XDG_STATE_HOME": "relative"},
        {"HOME": "/home/x", "XDG_RUNTIME_DIR": "/run/user/1000"},
        {"HOME": "/home/x", "XDG_RUNTIME_DIR": "relative"},
        {"HOME": "/home/../x", "XDG_RUNTIME_DIR": "", "XDG_STATE_HOME": ""},
        {"HOME": ""},
        {"HOME": "relative"},
        {},
    ],
)
@pytest.mark.parametrize("uid", [0, 1000])
def test_where_the_daemon_listens(environ: dict[str, str], uid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thin client's own reckoning agrees with the settings, or there is no daemon for this caller."""
    monkeypatch.setattr(os, "getuid", lambda: uid)
    found = thin.socket_path(environ)
    if uid and not environ.get("HOME", "").startswith("/") and "XDG_RUNTIME_DIR" not in environ:
        assert found == ""
    else:
        assert found == f"{settings.run_dir(environ, uid)}/daemon.sock"
