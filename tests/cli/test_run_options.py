"""What the options of run do: reports, environment, views, workspace."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.harness import until

if TYPE_CHECKING:
    from tests.cli.harness import Caller

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("traceless")]

FIELDS = {
    "exit-code", "signal", "limit", "limits-touched", "applied", "denials", "boundary", "degraded", "scopes",
    "notes", "phases", "peak-memory", "cpu",
}  # fmt: skip


def test_json_is_one_object(caller: Caller, ws: Path) -> None:
    """--json: exactly one object on stdout, whatever the command prints; its stdout goes to stderr."""
    ended = caller.sh(ws, "echo out; echo err >&2; echo '{}'; echo x >made; exit 3", flags=("--json",))
    assert ended.code == 3, ended
    assert ended.out.count(b"\n") == 1, ended
    report = ended.json
    assert set(report) >= FIELDS
    assert (report["exit-code"], report["boundary"]) == (3, "process")
    assert (report["applied"]["created"], report["applied"]["changes"]) == (1, ["created made"])
    assert sorted(ended.err.split()) == [b"err", b"out", b"{}"], ended
    phases = report["phases"]
    assert {"plan", "seal", "run", "settle", "total"} <= set(phases)
    assert sum(value for name, value in phases.items() if name != "total") <= phases["total"] * 1.05 + 1


def test_json_of_an_error(caller: Caller, ws: Path) -> None:
    """What keeps a command from running is an object too, with code, message, hint and exit code."""
    cases = (
        ("no-such-program", (), 127, "command-not-found"),
        ("true", ("--preset", "nonsense"), 126, "policy-invalid"),
        ("true", ("--policy", "/no/such.toml"), 126, "policy-missing"),
        ("true", ("--read", "/"), 126, "policy-invalid"),
        ("true", ("--memory", "lots"), 126, "policy-invalid"),
    )
    for name, flags, code, expected in cases:
        ended = caller.run(ws, name, flags=(*flags, "--json"))
        assert ended.code == code, ended
        error: dict[str, Any] = ended.json["error"]
        assert (error["code"], ended.json["exit-code"]) == (expected, code), ended
        assert error["message"], ended
        assert b"Traceback" not in ended.err, ended


def test_report_file(caller: Caller, ws: Path) -> None:
    """--report writes the same object, for results and errors alike, with the caller's own mode."""
    target = ws.parent / "report.json"
    ended = caller.sh(ws, "echo out; echo x >made", flags=("--report", str(target), "--json"))
    assert json.loads(target.read_text())["applied"] == ended.json["applied"]
    assert ended.err == b"out\n"
    facts = target.stat()
    assert (facts.st_uid, facts.st_mode & 0o777) == (caller.uid, 0o644)
    ended = caller.run(ws, "no-such-program", flags=("--report", str(target)))
    assert json.loads(target.read_text())["error"]["code"] == "command-not-found"
    assert ended.out == b""
    # Relative to the caller's directory.
    assert caller.run(ws, "true", flags=("--report", "../other.json")).code == 0
    assert json.loads((ws.parent / "other.json").read_text())["exit-code"] == 0


def test_report_that_cannot_be_written(caller: Caller, ws: Path) -> None:
    """When the report has no place, that is told before anything runs."""
    ended = caller.sh(ws, ": >ran", flags=("--report", "no/such/dir/report.json"))
    assert ended.code == 126, ended
    assert b"[report-unwritable]" in ended.err, ended
    assert not (ws / "ran").exists()
    control = caller.sh(ws, ": >ran", flags=("--report", "report.json"))
    assert control.code == 0, control
    assert (ws / "ran").exists()


def test_report_never_follows_the_command(caller: Caller, ws: Path) -> None:
    """A link that the command puts in the report's place, or in its way, leads nothing to the outside."""
    outside = caller.workspace("outside")
    victim = caller.file(outside / "victim", "untouched")
    (ws / "sub").mkdir()
    os.chown(ws / "sub", caller.uid, caller.uid)
    for name, script in (
        ("report.json", f"ln -s {victim} report.json"),
        ("report.json", f"rm -f report.json; ln -s {outside}/new report.json"),
        ("report.json", "rm -f report.json; ln -s /usr/lib/new report.json"),
        ("sub/victim", f"rm -rf sub; ln -s {outside} sub"),
    ):
        ended = caller.sh(ws, script, flags=("--report", name))
        assert victim.read_text() == "untouched", ended
        assert not (outside / "new").exists(), ended
        assert not os.path.lexists("/usr/lib/new"), ended


