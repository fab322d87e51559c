"""The policy commands, started as a person starts them: exit codes, data on stdout, messages on stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from casemate.cli.policy_cmds import STARTER
from casemate.policy import parse
from casemate.policy.model import RawPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.policy.conftest import Caller

SOURCE = str(Path(__file__).parents[3] / "src")
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from casemate.cli.policy_cmds import main
sys.exit(main(sys.argv[2:]))
"""


class Commands:
    """Runs the commands in a workspace."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.environ = {
            "HOME": caller.places.home,
            "PATH": "/usr/bin:/bin",
            "XDG_STATE_HOME": f"{caller.root}/state",
        }

    def __call__(self, *argv: str, code: int = 0, **environ: str) -> tuple[str, str]:
        """Run one; returns what it wrote to stdout and to stderr."""
        done = subprocess.run(
            [sys.executable, "-I", "-c", PROGRAM, SOURCE, *argv],
            cwd=self.caller.workspace, env=self.environ | environ, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout, done.stderr

    @property
    def file(self) -> Path:
        """The project's policy file."""
        return Path(self.caller.workspace, "casemate.toml")


@pytest.fixture
def casemate(caller: Caller) -> Iterator[Commands]:
    """The commands; whatever trust they record is taken back."""
    commands = Commands(caller)
    yield commands
    commands("trust", "--revoke")


def test_init_writes_a_file_that_changes_nothing(casemate: Commands, caller: Caller) -> None:
    """The starter is valid, grants nothing, and its name is all that stdout holds."""
    before = caller.load().policy
    out, err = casemate("init")
    assert out == f"{caller.workspace}/casemate.toml\n"
    assert "starter" in err
    assert casemate.file.read_text() == STARTER
    assert caller.load().policy == before


def test_every_line_of_the_starter_is_valid_when_taken_in() -> None:
    """A person may remove any comment sign in front of a setting."""
    lines = [line.removeprefix("# ") if " = " in line else line for line in STARTER.splitlines()]
    _, raw = parse.policy("\n".join(lines).encode(), "p.toml", name="project")
    assert isinstance(raw, RawPolicy)
    assert tomllib.loads("\n".join(lines))["filesystem"]["cache"] == ["pip", "npm"]


def test_init_never_overwrites(casemate: Commands, caller: Caller) -> None:
    """A file or a link in its place stays as it is."""
    casemate.file.write_text("mine")
    _, err = casemate("init", code=126)
    assert "exists" in err
    assert casemate.file.read_text() == "mine"
    casemate.file.unlink()
    casemate.file.symlink_to(f"{caller.root}/elsewhere")
    casemate("init", code=126)
    assert not Path(caller.root, "elsewhere").exists()


def test_init_refuses_a_home(casemate: Commands, caller: Caller) -> None:
    """No policy is written where no sandbox may work."""
    casemate("init", caller.places.home, code=126)
    assert not Path(caller.places.home, "casemate.toml").exists()


def test_trust_prints_what_it_grants_and_counts_until_the_file_changes(casemate: Commands) -> None:
    """The grants are on stdout, the trust is listed, and one more byte ends it."""
    text = "version = 1\n[filesystem]\ncache = ['pip']\ndeny = ['.env']\n[resources]\nmemory = '1G'\n"
    casemate.file.write_text(text)
    shown = json.loads(casemate("policy", "show", "--json")[0])
    assert shown["policy"]["filesystem"]["cache"] == []
    out, _ = casemate("trust")
    assert out == 'filesystem.cache = ["pip"]\n'
    shown = json.loads(casemate("policy", "show", "--json")[0])
    assert shown["policy"]["filesystem"]["cache"] == ["pip"]
    assert shown["origins"]["filesystem.cache"] == "project"
    assert f"  {casemate.caller.workspace}\n" in casemate("trust", "--list")[0]
    casemate.file.write_text(text + " ")
    assert json.loads(casemate("policy", "show", "--json")[0])["policy"]["filesystem"]["cache"] == []
    casemate("trust", "--revoke")
    assert casemate.caller.workspace not in casemate("trust", "--list")[0]


def test_trust_needs_a_valid_file_that_asks_for_something(casemate: Commands) -> None:
    """A missing or over-broad file is refused, one that only restricts needs no trust."""
    assert "no such file" in casemate("trust", code=126)[1]
    casemate.file.write_text("version = 1\n[filesystem]\nread = ['/etc']\n")
    assert "too broad" in casemate("trust", code=126)[1]
    casemate.file.write_text("version = 1\n[filesystem]\ndeny = ['.env']\n[network]\nmode = 'host'\n")
    out, err = casemate("trust")
    assert out == ""
    assert "nothing that needs trust" in err
    assert casemate.caller.workspace not in casemate("trust", "--list")[0]


