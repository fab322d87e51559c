"""The command's end and its start: exit codes, how a program is found, what its arguments may hold."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.harness import Caller

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("traceless")]


@pytest.mark.parametrize("code", [0, 1, 2, 7, 123, 124, 125, 126, 127, 255])
def test_the_commands_own_code(caller: Caller, ws: Path, code: int) -> None:
    """The command's exit code is passed through, those included that mean something else for Casemate."""
    ended = caller.sh(ws, f"exit {code}")
    assert (ended.code, ended.out, ended.err) == (code, b"", b""), ended


@pytest.mark.parametrize("number", [1, 2, 6, 9, 11, 15])
def test_death_by_a_signal(caller: Caller, ws: Path, number: int) -> None:
    """A command that a signal ended gives 128 + n, and the report names the signal."""
    ended = caller.sh(ws, f"kill -{number} $$", flags=("--json",))
    assert ended.code == 128 + number, ended
    assert (ended.json["signal"], ended.json["exit-code"]) == (number, 128 + number)


def test_no_such_command(caller: Caller, ws: Path) -> None:
    """A program that is not there is 127 with a stable code, whether named by itself or by a path."""
    for name in ("no-such-program-here", "./no-such-file", "/usr/bin/no-such-file", "no-such-dir/x"):
        ended = caller.run(ws, name)
        assert ended.code == 127, ended
        assert b"[command-not-found]" in ended.err, ended
        assert name.encode() in ended.err, ended


def test_program_of_the_host_that_is_not_shown(caller: Caller, ws: Path) -> None:
    """When the host has the program outside of the sandbox's view, the message says how to show it."""
    place = caller.workspace("elsewhere")
    caller.file(place / "hosttool", "#!/bin/sh\necho from the host\n", 0o755)
    env = {"PATH": f"/usr/bin:/bin:{place}"}
    hidden = caller.run(ws, "hosttool", env=env, flags=("--policy", str(_no_tools(caller, ws))))
    assert hidden.code == 127, hidden
    assert str(place).encode() in hidden.err, hidden
    shown = caller.run(ws, "hosttool", env=env, flags=("--read", str(place)))
    assert (shown.code, shown.out) == (0, b"from the host\n"), shown


def _no_tools(caller: Caller, ws: Path) -> Path:
    return caller.file(ws.parent / "policy.toml", "version = 1\n[filesystem]\ntools = false\n")


def test_not_executable(caller: Caller, ws: Path) -> None:
    """A file without the mode bit, a directory and a bad interpreter line are told apart from 'not there'."""
    caller.file(ws / "plain", "#!/bin/sh\ntrue\n", 0o644)
    caller.file(ws / "bad", "#!/no/such/interpreter\n", 0o755)
    for name in ("./plain", "."):
        ended = caller.run(ws, name)
        assert ended.code == 127, ended
        assert b"[command-not-executable]" in ended.err, ended
    assert caller.run(ws, "./bad").code == 127
    caller.file(ws / "plain", "#!/bin/sh\nexit 3\n", 0o755)
    assert caller.run(ws, "./plain").code == 3


def test_usage(caller: Caller, ws: Path) -> None:
    """A command line that makes no sense is 2, with a hint; nothing runs."""
    cases: dict[tuple[str, ...], bytes] = {
        ("run",): b"no command was given",
        ("run", "--"): b"no command was given",
        ("run", "--timeot", "3s", "--", "true"): b"did you mean --timeout",
        ("run", "--timeout"): b"needs a value",
        ("run", "--tty", "perhaps", "--", "true"): b"--tty takes",
        ("run", "--json=1", "--", "true"): b"unknown option",
        ("frobnicate",): b"unknown command 'frobnicate'",
        (): b"usage: casemate",
    }
    for argv, text in cases.items():
        ended = caller.cli(*argv, cwd=ws)
        assert ended.code == 2, (argv, ended)
        assert text in ended.err, (argv, ended)
        assert ended.out == b""


