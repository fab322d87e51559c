"""Rules on system calls, their assembly into classic BPF, and handing the program to the kernel.

A rule is an ``Action``, or a ``When`` that looks at one argument and chooses between two rules. Rules
are data: this module assembles them, anything else may read them.

The program: check of the instruction set, then a search over the call numbers, then the tests that the
rule found asks for. The kernel (5.11 on) works out by itself which calls are allowed whatever their
arguments and does not run the program for them at all; its reasoning follows only loads of the number
and of the instruction set, comparisons with constants, and returns. The search uses nothing else.

It is assembled backwards, from the last instruction to the first: jumps only go forward, so every
target stands already and its distance is known when the jump is written. Where a conditional jump
would not reach (255 instructions), a second copy of the return or an unconditional jump comes between.
"""

from __future__ import annotations

import struct
from bisect import bisect_left

TYPE_CHECKING = False  # importing typing for its constant takes longer than all of this module
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    # What is known of the accumulator: the masked word of seccomp_data at an offset.
    _Held = tuple[int, int] | None

__all__ = [
    "ALLOW",
    "KILL",
    "NOTIFY",
    "Action",
    "Arg",
    "Errno",
    "Prepared",
    "Rule",
    "When",
    "assemble",
    "install",
    "verify",
]

_MAX_INSTRUCTIONS = 4096  # BPF_MAXINSNS
_FULL = 0xFFFF_FFFF

# The instructions in use: load a word of seccomp_data, mask, jump always, jump if equal / greater or
# equal / any bit set, return a constant.
_LOAD, _AND, _JUMP, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x45, 0x06
_BRANCHES = frozenset({_JEQ, _JGE, _JSET})

# struct seccomp_data: int nr, u32 arch, u64 instruction_pointer, u64 args[6].
_NUMBER, _ARCH, _ARGUMENTS, _DATA_SIZE = 0, 4, 16, 64

_INSTRUCTION = struct.Struct("=HBBI")  # struct sock_filter: code, jump if true, if false, constant

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2

# How many lone values one leaf of the search may hold: more save instructions and cost steps.
_EXCEPTIONS = 3
# What a frequent value weighs in the search, in leaves.
_FREQUENT = 4