def test_trust_is_refused_inside_a_sandbox(casemate: Commands) -> None:
    """A command cannot approve itself."""
    casemate.file.write_text("version = 1\n[filesystem]\ncache = ['pip']\n")
    assert "inside a sandbox" in casemate("trust", code=126, CASEMATE_SANDBOX="process")[1]
    casemate("trust")


def test_show_prints_a_policy_that_says_the_same(casemate: Commands, caller: Caller) -> None:
    """The TOML of ``show`` is a policy file; loaded, it comes to what was shown."""
    data = caller.directory("da\"ta\\ é")
    options = ("--read", data, "--memory", "1536M", "--timeout", "90s", "--env", "A=b", "--deny", ".env")
    out, err = casemate("policy", "show", *options)
    assert err == ""
    file = caller.file("shown.toml", out)
    shown = json.loads(casemate("policy", "show", "--json", *options)[0])
    again = json.loads(casemate("policy", "show", "--json", "--policy", file)[0])
    assert again["policy"] == shown["policy"]
    assert "memory = \"1536M\"  # flags" in out
    assert "pids = 4096  # preset" in out


def test_show_tells_notes_on_stderr(casemate: Commands) -> None:
    """What a person must see does not end up in a pipe."""
    out, err = casemate("policy", "show", "--preset", "full-access")
    assert "FULL ACCESS" in err
    assert "FULL ACCESS" not in out
    assert json.loads(casemate("policy", "show", "--json", "--preset", "full-access")[0])["degraded"]


def test_check_judges_each_file(casemate: Commands, caller: Caller) -> None:
    """Good files are named on stdout, bad ones on stderr with line and suggestion."""
    good = caller.file("good.toml", "version = 1\n")
    bad = caller.file("bad.toml", "version = 1\n[filesystem]\nwirte = []\n")
    assert casemate("policy", "check", good) == (f"{good}: ok\n", "")
    out, err = casemate("policy", "check", bad, good, code=126)
    assert out == f"{good}: ok\n"
    assert "bad.toml:3" in err
    assert "did you mean 'write'?" in err
    report = json.loads(casemate("policy", "check", "--json", bad, good, code=126)[0])
    assert [entry["ok"] for entry in report] == [False, True]
    assert report[0]["error"]["details"]["field"] == "filesystem.wirte"
    casemate("policy", "check", f"{caller.root}/none", code=126)


def test_check_knows_the_administrators_file(casemate: Commands, caller: Caller) -> None:
    """``--managed`` takes a ceiling, and only then."""
    file = caller.file("m.toml", "version = 1\n[ceiling]\nread = []\n")
    casemate("policy", "check", "--managed", file)
    casemate("policy", "check", file, code=126)
    casemate("policy", "check", "--managed", caller.file("n.toml", "version = 1\n[ceiling]\ncache = ['x']\n"),
    code=126)


def test_schema_is_json(casemate: Commands) -> None:
    """The schema of either kind is one JSON object."""
    for options in ((), ("--managed",)):
        assert json.loads(casemate("policy", "schema", *options)[0])["$defs"]


def test_diff_compares_what_files_and_presets_come_to(casemate: Commands, caller: Caller) -> None:
    """Spelling makes no difference, values do."""
    one = caller.file("one.toml", "version = 1\n[resources]\nmemory = '1024M'\n")
    two = caller.file("two.json", '{"version": 1, "resources": {"memory": 1073741824}}')
    assert casemate("policy", "diff", one, two)[0] == ""
    out, _ = casemate("policy", "diff", "read-only", "workspace-write")
    assert out == 'filesystem.workspace: "read" -> "write"\n'
    assert "resources.memory" in json.loads(casemate("policy", "diff", "--json", one, "full-access")[0])


@pytest.mark.parametrize(
    "argv",
    [
        ("policy",), ("policy", "shw"), ("policy", "diff", "read-only"), ("policy", "check"), ("init",
        "--force"),
        ("trust", "--revoke", "--list"), ("trust", "a", "b"), ("policy", "schema", "x"), ("policy", "show",
        "x"),
        ("policy", "show", "--memroy", "1G"), ("trust", "--list", "x"),
    ],
)  # fmt: skip
def test_usage_errors_have_code_2(casemate: Commands, argv: tuple[str, ...]) -> None:
    """A mistake on the command line is none of the policy's."""
    out, err = casemate(*argv, code=2)
    assert out == ""
    assert "--help" in err


def test_help_is_data(casemate: Commands) -> None:
    """Each command explains itself on stdout."""
    for name in ("init", "trust", "policy"):
        assert casemate(name, "--help")[0].startswith("usage: casemate")


def test_names_cannot_steer_the_terminal(casemate: Commands) -> None:
    """What a hostile file says is shown escaped on both streams."""
    casemate.file.write_text('version = 1\n[filesystem]\ndeny = ["a\\u001b]0;x\\u0007"]\n')
    out, err = casemate("policy", "show")
    assert "\x1b" not in out + err
    assert "\\u001b" in out
    assert os.sep in out
