"""Standard streams: every byte arrives, ends are passed on in both directions, nobody waits for nobody."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import select
import signal
import struct
import subprocess
import termios
import time
from typing import TYPE_CHECKING

import pytest

from tests.cli.harness import PYTHON, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.harness import Caller

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("traceless")]

# Writes the same pseudo-random bytes to both streams, interleaved; the arguments are MiB.
BOTH = """
import os, random, sys
block = random.Random(7).randbytes(1 << 20)
for number in range(int(sys.argv[1])):
    data = number.to_bytes(4, "big") + block
    for stream in (1, 2):
        view = memoryview(data)
        while view:
            view = view[os.write(stream, view):]
"""


def both_digest(mib: int) -> str:
    """The digest of what ``BOTH`` writes to each stream."""
    import random

    block = random.Random(7).randbytes(1 << 20)
    digest = hashlib.sha256()
    for number in range(mib):
        digest.update(number.to_bytes(4, "big") + block)
    return digest.hexdigest()


def waiting(descriptor: int) -> int:
    """How many bytes there are to read."""
    size: int = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4))[0]
    return size


def test_stdin_and_its_end(caller: Caller, ws: Path) -> None:
    """All of stdin arrives, binary, and its end is passed on."""
    data = os.urandom(3 << 20) + b"\0\xff\x04\x03\x1a"
    ended = caller.run(ws, "/bin/cat", stdin=data)
    assert ended.code == 0, ended.err
    assert hashlib.sha256(ended.out).digest() == hashlib.sha256(data).digest()


def test_half_close(caller: Caller, ws: Path) -> None:
    """The end of stdin reaches the command while its output stays open, and the other way round."""
    ended = caller.sh(ws, "wc -c; echo after", stdin=b"12345")
    assert ended.out.split() == [b"5", b"after"], ended
    # The command has closed its output and reads on.
    ended = caller.sh(ws, "echo before; exec >&-; cat >got", stdin=b"x" * 100_000)
    assert (ended.code, ended.out) == (0, b"before\n"), ended
    assert (ws / "got").stat().st_size == 100_000


def test_reader_that_stops_early(caller: Caller, ws: Path) -> None:
    """A command that reads one byte ends at once, though its caller writes on and on."""
    process = caller.start("run", "--", "/usr/bin/head", "-c1", cwd=ws)
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    assert process.stdout is not None
    sent = 0

    def ended() -> bool:
        nonlocal sent
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            sent += os.write(process.stdin.fileno(), b"y" * 65536)  # type: ignore[union-attr]
        return process.poll() is not None

    until(ended, 20, "head -c1 has one byte and ends")
    assert process.stdout.read() == b"y"
    assert sent > 0
    assert caller.end(process) == 0


def test_stdin_that_stays_open(caller: Caller, ws: Path) -> None:
    """A command that does not read ends although nobody closes its stdin."""
    process = caller.start("run", "--", "/bin/true", cwd=ws)
    until(lambda: process.poll() is not None, 20)
    assert caller.end(process) == 0


def test_large_output_on_both_streams(caller: Caller, ws: Path, tmp_path: Path) -> None:
    """50 MiB on both streams at once arrive byte by byte, in pipes."""
    ended = caller.py(ws, BOTH, "25", timeout=100)
    assert ended.code == 0
    want = both_digest(25)
    assert hashlib.sha256(ended.out).hexdigest() == want
    assert hashlib.sha256(ended.err).hexdigest() == want


def test_large_output_into_files(caller: Caller, ws: Path, tmp_path: Path) -> None:
    """The same into files, both streams in one as well: nothing is lost or cut."""
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("wb") as one, err.open("wb") as two:
        assert caller.py(ws, BOTH, "8", stdout=one, stderr=two).code == 0
    assert hashlib.sha256(out.read_bytes()).hexdigest() == both_digest(8)
    assert hashlib.sha256(err.read_bytes()).hexdigest() == both_digest(8)
    with out.open("wb") as one:
        assert caller.py(ws, BOTH, "2", stdout=one, stderr=subprocess.STDOUT).code == 0
    assert out.stat().st_size == 2 * 2 * ((1 << 20) + 4)


def test_slow_reader_loses_nothing(caller: Caller, ws: Path) -> None:
    """A reader that pauses after the command's end for longer than any patience still gets all of it."""
    process = caller.start(
        "run", "--", PYTHON, "-I", "-S", "-c", BOTH, "1", cwd=ws, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    got = os.read(process.stdout.fileno(), 65536)
    while len(got) < (1 << 20) - 150_000:
        got += os.read(process.stdout.fileno(), 65536)
    # What is left fits the pipes, so the command ends; the reader takes its time.
    pause = time.monotonic() + 2.5
    until(lambda: time.monotonic() > pause, 5)
    got += process.stdout.read()
    assert len(got) == (1 << 20) + 4
    assert caller.end(process) == 0


def test_output_closed_by_its_reader(caller: Caller, ws: Path) -> None:
    """``casemate run -- yes | head -1`` ends at once, and the command by SIGPIPE."""
    process = caller.start("run", "--", "/usr/bin/yes", cwd=ws)
    assert process.stdout is not None
    assert process.stdout.read(2) == b"y\n"
    process.stdout.close()
    until(lambda: process.poll() is not None, 20)
    assert caller.end(process) == 141


def test_stderr_closed_by_its_reader(caller: Caller, ws: Path) -> None:
    """When nobody reads stderr any more, stdout, the code and the changes stay as they are."""
    process = caller.start(
        "run",
        "--",
        "/bin/sh",
        "-c",
        "sleep 0.2; : >made; echo lost >&2; echo out; echo x >.envrc; exit 5",
        cwd=ws,
    )
    assert process.stderr is not None
    process.stderr.close()
    assert process.stdout is not None
    assert process.stdout.read() == b"out\n"
    assert caller.end(process) == 5
    assert (ws / "made").exists()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_closed_standard_descriptors(caller: Caller, ws: Path, closed: str) -> None:
    """A caller that has closed some of 0, 1 and 2 gets its command run and its code, and no mix-up."""
    ended = caller.sh(
        ws,
        "cat; echo out; echo err >&2; : >made; exit 6",
        before=("/bin/sh", "-c", f'exec "$0" "$@" {closed}'),
    )
    assert ended.code == 6, ended
    assert ended.out == (b"" if ">&- " in f"{closed} ".replace("2>&-", "") else b"out\n"), ended
    assert ended.err == (b"" if "2>&-" in closed else b"err\n"), ended
    assert (ws / "made").exists()


def test_output_limit(caller: Caller, ws: Path) -> None:
    """Past --output the command is ended with 123 and the limit named; exactly the limit is passed on."""
    ended = caller.sh(ws, "yes | head -c 3000000; echo survived >&2", flags=("--output", "1M"))
    assert ended.code == 123, ended
    assert len(ended.out) == 1 << 20
    assert b"limit: output" in ended.err, ended
    assert b"survived" not in ended.err
    below = caller.sh(ws, "yes | head -c 1048575", flags=("--output", "1M"))
    assert (below.code, len(below.out)) == (0, (1 << 20) - 1), below.err


def test_stuck_reader_does_not_stop_the_clock(caller: Caller, ws: Path) -> None:
    """While nobody reads its output, the time limit of a command holds, and Casemate ends as well."""
    process = caller.start("run", "--timeout", "1s", "--", "/usr/bin/yes", cwd=ws)
    until(lambda: process.poll() is not None, 15, "the time limit")
    assert caller.end(process) == 124


def test_stuck_reader_does_not_stop_signals(caller: Caller, ws: Path) -> None:
    """While nobody reads its output, a signal still reaches the command."""
    process = caller.start("run", "--", "/usr/bin/yes", cwd=ws)
    assert process.stdout is not None
    assert process.stdout.read(2) == b"y\n"
    until(lambda: waiting(process.stdout.fileno()) > 60_000, 10, "the pipe is full")  # type: ignore[union-attr]
    process.send_signal(signal.SIGTERM)
    until(lambda: process.poll() is not None, 15, "SIGTERM ends it")
    assert caller.end(process) == 128 + signal.SIGTERM


def test_one_stuck_stream_does_not_stop_the_other(caller: Caller, ws: Path) -> None:
    """Output that nobody reads does not keep the other stream from arriving."""
    script = (
        "import os\nif os.fork():\n    for _ in range(9999): os.write(2, b'e' * 1000)\n    os.wait()\n"
        "else:\n    os.write(1, b'o' * 50000)\n"
    )
    process = caller.start("run", "--", PYTHON, "-I", "-S", "-c", script, cwd=ws)
    assert process.stdout is not None
    got = b""
    while len(got) < 50_000:
        assert select.select([process.stdout], [], [], 10)[0], "stdout arrives while stderr is stuck"
        got += os.read(process.stdout.fileno(), 65536)
    out, err = process.communicate(timeout=20)
    assert (out, len(err)) == (b"", 9999 * 1000)
    assert caller.end(process) == 0


def test_input_while_output_is_stuck(caller: Caller, ws: Path) -> None:
    """A command that reads everything before it writes works with a caller that does the same."""
    data = b"z" * (4 << 20)
    ended = caller.py(
        ws, "import sys; d = sys.stdin.buffer.read(); sys.stdout.buffer.write(d[::-1])", stdin=data
    )
    assert (ended.code, len(ended.out)) == (0, len(data))


def test_stdin_from_a_file_and_from_nothing(caller: Caller, ws: Path, tmp_path: Path) -> None:
    """stdin may be a file or /dev/null."""
    (tmp_path / "in").write_bytes(b"from a file")
    for path, want in ((tmp_path / "in", b"from a file"), ("/dev/null", b"")):
        with open(path, "rb") as stream:
            process = caller.start("run", "--", "/bin/cat", cwd=ws, stdin=stream)
            out, _ = process.communicate(timeout=20)
            assert (process.returncode, out) == (0, want)


def test_streams_of_the_caller_keep_their_mode(caller: Caller, ws: Path) -> None:
    """Casemate does not make its caller's descriptors non-blocking: others share them."""
    ends = [*os.pipe(), *os.pipe()]
    try:
        process = caller.start("run", "--", "/bin/echo", "x", cwd=ws, stdin=ends[0], stdout=ends[3])
        process.wait(20)
        assert all(os.get_blocking(end) for end in ends)
        assert os.read(ends[2], 10) == b"x\n"
    finally:
        for end in ends:
            os.close(end)
    assert caller.end(process) == 0


def test_own_streams_can_be_opened_by_name(caller: Caller, ws: Path) -> None:
    """/dev/stdout and /dev/stderr can be opened by the command, as shell scripts do."""
    ended = caller.sh(ws, "echo one >/dev/stdout; echo two >/dev/stderr; cat /dev/stdin", stdin=b"three\n")
    assert (ended.code, ended.out, ended.err) == (0, b"one\nthree\n", b"two\n"), ended
