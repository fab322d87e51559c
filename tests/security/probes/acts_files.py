"""Acts on files: reads and writes outside the workspace, and on names the host would trust."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import socket
import time
from typing import Any

import raw

Params = dict[str, Any]
Result = dict[str, Any]


def put(path: str, text: str, *, append: bool = False) -> bool:
    """Write; False when refused."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "a" if append else "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError:
        return False
    return True


def get(path: str) -> str:
    """Read; the empty string when refused."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(4096)
    except OSError:
        return ""


def read_ssh(p: Params) -> Result:
    """The caller's private key, by every path that may lead to it."""
    paths = [f"{p['home']}/.ssh/id_rsa", os.path.expanduser("~/.ssh/id_rsa")]
    paths += [f"/proc/{pid}/root{p['home']}/.ssh/id_rsa" for pid in raw.visible_pids()[:40]]
    return {"data": "".join(get(path) for path in paths)}


def read_shadow(p: Params) -> Result:
    """The digest of /etc/shadow, so that no line of it leaves the machine."""
    with open("/etc/shadow", "rb") as stream:
        return {"ok": True, "sha": hashlib.sha256(stream.read()).hexdigest()}


def outside_write(p: Params) -> Result:
    """An existing file, a new one, and a start file in the caller's home."""
    put(f"{p['outside']}/target.txt", p["token"])
    put(f"{p['outside']}/new.txt", p["token"])
    put(f"{p['home']}/.bashrc", p["token"], append=True)
    return {}


def names(p: Params) -> Result:
    """Write the token to every name listed in the parameters, below the workspace."""
    wrote = [name for name in p["names"] if put(f"{p['ws']}/{name}", f"# {p['token']}\n")]
    for name in p.get("executables", []):
        if put(f"{p['ws']}/{name}", f"#!/bin/sh\n# {p['token']}\n"):
            os.chmod(f"{p['ws']}/{name}", 0o755)
            wrote.append(name)
    return {"wrote": wrote}


def git_config(p: Params) -> Result:
    """A hook, and a configuration key that runs a program."""
    for git in p["gits"]:
        put(f"{p['ws']}/{git}/hooks/pre-commit", f"#!/bin/sh\n# {p['token']}\n")
        put(f"{p['ws']}/{git}/config", f"\n[core]\n\tfsmonitor = echo {p['token']}\n", append=True)
        try:
            os.chmod(f"{p['ws']}/{git}/hooks/pre-commit", 0o755)
        except OSError:
            continue
    return {}


def symlinks_out(p: Params) -> Result:
    """Write through a link that was there, one made here, and a directory link."""
    ws = p["ws"]
    put(f"{ws}/out_link", p["token"])
    put(f"{ws}/outdir_link/through.txt", p["token"])
    try:
        os.symlink(f"{p['outside']}/made.txt", f"{ws}/made_link")
        os.symlink(p["outside"], f"{ws}/madedir_link")
    except OSError:
        pass
    put(f"{ws}/made_link", p["token"])
    put(f"{ws}/madedir_link/made2.txt", p["token"])
    return {}


def hardlink_existing(p: Params) -> Result:
    """Overwrite in place a file that shares its inode with one outside."""
    descriptor = os.open(f"{p['ws']}/hard.txt", os.O_WRONLY | os.O_TRUNC)
    os.write(descriptor, p["token"].encode())
    return {"ok": True}


def hardlink_made(p: Params) -> Result:
    """Link a file of the outside into the workspace, then write it."""
    os.link(f"{p['outside']}/target.txt", f"{p['ws']}/hl.txt")
    put(f"{p['ws']}/hl.txt", p["token"])
    return {"ok": True}


def move_git(p: Params) -> Result:
    """Move the repository away and put one with a hook in its place."""
    os.rename(f"{p['ws']}/.git", f"{p['ws']}/.git.x")
    put(f"{p['ws']}/.git/hooks/pre-commit", f"#!/bin/sh\n# {p['token']}\n")
    return {"ok": True}


def move_parent(p: Params) -> Result:
    """Move the directory above a nested repository, then plant a hook in both places."""
    ws = p["ws"]
    try:
        os.rename(f"{ws}/sub", f"{ws}/sub2")
    except OSError:
        # What `mv` does when the rename is refused across layers.
        shutil.copytree(f"{ws}/sub", f"{ws}/sub2", symlinks=True)
        shutil.rmtree(f"{ws}/sub")
    for place in ("sub2", "sub"):
        put(f"{ws}/{place}/repo/.git/hooks/pre-commit", f"#!/bin/sh\n# {p['token']}\n")
    return {"ok": True}


