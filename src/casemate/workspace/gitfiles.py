"""The files git keeps in a repository: which are data, and what the others must look like.

Names are exact here. A known name in another case is an unknown name.
"""

from __future__ import annotations

import os

__all__ = [
    "ACTIVE",
    "ALTERNATES",
    "COMMONDIR",
    "CONFIG",
    "DATA",
    "GITDIR",
    "HOOK",
    "SPECIAL",
    "classify",
    "is_directory",
    "may_vanish",
    "nested",
    "of_worktree",
    "template_hook",
    "well_formed",
]

DATA, CONFIG, HOOK, HEAD, TODO, AUTHOR = "data", "config", "hook", "head", "todo", "author"
COMMONDIR, GITDIR, ALTERNATES, STRATEGY, OPTIONS = "commondir", "gitdir", "alternates", "strategy", "options"
EMPTY = "empty"

#: What makes a directory that becomes a repository act on the host.
ACTIVE = ("hooks", "commondir", "gitdir", "modules", "worktrees", "remotes", "branches", "rebase-merge",
          "rebase-apply", "sequencer")  # fmt: skip
#: In a repository that is not called .git, other files and directories may lie beside; these names,
#: folded, are git's all the same, whatever kind of entry has them.
SPECIAL = frozenset(
    {"head", "config", "config.worktree", "packed-refs", "index", "objects", "refs", "info", *ACTIVE}
)

_KINDS = {
    "HEAD": HEAD,
    "config": CONFIG,
    "config.worktree": CONFIG,
    "commondir": COMMONDIR,
    "gitdir": GITDIR,
    "objects/info/alternates": ALTERNATES,
    **dict.fromkeys(
        (
            "ORIG_HEAD FETCH_HEAD MERGE_HEAD CHERRY_PICK_HEAD REVERT_HEAD REBASE_HEAD BISECT_HEAD AUTO_MERGE "
            "MERGE_MSG MERGE_MODE MERGE_RR MERGE_AUTOSTASH SQUASH_MSG COMMIT_EDITMSG TAG_EDITMSG "
            "NOTES_EDITMSG NOTES_MERGE_REF NOTES_MERGE_PARTIAL EDIT_DESCRIPTION PULLREQ_EDITMSG "
            "BRANCH_DESCRIPTION description index packed-refs shallow locked gc.log BISECT_LOG BISECT_NAMES "
            "BISECT_TERMS BISECT_START BISECT_EXPECTED_REV BISECT_ANCESTORS_OK BISECT_FIRST_PARENT "
            "BISECT_RUN info/exclude info/attributes info/refs info/grafts info/sparse-checkout"
        ).split(),
        DATA,
    ),
}
# Below these directories everything is data, but for what has a kind of its own.
_TREES = ("objects/", "refs/", "logs/", "rr-cache/", "reftable/", "lfs/objects/", "lfs/tmp/", "lfs/cache/")
_DIRECTORIES = frozenset({
    "objects", "refs", "logs", "rr-cache", "reftable", "lfs", "lfs/objects", "lfs/tmp", "lfs/cache", "info",
    "hooks", "branches", "modules", "worktrees", "rebase-merge", "rebase-apply", "sequencer",
    "rebase-merge/rewritten", "rebase-apply/rewritten",
})  # fmt: skip

# What git keeps of a rebase, am, cherry-pick or revert that waits for a person.
_PENDING_DIRECTORIES = frozenset({"rebase-merge", "rebase-apply", "sequencer"})
_PENDING = {
    **dict.fromkeys(
        (
            "head-name onto orig-head head end msgnum msg msg-clean next last message message-squash "
            "patch amend autostash patch-merge-index author-date current-fixups done dropped "
            "fixup-message interactive quiet verbose rewritten-list rewritten-pending stopped-sha "
            "squash-onto refs-to-delete update-refs drop_redundant_commits keep_redundant_commits "
            "ignore_date cdate_is_adate allow_rerere_autoupdate reschedule-failed-exec "
            "no-reschedule-failed-exec signoff force-rebase abort-safety abort threeway keep keepcr "
            "scissors sign utf8 quoted-cr rebasing applying original-commit final-commit info messageid "
            "dirtyindex git-rebase-todo.total git-rebase-todo.backup"
        ).split(),
        DATA,
    ),
    "git-rebase-todo": TODO,
    "todo": TODO,
    "author-script": AUTHOR,
    "strategy": STRATEGY,
    "opts": OPTIONS,
    # Options for git apply, or of a merge strategy: such as a directory to work in.
    "apply-opt": EMPTY,
    "strategy_opts": EMPTY,
    "gpg_sign_opt": EMPTY,
}


def classify(inner: str) -> str | None:
    """The kind of a file at this place of a repository; None if git has no such file."""
    kind = _KINDS.get(inner)
    if kind is not None:
        return kind
    directory, slash, name = inner.partition("/")
    if directory == "hooks" and slash:
        return HOOK
    if inner.endswith(".lock"):  # left by a git that was killed: it would stop the next one
        return None
    if inner.startswith(_TREES):
        return None if inner == "objects/info/http-alternates" else DATA
    if directory in _PENDING_DIRECTORIES and slash:
        if directory == "rebase-apply" and name.isdigit() and name.isascii():
            return DATA  # the mails that are still to be applied
        return DATA if name.startswith("rewritten/") else _PENDING.get(name)
    return DATA if not slash and directory.startswith("sharedindex.") else None


