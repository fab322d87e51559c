"""What cannot work is refused with a stable code, and nothing runs less protected than it was asked to.

In every test the command would leave a file named ``ran``: that it is not there proves that nothing ran.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.cli.harness import STATE, Caller, Den, Ended, until
from tests.security.lab import drop_to, give

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("traceless")]

RUN = ("/bin/sh", "-c", ": >ran; echo ran")


def refused(ended: Ended, *codes: str, exit_code: int = 126) -> None:
    """It ended with one of these codes, said so, and showed no inside of the program."""
    assert ended.code == exit_code, ended
    assert any(f"[{code}]".encode() in ended.err for code in codes), ended
    assert b"Traceback" not in ended.err, ended
    assert ended.out == b"", ended


def test_policy_files(caller: Caller, ws: Path) -> None:
    """A policy file that is wrong in any way stops the run, with file, line and a suggestion."""
    cases = {
        'version = 1\n[filesystem]\nreed = ["x"]\n': (b":3", b"read"),
        "version = 1\n[resources]\nmemory = \n": (b":3", b""),
        'version = 1\n[resources]\nmemory = "lots"\n': (b"memory", b""),
        "[resources]\n": (b"version", b""),
        "version = 99\n": (b"version", b""),
        'version = 1\n[network]\nmode = "open"\n': (b"network", b""),
        'version = 1\n[isolation]\ndegrade = ["nonsense"]\n': (b"degrade", b""),
        "not toml at all": (b"", b""),
        "\0\xff": (b"", b""),
    }
    for text, (place, hint) in cases.items():
        for where in ("casemate.toml", "flag"):
            path = caller.file(ws / "casemate.toml" if where != "flag" else ws.parent / "p.toml", text)
            flags = ("--policy", str(path)) if where == "flag" else ()
            ended = caller.run(ws, *RUN, flags=flags)
            refused(ended, "policy-invalid", "policy-syntax")
            assert place in ended.err, (text, ended)
            assert hint in ended.err, (text, ended)
            path.unlink()
    assert not (ws / "ran").exists()
    caller.file(ws / "casemate.toml", "version = 1\n")
    assert caller.run(ws, *RUN).out == b"ran\n"


def test_policy_file_of_the_user(caller: Caller, ws: Path) -> None:
    """The user's own file is checked as well, and one that others can write grants nothing."""
    directory = caller.home / ".config" / "casemate"
    directory.mkdir(parents=True)
    give(caller.home / ".config", caller.uid)
    try:
        caller.file(directory / "policy.toml", "version = 1\n[nonsense]\n")
        refused(caller.run(ws, *RUN), "policy-invalid")
        caller.file(directory / "policy.toml", "version = 1\n", 0o666)
        refused(caller.run(ws, *RUN), "policy-owner")
        assert not (ws / "ran").exists()
        caller.file(directory / "policy.toml", "version = 1\n")
        assert caller.run(ws, *RUN).code == 0
    finally:
        shutil.rmtree(caller.home / ".config")


def test_workspaces_that_are_refused(caller: Caller, ws: Path) -> None:
    """/, HOME, what holds ~/.ssh, system directories and Casemate's own state are no workspaces."""
    (caller.home / ".ssh").mkdir(exist_ok=True)
    give(caller.home / ".ssh", caller.uid)
    state = "/var/lib/casemate" if caller.uid == 0 else str(caller.home / ".local/state/casemate")
    assert caller.run(ws, "true").code == 0  # makes the state directory
    system = ("/", "/usr/bin", "/etc", "/proc", "/dev", "/tmp", "/sys/kernel")
    for place in (*system, str(caller.home), str(caller.home / ".ssh"), str(caller.base), state):
        refused(caller.run(ws, *RUN, flags=("-C", place)), "workspace-refused")
    link = ws.parent / "link-to-root"
    link.symlink_to("/")
    refused(caller.run(ws, *RUN, flags=("-C", str(link))), "workspace-refused")
    for place in ("no/such", "file", ""):
        caller.file(ws / "file", "")
        code = {"no/such": "workspace-missing"}.get(place, "workspace-refused")
        ended = caller.run(ws, "true", flags=("-C", place))
        if place:
            refused(ended, code)
        else:
            assert ended.code == 0, "an empty word is the present directory, as for cd"


