"""After the last process is dead: what limit ended it, what of its changes is applied, what was denied."""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress

import msgspec

from casemate.errors import CommandNotFound, SandboxError, WorkspaceError
from casemate.sandbox import denials
from casemate.sandbox.job import direct_lock
from casemate.sandbox.result import Applied, NetworkUse, Result
from casemate.sys.locks import paused
from casemate.workspace.apply import apply
from casemate.workspace.journal import Journal
from casemate.workspace.report import ApplyOptions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from casemate.isolation.process.outcome import Outcome
    from casemate.sandbox.job import Job
    from casemate.workspace.report import ApplyReport
    from casemate.workspace.select import Selection

__all__ = ["HELD_VIEWS", "apply_options", "apply_tops", "check_failure", "forget_note", "merged", "result"]

#: Beside what a run held back: the directories that its numbers stand for.
HELD_VIEWS = "views.json"
_SIGXFSZ, _SIGKILL = 25, 9


def check_failure(job: Job, outcome: Outcome) -> None:
    """Raise what init reported instead of a command's end, if it did."""
    failure = outcome.failure
    if failure is None:
        return
    kind, *fields = failure
    if kind == "F" and outcome.spawned:
        return  # init broke after the command had run: its work is settled as after a kill
    if kind == "X":
        number = _errno(fields[0]) if fields else errno.ENOENT
        name = fields[1] if len(fields) > 1 else job.request.argv[0]
        if number == errno.E2BIG:
            raise SandboxError(
                "arguments and environment are too large for the kernel",
                code="argument-too-long",
                hint="pass it by a file or on stdin",
            )
        missing = number in (errno.ENOENT, errno.ENOTDIR)
        raise CommandNotFound(
            f"{name}: {'no such command in the sandbox' if missing else os.strerror(number)}",
            code="command-not-found" if missing else "command-not-executable",
            hint=_where(job, name) if missing else "check its mode and its interpreter line",
            command=name,
            errno=number,
        )
    if kind == "C":
        raise SandboxError(
            f"the working directory cannot be entered: {os.strerror(_errno(*fields[:1]))}",
            code="cwd-unusable",
            cwd=fields[1] if len(fields) > 1 else "",
        )
    step, number_text, what, text = (*fields, "", "", "", "")[:4]
    raise SandboxError(
        f"the sandbox could not be sealed at step {step}: {text or what}",
        code="seal-failed",
        hint="run `casemate doctor`; nothing of the command has run",
        step=step,
        errno=_errno(number_text),
    )


