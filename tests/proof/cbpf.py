"""An interpreter of classic BPF as the kernel runs it for seccomp. It shares no line with the assembler.

Written from the kernel's own rules (net/core/filter.c: ``bpf_check_classic``, ``check_load_and_stores``;
kernel/seccomp.c: ``seccomp_check_filter``, ``seccomp_run_filters``; include/uapi/linux/seccomp.h). What the
kernel would refuse to load is an error here. tests/proof/test_cbpf.py compares it with the running kernel.
"""

from __future__ import annotations

import struct
import sys
from typing import NamedTuple

MAX_INSNS = 4096
MEM_WORDS = 16
DATA_SIZE = 64  # sizeof(struct seccomp_data): int nr, u32 arch, u64 instruction_pointer, u64 args[6]
U32 = 0xFFFF_FFFF

ACTIONS = {
    0x8000_0000: "kill-process",
    0x0000_0000: "kill-thread",
    0x0003_0000: "trap",
    0x0005_0000: "errno",
    0x7FC0_0000: "user-notif",
    0x7FF0_0000: "trace",
    0x7FFC_0000: "log",
    0x7FFF_0000: "allow",
}

LOADS = {0x20: "ld abs", 0x80: "ld len", 0x81: "ldx len", 0x00: "ld imm", 0x01: "ldx imm"}
MEMORY = {0x60: "ld mem", 0x61: "ldx mem", 0x02: "st", 0x03: "stx"}
ALU = {
    0x00: "add",
    0x10: "sub",
    0x20: "mul",
    0x30: "div",
    0x40: "or",
    0x50: "and",
    0x60: "lsh",
    0x70: "rsh",
    0xA0: "xor",
}
JUMPS = {0x10: "jeq", 0x20: "jgt", 0x30: "jge", 0x40: "jset"}

OPCODES: dict[int, str] = {
    **LOADS,
    **MEMORY,
    **{0x04 | op: f"{name} k" for op, name in ALU.items()},
    **{0x0C | op: f"{name} x" for op, name in ALU.items()},
    0x84: "neg",
    0x05: "ja",
    **{0x05 | op: f"{name} k" for op, name in JUMPS.items()},
    **{0x0D | op: f"{name} x" for op, name in JUMPS.items()},
    0x06: "ret k",
    0x16: "ret a",
    0x07: "tax",
    0x87: "txa",
}


class BadProgram(Exception):
    """The kernel would refuse this program."""


class Insn(NamedTuple):
    """``struct sock_filter``."""

    code: int
    jt: int
    jf: int
    k: int


class Verdict(NamedTuple):
    """What the kernel does with the call: the action and its 16 bits of data (an errno, mostly)."""

    action: str
    data: int


def decode(program: bytes) -> list[Insn]:
    """The instructions of an assembled program; raises BadProgram when the kernel would."""
    if len(program) % 8:
        raise BadProgram("not a whole number of instructions")
    insns = [Insn(*fields) for fields in struct.iter_unpack("=HBBI", program)]
    check(insns)
    return insns


def encode(insns: list[Insn]) -> bytes:
    """The inverse of ``decode``."""
    return b"".join(struct.pack("=HBBI", *insn) for insn in insns)


def check(insns: list[Insn]) -> None:
    """The kernel's load-time rules."""
    if not 1 <= len(insns) <= MAX_INSNS:
        raise BadProgram(f"{len(insns)} instructions")
    for pc, insn in enumerate(insns):
        name = OPCODES.get(insn.code)
        if name is None:
            raise BadProgram(f"{pc}: opcode {insn.code:#x} is not for seccomp")
        _check_operands(pc, name, insn, len(insns))
    if OPCODES[insns[-1].code] not in ("ret k", "ret a"):
        raise BadProgram("the last instruction does not return")
    _check_memory(insns)


def _check_operands(pc: int, name: str, insn: Insn, length: int) -> None:
    left = length - pc - 1
    wrong = {
        "ld abs": insn.k >= DATA_SIZE or insn.k & 3 != 0,
        "div k": insn.k == 0,
        "lsh k": insn.k >= 32,
        "rsh k": insn.k >= 32,
        "ja": insn.k >= left,
    }.get(name, False)
    if name in MEMORY.values():
        wrong = insn.k >= MEM_WORDS
    if name[:3] in JUMPS.values() or name[:4] in JUMPS.values():
        wrong = insn.jt >= left or insn.jf >= left
    if wrong:
        raise BadProgram(f"{pc}: operand of {name} out of range")


