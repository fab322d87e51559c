"""``casemate run``: one command behind the boundary, its streams relayed, its end reported."""

from __future__ import annotations

import os

import msgspec

from casemate.cli.main import EXIT, error_text, exit_code, tell
from casemate.cli.relay import Relay
from casemate.errors import CasemateError, PolicyError
from casemate.policy.model import FlagLayer
from casemate.sandbox.denials import TAIL
from casemate.sandbox.job import Request, kept_count, prepare

TYPE_CHECKING = False
if TYPE_CHECKING:
    from casemate.sandbox.job import Job
    from casemate.sandbox.result import Result

__all__ = ["HELP", "Conclusion", "Options", "conclude", "interrupted", "main", "parse", "request"]

HELP = """usage: casemate run [OPTION…] [--] CMD [ARG…]

Runs CMD in a copy-on-write view of the workspace; unprotected changes are applied when it ends.

  -C, --workspace DIR     the workspace (default: the present directory)
  --preset NAME           read-only | workspace-write (default) | full-access (no boundary at all)
  --policy FILE           a policy file in the place of your own
  --read PATH             one more readable path          (may be repeated, like the next six)
  --write DIR             one more writable directory (a view too, applied at the end)
  --deny PATH             hide a path
  --protect NAME          one more protected name
  --cache NAME            keep this package manager's cache for the workspace: pip, npm, cargo, …
  --env NAME[=VALUE]      pass a variable, or set it
  --degrade WORD          give up one protection by its word
  --network MODE          none (default) | host (degraded)
  --timeout TIME          30s, 5m, 1h
  --memory SIZE  --disk SIZE  --file-size SIZE  --output SIZE      512M, 2G
  --pids N  --open-files N  --cpu N
  --scope auto|tree       tree: refuse to run where a limit cannot hold for the whole process tree
  --tty auto|yes|no       a pty of its own for the command (auto: if stdin and stdout are terminals)
  --no-wait               refuse instead of waiting when another command holds the workspace
  --no-daemon             do not ask a resident daemon
  --json                  print one JSON object on stdout when the command has ended
                          (the command's stdout then goes to stderr)
  --report FILE           write the same object to FILE
  --quiet                 no summary after the command

Exit code: the command's own, 128+n after signal n; 123 a limit ended it, 124 timeout, 125 the sandbox
failed, 126 refused, 127 no such command, 2 usage.
"""

_VALUES = {
    "--workspace": "workspace_dir", "-C": "workspace_dir", "--preset": "preset", "--policy": "policy",
    "--network": "network", "--timeout": "timeout", "--memory": "memory", "--disk": "disk",
    "--file-size": "file_size", "--output": "output", "--pids": "pids", "--open-files": "open_files",
    "--cpu": "cpu", "--scope": "scope", "--tty": "tty", "--report": "report",
}  # fmt: skip
_LISTS = {
    "--read": "read", "--write": "write", "--deny": "deny", "--protect": "protect",
    "--cache": "cache", "--degrade": "degrade", "--env": "env",
}  # fmt: skip
_SWITCHES = {"--json": "json", "--quiet": "quiet", "-q": "quiet", "--no-wait": "no_wait", "--no-daemon": "no_daemon"}
_SCALARS = (
    "network", "timeout", "memory", "disk", "file_size", "output", "pids", "open_files", "cpu", "scope",
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
        fields.update({name: tuple(values) for name, values in self.lists.items() if name != "env"})
        fields.update(cwd=cwd, pass_=tuple(passed), set=setting)
        return msgspec.convert(fields, FlagLayer)


def parse(argv: list[str]) -> Options:
    """Read the command line. Raises PolicyError (``usage``)."""
    options = Options(values={}, lists={}, switches=set())
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "--":
            index += 1
            break
        if not word.startswith("-") or word == "-":
            break
        name, equals, value = word.partition("=")
        if name in _SWITCHES and not equals:
            options.switches.add(_SWITCHES[name])
        elif name in _VALUES or name in _LISTS:
            if not equals:
                index += 1
                if index >= len(argv):
                    raise _usage(f"{name} needs a value")
                value = argv[index]
            if name in _VALUES:
                options.values[_VALUES[name]] = value
            else:
                options.lists.setdefault(_LISTS[name], []).append(value)
        elif name in ("--help", "-h"):
            options.switches.add("help")
            return options
        else:
            raise _usage(f"unknown option {name}{_near(name)}")
        index += 1
    options.argv = tuple(argv[index:])
    if not options.argv:
        raise PolicyError("no command was given", code="usage", hint="casemate run [OPTION…] -- CMD [ARG…]")
    if options.values.get("tty", "auto") not in ("auto", "yes", "no"):
        raise _usage("--tty takes auto, yes or no")
    return options


def _usage(message: str) -> PolicyError:
    return PolicyError(message, code="usage", hint="casemate run --help")


def _near(name: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, [*_VALUES, *_LISTS, *_SWITCHES], 1)
    return f"; did you mean {close[0]}?" if close else ""


def request(
    options: Options, *, cwd: str, environ: dict[str, str], terminal: bool, umask: int
) -> Request:
    """The request that the options make, for a caller in ``cwd`` whose streams are a terminal or not."""
    here = os.path.realpath(cwd)
    chosen = options.values.get("workspace_dir")
    workspace = os.path.realpath(os.path.join(cwd, chosen)) if chosen is not None else here
    inside = here == workspace or here.startswith(f"{workspace.rstrip('/')}/")
    policy = options.values.get("policy")
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
        umask=umask,
    )


