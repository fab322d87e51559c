"""A workspace that is changed directly: everyday work in it, and programs that watch it."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.request
from typing import TYPE_CHECKING

import pytest

from tests.cli.everyday import Pair, make_pair, need
from tests.cli.harness import PYTHON
from tests.cli.snippets import SNIPPETS
from tests.cli.test_everyday import (  # noqa: F401 - the same tests, with the pair of this file
    test_archives,
    test_cargo,
    test_java,
    test_make_and_gcc,
    test_npm,
    test_perl,
    test_ps,
    test_script,
    test_venv_and_pip,
    test_who_am_i,
)
from tests.security.lab import PATH, drop_to

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cli.harness import Caller

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("traceless")]

DIRECT = ("--direct",)
# They make pipes and sockets in the workspace, or set attributes by path.
NOT_HERE = ("files", "loopback-servers")


@pytest.fixture
def pair(caller: Caller) -> Iterator[Pair]:
    """A workspace that is changed directly, and a twin for the same commands outside."""
    yield make_pair(caller, DIRECT)
    caller.close()


@pytest.mark.parametrize("name", [name for name in SNIPPETS if name not in NOT_HERE])
def test_python(pair: Pair, name: str) -> None:
    """What Python programs count on is there."""
    pair.file("snippet.py", SNIPPETS[name])
    pair.same(PYTHON, "snippet.py")


GIT = """
set -e
echo one >a.txt; mkdir d; echo two >d/b; printf '#!/bin/sh\\n' >run.sh; chmod +x run.sh; ln -s a.txt link
git add .; git commit -q -m first
git checkout -q -b side; git mv d e; git mv a.txt c.txt; git commit -q -a -m second
git checkout -q trunk; echo more >new; git add new; git commit -q -m third
git merge -q -m merged side
echo changed >>c.txt; git stash push -q; git stash pop -q; git commit -q -a --amend -m fourth
git rebase -q --force-rebase HEAD~1
git checkout -q -b picked HEAD~1; echo p >p; git add p; git commit -q -m picked; git checkout -q trunk
git cherry-pick picked >/dev/null
git revert --no-edit HEAD >/dev/null
git tag v1; git tag -a -m tagged v2; git branch -m side other; git notes add -m note
git config user.name 'Another One'; git remote add up https://example.invalid/up.git
git bisect start HEAD HEAD~2 >/dev/null; git bisect reset >/dev/null 2>&1
git gc -q; git repack -a -d -q; git pack-refs --all; git reflog expire --all --expire=now
git fsck --strict --no-dangling; git status --short; git log --oneline | wc -l
"""


def test_git(pair: Pair) -> None:
    """A repository of the host is worked in as ever; its hooks and what its configuration runs stay as they
    are, and a new repository is refused with a word.
    """
    need("git")
    pair.host("git", "init", "-q", "-b", "trunk", ".")
    pair.inside("sh", "-c", GIT)
    assert pair.host("git", "status", "--porcelain") == ""
    pair.host("git", "fsck", "--strict", "--no-dangling")
    assert pair.host("git", "config", "user.name") == "Another One\n"
    assert "Another One" in (pair.ws / ".git/config").read_text()
    for words in (
        ("git", "config", "core.fsmonitor", "x"), ("git", "config", "alias.x", "!y"),
        ("git", "init", "fresh"), ("git", "clone", ".", "copy"), ("git", "worktree", "add", "../wt"),
        ("git", "worktree", "add", "wt"),
    ):  # fmt: skip
        ended = pair.caller.run(pair.ws, *words, flags=("--no-daemon", *DIRECT), env={"PATH": PATH})
        assert ended.code != 0, words
        if words[-1] != "../wt":
            assert b"Permission denied" in ended.err or b"could not write config" in ended.err, ended
    assert "fsmonitor" not in (pair.ws / ".git/config").read_text()


COPIES = """
set -e
mkdir -p from/sub; echo one >from/sub/file; ln -s sub/file from/link
chmod 640 from/sub/file; chmod 700 from/sub
cp -a from "$T/there"; cp -a "$T/there" back; cp -rp back again; mv "$T/there" moved
tar -cf "$T/all.tar" .; tar -xpf "$T/all.tar"; cp -a back/. .; touch -r from/sub .
find . -path ./.git -prune -o -path ./.twin -prune -o -printf '%M %s %p %l\\n' | sort
"""


def test_copies_keep_attributes(pair: Pair) -> None:
    """Copying with modes, times and lists of rights, from and to elsewhere."""
    need("tar", "find")
    pair.same("sh", "-c", "T=$(mktemp -d); export T\n" + COPIES)


ATTRIBUTES = """
import errno, os
def tried(act, *args, **more):
    try:
        act(*args, **more)
    except OSError as error:
        return errno.errorcode[error.errno]
