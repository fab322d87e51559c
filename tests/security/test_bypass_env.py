"""The caller's environment and descriptors: nothing of it runs in Casemate or gets inside unasked."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.security.engines import ENGINE, Engine, Nothing, Request, acts_command
from tests.security.lab import PYTHON, drop_to, give

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Runner
    from tests.security.lab import Scene

pytestmark = [pytest.mark.security, pytest.mark.root]

EVIL = "import os\nos.close(os.open({mark!r}, os.O_CREAT | os.O_WRONLY, 0o644))\n"


def hostile_python(scene: Scene) -> tuple[dict[str, str], Path]:
    """Every way a caller's environment makes a Python start run foreign code; returns it and the marks."""
    place = scene.ws.parent / "evil"
    marks = scene.ws.parent / "marks"
    user_site = scene.world.home / ".local/lib/python3.11/site-packages"
    base_site = place / "base/lib/python3.11/site-packages"
    for directory in (place, marks, user_site, base_site):
        directory.mkdir(parents=True, exist_ok=True)
    names = (
        "json",
        "msgspec",
        "tomllib",
        "ctypes",
        "sitecustomize",
        "usercustomize",
        "casemate",
        "selectors",
    )
    for name in names:
        (place / f"{name}.py").write_text(EVIL.format(mark=str(marks / f"path-{name}")))
    for site, label in ((user_site, "user"), (base_site, "base")):
        line = EVIL.format(mark=str(marks / f"pth-{label}")).strip().replace("\n", "; ")
        (site / "evil.pth").write_text(line + "\n")
        (site / "usercustomize.py").write_text(EVIL.format(mark=str(marks / f"custom-{label}")))
    (place / "startup.py").write_text(EVIL.format(mark=str(marks / "startup")))
    give(scene.ws.parent, scene.world.uid)
    give(scene.world.home, scene.world.uid)
    return {
        "PYTHONPATH": str(place), "PYTHONSTARTUP": str(place / "startup.py"), "PYTHONINSPECT": "1",
        "PYTHONUSERBASE": str(place / "base"), "PYTHONWARNINGS": "error::evil.Warning",
        "PYTHONBREAKPOINT": "evil",
        "PYTHONDEVMODE": "1", "PYTHONPLATLIBDIR": "evil", "PYTHONPYCACHEPREFIX": str(place / "cache"),
    }, marks  # fmt: skip


def test_hostile_python_environment(casemate: Runner, scene: Scene) -> None:
    """PYTHON* variables, .pth files and custom modules of the caller run nothing and change nothing."""
    env, marks = hostile_python(scene)
    outcome = casemate.acts("procs.own_environ", how={"env": env})
    assert not list(marks.iterdir()), [path.name for path in marks.iterdir()]
    assert outcome.code == 0, outcome.brief()
    assert not [line for line in outcome.records["procs.own_environ"]["data"].splitlines() if "evil" in line]
    home = {**env, "PYTHONHOME": str(scene.ws.parent / "evil")}
    assert casemate("/bin/true", env=home).code == 0, "PYTHONHOME broke the start"
    # The control: an ordinary Python start does run them.
    subprocess.run(
        [*drop_to(scene.world.uid), PYTHON, "-c", "import json"], check=False, capture_output=True,
        env={**scene.world.environment(), **{name: env[name] for name in ("PYTHONPATH", "PYTHONUSERBASE")}},
    )  # fmt: skip
    ran = {path.name for path in marks.iterdir()}
    assert {"path-sitecustomize", "pth-base"} <= ran, ran


def test_hostile_workspace_as_current_directory(casemate: Runner, scene: Scene) -> None:
    """Modules of the workspace shadow nothing of Casemate, however it is started there."""
    _, marks = hostile_python(scene)
    for name in ("json", "msgspec", "casemate", "os", "ctypes"):
        (scene.ws / f"{name}.py").write_text(EVIL.format(mark=str(marks / f"cwd-{name}")))
    (scene.ws / "pyvenv.cfg").write_text(f"home = {scene.ws}\n")
    outcome = casemate("/bin/true")
    assert outcome.code == 0, outcome.brief()
    command = scene.world.command
    assert command is not None
    module = [*drop_to(scene.world.uid), str(command.parent / "python3"), "-I", "-m", "casemate", "run", "--"]
    ran = subprocess.run(
        [*module, "/bin/true"], cwd=scene.ws, env=scene.world.environment(), capture_output=True, check=False
    )
    assert ran.returncode == 0, ran
    assert not list(marks.iterdir()), [path.name for path in marks.iterdir()]


