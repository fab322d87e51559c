"""Names that a sandboxed command may write in its view, but not hand to the host unasked.

A name is in the table if some tool acts on it *without* being asked to run the project's code (a shell
that starts, a ``cd``, an editor that opens the folder, git, an agent, an installer), or if it decides
what review, CI or Casemate itself enforces. Makefiles, build scripts, tests and tools' plug-ins in the
project's own language run only when a person runs the project: they are the work itself, and not here.

Names count at any depth, whether or not they exist, and *folded*: case, compatibility characters, code
points a file system may ignore, trailing dots and spaces, and NTFS streams make no difference, since on
some host they do not.
"""

from __future__ import annotations

import os
from bisect import bisect_right

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CI", "GIT", "INSTRUCTIONS", "TABLE", "Protected", "Rule", "fold", "wildcard"]

#: Kinds that are treated in a way of their own: judged by content, configurable, asked about.
GIT, CI, INSTRUCTIONS = "git", "ci", "instructions"

#: kind -> names. ``*`` stands for any run of characters; a slash means these components, at any depth.
#: A directory that matches protects everything in it.
TABLE: dict[str, str] = {
    "casemate": "casemate.toml .casemate*",
    # .git and .gitmodules are judged by content (gitrepo), not by name alone. git~1 is .git's short name.
    GIT: ".git git~1 .gitmodules gitmod~1 .gitconfig .lfsconfig",
    "vcs": ".hg/hgrc* .hg/sharedpath .jj/repo/config* .sl/config*",
    "hooks": (
        ".husky .githooks .pre-commit-config.yaml .pre-commit-config.yml lefthook.* .lefthook.* "
        "lefthook-local.* .lefthook-local.* .lefthook .lefthook-local .overcommit.yml .overcommit "
        ".lintstagedrc*"
    ),
    "shell": (
        ".bashrc .bash_profile .bash_login .bash_logout .bash_aliases .profile .login .logout .zshrc "
        ".zshenv .zprofile .zlogin .zlogout .kshrc .mkshrc .cshrc .tcshrc .inputrc .xprofile .xinitrc "
        ".xsession .xsessionrc .pam_environment config.fish fish/conf.d .tmux.conf .screenrc"
    ),
    "directory": (
        ".envrc* .direnvrc .autoenv* .zautoenv .localrc .shadowenv.d mise.toml .mise.toml mise.*.toml "
        ".mise.*.toml .mise .rtx.toml .asdfrc"
    ),
    "start-up": (
        ".gdbinit .lldbinit .pdbrc .pdbrc.py .irbrc .pryrc .rprofile .renviron .ghci .ripgreprc .ackrc "
        ".exrc .vimrc .gvimrc .nvimrc .nvim.lua .lvimrc .vimrc.local .vimspector.json .ycm_extra_conf.py "
        ".emacs .emacs.d .dir-locals.el .dir-locals-2.el"
    ),
    "editor": (
        ".vscode .vscode-* .idea .fleet .zed .nova .vs .devcontainer* *.code-workspace *.sublime-project "
        "*.sublime-workspace .theia"
    ),
    "agent": (
        ".mcp.json mcp.json .claude .claude.json .claude-* .codex .agents .cursor .gemini .qwen .windsurf "
        ".kiro .trae .junie .roo .roomodes .cline .kilocode .kilocodemodes .continue .continuerc.json "
        ".amazonq .augment .amp .goose .opencode opencode.json opencode.jsonc .crush .crush.json "
        "crush.json .factory .openhands .copilot .aider.* .github/hooks"
    ),
    "package": (
        ".npmrc .yarnrc .yarnrc.* .yarn/releases .yarn/plugins .pnpmfile.* pnpmfile.js .pnpmrc "
        "bunfig.toml .bunfig.toml pip.conf pip.ini .pip .pypirc uv.toml poetry.toml .condarc .mambarc "
        ".cargo/config .cargo/config.toml .cargo/credentials* .gemrc .bundle/config .gem/credentials "
        "nuget.config .m2/settings*.xml .mvn .terraformrc terraform.rc .docker/config.json .dockercfg"
    ),
    CI: (
        ".github/workflows .github/actions .gitea/workflows .forgejo/workflows .gitlab-ci.yml "
        ".gitlab-ci.yaml .gitlab-ci .circleci .travis.yml .travis.yaml jenkinsfile jenkinsfile.* "
        "*.jenkinsfile azure-pipelines*.yml azure-pipelines*.yaml .azure-pipelines .azuredevops "
        ".azure-devops bitbucket-pipelines.yml .drone.yml .drone.star .drone.jsonnet .woodpecker "
        ".woodpecker.yml .woodpecker.yaml .buildkite appveyor.yml .appveyor.yml .cirrus.yml .cirrus.star "
        ".semaphore .teamcity .tekton cloudbuild.yml cloudbuild.yaml cloudbuild.json buildspec.yml "
        "buildspec.yaml .build.yml .builds wercker.yml codemagic.yaml bitrise.yml .harness "
        "screwdriver.yaml"
    ),
    INSTRUCTIONS: (
        "claude.md claude.local.md agents.md agent.md agents.override.md gemini.md qwen.md .cursorrules "
        ".windsurfrules .clinerules .roorules* .goosehints .github/copilot-instructions.md "
        ".github/instructions .github/prompts .github/chatmodes .github/agents"
    ),
}

