"""The number tables and the policy table: complete, right, and small once assembled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from casemate.isolation.process.filter import DEFAULT, POLICY, WORDS, build, policy
from casemate.sys.bpf import ALLOW, Action, Errno, verify
from casemate.sys.syscalls import AUDIT_ARCH, TABLES, native

X86_HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
GENERIC_HEADER = Path("/usr/include/asm-generic/unistd.h")
ENOSYS, EPERM = Errno(38), Errno(1)


def numbers_of(header: Path, *defines: str) -> dict[str, int]:
    """The names and numbers that a header gives to the compiler, on a 64-bit machine."""
    ran = subprocess.run(
        ["cc", "-E", "-dM", *(f"-D{name}" for name in defines), str(header)],
        check=True,
        capture_output=True,
        text=True,
    )
    macros = dict(re.findall(r"^#define (\w+) (\w+)$", ran.stdout, re.MULTILINE))
    found: dict[str, int] = {}
    for name, value in macros.items():
        while not value.isdigit() and value in macros:
            value = macros[value]
        if name.startswith("__NR_") and value.isdigit():
            found[name.removeprefix("__NR_")] = int(value)
    return found


def test_the_x86_64_numbers_are_those_of_the_kernels_header() -> None:
    """Every name that the installed header knows has its number here; the header may be older."""
    header = numbers_of(X86_HEADER)
    assert len(header) > 350
    assert header.items() <= TABLES["x86_64"].items()


def test_the_aarch64_numbers_are_those_of_the_kernels_generic_header() -> None:
    """As above, with the switches that the aarch64 header sets before it includes the generic one."""
    header = numbers_of(
        GENERIC_HEADER,
        "__ARCH_WANT_RENAMEAT",
        "__ARCH_WANT_NEW_STAT",
        "__ARCH_WANT_SET_GET_RLIMIT",
        "__ARCH_WANT_SYS_CLONE3",
        "__ARCH_WANT_MEMFD_SECRET",
    )
    for bound in ("syscalls", "arch_specific_syscall"):
        del header[bound]
    assert len(header) > 300
    assert header.items() <= TABLES["aarch64"].items()


def test_the_newest_numbers() -> None:
    """What current headers may not have yet; these were taken from Linux 7.0."""
    newest = {"cachestat": 451, "fchmodat2": 452, "map_shadow_stack": 453, "futex_requeue": 456}
    newest |= {"statmount": 457, "listmount": 458, "lsm_list_modules": 461, "mseal": 462, "setxattrat": 463}
    newest |= {"removexattrat": 466, "open_tree_attr": 467, "file_setattr": 469, "listns": 470}
    for table in TABLES.values():
        assert newest.items() <= table.items()
        assert len(set(table.values())) == len(table)
    assert TABLES["x86_64"]["uretprobe"] == 335
    assert TABLES["x86_64"]["uprobe"] == 336
    assert TABLES.keys() == AUDIT_ARCH.keys()
    assert native() in TABLES


def test_every_call_is_decided_by_name() -> None:
    """The policy table names each call of each number table, and none that does not exist."""
    assert set(POLICY) == {name for table in TABLES.values() for name in table}
    assert DEFAULT == ENOSYS


def test_no_call_is_named_twice() -> None:
    """A name in two groups would silently get the later one."""
    from casemate.isolation.process import filter as module

    words = f"{module._ALLOWED} {module._REFUSALS} {module._NOT_THERE}".split() + list(module._JUDGED)
    assert len(words) == len(set(words)) == len(POLICY)


@pytest.mark.parametrize("arch", sorted(TABLES))
@pytest.mark.parametrize("words", [frozenset[str](), WORDS], ids=["no word", "every word"])
@pytest.mark.parametrize("strict_memfd", [False, True])
def test_the_program_stays_small(arch: str, words: frozenset[str], strict_memfd: bool) -> None:
    """A bound on what every process of every sandbox carries; the program passes the kernel's checks."""
    program = build(arch, words=words, strict_memfd=strict_memfd)
    verify(program)
    assert len(program) // 8 <= 220
    assert build(arch, words=frozenset(words), strict_memfd=strict_memfd) is program


def test_each_word_gives_back_what_it_names_and_no_more() -> None:
    """A degrade word changes the calls it is about; the rest of the table is the same rule."""

    def changed(*words: str, strict_memfd: bool = False) -> set[str]:
        table = policy(frozenset(words), strict_memfd=strict_memfd)
        assert set(table) == set(POLICY)
        return {name for name, rule in table.items() if rule is not POLICY[name]}

    assert changed() == set()
    assert changed("network-host") == set()
    assert changed("memfd-exec") == set()
    assert changed("ptrace") == {"ptrace", "process_vm_readv", "process_vm_writev"}
    nested = changed("nested-userns")
    assert {"clone", "unshare", "setns", "mount", "pivot_root", "fsopen"} < nested
    assert not nested & {"bpf", "keyctl", "io_uring_setup", "open_by_handle_at", "socket", "clone3", "ptrace"}
    assert changed(strict_memfd=True) == {"memfd_create"}
    assert changed("memfd-exec", strict_memfd=True) == set()


def test_a_word_the_filter_does_not_know_is_refused() -> None:
    """A misspelt word must not be taken for no word."""
    with pytest.raises(ValueError, match="nested-usrns"):
        build("x86_64", words=frozenset({"nested-usrns"}))
    with pytest.raises(KeyError):
        build("riscv64")


def test_what_programs_look_for_when_they_fall_back() -> None:
    """clone3 and vmsplice are absent, not forbidden: libraries fall back after ENOSYS only."""
    for words in (frozenset[str](), WORDS):
        table = policy(words)
        for name in ("clone3", "vmsplice", "listns"):
            assert table[name] == ENOSYS
        for name in ("io_uring_setup", "keyctl", "bpf", "userfaultfd", "pidfd_getfd", "kexec_load"):
            assert table[name] == EPERM


def test_the_hot_calls_are_decided_by_number_alone() -> None:
    """The kernel does not even run the filter for a call that is allowed whatever its arguments."""
    hot = "read write openat close mmap munmap mprotect madvise futex newfstatat epoll_wait recvmsg execve"
    for name in hot.split():
        assert POLICY[name] is ALLOW
    judged = [name for name, rule in POLICY.items() if not isinstance(rule, Action)]
    rare = "clone fcntl ioctl mknod mknodat personality prctl seccomp setsockopt socket socketpair unshare"
    assert sorted(judged) == rare.split()


def test_building_imports_little() -> None:
    """The filter is built on the way to every command: neither ctypes nor typing come with it."""
    script = "import sys; from casemate.isolation.process.filter import build; build('x86_64');"
    script += "print(*sorted({'typing', 'ctypes', 'enum', 're', 'dataclasses'} & set(sys.modules)))"
    source = str(Path(__file__).parents[3] / "src")
    ran = subprocess.run(
        [sys.executable, "-S", "-c", script],
        env={**os.environ, "PYTHONPATH": source},
        check=True,
        capture_output=True,
        text=True,
    )
    assert ran.stdout.split() == []
