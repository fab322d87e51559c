"""What the launcher is told: plain data, checked field by field when it comes over a socket.

``Spec`` is everything that is fixed before a command is known; its digest keys templates and slots.
``Late`` is what may come after the sandbox was sealed: arguments, environment, directory.
"""

from __future__ import annotations

from casemate.errors import SandboxError
from casemate.sys import packets
from casemate.sys.plain import is_list, is_object

__all__ = ["Direct", "Late", "Spec", "Stack", "View", "encode"]

_RLIMITS = ("CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "MSGQUEUE", "NOFILE", "NPROC", "STACK")


class View:
    """One directory of the host as the sandbox sees it.

    ``writable`` views are overlays whose top is private; others are read-only. ``owner`` is the uid and
    gid that the directory's files have on disk and that become the sandbox's own (root launcher only).
    ``top`` is what it is called in the layers of a session; a read-only view without one has no layers.
    """

    __slots__ = ("owner", "source", "target", "top", "writable")

    def __init__(
        self, source: str, target: str, writable: bool, owner: tuple[int, int] | None, top: str = ""
    ) -> None:
        self.source = source
        self.target = target
        self.writable = writable
        self.owner = owner
        self.top = top

    def as_list(self) -> list[object]:
        """The JSON form."""
        return [self.source, self.target, self.writable, self.owner, self.top]


class Stack:
    """The layers of a session: the directory that holds them, the live one, and the frozen ones, from the
    newest down, of the views and of HOME, which is one of the views then. Tops stay where they are when the
    command has ended.
    """

    __slots__ = ("homes", "layers", "live", "store")

    def __init__(self, store: str, live: str, layers: list[str], homes: list[str]) -> None:
        self.store = store
        self.live = live
        self.layers = layers
        self.homes = homes

    def as_list(self) -> list[object]:
        """The JSON form."""
        return [self.store, self.live, self.layers, self.homes]


class Direct:
    """A workspace that the command changes directly, by way of a broker.

    ``target`` is its path, outside and inside. ``judge`` names the class (``module:class``) whose instances
    decide about acts, and ``paths`` are where its modules are looked for beside the launcher's own; it gets
    the workspace, ``target``, ``protect`` (patterns), ``readable`` (where links may lead) and ``git_path``
    (a PATH). ``lock`` is a file that everybody who changes workspaces for sandboxes locks for one act.
    """

    __slots__ = ("git_path", "judge", "lock", "paths", "protect", "readable", "target")

    def __init__(
        self, *, target: str, judge: str, paths: list[str], protect: list[str], readable: list[str],
        git_path: str, lock: str,
    ) -> None:  # fmt: skip
        self.target = target
        self.judge = judge
        self.paths = paths
        self.protect = protect
        self.readable = readable
        self.git_path = git_path
        self.lock = lock

    def as_dict(self) -> dict[str, object]:
        """The JSON form."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, data: object) -> Direct:
        """Check and take the JSON form. Raises SandboxError (``bad-request``)."""
        fields = _record(data, set(cls.__slots__))
        protect, readable = _list(fields["protect"]), _list(fields["readable"])
        return cls(
            target=_text(fields["target"]),
            judge=_text(fields["judge"]),
            paths=[_text(word) for word in _list(fields["paths"])],
            protect=[_text(word) for word in protect],
            readable=[_text(word) for word in readable],
            git_path=_text(fields["git_path"]),
            lock=_text(fields["lock"]),
        )


class Spec:
    """A sandbox without its command.

    ``root`` is the list of entries of the root file system (see ``rootfs``); ``home`` maps file names
    below HOME to their content; ``binds`` are ``(source, target)`` writable host directories (caches);
    ``scratch`` is the size in bytes of the private writable file system that holds /tmp, HOME and, unless
    ``tops_on_disk``, the tops of the views; ``scratch_image`` puts it into a file instead of memory.
    ``keep_base`` is the directory below which each run of this spec gets one of its own, for tops that lie
    on disk or have to outlive the launcher. ``hide`` are paths below views that are covered where they exist.
    ``capture`` says that a gate takes every connection: ports to listen on where not all can be had.
    ``sockets`` are unix sockets of the host that the sandbox may connect to, at their own place.
    ``stack`` are the layers of the session that the command belongs to. ``direct`` says that the view at its
    target, a read-only one, is changed by way of a broker.
    """

    __slots__ = (
        "binds",
        "capture",
        "cpu",
        "devices",
        "direct",
        "hide",
        "home",
        "hostname",
        "keep_base",
        "landlock",
        "memfd_exec",
        "memory",
        "network_host",
        "pids",
        "require_group",
        "rlimits",
        "root",
        "scratch",
        "scratch_image",
        "sockets",
        "stack",
        "tops_on_disk",
        "views",
        "words",
    )

    def __init__(
        self,
        *,
        root: list[list[str]],
        views: list[View],
        home: dict[str, str],
        binds: list[tuple[str, str]],
        scratch: int,
        keep_base: str,
        tops_on_disk: bool,
        scratch_image: bool = False,
        rlimits: dict[str, int],
        memory: int | None,
        pids: int | None,
        cpu: float | None,
        words: list[str],
        landlock: bool = True,
        memfd_exec: bool = False,
        network_host: bool = False,
        require_group: bool = False,
        hostname: str = "sandbox",
        devices: list[str] | None = None,
        hide: list[str] | None = None,
        capture: list[int] | None = None,
        stack: Stack | None = None,
        sockets: list[str] | None = None,
        direct: Direct | None = None,
    ) -> None:
        self.root = root
        self.views = views
        self.home = home
        self.binds = binds
        self.scratch = scratch
        self.keep_base = keep_base
        self.tops_on_disk = tops_on_disk
        self.scratch_image = scratch_image
        self.rlimits = rlimits
        self.memory = memory
        self.pids = pids
        self.cpu = cpu
        self.words = words
        self.landlock = landlock
        self.memfd_exec = memfd_exec
        self.network_host = network_host
        self.require_group = require_group
        self.hostname = hostname
        self.devices = devices or []
        self.hide = hide or []
        self.capture = capture
        self.stack = stack
        self.sockets = sockets or []
        self.direct = direct

    def as_dict(self) -> dict[str, object]:
        """The JSON form, which ``from_dict`` takes back."""
        data: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        data["views"] = [view.as_list() for view in self.views]
        data["stack"] = None if self.stack is None else self.stack.as_list()
        data["direct"] = None if self.direct is None else self.direct.as_dict()
        return data

    @classmethod
    def from_dict(cls, data: object) -> Spec:
        """Check and take a spec that came over a socket. Raises SandboxError (``bad-request``)."""
        fields = _record(data, set(cls.__slots__))
        views: list[View] = []
        for item in _list(fields["views"]):
            source, target, writable, owner, top = _row(item, 5)
            pair = None if owner is None else _pair(owner)
            views.append(View(_text(source), _text(target), _flag(writable), pair, _text(top)))
        rlimits = {_text(key): _number(value) for key, value in _mapping(fields["rlimits"]).items()}
        if not set(rlimits) <= set(_RLIMITS):
            raise _bad("rlimits")
        cpu = fields["cpu"]
        if cpu is not None and not isinstance(cpu, (int, float)):
            raise _bad("cpu")
        return cls(
            root=[[_text(word) for word in _list(entry)] for entry in _list(fields["root"])],
            views=views,
            home={_text(k): _text(v) for k, v in _mapping(fields["home"]).items()},
            binds=[(_text(a), _text(b)) for a, b in (_row(item, 2) for item in _list(fields["binds"]))],
            scratch=_number(fields["scratch"]),
            keep_base=_text(fields["keep_base"]),
            tops_on_disk=_flag(fields["tops_on_disk"]),
            scratch_image=_flag(fields["scratch_image"]),
            rlimits=rlimits,
            memory=_optional(fields["memory"]),
            pids=_optional(fields["pids"]),
            cpu=cpu,
            words=[_text(word) for word in _list(fields["words"])],
            landlock=_flag(fields["landlock"]),
            memfd_exec=_flag(fields["memfd_exec"]),
            network_host=_flag(fields["network_host"]),
            require_group=_flag(fields["require_group"]),
            hostname=_text(fields["hostname"]),
            devices=[_text(word) for word in _list(fields["devices"])],
            hide=[_text(word) for word in _list(fields["hide"])],
            capture=_ports(fields["capture"]),
            sockets=[_text(path) for path in _list(fields["sockets"])],
            stack=_stack(fields["stack"]),
            direct=None if fields["direct"] is None else Direct.from_dict(fields["direct"]),
        )


class Late:
    """The command: what may be said to a sandbox that is sealed already.

    ``pts`` is the path inside of the command's own terminal; the launcher fills it in when ``tty`` is set.
    ``window`` is that terminal's size from the start: rows, columns, both in pixels; or empty. ``files`` are
    put below HOME before it starts: path and content. ``listener`` is a path below HOME where a unix socket
    is to listen that the launcher's caller serves, or ``""``.
    """

    __slots__ = ("argv", "cwd", "env", "files", "listener", "pts", "tty", "umask", "window")

    def __init__(
        self,
        argv: list[str],
        env: dict[str, str],
        cwd: str,
        tty: bool,
        pts: str = "",
        umask: int = 0o022,
        window: tuple[int, ...] = (),
        files: dict[str, str] | None = None,
        listener: str = "",
    ) -> None:
        self.argv = argv
        self.env = env
        self.cwd = cwd
        self.tty = tty
        self.pts = pts
        self.umask = umask & 0o777
        self.window = window
        self.files = files or {}
        self.listener = listener

    def as_dict(self) -> dict[str, object]:
        """The JSON form."""
        data: dict[str, object] = {name: getattr(self, name) for name in self.__slots__}
        data["window"] = list(self.window)
        return data

    @classmethod
    def from_dict(cls, data: object) -> Late:
        """Check and take the JSON form. Raises SandboxError (``bad-request``)."""
        fields = _record(data, set(cls.__slots__))
        argv = [_text(word) for word in _list(fields["argv"])]
        if not argv:
            raise _bad("argv")
        env = {_text(key): _text(value) for key, value in _mapping(fields["env"]).items()}
        cwd, pts = _text(fields["cwd"]), _text(fields["pts"])
        window = tuple(_number(value) for value in _list(fields["window"]))
        if window and (len(window) != 4 or not all(0 <= value < 1 << 16 for value in window)):
            raise _bad("window")
        files = {_text(path): _text(content) for path, content in _mapping(fields["files"]).items()}
        listener = _text(fields["listener"])
        tty, umask = _flag(fields["tty"]), _number(fields["umask"])
        return cls(argv, env, cwd, tty, pts, umask, window, files, listener)

    def as_words(self) -> list[str]:
        """The form in which a launcher hands it to its own child: no decoder to load at every start.

        The terminal's size, the files and the listener are the launcher's business alone, and are left out.
        """
        head = ["tty" if self.tty else "", str(self.umask), self.cwd, self.pts, str(len(self.argv))]
        return [*head, *self.argv, *(word for pair in self.env.items() for word in pair)]

    @classmethod
    def from_words(cls, words: list[str]) -> Late:
        """Take the words back. ``Preconditions:`` they come from ``as_words``."""
        tty, umask, cwd, pts, count = words[:5]
        first = 5 + int(count)
        env = dict(zip(words[first::2], words[first + 1 :: 2], strict=True))
        return cls(words[5:first], env, cwd, tty == "tty", pts, int(umask))


def encode(words: list[str]) -> bytes:
    """Words for a child, as one message. Raises SandboxError (``bad-request``) for what none can take."""
    try:
        return packets.join(words)
    except ValueError as error:
        text = f"an argument, variable or path is no text: {error}"
        raise SandboxError(text, code="bad-request") from error


def _bad(what: str) -> SandboxError:
    return SandboxError(f"malformed request: {what}", code="bad-request", field=what)


def _record(data: object, names: set[str]) -> dict[str, object]:
    fields = _mapping(data)
    if set(fields) != names:
        raise _bad(f"fields {sorted(set(fields) ^ names)}")
    return fields


def _mapping(value: object) -> dict[str, object]:
    if not is_object(value):
        raise _bad("a mapping was expected")
    return value


def _list(value: object) -> list[object]:
    if not is_list(value):
        raise _bad("a list was expected")
    return value


def _row(value: object, length: int) -> list[object]:
    row = _list(value)
    if len(row) != length:
        raise _bad(f"a row of {length} was expected")
    return row


def _pair(value: object) -> tuple[int, int]:
    first, second = _row(value, 2)
    return _number(first), _number(second)


def _text(value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise _bad("text without NUL was expected")
    return value


def _number(value: object) -> int:
    if type(value) is not int:
        raise _bad("a whole number was expected")
    return value


def _stack(value: object) -> Stack | None:
    if value is None:
        return None
    store, live, *kinds = _row(value, 4)
    layers, homes = ([_text(name) for name in _list(kind)] for kind in kinds)
    return Stack(_text(store), _text(live), layers, homes)


def _ports(value: object) -> list[int] | None:
    return None if value is None else [_number(port) for port in _list(value)]


def _optional(value: object) -> int | None:
    return None if value is None else _number(value)


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise _bad("true or false was expected")
    return value
