"""The door: every front end comes through here, and nothing else reaches a boundary.

``Sandbox`` and ``AsyncSandbox`` are for programs, ``inline`` is what the command line uses; both turn a
policy into a job, start it, and settle it the same way.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.sandbox.api import AsyncSandbox, Sandbox
    from casemate.sandbox.result import Result

__all__ = ["AsyncSandbox", "Result", "Sandbox"]


def __getattr__(name: str) -> object:
    """Load the public names on first use: asyncio costs the command line more than the sandbox does."""
    if name in ("AsyncSandbox", "Sandbox"):
        from casemate.sandbox import api

        return getattr(api, name)
    if name == "Result":
        from casemate.sandbox.result import Result

        return Result
    raise AttributeError(f"module 'casemate.sandbox' has no attribute {name!r}")
