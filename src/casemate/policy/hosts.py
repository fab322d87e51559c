"""What is a host name, what is an address, what is neither. Rules and traffic are read by the same functions.

Most ways around a list of hosts begin with a text that two programs read differently: a NUL in the middle, an
address in octal, a fullwidth dot. So everything that may be read differently is refused here, and what is
left has exactly one spelling: A-labels in lower case, without the last dot. Names are then compared byte for
byte.

A ``ValueError`` from here carries an ASCII sentence for the person; who calls knows the file and the field.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

__all__ = ["MAX_LABEL", "MAX_NAME", "address", "matches", "normalise"]

#: Bytes of a label and of a whole name in text form (RFC 1035), after the encoding of what is not ASCII.
MAX_LABEL, MAX_NAME = 63, 253

_LDH = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_.")
_DIGITS = frozenset("0123456789")
_HEX = frozenset("0123456789abcdef")
_NAMED = {
    "\0": "a NUL", " ": "a space", "\t": "a tab", "\n": "a line break", "\r": "a line break",
    ":": "a colon", "/": "a slash", "@": "an @", "%": "a percent sign", "*": "an asterisk",
}  # fmt: skip


def normalise(text: str) -> str:
    """The one spelling of a host name: A-labels, lower case, no dot at the end.

    Refused with a ValueError: whatever is not letters, digits, hyphens and underscores between single dots;
    labels and names that are too long; labels that begin or end with a hyphen; names that any resolver might
    take for an address (``127.0.0.1``, ``2130706433``, ``0x7f.1``); names in other scripts that do not come
    back from their encoding as they were written (fullwidth letters and dots, invisible characters).
    """
    if len(text) > MAX_NAME + 1:
        raise ValueError(f"a host name has at most {MAX_NAME} characters, this one begins {_shown(text)}")
    name = text[:-1] if text.endswith(".") else text
    if not name:
        raise ValueError("a host name is empty")
    name = name.lower() if name.isascii() else ".".join(map(_ascii_label, name.split(".")))
    if not _LDH.issuperset(name):
        wrong = next(char for char in name if char not in _LDH)
        raise ValueError(f"{_shown(text)} is not a host name: it has {_NAMED.get(wrong, ascii(wrong))} in it")
    if len(name) > MAX_NAME:
        raise ValueError(f"a host name has at most {MAX_NAME} characters, this one has {len(name)} encoded")
    labels = name.split(".")
    for label in labels:
        if not label:
            raise ValueError(f"{_shown(text)} is not a host name: a part of it is empty")
        if len(label) > MAX_LABEL:
            raise ValueError(f"a part of a host name has at most {MAX_LABEL} characters: {_shown(text)}")
        if label[0] == "-" or label[-1] == "-":
            raise ValueError(f"{_shown(text)} is not a host name: a part of it begins or ends with a hyphen")
    _check_last(labels[-1], text)
    return name


def address(text: str) -> IPv4Address | IPv6Address | None:
    """The address that a text is, or None: a strict dotted quad, or IPv6 as in RFC 4291, brackets or not.

    Zones (``fe80::1%eth0``) and every older spelling of IPv4 are None; ``normalise`` refuses them, too.
    """
    bare = text[1:-1] if text[:1] == "[" and text[-1:] == "]" else text
    six = ":" in bare
    if bare is not text and not six:
        return None
    if not 2 <= len(bare) <= 45 or "%" in bare or not (six or bare[-1] in _DIGITS):
        return None
    import ipaddress  # late: most texts are names, and names do not need it

    try:
        return ipaddress.IPv6Address(bare) if six else ipaddress.IPv4Address(bare)
    except ValueError:
        return None


def matches(name: str, suffix: str) -> bool:
    """Whether ``name`` lies below ``suffix``, by whole labels; a name does not lie below itself.

    Both are as ``normalise`` gives them: ``a.example.org`` is below ``example.org``, ``badexample.org`` is
    not.
    """
    return bool(suffix) and name.endswith("." + suffix) and len(name) > len(suffix) + 1


def _shown(text: str) -> str:
    """A text from anybody, as a bounded ASCII literal."""
    return ascii(text if len(text) <= 80 else text[:80] + "...")


def _check_last(last: str, text: str) -> None:
    """Refuse a name whose last label is a number: resolvers take such a name for an address."""
    if _DIGITS.issuperset(last) or (last[:2] == "0x" and _HEX.issuperset(last[2:])):
        if address(text) is not None:
            raise ValueError(f"{_shown(text)} is an address, not a host name")
        raise ValueError(
            f"{_shown(text)} is not a host name: its last part is a number, so that it may be read as an "
            "address; write an IPv4 address as four decimal numbers"
        )
    if "_" in last:
        raise ValueError(f"{_shown(text)} is not a host name: its last part has an underscore")


def _ascii_label(label: str) -> str:
    """One label as an A-label. The round trip refuses whatever an encoder would change on the way.

    IDNA 2003 and 2008 disagree on a few letters (sharp s, final sigma, joiners): these are refused here, and
    can be written in the encoded form, which every program reads alike.
    """
    if label.isascii():
        return label.lower()
    import unicodedata  # late: almost every name is ASCII

    lower = label.lower()
    plain = unicodedata.normalize("NFC", lower)
    wrong = ValueError(
        f"{_shown(label)} can be read as another host name than it looks like: write it in its xn-- form"
    )
    # Letters that turn into ASCII (the Kelvin sign); characters younger than the encoder's tables.
    if any(char.lower().isascii() for char in label if not char.isascii()):
        raise wrong
    if unicodedata.normalize("NFKC", lower) != plain:
        raise wrong
    try:
        encoded = plain.encode("idna")
        back = encoded.decode("idna")
    except UnicodeError:
        raise wrong from None
    if back != plain:
        raise wrong
    return encoded.decode("ascii")