def test_variables_that_run_code_stay_outside(casemate: Runner, scene: Scene) -> None:
    """What would run code or lead to a secret inside is not passed; --env passes exactly what it names."""
    variables = {
        "LD_PRELOAD": "/nowhere/x.so", "LD_LIBRARY_PATH": "/nowhere", "LD_AUDIT": "/nowhere/y.so",
        "BASH_ENV": "/nowhere/b", "ENV": "/nowhere/e", "BASH_FUNC_ls%%": "() { echo x; }",
        "PYTHONPATH": "/nowhere", "NODE_OPTIONS": "--require=/nowhere", "PERL5OPT": "-Mx", "RUBYOPT": "-rx",
        "GIT_SSH_COMMAND": "x", "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.fsmonitor",
        "GIT_CONFIG_VALUE_0": "x", "SSH_AUTH_SOCK": "/nowhere/agent",
        "DBUS_SESSION_BUS_ADDRESS": "unix:path=/n",
        "DOCKER_HOST": "unix:///nowhere", "WAYLAND_DISPLAY": "w",
        "DISPLAY": ":0", "XAUTHORITY": "/nowhere/x", "KUBECONFIG": "/nowhere/k", "NPM_TOKEN": "t",
        "ANTHROPIC_API_KEY": "t", "OPENAI_API_KEY": "t", "MY_PASSWORD": "t", "PIP_INDEX_URL": "https://u:pw@h.example/s",
    }  # fmt: skip
    outcome = casemate.acts("procs.own_environ", how={"env": variables}, flags=("--env", "CHOSEN=value"))
    inside = dict(
        line.split("=", 1)
        for line in outcome.records["procs.own_environ"]["data"].splitlines()
        if "=" in line
    )
    passed = {name for name in variables if inside.get(name) == variables[name]}
    assert not passed, passed
    assert "pw@" not in str(inside), "a credential in an index URL was passed"
    assert inside["CHOSEN"] == "value"
    assert inside["HOME"] != str(scene.world.home)
    assert inside["CASEMATE_SANDBOX"] == "process"
    bare = casemate.bare("procs.own_environ", how={"env": {"MY_PASSWORD": "t"}})
    assert "MY_PASSWORD=t" in bare.records["procs.own_environ"]["data"]


def test_descriptors_of_the_caller(casemate: Runner, scene: Scene) -> None:
    """No descriptor above 2 gets in: files, directories, sockets, pipes, at low and high numbers."""
    import socket

    secret = os.open(scene.world.home / ".ssh/id_rsa", os.O_RDONLY)
    directory = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    one, two = socket.socketpair()
    wanted = {3: secret, 9: directory, 77: secret, 255: one.fileno(), 1023: directory}
    saved = {}
    try:
        for number, source in wanted.items():
            if number not in (secret, directory, one.fileno(), two.fileno()):
                try:
                    saved[number] = os.dup(number)
                except OSError:
                    saved[number] = -1
                os.dup2(source, number)
        passed = tuple(saved)
        outcome = casemate.acts("procs.inherited_fds", how={"pass_fds": passed})
        record = outcome.records["procs.inherited_fds"]
        assert scene.world.secret not in record["data"]
        foreign = [row for row in record["fds"] if row[0] in passed and not row[1].startswith("pipe:")]
        assert not [row for row in foreign if "/proc/" not in row[1]], record["fds"]
        control = casemate.bare("procs.inherited_fds", how={"pass_fds": passed})
        assert scene.world.secret in control.records["procs.inherited_fds"]["data"]
    finally:
        for number, old in saved.items():
            os.dup2(old, number) if old >= 0 else os.close(number)
            if old >= 0:
                os.close(old)
        for number in (secret, directory):
            os.close(number)
        one.close()
        two.close()


