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
from casemate.cli.options import split
from casemate.cli.relay import Relay, window_size
from casemate.cli.report import ReportFile
from casemate.cli.streams import hold_standard_descriptors, put

__all__ = ["socket_path", "try_daemon"]


def socket_path(environ: dict[str, str]) -> str:
    """Where a daemon of this user listens; the same as ``settings.run_dir``, without its imports.

    Empty for a caller without a home: there is none.
    """
    if os.getuid() == 0:
        return "/run/casemate/daemon.sock"
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        return f"{os.path.normpath(runtime)}/casemate/daemon.sock"
    state = environ.get("XDG_STATE_HOME", "")
    if not state.startswith("/"):
        home = environ.get("HOME", "")
        if not home.startswith("/"):
            return ""
        state = f"{home}/.local/state"
    return f"{os.path.normpath(state)}/casemate/run/daemon.sock"


def try_daemon(argv: list[str]) -> int | None:
    """Have the daemon run it; None where it cannot: the caller runs it then."""
    hold_standard_descriptors()
    options = split(argv)
    if options.problem or not options.argv or options.switches & {"help", "no_daemon"}:
        return None
    if "session" in options.values:  # its layers are looked up when its lock is held
        return None
    if options.values.get("apply") == "ask":  # by the one who has the terminal
        return None
    environ = dict(os.environ)
    path = socket_path(environ)
    if not path or options.values.get("preset") == "full-access":
        return None
    endpoint = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)
    report: ReportFile | None = None
    try:
        endpoint.connect(path)
        if not _same_user(endpoint):
            return None
        cwd = os.getcwd()
        if "report" in options.values:
            report = ReportFile(os.path.join(cwd, options.values["report"]))
        answer, descriptors = _ask(endpoint, argv, cwd, environ)
    except (OSError, ValueError):
        answer, descriptors = [], []
    if not answer or answer[0] == "not-mine":
        endpoint.close()
        if report is not None:
            report.close()
        return None
    if answer[0] == "started":
        answer = _relay(endpoint, answer, descriptors, json="json" in options.switches)
    return _finish(answer, report)


def _ask(
    endpoint: _socket.socket, argv: list[str], cwd: str, environ: dict[str, str]
) -> tuple[list[str], list[int]]:
    """Ask for a run; returns the first answer that is not about waiting."""
    terminal = " ".join(map(str, (int(os.isatty(0) and os.isatty(1)), *window_size())))
    environment = [f"{name}={value}" for name, value in environ.items()]
    mask = os.umask(0o022)
    os.umask(mask)
    question = ["run", packets.identity(), terminal, str(mask), cwd, str(len(argv)), *argv, *environment]
    packets.send(endpoint, question)
    while True:
        answer, descriptors = packets.receive(endpoint)
        if not answer or answer[0] != "waiting":
            return answer, descriptors
        put(2, answer[1].encode("utf-8", "surrogateescape"))


def _same_user(endpoint: _socket.socket) -> bool:
    """Only a daemon of this very uid is trusted with a command."""
    data = endpoint.getsockopt(_socket.SOL_SOCKET, 17, 12)  # SO_PEERCRED: pid, uid, gid
    return int.from_bytes(data[4:8], sys.byteorder) == os.getuid()


def _relay(endpoint: _socket.socket, answer: list[str], descriptors: list[int], *, json: bool) -> list[str]:
    """Relay the streams to the end; returns the last answer."""
    kind, notes, output_limit, timeout, tail, stdout_to = answer[1:7]
    put(2, notes.encode("utf-8", "surrogateescape"))
    streams = [-1, -1, -1, -1, -1]
    if kind == "terminal":
        streams[3], streams[4] = descriptors
    else:
        streams[:3] = descriptors

    def send(*words: str) -> None:
        try:
            packets.send(endpoint, [*words])
        except OSError:
            return  # the daemon is gone, and the command with it: the loop sees the end

    relay = Relay(
        stdin=streams[0],
        stdout=streams[1],
        stderr=streams[2],
        terminal=streams[3],
        slave=streams[4],
        ended=endpoint.fileno(),
        signal=lambda number: send("signal", str(number)),
        kill=lambda: send("kill"),
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
    answer = _receive(endpoint)
    if answer[:1] == ["ended"]:
        said = relay.stderr_tail.replace(b"\0", b" ").decode("utf-8", "surrogateescape")
        send("relayed", relay.limit, said)
        answer = _receive(endpoint)
    if answer[:1] == ["end"]:
        return answer
    message = "the daemon has ended, and the command with it"
    data = f'{{"error":{{"code":"daemon-lost","message":"{message}"}},"exit-code":125}}\n'
    return ["end", "125", data if json else "", f"casemate: {message} [daemon-lost]\n", data]


def _receive(endpoint: _socket.socket) -> list[str]:
    try:
        return packets.receive(endpoint)[0]
    except OSError:
        return []


def _finish(answer: list[str], report: ReportFile | None) -> int:
    code, out, err, data = int(answer[1]), *(word.encode("utf-8", "surrogateescape") for word in answer[2:5])
    put(2, err)
    put(1, out)
    if report is not None:
        try:
            report.write(data)
        except OSError as error:
            put(2, f"casemate: the report cannot be written: {error.strerror} [report-unwritable]\n".encode())
            code = code or 125
    return code