def test_unreadable_workspace(caller: Caller, ws: Path) -> None:
    """A workspace that its caller cannot read is refused; root can read it."""
    os.chown(ws, 12345, 12345)
    ws.chmod(0o700)
    ended = caller.run(ws.parent, *RUN, flags=("-C", str(ws)))
    if caller.uid:
        refused(ended, "workspace-unreadable")
        assert not (ws / "ran").exists()
    else:
        assert ended.code == 0, ended
        (ws / "ran").unlink()
    os.chown(ws, caller.uid, caller.uid)
    assert caller.run(ws, *RUN).code == 0


def test_workspace_of_somebody_else(caller: Caller, ws: Path) -> None:
    """In a directory that the caller can only read, nothing is changed, and the result says what failed."""
    os.chown(ws, 12345, 12345)
    ws.chmod(0o755)
    ended = caller.run(ws, *RUN, flags=("--json",))
    assert b"Traceback" not in ended.err, ended
    if caller.uid:
        assert ended.json["applied"]["failed"], ended
        assert not (ws / "ran").exists(), ended
        caller.clean()  # what could not be applied is kept
    else:
        assert (ended.code, (ws / "ran").stat().st_uid) == (0, 12345), ended


def test_deleted_workspace(caller: Caller, ws: Path) -> None:
    """A directory that was removed under its caller's feet is told, before and while the command runs."""
    inner = ws / "inner"
    inner.mkdir()
    give(inner, caller.uid)
    ended = caller.run(ws, *RUN, before=("/bin/sh", "-c", 'cd inner && rmdir ../inner && exec "$0" "$@"'))
    assert ended.code == 126, ended
    assert b"[cwd-unusable]" in ended.err, ended
    inner.mkdir()
    give(inner, caller.uid)
    process = caller.start("run", "--", "/bin/sh", "-c", "echo up; read x; echo new >file", cwd=inner)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    inner.rmdir()
    _, err = process.communicate(b"\n", timeout=20)
    assert process.returncode != 0, err
    assert b"Traceback" not in err, err
    assert not inner.exists()
    caller.clean()


def test_missing_home(caller: Caller, ws: Path) -> None:
    """A HOME that does not exist and cannot be made is told where it matters."""
    ended = caller.run(ws, *RUN, env={"HOME": "/no/such/home"})
    if caller.uid:
        refused(ended, "state-unusable", exit_code=125)
        assert not (ws / "ran").exists()
    else:
        assert ended.code == 0, ended


def test_state_directory_that_is_in_the_way(caller: Caller, ws: Path) -> None:
    """A file where the state directory should be, or one that cannot be written, is a clear error."""
    if caller.uid == 0:
        den = Den()
        other = Caller("root", caller.command, caller.base, den)
        shutil.rmtree(f"{den.root}/run/casemate", ignore_errors=True)
        with open(f"{den.root}/run/casemate/uids", "w"):
            pass
        try:
            refused(other.run(ws, *RUN), "state-unusable", exit_code=125)
        finally:
            den.close()
    else:
        home = caller.workspace("otherhome")
        (home / ".local").mkdir()
        os.chown(home / ".local", 0, 0)
        (home / ".local").chmod(0o755)
        refused(caller.run(ws, *RUN, env={"HOME": str(home)}), "state-unusable", exit_code=125)
    assert not (ws / "ran").exists()


def test_no_more_descriptors(caller: Caller, ws: Path) -> None:
    """A caller that allows few descriptors gets an error, not half a sandbox."""
    codes = set()
    for count in (12, 14, 16, 18, 20, 24, 28, 32):
        limit = ("/bin/sh", "-c", f'ulimit -n {count}; exec "$0" "$@"')
        ended = caller.run(ws, *RUN, before=limit)
        codes.add(ended.code)
        if ended.code == 0:
            (ws / "ran").unlink()
        else:
            assert ended.code in (1, 2, 125, 126), (count, ended)  # 1 and 2: the interpreter's own, and sh's
            assert not (ws / "ran").exists(), (count, ended)
    assert codes != {0}
    assert caller.run(ws, *RUN).code == 0