def test_report_over_a_link_of_the_callers_own(caller: Caller, ws: Path) -> None:
    """A link that was there before is the caller's word: the report goes where it leads, and into a pipe."""
    real = caller.file(ws.parent / "real.json", "old")
    link = ws.parent / "link.json"
    link.symlink_to(real)
    assert caller.run(ws, "true", flags=("--report", str(link))).code == 0
    assert link.is_symlink()
    assert json.loads(real.read_text())["exit-code"] == 0
    for path in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"):
        ended = caller.run(ws, "true", flags=("--report", path))
        assert ended.json["exit-code"] == 0, ended


def test_quiet(caller: Caller, ws: Path) -> None:
    """--quiet leaves the summary out, -q too; errors are still told."""
    script = "echo x >.envrc; echo '#!/bin/sh' >tool; chmod +x tool"
    loud = caller.sh(ws, script)
    assert loud.code == 0, loud
    assert b"held back" in loud.err, loud
    assert b"changed executables" in loud.err, loud
    for flag in ("--quiet", "-q"):
        (ws / "tool").unlink()
        assert caller.sh(ws, script, flags=(flag,)).err == b""
    assert b"[command-not-found]" in caller.run(ws, "no-such-program", flags=("-q",)).err


def test_environment(caller: Caller, ws: Path) -> None:
    """Only the short list gets in; --env NAME passes one more, --env NAME=VALUE sets one."""
    probe = "echo $CALLERS_SECRET,$EXTRA,$SET,$HOME,$USER,$CASEMATE_SANDBOX,$TERM"
    env = {"EXTRA": "extra value"}
    plain = caller.sh(ws, probe, env=env)
    assert plain.out == b",,,/home/sandbox,sandbox,process,xterm\n", plain
    more = caller.sh(
        ws, probe, env=env, flags=("--env", "EXTRA", "--env", "SET=a=b c", "--env=CALLERS_SECRET")
    )
    assert more.out == b"hush,extra value,a=b c,/home/sandbox,sandbox,process,xterm\n", more
    own = caller.sh(ws, probe, flags=("--env", "CASEMATE_SANDBOX=none"))
    assert own.code == 126, "a command is not told a lie about where it is"


def test_read(caller: Caller, ws: Path) -> None:
    """--read shows a path read-only; without it the path is not there."""
    other = caller.workspace("other")
    caller.file(other / "data", "data")
    script = f"cat {other}/data; echo x >{other}/new; echo $?"
    without = caller.sh(ws, script)
    assert b"data" not in without.out, without
    with_it = caller.sh(ws, script, flags=("--read", str(other)))
    assert with_it.out.startswith(b"data"), with_it
    assert not with_it.out.endswith(b"0\n"), with_it
    assert not (other / "new").exists()


def test_many_paths(caller: Caller, ws: Path) -> None:
    """A hundred more readable paths are no problem; they are all there."""
    places = [caller.workspace(f"r{number}") for number in range(100)]
    flags = [word for place in places for word in ("--read", str(place))]
    script = " && ".join(f"test -d {place}" for place in places)
    ended = caller.sh(ws, script, flags=tuple(flags))
    assert ended.code == 0, ended


def test_write(caller: Caller, ws: Path) -> None:
    """--write adds a second view: nothing is changed while the command runs, all of it at the end."""
    other = caller.workspace("other")
    caller.file(other / "old", "old")
    script = f"echo new >{other}/new; rm {other}/old; echo w >made; echo up; read x"
    process = caller.start("run", "--json", "--write", str(other), "--", "/bin/sh", "-c", script, cwd=ws)
    assert process.stderr is not None
    assert process.stderr.readline() == b"up\n"
    assert (sorted(os.listdir(other)), os.listdir(ws)) == (["old"], [])
    out, _ = process.communicate(b"\n", timeout=20)
    assert process.returncode == 0
    assert (sorted(os.listdir(other)), os.listdir(ws)) == (["new"], ["made"])
    assert (other / "new").stat().st_uid == caller.uid
    changes = json.loads(out)["applied"]["changes"]
    assert set(changes) == {"created made", f"created {other}/new", f"deleted {other}/old"}
    refused = caller.sh(ws, f"echo x >{other}/again")
    assert refused.code != 0, refused
    assert not (other / "again").exists()


def test_write_protects_names_as_well(caller: Caller, ws: Path) -> None:
    """What is protected in the workspace is protected in the second view."""
    other = caller.workspace("other")
    ended = caller.sh(
        ws, f"echo x >{other}/.envrc; echo y >{other}/plain", flags=("--write", str(other), "--json")
    )
    assert (ended.code, os.listdir(other)) == (0, ["plain"]), ended
    assert [row[0] for row in ended.json["applied"]["held"]] == [f"{other}/.envrc"], ended