def _errno(text: str = "") -> int:
    """A number that init reported; it is inside, so it may report anything."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 5 else 0


def _where(job: Job, name: str) -> str:
    """Why a command that the host has is not there: it lies where the sandbox does not look."""
    if "/" in name:
        return "the path is not part of the sandbox's view; `--read` adds a directory"
    for directory in job.request.environ.get("PATH", "").split(":"):
        if directory and os.access(f"{directory}/{name}", os.X_OK):
            return f"the host has {directory}/{name}; `--read {directory}` lets the sandbox see it"
    return ""


def apply_tops(
    job: Job,
    tops: list[int],
    *,
    rootless: bool,
    hold_base: str,
    directory: str = "",
    resumed: bool = False,
    only: Sequence[Selection] | None = None,
    begin: Callable[[], object] | None = None,
) -> tuple[Applied, list[str]]:
    """Apply every view's top to its directory, by the checked step; returns what to tell and what to keep.

    ``directory`` is the run's own, where it is noted what is done if not all is. ``resumed`` says that an
    apply step may have been at work with these tops before. ``only``, one for each view: the rest stays.
    ``begin`` is called before the first change to each.
    """
    total = Applied()
    kept: list[str] = []
    views = [view for view in job.plan.spec.views if view.writable] if job.plan else []
    for number, (view, top) in enumerate(zip(views, tops, strict=True)):
        hold = _HoldDirectory(f"{hold_base}/{number}")
        try:
            options = apply_options(
                job, view.source, hold.descriptor, rootless=rootless, resumed=resumed,
                journal=Journal(f"{directory}/done{number}") if directory else None,
                only=only[number] if only is not None else None,
            )  # fmt: skip
            options = msgspec.structs.replace(options, begin=begin)
            # Commands that change a workspace directly wait meanwhile: what was judged here stays as it was.
            with paused(direct_lock(job.places)):
                report = apply(top, view.source, options)
        except OSError as error:
            raise WorkspaceError(
                f"the changes could not be applied to {view.source}: {error}",
                hint="they are kept; see `casemate changes`",
                path=view.source,
                errno=error.errno,
            ) from error
        finally:
            hold.close()
        if hold.used():
            kept.append(hold.path)
        prefix = "" if number == 0 and view.source == job.workspace else f"{view.source}/"
        total = merged(total, report, prefix)
    if kept:
        with suppress(OSError), open(f"{hold_base}/{HELD_VIEWS}", "wb") as file:
            file.write(msgspec.json.encode([view.source for view in views]))
    return total, kept


class _HoldDirectory:
    """Where held-back changes go; ``descriptor`` is None where there is no room: the top stays then."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor: int | None = None
        try:
            os.makedirs(path, 0o700, exist_ok=True)
            self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return

    def used(self) -> bool:
        return self.descriptor is not None and os.path.isdir(self.path)

    def close(self) -> None:
        if self.descriptor is None:
            return
        os.close(self.descriptor)
        try:
            os.removedirs(self.path)  # empty: nothing was held back
        except OSError:
            return


def apply_options(
    job: Job,
    view: str,
    hold_dir: int | None,
    *,
    rootless: bool,
    resumed: bool,
    journal: Journal | None = None,
    only: Selection | None = None,
) -> ApplyOptions:
    """How the changes of one view are judged and applied, for a command that ran as ``job``."""
    # What is hidden may also not be made: a name that was not there when the view was made has no cover.
    root = f"{view.rstrip('/')}/"
    denied = tuple(
        f"/{path.removeprefix(root)}" for path in job.policy.filesystem.deny if path.startswith(root)
    )
    return ApplyOptions(
        started_ns=job.began_wall_ns,
        firsts=job.firsts.get(view),
        xattrs="user.overlay." if rootless else "trusted.overlay.",
        redirects=not rootless,
        hold_dir=hold_dir,
        readable_roots=job.readable,
        protect=(*job.policy.filesystem.protect, *denied),
        resumed=resumed,
        only=only,
        journal=journal,
        expect=job.inodes.get(view),
    )


def forget_note(directory: str) -> None:
    """Make a run's directory one that nobody offers any more, before it is removed.

    Half of a top says other things than the whole (a directory that replaces another deletes what it does not
    have), so a run that is killed while it removes one must not leave it to be applied.
    """
    with suppress(OSError):
        os.unlink(f"{directory}/note.json")


def merged(total: Applied, report: ApplyReport, prefix: str) -> Applied:
    """One more view's report added, with its paths below ``prefix``."""
    counts = report.counts
    return Applied(
        created=total.created + counts.get("created", 0),
        modified=total.modified + sum(counts.get(k, 0) for k in ("modified", "replaced", "renamed", "mode")),
        deleted=total.deleted + counts.get("deleted", 0),
        changes=(*total.changes, *(f"{what} {prefix}{path}" for what, path in report.changed)),
        held=(*total.held, *((f"{prefix}{h.path}", h.reason) for h in report.held)),
        conflicts=(*total.conflicts, *(f"{prefix}{path}" for path in report.conflicts)),
        failed=(*total.failed, *((f"{prefix}{f.path}", f.error) for f in report.failed)),
        executables=(*total.executables, *(f"{prefix}{path}" for path in report.executables)),
        bytes=total.bytes + report.bytes,
        complete=total.complete and report.complete,
    )