# Installed packages bring their own CI files along; no service reads them there.
_INSTALLED = frozenset({"node_modules", "site-packages", "dist-packages"})

# Code points that HFS+, or a case-folding ext4 or f2fs, leaves out of a comparison: Unicode's
# Default_Ignorable_Code_Point, as (first, last).
_IGNORED = (
    (0x00AD, 0x00AD), (0x034F, 0x034F), (0x061C, 0x061C), (0x115F, 0x1160), (0x17B4, 0x17B5),
    (0x180B, 0x180F), (0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164),
    (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8), (0x1BCA0, 0x1BCA3),
    (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF),
)  # fmt: skip
_IGNORED_FROM = [first for first, _ in _IGNORED]


def fold(name: str) -> str:
    """The form of one name in which two names that some file system takes for the same are equal."""
    folded = name.lower() if name.isascii() else _fold_unicode(name)
    if ":" in folded[1:]:  # .git::$INDEX_ALLOCATION is .git on NTFS
        folded = folded[0] + folded[1:].partition(":")[0]
    return folded.rstrip(". ") or folded


def _fold_unicode(name: str) -> str:
    import unicodedata  # only names beyond ASCII need its tables

    # The locale's encoding may not be the file system's: judge the bytes.
    text = os.fsencode(name).decode("utf-8", "surrogateescape")
    kept = "".join(character for character in text if not _ignorable(ord(character)))
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", kept).casefold())
    return "".join(character for character in folded if not _ignorable(ord(character)))


def _ignorable(code: int) -> bool:
    at = bisect_right(_IGNORED_FROM, code) - 1
    return at >= 0 and code <= _IGNORED[at][1]


class Rule(msgspec.Struct, frozen=True):
    """Why a name is protected."""

    kind: str
    pattern: str

    @property
    def ask(self) -> bool:
        """Prose for an agent: held back to be looked at, not because a tool would run it."""
        return self.kind == INSTRUCTIONS


