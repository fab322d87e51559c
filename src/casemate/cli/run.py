"""``casemate run``: one command behind the boundary, its streams relayed, its end reported."""

from __future__ import annotations

import _signal
import gc
import os
from time import monotonic

import msgspec

from casemate.cli.main import EXIT, error_text, exit_code, line, tell
from casemate.cli.options import split
from casemate.cli.relay import Relay, window_size
from casemate.cli.report import ReportFile
from casemate.cli.streams import hold_standard_descriptors, put
from casemate.cli.usage import HELP
from casemate.errors import CasemateError, PolicyError
from casemate.policy.model import FlagLayer, RawCredential
from casemate.sandbox.job import Request, kept_count, pending_count, prepare, sweep_live
from casemate.sandbox.network import wants_gate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.cli.gate import RunGate
    from casemate.sandbox.inline import InlineRun
    from casemate.sandbox.job import Job
    from casemate.sandbox.live import LiveSocket
    from casemate.sandbox.locks import WorkspaceLock
    from casemate.sandbox.result import Result

__all__ = [
    "HELP",
    "Conclusion",
    "Options",
    "check_apply",
    "conclude",
    "execute",
    "finish",
    "interrupted",
    "main",
    "open_report",
    "parse",
    "request",
    "waiting_note",
]

_SCALARS = (
    "network", "parent_proxy", "timeout", "memory", "disk", "file_size", "output", "pids", "open_files",
    "cpu", "scope",
)  # fmt: skip


class Options(msgspec.Struct, kw_only=True):
    """What was asked for on the command line."""

    argv: tuple[str, ...] = ()
    values: dict[str, str] = {}
    lists: dict[str, list[str]] = {}
    switches: set[str] = set()

    def flags(self, cwd: str) -> FlagLayer:
        """The policy's flag layer."""
        fields: dict[str, object] = {name: self.values[name] for name in _SCALARS if name in self.values}
        setting: dict[str, str] = {}
        passed: list[str] = []
        for item in self.lists.get("env", []):
            name, equals, value = item.partition("=")
            if equals:
                setting[name] = value
            else:
                passed.append(name)
        plain = self.lists.keys() - {"env", "credential"}
        fields.update({name: tuple(self.lists[name]) for name in plain})
        fields.update(cwd=cwd, pass_=tuple(passed), set=setting)
        if "ask" in self.switches:
            fields["ask"] = True
        if "direct" in self.switches:
            fields["workspace"] = "direct"
        if given := self.lists.get("credential"):
            fields["credentials"] = dict(map(_credential, given))
        return msgspec.convert(fields, FlagLayer)


def parse(argv: list[str]) -> Options:
    """Read the command line. Raises PolicyError (``usage``)."""
    found = split(argv)
    options = Options(
        argv=tuple(found.argv), values=found.values, lists=found.lists, switches=found.switches
    )
    if "help" in options.switches:
        return options
    if found.problem:
        raise _usage(found.problem)
    if not options.argv:
        raise PolicyError("no command was given", code="usage", hint="casemate run [OPTION…] -- CMD [ARG…]")
    if options.values.get("tty", "auto") not in ("auto", "yes", "no"):
        raise _usage("--tty takes auto, yes or no")
    if options.values.get("apply", "all") not in ("ask", "all", "none"):
        raise _usage("--apply takes ask, all or none")
    return options


def _credential(text: str) -> tuple[str, RawCredential]:
    """``NAME[:AS][+add]=HOST[,HOST…]``, and what it says. Raises PolicyError (``usage``)."""
    left, equals, hosts = text.partition("=")
    name, colon, form = left.removesuffix("+add").partition(":")
    if not equals or not name or (colon and not form):
        raise _usage(f"--credential takes NAME[:AS][+add]=HOST[,HOST…], not {text!a}")
    return name, RawCredential(
        hosts=tuple(filter(None, hosts.split(","))), as_=form or "bearer", add=left.endswith("+add")
    )


def _usage(message: str) -> PolicyError:
    return PolicyError(message, code="usage", hint="casemate run --help")


