"""The caller's three standard descriptors. Nothing is imported: the daemon's thin client needs this too."""

from __future__ import annotations

import os

__all__ = ["hold_standard_descriptors", "put"]


def hold_standard_descriptors() -> None:
    """A caller may have closed some of 0, 1, 2; the next pipe or socket must not become one of them."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open("/dev/null", os.O_RDWR)


def put(descriptor: int, data: bytes) -> None:
    """Write all of it. A reader that has gone away is no error: what is said changes nothing of what is."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            import select

            select.select([], [descriptor], [])
        except OSError:
            return
