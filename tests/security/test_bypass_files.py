"""Files: protected names in every disguise, links, special files, and that ordinary work arrives."""

from __future__ import annotations

import os
import socket
import stat
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Runner
    from tests.security.lab import Scene

pytestmark = [pytest.mark.security, pytest.mark.root]

PROTECTED = [
    ".bashrc",
    ".bash_profile",
    ".bash_login",
    ".bash_logout",
    ".zshrc",
    ".zprofile",
    ".zshenv",
    ".zlogin",
    ".profile",
    ".envrc",
    ".mcp.json",
    ".vscode/tasks.json",
    ".idea/workspace.xml",
    ".devcontainer/devcontainer.json",
    ".devcontainer.json",
    "project.code-workspace",
    ".husky/pre-commit",
    ".pre-commit-config.yaml",
    ".claude/settings.json",
    ".claude/commands/x.md",
    ".codex/config.toml",
    ".cursor/mcp.json",
    ".gemini/settings.json",
    "casemate.toml",
    ".casemate/policy.toml",
    ".npmrc",
    ".yarnrc",
    ".yarnrc.yml",
    ".pnpmfile.cjs",
    "pip.conf",
    ".github/workflows/ci.yml",
    ".gitlab-ci.yml",
    "CLAUDE.md",
    "AGENTS.md",
]
# What a directory with case folding (ext4, APFS, NTFS) reads as the same names.
FOLDED = [
    ".MCP.JSON",
    ".Vscode/tasks.json",
    ".v\u017fcode/tasks.json",
    ".CLAUDE/settings.json",
    ".Husky/pre-commit",
    ".hu\u017fky/pre-commit",
    ".EnvRC",
    ".GIT/hooks/pre-commit",
    ".Git/config",
    "CaseMate.toml",
    ".BASHRC",
    ".GitModules",
]


def test_names_that_do_not_exist_yet(casemate: Runner, scene: Scene) -> None:
    """No protected name arrives, whether the host has it already or not, at the top or deep below."""
    names = [prefix + name for prefix in ("", "fresh/deep/") for name in PROTECTED]
    outcome = casemate.acts("files.names", names=[*names, "control.txt", "fresh/deep/control.txt"])
    assert len(outcome.records["files.names"]["wrote"]) == len(names) + 2, "inside, every write works"
    carried = set(scene.carries()) - {"alive.txt"}
    assert carried == {"control.txt", "fresh/deep/control.txt"}, outcome.brief()
    casemate.bare("files.names", names=names)
    assert set(names) <= set(scene.carries()), "the control did not write"


def test_names_in_other_case(casemate: Runner, scene: Scene) -> None:
    """Names are compared as a file system that folds case would."""
    outcome = casemate.acts("files.names", names=[*FOLDED, "control.txt"])
    assert set(scene.carries()) - {"alive.txt"} == {"control.txt"}, outcome.brief()
    casemate.bare("files.names", names=list(FOLDED))
    assert set(FOLDED) <= set(scene.carries()), "the control did not write"


def test_protected_names_by_other_ways(casemate: Runner, scene: Scene) -> None:
    """Rename, link, hard link, replacement of a whole directory and removal do not reach them either."""
    outcome = casemate.acts("files.protected_tricks")
    through = [name for name in scene.carries() if ".vscode" in name or name in (".claude/settings.json",)]
    assert not through, outcome.brief()
    assert not os.path.lexists(scene.ws / "t2/.vscode"), "a link of that name arrived"
    assert not os.path.lexists(scene.ws / "t3/.mcp.json"), "a hard link of that name arrived"
    assert (scene.ws / ".claude/settings.json").read_text() == "{}\n"
    assert (scene.ws / ".mcp.json").read_text() == "{}\n", "a protected file was removed"
    assert (scene.ws / ".codex/config.toml").read_text() == "# mine\n", "a protected file was removed"
    assert "t3/plain.json" in scene.carries(), "the ordinary name beside it must arrive"
    control = scene.world.scene()
    try:
        casemate.__class__(control).bare("files.protected_tricks")
        wanted = {"t1/.vscode/settings.json", "t3/.mcp.json", "t4/final/.vscode/settings.json"}
        assert wanted <= set(control.carries())
        assert not (control.ws / ".mcp.json").exists()
    finally:
        control.close()


def test_links_that_leave_the_workspace(casemate: Runner, scene: Scene) -> None:
    """A link made inside never lies on the host where a host tool would follow it to the outside."""
    outside = scene.outside
    (scene.ws / "gate").symlink_to(outside)  # the host's own
    bad = [
        ["absolute", f"{outside}/target.txt"],
        ["relative", "../outside/target.txt"],
        ["deep/relative", "../../outside/target.txt"],
        ["parent", ".."],
        ["ssh", f"{scene.world.home}/.ssh"],
        ["chain1", "chain2"],
        ["chain2", "../outside"],
        ["through", "gate/target.txt"],
        ["src", str(outside)],  # instead of a directory of the host
        ["dangling-outside", f"{outside}/not-yet.txt"],
        ["proc", "/proc/self/cwd/../outside/target.txt"],
        ["tmp", "/tmp/anything"],
    ]
    good = [["inside", "README.md"], ["deep/inside", "../README.md"]]
    outcome = casemate.acts("files.links", links=bad + good)
    top = os.path.realpath(scene.ws)
    escaped = []
    for name, _ in bad:
        path = scene.ws / name
        if path.is_symlink() and not os.path.realpath(path).startswith(top + "/"):
            escaped.append(name)
    assert not escaped, f"{escaped}; {outcome.brief()}"
    assert (scene.ws / "src/app.py").is_file(), "a directory of the host gave way to a link"
    for name, target in good:
        assert (scene.ws / name).is_symlink(), f"an ordinary link did not arrive: {name}"
        assert os.readlink(scene.ws / name) == target
    control = scene.world.scene()
    try:
        casemate.__class__(control).bare("files.links", links=[["absolute", str(control.outside)]])
        assert os.path.realpath(control.ws / "absolute") == str(control.outside)
    finally:
        control.close()


