"""Casemate runs a command behind a boundary made of the kernel's own primitives.

Public names: ``Sandbox``, ``AsyncSandbox``, ``Result``, ``Policy`` and the errors of
``casemate.errors``. They load on first use, so ``import casemate`` costs next to nothing.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate import errors
    from casemate.errors import (
        BusyError,
        CasemateError,
        CommandNotFound,
        PolicyError,
        ProtectionUnavailable,
        SandboxError,
        WorkspaceError,
    )
    from casemate.policy.model import Policy
    from casemate.sandbox import AsyncSandbox, Result, Sandbox

__version__ = "0.1.0"

__all__ = [
    "AsyncSandbox",
    "BusyError",
    "CasemateError",
    "CommandNotFound",
    "Policy",
    "PolicyError",
    "ProtectionUnavailable",
    "Result",
    "Sandbox",
    "SandboxError",
    "WorkspaceError",
    "__version__",
    "errors",
]

# Public name -> the module that holds it. Written out, so that no module is loaded to find a name.
_HOMES = {
    "AsyncSandbox": "casemate.sandbox",
    "BusyError": "casemate.errors",
    "CasemateError": "casemate.errors",
    "CommandNotFound": "casemate.errors",
    "Policy": "casemate.policy.model",
    "PolicyError": "casemate.errors",
    "ProtectionUnavailable": "casemate.errors",
    "Result": "casemate.sandbox",
    "Sandbox": "casemate.sandbox",
    "SandboxError": "casemate.errors",
    "WorkspaceError": "casemate.errors",
    "errors": "casemate.errors",
}


def __getattr__(name: str) -> object:
    """Load a public name from its home and keep it here."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'casemate' has no attribute {name!r}")
    from importlib import import_module

    module = import_module(home)
    value: object = module if name == "errors" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted(__all__)
