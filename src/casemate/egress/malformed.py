"""The one kind of error of the parsers here: bytes that are not what they claim to be."""

from __future__ import annotations

__all__ = ["Malformed"]


class Malformed(ValueError):
    """Bytes from a sandbox that no honest client sends, or that two programs may read differently.

    ``code`` is stable and in kebab-case, for events; the text is a bounded ASCII sentence.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
