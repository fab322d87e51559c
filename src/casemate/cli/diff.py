"""What waits, for a person to read and for a program: the list of changes, and how the contents differ.

Everything comes out of a sandbox, names, link targets and lines alike. It is shown with its control and
invisible characters as escapes, so that nothing in it acts on the terminal or reads as something else.
"""

from __future__ import annotations

import os

import msgspec

from casemate.cli.render import armoured, representable
from casemate.workspace.names import printable
from casemate.workspace.review import Entry
from casemate.workspace.textdiff import Budget

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from casemate.sandbox.tops import Reviews
    from casemate.workspace.review import Difference, Review
    from casemate.workspace.textdiff import TextDiff

__all__ = ["Page", "as_json", "is_colourful", "size_of"]

_FOLD = 50  # entries of a new directory from which on it is one line
_LINES = 500
_HELD = {"protected": "protected", "ask": "to be looked at", "conflict": "the host changed it, too"}
_COLOURS = {"+": "32", "-": "31", "@": "36"}


def is_colourful(descriptor: int, environ: dict[str, str]) -> bool:
    """Whether a reader there wants colours."""
    plain = environ.get("NO_COLOR") or environ.get("TERM", "dumb") == "dumb"
    return not plain and os.isatty(descriptor)


def size_of(size: int) -> str:
    """Bytes for a person."""
    if size < 10_000:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1000 or unit == "GiB":
            return f"{value:.1f} {unit}"
    return ""