class Protected:
    """The table, made ready for judging. ``extra`` are a policy's own patterns, of kind ``policy``.

    A pattern that starts with a slash counts from the workspace's root only; else it counts at any depth.
    """

    def __init__(self, extra: Iterable[str] = (), *, ci: bool = True) -> None:
        self._exact: dict[str, Rule] = {}
        # By last component, for patterns of several: (the components before it, rule).
        self._tails: dict[str, list[tuple[tuple[str, ...], Rule]]] = {}
        # Patterns with a wildcard: (pattern's components, from the root only, rule).
        self._globs: list[tuple[tuple[str, ...], bool, Rule]] = []
        # Paths from the root, literally, by last component: (the components before it, rule).
        self._paths: dict[str, list[tuple[tuple[str, ...], Rule]]] = {}
        # What goes before the last component of patterns and paths of several: (components, from the root
        # only, rule).
        self._ways: list[tuple[tuple[str, ...], bool, Rule]] = []
        for kind, names in TABLE.items():
            if ci or kind != CI:
                for name in names.split():
                    self._add(name, kind)
        for pattern in extra:
            self._add(pattern, "policy")
        # Most names match no wildcard: one test against all literal beginnings and ends settles that.
        self._rest = False
        heads: set[str] = set()
        ends: set[str] = set()
        for parts, _, _ in self._globs:
            last = parts[-1]
            literal = last if "*" not in last and "?" not in last else ""
            head, end = last.partition("*")[0], last.rpartition("*")[2]
            if literal or (head and "?" not in head):
                heads.add(literal or head)
            elif end and "?" not in end:
                ends.add(end)
            else:
                self._rest = True
        self._heads, self._ends = tuple(heads), tuple(ends)

    def _add(self, pattern: str, kind: str) -> None:
        rooted = pattern.startswith("/")
        parts = tuple(_fold_pattern(part) for part in pattern.split("/") if part and part != ".")
        if not parts:
            return
        rule = Rule(kind, pattern)
        self._add_ways(parts, rooted, rule)
        if rooted or any("*" in part or "?" in part for part in parts):
            self._globs.append((parts, rooted, rule))
        elif len(parts) == 1:
            self._exact.setdefault(parts[0], rule)
        else:
            self._tails.setdefault(parts[-1], []).append((parts[:-1], rule))

    def _add_ways(self, parts: tuple[str, ...], rooted: bool, rule: Rule) -> None:
        for count in range(1, len(parts)):
            # A link of any name to a directory: what is in that one matches ``*/name`` itself.
            if parts[count - 1] != "*":
                self._ways.append((parts[:count], rooted, rule))

    def add_path(self, path: str) -> None:
        """Protect one path of the workspace: the host's own configuration runs or reads it."""
        parts = tuple(fold(part) for part in path.split("/"))
        rule = Rule("policy", f"/{path}")
        self._paths.setdefault(parts[-1], []).append((parts[:-1], rule))
        self._add_ways(tuple(part.replace("*", "?") for part in parts), True, rule)

    def way(self, directory: str, name: str) -> Rule | None:
        """The rule that a link of this name would be a way around: ``.cargo/config.toml`` is protected, and a
        link ``.cargo`` to an ordinary directory with a ``config.toml`` would bring it about.
        """
        folded = fold(name)
        for parts, rooted, rule in self._ways:
            if wildcard(folded, parts[-1]) and self._is_below(directory, parts[:-1], rooted):
                if rule.kind == CI and _INSTALLED.intersection(directory.split("/")):
                    continue
                return rule
        return None

    @staticmethod
    def _is_below(directory: str, before: tuple[str, ...], rooted: bool) -> bool:
        """Whether a directory ends (or, ``rooted``: is) as the components of a pattern say."""
        if rooted and (directory.count("/") + 1 if directory else 0) != len(before):
            return False
        above = _parents(directory, len(before))
        return len(above) == len(before) and all(map(wildcard, above, before))

    def match(self, directory: str, name: str) -> Rule | None:
        """The rule that protects ``name`` in ``directory``; that ``directory`` is unprotected is known."""
        folded = fold(name)
        rule = self._exact.get(folded)
        if rule is None and folded in self._tails:
            for before, tail_rule in self._tails[folded]:
                if _parents(directory, len(before)) == before:
                    rule = tail_rule
        if rule is None and folded in self._paths:
            above = tuple(map(fold, directory.split("/"))) if directory else ()
            rule = next((path_rule for before, path_rule in self._paths[folded] if before == above), None)
        if rule is None and (self._rest or folded.startswith(self._heads) or folded.endswith(self._ends)):
            rule = self._glob(directory, folded)
        if rule is not None and rule.kind == CI and _INSTALLED.intersection(directory.split("/")):
            return None
        return rule

    def judge(self, path: str) -> Rule | None:
        """The rule that protects ``path``, by its own name or by that of a directory above it."""
        directory = ""
        for name in path.split("/"):
            if rule := self.match(directory, name):
                return rule
            directory = f"{directory}/{name}" if directory else name
        return None

    def _glob(self, directory: str, folded: str) -> Rule | None:
        for parts, rooted, rule in self._globs:
            if not wildcard(folded, parts[-1]):
                continue
            if self._is_below(directory, parts[:-1], rooted):
                return rule
        return None


def _parents(directory: str, count: int) -> tuple[str, ...]:
    if not count or not directory:
        return ()
    return tuple(fold(name) for name in directory.split("/")[-count:])


def _fold_pattern(part: str) -> str:
    # A trailing dot is cut off as in names, or the pattern could match nothing.
    folded = part.lower() if part.isascii() else _fold_unicode(part)
    return folded.rstrip(". ") or folded


def wildcard(name: str, pattern: str) -> bool:
    """Whether ``name`` matches ``pattern`` with ``*`` (any run) and ``?`` (one character).

    Linear in the product at worst: only the last star is ever tried again.
    """
    at = star = mark = 0
    seen = False
    position = 0
    while position < len(name):
        if at < len(pattern) and pattern[at] == "*":
            star, mark, seen = at, position, True
            at += 1
        elif at < len(pattern) and pattern[at] in ("?", name[position]):
            at += 1
            position += 1
        elif seen:
            mark += 1
            at, position = star + 1, mark
        else:
            return False
    while at < len(pattern) and pattern[at] == "*":
        at += 1
    return at == len(pattern)
