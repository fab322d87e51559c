"""What enters a sandbox beside the files a policy names: variables, and the files of a fresh HOME.

The environment starts empty. A short list of harmless variables passes, the settings of package indexes
pass without their credentials, and the policy's own ``pass`` and ``set`` come on top. Paths in those
settings (a bundle of certificates, a directory of wheels) are reported, so that they can be bound.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from casemate.policy import paths
from casemate.policy.paths import SYSTEM_VIEW, within_any
from casemate.policy.tools import PRIVATE
from casemate.settings import SANDBOX_HOME, SANDBOX_USER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from casemate.policy.model import Policy
    from casemate.policy.tools import Tools

__all__ = [
    "CACHES",
    "CERTIFICATES",
    "INDEX",
    "NO_PROXY",
    "PLAIN",
    "PROXIES",
    "ROOTS",
    "Inside",
    "build",
    "caches",
    "collect",
    "files",
    "home_files",
]

# Passed as they are. None of them names a file, a host or a person.
PLAIN = frozenset((
    "LANG", "LANGUAGE", "TZ", "TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE",
    "COLUMNS", "LINES", "CI", "DEBIAN_FRONTEND", "SOURCE_DATE_EPOCH", "NODE_ENV", "RUST_BACKTRACE",
    "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING",
    "PY_COLORS", "PYENV_VERSION", "RBENV_VERSION", "NODENV_VERSION", "RUSTUP_TOOLCHAIN",
    "RUSTUP_AUTO_INSTALL", "CARGO_TERM_COLOR", "CARGO_NET_OFFLINE", "CARGO_REGISTRY_DEFAULT", "GOTOOLCHAIN",
    "GOSUMDB", "GONOSUMDB", "GONOSUMCHECK", "GOPRIVATE", "GONOPROXY", "GOINSECURE", "PIP_NO_INDEX",
    "PIP_DEFAULT_TIMEOUT", "PIP_RETRIES", "PIP_DISABLE_PIP_VERSION_CHECK", "PIP_PREFER_BINARY",
    "PIP_ONLY_BINARY", "PIP_NO_BINARY", "PIP_TRUSTED_HOST", "PIP_NO_BUILD_ISOLATION",
    "PIP_ROOT_USER_ACTION", "PIP_BREAK_SYSTEM_PACKAGES", "PIP_REQUIRE_VIRTUALENV", "UV_OFFLINE",
    "UV_NO_INDEX", "UV_INDEX_STRATEGY", "UV_NATIVE_TLS", "UV_HTTP_TIMEOUT", "UV_PYTHON_PREFERENCE",
    "UV_PYTHON_DOWNLOADS", "UV_LINK_MODE", "NPM_CONFIG_OFFLINE", "npm_config_offline",
    "NPM_CONFIG_STRICT_SSL", "npm_config_strict_ssl", "GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL",
    "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL", "COREPACK_ENABLE_DOWNLOAD_PROMPT",
))  # fmt: skip
# URLs, paths or words in a list; credentials are taken out and paths are looked at.
INDEX = frozenset((
    "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT",
    "UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_CONSTRAINT",
    "UV_OVERRIDE", "UV_PYTHON_INSTALL_MIRROR", "NPM_CONFIG_REGISTRY", "npm_config_registry",
    "YARN_REGISTRY", "YARN_NPM_REGISTRY_SERVER", "BUN_CONFIG_REGISTRY", "GOPROXY", "RUSTUP_DIST_SERVER",
    "RUSTUP_UPDATE_ROOT", "NODEJS_ORG_MIRROR", "npm_config_nodedir", "COREPACK_NPM_REGISTRY",
))  # fmt: skip
# One path each (a colon separates several in the *_DIR ones).
CERTIFICATES = frozenset((
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS",
    "GIT_SSL_CAINFO", "GIT_SSL_CAPATH", "PIP_CERT", "AWS_CA_BUNDLE", "NIX_SSL_CERT_FILE",
    "CARGO_HTTP_CAINFO", "NPM_CONFIG_CAFILE", "npm_config_cafile", "DENO_CERT", "BUNDLE_SSL_CA_CERT",
    "HTTPLIB2_CA_CERTS", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
))  # fmt: skip
# Only of use, and only passed, where the host's network is.
PROXIES = frozenset(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"))
NO_PROXY = frozenset(("NO_PROXY", "no_proxy"))
# Where an installation lies: passed when the sandbox sees it.
ROOTS = frozenset((
    "VIRTUAL_ENV", "CONDA_PREFIX", "JAVA_HOME", "GOROOT", "DOTNET_ROOT", "NVM_BIN", "MAVEN_HOME",
    "GRADLE_HOME", "PNPM_HOME",
))  # fmt: skip
# Decided here; `pass` does not bring the host's own.
_DECIDED = frozenset(("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "SHELL", "PWD", "OLDPWD"))

_CACHE = f"{SANDBOX_HOME}/.cache"
# Cache -> its mounts (storage name, place inside) and its variables.
CACHES: dict[str, tuple[tuple[tuple[str, str], ...], dict[str, str]]] = {
    "pip": ((("pip", f"{_CACHE}/pip"),), {"PIP_CACHE_DIR": f"{_CACHE}/pip"}),
    "npm": ((("npm", f"{_CACHE}/npm"),), {"npm_config_cache": f"{_CACHE}/npm"}),
    # Not CARGO_HOME as a whole: cargo reads its settings there, and writes credentials.
    "cargo": (
        (("cargo-registry", f"{SANDBOX_HOME}/.cargo/registry"), ("cargo-git", f"{SANDBOX_HOME}/.cargo/git")),
        {},
    ),
    "uv": ((("uv", f"{_CACHE}/uv"),), {"UV_CACHE_DIR": f"{_CACHE}/uv"}),
    "yarn": (
        (("yarn", f"{_CACHE}/yarn"), ("yarn-berry", f"{SANDBOX_HOME}/.yarn/berry")),
        {"YARN_CACHE_FOLDER": f"{_CACHE}/yarn"},
    ),
    "pnpm": ((("pnpm", f"{SANDBOX_HOME}/.local/share/pnpm/store"),), {}),
    "go": (
        (("go-mod", f"{_CACHE}/go-mod"), ("go-build", f"{_CACHE}/go-build")),
        {"GOMODCACHE": f"{_CACHE}/go-mod", "GOCACHE": f"{_CACHE}/go-build"},
    ),
    "maven": ((("maven", f"{SANDBOX_HOME}/.m2/repository"),), {}),
    "gradle": ((("gradle", f"{_CACHE}/gradle"),), {"GRADLE_USER_HOME": f"{_CACHE}/gradle"}),
    "ccache": ((("ccache", f"{_CACHE}/ccache"),), {"CCACHE_DIR": f"{_CACHE}/ccache"}),
}


class Inside(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one look at the caller's settings found.

    ``env`` is the environment; ``binds`` are host paths to bind read-only at the same path; ``home_files``
    maps names below HOME to content; ``masks`` maps files of the system to content that must cover them,
    because they hold credentials; ``caches`` are (storage name, place inside); ``notes`` says what was
    held back, never by its value.
    """

    env: dict[str, str]
    binds: tuple[str, ...]
    home_files: dict[str, bytes]
    masks: dict[str, bytes]
    caches: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def collect(
    environ: Mapping[str, str],
    policy: Policy,
    tools: Tools,
    *,
    workspace: str,
    home: str | None = None,
    guard: paths.Guard | None = None,
) -> Inside:
    """Look at the caller's variables and settings once, for everything that follows from them."""
    from casemate import settings

    if guard is None:
        guard = paths.guard(settings.places(environ))
    admit = _Admission(policy, tools, workspace, home or guard.home, guard)
    env = _variables(environ, policy, tools, admit)
    contents, masks = _settings_files(environ, policy, workspace, admit)
    return Inside(
        env=env,
        binds=tuple(admit.binds),
        home_files=contents,
        masks=masks,
        caches=caches(policy),
        notes=tuple(dict.fromkeys(admit.notes)),
    )


