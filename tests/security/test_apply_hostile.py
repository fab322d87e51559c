"""The apply step on tops that were made to break out: nothing outside the workspace changes, nothing hangs,
nothing is lost. Each attack stands beside the same act in its harmless form, which passes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import time
from typing import TYPE_CHECKING

import pytest

from casemate.workspace.names import printable
from casemate.workspace.report import Limits
from tests.unit.workspace.tops import WHO, Stage, guarded, held, limited, stage_for

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.security


@pytest.fixture(params=[(who, near) for who in WHO for near in (True, False)], ids=str)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """Applied by root and by a user; with the top near (renames) and far (copies)."""
    with guarded(*request.param) as made:
        yield made


# -- links -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "to",
    ["{outside}/secret", "../outside/secret", "../../../../etc/passwd", "/etc/shadow", "a/../../outside",
     "/proc/self/root/etc/shadow", "{ws}/../outside", "/usr/../etc/shadow", "sub/../../outside/secret", "/",
     "..", "chain0", "//etc/shadow", "./.././../outside"],
)  # fmt: skip
def test_link_that_leads_out_is_held(stage: Stage, to: str) -> None:
    """A link that leads out of the workspace by any spelling or chain is held; one that stays in passes."""
    stage.lower(sub__file="x")
    stage.start()
    stage.link("evil", to.format(outside=stage.outside, ws=stage.ws))
    for number in range(5):
        stage.link(f"chain{number}", f"chain{number + 1}")
    stage.link("chain5", str(stage.outside))
    stage.link("good", "sub/file")
    stage.link("deep/er/good", "../../sub/file")
    stage.link("absolute", f"{stage.ws}/sub")
    stage.link("tool", "/usr/bin/env")
    stage.link("dangling", "not/yet")
    report = stage.apply()
    assert held(report).get("evil") == "link-outside"
    assert not stage.exists("evil")
    assert {item.reason for item in report.held} == {"link-outside"}
    assert stage.text("good") == "x"
    assert stage.text("deep/er/good") == "x"
    assert stage.text("absolute/file") == "x"
    assert os.readlink(stage.ws / "tool") == "/usr/bin/env"
    assert os.readlink(stage.ws / "dangling") == "not/yet"
    assert "tool" in report.executables


def test_link_by_way_of_the_hosts_own_link_is_held(stage: Stage) -> None:
    """A person's own link out of the workspace cannot be used by a new one, nor written through; also not
    by claiming that the link becomes a directory, in a way that will be held back.
    """
    stage.lower(plain="p")
    for name in ("mine", "other", "third"):
        os.symlink(stage.outside, stage.ws / name)
    stage.start()
    stage.link("evil", "mine/secret")
    stage.link("evil2", "other/secret")
    stage.link("good", "plain")
    stage.put("other/HEAD", "ref: refs/heads/main\n")
    stage.put("other/secret", "overwritten")
    for name in ("objects", "refs"):
        (stage.upper / "other" / name).mkdir()
    stage.put("third/secret", "mine")
    report = stage.apply()
    assert held(report) == {"evil": "link-outside", "evil2": "link-outside", "other": "git-repository"}
    assert stage.exists("good")
    # A directory in the place of a link replaces the link itself.
    assert not (stage.ws / "third").is_symlink()
    assert stage.text("third/secret") == "mine"


def test_two_runs_cannot_make_a_link_lead_out(stage: Stage) -> None:
    """``a -> b/../x`` is harmless while b is a directory, and leads out once b is a link: held at once."""
    stage.lower(b__file="1", x="2")
    stage.start()
    stage.link("a", "b/../x")
    stage.link("good", "b/file")
    assert held(stage.apply()) == {"a": "link-outside"}
    assert stage.text("good") == "1"


def test_link_to_a_protected_name_is_held(stage: Stage) -> None:
    """No second name for a protected file, whether it exists or not."""
    stage.lower(**{".git__hooks__x": "", "src__a": "a"})
    stage.start()
    for name, to in {"l1": ".git/hooks/pre-commit", "l2": ".envrc", "l3": "src/.vscode/tasks.json",
                     "l4": ".GIT", "l5": "l6/hooks", "l6": ".git"}.items():  # fmt: skip
        stage.link(name, to)
    stage.link("good", "src/a")
    report = stage.apply()
    assert held(report) == dict.fromkeys(("l1", "l2", "l3", "l4", "l5", "l6"), "link-protected")
    assert stage.text("good") == "a"


def test_files_under_a_link_of_the_host_are_not_written(stage: Stage) -> None:
    """A directory of the top over a link of the host never becomes a write through that link."""
    stage.lower(real__f="1")
    stage.start()
    stage.put("dir/secret", "overwritten")
    stage.put("real/f", "2")
    os.symlink(stage.outside, stage.ws / "dir")  # the host makes it while the command runs
    report = stage.apply()
    assert held(report)["dir"] == "conflict"
    assert os.readlink(stage.ws / "dir") == str(stage.outside)
    assert stage.text("real/f") == "2"


def test_a_hard_link_out_of_the_workspace_is_cut(stage: Stage) -> None:
    """A host file with a second name outside gets a new file, also when only its mode changed."""
    stage.lower(alone="1")
    other = stage.outside / "other"
    os.link(other, stage.ws / "shared")
    os.link(other, stage.ws / "mode")
    stage.start()
    stage.put("shared", "changed")
    stage.put("alone", "2")
    copied = stage.put("mode", "untouched\n", 0o755)
    status = (stage.ws / "mode").stat()
    os.utime(copied, ns=(status.st_mtime_ns, status.st_mtime_ns))
    report = stage.apply()
    assert not report.held
    assert other.read_text() == "untouched\n"
    assert stat.S_IMODE(other.stat().st_mode) == 0o600
    assert stage.text("shared") == "changed"
    assert stat.S_IMODE((stage.ws / "mode").stat().st_mode) == 0o755
    assert stage.text("alone") == "2"


# -- special files, modes, attributes -------------------------------------------------------------------


def test_special_files_are_neither_opened_nor_made(stage: Stage) -> None:
    """Pipes, sockets and devices are listed and left; a file beside them passes."""
    stage.start()
    stage.put("good", "g")
    os.mkfifo(stage.upper / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(stage.upper / "sock"))
    expected = {"pipe": "special", "sock": "special"}
    if os.geteuid() == 0:
        os.mknod(stage.upper / "disk", stat.S_IFBLK | 0o666, os.makedev(7, 0))
        os.mknod(stage.upper / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
        expected |= {"disk": "special", "zero": "special"}
    report = stage.apply()
    assert held(report) == expected
    assert report.complete
    assert sorted(os.listdir(stage.ws)) == ["good"]


def test_a_pipe_of_the_host_does_not_block(stage: Stage) -> None:
    """A FIFO that the host has in a file's place is not opened."""
    os.mkfifo(stage.ws / "pipe")
    stage.start()
    stage.put("pipe", "file")
    assert not stage.apply().failed
    assert stage.text("pipe") == "file"


