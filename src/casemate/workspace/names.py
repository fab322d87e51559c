"""Names from a hostile tree: kept byte for byte as Python's file names, shown only escaped."""

from __future__ import annotations

__all__ = ["is_visible", "join", "prefixes", "printable"]

# Letters and marks that take no room, though Unicode calls them printable: fillers, variation selectors.
_INVISIBLE = (
    (0x034F, 0x034F), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x2800, 0x2800),
    (0x3164, 0x3164), (0xFE00, 0xFE0F), (0xFFA0, 0xFFA0), (0xE0100, 0xE01EF),
)  # fmt: skip


def is_visible(character: str) -> bool:
    """Whether a character is seen, and as itself."""
    if character < "\u0300":  # most of all text
        return character.isprintable()
    code = ord(character)
    return character.isprintable() and not any(first <= code <= last for first, last in _INVISIBLE)


def printable(path: str) -> str:
    r"""``path`` in a form that is safe to show: nothing in it can move a cursor or hide a character.

    Control, format (bidirectional marks, joiners), private and invisible characters become ``\xNN`` or
    ``\u{NNNN}``, a byte that is not UTF-8 becomes ``\xNN``, a backslash is doubled: two different names
    never look the same.
    """
    if path.isascii() and path.isprintable() and "\\" not in path:
        return path
    shown: list[str] = []
    for character in path:
        code = ord(character)
        if character == "\\":
            shown.append("\\\\")
        elif is_visible(character):
            shown.append(character)
        elif 0xDC80 <= code <= 0xDCFF:  # surrogateescape: a raw byte
            shown.append(f"\\x{code - 0xDC00:02x}")
        elif code < 0x80:
            shown.append(f"\\x{code:02x}")
        else:
            shown.append(f"\\u{{{code:04x}}}")
    return "".join(shown)


def join(directory: str, name: str) -> str:
    """A path below the workspace; the workspace itself is the empty string."""
    return f"{directory}/{name}" if directory else name


def prefixes(path: str) -> list[str]:
    """The path and all directories above it, but not the workspace itself; the longest first."""
    found: list[str] = []
    while path:
        found.append(path)
        path = path.rpartition("/")[0]
    return found
