"""The resident daemon: only for its own user, clean, alone, and with the same results as without it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.harness import PYTHON, Caller, Den, alive, daemon_pid, family, until
from tests.security.lab import drop_to, give

if TYPE_CHECKING:
    from tests.cli.harness import Ended

pytestmark = [pytest.mark.root]


def path_of(caller: Caller) -> Path:
    return caller.runtime / "daemon.sock"


def test_start_status_stop(caller: Caller) -> None:
    """It starts once, says that it runs, stops, and leaves nothing; without one, that is said."""
    assert caller.cli("daemon", "status", cwd="/").code == 1
    assert caller.cli("daemon", "stop", cwd="/").code == 1
    assert caller.cli("daemon", cwd="/").code == 2
    assert caller.cli("daemon", "start", cwd="/").code == 0
    pid = daemon_pid(caller)
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    again = caller.cli("daemon", "start", cwd="/")
    assert (again.code, b"runs already" in again.err) == (0, True), again
    assert daemon_pid(caller) == pid
    relatives = family(pid)
    assert len(relatives) == 2
    caller.started += relatives
    assert caller.cli("daemon", "stop", cwd="/").code == 0
    until(lambda: not any(map(alive, relatives)))
    assert daemon_pid(caller) == 0
    assert not caller.traces(), caller.traces()


def served(caller: Caller, ws: Path, daemon: int) -> bool:
    """Whether a run in this workspace is the daemon's: the launcher's pid says so."""
    process = caller.start("run", "--", "/bin/sh", "-c", "echo up; read x", cwd=ws)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
        own = file.read().split()
    process.communicate(b"\n", timeout=20)
    assert process.returncode == 0
    return not own and daemon > 0


def test_runs_are_served(caller: Caller, ws: Path, daemon: int) -> None:
    """A run goes through the daemon; --no-daemon keeps it out, wherever it stands among the options."""
    assert served(caller, ws, daemon)
    for flags in (("--no-daemon",), ("--env", "A=1", "--no-daemon"), ("--timeout=30s", "--no-daemon", "-q")):
        process = caller.start("run", *flags, "--", "/bin/sh", "-c", "echo up; read x", cwd=ws)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
            assert file.read().split(), flags
        process.communicate(b"\n", timeout=20)


SAME = (
    ("echo out; echo err >&2; echo x >made; exit 3", ()),
    ("cat; pwd; umask; echo $HOME $USER $EXTRA", ("--env", "EXTRA=1")),
    ("kill -9 $$", ()),
    ("sleep 30", ("--timeout", "0.2s")),
    ("yes", ("--output", "100K")),
    ("echo x >.envrc; printf '#!/bin/sh\\n' >tool; chmod +x tool", ()),
    ("exec no-such-program", ()),
    ("echo x >made", ("--preset", "read-only")),
    ("cat /no/such/file; echo x >/etc/y", ()),
    ("true", ("--read", "/")),
    ("true", ("--nonsense",)),
    ("true", ("--preset", "nonsense")),
    ("true", ("--memory", "lots")),
    ("true", ("-C", "/")),
    ("head -c 9000000 /dev/zero >big", ("--disk", "4M")),
    ("ulimit -n; ulimit -u", ("--open-files", "77")),
    ("echo x", ("--network", "full")),
)


def test_same_as_without(caller: Caller, daemon: int) -> None:
    """Code, output, messages, report and changes are those of a run without the daemon."""

    def run(script: str, *flags: str) -> tuple[Ended, dict[str, Any], list[str]]:
        ws = caller.workspace()
        ended = caller.sh(
            ws, script, flags=(*flags, "--report", "../r.json"), stdin=b"in\n",
            before=("/bin/sh", "-c", 'umask 027; exec "$0" "$@"'),
        )  # fmt: skip
        report = ws.parent / "r.json"
        return ended, json.loads(report.read_text()) if report.exists() else {}, sorted(os.listdir(ws))

    # Names that no two runs share: the workspace's directory and key, the run's own.
    own = re.compile(rb"/t\d+/|ws-[0-9a-f]{20}|[0-9a-f]+-[0-9a-f]+-[0-9a-f]{14,}")
    for script, flags in SAME:
        served, bare = run(script, *flags), run(script, *flags, "--no-daemon")
        assert served[0].code == bare[0].code, (script, served, bare)
        assert own.sub(b"/", served[0].out) == own.sub(b"/", bare[0].out), (script, served, bare)
        assert own.sub(b"/", served[0].err) == own.sub(b"/", bare[0].err), (script, served, bare)
        assert served[2] == bare[2], (script, served, bare)
        reports = []
        for report in (served[1], bare[1]):
            for name in ("phases", "peak-memory", "cpu"):
                report.pop(name, None)
            report.get("disk", {}).pop("used", None)
            if script.startswith("head -c"):  # the watch and the writer's own limit race
                report.update({"limits-touched": [], "exit-code": 137, "signal": 9})
            reports.append(own.sub(b"/", json.dumps(report).encode()))
        assert reports[0] == reports[1], script


def test_json_and_report(caller: Caller, ws: Path, daemon: int) -> None:
    """--json is one object on stdout, and what was held back and changed is told, as without the daemon."""
    ended = caller.sh(ws, "echo out; echo x >made", flags=("--json", "--report", "../r.json"))
    assert ended.json["applied"]["created"] == 1, ended
    assert json.loads((ws.parent / "r.json").read_text()) == ended.json
    assert ended.err == b"out\n"
    facts = (ws.parent / "r.json").stat()
    assert facts.st_uid == caller.uid
    assert caller.run(ws, "true", flags=("--report", "/dev/stdout")).json["exit-code"] == 0
    refused = caller.sh(ws, ": >ran", flags=("--report", "/no/such/dir/r.json"))
    assert (refused.code, (ws / "ran").exists()) == (126, False), refused


def test_report_never_follows_the_command(caller: Caller, ws: Path, daemon: int) -> None:
    """By way of the daemon, too, a link in the report's place leads nowhere."""
    victim = caller.file(caller.workspace("outside") / "victim", "untouched")
    caller.sh(ws, f"ln -s {victim} report.json", flags=("--report", "report.json"))
    assert victim.read_text() == "untouched"


