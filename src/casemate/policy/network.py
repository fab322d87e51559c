"""The fields of ``[network]`` from what a person wrote to what the policy holds.

Loaded only where a layer has such a field: a run without network does not pay for it. Each function takes the
field's value on its way (``resolve.Task``) and raises ValueError with a sentence that names the entry.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, cast

from msgspec import UNSET

from casemate.policy import hosts, paths, requests, rules
from casemate.policy.model import Credential, RawCredential

if TYPE_CHECKING:
    from collections.abc import Callable

    from casemate.policy.resolve import Task

__all__ = ["RESOLVERS", "bound", "powerful"]

_ENTRIES = 1000
# Sockets whose other end does what it is told with the rights of root, or of the whole login.
_POWERFUL = (
    ("/run/docker.sock", "whoever reaches it is root on this host"),
    ("/run/docker/", "whoever reaches it is root on this host"),
    ("/run/podman/", "whoever reaches it is root on this host"),
    ("/run/containerd/", "whoever reaches it is root on this host"),
    ("/run/crio/", "whoever reaches it is root on this host"),
    ("/run/libvirt/", "whoever reaches it is root on this host"),
    ("/run/lxd/", "whoever reaches it is root on this host"),
    ("/run/snapd", "whoever reaches it is root on this host"),
    ("/var/lib/lxd/", "whoever reaches it is root on this host"),
    ("/var/snap/lxd/", "whoever reaches it is root on this host"),
    ("/run/systemd/", "systemd starts programs outside of the sandbox"),
    ("/run/dbus/", "services behind D-Bus start programs outside of the sandbox"),
    ("/nix/var/nix/daemon-socket/", "it builds and installs programs outside of the sandbox"),
    ("/tmp/.X11-unix/", "an X client reads the keyboard and types into every window"),
)
_AGENT = "it logs in with your keys; network.ssh-agent has a list of hosts for it"
_RUNS = "it runs commands outside of the sandbox, with your rights"
# By the start of the file's name, and of its directory's.
_POWERFUL_STARTS = (
    ("vscode-", "", _RUNS), ("sway-ipc.", "", _RUNS), ("ipc-socket.", "", _RUNS), ("", "tmux-", _RUNS),
    ("server", "emacs", _RUNS), ("agent.", "ssh-", _AGENT), ("ssh", "keyring", _AGENT),
)  # fmt: skip
_POWERFUL_NAMES = {
    "docker.sock": "whoever reaches it is root on this host",
    "podman.sock": "containers with your files start outside of the sandbox",
    "containerd.sock": "whoever reaches it is root on this host",
    "crio.sock": "whoever reaches it is root on this host",
    "bus": "the session's D-Bus starts programs outside of the sandbox",
    "private": "systemd starts programs outside of the sandbox",
    "libvirt-sock": "whoever reaches it is root on this host",
    "S.gpg-agent": "it signs and decrypts with your keys",
    "S.gpg-agent.ssh": _AGENT,
    "buildkitd.sock": "whoever reaches it is root on this host",
    "cri-dockerd.sock": "whoever reaches it is root on this host",
}


def _allow(task: Task) -> object:
    return _each(task, lambda text: rules.parse(text).text)


def _deny(task: Task) -> object:
    return _each(task, lambda text: rules.parse(text, deny=True).text)


def bound(task: Task) -> object:
    """The administrator's ``network-allow``."""
    return _each(task, lambda text: rules.parse(text, bound=True).text)


def _each(task: Task, read: Callable[[str], str]) -> tuple[str, ...]:
    found: list[str] = []
    for text in task.names:
        try:
            found.append(read(text))
        except ValueError as error:
            raise ValueError(f"{_show(text)}: {error}") from None
    return tuple(dict.fromkeys(found))


