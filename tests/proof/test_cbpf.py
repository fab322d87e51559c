"""The interpreter of the proof behaves as the running kernel does: same refusals, same results."""

from __future__ import annotations

import platform
import random

import pytest

from tests.proof.cbpf import (
    OPCODES,
    BadProgram,
    Insn,
    decode,
    encode,
    run,
    seccomp_data,
    verdict,
)
from tests.proof.kernel import ask

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[platform.machine()]
ALLOW = 0x7FFF0000
LD_NR = Insn(0x20, 0, 0, 0)
RET_ALLOW = Insn(0x06, 0, 0, ALLOW)
WINDOWS = (5000, 5001, 5002, 5003)  # call numbers that no kernel has: each shows one byte of the result


def accepted(program: bytes) -> bool:
    try:
        decode(program)
    except BadProgram:
        return False
    return True


def test_same_programs_are_refused_as_by_the_kernel() -> None:
    """Every opcode, with operands at and around each limit: what the kernel refuses is an error here."""
    programs = []
    for code in range(0x200):
        for k in (0, 1, 3, 4, 15, 16, 31, 32, 60, 64, 0xFFFFF000):
            # Written so that no call of the asking process ever reaches the instruction in question.
            guard = [Insn(0x02, 0, 0, 0), LD_NR, Insn(0x15, 0, 1, WINDOWS[0])]
            programs.append(encode([*guard, Insn(code, 0, 0, k), RET_ALLOW]))
    for jt, jf in ((0, 1), (1, 0), (1, 1), (2, 0), (0, 2), (255, 0)):
        programs.append(encode([LD_NR, Insn(0x15, jt, jf, 1), RET_ALLOW, RET_ALLOW]))
    programs += [
        encode([LD_NR]),
        encode([RET_ALLOW, LD_NR]),
        encode([Insn(0x60, 0, 0, 2), RET_ALLOW]),
        encode([LD_NR, Insn(0x15, 0, 1, 1), Insn(0x02, 0, 0, 2), Insn(0x60, 0, 0, 2), RET_ALLOW]),
        encode([LD_NR, Insn(0x02, 0, 0, 2), Insn(0x15, 0, 1, 1), Insn(0x61, 0, 0, 2), RET_ALLOW]),
        encode([RET_ALLOW] * 4096),
    ]
    (kernel,) = ask(["load", [program.hex() for program in programs]])
    assert isinstance(kernel, list)
    ours = [accepted(program) for program in programs]
    differing = [
        (decode_loosely(program), errno)
        for program, errno, mine in zip(programs, kernel, ours, strict=True)
        if (errno == 0) != mine
    ]
    assert differing == []
    assert 100 < sum(ours) < len(ours) - 1000, "both kinds were tried"


def decode_loosely(program: bytes) -> list[int]:
    return [program[i] | program[i + 1] << 8 for i in range(0, len(program), 8)]


def random_body(rng: random.Random) -> list[Insn]:
    """Random arithmetic, loads, stores and forward jumps; ends with the result in A."""
    names = {name: code for code, name in OPCODES.items()}
    straight = [name for name in names if name.split()[0] not in ("ret", "ja", "jeq", "jgt", "jge", "jset")]
    interesting = [0, 1, 2, 7, 0x7F, 0x80, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
    body = [Insn(0x02, 0, 0, cell) for cell in range(16)]
    length = rng.randrange(4, 40)
    for left in range(length, 0, -1):
        k = rng.choice([*interesting, rng.getrandbits(32)])
        if rng.random() < 0.25:
            name = rng.choice([n for n in names if n.startswith(("jeq", "jgt", "jge", "jset"))])
            body.append(Insn(names[name], rng.randrange(min(left, 6)), rng.randrange(min(left, 6)), k))
            continue
        name = rng.choice(straight)
        if name == "ld abs":
            k = rng.choice([0, 4, *range(16, 64, 4)])  # the instruction pointer is not ours to know
        elif "mem" in name or name in ("st", "stx"):
            k = rng.randrange(16)
        elif name == "div k":
            k = k or 3
        elif name in ("lsh k", "rsh k"):
            k %= 32
        body.append(Insn(names[name], 0, 0, k))
    return [*body, Insn(0x04, 0, 0, 0)]


def observable(body: list[Insn]) -> bytes:
    """The body, run only for the WINDOWS calls, its result turned into errnos a byte at a time."""
    head = [LD_NR, Insn(0x35, 1, 0, WINDOWS[0]), RET_ALLOW, Insn(0x25, 0, 1, WINDOWS[-1]), RET_ALLOW]
    shift = [LD_NR, Insn(0x14, 0, 0, WINDOWS[0]), Insn(0x64, 0, 0, 3), Insn(0x07, 0, 0, 0)]
    byte = [Insn(0x60, 0, 0, 0), Insn(0x7C, 0, 0, 0), Insn(0x54, 0, 0, 0xFF), Insn(0x44, 0, 0, 0x50100)]
    return encode([*head, *body, Insn(0x02, 0, 0, 0), *shift, *byte, Insn(0x16, 0, 0, 0)])


def test_same_results_as_the_kernel() -> None:
    """400 random programs over random arguments give bit for bit what the kernel's own engine gives."""
    rng = random.Random(20)
    requests, expected = [], []
    for _ in range(400):
        program = observable(random_body(rng))
        insns = decode(program)
        args = tuple(rng.choice([0, 1, 0x80000000, (1 << 64) - 1, rng.getrandbits(64)]) for _ in range(6))
        results = [verdict(run(insns, seccomp_data(nr, ARCH, args))) for nr in WINDOWS]
        killed = any(result.action == "kill-thread" for result in results)
        expected.append("killed" if killed else [result.data for result in results])
        requests.append(["run", program.hex(), [[nr, *args] for nr in WINDOWS]])
    assert ask(*requests) == expected
    assert 0 < expected.count("killed") < 200, "both ends were tried"


@pytest.mark.parametrize(
    ("value", "action", "data"),
    [
        (0x7FFF0000, "allow", 0),
        (0x00050001, "errno", 1),
        (0x0005FFFF, "errno", 4095),
        (0x80000000, "kill-process", 0),
        (0x00000000, "kill-thread", 0),
        (0x12340007, "kill-process", 7),
    ],
)
def test_returned_values(value: int, action: str, data: int) -> None:
    """A value is read as the kernel reads it: an unknown action kills, an errno ends at 4095."""
    assert verdict(value) == (action, data)
