"""What a process can be told about itself. Each act has a Python of its own: forks need a single thread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import casemate

SOURCE = str(Path(casemate.__file__).parents[1])
HEAD = f"""
import os, sys, time
sys.path.insert(0, {SOURCE!r})
import _signal
from casemate.sys import namespaces, process
"""


def run(script: str, **how: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", HEAD + script],
        capture_output=True, text=True, timeout=30, check=False,
        **how,  # type: ignore[call-overload]
    )  # fmt: skip


def test_fork_blocks_signals_in_the_child_only() -> None:
    """In the child every signal waits; the parent's mask is as before; the pidfd is the child's."""
    done = run(
        """
before = _signal.pthread_sigmask(_signal.SIG_BLOCK, [])
pid, pidfd = process.fork_into(0)
if pid == 0:
    mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, [])
    os._exit(0 if {1, 2, 10, 15, 17} <= {int(n) for n in mask} else 1)
assert _signal.pthread_sigmask(_signal.SIG_BLOCK, []) == before
assert os.waitpid(pid, 0) == (pid, 0)
assert not process.pidfd_signal(pidfd, 0)
print("fine")
"""
    )
    assert done.stdout == "fine\n", done


def test_a_handler_that_raises_stays_in_the_parent() -> None:
    """Signals that rain on a program whose handler raises never send the forked copy up the parent's way."""
    done = run(
        """
main = os.getpid()
class Told(BaseException): pass
armed = False
def stop(*_):
    global armed
    if os.getpid() != main:
        os.write(1, b"raised in the copy\\n")
        os._exit(9)
    if armed:
        armed = False
        raise Told
_signal.signal(10, stop)
rain = os.fork()
if rain == 0:
    for _ in range(4000):
        try:
            os.kill(main, 10)
        except ProcessLookupError:
            break
        time.sleep(0.00005)
    os._exit(0)
told = count = 0
for _ in range(300):
    try:
        armed = True
        pid, pidfd = process.fork_into(0)
        armed = False
        if pid == 0:
            os._exit(0)
        os.close(pidfd)
        count += 1
    except Told:
        told += 1
    while True:
        try:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                break
        except ChildProcessError:
            break
_signal.signal(10, _signal.SIG_IGN)
print("fine" if told and count else (told, count), flush=True)
os._exit(0)
"""
    )
    assert done.stdout == "fine\n", done


def test_close_all_but() -> None:
    """Everything from 3 up is closed but what is named."""
    done = run(
        """
a, b, c = (os.open("/dev/null", os.O_RDONLY) for _ in range(3))
os.dup2(c, 1000)
process.close_all_but([b, 1000])
left = [int(n) for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")]
print(sorted(n for n in left if n > 2) == [b, 1000])
"""
    )
    assert done.stdout == "True\n", done


def test_start_block() -> None:
    """Arguments and environment of the start are overwritten, for every reader of /proc."""
    done = run(
        """
process.StartBlock().rename(b"renamed")
block = open("/proc/self/cmdline", "rb").read() + open("/proc/self/environ", "rb").read()
print(block.strip(b"\\0"))
""",
        env={"SECRET": "hush" * 10, "PATH": os.environ["PATH"]},
    )
    assert done.stdout == "b'renamed'\n", done


def test_die_with_parent() -> None:
    """A process that asked for it dies with its parent, and at once if the parent is dead already."""
    done = run(
        """
alive_read, alive_write = os.pipe()
os.set_blocking(alive_read, False)
up_read, up_write = os.pipe()
middle = os.fork()
if middle == 0:
    os.close(up_read)
    alive = os.pipe()
    os.set_blocking(alive[0], False)
    child = os.fork()
    if child == 0:
        os.close(alive[1])
        process.die_with_parent(alive[0])
        os.write(up_write, b"u")
        time.sleep(30)
        os._exit(0)
    time.sleep(30)
os.close(up_write)
assert os.read(up_read, 1) == b"u"
os.kill(middle, 9)
os.waitpid(middle, 0)
print("ended" if os.read(up_read, 1) == b"" else "lives")
"""
    )
    assert done.stdout == "ended\n", done
    done = run(
        """
read, write = os.pipe()
os.set_blocking(read, False)
os.close(write)
try:
    process.die_with_parent(read)
except ProcessLookupError as error:
    print(error)
"""
    )
    assert "the launcher is gone" in done.stdout, done


@pytest.mark.root
def test_namespaces_without_a_process() -> None:
    """Namespaces are made by a child that is gone afterwards; what its setup met is told; nothing leaks."""
    done = run(
        """
def fds(): return len(os.listdir("/proc/self/fd"))
before = fds()
made = namespaces.make(namespaces.UTS | namespaces.IPC, lambda: namespaces.set_hostname("inside"))
assert sorted(made) == sorted((namespaces.UTS, namespaces.IPC))
own = os.stat("/proc/self/ns/uts").st_ino
assert os.fstat(made[namespaces.UTS]).st_ino != own
for handle in made.values():
    os.close(handle)
def bad(): raise PermissionError(13, "not allowed")
try:
    namespaces.make(namespaces.UTS, bad)
except OSError as error:
    assert error.errno == 13, error
    assert "not allowed" in str(error)
def finish(pid): raise KeyError("mine")
try:
    namespaces.make(namespaces.UTS, lambda: None, finish)
except KeyError:
    pass
assert fds() == before
namespaces.reap_helpers(wait=True)
try:
    os.waitpid(-1, os.WNOHANG)
    print("a child is left")
except ChildProcessError:
    print("fine")
"""
    )
    assert done.stdout == "fine\n", done


def test_pidfd_signal() -> None:
    """A signal by pidfd arrives; to a process that is gone it is False and no error."""
    from casemate.sys.process import pidfd_signal

    child = subprocess.Popen(["sleep", "60"])
    handle = os.pidfd_open(child.pid)
    assert pidfd_signal(handle, signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM
    assert not pidfd_signal(handle, signal.SIGTERM)
    os.close(handle)
