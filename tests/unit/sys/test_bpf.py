"""The assembler: what a rule says is what its program does, and the kernel's limits are kept."""

from __future__ import annotations

import itertools
import struct
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casemate.sys.bpf import ALLOW, KILL, Action, Arg, Errno, Rule, When, assemble, verify

ARCH = 0xC000003E
FULL = 0xFFFF_FFFF
ENOSYS = Errno(38)


class Run(NamedTuple):
    """What a program returned, in how many steps, and the offsets it looked at."""

    value: int
    steps: int
    loads: frozenset[int]


def run(program: bytes, number: int, args: tuple[int, ...] = (0,) * 6, arch: int = ARCH) -> Run:
    """Run a program on a call, knowing only the instructions that the assembler writes."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *args)
    code = list(struct.iter_unpack("=HBBI", program))
    at, accumulator, steps, loads = 0, 0, 0, set()
    while True:
        operation, yes, no, constant = code[at]
        at += 1
        steps += 1
        if operation == 0x20:
            loads.add(constant)
            (accumulator,) = struct.unpack_from("<I", data, constant)
        elif operation == 0x54:
            accumulator &= constant
        elif operation == 0x05:
            at += constant
        elif operation == 0x06:
            return Run(constant, steps, frozenset(loads))
        else:
            taken = {
                0x15: accumulator == constant,
                0x35: accumulator >= constant,
                0x45: accumulator & constant != 0,
            }[operation]
            at += yes if taken else no


def decide(rule: Rule, args: tuple[int, ...]) -> int:
    """What a rule says about some arguments, read straight from its data."""
    while isinstance(rule, When):
        word = args[rule.test.index] & ((1 << rule.test.bits) - 1)
        rule = rule.then if word & rule.test.mask in rule.test.values else rule.otherwise
    return rule.value


words32 = st.one_of(st.integers(0, 40), st.integers(0, 31).map(lambda bit: 1 << bit), st.integers(0, FULL))
words64 = st.builds(lambda high, low: high << 32 | low, st.one_of(st.just(0), words32), words32)
actions = st.one_of(st.just(ALLOW), st.just(KILL), st.integers(1, 4095).map(Errno))


@st.composite
def arguments(draw: st.DrawFn) -> Arg:
    """A test of one argument, with every kind of mask."""
    bits = draw(st.sampled_from([32, 64]))
    full = (1 << bits) - 1
    mask = draw(st.one_of(st.just(full), words64.map(lambda word: word & full)))
    some = st.lists(words64.map(lambda word: word & mask), min_size=1, max_size=5)
    values = draw(st.one_of(some, st.sampled_from([[0], [mask]])))
    return Arg(draw(st.sampled_from([0, 0, 1, 5])), *values, bits=bits, mask=mask)


rules = st.recursive(actions, lambda inner: st.builds(When, arguments(), inner, inner), max_leaves=8)
numbers = st.one_of(st.integers(0, 60), st.integers(0, 600), st.integers(0, FULL))
runs = st.tuples(numbers, st.integers(1, 3), st.one_of(actions, st.sampled_from([ALLOW, ENOSYS]), rules))
tables = st.lists(runs, max_size=60).map(
    lambda runs: {
        number: rule for first, length, rule in runs for number in range(first, min(first + length, FULL + 1))
    }
)


def telling(rule: Rule) -> list[tuple[int, ...]]:
    """Arguments that reach a rule's branches: every value of every test, with rubbish around the mask."""
    found: list[tuple[int, ...]] = [(0,) * 6, (2**64 - 1,) * 6]
    pending = [(rule, found[0])]
    while pending:
        rule, args = pending.pop()
        if isinstance(rule, Action):
            continue
        test, around = rule.test, ~rule.test.mask & (2**64 - 1)
        for word in (
            *test.values,
            *(value ^ 1 for value in test.values),
            test.mask,
            test.mask & -test.mask,
            1 << 32,
        ):
            for rubbish in (0, around, 0xDEADBEEF << 32 & around):
                changed = (*args[: test.index], word | rubbish, *args[test.index + 1 :])
                found.append(changed)
                if rubbish == around:
                    pending += [(rule.then, changed), (rule.otherwise, changed)]
    return found[:400]


@given(rule=rules)
def test_a_rule_means_what_its_program_does(rule: Rule) -> None:
    """Masks, halves of registers and nesting survive the assembly, whatever the unread bits are."""
    program = assemble(ARCH, {7: rule}, ENOSYS)
    for args in telling(rule):
        assert run(program, 7, args).value == decide(rule, args)
    assert run(program, 8).value == ENOSYS.value


