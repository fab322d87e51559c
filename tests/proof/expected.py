"""What the filter must do, written from the kernel's documentation and from what sandboxes are known to
leak; casemate.isolation.process.filter was not read for it.

Every call of both tables is in exactly one of five groups. ``OPEN`` holds the calls on which careful people
decide either way (their harm is small or their use is rare): the proof only asks that the filter does with
them what its own published policy says.
"""

from __future__ import annotations

from typing import NamedTuple

EPERM, EACCES, EINVAL, ENOSYS, EAFNOSUPPORT = 1, 13, 22, 38, 97


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What ordinary programs (shells, compilers, interpreters, servers on loopback, test suites) stop working
# without. Allowed with any arguments.
ALLOWED = _names(
    """
    read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction
    rt_sigprocmask rt_sigreturn pread64 pwrite64 readv writev access pipe select sched_yield mremap
    msync mincore madvise shmget shmat shmctl shmdt dup dup2 pause nanosleep getitimer alarm setitimer
    getpid sendfile connect accept sendto recvfrom sendmsg recvmsg shutdown bind listen getsockname
    getpeername getsockopt fork vfork execve exit wait4 kill uname semget semop semctl msgget msgsnd
    msgrcv msgctl flock fsync fdatasync truncate ftruncate getdents getcwd chdir fchdir rename
    mkdir rmdir creat link unlink symlink readlink chmod fchmod chown fchown lchown umask gettimeofday
    getrlimit getrusage sysinfo times getuid getgid setuid setgid geteuid getegid setpgid getppid
    getpgrp setsid setreuid setregid getgroups setgroups setresuid getresuid setresgid getresgid getpgid
    setfsuid setfsgid getsid capget capset rt_sigpending rt_sigtimedwait rt_sigqueueinfo rt_sigsuspend
    sigaltstack utime statfs fstatfs getpriority setpriority sched_setparam sched_getparam
    sched_setscheduler sched_getscheduler sched_get_priority_max sched_get_priority_min
    sched_rr_get_interval mlock munlock mlockall munlockall arch_prctl setrlimit sync gettid readahead
    setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr
    removexattr lremovexattr fremovexattr tkill time futex sched_setaffinity sched_getaffinity
    epoll_create getdents64 set_tid_address restart_syscall semtimedop fadvise64 timer_create
    timer_settime timer_gettime timer_getoverrun timer_delete clock_gettime clock_getres clock_nanosleep
    exit_group epoll_wait epoll_ctl tgkill utimes mq_open mq_unlink mq_timedsend mq_timedreceive
    mq_notify mq_getsetattr waitid ioprio_set ioprio_get inotify_init inotify_add_watch inotify_rm_watch
    openat mkdirat fchownat futimesat newfstatat unlinkat renameat linkat symlinkat readlinkat fchmodat
    faccessat pselect6 ppoll set_robust_list get_robust_list splice tee sync_file_range utimensat
    epoll_pwait signalfd timerfd_create eventfd fallocate timerfd_settime timerfd_gettime accept4
    signalfd4 eventfd2 epoll_create1 dup3 pipe2 inotify_init1 preadv pwritev rt_tgsigqueueinfo recvmmsg
    prlimit64 syncfs sendmmsg getcpu sched_setattr sched_getattr renameat2 getrandom execveat membarrier
    mlock2 copy_file_range preadv2 pwritev2 pkey_mprotect pkey_alloc pkey_free statx rseq
    pidfd_send_signal pidfd_open close_range openat2 faccessat2 epoll_pwait2 landlock_create_ruleset
    landlock_add_rule landlock_restrict_self futex_waitv fchmodat2
    """
)

# Never, whatever the arguments and whatever word weakens the policy: they act on the whole machine, on other
# processes' secrets, or open parts of the kernel with a long history of holes.
DENIED = _names(
    """
    swapon swapoff reboot kexec_load kexec_file_load init_module finit_module delete_module
    create_module get_kernel_syms query_module acct quotactl quotactl_fd syslog settimeofday
    clock_settime iopl ioperm modify_ldt vhangup nfsservctl lookup_dcookie bpf perf_event_open
    userfaultfd io_uring_setup io_uring_enter io_uring_register keyctl add_key request_key
    name_to_handle_at open_by_handle_at fanotify_init fanotify_mark memfd_secret lsm_set_self_attr kcmp
    pidfd_getfd uselib _sysctl afs_syscall getpmsg putpmsg tuxcall security vserver migrate_pages move_pages
    """
)