def is_directory(inner: str) -> bool:
    """Whether git has a directory at this place."""
    return inner in _DIRECTORIES or inner.startswith(_TREES)


def nested(inner: str) -> bool:
    """Whether another repository may be at this place: of a submodule or a worktree."""
    return inner.startswith(("modules/", "worktrees/"))


def of_worktree(inner: str) -> bool:
    """Whether this is the place of a linked worktree's own directory."""
    return inner.startswith("worktrees/") and inner.count("/") == 1


def may_vanish(inner: str, is_dir: bool, worktree: bool) -> bool:
    """Whether git deletes such an entry in the course of its work. Contents are judged one by one.

    ``worktree``: of a linked worktree, which git removes as a whole.
    """
    if is_dir:
        kept = ("objects", "hooks", "modules") if worktree else ("objects", "refs", "hooks", "modules")
        return inner not in kept and (is_directory(inner) or nested(inner))
    if inner.startswith("hooks/") and inner.endswith(".sample"):
        return True
    kind = classify(inner)
    if worktree and kind in (HEAD, COMMONDIR, GITDIR, CONFIG):
        return True
    return kind not in (None, HEAD, CONFIG, HOOK, COMMONDIR, GITDIR) or inner.endswith(".lock")


# -- content ---------------------------------------------------------------------------------------------

_HEX = frozenset("0123456789abcdef")
_REF = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+@#%=,!$&'(){}")
_TODO = frozenset(
    "p pick r reword e edit s squash f fixup d drop l label t reset m merge u update-ref noop b break "
    "revert".split()
)
_STRATEGIES = frozenset({"ort", "recursive", "resolve", "octopus", "ours", "subtree"})
_OPTION_KEYS = frozenset({
    "no-commit", "edit", "allow-empty", "allow-empty-message", "drop-redundant-commits",
    "keep-redundant-commits", "signoff", "record-origin", "allow-ff", "mainline", "allow-rerere-auto",
    "default-msg-cleanup", "commit-use-reference",
})  # fmt: skip


def well_formed(kind: str, data: bytes) -> bool:
    """Whether a file has the form in which git writes it, and asks git to run nothing."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    if kind == HEAD:
        return _head(text)
    if kind == TODO:
        # Not exec, nor a command that a newer git may know.
        words = (line.split(maxsplit=1)[0] for line in text.splitlines() if line.strip())
        return all(word in _TODO or word.startswith("#") for word in words)
    if kind == AUTHOR:
        return all(_author_line(line) for line in text.splitlines())
    if kind == STRATEGY:
        return text.strip() in _STRATEGIES
    if kind == EMPTY:
        return not text.strip()
    return kind == OPTIONS and _sequencer_options(data)


def _head(text: str) -> bool:
    line = text.removesuffix("\n").rstrip(" ")
    if line.startswith("ref: "):
        name = line[5:].strip(" ")
        return (
            name.startswith("refs/")
            and ".." not in name
            and len(name) < 1000
            and all(c in _REF or (not c.isascii() and c.isprintable()) for c in name)
        )
    return len(line) in (40, 64) and _HEX.issuperset(line)


def _author_line(line: str) -> bool:
    """``GIT_AUTHOR_NAME='...'``: git's older scripts hand the file to a shell."""
    name, equals, value = line.partition("=")
    if not equals or name not in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_AUTHOR_DATE"):
        return False
    if len(value) < 2 or value[0] != "'" or value[-1] != "'":
        return False
    return "'" not in value[1:-1].replace("'\\''", "").replace("'\\!'", "")


def _sequencer_options(data: bytes) -> bool:
    from casemate.workspace.gitconfig import Unsure, parse

    try:
        items = parse(data)
    except Unsure:
        return False
    return all(item.section == "options" and item.sub is None and item.key in _OPTION_KEYS for item in items)


_templates: dict[str, bytes | None] = {}


def template_hook(name: str, path: str, workspace: str) -> bytes | None:
    """Git's own sample of this name; None if this host's git has none."""
    key = f"{path}\0{workspace}\0{name}"
    if key not in _templates:
        _templates[key] = None
        for directory in _template_directories(path, workspace):
            try:
                with open(f"{directory}/hooks/{name}", "rb") as file:
                    _templates[key] = file.read()
                break
            except OSError:
                continue
    return _templates[key]


def _template_directories(path: str, workspace: str) -> list[str]:
    found = ["/usr/share/git-core/templates", "/usr/local/share/git-core/templates"]
    for directory in path.split(":"):
        git = os.path.realpath(f"{directory}/git")
        # A git inside the workspace is the command's own.
        if directory.startswith("/") and os.path.exists(git) and not git.startswith(workspace + "/"):
            found.append(os.path.normpath(f"{os.path.dirname(git)}/../share/git-core/templates"))
    return found