def request(
    options: Options,
    *,
    cwd: str,
    environ: dict[str, str],
    terminal: bool,
    window: tuple[int, ...],
    umask: int,
) -> Request:
    """The request that the options make, for a caller in ``cwd`` whose streams are a terminal or not.

    ``window`` is the size of its terminal, as ``relay.window_size`` gives it.
    """
    here = os.path.realpath(cwd)
    chosen = options.values.get("workspace_dir")
    workspace = os.path.realpath(os.path.join(cwd, chosen)) if chosen is not None else here
    inside = here == workspace or here.startswith(f"{workspace.rstrip('/')}/")
    policy = options.values.get("policy")
    session = options.values.get("session")
    if session is not None:
        _check_session(session, options)
    tty = options.values.get("tty", "auto")
    return Request(
        argv=options.argv,
        workspace=workspace,
        cwd=here if inside else workspace,
        environ=environ,
        preset=options.values.get("preset"),
        policy_file=os.path.join(cwd, policy) if policy is not None else None,
        flags=options.flags(cwd),
        tty=(terminal and tty == "auto" and "json" not in options.switches) or tty == "yes",
        window=window,
        umask=umask,
        session=session or "",
    )


def _check_session(name: str, options: Options) -> None:
    """Refuse a session that cannot be. Raises PolicyError."""
    from casemate.workspace.records import check_name

    check_name(name)
    if options.values.get("preset") == "full-access":
        raise PolicyError(
            "without a boundary there is no view that a session could keep",
            code="full-access-session",
            hint="leave one of both out",
        )


def check_apply(options: Options, job: Job) -> None:
    """Refuse to let changes wait that are made at once, or kept elsewhere. Raises PolicyError."""
    direct = job.plan is None or job.policy.filesystem.workspace == "direct"
    if options.values.get("apply", "all") == "all" or not (direct or job.request.session):
        return
    raise PolicyError(
        "what is changed here is changed at once" if direct else "what a session changes waits in it anyway",
        code="no-view",
        hint="leave out --apply" if direct else "see `casemate apply --session NAME`, and leave out --apply",
    )


class Conclusion(msgspec.Struct, frozen=True, kw_only=True):
    """What is left to do when all is over: bytes for stdout, text for stderr, the report, the exit code."""

    code: int
    out: bytes = b""
    err: str = ""
    report: bytes = b""


def main(argv: list[str]) -> int:
    """Run one command in this process."""
    hold_standard_descriptors()
    options = parse(argv)
    if "help" in options.switches:
        put(1, HELP.encode())
        return 0
    cwd = ""
    report: ReportFile | None = None
    try:
        cwd = _cwd()
        report = open_report(options, cwd)
        end = conclude(options, execute(options, cwd))
    except CasemateError as error:
        end = conclude(options, error)
    except OSError as error:
        from casemate.sandbox.failures import from_os_error

        end = conclude(options, from_os_error(error))
    except _Told as told:
        return 128 + told.number
    return finish(end, report)


def open_report(options: Options, cwd: str) -> ReportFile | None:
    """The place of the report, settled before anything runs. Raises PolicyError (``report-unwritable``)."""
    path = options.values.get("report")
    if path is None:
        return None
    try:
        return ReportFile(os.path.join(cwd, path))
    except (OSError, ValueError) as error:
        raise PolicyError(
            f"the report cannot be written to {path}: {getattr(error, 'strerror', None) or error}",
            code="report-unwritable",
            hint="name a file in a directory that exists and that you may write to",
            path=path,
        ) from None


def finish(end: Conclusion, report: ReportFile | None) -> int:
    """Print and report; returns the exit code. A reader of ours that has gone changes nothing of it."""
    code = end.code
    put(2, end.err.encode("utf-8", "replace"))
    put(1, end.out)
    if report is not None:
        try:
            report.write(end.report)
        except OSError as error:
            tell(f"the report cannot be written: {error.strerror} [report-unwritable]")
            code = code or EXIT["failed"]
    return code