open("file", "w").close()
os.symlink("file", "link")
for path in ("file", "link", ".", os.open("file", os.O_RDONLY), os.open(".", os.O_RDONLY), ".envrc"):
    print(tried(os.setxattr, path, "user.a", b"1"), tried(os.removexattr, path, "user.a"))
link = tried(os.setxattr, "link", "user.a", b"1", follow_symlinks=False)
print(link, tried(os.setxattr, "none", "user.a", b"1"))
open("/tmp/file", "w").close()
print(tried(os.setxattr, "/tmp/file", "user.a", b"1"), tried(os.removexattr, "/tmp/file", "user.a"))
"""


def test_attributes(caller: Caller, ws: Path) -> None:
    """Extended attributes are what a file system without them has; programs know that answer."""
    (ws / ".envrc").write_text("x\n")
    ended = caller.run(ws, PYTHON, "-c", ATTRIBUTES, flags=("--no-daemon", *DIRECT))
    lines = ended.out.decode().splitlines()
    assert lines == ["ENOTSUP ENOTSUP"] * 6 + ["ENOTSUP ENOENT", "None None"], ended


WATCHER = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None)
watch = libc.inotify_init1(0)
assert libc.inotify_add_watch(watch, b".", 0x2 | 0x8 | 0x80 | 0x100) >= 0
print("watching", flush=True)
seen = set()
while not {"config.js", "new.js", "renamed.js"} <= seen:
    data = os.read(watch, 65536)
    while data:
        size = struct.unpack_from("iIII", data)[3]
        seen.add(data[16 : 16 + size].rstrip(b"\\0").decode())
        data = data[16 + size :]
with open("built.txt", "w") as out:
    out.write(open("config.js").read())
print("built", flush=True)
sys.stdin.readline()
"""


