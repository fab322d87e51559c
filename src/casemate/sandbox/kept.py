"""Changes that wait for a person: held back by the apply step, or left where Casemate was killed."""

from __future__ import annotations

import copy
import os

import msgspec

from casemate.errors import BusyError, WorkspaceError
from casemate.isolation.process.spec import View
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
    # What the command's own policy protected, hid and could read.
    protect: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()


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
        tops = [self._top(name, number) for number in range(len(note.views))]
        if -1 in tops:
            raise WorkspaceError(
                "the changes are gone: they were kept in memory, and the machine was started anew",
                code="nothing-kept",
                hint=f"casemate discard {name}",
            )
        job = self._as_it_ran(note)
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

    def _as_it_ran(self, note: _Note) -> Job:
        """A job with the directories, the protection and the sight of the command that was interrupted."""
        plan, policy = self.job.plan, self.job.policy
        assert plan is not None  # noqa: S101
        spec = copy.copy(plan.spec)
        spec.views = [View(path, path, True, None) for path in note.views]
        filesystem = msgspec.structs.replace(
            policy.filesystem,
            protect=(*policy.filesystem.protect, *note.protect),
            deny=(*policy.filesystem.deny, *note.deny),
        )
        return msgspec.structs.replace(
            self.job,
            began_wall_ns=note.started_ns,
            plan=msgspec.structs.replace(plan, spec=spec),
            policy=msgspec.structs.replace(policy, filesystem=filesystem),
            readable=note.readable or self.job.readable,
        )

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
        for name in self._names(self._held):
            views = self._held_views(name)
            for number in self._names(f"{self._held}/{name}"):
                if not number.isdigit():
                    continue
                handle = self._hold(name, number)
                units = tuple(held.units(handle))
                os.close(handle)
                view = views[int(number)] if int(number) < len(views) else "?"
                if units:
                    found.append(Held(name=f"{name}/{number}", view=view, units=units))
        return found

    def apply_held(self, name: str, paths: list[str] | None, *, overwrite: bool) -> ApplyReport:
        """Apply held-back changes that a person has looked at; None for all of that run."""
        run, _, number = name.partition("/")
        handle = self._hold(run, number)
        views = self._held_views(run)
        try:
            self._check_paths(handle, name, paths)
            if not number.isdigit() or int(number) >= len(views):
                raise self._unknown(name)
            report = held.take(handle, views[int(number)], paths, overwrite=overwrite)
        finally:
            os.close(handle)
        self._tidy(name)
        return report

    def discard_held(self, name: str, paths: list[str] | None) -> int:
        """Throw held-back changes away; returns how many entries that were."""
        handle = self._hold(*name.split("/", 1))
        try:
            self._check_paths(handle, name, paths)
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
            run = f"{self._held}/{name.split('/', 1)[0]}"
            remove_tree(f"{self._held}/{name}")
            if self._names(run) == [settle.HELD_VIEWS]:
                remove_tree(run)
            _remove_if_empty(run)
            _remove_if_empty(self._held)

    def _held_views(self, name: str) -> list[str]:
        """The directories of a run that held something back, by number."""
        try:
            with open(f"{self._held}/{os.path.basename(name)}/{settle.HELD_VIEWS}", "rb") as file:
                return msgspec.json.decode(file.read(1 << 20), type=list[str])
        except (OSError, msgspec.DecodeError):
            return [self.job.workspace]

    def _check_paths(self, handle: int, name: str, paths: list[str] | None) -> None:
        known = {unit.path for unit in held.units(handle)}
        unknown = [path for path in paths or () if path not in known]
        if unknown:
            raise WorkspaceError(
                f"nothing is held back under {', '.join(unknown)} in {name}",
                code="nothing-kept",
                hint="casemate changes",
                name=name,
            )

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
