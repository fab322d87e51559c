"""What a PATH needs inside: each manager's programs and libraries, and never its credentials."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from casemate.policy import paths
from casemate.policy.tools import DEFAULT_PATH, Tools, discover

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.policy.conftest import Caller


def find(caller: Caller, *entries: str, **options: object) -> Tools:
    """Discover for a PATH of these directories, relative ones below the home."""
    full = [entry if entry.startswith("/") else f"{caller.places.home}/{entry}" for entry in entries]
    return discover(
        ":".join(full),
        caller.places.home,
        workspace=caller.workspace,
        guard=paths.guard(caller.places),
        **options,  # type: ignore[arg-type]
    )


def home(caller: Caller, *names: str) -> set[str]:
    """Paths below the home."""
    return {f"{caller.places.home}/{name}" for name in names}


def seen(tools: Tools, path: str) -> bool:
    """Whether the sandbox would see ``path``."""
    return any(paths.holds(bind, path) for bind in tools.binds)


def fill(caller: Caller, *names: str) -> None:
    """Make files below the home."""
    for name in names:
        caller.file(f"home/{name}", "x", 0o755)


MANAGERS = {
    "pyenv": (
        (".pyenv/shims", ".pyenv/bin"),
        (".pyenv/libexec/pyenv", ".pyenv/shims/python3", ".pyenv/bin/pyenv", ".pyenv/version",
         ".pyenv/versions/3.12.1/bin/python3", ".pyenv/plugins/x/bin/y"),
        (".pyenv/.git/config", ".pyenv/cache/x"),
        {"PYENV_ROOT": ".pyenv"},
    ),
    "rbenv": (
        (".rbenv/shims",),
        (".rbenv/libexec/rbenv", ".rbenv/shims/ruby", ".rbenv/versions/3/bin/ruby"),
        (".rbenv/secret",),
        {"RBENV_ROOT": ".rbenv"},
    ),
    "cargo and rustup": (
        (".cargo/bin",),
        (".cargo/bin/rustup", ".cargo/bin/cargo", ".rustup/toolchains/stable/bin/rustc",
        ".rustup/settings.toml", ".rustup/update-hashes/stable"),
        (".cargo/credentials.toml", ".cargo/credentials", ".cargo/config.toml", ".cargo/registry/x"),
        {"RUSTUP_HOME": ".rustup"},
    ),
    "nvm": (
        (".nvm/versions/node/v20/bin",),
        (".nvm/versions/node/v20/bin/node", ".nvm/versions/node/v20/lib/node_modules/npm/x", ".nvm/nvm.sh"),
        (".nvm/versions/node/v20/etc/npmrc", ".nvm/.cache/x"),
        {"NVM_DIR": ".nvm"},
    ),
    "volta": (
        (".volta/bin",),
        (".volta/bin/volta-shim", ".volta/tools/image/node/20/bin/node"),
        (".volta/log/x", ".volta/hooks.json"),
        {"VOLTA_HOME": ".volta"},
    ),
    "asdf": (
        (".asdf/shims",),
        (".asdf/shims/node", ".asdf/installs/node/20/bin/node", ".asdf/plugins/node/bin/x", ".asdf/asdf.sh"),
        (".asdf/.git/config", ".asdf/tmp/x"),
        {"ASDF_DATA_DIR": ".asdf", "ASDF_DIR": ".asdf"},
    ),
    "mise": (
        (".local/share/mise/shims",),
        (".local/share/mise/shims/node", ".local/share/mise/installs/node/20/bin/node"),
        (".local/share/mise/http-tarballs/x", ".config/mise/config.toml"),
        {"MISE_DATA_DIR": ".local/share/mise"},
    ),
    "go": (
        ("sdk/go/bin", "go/bin"),
        ("sdk/go/bin/go", "sdk/go/src/fmt/x", "sdk/go/pkg/tool/x", "sdk/go/VERSION", "go/bin/gopls"),
        ("go/pkg/mod/x", "go/src/x"),
        {},
    ),
    "bun": (
        (".bun/bin",),
        (".bun/bin/bun", ".bun/install/global/node_modules/x"),
        (".bun/install/cache/x",),
        {},
    ),
    "deno": ((".deno/bin",), (".deno/bin/deno",), (".deno/cache/x",), {}),
    "sdkman": (
        (".sdkman/candidates/java/21/bin",),
        (".sdkman/candidates/java/21/bin/java", ".sdkman/candidates/java/21/release",
         ".sdkman/candidates/java/21/conf/net.properties", ".sdkman/candidates/java/21/lib/x"),
        (".sdkman/etc/config", ".sdkman/var/x"),
        {},
    ),
    "maven": (
        ("opt/maven/bin",),
        ("opt/maven/bin/mvn", "opt/maven/boot/x", "opt/maven/lib/x"),
        ("opt/maven/conf/settings.xml",),
        {},
    ),
    "conda": (
        ("miniconda3/bin", "miniconda3/condabin"),
        ("miniconda3/bin/python", "miniconda3/lib/python3.11/os.py", "miniconda3/conda-meta/history",
         "miniconda3/condabin/conda", "miniconda3/ssl/cacert.pem"),
        ("miniconda3/.condarc", "miniconda3/pkgs/x"),
        {},
    ),
    "npm's own prefix": (
        (".npm-global/bin",),
        (".npm-global/bin/tsc", ".npm-global/lib/node_modules/typescript/x"),
        (".npm-global/etc/npmrc", ".npmrc"),
        {},
    ),
    "~/.local/bin": (
        (".local/bin",),
        (".local/bin/tool", ".local/lib/python3.11/site-packages/x"),
        (".local/share/keyrings/login.keyring", ".local/share/other", ".local/state/x"),
        {"PYTHONUSERBASE": ".local"},
    ),
    "~/bin": (("bin",), ("bin/script",), ("lib/private", "share/private", "notes"), {}),
    "a project's node_modules": (
        ("other/node_modules/.bin",),
        ("other/node_modules/.bin/tsc", "other/node_modules/typescript/x"),
        ("other/.env",),
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MANAGERS)
def test_a_managers_programs_enter_and_its_secrets_do_not(caller: Caller, name: str) -> None:
    """For each layout: what runs is visible, what is private is not, and the manager finds its root."""
    entries, needed, private, env = MANAGERS[name]
    fill(caller, *needed, *private)
    tools = find(caller, *entries)
    for path in home(caller, *needed):
        assert seen(tools, path), path
    for path in home(caller, *private):
        assert not seen(tools, path), path
    assert tools.env == {key: f"{caller.places.home}/{value}" for key, value in env.items()}
    assert tools.path == tuple(f"{caller.places.home}/{entry}" for entry in entries)
    assert not any(paths.holds(bind, caller.places.home) for bind in tools.binds)
    assert tools.notes == ()


@pytest.mark.parametrize("manager", ["uv/tools", "pipx/venvs"])
def test_tools_behind_links_bring_their_environment_and_interpreter(caller: Caller, manager: str) -> None:
    """``~/.local/bin/x`` leads to an environment, which leads to an interpreter; receipts stay outside."""
    root = f".local/share/{manager}/ruff"
    python = ".local/share/uv/python/cpython-3.12"
    fill(
        caller, f"{root}/bin/ruff", f"{root}/lib/python3.12/site-packages/x", f"{root}/uv-receipt.toml",
        f"{root}/pipx_metadata.json", f"{python}/bin/python3", f"{python}/lib/python3.12/os.py",
        ".local/share/uv/credentials/credentials.toml", ".local/bin/plain",
    )  # fmt: skip
    caller.file(f"home/{root}/pyvenv.cfg", f"home = {caller.places.home}/{python}/bin\n")
    os.symlink(f"{caller.places.home}/{root}/bin/ruff", f"{caller.places.home}/.local/bin/ruff")
    tools = find(caller, ".local/bin")
    for path in (f"{root}/bin/ruff", f"{root}/pyvenv.cfg", f"{python}/bin/python3",
    f"{python}/lib/python3.12/os.py"):
        assert seen(tools, f"{caller.places.home}/{path}"), path
    for path in (f"{root}/uv-receipt.toml", f"{root}/pipx_metadata.json", ".local/share/uv/credentials"):
        assert not seen(tools, f"{caller.places.home}/{path}"), path


def test_a_link_to_a_single_program_brings_that_program(caller: Caller) -> None:
    """A link to a file beside private ones binds the file alone."""
    fill(caller, "apps/tool-1.2/tool", "apps/tool-1.2/settings", ".local/bin/x")
    os.symlink("../../apps/tool-1.2/tool", f"{caller.places.home}/.local/bin/tool")
    tools = find(caller, ".local/bin")
    assert home(caller, "apps/tool-1.2/tool") <= set(tools.binds)
    assert not seen(tools, f"{caller.places.home}/apps/tool-1.2/settings")


def test_links_to_private_files_bring_nothing(caller: Caller) -> None:
    """A link on PATH is no way to a key, a token or a setting."""
    fill(caller, ".ssh/id_ed25519", ".config/gh/hosts.yml", ".docker/config.json", ".local/bin/x")
    for number, target in enumerate((".ssh/id_ed25519", ".config/gh/hosts.yml", ".docker/config.json",
    ".ssh")):
        os.symlink(f"{caller.places.home}/{target}", f"{caller.places.home}/.local/bin/l{number}")
    tools = find(caller, ".local/bin")
    assert set(tools.binds) == home(caller, ".local/bin")


@pytest.mark.parametrize("entry", ["", ".config/yarn/global/node_modules/.bin", ".ssh", ".docker/bin",
".aws"])
def test_private_directories_on_path_stay_outside(caller: Caller, entry: str) -> None:
    """The home itself and the directories of settings are left out, with a note."""
    caller.directory(f"home/{entry}")
    tools = find(caller, entry, "/usr/bin")
    assert tools.binds == ()
    assert tools.path == ("/usr/bin",)
    assert len(tools.notes) == 1


def test_what_a_grant_would_refuse_is_not_bound_for_a_path_either(caller: Caller) -> None:
    """Casemate's own state, the kernel's file systems and shared directories do not enter by PATH."""
    caller.file("state/casemate/x/bin/tool", "x", 0o755)
    own = f"{caller.places.state}/x/bin"
    tools = find(caller, own, "/proc/self/net", "/var", "/usr/bin")
    assert tools.binds == ()
    assert tools.path == ("/usr/bin",)
    assert len(tools.notes) == 3


def test_a_directory_with_credentials_in_it_stays_outside(caller: Caller) -> None:
    """A directory that is no bin is bound as a whole only if no file of credentials lies in it."""
    fill(caller, "scripts/run", "mixed/run", "mixed/.npmrc")
    tools = find(caller, "scripts", "mixed")
    assert set(tools.binds) == home(caller, "scripts")
    assert tools.path == (f"{caller.places.home}/scripts",)


def test_relative_writable_and_missing_entries_are_left_out(caller: Caller) -> None:
    """Where anybody, or any directory, could put a program, PATH does not lead."""
    open_to_all = caller.directory("open")
    os.chmod(open_to_all, 0o777)
    sticky = caller.directory("sticky")
    os.chmod(sticky, 0o1777)
    tools = discover(
        f".:bin:./x::{open_to_all}:{sticky}:/no/such:/etc/hostname:/usr/bin:/usr/bin:/a\0b",
        caller.places.home,
        guard=paths.guard(caller.places),
    )  # fmt: skip
    assert tools.path == ("/usr/bin",)
    assert tools.binds == ()
    assert len(tools.notes) == 5
    os.chmod(open_to_all, 0o755)
    assert find(caller, open_to_all).path == (open_to_all,)


def test_an_empty_path_becomes_the_systems(caller: Caller) -> None:
    """A sandbox always finds the system's programs."""
    for path in ("", ":", "/no/such"):
        assert set(discover(path, caller.places.home).path) <= set(DEFAULT_PATH.split(":"))
        assert "/usr/bin" in discover(path, caller.places.home).path


