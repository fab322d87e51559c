"""The filter of a sandbox whose workspace is changed directly, proven as the other one is.

Written from what the calls do, not from the filter: every call that could change a file or a name waits for
the broker, nothing else does, and nothing that waits would otherwise have been refused.
"""

from __future__ import annotations

import pytest

from casemate.isolation.process import filter as subject
from casemate.isolation.process.broker import CALLS
from casemate.sys.bpf import NOTIFY, Action, When
from tests.proof.cbpf import Insn, decode, run, seccomp_data, verdict
from tests.proof.numbers import ARCHES, TABLES
from tests.proof.points import VECTORS, around

EPERM, ENOSYS = 1, 38
WAITS = "user-notif"
RUBBISH = (0, 1 << 32, 0xDEAD_BEEF << 32)

# By path or by descriptor, whatever the arguments.
ALWAYS = set(
    """
    creat mkdir mkdirat unlink rmdir unlinkat symlink symlinkat rename renameat renameat2 link linkat truncate
    chmod fchmod fchmodat fchmodat2 chown lchown fchown fchownat utime utimes futimesat utimensat umask
    setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat
    """.split()
)
# Their flags lie in memory, or they act past every filter, or promise what the broker does not know of.
ABSENT = set(
    "openat2 io_uring_setup io_uring_enter io_uring_register "
    "landlock_create_ruleset landlock_add_rule landlock_restrict_self".split()
)
BY_ARGUMENT = {"open", "openat", "access", "faccessat", "faccessat2", "mknod", "mknodat"}
each_arch = pytest.mark.parametrize("arch", ARCHES)


def program(arch: str) -> list[Insn]:
    return decode(subject.build(arch, direct=True))


def ask(insns: list[Insn], arch: str, name: str, args: tuple[int, ...]) -> tuple[str, int]:
    found = verdict(run(insns, seccomp_data(TABLES[arch][name], ARCHES[arch], args)))
    return found.action, found.data


@each_arch
def test_what_waits(arch: str) -> None:
    """The calls that change something wait, and only they do; the rest is as without a broker."""
    insns, plain = program(arch), decode(subject.build(arch))
    for name in TABLES[arch]:
        for args in VECTORS:
            got = ask(insns, arch, name, args)
            if name in ALWAYS:
                assert got == (WAITS, 0), name
            elif name in ABSENT:
                assert got == ("errno", ENOSYS), name
            elif name not in BY_ARGUMENT:
                assert got == ask(plain, arch, name, args), name


@each_arch
def test_openings(arch: str) -> None:
    """Opening waits if it could change anything: access mode, making, emptying; reading never waits."""
    insns = program(arch)
    for name, index in (("open", 1), ("openat", 2)):
        if name not in TABLES[arch]:
            continue
        for high in RUBBISH:
            for flags in range(1 << 12):
                args = (0,) * index + (high | flags,)
                changes = flags & 3 or flags & 0o100 or flags & 0o1000
                assert ask(insns, arch, name, args) == ((WAITS, 0) if changes else ("allow", 0)), oct(flags)
            for flags in (0o20200001, 0o20200002, 0o20040002):  # O_TMPFILE, on either machine
                assert ask(insns, arch, name, (0,) * index + (high | flags,)) == (WAITS, 0)


@each_arch
def test_questions(arch: str) -> None:
    """Whether something can be written is asked of the broker; whether it can be read, of the kernel."""
    insns = program(arch)
    for name, index in (("access", 1), ("faccessat", 2), ("faccessat2", 2)):
        if name in TABLES[arch]:
            for mode in range(8):
                want = (WAITS, 0) if mode & 2 else ("allow", 0)
                assert ask(insns, arch, name, (0,) * index + (mode,)) == want


@each_arch
def test_nodes(arch: str) -> None:
    """Devices stay refused; what could be made otherwise waits."""
    insns = program(arch)
    for name, index in (("mknod", 1), ("mknodat", 2)):
        if name in TABLES[arch]:
            for kind in range(16):
                want = (WAITS, 0) if kind << 12 in (0, 0x8000, 0x1000, 0xC000) else ("errno", EPERM)
                assert ask(insns, arch, name, (0,) * index + (kind << 12 | 0o644,)) == want


@each_arch
def test_program_is_the_table(arch: str) -> None:
    """The program does for each call, at every value that a rule compares with, what its table says."""
    insns = program(arch)
    for name, rule in subject.policy(direct=True).items():
        if name not in TABLES[arch]:
            continue
        for args in ((), *around(rule)):
            decided = rule
            while isinstance(decided, When):
                test = decided.test
                value = (args[test.index] if test.index < len(args) else 0) & ((1 << test.bits) - 1)
                decided = decided.then if value & test.mask in test.values else decided.otherwise
            assert isinstance(decided, Action)
            found = verdict(decided.value)
            assert ask(insns, arch, name, args) == (found.action, found.data), (name, args)


def test_the_broker_takes_what_waits() -> None:
    """Each call that may wait has somebody who answers it, and nobody waits for what never comes."""

    def waits(rule: object) -> bool:
        return rule == NOTIFY or (isinstance(rule, When) and (waits(rule.then) or waits(rule.otherwise)))

    assert {name for name, rule in subject.policy(direct=True).items() if waits(rule)} == set(CALLS)
    assert set(CALLS) == ALWAYS | BY_ARGUMENT


@each_arch
def test_the_brokers_own(arch: str) -> None:
    """The broker starts nothing, connects nowhere, touches no other process but by reading its memory."""
    insns = decode(subject.broker(arch))
    refused = (
        "execve execveat fork vfork clone clone3 ptrace process_vm_writev kill socket connect setns mount"
    )
    for name in refused.split():
        if name in TABLES[arch]:
            assert ask(insns, arch, name, ())[0] == "errno", name
    for (
        name
    ) in "read write openat openat2 ioctl process_vm_readv unlinkat renameat2 linkat fchmodat close".split():
        assert ask(insns, arch, name, ()) == ("allow", 0), name
    plain = decode(subject.build(arch))
    for name in TABLES[arch]:
        if name != "process_vm_readv" and ask(insns, arch, name, ()) == ("allow", 0):
            assert ask(plain, arch, name, ()) == ("allow", 0), f"{name}: more than a sandbox may"