def test_deny(caller: Caller, ws: Path) -> None:
    """--deny hides a path of the workspace, or of another one shown; what lies there stays."""
    caller.file(ws / ".env", "secret")
    (ws / "dir").mkdir()
    caller.file(ws / "dir" / "inner", "secret")
    script = "cat .env dir/inner; ls dir; echo x >.env; echo done"
    assert caller.sh(ws, "cat .env dir/inner").out == b"secretsecret"
    ended = caller.sh(ws, script, flags=("--deny", ".env", "--deny", "dir"))
    assert ended.out == b"done\n", ended
    assert (ws / ".env").read_text() == "secret"
    assert (ws / "dir" / "inner").read_text() == "secret"


def test_deny_of_what_is_not_there(caller: Caller, ws: Path) -> None:
    """A hidden path that does not exist is not brought into being by the command either."""
    ended = caller.sh(ws, "echo x >.env; echo y >other", flags=("--deny", ".env"))
    assert not (ws / ".env").exists(), ended
    assert (ws / "other").exists(), ended


def test_protect(caller: Caller, ws: Path) -> None:
    """--protect holds changes of a name back, listed in the report; without it they are applied."""
    ended = caller.sh(ws, "echo x >poetry.lock", flags=("--protect", "*.lock", "--json"))
    assert [row[0] for row in ended.json["applied"]["held"]] == ["poetry.lock"], ended
    assert not (ws / "poetry.lock").exists()
    assert caller.sh(ws, "echo x >poetry.lock").code == 0
    assert (ws / "poetry.lock").exists()


def test_cache(caller: Caller, ws: Path) -> None:
    """--cache keeps a package manager's cache per workspace between runs, and nothing without it."""
    script = 'd=$(dirname "$PIP_CACHE_DIR/x"); test -n "$PIP_CACHE_DIR" && cat "$d/kept" ; echo k >"$d/kept"'
    first = caller.sh(ws, script, flags=("--cache", "pip"))
    assert (first.code, first.out) == (0, b""), first
    second = caller.sh(ws, script, flags=("--cache", "pip"))
    assert (second.code, second.out) == (0, b"k\n"), second
    assert caller.sh(caller.workspace("another"), script, flags=("--cache", "pip")).out == b""
    assert caller.sh(ws, "ls -A ~").out.split() == [b".gitconfig"]
    assert os.listdir(ws) == []


def test_presets(caller: Caller, ws: Path) -> None:
    """read-only changes nothing and says what would; full-access says loudly that there is no boundary."""
    ended = caller.sh(ws, "echo x >made", flags=("--preset", "read-only"))
    assert ended.code != 0, ended
    assert b'filesystem.workspace = "write"' in ended.err, ended
    assert os.listdir(ws) == []
    loud = caller.sh(ws, "echo x >made; echo $CALLERS_SECRET; exit 3", flags=("--preset", "full-access"))
    assert (loud.code, loud.out) == (3, b"hush\n"), loud
    assert b"FULL ACCESS" in loud.err, loud
    assert os.listdir(ws) == ["made"]


def test_full_access(caller: Caller, ws: Path) -> None:
    """Without a boundary the rest is the same: one object with --json, umask, signals, codes."""
    flags = ("--preset", "full-access")
    ended = caller.sh(ws, "echo out; exit 3", flags=(*flags, "--json"))
    assert (ended.code, ended.json["boundary"]) == (3, "none")
    assert "boundary = none" in ended.json["degraded"], ended
    assert ended.err.endswith(b"out\n"), ended
    before = ("/bin/sh", "-c", 'umask 027; exec "$0" "$@"')
    assert caller.sh(ws, "umask", flags=flags, before=before).out == b"0027\n"
    assert caller.run(ws, "no-such-program", flags=flags).code == 127
    process = caller.start("run", *flags, "--", "/bin/sh", "-c", "echo up; exec sleep 60", cwd=ws)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.terminate()
    assert caller.end(process) == 143
    for _ in range(10):  # by its first breath, when there is hardly a handler yet
        ended = caller.sh(ws, "kill -TERM $PPID; exec sleep 60", flags=flags)
        assert ended.code == 143, ended


def test_network_word(caller: Caller, ws: Path) -> None:
    """--network host is shown as degraded in the result; a mode that does not exist is refused."""
    probe = "cat /proc/net/route | wc -l; ls /sys/class/net 2>/dev/null; cat /proc/net/dev | wc -l"
    inside = caller.sh(ws, probe, flags=("--json",))
    assert inside.json["degraded"] == [], inside
    host = caller.sh(ws, probe, flags=("--network", "host", "--json"))
    assert "network = host" in host.json["degraded"], host
    for mode in ("none", "allowlist", "full"):
        assert caller.sh(ws, probe, flags=("--network", mode, "--json")).json["degraded"] == [], mode
    for flags in (("--network", "nonsense"), ("--allow", "*.com"), ("--allow", "127.0.0.1:80")):
        refused = caller.sh(ws, ": >ran", flags=flags)
        assert refused.code == 126, refused
        assert b"flags: network." in refused.err, refused
    assert not (ws / "ran").exists()


