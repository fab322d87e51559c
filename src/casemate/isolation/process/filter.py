"""Which system calls a sandboxed program may make: a table by name, and the filter built from it.

The table is an allow-list. A call that no group names, so every call that a newer kernel adds, fails
with ENOSYS: the C library and the language runtimes then fall back to what they used before it existed.
That includes numbers above the last known one, among them the whole x32 range (from 0x40000000), and on
x86_64 the numbers 512 to 547, which older kernels also served to 64-bit callers, with x32 semantics.

What is refused on purpose fails with EPERM, as it would for want of a capability, or with the error of a
kernel that lacks the feature where programs are known to look for that one. Nothing is killed for a
forbidden call; only calls through another instruction set (``int 0x80``) kill, because their numbers
mean something else and the table does not speak of them.

The filter is the inner wall. Most of what it refuses would fail anyway for want of a capability; it is
refused here so that neither a bug behind that check nor a mistake in dropping the capability matters.
It is the only wall for: user namespaces, io_uring, userfaultfd, keyrings, AF_VSOCK and the other socket
families, TIOCSTI, and (where the pid namespace's sysctl cannot be set) executable memfds.
"""

from __future__ import annotations

from errno import (
    EACCES,
    EAFNOSUPPORT,
    EINVAL,
    ENOENT,
    ENOSYS,
    EOPNOTSUPP,
    EPERM,
    EPROTONOSUPPORT,
    ESOCKTNOSUPPORT,
)

from casemate.sys.bpf import ALLOW, NOTIFY, Arg, Errno, Rule, When, assemble
from casemate.sys.syscalls import AUDIT_ARCH, TABLES

TYPE_CHECKING = False  # importing typing for its constant takes longer than all of this module
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEFAULT", "POLICY", "WORDS", "broker", "build", "policy"]

# The words of the policy's degrade list that change the table.
WORDS = frozenset({"memfd-exec", "nested-userns", "network-host", "ptrace"})

_REFUSED = Errno(EPERM)
_ABSENT = Errno(ENOSYS)

# For numbers in no table, and for the calls named under _NOT_THERE.
DEFAULT: Rule = _ABSENT

# --- Allowed whatever the arguments ---------------------------------------------------------------------

_ALLOWED = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek close close_range dup dup2
dup3 flock pipe pipe2 sendfile splice tee copy_file_range
poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2
eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime
inotify_init inotify_init1 inotify_add_watch inotify_rm_watch
io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents

open openat openat2 creat stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2
getcwd chdir fchdir getdents getdents64 readlink readlinkat mkdir mkdirat rmdir unlink unlinkat rename
renameat renameat2 link linkat symlink symlinkat truncate ftruncate fallocate fadvise64 readahead
chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat umask utime utimes futimesat utimensat
setxattr lsetxattr fsetxattr setxattrat getxattr lgetxattr fgetxattr getxattrat listxattr llistxattr
flistxattr listxattrat removexattr lremovexattr fremovexattr removexattrat file_getattr file_setattr
sync syncfs fsync fdatasync sync_file_range

mmap munmap mremap mprotect msync madvise mincore brk mlock mlock2 munlock mlockall munlockall
pkey_mprotect pkey_alloc pkey_free mseal membarrier map_shadow_stack get_mempolicy

fork vfork execve execveat exit exit_group wait4 waitid kill tkill tgkill pidfd_open pidfd_send_signal
getpid getppid gettid getpgrp getpgid setpgid getsid setsid set_tid_address restart_syscall
getpriority setpriority ioprio_get ioprio_set getrlimit setrlimit prlimit64 getrusage times
sched_yield sched_getaffinity sched_setaffinity sched_getparam sched_setparam sched_getscheduler
sched_setscheduler sched_getattr sched_setattr sched_get_priority_max sched_get_priority_min
sched_rr_get_interval getcpu
futex futex_waitv futex_wake futex_wait futex_requeue set_robust_list get_robust_list rseq arch_prctl

rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait rt_sigqueueinfo
rt_tgsigqueueinfo sigaltstack pause alarm getitimer setitimer
nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time
timer_create timer_settime timer_gettime timer_getoverrun timer_delete

getuid geteuid getresuid getgid getegid getresgid getgroups setuid setreuid setresuid setfsuid setgid
setregid setresgid setfsgid setgroups capget capset
uname sysinfo getrandom