# A way around a read-only or hidden path is a way to mount: allowed only by the word ``nested-userns``.
NESTED_ONLY = _names(
    """
    mount umount2 pivot_root chroot setns move_mount open_tree open_tree_attr fsopen fsconfig fsmount fspick
    mount_setattr sethostname setdomainname
    """
)

# Reading and writing another process: allowed only by the word ``ptrace``.
PTRACE_ONLY = _names("ptrace process_vm_readv process_vm_writev")

# Judged by their arguments, below.
BY_ARGUMENT = _names(
    "clone clone3 unshare socket socketpair setsockopt fcntl ioctl personality prctl memfd_create"
    " mknod mknodat"
)

OPEN = _names(
    """
    ustat sysfs set_thread_area get_thread_area epoll_ctl_old epoll_wait_old remap_file_pages adjtimex
    clock_adjtime io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents mbind set_mempolicy
    get_mempolicy set_mempolicy_home_node vmsplice seccomp process_madvise process_mrelease cachestat
    map_shadow_stack futex_wake futex_wait futex_requeue statmount listmount lsm_get_self_attr
    lsm_list_modules mseal setxattrat getxattrat listxattrat removexattrat file_getattr file_setattr
    uretprobe uprobe
    """
)


class Case(NamedTuple):
    """One call with arguments, and what must become of it: "allow", "deny", "open", or one errno."""

    name: str
    args: tuple[int, ...]
    want: str | int
    unless: str = ""  # the degrade word that turns the row round: then it must be allowed
    strict_memfd: bool = False  # holds only where the filter is the one that guards memfds


RUBBISH = (0, 1 << 32, 0xDEAD_BEEF << 32, 0xFFFF_FFFF << 32)  # what a caller may leave in the upper half

CLONE_FLAGS = {
    "CLONE_NEWNS": 0x0002_0000,
    "CLONE_NEWCGROUP": 0x0200_0000,
    "CLONE_NEWUTS": 0x0400_0000,
    "CLONE_NEWIPC": 0x0800_0000,
    "CLONE_NEWUSER": 0x1000_0000,
    "CLONE_NEWPID": 0x2000_0000,
    "CLONE_NEWNET": 0x4000_0000,
}
ALL_NAMESPACES = 0x7E02_0000
CLONE_PTRACE, CLONE_UNTRACED = 0x2000, 0x0080_0000
CLONE_NEWTIME = 0x80  # for unshare and clone3; in clone() the low byte is the exit signal
SIGCHLD = 17
USUAL_CLONES = (
    SIGCHLD,
    0x0120_0000 | SIGCHLD,  # fork of glibc: CHILD_SETTID | CHILD_CLEARTID
    0x003D_0F00,  # pthread_create
    0x0000_4100 | SIGCHLD,  # vfork and posix_spawn: VM | VFORK
    0x0000_1000 | SIGCHLD,  # with a pidfd
    0x8000_0000 | SIGCHLD,  # CLONE_IO
    0,
)


def clone_cases() -> list[Case]:
    """clone(): the kernel reads the lower half of the register, so rubbish above must change nothing."""
    namespaces = set(CLONE_FLAGS.values())
    cases = [Case("clone", (flags,), "allow") for flags in USUAL_CLONES]
    for flags in (1 << bit for bit in range(32)):
        if flags not in namespaces:
            cases.append(
                Case("clone", (flags,), "open" if flags in (CLONE_PTRACE, CLONE_UNTRACED) else "allow")
            )
            cases += [Case("clone", (high | flags,), "open") for high in RUBBISH]
            continue
        for usual in (*USUAL_CLONES, 0xFFFF_FFFF & ~ALL_NAMESPACES):
            cases += [Case("clone", (high | usual | flags,), "deny", "nested-userns") for high in RUBBISH]
    cases.append(Case("clone", (ALL_NAMESPACES | SIGCHLD,), "deny", "nested-userns"))
    # Its flags lie in memory, where no filter can look; with ENOSYS the C library falls back to clone().
    for pointer in (0, 0x7FFE_0000_1000):
        cases += [Case("clone3", (pointer, size), ENOSYS) for size in (64, 88)]
    for flags in (*CLONE_FLAGS.values(), CLONE_NEWTIME, ALL_NAMESPACES | CLONE_NEWTIME):
        cases += [Case("unshare", (flags | extra,), "deny", "nested-userns") for extra in (0, 0x200, 0x400)]
    cases += [Case("unshare", (1 << bit,), "open") for bit in range(64) if 1 << bit not in namespaces]
    cases += [Case("unshare", (flags,), "allow") for flags in (0x200, 0x400)]  # CLONE_FS, CLONE_FILES
    return cases


