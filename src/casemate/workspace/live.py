"""Decides about acts in a workspace that a command changes directly: each one before it is carried out.

The rules are those of the apply step, for a tree without a top. What the apply step judges by content cannot
be judged while a program holds the file open, so it can only come about by a rename of a finished file:
``content`` names the few files of git that are made in this way, and whoever carries out the rename puts
exactly the judged bytes there. Everything else that needs its content looked at is refused.

``Preconditions`` of all answers: nobody but the caller changes the tree for the sandbox, one act at a time.
The host may change it at any time; what was remembered of it is looked at anew every second.

A command can take away everybody's right to look into its directories. What cannot be looked at is never
taken for empty: nothing is done in it that another content would forbid.
"""

from __future__ import annotations

import errno
import os
import stat
import time

from casemate.sys.files import mode_beneath, open_beneath
from casemate.workspace import gitconfig, gitfiles
from casemate.workspace.gitrepo import GitJudge, Place
from casemate.workspace.links import Links
from casemate.workspace.marks import LISTED, Strict, completes, is_marked, look_into, mark
from casemate.workspace.merged import Merged, read_file, read_link
from casemate.workspace.names import join
from casemate.workspace.protected import GIT, INSTRUCTIONS, Protected, Rule, fold
from casemate.workspace.report import (
    ASK,
    GIT_CONFIG,
    GIT_HOOK,
    GIT_REPOSITORY,
    LINK_OUTSIDE,
    MOVE,
    PROTECTED,
    Held,
)
from casemate.workspace.scan import Changes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["LiveJudge", "TooLarge"]

_REMEMBER = 1.0  # seconds
_MOST_REMEMBERED = 2_000  # a path takes up to 4 KiB
# A directory with more in it than this is not moved as a whole: looking at it keeps everybody waiting.
_MOST_MOVED = 50_000

# Of the files that git's own work makes, those whose content decides what git does on the host.
_BY_CONTENT = frozenset(
    {
        gitfiles.HEAD,
        gitfiles.CONFIG,
        gitfiles.TODO,
        gitfiles.AUTHOR,
        gitfiles.STRATEGY,
        gitfiles.OPTIONS,
        gitfiles.EMPTY,
    }
)
# Directories of a repository that are made with care or not at all.
_NOT_MADE = frozenset({"hooks", "modules", "worktrees", "branches", "remotes"})
# Git writes these beside its index and renames or removes them; the number is a process id.
_NUMBERED = ("index.stash.", "next-index-")
_PASSING = frozenset({"gc.pid", "packed-refs.new"})
_RANDOM = "info/refs_"  # and six letters


class TooLarge(OSError):
    """A directory cannot be moved as a whole: EXDEV, which tells programs to copy what is in it."""

    def __init__(self, path: str) -> None:
        super().__init__(errno.EXDEV, "more in it than is looked at for one move", path)


