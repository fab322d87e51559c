"""Why the gate did not do what a sandbox asked for. None of these leaves the worker."""

from __future__ import annotations

__all__ = ["Refused"]


class Refused(Exception):
    """The policy, or a rule of the protocol, does not let this pass.

    ``code`` is stable and in kebab-case; the text is a sentence for the person inside. ``rule`` is the
    policy's entry that decided (``""`` where none did), ``allow`` the line of a policy that would allow it
    (``""`` where nothing would).
    """

    def __init__(self, code: str, message: str = "", *, rule: str = "", allow: str = "") -> None:
        super().__init__(message or code)
        self.code = code
        self.rule = rule
        self.allow = allow
