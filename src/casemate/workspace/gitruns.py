"""What git runs or reads in a workspace because its host has set it up so: such a file is as good as a hook.

The host's configuration names hooks, filters and included files, its hooks may be links, and a relative path
counts from whatever work tree the configuration is used for: of the repository itself, of a linked worktree,
or of any directory whose ``.git`` file names it. What is named as a path counts whether or not it is there.
"""

from __future__ import annotations

import os
import stat

from casemate.sys.files import open_beneath
from casemate.workspace import gitconfig
from casemate.workspace.merged import read_file, read_link
from casemate.workspace.names import join

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from casemate.workspace.merged import Merged

__all__ = ["HostRuns", "leads_to"]

_SHORT = 1 << 16
_MOST_MODULES = 2000
_DEEPEST = 10  # as git
_SETTINGS = ("config", "config.worktree")
_COMMAND, _HOOKS, _INCLUDED, _TREE = "command", "hooks", "included", "tree"
_KINDS = {"core.hookspath": _HOOKS, "core.worktree": _TREE}
_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class HostRuns:
    """Looks them up, directory by directory. ``unsafe`` gives the settings of a configuration that are not
    safe (None: not understood), ``written`` resolves a path in a file that the command may have written.
    """

    def __init__(
        self,
        merged: Merged,
        workspace: str,
        unsafe: Callable[[bytes], list[gitconfig.Item] | None],
        written: Callable[[str, str], str | None],
    ) -> None:
        self.merged, self.workspace = merged, workspace
        self._unsafe, self._written = unsafe, written

    def paths(self, directory: str, *, linked: bool) -> Iterator[str]:
        """The paths that count because of the repository that ``directory`` belongs to, if there is one.

        ``linked``: the command has made a ``.git`` file in it.
        """
        link = join(directory, ".git")
        tree = os.path.join(self.workspace, directory)
        mode = self.merged.lower_mode(link)
        if mode or linked or not directory:
            yield from self._personal(tree)
        if stat.S_ISDIR(mode):
            yield from self._hooks(link)
            settings = [*self._settings(link)]
            yield from self._named(tree, f"{tree}/.git", settings)
            yield from self._worktrees(link, settings)
            yield from self._modules(link)
        elif mode:
            # A worktree or submodule, perhaps of a repository around the workspace, or a link. Only the host,
            # or a judged change, can have made it, so where it leads may be followed.
            text = "" if stat.S_ISLNK(mode) else leads_to(read_file(self.merged.lower, link, _SHORT))
            yield from self._outside(tree, os.path.join(tree, text or ".git"))
        if linked:
            git = self._written(directory, leads_to(read_file(self.merged.top, link, _SHORT))) or ""
            above, _, name = git.rpartition("/")
            # The directory of a worktree may be as new as the file: its repository is where it has to be.
            places = [git, above.rpartition("/")[0]] if above.rpartition("/")[2] == "worktrees" else [git]
            for place in places if name else ():
                yield from self._named(tree, os.path.join(self.workspace, place), self._settings(place))
        if not directory:
            yield from self._around()

    def _around(self) -> Iterator[str]:
        """The workspace may be a part of a repository."""
        above = os.path.dirname(self.workspace)
        while len(above) > 1:
            git = f"{above}/.git"
            if os.path.isfile(git):
                git = os.path.join(above, leads_to(_host_file(git)))
            yield from self._outside(above, git)
            above = os.path.dirname(above)

    def _outside(self, tree: str, git: str) -> Iterator[str]:
        common = os.path.join(git, os.fsdecode(_host_file(f"{git}/commondir") or b".").rstrip("\n"))
        hooks = f"{common}/hooks"
        try:
            names = [name for name in os.listdir(hooks) if not name.endswith(".sample")]
        except OSError:
            names = []
        for name in names:
            if os.path.islink(path := f"{hooks}/{name}"):
                yield from self._inside(hooks, os.readlink(path))
        found = (_host_file(path) for path in (f"{common}/config", f"{git}/config.worktree"))
        yield from self._named(tree, common, (data for data in found if data))

    def _worktrees(self, git: str, settings: list[bytes]) -> Iterator[str]:
        """For the linked worktrees of a repository, whether or not anything in them changes."""
        for name in self._names(join(git, "worktrees")):
            place = f"{git}/worktrees/{name}"
            own = read_file(self.merged.lower, f"{place}/gitdir", _SHORT)
            tree = os.path.dirname(os.path.join(self.workspace, place, os.fsdecode(own or b"").rstrip("\n")))
            data = read_file(self.merged.lower, f"{place}/config.worktree", gitconfig.LONGEST)
            yield from self._named(tree, os.path.join(self.workspace, git), [*settings, data or b""])

    def _modules(self, git: str) -> Iterator[str]:
        """For its submodules; they name their work trees themselves."""
        places = [join(git, "modules")]
        for place in places:
            if len(places) < _MOST_MODULES and not self.merged.lower_mode(f"{place}/HEAD"):
                places += (join(place, name) for name in self._names(place))
            else:
                full = os.path.join(self.workspace, place)
                yield from self._hooks(place)
                yield from self._named(full, full, self._settings(place))

    def _settings(self, git: str) -> Iterator[bytes]:
        for name in _SETTINGS:
            data = read_file(self.merged.lower, join(git, name), gitconfig.LONGEST)
            if data is not None:
                yield data

    def _personal(self, tree: str) -> Iterator[str]:
        """What the settings of the person and of the machine name for every repository."""
        home = os.path.expanduser("~")
        more = os.environ.get("XDG_CONFIG_HOME") or f"{home}/.config"
        for path in ("/etc/gitconfig", f"{more}/git/config", f"{home}/.gitconfig"):
            if data := _host_file(path):
                # Commands are looked up in PATH: `helper = cache` is no file of the workspace.
                yield from self._named(tree, os.path.dirname(path), [data], words=False)

    def _named(
        self, tree: str, git: str, settings: Iterable[bytes], *, words: bool = True, depth: int = 0
    ) -> Iterator[str]:
        """What configurations name, of a repository ``git`` that is used for the work tree ``tree``."""
        read = [(self._unsafe(data), data) for data in settings]
        values = [value for items, data in read for value in _values(items, data)]
        others = (os.path.join(git, value) for kind, value in values if kind == _TREE)
        trees = [tree, *map(os.path.normpath, others)]
        for kind, value in values:
            if kind == _INCLUDED:
                # Relative to the configuration, everything else to the work tree.
                yield from self._inside(git, value)
                path = os.path.join(git, _expanded(value))
                if depth < _DEEPEST and (data := _host_file(path)):
                    more = depth + 1
                    yield from self._named(tree, os.path.dirname(path), [data], words=words, depth=more)
            elif kind == _HOOKS:
                for base in trees:
                    yield from self._inside(base, value)
            elif kind == _COMMAND:
                yield from self._of_command(trees, value, words=words)

    def _of_command(self, trees: list[str], value: str, *, words: bool) -> Iterator[str]:
        for word in value.replace('"', " ").replace("'", " ").lstrip("!").split():
            for base in trees if words or "/" in word else ():
                for path in self._inside(base, word):
                    # A path, and neither the work tree itself nor one above it.
                    is_path = "/" in word or self.merged.lower_mode(path) != 0
                    if is_path and not f"{base}/".startswith(f"{self.workspace}/{path}/"):
                        yield path

    def _inside(self, base: str, word: str) -> Iterator[str]:
        """A path of the host as one of the workspace, as it is written and as it is."""
        if "\0" in word or len(word) > 4000:
            return
        full = os.path.join(base, _expanded(word))
        for path in dict.fromkeys((os.path.normpath(full), os.path.realpath(full))):
            if path.startswith(self.workspace + "/"):
                yield path[len(self.workspace) + 1 :]

    def _hooks(self, git: str) -> Iterator[str]:
        """Where hooks lead that are links."""
        hooks = join(git, "hooks")
        if stat.S_ISLNK(self.merged.lower_mode(hooks)):
            yield from self._link(hooks)
            return
        for name in self._names(hooks):
            if not name.endswith(".sample"):
                yield from self._link(join(hooks, name))

    def _names(self, directory: str) -> list[str]:
        try:
            handle = open_beneath(self.merged.lower, directory, _LISTED)
        except OSError:
            return []
        try:
            return os.listdir(handle)
        except OSError:
            return []
        finally:
            os.close(handle)

    def _link(self, path: str) -> Iterator[str]:
        try:
            to = read_link(self.merged.lower, path)
        except OSError:
            return
        yield from self._inside(os.path.join(self.workspace, os.path.dirname(path)), to)


def _values(items: list[gitconfig.Item] | None, data: bytes) -> Iterator[tuple[str, str]]:
    """(kind, value) of settings; in a text that is not understood every value may be of any kind."""
    if items is None:
        for line in os.fsdecode(data).splitlines():
            value = line.partition("=")[2]
            kinds = (_COMMAND, _INCLUDED) if "/" in value else (_COMMAND,)
            yield from ((kind, value.strip(' \t"')) for kind in kinds)
        return
    for item in items:
        if item.section == "submodule" and item.key == "path":
            continue  # where it is, and nothing that is run
        kind = _INCLUDED if item.section.startswith("include") else _KINDS.get(item.name, _COMMAND)
        yield kind, item.value or ""


def _expanded(path: str) -> str:
    return os.path.expanduser(path) if path.startswith("~/") else path


def leads_to(data: bytes | None) -> str:
    """What a file called .git names."""
    return os.fsdecode(data or b"").removeprefix("gitdir: ").rstrip("\n")


def _host_file(path: str) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError):
        return None
    try:
        return os.read(fd, gitconfig.LONGEST) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    except OSError:
        return None
    finally:
        os.close(fd)
