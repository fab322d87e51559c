"""Files that were renamed: the top has a new file and a whiteout, and says nothing of their being one.

A file is taken for renamed if what is created has the content of what is deleted, or most of its lines. It
is a way to show them and nothing more: each of the two was judged for itself, and what would be held back
stands in the list under its own name.
"""

from __future__ import annotations

import os

from casemate.workspace.content import same
from casemate.workspace.scan import FILE
from casemate.workspace.textdiff import is_binary

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from casemate.workspace.review import Entry, Review

__all__ = ["pair"]

_MOST_BYTES = 64 << 20  # compared in all
_MOST_PAIRS = 400  # of files that are not the same
_TEXT = 1 << 16
_SMALL = 16  # bytes; files this small are alike by chance
_ALIKE = 0.6  # of the lines of the longer one


def pair(review: Review, entries: list[Entry]) -> list[Entry]:
    """The list with each pair made one entry, in the place of the new name."""
    made = [entry for entry in entries if _counts(entry, "created", entry.size)]
    gone = [entry for entry in entries if _counts(entry, "deleted", entry.size_before)]
    if not made or not gone:
        return entries
    paired = _exact(review, made, gone)
    made = [entry for entry in made if entry.path not in paired]
    taken = {entry.path for entry in paired.values()}
    gone = [entry for entry in gone if entry.path not in taken]
    if len(made) * len(gone) <= _MOST_PAIRS:
        paired |= _similar(review, made, gone)
    for entry in entries:
        before = paired.get(entry.path)
        if before is not None:
            entry.what, entry.source = "renamed", before.source or before.path
            entry.whiteout = before.path
            entry.mode_before, entry.size_before = before.mode_before, before.size_before
    taken = {entry.path for entry in paired.values()}
    return [entry for entry in entries if entry.path not in taken]


def _counts(entry: Entry, what: str, size: int) -> bool:
    return entry.what == what and entry.kind == FILE and size > 0 and not entry.held


def _exact(review: Review, made: list[Entry], gone: list[Entry]) -> dict[str, Entry]:
    """Pairs of the same content; of several the one with the same last name."""
    by_size: dict[int, list[Entry]] = {}
    for entry in gone:
        by_size.setdefault(entry.size_before, []).append(entry)
    paired: dict[str, Entry] = {}
    left = _MOST_BYTES
    # Of small files: what is deleted, by size and content, each read once.
    small: dict[int, dict[bytes, list[Entry]]] = {}
    for entry in made:
        candidates, size = by_size.get(entry.size), entry.size
        if not candidates:
            continue
        left -= size
        if left < 0:
            break
        data: bytes | None = None
        if size <= _TEXT:
            if size not in small:
                known = small[size] = {}
                for old in candidates:
                    left -= size
                    if (content := _read(review.old, old)) is not None:
                        known.setdefault(content, []).append(old)
            data = _read(review.new, entry)
            alike = [] if data is None else small[size].get(data, [])
        else:
            alike = [old for old in candidates if _is_same(review, entry, old)]
            left -= size * len(candidates)
        name = entry.path.rpartition("/")[2]
        alike = sorted(alike, key=lambda old: old.path.rpartition("/")[2] != name)
        if alike and (size >= _SMALL or alike[0].path.rpartition("/")[2] == name):
            paired[entry.path] = alike[0]
            candidates.remove(alike[0])
            if data is not None:
                small[size][data].remove(alike[0])
    return paired


def _read(opener: Callable[[Entry], int | None], entry: Entry) -> bytes | None:
    """The content of a small file."""
    try:
        fd = opener(entry)
    except OSError:
        return None
    if fd is None:
        return None
    try:
        return os.read(fd, _TEXT + 1)
    except OSError:
        return None
    finally:
        os.close(fd)


def _is_same(review: Review, entry: Entry, old: Entry) -> bool:
    opened: list[int] = []
    try:
        for opener, of in ((review.new, entry), (review.old, old)):
            fd = opener(of)
            if fd is None:
                return False
            opened.append(fd)
        return same(opened[0], opened[1], entry.size)
    except OSError:
        return False
    finally:
        for fd in opened:
            os.close(fd)


def _similar(review: Review, made: list[Entry], gone: list[Entry]) -> dict[str, Entry]:
    """Pairs of texts that have most of their lines in common, the best first."""
    made, gone = [e for e in made if e.size >= _SMALL], [e for e in gone if e.size_before >= _SMALL]
    news = [(entry, lines) for entry in made if (lines := _lines(review.new, entry, entry.size))]
    olds = [(entry, lines) for entry in gone if (lines := _lines(review.old, entry, entry.size_before))]
    scores: list[tuple[float, str, str]] = []
    for entry, new in news:
        for old_entry, old in olds:
            common = sum(min(count, old[line]) for line, count in new.items() if line in old)
            score = common / max(sum(new.values()), sum(old.values()))
            if score >= _ALIKE:
                scores.append((-score, entry.path, old_entry.path))
    paired: dict[str, Entry] = {}
    by_path = {entry.path: entry for entry in gone}
    for _, path, old_path in sorted(scores):
        if path not in paired and old_path in by_path:
            paired[path] = by_path.pop(old_path)
    return paired


def _lines(opener: Callable[[Entry], int | None], entry: Entry, size: int) -> dict[bytes, int]:
    """How often each line stands in a text; empty for what is none."""
    data = _read(opener, entry) if size <= _TEXT else None
    counts: dict[bytes, int] = {}
    if data is not None and not is_binary(data):
        for line in data.splitlines():
            counts[line] = counts.get(line, 0) + 1
    return counts
