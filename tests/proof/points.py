"""The questions of the proof: every call with the arguments that tell, and what must become of it."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from casemate.isolation.process import filter as subject
from casemate.sys import syscalls
from casemate.sys.bpf import Action, Arg, Errno, Rule, When
from tests.proof import expected
from tests.proof.cbpf import Insn, Verdict, decode, run, seccomp_data, verdict
from tests.proof.expected import CASES, ENOSYS, Case
from tests.proof.numbers import ARCHES, TABLES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Setting(NamedTuple):
    """One filter: an instruction set, degrade words, and who guards memfds."""

    arch: str
    words: frozenset[str] = frozenset()
    strict_memfd: bool = False

    def program(self) -> list[Insn]:
        return decode(subject.build(self.arch, words=self.words, strict_memfd=self.strict_memfd))

    def table(self) -> Mapping[str, Rule]:
        return subject.policy(self.words, strict_memfd=self.strict_memfd)


SETTINGS = [
    Setting(arch, frozenset(words), strict)
    for arch in ARCHES
    for strict in (False, True)
    for words in ((), ("ptrace",), ("nested-userns",), ("memfd-exec",), tuple(sorted(subject.WORDS)))
]


def ident(setting: Setting) -> str:
    return "-".join([setting.arch, *sorted(setting.words), *(["strict"] if setting.strict_memfd else [])])


ONES = (1 << 64) - 1
# Arguments of which each is refused by some call: a number that is taken for another call shows.
VECTORS = (
    (),
    (ONES,) * 6,
    (1,) * 6,
    (0x5412, 0x5412, 0x1_0000_0000, 0x4000_0000, 0x7E02_0080, 0x10),
    (3, 6, 31),
    (1, 8),
)


class Point(NamedTuple):
    """One call as the kernel hands it to the filter, and what must become of it."""

    nr: int
    args: tuple[int, ...]
    want: str | int
    why: str


def satisfied(want: str | int, got: Verdict) -> bool:
    """Whether the verdict is the wanted one. A refusal is an error number above 0, never a kill."""
    if want == "open":
        return got.action in ("allow", "errno")
    if want == "allow":
        return got == ("allow", 0)
    if want == "deny":
        return got.action == "errno" and got.data > 0
    return got == ("errno", want)


def group_want(name: str, words: frozenset[str]) -> str:
    """What must become of a call whatever its arguments."""
    if name in expected.ALLOWED:
        return "allow"
    if name in expected.DENIED:
        return "deny"
    if name in expected.NESTED_ONLY:
        return "allow" if "nested-userns" in words else "deny"
    if name in expected.PTRACE_ONLY:
        return "allow" if "ptrace" in words else "deny"
    return "open"


def case_want(case: Case, setting: Setting) -> str | int:
    """What a row of CASES asks for under this setting."""
    if case.unless in setting.words:
        return "allow"
    if case.strict_memfd and not setting.strict_memfd:
        return "open"
    return case.want


@cache
def points(setting: Setting) -> tuple[Point, ...]:
    """Everything that is asked of one filter."""
    return tuple([*number_points(setting), *argument_points(setting)])


def number_points(setting: Setting) -> Iterator[Point]:
    """Every number up to 1024, known or not, with arguments of several kinds."""
    names = {number: name for name, number in TABLES[setting.arch].items()}
    newer = {number for name, number in syscalls.TABLES[setting.arch].items() if name not in names.values()}
    for number in range(1025):
        name = names.get(number)
        if name is None:
            # Newer than the headers behind numbers.py: if the filter knows it, still nobody may call it.
            want: str | int = "deny" if number in newer else ENOSYS
        else:
            want = group_want(name, setting.words)
        for args in VECTORS:
            yield Point(number, args, want, name or "unknown")


def argument_points(setting: Setting) -> Iterator[Point]:
    """The rows of CASES that this instruction set has."""
    numbers = TABLES[setting.arch]
    for case in CASES:
        if case.name in numbers:
            yield Point(numbers[case.name], case.args, case_want(case, setting), case.name)


def verdict_of(program: list[Insn], arch: str, point: Point) -> Verdict:
    return verdict(run(program, seccomp_data(point.nr, ARCHES[arch], point.args)))


def violations(program: list[Insn], setting: Setting) -> Iterator[tuple[Point, Verdict]]:
    """Where the program does not do what the expectation asks."""
    for point in points(setting):
        got = verdict_of(program, setting.arch, point)
        if not satisfied(point.want, got):
            yield point, got


def judge(rule: Rule, args: tuple[int, ...]) -> Verdict:
    """What the published table says, by its own documentation: the first decision wins."""
    while isinstance(rule, When):
        test = rule.test
        value = (args[test.index] if test.index < len(args) else 0) & ((1 << test.bits) - 1)
        rule = rule.then if value & test.mask in test.values else rule.otherwise
    assert isinstance(rule, Action)
    return Verdict("errno", rule.number) if isinstance(rule, Errno) else verdict(rule.value)


def around(rule: Rule) -> Iterator[tuple[int, ...]]:
    """Every combination of the values that a rule compares with, then each tested value at one bit off it."""
    compared: dict[int, set[int]] = {}
    for test in comparisons(rule):
        outside = next(value for value in (0x77, 1, 0, test.mask) if value & test.mask not in test.values)
        compared.setdefault(test.index, set()).update({*test.values, outside})
    if compared:
        yield from product(*(sorted(compared.get(index, {0})) for index in range(6)))
        yield from one_off(rule, (0,) * 6)


def one_off(rule: Rule, args: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Arguments that lead to each test of a rule, with the tested one a bit away from each of its values."""
    if not isinstance(rule, When):
        return
    test = rule.test
    before, after = args[: test.index], args[test.index + 1 :]
    outside = next(value for value in (0x77, 1, 0, test.mask) if value & test.mask not in test.values)
    for value in (*test.values, outside):
        yield from ((*before, value ^ 1 << bit, *after) for bit in range(64))
    yield from one_off(rule.then, (*before, test.values[0], *after))
    yield from one_off(rule.otherwise, (*before, outside, *after))


def comparisons(rule: Rule) -> Iterator[Arg]:
    """The tests of a rule."""
    if isinstance(rule, When):
        yield rule.test
        yield from comparisons(rule.then)
        yield from comparisons(rule.otherwise)


FOREIGN = {
    "i386": 0x4000_0003,
    "x86_64": 0xC000_003E,
    "x86_64 without its 64-bit mark": 0x4000_003E,
    "arm": 0x4000_0028,
    "aarch64": 0xC000_00B7,
    "aarch64 without its 64-bit mark": 0x4000_00B7,
    "aarch64 big endian": 0x8000_00B7,
    "riscv64": 0xC000_00F3,
    "zero": 0,
    "ones": 0xFFFF_FFFF,
}
