"""Acts against a workspace that is changed directly: each attempt is one row of the report."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import signal
import socket
import stat
import struct
import time
from typing import TYPE_CHECKING, Any

import raw

if TYPE_CHECKING:
    from collections.abc import Callable

Params = dict[str, Any]
Result = dict[str, Any]

AT_FDCWD = -100
OPENAT, LINKAT, MKDIRAT, SYMLINKAT, UNLINKAT, RENAMEAT2 = 257, 265, 258, 266, 263, 316
FCHMODAT2, OPENAT2, TRUNCATE, SETXATTR = 452, 437, 76, 188
W, NEW = os.O_WRONLY, os.O_WRONLY | os.O_CREAT


def attempts(table: dict[str, Callable[[], object]]) -> Result:
    """Make each; an error is its errno, success is 0."""
    done: dict[str, int] = {}
    for name, act in table.items():
        try:
            act()
            done[name] = 0
        except OSError as error:
            done[name] = error.errno or -1
        except ValueError:  # what Python itself refuses, after an earlier attempt went through
            done[name] = -1
    return {"ok": True, "done": done}


def write(path: str | bytes, text: str, flags: int = NEW | os.O_TRUNC) -> None:
    handle = os.open(path, flags, 0o644)
    os.write(handle, text.encode())
    os.close(handle)


def names(p: Params) -> Result:
    """Every name of the parameters: written in place, moved or linked there, made a directory, a link."""
    ws, token = p["ws"], p["token"]
    table: dict[str, Callable[[], object]] = {}
    for number, name in enumerate(p["names"]):
        path = f"{ws}/{name}"
        above = os.path.dirname(path)
        with contextlib.suppress(OSError):
            os.makedirs(above, exist_ok=True)
        source = f"{ws}/source{number}"
        write(source, token)
        table[f"write {name}"] = lambda path=path: write(path, token)  # type: ignore[misc]
        table[f"append {name}"] = lambda path=path: write(path, token, os.O_WRONLY | os.O_APPEND)  # type: ignore[misc]
        table[f"chmod {name}"] = lambda path=path: os.chmod(path, 0o777)  # type: ignore[misc]
        table[f"rename {name}"] = lambda path=path, source=source: os.rename(source, path)  # type: ignore[misc]
        table[f"link {name}"] = lambda path=path, source=source: os.link(source, path)  # type: ignore[misc]
        table[f"symlink {name}"] = lambda path=path: os.symlink("README.md", path)  # type: ignore[misc]
        table[f"mkdir {name}"] = lambda path=path: os.mkdir(path)  # type: ignore[misc]
        table[f"unlink {name}"] = lambda path=path: os.unlink(path)  # type: ignore[misc]
    return attempts(table)


def tricks(p: Params) -> Result:
    """Protected names reached other than by a plain write."""
    ws, token = p["ws"], p["token"]
    for place in ("t1/stage", "t2/stage", "t3", "t4/stage/sub", "t5", "t6/a/workflows", "t7/x/y"):
        os.makedirs(f"{ws}/{place}", exist_ok=True)
    write(f"{ws}/t1/stage/settings.json", token)
    write(f"{ws}/t3/plain.json", token)
    write(f"{ws}/t6/a/workflows/ci.yml", token)
    table: dict[str, Callable[[], object]] = {
        "rename a directory to .vscode": lambda: os.rename(f"{ws}/t1/stage", f"{ws}/t1/.vscode"),
        "link .vscode to a directory": lambda: os.symlink("stage", f"{ws}/t2/.vscode"),
        "hard link .mcp.json": lambda: os.link(f"{ws}/t3/plain.json", f"{ws}/t3/.mcp.json"),
        "remove .claude": lambda: shutil.rmtree(f"{ws}/.claude"),
        "move .claude": lambda: os.rename(f"{ws}/.claude", f"{ws}/t4/c"),
        "unlink .mcp.json": lambda: os.unlink(f"{ws}/.mcp.json"),
        "move .mcp.json away": lambda: os.rename(f"{ws}/.mcp.json", f"{ws}/t4/m"),
        "link .mcp.json away": lambda: os.link(f"{ws}/.mcp.json", f"{ws}/t4/m"),
        "exchange .mcp.json": lambda: raw.nr_call(
            RENAMEAT2, AT_FDCWD, f"{ws}/.mcp.json".encode(), AT_FDCWD, f"{ws}/t3/plain.json".encode(), 2
        ),
        "whiteout": lambda: raw.nr_call(
            RENAMEAT2, AT_FDCWD, f"{ws}/t3/plain.json".encode(), AT_FDCWD, f"{ws}/t3/q".encode(), 4
        ),
        "a directory becomes .github": lambda: os.rename(f"{ws}/t6/a", f"{ws}/t6/.github"),
        "the directory above .git moves": lambda: os.rename(f"{ws}/sub", f"{ws}/sub2"),
        "the repository moves": lambda: os.rename(f"{ws}/.git", f"{ws}/t7/git"),
        "a link to .vscode is written through": lambda: (
            os.symlink("../.vscode", f"{ws}/t7/v"),
            write(f"{ws}/t7/v/settings.json", token),
        ),
        "a host's link to .vscode is written through": lambda: write(f"{ws}/alias/settings.json", token),
        "truncate .mcp.json": lambda: os.truncate(f"{ws}/.mcp.json", 0),
        "times of .mcp.json": lambda: os.utime(f"{ws}/.mcp.json", (1, 1)),
        "mode of .vscode": lambda: os.chmod(f"{ws}/.vscode", 0o777),
        "attribute of .mcp.json": lambda: os.setxattr(f"{ws}/.mcp.json", "user.x", b"x"),
        "special bits on .vscode": lambda: os.chmod(f"{ws}/.vscode", 0o3777),
        "fifo": lambda: os.mkfifo(f"{ws}/t7/fifo"),
        "socket": lambda: socket.socket(socket.AF_UNIX).bind(f"{ws}/t7/s"),
        "plain rename": lambda: os.rename(f"{ws}/t3/plain.json", f"{ws}/t3/renamed.json"),
    }
    return attempts(table)


def descriptors(p: Params) -> Result:
    """From what is open, by every way to more: the given file, a file read, a directory, O_PATH, /proc."""
    ws, token = p["ws"], p["token"]
    os.chdir(ws)
    given = os.open("given.txt", os.O_RDWR | os.O_CREAT, 0o644)
    os.write(given, token.encode())
    kept = os.open(".mcp.json", os.O_RDONLY)
    directory = os.open(".git", os.O_RDONLY | os.O_DIRECTORY)
    path = os.open(".mcp.json", os.O_PATH)
    itself = os.open(".", os.O_PATH)

    def by(number: int) -> str:
        return f"/proc/self/fd/{number}"

    def linkat(number: int, name: str, *, empty: bool) -> object:
        old = b"" if empty else by(number).encode()
        return raw.nr_call(LINKAT, number, old, AT_FDCWD, name.encode(), 0x1000 if empty else 0x400)

    def passed() -> None:
        # Over a socket to a child and back: descriptors are what they are, wherever they go.
        ours, theirs = socket.socketpair()
        socket.send_fds(ours, [b"x"], [given])
        _, fds, _, _ = socket.recv_fds(theirs, 1, 1)
        os.open("../.mcp.json", NEW, dir_fd=fds[0])

    table: dict[str, Callable[[], object]] = {
        "up from the given file": lambda: os.open("..", os.O_RDONLY, dir_fd=given),
        "passed and up": passed,
        "enter the given file": lambda: os.fchdir(given),
        "write by the read one": lambda: os.write(kept, b"x"),
        "reopen the read one": lambda: write(by(kept), token, W),
        "reopen the path": lambda: write(by(path), token, W | os.O_TRUNC),
        "reopen by a thread's name": lambda: write(f"/proc/thread-self/fd/{path}", token, W),
        "truncate by /proc": lambda: os.truncate(by(path), 0),
        "mode by the read one": lambda: os.fchmod(kept, 0o777),
        "mode by /proc": lambda: os.chmod(by(path), 0o777),
        "mode by an empty path": lambda: raw.nr_call(FCHMODAT2, path, b"", 0o777, 0x1000),
        "times by the read one": lambda: os.utime(kept, (1, 1)),
        "attribute by the read one": lambda: os.setxattr(kept, "user.x", b"x"),
        "owner by the read one": lambda: os.fchown(kept, os.getuid(), os.getgid()),
        "map and write": lambda: mmap.mmap(kept, 2, access=mmap.ACCESS_WRITE)[0:1],
        "make in an open .git": lambda: write_at(directory, "hooks/pre-commit", token),
        "make in .git by /proc": lambda: write(f"{by(directory)}/hooks/pre-commit", token),
        "make by the open workspace": lambda: write_at(itself, ".envrc", token),
        "make by cwd in /proc": lambda: write("/proc/self/cwd/.envrc", token),
        "make by root in /proc": lambda: write(f"/proc/self/root{ws}/.envrc", token),
        "link the given one to .envrc": lambda: linkat(given, ".envrc", empty=False),
        "link the given one, empty path": lambda: linkat(given, ".envrc", empty=True),
        "link the kept one away": lambda: linkat(path, "away", empty=False),
        "unnamed file to .envrc": lambda: linkat(unnamed(token), ".envrc", empty=False),
        "openat2": lambda: raw.nr_call(OPENAT2, AT_FDCWD, b".envrc", struct.pack("QQQ", NEW, 0o644, 0), 24),
        "io_uring": lambda: raw.syscall("io_uring_setup", 1, bytes(120)),
        "landlock": lambda: raw.nr_call(444, 0, 0, 1),
        "unnamed file to a plain name": lambda: linkat(unnamed(token), "unnamed.txt", empty=False),
        "the given one again, by /proc": lambda: write(by(given), token, W),
        "the given one, linked plainly": lambda: linkat(given, "given2.txt", empty=False),
    }
    return attempts(table)


def write_at(directory: int, name: str, text: str) -> None:
    handle = os.open(name, NEW, 0o644, dir_fd=directory)
    os.write(handle, text.encode())
    os.close(handle)


def unnamed(text: str) -> int:
    handle = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o644)
    os.write(handle, text.encode())
    return handle


def modes(p: Params) -> Result:
    """Set-id bits by every call that takes a mode, on a file and a directory of the workspace."""
    ws = p["ws"]
    os.chdir(ws)
    shutil.copy("/usr/bin/id", "prog")
    given = os.open("prog", os.O_RDWR)
    by = f"/proc/self/fd/{given}"
    os.mkdir("/tmp/own", 0o700)
    table: dict[str, Callable[[], object]] = {
        "chmod": lambda: os.chmod("prog", 0o6755),
        "fchmod": lambda: os.fchmod(given, 0o6755),
        "by /proc": lambda: os.chmod(by, 0o6755),
        "fchmodat2": lambda: raw.nr_call(FCHMODAT2, given, b"", 0o6755, 0x1000),
        "open": lambda: os.close(os.open("made", NEW, 0o6755)),
        "mkdir": lambda: os.mkdir("madedir", 0o3777),
        "directory": lambda: os.chmod("src", 0o3777),
        "mknod": lambda: os.mknod("node", stat.S_IFREG | 0o6755),
        "outside": lambda: os.chmod("/tmp/own", 0o2700),
    }
    done = attempts(table)
    done["outside mode"] = stat.S_IMODE(os.stat("/tmp/own").st_mode)
    return done


def race(p: Params) -> Result:
    """Two processes: one flips the bytes of a path in shared memory, the other calls with it."""
    ws, end = p["ws"], time.monotonic() + p["seconds"]
    os.chdir(ws)
    os.makedirs("open", exist_ok=True)
    write("plain", p["token"])
    shared = mmap.mmap(-1, 4096)
    one, two = b"open/raced\0", b".git/raced\0"
    shared[: len(one)] = one
    address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    flipper = os.fork()
    if flipper == 0:
        while True:
            shared[: len(one)] = two
            shared[: len(one)] = one
    calls = won = 0
    call = raw.LIBC.syscall
    plain, fd, flags, mode = (
        ctypes.c_char_p(b"plain"),
        ctypes.c_long(AT_FDCWD),
        ctypes.c_long(NEW),
        ctypes.c_long(0o755),
    )
    pointer = ctypes.c_void_p(address)
    zero = ctypes.c_long(0)
    try:
        while time.monotonic() < end:
            calls += 1
            handle = call(ctypes.c_long(OPENAT), fd, pointer, flags, mode)
            if handle >= 0:
                os.write(handle, p["token"].encode())
                os.close(handle)
            won += os.path.lexists(".git/raced")
            call(ctypes.c_long(UNLINKAT), fd, pointer, zero)
            call(ctypes.c_long(LINKAT), fd, plain, fd, pointer, zero)
            call(ctypes.c_long(RENAMEAT2), fd, pointer, fd, pointer, zero)
            call(ctypes.c_long(UNLINKAT), fd, pointer, zero)
            call(ctypes.c_long(SYMLINKAT), plain, fd, pointer)
            call(ctypes.c_long(UNLINKAT), fd, pointer, zero)
            call(ctypes.c_long(MKDIRAT), fd, pointer, mode)
            call(ctypes.c_long(UNLINKAT), fd, pointer, ctypes.c_long(0x200))
            won += os.path.lexists(".git/raced")
    finally:
        os.kill(flipper, signal.SIGKILL)
        os.waitpid(flipper, 0)
    return {"ok": True, "calls": calls, "won": won}


def swap(p: Params) -> Result:
    """One process swaps a directory with links and other directories, others write through its name."""
    ws, end = p["ws"], time.monotonic() + p["seconds"]
    os.chdir(ws)
    os.makedirs("room/d", exist_ok=True)
    os.makedirs("room/e", exist_ok=True)
    os.symlink("../src", "room/l")
    swapper = os.fork()
    if swapper == 0:
        while True:
            for old, new in (("d", "x"), ("l", "d"), ("d", "l"), ("e", "d"), ("d", "e"), ("x", "d")):
                with contextlib.suppress(OSError):
                    os.rename(f"room/{old}", f"room/{new}")
    calls = made = 0
    try:
        while time.monotonic() < end:
            for name in ("room/d/w.txt", "room/d/../../.envrc", "room/d/../../.git/hooks/post-commit"):
                calls += 1
                with contextlib.suppress(OSError):
                    write(name, p["token"])
                    made += 1
    finally:
        os.kill(swapper, signal.SIGKILL)
        os.waitpid(swapper, 0)
    return {"ok": True, "calls": calls, "made": made}


def hostile(p: Params) -> Result:
    """What a broker could stumble over: pointers, lengths, descriptors, numbers, killed callers, a flood."""
    os.chdir(p["ws"])
    call = raw.nr_call
    long = b"a" * 5000
    deep = b"d/" * 2040 + b"f"
    mapped = mmap.mmap(-1, 8192)
    mapped[4090:4096] = b"ab/cde"  # runs on into the next page
    base = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    call(10, base + 4096, 4096, 0)  # mprotect: that page cannot be read
    table: dict[str, Callable[[], object]] = {
        "null": lambda: call(OPENAT, AT_FDCWD, 0, NEW, 0o644),
        "kernel address": lambda: call(OPENAT, AT_FDCWD, 0xFFFF_8000_0000_0000, NEW, 0o644),
        "last byte": lambda: call(OPENAT, AT_FDCWD, 0xFFFF_FFFF_FFFF_FFFF, NEW, 0o644),
        "into an unreadable page": lambda: call(OPENAT, AT_FDCWD, base + 4090, NEW, 0o644),
        "empty": lambda: call(OPENAT, AT_FDCWD, b"", NEW, 0o644),
        "too long": lambda: call(OPENAT, AT_FDCWD, long, NEW, 0o644),
        "deep": lambda: call(OPENAT, AT_FDCWD, deep, NEW, 0o644),
        "not UTF-8": lambda: os.close(call(OPENAT, AT_FDCWD, b"n\xff\xfe", NEW, 0o644)),
        "a newline": lambda: os.close(call(OPENAT, AT_FDCWD, b"a\nb", NEW, 0o644)),
        "no such descriptor": lambda: call(OPENAT, 12345, b"x", NEW, 0o644),
        "negative descriptor": lambda: call(OPENAT, -5, b"x", NEW, 0o644),
        "a pipe": lambda: call(OPENAT, os.pipe()[0], b"x", NEW, 0o644),
        "odd flags": lambda: os.close(call(OPENAT, AT_FDCWD, b"odd", 0xFFFF_FFFF & ~0o20200000, 0o644)),
        "rubbish above": lambda: os.close(
            call(OPENAT, 0xDEAD_BEEF_FFFF_FF9C, b"rubbish", 0xDEAD_0000_0000_0000 | NEW, 0o644)
        ),
        "bad times": lambda: call(280, AT_FDCWD, b"README.md", 8, 0),
        "negative size": lambda: call(TRUNCATE, b"README.md", 0xFFFF_FFFF_FFFF_FFFF),
        "bad flags": lambda: call(LINKAT, AT_FDCWD, b"README.md", AT_FDCWD, b"zz", 0x8000),
        "slash after a new file": lambda: call(OPENAT, AT_FDCWD, b"slash/", NEW, 0o644),
        "loop": lambda: (os.symlink("loop", "loop"), call(OPENAT, AT_FDCWD, b"loop", NEW, 0o644)),
        "dot": lambda: os.mkdir("src/."),
        "rename the workspace": lambda: os.rename(p["ws"], p["ws"] + "2"),
        "remove the workspace": lambda: os.rmdir(p["ws"]),
    }
    done = attempts(table)
    for _ in range(200):  # killed in the middle of a call, or before it is answered
        child = os.fork()
        if child == 0:
            while True:
                with contextlib.suppress(OSError):
                    write("victim", "x")
        time.sleep(0.001)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    children = []
    for number in range(40):
        child = os.fork()
        if child == 0:
            for count in range(50):
                write(f"flood{number}", str(count))
            os._exit(0)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    done["flood"] = sorted(set(codes))
    write("after.txt", p["token"])
    return done


def interrupted(p: Params) -> Result:
    """Calls under a storm of signals are made once each, whether the handler asks for restarts or not."""
    os.chdir(p["ws"])
    count = [0, 0]
    wrong = []
    signal.signal(signal.SIGALRM, lambda *_: count.__setitem__(0, count[0] + 1))

    def made(act: Callable[..., object], *words: str) -> None:
        while True:
            try:
                act(*words)
            except InterruptedError:  # not made then: the next try must not find it done
                count[1] += 1
                continue
            except OSError as error:
                wrong.append(str(error))
            return

    interruptions = []
    for restart in (True, False):
        count[1] = 0
        signal.siginterrupt(signal.SIGALRM, not restart)
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        for number in range(400):
            name = f"{restart}{number}"
            made(os.mkdir, f"m{name}")
            made(os.rename, f"m{name}", f"n{name}")
            made(os.rmdir, f"n{name}")
        signal.setitimer(signal.ITIMER_REAL, 0)
        interruptions.append(count[1])
    return {"ok": not wrong, "wrong": wrong[:5], "signals": count[0], "interruptions": interruptions}


def semantics(p: Params) -> Result:
    """What programs count on: masks, modes, times, errors, links, locks, an executed file."""
    os.chdir(p["ws"])
    found: Result = {"ok": True}
    os.umask(0o027)
    write("masked", "x", NEW | os.O_EXCL)
    os.mkdir("maskeddir")
    os.umask(0o002)
    write("masked2", "x", NEW | os.O_EXCL)
    child = os.fork()
    if child == 0:
        os.umask(0o077)
        write("masked3", "x", NEW | os.O_EXCL)
        os._exit(0)
    os.waitpid(child, 0)
    write("masked4", "x", NEW | os.O_EXCL)
    found["modes"] = {
        name: stat.S_IMODE(os.stat(name).st_mode)
        for name in ("masked", "maskeddir", "masked2", "masked3", "masked4")
    }
    os.utime("masked", ns=(1_500_000_000, 2_500_000_001))
    found["times"] = [os.stat("masked").st_atime_ns, os.stat("masked").st_mtime_ns]
    os.utime("maskeddir", (5, 6))
    found["directory times"] = os.stat("maskeddir").st_mtime
    os.chmod("masked", 0o711)
    found["mode"] = stat.S_IMODE(os.stat("masked").st_mode)
    os.chown("masked", os.getuid(), os.getgid())
    found["access"] = [
        os.access(name, os.W_OK) for name in ("masked", ".", "src", ".mcp.json", ".vscode", "/tmp")
    ]
    found.update(attempts(ordinary(p["ws"])))
    return found


def ordinary(ws: str) -> dict[str, Callable[[], object]]:
    """What programs do and meet every day."""
    return {
        "exclusive": lambda: write("masked", "x", NEW | os.O_EXCL),
        "missing": lambda: write("nothing/here", "x"),
        "no such file": lambda: write("nothing", "x", W),
        "a directory": lambda: write("src", "x", W),
        "unlink a directory": lambda: os.unlink("src"),
        "rmdir a file": lambda: os.rmdir("masked"),
        "rmdir a full one": lambda: os.rmdir("src"),
        "mkdir again": lambda: os.mkdir("src"),
        "not a directory": lambda: write("masked/x", "x"),
        "no replace": lambda: raw.nr_call(RENAMEAT2, AT_FDCWD, b"masked", AT_FDCWD, b"masked2", 1),
        "to another file system": lambda: os.rename("masked", "/tmp/masked"),
        "from another file system": lambda: (
            write("/tmp/foreign", "x"),
            os.rename("/tmp/foreign", "foreign"),
        ),
        "into itself": lambda: os.rename("src", "src/sub"),
        "no follow": lambda: (os.symlink("masked", "sym"), write("sym", "x", W | os.O_NOFOLLOW)),
        "through a link": lambda: write("sym", "through", W | os.O_TRUNC),
        "through a link of /tmp": lambda: (
            os.symlink(ws, "/tmp/ws"),
            write("/tmp/ws/by_tmp.txt", "x"),
        ),
        "a dangling link": lambda: (os.symlink("made_by_link", "dangling"), write("dangling", "x")),
        "up and down": lambda: write("src/../src/up.txt", "x"),
        "exchange": lambda: raw.nr_call(RENAMEAT2, AT_FDCWD, b"masked2", AT_FDCWD, b"masked4", 2),
        "own twin": lambda: (os.link("masked2", "twin"), write("twin", "second", W)),
        "unlinked and written": unlinked,
        "execute": lambda: execute(),
    }


def unlinked() -> None:
    handle = os.open("short", os.O_RDWR | os.O_CREAT, 0o600)
    os.unlink("short")
    os.write(handle, b"still")
    os.close(handle)


def execute() -> None:
    """Written, closed and run at once, many times: nobody else may have it open for writing by then."""
    for _ in range(60):
        handle = os.open("prog", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o755)
        os.write(handle, b"#!/bin/true\n")
        os.close(handle)
        child = os.fork()
        if child == 0:
            try:
                os.execv("./prog", ["prog"])
            except OSError as error:
                os._exit(error.errno or 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            raise OSError(code, "execve")
