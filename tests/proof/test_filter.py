"""The system-call filter is proven, not trusted.

The assembled program is evaluated by the interpreter of cbpf.py for every call number of both tables, the
x32 range, foreign instruction sets and every argument combination that matters, and compared twice: with
the expectation of expected.py, which was written without the filter, and with the filter's own table.
Nothing is sampled where it can be counted out.
"""

from __future__ import annotations

import platform
import random

import pytest

from casemate.isolation.process import filter as subject
from casemate.sys import syscalls
from casemate.sys.bpf import ALLOW, When
from tests.proof import expected
from tests.proof.cbpf import Insn, run, seccomp_data, verdict
from tests.proof.expected import ENOSYS
from tests.proof.kernel import ask
from tests.proof.numbers import ARCHES, TABLES
from tests.proof.points import (
    FOREIGN,
    SETTINGS,
    Point,
    Setting,
    around,
    comparisons,
    ident,
    judge,
    points,
    verdict_of,
    violations,
)

each_setting = pytest.mark.parametrize("setting", SETTINGS, ids=ident)
each_arch = pytest.mark.parametrize("setting", [Setting(arch) for arch in ARCHES], ids=ident)


def test_every_call_is_expected_once() -> None:
    """The expectation names each call of both tables in exactly one group."""
    groups = (
        expected.ALLOWED,
        expected.DENIED,
        expected.NESTED_ONLY,
        expected.PTRACE_ONLY,
        expected.BY_ARGUMENT,
        expected.OPEN,
    )
    everything = set().union(*TABLES.values())
    assert sorted(name for group in groups for name in group) == sorted(everything)


@pytest.mark.parametrize("arch", ARCHES)
def test_numbers_agree(arch: str) -> None:
    """The project's numbers, the audit value too, are those of the kernel's headers."""
    ours, theirs = TABLES[arch], syscalls.TABLES[arch]
    assert {name: theirs.get(name) for name in ours} == ours
    assert all(number > max(ours.values()) for name, number in theirs.items() if name not in ours)
    assert syscalls.AUDIT_ARCH[arch] == ARCHES[arch]


@each_setting
def test_expectation_holds(setting: Setting) -> None:
    """Each number of the table with all its telling arguments gets the verdict it must get."""
    wrong = [
        (p.why, [hex(a) for a in p.args], p.want, got) for p, got in violations(setting.program(), setting)
    ]
    assert wrong == []


@each_setting
def test_program_is_the_table(setting: Setting) -> None:
    """For every point of the proof the program's verdict is the one that the published table gives."""
    program, table = setting.program(), setting.table()
    names = {number: name for name, number in syscalls.TABLES[setting.arch].items()}
    wrong = []
    for point in points(setting):
        rule = table[names[point.nr]] if point.nr in names else subject.DEFAULT
        if (got := verdict_of(program, setting.arch, point)) != judge(rule, point.args):
            wrong.append((point, got))
    assert wrong == []


@each_setting
def test_program_is_the_table_around_each_value(setting: Setting) -> None:
    """So it is for every value that a rule compares with, and one bit away from it."""
    program, table = setting.program(), setting.table()
    for name, number in syscalls.TABLES[setting.arch].items():
        for args in around(table[name]):
            got = verdict_of(program, setting.arch, Point(number, args, "open", name))
            assert got == judge(table[name], args), (name, args)


@each_arch
def test_program_is_the_table_for_any_arguments(setting: Setting) -> None:
    """Random arguments near the values that rules compare with meet the published table, too."""
    program, table = setting.program(), setting.table()
    rng = random.Random(setting.arch)
    for name, number in syscalls.TABLES[setting.arch].items():
        interesting = sorted(
            {v for test in comparisons(table[name]) for v in test.values} | {0, 1, 0xFFFF_FFFF}
        )
        for _ in range(400 if isinstance(table[name], When) else 8):
            args = tuple(
                rng.choice(interesting) ^ (rng.choice((0, 0, 1 << rng.randrange(64)))) for _ in range(6)
            )
            got = verdict_of(program, setting.arch, Point(number, args, "open", name))
            assert got == judge(table[name], args), (name, args)


@each_setting
def test_numbers_beyond_the_table(setting: Setting) -> None:
    """No number above the tables, the whole x32 range included, is ever allowed: ENOSYS for all of it."""
    program = setting.program()
    rng = random.Random(7)
    numbers = {0x4000_0000 + number for number in range(1100)}
    for edge in (1 << bit for bit in range(11, 33)):
        numbers |= {(edge + delta) & 0xFFFF_FFFF for delta in (-2, -1, 0, 1, 2)}
    # A known number with a bit above it: a comparison of fewer bits would take one for the other.
    numbers |= {number | 1 << bit for number in TABLES[setting.arch].values() for bit in range(11, 32)}
    numbers |= {rng.randrange(1025, 1 << 32) for _ in range(3000)}
    for number in numbers - set(range(1025)):
        got = verdict_of(program, setting.arch, Point(number, (), ENOSYS, "beyond"))
        assert got == ("errno", ENOSYS), hex(number)


@each_setting
def test_foreign_instruction_sets(setting: Setting) -> None:
    """A call by another instruction set (int 0x80, say) ends the process, whatever its number."""
    program = setting.program()
    for value in {*FOREIGN.values(), *(ARCHES[setting.arch] ^ 1 << bit for bit in range(32))}:
        if value == ARCHES[setting.arch]:
            continue
        for number in (*range(0, 500, 7), 0x4000_0000, 0xFFFF_FFFF):
            assert verdict(run(program, seccomp_data(number, value))).action == "kill-process"


@each_setting
def test_calls_that_every_program_makes_read_no_argument(setting: Setting) -> None:
    """Whether an argument-free verdict depends on anything but number and instruction set: it does not.

    The kernel keeps the answer of such calls in a bitmap and runs no filter for them at all.
    """
    program = setting.program()
    for name in ("read", "write", "close", "fstat", "futex", "mmap", "exit_group"):
        data = seccomp_data(TABLES[setting.arch][name], ARCHES[setting.arch])
        assert run(program, data) == ALLOW.value
        assert max(touched(program, data)) < 8, name


def touched(program: list[Insn], data: bytes) -> set[int]:
    """The offsets of seccomp_data that the program loads on its way for this call."""
    path: list[int] = []
    run(program, data, path)
    return {program[pc].k for pc in path if program[pc].code == 0x20}


def test_the_kernel_takes_it() -> None:
    """This machine's kernel accepts the program as it is."""
    program = subject.build(platform.machine())
    assert ask(["load", [program.hex()]]) == [[0]]
