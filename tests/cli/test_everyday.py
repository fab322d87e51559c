"""Everyday commands end behind the boundary as they do without it, and the host can use what they made."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from typing import TYPE_CHECKING

import pytest

from tests.cli.everyday import Pair, make_pair, need, node_path
from tests.cli.harness import PYTHON
from tests.cli.snippets import SNIPPETS
from tests.security.lab import PATH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cli.harness import Caller

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("traceless")]

AS_ROOT = pytest.mark.parametrize("caller", ["root"], indirect=True)


@pytest.fixture
def pair(caller: Caller) -> Iterator[Pair]:
    """A workspace, and a twin for the same commands outside."""
    yield make_pair(caller)
    caller.close()


GIT = """
export GIT_AUTHOR_DATE=2024-01-01T00:00:00Z GIT_COMMITTER_DATE=2024-01-01T00:00:00Z
git init -q repo
cd repo
mkdir d
echo one >a.txt
echo two >d/b
printf '#!/bin/sh\\n' >run.sh
chmod +x run.sh
ln -s a.txt link
git add .
git commit -q -m first
git branch side
git mv a.txt c.txt
git mv d e
git commit -q -a -m second
echo changed >>c.txt
git stash push -q
git worktree add -q ../work side
echo more >../work/new
git -C ../work add new
git -C ../work commit -q -m third
git merge -q -m merged side
git tag -a -m tagged v1
git clone -q . ../copy
git -C ../copy remote add other ../repo
git config user.name 'Another One'
git gc -q
git log --all --graph --format='%H %an %ae %s'
git status --short --branch
git worktree list
git for-each-ref
"""


def test_git(pair: Pair) -> None:
    """A repository made inside is a good one outside: same commits, clean, sound, work trees and stash."""
    need("git")
    said = pair.same("sh", "-e", "-c", GIT)
    assert "Some One" in said
    assert "trunk" in said
    for place in ("repo", "work", "copy"):
        directory = pair.ws / place
        assert pair.host("git", "status", "--porcelain", cwd=directory) == ""
        pair.host("git", "fsck", "--strict", "--no-dangling", cwd=directory)
    repository, other = pair.ws / "repo", pair.twin / "repo"
    assert (repository / ".git/config").read_text() == (other / ".git/config").read_text()
    pair.host("git", "stash", "pop", cwd=repository)
    assert "changed" in (repository / "c.txt").read_text()
    pair.host("git", "worktree", "remove", "../work", cwd=repository)
    # What the host has made is the base of the next run inside.
    pair.inside("git", "-C", "repo", "commit", "-q", "-a", "-m", "fourth")
    assert pair.host("git", "log", "-1", "--format=%s", cwd=repository) == "fourth\n"
    assert pair.host("git", "status", "--porcelain", cwd=repository) == ""


def test_git_submodule(pair: Pair) -> None:
    """A submodule added inside is one outside, recorded, checked out and sound."""
    need("git")
    script = """
    for name in inner outer; do
        git init -q $name
        echo $name >$name/file
        git -C $name add file
        git -C $name commit -q -m $name
    done
    cd outer
    git -c protocol.file.allow=always submodule --quiet add ../inner module
    git commit -q -m module
    """
    pair.inside("sh", "-e", "-c", script)
    outer = pair.ws / "outer"
    assert pair.host("git", "status", "--porcelain", "--ignore-submodules=none", cwd=outer) == ""
    assert " module (heads/trunk)" in pair.host("git", "submodule", "status", cwd=outer)
    assert pair.host("git", "fsck", "--strict", cwd=outer / "module") == ""
    assert (outer / "module/file").read_text() == "inner\n"


def wheel(pair: Pair) -> str:
    """A wheel with one module and one script, beside the sources of the workspace; its name."""
    name = "greeting-1.0-py3-none-any.whl"
    info = "greeting-1.0.dist-info"
    files = {
        "greeting.py": "def main():\n    print('hello from a wheel')\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\ngreet = greeting:main\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(pair.ws / name, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    os.chown(pair.ws / name, pair.caller.uid, pair.caller.uid)
    return name


def test_venv_and_pip(pair: Pair) -> None:
    """An environment made inside, with a wheel installed offline, works inside and outside."""
    script = f"{PYTHON} -m venv env && env/bin/pip install -q --no-index ./{wheel(pair)} && env/bin/greet"
    assert pair.inside("sh", "-e", "-c", script).out == b"hello from a wheel\n"
    assert pair.host("env/bin/greet") == "hello from a wheel\n"
    where = "import sys, greeting; print(sys.prefix, greeting.__file__)"
    prefix, module = pair.host("env/bin/python", "-I", "-c", where).split()
    assert prefix == str(pair.ws / "env")
    assert module.startswith(prefix)
    # Programs that a run has made or changed are named.
    report = json.loads(pair.report.read_text())
    assert "env/bin/greet" in report["applied"]["executables"]


def test_npm(pair: Pair) -> None:
    """npm packs, initialises and installs offline; what it made runs inside and outside."""
    path = node_path()
    need("node", "npm", path=path)
    pair.file("lib/package.json", '{"name": "tiny", "version": "1.0.0", "bin": {"tiny": "cli.js"}}')
    pair.file("lib/index.js", "module.exports = () => 42\n")
    pair.file("lib/cli.js", '#!/usr/bin/env node\nconsole.log(require("./index.js")())\n', 0o755)
    script = """
    npm pack -s ./lib
    mkdir app
    cd app
    npm init -y >/dev/null
    npm pkg set scripts.start='node -p "require(\\"tiny\\")() + 1"'
    npm install -s --offline --no-audit --no-fund ../tiny-1.0.0.tgz
    node_modules/.bin/tiny
    npm start -s
    """
    ended = pair.inside("sh", "-e", "-c", script, path=path)
    assert ended.out == b"tiny-1.0.0.tgz\n42\n43\n"
    app = pair.ws / "app"
    assert pair.host("node_modules/.bin/tiny", cwd=app, path=path) == "42\n"
    assert pair.host("npm", "start", "-s", cwd=app, path=path) == "43\n"
    assert "tiny@1.0.0" in pair.host("npm", "ls", cwd=app, path=path)
    report = json.loads(pair.report.read_text())
    assert "app/node_modules/.bin/tiny" in report["applied"]["executables"]


def test_make_and_gcc(pair: Pair) -> None:
    """make and gcc build a program; it runs inside and outside, and a second make has nothing to do."""
    need("make", "gcc")
    pair.file("hello.c", '#include <stdio.h>\nint main(void) { puts("hello"); return 0; }\n')
    pair.file("Makefile", "hello: hello.o\n\tgcc -pipe -o $@ $<\nhello.o: hello.c\n\tgcc -O2 -c -o $@ $<\n")
    pair.same("make", "-j2")
    pair.same_tree()
    assert pair.same("./hello") == "hello\n"
    assert pair.host("./hello") == "hello\n"
    assert "up to date" in pair.same("make")


@AS_ROOT
def test_cargo(pair: Pair) -> None:
    """cargo, found through PATH outside the system's directories, builds and tests a crate offline."""
    here = os.environ.get("PATH", PATH)
    need("cargo", path=here)
    directory = os.path.dirname(str(shutil.which("cargo", path=here)))
    # rustup's programs look for their toolchains below the home of who installed them.
    toolchains = os.environ.get("RUSTUP_HOME") or os.path.expanduser("~/.rustup")
    pair.file("crate/Cargo.toml", '[package]\nname = "hello"\nversion = "0.1.0"\nedition = "2021"\n')
    pair.file("crate/main.rs", '#[test]\nfn t() {}\nfn main() { println!("hello"); }\n')
    script = "cd crate; mkdir src; mv main.rs src; cargo test -q --offline; cargo run -q --offline"
    ended = pair.inside("sh", "-e", "-c", script, path=f"{directory}:{PATH}", env={"RUSTUP_HOME": toolchains})
    assert b"1 passed" in ended.out
    assert ended.out.endswith(b"hello\n")
    assert pair.host("crate/target/debug/hello") == "hello\n"