@given(table=tables, default=actions, frequent=st.lists(numbers, max_size=10))
def test_each_number_gets_its_own_rule(table: dict[int, Rule], default: Rule, frequent: list[int]) -> None:
    """Every number has its own rule and its neighbours have theirs, up to 2**32 - 1."""
    program = assemble(ARCH, table, default, frequent=frequent)
    probes = {0, FULL, 0x4000_0000}
    for number in table:
        probes.update((number, min(number + 1, FULL), max(number - 1, 0)))
    for number in probes:
        rule = table.get(number, default)
        for args in telling(rule)[:6]:
            assert run(program, number, args).value == decide(rule, args)
        assert run(program, number, arch=0x40000003).value == KILL.value


@given(table=tables)
def test_what_is_allowed_at_once_never_looks_at_arguments(table: dict[int, Rule]) -> None:
    """The kernel caches such calls, but only if the path to the return loads number and machine alone."""
    program = assemble(ARCH, table, ENOSYS)
    for number, rule in table.items():
        if isinstance(rule, Action):
            assert run(program, number).loads == {0, 4}


def test_one_rule_in_several_places() -> None:
    """A rule that is reached after tests of different arguments is right after each of them."""
    inner = When(Arg(0, 1), Errno(1), When(Arg(1, 2), Errno(2), Errno(3)))
    outer = When(Arg(1, 2), When(Arg(0, 5), KILL, inner), When(Arg(2, 0, mask=6), inner, ALLOW))
    program = assemble(ARCH, {4: inner, 5: outer}, ENOSYS)
    for args in itertools.product((0, 1, 2, 5), repeat=3):
        full = (*args, 0, 0, 0)
        assert run(program, 4, full).value == decide(inner, full)
        assert run(program, 5, full).value == decide(outer, full)


def test_masks_of_one_argument_in_a_row() -> None:
    """What an earlier test left of the argument is not taken for the whole of it."""
    last = When(Arg(0, 0x60, 0x61, mask=0x61), Errno(4), When(Arg(0, 0x88, 0x99), Errno(5), Errno(6)))
    rule = When(Arg(0, 0x5, mask=0x7), Errno(1), When(Arg(0, 0, mask=0x18), Errno(2), last))
    rule = When(Arg(0, 0, mask=0xA0), Errno(7), When(Arg(0, 0x20, mask=0xA0), Errno(8), rule))
    rule = When(Arg(0, 0x40, mask=0x40), rule, When(Arg(0, 0xE, mask=0xF), Errno(3), rule))
    program = assemble(ARCH, {5: rule}, ENOSYS)
    for word in range(256):
        args = (word | 0xABC << 40, 0, 0, 0, 0, 0)
        assert run(program, 5, args).value == decide(rule, args)


def test_targets_out_of_reach_of_one_jump_are_reached() -> None:
    """A conditional jump reaches 255 instructions; a program of thousands is right all the same."""
    rule = When(Arg(3, 5, 7), Errno(9), ALLOW)
    table: dict[int, Rule] = {number: Errno(number % 7 + 1) for number in range(0, 1500)}
    table |= {number: rule for number in range(3, 1500, 40)}
    table |= {
        number: When(Arg(2, number << 33 | 5, bits=64), KILL, When(Arg(2, 1, mask=1), ALLOW, Errno(3)))
        for number in range(1, 1500, 97)
    }
    program = assemble(ARCH, table, ENOSYS)
    assert len(program) // 8 > 4 * 255
    for number in range(1510):
        said = table.get(number, ENOSYS)
        for args in ((0,) * 6, (0, 0, number << 33 | 5, 7, 0, 0), (0, 0, 1, 5 | 1 << 32, 0, 0)):
            assert run(program, number, args).value == decide(said, args)


def test_a_lone_number_costs_one_instruction() -> None:
    """Single exceptions within a range are compared for equality, not fenced in from both sides."""
    plain = assemble(ARCH, dict.fromkeys(range(100), ALLOW), ENOSYS)
    table: dict[int, Rule] = dict.fromkeys(range(100), ALLOW)
    table[50] = ENOSYS
    assert len(assemble(ARCH, table, ENOSYS)) == len(plain) + 8