connect bind listen accept accept4 shutdown getsockname getpeername getsockopt sendto recvfrom sendmsg
recvmsg sendmmsg recvmmsg
shmget shmat shmdt shmctl semget semop semtimedop semctl msgget msgsnd msgrcv msgctl
mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr

landlock_create_ruleset landlock_add_rule landlock_restrict_self

uretprobe uprobe
"""
# Notes on the list:
# - splice and tee move pages between pipes and files (CVE-2022-0847, fixed long before the kernels this
#   project needs); Go, Rust's std::fs::copy and coreutils rely on them. vmsplice is another matter, below.
# - io_setup and its family are the old asynchronous input and output of databases, not io_uring. They
#   work on open descriptors only; their quota (fs.aio-max-nr) is the host's, which no filter can share out.
# - get_mempolicy only reads; libnuma calls it when it is loaded and complains aloud if it fails.
# - set*id and capset can do no more than the capabilities left, which are none; tests of such programs
#   and su-like tools want the kernel's own answer.
# - Landlock only ever takes away; tools that confine themselves go on doing so.
# - uretprobe and uprobe are made by the kernel's own trampoline when the *host* traces a binary that the
#   sandbox runs; refused, they crash it. Called by hand they only kill the caller.

# --- Refused with EPERM ------------------------------------------------------------------------------

_REFUSALS = """
mount umount2 pivot_root chroot move_mount open_tree open_tree_attr fsopen fsconfig fsmount fspick
mount_setattr setns

ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd process_madvise

open_by_handle_at name_to_handle_at fanotify_init fanotify_mark

io_uring_setup io_uring_enter io_uring_register userfaultfd bpf perf_event_open memfd_secret
keyctl add_key request_key

mbind set_mempolicy set_mempolicy_home_node migrate_pages move_pages

