"""The tops that wait for a workspace: of commands whose changes were to wait, or that were killed.

Each lies in a directory of its own, with a note of what ran and what its policy said; a file ``pending``
beside it says that the command came to its end and that its changes were kept because that was asked for.
"""

from __future__ import annotations

import copy
import os
from contextlib import ExitStack, suppress
from typing import NamedTuple

import msgspec

from casemate.errors import WorkspaceError
from casemate.isolation.process.spec import View
from casemate.isolation.process.trees import remove_run, remove_tree
from casemate.sandbox import settle
from casemate.sandbox.job import PENDING
from casemate.workspace import held
from casemate.workspace.diff import TopReview
from casemate.workspace.journal import Journal
from casemate.workspace.names import prefixes
from casemate.workspace.report import CONFLICT, SPECIAL
from casemate.workspace.select import Selection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from casemate.sandbox.job import Job
    from casemate.sandbox.result import Applied
    from casemate.workspace.review import Review

__all__ = ["Interrupted", "Reviews", "Tops", "Words", "leave_pending"]


class Words(NamedTuple):
    """What a person has named: patterns, and paths that are relative to a view, or absolute."""

    globs: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()

    def selection(self, view: str) -> Selection:
        """What that means in one view."""
        root = f"{view.rstrip('/')}/"
        own = [[word.removeprefix(root) for word in words] for words in self]
        return Selection(own[0], own[1])

    def missed(self, chosen: Sequence[tuple[str, Selection]]) -> list[str]:
        """The words that mean nothing in any of the views."""
        left = set(self.globs) | set(self.paths)
        for view, only in chosen:
            root = f"{view.rstrip('/')}/"
            left -= {word for word in left if word.removeprefix(root) in only.used}
        return sorted(left)


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
    """The work of a command that nobody settled. ``changes`` pairs what happened with the path; ``state`` is
    ``pending`` where it was to wait, ``interrupted`` where the command, or Casemate, was killed.
    """

    name: str
    argv: tuple[str, ...]
    started_ns: int
    changes: tuple[tuple[str, str], ...]
    state: str = "interrupted"


