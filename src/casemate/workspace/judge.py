"""Decides, entry by entry, what of a command's changes may reach the workspace.

Reads the top and the workspace, changes neither. Each directory has a *context*, made once from its
parent's: ordinary, held (with everything below it), or inside a git repository.
"""

from __future__ import annotations

import msgspec

from casemate.workspace.gitrepo import GitJudge, Place
from casemate.workspace.links import Links
from casemate.workspace.protected import GIT, Protected, Rule
from casemate.workspace.report import ASK, GIT_REPOSITORY, PASS, PROTECTED, SPECIAL, Held, Verdict
from casemate.workspace.scan import DIR, FILE, LINK, WHITEOUT, Change

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.workspace.merged import Merged
    from casemate.workspace.report import ApplyOptions

__all__ = ["Context", "Judge"]


class Context(msgspec.Struct, frozen=True):
    """What a directory is, for the entries in it. All fields None: an ordinary directory."""

    held: Held | None = None
    git: Place | None = None


ORDINARY = Context()


class Judge:
    """The verdicts over one view."""

    def __init__(self, merged: Merged, workspace: str, options: ApplyOptions) -> None:
        self.merged = merged
        self.protected = Protected(options.protect, ci=options.ci)
        self.links = Links(merged, self.protected, workspace, options.readable_roots)
        self.git = GitJudge(merged, self.protected, workspace, options.git_path)

        # All of it before anything is judged: what a repository makes git run may lie anywhere.
        for change in merged.index.values():
            if change.kind == DIR and change.source:
                self._learn(change.source)
        for directory in ("", *self.git.linked):
            self._learn(directory)
        #: The context of the workspace itself.
        self.root = self._repository(ORDINARY, "")

    def _learn(self, directory: str) -> None:
        """Protect what the host's own git configuration there makes git run."""
        for path in self.git.host_references(directory):
            self.protected.add_path(path)

    @staticmethod
    def holding(held: Held) -> Context:
        """The context of a directory that is held back as a whole."""
        return Context(held=held)

    def enter(self, context: Context, path: str, change: Change | None) -> Context:
        """The context of a directory, given its parent's. ``change`` is None if only the host has it."""
        if context.held is not None:
            return context
        directory, _, name = path.rpartition("/")
        if context.git is not None:
            verdict = self.git.enter(context.git, name, path, change)
            if isinstance(verdict, Held):
                return Context(held=verdict)
            if verdict is not None:
                return Context(git=verdict)
        rule = self.protected.match(directory, name)
        if rule is not None:
            if rule.kind == GIT and name == ".git":
                return self._dot_git(path, change)
            return Context(held=_protected(path, rule))
        return self._repository(ORDINARY, path, change)

    def _dot_git(self, path: str, change: Change | None) -> Context:
        if change is not None and change.hides:
            return Context(held=Held(path, GIT_REPOSITORY, "another .git in the place of the one there"))
        place = self.git.repository(path, strict=True)
        return Context(held=place) if isinstance(place, Held) else Context(git=place)

    def _repository(self, context: Context, path: str, change: Change | None = None) -> Context:
        """An ordinary directory, unless git would take it for a repository."""
        if not self.git.is_repository(path):
            return context
        if change is not None and change.hides:
            return Context(held=Held(path, GIT_REPOSITORY, "in the place of what is there"))
        place = self.git.repository(path, strict=False)
        return Context(held=place) if isinstance(place, Held) else Context(git=place)

    def entry(self, context: Context, change: Change) -> Verdict:
        """The verdict over an entry of the top that is no directory."""
        if context.held is not None:
            return Verdict(context.held)
        directory, _, name = change.path.rpartition("/")
        if change.kind == WHITEOUT:
            held = self.deletion(context, change.path, change.lower_mode)
            return PASS if held is None else Verdict(held)
        if context.git is not None:
            judged = self.git.entry(context.git, name, change)
            if judged is not None:
                return judged
        rule = self.protected.match(directory, name)
        if rule is not None:
            return self._protected_entry(change, name, rule)
        if change.kind == FILE:
            return PASS
        if change.kind == LINK:
            return self._link(change)
        return Verdict(Held(change.path, SPECIAL, "a socket, pipe or device"))

    def _protected_entry(self, change: Change, name: str, rule: Rule) -> Verdict:
        if rule.kind == GIT and change.kind == FILE and name in (".git", ".gitmodules"):
            return self.git.link_file(change) if name == ".git" else self.git.modules_file(change)
        return Verdict(_protected(change.path, rule))

    def _link(self, change: Change) -> Verdict:
        to = self.merged.target_of(self.merged.find(change.path))
        reason, mode = self.links.judge(change.path, to)
        if reason is not None:
            return Verdict(Held(change.path, *reason))
        return Verdict(executable=bool(mode & 0o111) and mode & 0o170000 == 0o100000)

    def deletion(self, context: Context, path: str, mode: int) -> Held | None:
        """Why the host's entry (alone, not what is in it) may not be removed, or None."""
        if context.held is not None:
            return context.held
        directory, _, name = path.rpartition("/")
        is_dir = mode & 0o170000 == 0o040000
        if context.git is not None:
            judged = self.git.deletion(context.git, name, path, is_dir)
            if judged:
                return judged if isinstance(judged, Held) else None
        rule = self.protected.match(directory, name)
        if rule is not None:
            if rule.kind == GIT and name == ".git" and not is_dir and directory:
                return None  # the link file of a worktree or submodule: nothing is lost with it
            return _protected(path, rule)
        place = self.enter(context, path, None).git if is_dir else None
        if place is not None and not place.inner:
            return Held(path, PROTECTED, f"{GIT}: would delete a repository")
        return None


def _protected(path: str, rule: Rule) -> Held:
    return Held(path, ASK if rule.ask else PROTECTED, f"{rule.kind}: {rule.pattern}")