def test_frequent_numbers_are_found_sooner() -> None:
    """The search halves the weight, so that a number said to be frequent takes fewer steps."""
    table: dict[int, Rule] = {number: Errno(number // 3 + 1) for number in range(300)}
    usual = run(assemble(ARCH, table, ENOSYS), 4).steps
    assert run(assemble(ARCH, table, ENOSYS, frequent=[3, 4, 5]), 4).steps < usual


def test_no_test_is_loaded_twice() -> None:
    """Tests of one argument in a row, with one mask, share their load."""
    rule = When(Arg(0, 1), ALLOW, When(Arg(0, 2), KILL, When(Arg(0, 3), Errno(3), Errno(4))))
    program = assemble(ARCH, {5: rule}, ENOSYS)
    assert [code for code, *_ in struct.iter_unpack("=HBBI", program)].count(0x20) == 3


def test_a_program_too_long_for_the_kernel_is_refused() -> None:
    """4096 instructions are the kernel's limit."""
    table: dict[int, Rule] = {number: Errno(number + 1) for number in range(3000)}
    with pytest.raises(ValueError, match="the kernel takes 4096"):
        assemble(ARCH, table, ENOSYS)


def instruction(code: int, yes: int = 0, no: int = 0, constant: int = 0) -> bytes:
    """One ``struct sock_filter``."""
    return struct.pack("=HBBI", code, yes, no, constant)


RET = instruction(0x06, constant=0x7FFF0000)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(b"", id="empty"),
        pytest.param(RET[:-1], id="half an instruction"),
        pytest.param(RET * 4097, id="too long"),
        pytest.param(instruction(0x20), id="no return at the end"),
        pytest.param(instruction(0x15, yes=1) + RET, id="branch beyond the end, if true"),
        pytest.param(instruction(0x15, no=1) + RET, id="branch beyond the end, if false"),
        pytest.param(instruction(0x05, constant=1) + RET, id="jump beyond the end"),
        pytest.param(instruction(0x05, constant=FULL) + RET, id="jump backwards"),
        pytest.param(instruction(0x20, constant=2) + RET, id="unaligned load"),
        pytest.param(instruction(0x20, constant=64) + RET, id="load beyond the data"),
        pytest.param(instruction(0x28) + RET, id="load of half a word"),
        pytest.param(instruction(0x04) + RET, id="arithmetic"),
        pytest.param(instruction(0x16) + RET, id="return of the accumulator"),
    ],
)
def test_a_program_the_kernel_would_refuse_is_refused(program: bytes) -> None:
    """Anything that the kernel's checks refuse, or that the assembler never writes, raises ValueError."""
    with pytest.raises(ValueError, match="instruction"):
        verify(program)


def test_a_sound_program_passes() -> None:
    """The control of the refusals: jumps to the very last instruction, the last word, the longest program."""
    verify(instruction(0x15, yes=1, no=0) + RET + RET)
    verify(instruction(0x05, constant=1) + RET + RET)
    verify(instruction(0x20, constant=60) + RET)
    verify(RET * 4096)


@pytest.mark.parametrize("number", [0, -1, 4096])
def test_an_errno_that_callers_would_not_see_is_refused(number: int) -> None:
    """0 would be success, and the kernel cuts what is above 4095."""
    with pytest.raises(ValueError, match="not an error number"):
        Errno(number)
    assert Errno(4095).number == 4095


@pytest.mark.parametrize(
    ("index", "values", "bits", "mask"),
    [
        pytest.param(6, (0,), 32, None, id="no such argument"),
        pytest.param(0, (), 32, None, id="no value"),
        pytest.param(0, (1 << 32,), 32, None, id="value wider than the word"),
        pytest.param(0, (1,), 32, 1 << 32, id="mask wider than the word"),
        pytest.param(0, (3,), 32, 1, id="value outside the mask"),
        pytest.param(0, (-1,), 64, None, id="negative value"),
        pytest.param(0, (1,), 16, None, id="no such width"),
    ],
)
def test_a_test_that_cannot_hold_is_refused(
    index: int, values: tuple[int, ...], bits: int, mask: int | None
) -> None:
    """A test that says nothing, or that no argument can pass, is a mistake in the table."""
    with pytest.raises(ValueError, match=r"Arg\("):
        Arg(index, *values, bits=bits, mask=mask)


def test_equal_actions_are_equal() -> None:
    """Actions compare by what the kernel gets; a rule prints as what it is."""
    assert Errno(1) == Errno(1) != Errno(2) != ALLOW
    assert hash(Errno(1)) == hash(Errno(1))
    assert repr(When(Arg(1, 5, mask=0xF), ALLOW, KILL)) == "When(Arg(1, 0x5, bits=32, mask=0xf), ALLOW, KILL)"
    assert repr(Errno(1)) == "Errno(1)"