UNIX, INET, INET6, NETLINK, PACKET_FAMILY, ALG, VSOCK, XDP = 1, 2, 10, 16, 17, 38, 40, 44
STREAM, DGRAM, RAW, RDM, SEQPACKET, DCCP, PACKET = 1, 2, 3, 4, 5, 6, 10
TYPES = (STREAM, DGRAM, RAW, RDM, SEQPACKET, DCCP, PACKET)
CLOEXEC, NONBLOCK = 0x80000, 0x800
ICMP, TCP, UDP, ICMP6, SCTP, SMC, MPTCP = 1, 6, 17, 58, 132, 256, 262
# Numbers that Linux gives a meaning to (DCCP 33, L2TP 115, UDPLITE 136), and neighbours of the allowed.
PROTOCOLS = (0, ICMP, 2, 5, TCP, 7, 16, UDP, 18, 33, 47, ICMP6, 115, SCTP, 136, 255, SMC, 257, MPTCP, 263)


def socket_want(family: int, kind: int, protocol: int) -> str:
    """What must become of socket(family, kind, protocol)."""
    if family == UNIX:
        return "allow" if kind in (STREAM, DGRAM, SEQPACKET) and protocol == 0 else "open"
    if family == NETLINK:  # 0 is NETLINK_ROUTE, with which the C library lists interfaces
        return "deny" if protocol else "allow" if kind in (RAW, DGRAM) else "open"
    if family not in (INET, INET6):
        return "deny" if family else "open"
    if kind not in (STREAM, DGRAM):
        return "deny"
    if (kind, protocol) in ((STREAM, 0), (STREAM, TCP), (DGRAM, 0), (DGRAM, UDP)):
        return "allow"
    # Pings by datagram send nothing but echo requests; the kernel itself refuses a mismatched pair.
    return "open" if protocol in (TCP, UDP, ICMP, ICMP6) else "deny"


def socket_cases() -> list[Case]:
    """socket(): three ints, of which the kernel reads 32 bits each."""
    cases = []
    for family in range(47):
        for kind in TYPES:
            for protocol in PROTOCOLS:
                want = socket_want(family, kind, protocol)
                for flags in (0, CLOEXEC | NONBLOCK):
                    cases.append(Case("socket", (family, kind | flags, protocol), want))
    denied = [(VSOCK, STREAM, 0), (PACKET_FAMILY, RAW, 3), (ALG, SEQPACKET, 0), (XDP, RAW, 0)]
    denied += [(INET, STREAM, MPTCP), (INET6, STREAM, MPTCP), (INET, STREAM, SMC), (INET, STREAM, SCTP)]
    denied += [(INET, SEQPACKET, SCTP), (INET, RAW, 255), (NETLINK, RAW, 12)]
    for row in denied:
        for place in range(3):
            for high in RUBBISH:
                args = tuple(value | high if index == place else value for index, value in enumerate(row))
                cases += [
                    Case("socket", (args[0], args[1] | flags, args[2]), "deny") for flags in (0, CLOEXEC)
                ]
    for family in (47, 255, 0xFFFF, 0x7FFF_FFFF, 0xFFFF_FFFF):
        cases.append(Case("socket", (family, STREAM, 0), "deny"))
    for kind in (STREAM, DGRAM, SEQPACKET):
        for flags in (0, CLOEXEC, NONBLOCK):
            cases.append(Case("socketpair", (UNIX, kind | flags, 0, 0x7FFE_0000), "allow"))
    for family in range(47):
        if family not in (0, UNIX):
            cases.append(Case("socketpair", (family, STREAM, 0, 0x7FFE_0000), "deny"))
    # SO_REUSEADDR, TCP_NODELAY, TCP_FASTOPEN (the network namespace holds that one), IP_TTL; then TCP_ULP
    cases += [Case("setsockopt", (3, *option), "allow") for option in ((1, 2), (6, 1), (6, 23), (0, 2))]
    cases += [Case("setsockopt", (3, 6 | high, 31 | high), "open") for high in RUBBISH]
    return cases


# Leases (fcntl(2), "File and directory leases") and delegations make other programs' open() wait.
F_SETLEASE, F_SETDELEG = 1024, 1024 + 16


