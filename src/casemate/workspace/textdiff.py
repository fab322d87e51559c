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
_LONG = 1 << 15  # bytes, of both texts
_STRIDE = 8  # lines that are compared at once
_MOST_EDITS = 700  # each costs memory for all the shorter ways to it
_NO_END = "\\ No newline at end of file"
_UNENDED = "\n"  # at the end of a line, where it cannot be otherwise
_PLAIN = bytes(range(32, 127)) + b"\t\n"
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


def visible(line: str, hidden: dict[str, int]) -> str:
    """One line, without its end, as it may be shown; ``hidden`` counts what is shown as an escape.

    Bytes that are not UTF-8 stand in it as surrogate escapes.
    """
    cut = len(line) > _LINE
    text = line[:_LINE] if cut else line
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
    found = TextDiff()
    base = 0
    if len(old) + len(new) > _LONG:
        old, new, base = _middle(old, new)
    left, right = _Side(old, found.hidden), _Side(new, found.hidden)
    blocks = list(_blocks(left.lines, right.lines, budget, found))
    room = min(budget.lines, budget.lines_each)
    at = 0
    while at < len(blocks):
        end = at + 1
        while end < len(blocks) and blocks[end][0] - blocks[end - 1][1] <= 2 * _CONTEXT:
            end += 1
        _hunk(left, right, blocks[at:end], found, room, base)
        at = end
    budget.lines -= len(found.lines)
    return found


def _middle(old: bytes, new: bytes) -> tuple[bytes, bytes, int]:
    """What is left of two texts without their common beginning and end, but for some lines of context; and
    how many lines were left out before. To look for these in bytes spares taking long texts apart.
    """
    begin = old.rfind(b"\n", 0, _common(old, new)) + 1
    least = min(len(old), len(new)) - begin
    size = _common_end(old, new, least)
    ends = [old.find(b"\n", len(old) - size) + 1 if size else 0, 0]
    ends[0] = ends[0] or len(old)
    ends[1] = len(new) - (len(old) - ends[0])
    for _ in range(_CONTEXT):
        begin = old.rfind(b"\n", 0, max(0, begin - 1)) + 1
        after = old.find(b"\n", ends[0]) + 1 or len(old)
        ends = [after, ends[1] + after - ends[0]]
    return old[begin : ends[0]], new[begin : ends[1]], old.count(b"\n", 0, begin)


