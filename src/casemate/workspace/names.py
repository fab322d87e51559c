"""Names from a hostile tree: kept byte for byte as Python's file names, shown only escaped."""

from __future__ import annotations

__all__ = ["join", "prefixes", "printable"]


def printable(path: str) -> str:
    r"""``path`` in a form that is safe to show: nothing in it can move a cursor or hide a character.

    Control, format (bidirectional marks, joiners) and private characters become ``\xNN`` or
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
        elif character.isprintable():
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
