"""The probe table: 45 rows, each with its acts, its judge and the control that shows it can succeed."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.security import judge
from tests.security.lab import DEEP, NESTED

BOTH = ("root", "uid1000")


@dataclasses.dataclass(frozen=True)
class Row:
    """One attack.

    ``control`` names the engine under which the act succeeds; ``control_modes`` who may do it there: what
    needs privilege on a bare host has its control as root only. ``impossible`` lists the parts that a
    control cannot show in a mode, with the reason in a comment beside it.
    """

    id: str
    title: str
    acts: tuple[str, ...]
    judge: judge.Judge
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    flags: tuple[str, ...] = ()
    tty: bool = False
    fd: bool = False
    census: bool = False
    control: str = "bare"
    control_modes: tuple[str, ...] = BOTH
    impossible: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    alive: bool = True
    may_die: bool = False
    seconds: float = 60.0


LIMITS = ("--pids", "256", "--memory", "512M", "--disk", "256M")
ROOT = ("root",)

ROWS: tuple[Row, ...] = (
    Row("read-ssh-key", "read $HOME/.ssh/id_rsa", ("files.read_ssh",),
        judge.data_holds_secret("files.read_ssh")),
    Row("read-shadow", "read /etc/shadow", ("files.read_shadow",), judge.shadow, control_modes=ROOT),
    Row("write-outside", "write outside the workspace", ("files.outside_write",), judge.outside_write),
    Row(
        "git-hooks-config", "write .git/hooks and .git/config", ("files.git_config",),
        judge.planted(".git/hooks/pre-commit", ".git/config"), {"gits": [".git"]},
    ),
    Row(
        "nested-git-hooks", "write the hooks of a nested repository, also a deep one", ("files.git_config",),
        judge.planted(
            f"{NESTED}/.git/hooks/pre-commit", f"{DEEP}/.git/hooks/pre-commit",
            f"{NESTED}/.git/config", f"{DEEP}/.git/config",
        ),
        {"gits": [f"{NESTED}/.git", f"{DEEP}/.git"]},
    ),
    Row(
        "tool-config", "write .mcp.json, .vscode, .claude/settings.json, .bashrc", ("files.names",),
        judge.planted(".mcp.json", ".vscode/settings.json", ".claude/settings.json", ".bashrc"),
        {"names": [".mcp.json", ".vscode/settings.json", ".claude/settings.json", ".bashrc"]},
    ),
    Row(
        "codex-config", "write .codex/config.toml", ("files.names",), judge.planted(".codex/config.toml"),
        {"names": [".codex/config.toml"]},
    ),
    Row(
        "envrc-bin", "write .envrc; change node_modules/.bin/eslint unseen", ("files.names",),
        judge.envrc_and_bin,
        {"names": [".envrc"], "executables": ["node_modules/.bin/eslint"]},
    ),
    Row("symlink-out", "write through links to the outside, existing and made", ("files.symlinks_out",),
        judge.symlinks_out),
    Row("hardlink-existing", "write through a hard link that was there", ("files.hardlink_existing",),
        judge.outside_any),
    Row("hardlink-made", "hard-link a file of the outside and write it", ("files.hardlink_made",),
        judge.outside_any),
    Row("move-git", "move .git away and plant a new one", ("files.move_git",), judge.planted_hook),
    Row(
        "pivot-root", "undo a carve-out by user namespace and pivot_root", ("files.pivot_escape",),
        judge.planted_hook, control="bwrap-carve-out", control_modes=("uid1000",),
    ),
    Row("move-parent", "move the parent of a nested repository, plant a hook", ("files.move_parent",),
        judge.planted_hook),
    Row("pid1-environ", "the secret in /proc/1/environ and its neighbours", ("procs.environ_of_all",),
        judge.data_holds_secret("procs.environ_of_all")),
    Row("proc-root", "write through /proc/{self,1,PID}/root", ("files.proc_root",), judge.outside_any),
    Row("host-pid-visible", "see a process of the host", ("procs.host_pids",), judge.host_pids),
    Row(
        "ptrace-host", "ptrace, process_vm_readv, /proc/PID/mem of a host process",
        ("procs.ptrace_peek", "procs.vm_readv", "procs.proc_mem"),
        judge.data_holds_secret("procs.ptrace_peek", "procs.vm_readv", "procs.proc_mem"),
    ),
    Row("kill-host", "kill and renice a host process", ("procs.signal_victim", "procs.renice"),
        judge.kill_and_renice),
    Row("tcp-loopback", "TCP to the host's loopback", ("net.tcp",),
        judge.arrived(v4="tcp4:", v6="tcp6:", mapped="map:")),
    Row("tcp-fastopen-mptcp", "TCP by MSG_FASTOPEN and by MPTCP", ("net.fastopen", "net.mptcp"),
        judge.arrived(fastopen="tfo:", mptcp="mptcp:")),
    Row("udp-dns", "UDP and DNS to the host", ("net.udp",), judge.arrived(udp="udp:", dns="dns")),
    Row("abstract-unix", "abstract unix sockets of the host", ("net.abstract",),
        judge.arrived(stream="as:", dgram="ad:")),
    Row("path-unix", "unix sockets of the host with a path", ("net.path_unix",),
        judge.arrived(stream="ps:", dgram="pd:")),
    Row(
        "raw-packet", "raw and packet sockets", ("net.sockets",),
        judge.keys_ok("net.sockets", "raw", "packet", below="made"),
        {"sockets": [["raw", 2, 3, 1], ["packet", 17, 3, 0x0300]]}, control_modes=ROOT,
    ),
    Row(
        "vsock", "AF_VSOCK sockets", ("net.sockets",),
        judge.keys_ok("net.sockets", "stream", "high", below="made"),
        # The kernel reads 32 bits of the family; a filter that compares 64 would let the second one pass.
        {"sockets": [["stream", 40, 1, 0], ["high", (1 << 32) | 40, 1, 0]]},
    ),
    Row("io-uring", "io_uring_setup", ("kernel.io_uring",), judge.record_ok("kernel.io_uring")),
    Row("userfaultfd", "userfaultfd", ("kernel.userfaultfd",), judge.record_ok("kernel.userfaultfd")),
    Row("bpf-perf", "bpf and perf_event_open", ("kernel.bpf", "kernel.perf"),
        judge.record_ok("kernel.bpf", "kernel.perf"), control_modes=ROOT),
    Row("add-key", "add_key and keyctl", ("kernel.add_key",), judge.record_ok("kernel.add_key")),
    Row("mount", "mount, by the old and the new interface", ("kernel.mount_old", "kernel.mount_new"),
        judge.mounts, control="private-mounts", control_modes=ROOT),
    Row("user-namespace", "unshare and clone3 of a user namespace",
        ("kernel.unshare_user", "kernel.clone_user"),
        lambda seen: {**judge.record_ok("kernel.unshare_user")(seen),
                      **judge.keys_ok("kernel.clone_user", "clone", "clone3", "clone-high")(seen)}),
    Row("tiocsti", "push input into the host's terminal", ("kernel.tiocsti",), judge.tiocsti,
        {"inject": "INJECT"}, tty=True),
    Row("memfd-exec", "execute a program from a memfd", ("kernel.memfd_exec",), judge.memfd,
        control="degrade-memfd"),
    Row("forks-600", "600 processes at once under --pids 256", ("limits.forks",), judge.forks,
        {"count": 600, "hold": 1.0}, LIMITS, census=True, control="defaults", may_die=True, alive=False),
    Row("memory-1g", "touch 1 GiB under --memory 512M", ("limits.touch",), judge.touched,
        {"mib": 1024, "hold": 0.0}, LIMITS, control="defaults", may_die=True, alive=False),
    Row("disk-400m", "write 400 MiB under --disk 256M", ("limits.write_file",), judge.written,
        {"mib": 400, "hold": 0.0}, LIMITS, control="defaults", may_die=True, alive=False),
    Row("dev-kvm", "open /dev/kvm", ("kernel.kvm",), judge.record_ok("kernel.kvm"), control_modes=ROOT),
    Row("core-pattern", "write /proc/sys/kernel/core_pattern", ("kernel.core_pattern",),
        judge.record_ok("kernel.core_pattern"), control_modes=ROOT),
    Row("env-secret", "a secret of the caller's environment", ("procs.own_environ",),
        judge.data_holds_secret("procs.own_environ")),
    Row("inherited-fd", "use a descriptor of the caller", ("procs.inherited_fds",), judge.inherited, fd=True),
    Row("symlink-race", "swap a directory against a link for 2 s", ("files.race",), judge.outside_any,
        {"seconds": 2.0}),
    Row("daemon", "a detached process outlives the command", ("procs.daemon",), judge.daemon),
    Row("shared-tmp", "the host's /tmp", ("files.shared_tmp",), judge.shared_tmp),
    Row("root-powers", "set the clock, read the kernel log, keep capabilities",
        ("kernel.clock", "kernel.dmesg", "procs.privileges"), judge.root_powers, control_modes=ROOT),
)  # fmt: skip

BY_ID = {row.id: row for row in ROWS}
