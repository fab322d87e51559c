"""``casemate run --apply ask``: the changes are shown when the command has ended, and a person decides.

Whatever the answer, nothing is lost: until it is yes the changes wait where those of ``--apply none`` do.
What the command has printed may have left the terminal in any state, and made it answer questions that look
like typing. So the terminal is put in order first, what has come before the question is thrown away, and
only a line that is an answer, letter by letter, counts as one.
"""

from __future__ import annotations

import _signal
import os

import msgspec

from casemate.cli.diff import Page, is_colourful
from casemate.cli.main import tell
from casemate.cli.streams import put
from casemate.errors import BusyError, CasemateError
from casemate.sandbox.kept import Kept, Words
from casemate.workspace.textdiff import Budget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.sandbox.job import Job
    from casemate.sandbox.kept import Reviews
    from casemate.sandbox.result import Applied, Result

__all__ = ["ask", "combined"]

# Shift in, ASCII; no attributes; the main screen; no margins at the sides, positions count from the corner,
# what is written replaces, the whole screen scrolls; the palette's and the text's own colours; lines wrap;
# the cursor shows. Some of that moves the cursor, and saving it would save what is undone here: so the last
# line, and one of our own below it.
_ORDER = (
    b"\x0f\x1b(B\x1b[m\x1b[?1049l\x1b[?69l\x1b[?6l\x1b[4l\x1b[r"
    b"\x1b]104\x07\x1b]110\x07\x1b]111\x07\x1b[?7h\x1b[?25h\x1b[999;1H\r\n"
)
_SHORT = 60  # lines of diff that are shown without being asked for
_WAYS = "`casemate diff` shows them, `casemate apply` applies them, `casemate discard` throws them away"
_QUESTION = "casemate: apply them? y(es), n(o: they wait), d(iff), s(elect), q(uit: they wait): "


class _Interrupted(BaseException):
    """Ctrl-C at the question."""


def ask(result: Result, job: Job, *, quiet: bool) -> Result:
    """Show what waits under ``result.applied.pending`` and do as a person says; the result with that in it.

    Without a terminal on stdin and stderr nobody is asked.
    """
    if not (os.isatty(0) and os.isatty(2)):
        if not quiet:
            tell("there is no terminal to ask at")  # the summary says what to do
        return result
    before = _signal.signal(_signal.SIGINT, _interrupt)
    try:
        kept = _open(job)
        try:
            return msgspec.structs.replace(result, applied=_decide(kept, result.applied))
        finally:
            kept.close()
    except (_Interrupted, CasemateError, OSError) as error:
        if isinstance(error, CasemateError | OSError):
            tell(f"{error}; the changes wait: {_WAYS}")
        return result
    finally:
        _signal.signal(_signal.SIGINT, before)


def _interrupt(_number: int, _frame: object) -> None:
    raise _Interrupted


def _open(job: Job) -> Kept:
    try:
        return Kept(job.workspace, job.request.environ, job=job)
    except BusyError as busy:
        tell(f"{busy.message}: waiting for its end")
        return Kept(job.workspace, job.request.environ, job=job, wait=True)


def _decide(kept: Kept, applied: Applied) -> Applied:
    """Ask until there is nothing left, or it is to wait; what was applied on the way."""
    name = applied.pending
    put(2, _ORDER)
    shown = False
    while applied.pending:
        with kept.review(name) as reviews:
            if not shown:
                _show(reviews)
                shown = True
            answer = _line(_QUESTION)
            if answer in ("d", "diff"):
                _show_texts(reviews, Budget())
                continue
        if answer in ("", "n", "no", "q", "quit", None):
            break
        words: Words | None = None
        if answer in ("s", "select"):
            typed = _line("casemate: names or patterns, as --only takes them: ")
            if not typed:
                continue
            words = _words(typed)
        elif answer not in ("y", "yes"):
            tell("that is no answer")
            continue
        try:
            done = kept.apply_interrupted(name, words)
        except CasemateError as error:
            tell(error.message)
            continue
        for word in kept.tops.missed if words is not None else ():
            tell(f"nothing has changed under {word}")
        applied = combined(applied, done)
        shown = False
        if not done.complete:  # a second try now would find the same
            break
    return applied


def _words(typed: str) -> Words:
    import shlex

    try:
        parts = shlex.split(typed)
    except ValueError:
        parts = typed.split()
    globs = tuple(part for part in parts if "*" in part or "?" in part)
    return Words(globs, tuple(part for part in parts if part not in globs))


def combined(one: Applied, other: Applied) -> Applied:
    """Two steps over the same changes as one; what waits is what the second has left."""
    return msgspec.structs.replace(
        other,
        created=one.created + other.created,
        modified=one.modified + other.modified,
        deleted=one.deleted + other.deleted,
        changes=one.changes + other.changes,
        held=one.held + other.held,
        conflicts=one.conflicts + other.conflicts,
        executables=one.executables + other.executables,
        bytes=one.bytes + other.bytes,
        kept=other.kept or one.kept,
    )


def _show(reviews: Reviews) -> None:
    """The list, and the diff if it is short."""
    page = Page(reviews, colour=is_colourful(2, dict(os.environ)))
    count = reviews.count()
    lines = [f"casemate: {count} change(s) wait for an answer:", *page.listing(lines_changed=True)]
    texts = [line for lines in page.texts(Budget()) for line in lines]
    if len(texts) <= _SHORT:
        lines += texts
    put(2, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))


def _show_texts(reviews: Reviews, budget: Budget) -> None:
    page = Page(reviews, colour=is_colourful(2, dict(os.environ)))
    for lines in page.texts(budget):
        put(2, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))


def _line(question: str) -> str | None:
    """What a person types at the terminal; None at its end, a word that is no answer for rubbish."""
    import termios

    termios.tcflush(0, termios.TCIFLUSH)
    put(2, question.encode())
    data = os.read(0, 4096)
    if not data:
        put(2, b"\n")
        return None
    text = data.decode("utf-8", "surrogateescape")
    if not text.endswith("\n") or not text[:-1].isprintable():
        return "?"
    return text.strip()