def test_system_directories_need_no_bind(caller: Caller) -> None:
    """What the sandbox sees anyway keeps its place on PATH and costs nothing."""
    tools = find(caller, "/usr/local/bin", "/usr/bin", "/bin")
    assert tools.path == ("/usr/local/bin", "/usr/bin", "/bin")
    assert tools.binds == ()


def test_the_workspaces_own_directories_are_there_already(caller: Caller) -> None:
    """A bin of the workspace stays on PATH without a bind."""
    inside = caller.directory("work/project/bin")
    tools = find(caller, inside)
    assert (tools.path, tools.binds) == ((inside,), ())


def test_a_prefix_that_holds_the_workspace_or_the_home_is_not_opened(caller: Caller) -> None:
    """``X/bin`` brings its siblings only if neither the home nor the workspace lies among them."""
    caller.file("work/bin/tool", "x", 0o755)
    caller.file("work/lib/private", "x")
    caller.file("bin/tool", "x", 0o755)
    caller.file("lib/private", "x")
    tools = find(caller, f"{caller.root}/work/bin", f"{caller.root}/bin")
    assert not seen(tools, f"{caller.root}/lib/private")
    assert not seen(tools, caller.workspace)
    assert seen(tools, f"{caller.root}/work/bin/tool")


def test_links_on_the_way_are_spelt_both_ways(caller: Caller) -> None:
    """Shims hold their root's path as it was spelt, so a linked root is bound under both names."""
    os.makedirs(f"{caller.root}/big/pyenv/shims")
    caller.file("big/pyenv/libexec/pyenv", "x", 0o755)
    os.symlink(f"{caller.root}/big/pyenv", f"{caller.places.home}/.pyenv")
    tools = find(caller, ".pyenv/shims")
    assert home(caller, ".pyenv/libexec", ".pyenv/shims") <= set(tools.binds)
    assert f"{caller.root}/big/pyenv/libexec" in tools.binds
    assert tools.env["PYENV_ROOT"] == f"{caller.places.home}/.pyenv"


