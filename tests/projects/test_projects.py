"""Real projects: their own tests end the same way under the default policy as without a sandbox."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cli.harness import PYTHON, Caller, Den
from tests.projects.junit import counts, differences, lasting, verdicts
from tests.projects.table import PROJECTS, RUNNER, Project
from tests.security.lab import drop_to, give

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.projects.junit import Verdict

pytestmark = [pytest.mark.slow, pytest.mark.root, pytest.mark.timeout(500)]

CASES = [pytest.param(each, mode, id=f"{each}-{mode}") for each in PROJECTS for mode in each.modes]


def must(*argv: str) -> None:
    """Run a step of the preparation; what it said is the failure's message."""
    done = subprocess.run(argv, timeout=180, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{argv}: {done.stdout[-2000:]}\n{done.stderr[-3000:]}"


@pytest.fixture(scope="session")
def store() -> Iterator[Path]:
    """The pinned source distributions, from the configured index."""
    directory = Path(tempfile.mkdtemp(prefix="casemate-sdists-", dir="/srv"))
    directory.chmod(0o755)
    pins = [f"{p.name}=={p.version} --hash=sha256:{p.sha256}" for p in PROJECTS]
    (directory / "pins.txt").write_text("\n".join(pins) + "\n")
    only = ",".join(p.name for p in PROJECTS)
    try:
        must(
            sys.executable, "-I", "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes",
            "--no-binary", only, "--dest", str(directory), "-r", str(directory / "pins.txt"),
        )  # fmt: skip
        yield directory
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def caller(mode: str, installation: tuple[Path, Path]) -> Iterator[Caller]:
    """Who calls: root, or uid 1000 without any capability."""
    base = Path(tempfile.mkdtemp(prefix="casemate-projects-", dir="/srv"))
    base.chmod(0o755)
    den = Den() if mode == "root" else None
    made = Caller(mode, installation[0], base, den)
    made.home.mkdir(mode=0o700)
    give(made.home, made.uid)
    yield made
    made.close()
    made.clean()
    if den is not None:
        den.close()
    shutil.rmtree(base)


@dataclasses.dataclass
class Checkout:
    """A project unpacked in a workspace, with an environment of its own beside the source."""

    caller: Caller
    project: Project
    ws: Path

    @property
    def source(self) -> Path:
        return self.ws / "source"

    @property
    def python(self) -> str:
        return str(self.ws / "venv/bin/python")

    @property
    def build(self) -> list[str]:
        """The command that builds and installs the project, without a network."""
        return [
            self.python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation",
            "--disable-pip-version-check", str(self.source),
        ]  # fmt: skip

    @property
    def test(self) -> list[str]:
        """The command that runs the project's tests."""
        version = f"py{sys.version_info[0]}.{sys.version_info[1]}"
        return [
            self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--timeout=90",
            f"--junitxml={self.report}", *(word.format(python=version) for word in self.project.tests),
        ]  # fmt: skip

    @property
    def report(self) -> Path:
        return self.ws / "report.xml"

    def prepare(self, store: Path) -> None:
        """Unpack it, and install what its tests need."""
        must("tar", "--no-same-owner", "-xzf", str(store / self.project.sdist), "-C", str(self.ws))
        (self.ws / str(self.project)).rename(self.source)
        must(PYTHON, "-I", "-m", "venv", str(self.ws / "venv"))
        install = [self.python, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        must(*install, *RUNNER, *self.project.requirements)
        give(self.ws, self.caller.uid)

    def twin(self) -> Checkout:
        """A copy in another workspace."""
        copy = self.caller.workspace()
        copy.rmdir()
        must("cp", "-a", str(self.ws), str(copy))
        return dataclasses.replace(self, ws=copy)

    def outside(self, argv: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command of it without a sandbox, but with a /tmp of its own: some tests leave files there."""
        caller = self.caller
        tmp = 'mount -t tmpfs -o mode=1777 tmp /tmp && exec "$@"'
        return subprocess.run(
            ["unshare", "--mount", "sh", "-c", tmp, "sh", *drop_to(caller.uid), *argv],
            cwd=self.source, env=caller.environment(), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip

    def inside(self, argv: list[str]) -> str:
        """Run a command of it under the default policy; what was said on stderr and stdout."""
        ended = self.caller.run(
            self.source, *argv, flags=("--no-daemon", "-C", str(self.ws)), timeout=240, stdin=b""
        )
        assert ended.code in (0, 1), ended  # pytest says 1 when a test has failed
        return (ended.out + ended.err).decode(errors="replace")

    def run_tests(self, *, sandboxed: bool) -> dict[str, Verdict]:
        """Run the project's tests; what became of each."""
        self.report.unlink(missing_ok=True)
        if sandboxed:
            said = self.inside(self.test)
        else:
            done = self.outside(self.test)
            said = done.stdout + done.stderr
        assert self.report.is_file(), said[-3000:]
        return verdicts(self.report.read_text())

    def installed(self) -> str:
        """Where an interpreter outside finds the project."""
        where = f"import {self.project.name} as m; print(m.__file__)"
        return self.outside([self.python, "-I", "-c", where]).stdout


@pytest.mark.parametrize(("project", "mode"), CASES)
def test_same_outcome(project: Project, mode: str, caller: Caller, store: Path) -> None:
    """The same tests pass, fail and are skipped inside and outside; what is built inside works outside."""
    box = Checkout(caller, project, caller.workspace())
    box.prepare(store)
    bare = box.twin()
    bare.outside(bare.build)
    assert str(bare.ws) in bare.installed()
    if project.build_inside:
        box.inside(box.build)
    else:
        box.outside(box.build)
    assert str(box.ws) in box.installed()
    outside = bare.run_tests(sandboxed=False)
    inside = box.run_tests(sandboxed=True)
    print(f"{project} as {mode}: outside {counts(outside)}, inside {counts(inside)}")
    different = differences(outside, inside)
    if different:
        # Tests of timeouts and races differ now and then: what the sandbox breaks, it breaks each time.
        print(f"differences, so once more: {different}")
        outside, inside = bare.run_tests(sandboxed=False), box.run_tests(sandboxed=True)
        different = lasting(different, differences(outside, inside))
    assert different == {}
    passed = [name for name, verdict in inside.items() if verdict.outcome == "passed"]
    assert len(passed) >= project.at_least
    assert [proof for proof in project.proofs if not any(name.endswith(proof) for name in passed)] == []
    assert os.stat(box.report).st_uid == caller.uid
