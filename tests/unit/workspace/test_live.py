"""What may be done directly in a workspace: the judge's answers over a real tree."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

import pytest

from casemate.workspace import gitconfig, live
from casemate.workspace.live import LiveJudge, TooLarge
from tests.unit.workspace.test_protected import test_free as FREE
from tests.unit.workspace.test_protected import test_protected as PROTECTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HEAD, CONFIG = "ref: refs/heads/main\n", "[core]\n\trepositoryformatversion = 0\n\tbare = false\n"
DIRECTORY = stat.S_IFDIR | 0o755
FILE = stat.S_IFREG | 0o644


def repository(place: Path, config: str = CONFIG) -> None:
    for name in ("objects/info", "refs/heads", "hooks", "info", "logs"):
        (place / name).mkdir(parents=True)
    (place / "HEAD").write_text(HEAD)
    (place / "config").write_text(config)
    (place / "index").write_bytes(b"DIRC")


@pytest.fixture
def ws(tmp_path: Path) -> Path:
    made = tmp_path / "ws"
    (made / "src/deep").mkdir(parents=True)
    (made / "src/app.py").write_text("x\n")
    (made / ".envrc").write_text("x\n")
    (made / ".vscode").mkdir()
    repository(made / ".git")
    repository(made / "sub/.git")
    repository(made / "bare.git")
    return made


@pytest.fixture
def judge(ws: Path) -> Iterator[LiveJudge]:
    tree = os.open(ws, os.O_PATH | os.O_DIRECTORY)
    yield LiveJudge(tree, str(ws), protect=["secret.*", "/hidden/key"], readable=["/usr"])
    os.close(tree)


def names(test: Callable[..., None]) -> list[str]:
    (mark,) = [mark for mark in test.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    return list(mark.args[1])


@pytest.mark.parametrize("path", names(PROTECTED))
def test_protected(judge: LiveJudge, path: str) -> None:
    """A protected name is neither made, written nor removed, as a file, a link or a directory."""
    assert judge.write(path, new=True)
    assert judge.write(path, new=False)
    assert judge.link(path, "README.md")
    assert judge.make_directory(path)
    assert judge.remove(path, directory=False)
    assert judge.move("src/app.py", path, FILE)
    assert judge.move(path, "free", FILE)


@pytest.mark.parametrize("path", names(FREE))
def test_free(judge: LiveJudge, ws: Path, path: str) -> None:
    """The control: ordinary names."""
    if path == "x.git/HEAD":  # alone it makes no repository
        (ws / "x.git").mkdir()
        assert not judge.write(path, new=True)
        return
    assert not judge.write(path, new=True)
    assert not judge.remove(path, directory=False)
    assert not judge.move("src/app.py", path, FILE)


def test_the_policys_own_names(judge: LiveJudge) -> None:
    """Patterns of the policy hold at any depth, those with a slash from the top."""
    assert judge.write("src/secret.txt", new=True)
    assert judge.write("hidden/key", new=True)
    assert not judge.write("src/hidden/key", new=True)


DATA = [
    "index", "index.lock", "objects/ab/cdef", "objects/pack/tmp_pack_x", "refs/heads/topic",
    "refs/heads/t.lock", "logs/HEAD", "ORIG_HEAD", "COMMIT_EDITMSG", "packed-refs.lock",
    "packed-refs.new", "HEAD.lock", "config.lock", "index.stash.123", "next-index-7.lock", "gc.pid",
    "info/exclude", "info/refs_AbC123", "rebase-merge/onto",
]  # fmt: skip
NOT_DATA = [
    "config", "config.worktree", "HEAD", "hooks/pre-commit", "hooks/pre-commit.sample", "hooks/x.lock",
    "commondir", "gitdir", "objects/info/alternates", "rebase-merge/git-rebase-todo", "unknown",
    "fsmonitor--daemon.ipc", "index.stash.x", "info/refs_AbC12/", "objects/.envrc", "worktrees/w/HEAD",
    "modules/m/config",
]  # fmt: skip


@pytest.mark.parametrize("place", [".git", "sub/.git"])
def test_in_a_repository(judge: LiveJudge, ws: Path, place: str) -> None:
    """Git's data may be written in place; what makes git run or look elsewhere may not."""
    for inner in DATA:
        assert not judge.write(f"{place}/{inner}", new=True), inner
    for inner in NOT_DATA:
        assert judge.write(f"{place}/{inner.rstrip('/')}", new=True), inner
    for inner in ("objects/ab", "refs/heads/x", "rebase-merge", "logs/refs"):
        assert not judge.make_directory(f"{place}/{inner}"), inner
    for inner in ("hooks", "worktrees", "modules", "branches", "else", "objects/.vscode"):
        assert judge.make_directory(f"{place}/{inner}"), inner
    assert judge.link(f"{place}/HEAD", "refs/heads/main")
    assert judge.remove(place, directory=True)
    assert judge.touch_directory(place)
    assert not judge.touch_directory(f"{place}/objects")
    assert judge.move(f"{place}/objects", f"{place}/refs/o", DIRECTORY)