def test_toolchains_and_versions_that_are_links_bring_their_targets(caller: Caller) -> None:
    """``rustup toolchain link`` and linked Python versions work too."""
    fill(caller, ".cargo/bin/rustup", "rust/build/bin/rustc", "rust/build/lib/x", "rust/build/.env")
    caller.directory("home/.rustup/toolchains")
    os.symlink(f"{caller.places.home}/rust/build", f"{caller.places.home}/.rustup/toolchains/mine")
    tools = find(caller, ".cargo/bin")
    assert home(caller, "rust/build/bin", "rust/build/lib") <= set(tools.binds)
    assert not seen(tools, f"{caller.places.home}/rust/build/.env")


def test_the_interpreter_behind_the_workspaces_environment_is_found(caller: Caller) -> None:
    """``.venv/bin/python`` runs although its interpreter is not on PATH."""
    python = "home/pythons/3.12"
    caller.file(f"{python}/bin/python3", "x", 0o755)
    caller.file(f"{python}/lib/python3.12/os.py", "x")
    caller.file(f"{caller.workspace}/.venv/pyvenv.cfg", f"home = {caller.root}/{python}/bin\n")
    tools = find(caller, "/usr/bin")
    assert seen(tools, f"{caller.root}/{python}/bin/python3")
    assert seen(tools, f"{caller.root}/{python}/lib/python3.12/os.py")