class Reviews:
    """A review for each view. Closes them, and what they look at."""

    def __init__(
        self, name: str, argv: tuple[str, ...], stack: ExitStack, called: tuple[str, str] = ("", "")
    ) -> None:
        self.name, self.argv = name, argv
        # What a message says of it, and how to look at it.
        self._called = called if called[0] else (name, f"casemate diff {name} --stat")
        #: The directory, and what would become of it.
        self.views: list[tuple[str, Review]] = []
        #: Words of the last choice that mean nothing here.
        self.missed: list[str] = []
        self.stack = stack

    def __enter__(self) -> Self:
        """It is open already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.stack.close()

    def count(self) -> int:
        """How many changes wait; what could not be looked at counts, too."""
        return sum(review.count() for _, review in self.views)

    def select(self, words: Words) -> None:
        """Leave out what is not meant. Raises WorkspaceError (``nothing-kept``) where nothing is."""
        chosen = [(view, words.selection(view)) for view, _ in self.views]
        self._check(words, chosen)
        for (_, review), (_, only) in zip(self.views, chosen, strict=True):
            review.select(only)

    def _check(self, words: Words, chosen: list[tuple[str, Selection]]) -> None:
        names = [set(review.names()) for _, review in self.views]
        there = {above for paths in names for path in paths for above in prefixes(path)}
        for (_, only), paths in zip(chosen, names, strict=True):
            only.prefer(there)
            for path in paths:
                only.matches(path)
        missed = words.missed(chosen)
        # Of what is listed as a whole, nobody has looked at every name.
        reviews = [review for _, review in self.views]
        self.missed = [
            word
            for word in missed
            if word in words.globs
            or not any(review.could_hold(path) for review in reviews for path in _forms(word, self.views))
        ]
        # Some may have been dealt with before a step was killed: no reason to leave the others undone.
        if len(self.missed) == len({*words.globs, *words.paths}):
            raise WorkspaceError(
                f"nothing has changed under {', '.join(self.missed)} in {self._called[0]}",
                code="nothing-kept",
                hint=self._called[1],
                name=self.name,
            )

    def choose(self, words: Words) -> list[Selection]:
        """One selection for each view. Raises WorkspaceError (``nothing-kept``) where nothing is meant."""
        chosen = [(view, words.selection(view)) for view, _ in self.views]
        self._check(words, chosen)
        for (_, review), (_, only) in zip(self.views, chosen, strict=True):
            for entry in review.entries:
                # By its old name, too; and a renamed file is two changes, and one decision.
                if any(list(map(only.matches, {entry.path, entry.source, entry.whiteout} - {""}))):
                    only.also({entry.path, entry.whiteout} - {""})
        return [only for _, only in chosen]


def _forms(word: str, views: list[tuple[str, Review]]) -> list[str]:
    return ["/".join(filter(None, word.removeprefix(f"{view.rstrip('/')}/").split("/"))) for view, _ in views]


class Tops:
    """What waits below ``job``'s own directory. ``Preconditions:`` the workspace's lock is held."""

    def __init__(self, job: Job, *, rootless: bool) -> None:
        assert job.plan is not None  # noqa: S101
        self._job, self._rootless = job, rootless
        #: Words of the last ``apply`` or ``discard`` that meant nothing.
        self.missed: list[str] = []
        # Of what is called otherwise than by its name: what a message says of it, and how to look at it.
        self._called = ("", "")
        self._base = job.plan.spec.keep_base
        self._held = f"{job.places.state}/held/{job.key}"

    def names(self) -> list[str]:
        """The names under which tops wait, oldest first."""
        try:
            names = os.listdir(self._base)
        except FileNotFoundError:
            return []
        notes = {name: note for name in names if (note := self._note(name)) is not None}
        return sorted(notes, key=lambda name: (notes[name].started_ns, name))

    def state(self, name: str) -> str:
        """``pending`` or ``interrupted``."""
        waits = os.path.exists(f"{self._base}/{os.path.basename(name)}/{PENDING}")
        return "pending" if waits else "interrupted"

    def describe(self, name: str, most: int) -> Interrupted:
        """One of them, with its first changes. Raises WorkspaceError."""
        note = self._noted(name)
        changes: list[tuple[str, str]] = []
        with self.review(name, missing=True) as reviews:
            for view, review in reviews.views:
                prefix = "" if view == self._job.workspace else f"{view}/"
                changes += [(entry.what, prefix + entry.path) for entry in review.entries]
        return Interrupted(
            name=name, argv=note.argv, started_ns=note.started_ns, changes=tuple(changes[:most]),
            state=self.state(name),
        )  # fmt: skip

    def review(self, name: str, *, missing: bool = False) -> Reviews:
        """What it would do. Raises WorkspaceError (``nothing-kept``) where a top is gone, unless ``missing``
        may be: it is left out then.
        """
        note = self._noted(name)
        job = self._as_it_ran(note)
        reviews = Reviews(name, note.argv, ExitStack(), self._called)
        try:
            for number, view in enumerate(note.views):
                top = self._top(name, number)
                if top < 0:
                    if missing:
                        continue
                    raise self._gone(name)
                reviews.stack.callback(os.close, top)
                options = settle.apply_options(
                    job, view, None, rootless=self._rootless, resumed=True,
                    journal=Journal(self._journal(name, number)),
                )  # fmt: skip
                try:
                    review = reviews.stack.enter_context(TopReview(top, view, options))
                except WorkspaceError:
                    if missing:
                        continue
                    raise
                reviews.views.append((view, review))
        except BaseException:
            reviews.stack.close()
            raise
        return reviews

    def apply(self, name: str, words: Words | None = None) -> Applied:
        """Apply its changes by the same checked step as at a command's end; with ``words`` a part of them.

        What a person names by its very path is applied even if it is protected, not if the host changed it,
        too. Raises WorkspaceError.
        """
        only: list[Selection] | None = None
        if words is not None:
            with self.review(name) as reviews:
                only = reviews.choose(words)
                self.missed = reviews.missed
        return self.apply_chosen(name, only)

    def apply_chosen(
        self, name: str, only: list[Selection] | None, begin: Callable[[], object] | None = None
    ) -> Applied:
        """The same for what was chosen in a review. ``begin`` is called before the first change to each view:
        what is refused as a whole is refused before.
        """
        note = self._noted(name)
        tops = [self._top(name, number) for number in range(len(note.views))]
        hold = f"{self._held}/{os.path.basename(name)}"
        try:
            if -1 in tops:
                raise self._gone(name)
            applied, kept = settle.apply_tops(
                self._as_it_ran(note), tops, rootless=self._rootless, hold_base=hold,
                directory=f"{self._base}/{os.path.basename(name)}", resumed=True, only=only,
                begin=begin,
            )  # fmt: skip
        finally:
            for top in tops:
                if top >= 0:
                    os.close(top)
        if only is not None:
            applied = self._take_named(note, hold, only, applied)
            self._drop_empty_hold(name)
            kept = [path for path in kept if os.path.isdir(path)]
        left = 0 if applied.complete and only is None else self._left(name)
        if applied.complete and not left:
            self.discard(name)
        else:
            applied = msgspec.structs.replace(applied, pending=name, pending_changes=left)
        return msgspec.structs.replace(applied, kept=kept[0]) if kept else applied

    def _take_named(self, note: _Note, hold: str, only: list[Selection], applied: Applied) -> Applied:
        """Apply what was held back although a person has named it: that is the consent it waits for. It is
        none to overwriting what the host has changed.
        """
        taken: set[str] = set()
        for number, view in enumerate(note.views):
            prefix = "" if number == 0 and view == self._job.workspace else f"{view}/"
            names = [
                path.removeprefix(prefix)
                for path, reason in applied.held
                if path.startswith(prefix) and reason not in (SPECIAL, CONFLICT)
                and only[number].names(path.removeprefix(prefix))
            ]  # fmt: skip
            if not names:
                continue
            try:
                handle = os.open(f"{hold}/{number}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                report = held.take(handle, view, names)
            finally:
                os.close(handle)
            left = {item.path for item in report.failed} | {item.path for item in report.held}
            taken |= {prefix + path for path in set(names) - left}
            applied = settle.merged(applied, report, prefix)
        return msgspec.structs.replace(
            applied,
            held=tuple(dict.fromkeys(item for item in applied.held if item[0] not in taken)),
            conflicts=tuple(dict.fromkeys(path for path in applied.conflicts if path not in taken)),
        )

    def _left(self, name: str) -> int:
        """How many changes wait still."""
        with self.review(name) as reviews:
            return reviews.count()

    def discard(self, name: str, words: Words | None = None) -> int:
        """Throw its changes away, or a part of them; returns how many of the list that were.

        Raises WorkspaceError.
        """
        if words is None:
            directory = f"{self._base}/{os.path.basename(name)}"
            if not os.path.isdir(directory):
                raise self._unknown(name)
            settle.forget_note(directory)
            remove_run(directory)
            self._drop_empty_hold(name)
            with suppress(OSError):
                os.rmdir(self._base)
            return 0
        count = 0
        with self.review(name) as reviews:
            chosen = reviews.choose(words)
            self.missed = reviews.missed
            for number, ((_, review), only) in enumerate(zip(reviews.views, chosen, strict=True)):
                review.select(only)
                names = {path for entry in review.entries for path in (entry.path, entry.whiteout) if path}
                Journal(self._journal(name, number)).add(sorted(names))
                count += len(review.entries)
        if not self._left(name):
            self.discard(name)
        return count

    def _drop_empty_hold(self, name: str) -> None:
        """Remove what a killed step has left in the place for held-back changes, if it came to name none."""
        hold = f"{self._held}/{os.path.basename(name)}"
        try:
            numbers = [number for number in os.listdir(hold) if number.isdigit()]
        except OSError:
            return
        for number in numbers:
            handle = os.open(f"{hold}/{number}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if held.units(handle):
                    return
            finally:
                os.close(handle)
        remove_tree(hold)
        with suppress(OSError):
            os.rmdir(self._held)

    # -- places --------------------------------------------------------------------------------------

    def _as_it_ran(self, note: _Note) -> Job:
        """A job with the directories, the protection and the sight of the command that has ended."""
        plan, policy = self._job.plan, self._job.policy
        assert plan is not None  # noqa: S101
        spec = copy.copy(plan.spec)
        spec.views = [View(path, path, True, None) for path in note.views]
        filesystem = msgspec.structs.replace(
            policy.filesystem,
            protect=(*policy.filesystem.protect, *note.protect),
            deny=(*policy.filesystem.deny, *note.deny),
        )
        return msgspec.structs.replace(
            self._job,
            began_wall_ns=note.started_ns,
            plan=msgspec.structs.replace(plan, spec=spec),
            policy=msgspec.structs.replace(policy, filesystem=filesystem),
            readable=note.readable or self._job.readable,
        )

    def _note(self, name: str) -> _Note | None:
        try:
            with open(f"{self._base}/{os.path.basename(name)}/note.json", "rb") as file:
                return msgspec.json.decode(file.read(1 << 20), type=_Note)
        except (OSError, msgspec.DecodeError):
            return None

    def _noted(self, name: str) -> _Note:
        note = self._note(name)
        if note is None:
            raise self._unknown(name)
        return note

    def _top(self, name: str, number: int) -> int:
        base = f"{self._base}/{os.path.basename(name)}"
        for place in (f"{base}/scratch/up{number}", f"{base}/up{number}"):
            try:
                return os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
        return -1

    def _journal(self, name: str, number: int) -> str:
        return f"{self._base}/{os.path.basename(name)}/done{number}"

    def _unknown(self, name: str) -> WorkspaceError:
        return WorkspaceError(
            f"nothing is kept under the name {name}", code="nothing-kept", hint="casemate changes", name=name
        )

    def _gone(self, name: str) -> WorkspaceError:
        return WorkspaceError(
            "the changes are gone: they were kept in memory, and the machine was started anew",
            code="nothing-kept",
            hint=f"casemate discard {name}",
        )


def leave_pending(job: Job, tops: list[int], directory: str, *, rootless: bool) -> Applied:
    """Let an ended command's changes wait instead of applying them; ``pending`` is "" if there are none.

    Preconditions: the run's directory has its note, so that the tops outlive this process. Raises
    WorkspaceError where a workspace cannot be looked at, OSError where there is no room.
    """
    from casemate.sandbox.result import Applied

    views = [view for view in job.plan.spec.views if view.writable] if job.plan else []
    count = 0
    for view, top in zip(views, tops, strict=True):
        options = settle.apply_options(job, view.source, None, rootless=rootless, resumed=False)
        with TopReview(top, view.source, options) as review:
            count += review.count()
    if not count:
        return Applied()
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    os.close(os.open(f"{directory}/{PENDING}", flags, 0o600))
    # The rest of the command's private file system is of no use any more, and takes memory.
    for name in ("tmp", "shm", "home", "vartmp"):
        remove_tree(f"{directory}/scratch/{name}")
    return Applied(pending=os.path.basename(directory), pending_changes=count)
