"""The client of a resident daemon: no import beyond built-in and frozen modules, so that it starts at once.

One packet asks (the command line, directory, environment), one answers with the sandbox's streams, the
relay runs here, one packet tells how it went, one brings what is to be printed. Where there is no daemon,
or one of another installation, ``try_daemon`` returns None and the caller runs the command itself.
"""

from __future__ import annotations

import _socket
import os
import sys

from casemate.cli import packets
from casemate.cli.relay import Relay

__all__ = ["socket_path", "try_daemon"]


def socket_path(environ: dict[str, str]) -> str:
    """Where a daemon of this user listens; the same as ``settings.run_dir``, without its imports."""
    if os.getuid() == 0:
        return "/run/casemate/daemon.sock"
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        return f"{os.path.normpath(runtime)}/casemate/daemon.sock"
    state = environ.get("XDG_STATE_HOME", "")
    if not state.startswith("/"):
        state = f"{environ.get('HOME', '/')}/.local/state"
    return f"{os.path.normpath(state)}/casemate/run/daemon.sock"


def try_daemon(argv: list[str]) -> int | None:
    """Have the daemon run it; None where it cannot: the caller runs it then."""
    for word in argv:
        if word == "--" or not word.startswith("-"):
            break
        if word in ("--no-daemon", "--help", "-h") or "full-access" in word:
            return None
    if "full-access" in argv:
        return None
    environ = dict(os.environ)
    endpoint = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)
    try:
        endpoint.connect(socket_path(environ))
        if not _same_user(endpoint):
            return None
        cwd = os.getcwd()
        terminal = "1" if os.isatty(0) and os.isatty(1) else "0"
        environment = [f"{name}={value}" for name, value in environ.items()]
        mask = os.umask(0o022)
        os.umask(mask)
        question = ["run", packets.identity(), terminal, str(mask), cwd, str(len(argv)), *argv, *environment]
        packets.send(endpoint, question)
        answer, descriptors = packets.receive(endpoint)
        if not answer or answer[0] == "other-version":
            return None
    except OSError:
        endpoint.close()
        return None
    if answer[0] == "started":
        answer = _relay(endpoint, answer, descriptors)
    return _finish(answer)


def _same_user(endpoint: _socket.socket) -> bool:
    """Only a daemon of this very uid is trusted with a command."""
    data = endpoint.getsockopt(_socket.SOL_SOCKET, 17, 12)  # SO_PEERCRED: pid, uid, gid
    return int.from_bytes(data[4:8], sys.byteorder) == os.getuid()


def _relay(endpoint: _socket.socket, answer: list[str], descriptors: list[int]) -> list[str]:
    kind, notes, output_limit, timeout, tail, stdout_to = answer[1:7]
    os.write(2, notes.encode("utf-8", "surrogateescape"))
    streams = [-1, -1, -1, -1, -1]
    if kind == "terminal":
        streams[3], streams[4] = descriptors
    else:
        streams[:3] = descriptors

    def signal(number: int) -> None:
        packets.send(endpoint, ["signal", str(number)])

    def kill() -> None:
        packets.send(endpoint, ["kill"])

    relay = Relay(
        stdin=streams[0],
        stdout=streams[1],
        stderr=streams[2],
        terminal=streams[3],
        slave=streams[4],
        ended=endpoint.fileno(),
        signal=signal,
        kill=kill,
        tick=lambda: "",
        watched=False,
        output_limit=int(output_limit) if output_limit else None,
        timeout=float(timeout) if timeout else None,
        tail=int(tail),
        stdout_to=int(stdout_to),
    )
    try:
        relay.run()
    finally:
        relay.close()
    packets.receive(endpoint)  # "ended"
    tail = relay.stderr_tail.replace(b"\0", b" ").decode("utf-8", "surrogateescape")
    packets.send(endpoint, ["relayed", relay.limit, tail])
    answer, _ = packets.receive(endpoint)
    return answer or ["end", "125", "", "casemate: the daemon has ended [daemon-lost]\n"]


def _finish(answer: list[str]) -> int:
    code, out, err = answer[1:4]
    os.write(2, err.encode("utf-8", "surrogateescape"))
    if out:
        os.write(1, out.encode("utf-8", "surrogateescape"))
    return int(code)
