"""The caller's package-index and git settings, copied into the fresh HOME without their credentials.

Each reader takes a closed list of keys and writes a new file; nothing is copied by default. The files are
the caller's own, small, and read only when they are there.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from casemate.policy.credentials import clean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Ini", "cargo_config", "git_config", "npmrc", "pip_conf", "read_small", "render_ini"]

#: section -> key -> value, in the order of the file.
Ini = dict[str, dict[str, str]]

_MAX = 256 * 1024
_PIP_KEYS = frozenset((
    "index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "cert", "constraint",
    "timeout", "default-timeout", "retries", "prefer-binary", "only-binary", "no-binary",
    "disable-pip-version-check", "no-build-isolation", "require-virtualenv", "break-system-packages",
    "no-cache-dir", "progress-bar", "use-feature", "use-deprecated", "root-user-action",
))  # fmt: skip
_NPM_KEYS = frozenset((
    "registry", "cafile", "strict-ssl", "fund", "audit", "update-notifier", "yes", "save-exact",
    "save-prefix", "engine-strict", "legacy-peer-deps", "package-lock", "prefer-offline", "offline",
    "omit-lockfile-registry-resolved", "nodedir", "replace-registry-host", "fetch-retries",
    "fetch-timeout", "ignore-scripts", "always-auth", "maxsockets", "loglevel", "progress", "color",
    "init-license", "init-version", "auto-install-peers", "shamefully-hoist", "node-linker",
))  # fmt: skip
_CARGO_TABLES = ("registry", "net", "http", "build", "term")
_CARGO_KEYS = frozenset((
    "index", "registry", "replace-with", "directory", "local-registry", "protocol", "default", "offline",
    "retry", "git-fetch-with-cli", "cainfo", "check-revoke", "timeout", "multiplexing", "jobs",
    "incremental", "verbose", "color", "quiet", "target", "opt-level", "debug", "lto", "codegen-units",
))  # fmt: skip


def read_small(path: str) -> str | None:
    """The text of a small regular file, or None. Never blocks and never raises."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError):
        return None
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > _MAX:
            return None
        data = b""
        while chunk := os.read(fd, _MAX + 1 - len(data)):
            data += chunk
            if len(data) > _MAX:
                return None
    except OSError:
        return None
    finally:
        os.close(fd)
    text = data.decode("utf-8", "replace").removeprefix("\ufeff")
    # One kind of line end; str.splitlines would also split at characters that are part of a value.
    return None if "\0" in text else text.replace("\r\n", "\n").replace("\r", "\n")


# ---------------------------------------------------------------- pip


def pip_conf(text: str, admit: Callable[[str], str | None]) -> tuple[Ini, bool]:
    """pip's settings that may enter, and whether anything was held back."""
    found: Ini = {}
    held = False
    for section, key, value in _ini_items(text):
        name = key.lower().replace("_", "-").removeprefix("--")
        if not _plain(section) or name not in _PIP_KEYS:
            held = True
            continue
        kept = _admitted(value, admit)
        if kept is None or kept.split() != value.split():
            held = True
        if kept:
            found.setdefault(section, {})[name] = kept
    return found, held


def _plain(word: str) -> bool:
    return 0 < len(word) <= 64 and word.isascii() and word.replace("-", "").replace("_", "").isalnum()


def _admitted(value: str, admit: Callable[[str], str | None]) -> str | None:
    cleaned = clean(value)
    return None if cleaned is None else admit(cleaned)


def _ini_items(text: str) -> list[tuple[str, str, str]]:
    items: list[tuple[str, str, list[str]]] = []
    section = ""
    for line in text.split("\n"):
        bare = line.strip()
        if not bare or bare[0] in "#;":
            continue
        if line[0] in " \t" and items and items[-1][0] == section:
            items[-1][2].append(bare)
            continue
        if bare.startswith("[") and bare.endswith("]"):
            section = bare[1:-1].strip()
            continue
        at = min((at for at in (bare.find("="), bare.find(":")) if at > 0), default=0)
        if at:
            value = bare[at + 1 :].strip()
            items.append((section, bare[:at].strip(), [value] if value else []))
    return [(section, key, "\n".join(lines)) for section, key, lines in items]


def render_ini(ini: Ini) -> bytes:
    """The file that pip reads; a value of several lines goes on indented ones."""
    lines: list[str] = []
    for section, keys in ini.items():
        lines.append(f"[{section}]")
        for key, value in keys.items():
            parts = value.split("\n")
            lines.append(f"{key} = {parts[0]}" if len(parts) == 1 else f"{key} =")
            if len(parts) > 1:
                lines += [f"    {part}" for part in parts]
    return ("\n".join(lines) + "\n").encode()


# ---------------------------------------------------------------- npm


def npmrc(text: str, admit: Callable[[str], str | None]) -> tuple[bytes, bool]:
    """npm's settings that may enter, and whether anything was held back."""
    lines: list[str] = []
    held = False
    for line in text.split("\n"):
        bare = line.strip()
        if not bare or bare[0] in "#;":
            continue
        key, equals, value = bare.partition("=")
        key, value = key.strip(), value.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        scope = key.removeprefix("@").removesuffix(":registry")
        scoped = key == f"@{scope}:registry" and _plain(scope.replace(".", "-"))
        if not equals or not (scoped or key in _NPM_KEYS) or "${" in value:
            held = True
            continue
        kept = _admitted(value, admit)
        held = held or kept != value
        if kept:
            lines.append(f"{key}={kept}")
    return ("\n".join(lines) + "\n").encode() if lines else b"", held