def _parent_proxy(task: Task) -> object:
    text = str(task.value)
    scheme, found, rest = text.partition("://")
    if "@" in text:
        raise ValueError("a password does not belong into a policy; name a proxy that needs none")
    try:
        if not found or scheme.lower() != "http":
            raise ValueError("write http://HOST:PORT; other kinds of proxy are not spoken to")
        host, colon, port = rest.removesuffix("/").rpartition(":")
        if not colon:
            raise ValueError("the port is missing: write http://HOST:PORT")
        number = rules.parse(f"proxy.invalid:{port}", deny=True).ports
        if number[0][0] != number[-1][1]:
            raise ValueError("one port is meant")
        address = hosts.address(host)
        shown = f"[{address}]" if address and address.version == 6 else str(address or hosts.normalise(host))
    except ValueError as error:
        raise ValueError(f"{_show(text)}: {error}") from None
    return f"http://{shown}:{number[0][0]}"


def _publish(task: Task) -> object:
    found: dict[str, str] = {}
    values = cast("tuple[int | str, ...]", task.value)
    if len(values) > _ENTRIES:
        raise ValueError(f"{len(values)} entries are more than the {_ENTRIES} that are possible")
    for value in values:
        host, colon, inside = str(value).partition(":")
        ports = (host, inside if colon else host)
        for port in ports:
            if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
                raise ValueError(f"{_show(value)}: write PORT, or HOST-PORT:PORT, each from 1 to 65535")
        pair = (str(int(ports[0])), str(int(ports[1])))
        if found.setdefault(*pair) != pair[1]:
            raise ValueError(f"{_show(value)}: port {pair[0]} of the host leads to {found[pair[0]]} already")
    return tuple(f"{host}:{inside}" for host, inside in found.items())


def _sockets(task: Task) -> object:
    context = task.context
    found: list[str] = []
    for text in task.names:
        try:
            path = paths.expand(text, base=context.base, home=context.guard.home)
            _check_socket(path, context.guard)
        except ValueError as error:
            raise ValueError(f"{_show(text)}: {error}") from None
        if not task.grants:
            found.append(path)
            continue
        try:
            kind = os.stat(path).st_mode
        except OSError:
            if context.must_exist:
                raise ValueError(f"{_show(text)}: {path} does not exist") from None
            task.notes.append(f"{task.field}: {path} does not exist and is left out")
            continue
        if not stat.S_ISSOCK(kind):
            raise ValueError(f"{_show(text)}: {path} is not a socket")
        if why := powerful(path):
            task.notes.append(f"WARNING: {task.field} opens {path}: {why}")
        found.append(path)
    return tuple(dict.fromkeys(found))


def _check_socket(path: str, guard: paths.Guard) -> None:
    for own in (*guard.own, "/run/casemate", "/var/lib/casemate"):
        if paths.holds(own, path):
            raise ValueError(f"{path} is Casemate's own: who reaches it decides about sandboxes")
    for kernel in paths.KERNEL:
        if paths.holds(kernel, path):
            raise ValueError(f"{path} is no place for sockets that a sandbox could be given")


def powerful(path: str) -> str:
    """Why a socket is as good as root or as the whole login, or ``""``. ``path`` is resolved."""
    for start, why in _POWERFUL:
        if path == start or (start.endswith("/") and path.startswith(start)) or path.startswith(f"{start}."):
            return why
    directory, _, name = path.rpartition("/")
    parent = directory.rpartition("/")[2]
    for start, above, why in _POWERFUL_STARTS:
        if name.startswith(start) and parent.startswith(above):
            return why
    return _POWERFUL_NAMES.get(name, "")


def _ssh_agent(task: Task) -> object:
    def read(text: str) -> str:
        rule = rules.parse(text if "]:" in text or ":" in text else f"{text}:22")
        if rule.kind != "name" or rule.protocol != "any":
            raise ValueError("write a host's name, or HOST:PORT")
        if len(rule.ports) != 1 or rule.ports[0][0] != rule.ports[0][1]:
            raise ValueError("one port is meant; without one it is 22")
        return rule.text.removesuffix(":22")

    return _each(task, read)


def _credentials(task: Task) -> object:
    from casemate.policy.resolve import check_variable

    found: list[Credential] = []
    values = cast("dict[str, RawCredential]", task.value)
    if len(values) > _ENTRIES:
        raise ValueError(f"{len(values)} credentials are more than the {_ENTRIES} that are possible")
    for name, raw in values.items():
        check_variable(name)
        try:
            found.append(_credential(task, name, raw))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return tuple(found)