def test_java(pair: Pair) -> None:
    """javac and java: threads, a child process, the user's name."""
    need("javac", "java")
    pair.file(
        "Hello.java",
        """
public class Hello {
    public static void main(String[] args) throws Exception {
        Process child = new ProcessBuilder("echo", "from a child").start();
        System.out.print(new String(child.getInputStream().readAllBytes()));
        System.out.println(java.util.stream.IntStream.range(0, 1000).parallel().sum());
        System.out.println(args.length > 0 ? System.getProperty("user.name") : "");
    }
}
""",
    )
    assert pair.inside("javac", "Hello.java").out == b""
    assert pair.inside("java", "Hello", "name").out == b"from a child\n499500\nsandbox\n"
    assert pair.host("java", "Hello") == "from a child\n499500\n\n"


def test_perl(pair: Pair) -> None:
    """perl forks, waits, opens pipes and sockets."""
    need("perl")
    script = r"""
use strict; use IO::Socket::INET; use POSIX;
my $child = fork // die; exit 3 unless $child; waitpid $child, 0; print $? >> 8, "\n";
open my $pipe, "-|", "echo piped" or die; print <$pipe>; close $pipe;
my $server = IO::Socket::INET->new(Listen => 1, LocalAddr => "127.0.0.1") or die;
my $client = IO::Socket::INET->new(PeerAddr => "127.0.0.1", PeerPort => $server->sockport) or die;
print $client "line\n"; $client->flush; my $peer = $server->accept; print scalar <$peer>;
open my $file, ">", "written" or die; print $file "text"; close $file; rename "written", "renamed" or die;
print join(",", sort glob "*"), "\n";
"""
    assert pair.same("perl", "-e", script) == "3\npiped\nline\nrenamed\n"
    pair.same_tree()


