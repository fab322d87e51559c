"""What Casemate itself reads on the host before and after a command: none of it opens a door."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.security.engines import ENGINE, Request
from tests.security.lab import drop_to, give

if TYPE_CHECKING:
    from tests.conftest import Runner
    from tests.security.lab import Scene

pytestmark = [pytest.mark.security, pytest.mark.root]


def readable(casemate: Runner, scene: Scene, *paths: str, **how: object) -> str:
    """All that the command could read of the paths."""
    outcome = casemate.acts("files.read_paths", paths=list(paths), how=dict(how))
    return str(outcome.records["files.read_paths"]["data"])


@pytest.mark.parametrize(
    "entry",
    [
        "{home}", "{home}/.ssh", "{home}/.aws", "{home}/bin", "{home}/bin/..", "{home}/tools", "/",
        "/proc/self/root", "{home}/.local/bin", "{outside}", "", ".", "..", "{ws}/../../home", "/root",
        "/var/lib", "/run", "/home",
    ],
)  # fmt: skip
def test_path_opens_no_secret(casemate: Runner, scene: Scene, entry: str) -> None:
    """Whatever directory stands on PATH, secrets of the home and its neighbours stay unreadable."""
    home = scene.world.home
    for name in ("bin", ".local/bin"):
        (home / name).mkdir(parents=True, exist_ok=True)
        (home / name / "tool").write_text("#!/bin/sh\n")
        (home / name / "tool").chmod(0o755)
    link = home / "tools"
    if not link.is_symlink():
        link.symlink_to(home)
    give(home, scene.world.uid)
    word = entry.format(home=home, outside=scene.outside, ws=scene.ws)
    path = f"{word}:{scene.world.environment()['PATH']}:{word}"
    paths = [f"{home}/.ssh/id_rsa", f"{home}/.aws/credentials", f"{home}/tools/.ssh/id_rsa"]
    paths += [f"{home}/bin/../.ssh/id_rsa", "/root/.npmrc", "/root/.gitconfig"]
    data = readable(casemate, scene, *paths, env={"PATH": path})
    assert scene.world.secret not in data
    control = casemate.bare("files.read_paths", paths=paths[:1])
    assert scene.world.secret in control.records["files.read_paths"]["data"]


def test_files_of_the_workspace_open_nothing(casemate: Runner, scene: Scene) -> None:
    """Settings that a project holds (environments, package managers, git) bring no host file in."""
    home, ws = scene.world.home, scene.ws
    secret = f"{home}/.ssh/id_rsa"
    fake = scene.ws.parent / "python"
    (fake / "bin").mkdir(parents=True)
    (fake / "share").mkdir()
    (fake / "share/secret.txt").write_text(scene.world.secret)
    texts = {
        ".venv/pyvenv.cfg": f"home = {home}/.ssh\nversion = 3.11.2\n",
        "venv/pyvenv.cfg": f"home = {fake}/bin\nversion = 3.11.2\n",
        "env/pyvenv.cfg": f"home = {home}/bin/../.ssh\n",
        ".npmrc": f"cafile={secret}\nregistry=file://{secret}\n",
        "pip.conf": f"[global]\ncert = {secret}\nfind-links = {home}/.ssh\n",
        ".cargo/config.toml": f'[http]\ncainfo = "{secret}"\n',
        "constraints.txt": f"-c {secret}\n",
        "requirements.txt": f"-r {secret}\n--find-links {home}/.ssh\n",
        ".python-version": "../../../../..\n",
        ".tool-versions": f"python path:{home}/.ssh\n",
        ".nvmrc": f"../../../..{home}\n",
        "rust-toolchain.toml": f'[toolchain]\npath = "{home}/.ssh"\n',
        ".gitconfig": f"[include]\n\tpath = {secret}\n",
    }
    for name, text in texts.items():
        (ws / name).parent.mkdir(exist_ok=True)
        (ws / name).write_text(text)
    (ws / ".venv/bin").mkdir()
    (ws / ".venv/bin/python").symlink_to(secret)
    (ws / "node_modules/.bin/tool").symlink_to(f"{home}/.aws/credentials")
    with (ws / ".git/config").open("a") as stream:
        stream.write(f"[include]\n\tpath = {secret}\n[core]\n\thooksPath = {home}/.ssh\n")
    give(ws.parent, scene.world.uid)
    path = f"{ws}/.venv/bin:{ws}/node_modules/.bin:{scene.world.environment()['PATH']}"
    env = {"PATH": path, "VIRTUAL_ENV": f"{ws}/venv"}
    paths = [secret, f"{ws}/.venv/bin/python", f"{ws}/node_modules/.bin/tool", f"{home}/.aws/credentials",
             f"{fake}/share/secret.txt"]  # fmt: skip
    assert scene.world.secret not in readable(casemate, scene, *paths, env=env)
    control = casemate.bare("files.read_paths", paths=paths)
    assert control.records["files.read_paths"]["data"].count(scene.world.secret) == len(paths)


@pytest.mark.parametrize(
    "name", ["PIP_CERT", "SSL_CERT_FILE", "NPM_CONFIG_CAFILE", "PIP_CONFIG_FILE", "CARGO_HOME"]
)
def test_variables_that_name_files(casemate: Runner, scene: Scene, name: str) -> None:
    """A variable for certificates or settings that names a private file does not bring it in."""
    home = scene.world.home
    value = f"{home}/.aws" if name == "CARGO_HOME" else f"{home}/.ssh/id_rsa"
    paths = [f"{home}/.ssh/id_rsa", f"{home}/.aws/credentials"]
    outcome = casemate.acts("files.read_paths", "procs.own_environ", paths=paths, how={"env": {name: value}})
    assert scene.world.secret not in outcome.stdout


def test_names_cannot_speak_to_the_terminal(casemate: Runner, scene: Scene) -> None:
    """Names out of a sandbox are shown escaped: no control character of one reaches the caller's terminal."""
    evil = "\\033]0;owned\\007\\033[2J\\r\\nheld back: nothing"
    script = f'd=$(printf \'{evil}\'); mkdir -p "$d/.vscode" .husky; : >"$d/.vscode/x"; : >".husky/$d"'
    script += '; ln -s /nowhere "$d/link"; printf \'x\' >"$d/run"; chmod 755 "$d/run"; exit 3'
    for outcome in (casemate("/bin/bash", "-c", script), casemate("/bin/bash", "-c", script, tty=True)):
        assert outcome.code == 3, outcome.brief()
        said = outcome.stderr + outcome.stdout
        assert "owned" in said, "the control: the name is shown at all"
        assert "\033" not in said, said
        assert "\007" not in said
        assert "\nheld back: nothing" not in said