def execute(options: Options, cwd: str) -> Result:
    """Run the command of ``options`` as its caller, who is in ``cwd``. Raises what kept it from running."""
    environ = dict(os.environ)
    terminal = os.isatty(0) and os.isatty(1)
    umask = os.umask(0o022)
    asked = request(
        options, cwd=cwd, environ=environ, terminal=terminal, window=window_size(), umask=umask
    )
    if asked.preset == "full-access":
        return _run_bare(options, asked)
    # What comes while the sandbox is being made is the command's: the relay lets it through.
    mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, _ENDING)
    try:
        result, job = _run_behind_boundary(options, asked)
    finally:
        for number in _ENDING:  # one that came after the command's end has nobody to tell
            if _signal.getsignal(number) != _signal.SIG_IGN:
                _signal.signal(number, _signal.SIG_IGN)
                _signal.signal(number, _signal.SIG_DFL)
        _signal.pthread_sigmask(_signal.SIG_SETMASK, mask)
    if result.applied.pending and options.values["apply"] == "ask":
        from casemate.cli.approve import ask

        result = ask(result, job, quiet="quiet" in options.switches)
    return result


def _run_behind_boundary(options: Options, asked: Request) -> tuple[Result, Job]:
    from casemate.isolation.process.launcher import Launcher
    from casemate.sandbox import inline
    from casemate.settings import places
    from casemate.sys import cgroups
    from casemate.sys.process import is_root

    # Before the launcher, which may enter a user namespace: from inside one root's files look like nobody's,
    # and who owns a policy or a tool counts.
    hierarchies = cgroups.detect()
    job = prepare(asked, hierarchies, rootless=not is_root())
    check_apply(options, job)
    gate = None
    if wants_gate(job.policy.network):
        from casemate.cli.gate import RunGate
        from casemate.sys.process import use_all_descriptors

        use_all_descriptors()  # the gate's sockets come from inside by messages
        gate = RunGate(options)
    launcher = Launcher(places(asked.environ).run, hierarchies=hierarchies)
    try:
        if "quiet" not in options.switches:
            for note in job.notes:
                tell(note)
        lock = _lock(job, options)
        try:
            if lock is not None and "quiet" not in options.switches and (offer := interrupted(job)):
                tell(offer)
            apply = options.values.get("apply", "all") == "all"
            run = inline.InlineRun(launcher, job, lock, gate, apply=apply)
        except BaseException:
            if lock is not None:
                lock.close()
            raise
        beside = _Beside(run, job, gate)
        relay = _relay(run, job, options, beside)
        gc.enable()
        try:
            for name in _FOR_THE_END:
                __import__(name)
            relay.run()
        except BaseException:
            run.kill()
            raise
        finally:
            beside.close()
            relay.close()
            outcome = run.finish(limit=relay.limit, stderr_tail=relay.stderr_tail)
        return outcome, job
    finally:
        launcher.close()
        if gate is not None:
            gate.close()


class _Beside:
    """What is done beside the streams while a command runs."""

    def __init__(self, run: InlineRun, job: Job, gate: RunGate | None) -> None:
        self.gate = gate
        self._run, self._job = run, job
        self._live: LiveSocket | None = None
        self._began = monotonic()
        self.relay: Relay | None = None

    def tick(self) -> str:
        """What is due between events; returns a watched limit that is exceeded, or ``""``."""
        if self._live is None and self.relay is not None and monotonic() - self._began > 0.15:
            from casemate.sandbox.live import LiveSocket

            try:
                job, name = self._job, str(os.getpid())
                sweep_live(f"{job.places.run}/live")
                live = LiveSocket(job.places.run, job.key, name, self._run.socket_inside)
            except OSError:  # no room for it: the command runs without
                self.relay = None
            else:
                self._live = live
                self.relay.serve(live.fileno(), live.poll)
        if self.gate is not None:
            self.gate.tick()
        return self._run.tick()

    def close(self) -> None:
        """The command has ended."""
        if self._live is not None:
            self._live.close()


def _relay(run: InlineRun, job: Job, options: Options, beside: _Beside) -> Relay:
    from casemate.sandbox.denials import TAIL

    gate = beside.gate
    relay = Relay(
        stdin=run.stdin,
        stdout=run.stdout,
        stderr=run.stderr,
        terminal=run.terminal,
        slave=run.slave,
        ended=run.ended,
        signal=run.signal,
        kill=run.kill,
        tick=lambda: beside.tick(),
        watched=run.watched or (gate is not None and gate.patient),
        output_limit=job.policy.resources.output,
        timeout=job.policy.resources.timeout,
        tail=TAIL,
        stdout_to=2 if "json" in options.switches else 1,
    )
    beside.relay = relay
    if gate is not None:
        gate.join(relay, run)
    return relay


