"""Resources: every way to take more than the limit is stopped, and a little less than it passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.security.engines import acts_command
from tests.security.services import Census

if TYPE_CHECKING:
    from tests.conftest import Runner
    from tests.security.lab import Scene

pytestmark = [pytest.mark.security, pytest.mark.root]


def touched(outcome: object) -> int:
    """The sum of MiB that the children of the act report, also when it ended early."""
    best: dict[str, int] = {}
    for line in outcome.says("touched"):  # type: ignore[attr-defined]
        _, index, mib = line.split()
        best[index] = max(best.get(index, 0), int(mib))
    return sum(best.values())


def test_memory_of_many_processes(casemate: Runner, scene: Scene) -> None:
    """Four processes of 256 MiB do not hold 1 GiB together under 512 MiB; two of 128 MiB do no harm."""
    argv = acts_command(scene, ["limits.touch"], mib=1024, split=4, hold=1.0)
    outcome = casemate(*argv, flags=("--memory", "512M"))
    record = outcome.records.get("limits.touch", {})
    assert not record.get("ok"), outcome.brief()
    assert outcome.report.get("limit") == "memory" or record.get("status"), outcome.brief()
    fits = casemate.acts("limits.touch", mib=256, split=2, hold=0.2, flags=("--memory", "512M"))
    assert fits.records["limits.touch"]["ok"], fits.brief()


@pytest.mark.parametrize("place", ["/dev/shm", "/tmp", "/var/tmp", "/home/sandbox"])
def test_memory_or_disk_by_files(casemate: Runner, scene: Scene, place: str) -> None:
    """Files in the private places do not hold 1 GiB under 512 MiB of memory and 256 MiB of disk."""
    argv = acts_command(scene, ["limits.write_file"], mib=1024, files=[f"{place}/big"], hold=0.5)
    outcome = casemate(*argv, flags=("--memory", "512M", "--disk", "256M"))
    assert not outcome.records.get("limits.write_file", {}).get("ok"), outcome.brief()
    assert outcome.says("wrote") or outcome.report.get("limit"), outcome.brief()
    fits = casemate.acts(
        "limits.write_file",
        mib=64,
        files=[f"{place}/small"],
        hold=0.0,
        flags=("--memory", "512M", "--disk", "256M"),
    )
    assert fits.records["limits.write_file"]["ok"], fits.brief()


def test_disk_by_many_files(casemate: Runner, scene: Scene) -> None:
    """Forty files of 10 MiB do not get past --disk 256M; ten do."""
    files = [f"{scene.ws}/part{number}" for number in range(40)]
    argv = acts_command(scene, ["limits.write_file"], mib=400, files=files, hold=0.5)
    outcome = casemate(*argv, flags=("--disk", "256M"))
    assert not outcome.records.get("limits.write_file", {}).get("ok"), outcome.brief()
    size = sum(path.stat().st_blocks * 512 for path in scene.ws.glob("part*"))
    # Where the host measures and kills, some of it gets past before it looks.
    assert size <= (260 << 20 if scene.world.uid == 0 else 360 << 20), size
    for path in scene.ws.glob("part*"):
        path.unlink()
    fits = casemate.acts("limits.write_file", mib=100, files=files[:10], hold=0.0, flags=("--disk", "256M"))
    assert fits.records["limits.write_file"]["ok"], fits.brief()
    assert (scene.ws / "part9").stat().st_size == 10 << 20


def test_threads_count(casemate: Runner, scene: Scene) -> None:
    """Threads are tasks: 600 of them do not fit under --pids 256; 100 do."""
    act = "procs.threads"
    record = casemate.acts(act, count=600, flags=("--pids", "256")).records[act]
    assert not record["ok"], record
    assert record["made"] < 256, record
    record = casemate.acts(act, count=100, flags=("--pids", "256")).records[act]
    assert record["ok"], record


def test_processes_just_below(casemate: Runner, scene: Scene) -> None:
    """200 processes run under --pids 256, counted on the host."""
    with Census(f"p{scene.token}") as census:
        record = casemate.acts("limits.forks", count=200, hold=0.4, flags=("--pids", "256"))
    assert record.records["limits.forks"]["ok"], record.brief()
    assert census.most >= 200


def test_open_files(casemate: Runner, scene: Scene) -> None:
    """The default lets 2,000 descriptors pass and stops 20,000."""
    act = "limits.open_files"
    assert casemate.acts(act, count=2000).records[act]["ok"]
    record = casemate.acts(act, count=20000).records[act]
    assert not record["ok"], record


def test_output(casemate: Runner, scene: Scene) -> None:
    """Output past the limit ends the command and says so; below it all of it comes."""
    policy = scene.ws.parent / "policy.toml"
    policy.write_text('version = 1\n[resources]\noutput = "4M"\n')
    policy.chmod(0o644)
    argv = acts_command(scene, ["limits.spin_output"], mib=8)
    outcome = casemate(*argv, flags=("--policy", str(policy)))
    assert 3 << 20 < len(outcome.stdout) <= 5 << 20
    assert outcome.report.get("limit") == "output", outcome.brief()
    assert outcome.code == 123, outcome.brief()
    fits = casemate.acts("limits.spin_output", mib=2, flags=("--policy", str(policy)))
    assert fits.code == 0, fits.brief()
    assert len(fits.stdout) > 2 << 20