class Page:
    """One review as lines: ``listing`` and ``texts``. With ``fold`` what nobody reads is one line: a new
    directory with much in it, and what git keeps for itself.
    """

    def __init__(self, reviews: Reviews, *, colour: bool = False, fold: bool = True) -> None:
        self._reviews, self._colour = reviews, colour
        self._folded: dict[int, dict[str, list[Entry]]] = {}
        self._within: dict[int, dict[str, int]] = {}
        for number, (_, review) in enumerate(reviews.views):
            self._folded[number] = _fold(review.entries) if fold else {}
            self._within[number] = _within(review.entries)

    def _paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour and code else text

    # -- the list ------------------------------------------------------------------------------------

    def listing(self, *, lines_changed: bool = False) -> list[str]:
        """A line for each change; with ``lines_changed`` also how many lines of a text were."""
        found: list[str] = []
        budget = Budget(lines=0)
        for number, (view, review) in enumerate(self._reviews.views):
            if not review.count():
                continue
            if len(self._reviews.views) > 1:
                found.append(f"in {printable(view)}:")
            if review.truncated:
                found.append("  more changes than can be looked at: nothing of them can be applied")
            lines = [
                self._line(review, entry, budget if lines_changed else None, inside, self._within[number])
                for entry, inside in self._shown(number, review)
            ]
            lines += [f"  {'unreadable':10} {printable(path)} ({code})" for path, code in review.skipped]
            found += lines[:_LINES]
            if len(lines) > _LINES:
                found.append(f"  … and {len(lines) - _LINES} more: --only shows a part, --json all")
        return found

    def _shown(self, number: int, review: Review) -> Iterator[tuple[Entry, list[Entry]]]:
        """The entries that have a line of their own, with those that are folded into it."""
        folds = self._folded[number]
        listed = {entry.path for entry in review.entries}
        # A repository that was there before is no change itself.
        heads = [
            Entry(path=path, what="modified", kind="dir") for path in folds if path not in listed
        ]
        for entry in sorted([*review.entries, *heads], key=_by_path) if heads else review.entries:
            if entry.path in folds:
                yield entry, folds[entry.path]
            elif not entry.within and (entry.held or not _is_below(entry.path, folds)):
                yield entry, []

    def _line(
        self, review: Review, entry: Entry, budget: Budget | None, inside: list[Entry], within: dict[str, int]
    ) -> str:
        told = [*_facts(entry, inside)]
        if budget is not None and entry.what in ("created", "modified", "renamed", "replaced"):
            difference = review.difference(entry, budget)
            if difference.text is not None and (difference.text.added or difference.text.removed):
                told.insert(0, f"+{difference.text.added} -{difference.text.removed}")
        if entry.held and entry.path in within:
            told.append(f"with {within[entry.path]} more in it")
        what, code = entry.what, {"deleted": "31", "created": "32"}.get(entry.what, "36")
        if entry.held:
            reason = _HELD.get(entry.held, entry.held)
            detail = f": {printable(entry.detail)}" if entry.detail else ""
            told.append(f"held back: {reason}{detail}")
            code = "33"
        told_text = f"  ({'; '.join(told)})" if told else ""
        return f"  {self._paint(f'{what:10}', code)} {_name(entry)}{told_text}"

    # -- the texts -----------------------------------------------------------------------------------

    def texts(self, budget: Budget) -> Iterator[list[str]]:
        """The unified diff, as lines, of each entry that has a line of its own in the list; as far as
        ``budget`` goes.
        """
        for number, (view, review) in enumerate(self._reviews.views):
            folds = self._folded[number]
            prefix = f"{view}/" if len(self._reviews.views) > 1 else ""
            for entry in review.entries:
                if folds and (entry.path in folds or (not entry.held and _is_below(entry.path, folds))):
                    continue
                if lines := self._text(review, entry, prefix, budget):
                    yield lines

    def _text(self, review: Review, entry: Entry, prefix: str, budget: Budget) -> list[str]:
        if entry.what in ("mode", "touched") or "dir" in (entry.kind, entry.kind_before):
            return []
        difference = review.difference(entry, budget)
        text = difference.text
        links = [f"-{printable(entry.to_before)}"] if entry.to_before else []
        links += [f"+{printable(entry.to)}"] if entry.to else []
        if not links and not difference.why and (text is None or not text.lines):
            return []
        new = printable(prefix + entry.path)
        old = printable(prefix + entry.source) if entry.source else new
        head = [
            f"--- {'/dev/null' if entry.what == 'created' else f'a/{old}'}",
            f"+++ {'/dev/null' if entry.what == 'deleted' else f'b/{new}'}",
        ]
        lines = ["@@ symbolic link @@", *links] if links else []
        lines += text.lines if text is not None else []
        if self._colour:
            head = [self._paint(line, "1") for line in head]
            lines = [self._paint(line, _COLOURS.get(line[:1], "")) for line in lines]
        if text is None or text.hidden or text.coarse or text.left_out:
            lines += _remarks(text, difference.why, _sizes(entry))
        return [*head, *lines]


def _by_path(entry: Entry) -> bytes:
    return os.fsencode(entry.path)


def _fold(entries: list[Entry]) -> dict[str, list[Entry]]:
    """Directories that are one line -> what is in them and need not be named; the outermost only."""
    counts: dict[str, list[Entry]] = {entry.path: [] for entry in entries if _is_new(entry)}
    for entry in entries:
        above = entry.path.rpartition("/")[0]
        while above:
            if above.rpartition("/")[2] == ".git":
                counts.setdefault(above, [])
            if above in counts:
                counts[above].append(entry)
            above = above.rpartition("/")[0]
    large = {
        path for path, inside in counts.items() if len(inside) > (0 if _is_git(path) else _FOLD)
    }
    return {path: counts[path] for path in large if not _is_below(path, large)}


def _is_git(path: str) -> bool:
    return path.rpartition("/")[2] == ".git"


def _within(entries: list[Entry]) -> dict[str, int]:
    """Directories that are held back as a whole -> how many entries are in them."""
    counts: dict[str, int] = {}
    for entry in entries:
        above = entry.path if entry.within else ""
        while above := above.rpartition("/")[0]:
            counts[above] = counts.get(above, 0) + 1
    return counts


def _is_new(entry: Entry) -> bool:
    return entry.what == "created" and entry.kind == "dir" and not entry.held