def test_policy_file(caller: Caller, ws: Path) -> None:
    """--policy stands in the place of the user's file; flags weigh more."""
    policy = caller.file(ws.parent / "p.toml", 'version = 1\n[environment.set]\nA = "file"\nB = "file"\n')
    ended = caller.sh(ws, "echo $A $B", flags=("--policy", str(policy), "--env", "B=flag"))
    assert ended.out == b"file flag\n", ended
    assert caller.sh(ws, "echo $A $B", flags=("--policy", "../p.toml")).out == b"file file\n"


def test_timeout(caller: Caller, ws: Path) -> None:
    """--timeout ends the command with 124, names the limit, and what was changed before is applied."""
    ended = caller.sh(ws, "echo x >made; sleep 60", flags=("--timeout", "1s", "--json"))
    assert ended.code == 124, ended
    assert ended.json["limit"] == "timeout"
    assert (ws / "made").exists()
    assert caller.sh(ws, "sleep 0.1", flags=("--timeout", "30s")).code == 0


def test_the_last_of_a_repeated_option_counts(caller: Caller, ws: Path) -> None:
    """A repeated scalar replaces the one before; ``--name=value`` and ``--name value`` are the same."""
    ended = caller.sh(ws, "ulimit -n", flags=("--open-files", "100", "--open-files=200"))
    assert ended.out == b"200\n", ended


def test_nothing_shows_before_the_end(caller: Caller, ws: Path) -> None:
    """The workspace stays as it is while the command runs, also when that takes longer than a moment."""
    process = caller.start("run", "--", "/bin/sh", "-c", "echo x >made; echo up; read x", cwd=ws)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    until(lambda: any("note.json" in name for name in caller.files()), 10, "the changes are kept by now")
    assert os.listdir(ws) == []
    process.communicate(b"\n", timeout=20)
    assert (process.returncode, os.listdir(ws)) == (0, ["made"])


@pytest.mark.parametrize("place", ["/tmp", "/var/tmp"])
def test_workspace_among_temporary_files(caller: Caller, place: str) -> None:
    """A workspace below the host's /tmp or /var/tmp works at its own path; nothing else there is touched."""
    base = Path(tempfile.mkdtemp(prefix="casemate-place-", dir=place))
    base.chmod(0o755)
    ws, index, neighbour = base / "t1" / "ws", base / "index", base / "neighbour"
    other = Path("/tmp" if place == "/var/tmp" else "/var/tmp") / base.name
    try:
        for path in (ws, index, neighbour):
            path.mkdir(parents=True)
            os.chown(path, caller.uid, caller.uid)
        script = "pwd; ls -d $PIP_FIND_LINKS; ls -A /tmp /var/tmp; echo x >made; : >/tmp/a; : >/var/tmp/b"
        ended = caller.sh(ws, script, env={"PIP_FIND_LINKS": str(index)})
        assert ended.code == 0, ended
        lines = ended.out.decode().splitlines()
        assert lines[:2] == [str(ws), str(index)], ended
        assert not any("neighbour" in line for line in lines), ended
        assert (ws / "made").read_text() == "x\n"
        assert not other.exists(), "no mount point is made on the host"
        assert not any(os.path.exists(name) for name in ("/tmp/a", "/var/tmp/b"))
        elsewhere = caller.workspace()
        assert caller.sh(elsewhere, "ls -d $PIP_FIND_LINKS", env={"PIP_FIND_LINKS": str(index)}).code == 0
        assert not other.exists()
    finally:
        shutil.rmtree(base)


def test_policy_file_of_root(caller: Caller, ws: Path) -> None:
    """A policy file of root's counts for everybody; one that others may write does not."""
    file = caller.base / "roots.toml"
    file.write_text('version = 1\n[environment]\nset = { FROM = "root" }\n')
    file.chmod(0o644)
    ended = caller.sh(ws, "echo $FROM", flags=("--policy", str(file)))
    assert (ended.code, ended.out) == (0, b"root\n"), ended
    file.chmod(0o666)
    refused = caller.sh(ws, "echo ran >ran", flags=("--policy", str(file)))
    assert refused.code == 126, refused
    assert not (ws / "ran").exists()
