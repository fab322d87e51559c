r"""Unified diffs of hostile text: bounded in time and length, and safe to show.

What cannot be seen, or is shown otherwise than it stands (control and bidirectional characters, invisible
letters, odd spaces, bytes that are not UTF-8), appears as ``\x1b`` or ``\u{202e}`` and is counted, so that a
reader can tell it from a text that merely says so.

The algorithm is Myers', with a bound on the work: a file made to be slow to compare is shown as replaced.
"""

from __future__ import annotations

import msgspec

from casemate.workspace.names import is_visible, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Budget", "TextDiff", "compare", "is_binary", "visible"]

_CONTEXT = 3
_LINE = 1000  # characters that are shown of one line
_SNIFF = 8000
_MOST_EDITS = 700  # each costs memory for all the shorter ways to it
_EMOJI_STYLE = "\ufe0f"


class Budget:
    """How much may still be shown and computed, for all files of a review together."""

    def __init__(self, *, lines: int = 20_000, lines_each: int = 2_000, work: int = 4_000_000) -> None:
        self.lines, self.lines_each, self.work = lines, lines_each, work


class TextDiff(msgspec.Struct, kw_only=True, omit_defaults=True, rename="kebab"):
    """The difference between two texts. ``lines`` begin with ``@@``, a space, ``+``, ``-`` or a backslash."""

    lines: list[str] = []
    added: int = 0
    removed: int = 0
    #: Lines that the bounds left out of ``lines``.
    left_out: int = 0
    #: What is shown as an escape, and how often: ``U+202E`` -> 2, ``byte FF`` -> 1.
    hidden: dict[str, int] = {}
    #: It took too long to compare: all of the old text stands against all of the new.
    coarse: bool = False


def is_binary(data: bytes) -> bool:
    """Whether a content is no text: it has a NUL byte early on."""
    return b"\0" in data[:_SNIFF]


def visible(line: bytes, hidden: dict[str, int]) -> str:
    """One line, without its end, as it may be shown; ``hidden`` counts what is shown as an escape."""
    if len(line) > _LINE * 4:
        line = line[: _LINE * 4 + 8]
    text = line.decode("utf-8", "surrogateescape")
    cut = len(text) > _LINE
    if cut:
        text = text[:_LINE]
    if not (text.isascii() and text.isprintable()):
        text = _escape(text, hidden)
    return f"{text} … (the line goes on)" if cut else text


def _escape(text: str, hidden: dict[str, int]) -> str:
    shown: list[str] = []
    before = ""
    last = len(text) - 1
    for at, character in enumerate(text):
        if character == "\t" or not _is_hidden(character, before):
            shown.append(character)
        else:
            code = ord(character)
            shown.append(printable(character))
            if character != "\r" or at != last:  # a line of another system ends so
                name = f"byte {code - 0xDC00:02X}" if 0xDC80 <= code <= 0xDCFF else f"U+{code:04X}"
                hidden[name] = hidden.get(name, 0) + 1
        before = character
    return "".join(shown)


def _is_hidden(character: str, before: str) -> bool:
    if is_visible(character):
        return False
    # One variation selector makes an emoji of a sign; a second one in a row carries something else.
    return not (character == _EMOJI_STYLE and before > "\u00a0" and is_visible(before))


def compare(old: bytes, new: bytes, budget: Budget) -> TextDiff:
    """The unified diff of two texts, in no more lines and steps than ``budget`` still has."""
    left, right = _lines(old), _lines(new)
    found = TextDiff()
    blocks = list(_blocks(left, right, budget, found))
    room = min(budget.lines, budget.lines_each)
    at = 0
    while at < len(blocks):
        end = at + 1
        while end < len(blocks) and blocks[end][0] - blocks[end - 1][1] <= 2 * _CONTEXT:
            end += 1
        _hunk(left, right, blocks[at:end], found, room)
        at = end
    budget.lines -= len(found.lines)
    return found


def _lines(data: bytes) -> list[bytes]:
    """Lines with their ends, so that a missing last one is a difference."""
    return data.splitlines(keepends=True) if b"\r" not in data else _lines_by_newline(data)