def test_empty_name_of_a_command(caller: Caller, ws: Path) -> None:
    """An empty program name is refused before anything is made; an empty argument is an argument."""
    ended = caller.run(ws, "")
    assert ended.code == 2, ended
    assert b"[no-command]" in ended.err, ended
    assert caller.run(ws, "/usr/bin/printf", "<%s>", "").out == b"<>"


def test_help(caller: Caller, ws: Path) -> None:
    """Help and version go to stdout with 0; every option of the help is known."""
    ended = caller.cli("run", "--help", cwd=ws)
    assert ended.code == 0, ended
    assert ended.out.startswith(b"usage: casemate run"), ended
    assert caller.cli("--version", cwd=ws).out.startswith(b"casemate "), ended
    assert caller.cli("--help", cwd=ws).code == 0
    later = caller.cli("run", "--env", "A=1", "--help", cwd=ws)
    assert (later.code, later.out) == (0, ended.out), later


def test_script_without_interpreter_line(caller: Caller, ws: Path) -> None:
    """A text file without ``#!`` is run by /bin/sh, by path and along PATH, as execvp does."""
    caller.file(ws / "plain", 'echo "$0" "$1"\nexit 4\n', 0o755)
    ended = caller.run(ws, "./plain", "an argument")
    assert (ended.code, ended.out) == (4, b"./plain an argument\n"), ended
    ended = caller.run(ws, "plain", "x", flags=("--env", f"PATH={ws}:/usr/bin:/bin"))
    assert (ended.code, ended.out) == (4, f"{ws}/plain x\n".encode()), ended


def test_order_of_path(caller: Caller, ws: Path) -> None:
    """PATH is searched from the front; what cannot be executed is passed over."""
    for name, mode in (("first", 0o644), ("second", 0o755), ("third", 0o755)):
        (ws / name).mkdir()
        caller.file(ws / name / "tool", f"#!/bin/sh\necho {name}\n", mode)
    path = f"PATH={ws}/first:{ws}/second:{ws}/third:/usr/bin:/bin"
    assert caller.run(ws, "tool", flags=("--env", path)).out == b"second\n"
    only = caller.run(ws, "tool", flags=("--env", f"PATH={ws}/first:/usr/bin"))
    assert only.code == 127, only
    assert b"[command-not-executable]" in only.err, only


def test_a_path_of_one_entry_and_none(caller: Caller, ws: Path) -> None:
    """A PATH of one directory works; with an empty one only paths do."""
    assert caller.run(ws, "true", flags=("--env", "PATH=/usr/bin")).code == 0
    assert caller.run(ws, "true", flags=("--env", f"PATH={ws}")).code == 127
    assert caller.run(ws, "/usr/bin/true", flags=("--env", "PATH=")).code == 0


def test_arguments_of_any_bytes(caller: Caller, ws: Path) -> None:
    """Arguments and variables may hold unicode, line ends, escapes and bytes that are no UTF-8."""
    words = [b"na\xc3\xafve", b"\xff\xfe\x80", b"two\nlines", b"\x1b[31m", b" ", b"--", b"-x", b"%s"]
    ended = caller.cli(
        "run", "--env", b"ODD=\xff\n\xc3\xa4", "--", "/usr/bin/printf", "%s\\0", *words, cwd=ws
    )
    assert ended.code == 0, ended
    assert ended.out.split(b"\0")[:-1] == words
    told = caller.cli(
        "run", "--env", b"ODD=\xff\n\xc3\xa4", "--", "/bin/sh", "-c", 'printf %s "$ODD"', cwd=ws
    )
    assert told.out == b"\xff\n\xc3\xa4", told


def test_odd_names_in_messages_and_reports(caller: Caller, ws: Path) -> None:
    """Names that are no UTF-8 or hold escapes neither break the report nor reach the terminal raw."""
    ended = caller.cli("run", "--", b"no-\xff-\x1b[31m", cwd=ws)
    assert ended.code == 127, ended
    assert b"\x1b" not in ended.err, ended
    ended = caller.cli("run", "--json", "--", "/bin/sh", "-c", b": >bad-\xff", cwd=ws)
    assert ended.code == 0, ended
    assert ended.json["applied"]["changes"] == ["created bad-\\xff"]
    assert os.path.exists(os.fsencode(ws) + b"/bad-\xff")