class _Told(BaseException):
    """A signal that came while waiting for the workspace."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


# Loaded while the command starts, since its end needs them first: 3 ms for which nobody waits.
_FOR_THE_END = ("casemate.sandbox.settle", "casemate.sandbox.quota", "casemate.cli.render")
_ENDING = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT)


def _lock(job: Job, options: Options) -> WorkspaceLock | None:
    """Take the workspace's lock. Signals are blocked until the relay runs, but for the time spent waiting."""
    from casemate.sandbox import inline

    def stop(number: int, _: object) -> None:
        raise _Told(number)

    def waiting(holder: str) -> None:
        put(2, waiting_note(job, holder).encode("utf-8", "replace"))
        for number in _ENDING:
            if _signal.getsignal(number) != _signal.SIG_IGN:
                _signal.signal(number, stop)
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, _ENDING)

    try:
        return inline.lock_workspace(job, wait="no_wait" not in options.switches, tell=waiting)
    finally:
        _signal.pthread_sigmask(_signal.SIG_BLOCK, _ENDING)


_LIMITS = {*_SCALARS} - {"network", "parent_proxy"}


def _run_bare(options: Options, asked: Request) -> Result:
    from casemate.sandbox import bare
    from casemate.sys.cgroups import Hierarchies

    asked_for = sorted(_LIMITS & options.values.keys())
    if asked_for:
        raise PolicyError(
            f"without a boundary nothing can hold a limit: {', '.join(asked_for)}",
            code="full-access-limits",
            hint="leave the limits out, or use another preset",
        )
    job = prepare(asked, Hierarchies(0, {}, {}), rootless=True)
    check_apply(options, job)
    for note in job.notes:
        tell(note)
    return bare.run(job, stdout_to=2 if "json" in options.switches else 1)


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise PolicyError(
            "the present directory does not exist any more", code="cwd-unusable", hint="cd to one that does"
        ) from error


def waiting_note(job: Job, holder: str) -> str:
    """What is said before waiting for another command's end, and what would not have to wait."""
    files = job.policy.filesystem
    if job.request.session:
        instead = "a command of another session, or of none, need not wait"
    elif files.workspace == "write" and not files.write:
        instead = "with --direct, or in another workspace, it need not wait"
    else:
        instead = "in another workspace it need not wait"
    return line(f"waiting for another command in this workspace ({holder}); {instead}")


def interrupted(job: Job) -> str:
    """The offer of what killed commands left, or ``""``. ``Preconditions:`` the job's lock is held."""
    if job.request.session:  # it is not the workspace's: somebody else's command may be under way
        return ""
    count = kept_count(job)
    waiting = pending_count(job) if count else 0
    parts = [f"{number} {what}" for number, what in (
        (count - waiting, "interrupted command(s)"), (waiting, "command(s) that wait for a review"),
    ) if number]  # fmt: skip
    if not parts:
        return ""
    return (
        f"the changes of {' and '.join(parts)} in this workspace are kept: "
        "`casemate changes` shows them, `casemate apply` or `casemate discard` ends them"
    )


def conclude(options: Options, end: Result | CasemateError) -> Conclusion:
    """Turn a result or an error into what is printed, reported and returned."""
    from casemate.cli import render

    wanted = "json" in options.switches or "report" in options.values
    if isinstance(end, CasemateError):
        code = exit_code(end)
        data = render.error_as_json(end, code) if wanted else b""
        text = error_text(end)
    else:
        data = render.as_json(end) if wanted else b""
        lines = render.summary(end) if "quiet" not in options.switches else []
        text = "".join(f"{line}\n" for line in lines)
        code = EXIT["timeout"] if end.limit == "timeout" else EXIT["limit"] if end.limit else end.exit_code
    return Conclusion(
        code=code,
        out=data + b"\n" if "json" in options.switches else b"",
        err=text,
        report=data + b"\n" if "report" in options.values else b"",
    )
