"""What a hostile command leaves in a session neither helps the next past its policy nor reaches the host."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cli.harness import PYTHON
from tests.cli.test_session import listed, run, sessions, snapshot
from tests.security.lab import drop_to

if TYPE_CHECKING:
    from tests.cli.harness import Caller

pytestmark = [pytest.mark.root, pytest.mark.security, pytest.mark.slow]
__all__ = ["sessions"]


def secret_below(caller: Caller, ws: Path) -> Path:
    """A file that the policy will hide, in a directory of the workspace."""
    directory = ws / "a/b"
    directory.mkdir(parents=True)
    for path in (directory, directory.parent):
        os.chown(path, caller.uid, caller.uid)
    caller.file(directory / "plain", "plain\n")
    return caller.file(directory / "secret", "CANARY\n")


MOVES = {
    "nothing": "true",
    "its directory renamed": "mv a/b a/c",
    "the one above renamed": "mv a z",
    "copied in by a link": "ln a/b/secret again || cp a/b/secret again",
    "its directory replaced": "mv a/b x; mkdir a/b; mv x/plain a/b/",
    "twice": "mv a/b a/c; mv a z",
    "a link in its place": "mv a real; ln -s real a",
    "its directory in conflict": "chmod 700 a/b; touch a/b",
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("move", MOVES)
def test_hidden_paths_stay_hidden(caller: Caller, ws: Path, move: str, frozen: bool) -> None:
    """What --deny hides stays hidden in a session, wherever an earlier command has moved its directory to."""
    hidden = secret_below(caller, ws)
    flags = ("--deny", str(hidden))
    ended = caller.sh(ws, MOVES[move], flags=("--session", "s", *flags))
    assert ended.code in (0, 1), ended
    if frozen:
        snapshot(caller, ws)
    script = "grep -rs CANARY . ~; find . ~ -name secret -exec cat {} +; cat a/b/secret; find . -name plain"
    out = caller.sh(ws, script, flags=("--session", "s", *flags)).out
    assert b"CANARY" not in out, out
    assert b"plain" in out, "the rest of the directory is there"
    assert b"CANARY" not in caller.sh(ws, script, flags=("--session", "s", *flags)).out
    assert hidden.read_text() == "CANARY\n"


def test_hidden_paths_are_what_is_hidden(caller: Caller, ws: Path) -> None:
    """Control: without --deny the same commands find it, in its new place, too."""
    secret_below(caller, ws)
    run(caller, ws, "mv a z")
    assert b"CANARY" in run(caller, ws, "grep -rs CANARY .")


def test_hidden_directories(caller: Caller, ws: Path) -> None:
    """A hidden directory is gone with all in it, its neighbours and what they look like are not."""
    secret_below(caller, ws)
    os.chmod(ws / "a", 0o750)
    os.utime(ws / "a", (1_000_000_000, 1_000_000_000))
    flags = ("--session", "s", "--deny", str(ws / "a/b"), "--deny", str(ws / "a/b/secret"))
    ended = caller.sh(ws, "find a; stat -c '%a %Y %u' a; id -u; touch a/n", flags=flags)
    found = ended.out.split()
    assert (ended.code, found[:3], found[3]) == (0, [b"a", b"750", b"1000000000"], found[4]), ended
    assert caller.sh(ws, "mkdir a/b && echo mine >a/b/secret && cat a/b/secret", flags=flags).out == b"mine\n"
    done = caller.cli("apply", "--session", "s", cwd=ws)
    assert b"held back: a/b" in done.err, done
    assert (ws / "a/b/secret").read_text() == "CANARY\n"
    assert (ws / "a/n").exists()
    for entry in caller.cli("changes", "--json", cwd=ws).json["held"]:
        caller.cli("discard", entry["name"], "--all", cwd=ws)


def test_links_in_home_lead_nowhere(caller: Caller, ws: Path) -> None:
    """A link where a cache would be mounted is refused, and nothing is made where it leads to."""
    outside = caller.workspace()
    for trap in (f"ln -s {outside} ~/.cache", "mkdir ~/.cache; ln -s /etc ~/.cache/pip", "echo >~/.cache"):
        run(caller, ws, f"rm -rf ~/.cache; {trap}")
        ended = caller.sh(ws, "true", flags=("--session", "s", "--cache", "pip"))
        assert ended.code == 125, (trap, ended)
        assert b"[session-home]" in ended.err, ended
    assert os.listdir(outside) == []
    run(caller, ws, "rm -rf ~/.cache")
    assert caller.sh(ws, "touch ~/.cache/pip/x", flags=("--session", "s", "--cache", "pip")).code == 0
    out = run(caller, ws, "ls ~/.cache/pip/x || :; echo", errors=True)
    assert out == b"\n", "a cache is no part of the session"
    assert caller.sh(ws, "ls ~/.cache/pip", flags=("--session", "s", "--cache", "pip")).out == b"x\n"


def test_what_the_gate_puts_into_home(caller: Caller, ws: Path) -> None:
    """No earlier command can put something else in the place of what the gate wants read, the certificates of
    the sandbox among it.
    """
    allow = ("--allow", "api.example.test", "--credential", "TOKEN=api.example.test")
    flags = ("--session", "s", *allow)
    script = "test -s ~/.casemate/ca-bundle.pem && wc -l <~/.casemate/ca-bundle.pem; echo >~/.casemate/x; :"
    env = {"TOKEN": "hush-hush-hush"}
    lines = caller.sh(ws, script, flags=flags, env=env).out
    assert int(lines) > 10
    run(caller, ws, "rm -rf ~/.casemate; mkdir ~/.casemate; echo mine >~/.casemate/ca-bundle.pem")
    assert caller.sh(ws, script, flags=flags, env=env).out == lines
    run(caller, ws, "rm -rf ~/.casemate; ln -s /etc ~/.casemate")
    ended = caller.sh(ws, script, flags=flags, env=env)
    assert ended.code == 125, ended
    assert b"[session-home]" in ended.err, ended


ATTRIBUTES = """
import os
os.makedirs("d/sub", exist_ok=True)
for prefix in ("user.overlay.", "trusted.overlay.", "user.casemate.", "trusted.casemate."):
    for name, value in (
        ("opaque", b"y"), ("redirect", b"/../../../../etc"), ("redirect", b"/old"), ("origin", b"x" * 30),
        ("metacopy", b""), ("whiteout", b"y"), ("mode", b"7777"), ("applied", b"y"), ("mode", b"x"),
    ):
        for path in (".", "d", "d/sub", "f", os.path.expanduser("~")):
            try:
                os.setxattr(path, prefix + name, value)
            except OSError:
                pass
