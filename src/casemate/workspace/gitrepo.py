"""Git repositories in a view: what of a change to one is data, and what would run on the host.

A repository is any directory that git would accept as one, whatever its name (``HEAD`` with ``objects`` and
``refs``, or ``HEAD`` with ``commondir``), or as the common directory of another one (``objects`` and ``refs``
with a configuration or hooks; no ``HEAD``). Names count from the top and from the workspace together,
deleted ones too: a deletion may yet be held back. So no repository can be put together in two runs out of
halves that look harmless, nor be taken for an ordinary directory once a part of it is gone.

Data passes: objects, refs, logs, the index, messages. Configuration passes by its keys, hooks if they
are git's own samples, files that point to another directory if that is a judged repository inside the
workspace. A ``commondir`` passes at one place and with one content: ``../..`` in ``worktrees/NAME``, where
git itself writes it. What is unknown inside a ``.git`` is held back.
"""

from __future__ import annotations

import os
import stat

import msgspec

from casemate.workspace import gitconfig, gitfiles, marks
from casemate.workspace.gitruns import HostRuns, leads_to
from casemate.workspace.merged import read_file
from casemate.workspace.names import join, prefixes, printable
from casemate.workspace.protected import GIT, fold
from casemate.workspace.report import (
    GIT_CONFIG,
    GIT_HOOK,
    GIT_LINK,
    GIT_REPOSITORY,
    PASS,
    PROTECTED,
    Held,
    Verdict,
)
from casemate.workspace.scan import DIR, FILE, WHITEOUT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from casemate.workspace.merged import Merged
    from casemate.workspace.protected import Protected
    from casemate.workspace.scan import Change

__all__ = ["GitJudge", "Place"]

_SHORT = 1 << 16
_WORKTREE = "core.worktree"


class Place(msgspec.Struct, frozen=True):
    """A directory inside a repository."""

    #: The repository's own directory, as a path of the view.
    root: str
    #: Where in it we are: "" for its own directory, else such as ``objects/pack``.
    inner: str
    #: Called .git, or inside one: nothing unknown passes.
    strict: bool
    #: The directory of a linked worktree, and of nothing else: git removes it as a whole.
    worktree: bool = False


