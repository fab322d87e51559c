"""``bin/casemate`` starts the right interpreter, isolated, from wherever it was installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.tree import ROOT

SCRIPT = ROOT / "bin" / "casemate"
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
INTERPRETER = Path(os.path.realpath(sys.executable))

# Stands in for the command: tells how it was started.
ENTRY = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv[1:],
    "executable": sys.executable,
    "file": os.path.realpath(__file__),
    "isolated": sys.flags.isolated,
    "no_site": sys.flags.no_site,
    "site": "site" in sys.modules,
    "pid": os.getpid(),
}))
"""

ODD_ARGUMENTS = ["run", "--", "", "two words", "*", "a\nb", "$HOME", "--", "-I", "'\"\\"]


def install(prefix: Path, *, interpreter: bool = True) -> Path:
    """What pip makes of the wheel, with ENTRY as the command; returns the script."""
    entry = prefix / "lib" / VERSION / "site-packages" / "casemate" / "cli" / "entry.py"
    entry.parent.mkdir(parents=True)
    entry.write_text(ENTRY)
    script = prefix / "bin" / "casemate"
    script.parent.mkdir()
    shutil.copy(SCRIPT, script)
    if interpreter:
        (prefix / "pyvenv.cfg").write_text(f"home = {INTERPRETER.parent}\n")
        (script.parent / "python3").symlink_to(INTERPRETER)
    return script


def start(
    command: list[str], env: dict[str, str] | None = None, cwd: Path | None = None
) -> dict[str, object]:
    """What ENTRY tells."""
    child = subprocess.Popen(
        command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    told: dict[str, object] = json.loads(out)
    assert told.pop("pid") == child.pid, "the interpreter replaced the shell"
    return told


def test_arguments_and_flags(tmp_path: Path) -> None:
    """The interpreter beside the script runs the package beside it, with -I and -S, arguments untouched."""
    script = install(tmp_path / "pre fix")
    told = start([str(script), *ODD_ARGUMENTS])
    assert told == {
        "argv": ODD_ARGUMENTS,
        "executable": str(script.parent / "python3"),
        "file": str(tmp_path / "pre fix/lib" / VERSION / "site-packages/casemate/cli/entry.py"),
        "isolated": 1,
        "no_site": 1,
        "site": False,
    }


def test_every_way_to_name_it(tmp_path: Path) -> None:
    """Found along PATH, by a relative path, by a link, by a link to a link, by ``sh``: the same package."""
    script = install(tmp_path / "venv")
    bin_dir, links = script.parent, tmp_path / "links"
    links.mkdir()
    (links / "casemate").symlink_to(script)
    (links / "relative").symlink_to("../venv/bin/casemate")
    (links / "second").symlink_to("relative")
    (tmp_path / "moved").symlink_to(bin_dir)
    path = {"PATH": f"{links}:{os.environ['PATH']}"}
    entry = start([str(script)])["file"]
    for command, env, cwd in (
        (["casemate"], path, None),
        (["./casemate"], None, bin_dir),
        (["bin/casemate"], None, bin_dir.parent),
        ([str(links / "casemate")], None, None),
        ([str(links / "relative")], None, None),
        ([str(links / "second")], None, None),
        ([str(tmp_path / "moved" / "casemate")], None, None),
        (["sh", "casemate"], None, bin_dir),
    ):
        told = start(["/usr/bin/env", *command], env=env, cwd=cwd)
        assert os.path.realpath(str(told["file"])) == entry, command


def test_the_usual_path_needs_no_other_program(tmp_path: Path) -> None:
    """Called by its own path, the script finds everything by itself: PATH may hold nothing at all."""
    script = install(tmp_path / "venv")
    assert start([str(script)], env={"PATH": str(tmp_path / "none")})["isolated"] == 1


def test_without_an_interpreter_beside(tmp_path: Path) -> None:
    """Where only the package lies beside the script (``pip install --user``), PATH has the interpreter."""
    script = install(tmp_path / "local", interpreter=False)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / VERSION).symlink_to(INTERPRETER)
    told = start([str(script), "x"], env={"PATH": f"{tools}:/usr/bin:/bin"})
    assert (told["argv"], told["isolated"], told["executable"]) == (["x"], 1, str(tools / VERSION))