def build(environ: Mapping[str, str], policy: Policy, tools: Tools, *, workspace: str = "") -> dict[str, str]:
    """The sandbox's environment."""
    return collect(environ, policy, tools, workspace=workspace).env


def files(
    environ: Mapping[str, str], policy: Policy, tools: Tools, *, workspace: str = ""
) -> tuple[str, ...]:
    """The host paths that settings in the environment name, to bind read-only at the same path."""
    return collect(environ, policy, tools, workspace=workspace).binds


def home_files(
    environ: Mapping[str, str], policy: Policy, tools: Tools, *, workspace: str = ""
) -> dict[str, bytes]:
    """The files of the fresh HOME, by their name below it."""
    return collect(environ, policy, tools, workspace=workspace).home_files


def caches(policy: Policy) -> tuple[tuple[str, str], ...]:
    """The per-workspace caches: (name of the store, where it is mounted inside)."""
    return tuple(mount for name in policy.filesystem.cache for mount in CACHES[name][0])


# ---------------------------------------------------------------- variables


def _variables(environ: Mapping[str, str], policy: Policy, tools: Tools, admit: _Admission) -> dict[str, str]:
    env: dict[str, str] = {"LANG": "C.UTF-8"}
    host = policy.network.mode == "host"
    for name, value in environ.items():
        if not value or "\0" in value or "\0" in name:
            continue
        if name in PLAIN or name.startswith("LC_"):
            env[name] = value
        elif name in CERTIFICATES:
            kept = admit.path_list(name, value)
            if kept:
                env[name] = kept
        elif name in ROOTS:
            if root := admit.root(value):
                env[name] = root
        elif name in INDEX or _is_registry(name) or (host and name in PROXIES):
            if kept := admit.setting(name, value):
                env[name] = kept
        elif host and name in NO_PROXY:
            env[name] = value
        elif name == "PIP_CONFIG_FILE" and value == os.devnull:
            env[name] = value  # pip's word for "no file at all"
    env |= tools.env
    for cache in policy.filesystem.cache:
        env |= CACHES[cache][1]
    env |= _passed(environ, policy.environment.pass_)
    env |= {
        "PATH": ":".join(tools.path),
        "HOME": SANDBOX_HOME,
        "USER": SANDBOX_USER,
        "LOGNAME": SANDBOX_USER,
        "TMPDIR": "/tmp",
        "SHELL": "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh",
    }
    env |= policy.environment.set
    # Last, so that nothing above can say that a command is somewhere else than it is.
    env["CASEMATE_SANDBOX"] = policy.isolation.boundary
    return env


