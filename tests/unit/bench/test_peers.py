"""Finding and checking peers."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench import bpf, launch, machine, ours, peers
from bench.peers import Bare, BenchError, Scratch, Spawned

if TYPE_CHECKING:
    from collections.abc import Sequence

REPOSITORY = Path(__file__).parents[3]


class Pretender(Spawned):
    """Says it is a sandbox but runs the command as it is."""

    name = "pretender"
    what = "env"

    def command(self, scratch: Scratch) -> Sequence[str]:
        return ("/usr/bin/env",)


@pytest.fixture
def scratch(tmp_path: Path) -> Scratch:
    """Files of a run, with the workspace in place."""
    place = Scratch(tmp_path)
    place.workspace.mkdir()
    return place


def test_names_are_those_of_the_contract() -> None:
    """The peers of the run, in order, are the agreed ones; more variants may follow."""
    known = [peer.name for peer in (*peers.comparison(), *ours.variants())]
    assert len(known) == len(set(known))
    assert [name for name in known if name in launch.NAMES] == list(launch.NAMES)


def test_failing_command_has_no_time(scratch: Scratch) -> None:
    """A command that does not exit 0 is an error, never a figure; one that does gives a time."""
    bare = Bare()
    bare.prepare(scratch)
    assert bare.once(["/usr/bin/true"]) > 0
    with pytest.raises(BenchError, match="exit 1"):
        bare.once(["/usr/bin/false"])


def test_pretended_sandbox_is_found_out(scratch: Scratch) -> None:
    """The look from inside notices when there is no sandbox; no sandbox where none is said passes."""
    bare = Bare()
    bare.prepare(scratch)
    bare.verify()
    pretender = Pretender()
    pretender.prepare(scratch)
    with pytest.raises(BenchError, match="pid namespace"):
        pretender.verify()


def test_plain_filter_allows_and_denies() -> None:
    """Each comparison of the plain filter leads to the refusal, everything else to the permission."""
    program = bpf._plain()
    size = bpf.INSTRUCTION
    lines = [struct.unpack("=HBBI", program[at : at + size]) for at in range(0, len(program), size)]
    assert len(lines) >= 100
    chain = range(4, len(lines) - 2)
    assert lines[-2][3] == 0x7FFF0000
    assert lines[-1][3] == 0x00050001
    assert all(index + 1 + lines[index][1] == len(lines) - 1 for index in chain)


def test_facts_name_no_machine() -> None:
    """A report can be published: it holds neither the machine's name nor a path of it."""
    facts = " ".join(str(value) for value in machine.facts().values())
    assert os.uname().nodename not in facts.split()
    assert os.getcwd() not in facts


def test_missing_peers_are_an_error_on_demand(tmp_path: Path) -> None:
    """With --require-all an absent peer ends the run, named with the command that installs it."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.launch", "--require-all"],
        cwd=REPOSITORY,
        env=os.environ | {"CASEMATE_PEERS": str(tmp_path / "nowhere"), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "codex is absent" in done.stderr
    assert "scripts/setup-peers" in done.stderr
    assert list(tmp_path.iterdir()) == []