# ---------------------------------------------------------------- cargo


def cargo_config(text: str, admit: Callable[[str], str | None]) -> tuple[bytes, bool]:
    """cargo's settings that may enter, and whether anything was held back.

    Read line by line, not as TOML: the parser costs more than a whole run's policy, and a line that is not
    a plain key and value is held back.
    """
    lines: list[str] = []
    table, started, held = "", False, False
    for line in text.split("\n"):
        bare = line.strip()
        if not bare or bare.startswith("#"):
            continue
        if bare.startswith("["):
            table = _cargo_table(bare)
            started = False
            held = held or not table
            continue
        key, _, value = (part.strip() for part in bare.partition("="))
        value = _without_comment(value)
        kept = _cargo_value(value, admit) if table and key in _CARGO_KEYS else None
        held = held or kept != value
        if kept is None:
            continue
        if not started:
            lines.append(f"[{table}]")
            started = True
        lines.append(f"{key} = {kept}")
    return ("\n".join(lines) + "\n").encode() if lines else b"", held


def _cargo_table(header: str) -> str:
    """The table's name in its plain form when it is about registries or building, else nothing."""
    name, bracket, rest = header[1:].partition("]")
    if not bracket or (rest.strip() and not rest.strip().startswith("#")):
        return ""
    first, _, second = (part.strip(" \"'") for part in name.strip().partition("."))
    if not second:
        return first if first in _CARGO_TABLES else ""
    if first not in ("source", "registries", "profile") or not _plain(second):
        return ""
    return f"{first}.{second}"


def _without_comment(text: str) -> str:
    """A TOML value without the comment after it."""
    if text[:1] in ('"', "'"):
        end = text.find(text[0], 1) + 1
        rest = text[end:].strip()
        return text[:end] if end and (not rest or rest.startswith("#")) else text
    return text.partition("#")[0].strip()


def _cargo_value(text: str, admit: Callable[[str], str | None]) -> str | None:
    if text in ("true", "false") or (len(text) < 10 and text.isascii() and text.isdigit()):
        return text
    if len(text) < 2 or text[0] not in "\"'" or text[-1] != text[0]:
        return None
    inner = text[1:-1]
    if not set(inner).isdisjoint("\"'\\"):
        return None
    kept = _admitted(inner, admit)
    return f"{text[0]}{kept}{text[0]}" if kept and set(kept).isdisjoint("\"'\\") else None


# ---------------------------------------------------------------- git

_GIT_KEYS = {("user", "name"), ("user", "email"), ("init", "defaultbranch")}


def git_config(texts: list[str], directories: list[str], identity: Mapping[str, str]) -> bytes:
    """A ``.gitconfig`` with who commits, the name of a first branch, and the directories that are safe.

    ``texts`` are the caller's configuration files, the weightiest last; includes are not followed.
    """
    found: dict[tuple[str, str], str] = dict.fromkeys((), "")
    for text in texts:
        found |= _git_values(text)
    for key, variable in (("name", "GIT_AUTHOR_NAME"), ("email", "GIT_AUTHOR_EMAIL")):
        if ("user", key) not in found and identity.get(variable):
            found["user", key] = identity[variable]
    lines: list[str] = []
    for section, key, shown in (
        ("user", "name", "name"), ("user", "email", "email"), ("init", "defaultbranch", "defaultBranch"),
    ):  # fmt: skip
        if (section, key) in found:
            if not lines or key == "defaultbranch":
                lines.append(f"[{section}]")
            lines.append(f"\t{shown} = {_git_quote(found[section, key])}")
    if directories:
        lines.append("[safe]")
        lines += [f"\tdirectory = {_git_quote(path)}" for path in directories]
    return os.fsencode("\n".join(lines) + "\n")


def _git_quote(value: str) -> str:
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t")):
        value = value.replace(plain, escaped)
    # Other control characters have no escape in git's syntax, and no place in a name.
    return '"' + "".join(c for c in value if ord(c) >= 32 and ord(c) != 127) + '"'


def _git_values(text: str) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    section = ""
    # A backslash at the end of a line joins it to the next.
    for line in text.replace("\\\n", "").split("\n"):
        bare = line.strip()
        if bare.startswith("["):
            # A subsection is another place: user "x" is not user.
            header, _, bare = bare[1:].partition("]")
            section = header.strip().lower()
        key, equals, value = bare.partition("=")
        name = (section, key.strip().lower())
        if equals and name in _GIT_KEYS:
            found[name] = _git_unquote(value.strip())
    return found


def _git_unquote(text: str) -> str:
    out: list[str] = []
    kept = 0  # how much of `out` is not blanks at the end outside quotes
    quoted = False
    at = 0
    while at < len(text):
        char = text[at]
        if char == "\\" and at + 1 < len(text):
            at += 1
            out.append({"n": "\n", "t": "\t", "b": ""}.get(text[at], text[at]))
            kept = len(out)
        elif char == '"':
            quoted = not quoted
            kept = len(out)
        elif char in "#;" and not quoted:
            break
        else:
            out.append(char)
            if quoted or not char.isspace():
                kept = len(out)
        at += 1
    return "".join(out[:kept])