def test_shell(pair: Pair) -> None:
    """bash: process substitution, here documents, background jobs, traps, /dev/fd, named pipes."""
    need("bash")
    script = r"""
cat <(echo one) <(echo two) >both
diff <(sort both) <(printf 'one\ntwo\n') && echo equal
tee >(tr a-z A-Z >upper) <<<"through tee" >/dev/null; wait $!; cat upper
exec 7<<<"seven"; cat /dev/fd/7; cat /dev/stdin <<'END'
here
END
mkfifo pipe; (echo by name >pipe &); cat <pipe; rm pipe
trap 'echo trapped' USR1; kill -USR1 $$
sleep 60 & kill %1; wait %1; echo $?
(exit 7); echo $?
set -o pipefail; false | true; echo $?
coproc cat; echo co >&"${COPROC[1]}"; read -r word <&"${COPROC[0]}"; echo "$word"; kill $COPROC_PID
printf '%s\n' {1..5} | xargs -P2 -n1 echo | sort -n | tail -1
mkdir -p deep/{x,y}; touch deep/{x,y}/f; find deep -type f | sort
ls /dev/fd/ >/dev/null && [ -c /dev/null ] && [ -w /dev/full ] && [ -d /dev/shm ] && echo devices
"""
    assert "equal" in pair.same("bash", "-c", script)
    pair.same_tree()


def test_archives(pair: Pair) -> None:
    """tar, gzip and zip write archives that the other side reads, modes and links included."""
    need("tar", "gzip")
    script = f"""
    mkdir -p in/sub
    echo text >in/sub/file
    chmod 640 in/sub/file
    ln -s sub/file in/link
    tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf a.tar in
    gzip -n -k a.tar
    mkdir out && tar -xzf a.tar.gz -C out
    {PYTHON} -m zipfile -c a.zip in && {PYTHON} -m zipfile -e a.zip unzipped
    find . -type f | sort | xargs sha256sum | grep -v a.zip
    """
    pair.same("sh", "-e", "-c", script)
    for directory in (pair.ws, pair.twin):
        (directory / "a.zip").unlink()  # holds the time
    pair.same_tree()
    assert pair.host("tar", "-tf", "a.tar.gz").splitlines() == ["in/", "in/link", "in/sub/", "in/sub/file"]


@pytest.mark.parametrize("name", SNIPPETS)
def test_python(pair: Pair, name: str) -> None:
    """A Python program says and leaves the same on both sides."""
    pair.file("program.py", SNIPPETS[name])
    assert pair.same(PYTHON, "-B", "program.py") != ""
    if name != "sqlite":  # its files hold counters of their own
        pair.same_tree(leave_out=("__pycache__",))
    else:
        check = "import sqlite3 as s; print(*s.connect('wal.db').execute('pragma integrity_check'))"
        assert pair.host(PYTHON, "-c", check) == "('ok',)\n"


def test_who_am_i(pair: Pair) -> None:
    """Every way to ask gives one answer: the user sandbox in its own home, and one network device."""
    path = node_path()
    need("node", path=path)
    script = f"""
    whoami; id -un; id -gn; echo ~; echo $HOME $USER $LOGNAME; getent passwd $(id -u) | cut -d: -f1,6
    {PYTHON} -c 'import getpass, os; print(getpass.getuser(), os.path.expanduser("~"))'
    cd && pwd && touch here && ls
    """
    said = pair.inside("sh", "-e", "-c", script).out.decode().splitlines()
    home = "/home/sandbox"
    assert said == [
        "sandbox", "sandbox", "sandbox", home, f"{home} sandbox sandbox", f"sandbox:{home}",
        f"sandbox {home}", home, "here",
    ]  # fmt: skip
    code = """
    const os = require("os"), user = os.userInfo(), lo = os.networkInterfaces()
    console.log(JSON.stringify([user.username, user.homedir, os.homedir(), os.tmpdir(), os.cpus().length > 0,
        Object.keys(lo), lo.lo.map((a) => a.address).sort()]))
    """
    told = json.loads(pair.inside("node", "-e", code, path=path).out)
    assert told == ["sandbox", home, home, "/tmp", True, ["lo"], ["127.0.0.1", "::1"]]


def test_ps(pair: Pair) -> None:
    """ps and its relatives show the sandbox's processes and no other; outside they show more."""
    need("ps", "pgrep")
    said = pair.inside("sh", "-c", "ps -e -o args=; pgrep -c .").out.decode().splitlines()
    assert said[0] == "casemate-init"
    assert [line.split()[0] for line in said[1:]] == ["sh", "ps", "2"]
    assert len(pair.host("ps", "-e", "-o", "comm=").split()) > 3


def test_script(pair: Pair) -> None:
    """script gives its command a terminal of its own."""
    need("script")
    words = ("script", "-q", "-e", "-c", "tty >/dev/null && stty rows 40 && stty size; exit 4", "/dev/null")
    ended = pair.caller.run(pair.ws, *words, flags=("--no-daemon", "--quiet"))
    assert (ended.code, ended.out) == (4, b"40 0\r\n"), ended
