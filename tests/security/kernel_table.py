"""Kernel interfaces that a command must not reach, as data: each with what a bare root gets instead.

``bare`` is the errno that the same call gives root without a sandbox (0: it succeeds). It shows that the
call is well formed and gets past the permission check there. None of the calls changes the host.
"""

from __future__ import annotations

import errno

# The kernel may be built without these; then the call has no control here and is only shown refused.
ABSENT = -1
REFUSED = (errno.EPERM, errno.ENOSYS, errno.EACCES, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)

# label, call, arguments, what bare root gets
CALLS: tuple[tuple[str, str, list[object], int], ...] = (
    ("unshare-user", "unshare", [0x10000000], 0),
    ("unshare-user-high-bits", "unshare", [(1 << 33) | 0x10000000], errno.EINVAL),
    ("unshare-mount", "unshare", [0x20000], 0),
    ("unshare-net", "unshare", [0x40000000], 0),
    ("unshare-pid", "unshare", [0x20000000], 0),
    ("unshare-time", "unshare", [0x80], 0),
    ("chroot", "chroot", ["/"], 0),
    ("pivot-root", "pivot_root", ["/", "/"], errno.EBUSY),
    ("umount", "umount2", ["/nowhere", 2], errno.ENOENT),
    ("mount-nowhere", "mount", ["none", "/nowhere", "tmpfs", 0, 0], errno.ENOENT),
    ("fsopen", "fsopen", ["tmpfs", 0], 0),
    ("fspick", "fspick", [-100, "/", 0], 0),
    ("open-tree-clone", "open_tree", [-100, "/tmp", 1], 0),
    ("move-mount", "move_mount", [-1, "", -1, "", 0], errno.ENOENT),
    ("fsmount", "fsmount", [-1, 0, 0], errno.EBADF),
    ("fsconfig", "fsconfig", [-1, 0, 0, 0, 0], errno.EINVAL),
    ("mount-setattr", "mount_setattr", [-100, "/nowhere", 0, "buf:32", 32], 0),
    ("setns-nothing", "setns", [-1, 0], errno.EBADF),
    ("personality-read-implies-exec", "personality", [0x0400000], 0),
    ("personality-page-zero", "personality", [0x0100000], 0),
    ("personality-foreign", "personality", [0x0400000 | 0x6], 0),
    ("keyctl-get-keyring", "keyctl", [0, -3, 1], 0),
    ("request-key", "request_key", ["user", "casemate-probe", 0, 0], errno.ENOKEY),
    ("add-key", "add_key", ["user", "casemate-probe", "x", 1, -1], 0),
    ("io-uring", "io_uring_setup", [4, "buf:256"], 0),
    ("userfaultfd-user-mode", "userfaultfd", [1], 0),
    ("userfaultfd", "userfaultfd", [0], 0),
    ("bpf-map", "bpf", [0, "buf:120", 120], errno.EINVAL),
    ("perf", "perf_event_open", ["buf:128", 0, -1, -1, 0], errno.ENOENT),
    ("fanotify", "fanotify_init", [0, 0], 0),
    ("fanotify-unprivileged", "fanotify_init", [0x200, 0], 0),
    ("swapon", "swapon", ["/nowhere", 0], errno.ENOENT),
    ("acct", "acct", ["/nowhere"], errno.ENOENT),
    ("reboot-bad-magic", "reboot", [1, 2, 3, 0], errno.EINVAL),
    ("kexec-load-too-many", "kexec_load", [0, 1000, 0, 0], ABSENT),
    ("iopl", "iopl", [3], ABSENT),
    ("ioperm", "ioperm", [0x80, 1, 1], ABSENT),
    ("settimeofday-nothing", "settimeofday", [0, 0], 0),
    ("syslog-size", "syslog", [10, 0, 0], 0),
    ("quotactl", "quotactl", [0x80000700, "/nowhere", 0, 0], errno.ENOENT),
    ("process-vm-readv-1", "process_vm_readv", [1, 0, 0, 0, 0, 0], 0),
    ("kcmp-nobody", "kcmp", [0x3FFFFF, 0x3FFFFF, 2, 0, 0], errno.ESRCH),
    ("ptrace-seize-nobody", "ptrace", [0x4206, 0x3FFFFF, 0, 0], errno.ESRCH),
    ("pidfd-getfd", "pidfd_getfd", [-1, 0, 0], errno.EBADF),
    ("process-madvise", "process_madvise", [-1, "buf:16", 1, 20, 0], errno.EBADF),
    ("name-to-handle", "name_to_handle_at", [-100, "/nowhere", "buf:8", "buf:8", 0], errno.ENOENT),
    ("open-by-handle", "open_by_handle_at", [-1, "buf:8", 0], errno.EINVAL),
    ("modify-ldt", "modify_ldt", [0, "buf:16", 16], 0),
    ("lookup-dcookie", "lookup_dcookie", [0, "buf:16", 16], ABSENT),
    ("init-module", "init_module", ["buf:64", 64, ""], ABSENT),
    ("finit-module", "finit_module", [-1, "", 0], ABSENT),
)

