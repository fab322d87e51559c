"""Repositories put together where nobody can look, and places that move away under the eyes of a judge."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import socket
import time
from typing import TYPE_CHECKING, Any

import raw

if TYPE_CHECKING:
    from collections.abc import Callable

Params = dict[str, Any]
Result = dict[str, Any]

HEAD = "ref: refs/heads/main\n"
#: The modes a directory gets before anything is in it, after each name, and whether the one above has it.
HIDES: dict[str, tuple[int, int]] = {
    "open": (0o755, 0o755),
    "unlisted": (0o311, 0o311),
    "later": (0o755, 0o311),
    "unreachable": (0o755, 0o600),
}
ORDERS = [*itertools.permutations(("HEAD", "objects", "refs")), ("HEAD", "commondir"), ("commondir", "HEAD")]


def put(path: str, text: str) -> None:
    with open(path, "w") as stream:
        stream.write(text)


def config(run: str, name: str) -> str:
    return (
        f"[core]\n\trepositoryformatversion = 1\n\tbare = false\n\tworktree = .\n\tfsmonitor = {run} {name}\n"
        "[extensions]\n\tworktreeConfig = true\n"
    )


def plainly(place: str, mark: str) -> None:
    """Each name made as git makes it."""
    if mark == "HEAD":
        put(f"{place}/HEAD", HEAD)
    elif mark == "commondir":
        put(f"{place}/commondir", f"{os.path.dirname(place)}/store\n")
    else:
        os.mkdir(f"{place}/{mark}")


def moved(place: str, mark: str) -> None:
    """Each name made elsewhere and moved."""
    source = f"{place}.made"
    os.makedirs(source, exist_ok=True)
    plainly(source, mark)
    os.rename(f"{source}/{mark}", f"{place}/{mark}")


def linked(place: str, mark: str) -> None:
    """Each name a link: hard for files, symbolic for directories."""
    source = f"{place}.made"
    os.makedirs(source, exist_ok=True)
    if mark in ("HEAD", "commondir"):
        plainly(source, mark)
        os.rename(f"{source}/{mark}", f"{source}/plain")
        os.link(f"{source}/plain", f"{place}/{mark}")
    else:
        os.makedirs(f"{source}/some", exist_ok=True)
        os.symlink("../" + os.path.basename(source) + "/some", f"{place}/{mark}")


def exchanged(place: str, mark: str) -> None:
    """Each name comes in exchange for another one, and that one goes."""
    source = f"{place}.made"
    os.makedirs(source, exist_ok=True)
    plainly(source, mark)
    os.mkdir(f"{source}/x")
    os.rename(f"{source}/{mark}", f"{source}/other")
    raw.nr_call(316, -100, f"{source}/x".encode(), -100, f"{source}/other".encode(), 2)
    os.rename(f"{source}/x", f"{place}/{mark}")
    os.rmdir(f"{source}/other")


WAYS: dict[str, Callable[[str, str], None]] = {
    "plain": plainly, "moved": moved, "linked": linked, "exchanged": exchanged,
}  # fmt: skip


def repositories(p: Params) -> Result:
    """A repository for every order of names, way to make each, and mode that hides them."""
    top = f"{p['ws']}/built"
    # A common directory is held by itself: the host has made it, so that the rest is what is tried.
    if not os.path.exists(f"{top}/store/config"):
        return {"ok": False, "made": []}
    made: list[str] = []
    for way, hide in itertools.product(WAYS, HIDES):
        for number, order in enumerate(ORDERS):
            name = f"{way}-{hide}-{number}"
            place = f"{top}/{name}"
            first, then = HIDES[hide]
            os.mkdir(place)
            put(f"{place}/config", config(p["run"], name))
            # With a commondir git takes core.worktree from here only.
            put(f"{place}/config.worktree", "[core]\n\tbare = false\n\tworktree = .\n")
            os.chmod(place, first)
            for mark in order:
                with contextlib.suppress(OSError):
                    WAYS[way](place, mark)
                with contextlib.suppress(OSError):
                    os.chmod(place, then)
                if then == 0o600:
                    with contextlib.suppress(OSError):
                        put(f"{place}/x", "x")
                    with contextlib.suppress(OSError):
                        os.chmod(place, first)
            with contextlib.suppress(OSError):
                os.chmod(place, 0o755)
            made.append(name)
    return {"ok": True, "made": made}


def inside_git(p: Params) -> Result:
    """Repositories among the data of others, where anything may be written."""
    for place in p["places"]:
        inside = f"{p['ws']}/{place}"
        with contextlib.suppress(OSError):
            os.makedirs(inside, exist_ok=True)
        for name in ("objects", "refs"):
            with contextlib.suppress(OSError):
                os.makedirs(f"{inside}/{name}", exist_ok=True)
        for name, text in (("config", config(p["run"], place.replace("/", "_"))), ("HEAD", HEAD)):
            with contextlib.suppress(OSError):
                put(f"{inside}/{name}", text)
    return {"ok": True}


WAYS_AROUND = {
    ".cargo": "config.toml", ".github": "workflows/ci.yml", ".hg": "hgrc", "deep/.yarn": "plugins/p.cjs",
}  # fmt: skip


def ways_around(p: Params) -> Result:
    """Links with the first names of protected paths, to directories with the last ones."""
    os.chdir(p["ws"])
    for number, (link, last) in enumerate(WAYS_AROUND.items()):
        for order in ("before", "after", "moved"):
            top, plain = f"ways/{order}/{number}", f"plain{number}"
            os.makedirs(f"{top}/{os.path.dirname(link)}", exist_ok=True)
            os.makedirs(f"{top}/{plain}/{os.path.dirname(last)}", exist_ok=True)
            to = "../" * link.count("/") + plain
            with contextlib.suppress(OSError):
                if order == "before":
                    os.symlink(to, f"{top}/{link}")
                put(f"{top}/{plain}/{last}", p["token"])
                if order == "after":
                    os.symlink(to, f"{top}/{link}")
                if order == "moved":
                    os.symlink(to, f"{top}/{os.path.dirname(link) or '.'}/l")
                    os.rename(f"{top}/{os.path.dirname(link) or '.'}/l", f"{top}/{link}")
    return {"ok": True}


def chmod_rounds(p: Params) -> Result:
    """Directories that are locked and opened again, as programs do that restore modes."""
    os.chdir(p["ws"])
    os.makedirs("locked/in", exist_ok=True)
    put("locked/in/f", "x")
    errors: list[str] = []
    for mode in (0, 0o600, 0o311, 0o500, 0o755):
        try:
            os.chmod("locked", mode)
        except OSError as error:
            errors.append(f"{mode:o}: {error}")
    put("locked/in/g", p["token"])
    os.chmod("locked/in", 0)
    os.chmod("locked/in", 0o700)
    os.rename("locked/in", "locked/out")
    return {"ok": not errors, "errors": errors}


def race_names(p: Params) -> Result:
    """One of two sandboxes: moves ``y`` to ``x/workflows`` and back, while the other one moves ``x``."""
    os.chdir(p["ws"])
    os.mkdir("y")
    put("y/evil.yml", "on: push\n")
    return rounds(p, "y", "x/workflows")


def race_parents(p: Params) -> Result:
    """The other one: moves ``x`` to ``.github`` and back."""
    os.chdir(p["ws"])
    os.mkdir("x")
    return rounds(p, "x", ".github")


MIXED = ["a", "b", "x", ".github", "workflows", ".vscode", "HEAD", "objects", "refs", "commondir", ".git"]
MIXED_FILES = ["HEAD", "commondir", "config", "evil.yml", "HEAD.lock", ".envrc"]
MODES = [0o311, 0, 0o600, 0o111, 0o333, 0o500, 0o755, 0o755]


def mixed_act(chance: random.Random) -> Callable[[], object]:
    one, two = (
        "/".join([*chance.choices(MIXED, k=chance.choice((0, 1, 1, 2))), chance.choice(MIXED + MIXED_FILES)])
        for _ in range(2)
    )
    acts: list[Callable[[], object]] = [
        lambda: os.mkdir(one), lambda: os.mkdir(two), lambda: put(one, HEAD), lambda: put(two, HEAD),
        lambda: os.rename(one, two), lambda: os.rename(one, two), lambda: os.rename(two, one),
        lambda: raw.nr_call(316, -100, one.encode(), -100, two.encode(), 2),
        lambda: os.chmod(one, chance.choice(MODES)), lambda: os.link(one, two),
        lambda: os.symlink("a", one), lambda: os.unlink(one), lambda: os.rmdir(two),
    ]  # fmt: skip
    return chance.choice(acts)


def mixed(p: Params) -> Result:
    """Random acts with names that are harmless alone, from one of two sandboxes."""
    os.makedirs(f"{p['ws']}/mixed", exist_ok=True)
    os.chdir(f"{p['ws']}/mixed")
    chance, end, done, tried = random.Random(p["seed"]), time.monotonic() + p["seconds"], 0, 0
    while time.monotonic() < end:
        tried += 1
        with contextlib.suppress(OSError):
            mixed_act(chance)()
            done += 1
        if tried % 300 == 0:  # what is locked for good can be no part of anything
            for base, directories, _ in os.walk("."):
                for name in directories:
                    with contextlib.suppress(OSError):
                        os.chmod(f"{base}/{name}", 0o755)
        if tried % 1500 == 0 and p["sandboxed"]:
            for name in MIXED:
                shutil.rmtree(name, ignore_errors=True)
    return {"ok": True, "done": done}


def hide_and_connect(p: Params) -> Result:
    """A socket of the host in a directory that another sandbox moves to and fro: wherever it is."""
    for place in p["rooms"] * 300:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as link:
            os.chdir(f"{p['ws']}/{place}")
            link.connect("s")
            link.send(p["token"].encode())
            return {"ok": True, "connected": place}
    return {"ok": True, "connected": ""}


def move_rooms(p: Params) -> Result:
    """The other sandbox."""
    os.chdir(p["ws"])
    for number in range(200):
        os.makedirs(f"m/{number:03}", exist_ok=True)
    done, rooms = 0, p["rooms"]
    end = time.monotonic() + p["seconds"]
    while time.monotonic() < end and not os.path.exists("stop"):
        for old, new in zip(rooms, [*rooms[1:], rooms[0]], strict=True):
            with contextlib.suppress(OSError):
                os.rename(old, new)
                done += 1
    return {"ok": True, "done": done}


def rounds(p: Params, here: str, there: str) -> Result:
    done, end = 0, time.monotonic() + p["seconds"]
    while time.monotonic() < end and not os.path.exists(".github/workflows"):
        for old, new in ((here, there), (there, here)):
            with contextlib.suppress(OSError):
                os.rename(old, new)
                done += 1
    return {"ok": True, "done": done, "won": os.path.exists(".github/workflows")}