def _hold_standard_descriptors() -> None:
    """A caller may have closed some of 0, 1, 2; the next pipe must not become one of them."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open("/dev/null", os.O_RDWR)


class Conclusion(msgspec.Struct, frozen=True, kw_only=True):
    """What is left to do when all is over: bytes for stdout, text for stderr, the exit code."""

    code: int
    out: bytes = b""
    err: str = ""


def main(argv: list[str]) -> int:
    """Run one command in this process."""
    _hold_standard_descriptors()
    options = parse(argv)
    if "help" in options.switches:
        os.write(1, HELP.encode())
        return 0
    cwd = ""
    try:
        cwd = _cwd()
        end = conclude(options, cwd, _run(options, cwd))
    except CasemateError as error:
        end = conclude(options, cwd or "/", error)
    os.write(2, end.err.encode("utf-8", "replace"))
    if end.out:
        os.write(1, end.out)
    return end.code


def _run(options: Options, cwd: str) -> Result:
    from casemate.isolation.process.launcher import Launcher
    from casemate.sandbox import inline
    from casemate.settings import places

    environ = dict(os.environ)
    terminal = os.isatty(0) and os.isatty(1)
    mask = os.umask(0o022)
    asked = request(options, cwd=cwd, environ=environ, terminal=terminal, umask=mask)
    if asked.preset == "full-access":
        return _run_bare(asked)
    launcher = Launcher(places(environ).run)
    try:
        job = prepare(asked, launcher.hierarchies, rootless=launcher.rootless)
        if "quiet" not in options.switches:
            for note in job.notes:
                tell(note)
        lock = inline.lock_workspace(job, wait="no_wait" not in options.switches, tell=_tell_waiting)
        if lock is not None and "quiet" not in options.switches and (offer := interrupted(job)):
            tell(offer)
        run = inline.InlineRun(launcher, job, lock)
        relay = Relay(
            stdin=run.stdin,
            stdout=run.stdout,
            stderr=run.stderr,
            terminal=run.terminal,
            slave=run.slave,
            ended=run.ended,
            signal=run.signal,
            kill=run.kill,
            tick=run.tick,
            watched=run.watched,
            output_limit=job.policy.resources.output,
            timeout=job.policy.resources.timeout,
            tail=TAIL,
            stdout_to=2 if "json" in options.switches else 1,
        )
        try:
            relay.run()
        except BaseException:
            run.kill()
            raise
        finally:
            relay.close()
            outcome = run.finish(limit=relay.limit, stderr_tail=relay.stderr_tail)
        return outcome
    finally:
        launcher.close()


def _run_bare(asked: Request) -> Result:
    from casemate.sandbox import bare
    from casemate.sys.cgroups import Hierarchies

    job = prepare(asked, Hierarchies(0, {}, {}), rootless=True)
    for note in job.notes:
        tell(note)
    return bare.run(job)


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise PolicyError(
            "the present directory does not exist any more", code="cwd-unusable", hint="cd to one that does"
        ) from error


def _tell_waiting(holder: str) -> None:
    tell(f"waiting for another command in this workspace ({holder})")


def interrupted(job: Job) -> str:
    """The offer of what killed commands left, or ``""``. ``Preconditions:`` the workspace's lock is held."""
    count = kept_count(job)
    if not count:
        return ""
    return (
        f"the changes of {count} interrupted command(s) in this workspace are kept: "
        "`casemate changes` shows them, `casemate apply` or `casemate discard` ends them"
    )


def conclude(options: Options, cwd: str, end: Result | CasemateError) -> Conclusion:
    """Turn a result or an error into what is printed, reported and returned."""
    from casemate.cli import render

    lines: list[str] = []
    if isinstance(end, CasemateError):
        code = exit_code(end)
        data = msgspec.json.encode({"error": end.as_dict(), "exit-code": code}, enc_hook=str)
        text = error_text(end)
    else:
        data = render.as_json(end)
        if "quiet" not in options.switches:
            lines = render.summary(end)
        text = "".join(f"{line}\n" for line in lines)
        code = EXIT["timeout"] if end.limit == "timeout" else EXIT["limit"] if end.limit else end.exit_code
    report = options.values.get("report")
    if report is not None:
        try:
            _write_report(os.path.join(cwd, report), data)
        except OSError as error:
            text += f"casemate: cannot write the report: {error}\n"
            code = code or EXIT["usage"]
    return Conclusion(code=code, out=data + b"\n" if "json" in options.switches else b"", err=text)


def _write_report(path: str, data: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.write(handle, data + b"\n")
    finally:
        os.close(handle)