@pytest.mark.parametrize(
    "line", ["home = {home}", "home = {home}/.ssh", "home = {home}/data/bin", "home = ../bin", "home = /",
    "home =",
             "x" * 10000, "home = {home}/.config/x/bin", "home = {home}/a\0b"]
)  # fmt: skip
def test_a_hostile_environment_in_the_workspace_opens_nothing(caller: Caller, line: str) -> None:
    """A pyvenv.cfg that a command wrote can name only what is a Python installation already."""
    fill(caller, "data/bin/secret", "data/lib/secret", ".config/x/bin/python3", ".config/x/lib/python3/os.py")
    caller.file(f"{caller.workspace}/.venv/pyvenv.cfg", line.format(home=caller.places.home) + "\n")
    assert find(caller, "/usr/bin").binds == ()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_strange_pyvenv_cfg_does_not_hang(caller: Caller, make: Callable[[str], None]) -> None:
    """A FIFO, a directory or a device in its place is nothing."""
    caller.directory("work/project/.venv")
    make(f"{caller.workspace}/.venv/pyvenv.cfg")
    assert find(caller, "/usr/bin").binds == ()


def test_deny_and_disabled_leave_tools_out(caller: Caller) -> None:
    """A hidden path hides tools as well, and ``tools = false`` binds nothing; else it would be bound."""
    fill(caller, "apps/x/bin/tool")
    assert find(caller, "apps/x/bin").path
    denied = find(caller, "apps/x/bin", deny=(f"{caller.places.home}/apps",))
    assert (denied.binds, denied.path[:1]) == ((), ("/usr/local/sbin",))
    disabled = find(caller, "apps/x/bin", "/usr/bin", enabled=False)
    assert (disabled.binds, disabled.path, disabled.env) == ((), ("/usr/bin",), {})
    granted = find(caller, "apps/x/bin", enabled=False, visible=(f"{caller.places.home}/apps",))
    assert (granted.binds, granted.path) == ((), (f"{caller.places.home}/apps/x/bin",))


def test_a_grant_covers_what_tools_would_bind(caller: Caller) -> None:
    """Nothing is bound twice."""
    fill(caller, "apps/x/bin/tool", "apps/x/lib/y")
    assert find(caller, "apps/x/bin", visible=(f"{caller.places.home}/apps",)).binds == ()


def test_this_machines_interpreters_are_visible(caller: Caller) -> None:
    """Whatever python3, pip, cargo, rustc and node this PATH finds lies in what the sandbox sees."""
    path = os.environ.get("PATH", DEFAULT_PATH)
    real_home = os.path.expanduser("~")
    tools = discover(path, real_home, environ=os.environ, workspace=caller.workspace)
    shown = (*paths.SYSTEM_VIEW, *tools.binds)
    for name in ("python3", "pip", "cargo", "rustc", "node"):
        found = shutil.which(name, path=path)
        if found is None:
            continue
        assert paths.within_any(found, shown), found
        assert paths.within_any(os.path.realpath(found), shown), found
        assert shutil.which(name, path=":".join(tools.path)) == found
