"""Control groups of version 1: made, entered, killed and removed, beside other launchers that do the same.

Below a group of the test's own. Version 2 has no controllers on the machines that run this.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from casemate.sys import cgroups
from casemate.sys.cgroups import Group, Hierarchies, Limits
from tests.cli.harness import alive, until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.root]


@pytest.fixture
def hierarchies() -> Iterator[Hierarchies]:
    """The real hierarchies, each with a base of the test's own."""
    found = cgroups.detect()
    assert found.version == 1, found.reasons
    base = {name: f"{path}/casemate-test-{os.getpid()}" for name, path in found.base.items()}
    for path in base.values():
        os.mkdir(path)
    yield Hierarchies(1, base, {})
    for path in base.values():
        for directory, names, _ in os.walk(path, topdown=False):
            for name in names:
                with contextlib.suppress(OSError):
                    os.rmdir(f"{directory}/{name}")
        os.rmdir(path)


def enter(group: Group, *argv: str) -> subprocess.Popen[bytes]:
    """A process that puts itself into the group, says so, and goes on."""
    code = (
        "import os, sys\nfor fd in map(int, sys.argv[1].split(',')): os.write(fd, b'0')\n"
        "print('in', flush=True)\nos.execvp(sys.argv[2], sys.argv[2:])\n"
    )
    entrances = group.entrances()
    words = ",".join(map(str, entrances))
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code, words, *argv], pass_fds=entrances, stdout=subprocess.PIPE
    )
    for entrance in entrances:
        os.close(entrance)
    assert process.stdout is not None
    assert process.stdout.readline() == b"in\n"
    return process


def end(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(10)
    finally:
        assert process.stdout is not None
        process.stdout.close()


def test_limits_are_set(hierarchies: Hierarchies) -> None:
    """What is asked for is in the kernel's files; without limits there is a group for the peak only."""
    group = Group(hierarchies, "a-1", Limits(64 << 20, 50, 0.5))
    where = group.directories
    assert Path(where["memory"], "memory.limit_in_bytes").read_text() == f"{64 << 20}\n"
    assert Path(where["pids"], "pids.max").read_text() == "50\n"
    assert Path(where["cpu"], "cpu.cfs_quota_us").read_text() == "50000\n"
    assert group.remove()
    assert not any(os.path.exists(path) for path in where.values())
    bare = Group(hierarchies, "a-2", Limits(None, None, None))
    assert set(bare.directories) == {"memory"}
    assert bare.remove()


def test_members_and_their_end(hierarchies: Hierarchies) -> None:
    """Processes are counted and killed with their children; the group can be removed then, not before."""
    group = Group(hierarchies, "b-1", Limits(64 << 20, 50, None))
    process = enter(group, "sh", "-c", "sleep 60 & sleep 60 & echo up; wait")
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    members = group.processes()
    assert len(members) == group.population() == 3
    assert not group.remove()
    assert set(group.directories) == {"memory", "pids"}
    group.kill()
    assert end(process) == -9
    until(lambda: not any(map(alive, members)))
    assert group.events()["peak"] > 0
    until(group.remove)


def test_refused_forks_are_events(hierarchies: Hierarchies) -> None:
    """A fork that the limit refuses is counted; those that a kill refuses are not."""
    group = Group(hierarchies, "c-1", Limits(None, 3, None))
    process = enter(group, "sh", "-c", "sleep 60 & sleep 60 & sleep 60 & wait")
    until(lambda: group.events().get("pids_max", 0) > 0)
    process.kill()
    group.kill()
    end(process)
    count = group.events()["pids_max"]
    assert count > 0
    until(group.remove)
    calm = Group(hierarchies, "c-2", Limits(None, 20, None))
    process = enter(calm, "sh", "-c", "while :; do sleep 0.001 & wait; done")
    calm.kill()
    end(process)
    assert calm.events()["pids_max"] == 0
    until(calm.remove)


def test_a_limit_that_the_kernel_refuses_leaves_nothing(hierarchies: Hierarchies) -> None:
    """When one file takes no value, every directory made so far is removed again."""
    with pytest.raises(OSError):  # noqa: PT011 - whichever the kernel gives
        Group(hierarchies, "d-1", Limits(1 << 20, -5, None))
    left = [path for base in hierarchies.base.values() for path in Path(base).rglob("d-1")]
    assert left == []


def test_leftovers(hierarchies: Hierarchies) -> None:
    """Groups of dead launchers are removed, those of living ones stay; an empty parent goes as well."""
    process = subprocess.Popen(["true"])
    process.wait()
    dead = Group(hierarchies, f"{process.pid:x}-1", Limits(None, 5, None))
    own = Group(hierarchies, f"{os.getpid():x}-1", Limits(None, 5, None))
    for parent in hierarchies.parents():
        cgroups.remove_leftovers(parent)
    assert not any(os.path.exists(path) for path in dead.directories.values())
    assert all(os.path.exists(path) for path in own.directories.values())
    assert own.remove()
    for parent in hierarchies.parents():
        cgroups.remove_leftovers(parent)
        assert not os.path.exists(parent)


def test_parents_that_vanish(hierarchies: Hierarchies) -> None:
    """Launchers that come and go at once, and remove the empty parent, never make one another fail."""
    failed: list[BaseException] = []

    def come_and_go(name: str) -> None:
        try:
            for number in range(150):
                group = Group(hierarchies, f"{os.getpid():x}-{name}{number}", Limits(None, 5, None))
                assert group.remove()
                for parent in hierarchies.parents():
                    cgroups.remove_leftovers(parent)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=come_and_go, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
