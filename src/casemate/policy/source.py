"""Where a layer's values stand, so that an error can name file, line and field."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from casemate.errors import PolicyError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Layer", "Source", "suggestion"]


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One layer's origin. ``text`` is the file's own, ``""`` for flags and presets."""

    name: str
    file: str = ""
    text: str = ""

    def error(self, field: str, message: str, *, hint: str = "", code: str | None = None) -> PolicyError:
        """The error for ``field``; the line is looked up only now, because only errors need one."""
        details: dict[str, object] = {"layer": self.name, "field": field}
        where = self.name
        if self.file:
            where = details["file"] = self.file
        if self.text:
            from casemate.policy.lines import find

            line = find(self.text, field, json=self.file.endswith(".json"))
            if line is not None:
                details["line"] = line
                where = f"{where}:{line}"
        return PolicyError(f"{where}: {field}: {message}", code=code, hint=hint, **details)


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One resolved layer: values by field path, in the forms of ``Policy``.

    ``grants`` says whether what it allows counts, ``restricts`` whether its scalars are upper bounds that
    no other layer can lift. ``soft`` names scalars that count only where they allow more than what stands.
    """

    source: Source
    values: dict[str, object]
    grants: bool = True
    restricts: bool = False
    notes: tuple[str, ...] = ()
    soft: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The layer's name as people see it."""
        return self.source.name


def suggestion(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'write'?`` for the nearest known word, else nothing."""
    from difflib import get_close_matches

    # Words come from files of any size; the comparison is quadratic in their length.
    near = get_close_matches(word[:64], list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