def test_closed_standard_descriptors(casemate: Runner, scene: Scene) -> None:
    """A caller with 0, 1 and 2 closed gives the command no other file in their place."""
    argv = [
        *drop_to(scene.world.uid),
        *ENGINE.argv(Request(scene, ["/bin/sh", "-c", "ls -l /proc/self/fd >fds.txt"])),
    ]
    closer = "import os, sys; os.closerange(0, 3); os.execv(sys.argv[1], sys.argv[1:])"
    argv[0] = argv[0] if argv[0].startswith("/") else "/usr/bin/" + argv[0]
    subprocess.run(
        [PYTHON, "-I", "-S", "-c", closer, *argv], cwd=scene.ws, env=scene.world.environment(), check=False
    )
    listing = (scene.ws / "fds.txt").read_text() if (scene.ws / "fds.txt").exists() else ""
    for mark in ("casemate-attack", "/var/lib", "/run/", "mountinfo", "cgroup", ".lock"):
        assert mark not in listing.replace(str(scene.ws), ""), listing


def test_standard_descriptors_are_streams(casemate: Runner, scene: Scene) -> None:
    """The caller's files as stdin and stdout are streams inside: not to be cut, overwritten or reread."""
    source, log = scene.ws.parent / "source.txt", scene.ws.parent / "log.txt"
    python = acts_command(scene, ["procs.standard_descriptors"])
    argv = ["/bin/sh", "-c", 'exec 9<&0 </dev/null; exec "$@"', "sh", *python]

    def run(engine: Engine) -> dict[str, dict[str, object]]:
        handles = []
        for path in (source, log):
            path.write_text("what was there before\n")
            path.chmod(0o600)
            os.chown(path, scene.world.uid, scene.world.uid)
            handles.append(os.open(path, os.O_RDWR))
            os.lseek(handles[-1], 0, os.SEEK_END)
        try:
            engine.run(Request(scene, argv, stdin=handles[0], stdout=handles[1]))
        finally:
            for handle in handles:
                os.close(handle)
        result: dict[str, dict[str, object]] = json.loads((scene.ws / "descriptors.json").read_text())
        (scene.ws / "descriptors.json").unlink()
        return result

    got = run(ENGINE)
    assert not [name for name, value in got.items() if value["ok"]], got
    assert source.read_text() == "what was there before\n"
    text = log.read_text()
    assert text.startswith("what was there before\n"), text
    assert "@@ {" in text, "the output itself arrives"
    for path in (source, log):
        info = path.stat()
        assert (info.st_uid, info.st_mode & 0o777) == (scene.world.uid, 0o600), "owner or mode changed"
    control = run(Nothing())
    assert all(value["ok"] for value in control.values()), control


def test_directory_as_standard_input(casemate: Runner, scene: Scene) -> None:
    """A directory of the host as stdin is no way to the files below it."""
    name = f"{scene.outside}/target.txt".lstrip("/")
    argv = ["/bin/sh", "-c", f"cat /proc/self/fd/0/{name}; cd /proc/self/fd/0/ && cat {name}"]
    for engine, seen in ((ENGINE, False), (Nothing(), True)):
        root = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
        try:
            outcome = engine.run(Request(scene, argv, stdin=root))
        finally:
            os.close(root)
        assert ("untouched" in outcome.stdout) is seen, outcome.brief()


def test_unusable_state_directory(casemate: Runner, scene: Scene) -> None:
    """State that cannot be made stops the run with Casemate's own code, and without a traceback."""
    if scene.world.uid == 0:
        # Root's state has a fixed place, which no variable moves.
        outcome = casemate("/bin/echo", "started", env={"XDG_RUNTIME_DIR": "/nowhere/run"})
        assert outcome.code == 0, outcome.brief()
        return
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        outcome = casemate("/bin/echo", "started", env={name: "/proc/nowhere"})
        assert outcome.code == 125, outcome.brief()
        assert "started" not in outcome.stdout
        assert "Traceback" not in outcome.stderr, outcome.stderr