def _check_memory(insns: list[Insn]) -> None:
    """A cell may be read only if every way to the read has written it (all jumps go forward)."""
    everything = (1 << MEM_WORDS) - 1
    reached = [everything] * len(insns)
    valid = 0
    for pc, insn in enumerate(insns):
        valid &= reached[pc]
        name = OPCODES[insn.code]
        if name in ("st", "stx"):
            valid |= 1 << insn.k
        elif name in ("ld mem", "ldx mem"):
            if not valid & 1 << insn.k:
                raise BadProgram(f"{pc}: cell {insn.k} may be read before it is written")
        elif name == "ja" or insn.code & 7 == 5:
            for target in (insn.k, insn.k) if name == "ja" else (insn.jt, insn.jf):
                reached[pc + 1 + target] &= valid
            valid = everything


def seccomp_data(nr: int, arch: int, args: tuple[int, ...] = (), ip: int = 0x7F00_1234_5678) -> bytes:
    """``struct seccomp_data`` in this machine's byte order; arguments are 64 bits wide."""
    full = [*args, 0, 0, 0, 0, 0, 0][:6]
    words = [value & 0xFFFF_FFFF_FFFF_FFFF for value in full]
    return struct.pack("=IIQ6Q", nr & U32, arch, ip, *words)


def verdict(value: int) -> Verdict:
    """A returned value as the kernel reads it: an unknown action kills, an errno is capped."""
    action = ACTIONS.get(value & 0xFFFF_0000, "kill-process")
    data = value & 0xFFFF
    return Verdict(action, min(data, 4095) if action == "errno" else data)


def run(insns: list[Insn], data: bytes, path: list[int] | None = None) -> int:
    """The 32-bit value that the program returns for this call. ``insns`` came from ``decode``.

    ``path`` is given the instructions that ran, in order.
    """
    a = x = pc = 0
    cells = [0] * MEM_WORDS
    while True:
        if path is not None:
            path.append(pc)
        code, jt, jf, k = insns[pc]
        pc += 1
        kind = code & 7
        if kind == 5:  # jumps
            if code == 0x05:
                pc += k
                continue
            other = x if code & 8 else k
            op = code & 0xF0
            if op == 0x10:
                taken = a == other
            elif op == 0x20:
                taken = a > other
            elif op == 0x30:
                taken = a >= other
            else:
                taken = a & other != 0
            pc += jt if taken else jf
        elif code == 0x20:
            a = int.from_bytes(data[k : k + 4], sys.byteorder)
        elif kind == 6:
            return k if code == 0x06 else a
        elif kind == 4:
            result = _alu(code, a, x if code & 8 else k)
            if result is None:
                return 0  # a division by zero ends the program with 0, and 0 kills
            a = result
        else:
            a, x = _move(code, k, a, x, cells)


def _alu(code: int, a: int, operand: int) -> int | None:
    if code == 0x84:
        return -a & U32
    name = ALU[code & 0xF0]
    if name == "div":
        return None if operand == 0 else a // operand
    shift = operand & 31  # the kernel masks a shift by X; a shift by K of 32 or more does not load
    return {
        "add": a + operand,
        "sub": a - operand,
        "mul": a * operand,
        "or": a | operand,
        "and": a & operand,
        "xor": a ^ operand,
        "lsh": a << shift,
        "rsh": a >> shift,
    }[name] & U32


def _move(code: int, k: int, a: int, x: int, cells: list[int]) -> tuple[int, int]:
    """Everything that only moves values: loads but ``ld abs``, stores, tax, txa."""
    match code:
        case 0x00:
            a = k
        case 0x01:
            x = k
        case 0x80:
            a = DATA_SIZE
        case 0x81:
            x = DATA_SIZE
        case 0x60:
            a = cells[k]
        case 0x61:
            x = cells[k]
        case 0x02:
            cells[k] = a
        case 0x03:
            cells[k] = x
        case 0x07:
            x = a
        case 0x87:
            a = x
        case _:
            raise BadProgram(f"opcode {code:#x}")
    return a, x
