"""Changes that wait for a person: held back by the apply step, or left where Casemate was killed."""

from __future__ import annotations

import os

import msgspec

from casemate.errors import BusyError, WorkspaceError
from casemate.isolation.process.trees import remove_run, remove_tree
from casemate.sandbox import settle
from casemate.sandbox.job import Job, Request, prepare
from casemate.sandbox.locks import WorkspaceLock
from casemate.sys.cgroups import Hierarchies
from casemate.sys.process import is_root
from casemate.workspace import held
from casemate.workspace.scan import scan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.sandbox.result import Applied
    from casemate.workspace.held import Unit
    from casemate.workspace.report import ApplyReport

__all__ = ["Held", "Interrupted", "Kept"]

_MOST = 1000


class _Note(msgspec.Struct, rename="kebab"):
    version: int
    workspace: str
    argv: tuple[str, ...]
    started_ns: int
    views: tuple[str, ...]


class Interrupted(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a command that nobody settled. ``changes`` pairs what happened with the path."""

    name: str
    argv: tuple[str, ...]
    started_ns: int
    changes: tuple[tuple[str, str], ...]


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What one run's apply step held back, per view."""

    name: str
    view: str
    units: tuple[Unit, ...]


class Kept:
    """Everything that is kept for one workspace. Holds its lock until ``close``.

    Raises PolicyError for a workspace that is refused, BusyError while a command runs in it.
    """

    def __init__(self, workspace: str, environ: dict[str, str]) -> None:
        self.rootless = not is_root()
        request = Request(argv=("true",), workspace=workspace, cwd=workspace, environ=environ)
        controllers = {"memory": "", "pids": "", "cpu": ""}
        self.job: Job = prepare(request, Hierarchies(1, controllers, {}), rootless=self.rootless)
        assert self.job.plan is not None  # noqa: S101
        self._views = self.job.plan.spec.keep_base
        self._held = f"{self.job.places.state}/held/{self.job.key}"
        self._lock = WorkspaceLock(f"{self.job.places.run}/locks/{self.job.key}")
        if not self._lock.take(wait=False, label=f"pid {os.getpid()}: looking at kept changes"):
            holder = self._lock.holder()
            self._lock.close()
            raise BusyError(
                f"a command runs in {workspace} ({holder})", hint="wait for its end", workspace=workspace
            )

    def close(self) -> None:
        """Give the workspace's lock back."""
        self._lock.close()

    # -- interrupted commands ------------------------------------------------------------------------

    def interrupted(self) -> list[Interrupted]:
        """The commands whose changes were neither applied nor thrown away, oldest first."""
        found: list[Interrupted] = []
        for name in self._names(self._views):
            note = self._note(name)
            if note is None:
                continue
            changes: list[tuple[str, str]] = []
            for number, view in enumerate(note.views):
                top = self._top(name, number)
                if top >= 0:
                    changes += self._scan(top, view)[: _MOST - len(changes)]
            found.append(
                Interrupted(name=name, argv=note.argv, started_ns=note.started_ns, changes=tuple(changes))
            )
        return sorted(found, key=lambda item: item.started_ns)

    def _scan(self, top: int, view: str) -> list[tuple[str, str]]:
        prefix = "user.overlay." if self.rootless else "trusted.overlay."
        lower = os.open(view, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return scan(top, lower, prefix=prefix, redirects=not self.rootless).summary()
        finally:
            os.close(lower)
            os.close(top)

    def apply_interrupted(self, name: str) -> Applied:
        """Apply a killed command's changes by the same checked step as at a command's end."""
        note = self._note(name)
        assert self.job.plan is not None  # noqa: S101
        if note is None:
            raise self._unknown(name)
        views = [view.source for view in self.job.plan.spec.views if view.writable]
        if list(note.views) != views:
            raise WorkspaceError(
                "the command ran under a policy with other writable directories",
                code="views-differ",
                hint=f"use the policy that it ran under; it wrote to {', '.join(note.views)}",
            )
        tops = [self._top(name, number) for number in range(len(views))]
        job = msgspec.structs.replace(self.job, began_wall_ns=note.started_ns)
        try:
            applied, kept = settle.apply_tops(
                job, tops, rootless=self.rootless, hold_base=f"{self._held}/{name}", resumed=True
            )
        finally:
            for top in tops:
                os.close(top)
        if applied.complete:
            self.discard_interrupted(name)
        return msgspec.structs.replace(applied, kept=kept[0]) if kept else applied

    def discard_interrupted(self, name: str) -> None:
        """Throw a killed command's changes away."""
        if name not in self._names(self._views):
            raise self._unknown(name)
        remove_run(f"{self._views}/{name}")
        _remove_if_empty(self._views)

    # -- held-back changes ---------------------------------------------------------------------------

    def held(self) -> list[Held]:
        """What apply steps held back and kept."""
        found: list[Held] = []
        assert self.job.plan is not None  # noqa: S101
        views = [view.source for view in self.job.plan.spec.views if view.writable]
        for name in self._names(self._held):
            for number in self._names(f"{self._held}/{name}"):
                handle = self._hold(name, number)
                units = tuple(held.units(handle))
                os.close(handle)
                view = views[int(number)] if int(number) < len(views) else "?"
                if units:
                    found.append(Held(name=f"{name}/{number}", view=view, units=units))
        return found

    def apply_held(self, name: str, paths: list[str] | None, *, overwrite: bool) -> ApplyReport:
        """Apply held-back changes that a person has looked at; None for all of that run."""
        handle = self._hold(*name.split("/", 1))
        assert self.job.plan is not None  # noqa: S101
        views = [view.source for view in self.job.plan.spec.views if view.writable]
        try:
            report = held.take(handle, views[int(name.split("/")[1])], paths, overwrite=overwrite)
        finally:
            os.close(handle)
        self._tidy(name)
        return report

    def discard_held(self, name: str, paths: list[str] | None) -> int:
        """Throw held-back changes away; returns how many entries that were."""
        handle = self._hold(*name.split("/", 1))
        try:
            count = held.discard(handle, paths)
        finally:
            os.close(handle)
        self._tidy(name)
        return count

    # -- places --------------------------------------------------------------------------------------

    def _tidy(self, name: str) -> None:
        handle = self._hold(*name.split("/", 1))
        empty = not held.units(handle)
        os.close(handle)
        if empty:
            remove_tree(f"{self._held}/{name}")
            _remove_if_empty(f"{self._held}/{name.split('/', 1)[0]}")
            _remove_if_empty(self._held)

    def _hold(self, name: str, number: str = "0") -> int:
        try:
            return os.open(
                f"{self._held}/{os.path.basename(name)}/{int(number)}",
                os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW,
            )
        except (OSError, ValueError) as error:
            raise self._unknown(name) from error

    def _names(self, directory: str) -> list[str]:
        try:
            return sorted(os.listdir(directory))
        except FileNotFoundError:
            return []

    def _note(self, name: str) -> _Note | None:
        try:
            with open(f"{self._views}/{os.path.basename(name)}/note.json", "rb") as file:
                return msgspec.json.decode(file.read(1 << 20), type=_Note)
        except (OSError, msgspec.DecodeError):
            return None

    def _top(self, name: str, number: int) -> int:
        base = f"{self._views}/{os.path.basename(name)}"
        for place in (f"{base}/scratch/up{number}", f"{base}/up{number}"):
            try:
                return os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
        return -1

    def _unknown(self, name: str) -> WorkspaceError:
        return WorkspaceError(
            f"nothing is kept under the name {name}", code="nothing-kept", hint="casemate changes", name=name
        )


def _remove_if_empty(directory: str) -> None:
    try:
        os.rmdir(directory)
    except OSError:
        return