def test_one_large_argument(caller: Caller, ws: Path) -> None:
    """The largest argument that the kernel takes is passed; a variable beyond it is refused, nothing runs."""
    fits = caller.run(ws, "/bin/sh", "-c", 'printf %s "$1" | wc -c', "sh", "x" * 131_071)
    assert (fits.code, fits.out.strip()) == (0, b"131071"), fits
    text = f'version = 1\n[environment.set]\nBIG = "{"y" * 140_000}"\n'
    policy = str(caller.file(ws.parent / "big.toml", text))
    large = caller.run(ws, "/bin/sh", "-c", ": >ran", flags=("--policy", policy))
    assert large.code == 126, large
    assert b"longer than the kernel takes" in large.err, large
    assert not (ws / "ran").exists()


def test_large_environment(caller: Caller, ws: Path) -> None:
    """Variables of 1 MiB in all are passed; more than the kernel takes is a clear error and runs nothing."""

    def policy(count: int) -> str:
        lines = "".join(f'V{number} = "{"z" * 100_000}"\n' for number in range(count))
        return str(caller.file(ws.parent / "env.toml", f"version = 1\n[environment.set]\n{lines}"))

    fits = caller.sh(ws, "env | wc -c", flags=("--policy", policy(9)))
    assert fits.code == 0, fits
    assert int(fits.out) > 900_000
    # A policy file takes 1 MiB at most: the rest comes from the caller's own environment.
    passed = {f"MYAPP_{number}": "w" * 100_000 for number in range(12)}
    large = caller.sh(ws, ": >ran", flags=("--policy", policy(9), "--env", "MYAPP_*"), env=passed)
    assert large.code == 125, large
    assert b"[argument-too-long]" in large.err, large
    assert not (ws / "ran").exists()


def test_odd_names_of_variables(caller: Caller, ws: Path) -> None:
    """A variable without a name is refused with a word; an empty value is a value."""
    ended = caller.sh(ws, ": >ran", flags=("--env", "=x"))
    assert ended.code in (2, 126), ended
    assert not (ws / "ran").exists()
    assert caller.sh(ws, 'printf "<%s>" "${EMPTY-unset}"', flags=("--env", "EMPTY=")).out == b"<>"


def test_start_in_a_subdirectory(caller: Caller, ws: Path) -> None:
    """-C names the workspace: the command starts where its caller is if that lies inside, else at the top."""
    deep = ws / "a" / "b"
    deep.mkdir(parents=True)
    assert caller.run(deep, "/bin/pwd", flags=("-C", str(ws))).out == f"{deep}\n".encode()
    outside = caller.workspace("outside")
    assert caller.run(outside, "/bin/pwd", flags=("-C", str(ws))).out == f"{ws}\n".encode()
    assert caller.run(deep, "/bin/pwd", flags=("--workspace=../..",)).out == f"{deep}\n".encode()
    link = ws.parent / "link"
    link.symlink_to(ws)
    os.lchown(link, caller.uid, caller.uid)
    assert caller.run(outside, "/bin/pwd", flags=("-C", str(link))).out == f"{ws}\n".encode()


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_umask_is_passed_on(caller: Caller, ws: Path, mask: int) -> None:
    """The command has its caller's umask, and what it makes arrives with those modes."""
    ended = caller.sh(
        ws, "umask; : >file; mkdir dir", before=("/bin/sh", "-c", f'umask {mask:o}; exec "$0" "$@"')
    )
    assert int(ended.out, 8) == mask, ended
    assert (ws / "file").stat().st_mode & 0o777 == 0o666 & ~mask
    assert (ws / "dir").stat().st_mode & 0o777 == 0o777 & ~mask