def _lines_by_newline(data: bytes) -> list[bytes]:
    # bytes.splitlines ends a line at a carriage return, too; nothing else does.
    lines = [line + b"\n" for line in data.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def _hunk(
    left: list[bytes], right: list[bytes], blocks: list[tuple[int, int, int, int]], found: TextDiff, room: int
) -> None:
    """Add one hunk: some changed blocks with the lines around and between them."""
    first, last = blocks[0], blocks[-1]
    ahead = min(_CONTEXT, first[0])
    behind = min(_CONTEXT, len(left) - last[1])
    removed = sum(block[1] - block[0] for block in blocks)
    added = sum(block[3] - block[2] for block in blocks)
    found.removed += removed
    found.added += added
    total = 1 + ahead + behind + added + (last[1] - first[0])
    begin = len(found.lines)
    if begin >= room:
        found.left_out += total
        return
    old = _range(first[0] - ahead, last[1] + behind)
    new = _range(first[2] - ahead, last[3] + behind)
    lines = [f"@@ -{old} +{new} @@"]
    hidden = found.hidden
    at = first[0] - ahead
    left_room = room - begin - 1
    for start, stop, new_start, new_stop in blocks:
        for mark, source, low, high in (
            (" ", left, at, start), ("-", left, start, stop), ("+", right, new_start, new_stop),
        ):  # fmt: skip
            high = min(high, low + max(0, left_room))
            left_room -= high - low
            for line in source[low:high]:
                _line(lines, mark, line, hidden)
        at = stop
    for line in left[at : at + min(behind, max(0, left_room))]:
        _line(lines, " ", line, hidden)
    shown = sum(1 for line in lines if not line.startswith("\\"))
    found.lines += lines
    found.left_out += total - shown


def _line(lines: list[str], mark: str, line: bytes, hidden: dict[str, int]) -> None:
    if line.endswith(b"\n"):
        lines.append(mark + visible(line[:-1], hidden))
    else:
        lines += [mark + visible(line, hidden), "\\ No newline at end of file"]


def _range(start: int, stop: int) -> str:
    """A range of lines as a unified diff has it."""
    length = stop - start
    begin = start + 1 if length else start
    return str(begin) if length == 1 else f"{begin},{length}"


def _blocks(
    left: list[bytes], right: list[bytes], budget: Budget, found: TextDiff
) -> Iterator[tuple[int, int, int, int]]:
    """Where the texts differ: (start, stop) of the old lines and of the new ones, in order."""
    low, most = 0, min(len(left), len(right))
    while low < most and left[low] == right[low]:
        low += 1
    high, rest = 0, most - low
    while high < rest and left[-1 - high] == right[-1 - high]:
        high += 1
    old, new = left[low : len(left) - high], right[low : len(right) - high]
    if not old and not new:
        return
    if not old or not new:
        yield low, low + len(old), low, low + len(new)
        return
    path = _shortest(old, new, budget)
    if path is None:
        found.coarse = True
        yield low, low + len(old), low, low + len(new)
        return
    for start, stop, new_start, new_stop in path:
        yield low + start, low + stop, low + new_start, low + new_stop


def _shortest(old: list[bytes], new: list[bytes], budget: Budget) -> list[tuple[int, int, int, int]] | None:
    """The shortest edit from one list to the other as changed blocks; None if the work is not worth it."""
    furthest = {1: 0}
    trace: list[dict[int, int]] = []
    size, other = len(old), len(new)
    for distance in range(size + other + 1):
        budget.work -= distance + 16
        if budget.work < 0 or distance > _MOST_EDITS:
            return None
        trace.append(furthest.copy())
        for k in range(-distance, distance + 1, 2):
            if k == -distance or (k != distance and furthest[k - 1] < furthest[k + 1]):
                x = furthest[k + 1]
            else:
                x = furthest[k - 1] + 1
            y = x - k
            start = x
            while x < size and y < other and old[x] == new[y]:
                x += 1
                y += 1
            budget.work -= x - start
            furthest[k] = x
            if x >= size and y >= other:
                return _walk_back(trace, size, other)
    return None


def _walk_back(trace: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int, int, int]]:
    """The changed blocks of the path that was found, in order."""
    blocks: list[tuple[int, int, int, int]] = []
    for distance in range(len(trace) - 1, 0, -1):
        furthest = trace[distance]
        k = x - y
        down = k == -distance or (k != distance and furthest[k - 1] < furthest[k + 1])
        before = k + 1 if down else k - 1
        old_x = furthest[before]
        old_y = old_x - before
        # The step itself; the common lines after it belong to no block.
        stop_x, stop_y = (old_x, old_y + 1) if down else (old_x + 1, old_y)
        if blocks and blocks[-1][0] == stop_x and blocks[-1][2] == stop_y:
            _, last, _, new_last = blocks.pop()
            blocks.append((old_x, last, old_y, new_last))
        else:
            blocks.append((old_x, stop_x, old_y, stop_y))
        x, y = old_x, old_y
    return blocks[::-1]