"""


def test_attributes_of_the_overlay_cannot_be_forged(caller: Caller, ws: Path) -> None:
    """Attributes that overlayfs or the apply step would read mean nothing when a command sets them: not to
    the next command, not when layers are merged, not when they are applied.
    """
    caller.file(ws / "f", "f\n")
    (ws / "d").mkdir()
    os.chown(ws / "d", caller.uid, caller.uid)
    caller.file(ws / "d/x", "x\n")
    for _ in range(2):
        ended = caller.py(ws, ATTRIBUTES, flags=("--session", "s"))
        assert ended.code == 0, ended
        snapshot(caller, ws)
        assert run(caller, ws, "cat f d/x; ls d d/sub; ls ~") == b"f\nx\nd:\nsub\nx\n\nd/sub:\n"
    assert caller.cli("session", "flatten", "s", cwd=ws).code == 0
    assert run(caller, ws, "cat f d/x; ls d d/sub; ls ~; echo >n") == b"f\nx\nd:\nsub\nx\n\nd/sub:\n"
    done = caller.cli("apply", "--session", "s", cwd=ws)
    assert done.code == 0, done
    assert sorted(str(path.relative_to(ws)) for path in ws.rglob("*")) == ["d", "d/sub", "d/x", "f", "n"]
    assert {stat.S_IMODE(path.stat().st_mode) & 0o7000 for path in ws.rglob("*")} == {0}
    assert not [name for path in ws.rglob("*") for name in os.listxattr(path) if "overlay" in name]


def test_special_files_and_modes(caller: Caller, ws: Path) -> None:
    """Set-id files, FIFOs, sockets, locked directories and odd names stay in a session, in layers and out of
    everybody's reach; none of it arrives in the workspace.
    """
    script = (
        "cp /bin/true suid; chmod 6755 suid; mkfifo pipe; mkdir -p locked/in; echo x >locked/in/f; chmod 0 "
        "locked/in locked; touch $'a\\nb' $'\\xff\\xfe'; ln -s /etc/passwd link; ln suid other"
    )
    run(caller, ws, f"bash -c {shlex.quote(script)}")
    snapshot(caller, ws)
    run(caller, ws, "echo x >>suid; ls -la >/dev/null")
    assert caller.cli("session", "flatten", "s", cwd=ws).code == 0
    looked = "stat -c %a locked; chmod 700 locked; stat -c %a locked/in suid other; chmod 0 locked"
    out = run(caller, ws, f"ls; {looked}")
    assert out.endswith(b"0\n0\n755\n6755\n"), out
    (store,) = (caller.state / "sessions").iterdir()
    for uid in (1000, 65534):
        if uid != caller.uid:
            tried = subprocess.run(
                [*caller.words(["ls", str(store).removeprefix(caller.root)], "/")[: 7 if caller.den else 0],
                 *drop_to(uid), "ls", str(store)],
                capture_output=True, check=False,
            )  # fmt: skip
            assert tried.returncode != 0
    caller.cli("diff", "--session", "s", cwd=ws)
    assert run(caller, ws, "stat -c %a locked") == b"0\n", "to look at it changes nothing"
    done = caller.cli("apply", "--session", "s", cwd=ws)
    assert done.code == 0, done
    assert not (stat.S_IMODE((ws / "suid").stat().st_mode) & 0o7000)
    assert not (ws / "pipe").exists()
    for entry in caller.cli("changes", "--json", cwd=ws).json["held"]:
        caller.cli("discard", entry["name"], "--all", cwd=ws)


DEEP = """
import os
for _ in range(1500):
    os.mkdir("d" * 10)
    os.chdir("d" * 10)