def test_modes_are_cut(stage: Stage) -> None:
    """setuid, setgid and sticky bits never arrive; execute bits do, and are listed."""
    stage.lower(old="1")
    (stage.ws / "old").chmod(0o600)
    stage.start()
    stage.put("suid", "s", 0o6755)
    stage.put("dir/file", "f", 0o640)
    (stage.upper / "dir").chmod(0o3770)
    stage.put("old", "1", 0o4711)
    report = stage.apply()
    assert stat.S_IMODE((stage.ws / "suid").stat().st_mode) == 0o755
    assert stat.S_IMODE((stage.ws / "dir").stat().st_mode) == 0o770
    assert stat.S_IMODE((stage.ws / "dir/file").stat().st_mode) == 0o640
    assert stat.S_IMODE((stage.ws / "old").stat().st_mode) == 0o711
    assert set(report.executables) == {"suid", "old"}


def test_attributes_do_not_arrive(stage: Stage) -> None:
    """No extended attribute, capability or access list reaches the workspace."""
    stage.start()
    stage.put("dir/file", "f", 0o755)
    stage.put("lone", "l")
    for path in ("dir", "dir/file", "lone"):
        os.setxattr(stage.upper / path, "user.evil", b"1")
    # u::rwx,u:0:rwx,g::r-x,m::rwx,o::r-x
    acl = bytes.fromhex("02000000" "01000700ffffffff" "0200070000000000" "04000500ffffffff" "10000700ffffffff"
                        "20000500ffffffff")  # fmt: skip
    with contextlib.suppress(OSError):
        os.setxattr(stage.upper / "dir/file", "system.posix_acl_access", acl)
    if os.geteuid() == 0:
        capability = bytes.fromhex("0100000200040000000000000000000000000000")
        os.setxattr(stage.upper / "dir/file", "security.capability", capability)
        os.setxattr(stage.upper / "lone", "security.capability", capability)
        os.setxattr(stage.upper / "dir", "trusted.overlay.opaque", b"y")
    assert not stage.apply().held
    for path in ("dir", "dir/file", "lone"):
        assert os.listxattr(stage.ws / path) == []
    assert stage.text("dir/file") == "f"