class Action:
    """What becomes of a call; ``value`` is what the program returns to the kernel."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Action) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        names = {0x7FFF_0000: "ALLOW", 0x8000_0000: "KILL", 0x7FC0_0000: "NOTIFY"}
        return names.get(self.value, f"Action({self.value:#x})")


class Errno(Action):
    """The call does nothing and fails with this error number."""

    __slots__ = ()

    def __init__(self, number: int) -> None:
        # The kernel cuts what is above 4095, and 0 would look like success to the caller.
        if not 0 < number < 4096:
            raise ValueError(f"not an error number: {number}")
        super().__init__(0x0005_0000 | number)

    @property
    def number(self) -> int:
        """The error number."""
        return self.value & 0xFFFF

    def __repr__(self) -> str:
        return f"Errno({self.number})"


ALLOW = Action(0x7FFF_0000)
NOTIFY = Action(0x7FC0_0000)  # the call waits for an answer of whoever holds the listener
KILL = Action(0x8000_0000)  # the whole process, by SIGSYS that cannot be caught


class Arg:
    """Whether an argument (0 to 5), masked, is one of some values.

    ``bits`` is how much of the register the *kernel* reads. Where the call's parameter is an int (ioctl's
    command, socket's three, prctl's option) the kernel ignores the upper half of the register, so a test
    of all 64 bits could be passed by with any rubbish up there (CVE-2019-10063 and CVE-2019-7303 were
    that, for TIOCSTI): 32. Where it is a long or a pointer, a test of the low half alone would take two
    different values for the same: 64.
    """

    __slots__ = ("bits", "index", "mask", "values")

    def __init__(self, index: int, *values: int, bits: int = 32, mask: int | None = None) -> None:
        full = (1 << bits) - 1
        self.index = index
        self.bits = bits
        self.mask = full if mask is None else mask
        self.values = tuple(sorted(set(values)))
        if not 0 <= index < 6 or bits not in (32, 64) or not 0 <= self.mask <= full or not values:
            raise ValueError(f"not a test: {self!r}")
        if any(value & ~self.mask for value in self.values):
            raise ValueError(f"a value that the mask can never leave: {self!r}")

    def __repr__(self) -> str:
        values = ", ".join(map(hex, self.values))
        return f"Arg({self.index}, {values}, bits={self.bits}, mask={self.mask:#x})"


class When:
    """``then`` if the test holds, ``otherwise`` if not. Rules nest; the first decision wins."""

    __slots__ = ("otherwise", "test", "then")

    def __init__(self, test: Arg, then: Rule, otherwise: Rule) -> None:
        self.test = test
        self.then = then
        self.otherwise = otherwise

    def __repr__(self) -> str:
        return f"When({self.test!r}, {self.then!r}, {self.otherwise!r})"


Rule = Action | When


def assemble(
    arch: int,
    rules: Mapping[int, Rule],
    default: Rule,
    *,
    foreign: Action = KILL,
    frequent: Iterable[int] = (),
) -> bytes:
    """The program (an array of ``struct sock_filter``) that applies a rule to each call number.

    ``default`` is for every number without a rule, up to 2**32 - 1; ``foreign`` for calls of another
    instruction set than ``arch`` (an ``AUDIT_ARCH`` value). Numbers in ``frequent`` are found in fewer
    steps. Raises ValueError if the program would be too long.
    """
    code = _Code()
    places = {number: code.rule(rule) for number, rule in rules.items()}
    start = code.search(places, code.rule(default), frequent)
    start = code.step(_LOAD, _NUMBER, start)
    start = code.branch(_JEQ, arch, start, code.returning(foreign.value, fresh=True))
    code.step(_LOAD, _ARCH, start)
    program = code.program()
    verify(program)
    return program


def verify(program: bytes) -> None:
    """Check a program as the kernel does before it takes one. Raises ValueError with the reason.

    Of the instructions the kernel knows, only those this module writes are accepted.
    """
    if not program or len(program) % _INSTRUCTION.size:
        raise ValueError("not a whole number of instructions")
    count = len(program) // _INSTRUCTION.size
    if count > _MAX_INSTRUCTIONS:
        raise ValueError(f"{count} instructions, the kernel takes {_MAX_INSTRUCTIONS}")
    code = 0
    # Offsets are unsigned and count from the next instruction: what is in range cannot go backwards.
    for left, (code, yes, no, constant) in zip(
        range(count - 1, -1, -1), _INSTRUCTION.iter_unpack(program), strict=True
    ):
        if code in _BRANCHES:
            wrong = yes >= left or no >= left
        elif code == _LOAD:
            wrong = constant % 4 != 0 or constant >= _DATA_SIZE
        elif code == _JUMP:
            wrong = constant >= left
        else:
            wrong = code not in (_AND, _RETURN)
        if wrong:
            raise ValueError(f"instruction {count - 1 - left}: {code:#x} {yes} {no} {constant:#x}")
    if code != _RETURN:
        raise ValueError("the last instruction is not a return")


class _Code:
    """Instructions, last one first. A place is an index into that order, so later places come earlier."""

    def __init__(self) -> None:
        self._instructions: list[tuple[int, int, int, int]] = []
        self._returns: dict[int, int] = {}
        self._rules: dict[tuple[int, _Held], int] = {}
        self._nearer: dict[int, int] = {}

    def program(self) -> bytes:
        """The instructions in the order in which they run."""
        pack = _INSTRUCTION.pack
        return b"".join([pack(*instruction) for instruction in reversed(self._instructions)])

    def returning(self, value: int, *, fresh: bool = False) -> int:
        """The place of a return of this value, shared by all who ask unless they want one of their own."""
        place = None if fresh else self._returns.get(value)
        if place is None:
            place = self._returns[value] = self._put(_RETURN, 0, 0, value)
        return place

    def branch(self, code: int, constant: int, yes: int, no: int) -> int:
        """A conditional jump to two places."""
        if yes == no:
            return yes
        yes, no = self._near(yes), self._near(no)
        here = len(self._instructions)
        return self._put(code, here - yes - 1, here - no - 1, constant)

    def step(self, code: int, constant: int, then: int) -> int:
        """An instruction that goes on to a place."""
        if then != len(self._instructions) - 1:
            self._put(_JUMP, 0, 0, len(self._instructions) - then - 1)
        return self._put(code, 0, 0, constant)

    def rule(self, rule: Rule, held: _Held = None) -> int:
        """The place where the rule is applied, reached with ``held`` in the accumulator."""
        if isinstance(rule, Action):
            return self.returning(rule.value)
        place = self._rules.get((id(rule), held))
        if place is None:
            place = self._rules[id(rule), held] = self._when(rule, held)
        return place

    def search(self, places: Mapping[int, int], default: int, frequent: Iterable[int] = ()) -> int:
        """The place of a binary search for the accumulator's value, which goes on to that value's place."""
        return self._split(_leaves(_ranges(places, default), sorted(frequent)))

    def _split(self, leaves: list[_Leaf]) -> int:
        """Halve the weight until one leaf is left."""
        if len(leaves) == 1:
            place = leaves[0].place
            for value, other in reversed(leaves[0].exceptions):
                place = self.branch(_JEQ, value, other, place)
            return place
        total = sum([leaf.weight for leaf in leaves])
        below, middle = leaves[0].weight, 1
        while middle < len(leaves) - 1 and 2 * below + leaves[middle].weight <= total:
            below += leaves[middle].weight
            middle += 1
        upper, lower = self._split(leaves[middle:]), self._split(leaves[:middle])
        return self.branch(_JGE, leaves[middle].first, upper, lower)

    def _when(self, rule: When, held: _Held) -> int:
        test = rule.test
        low = _ARGUMENTS + 8 * test.index  # both instruction sets are little-endian
        high_mask, low_mask = test.mask >> 32, test.mask & _FULL
        if not test.mask:
            return self.rule(rule.then, held)
        if not high_mask:
            after = (low, _FULL if _by_bits(low_mask, test.values) else low_mask)
            yes, no = self.rule(rule.then, after), self.rule(rule.otherwise, after)
            return self._word(low, low_mask, test.values, yes, no, held)
        # Both halves. What the accumulator holds then depends on which of them decided: nothing is known.
        yes, no = self.rule(rule.then), self.rule(rule.otherwise)
        halves: dict[int, tuple[int, ...]] = {}
        for value in test.values:
            halves[value >> 32] = (*halves.get(value >> 32, ()), value & _FULL)
        lows = {high: self._word(low, low_mask, values, yes, no) for high, values in halves.items()}
        place = no
        for high in reversed(lows):
            if _by_bits(high_mask, tuple(lows)):
                return self._word(low + 4, high_mask, (high,), lows[high], no, held)
            place = self.branch(_JEQ, high, lows[high], place)
        return self._masked(low + 4, high_mask, place, held)

    def _word(
        self, offset: int, mask: int, values: tuple[int, ...], yes: int, no: int, held: _Held = None
    ) -> int:
        """Compare one masked 32-bit word with some values."""
        if not mask:
            return yes  # everything masks to 0, the only value that a test can name then
        if _by_bits(mask, values):
            if values != (0,):
                yes, no = no, yes
            return self._masked(offset, _FULL, self.branch(_JSET, mask, no, yes), held)
        return self._masked(offset, mask, self.search(dict.fromkeys(values, yes), no), held)

    def _masked(self, offset: int, mask: int, then: int, held: _Held) -> int:
        """Get a masked word into the accumulator, as far as it is not there already."""
        if held == (offset, mask):
            return then
        if mask != _FULL:
            then = self.step(_AND, mask, then)
        return then if held == (offset, _FULL) else self.step(_LOAD, offset, then)

    def _near(self, place: int) -> int:
        """The place, or one nearer to here that leads to the same end."""
        while (nearer := self._nearer.get(place)) is not None:
            place = nearer
        # Two short of 255: each of a branch's two targets may need one instruction more.
        if len(self._instructions) - place - 1 <= 253:
            return place
        code, _, _, constant = self._instructions[place]
        if code == _RETURN:
            nearer = self._put(_RETURN, 0, 0, constant)
        else:
            nearer = self._put(_JUMP, 0, 0, len(self._instructions) - place - 1)
        self._nearer[place] = nearer
        return nearer

    def _put(self, code: int, yes: int, no: int, constant: int) -> int:
        self._instructions.append((code, yes, no, constant))
        return len(self._instructions) - 1


def _by_bits(mask: int, values: tuple[int, ...]) -> bool:
    """Whether one jump on any-bit-set decides, with the word left as it was."""
    return values == (0,) or (values == (mask,) and mask & (mask - 1) == 0)


class _Leaf:
    """A range of values that lead to one place, but for a few single ones that lead elsewhere."""

    __slots__ = ("exceptions", "first", "place", "weight")

    def __init__(self, first: int, place: int, exceptions: list[tuple[int, int]], weight: int) -> None:
        self.first = first
        self.place = place
        self.exceptions = exceptions
        self.weight = weight


def _ranges(places: Mapping[int, int], default: int) -> list[tuple[int, int]]:
    """The first value and the place of each longest range with one place, then the end of the last."""
    ranges: list[tuple[int, int]] = []
    last = -1
    free = 0
    for value in sorted(places):
        if value > free and last != default:
            last = default
            ranges.append((free, last))
        place = places[value]
        if last != place:
            last = place
            ranges.append((value, last))
        free = value + 1
    if free <= _FULL and last != default:
        ranges.append((free, default))
    ranges.append((_FULL + 1, -1))
    return ranges


def _leaves(ranges: list[tuple[int, int]], frequent: list[int]) -> list[_Leaf]:
    """Group the ranges so that a lone value costs one comparison (equal) instead of two (from, to)."""
    leaves: list[_Leaf] = []
    at = 0
    while at < len(ranges) - 1:
        place, end = ranges[at][1], _reach(ranges, at, ranges[at][1])
        # To take the first range for the exception may reach further.
        other = _reach(ranges, at, ranges[at + 1][1])
        if other > end:
            place, end = ranges[at + 1][1], other
        first, beyond = ranges[at][0], ranges[end][0]
        exceptions = [pair for pair in ranges[at:end] if pair[1] != place]
        weight = 1 + _FREQUENT * (bisect_left(frequent, beyond) - bisect_left(frequent, first))
        leaves.append(_Leaf(first, place, exceptions, weight))
        at = end
    return leaves


def _reach(ranges: list[tuple[int, int]], start: int, place: int) -> int:
    """How far a leaf for ``place`` reaches that begins with a range: the range after its last."""
    exceptions = 0
    end = start
    for at in range(start, len(ranges) - 1):
        if ranges[at][1] == place:
            end = at + 1
        elif exceptions < _EXCEPTIONS and ranges[at + 1][0] - ranges[at][0] == 1:
            exceptions += 1
        else:
            break
    return end


class Prepared:
    """A program made ready in memory, so that a freshly forked child has one call to make and no more."""

    __slots__ = ("_buffer", "_call", "_fail", "_header")

    def __init__(self, program: bytes) -> None:
        # Here and not above: who only assembles needs neither ctypes nor the C library.
        import ctypes

        from casemate.sys.native import LIBC, fail

        self._buffer = ctypes.create_string_buffer(program, len(program))
        # struct sock_fprog: unsigned short count, padding, pointer.
        header = struct.pack("@HP", len(program) // _INSTRUCTION.size, ctypes.addressof(self._buffer))
        self._header = ctypes.create_string_buffer(header, len(header))
        # LIBC["prctl"] is a function object of its own: the types set here are nobody else's business.
        self._call = LIBC["prctl"]
        self._call.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
        self._fail = fail

    @property
    def header(self) -> object:
        """The ``struct sock_fprog``, for other calls that take one; valid as long as this object."""
        return self._header

    def install(self) -> None:
        """Put the calling thread, and all it starts from now on, behind the program.

        The same as seccomp(2) with flags 0, but without a number that differs by machine: no TSYNC, since
        the caller has one thread, and no SPEC_ALLOW, so that hosts which tie the speculative-store
        mitigation to seccomp keep it.

        Preconditions: no_new_privs is set, or the thread has CAP_SYS_ADMIN in its user namespace.
        Raises OSError: EACCES where that is not so, EINVAL for a program (or by a kernel) that cannot.
        """
        if self._call(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, self._header, 0, 0) != 0:
            raise self._fail("seccomp")


def install(program: bytes) -> None:
    """``Prepared(program).install()``, for those who are in no hurry."""
    Prepared(program).install()
