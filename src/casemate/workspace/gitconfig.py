"""Git's configuration files: a strict reader of their syntax, and the keys that are safe to accept.

The reader accepts what git accepts and gives the same values, except where git's versions differ or the
text is odd enough that a person should look: there it raises ``Unsure``. What it does not understand is
unsafe, so it never has to guess.
"""

from __future__ import annotations

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Item", "Unsure", "named", "parse", "safe_url", "unsafe"]

#: Longer files are not read: nobody writes them by hand, and git does not either.
LONGEST = 1 << 18

_KEY = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-")
_ALPHA = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_ESCAPES = {"t": "\t", "b": "\b", "n": "\n", "\\": "\\", '"': '"'}


class Unsure(Exception):
    """The text is no git configuration, or not one that every git reads alike."""


class Item(msgspec.Struct, frozen=True):
    """One setting. ``section`` and ``key`` are in lower case; ``sub`` is None without a subsection."""

    section: str
    sub: str | None
    key: str
    #: None: the key stands alone, which means true.
    value: str | None

    @property
    def name(self) -> str:
        """As ``git config`` shows it."""
        return ".".join(part for part in (self.section, self.sub, self.key) if part is not None)


def parse(data: bytes) -> list[Item]:
    """All settings in order. Raises ``Unsure``."""
    if len(data) > LONGEST or b"\0" in data:
        raise Unsure("not a text of reasonable length")
    text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape").replace("\r\n", "\n")
    if "\r" in text:
        raise Unsure("a lone carriage return")
    return _Reader(text + "\n").read()


class _Reader:
    """Follows git's config.c, state for state. The text ends with a newline, as git reads it."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def read(self) -> list[Item]:
        items: list[Item] = []
        base = ""
        while self.at < len(self.text):
            character = self._next()
            if character in " \t\n":
                continue
            if character in "#;":
                self.at = self.text.index("\n", self.at) + 1
            elif character == "[":
                base = self._section()
            elif character in _ALPHA and base:
                key, value = self._setting(character)
                section, dot, sub = base.partition(".")
                items.append(Item(section, sub if dot else None, key, value))
            else:
                raise Unsure(f"unexpected {character!r}")
        return items

    def _next(self) -> str:
        character = self.text[self.at] if self.at < len(self.text) else "\n"
        self.at += 1
        return character

    def _section(self) -> str:
        name = ""
        while (character := self._next()) in _KEY or character == ".":
            name += character.lower()
        if not name or name.startswith(".") or name.endswith(".") or ".." in name:
            raise Unsure("an odd section name")
        if character == "]":
            return name
        while character in " \t":
            character = self._next()
        if character != '"' or self.text[self.at - 2] not in " \t":
            raise Unsure("an odd section header")
        return f"{name}.{self._subsection()}"

    def _subsection(self) -> str:
        sub = ""
        while (character := self._next()) != '"':
            if character == "\\":
                character = self._next()
            if character == "\n":
                raise Unsure("a section header without an end")
            sub += character
        if self._next() != "]":
            raise Unsure("a section header without an end")
        return sub

    def _setting(self, first: str) -> tuple[str, str | None]:
        key = first.lower()
        while (character := self._next()) in _KEY:
            key += character.lower()
        while character in " \t":
            character = self._next()
        if character == "\n":
            return key, None
        if character != "=":
            raise Unsure("a key without a value or a line's end")
        return key, self._value()

    def _value(self) -> str:
        value, spaces = "", ""
        quoted = False
        while True:
            character = self._next()
            if character == "\n":
                if quoted:
                    raise Unsure("a quote without an end")
                return value
            if not quoted and character in " \t":
                if value:
                    spaces += character
                continue
            if not quoted and character in "#;":
                self.at = self.text.index("\n", self.at)
                continue
            if "\t" in spaces:  # a tab for git since 2.45, a space before
                raise Unsure("a tab inside a value")
            value += spaces
            spaces = ""
            if character == "\\":
                character = self._next()
                if character == "\n":
                    if self.at >= len(self.text):
                        raise Unsure("a continued line at the end")
                    continue
                if character not in _ESCAPES:
                    raise Unsure("an unknown escape")
                value += _ESCAPES[character]
            elif character == '"':
                quoted = not quoted
            else:
                value += character


# -- which settings are safe ---------------------------------------------------------------------------

_WORD = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._,:+/-*@= %{}^")


def _word(value: str) -> bool:
    """A switch, number or word of git's own: nothing that could be a command, a path out or an option."""
    return (
        len(value) <= 200
        and _WORD.issuperset(value)
        and value[:1] not in ("-", "/", "!")
        and (".." not in value)
    )


def _text(value: str) -> bool:
    return len(value) <= 1000 and all(c.isprintable() or c == "\t" for c in value)


def _ref(value: str) -> bool:
    """A ref or a pattern of refs."""
    return _word(value) and "//" not in value and "@{" not in value


def _refspec(value: str) -> bool:
    value = value.removeprefix("+").removeprefix("^")
    return value.count(":") <= 1 and all(_ref(part) for part in value.split(":"))


_SCHEMES = frozenset({"https", "http", "ssh", "git", "file", "git+ssh", "ssh+git"})