def test_what_is_judged_by_content(judge: LiveJudge) -> None:
    """HEAD and the configuration come about by a rename, with a content that is safe."""
    assert judge.content(".git/HEAD")
    assert judge.content(".git/config")
    assert judge.content("sub/.git/rebase-merge/git-rebase-todo")
    assert not judge.content(".git/index")
    assert not judge.content("src/HEAD")
    assert not judge.accepts(".git/HEAD", b"ref: refs/heads/topic\n")
    assert judge.accepts(".git/HEAD", b"ref: ../../etc\n")
    assert not judge.accepts(".git/config", CONFIG.encode() + b"[user]\n\tname = N\n")
    for text in (b"[core]\n\tfsmonitor = x\n", b"[alias]\n\tx = !y\n", b"[core]\n\tworktree = ..\n", b"[co"):
        assert judge.accepts(".git/config", CONFIG.encode() + text), text
    assert not judge.accepts(".git/rebase-merge/git-rebase-todo", b"pick abc one\n")
    assert judge.accepts(".git/rebase-merge/git-rebase-todo", b"exec touch x\n")


def test_settings_of_the_host_stay(judge: LiveJudge, ws: Path) -> None:
    """Unsafe settings that the host has written stay, in their order, and no other may be added."""
    own = b"[core]\n\thooksPath = x\n[alias]\n\ty = !z\n"
    (ws / ".git/config").write_bytes(own)
    assert not judge.accepts(".git/config", own + b"[user]\n\tname = N\n")
    assert judge.accepts(".git/config", own + b"[core]\n\thooksPath = other\n")
    assert judge.accepts(".git/config", b"[alias]\n\ty = !z\n[core]\n\thooksPath = x\n")
    assert judge.accepts(".git/config", b"[user]\n\tname = N\n"), "they may not go"
    (ws / ".git/config").write_bytes(b"[odd")
    assert judge.accepts(".git/config", b"[user]\n\tname = N\n"), "what is there is not understood"


@pytest.mark.parametrize(
    "order",
    [("HEAD", "objects", "refs"), ("refs", "head", "OBJECTS"), ("commondir", "HEAD"),
     ("objects", "refs", "config"), ("hooks", "refs", "objects"), ("refs", "Config.Worktree", "objects")],
)  # fmt: skip
def test_no_repository_comes_about(judge: LiveJudge, ws: Path, order: tuple[str, ...]) -> None:
    """The last of the names by which git knows a repository cannot be made, in whatever case and order."""
    (ws / "new").mkdir()
    *first, last = order
    for name in first:
        assert not judge.make_directory(f"new/{name}")
        (ws / "new" / name).mkdir()
    assert judge.make_directory(f"new/{last}")
    assert judge.write(f"new/{last}", new=True)
    assert judge.link(f"new/{last}", "../src")
    assert judge.move("src/app.py", f"new/{last}", FILE)
    assert judge.move("src/deep", f"new/{last}", DIRECTORY)


def test_a_common_directory(judge: LiveJudge, ws: Path) -> None:
    """One without a HEAD is a repository, and the host's keeps its HEAD whatever lies beside it."""
    for name in ("common/objects", "common/refs", "common/hooks", "bare.git/worktrees/w"):
        (ws / name).mkdir(parents=True)
    (ws / "bare.git/commondir").write_text(".\n")
    (ws / "bare.git/worktrees/w/HEAD").write_text(HEAD)
    (ws / "bare.git/worktrees/w/commondir").write_text("../..\n")
    for path in ("common/config", "common/hooks/pre-commit", "common/commondir"):
        assert judge.write(path, new=True), path
    for name in ("HEAD", "config", "commondir"):
        assert judge.remove(f"bare.git/{name}", directory=False), name
        assert judge.write(f"bare.git/worktrees/w/{name}", new=True), name
    assert not judge.remove("bare.git/worktrees/w/commondir", directory=False)
    assert not judge.remove("bare.git/worktrees/w/HEAD", directory=False)


def test_a_bare_repository(judge: LiveJudge) -> None:
    """One of the host under any name is a repository: its configuration and hooks stay."""
    assert judge.write("bare.git/config", new=False)
    assert judge.write("bare.git/hooks/update", new=True)
    assert judge.make_directory("bare.git/hooks")
    assert not judge.write("bare.git/refs/heads/main", new=True)
    assert not judge.write("bare.git/description", new=True)
    assert not judge.write("bare.git/README.md", new=True)


@pytest.mark.parametrize(
    ("path", "to", "fine"),
    [
        ("l", "src/app.py", True), ("src/l", "../src/app.py", True), ("l", "missing", True),
        ("l", "/usr/bin/python3", True), ("l", "@/src", True),
        ("l", "..", False), ("src/l", "../../x", False), ("l", "/etc/passwd", False), ("l", ".envrc", False),
        ("src/l", "../.git/hooks", False), ("l", "src/../../x", False), ("l", "/proc/self/root", False),
    ],
)  # fmt: skip
def test_links(judge: LiveJudge, ws: Path, path: str, to: str, fine: bool) -> None:
    """A link stays in the workspace or leads to what may be read, and to nothing protected."""
    assert (judge.link(path, to.replace("@", str(ws))) == "") is fine


