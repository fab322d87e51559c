"""Workspaces for the API, as whoever runs the tests: root here, uid 1000 by ``test_as_user``."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from casemate.isolation.process.trees import remove_tree
from casemate.settings import places, workspace_key
from tests.cli.harness import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def environ(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A caller's environment with a home of its own."""
    home = Path(tempfile.mkdtemp(prefix="casemate-api-home-", dir="/var/tmp"))
    yield {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8", "CALLERS_SECRET": "hush"
    }  # fmt: skip
    remove_tree(str(home))


@pytest.fixture
def workspaces(environ: dict[str, str]) -> Iterator[Callable[[], Path]]:
    """Makes fresh workspaces; when the test is over, nothing is left of what ran in them."""
    base = Path(tempfile.mkdtemp(prefix="casemate-api-", dir="/var/tmp"))
    made: list[Path] = []

    def make() -> Path:
        path = base / f"w{len(made)}"
        path.mkdir()
        made.append(path)
        return path

    descriptors = len(os.listdir("/proc/self/fd"))
    yield make
    gc.collect()
    try:
        until(lambda: not left(base, made, environ), 5)
    except AssertionError:
        pytest.fail("left behind:\n" + "\n".join(left(base, made, environ)))
    finally:
        shutil.rmtree(base)
    until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 3, 2, "descriptors are closed")


@pytest.fixture
def ws(workspaces: Callable[[], Path]) -> Path:
    """One fresh workspace."""
    return workspaces()


def left(base: Path, made: list[Path], environ: dict[str, str]) -> list[str]:
    """What is there still of the sandboxes of these workspaces."""
    found = []
    for pid in os.listdir("/proc"):
        if pid.isdigit() and int(pid) != os.getpid():
            try:
                text = Path(f"/proc/{pid}/mountinfo").read_text()
            except OSError:
                continue
            if str(base) in text:
                found.append(f"process {pid}")
    where = places(environ)
    keys = {workspace_key(str(path)) for path in made}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        found += [f"mount {line}"] if any(key in line for key in keys) else []
    for root in {where.state, where.run}:
        for directory, _, names in os.walk(root):
            if os.path.basename(directory) in keys and "held" not in directory and "caches" not in directory:
                found.append(directory)
            found += [f"{directory}/{name}" for name in names if name in keys]
    return found