@pytest.mark.parametrize("name", ["/etc/hostname", "/etc/os-release", "/usr/share/doc/bash", "private"])
def test_denied_paths_are_hidden(casemate: Runner, scene: Scene, name: str) -> None:
    """A denied path of the system or the workspace is unreadable by every way that leads to it."""
    if name == "private":
        (scene.ws / "private/deep").mkdir(parents=True)
        (scene.ws / "private/deep/file").write_text(scene.world.secret)
        give(scene.ws, scene.world.uid)
    real = os.path.realpath(scene.ws / name)
    policy = scene.ws.parent / "policy.toml"
    policy.write_text(f'version = 1\n[filesystem]\ndeny = ["{name}"]\n')
    policy.chmod(0o644)
    inner = f"{real}/deep/file" if name == "private" else real
    if os.path.isdir(inner):
        inner = next(str(path) for path in Path(inner).rglob("*") if path.is_file())
    ways = [inner, f"/proc/self/root{inner}", f"/proc/self/cwd/../../../../..{inner}", f"/proc/1/root{inner}"]
    denied = casemate.acts("files.read_paths", paths=ways, flags=("--policy", str(policy)))
    opened = [path for path, value in denied.records["files.read_paths"]["made"].items() if value.get("data")]
    assert not opened, denied.brief()
    script = (
        f'mv "{real}" "{real}.x" 2>/dev/null; cat "{real}.x"/deep/file "{real}.x"; ln "{inner}" x && cat x'
    )
    moved = casemate("/bin/sh", "-c", script, flags=("--policy", str(policy)))
    assert scene.world.secret not in moved.stdout
    control = casemate.acts("files.read_paths", paths=ways[:1])
    assert control.records["files.read_paths"]["made"][inner]["ok"], control.brief()


def test_workspace_of_another_owner(casemate: Runner, scene: Scene) -> None:
    """Root in a workspace of uid 1000: it works, and what is made belongs to the workspace's owner."""
    if scene.world.uid != 0:
        # As uid 1000 the counterpart: a workspace of root's is readable and nothing in it changes.
        os.chown(scene.ws, 0, 0)
        for base, directories, names in os.walk(scene.ws):
            for entry in [*directories, *names]:
                os.lchown(os.path.join(base, entry), 0, 0)
        outcome = casemate("/bin/sh", "-c", "echo changed >README.md; echo made >new.txt; exit 0")
        assert (scene.ws / "README.md").read_text() == "a project\n", outcome.brief()
        assert not (scene.ws / "new.txt").exists()
        return
    give(scene.ws.parent, 1000)
    outcome = casemate("/bin/sh", "-c", "mkdir made; echo x >made/file; echo y >>README.md; exit 0")
    assert outcome.code == 0, outcome.brief()
    for name in ("made", "made/file", "README.md"):
        info = (scene.ws / name).stat()
        assert (info.st_uid, info.st_gid) == (1000, 1000), name