def test_special_files_and_modes(casemate: Runner, scene: Scene) -> None:
    """No setuid or setgid bit, FIFO, socket or capability arrives; the plain file does."""
    outcome = casemate.acts("files.special")
    for base, directories, names in os.walk(scene.ws):
        for name in [*directories, *names]:
            info = os.lstat(os.path.join(base, name))
            kind = stat.S_IFMT(info.st_mode)
            if ".lab" in base:
                continue  # the harness made these
            assert kind in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK), f"{name}: {oct(info.st_mode)}"
            if kind == stat.S_IFREG:
                assert not info.st_mode & 0o6000, f"{name}: {oct(info.st_mode)}; {outcome.brief()}"
                attributes = os.listxattr(os.path.join(base, name), follow_symlinks=False)
                assert not [
                    key for key in attributes if key.startswith(("security.", "trusted.", "user.over"))
                ]
            assert info.st_uid == scene.world.uid, f"{name} belongs to {info.st_uid}"
    assert (scene.ws / "suid").is_file(), outcome.brief()
    control = scene.world.scene()
    try:
        casemate.__class__(control).bare("files.special")
        assert (control.ws / "suid").stat().st_mode & 0o4000
        assert stat.S_ISFIFO((control.ws / "fifo").stat().st_mode)
    finally:
        control.close()


def test_ordinary_work_arrives(casemate: Runner, scene: Scene) -> None:
    """New, changed, removed and renamed files, links inside and scripts are on the host afterwards."""
    outcome = casemate.acts("files.plain_work")
    assert (scene.ws / "src/new.py").read_text() == scene.token, outcome.brief()
    assert (scene.ws / "src/app.py").read_text() == scene.token
    assert not (scene.ws / "sub/file.txt").exists()
    assert (scene.ws / "build/final/a.txt").read_text() == scene.token
    assert os.readlink(scene.ws / "build/latest") == "final/a.txt"
    assert (scene.ws / "run.sh").stat().st_mode & 0o111
    assert "run.sh" in str(outcome.applied.get("executables")), "a changed executable is named"


def test_nothing_of_the_sandbox_stays_in_the_workspace(casemate: Runner, scene: Scene) -> None:
    """No placeholder file or directory is left, during the run or after it."""
    before = sorted(str(path) for path in scene.ws.rglob("*"))
    outcome = casemate("/bin/true")
    assert outcome.code == 0, outcome.brief()
    assert sorted(str(path) for path in scene.ws.rglob("*")) == before


def test_socket_of_the_host_inside_the_workspace(casemate: Runner, scene: Scene) -> None:
    """A unix socket that the host listens on is out of reach even when its file is in the workspace."""
    listeners = scene.world.listeners
    path = scene.ws / "dev.sock"
    listeners.add_path(str(path), socket.SOCK_STREAM)
    where: dict[str, Any] = {"path_stream": str(path), "path_dgram": str(path)}
    casemate.acts("net.path_unix", **where)
    assert not listeners.got("ps:" + scene.token)
    casemate.bare("net.path_unix", **where)
    assert listeners.got("ps:" + scene.token, wait=1.0), "the control did not arrive"


def test_canaries_are_not_readable_by_any_path(casemate: Runner, scene: Scene) -> None:
    """Secrets of the caller's home are out of reach by name, by /proc and by what the mounts reveal."""
    home = scene.world.home
    paths = [
        f"{home}/.ssh/id_rsa", f"{home}/.aws/credentials", "/root/.gitconfig", "/root/.npmrc",
        "/root/.bashrc",
        f"/proc/1/root{home}/.ssh/id_rsa", "/proc/self/cwd/../../home/.ssh/id_rsa",
        f"{scene.ws}/../../home/.ssh/id_rsa", f"/proc/1/cwd{home}/.aws/credentials",
        "/proc/kcore", "/proc/kmsg", "/proc/kpageflags", "/dev/mem", "/dev/vda", "/proc/1/mem",
        "/sys/kernel/debug", "/var/lib/casemate", "/run/casemate", "/etc/shadow", "/etc/gshadow",
    ]  # fmt: skip
    outcome = casemate.acts("files.read_paths", paths=paths)
    record = outcome.records["files.read_paths"]
    opened = [path for path, value in record["made"].items() if value["ok"]]
    assert not opened, opened
    control = casemate.bare("files.read_paths", paths=paths[:2])
    assert scene.world.secret in control.records["files.read_paths"]["data"]
