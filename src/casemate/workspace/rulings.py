"""One pass of judgement over all changes of a top: the same for the step that applies and for a review."""

from __future__ import annotations

import time

import msgspec

from casemate.workspace.moves import judge_move
from casemate.workspace.report import OVERLAY, PASS, Held, Verdict
from casemate.workspace.scan import DIR, Change, Changes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from casemate.workspace.judge import Context, Judge
    from casemate.workspace.report import Limits

__all__ = ["Ruling", "TooLong", "rulings"]


class TooLong(Exception):
    """Judging took longer than the limits allow."""


class Ruling(msgspec.Struct, frozen=True, gc=False):
    """What was decided about one change."""

    change: Change
    verdict: Verdict
    #: The directory that it is in, where that is held back as a whole.
    within: Held | None = None
    #: It could not be looked at.
    error: OSError | None = None


def rulings(judge: Judge, changes: Changes, contexts: dict[str, Context], limits: Limits) -> Iterator[Ruling]:
    """Decide over every change, in order; ``contexts`` gets what each directory is. Raises TooLong."""
    end = time.monotonic() + limits.seconds
    for change in changes.entries:
        if time.monotonic() > end:
            raise TooLong
        above = contexts[change.path.rpartition("/")[0]]
        try:
            if change.kind == DIR:
                context = contexts[change.path] = _directory(judge, change, above, changes, limits)
                verdict = PASS if context.held is None else Verdict(context.held)
            else:
                verdict = judge.entry(above, change)
        except OSError as error:
            contexts[change.path] = judge.holding(Held(change.path, OVERLAY, "unreadable"))
            yield Ruling(change, PASS, above.held, error)
            continue
        yield Ruling(change, verdict, above.held)


def _directory(
    judge: Judge, change: Change, above: Context, changes: Changes, limits: Limits
) -> Context:
    context = judge.enter(above, change.path, change)
    if change.moved and context.held is None:
        held = judge_move(judge, change, context, changes.hidden, limits.entries)
        if held is not None:
            return judge.holding(held)
    return context
