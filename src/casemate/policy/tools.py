"""The tool directories on PATH, and what of them a sandbox needs to see.

A directory on PATH is rarely enough: a shim needs the tree behind it, a virtual environment the interpreter
that made it. The table below knows the layouts of the common managers and names the parts that hold
programs and libraries. What holds credentials or state (``~/.cargo`` itself, ``~/.config``, a package
manager's receipts) is never among them, and neither is anything that a grant would refuse.

Looks at names and kinds of files only and runs nothing: a normal PATH costs well under a millisecond.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from casemate.policy import paths
from casemate.policy.paths import SYSTEM_VIEW, holds, within_any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["DEFAULT_PATH", "PRIVATE", "Tools", "discover"]

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Directories of the system's own programs, which need no second look.
_PLAIN = frozenset(DEFAULT_PATH.split(":")) | {"/usr/games", "/usr/local/games"}
_BIN = frozenset(("bin", "sbin", "condabin"))
# What stands beside a bin that belongs to it.
_SIBLINGS = ("lib", "lib64", "libexec", "include", "share")
# Managers in the form of rbenv: ROOT/shims run ROOT/libexec/NAME, which finds ROOT/versions.
_XENVS = ("pyenv", "rbenv", "nodenv", "goenv", "plenv", "phpenv", "jenv")
_XENV_PARTS = ("bin", "lib", "include", "libexec", "shims", "versions", "plugins", "version")
_CONDA_PARTS = ("condabin", "conda-meta", "ssl", "shell", "compiler_compat", "x86_64-conda-linux-gnu")
_GO_PARTS = ("pkg", "src", "lib", "misc", "api", "test", "VERSION", "go.env")
_JDK_PARTS = ("lib", "conf", "jmods", "legal", "release", "jre", "include")
# A directory with one of these is somebody's settings, whatever else is in it.
_CREDENTIALS = (
    "credentials", "credentials.toml", "credentials.json", "auth.json", ".npmrc", ".pypirc", ".netrc",
    ".git-credentials", ".env", ".yarnrc.yml", "hosts.yml",
)  # fmt: skip
# Below a home, never bound whatever PATH says.
PRIVATE = (
    ".config", ".docker", ".kube", ".aws", ".azure", ".ssh", ".gnupg", ".password-store", ".mozilla",
    ".thunderbird", ".local/share/keyrings", ".local/share/uv/credentials", ".claude", ".codex", ".gemini",
)  # fmt: skip
_MAX_LINKS = 512
_VENVS = (".venv", "venv", "env")


class Tools(msgspec.Struct, frozen=True, kw_only=True):
    """What PATH needs inside.

    ``binds`` are host paths to bind read-only at the same path; a link on the way is followed on the host.
    ``path`` is the sandbox's PATH, ``env`` the managers' own variables, ``notes`` what was left out.
    """

    binds: tuple[str, ...] = ()
    env: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    path: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def discover(
    path_env: str,
    home: str,
    *,
    environ: Mapping[str, str] | None = None,
    workspace: str = "",
    visible: Iterable[str] = (),
    deny: Iterable[str] = (),
    guard: paths.Guard | None = None,
    enabled: bool = True,
) -> Tools:
    """Find what the directories in ``path_env`` need.

    ``visible`` are paths that the sandbox sees anyway (beside the system and the workspace), ``deny`` those
    it must not see. With ``enabled`` false nothing is bound, and PATH keeps what is visible.
    Preconditions: ``home``, ``workspace``, ``visible`` and ``deny`` are absolute.
    """
    if guard is None:
        from casemate.settings import places

        guard = paths.guard(places({"HOME": home}))
    finder = _Finder(home, environ or {}, workspace, tuple(visible), tuple(deny), guard)
    for entry in dict.fromkeys(path_env.split(":")):
        finder.entry(entry, enabled)
    if enabled:
        finder.environments()
    return finder.result()


class _Finder:
    """One search. Each rule looks at a directory on PATH and adds the binds of its layout."""

    def __init__(
        self,
        home: str,
        environ: Mapping[str, str],
        workspace: str,
        visible: tuple[str, ...],
        deny: tuple[str, ...],
        guard: paths.Guard,
    ) -> None:
        self.home = home
        self.environ = environ
        self.workspace = workspace
        self.visible = visible
        self.deny = deny
        self.guard = guard
        # Both spellings: PATH may name a home that is a link, and links may lead to the real one.
        private = [f"{base}/{name}" for base in dict.fromkeys((home, *guard.homes)) for name in PRIVATE]
        self.private = tuple(f"{path}/" for path in private)
        self.above_private = {path[:at] for path in private for at, c in enumerate(path) if c == "/"}
        self.found: dict[str, None] = {}
        self.env: dict[str, str] = {}
        self.path: list[str] = []
        self.notes: list[str] = []
        self.seen: set[str] = set()

    # ------------------------------------------------------------ one entry of PATH

    def entry(self, entry: str, enabled: bool) -> None:
        """Take one directory of PATH, or say why not."""
        if not entry:
            return  # an empty entry is the current directory: relative, and never meant
        if not entry.startswith("/"):
            self._left_out(entry, "it is relative, so it would mean another directory in each place")
            return
        entry = os.path.normpath(entry)
        try:
            mode = os.stat(entry).st_mode
        except (OSError, ValueError):
            return
        if mode & 0o170000 != 0o040000:
            return
        if mode & 0o002:
            self._left_out(entry, "everybody can write there")
            return
        if entry in _PLAIN:
            self.path.append(entry)
            return
        real = os.path.realpath(entry)
        if self._shown(entry) and self._shown(real):
            self.path.append(entry)
            if enabled and not self._in_workspace(real):
                self._venv(os.path.dirname(real))
            return
        if enabled and self._tool(entry, real):
            self.path.append(entry)

    def _tool(self, entry: str, real: str) -> bool:
        """Bind what the directory ``real``, known as ``entry``, needs; whether it may be seen."""
        if real.startswith("/snap/"):
            self._left_out(entry, "programs of snapd need the host's snapd")
            return False
        if not self._bindable(real):
            self._left_out(entry, "it is private, or holds something that is")
            return False
        if real in self.seen:
            return True
        self.seen.add(real)
        if not self._layout(real):
            if os.path.basename(real) in _BIN:
                self._generic(real)
            elif any(os.path.lexists(f"{real}/{name}") for name in _CREDENTIALS):
                self._left_out(entry, "it holds credentials")
                return False
            else:
                self._bind(real)
        self._links(real)
        if entry != real:
            self._respell(os.path.dirname(entry), os.path.dirname(real), entry, real)
        return True

    def _layout(self, real: str) -> bool:
        """Whether a manager's layout was recognised and bound."""
        parent, name = os.path.split(real)
        if "/plugins/" in real and self._xenv(real.partition("/plugins/")[0]):
            return True
        if name == "shims":
            return self._xenv(parent) or self._asdf(parent)
        if name == ".bin" and os.path.basename(parent) == "node_modules":
            self._bind(parent)
            return True
        if real.startswith("/nix/store/"):
            self._bind("/nix/store")
            return True
        if name not in _BIN:
            return False
        return (
            self._xenv(parent)
            or self._asdf(parent)
            or self._cargo(real, parent)
            or self._bun(real, parent)
            or self._volta(parent)
            or self._venv(parent)
        )

    # ------------------------------------------------------------ the table

    def _xenv(self, root: str) -> bool:
        guess = os.path.basename(root).lstrip(".")
        for name in (guess, *_XENVS) if guess in _XENVS else _XENVS:
            if _exists(f"{root}/libexec/{name}"):
                break
        else:
            return False
        self._parts(root, (*_XENV_PARTS, f"{name}.d"))
        self.env[f"{name.upper()}_ROOT"] = root
        # A version may be a link to an interpreter that was built somewhere else.
        for target in _link_targets(f"{root}/versions"):
            self._prefix(target)
        return True

    def _asdf(self, root: str) -> bool:
        if not _exists(f"{root}/installs") and not _exists(f"{root}/asdf.sh"):
            return False
        self._parts(root, ("bin", "lib", "libexec", "shims", "installs", "plugins", "asdf.sh"))
        if os.path.basename(root) in ("mise", "rtx"):
            self.env["MISE_DATA_DIR"] = root
        else:
            self.env["ASDF_DATA_DIR"] = root
            self.env["ASDF_DIR"] = self.environ.get("ASDF_DIR", root)
        return True

    def _cargo(self, real: str, parent: str) -> bool:
        rustup = _exists(f"{real}/rustup")
        if not rustup and os.path.basename(parent) != ".cargo":
            return False
        # The bin alone: its parent holds the credentials, the registry and the configuration.
        self._bind(real)
        if rustup:
            root = self.environ.get("RUSTUP_HOME") or f"{self.home}/.rustup"
            if root.startswith("/") and _exists(f"{root}/toolchains"):
                # update-hashes: rustup makes it where it is missing, and gives up where it cannot.
                self._parts(root, ("toolchains", "settings.toml", "update-hashes"))
                self.env["RUSTUP_HOME"] = root
                for target in _link_targets(f"{root}/toolchains"):
                    self._prefix(target)
        return True

    def _bun(self, real: str, parent: str) -> bool:
        if os.path.basename(parent) != ".bun":
            return False
        self._bind(real)
        self._parts(parent, ("install/global/node_modules",))
        return True

    def _volta(self, root: str) -> bool:
        if not _exists(f"{root}/bin/volta-shim") and not _exists(f"{root}/tools/image"):
            return False
        self._parts(root, ("bin", "tools", "layout.v3", "layout.v4"))
        self.env["VOLTA_HOME"] = root
        return True

    def _venv(self, root: str) -> bool:
        """A virtual environment: itself, and the interpreter it was made from."""
        cfg = f"{root}/pyvenv.cfg"
        if not _exists(cfg):
            return False
        if not self._shown(root):
            self._parts(root, ("bin", "lib", "lib64", "include", "share", "pyvenv.cfg"))
        self._interpreter(cfg)
        return True

    def _interpreter(self, cfg: str) -> None:
        """Bind the Python installation that ``home`` in a pyvenv.cfg names.

        The file may lie where a sandboxed command wrote it, so only what is a Python installation by its
        content is taken.
        """
        named = _pyvenv_home(cfg)
        if named is None or (self._shown(named) and self._shown(os.path.realpath(named))):
            return
        real = os.path.realpath(named)
        prefix, name = os.path.split(real)
        if name != "bin" or not _is_python(prefix):
            return
        self._prefix(prefix)
        if named != real:
            self._respell(os.path.dirname(named), prefix, named, real)

    def _generic(self, real: str) -> None:
        """``X/bin`` with what stands beside it."""
        parent = os.path.dirname(real)
        self._bind(real)
        # ~/bin stands beside everything a person has, and so does any bin in what holds a home.
        if any(holds(parent, home) for home in (self.home, *self.guard.homes)):
            return
        if os.path.basename(parent) == ".local":
            # ~/.local/share holds keyrings, histories and receipts; what its tools need comes by links.
            self._parts(parent, ("lib", "libexec"))
            if self._user_site(parent):
                self.env["PYTHONUSERBASE"] = parent
            return
        self._prefix(parent)
        if _exists(f"{parent}/conda-meta"):
            self._parts(parent, _CONDA_PARTS)
        elif _exists(f"{real}/go") and _exists(f"{parent}/src"):
            self._parts(parent, _GO_PARTS)
        elif _exists(f"{parent}/release") and _exists(f"{real}/java"):
            self._parts(parent, _JDK_PARTS)
        elif _exists(f"{real}/mvn"):
            self._parts(parent, ("boot",))  # conf holds settings.xml, and that holds passwords
        elif _exists(f"{parent}/Cellar"):
            self._parts(parent, ("Cellar", "opt"))
        if "/versions/node/" in real:
            root = real.partition("/versions/node/")[0]
            if _exists(f"{root}/nvm.sh"):
                self._parts(root, ("nvm.sh", "alias"))
                self.env["NVM_DIR"] = root

    def _user_site(self, base: str) -> bool:
        try:
            return any(name.startswith("python") for name in os.listdir(f"{base}/lib"))
        except OSError:
            return False

    def _prefix(self, root: str) -> None:
        """The programs and libraries below an installation's prefix."""
        self._parts(root, ("bin", "sbin", *_SIBLINGS))

    # ------------------------------------------------------------ links

    def _links(self, directory: str) -> None:
        """Follow the links in a directory of programs to what they need."""
        for target in _link_targets(directory):
            if self._covered(target) or self._shown(target) or self._in_workspace(target):
                continue
            folder = os.path.dirname(target)
            if folder in self.seen:
                continue
            if os.path.basename(folder) in _BIN and self._bindable(folder):
                self.seen.add(folder)
                if not self._layout(folder):
                    self._generic(folder)
            elif os.path.isfile(target):
                self._bind(target)

    def _respell(self, spelt: str, root: str, entry: str, real: str) -> None:
        """Bind again under the name that PATH uses: shims hold their root's path as it was spelt."""
        same_name = os.path.basename(entry) == os.path.basename(real)
        for path in list(self.found):
            if path == real:
                self.found[entry] = None
            elif same_name and holds(root, path):
                self.found[spelt + path[len(root) :]] = None
        for name, value in self.env.items():
            if value == root:
                self.env[name] = spelt

    # ------------------------------------------------------------ the workspace's own environments

    def environments(self) -> None:
        """The interpreters behind the workspace's virtual environments, which need not be on PATH."""
        roots = [f"{self.workspace}/{name}" for name in _VENVS] if self.workspace else []
        active = self.environ.get("VIRTUAL_ENV", "")
        if active.startswith("/"):
            roots.append(os.path.normpath(active))
        for root in dict.fromkeys(roots):
            cfg = f"{root}/pyvenv.cfg"
            if _exists(cfg):
                self._interpreter(cfg)

    # ------------------------------------------------------------ what may be bound

    def _parts(self, root: str, names: Iterable[str]) -> None:
        for name in names:
            path = f"{root}/{name}"
            if path not in self.found and _exists(path):
                self._bind(path)

    def _bind(self, path: str) -> None:
        if self._bindable(path) and not self._shown(path):
            self.found[path] = None

    def _bindable(self, path: str) -> bool:
        real = os.path.realpath(path)
        for spelling in (path,) if real == path else (path, real):
            if paths.refusal(spelling, self.guard) is not None or within_any(spelling, self.deny):
                return False
            if spelling in self.above_private or f"{spelling}/".startswith(self.private):
                return False
        # A directory that holds the workspace would put a second, bare copy of it into the view.
        return not (self.workspace and holds(real, self.workspace))

    def _in_workspace(self, path: str) -> bool:
        return bool(self.workspace) and holds(self.workspace, path)

    def _shown(self, path: str) -> bool:
        if within_any(path, self.deny):
            return False
        return within_any(path, SYSTEM_VIEW) or self._in_workspace(path) or within_any(path, self.visible)

    def _covered(self, path: str) -> bool:
        return within_any(path, self.found)

    def _left_out(self, entry: str, reason: str) -> None:
        self.notes.append(f"PATH: {ascii(entry)[1:-1]} is left out: {reason}")

    def result(self) -> Tools:
        """Everything found, without what another bind covers."""
        binds = tuple(
            path for path in self.found if not any(o != path and holds(o, path) for o in self.found)
        )
        if not self.path:
            self.path = [entry for entry in DEFAULT_PATH.split(":") if _exists(entry)]
        return Tools(binds=binds, env=self.env, path=tuple(self.path), notes=tuple(self.notes))


