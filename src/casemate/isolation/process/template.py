"""What all sandboxes of a plan share: the read-only root, a mount namespace that each one copies."""

from __future__ import annotations

import os
import time

from casemate.errors import ProtectionUnavailable, SandboxError
from casemate.isolation.process import rootfs
from casemate.sys import namespaces

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from casemate.isolation.process.spec import Spec

__all__ = ["Template", "Templates"]

#: For how many seconds sandboxes are made from a root that has overlays over the host's directories. They
#: remember names that were looked up, and so might not show what the host has installed since.
_FRESH = 20.0


class Template:
    """The read-only root of a plan: a mount namespace of which it is the root, and two places in it.

    It goes when nothing refers to it any more: a sandbox that was made ahead may start later.
    """

    __slots__ = ("_made", "dev", "layered", "namespace", "tree")

    def __init__(
        self, spec: Spec, place: str, *, ids: int, attached: bool, meanwhile: Callable[[], object]
    ) -> None:
        self.tree = self.dev = self.namespace = -1
        self.layered = False
        self._made = time.monotonic()

        def setup() -> None:
            rootfs.become_root(spec.root, spec.devices, ids=ids, attached=attached, place=place)

        def look(child: int) -> None:
            self.tree = os.open(f"/proc/{child}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self.dev = os.open("dev", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.tree)
            with open(f"/proc/{child}/mountinfo", "rb") as file:
                self.layered = b" - overlay " in file.read()

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

    @property
    def usable(self) -> bool:
        """Whether another sandbox may be made from it."""
        return not self.layered or time.monotonic() - self._made < _FRESH

    def __del__(self) -> None:
        for descriptor in (self.tree, self.dev, self.namespace):
            if descriptor >= 0:
                os.close(descriptor)


class Templates:
    """The templates that a launcher has made, by what they show.

    ``place`` is a private directory on which a new root is built (in another mount namespace).
    """

    def __init__(self, place: str, *, rootless: bool, attached: bool) -> None:
        self._place, self._rootless, self._attached = place, rootless, attached
        self._known: dict[str, Template] = {}
        self._ids = -1

    def get(self, spec: Spec, meanwhile: Callable[[], object]) -> Template:
        """The template of a spec; ``meanwhile`` is called if it has to be built, while that is done."""
        key = repr((spec.root, spec.devices))
        known = self._known.get(key)
        if known is None or not known.usable:
            os.makedirs(self._place, 0o700, exist_ok=True)
            if self._ids < 0 and not self._rootless:
                self._ids = _no_groups()
            known = self._known[key] = Template(
                spec, self._place, ids=self._ids, attached=self._attached, meanwhile=meanwhile
            )
        return known

    def close(self) -> None:
        """Let them go; sandboxes that were made from them keep their own copies."""
        self._known.clear()
        if self._ids >= 0:
            os.close(self._ids)
            self._ids = -1


def _no_groups() -> int:
    try:
        return namespaces.no_groups()
    except OSError as error:
        raise ProtectionUnavailable(
            f"cannot make an id map: {error}",
            hint="look at user.max_user_namespaces",
            protection="sockets of the host",
            needed="a user namespace, made by root",
            found=str(error),
        ) from error