def result(
    job: Job,
    outcome: Outcome,
    applied: Applied,
    *,
    limit: str,
    stderr_tail: bytes,
    disk_full: bool,
    network: NetworkUse | None = None,
    stdout: bytes = b"",
    stderr: bytes = b"",
) -> Result:
    """Put together what the host knows. ``limit`` is one that the caller enforced (time, output, watched)."""
    status = outcome.status
    signal = 0
    if status is None:
        code, signal = 128 + _SIGKILL, _SIGKILL
    elif os.WIFSIGNALED(status):
        signal = os.WTERMSIG(status)
        code = 128 + signal
    else:
        code = os.WEXITSTATUS(status)
    touched = _touched(outcome, signal, code, disk_full=disk_full, size=_size_limit(job))
    ended = limit or (touched[0] if touched and code != 0 else "")
    plan = job.plan
    times = outcome.times
    phases: dict[str, float] = {"total": (time.monotonic() - job.began) * 1e3}
    if "fork" in times:
        phases["plan"] = (times["fork"] - job.began) * 1e3
        if "spawned" in times:
            phases["seal"] = (times["spawned"] - times["fork"]) * 1e3
            if "ended" in times:
                phases["run"] = (times["ended"] - times["spawned"]) * 1e3
                phases["settle"] = (time.monotonic() - times["ended"]) * 1e3
    return Result(
        exit_code=code,
        signal=signal,
        limit=ended,
        limits_touched=touched,
        stdout=stdout,
        stderr=stderr,
        applied=_with_executables(job, outcome, applied),
        denials=denials.find(job, applied, stderr_tail, network, outcome.refused)
        if code != 0 or applied.held or network or outcome.refused
        else (),
        network=network or NetworkUse(),
        boundary="process" if plan else "none",
        degraded=job.degraded,
        scopes=plan.scopes if plan else {},
        notes=(*job.notes, *_network_notes(network)),
        phases={name: round(value, 3) for name, value in phases.items()},
        peak_memory=outcome.events.get("peak", outcome.rusage[2]),
        cpu=round(outcome.rusage[0] + outcome.rusage[1], 6),
    )


def _with_executables(job: Job, outcome: Outcome, applied: Applied) -> Applied:
    """Executable files that came about directly, and links to such: those that are there in the end."""
    found: list[str] = []
    for path in outcome.executables:
        with suppress(OSError, ValueError):
            mode = os.stat(os.path.join(job.workspace, path)).st_mode
            if stat.S_ISREG(mode) and mode & 0o111:
                found.append(path)
    return msgspec.structs.replace(applied, executables=(*applied.executables, *found)) if found else applied


def _network_notes(network: NetworkUse | None) -> list[str]:
    notes: list[str] = []
    if network is not None and network.capture == "listed ports":
        notes.append("network: partial: only ports that rules name reach the gate; see `casemate doctor`")
    if network is not None and network.lost:
        notes.append("network: the egress gate ended before the command did, which then reached nothing more")
    return notes


def _size_limit(job: Job) -> str:
    """What SIGXFSZ stands for: where the disk is only watched, no file may be larger than it either."""
    disk = job.plan.watch.get("disk") if job.plan else None
    most = job.policy.resources.file_size
    return "disk" if disk is not None and (most is None or disk < most) else "file-size"


def _touched(
    outcome: Outcome, signal: int, code: int, *, disk_full: bool, size: str
) -> tuple[str, ...]:
    """Limits that the host saw bite, the likeliest cause of death first."""
    found: list[str] = []
    if outcome.events.get("oom_kill"):
        found.append("memory")
    if signal == _SIGXFSZ or code == 128 + _SIGXFSZ:
        found.append(size)
    if disk_full and "disk" not in found:
        found.append("disk")
    if outcome.events.get("pids_max"):
        found.append("pids")
    return tuple(found)