def pivot_escape(p: Params) -> Result:
    """Undo a read-only carve-out: new user and mount namespace, detach the old tree, rename there."""
    here = os.open(p["ws"], os.O_RDONLY | os.O_DIRECTORY)
    uid, gid = os.getuid(), os.getgid()
    raw.syscall("unshare", 0x10000000 | 0x00020000)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {uid} 1"),
        ("gid_map", f"0 {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="utf-8") as stream:
            stream.write(text)
    raw.syscall("mount", b"none", b"/", 0, 0x4000 | 0x40000, 0)
    raw.syscall("mount", b"tmpfs", b"/tmp", b"tmpfs", 0, 0)
    os.mkdir("/tmp/old")
    raw.syscall("pivot_root", b"/tmp", b"/tmp/old")
    os.chdir("/")
    raw.syscall("umount2", b"/old", 2)
    os.rename(".git", ".git.x", src_dir_fd=here, dst_dir_fd=here)
    os.mkdir(".git", dir_fd=here)
    os.mkdir(".git/hooks", dir_fd=here)
    hook = os.open(".git/hooks/pre-commit", os.O_CREAT | os.O_WRONLY, 0o755, dir_fd=here)
    os.write(hook, f"#!/bin/sh\n# {p['token']}\n".encode())
    return {"ok": True}


def proc_root(p: Params) -> Result:
    """Write to the outside through the root and cwd links of every process in sight."""
    for pid in ["self", 1, os.getppid(), *raw.visible_pids()[:40]]:
        for link in ("root", "cwd/../../../../../.."):
            put(f"/proc/{pid}/{link}{p['outside']}/target.txt", p["token"])
    return {}


def race(p: Params) -> Result:
    """Swap a directory against a link to the outside, and write through the name, for a while."""
    ws = p["ws"]
    os.mkdir(f"{ws}/race")
    put(f"{ws}/race/target.txt", "inside")
    os.symlink(p["outside"], f"{ws}/race_swap")
    end = time.monotonic() + p["seconds"]
    swapper = os.fork()
    if swapper == 0:
        one, two = f"{ws}/race".encode(), f"{ws}/race_swap".encode()
        while time.monotonic() < end:
            raw.LIBC.syscall(ctypes.c_long(316), -100, one, -100, two, 2)
        os._exit(0)
    opens = 0
    while time.monotonic() < end:
        opens += 1
        try:
            descriptor = os.open(f"{ws}/race/target.txt", os.O_WRONLY | os.O_TRUNC)
        except OSError:
            continue
        os.write(descriptor, p["token"].encode())
        os.close(descriptor)
    os.waitpid(swapper, 0)
    return {"ok": True, "opens": opens}


def shared_tmp(p: Params) -> Result:
    """Read the host's file in /tmp, and leave one there."""
    put(p["tmp_new"], p["token"])
    return {"data": get(p["tmp_canary"])}


def links(p: Params) -> Result:
    """Make each link of the parameters, with its directories; an old entry of that name goes first."""
    made = []
    for name, target in p["links"]:
        path = f"{p['ws']}/{name}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
        os.symlink(target, path)
        made.append(name)
    return {"ok": True, "made": made}


def protected_tricks(p: Params) -> Result:
    """Protected names reached other than by a plain write: rename, link, replacement, hard link, removal."""
    ws, token = p["ws"], p["token"]
    put(f"{ws}/t1/stage/settings.json", token)
    os.rename(f"{ws}/t1/stage", f"{ws}/t1/.vscode")
    put(f"{ws}/t2/stage/settings.json", token)
    os.symlink("stage", f"{ws}/t2/.vscode")
    put(f"{ws}/t3/plain.json", token)
    os.link(f"{ws}/t3/plain.json", f"{ws}/t3/.mcp.json")
    # The whole directory is replaced: on an overlay that is an opaque one, not a changed one.
    shutil.rmtree(f"{ws}/.claude")
    put(f"{ws}/.claude/settings.json", token)
    put(f"{ws}/t4/stage/.vscode/settings.json", token)
    os.rename(f"{ws}/t4/stage", f"{ws}/t4/final")
    os.unlink(f"{ws}/.mcp.json")
    os.unlink(f"{ws}/.codex/config.toml")
    return {"ok": True}


def special(p: Params) -> Result:
    """Entries that are more than plain files."""
    ws = p["ws"]
    for name, mode in (("suid", 0o4755), ("sgid", 0o2755)):
        shutil.copy("/usr/bin/id", f"{ws}/{name}")
        os.chmod(f"{ws}/{name}", mode)
    os.chmod(f"{ws}/src/app.py", 0o6777)
    os.mkdir(f"{ws}/sdir")
    os.chmod(f"{ws}/sdir", 0o3777)
    done: Result = {"fifo": "made"}
    os.mkfifo(f"{ws}/fifo")
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(f"{ws}/sock")
    for name, value in (
        ("security.capability", b"\1\0\0\2\0\4\0\0\0\0\0\0\0\0\0\0\0\0\0\0"),
        ("user.note", b"x"),
    ):
        try:
            os.setxattr(f"{ws}/suid", name, value)
            done[name] = "set"
        except OSError as error:
            done[name] = error.errno
    return done


def read_paths(p: Params) -> Result:
    """What can be read of each path, the beginning only."""
    found = {}
    for path in p["paths"]:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            found[path] = {"ok": True, "data": os.read(fd, 256).decode(errors="replace")}
            os.close(fd)
        except OSError as error:
            found[path] = {"ok": False, "errno": error.errno}
    return {"made": found, "data": "".join(str(value.get("data", "")) for value in found.values())}


def plain_work(p: Params) -> Result:
    """An ordinary program's day: new, changed, removed and renamed files, a link inside, a script."""
    ws = p["ws"]
    put(f"{ws}/src/new.py", p["token"])
    put(f"{ws}/src/app.py", p["token"])
    os.unlink(f"{ws}/sub/file.txt")
    put(f"{ws}/build/out/a.txt", p["token"])
    os.rename(f"{ws}/build/out", f"{ws}/build/final")
    os.symlink("final/a.txt", f"{ws}/build/latest")
    put(f"{ws}/run.sh", f"#!/bin/sh\n# {p['token']}\n")
    os.chmod(f"{ws}/run.sh", 0o755)
    return {"ok": True}