def test_limits_of_the_caller_that_are_lower(caller: Caller, ws: Path) -> None:
    """Where the caller's own hard limit is lower than the policy's, the lower one holds."""
    ended = caller.sh(ws, "ulimit -n", before=("/bin/sh", "-c", 'ulimit -n 300; exec "$0" "$@"'))
    assert (ended.code, ended.out) == (0, b"300\n"), ended


# -- hosts that lack something -----------------------------------------------------------------------


def test_no_user_namespaces(caller: Caller, ws: Path) -> None:
    """Where the caller may make no user namespace, an unprivileged run is refused by name."""
    if caller.uid == 0:
        # Root needs none; a root without CAP_SYS_ADMIN cannot make any other.
        ended = caller.run(ws, *RUN, before=("setpriv", "--bounding-set=-sys_admin", "--"))
        assert ended.code in (125, 126), ended
        assert b"Traceback" not in ended.err, ended
    else:
        done = in_user_namespace(caller, ws, 0)
        refused(done, "protection-unavailable")
        assert b"user namespace" in done.err, done
        assert not (ws / "ran").exists()
        control = in_user_namespace(caller, ws, 10)
        assert (control.code, control.out) == (0, b"ran\n"), control
        (ws / "ran").unlink()
    assert not (ws / "ran").exists()


