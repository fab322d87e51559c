"""The process that ``bench.phases`` measures in: as slim as the keeper, since a fork costs what is mapped.

Started with -I -S; arguments: directories for ``sys.path``, workspace, runtime directory, rounds, "ahead"
or "", command. Each round prints one line of ``name=calls:microseconds`` words. Imports nothing heavier
than the launcher itself does.
"""

from __future__ import annotations

import gc
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_MODULES = ("mounts", "namespaces", "cgroups", "landlock", "process", "bpf")


class Meter:
    """Calls and seconds per name, since the last reset."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def reset(self) -> None:
        self.spent.clear()
        self.calls.clear()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: object, **options: object) -> object:
            begin = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - begin
                self.calls[name] = self.calls.get(name, 0) + 1

        return run

    def wrap(self, owner: object, names: list[str], prefix: str) -> None:
        for name in names:
            function = getattr(owner, name, None)
            if callable(function) and not isinstance(function, type):
                setattr(owner, name, self.timed(f"{prefix}{name}", function))

    def words(self, prefix: str) -> list[str]:
        return [f"{prefix}{name}={self.calls[name]}:{self.spent[name] * 1e6:.1f}" for name in self.spent]


class Steps(list[str]):
    """Stands in for the seal's step marker and notes when each step began."""

    def __init__(self) -> None:
        super().__init__(["start"])
        self.marks: list[tuple[str, float]] = [("start", time.monotonic())]

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, value)
        self.marks.append((value, time.monotonic()))


def instrument(meter: Meter, modules: dict[str, Any]) -> None:
    """Time the functions of ``casemate.sys`` and the launcher's methods; make the child tell its steps."""
    launcher, seal = modules["launcher"], modules["seal"]
    for short in _MODULES:
        module = __import__(f"casemate.sys.{short}", fromlist=["x"])
        meter.wrap(module, list(module.__all__), f"{short}.")
    meter.wrap(launcher.Ruleset, ["__init__", "allow", "enforce"], "landlock.Ruleset.")
    meter.wrap(launcher.cgroups.Group, ["__init__", "entrances", "events", "remove"], "cgroups.Group.")
    methods = ["_make_group", "_make_tree", "_make_namespaces", "_attach_view", "_fill_home"]
    meter.wrap(launcher.Launcher, methods, "launcher.")
    original = seal._seal

    def told(parts: Any, step: list[str], *, slot: bool) -> object:
        meter.reset()
        steps = Steps()
        kept = original(parts, steps, slot=slot)
        steps.marks.append(("sealed", time.monotonic()))
        marks = ",".join(f"{name}@{at!r}" for name, at in steps.marks).replace(" ", "_")
        # The launcher ignores a record of a kind that it does not know.
        os.write(parts.status, f"T\0{marks} {' '.join(meter.words('C '))}\n".replace("C ", "C_").encode())
        return kept

    seal._seal = told


def plan(spec: Any, workspace: str) -> Any:
    """A plan like that of the default policy: system directories, one writable view, default limits."""
    root: list[list[str]] = [["dir", name] for name in ("/tmp", "/var/tmp", "/proc", "/home/sandbox", "/etc")]
    root += [["bind", name, name] for name in ("/usr", "/etc")]
    for name in ("/bin", "/sbin", "/lib", "/lib64", "/lib32"):
        if os.path.islink(name):
            root.append(["link", name, os.readlink(name)])
        elif os.path.isdir(name):
            root.append(["bind", name, name])
    root.append(["dir", workspace])
    owner = os.stat(workspace)
    view = spec.View(workspace, workspace, True, (owner.st_uid, owner.st_gid), "")
    return spec.Spec(
        root=root, views=[view], home={".gitconfig": "[user]\n\tname = x\n"}, binds=[], scratch=4 << 30,
        rlimits={"CORE": 0, "NOFILE": 4096}, memory=8 << 30, pids=4096, cpu=2.0, words=[],
    )  # fmt: skip


def one(launcher: Any, spec: Any, late: Any, *, ahead: bool) -> tuple[list[str], float]:
    """One whole life of a sandbox: the words of its line, and the seconds that it took."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    at = [time.monotonic()]
    site = launcher.prepare(spec, ahead=ahead)
    at.append(time.monotonic())
    running = launcher.start(site, late, (null, null, null))
    at.append(time.monotonic())
    while launcher.read_status(running):
        if b"W\0" in running.record or b"F\0" in running.record:
            break
    at.append(time.monotonic())
    outcome = launcher.reap(running)
    at.append(time.monotonic())
    launcher.discard(site)
    at.append(time.monotonic())
    os.close(null)
    if outcome.status != 0:
        raise SystemExit(f"phases: the command failed: {outcome.failure or outcome.status}")
    names = ("prepare", "start (fork)", "until reported", "reap", "discard")
    words = [f"{n}=1:{(b - a) * 1e6:.1f}" for n, a, b in zip(names, at, at[1:], strict=False)]
    words += [f"all=1:{(at[-1] - at[0]) * 1e6:.1f}", f"all but prepare=1:{(at[-1] - at[1]) * 1e6:.1f}"]
    told = next(line for line in running.record.split(b"\n") if line.startswith(b"T\0"))
    steps, *functions = told[2:].decode().split(" ")
    marks = [(name, float(when)) for name, _, when in (mark.partition("@") for mark in steps.split(","))]
    marks += [("spawn", outcome.times["spawned"]), ("ended", outcome.times["ended"])]
    previous, since = "fork", outcome.times["fork"]
    for mark, when in marks:
        words.append(f"  child: {previous}=1:{(when - since) * 1e6:.1f}")
        previous, since = mark, when
    return words + [function.replace("C_", "C ") for function in functions], at[-1] - at[0]


def main() -> None:
    *paths, workspace, runtime, rounds, ahead, command = sys.argv[1:]
    sys.path[:0] = paths
    room = "casemate.isolation.process"
    modules = {name: __import__(f"{room}.{name}", fromlist=["x"]) for name in ("launcher", "seal", "spec")}
    meter = Meter()
    instrument(meter, modules)
    launcher = modules["launcher"].Launcher(runtime)
    spec = plan(modules["spec"], workspace)
    late = modules["spec"].Late([command], {"PATH": "/usr/bin:/bin"}, workspace, False)
    warm_up = 5  # templates are built, caches fill
    for number in range(int(rounds) + warm_up):
        if number == warm_up:
            # As the keeper does: a collection in the child would copy every page of its heap.
            gc.freeze()
            gc.disable()
        meter.reset()
        words, _ = one(launcher, spec, late, ahead=bool(ahead))
        if number >= warm_up:
            sys.stdout.write("\t".join([*words, *meter.words("L ")]) + "\n")
    launcher.close()


if __name__ == "__main__":
    main()