def safe_url(value: str) -> bool:
    """An address that makes git run nothing but its own transports.

    ``word::address`` and ``word://`` run ``git-remote-word``; what starts with a dash, also as a host or
    user, may become an option of ssh; a line break would end up in a credential helper's input.
    """
    if not value or value[0] in "-!" or len(value) > 2000 or not value.isprintable():
        return False
    lowered = value.lower()
    if "%0a" in lowered or "%0d" in lowered or "%00" in lowered:
        return False
    scheme, colons, rest = value.partition("://")
    if colons:
        if scheme.lower() not in _SCHEMES:
            return False
        host = rest.partition("/")[0]
        return not any(part.startswith("-") for part in host.split("@")) and "::" not in scheme
    if "::" in value.partition("/")[0]:
        return False
    before, colon, path = value.partition(":")
    if colon and "/" not in before:  # host:path, by ssh
        return not any(part.startswith("-") for part in before.split("@")) and not path.startswith("-")
    return True


def _remote(value: str) -> bool:
    """The name of a remote, or an address: git takes either."""
    return safe_url(value)


def _name(sub: str | None) -> bool:
    """A subsection that names a branch, remote or submodule: the name becomes part of paths."""
    if sub is None:
        return True
    return bool(sub) and sub[0] not in "-/!" and _text(sub) and ".." not in sub.split("/") and "::" not in sub


_SUBMODULE_UPDATES = frozenset({"checkout", "rebase", "merge", "none"})

# section.key (or section.*.key where it has a subsection) -> what its value must be like.
_SAFE: dict[str, Callable[[str], bool]] = {
    **dict.fromkeys(
        (
            "core.repositoryformatversion core.filemode core.bare core.logallrefupdates core.ignorecase "
            "core.precomposeunicode core.symlinks core.autocrlf core.eol core.safecrlf core.quotepath "
            "core.abbrev core.sparsecheckout core.sparsecheckoutcone core.untrackedcache core.preloadindex "
            "core.splitindex core.checkstat core.trustctime core.compression core.loosecompression "
            "core.bigfilethreshold core.commitgraph core.multipackindex core.longpaths core.hidedotfiles "
            "extensions.objectformat extensions.refstorage extensions.worktreeconfig extensions.noop "
            "extensions.compatobjectformat extensions.relativeworktrees index.version index.threads "
            "index.sparse init.defaultbranch pull.rebase pull.ff push.default push.autosetupremote "
            "push.followtags fetch.prune fetch.prunetags fetch.writecommitgraph merge.ff merge.conflictstyle "
            "merge.renames diff.renames diff.renamelimit diff.algorithm diff.mnemonicprefix diff.colormoved "
            "rebase.autostash rebase.autosquash rebase.updaterefs rerere.enabled rerere.autoupdate "
            "status.showuntrackedfiles status.branch status.short log.date log.abbrevcommit log.decorate "
            "color.ui color.branch color.diff color.status column.ui branch.sort tag.sort feature.manyfiles "
            "feature.experimental gc.auto gc.autopacklimit gc.writecommitgraph pack.threads pack.window "
            "commit.verbose commit.cleanup branch.autosetuprebase branch.autosetupmerge "
            "submodule.recurse submodule.fetchjobs submodule.alternatelocation submodule.active "
            "submodule.alternateerrorstrategy submodule.propagatebranches lfs.repositoryformatversion "
            "branch.*.rebase remote.*.prune remote.*.prunetags remote.*.tagopt "
            "remote.*.skipdefaultupdate remote.*.skipfetchall submodule.*.active submodule.*.ignore "
            "submodule.*.fetchrecursesubmodules submodule.*.shallow"
        ).split(),
        _word,
    ),
    **dict.fromkeys(
        "user.name user.email author.name author.email committer.name committer.email".split(), _text
    ),
    "branch.*.description": _text,
    "branch.*.remote": _remote,
    "branch.*.pushremote": _remote,
    "remote.pushdefault": _remote,
    "checkout.defaultremote": _remote,
    "branch.*.merge": _ref,
    "submodule.*.branch": _ref,
    "remote.*.url": safe_url,
    "remote.*.pushurl": safe_url,
    "submodule.*.url": safe_url,
    "remote.*.fetch": _refspec,
    "submodule.*.update": _SUBMODULE_UPDATES.__contains__,
}  # fmt: skip
_PATHS = frozenset({"core.worktree", "submodule.*.path"})


def _is_safe(item: Item, inside: Callable[[str], bool]) -> bool:
    if not _name(item.sub):
        return False
    name = f"{item.section}.{item.key}" if item.sub is None else f"{item.section}.*.{item.key}"
    if name in _PATHS:
        return item.value is not None and inside(item.value)
    test = _SAFE.get(name)
    if name == "remote.*.tagopt":
        return item.value in ("--no-tags", "--tags")
    return test is not None and (item.value is None or test(item.value))


def unsafe(items: list[Item], inside: Callable[[str], bool]) -> list[Item]:
    """The settings that are not safe, in order. ``inside`` judges paths that a repository is told to use."""
    return [item for item in items if not _is_safe(item, inside)]


def named(data: bytes) -> list[Item] | None:
    """The settings that are not safe or name a path; None if the text is not understood."""
    try:
        return unsafe(parse(data), lambda _: False)
    except Unsure:
        return None