def _is_below(path: str, directories: dict[str, list[Entry]] | set[str]) -> bool:
    above = path.rpartition("/")[0]
    while above:
        if above in directories:
            return True
        above = above.rpartition("/")[0]
    return False


def _name(entry: Entry) -> str:
    slash = "/" if entry.kind == "dir" else ""
    name = f"{printable(entry.path)}{slash}"
    if entry.what == "renamed":
        return f"{printable(entry.source)}{slash} -> {name}"
    if entry.kind == "link" and entry.what != "deleted":
        return f"{name} -> {printable(entry.to)}"
    return name


def _facts(entry: Entry, inside: list[Entry]) -> Iterator[str]:
    """What there is to say of one entry."""
    if entry.what == "replaced" or (entry.what == "renamed" and entry.kind_before):
        kind = {"dir": "directory", "special": "special file"}.get(entry.kind_before, entry.kind_before)
        filled = f" with {_entries(entry.replaces - 1)}" if entry.replaces else ""
        yield f"in the place of a {kind}{filled}"
    if inside:
        size = sum(other.size for other in inside)
        yield f"{_entries(len(inside))} in it, {size_of(size)}"
        if count := sum(other.executable for other in inside):
            yield f"{count} of them executable"
    elif entry.entries:
        yield _entries(entry.entries) + (f", {size_of(entry.size_before)}" if entry.size_before else "")
    if entry.kind == "file" and entry.what in ("created", "modified", "deleted"):
        yield _sizes(entry)
    if entry.what == "touched":
        yield "only its time"
    if entry.what == "modified" and entry.kind == "link":
        yield f"was {printable(entry.to_before)}"
    if entry.mode_before and entry.mode and entry.mode != entry.mode_before:
        yield f"mode {entry.mode_before:04o} -> {entry.mode:04o}"
    if entry.executable:
        yield "executable"


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


def _sizes(entry: Entry) -> str:
    if entry.what == "created":
        return size_of(entry.size)
    if entry.what == "deleted":
        return size_of(entry.size_before)
    return f"{size_of(entry.size_before)} -> {size_of(entry.size)}"


def _remarks(text: TextDiff | None, why: str, sizes: str) -> list[str]:
    """What a reader has to know beside the lines."""
    if text is None:
        return [f"({why}: {sizes})"] if why else []
    found: list[str] = []
    if text.hidden:
        told = ", ".join(f"{name} ({count})" for name, count in sorted(text.hidden.items()))
        found.append(f"(not visible in an editor, shown as escapes: {told})")
    if text.coarse:
        found.append("(too different to compare line by line)")
    if text.left_out:
        found.append(f"({text.left_out} more lines: `casemate diff --only` shows a part)")
    return found


def as_json(reviews: Reviews, kind: str, *, texts: bool) -> bytes:
    """One object with everything in it; safe to show, and faithful: what is not printable is escaped.

    Names are exact but for bytes that are not UTF-8 (``\\xNN``); lines of diffs are as a person sees them.
    """
    budget = Budget()
    views: list[dict[str, object]] = []
    for view, review in reviews.views:
        views.append(
            {
                "view": view,
                "counts": review.counts(),
                "truncated": review.truncated,
                "skipped": review.skipped,
                "changes": [_entry(entry, review, budget if texts else None) for entry in review.entries],
            }
        )
    data: dict[str, object] = {
        "id": reviews.name, "kind": kind, "command": reviews.argv, "views": views,
    }  # fmt: skip
    return armoured(msgspec.json.encode(representable(data)))


def _entry(entry: Entry, review: Review, budget: Budget | None) -> dict[str, object]:
    plain: dict[str, object] = msgspec.to_builtins(entry)
    plain.pop("whiteout", None)
    for name, value in (("mode", entry.mode), ("mode-before", entry.mode_before)):
        if value:
            plain[name] = f"{value:04o}"
    if budget is not None:
        difference: Difference = review.difference(entry, budget)
        if difference.text is not None:
            plain["diff"] = msgspec.to_builtins(difference.text)
        elif difference.why:
            plain["content"] = difference.why
    return plain