@pytest.mark.root
def test_owner_is_the_workspaces() -> None:
    """As root, what arrives belongs to the owner of the directory it is in, or of the file it replaces."""
    with stage_for("root", near=False) as far, stage_for("root") as near:
        for stage in (far, near):
            stage.lower(mine__a="1", yours__b="2")
            os.chown(stage.ws, 1000, 1000)
            os.chown(stage.ws / "mine", 1001, 1001)
            os.chown(stage.ws / "mine/a", 1002, 1002)
            stage.start()
            stage.put("mine/a", "changed")
            stage.put("mine/new/x", "n")
            stage.put("top", "t")
            stage.link("mine/link", "a")
            for path in (stage.upper, *stage.upper.rglob("*")):
                os.chown(path, 0x70000005, 0x70000005, follow_symlinks=False)
            assert not stage.apply().failed
            owners = {name: (stage.ws / name).lstat().st_uid for name in
                      ("mine/a", "mine/new", "mine/new/x", "mine/link", "top")}  # fmt: skip
            assert owners == {
                "mine/a": 1002,
                "mine/new": 1001,
                "mine/new/x": 1001,
                "mine/link": 1001,
                "top": 1000,
            }


# -- sizes, names, depth ---------------------------------------------------------------------------------


def test_sparse_and_huge_files(stage: Stage) -> None:
    """A sparse file of 1 TiB takes no room and no time, one that no file system holds fails by itself."""
    stage.start()
    with open(stage.upper / "sparse", "wb") as file:
        file.write(b"head")
        file.seek((1 << 40) - 4)
        file.write(b"tail")
    stage.put("good", "g")
    began = time.monotonic()
    report = stage.apply()
    assert time.monotonic() - began < 10
    assert not report.failed
    status = (stage.ws / "sparse").stat()
    assert status.st_size == 1 << 40
    assert status.st_blocks * 512 < 1 << 20
    with open(stage.ws / "sparse", "rb") as file:
        assert file.read(4) == b"head"
        file.seek(-4, os.SEEK_END)
        assert file.read() == b"tail"
    assert report.bytes < 1 << 20
    stage.put("again", "a")
    assert stage.apply(resumed=True).counts.get("modified") is None  # equal, also without reading 1 TiB


def test_more_than_a_file_system_holds(stage: Stage) -> None:
    """A file that is too large for the workspace is reported; everything else is applied, nothing deleted."""
    stage.lower(gone="1")
    stage.start()
    with open(stage.upper / "huge", "wb") as file:
        for size in (1 << 62, 1 << 43):
            with contextlib.suppress(OSError):  # or the top cannot hold it either
                file.truncate(size)
                break
    stage.put("good", "g")
    stage.whiteout("gone")
    report = stage.apply()
    assert stage.text("good") == "g"
    if report.failed:
        assert {failure.path for failure in report.failed} == {"huge", "gone"}
        assert not report.complete
        assert stage.text("gone") == "1"


NAMES = [b"\x1b[31mred\x1b[0m", b"new\nline", b"tab\tcr\r", b"\xff\xfe\x80raw", b"a" * 255, b"-rf", b" ",
         b"\\", "\u202egpj.exe".encode(), "\u00e9".encode(), "e\u0301".encode(), b"*", b"\x7f", b"$(id)",
         b"%s%n"]  # fmt: skip


def test_odd_names(stage: Stage) -> None:
    """Any name arrives byte for byte, and is harmless when shown."""
    stage.start()
    upper, ws = os.fsencode(stage.upper), os.fsencode(stage.ws)
    for name in NAMES:
        with open(upper + b"/" + name, "wb") as file:
            file.write(name)
    os.symlink(b"\xff\xfe\x80raw", upper + b"/link\n")
    report = stage.apply()
    assert not report.failed
    assert sorted(os.listdir(ws)) == sorted([*NAMES, b"link\n"])
    for name in NAMES:
        with open(ws + b"/" + name, "rb") as file:
            assert file.read() == name
    shown = [printable(path) for _, path in report.changed]
    assert len(set(shown)) == len(shown)
    assert all(text.isprintable() for text in shown)


