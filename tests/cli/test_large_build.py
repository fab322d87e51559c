"""What the defaults have to let through: a build of 2 GiB of memory, 2 GiB on disk and 2,000 processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.harness import Caller

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.usefixtures("traceless")]

# All at once: the processes live while the memory is touched and the file written. Ends by itself.
BUILD = """
import os, sys
read, write = os.pipe()
children = []
for _ in range(2000):
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    children.append(pid)
held = bytearray(2 << 30)
for at in range(0, len(held), 4096):
    held[at] = 1
block = b"x" * (1 << 20)
with open("object", "wb", buffering=0) as out:
    for _ in range(2048):
        out.write(block)
size = os.stat("object").st_size
os.unlink("object")
os.close(write)
for pid in children:
    os.waitpid(pid, 0)
print(len(children), len(held), size, flush=True)
"""


@pytest.mark.timeout(300)
def test_the_defaults_let_a_large_build_pass(caller: Caller, ws: Path) -> None:
    """Under the default policy it ends well, and no limit is even touched."""
    ended = caller.py(ws, BUILD, flags=("--json",), timeout=240)
    assert ended.code == 0, ended
    assert f"2000 {2 << 30} {2 << 30}".encode() in ended.err, ended
    assert (ended.json["limit"], ended.json["limits-touched"]) == ("", []), ended
