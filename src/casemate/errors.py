"""The one error tree of Casemate.

::

    CasemateError                 code, message, details, hint
    ├── PolicyError               the policy (a file, a flag, a preset) is wrong or not allowed
    ├── ProtectionUnavailable     a required protection cannot be enforced on this host
    ├── SandboxError              the sandbox itself failed; the command is not to blame
    │   └── CommandNotFound       the program could not be executed
    ├── WorkspaceError            the view or the apply step failed; nothing was lost
    └── BusyError                 somebody else holds what is needed

A command that fails is never an error of this tree: it is a ``Result``.
"""

from __future__ import annotations

__all__ = [
    "BusyError",
    "CasemateError",
    "CommandNotFound",
    "PolicyError",
    "ProtectionUnavailable",
    "SandboxError",
    "WorkspaceError",
]


class CasemateError(Exception):
    """Root of the tree.

    ``code`` is stable and in kebab-case, ``details`` holds the values involved (strings, numbers,
    lists of them), ``hint`` says what to do next.
    """

    code = "casemate"

    def __init__(
        self, message: str, *, code: str | None = None, hint: str = "", **details: object
    ) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        self.hint = hint
        self.details = details

    def as_dict(self) -> dict[str, object]:
        """The same facts as plain data, for ``--json``."""
        return {"code": self.code, "message": self.message, "hint": self.hint, "details": self.details}


class PolicyError(CasemateError):
    """The policy is malformed, over-broad, or asks for what it may not have.

    ``details`` holds ``file``, ``line``, ``field`` where they are known.
    """

    code = "policy-invalid"


class ProtectionUnavailable(CasemateError):
    """A required protection cannot be enforced here, so nothing was started.

    ``details`` holds ``protection``, ``needed`` and ``found``.
    """

    code = "protection-unavailable"


class SandboxError(CasemateError):
    """The sandbox could not be built or broke; the command's own failure is never reported this way."""

    code = "sandbox-failed"


class CommandNotFound(SandboxError):
    """The program could not be executed; nothing of it ran."""

    code = "command-not-found"


class WorkspaceError(CasemateError):
    """The workspace's view could not be made, scanned or applied."""

    code = "workspace-failed"


class BusyError(CasemateError):
    """Another command holds the workspace and waiting was not wanted."""

    code = "busy"
