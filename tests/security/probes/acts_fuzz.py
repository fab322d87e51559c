"""Random acts in a workspace that is changed directly, beside the same acts on an ordinary file system."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
import stat
from typing import Any

import raw

Params = dict[str, Any]
Result = dict[str, Any]

NAMES = ["a", "b", "c", "d", "e"]
CREATE = os.O_CREAT | os.O_WRONLY
FLAGS = [
    os.O_WRONLY, os.O_RDWR, CREATE, CREATE | os.O_EXCL, CREATE | os.O_TRUNC, os.O_RDONLY | os.O_CREAT,
    os.O_RDONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_NOFOLLOW, CREATE | os.O_DIRECTORY,
    os.O_RDWR | os.O_DIRECTORY, os.O_RDONLY | os.O_DIRECTORY, os.O_PATH, os.O_RDONLY,
]  # fmt: skip


def path(chance: random.Random) -> str:
    """A path of a few names, sometimes with a way up; it never begins with one, nor ends with a dot."""
    parts = [chance.choice(NAMES) for _ in range(chance.choice((1, 1, 2, 2, 3, 4)))]
    if chance.random() < 0.15:
        parts.insert(chance.randrange(1, len(parts) + 1), chance.choice((".", "..")))
        parts += ["a"] if parts[-1] == "." else []
    return "/".join(parts) + chance.choice(("", "", "", "", "/"))


def opened(name: str, flags: int, text: bytes) -> None:
    handle = os.open(name, flags, 0o640)
    try:
        if flags & 3 and not flags & os.O_PATH:
            os.write(handle, text)
            os.fchmod(handle, 0o600)
    finally:
        os.close(handle)


def renamed(old: str, new: str, flags: int) -> None:
    raw.nr_call(316, -100, old.encode(), -100, new.encode(), flags)


def act(chance: random.Random) -> tuple[str, Any]:
    """A name for the report, and the act."""
    kind, one, two = chance.randrange(16), path(chance), path(chance)
    flags, number = chance.choice(FLAGS), chance.randrange(9)
    to = "/".join(chance.choice(NAMES) for _ in range(chance.choice((1, 2))))
    acts: list[tuple[str, Any]] = [
        (f"open {one} {flags:#o}", lambda: opened(one, flags, str(number).encode())),
        (f"mkdir {one}", lambda: os.mkdir(one, 0o755)),
        (f"mkdir {two}", lambda: os.mkdir(two, 0o700)),
        (f"rmdir {one}", lambda: os.rmdir(one)),
        (f"unlink {one}", lambda: os.unlink(one)),
        (f"rename {one} {two}", lambda: os.rename(one, two)),
        (f"rename {one} {two}", lambda: os.rename(one, two)),
        (f"renameat2 {one} {two} {number % 4}", lambda: renamed(one, two, number % 4)),
        (f"link {one} {two}", lambda: os.link(one, two, follow_symlinks=False)),
        (f"link {one} {two} follow", lambda: os.link(one, two, follow_symlinks=True)),
        (f"symlink {to} {one}", lambda: os.symlink(to, one)),
        (f"chmod {one}", lambda: os.chmod(one, 0o700 | number)),
        (f"truncate {one}", lambda: os.truncate(one, number)),
        (f"utime {one}", lambda: os.utime(one, (number, number), follow_symlinks=number % 2 == 0)),
        (f"access {one}", lambda: raw.nr_call(21, one.encode(), 2 | number % 2)),
        (f"chown {one}", lambda: os.chown(one, os.getuid(), -1, follow_symlinks=number % 2 == 0)),
    ]
    return acts[kind]


def tree(top: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for base, directories, names in os.walk(top):
        for name in [*directories, *names]:
            full = os.path.join(base, name)
            facts = os.lstat(full)
            text = f"{stat.filemode(facts.st_mode)} {facts.st_nlink if stat.S_ISREG(facts.st_mode) else 0}"
            if stat.S_ISLNK(facts.st_mode):
                text = os.readlink(full)
            elif stat.S_ISREG(facts.st_mode) and facts.st_mode & 0o400:
                with open(full, "rb") as file:
                    text += repr(file.read(20))
            found[os.path.relpath(full, top)] = text
    return found


def same(p: Params) -> Result:
    """The same acts, drawn from a seed, in both places: the same errors, the same trees."""
    places = [f"{p['ws']}/twin", "/tmp/twin"]
    different: list[str] = []
    for seed in p["seeds"]:
        for place in places:
            os.makedirs(place, exist_ok=True)
        chance = random.Random(seed)
        for _ in range(p["count"]):
            name, function = act(chance)
            codes = []
            for place in places:
                os.chdir(place)
                try:
                    function()
                    codes.append(0)
                except OSError as error:
                    codes.append(error.errno or -1)
            if codes[0] != codes[1]:
                different.append(f"{seed}: {name}: {[errno.errorcode.get(code, code) for code in codes]}")
                if (0 in codes) or len(different) > 40:
                    break  # from here on the two are not the same any more
        os.chdir("/")
        trees = [tree(place) for place in places]
        if trees[0] != trees[1] and not different:
            different.append(f"{seed}: {set(trees[0].items()) ^ set(trees[1].items())}")
        for place in places:
            raw_remove(place)
    return {"ok": True, "different": different}


def raw_remove(top: str) -> None:
    for base, directories, names in os.walk(top, topdown=False):
        for name in names:
            os.unlink(os.path.join(base, name))
        for name in directories:
            full = os.path.join(base, name)
            if os.path.islink(full):
                os.unlink(full)
            else:
                os.rmdir(full)
    os.rmdir(top)


TEXTS = [
    b"f1", b"f2", b"src/app.py", b".envrc", b".git/config", b"", b"/", b"..", b"a" * 4096, b"/dev/stdout",
    b"/proc/self/fd/3", b"\xff\xfe", b"/tmp/x", b"README.md/", b"/proc/self/cwd/y", bytes(range(1, 256)),
]  # fmt: skip
CALLS = [
    2, 257, 85, 83, 258, 133, 259, 87, 84, 263, 88, 266, 82, 264, 316, 86, 265, 76, 90, 91, 268, 452, 92, 94,
    93, 260, 132, 235, 261, 280, 21, 269, 439, 95,
]  # fmt: skip


def registers(p: Params) -> Result:
    """Every call that waits for the broker with rubbish in every register: pointers to texts, to nothing,
    numbers of descriptors, flags, bits above the width that the kernel reads.
    """
    os.chdir(p["ws"])
    chance = random.Random(p["seed"])
    buffers = [ctypes.create_string_buffer(text) for text in TEXTS]
    pointers = [ctypes.addressof(buffer) for buffer in buffers]
    handles = [os.open(name, os.O_RDONLY) for name in (".", "/tmp", "README.md")]
    handles.append(os.open("given", os.O_RDWR | os.O_CREAT))
    calls = 0
    # Rubbish may make a FIFO in /tmp and open it: whoever waits there goes on soon.
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    for _ in range(p["calls"]):

        def value() -> int:
            kind = chance.randrange(8)
            if kind < 4:
                return chance.choice(pointers)
            if kind == 4:
                return chance.choice([*handles, 0xFFFF_FF9C, 0xDEAD_BEEF_FFFF_FF9C, 999])
            if kind == 5:
                return chance.choice((0, 1, 8, (1 << 64) - 1, 1 << 47, 0xFFFF_8000_0000_0000))
            if kind == 6:
                return chance.choice((0o644, 0o6755, 0o100644, 0o10644, 0x1000, 0x400, 0x200, 0x100))
            return chance.getrandbits(chance.choice((8, 16, 32, 64)))

        number = chance.choice(CALLS)
        try:
            result = raw.nr_call(number, *(value() for _ in range(6)))
            if number in (2, 257, 85) and result > 10:
                os.close(result)
        except OSError:
            pass
        calls += 1
    signal.setitimer(signal.ITIMER_REAL, 25)
    os.umask(0o022)
    with open("after", "w") as file:
        file.write(p["token"])
    return {"ok": True, "calls": calls}
