"""What goes into the apply step, and what it tells."""

from __future__ import annotations

import msgspec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from casemate.workspace.journal import Journal
    from casemate.workspace.select import Selection
    from casemate.workspace.survey import Firsts

__all__ = ["PASS", "ApplyOptions", "ApplyReport", "Failure", "Held", "Limits", "Tally", "Verdict"]

#: Reasons for holding back. ``ask`` means: prose for an agent, to be looked at.
PROTECTED, ASK, CONFLICT, SPECIAL = "protected", "ask", "conflict", "special"
LINK_OUTSIDE, LINK_PROTECTED, MOVE, OVERLAY = "link-outside", "link-protected", "move", "overlay"
GIT_CONFIG, GIT_HOOK, GIT_LINK, GIT_REPOSITORY = "git-config", "git-hook", "git-link", "git-repository"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a walk over a hostile tree."""

    entries: int = 1_000_000
    depth: int = 256
    path: int = 4000  # bytes; the kernel takes 4095 in one call, temporary names need some room
    seconds: float = 120.0


class ApplyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of the run and choices of the policy."""

    #: ``start_time()`` taken before the overlay was mounted: what the host changed later is its own.
    started_ns: int
    #: Of a session: since when paths are its own.
    firsts: Firsts | None = None
    #: ``user.overlay.`` for an overlay mounted with ``userxattr``.
    xattrs: str = "trusted.overlay."
    #: The overlay was mounted with ``redirect_dir=on``.
    redirects: bool = True
    #: A private directory that keeps what is held back; None: the caller keeps the top instead.
    hold_dir: int | None = None
    #: Absolute directories that the sandbox could read and not write: links may lead there.
    readable_roots: tuple[str, ...] = ()
    #: More protected names (patterns, see ``protected.Protected``).
    protect: tuple[str, ...] = ()
    #: False: CI files are ordinary files.
    ci: bool = True
    #: An apply step has been at work with this top before, and did not end or was not complete. (Root tops
    #: carry a mark of their own.)
    resumed: bool = False
    #: (st_dev, st_ino) of the workspace when the run began; another directory there now is refused.
    expect: tuple[int, int] | None = None
    limits: Limits = Limits()
    #: Only these changes, and the directories that they need; the others stay in the top.
    only: Selection | None = None
    #: What of the top was dealt with before, and where that is noted if the top will be needed again.
    journal: Journal | None = None
    #: Called when the first change is about to be made: all that is refused as a whole is by then.
    begin: Callable[[], object] | None = None
    #: How many paths each list of the report names; totals are always exact.
    listed: int = 1000
    #: How much held content is kept in ``hold_dir`` at most.
    hold_bytes: int = 1 << 30
    #: Where git's own template of hooks is searched beside the usual places: a PATH.
    git_path: str = "/usr/bin:/usr/local/bin"


class Held(msgspec.Struct, frozen=True):
    """Something that was not applied, on purpose."""

    path: str
    reason: str
    detail: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """Whether an entry may pass. ``content``: as exactly these bytes, the ones that were judged."""

    held: Held | None = None
    content: bytes | None = None
    #: A link that leads to something executable.
    executable: bool = False


PASS = Verdict()


class Failure(msgspec.Struct, frozen=True):
    """Something that could not be applied; it is still in the top."""

    path: str
    error: str


class ApplyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the apply step did. Paths are Python file names: show them with ``printable`` only."""

    #: created, modified, deleted, replaced, renamed, mode: how many of each.
    counts: dict[str, int] = {}
    #: (what, path), bounded by ``options.listed``; ``total`` is exact.
    changed: tuple[tuple[str, str], ...] = ()
    total: int = 0
    held: tuple[Held, ...] = ()
    held_total: int = 0
    #: Paths among ``held`` that the host changed meanwhile.
    conflicts: tuple[str, ...] = ()
    #: New or changed files that can be executed, and links to such.
    executables: tuple[str, ...] = ()
    executables_total: int = 0
    failed: tuple[Failure, ...] = ()
    failed_total: int = 0
    bytes: int = 0
    ms: float = 0.0
    #: False: the top holds something that is neither applied nor kept elsewhere. Do not delete it.
    complete: bool = True


class Tally:
    """The report while it grows."""

    def __init__(self, listed: int) -> None:
        self.listed = listed
        self.counts: dict[str, int] = {}
        self.changed: list[tuple[str, str]] = []
        self.held: list[Held] = []
        self.held_total = 0
        self._told: set[tuple[str, str]] = set()
        self.conflicts: list[str] = []
        self.executables: list[str] = []
        self.executables_total = 0
        self.failed: list[Failure] = []
        self.failed_total = 0
        self.bytes = 0
        self.complete = True

    def change(self, what: str, path: str) -> None:
        """One change was applied."""
        self.counts[what] = self.counts.get(what, 0) + 1
        if len(self.changed) < self.listed:
            self.changed.append((what, path))

    def hold(self, path: str, reason: str, detail: str = "") -> None:
        """One change was held back."""
        if (path, reason) in self._told:
            return  # as what was deleted and as what was to come there
        self._told.add((path, reason))
        self.held_total += 1
        if len(self.held) < self.listed:
            self.held.append(Held(path, reason, detail))
            if reason == CONFLICT:
                self.conflicts.append(path)

    def executable(self, path: str) -> None:
        """A new or changed file can be executed."""
        self.executables_total += 1
        if len(self.executables) < self.listed:
            self.executables.append(path)

    def fail(self, path: str, error: str) -> None:
        """One change could not be applied, so the top must stay."""
        self.complete = False
        self.failed_total += 1
        if len(self.failed) < self.listed:
            self.failed.append(Failure(path, error))

    def report(self, ms: float) -> ApplyReport:
        """The finished report."""
        return ApplyReport(
            counts=self.counts,
            changed=tuple(self.changed),
            total=sum(self.counts.values()),
            held=tuple(self.held),
            held_total=self.held_total,
            conflicts=tuple(self.conflicts),
            executables=tuple(self.executables),
            executables_total=self.executables_total,
            failed=tuple(self.failed),
            failed_total=self.failed_total,
            bytes=self.bytes,
            ms=ms,
            complete=self.complete,
        )