def test_overlay_attributes(casemate: Runner, scene: Scene) -> None:
    """Attributes that an overlay obeys, set by the command, redirect and remove nothing on the host."""
    script = (
        "import os\n"
        "os.makedirs('made/sub'); open('made/file', 'w').write('x')\n"
        "done = []\n"
        "for space in ('user.overlay.', 'trusted.overlay.', 'user.overlay.overlay.'):\n"
        "    for key, value in (('opaque', b'y'), ('redirect', b'/../../outside'), ('metacopy', b''),\n"
        "                       ('origin', b'\\0' * 24), ('whiteout', b'y'), ('upper', b'\\0')):\n"
        "        for path in ('made', 'made/file', 'src', 'src/app.py', '.'):\n"
        "            try:\n"
        "                os.setxattr(path, space + key, value); done.append((path, space + key))\n"
        "            except OSError:\n"
        "                pass\n"
        "for name in ('made/gone', 'README.md.gone'):\n"
        "    try:\n"
        "        os.mknod(name, 0o20600, 0); done.append(name)\n"
        "    except OSError:\n"
        "        pass\n"
        "print(len(done), 'set')\n"
    )
    outcome = casemate("/usr/bin/python3", "-I", "-S", "-c", script)
    assert "set" in outcome.stdout, outcome.brief()
    assert not scene.outside_changed()
    assert (scene.ws / "src/app.py").read_text() == "print('hello')\n", outcome.brief()
    assert (scene.ws / "README.md").exists()
    assert not (scene.ws / "made/target.txt").exists()
    for base, directories, names in os.walk(scene.ws):
        for name in [*directories, *names]:
            listed = os.listxattr(os.path.join(base, name), follow_symlinks=False)
            assert not [key for key in listed if "overlay" in key], (name, listed)


def test_a_report_is_written_where_the_caller_said(casemate: Runner, scene: Scene) -> None:
    """A link that the command puts in the place of the report sends it nowhere else."""
    target = scene.outside / "target.txt"
    argv = ENGINE.argv(Request(scene, ["/bin/sh", "-c", f"rm -f out.json; ln -s {target} out.json; exit 0"]))
    argv[argv.index("--report") + 1] = "out.json"
    subprocess.run(
        [*drop_to(scene.world.uid), *argv], cwd=scene.ws, env=scene.world.environment(),
        capture_output=True, check=False,
    )  # fmt: skip
    assert not scene.outside_changed()
    assert not (scene.ws / "out.json").is_symlink()


def test_the_view_stays_private_while_it_runs(casemate: Runner, scene: Scene) -> None:
    """Other users cannot read what a running command writes: tops and state are closed to them."""
    script = f"echo {scene.world.secret} >made.txt; chmod 666 made.txt; chmod 777 .; echo started; sleep 2"
    argv = [*drop_to(scene.world.uid), *ENGINE.argv(Request(scene, ["/bin/sh", "-c", script]))]
    process = subprocess.Popen(
        argv, cwd=scene.ws, env=scene.world.environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    state = ["/run/casemate", "/var/lib/casemate"]
    if scene.world.uid:
        state = [str(scene.world.home / ".local/state/casemate")]
        scene.world.home.chmod(0o755)
    find = ["find", *state, "-name", "made.txt", "-readable"]
    stranger = subprocess.run([*drop_to(4242), *find], capture_output=True, text=True, check=False)
    process.terminate()
    process.wait(10)
    process.stdout.close()
    assert not stranger.stdout.strip(), stranger.stdout


def test_nothing_is_executed_from_the_workspace_by_casemate(casemate: Runner, scene: Scene) -> None:
    """Programs of the workspace with the names of tools are not run by Casemate itself on the host."""
    marks = scene.ws.parent / "marks"
    marks.mkdir()
    place = scene.ws / "node_modules/.bin"
    for name in (
        "git",
        "python3",
        "sh",
        "mount",
        "umount",
        "newuidmap",
        "readlink",
        "id",
        "npm",
        "pip",
        "rustc",
    ):
        (place / name).write_text(f'#!/bin/sh\n: >"{marks}/{name}"\n')
        (place / name).chmod(0o755)
    give(scene.ws.parent, scene.world.uid)
    path = f"{place}:{scene.world.environment()['PATH']}"
    outcome = casemate("/bin/true", env={"PATH": path})
    assert outcome.code == 0, outcome.brief()
    assert not list(marks.iterdir()), [entry.name for entry in marks.iterdir()]
    subprocess.run([place / "git"], check=True)
    assert [entry.name for entry in marks.iterdir()] == ["git"], "the control leaves a mark"
    shutil.rmtree(marks)