def test_nothing_installed(tmp_path: Path) -> None:
    """A script without a package says so and ends with the code of a failed sandbox."""
    shutil.copy(SCRIPT, tmp_path / "casemate")
    done = subprocess.run([str(tmp_path / "casemate"), "run"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 125
    assert "no installation found" in done.stderr


@pytest.fixture
def hostile(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """An environment in which every hook of shell and interpreter writes a mark; and the mark's place."""
    mark = tmp_path / "mark"
    python = f"open({str(mark)!r}, 'a').write('python ')\n"
    code, home = tmp_path / "code", tmp_path / "home"
    user_site = home / ".local" / "lib" / VERSION / "site-packages"
    user_site.mkdir(parents=True)
    code.mkdir()
    for name in ("sitecustomize", "usercustomize", "json", "os", "encodings", "casemate"):
        (code / f"{name}.py").write_text(python)
    (user_site / "evil.pth").write_text(f"import sys; {python}")
    (tmp_path / "shell").write_text(f"echo shell >>{mark}\n")
    return {
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(code),
        "PYTHONSTARTUP": str(code / "sitecustomize.py"),
        "PYTHONUSERBASE": str(home / ".local"),
        "PYTHONINSPECT": "1",
        "ENV": str(tmp_path / "shell"),
        "BASH_ENV": str(tmp_path / "shell"),
        "CDPATH": str(code),
        "IFS": "/",
    }, mark


def test_hostile_environment(tmp_path: Path, hostile: tuple[dict[str, str], Path]) -> None:
    """Whatever PYTHON* variables, user-site .pth files and shell start files say, nothing of it runs."""
    env, mark = hostile
    script = install(tmp_path / "venv")
    told = start(
        [str(script), "a b"], env={**env, "PYTHONHOME": str(tmp_path / "none")}, cwd=tmp_path / "code"
    )
    assert (told["argv"], told["isolated"]) == (["a b"], 1)
    assert not mark.exists()


def test_hostile_environment_is_hostile(hostile: tuple[dict[str, str], Path]) -> None:
    """Control: in the same environment an ordinary interpreter runs the caller's code."""
    env, mark = hostile
    del env["PYTHONPATH"]  # its fake `os` would not even let an interpreter start
    subprocess.run([str(INTERPRETER), "-c", ""], env=env, stdin=subprocess.DEVNULL, timeout=60)
    assert "python" in mark.read_text()


def environment(tmp_path: Path) -> Path:
    """A fresh virtual environment that sees the build tools of this one."""
    venv = tmp_path / "fresh"
    subprocess.run([str(INTERPRETER), "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60)
    tools = Path(pytest.__file__).parents[1]
    (venv / "lib" / VERSION / "site-packages" / "tools.pth").write_text(f"{tools}\n")
    return venv


@pytest.mark.parametrize("how", ["wheel", "editable"])
def test_real_installation(tmp_path: Path, how: str) -> None:
    """pip puts the script into a fresh environment, from a wheel and editable; it names its version."""
    venv = environment(tmp_path)
    pip = [sys.executable, "-I", "-m", "pip", "--python", str(venv / "bin" / "python"), "--quiet", "install"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    target = ["-e", str(ROOT)] if how == "editable" else [str(ROOT)]
    subprocess.run([*pip, *options, "--ignore-installed", *target], check=True, timeout=100)
    link = tmp_path / "casemate"
    link.symlink_to(venv / "bin" / "casemate")
    for command in (venv / "bin" / "casemate", link):
        done = subprocess.run([str(command), "--version"], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert "0." in done.stdout