def _credential(task: Task, name: str, raw: RawCredential) -> Credential:
    if not raw.hosts:
        raise ValueError("hosts is empty, so that nobody would get the value; name the hosts")
    names: list[str] = []
    for text in raw.hosts:
        try:
            names.append(rules.parse_host(text))
        except ValueError as error:
            raise ValueError(f"{_show(text)}: {error}") from None
    return Credential(
        name=name,
        hosts=tuple(dict.fromkeys(names)),
        source=_source(task, name, "env" if raw.from_ is UNSET else raw.from_),
        as_=_form("bearer" if raw.as_ is UNSET else raw.as_),
        add=raw.add is True,
    )


def _source(task: Task, name: str, text: str) -> str:
    from casemate.policy.resolve import check_variable

    kind, colon, rest = text.partition(":")
    if kind == "env":
        check_variable(rest if colon else name)
        return f"env:{rest if colon else name}"
    if kind == "file" and rest:
        if not rest.startswith(("/", "~/")):
            raise ValueError(f"{_show(text)}: the file is named by its whole path, or from ~/")
        path = paths.expand(rest, base="/", home=task.context.guard.home)
        if paths.holds(task.context.workspace, path):
            raise ValueError(f"{path} lies in the workspace, where the command itself could read it")
        return f"file:{path}"
    raise ValueError(f"from = {_show(text)} is not env, env:NAME or file:/path")


# The least that a header's name or a query's key is made of.
_TOKEN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.~")
# Headers that say where a message ends or who is meant; a value there would change the message.
_FRAMING = frozenset(
    "connection content-length cookie2 expect host http2-settings keep-alive proxy-authenticate "
    "proxy-authorization proxy-connection te trailer transfer-encoding upgrade via".split()
)


def _form(text: str) -> str:
    kind, colon, argument = text.partition(":")
    if kind == "bearer" and not colon:
        return text
    if kind == "basic":
        plain = argument.isascii() and argument.isprintable() and ":" not in argument
        if colon and not (argument and plain):
            raise ValueError(f"as = {_show(text)}: behind basic: stands the user's name, without a colon")
        return text
    if kind in ("header", "query") and colon and argument and _TOKEN.issuperset(argument):
        if kind == "header" and argument.lower() in _FRAMING:
            raise ValueError(f"as = {_show(text)}: this header belongs to the connection")
        return text
    raise ValueError(f"as = {_show(text)} is not bearer, basic, basic:USER, header:NAME or query:KEY")


def _requests(task: Task) -> object:
    found: dict[str, tuple[str, ...]] = {}
    values = cast("dict[str, tuple[str, ...]]", task.value)
    if sum(map(len, values.values())) + len(values) > _ENTRIES:
        raise ValueError(f"there are more than the {_ENTRIES} entries that are possible")
    for text, patterns in values.items():
        try:
            host = rules.parse_host(text, broad=True)
        except ValueError as error:
            raise ValueError(f"{_show(text)}: {error}") from None
        kept: list[str] = []
        for pattern in patterns:
            try:
                kept.append(requests.parse(pattern))
            except ValueError as error:
                raise ValueError(f"{_show(text)}: {_show(pattern)}: {error}") from None
        if host in found:
            raise ValueError(f"{_show(text)}: this host stands there twice")
        found[host] = tuple(dict.fromkeys(kept))
    return found


RESOLVERS: dict[str, Callable[[Task], object]] = {
    "network.allow": _allow,
    "network.deny": _deny,
    "network.parent-proxy": _parent_proxy,
    "network.publish": _publish,
    "network.sockets": _sockets,
    "network.ssh-agent": _ssh_agent,
    "network.credentials": _credentials,
    "network.requests": _requests,
    "network.within": bound,
}


def _show(value: object) -> str:
    text = str(value)
    return ascii(text if len(text) <= 120 else text[:117] + "...")