def background(
    caller: Caller, ws: Path, *command: str, flags: tuple[str, ...] = DIRECT
) -> subprocess.Popen[bytes]:
    """A run that goes on meanwhile."""
    argv = [str(caller.command), "run", "--no-daemon", "--quiet", *flags, "--", *command]
    return subprocess.Popen(
        [*drop_to(caller.uid), *argv], cwd=ws, env={**caller.environment(), "PATH": PATH},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def line(process: subprocess.Popen[bytes]) -> str:
    """The next line that it prints."""
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def test_a_watcher(caller: Caller, ws: Path) -> None:
    """A watcher inside hears of every edit that the host makes, and what it builds is on the host at once,
    while it runs.
    """
    caller.file(ws / "config.js", "before")
    caller.file(ws / "old.js", "old")
    process = background(caller, ws, PYTHON, "-I", "-c", WATCHER)
    try:
        assert line(process) == "watching"
        (ws / "config.js").write_text("after")  # as the host's root: whoever edits, the file is the same
        caller.file(ws / "new.js", "new")
        (ws / "old.js").rename(ws / "renamed.js")
        assert line(process) == "built"
        assert (ws / "built.txt").read_text() == "after"
        assert (ws / "built.txt").stat().st_uid == caller.uid
        assert process.poll() is None
    finally:
        process.communicate(b"\n", timeout=30)


SERVER = """
import http.server, os, sys
class Handler(http.server.SimpleHTTPRequestHandler):
    def do_POST(self):
        with open(self.path.lstrip("/"), "wb") as file:
            file.write(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
    def log_message(self, *words): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("serving", flush=True)
server.serve_forever()
"""


def test_a_development_server(caller: Caller, ws: Path) -> None:
    """A server inside, reached from the host's loopback, shows each edit at its next answer; what it is sent
    to store is on the host before its answer is; what is protected is not stored.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    caller.file(ws / "page.html", "one")
    flags = (*DIRECT, "-p", f"{port}:{port}")
    process = background(caller, ws, PYTHON, "-I", "-c", SERVER, str(port), flags=flags)

    def ask(method: str, path: str, data: bytes | None = None) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", data, method=method)
        with urllib.request.urlopen(request, timeout=20) as answer:
            body: bytes = answer.read()
            return body

    try:
        assert line(process) == "serving"
        assert ask("GET", "page.html") == b"one"
        caller.file(ws / "page.html", "two")
        assert ask("GET", "page.html") == b"two"
        ask("POST", "stored.txt", b"three")
        assert (ws / "stored.txt").read_bytes() == b"three"
        with pytest.raises(OSError, match=r".*"):
            ask("POST", ".envrc", b"four")
        assert not (ws / ".envrc").exists()
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_edits_are_seen(caller: Caller, ws: Path) -> None:
    """Inside the next read sees what the host has written, made or removed: nothing of it is remembered."""
    script = (
        "import os, sys\nfor word in sys.stdin:\n"
        " print(sorted(n for n in os.listdir('.') if n.startswith('x')), os.path.exists('xnew'), flush=True)"
    )
    process = background(caller, ws, PYTHON, "-I", "-c", script)
    assert process.stdin is not None

    def ask() -> str:
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        return line(process)

    try:
        assert ask() == "[] False"
        caller.file(ws / "xnew", "")
        assert ask() == "['xnew'] True"
        (ws / "xnew").unlink()
        assert ask() == "[] False"
    finally:
        process.communicate(timeout=30)


def test_others_need_not_wait(caller: Caller, ws: Path) -> None:
    """A command that runs directly holds nobody up, view or direct; none loses what another wrote."""
    process = background(
        caller, ws, "sh", "-c", "echo server >server.txt; echo up; read x; echo more >>server.txt"
    )
    try:
        assert line(process) == "up"
        ended = caller.sh(ws, "cat server.txt; echo view >view.txt", flags=("--no-daemon", "--no-wait"))
        assert (ended.code, ended.out) == (0, b"server\n"), ended
        ended = caller.sh(
            ws, "cat view.txt; echo direct >direct.txt", flags=("--no-daemon", "--no-wait", *DIRECT)
        )
        assert (ended.code, ended.out) == (0, b"view\n"), ended
    finally:
        process.communicate(b"\n", timeout=30)
    assert (ws / "server.txt").read_text() == "server\nmore\n"
    assert (ws / "direct.txt").read_text() == "direct\n"


def test_many_writers(caller: Caller, ws: Path) -> None:
    """Several direct commands that make, rename and remove the same names at once come to one end."""
    script = (
        "import os, sys\nfor n in range(150):\n name = sys.argv[1] + str(n)\n"
        " open(name, 'w').write(name); os.rename(name, 'k' + name)\n"
        " try:\n  os.mkdir('same'); os.rmdir('same')\n except OSError: pass\n"
    )
    processes = [background(caller, ws, PYTHON, "-I", "-c", script, word) for word in "abc"]
    for process in processes:
        process.communicate(timeout=90)
        assert process.returncode == 0
    assert {path.name for path in ws.glob("k*")} == {f"k{word}{n}" for word in "abc" for n in range(150)}
    assert not (ws / "same").exists()


def test_the_report(caller: Caller, ws: Path) -> None:
    """It says that the workspace was changed directly, what was refused and why, and what can be executed."""
    script = "echo x >.envrc; echo ok >plain; printf '#!/bin/sh\\n' >tool; chmod +x tool; true"
    ended = caller.sh(ws, script, flags=("--no-daemon", "--json", *DIRECT))
    report = json.loads(ended.out)
    assert report["exit-code"] == 0
    assert any("filesystem.workspace is direct" in note for note in report["notes"])
    refused = [denial for denial in report["denials"] if denial["kind"].startswith("refused")]
    assert [(d["kind"], d["certain"]) for d in refused] == [("refused-protected", True)]
    assert refused[0]["what"].startswith(".envrc")
    assert report["applied"]["executables"] == ["tool"]
    assert "the workspace" in report["scopes"]["disk"] or report["scopes"]["disk"] == "watched"


def test_what_it_grows_by_is_limited(caller: Caller, ws: Path) -> None:
    """The disk limit holds for one file, and for many."""
    caller.file(ws / "before", "x" * (6 << 20))  # is there already: no part of it
    ended = caller.sh(ws, "head -c 9000000 /dev/zero >big", flags=("--no-daemon", "--disk", "8M", *DIRECT))
    assert ended.code == 123, ended
    (ws / "big").unlink()
    many = "i=0; while [ $i -lt 4000 ]; do head -c 1000000 /dev/zero >m$i; i=$((i+1)); done"
    ended = caller.sh(ws, many, flags=("--no-daemon", "--disk", "8M", *DIRECT), timeout=120)
    assert ended.code == 123, ended
    ended = caller.sh(ws, "rm m*; echo ok", flags=("--no-daemon", "--disk", "8M", *DIRECT))
    assert ended.code == 0, ended


def test_by_a_project(caller: Caller, ws: Path) -> None:
    """A project's own file cannot choose it; the user's can, and the word on the command line."""
    caller.file(ws / "casemate.toml", 'version = 1\n[filesystem]\nworkspace = "direct"\n')
    ended = caller.sh(ws, "echo x >made; sleep 0.1; test -e made && echo seen", flags=("--no-daemon",))
    assert b"would allow more and is not counted" in ended.err
    assert b"is direct" not in ended.err
    policy = caller.file(ws.parent / "direct.toml", 'version = 1\n[filesystem]\nworkspace = "direct"\n')
    (ws / "casemate.toml").unlink()
    ended = caller.sh(ws, "true", flags=("--no-daemon", "--policy", str(policy)))
    assert b"is direct (from" in ended.err


def test_words_that_do_not_go_together(caller: Caller, ws: Path) -> None:
    """With user namespaces of its own a command could have other paths than the broker: refused."""
    ended = caller.sh(ws, "true", flags=("--no-daemon", "--degrade", "nested-userns", *DIRECT))
    assert ended.code == 126, ended
    assert b"nested-userns" in ended.err


def test_from_python(caller: Caller, ws: Path) -> None:
    """The library does it, too: writes are there while the command runs, refusals are in the result."""
    script = f"""
import asyncio, os
from casemate import AsyncSandbox
from casemate.policy.model import FlagLayer
async def main():
    async with AsyncSandbox({str(ws)!r}, flags=FlagLayer(workspace="direct"), ready=1) as sandbox:
        seen = []
        result = await sandbox.run("echo one >one; mkdir .vscode; echo out; sleep 0.2",
                                   on_stdout=lambda data: seen.append(open({str(ws / "one")!r}).read()))
        both = await asyncio.gather(*(sandbox.run(f"echo x >par{{n}}; sleep 0.1") for n in range(3)))
        print(seen, result.exit_code, [d.kind for d in result.denials], [r.exit_code for r in both])
asyncio.run(main())
"""
    done = subprocess.run(
        [*drop_to(caller.uid), str(caller.command.parent / "python3"), "-I", "-c", script],
        cwd=ws, env={**caller.environment(), "PATH": PATH}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.stdout == "['one\\n'] 0 ['refused-protected'] [0, 0, 0]\n", done.stderr
    assert (ws / "par2").exists()


def test_by_a_terminal_and_a_daemon(caller: Caller, ws: Path, daemon: int) -> None:
    """With a pty of its own, and by a resident daemon, it is the same."""
    ended = caller.sh(ws, "tty; echo x >by_tty", flags=("--tty", "yes", "--no-daemon", *DIRECT))
    assert ended.code == 0, ended
    assert (ws / "by_tty").exists()
    ended = caller.sh(ws, "echo x >by_daemon; mkdir .idea", flags=DIRECT)
    assert ended.code == 1, ended
    assert b"refused-protected .idea" in ended.err
    assert (ws / "by_daemon").exists()