class _Refused:
    """A directory in which nothing may be done."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


class _Unknown(_Refused):
    """The directory ``path`` cannot be looked into. Never remembered: it takes a chmod to change that."""

    __slots__ = ("path",)

    def __init__(self, path: str, error: OSError) -> None:
        super().__init__(f"{GIT_REPOSITORY}: {path or '.'} cannot be looked into: {error.strerror}")
        self.path = path


_Context = _Refused | Place | None
"""What a directory is: out of bounds, a part of a repository, or ordinary."""


class LiveJudge:
    """The verdicts over acts below ``tree``, an open directory, which the command knows as ``workspace``.

    Paths are relative to it and free of links; the workspace itself is "". Every method returns the reason
    for a refusal, or "".
    """

    def __init__(
        self,
        tree: int,
        workspace: str,
        *,
        protect: Iterable[str] = (),
        readable: Iterable[str] = (),
        git_path: str = "/usr/bin:/usr/local/bin",
    ) -> None:
        self._tree, self._workspace = tree, workspace
        self._readable, self._git_path = tuple(readable), git_path
        self.protected = Protected(protect)
        self._learned: set[str] = set()
        self._contexts: dict[str, _Context] = {}
        self._until = 0.0
        self._git = self._look()
        # Now, as long as it has its caller's rights: the configuration may lie where nobody else can read it.
        self._context("")
        # Names beyond ASCII need its tables, and later no file can be opened for them.
        __import__("unicodedata")

    def _look(self) -> GitJudge:
        """Forget what was seen of the tree."""
        self._contexts = {}
        self._until = time.monotonic() + _REMEMBER
        self._git = GitJudge(self._merged(), self.protected, self._workspace, self._git_path)
        return self._git

    def _merged(self, kind: type[Merged] = Merged) -> Merged:
        return kind(self._tree, self._tree, Changes(entries=[], skipped=[], hidden=set()))

    def gone(self, path: str, *, whole: bool) -> None:
        """A directory was removed or has another mode, or (``whole``) was moved with all that is in it."""
        self._contexts.pop(path, None)
        if whole:
            self._until = 0.0

    # -- places --------------------------------------------------------------------------------------

    def _context(self, directory: str) -> _Context:
        if time.monotonic() > self._until or len(self._contexts) > _MOST_REMEMBERED:
            self._look()
        if directory in self._contexts:
            return self._contexts[directory]
        known = directory
        while known and known not in self._contexts:
            known = known.rpartition("/")[0]
        try:
            if not known and "" not in self._contexts:
                self._contexts[""] = self._ordinary("")
            context = self._contexts[known]
            for name in directory[len(known) :].lstrip("/").split("/") if directory != known else ():
                above, known = known, join(known, name)
                context = self._contexts[known] = self._enter(context, known, above, name)
        except OSError as error:
            return _Unknown(known, error)
        return context

    def _enter(self, context: _Context, path: str, above: str, name: str) -> _Context:
        """What a directory is, given what the one above is. Raises OSError if it cannot be looked into."""
        if isinstance(context, _Refused):
            return context
        if context is not None:
            look_into(self._tree, path)
            inside = self._git.enter(context, name, path, None)
            if inside is not None:
                return _Refused(_text(inside)) if isinstance(inside, Held) else inside
        rule = self.protected.match(above, name)
        if rule is None:
            return self._ordinary(path)
        if rule.kind == GIT and name == ".git" and self._is_directory(path):
            return Place(path, "", True)
        return _Refused(_rule(rule))

    def _ordinary(self, path: str) -> _Context:
        """An ordinary directory, unless git would take it for a repository."""
        marked, has_git = look_into(self._tree, path)
        if marked and self._git.is_repository(path):
            place = self._git.repository(path, strict=False)
            return _Refused(_text(place)) if isinstance(place, Held) else place
        if has_git or not path:  # the workspace itself may be a part of a repository
            self._learn(path)
        return None

    def _learn(self, directory: str) -> None:
        """Protect what the repository there makes git run or read, as its host has set it up."""
        for path in self._git.host_references(directory):
            if path not in self._learned:
                self._learned.add(path)
                self.protected.add_path(path)

    def _mode(self, path: str) -> int:
        try:
            return mode_beneath(self._tree, path)
        except OSError:
            return 0

    def _is_directory(self, path: str) -> bool:
        return stat.S_ISDIR(self._mode(path))

    # -- files ---------------------------------------------------------------------------------------

    def write(self, path: str, *, new: bool) -> str:
        """A file's content or attributes are changed, or (``new``) a file is made."""
        directory, _, name = path.rpartition("/")
        if not path:
            return "the workspace itself"
        context = self._context(directory)
        if isinstance(context, _Refused):
            return context.reason
        if context is not None:
            reason = self._write_git(context, directory, name, new=new)
            if reason is not None:
                return reason
        return self._named(context, directory, name, new=new)

    def _named(self, context: _Context, directory: str, name: str, *, new: bool) -> str:
        rule = self.protected.match(directory, name)
        if rule is not None:
            return _rule(rule)
        return self._completes(directory, name) if new and context is None else ""

    def _completes(self, directory: str, name: str) -> str:
        """Why a new name may not come to a directory that git would then take for a repository."""
        if not mark(name):
            return ""
        self.gone(directory, whole=True)  # it is to be looked at anew
        return completes(self._tree, directory, name)

    def _data(self, place: Place, directory: str, name: str, *, new: bool) -> str:
        """A file or directory of git's own: of any name but those that make its directory something else."""
        rule = self.protected.match(directory, name)
        if rule is not None:
            return _rule(rule)
        return self._completes(directory, name) if new and place.inner else ""

    def _write_git(self, place: Place, directory: str, name: str, *, new: bool) -> str | None:
        """A file inside a repository; None: an ordinary file beside its own."""
        inner = join(place.inner, name)
        if _is_passing(inner):
            return ""
        lock = inner.endswith(".lock")
        kind = gitfiles.classify(inner.removesuffix(".lock") if lock else inner)
        if kind == gitfiles.DATA or (lock and kind in _BY_CONTENT):
            return self._data(place, directory, name, new=new)
        if kind is None:
            if place.strict or place.inner or fold(name) in gitfiles.SPECIAL:
                return f"{GIT_REPOSITORY}: {inner} is no file that git's daily work makes"
            return None
        if kind == gitfiles.HOOK:
            return f"{GIT_HOOK}: {inner}"
        return f"{GIT_CONFIG if kind == gitfiles.CONFIG else GIT_REPOSITORY}: {inner} is not written in place"

    def content(self, path: str) -> bool:
        """Whether a file may come to this path by a rename, and with a content that ``accepts`` only."""
        directory, _, name = path.rpartition("/")
        context = self._context(directory)
        return isinstance(context, Place) and gitfiles.classify(join(context.inner, name)) in _BY_CONTENT

    def accepts(self, path: str, data: bytes) -> str:
        """Judge the bytes that are to be at a path for which ``content`` is true."""
        directory, _, name = path.rpartition("/")
        place = self._context(directory)
        if not isinstance(place, Place):
            return GIT_REPOSITORY
        kind = gitfiles.classify(join(place.inner, name))
        if kind != gitfiles.CONFIG:
            if kind is not None and gitfiles.well_formed(kind, data):
                return ""
            return f"{GIT_REPOSITORY}: {name} has a content that git would not write"
        there = read_file(self._tree, path, gitconfig.LONGEST)
        if there is None and self._mode(path):
            return f"{GIT_CONFIG}: what is there cannot be read"
        wrong, before = gitconfig.named(data), gitconfig.named(there or b"")
        if wrong is None or before is None:
            return f"{GIT_CONFIG}: not understood"
        # Settings that are there already are the host's own, and stay, in their order: another one could
        # change what they mean.
        if wrong != before:
            return f"{GIT_CONFIG}: {', '.join(sorted({item.name for item in wrong + before}))[:200]}"
        return ""

    # -- directories, links, removal -------------------------------------------------------------------

    def make_directory(self, path: str) -> str:
        """A directory is made."""
        directory, _, name = path.rpartition("/")
        if not path:
            return ""  # it exists, and the kernel says so
        context = self._context(directory)
        if isinstance(context, _Refused):
            return context.reason
        if context is not None:
            inner = join(context.inner, name)
            if gitfiles.is_directory(inner) and inner.partition("/")[0] not in _NOT_MADE:
                return self._data(context, directory, name, new=True)
            if context.strict or context.inner or fold(name) in gitfiles.SPECIAL or gitfiles.nested(inner):
                return f"{GIT_REPOSITORY}: {inner} is no directory that git's daily work makes"
        return self._named(context, directory, name, new=True)

    def touch_directory(self, path: str) -> str:
        """The mode or the times of a directory are changed."""
        context = self._context(path)
        if isinstance(context, _Unknown) and context.path == path and self._is_ordinary_above(path):
            return ""  # or nobody could ever look into it again
        if isinstance(context, _Refused):
            return context.reason
        if context is not None and (not context.inner or context.inner.partition("/")[0] in _NOT_MADE):
            return f"{GIT_REPOSITORY}: {path}"
        return ""

    def _is_ordinary_above(self, path: str) -> bool:
        return path != "" and self._context(path.rpartition("/")[0]) is None

    def closed(self, path: str) -> str:
        """Nothing at all can be done in a directory."""
        context = self._context(path)
        return context.reason if isinstance(context, _Refused) and not isinstance(context, _Unknown) else ""

    def link(self, path: str, to: str) -> str:
        """A symbolic link is made."""
        directory, _, name = path.rpartition("/")
        context = self._context(directory)
        if isinstance(context, _Refused):
            return context.reason
        if context is not None and (context.strict or context.inner or fold(name) in gitfiles.SPECIAL):
            return f"{GIT_REPOSITORY}: a link in a repository"
        return self._named(context, directory, name, new=True) or self._leads(path, to)

    def _leads(self, path: str, to: str) -> str:
        links = Links(self._merged(Strict), self.protected, self._workspace, self._readable)
        try:
            reason, _ = links.judge(path, to)
        except OSError as error:
            return f"{LINK_OUTSIDE}: what it leads to cannot be looked at: {error.strerror}"
        return "" if reason is None else f"{reason[0]}: {reason[1]}"

    def remove(self, path: str, *, directory: bool) -> str:
        """An entry is removed; of a directory, only itself, which is empty then."""
        above, _, name = path.rpartition("/")
        if not path:
            return "the workspace itself"
        context = self._context(above)
        if isinstance(context, _Refused):
            return context.reason
        if context is not None:
            if _is_passing(join(context.inner, name)):
                return ""
            judged = self._git.deletion(context, name, path, directory)
            if judged:
                return _text(judged) if isinstance(judged, Held) else ""
        rule = self.protected.match(above, name)
        if rule is not None:
            if rule.kind == GIT and name == ".git" and not directory and above:
                return ""  # the link file of a worktree or submodule: nothing is lost with it
            return _rule(rule)
        if directory and isinstance(self._context(path), Place) and context is None:
            return f"{PROTECTED}: {GIT}: a repository"
        return ""

    # -- moves ---------------------------------------------------------------------------------------

    def move(self, old: str, new: str, mode: int) -> str:
        """An entry of this mode is renamed. What a rename replaces is asked about by ``remove``."""
        if new == old or new.startswith(f"{old}/"):
            return ""  # the kernel refuses it, or does nothing
        directory = stat.S_ISDIR(mode)
        reason = self.remove(old, directory=directory)
        if reason:
            return reason
        if stat.S_ISREG(mode):
            return "" if self.content(new) else self.write(new, new=True)
        if stat.S_ISLNK(mode):
            try:
                return self.link(new, read_link(self._tree, old))
            except OSError:
                return MOVE
        if not directory:
            return "a socket, pipe or device"
        above = self._context(old.rpartition("/")[0]), self._context(new.rpartition("/")[0])
        if any(isinstance(context, Place) for context in above):
            return f"{GIT_REPOSITORY}: a directory of one is not moved"
        return self.make_directory(new) or self._move_all(old, new)

    def _move_all(self, old: str, new: str) -> str:
        """Everything in a directory comes to be elsewhere: nothing of it may be protected here or there."""
        # A link means something else where the directories above it are others.
        elsewhere = old.rpartition("/")[0] != new.rpartition("/")[0]
        stack, count = [""], 0
        while stack:
            below = stack.pop()
            here, there = join(old, below) if below else old, join(new, below) if below else new
            try:
                handle = open_beneath(self._tree, here, LISTED)
            except OSError as error:
                return f"{MOVE}: {here} cannot be looked at: {error.strerror}"
            marks: set[str] = set()
            try:
                with os.scandir(handle) as entries:
                    for entry in entries:
                        count += 1
                        if count > _MOST_MOVED:
                            raise TooLarge(old)
                        name = entry.name
                        marks.add(mark(name))
                        rule = self.protected.match(here, name) or self.protected.match(there, name)
                        if rule is not None:
                            return f"{MOVE}: {join(here, name)}: {_rule(rule)}"
                        if entry.is_dir(follow_symlinks=False):
                            stack.append(join(below, name))
                        elif entry.is_symlink() and (rule := self.protected.way(there, name)):
                            return f"{MOVE}: {join(here, name)}: a way to {rule.pattern}"
                        elif elsewhere and entry.is_symlink():
                            reason = self._leads(join(there, name), read_link(self._tree, join(here, name)))
                            if reason:
                                return f"{MOVE}: {join(here, name)}: {reason}"
            finally:
                os.close(handle)
            if is_marked(marks):
                return f"{MOVE}: {here} is a repository"
        return ""


def _is_passing(inner: str) -> bool:
    """Whether git makes a file of this name in a repository for as long as one of its commands runs."""
    name = inner.removesuffix(".lock")
    if name in _PASSING:
        return True
    if name.startswith(_RANDOM):
        return len(name) == len(_RANDOM) + 6 and name[-6:].isalnum()
    return any(name.startswith(head) and name[len(head) :].isdigit() for head in _NUMBERED)


def _rule(rule: Rule) -> str:
    return f"{ASK if rule.kind == INSTRUCTIONS else PROTECTED}: {rule.kind}: {rule.pattern}"


def _text(held: Held) -> str:
    return f"{held.reason}: {held.detail}"
