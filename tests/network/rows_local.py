"""Rows on everything but the network: the host's sockets, the kernel's configuration, other namespaces."""

from __future__ import annotations

from tests.network import neighbours
from tests.network.row import ROOT, Row

_PATHS = tuple(
    {"part": name, "path": f"<sockets>/{file}", "send": f"<m:{name}>", "dgram": name == "dgram"}
    for name, file in neighbours.PATHS.items()
)
_ABSTRACT = (
    {"part": "stream", "path": neighbours.ABSTRACT_STREAM, "send": "<m:stream>"},
    {"part": "dgram", "path": neighbours.ABSTRACT_DGRAM, "send": "<m:dgram>", "dgram": True},
)


def _told(*parts: str) -> tuple[dict[str, object], ...]:
    return tuple({"part": part, "order": part} for part in parts)


ROWS: tuple[Row, ...] = (
    Row("unix-paths", "unix sockets of the host with a path", "local.unix", _PATHS, "bare"),
    Row("unix-abstract", "abstract unix sockets of the host", "local.unix", _ABSTRACT, "bare"),
    Row("vsock", "a socket towards a hypervisor", "local.vsock", _told("any"), "bare", told=True),
    Row("netlink", "addresses, routes and devices by netlink", "local.netlink",
        _told("address", "route", "link"), "bare", told=True, control_modes=ROOT),
    Row("device-ioctl", "a device's flags by ioctl", "local.ioctl", _told("flags"), "bare", told=True,
        control_modes=ROOT),
    Row("device-tun", "a network device of one's own", "local.tun", _told("tun"), "bare", told=True,
        control_modes=ROOT),
    Row("join-namespace", "enter another process's network namespace", "local.join", _told("any"), "bare",
        told=True, control_modes=ROOT),
    Row("network-switches", "change a switch of the network", "local.sysctl", _told("forward"), "bare",
        told=True, control_modes=ROOT),
)  # fmt: skip
