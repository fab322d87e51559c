"""Layers made one, case by case: each compared with what the kernel shows of them."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from typing import TYPE_CHECKING, Any

import pytest

from casemate.errors import WorkspaceError
from casemate.workspace import flatten as module
from tests.property.test_flatten import inside, merged, modes
from tests.unit.workspace.tops import WHO, stage_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.unit.workspace.tops import Stage

LOOK = """
import json, os, stat
found = {}
for path, directories, files in os.walk("."):
    for name in directories + files:
        one = f"{path}/{name}"
        facts = os.lstat(one)
        what = [stat.S_IFMT(facts.st_mode), stat.S_IMODE(facts.st_mode), facts.st_mtime_ns]
        if stat.S_ISLNK(facts.st_mode):
            what.append(os.readlink(one))
        elif stat.S_ISREG(facts.st_mode):
            what.append(open(one).read())
        found[ascii(one)] = what
print(json.dumps(found))
"""


@pytest.fixture(params=WHO)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """A workspace of root or of a user."""
    with stage_for(request.param) as made:
        yield made


def layered(stage: Stage, *scripts: str) -> tuple[list[Path], dict[str, Any]]:
    """One layer for each script, the newest first, and what is seen at last."""
    layers: list[Path] = []
    for number, script in enumerate(scripts):
        upper = stage.upper.parent / f"layer{number}"
        upper.mkdir()
        inside(stage, [*layers, stage.ws], upper, "sh", "-c", f"{{ {script}\n}} >/dev/null 2>&1; :")
        layers.insert(0, upper)
    return layers, look(stage, [*layers, stage.ws])


def look(stage: Stage, lowers: list[Path]) -> dict[str, Any]:
    """What layers show."""
    spare = stage.base / "spare"
    stage.clean(spare)
    found: dict[str, Any] = json.loads(inside(stage, lowers, spare, sys.executable, "-I", "-S", "-c", LOOK))
    return found


CASES: dict[str, tuple[str, ...]] = {
    "moved out, and on": ("mv a/b x", "mv x y", "echo n >y/n"),
    "moved in, and its parent": ("mv a c/in", "mv c z", "rm z/in/f; mv z/in/b z/b2"),
    "moved below a moved one": ("mv a/b c/b", "mv c d2", "mv d2/b back", "mv back a/b"),
    "moved twice under one name": ("mv a x; mkdir a; echo 1 >a/new", "mv a y; mv x a", "rm -r a/b"),
    "moved by a layer in the middle": ("echo n >c/d/n", "mv c/d a/m", "echo x >f"),
    "moved out of a replaced one": ("rm -r c; mkdir c; mv a/b c/d", "mv c/d x"),
    "swapped": ("mv a t; mv c a; mv t c", "echo 1 >a/one; rm -r c/b", "mv a t; mv c a; mv t c"),
    "replaced below a moved one": (
        "mv a x", "rm -r x/b; mkdir x/b; echo 1 >x/b/one", "mv x/b x/c; mv c/d x/b",
    ),
    "deleted and made again": ("rm -r a", "mkdir -p a/b; echo 1 >a/b/f", "rm a/b/f; echo 2 >a/f"),
    "kinds that change": (
        "rm f; mkdir f; echo 1 >f/g", "rm -r f; ln -s a f", "rm f; mkfifo f", "rm f; echo 2 >f",
    ),
    "files over directories": ("rm -r a; echo 1 >a", "rm a; mkdir a; echo 2 >a/new", "rm -r c; ln -s a c"),
    "whiteouts of the session's own": (
        "mkdir -p n/m; echo 1 >n/m/f", "rm n/m/f", "rm -r n; mkdir n", "rmdir n",
    ),
    "modes and times": (
        "chmod 700 a; touch -d 2001-01-01 a/b; chmod 4711 f; touch -hd 2002-02-02 link",
        "chmod 1777 a; echo >a/f; touch -d 2003-03-03 a", "mkdir -m 2750 s; touch -d 2004-04-04 s",
    ),
    "locked directories": (
        "chmod 0 a/b; chmod 111 c/d c", "mkdir -p l/m; echo 1 >l/m/f; chmod 0 l/m; chmod 400 l",
    ),
    "odd names": (
        "touch \"$(printf 'a\\nb')\" \"$(printf '\\377\\376')\" -- '-n' '*'; mkdir ' '",
        "rm -- -n; mv ' ' '  '",
    ),
    "nothing": (":", ":", ":"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_like_the_kernel(stage: Stage, case: str) -> None:
    """The layer shows what its parts showed, whichever of them were made one; the parts are as before."""
    for name in ("a/f", "a/b/f", "a/b/c/f", "c/f", "c/d/f", "f"):
        stage.lower(**{name.replace("/", "__"): f"{name}\n"})
    os.symlink("nowhere", stage.ws / "link")
    layers, seen = layered(stage, *CASES[case])
    before = modes(layers)
    for first in range(len(layers)):
        for last in range(first + 2, len(layers) + 1):
            one = merged(stage, layers[first:last], f"one{first}{last}")
            assert look(stage, [*layers[:first], one, *layers[last:], stage.ws]) == seen, (first, last)
            assert modes(layers) == before


def test_hard_links_and_attributes(stage: Stage) -> None:
    """Names of one file stay that; attributes of files and directories stay; nothing is copied."""
    layers, _ = layered(stage, "mkdir d; echo 1 >d/a; ln d/a d/b; ln d/b c", "echo x >e; ln e d/e", "rm c")
    for path in (layers[2] / "d/a", layers[1] / "d"):
        os.setxattr(path, "user.note", b"kept")
    one = merged(stage, layers, "one")
    assert len({(one / name).stat().st_ino for name in ("d/a", "d/b")}) == 1
    assert len({(one / name).stat().st_ino for name in ("e", "d/e")}) == 1
    assert (one / "d/a").stat().st_ino == (layers[2] / "d/a").stat().st_ino
    assert stat.S_ISCHR((one / "c").lstat().st_mode), "a whiteout"
    assert [os.getxattr(one / name, "user.note") for name in ("d/a", "d")] == [b"kept"] * 2


def test_more_names_than_a_file_can_have(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system allows no more names, the entry is copied, as it was."""
    make = "mkdir d; echo 1 >d/f; chmod 640 d/f; touch -d 2001-01-01 d/f; ln -s x d/l"
    layers, seen = layered(stage, make, ":")
    real = os.link

    def link(*args: Any, **how: Any) -> None:
        if args[0] in ("f", "l"):
            raise OSError(errno.EMLINK, "too many links")
        real(*args, **how)

    monkeypatch.setattr(module.os, "link", link)
    one = merged(stage, layers, "one")
    assert (one / "d/f").stat().st_ino != (layers[1] / "d/f").stat().st_ino
    assert look(stage, [one, stage.ws]) == seen


