"""Everyday work under the default preset: nothing is degraded or held back, and the host goes on with it."""

from __future__ import annotations

import ast
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cli.everyday import node_path
from tests.cli.harness import PYTHON
from tests.everyday.scenarios import SCENARIOS
from tests.everyday.work import missing, npm_hosts, pip_hosts, settings
from tests.security.lab import PATH

if TYPE_CHECKING:
    from tests.everyday.work import Work

pytestmark = [pytest.mark.root]


def need(*programs: str, path: str = PATH) -> None:
    """A scenario that cannot be tried is not passed."""
    if lacking := missing(*programs, path=path):
        pytest.fail(f"missing, so scripts/setup has not been run: {' '.join(lacking)}")


def test_there_are_25() -> None:
    """Each scenario has a test, and there are twenty-five of them."""
    here = Path(__file__).parent
    names = {
        node.name.removeprefix("test_")
        for file in ("test_scenarios.py", "test_network_scenarios.py")
        for node in ast.walk(ast.parse((here / file).read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert len(SCENARIOS) == 25
    assert set(SCENARIOS) == names - {"there_are_25"}


def test_git(work: Work) -> None:
    """init, add, commit, branch, worktree: inside, and seen as sound by the host's git."""
    work.inside("""
        git init -q repo; cd repo
        echo one >a; git add a; git commit -q -m first
        git branch side; git worktree add -q ../tree side
        echo two >../tree/b; git -C ../tree add b; git -C ../tree commit -q -m second
        git merge -q side; git status --porcelain
    """)
    assert (
        work.host("cd repo; git log --format=%s; git fsck --strict; git status --porcelain")
        == "second\nfirst\n"
    )
    assert work.host("git -C tree status --porcelain; git -C repo worktree list | wc -l") == "2\n"


def test_git_rebase(work: Work) -> None:
    """A rebase stops at a conflict, is resolved and goes on; its state survives from one run to the next."""
    work.inside("""
        git init -q .; echo base >f; git add f; git commit -q -m base
        git checkout -q -b topic; echo topic >f; git commit -q -a -m topic; echo more >g; git add g
        git commit -q -m more
        git checkout -q trunk; echo trunk >f; git commit -q -a -m trunk
        git checkout -q topic
        ! git rebase -q trunk 2>/dev/null
    """)
    assert "rebase" in work.host("git status")
    work.inside("echo both >f; git add f; GIT_EDITOR=true git rebase --continue")
    assert (
        work.host("git log --format=%s; cat f g; git status --porcelain")
        == "more\ntopic\ntrunk\nbase\nboth\nmore\n"
    )


def test_git_submodule(work: Work) -> None:
    """A submodule from a path of the workspace."""
    work.inside("""
        git init -q lib; cd lib; echo lib >file; git add file; git commit -q -m lib; cd ..
        git init -q app; cd app
        git -c protocol.file.allow=always submodule --quiet add ../lib lib
        git commit -q -m app; git submodule status
    """)
    assert work.host("cd app; git submodule status; git status --porcelain; cat lib/file").endswith("lib\n")


def test_git_mv(work: Work) -> None:
    """git mv of a directory that the host has made before; without root it takes mv and git add."""
    work.host(
        "git init -q .; mkdir -p old/deep; echo x >old/deep/f; echo y >old/g; git add .; git commit -q -m 1"
    )
    move = "git mv old new"
    if work.caller.uid:
        # Overlays cannot note a renamed directory for a user: EXDEV. mv copies then, git does not.
        assert b"cross-device" in work.inside(move, code=128).err
        move = "mv old new; git add -A"
    work.inside(f"{move}; git commit -q -m moved; git log -1 --summary --format= -M | grep -c rename")
    assert work.host("git status --porcelain; ls -R new; ls") == "new:\ndeep\ng\n\nnew/deep:\nf\nnew\n"


@pytest.mark.slow
def test_pip(work: Work) -> None:
    """A virtual environment with a package of the index; it runs inside and outside."""
    script = (
        f"{PYTHON} -m venv env; env/bin/pip install -q iniconfig==2.1.0; env/bin/python -c 'import iniconfig'"
    )
    work.inside(script, allow=pip_hosts(), env=settings())
    assert "iniconfig" in work.host("env/bin/pip list 2>/dev/null; env/bin/python -c 'import iniconfig'")


@pytest.mark.slow
def test_uv(work: Work) -> None:
    """uv makes an environment and fills it from the index."""
    uv = os.path.dirname(sys.executable)
    need("uv", path=uv)
    script = (
        f"{uv}/uv venv -q --python {PYTHON} env; {uv}/uv pip install -q -p env/bin/python iniconfig==2.1.0"
    )
    work.inside(script, allow=pip_hosts(), env=settings())
    work.host("env/bin/python -c 'import iniconfig'")


def test_pytest(work: Work) -> None:
    """pytest with a fixture, a temporary directory, a failing test and its cache."""
    work.file("app.py", "def double(x):\n    return 2 * x\n")
    work.file("test_app.py", "from app import double\n\ndef test_good(tmp_path):\n"
              "    (tmp_path / 'f').write_text('x')\n"
              "    assert double(2) == 4\n\ndef test_bad():\n    assert double(2) == 5\n")  # fmt: skip
    ended = work.inside(f"{sys.executable} -m pytest -q", code=1)
    assert b"1 failed, 1 passed" in ended.out
    assert b"test_bad" in work.inside(f"{sys.executable} -m pytest -q --lf", code=1).out


@pytest.mark.slow
def test_npm(work: Work) -> None:
    """npm install of a package of the registry, npm test, and the same outside."""
    path = node_path()
    need("node", "npm", path=path)
    work.file("package.json", '{"name": "w", "version": "1.0.0", "scripts": {"test": "node test.js"}}')
    work.file("test.js", "require('assert')(require('is-number')(5)); console.log('tested')\n")
    ended = work.inside(
        "npm install --no-audit --no-fund is-number@7.0.0; npm test",
        allow=npm_hosts(),
        path=path,
        env=settings(),
    )
    assert b"tested" in ended.out
    assert "tested" in work.host("npm test", path=path)
    assert (work.ws / "package-lock.json").is_file()


def test_node(work: Work) -> None:
    """node with files, a child process, a worker, a local server."""
    path = node_path()
    need("node", path=path)
    work.file(
        "main.js",
        """
const http = require("http"), fs = require("fs"), { execFileSync } = require("child_process");
const { Worker } = require("worker_threads");
fs.writeFileSync("out.txt", execFileSync("echo", ["child"]).toString());
new Worker("require('worker_threads').parentPort.postMessage(42)", { eval: true }).on("message", (m) => {
  const server = http.createServer((q, a) => a.end("served")).listen(0, () =>
    http.get({ port: server.address().port }, (a) => a.on("data", (d) => {
      console.log(m, d.toString());
      server.close();
    })));
});
""",
    )
    assert work.inside("node main.js", path=path).out == b"42 served\n"
    assert (work.ws / "out.txt").read_text() == "child\n"


@pytest.mark.slow
def test_tsc(work: Work) -> None:
    """The TypeScript compiler, installed from the registry, compiles; the result runs outside."""
    path = node_path()
    need("node", "npm", path=path)
    work.file("main.ts", "const words: string[] = ['typed', 'text'];\nconsole.log(words.join(' '));\n")
    script = (
        "npm install --no-audit --no-fund --no-save typescript@5.9.3; node_modules/.bin/tsc --strict main.ts"
    )
    work.inside(script, allow=npm_hosts(), path=path, env=settings())
    assert work.host("node main.js", path=path) == "typed text\n"
    ended = work.inside(
        "echo 'const n: number = 1; n.no' >bad.ts; node_modules/.bin/tsc bad.ts", path=path, code=2
    )
    assert b"TS2339" in ended.out


@pytest.mark.parametrize("mode", ["root"])  # where it is rustup's, it lies in the home of who installed it
def test_cargo(work: Work, mode: str) -> None:
    """cargo builds and tests a crate without dependencies."""
    here = os.environ.get("PATH", PATH)
    need("cargo", path=here)
    found = str(shutil.which("cargo", path=here))
    work.file("Cargo.toml", '[package]\nname = "hello"\nversion = "0.1.0"\nedition = "2021"\n')
    work.file("src/main.rs", '#[test]\nfn t() {}\nfn main() { println!("hello"); }\n')
    toolchains = os.environ.get("RUSTUP_HOME") or os.path.expanduser("~/.rustup")
    env = {"RUSTUP_HOME": toolchains} if os.path.isdir(toolchains) else {}
    ended = work.inside(
        "cargo test -q --offline; cargo build -q --offline", path=f"{os.path.dirname(found)}:{PATH}", env=env
    )
    assert b"1 passed" in ended.out
    assert work.host("target/debug/hello") == "hello\n"


def test_make(work: Work) -> None:
    """make and gcc, in parallel; outside there is nothing left to do, and after a change there is."""
    need("make", "gcc")
    work.file("a.c", '#include <stdio.h>\nint b(void);\nint main(void) { printf("%d\\n", b()); return 0; }\n')
    work.file("b.c", "int b(void) { return 7; }\n")
    work.file("Makefile", "prog: a.o b.o\n\tgcc -o $@ $^\n%.o: %.c\n\tgcc -O2 -c -o $@ $<\n")
    assert work.inside("make -s -j2; ./prog").out == b"7\n"
    assert "up to date" in work.host("make")
    work.file("b.c", "int b(void) { return 8; }\n")
    assert work.inside("make -s; ./prog").out == b"8\n"


def test_cmake(work: Work) -> None:
    """cmake configures, builds and tests a C project."""
    need("cmake", "gcc", "make")
    work.file("CMakeLists.txt",
     "cmake_minimum_required(VERSION 3.10)\nproject(p C)\nadd_library(l STATIC l.c)\n"
              "add_executable(p p.c)\ntarget_link_libraries(p l)\nenable_testing()\n"
              "add_test(NAME t COMMAND p)\n")  # fmt: skip
    work.file("l.c", "int l(void) { return 0; }\n")
    work.file("p.c", "int l(void);\nint main(void) { return l(); }\n")
    ended = work.inside("cmake -S . -B build >/dev/null; cmake --build build >/dev/null; cd build; ctest")
    assert b"100% tests passed" in ended.out
    assert work.host("build/p && echo runs") == "runs\n"


def test_perl(work: Work) -> None:
    """perl: files, pipes, a fork, a module of the system."""
    need("perl")
    work.file(
        "p.pl",
        """use strict; use warnings; use File::Temp; use POSIX;
my $t = File::Temp->new; print $t "x"; close $t;
open my $p, "-|", "echo", "piped" or die; print <$p>; close $p;
my $pid = fork // die; exit 4 unless $pid; waitpid $pid, 0; print $? >> 8, "\\n";
open my $f, ">", "made" or die; print $f join(",", sort glob "*"); close $f;
""",
    )
    assert work.inside("perl p.pl").out == b"piped\n4\n"
    assert (work.ws / "made").read_text() == "made,p.pl"


def test_java(work: Work) -> None:
    """javac and java: a jar, threads, a child process."""
    need("javac", "java", "jar")
    work.file(
        "Main.java",
        """
public class Main {
    public static void main(String[] a) throws Exception {
        Thread t = new Thread(() -> System.out.println("thread")); t.start(); t.join();
        Process child = new ProcessBuilder("echo", "child").start();
        System.out.print(new String(child.getInputStream().readAllBytes()));
    }
}
""",
    )
    assert (
        work.inside("javac Main.java; jar cfe m.jar Main Main.class; java -jar m.jar").out
        == b"thread\nchild\n"
    )
    assert work.host("java -jar m.jar") == "thread\nchild\n"


def test_sqlite(work: Work) -> None:
    """sqlite3 with a write-ahead log; the host opens what it left."""
    need("sqlite3")
    work.inside("""
        sqlite3 db "pragma journal_mode=wal; create table t(x); insert into t values (1), (2);"
        sqlite3 db "insert into t select x + 10 from t; vacuum;"
    """)
    assert work.host("sqlite3 db 'select sum(x) from t; pragma integrity_check'") == "26\nok\n"
    assert work.inside("sqlite3 db 'delete from t where x > 5; select count(*) from t'").out == b"2\n"


def test_archives(work: Work) -> None:
    """tar with compression and zip, modes and links included, read by the other side."""
    need("tar", "zip", "unzip")
    work.inside("""
        mkdir -p in/sub; echo text >in/sub/f; chmod 750 in/sub/f; ln -s sub/f in/l
        tar czf a.tgz in; tar cJf a.txz in; zip -qry a.zip in
        mkdir out; tar xzf a.tgz -C out; mkdir unzipped; unzip -q a.zip -d unzipped
        diff -r in out/in; diff -r in unzipped/in
    """)
    assert work.host("tar tzf a.tgz | sort; stat -c %a out/in/sub/f; readlink unzipped/in/l") == (
        "in/\nin/l\nin/sub/\nin/sub/f\n750\nsub/f\n"
    )


def test_rsync(work: Work) -> None:
    """rsync -a keeps times, modes and links, and --delete deletes."""
    need("rsync")
    work.host(
        "mkdir -p from/d to; echo 1 >from/d/f; ln -s d/f from/l; chmod 640 from/d/f;"
        "touch -d 2001-01-01 from/d/f"
    )
    work.host("echo old >to/gone")
    work.inside("rsync -a --delete from/ to/")
    assert (
        work.host("diff -r from to; stat -c '%a %Y' to/d/f; readlink to/l; ls to")
        == "640 978307200\nd/f\nd\nl\n"
    )
    assert work.inside("rsync -ain --omit-dir-times --delete from/ to/").out == b""


def test_process_substitution(work: Work) -> None:
    """bash: <( ) and >( ), here strings, coprocesses."""
    ended = work.inside(
        "diff <(printf 'a\\nb\\n') <(printf 'a\\nb\\n') && echo same; cat <(echo one) <(echo two);"
        "tee >(cat >copied) <<<text >/dev/null; wait $!; cat copied; read -r x < <(echo last); echo $x",
        shell="bash",
    )
    assert ended.out == b"same\none\ntwo\ntext\nlast\n"


def test_process_pool(work: Work) -> None:
    """ProcessPoolExecutor by fork, spawn and forkserver, with shared memory and a lock."""
    work.file(
        "pool.py",
        """
import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import shared_memory

def square(x):
    return x * x

if __name__ == "__main__":
    block = shared_memory.SharedMemory(create=True, size=64)
    for method in ("fork", "spawn", "forkserver"):
        context = mp.get_context(method)
        with context.Manager() as manager, ProcessPoolExecutor(2, mp_context=context) as pool:
            print(method, sum(pool.map(square, range(100))), manager.list([1]))
    block.close()
    block.unlink()
""",
    )
    ended = work.inside(f"{PYTHON} pool.py")
    assert ended.out.splitlines() == [f"{m} 328350 [1]".encode() for m in ("fork", "spawn", "forkserver")]