def test_moves(judge: LiveJudge, ws: Path) -> None:
    """A directory moves if nothing in it is protected, here or there, and no link in it comes to lead out."""
    (ws / "a/b").mkdir(parents=True)
    (ws / "a/b/up").symlink_to("../../src/app.py")
    assert not judge.move("a", "c", DIRECTORY)
    assert not judge.move("a/b", "src/b", DIRECTORY)
    assert judge.move("a/b", "b", DIRECTORY), "the link in it would leave the workspace"
    assert judge.move("sub", "else", DIRECTORY), "a repository is in it"
    assert judge.move(".vscode", "code", DIRECTORY)
    assert judge.move("a", ".vscode2/../.idea", DIRECTORY)
    (ws / "p/workflows").mkdir(parents=True)
    assert not judge.move("p", "q", DIRECTORY)
    assert judge.move("p", ".github", DIRECTORY), ".github/workflows would come about"
    assert judge.move("a", "a/inner", FILE) == judge.move("a", "a", DIRECTORY) == "", "the kernel's to say"


def test_a_move_of_too_much(judge: LiveJudge, ws: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes too long to look at is not moved as a whole; programs copy after this error."""
    monkeypatch.setattr(live, "_MOST_MOVED", 3)
    (ws / "many").mkdir()
    for number in range(4):
        (ws / f"many/{number}").touch()
    with pytest.raises(TooLarge) as caught:
        judge.move("many", "more", DIRECTORY)
    assert caught.value.errno == errno.EXDEV


def test_what_the_host_runs(ws: Path) -> None:
    """What the host's configuration names, and where its hooks lead that are links, is as good as a hook."""
    (ws / "tools").mkdir()
    for name in ("clean", "hook", "other"):
        (ws / "tools" / name).touch()
    (ws / ".git/config").write_text(CONFIG + '[filter "x"]\n\tclean = tools/clean %f\n')
    (ws / ".git/hooks/pre-commit").symlink_to("../../tools/hook")
    tree = os.open(ws, os.O_PATH | os.O_DIRECTORY)
    judge = LiveJudge(tree, str(ws))
    assert judge.write("tools/clean", new=False)
    assert judge.write("tools/hook", new=False)
    assert not judge.write("tools/other", new=False)
    os.close(tree)


def test_what_the_host_comes_to_run(judge: LiveJudge, ws: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that the host makes during the run count as those that were there; what was learned stays."""
    (ws / "tools").mkdir()
    for name in ("tools/one", "tools/two"):
        (ws / name).touch()
        assert not judge.write(name, new=False)
    monkeypatch.setattr(live, "_REMEMBER", 0.0)
    for name in ("one", "two"):
        (ws / ".git/config").write_text(f'{CONFIG}[filter "x"]\n\tclean = tools/{name} %f\n')
        judge.gone("", whole=True)
        assert judge.write(f"tools/{name}", new=False)
    assert judge.write("tools/one", new=False)


@pytest.mark.parametrize("inner", ["refs", "refs/d", "logs", "objects/ab", "rr-cache/x"])
def test_no_repository_in_another_one(judge: LiveJudge, ws: Path, inner: str) -> None:
    """Among a repository's data no directory becomes a repository; single marks are ordinary names there."""
    place = ws / ".git" / inner
    place.mkdir(parents=True, exist_ok=True)
    for name in ("objects", "refs"):
        assert not judge.make_directory(f".git/{inner}/{name}")
        (place / name).mkdir()
    assert judge.write(f".git/{inner}/HEAD", new=True)
    assert judge.write(f".git/{inner}/head", new=True)
    assert judge.move("src/app.py", f".git/{inner}/HEAD", FILE)
    assert not judge.write(f".git/{inner}/main", new=True)
    (place / "HEAD").write_text(HEAD)  # the host's own doing
    judge.gone("", whole=True)
    assert judge.write(f".git/{inner}/config", new=True)


def test_a_configuration_that_cannot_be_read(judge: LiveJudge, ws: Path) -> None:
    """What the host has set there is not known, so nothing takes its place."""
    (ws / ".git/config").unlink()
    assert not judge.accepts(".git/config", CONFIG.encode())
    (ws / ".git/config").write_text(CONFIG + "; " + "x" * gitconfig.LONGEST)
    assert judge.accepts(".git/config", CONFIG.encode())


def test_what_is_gone(judge: LiveJudge, ws: Path) -> None:
    """A directory that is removed or moved is looked at anew when it comes back as something else."""
    assert not judge.write("src/x", new=True)
    assert not judge.write("src/deep/x", new=True)
    (ws / "src").rename(ws / "old")
    repository(ws / "src")
    judge.gone("src", whole=True)
    assert judge.write("src/config", new=False)
    assert judge.write("src/hooks/update", new=True)


def test_deep_paths(judge: LiveJudge) -> None:
    """However deep a path is, it is judged: the protected name far above counts."""
    assert judge.write("d/" * 2000 + ".envrc", new=True)
    assert not judge.write("d/" * 2000 + "f", new=True)
    assert judge.write(".vscode/" + "d/" * 1500 + "f", new=True)