def test_special_files_stay(stage: Stage) -> None:
    """A FIFO and a socket are entries like others here; what of it may be applied is judged later."""
    layers, _ = layered(stage, "mkfifo p", "mkdir d; mkfifo d/q")
    one = merged(stage, layers, "one")
    assert all(stat.S_ISFIFO((one / name).stat().st_mode) for name in ("p", "d/q"))


def test_too_deep(stage: Stage) -> None:
    """A tree that no path reaches is refused, and nothing of the layers has changed."""
    make = "i=0; while [ $i -lt 300 ]; do mkdir -p dddddddddddddddd && cd dddddddddddddddd; i=$((i+1)); done"
    layers, _ = layered(stage, make, "mkdir x")
    before = modes(layers)
    with pytest.raises(WorkspaceError) as caught:
        merged(stage, layers, "one")
    assert caught.value.code == "session-too-deep"
    assert modes(layers) == before


@pytest.mark.parametrize(
    "value",
    [b"../../outside", b"/../outside", b"/", b"", b".", b"..", b"/a/../../outside", b"/a//b", b"x/y", b"\xff",
     b"/" + b"a/" * 1500 + b"b", b"/nowhere", b"nowhere", b"/d", b"d", b"/new", b"new"],
)  # fmt: skip
def test_hostile_redirects(stage: Stage, value: bytes) -> None:
    """Whatever a redirection says, nothing outside of the layers is read, and the work comes to an end."""
    for number in range(2):
        upper = stage.upper.parent / f"layer{number}"
        (upper / "new").mkdir(parents=True)
        (upper / "d").mkdir()
        (upper / "new/f").write_text(str(number))
        (upper / "d/g").write_text(str(number))
        for name in ("new", "d") if number else ("new",):
            os.setxattr(upper / name, f"{stage.prefix}redirect", value)
    layers = [stage.upper.parent / f"layer{number}" for number in (1, 0)]
    try:
        one = merged(stage, layers, "one")
    except OSError:
        return
    found = {path.name: path.read_text() for path in one.rglob("*") if path.is_file()}
    assert set(found) <= {"f", "g"}
    assert set(found.values()) <= {"0", "1"}