class GitJudge:
    """Judges what belongs to repositories in one view."""

    def __init__(self, merged: Merged, protected: Protected, workspace: str, path: str) -> None:
        self.merged, self.protected, self.path = merged, protected, path
        self.workspace = workspace.rstrip("/")
        self._marks: dict[str, set[str]] = {}
        #: Directories that get a file called .git: what runs in them is what its repository has set up.
        self.linked: set[str] = set()
        for change in merged.index.values():
            directory, _, name = change.path.rpartition("/")
            if name == ".git" and change.kind == FILE:
                self.linked.add(directory)
            found = marks.mark(name)
            # What is deleted counts as the workspace has it.
            if found and not (found in marks.FILES and change.kind in (DIR, WHITEOUT)):
                self._marks.setdefault(directory, set()).add(found)
        self._runs = HostRuns(merged, self.workspace, gitconfig.named, self._written)
        self._repositories: dict[str, bool] = {}
        self._sound: dict[str, Held | None] = {}

    # -- recognising ---------------------------------------------------------------------------------

    def is_repository(self, path: str) -> bool:
        """Whether git could take the directory for a repository once everything has been applied."""
        known = self._repositories.get(path)
        if known is None:
            known = self._repositories[path] = self._marked(path, self._marks.get(path, set()))
        return known

    def _marked(self, path: str, above: set[str]) -> bool:
        places = self._lower_places(path)
        return marks.recognised(
            lambda name: name.lower() in above or any(self._has(at, name) for at in places)
        )

    def _has(self, directory: str, name: str) -> bool:
        """Whether a directory of the workspace has one of the marks."""
        mode = self.merged.lower_mode(join(directory, name))
        return mode != 0 and not (name in marks.FILES and stat.S_ISDIR(mode))

    def _lower_places(self, path: str) -> list[str]:
        """Where the workspace may have a part of the directory: at its own place, and where it came from."""
        node = self.merged.find(path)
        places = [path] if self.merged.lower_mode(path) else []
        if node.kind == DIR and node.lower is not None and node.lower != path:
            places.append(node.lower)
        return places

    def _in_workspace(self, path: str) -> bool:
        """Whether the workspace alone already has a repository there."""
        return marks.recognised(lambda name: self._has(path, name))

    def repository(self, path: str, *, strict: bool, worktree: bool = False) -> Place | Held:
        """The place of a repository's own directory; held if the workspace's half of it is not sound."""
        if path not in self._sound:
            self._sound[path] = None if strict else self._unsound(path)
        held = self._sound[path]
        return Place(path, "", strict, worktree) if held is None else held

    def _is_worktree(self, place: Place, inner: str, path: str) -> bool:
        """Whether a repository inside another one is no more than a worktree of that one."""
        if place.worktree or not gitfiles.of_worktree(inner):
            return False
        above = self._marks.get(path, ())
        return "objects" not in above and not any(self._has(at, "objects") for at in self._lower_places(path))

    def _unsound(self, path: str) -> Held | None:
        """What is there already was an ordinary directory and judged as one: judge it as a repository."""
        for place in self._lower_places(path):
            if place == path and self._in_workspace(place):
                continue
            for name in ("config", "config.worktree"):
                if self._has(place, name):
                    data = read_file(self.merged.lower, join(place, name), gitconfig.LONGEST)
                    if data is None or self._unsafe_keys(data, path) != []:
                        return _held(path, GIT_REPOSITORY, f"would become one, with the {name} that is there")
            for name in gitfiles.ACTIVE:
                if self.merged.lower_mode(join(place, name)):
                    return _held(path, GIT_REPOSITORY, f"would become one, with the {name} that is there")
        return None

    # -- directories ---------------------------------------------------------------------------------

    def enter(self, place: Place, name: str, path: str, change: Change | None) -> Place | Held | None:
        """The place of a directory inside a repository; None: no part of it, an ordinary directory."""
        inner = join(place.inner, name)
        hides = change is not None and change.hides
        known = gitfiles.nested(inner) or gitfiles.is_directory(inner)
        if (known or place.inner) and self.is_repository(path):
            if hides or not gitfiles.nested(inner):
                return _held(path, GIT_REPOSITORY, "a repository in the place of a part of another one")
            worktree = self._is_worktree(place, inner, path)
            return self.repository(path, strict=place.strict, worktree=worktree)
        part = gitfiles.of_worktree(inner) or (gitfiles.nested(inner) and place.strict)
        if part or gitfiles.is_directory(inner):
            if self.protected.match(join(place.root, place.inner) if place.inner else place.root, name):
                return _held(path, GIT_REPOSITORY, f"{inner}: not a known part of a repository")
            if hides and not gitfiles.may_vanish(inner, True, place.worktree):
                return _held(path, GIT_REPOSITORY, f"replaces {inner} of a repository")
            return Place(place.root, inner, place.strict, place.worktree)
        if place.strict or fold(name) in gitfiles.SPECIAL:
            return _held(path, GIT_REPOSITORY, f"{inner}: not a known part of a repository")
        return None

    # -- entries -------------------------------------------------------------------------------------

    def entry(self, place: Place, name: str, change: Change) -> Verdict | None:
        """The verdict over a file, link or the like in a repository; None: an ordinary file beside it."""
        inner = join(place.inner, name)
        kind = gitfiles.classify(inner)
        if kind is None:
            if place.strict or place.inner or fold(name) in gitfiles.SPECIAL:
                return _no(change, GIT_REPOSITORY, f"{inner}: not a known part of a repository")
            return None
        if change.kind != FILE:
            return _no(change, GIT_REPOSITORY, f"{inner} is no regular file")
        if kind == gitfiles.DATA:
            # objects and refs hold anything, but nothing that is somebody else's configuration.
            rule = self.protected.match(change.path.rpartition("/")[0], name)
            return PASS if rule is None else _no(change, PROTECTED, f"{rule.kind}: {rule.pattern}")
        if kind == gitfiles.CONFIG:
            return self._config(place.root, change)
        if kind == gitfiles.HOOK:
            return self._hook(name, change)
        data = read_file(self.merged.top, change.path, _SHORT)
        if data is None:
            return _no(change, GIT_REPOSITORY, f"{inner} is too long")
        if kind in (gitfiles.COMMONDIR, gitfiles.GITDIR, gitfiles.ALTERNATES):
            problem = self._pointer(kind, place, data)
            return Verdict(content=data) if problem is None else _no(change, GIT_LINK, problem)
        if not gitfiles.well_formed(kind, data):
            return _no(change, GIT_REPOSITORY, f"{inner} has a content that git would not write")
        return Verdict(content=data)

    def _config(self, root: str, change: Change) -> Verdict:
        data = read_file(self.merged.top, change.path, gitconfig.LONGEST)
        if data is None:
            return _no(change, GIT_CONFIG, "too long")
        wrong = self._unsafe_keys(data, root)
        if wrong is None:
            return _no(change, GIT_CONFIG, "not understood")
        if self._moves(data, root, change):
            return _no(change, GIT_CONFIG, _WORKTREE)
        if wrong and wrong != self._host_keys(root, change):
            return _no(change, GIT_CONFIG, ", ".join(sorted({item.name for item in wrong}))[:200])
        return Verdict(content=data)

    def _unsafe_keys(self, data: bytes, root: str) -> list[gitconfig.Item] | None:
        """The settings that are not safe; None if the text is not understood."""
        try:
            return gitconfig.unsafe(gitconfig.parse(data), lambda path: self._usable(root, path))
        except gitconfig.Unsure:
            return None

    def _host_keys(self, root: str, change: Change) -> list[gitconfig.Item] | None:
        """The unsafe settings that the workspace's own file has: a person has put them there."""
        data = read_file(self.merged.lower, change.path, gitconfig.LONGEST)
        return None if data is None else self._unsafe_keys(data, root)

    def _moves(self, data: bytes, root: str, change: Change) -> bool:
        """Whether a repository that the workspace has gets another work tree: what the host has set up to be
        run, relative to the work tree, would be something else then.
        """
        there = [self.merged.lower_mode(join(root, name)) for name in ("config", "config.worktree")]
        if not any(there) and change.path == join(root, "config"):
            return False
        before = read_file(self.merged.lower, change.path, gitconfig.LONGEST)
        return _work_trees(data) != _work_trees(before or b"")

    def _usable(self, base: str, path: str) -> bool:
        """Whether git may be told to keep files at ``path``: in the workspace, nowhere protected."""
        resolved = self._written(base, path)
        if not resolved:
            return resolved is not None
        if self.protected.judge(resolved):
            return False
        return not any(self.is_repository(at) for at in prefixes(resolved))

    def _hook(self, name: str, change: Change) -> Verdict:
        if name.endswith(".sample"):
            data = read_file(self.merged.top, change.path, _SHORT)
            if data is not None and data == gitfiles.template_hook(name, self.path, self.workspace):
                return Verdict(content=data)
        return _no(change, GIT_HOOK, "not one of git's own samples")

    # -- files that point elsewhere --------------------------------------------------------------------

    def _resolve(self, base: str, path: str) -> str | None:
        """A path written in a file, as a path of the view; None if it leaves the workspace or is odd.

        ``base`` is the directory it is relative to. No link may be on the way.
        """
        if not path or "\0" in path or "\n" in path or len(path) > 4000:
            return None
        if path.startswith("/"):
            if path != self.workspace and not path.startswith(self.workspace + "/"):
                return None
            path, base = path[len(self.workspace) :], ""
        here = base.split("/") if base else []
        for name in path.split("/"):
            if name == "..":
                if not here:
                    return None
                here.pop()
            elif name not in ("", "."):
                here.append(name)
                if self.merged.find("/".join(here)).kind not in (DIR, FILE, ""):
                    return None
        return "/".join(here)

    def _written(self, base: str, path: str) -> str | None:
        """``_resolve`` for what a command has written. There ``..`` may stand at the beginning only: after a
        name it means something else once that name is a link.
        """
        names = [name for name in path.split("/") if name not in ("", ".")]
        while names and names[0] == ".." and not path.startswith("/"):
            del names[0]
        return None if ".." in names else self._resolve(base, path)

    def _pointer(self, kind: str, place: Place, data: bytes) -> str | None:
        """What is wrong with a commondir, gitdir or alternates file, or None."""
        text = os.fsdecode(data)
        if kind == gitfiles.ALTERNATES:
            for line in text.splitlines():
                if line and not line.startswith("#"):
                    objects = self._written(join(place.root, "objects"), line)
                    if line.startswith('"') or objects is None:
                        return "leads out of the workspace"
            return None
        if not place.worktree:
            return "only the directory of a worktree has one"
        to = text.removesuffix("\n")
        if kind == gitfiles.COMMONDIR:
            return None if to == "../.." else "does not lead to the repository that it is in"
        resolved = self._written(place.root, to)
        if resolved is None:
            return "leads out of the workspace"
        return None if resolved.rpartition("/")[2] == ".git" else "does not name a .git"

    def _is_sound(self, path: str) -> bool:
        if not self.is_repository(path):
            return False
        strict = ".git" in path.split("/")
        return not isinstance(self.repository(path, strict=strict), Held)

    def link_file(self, change: Change) -> Verdict:
        """A file called .git: it must name a repository in the workspace that passes itself."""
        data = read_file(self.merged.top, change.path, _SHORT)
        text = os.fsdecode(data or b"")
        if not text.startswith("gitdir: "):
            return _no(change, GIT_LINK, "not a link of git's")
        to = self._written(change.path.rpartition("/")[0], leads_to(data))
        if to is None or not self._is_sound(to):
            return _no(change, GIT_LINK, "does not lead to a repository in the workspace that passes")
        return Verdict(content=data)

    def modules_file(self, change: Change) -> Verdict:
        """A .gitmodules: by its keys, as a configuration."""
        return self._config(change.path.rpartition("/")[0], change)

    # -- deletions -----------------------------------------------------------------------------------

    def deletion(self, place: Place, name: str, path: str, is_dir: bool) -> Held | bool:
        """Held, or True: the host's entry may go; False: the rules for ordinary files hold."""
        inner = join(place.inner, name)
        if gitfiles.may_vanish(inner, is_dir, place.worktree):
            return True
        if not place.strict and gitfiles.classify(inner) is None and not gitfiles.is_directory(inner):
            return False
        return _held(path, PROTECTED, f"{GIT}: would delete {inner}")

    # -- what the host's own configuration runs --------------------------------------------------------

    def host_references(self, directory: str) -> Iterator[str]:
        """Paths that git runs or reads in ``directory`` because its host has set it up so."""
        return self._runs.paths(directory, linked=directory in self.linked)


def _work_trees(data: bytes) -> list[str | None] | None:
    """Every value that a configuration gives for the work tree; None if it is not understood."""
    try:
        return [item.value for item in gitconfig.parse(data) if item.name == _WORKTREE]
    except gitconfig.Unsure:
        return None


def _no(change: Change, reason: str, detail: str) -> Verdict:
    return Verdict(_held(change.path, reason, detail))


def _held(path: str, reason: str, detail: str) -> Held:
    """The detail may quote the command's own names and keys."""
    return Held(path, reason, printable(detail))
