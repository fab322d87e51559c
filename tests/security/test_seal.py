"""The seal, read from /proc of a sealed command: from inside, and by the host while it runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.security.engines import ENGINE, Request
from tests.security.lab import drop_to, processes_with

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Runner
    from tests.security.lab import Scene

pytestmark = [pytest.mark.security, pytest.mark.root]

CAPS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
KINDS = ("cgroup", "ipc", "mnt", "net", "pid", "uts")


def status_of(text: str) -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def assert_sealed(status: dict[str, str], who: str) -> None:
    assert status["NoNewPrivs"] == "1", who
    assert status["Seccomp"] == "2", who
    for name in CAPS:
        assert int(status[name], 16) == 0, f"{who}: {name} {status[name]}"
    assert status["Groups"].strip() in ("", "65534"), f"{who}: groups {status['Groups']!r}"


def host_devices() -> set[str]:
    """Device numbers of the file systems that the host has mounted."""
    return {line.split()[2] for line in Path("/proc/self/mountinfo").read_text().splitlines()}


@pytest.fixture
def look(casemate: Runner) -> dict[str, Any]:
    """What a sealed process sees."""
    return casemate.acts("seal.look", flags=("--pids", "256", "--file-size", "1G")).records["seal.look"]


@pytest.fixture
def running(scene: Scene) -> Iterator[list[int]]:
    """The processes of a running sandbox, by the host's numbers: pid 1 first, then the command."""
    request = Request(scene, ["/bin/sh", "-c", "echo started; exec sleep 60"])
    process = subprocess.Popen(
        [*drop_to(scene.world.uid), *ENGINE.argv(request)], cwd=scene.ws, env=scene.world.environment(),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    host = os.readlink("/proc/self/ns/pid")
    found = []
    for pid in processes_with(str(scene.ws)):
        try:
            if os.readlink(f"/proc/{pid}/ns/pid") != host:
                inner = int(status_of(Path(f"/proc/{pid}/status").read_text())["NSpid"].split()[-1])
                found.append((inner, pid))
        except OSError:
            continue
    yield [pid for _, pid in sorted(found)]
    process.kill()
    process.wait()
    process.stdout.close()


def test_from_inside(look: dict[str, Any], scene: Scene) -> None:
    """No new privileges, a filter, no capability, and the uid that was meant."""
    status = status_of(look["status"])
    assert_sealed(status, "the command")
    uid = int(status["Uid"].split()[0])
    inside, outside, count = (int(word) for word in look["uid_map"][:3])
    if scene.world.uid == 0:
        assert uid >= 0x70000000, "root's commands have a uid of their own"
        assert (inside, outside, count) == (0, 0, 4294967295), "and no user namespace"
    else:
        assert count == 1, look["uid_map"]
        assert len(look["uid_map"]) == 3
        assert inside == uid
        assert uid != 0, "a command is not root, not even of its own namespace"


def test_namespaces_differ_from_the_hosts(look: dict[str, Any], scene: Scene) -> None:
    """Every namespace is another one than the host's; rootless also the user namespace."""
    for kind in KINDS:
        assert look["ns"][kind] != os.readlink(f"/proc/self/ns/{kind}"), kind
    if scene.world.uid:
        assert look["ns"]["user"] != os.readlink("/proc/self/ns/user")
    assert look["hostname"] != os.uname().nodename


def test_mounts(look: dict[str, Any], scene: Scene) -> None:
    """No mount is writable and the host's; none lets setuid bits or device nodes work."""
    devices = host_devices()
    writable, loose = [], []
    for line in look["mountinfo"].splitlines():
        fields = line.split()
        place, options, device = fields[4], fields[5].split(","), fields[2]
        # Without the right to make nodes, those of the host are bound one by one.
        is_node = place.startswith("/dev/") and not os.path.isdir(place)
        if "nosuid" not in options and not is_node:
            loose.append(line)
        if "nodev" not in options and not is_node and place not in ("/dev", "/dev/pts"):
            loose.append(line)
        if "rw" in options and device in devices and not (is_node and place.startswith("/dev/")):
            writable.append(line)
    assert not writable, "\n".join(writable)
    assert not loose, "\n".join(loose)
    places = {line.split()[4] for line in look["mountinfo"].splitlines()}
    sources = {line.split()[3] for line in look["mountinfo"].splitlines()}
    for path in places | sources:
        assert not path.startswith((str(scene.outside), str(scene.world.home))), path
    assert "/proc/sys" in places, "an own mount covers /proc/sys"


def test_limits(look: dict[str, Any]) -> None:
    """rlimits as in the policy: files, file size, no core dump, processes."""
    limits = look["limits"]
    assert limits["RLIMIT_NOFILE"] == [4096, 4096]
    assert limits["RLIMIT_CORE"] == [0, 0]
    assert limits["RLIMIT_FSIZE"] == [1 << 30, 1 << 30]
    assert limits["RLIMIT_NPROC"][0] == limits["RLIMIT_NPROC"][1]
    assert 256 <= limits["RLIMIT_NPROC"][1] <= 258, "init is one more, and the group bites first"


def test_neighbours(look: dict[str, Any], scene: Scene) -> None:
    """Every process in sight is sealed, and none shows the caller's environment."""
    assert look["pids"][0] == 1
    for pid, neighbour in look["neighbours"].items():
        assert scene.world.secret not in neighbour["environ"], f"pid {pid}"
        assert_sealed(status_of(neighbour["status"]), f"pid {pid}")
    assert look["neighbours"]["1"]["environ"].startswith("errno"), "pid 1 is not dumpable"
    assert scene.world.secret not in str(look["env"])


def test_from_the_host(running: list[int], scene: Scene) -> None:
    """The host sees the same, exactly 0, 1 and 2 open, a clean environment, and pid 1 closed."""
    assert len(running) >= 2, "pid 1 and the command"
    for pid in running:
        assert_sealed(status_of(Path(f"/proc/{pid}/status").read_text()), f"host pid {pid}")
        assert scene.world.secret.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        for kind in KINDS:
            assert os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}"), kind
        uid = int(status_of(Path(f"/proc/{pid}/status").read_text())["Uid"].split()[0])
        assert uid == 1000 if scene.world.uid else uid >= 0x70000000
    command = running[-1]
    assert sorted(os.listdir(f"/proc/{command}/fd"), key=int) == ["0", "1", "2"]
    # The kernel gives the files of a process that is not dumpable to root.
    assert os.stat(f"/proc/{running[0]}/environ").st_uid == 0
    assert os.stat(f"/proc/{command}/environ").st_uid != 0
    for name in os.listdir(f"/proc/{running[0]}/fd"):
        target = os.readlink(f"/proc/{running[0]}/fd/{name}")
        assert target.startswith(("pipe:", "socket:", "anon_inode:", "/dev/null")), f"pid 1 holds {target}"


def test_host_processes_keep_the_secret_to_themselves(look: dict[str, Any], scene: Scene) -> None:
    """The control of the scan: the caller's own environment does hold the secret."""
    assert scene.world.environment()["LAB_SECRET"] == scene.world.secret
    assert look["env"].get("CASEMATE_SANDBOX") == "process"
