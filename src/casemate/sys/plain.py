"""What plain data is, told to the type checkers: values that JSON can hold, as they come from a decoder."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeGuard

__all__ = ["is_list", "is_object"]


def is_object(value: object) -> TypeGuard[dict[str, object]]:
    """Whether a decoded value is an object; the names in one are always text."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[object]]:
    """Whether a decoded value is a list."""
    return isinstance(value, list)
