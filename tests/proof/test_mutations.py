"""The proof can fail: whatever single thing is changed in the filter, it notices.

Two kinds of change: one instruction of the assembled program, and one rule of the table before assembly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

from casemate.isolation.process import filter as subject
from casemate.sys import syscalls
from casemate.sys.bpf import ALLOW, Errno, assemble
from tests.proof import expected
from tests.proof.cbpf import BadProgram, Insn, Verdict, check, decode, run, seccomp_data, verdict
from tests.proof.numbers import ARCHES, TABLES
from tests.proof.points import (
    FOREIGN,
    Point,
    Setting,
    around,
    group_want,
    ident,
    judge,
    points,
    satisfied,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

STRICT = [Setting(arch, strict_memfd=True) for arch in ARCHES]
EPERM_VALUE = 0x0005_0001
JGE, JSET = 0x35, 0x45
BITS = (0, 1, 3, 4, 8, 12, 15, 16, 19, 28, 31)


class Probe(NamedTuple):
    """One call, what the expectation wants, and what the table says."""

    data: bytes
    want: str | int
    table: Verdict


def probes(setting: Setting) -> list[Probe]:
    """All points of the proof, the numbers beyond the tables and the foreign instruction sets."""
    table = setting.table()
    names = {number: name for name, number in syscalls.TABLES[setting.arch].items()}
    arch = ARCHES[setting.arch]
    every = list(points(setting))
    every += [
        Point(1 << bit | low, (), expected.ENOSYS, "") for bit in range(11, 32) for low in (0, 1, 59, 400)
    ]
    for name, number in syscalls.TABLES[setting.arch].items():
        every += [Point(number, args, "open", name) for args in around(table[name])]
    found = []
    for point in every:
        rule = table[names[point.nr]] if point.nr in names else subject.DEFAULT
        found.append(Probe(seccomp_data(point.nr, arch, point.args), point.want, judge(rule, point.args)))
    killed = Verdict("kill-process", 0)
    for value in {*FOREIGN.values(), *(arch ^ 1 << bit for bit in range(32))} - {arch}:
        found += [Probe(seccomp_data(number, value), "kill", killed) for number in (0, 1, 59, 4000)]
    return found


def mutants(insn: Insn) -> Iterator[Insn]:
    """Every small change of one instruction that changes what it does."""
    code, jt, jf, k = insn
    if code == 0x06:
        yield Insn(code, jt, jf, EPERM_VALUE if k == ALLOW.value else ALLOW.value)
        yield Insn(code, jt, jf, k ^ 1)
    elif code & 7 == 5 and code != 0x05:
        yield Insn(code, jf, jt, k)
        yield Insn(code, jt, jt, k)
        yield Insn(code, jf, jf, k)
        yield from (Insn(code, jt, jf, k ^ 1 << bit) for bit in BITS)
        yield Insn(code, jt, jf, k + 1 & 0xFFFF_FFFF)
    elif code == 0x05:
        yield from (Insn(code, jt, jf, k + delta) for delta in (-1, 1) if k + delta >= 0)
    elif code == 0x20:
        yield from (Insn(code, jt, jf, k ^ bit) for bit in (4, 8, 16))
    else:
        yield from (Insn(code, jt, jf, k ^ 1 << bit) for bit in BITS)


def loadable(program: list[Insn]) -> bool:
    """Whether the kernel would take it; if not, the change cannot go unnoticed."""
    try:
        check(program)
    except BadProgram:
        return False
    return True


@pytest.mark.parametrize("setting", STRICT, ids=ident)
def test_a_changed_instruction_is_noticed(setting: Setting) -> None:
    """Any change of one instruction makes some call of the proof come out differently."""
    program = setting.program()
    passing: dict[int, list[Probe]] = {}
    for probe in probes(setting):
        path: list[int] = []
        run(program, probe.data, path)
        for pc in path:
            passing.setdefault(pc, []).append(probe)
    assert sorted(passing) == list(range(len(program))), "some instruction is never reached"

    noticed = {"expectation": 0, "table": 0, "": 0}
    unnoticed = []
    for pc, insn in enumerate(program):
        for other in mutants(insn):
            changed = [*program[:pc], other, *program[pc + 1 :]]
            if loadable(changed):
                by = noticed_by(changed, passing[pc])
                noticed[by] += 1
                if not by:
                    unnoticed.append((pc, insn, other))
    # Two changes change nothing: where a search parts two numbers with the same end (every number was
    # tried), and a bit more in a mask that an earlier test has already found to be 0.
    assert [change for change in unnoticed if change[1].code not in (JGE, JSET)] == []
    assert len(unnoticed) < 0.01 * sum(noticed.values())
    assert noticed["expectation"] > noticed["table"]


def noticed_by(program: list[Insn], asked: list[Probe]) -> str:
    """Which of the two comparisons a changed program fails; nothing if it fails none."""
    for probe in asked:
        if probe.want != "open" and not meets(program, probe):
            return "expectation"
    changed = any(verdict(run(program, probe.data)) != probe.table for probe in asked)
    return "table" if changed else ""


def meets(program: list[Insn], probe: Probe) -> bool:
    """Whether the program does what the expectation asks for this call."""
    got = verdict(run(program, probe.data))
    return got.action == "kill-process" if probe.want == "kill" else satisfied(probe.want, got)


@pytest.mark.parametrize("setting", [Setting(arch) for arch in ARCHES], ids=ident)
def test_a_changed_rule_is_noticed(setting: Setting) -> None:
    """A call that is allowed instead of refused, or the other way round, contradicts the expectation."""
    table = setting.table()
    numbers = syscalls.TABLES[setting.arch]
    unnoticed = []
    for name, number in TABLES[setting.arch].items():
        want = group_want(name, frozenset())
        if want == "open":
            continue
        turned = Errno(1) if want == "allow" else ALLOW
        rules = {n: (turned if other == name else table[other]) for other, n in numbers.items()}
        program = decode(assemble(ARCHES[setting.arch], rules, subject.DEFAULT))
        if satisfied(want, verdict(run(program, seccomp_data(number, ARCHES[setting.arch])))):
            unnoticed.append(name)
    assert unnoticed == []


@pytest.mark.parametrize("setting", STRICT, ids=ident)
def test_a_dropped_argument_rule_is_noticed(setting: Setting) -> None:
    """Each call that is judged by its arguments has rows that fail if it were simply allowed or refused."""
    blind = []
    for name in expected.BY_ARGUMENT & set(TABLES[setting.arch]):
        rows = [point for point in points(setting) if point.why == name]
        if all(satisfied(point.want, Verdict("allow", 0)) for point in rows):
            blind.append(f"{name} allowed")
        if name != "clone3" and all(satisfied(point.want, Verdict("errno", 1)) for point in rows):
            blind.append(f"{name} refused")
    # Which options of these two are too much, careful people decide differently.
    assert set(blind) <= {"setsockopt allowed", "prctl allowed"}