def in_user_namespace(caller: Caller, ws: Path, most: int) -> Ended:
    """Run as uid 1000 in a user namespace of its own that allows ``most`` more; the host's limit stays."""
    # The shell that was there before the maps has no capability; the one that it executes has.
    limit = f"echo {most} >/proc/sys/user/max_user_namespaces && exec "
    limit += 'setpriv --reuid=1000 --regid=1000 --clear-groups -- "$0" "$@"'
    wait = ["/bin/sh", "-c", 'read go; exec /bin/sh -c "$0" "$@"', limit]
    process = subprocess.Popen(
        ["unshare", "--user", *wait, str(caller.command), "run", "--", *RUN],
        cwd=ws, env=caller.environment(),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    caller.started.append(process.pid)
    own = os.readlink("/proc/self/ns/user")
    until(lambda: os.readlink(f"/proc/{process.pid}/ns/user") != own)
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{process.pid}/{name}", "w") as file:
            file.write("0 0 1\n1000 1000 1\n")
    out, err = process.communicate(b"go\n", timeout=40)
    return Ended(process.returncode, out, err)


def test_no_writable_control_groups(caller: Caller, ws: Path) -> None:
    """Without control groups ``scope = tree`` is refused; ``auto`` runs with the next scope and says so."""
    before: tuple[str, ...] = ()
    if caller.uid == 0:
        script = (
            "for d in $(awk '$3 ~ /cgroup/ {print $2}' /proc/self/mounts); do "
            'mount -o remount,bind,ro $d || exit 99; done; exec "$0" "$@"'
        )
        before = ("unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script)
    refused(caller.run(ws, *RUN, flags=("--scope", "tree"), before=before), "protection-unavailable")
    refused(caller.run(ws, *RUN, flags=("--cpu", "1"), before=before), "protection-unavailable")
    assert not (ws / "ran").exists()
    ended = caller.run(ws, *RUN, flags=("--json",), before=before)
    assert ended.code == 0, ended
    assert ended.json["scopes"]["memory"] == "watched", ended
    assert ended.json["scopes"]["pids"] == "process", ended


def test_control_groups_are_there_for_root(caller: Caller, ws: Path) -> None:
    """The control of the test above: as root on this host, the tree scope is real."""
    ended = caller.run(ws, *RUN, flags=("--scope", "tree", "--json"))
    if caller.uid:
        assert ended.code == 126, ended
    else:
        assert ended.json["scopes"]["memory"] == "tree", ended


# -- disks that are full -----------------------------------------------------------------------------


@pytest.fixture
def small(caller: Caller, tmp_path: Path) -> Iterator[tuple[Caller, Path, Path]]:
    """The caller in a mount namespace where a workspace and a home lie on small file systems of their own."""
    base = caller.base / f"small{caller.count}"
    ws, home = base / "t1" / "ws", base / "home"
    for path in (ws, home):
        path.mkdir(parents=True)
    den = Den((str(ws), str(home), *(STATE if caller.uid == 0 else ())), size="2m")
    made = Caller(caller.mode, caller.command, base, den)
    for path in (ws, home):
        os.chown(f"{den.root}{path}", caller.uid, caller.uid)
    yield made, ws, home
    den.close()
    shutil.rmtree(base)


def fill(path: str) -> None:
    """Leave no byte."""
    with open(f"{path}/filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(65536))
        except OSError:
            pass
    with open(f"{path}/filler", "ab", buffering=0) as file:
        try:
            while True:
                file.write(b"x")
        except OSError:
            pass


def test_full_workspace(small: tuple[Caller, Path, Path]) -> None:
    """A workspace without space: the command runs, the apply step says what failed, and all is kept."""
    caller, ws, _ = small
    host = f"{caller.root}{ws}"
    fill(host)
    ended = caller.sh(ws, "head -c 300000 /dev/zero >big && echo made", flags=("--json",))
    assert b"Traceback" not in ended.err, ended
    assert ended.err.startswith(b"made"), ended
    applied = ended.json["applied"]
    assert applied["failed"], ended
    assert not applied["complete"], ended
    assert not os.path.exists(f"{host}/big")
    os.unlink(f"{host}/filler")
    offer = caller.sh(ws, "true")
    assert b"interrupted" in offer.err, offer
    kept = caller.cli("changes", "--json", cwd=ws).json
    done = caller.cli("apply", kept["interrupted"][0]["name"], cwd=ws)
    assert done.code == 0, (kept, done)
    assert os.stat(f"{host}/big").st_size == 300_000
    assert not [name for name in caller.files() if "views" in name], caller.files()


def test_full_state_directory(small: tuple[Caller, Path, Path]) -> None:
    """No space for state: nothing runs, or it runs and nothing of it is lost without a word."""
    caller, ws, home = small
    fill(f"{caller.root}{home}" if caller.uid else f"{caller.root}/run/casemate")
    ended = caller.run(ws, *RUN)
    assert b"Traceback" not in ended.err, ended
    if ended.code:
        assert b"[disk-full]" in ended.err, ended
        assert not os.path.exists(f"{caller.root}{ws}/ran"), ended
    else:
        assert os.path.exists(f"{caller.root}{ws}/ran"), ended


def test_full_hold_directory(small: tuple[Caller, Path, Path]) -> None:
    """No space for what is held back: it is not applied, not lost in silence, and the rest arrives."""
    caller, ws, home = small
    script = "head -c 900000 /dev/zero >.envrc; echo x >plain"
    state = f"{caller.root}{home}" if caller.uid else str(caller.state)
    with open(f"{state}/filler", "wb") as file:
        file.write(bytes((1 << 20) + 300_000 if caller.uid else 0))
    if caller.uid == 0:
        fill(state)
    ended = caller.sh(ws, script, flags=("--json",))
    assert b"Traceback" not in ended.err, ended
    assert not os.path.exists(f"{caller.root}{ws}/.envrc"), ended
    if "error" in ended.json:
        assert ended.json["error"]["code"] in ("disk-full", "workspace-failed"), ended
    else:
        report = ended.json["applied"]
        assert report["held"] or report["failed"], ended


def test_scratch_that_is_full(caller: Caller, ws: Path) -> None:
    """A command that fills /tmp gets an error of its own and the limit is named; nothing breaks."""
    ended = caller.py(
        ws, "open('/tmp/x', 'wb').write(bytes(64 << 20))", flags=("--disk", "32M", "--json"), timeout=60
    )
    assert ended.code == 123, ended
    assert ended.json["limit"] == "disk", ended


def test_drop_to_is_unprivileged() -> None:
    """The lab's own promise: uid 1000 has no capability, or half of these tests mean nothing."""
    done = subprocess.run(
        [*drop_to(1000), "/bin/cat", "/proc/self/status"], capture_output=True, text=True, check=True
    )
    words = dict(line.split(":", 1) for line in done.stdout.splitlines())
    assert int(words["CapEff"], 16) == int(words["CapPrm"], 16) == 0
    assert words["Uid"].split() == ["1000"] * 4
