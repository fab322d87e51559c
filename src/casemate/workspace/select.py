"""Which changes of a top are meant: patterns and paths that a person names, and what was dealt with before.

A pattern without a slash matches a name at any depth, one with a slash the path from the workspace; ``*`` and
``?`` stay within one name, ``**`` stands for any number of directories. Square brackets are themselves: names
have them (``[id].tsx``) more often than anybody needs a class of characters. What matches a directory matches
all that is in it.

Names come from a hostile tree. Where one cannot be typed, it may be given as it is shown.
"""

from __future__ import annotations

from casemate.workspace.names import prefixes, printable
from casemate.workspace.protected import wildcard

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from casemate.workspace.journal import Journal

__all__ = ["Choice", "Selection"]


class Selection:
    """Patterns and exact paths. ``used`` tells afterwards which of the words have matched something."""

    def __init__(self, globs: Iterable[str] = (), paths: Iterable[str] = ()) -> None:
        self.words: set[str] = set()
        self.used: set[str] = set()
        self._paths: dict[str, str] = {}
        # Of these, the ones that are a name as it is.
        self._literal: set[str] = set()
        # Pattern of one name; the word that it comes from.
        self._names: list[tuple[str, str]] = []
        self._globs: list[tuple[tuple[str, ...], str]] = []
        self._all: set[str] = set()
        self._more: set[str] = set()
        self._known: dict[str, bool] = {"": False}
        for word in globs:
            self.words.add(word)
            parts = tuple(part for part in word.split("/") if part not in ("", "."))
            if not parts or set(parts) == {"**"}:
                self._all.add(word)
            elif len(parts) == 1 and not word.startswith(("/", "./")):
                self._names.append((parts[0], word))
            else:
                self._globs.append((parts, word))
        for word in paths:
            self.add_path(word)

    def add_path(self, word: str) -> None:
        """One more exact path; a directory means all that is in it."""
        self.words.add(word)
        plain = "/".join(part for part in word.split("/") if part not in ("", "."))
        if plain:
            self._paths[plain] = word
        else:
            self._all.add(word)
        self._known = {"": False}

    def also(self, paths: Iterable[str]) -> None:
        """Some more paths, that go with what is meant already."""
        self._more.update(paths)
        self._known = {"": False}

    def prefer(self, names: Iterable[str]) -> None:
        """A word that is one of these names means that one, and no other that is shown like it."""
        self._literal = self._paths.keys() & names
        self._known = {"": False}

    def matches(self, path: str) -> bool:
        """Whether the path, or a directory that it is in, is meant."""
        known = self._known.get(path)
        if known is None:
            above = self.matches(path.rpartition("/")[0])
            known = self._known[path] = self._own(path) or above
        return known

    def names(self, path: str) -> bool:
        """Whether this very path was named, not by a pattern and not by a directory above it."""
        return any(self._is_path(path, form) for form in (path, printable(path)))

    def _is_path(self, path: str, form: str) -> bool:
        return form in self._paths and (form == path or form not in self._literal)

    def missed(self) -> list[str]:
        """The words that nothing has matched so far."""
        return sorted(self.words - self.used)

    def _own(self, path: str) -> bool:
        self.used |= self._all
        found = bool(self._all) or path in self._more
        for form in {path, printable(path)}:
            if self._is_path(path, form):
                self.used.add(self._paths[form])
                found = True
            parts = form.split("/")
            for pattern, word in self._names:
                if wildcard(parts[-1], pattern):
                    self.used.add(word)
                    found = True
            for glob, word in self._globs:
                if _glob(parts, glob):
                    self.used.add(word)
                    found = True
        return found


def _glob(parts: list[str], pattern: tuple[str, ...]) -> bool:
    """Whether a path matches component by component; ``**`` stands for any number of them.

    As for stars within a name, only the last ``**`` is ever tried again: linear in the product.
    """
    at = position = mark = 0
    star = -1
    while position < len(parts):
        if at < len(pattern) and pattern[at] == "**":
            star, mark = at, position
            at += 1
        elif at < len(pattern) and wildcard(parts[position], pattern[at]):
            at += 1
            position += 1
        elif star >= 0:
            mark += 1
            at, position = star + 1, mark
        else:
            return False
    return all(part == "**" for part in pattern[at:])


class Choice:
    """What one step deals with: all but what was dealt with before, or what a person has chosen of that."""

    def __init__(self, only: Selection | None, journal: Journal | None) -> None:
        self.only = only
        self.done: set[str] = set() if journal is None else journal.done
        #: Whether anything at all is left out.
        self.partial = only is not None or bool(self.done)
        #: Renamed directories that must be moved for something that is wanted.
        self.extra: set[str] = set()
        #: Directories that something wanted lies in.
        self.needed: set[str] = set()

    def wants(self, path: str) -> bool:
        """Whether this change is to be made."""
        if not self.partial or path in self.extra:
            return True
        return path not in self.done and (self.only is None or self.only.matches(path))

    def need(self, path: str) -> None:
        """Something at ``path`` will be made or deleted: the directories above it are needed."""
        for above in prefixes(path)[1:]:
            if above in self.needed:
                return
            self.needed.add(above)

    def makes_directory(self, path: str) -> bool:
        """Whether a directory has to be there in the end."""
        return self.wants(path) or path in self.needed