def _exists(path: str) -> bool:
    try:
        os.stat(path)
    except (OSError, ValueError):
        return False
    return True


def _link_targets(directory: str) -> list[str]:
    """The resolved targets of the links in ``directory`` that lead out of it."""
    texts: dict[str, None] = {}
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if len(texts) >= _MAX_LINKS:
                    break
                if entry.is_symlink():
                    text = os.readlink(entry.path)
                    # A plain name stays in the directory, which is bound.
                    if "/" in text:
                        texts[text] = None
    except OSError:
        pass
    found = dict.fromkeys(os.path.realpath(os.path.join(directory, text)) for text in texts)
    return [path for path in found if not holds(directory, path)]


def _pyvenv_home(cfg: str) -> str | None:
    try:
        fd = os.open(cfg, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        text = os.read(fd, 4096).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(fd)
    for line in text.split("\n"):
        key, equals, value = line.partition("=")
        if equals and key.strip() == "home":
            value = os.path.normpath(value.strip())
            return value if value.startswith("/") and "\0" not in value else None
    return None


def _is_python(prefix: str) -> bool:
    """Whether ``prefix`` is a Python installation that root or the caller made."""
    try:
        names = os.listdir(f"{prefix}/lib")
        owner = os.stat(prefix).st_uid
    except OSError:
        return False
    if owner not in (0, os.geteuid()):
        return False
    return any(
        name.startswith(("python", "pypy")) and _exists(f"{prefix}/lib/{name}/os.py") for name in names[:256]
    )