def _common(one: bytes, other: bytes) -> int:
    """How many bytes two texts have in common at their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common_end(one: bytes, other: bytes, most: int) -> int:
    """How many bytes, of ``most``, two texts have in common at their end."""
    low, high, ends = 0, most, (len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[ends[0] - middle : ends[0] - low] == other[ends[1] - middle : ends[1] - low]:
            low = middle
        else:
            high = middle - 1
    return low


class _Side:
    """One text as lines. The last one, if its end is missing, has a mark: that is a difference, too."""

    def __init__(self, data: bytes, hidden: dict[str, int]) -> None:
        self._hidden = hidden
        # Most of all text is nothing but ASCII: then no line has to be looked at for itself.
        self._plain = not data.translate(None, _PLAIN)
        text = data.decode("ascii") if self._plain else data.decode("utf-8", "surrogateescape")
        self.lines = text.split("\n")
        self._ended = not self.lines[-1]
        if self._ended:
            self.lines.pop()
        else:
            self.lines[-1] += _UNENDED

    def show(self, start: int, stop: int, mark: str, lines: list[str], free: int) -> int:
        """Add lines to ``lines``, each behind ``mark``, but at most ``free``; returns what is free then."""
        stop = min(stop, start + free)
        chosen = self.lines[start:stop]
        unended = stop == len(self.lines) and not self._ended and start < stop
        if unended:
            chosen[-1] = chosen[-1].removesuffix(_UNENDED)
        if self._plain and len(max(chosen, key=len, default="")) < _LINE:
            lines += [mark + line for line in chosen]
        else:
            hidden = self._hidden
            lines += [mark + visible(line, hidden) for line in chosen]
        if unended:
            lines.append(_NO_END)
        return free - (stop - start)


def _hunk(
    left: _Side, right: _Side, blocks: list[tuple[int, int, int, int]], found: TextDiff, room: int, base: int
) -> None:
    """Add one hunk: some changed blocks with the lines around and between them. ``base`` is how many lines of
    the texts come before those that are here.
    """
    first, last = blocks[0], blocks[-1]
    ahead = min(_CONTEXT, first[0])
    behind = min(_CONTEXT, len(left.lines) - last[1])
    added = 0
    for start, stop, new_start, new_stop in blocks:
        found.removed += stop - start
        added += new_stop - new_start
    found.added += added
    total = 1 + ahead + behind + added + (last[1] - first[0])
    free = room - len(found.lines) - 1
    if free < 0:
        found.left_out += total
        return
    found.left_out += max(0, total - 1 - free)
    old = _range(base + first[0] - ahead, base + last[1] + behind)
    new = _range(base + first[2] - ahead, base + last[3] + behind)
    lines = found.lines
    lines.append(f"@@ -{old} +{new} @@")
    at = first[0] - ahead
    for start, stop, new_start, new_stop in blocks:
        if at < start:
            free = left.show(at, start, " ", lines, free)
        if start < stop:
            free = left.show(start, stop, "-", lines, free)
        if new_start < new_stop:
            free = right.show(new_start, new_stop, "+", lines, free)
        at = stop
    if behind:
        left.show(at, at + behind, " ", lines, free)


def _range(start: int, stop: int) -> str:
    """A range of lines as a unified diff has it."""
    length = stop - start
    begin = start + 1 if length else start
    return str(begin) if length == 1 else f"{begin},{length}"


def _blocks(
    left: list[str], right: list[str], budget: Budget, found: TextDiff
) -> Iterator[tuple[int, int, int, int]]:
    """Where the texts differ: (start, stop) of the old lines and of the new ones, in order."""
    low, most = 0, min(len(left), len(right))
    while low + _STRIDE <= most and left[low : low + _STRIDE] == right[low : low + _STRIDE]:
        low += _STRIDE
    while low < most and left[low] == right[low]:
        low += 1
    high, rest = 0, most - low
    ends = len(left), len(right)
    while high + _STRIDE <= rest and (
        left[ends[0] - high - _STRIDE : ends[0] - high] == right[ends[1] - high - _STRIDE : ends[1] - high]
    ):
        high += _STRIDE
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


def _shortest(old: list[str], new: list[str], budget: Budget) -> list[tuple[int, int, int, int]] | None:
    """The shortest edit from one list to the other as changed blocks; None if the work is not worth it."""
    size, other = len(old), len(new)
    most = min(_MOST_EDITS, size + other)
    # By diagonal, from the middle: how far along the old list a path of so many edits gets.
    middle = most + 1
    furthest = [0] * (2 * most + 3)
    trace: list[list[int]] = []
    for distance in range(most + 1):
        budget.work -= distance + 16
        if budget.work < 0:
            return None
        trace.append(furthest[middle - distance - 1 : middle + distance + 2])
        last = middle + distance
        for at in range(middle - distance, last + 1, 2):
            x = furthest[at - 1] + 1
            if at != last and (x <= furthest[at + 1] or at == middle - distance):
                x = furthest[at + 1]
            elif not distance:
                x = 0
            y = x - at + middle
            if x < size and y < other and old[x] == new[y]:
                begin = x
                while x < size and y < other and old[x] == new[y]:
                    x += 1
                    y += 1
                    while x + _STRIDE <= size and old[x : x + _STRIDE] == new[y : y + _STRIDE]:
                        x += _STRIDE
                        y += _STRIDE
                budget.work -= x - begin
            furthest[at] = x
            if x >= size and y >= other:
                return _walk_back(trace, size, other)
    return None


def _walk_back(trace: list[list[int]], x: int, y: int) -> list[tuple[int, int, int, int]]:
    """The changed blocks of the path that was found, in order."""
    blocks: list[tuple[int, int, int, int]] = []
    for distance in range(len(trace) - 1, 0, -1):
        furthest = trace[distance]
        at = x - y + distance + 1  # in this round's part of the diagonals
        down = at == 1 or (at != 2 * distance + 1 and furthest[at - 1] < furthest[at + 1])
        old_x = furthest[at + 1] if down else furthest[at - 1]
        old_y = old_x - (x - y + 1 if down else x - y - 1)
        # The step itself; the common lines after it belong to no block.
        stop_x, stop_y = (old_x, old_y + 1) if down else (old_x + 1, old_y)
        if blocks and blocks[-1][0] == stop_x and blocks[-1][2] == stop_y:
            _, last, _, new_last = blocks.pop()
            blocks.append((old_x, last, old_y, new_last))
        else:
            blocks.append((old_x, stop_x, old_y, stop_y))
        x, y = old_x, old_y
    return blocks[::-1]