def fcntl_cases() -> list[Case]:
    """fcntl(): the command is an unsigned int; everything but taking a lease is the caller's own affair."""
    leases = (F_SETLEASE, F_SETDELEG)
    cases = [Case("fcntl", (3, command | high), "deny") for command in leases for high in RUBBISH]
    # F_DUPFD to F_GETOWNER_UIDS, F_OFD_*, F_GETLEASE to F_DUPFD_CLOEXEC, F_SETPIPE_SZ to F_SET_FILE_RW_HINT
    usual = [*range(18), 36, 37, 38, *range(1025, 1028), 1030, *range(1031, 1039)]
    return cases + [Case("fcntl", (3, command | high), "allow") for command in usual for high in RUBBISH]


TIOCSTI, TIOCLINUX = 0x5412, 0x541C
USUAL_IOCTLS = {
    "TCGETS": 0x5401,
    "TCSETS": 0x5402,
    "TCSETSW": 0x5403,
    "TCSETSF": 0x5404,
    "TIOCSCTTY": 0x540E,
    "TIOCGPGRP": 0x540F,
    "TIOCSPGRP": 0x5410,
    "TIOCGWINSZ": 0x5413,
    "TIOCSWINSZ": 0x5414,
    "FIONREAD": 0x541B,
    "FIONBIO": 0x5421,
    "TIOCNOTTY": 0x5422,
    "FIONCLEX": 0x5450,
    "FIOCLEX": 0x5451,
    "FIOASYNC": 0x5452,
    "TIOCGPTN": 0x8004_5430,
    "TIOCSPTLCK": 0x4004_5431,
    "TIOCGPTPEER": 0x5441,
    "FICLONE": 0x4004_9409,
    "FS_IOC_GETFLAGS": 0x8008_6601,
    "SIOCGIFCONF": 0x8912,
    "SIOCGIFFLAGS": 0x8913,
}


def ioctl_cases() -> list[Case]:
    """ioctl(): the command is an unsigned int; what stands above it is ignored by the kernel."""
    cases = [Case("ioctl", (0, command), "allow") for command in USUAL_IOCTLS.values()]
    for command in (TIOCSTI, TIOCLINUX):
        cases += [Case("ioctl", (fd, high | command), "deny") for high in RUBBISH for fd in (0, 255, 1 << 63)]
    return cases


def other_cases() -> list[Case]:
    """personality, prctl, memfd_create, mknod."""
    cases = [Case("personality", (persona,), "allow") for persona in (0xFFFF_FFFF, 0)]
    for persona in (0x0040_0000, 0x0010_0000, 0x0040_0008):  # READ_IMPLIES_EXEC, MMAP_PAGE_ZERO
        cases += [Case("personality", (high | persona,), "deny") for high in RUBBISH]
    cases += [Case("personality", (1 << bit,), "open") for bit in range(33)]
    # PDEATHSIG, GET_DUMPABLE, SET_NAME, GET_NAME, CAPBSET_READ, SUBREAPER, NO_NEW_PRIVS and its question
    cases += [Case("prctl", (option, 1), "allow") for option in (1, 3, 15, 16, 23, 36, 37, 38, 39)]
    cases += [Case("prctl", (option, 1), "open") for option in range(100)]
    for flags in range(0x20):
        for high in RUBBISH:
            args = (0x7FFE_0000, high | flags)
            if flags & 0x10:  # MFD_EXEC
                cases.append(Case("memfd_create", args, "deny", "memfd-exec", strict_memfd=True))
            elif flags & 0x08:  # MFD_NOEXEC_SEAL
                cases.append(Case("memfd_create", args, "allow"))
            else:  # executable, unless the pid namespace's vm.memfd_noexec says otherwise
                cases.append(Case("memfd_create", args, "deny", "memfd-exec", strict_memfd=True))
    for call, before in (("mknod", (0x7FFE_0000,)), ("mknodat", (3, 0x7FFE_0000))):
        for mode in (0o010644, 0o100644, 0o644):  # a FIFO, and a regular file in both spellings
            cases.append(Case(call, (*before, mode, 0), "allow"))
        for mode in (0o020000, 0o060600):  # devices; 0:0 is what an overlay takes for a deletion
            for high in (*RUBBISH, 0x1_0000, 0x8001_0000):  # the kernel reads 16 bits of the mode
                cases.append(Case(call, (*before, mode | high, 0), "deny"))
        cases += [Case(call, (*before, kind << 12, 0), "open") for kind in range(16)]
    return cases


CASES = [*clone_cases(), *socket_cases(), *fcntl_cases(), *ioctl_cases(), *other_cases()]