def _is_registry(name: str) -> bool:
    """Names with a part of the caller's own: cargo's and npm's registries by their names."""
    if name.startswith("CARGO_"):
        return name.startswith("CARGO_REGISTRIES_") and name.endswith(("_INDEX", "_PROTOCOL"))
    return name.startswith(("npm_config_@", "NPM_CONFIG_@")) and name.endswith(":registry")


def _passed(environ: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    exact = frozenset(names)
    prefixes = tuple(name[:-1] for name in names if name.endswith("*"))
    return {
        name: value
        for name, value in environ.items()
        if (name in exact or (prefixes and name.startswith(prefixes)))
        and name not in _DECIDED
        and not name.startswith("CASEMATE_")
        and "\0" not in value
    }


class _Admission:
    """Decides about the paths and URLs in settings, and keeps what has to be bound."""

    def __init__(self, policy: Policy, tools: Tools, workspace: str, home: str, guard: paths.Guard) -> None:
        self.policy = policy
        self.tools = tools
        self.workspace = workspace
        self.home = home
        self.guard = guard
        self.binds: dict[str, None] = {}
        self.decided: dict[str, str | None] = {}
        self.notes: list[str] = []
        self._homes = tuple(dict.fromkeys((home, *guard.homes)))
        shown = policy.filesystem
        mine = (workspace,) if workspace else ()
        self.visible = (*SYSTEM_VIEW, *mine, *shown.read, *shown.write, *tools.binds)

    def setting(self, name: str, value: str) -> str | None:
        """A list of URLs, paths and words, without credentials and without paths that may not be seen."""
        from casemate.policy.credentials import clean

        cleaned = clean(value)
        if cleaned is None:
            self.notes.append(f"{name} is not passed: it holds something that may be a credential")
            return None
        return self.parts(cleaned, name)

    def parts(self, cleaned: str, name: str = "") -> str | None:
        """``cleaned`` without the paths that may not be seen; None when nothing is left."""
        from casemate.policy.credentials import local_path, split

        kept: list[str] = []
        changed = False
        for part in split(cleaned):
            path = local_path(part, self.home)
            if path is not None and self.path(path, name) is None:
                changed = True
            elif part.startswith("~/"):
                # Inside, ~ is the fresh home and not the one that was meant.
                kept.append(f"{self.home}{part[1:]}")
                changed = True
            else:
                kept.append(part)
        if not changed:
            return cleaned  # with the separators as they were
        return (" " if "," not in cleaned else ",").join(kept) or None

    def path_list(self, name: str, value: str) -> str | None:
        """One path, or for directories several with colons between them."""
        several = value.split(":") if name.endswith(("_DIR", "_CAPATH")) else [value]
        kept = [path for path in several if path.startswith("/") and self.path(path, name)]
        return ":".join(kept) or None

    def path(self, path: str, name: str) -> str | None:
        """``path`` if the sandbox may see it; it is bound if it does not see it yet."""
        # One bundle of certificates is commonly named by half a dozen variables.
        if path not in self.decided:
            self.decided[path] = self._decide(path, name)
        return self.decided[path]

    def _decide(self, path: str, name: str) -> str | None:
        real = os.path.realpath(path)
        if within_any(real, self.policy.filesystem.deny):
            return None
        if within_any(path, self.visible) and within_any(real, self.visible):
            return path
        if not os.path.exists(real):
            return None
        if reason := self._unfit(real, name):
            self.notes.append(f"{name or 'a setting'}: {real}: {reason}")
            return None
        try:
            paths.check_grant(real, write=False, guard=self.guard, workspace=self.workspace)
        except ValueError as error:
            self.notes.append(f"{name or 'a setting'}: {error}")
            return None
        if self.workspace and paths.holds(real, self.workspace):
            self.notes.append(f"{name or 'a setting'}: {real} holds the workspace")
            return None
        self.binds[os.path.normpath(path)] = None
        return path

    def _unfit(self, real: str, name: str) -> str:
        """Why a setting alone may not bring a file in, or ``""``: nobody has named it as readable."""
        if any(within_any(real, [f"{home}/{part}" for part in PRIVATE]) for home in self._homes):
            return "it names a place for private files"
        if name in CERTIFICATES and os.path.isfile(real) and not _is_certificates(real):
            return "it does not name a file of certificates"
        return ""

    def root(self, value: str) -> str | None:
        """Where an installation lies, as the sandbox can name it; None when it does not see it."""
        if not value.startswith("/"):
            return None
        for path in dict.fromkeys((os.path.normpath(value), os.path.realpath(value))):
            if within_any(path, self.policy.filesystem.deny):
                return None
            if within_any(path, self.visible) or f"{path}/bin" in self.tools.binds:
                return path
        return None


def _is_certificates(file: str) -> bool:
    """Whether a file holds certificates in PEM form and no key. Large bundles are looked at in part."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        text = os.read(handle, 1 << 20)
    except OSError:
        return False
    finally:
        os.close(handle)
    return b"CERTIFICATE-----" in text and b"PRIVATE KEY-----" not in text


# ---------------------------------------------------------------- files

_SYSTEM_PIP = ("/etc/pip.conf", "/etc/xdg/pip/pip.conf")
_SYSTEM_NPM = ("/etc/npmrc", "/usr/etc/npmrc", "/usr/local/etc/npmrc")


def _settings_files(
    environ: Mapping[str, str], policy: Policy, workspace: str, admit: _Admission
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The fresh HOME's files, and the covers of the system's."""
    from casemate.policy import registries

    home = admit.home
    config = environ.get("XDG_CONFIG_HOME", "")
    config = config if config.startswith("/") else f"{home}/.config"
    found: dict[str, bytes] = {}
    masks: dict[str, bytes] = {}

    pip: registries.Ini = {}
    named = environ.get("PIP_CONFIG_FILE", "")
    for file in (f"{home}/.pip/pip.conf", f"{config}/pip/pip.conf", named if named.startswith("/") else ""):
        if file and (text := registries.read_small(file)) is not None:
            ini, held = registries.pip_conf(text, admit.parts)
            _merge(pip, ini)
            _held(admit, file, held)
    if pip:
        found[".config/pip/pip.conf"] = registries.render_ini(pip)
    for file, name, reader in (
        (f"{home}/.npmrc", ".npmrc", registries.npmrc),
        (f"{home}/.cargo/config.toml", ".cargo/config.toml", registries.cargo_config),
        (f"{home}/.cargo/config", ".cargo/config.toml", registries.cargo_config),
    ):
        if name not in found and (text := registries.read_small(file)) is not None:
            content, held = reader(text, admit.parts)
            _held(admit, file, held)
            if content:
                found[name] = content
    for file in _SYSTEM_PIP:
        if (text := registries.read_small(file)) is not None:
            ini, held = registries.pip_conf(text, admit.parts)
            if held:
                masks[file] = registries.render_ini(ini)
    for file in _SYSTEM_NPM:
        if (text := registries.read_small(file)) is not None:
            content, held = registries.npmrc(text, admit.parts)
            if held:
                masks[file] = content
    if (text := registries.read_small("/etc/gitconfig")) is not None and _holds_secret(text):
        masks["/etc/gitconfig"] = registries.git_config([text], [], {})

    texts = [registries.read_small(f"{config}/git/config"), registries.read_small(f"{home}/.gitconfig")]
    safe = [workspace] if workspace else []
    found[".gitconfig"] = registries.git_config(
        [text for text in texts if text is not None], [*safe, *policy.filesystem.write], environ
    )
    return found, masks


def _merge(into: dict[str, dict[str, str]], more: dict[str, dict[str, str]]) -> None:
    for section, keys in more.items():
        into.setdefault(section, {}).update(keys)


def _held(admit: _Admission, file: str, held: bool) -> None:
    if held:
        admit.notes.append(f"{file}: what may be a credential, or is not about indexes, stays outside")


def _holds_secret(text: str) -> bool:
    lowered = text.lower()
    return any(word in lowered for word in ("extraheader", "password", "credential")) or any(
        "@" in rest.partition("/")[0] for rest in text.split("://")[1:]
    )