def test_environment_of_the_daemon(caller: Caller, ws: Path) -> None:
    """The daemon and its keeper hold nothing of the caller that started it, nor of those it serves."""
    read, write = os.pipe()
    secret = {"CALLERS_SECRET": "hush", "PYTHONPATH": "/evil", "LD_PRELOAD_X": "hush"}
    started = caller.cli(
        "daemon",
        "start",
        cwd=ws,
        env=secret,
        pass_fds=(write,),
        before=("/bin/sh", "-c", 'trap "" TERM; exec "$0" "$@"'),
    )
    assert started.code == 0, started
    os.close(write)
    pid = daemon_pid(caller)
    caller.started += family(pid)
    try:
        assert caller.sh(ws, "true", env=secret, flags=("--env", "CALLERS_SECRET")).code == 0
        for process in family(pid):
            for name in ("environ", "cmdline"):
                text = Path(f"/proc/{process}/{name}").read_bytes()
                assert b"hush" not in text, (process, name)
                assert b"/evil" not in text, (process, name)
        os.set_blocking(read, False)
        assert os.read(read, 1) == b"", "the starter's descriptor is closed everywhere"
    finally:
        os.close(read)
        assert caller.cli("daemon", "stop", cwd="/").code == 0
    until(lambda: not caller.traces(), 5)


def test_directory_and_socket_are_private(caller: Caller, daemon: int) -> None:
    """Nobody else can write the directory of the socket, nor connect."""
    directory = caller.runtime.stat()
    assert directory.st_uid == caller.uid
    assert not directory.st_mode & 0o022
    node = path_of(caller).lstat()
    assert stat.S_ISSOCK(node.st_mode)
    assert (node.st_uid, node.st_mode & 0o077) == (caller.uid, 0)


def test_a_directory_that_others_can_write(caller: Caller, ws: Path) -> None:
    """It does not serve where somebody else could put a socket."""
    runtime = caller.runtime
    runtime.mkdir(parents=True, exist_ok=True)
    os.chown(runtime, caller.uid, caller.uid)
    runtime.chmod(0o777)
    try:
        ended = caller.cli("daemon", "serve", cwd="/")
        assert ended.code == 125, ended
        assert b"not a private directory" in ended.err, ended
    finally:
        runtime.chmod(0o755)
    assert caller.run(ws, "true").code == 0


def test_another_user_is_not_served(caller: Caller, ws: Path, daemon: int) -> None:
    """Root is refused by a user's daemon, and a user by root's, even if the socket can be reached."""
    probe = (
        "import socket, sys\ns = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "s.settimeout(10)\ns.connect(sys.argv[1])\ntry:\n    s.send(b'wstatus')\n    print(s.recv(100))\n"
        "except OSError as error: print(error)\n"
    )
    other = 1000 if caller.uid == 0 else 0
    path = path_of(caller)
    link = caller.base / "sock"  # a way past the directories' modes
    path.chmod(0o777)
    home = caller.home.stat().st_mode
    os.chmod(caller.home, 0o755)
    for directory in (caller.state.parent, caller.state, caller.runtime):
        with contextlib.suppress(OSError):
            directory.chmod(0o755)
    prefix = [*caller.den.prefix, "/"] if caller.den else []
    inside = str(path).removeprefix(caller.root)
    try:
        for uid, want in ((other, False), (caller.uid, True)):
            done = subprocess.run(
                [*prefix, *drop_to(uid), PYTHON, "-I", "-S", "-c", probe, inside],
                capture_output=True, text=True, check=True, timeout=30,
            )  # fmt: skip
            assert ("status" in done.stdout) == want, (uid, done)
    finally:
        os.chmod(caller.home, home)
        link.unlink(missing_ok=True)


