"""What all sandboxes of a plan share: the read-only root, a mount namespace that each one copies."""

from __future__ import annotations

import os

from casemate.errors import SandboxError
from casemate.isolation.process import rootfs
from casemate.sys import namespaces

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from casemate.isolation.process.spec import Spec

__all__ = ["Template"]


class Template:
    """The read-only root of a plan: a mount namespace of which it is the root, and two places in it."""

    __slots__ = ("dev", "namespace", "tree")

    def __init__(
        self, spec: Spec, place: str, *, make_nodes: bool, meanwhile: Callable[[], object]
    ) -> None:
        self.tree = self.dev = -1

        def setup() -> None:
            rootfs.become_root(spec.root, spec.devices, make_nodes=make_nodes, place=place)

        def look(child: int) -> None:
            self.tree = os.open(f"/proc/{child}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self.dev = os.open("dev", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.tree)

        try:
            made = namespaces.make(namespaces.MOUNT, setup, look, meanwhile)
            self.namespace = made[namespaces.MOUNT]
        except OSError as error:
            raise SandboxError(
                f"the sandbox's root cannot be built: {error.strerror}",
                code="root-failed",
                hint="run `casemate doctor`",
                errno=error.errno,
            ) from error

    def close(self) -> None:
        """Let it go; sandboxes that were made from it keep their own copies."""
        for descriptor in (self.tree, self.dev, self.namespace):
            os.close(descriptor)