# Families that no ordinary program needs. AF_UNIX, AF_INET, AF_INET6 stay; AF_NETLINK only as ROUTE.
FAMILIES = tuple(number for number in range(46) if number not in (0, 1, 2, 10, 16))
SOCKETS: tuple[tuple[str, int, int, int], ...] = (
    *((f"family-{number}-type-{kind}", number, kind, 0) for number in FAMILIES for kind in (1, 2, 3, 5)),
    ("vsock-high-bits", (1 << 32) | 40, 1, 0),
    ("packet-all", 17, 3, 0x0300),
    ("packet-dgram", 17, 2, 0x0300),
    ("raw-icmp", 2, 3, 1),
    ("raw-any", 2, 3, 255),
    ("raw-v6", 10, 3, 58),
    ("mptcp", 2, 1, 262),
    ("mptcp-v6", 10, 1, 262),
    ("mptcp-flags", 2, 1 | 0o2000000 | 0o4000, 262),
    ("mptcp-high-bits", 2, 1, (1 << 32) | 262),
    ("sctp", 2, 1, 132),
    ("sctp-seqpacket", 2, 5, 132),
    ("udplite", 2, 2, 136),
    ("dccp", 2, 6, 33),
    ("smc", 43, 1, 0),
    *((f"netlink-{number}", 16, 3, number) for number in (3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 15, 16, 18)),
)

# Files of the kernel that change the host. They are opened for writing and closed again, nothing more.
SWITCHES = (
    "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/sysrq",
    "/proc/sys/kernel/randomize_va_space", "/proc/sys/kernel/hostname", "/proc/sys/kernel/panic",
    "/proc/sys/kernel/pid_max", "/proc/sys/kernel/perf_event_paranoid", "/proc/sys/vm/overcommit_memory",
    "/proc/sys/vm/drop_caches", "/proc/sys/vm/mmap_min_addr", "/proc/sys/vm/panic_on_oom",
    "/proc/sys/fs/suid_dumpable", "/proc/sys/fs/protected_symlinks", "/proc/sys/fs/file-max",
    "/proc/sys/net/ipv4/ip_forward", "/proc/sys/user/max_user_namespaces", "/proc/sys/dev/tty/legacy_tiocsti",
    "/proc/sysrq-trigger", "/proc/irq/default_smp_affinity", "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/power/state", "/sys/kernel/uevent_helper", "/sys/fs/cgroup/cgroup.procs",
    "/sys/fs/cgroup/memory/cgroup.procs", "/sys/fs/cgroup/memory/release_agent",
    "/sys/fs/cgroup/pids/notify_on_release", "/dev/mem", "/dev/port", "/dev/vda", "/dev/kvm", "/dev/fuse",
    "/dev/loop-control", "/dev/loop0", "/dev/vsock", "/dev/net/tun", "/dev/console", "/dev/tty0", "/dev/kmsg",
)  # fmt: skip