def test_a_false_daemon_is_not_used(caller: Caller, ws: Path) -> None:
    """A socket of another user in the daemon's place gets no command: the run goes on without it."""
    runtime = caller.runtime
    runtime.mkdir(parents=True, exist_ok=True)
    give(caller.home / ".local" if caller.uid else runtime, caller.uid)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other = 0 if caller.uid else 1000
    path = path_of(caller)
    code = (
        "import os, socket, sys\ns = socket.socket(fileno=int(sys.argv[1]))\n"
        "c, _ = s.accept()\nprint(c.recv(1 << 20), flush=True)\n"
    )
    try:
        listener.bind(str(path))
        path.chmod(0o777)
        os.chown(path, other, other)
        # What the peer's credentials say is who listened.
        fake = subprocess.Popen(
            [*drop_to(other), PYTHON, "-I", "-S", "-c",
             "import socket, sys; s = socket.socket(fileno=int(sys.argv[1])); s.listen(1); exec(sys.argv[2])",
             str(listener.fileno()), code],
            pass_fds=(listener.fileno(),), stdout=subprocess.PIPE,
        )  # fmt: skip
        until(lambda: _listens(listener), 10)
        ended = caller.sh(ws, "echo own")
        assert (ended.code, ended.out) == (0, b"own\n"), ended
        fake.kill()
        out, _ = fake.communicate()
        assert b"run" not in out, out
    finally:
        listener.close()
        path.unlink(missing_ok=True)
    caller.clean()


def _listens(listener: socket.socket) -> bool:
    return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def test_another_installation_is_not_used(caller: Caller, ws: Path, daemon: int) -> None:
    """A client of another installation runs its command itself, and ``status`` says why."""
    copy = caller.base / "copy"
    shutil.copytree(caller.command.parents[1], copy, symlinks=True)
    try:
        other = Caller(caller.mode, copy / "bin/casemate", caller.base, caller.den)
        other.count = 1000
        status = other.cli("daemon", "status", cwd="/")
        assert b"another installation" in status.out, status
        assert not served(other, other.workspace(), daemon)
        assert served(caller, ws, daemon)
    finally:
        shutil.rmtree(copy)


def test_a_client_of_other_mounts_is_not_served(caller: Caller, ws: Path, daemon: int) -> None:
    """A client that sees other files under the same names runs its command on its own files."""
    caller.file(ws / "file", "the host's")
    if caller.den is None:
        # A user's own namespace of mounts: the path means something else there.
        argv = [*drop_to(1000), "unshare", "--user", "--map-current-user", "--mount", "/bin/sh", "-c"]
        script = 'exec "$@"'
    else:
        argv = [*caller.den.prefix, str(ws), "unshare", "--mount", "/bin/sh", "-c"]
        script = 'mount -t tmpfs none . && cd . && cd "$PWD" && echo mine >file; exec "$@"'
    done = subprocess.run(
        [*argv, script, "sh", str(caller.command), "run", "--", "/bin/cat", "file"],
        cwd=ws, env=caller.environment(), capture_output=True, timeout=40, check=False,
    )  # fmt: skip
    if caller.den is None:
        assert (done.returncode, done.stdout) == (0, b"the host's"), done
    else:
        assert (done.returncode, done.stdout) == (0, b"mine\n"), done


def test_stale_socket(caller: Caller, ws: Path) -> None:
    """After a kill of the daemon its socket is no obstacle: to runs, and to the next daemon."""
    assert caller.cli("daemon", "start", cwd="/").code == 0
    relatives = family(daemon_pid(caller))
    caller.started += relatives
    assert caller.run(ws, "true").code == 0
    os.kill(relatives[0], signal.SIGKILL)
    until(lambda: not any(map(alive, relatives)), 5, "the keeper ends as well")
    until(lambda: not caller.processes(), 2)
    assert path_of(caller).exists()
    assert caller.sh(ws, "echo x >made").code == 0
    assert caller.cli("daemon", "start", cwd="/").code == 0
    caller.started += family(daemon_pid(caller))
    assert served(caller, ws, daemon_pid(caller))
    assert caller.cli("daemon", "stop", cwd="/").code == 0
    until(lambda: not caller.traces(), 5)


def test_two_starts_at_once(caller: Caller) -> None:
    """Of several that start at once one serves, and every ``start`` succeeds."""
    starts = [caller.start("daemon", "start", cwd="/") for _ in range(5)]
    for process in starts:
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
    pid = daemon_pid(caller)
    mark = str(caller.command.parents[1]).encode()
    serving = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{name}/cmdline").read_bytes()
            if name.isdigit() and mark in words and words.endswith(b"daemon\0serve\0"):
                serving.append(int(name))
    caller.started += family(pid)
    assert serving == [pid]
    assert caller.cli("daemon", "stop", cwd="/").code == 0
    until(lambda: not alive(pid))
    until(lambda: not caller.traces(), 5)


def test_den_is_private() -> None:
    """The lab's own promise: root's daemon of these tests is not the host's."""
    den = Den()
    try:
        assert os.listdir(f"{den.root}/run/casemate") == []
    finally:
        den.close()