open("f", "w").write("x" * 5000000)
"""


def test_deep_trees(caller: Caller, ws: Path) -> None:
    """A tree deeper than any path stays in a session and counts against its limit; it cannot be merged, which
    is said, and it can be rolled back and discarded.
    """
    first = caller.py(ws, DEEP, flags=("--session", "s", "--disk", "100M"))
    assert first.code == 0, first
    assert listed(caller, ws)[0]["used"] >= 5_000_000
    snapshot(caller, ws)
    run(caller, ws, "echo x >f")
    ended = caller.cli("session", "flatten", "s", cwd=ws)
    snapshot(caller, ws)
    ended = caller.cli("session", "flatten", "s", cwd=ws)
    assert ended.code == 125, ended
    assert b"[session-too-deep]" in ended.err, ended
    assert run(caller, ws, "cat f; ls") == b"x\ndddddddddd\nf\n"
    assert caller.cli("session", "rollback", "s", "start", cwd=ws).code == 0
    assert run(caller, ws, "ls") == b""
    assert listed(caller, ws)[0]["used"] < 100_000


def test_the_owner_on_disk_is_nobody(caller: Caller, ws: Path) -> None:
    """As root, what a session keeps belongs on disk to a uid that no sandbox has, whichever uid wrote it."""
    run(caller, ws, f"{PYTHON} -c 'open(\"f\", \"w\")'; touch ~/h")
    run(caller, ws, "echo >>f; mkdir d")
    (store,) = (caller.state / "sessions").iterdir()
    owners = {path.lstat().st_uid for path in Path(store, "layers").glob("*/*/*")}
    assert owners == {caller.uid or 0x70010000}