kexec_load kexec_file_load init_module finit_module delete_module create_module query_module
get_kernel_syms reboot swapon swapoff acct quotactl quotactl_fd syslog sethostname setdomainname vhangup
settimeofday clock_settime clock_adjtime adjtimex
iopl ioperm modify_ldt
uselib ustat sysfs lookup_dcookie nfsservctl lsm_set_self_attr
"""
# Line by line:
# - Mounts and namespaces. With a user namespace of its own a program is root there: it can move the
#   read-only mounts and masks of the sandbox away (pivot_root, then umount2 of the old root), and reach
#   kernel code that was written for root (CVE-2022-0185 in fsconfig; nf_tables: CVE-2022-32250,
#   CVE-2024-1086; OverlayFS: CVE-2023-0386). clone, clone3 and unshare are judged further down.
# - Other processes' memory and descriptors. The pid namespace hides the host's processes; this keeps the
#   sandbox's programs from one another and from pid 1. The word ptrace gives back the first three, which
#   debuggers use. process_madvise has no use on oneself that madvise has not.
# - Handles open any inode of a file system past every mount (CVE-2014-3519 and "shocker"); fanotify
#   reports on whole mounts and hands out descriptors.
# - Kernel interfaces with a long record of exploited bugs, and their helpers. io_uring also performs file
#   and socket operations that no filter sees (CVE-2022-29582, CVE-2023-2598); userfaultfd stops the kernel
#   in the middle of a copy, which turns its smallest races into sure wins; bpf (CVE-2021-3490,
#   CVE-2023-2163); perf (CVE-2013-2094, CVE-2023-2235). memfd_secret hides memory from the host. Keyrings
#   know no namespace but the user namespace: without one of its own, a sandbox shares the quota, and where
#   the uid is shared also the keys, with the host (bugs too: CVE-2016-0728).
# - Placement of memory on NUMA nodes. numpy, OpenBLAS and the JVM go on without it (Docker refuses it
#   too); it has its own bugs (CVE-2017-7616, CVE-2023-4611) and move_pages tells about other processes.
# - The machine itself: kernel, modules, swap, clocks, names, log.
# - Ports and descriptor tables of the processor (CVE-2017-17053 and others in modify_ldt). Only
#   Wine and DOSEMU need modify_ldt.
# - Relics without users.

# --- As if the kernel had never heard of them (ENOSYS) --------------------------------------------------

_NOT_THERE = """
clone3
vmsplice
statmount listmount listns
process_mrelease cachestat remap_file_pages rseq_slice_yield lsm_get_self_attr lsm_list_modules
_sysctl getpmsg putpmsg afs_syscall tuxcall security vserver set_thread_area get_thread_area
epoll_ctl_old epoll_wait_old
"""
# - clone3 has its flags behind a pointer, where a filter cannot look; glibc falls back to clone after
#   ENOSYS, and after nothing else.
# - vmsplice lends pages to a pipe: with it a forked child could read what its parent wrote later
#   (CVE-2020-29374), and sandboxes are forked from warm interpreters. Who uses it for speed (some
#   builds of yes) goes on with write after ENOSYS, not always after EPERM.
# - util-linux falls back to /proc/self/mountinfo; listns shows what namespaces there are.
# - Nothing ordinary uses the next line. The rest has had no implementation on 64 bit for many years, if
#   ever.

# --- Decided by an argument -------------------------------------------------------------------------------
# ``bits`` follows from the kernel's own declaration of each parameter, named on each.

# clone(unsigned long flags, ...): the kernel takes lower_32_bits(flags). CLONE_NEWTIME (0x80) lies within
# the byte that clone reads as the exit signal and cuts off before it looks at flags, so clone cannot make
# a time namespace; only clone3 and unshare can. Every other bit of the word is a flag without a namespace.
_NEW_NAMESPACES = 0x7E020000  # NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_CLONE = When(Arg(0, 0, mask=_NEW_NAMESPACES), ALLOW, _REFUSED)

# unshare(unsigned long flags): the kernel looks at all 64 bits. Files, fs, sysvsem and the no-ops of a
# single thread are the caller's own affair; all else is a namespace, NEWTIME too, or will be one.
_UNSHARE_HARMLESS = 0x100 | 0x200 | 0x400 | 0x800 | 0x10000 | 0x40000
_UNSHARE = When(Arg(0, 0, bits=64, mask=(1 << 64) - 1 & ~_UNSHARE_HARMLESS), ALLOW, _REFUSED)

# socket(int family, int type, int protocol); type carries SOCK_CLOEXEC and SOCK_NONBLOCK above its four bits.
# The rest of the families are kernel code that nobody needs in a build and that was exploited again and
# again (AF_PACKET: CVE-2017-7308, CVE-2020-14386; AF_VSOCK: CVE-2021-26708; AF_ALG, CAN, TIPC, RDS, KCM,
# XDP, ...). VSOCK reaches the hypervisor's host past every network namespace. NETLINK_ROUTE is how
# getifaddrs (glibc, libuv) lists interfaces; other netlink protocols are administration.
# MPTCP (262), SCTP (132), DCCP (33), UDPLITE (136) and SMC (256) are refused as kernels without them would:
# Go tries MPTCP for listeners and falls back. With Landlock's TCP rules MPTCP would be a way around.
# CPython's own test_socket takes UDPLITE for granted and fails there, as on kernels without it.
_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
_STREAM, _DGRAM, _RAW = 1, 2, 3
_PROTOCOLS = (0, 1, 6, 17, 58)  # any, ICMP (ping by datagram), TCP, UDP, ICMPv6
_SOCKET = When(
    Arg(0, _UNIX),
    ALLOW,
    When(
        Arg(0, _INET, _INET6),
        When(
            Arg(1, _STREAM, _DGRAM, mask=0xF),
            When(Arg(2, *_PROTOCOLS), ALLOW, Errno(EPROTONOSUPPORT)),
            When(Arg(1, _RAW, mask=0xF), _REFUSED, Errno(ESOCKTNOSUPPORT)),
        ),
        When(
            Arg(0, _NETLINK),
            When(Arg(2, 0), ALLOW, Errno(EPROTONOSUPPORT)),
            Errno(EAFNOSUPPORT),
        ),
    ),
)
# socketpair(int family, ...): the kernel has it for unix sockets (and TIPC).
_SOCKETPAIR = When(Arg(0, _UNIX), ALLOW, When(Arg(0, _INET, _INET6), Errno(EOPNOTSUPP), Errno(EAFNOSUPPORT)))

# setsockopt(int fd, int level, int name, ...): TCP_ULP puts kernel TLS and others onto a socket, without any
# capability; a frequent way into the kernel (CVE-2023-0461, CVE-2024-26583). OpenSSL asks for it only if
# told to, and goes on without. ENOENT is what a kernel without the module says.
_SOL_TCP, _TCP_ULP = 6, 31
_SETSOCKOPT = When(Arg(1, _SOL_TCP), When(Arg(2, _TCP_ULP), Errno(ENOENT), ALLOW), ALLOW)

# fcntl(unsigned int fd, unsigned int command, ...): a lease (F_SETLEASE, F_SETDELEG) makes whoever opens the
# file wait for its holder, up to fs.lease-break-time (45 s), again and again. What a sandbox may only read is
# the host's own file, and so are they who wait. EINVAL is what file systems without leases say.
_F_SETLEASE, _F_SETDELEG = 1024, 1040
_FCNTL = When(Arg(1, _F_SETLEASE, _F_SETDELEG), Errno(EINVAL), ALLOW)

# ioctl(unsigned int fd, unsigned int command, ...). TIOCSTI types into the terminal, TIOCLINUX pastes and
# TIOCCONS redirects the console (CVE-2017-5226 and its like: what is typed runs outside when the sandbox
# has ended); TIOCSETD loads line disciplines, old drivers that take no capability (CVE-2017-2636,
# CVE-2023-6546). A pty of one's own does not make them needed. Other commands are the business of the
# device or file system that is opened; /dev holds none that is dangerous, and what administers a file
# system (FIBMAP, FITRIM, FIFREEZE, the BLK family) takes a capability in each of them.
_TIOCSTI, _TIOCLINUX, _TIOCCONS, _TIOCSETD = 0x5412, 0x541C, 0x541D, 0x5423
_IOCTL = When(Arg(1, _TIOCSTI, _TIOCLINUX, _TIOCCONS, _TIOCSETD), _REFUSED, ALLOW)

# personality(unsigned int): the plain ones, and 0x40000 (no address randomisation: gdb, sanitizers); all bits
# set only asks. READ_IMPLIES_EXEC, MMAP_PAGE_ZERO and the foreign system personalities are refused.
_PERSONALITY = When(Arg(0, 0, 0x8, 0x20000, 0x20008, 0x40000, 0xFFFFFFFF), ALLOW, _REFUSED)

# mknod(path, umode_t mode, dev), mknodat(dir, path, umode_t mode, dev); umode_t has 16 bits. Devices are
# refused: regular files, FIFOs and sockets remain. Also a character device 0:0, which takes no capability
# and is what overlays read as "deleted".
_FILE_TYPES = (0, 0x8000, 0x1000, 0xC000)
_MKNOD = When(Arg(1, *_FILE_TYPES, mask=0xF000), ALLOW, _REFUSED)
_MKNODAT = When(Arg(2, *_FILE_TYPES, mask=0xF000), ALLOW, _REFUSED)

# seccomp(unsigned int operation, unsigned int flags, ...): filters on top only take away. Not so
# NEW_LISTENER (8): only one filter of a chain may have one, and it is kept for the operator's own tracing;
# EINVAL as before Linux 5.0. Only SET_MODE_FILTER (1) takes flags of this kind.
_SECCOMP = When(Arg(0, 1), When(Arg(1, 0, mask=0x8), ALLOW, Errno(EINVAL)), ALLOW)

# prctl(int option, ...): an allow-list, since options are added with every kernel and some are not about the
# caller alone. EINVAL is what a kernel says that does not know the option.
_PRCTL_OPTIONS = (
    *(1, 2),  # SET/GET_PDEATHSIG
    *(3, 4),  # GET/SET_DUMPABLE
    *(7, 8, 23, 24, 27, 28, 47),  # KEEPCAPS, CAPBSET_*, SECUREBITS, CAP_AMBIENT: cannot give what is gone
    *(13, 14, 15, 16),  # TIMING, NAME
    *(21, 22),  # GET/SET_SECCOMP: SET without the flags of seccomp(2)
    *(25, 26),  # GET/SET_TSC
    *(29, 30),  # TIMERSLACK
    *(33, 34),  # MCE_KILL: what a memory error does to the caller
    *(36, 37, 38, 39),  # CHILD_SUBREAPER, NO_NEW_PRIVS
    *(41, 42),  # THP_DISABLE
    *(50, 51, 63, 64),  # aarch64: vector lengths of SVE and SME
    *(52, 53),  # SPECULATION_CTRL of the caller
    *(54, 55, 56, 60, 61),  # aarch64: pointer authentication, tagged addresses
    *(65, 66),  # MDWE: memory that is writable is never executable
    *(74, 75, 76),  # shadow stack
    0x41555856,  # GET_AUXV
    0x53564D41,  # SET_VMA: names for anonymous memory (glibc, Go)
    0x59616D61,  # SET_PTRACER: crash handlers; means nothing while ptrace is refused
)
# Known and refused: SET_MM (a false command line in /proc), the perf switches, SET_IO_FLUSHER,
# SCHED_CORE (makes other programs' cores idle), MEMORY_MERGE (merged pages tell what others hold).
_PRCTL_REFUSED = (31, 32, 35, 57, 58, 62, 67, 68)
_PRCTL = When(Arg(0, *_PRCTL_OPTIONS), ALLOW, When(Arg(0, *_PRCTL_REFUSED), _REFUSED, Errno(EINVAL)))

# memfd_create(name, unsigned int flags), where the pid namespace's vm.memfd_noexec cannot be set (rootless:
# the file belongs to the host's root). A filter cannot add a flag, so what does not ask for a sealed,
# non-executable file is told that there are none: callers then use a file in /tmp or /dev/shm. Who asks for
# an executable one gets the answer that the sysctl gives.
_MFD_NOEXEC_SEAL, _MFD_EXEC = 0x8, 0x10
_MEMFD_STRICT = When(
    Arg(1, 0, mask=_MFD_EXEC),
    When(Arg(1, _MFD_NOEXEC_SEAL, mask=_MFD_NOEXEC_SEAL), ALLOW, _ABSENT),
    Errno(EACCES),
)

_JUDGED: Mapping[str, Rule] = {
    "clone": _CLONE,
    "unshare": _UNSHARE,
    "socket": _SOCKET,
    "socketpair": _SOCKETPAIR,
    "setsockopt": _SETSOCKOPT,
    "fcntl": _FCNTL,
    "ioctl": _IOCTL,
    "personality": _PERSONALITY,
    "mknod": _MKNOD,
    "mknodat": _MKNODAT,
    "seccomp": _SECCOMP,
    "prctl": _PRCTL,
    "memfd_create": ALLOW,
}


def _rules(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


# Every call of every table, once (a test says so).
POLICY: Mapping[str, Rule] = {
    **_rules(_ALLOWED, ALLOW),
    **_rules(_REFUSALS, _REFUSED),
    **_rules(_NOT_THERE, _ABSENT),
    **_JUDGED,
}

# --- The degrade words ------------------------------------------------------------------------------------

# ptrace: debuggers, strace, leak sanitizers.
_WITH_PTRACE = "ptrace process_vm_readv process_vm_writev"

# nested-userns: sandboxes, containers and browsers inside. All of the first refused line comes back.
# Netlink stays at NETLINK_ROUTE, so nf_tables does not come with it. clone3 could do no more now than clone
# and unshare, but whoever calls it can do without.
_WITH_USERNS = """
clone unshare setns mount umount2 pivot_root chroot move_mount open_tree open_tree_attr fsopen
fsconfig fsmount fspick mount_setattr statmount listmount sethostname setdomainname seccomp
"""


# --- A workspace that is changed directly ------------------------------------------------------------------

# What could change a file waits for the broker, which carries it out where it means the workspace and lets
# the rest through. None of this is a wall: the sandbox's own mount of the workspace is read-only, and the
# broker never lets a call through because of what it has seen in memory. Set-id bits of a mode are the
# exception, since they could be put on a file that the broker has opened: they lie in a register, and a call
# with them is never let through.
# Asked about without conditions: calls that are rare, or whose every use would fail on a read-only mount.
_ACTS = """
creat mkdir mkdirat unlink rmdir unlinkat symlink symlinkat rename renameat renameat2 link linkat truncate
chmod fchmod fchmodat fchmodat2 chown lchown fchown fchownat utime utimes futimesat utimensat
setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat
"""
# open(path, int flags, mode), openat(dir, path, int flags, mode): any access mode but reading, O_CREAT, and
# O_TRUNC, which empties a file whatever the access mode is. O_TMPFILE wants an access mode for writing.
_CHANGING = 0o3 | 0o100 | 0o1000
# access(path, int mode), faccessat(dir, path, int mode): W_OK, which a read-only mount answers by EROFS.
_W_OK = 2
_WITH_BROKER: Mapping[str, Rule] = {
    **dict.fromkeys(_ACTS.split(), NOTIFY),
    "open": When(Arg(1, 0, mask=_CHANGING), ALLOW, NOTIFY),
    "openat": When(Arg(2, 0, mask=_CHANGING), ALLOW, NOTIFY),
    "access": When(Arg(1, 0, mask=_W_OK), ALLOW, NOTIFY),
    "faccessat": When(Arg(2, 0, mask=_W_OK), ALLOW, NOTIFY),
    "faccessat2": When(Arg(2, 0, mask=_W_OK), ALLOW, NOTIFY),
    "mknod": When(Arg(1, *_FILE_TYPES, mask=0xF000), NOTIFY, _REFUSED),
    "mknodat": When(Arg(2, *_FILE_TYPES, mask=0xF000), NOTIFY, _REFUSED),
    "umask": NOTIFY,  # only so that the broker knows that it has changed
    # Their flags lie in memory. Who gets ENOSYS uses openat, and read and write.
    "openat2": _ABSENT,
    **dict.fromkeys(("io_uring_setup", "io_uring_enter", "io_uring_register"), _ABSENT),
    # The broker does not know what a program has forbidden itself, so it shall not count on it.
    **dict.fromkeys(
        ("landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"), _ABSENT
    ),
}

# What the broker itself needs no more once it serves. It starts nothing and connects nowhere.
_NOT_FOR_BROKER = """
execve execveat fork vfork clone ptrace process_vm_writev kill tkill tgkill pidfd_send_signal pidfd_open
socket socketpair connect bind listen accept accept4 setns unshare
setuid setreuid setresuid setfsuid setgid setregid setresgid setfsgid setgroups capset memfd_create
"""


def broker(arch: str) -> bytes:
    """The program for the broker of a directly changed workspace: less than a sandbox has, but it may read
    the memory of other processes. Raises KeyError for an unknown machine.
    """
    numbers = TABLES[arch]
    table = {**POLICY, **_rules(_NOT_FOR_BROKER, _REFUSED), "process_vm_readv": ALLOW}
    return assemble(AUDIT_ARCH[arch], {number: table[name] for name, number in numbers.items()}, DEFAULT)


def policy(
    words: frozenset[str] = frozenset(), *, strict_memfd: bool = False, direct: bool = False
) -> dict[str, Rule]:
    """The table under some degrade words; ``direct``: with a broker.

    ``strict_memfd`` is for a sandbox whose pid namespace has no vm.memfd_noexec of its own; the word
    ``memfd-exec`` wins over it. ``network-host`` changes nothing here: the socket rules hold for the host's
    network too. Raises ValueError for a word that is not in ``WORDS``.
    """
    if not words <= WORDS:
        raise ValueError(f"not words of the filter: {sorted(words - WORDS)}")
    table = dict(POLICY)
    if strict_memfd and "memfd-exec" not in words:
        table["memfd_create"] = _MEMFD_STRICT
    if "ptrace" in words:
        table.update(_rules(_WITH_PTRACE, ALLOW))
    if "nested-userns" in words:
        table.update(_rules(_WITH_USERNS, ALLOW))
    if direct:
        table.update(_WITH_BROKER)
    return table


# Found in fewer steps by kernels that run the filter for allowed calls too (before 5.11).
_FREQUENT = (
    "read write close fstat newfstatat stat lstat openat lseek mmap munmap mprotect brk futex poll "
    "epoll_wait epoll_pwait recvmsg sendmsg rt_sigprocmask rt_sigaction clock_nanosleep ioctl"
)

_built: dict[tuple[str, frozenset[str], bool, bool], bytes] = {}


def build(
    arch: str, *, words: frozenset[str] = frozenset(), strict_memfd: bool = False, direct: bool = False
) -> bytes:
    """The filter program for ``x86_64`` or ``aarch64``. The same arguments give the same object.

    Raises KeyError for another machine and ValueError as ``policy`` does.
    """
    key = (arch, words, strict_memfd, direct)
    program = _built.get(key)
    if program is None:
        numbers = TABLES[arch]
        table = policy(words, strict_memfd=strict_memfd, direct=direct)
        rules = {number: table[name] for name, number in numbers.items()}
        frequent = [numbers[name] for name in _FREQUENT.split() if name in numbers]
        program = assemble(AUDIT_ARCH[arch], rules, DEFAULT, frequent=frequent)
        _built[key] = program
    return program
