"""Changes that wait for a person: held back by the apply step, or left where Casemate was killed."""

from __future__ import annotations

import os
from contextlib import ExitStack

import msgspec

from casemate.errors import BusyError, WorkspaceError
from casemate.isolation.process.trees import remove_tree
from casemate.sandbox import settle
from casemate.sandbox.job import Job, Request, prepare
from casemate.sandbox.locks import WorkspaceLock
from casemate.sandbox.tops import Interrupted, Reviews, Tops, Words
from casemate.sys.cgroups import Hierarchies
from casemate.sys.process import is_root
from casemate.workspace import held
from casemate.workspace.helddiff import HeldReview
from casemate.workspace.names import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

    from casemate.sandbox.result import Applied
    from casemate.workspace.held import Unit
    from casemate.workspace.report import ApplyReport

__all__ = ["Held", "Interrupted", "Kept", "Reviews", "Words"]

_MOST = 1000


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What one run's apply step held back, per view."""

    name: str
    view: str
    units: tuple[Unit, ...]


class Kept:
    """Everything that is kept for one workspace. Holds its lock until ``close``.

    ``job`` is of a command that has just run there, if there is one; else the policy is read as for one. With
    ``wait`` it waits for a command that runs there.

    Raises PolicyError for a workspace that is refused, BusyError while a command runs in it.
    """

    def __init__(
        self, workspace: str, environ: dict[str, str], *, job: Job | None = None, wait: bool = False
    ) -> None:
        self.rootless = not is_root()
        if job is None:
            request = Request(argv=("true",), workspace=workspace, cwd=workspace, environ=environ)
            controllers = {"memory": "", "pids": "", "cpu": ""}
            job = prepare(request, Hierarchies(1, controllers, {}), rootless=self.rootless)
        self.job: Job = job
        assert self.job.plan is not None  # noqa: S101
        self.tops = Tops(job, rootless=self.rootless)
        self._held = f"{self.job.places.state}/held/{self.job.key}"
        self._lock = WorkspaceLock(f"{self.job.places.run}/locks/{self.job.key}")
        if not self._lock.take(wait=wait, label=f"pid {os.getpid()}: looking at kept changes"):
            holder = self._lock.holder()
            self._lock.close()
            raise BusyError(
                f"a command runs in {workspace} ({holder})", hint="wait for its end", workspace=workspace
            )

    def __enter__(self) -> Self:
        """It is open already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Give the workspace's lock back."""
        self._lock.close()

    # -- commands that were not settled ---------------------------------------------------------------

    def interrupted(self) -> list[Interrupted]:
        """The commands whose changes were neither applied nor thrown away, oldest first: those that were
        killed, and those whose changes were to wait.
        """
        return [self.tops.describe(name, _MOST) for name in self.tops.names()]

    def apply_interrupted(self, name: str, words: Words | None = None) -> Applied:
        """Apply such changes by the same checked step as at a command's end, or a part of them."""
        return self.tops.apply(name, words)

    def discard_interrupted(self, name: str, words: Words | None = None) -> int:
        """Throw such changes away, or a part; returns how many of the list they were (0 for all)."""
        return self.tops.discard(name, words)

    # -- all of it -----------------------------------------------------------------------------------

    def names(self) -> dict[str, str]:
        """What is kept: name -> ``pending``, ``interrupted`` or ``held``."""
        found = {name: self.tops.state(name) for name in self.tops.names()}
        return found | {entry.name: "held" for entry in self.held()}

    def review(self, name: str) -> Reviews:
        """What the changes kept under a name would do to the workspace. Raises WorkspaceError."""
        if name in self.tops.names():
            return self.tops.review(name)
        run, _, number = name.partition("/")
        handle, views = self._hold(run, number), self._held_views(run)
        reviews = Reviews(name, (), ExitStack())
        reviews.stack.callback(os.close, handle)
        try:
            if int(number) >= len(views):
                raise self._unknown(name)
            view = views[int(number)]
            reviews.views.append((view, reviews.stack.enter_context(HeldReview(handle, view))))
        except BaseException:
            reviews.stack.close()
            raise
        return reviews

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
        """Apply held-back changes that a person has looked at; None for all of that run. What the host has
        changed, too, only with ``overwrite``.
        """
        run, _, number = name.partition("/")
        handle = self._hold(run, number)
        views = self._held_views(run)
        try:
            paths = self._meant(handle, name, paths)
            if not number.isdigit() or int(number) >= len(views):
                raise self._unknown(name)
            report = held.take(handle, views[int(number)], paths, overwrite=overwrite)
        finally:
            os.close(handle)
        self._tidy(name)
        return report

    def discard_held(self, name: str, paths: list[str] | None) -> int:
        """Throw held-back changes away; returns how many entries that were."""
        run, _, number = name.partition("/")
        handle = self._hold(run, number)
        try:
            paths = self._meant(handle, name, paths)
            count = held.discard(handle, paths)
        finally:
            os.close(handle)
        self._tidy(name)
        return count

    # -- places --------------------------------------------------------------------------------------

    def _tidy(self, name: str) -> None:
        run, _, number = name.partition("/")
        handle = self._hold(run, number)
        empty = not held.units(handle)
        os.close(handle)
        if empty:
            remove_tree(f"{self._held}/{name}")
            if self._names(f"{self._held}/{run}") == [settle.HELD_VIEWS]:
                remove_tree(f"{self._held}/{run}")
            _remove_if_empty(f"{self._held}/{run}")
            _remove_if_empty(self._held)

    def _held_views(self, name: str) -> list[str]:
        """The directories of a run that held something back, by number."""
        try:
            with open(f"{self._held}/{os.path.basename(name)}/{settle.HELD_VIEWS}", "rb") as file:
                return msgspec.json.decode(file.read(1 << 20), type=list[str])
        except (OSError, msgspec.DecodeError):
            return [self.job.workspace]

    def _meant(self, handle: int, name: str, paths: list[str] | None) -> list[str] | None:
        """The held-back paths that are named, as they are or else as they are shown."""
        if paths is None:
            return None
        known = {unit.path for unit in held.units(handle)}
        shown = {printable(path): path for path in known}
        unknown = [path for path in paths if path not in known and path not in shown]
        if unknown:
            raise WorkspaceError(
                f"nothing is held back under {', '.join(unknown)} in {name}",
                code="nothing-kept",
                hint="casemate changes",
                name=name,
            )
        return [path if path in known else shown[path] for path in paths]

    def _hold(self, name: str, number: str) -> int:
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

    def _unknown(self, name: str) -> WorkspaceError:
        return WorkspaceError(
            f"nothing is kept under the name {name}", code="nothing-kept", hint="casemate changes", name=name
        )


def _remove_if_empty(directory: str) -> None:
    try:
        os.rmdir(directory)
    except OSError:
        return