def test_deeper_than_a_path_can_say(stage: Stage) -> None:
    """A nest beyond PATH_MAX is left in the top and said so; its beginning and the rest are applied."""
    stage.start()
    stage.put("good", "g")
    name = "d" * 200
    fd = os.open(stage.upper, os.O_RDONLY)
    for _ in range(300):
        os.mkdir(name, dir_fd=fd)
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(os.open("bottom", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)
    report = stage.apply()
    assert not report.complete
    assert [failure.error for failure in report.failed] == ["too-deep"]
    assert stage.text("good") == "g"
    assert stage.exists(name)


def test_deep_but_sayable(stage: Stage) -> None:
    """Two hundred levels are nothing special."""
    stage.start()
    path = "/".join(["d"] * 200)
    stage.put(f"{path}/f", "deep")
    assert not stage.apply().failed
    assert stage.text(f"{path}/f") == "deep"


def test_too_many_entries(stage: Stage) -> None:
    """Beyond the bound on entries nothing at all is applied, and that is said; just under it all is."""
    stage.start()
    for number in range(300):
        stage.put(f"d{number % 7}/f{number}", "")
    report = stage.apply(limits=Limits(entries=250))
    assert not report.complete
    assert report.failed_total == 1
    assert os.listdir(stage.ws) == []
    report = stage.apply(limits=Limits(entries=307))
    assert report.complete
    assert report.total == 307


@pytest.mark.slow
def test_a_hundred_thousand_entries() -> None:
    """A hundred thousand entries are applied in bounded time; lists stay short, totals exact."""
    with stage_for(WHO[0], where="/dev/shm") as stage:
        for number in range(100):
            (stage.upper / f"d{number}").mkdir()
            for inner in range(1000):
                os.close(os.open(stage.upper / f"d{number}/f{inner}", os.O_CREAT | os.O_WRONLY, 0o755))
        stage.whiteout("d0/nothing")  # so that not all of it can be taken by one rename
        stage.start()
        with limited(60):
            report = stage.apply(listed=10)
    assert report.total == 100_100
    assert report.executables_total == 100_000
    assert len(report.changed) == len(report.executables) == 10


# -- modes that lock us out ------------------------------------------------------------------------------


def test_locked_files_and_directories(stage: Stage) -> None:
    """Files and directories without any permission for us arrive with just that mode."""
    stage.lower(ro__x="1")
    (stage.ws / "ro").chmod(0o555)
    stage.start()
    stage.put("secret", "s", 0o000)
    stage.put("dir/inner", "i", 0o200)
    (stage.upper / "dir").chmod(0o000)
    stage.put("ro/new", "n")
    (stage.upper / "ro").chmod(0o555)
    report = stage.apply()
    assert not report.failed
    assert stat.S_IMODE((stage.ws / "secret").stat().st_mode) == 0
    assert stat.S_IMODE((stage.ws / "dir").stat().st_mode) == 0
    assert stat.S_IMODE((stage.ws / "ro").stat().st_mode) == 0o555
    (stage.ws / "dir").chmod(0o700)
    (stage.ws / "secret").chmod(0o600)
    assert stage.text("secret") == "s"
    assert stage.text("ro/new") == "n"
    assert stat.S_IMODE((stage.ws / "dir/inner").stat().st_mode) == 0o200


def test_special_bits_of_the_host_stay(stage: Stage) -> None:
    """A setgid directory of the host stays one when the command changes its mode."""
    stage.lower(shared__x="1")
    (stage.ws / "shared").chmod(0o2755)
    stage.start()
    stage.put("shared/y", "2")
    (stage.upper / "shared").chmod(0o2775)
    assert not stage.apply().held
    assert stat.S_IMODE((stage.ws / "shared").stat().st_mode) == 0o2775


def test_access_lists_of_the_host_are_handed_down(stage: Stage) -> None:
    """A file made in a directory with a default access list has it, however it came there."""
    # u::rwx, g::r-x, g:0:rwx, m::rwx, o::---
    acl = bytes.fromhex(
        "0200000001000700ffffffff04000500ffffffff080007000000000010000700ffffffff20000000ffffffff"
    )
    (stage.ws / "shared").mkdir()
    (stage.ws / "plain").mkdir()
    os.setxattr(stage.ws / "shared", "system.posix_acl_default", acl)
    stage.start()
    for path in ("shared/file", "shared/new/file", "plain/file"):
        stage.put(path, "x")
    assert not stage.apply().held
    assert os.listxattr(stage.ws / "shared/file") == ["system.posix_acl_access"]
    assert "system.posix_acl_default" in os.listxattr(stage.ws / "shared/new")
    assert os.listxattr(stage.ws / "plain/file") == []


def test_times_beyond_all_reason(stage: Stage) -> None:
    """A time that no other file system can hold stops neither what passes nor what is held."""
    stage.start()
    for path in ("passes", ".envrc"):
        file = stage.put(path, "x")
        for seconds in (1 << 62, 1 << 40, 1 << 33):
            with contextlib.suppress(OSError, OverflowError):
                os.utime(file, ns=(0, seconds * 10**9))
                break
    report = stage.apply()
    assert held(report) == {".envrc": "protected"}
    assert report.complete
    assert stage.text("passes") == "x"
    assert held(stage.apply(resumed=True)) == {".envrc": "protected"}


def test_attributes_without_content(stage: Stage) -> None:
    """A file copied up without its content (metacopy) never replaces the content with zeros."""
    stage.lower(data="precious", plain="p")
    stage.start()
    with open(stage.upper / "data", "wb") as file:
        file.truncate(8)
    os.setxattr(stage.upper / "data", stage.prefix + "metacopy", b"")
    with open(stage.upper / "plain", "wb") as file:
        file.truncate(8)
    report = stage.apply()
    assert [failure.path for failure in report.failed] == ["data"]
    assert not report.complete
    assert stage.text("data") == "precious"
    assert stage.text("plain") == "\0" * 8
