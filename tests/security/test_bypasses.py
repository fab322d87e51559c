"""System calls, sockets, devices, kernel files, terminals and processes: every way around the boundary."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest

from tests.security import kernel_table as table
from tests.security.engines import Bwrap, Request, acts_command

if TYPE_CHECKING:
    from tests.conftest import Runner
    from tests.security.lab import Scene

pytestmark = [pytest.mark.security, pytest.mark.root]


def made(record: dict[str, Any]) -> list[str]:
    """The labels of a record that succeeded."""
    inner = record.get("made", record)
    return sorted(key for key, value in inner.items() if isinstance(value, dict) and value.get("ok"))


def test_calls_are_refused(casemate: Runner, scene: Scene) -> None:
    """Every listed call is refused as such: not for its arguments, but because nobody may make it."""
    calls = [[label, name, args] for label, name, args, _ in table.CALLS]
    got = casemate.acts("kernel.calls", calls=calls).records["kernel.calls"]["made"]
    wrong = {
        label: value
        for label, value in got.items()
        if value.get("ok") or ("signal" not in value and value.get("errno") not in table.REFUSED)
    }
    assert not wrong, f"not refused: {wrong}"


def test_calls_work_for_a_bare_root(worlds: Any) -> None:
    """The control of the list: the same calls get past the permission check without a sandbox."""
    world = worlds("root")
    scene = world.scene()
    try:
        from tests.conftest import Runner

        calls = [[label, name, args] for label, name, args, _ in table.CALLS]
        got = Runner(scene).bare("kernel.calls", calls=calls).records["kernel.calls"]["made"]
        wrong = {
            label: got[label]
            for label, _, _, code in table.CALLS
            if code != table.ABSENT and (0 if got[label].get("ok") else got[label].get("errno")) != code
        }
        assert not wrong, wrong
    finally:
        scene.close()


def test_socket_families(casemate: Runner, worlds: Any) -> None:
    """Only unix, IPv4 and IPv6 sockets with plain TCP or UDP can be made."""
    sockets = [list(row) for row in table.SOCKETS]
    opened = made(casemate.acts("net.sockets", sockets=sockets).records["net.sockets"])
    assert not opened, opened
    usual = [["tcp", 2, 1, 0], ["tcp6", 10, 1, 6], ["udp", 2, 2, 17], ["unix", 1, 1, 0], ["seq", 1, 5, 0]]
    assert len(made(casemate.acts("net.sockets", sockets=usual).records["net.sockets"])) == len(usual)
    scene = worlds("root").scene()
    try:
        bare = made(casemate.__class__(scene).bare("net.sockets", sockets=sockets).records["net.sockets"])
        assert {"mptcp", "raw-icmp", "packet-all", "vsock-high-bits", "mptcp-high-bits"} <= set(bare), bare
    finally:
        scene.close()


def test_other_system_call_tables(casemate: Runner, scene: Scene) -> None:
    """Neither the x32 numbers nor int 0x80 reach the kernel's other tables."""
    record = casemate.acts("kernel.other_tables").records["kernel.other_tables"]
    assert not record["x32"].get("ok"), record
    assert not record["int80"].get("ok"), record
    control = casemate.bare("kernel.other_tables").records["kernel.other_tables"]
    # This needs a kernel with ia32. x32 has no control where the kernel was built without it.
    assert control["int80"].get("ok"), control


def test_namespaces(casemate: Runner, scene: Scene) -> None:
    """No namespace of any kind can be made or joined."""
    outcome = casemate.acts("kernel.unshare_each", "kernel.clone_user", "kernel.setns_all")
    for act, record in outcome.records.items():
        assert not made({k: v for k, v in record.items() if k != "act"}), f"{act}: {record}"
    control = casemate.bare("kernel.unshare_each", "kernel.clone_user").records
    assert "user+net" in made(control["kernel.unshare_each"])
    assert set(made(control["kernel.clone_user"])) == {"clone", "clone3", "clone-high"}


def test_kernel_switches(casemate: Runner, worlds: Any) -> None:
    """No file of /proc, /sys or /dev that changes the host opens for writing."""
    paths = list(table.SWITCHES)
    opened = made(casemate.acts("kernel.open_writable", paths=paths).records["kernel.open_writable"])
    assert not opened, opened
    scene = worlds("root").scene()
    try:
        bare = casemate.__class__(scene).bare("kernel.open_writable", paths=paths)
        found = made(bare.records["kernel.open_writable"])
        assert len(found) > 25, f"the control opens too few to mean anything: {found}"
        assert {"/proc/sys/kernel/core_pattern", "/sys/power/state", "/dev/kvm"} <= set(found)
    finally:
        scene.close()


def test_devices(casemate: Runner, worlds: Any) -> None:
    """/dev holds the harmless devices only, and no node can be made and opened."""
    outcome = casemate.acts("kernel.device_list", "kernel.make_devices")
    devices = outcome.records["kernel.device_list"]["devices"]
    harmless = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)}
    odd = [row for row in devices if (row[2], row[3]) not in harmless and row[2] != 136]
    assert not odd, odd
    names = {row[0] for row in devices}
    assert {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"} <= names
    assert not made(outcome.records["kernel.make_devices"])
    scene = worlds("root").scene()
    try:
        bare = casemate.__class__(scene).bare("kernel.make_devices").records["kernel.make_devices"]
        # A kernel without /dev/mem or a group of devices may refuse the others even to root.
        assert "kmsg" in made(bare), bare
    finally:
        scene.close()


def test_file_handles(casemate: Runner, worlds: Any) -> None:
    """A file cannot be opened by its handle, which would need no path."""
    record = casemate.acts("kernel.handles").records["kernel.handles"]
    assert not record["opened"]["ok"], record
    assert record["opened"]["errno"] in table.REFUSED, record
    scene = worlds("root").scene()
    try:
        bare = casemate.__class__(scene).bare("kernel.handles").records["kernel.handles"]
        assert bare["opened"]["ok"], bare
    finally:
        scene.close()


def test_cgroup_file_systems(casemate: Runner, worlds: Any) -> None:
    """No cgroup file system is writable, and the group's path on the host is not shown."""
    record = casemate.acts("kernel.cgroup_release_agent", mkdir=True).records["kernel.cgroup_release_agent"]
    assert not record["writable"], record
    assert "casemate" not in record["cgroup"], record["cgroup"]
    scene = worlds("root").scene()
    try:
        bare = casemate.__class__(scene).bare("kernel.cgroup_release_agent", mkdir=False)
        assert bare.records["kernel.cgroup_release_agent"]["writable"]
    finally:
        scene.close()


def test_pid_one_is_closed(casemate: Runner, worlds: Any) -> None:
    """Nothing about the sandbox's pid 1 can be read, traced or taken."""
    record = casemate.acts("seal.pid_one").records["seal.pid_one"]
    assert not made(record), record
    scene = worlds("root").scene()
    try:
        # Under bubblewrap pid 1 is an ordinary process: never the host's own init.
        peer = Bwrap()
        peer.extra = ("--unshare-pid",)
        outcome = peer.run(Request(scene, acts_command(scene, ["seal.pid_one"])))
        assert {"environ", "fd", "root", "ptrace"} <= set(made(outcome.records["seal.pid_one"]))
    finally:
        scene.close()


def test_terminal_of_the_host(casemate: Runner, scene: Scene) -> None:
    """A command with a terminal gets one of its own; the host's is not there under any name."""
    outcome = casemate.acts("kernel.terminal_of_host", "kernel.tiocsti", how={"tty": True}, inject="INJECT")
    identity = outcome.tty_identity
    ttys = outcome.records["kernel.tiocsti"]["ttys"]
    assert ttys, "the command was to have a terminal"
    assert identity not in ttys
    reached = outcome.records["kernel.terminal_of_host"]["made"]
    same = [path for path, value in reached.items() if value.get("dev") == identity[0]]
    assert not same, reached
    assert not [path for path, value in reached.items() if value.get("stolen")]
    assert not outcome.tty_input
    assert outcome.tty_canonical, "the terminal was left in another mode"
    control = casemate.bare("kernel.tiocsti", how={"tty": True}, inject="INJECT")
    assert control.tty_identity in control.records["kernel.tiocsti"]["ttys"]
    assert "INJECT" in control.tty_input


def test_signals_by_the_kernel(casemate: Runner, scene: Scene) -> None:
    """A socket's owner signal does not reach a process of the host."""
    victim = scene.world.victim
    victim.signals()
    casemate.acts("procs.owner_signal")
    assert victim.signals() == 0
    casemate.bare("procs.owner_signal")
    assert victim.signals() > 0, "the control did not deliver"


def test_priority_of_host_processes(casemate: Runner, scene: Scene) -> None:
    """setpriority by process, by group and for all of one's user leaves the host's processes alone."""
    victim = scene.world.victim
    try:
        casemate.acts("procs.renice", by_user=True)
        assert victim.nice() == 0
        casemate.bare("procs.renice", by_user=False)
        assert victim.nice() == 7, "the control did not change it"
    finally:
        victim.restore()


def test_watching(casemate: Runner, worlds: Any) -> None:
    """fanotify is refused; inotify works, for what is visible."""
    record = casemate.acts("kernel.watch_everything").records["kernel.watch_everything"]
    assert not record["fanotify"]["ok"], record
    assert record["inotify"]["ok"], record
    scene = worlds("root").scene()
    try:
        bare = casemate.__class__(scene).bare("kernel.watch_everything").records["kernel.watch_everything"]
        assert bare["fanotify"]["ok"]
    finally:
        scene.close()


def test_setuid_programs_gain_nothing(casemate: Runner, scene: Scene) -> None:
    """A setuid-root program of the host runs as the caller inside; bare it runs as root."""
    import shutil

    program = scene.world.base / "programs/setuid-id"
    program.parent.mkdir()
    shutil.copy("/usr/bin/id", program)
    program.chmod(0o4755)
    try:
        flags = ("--read", str(program.parent))
        record = casemate.acts("procs.setuid_program", flags=flags, programs=[str(program)])
        ran = record.records["procs.setuid_program"]
        assert ran["uid"] != 0 or scene.world.uid != 0
        assert ran["ran"][str(program)] == str(ran["uid"]), ran
        # EINVAL where the namespace does not even know uid 0.
        denied = {f"errno {errno.EPERM}", f"errno {errno.EINVAL}"}
        assert {ran["ran"]["setuid"], ran["ran"]["setgid"]} <= denied, ran
        if scene.world.uid:
            bare = casemate.bare("procs.setuid_program", programs=[str(program)])
            assert bare.records["procs.setuid_program"]["ran"][str(program)] == "0"
    finally:
        shutil.rmtree(program.parent)


def test_memfd_by_its_word_only(casemate: Runner, scene: Scene) -> None:
    """memfd programs run under the word `memfd-exec` and not without it (each flag, both ways to exec)."""
    from tests.security.matrix import DEGRADE_MEMFD

    act = "kernel.memfd_exec"
    assert not made(casemate.acts(act).records[act])
    policy = scene.ws.parent / "policy.toml"
    policy.write_text(DEGRADE_MEMFD)
    outcome = casemate.acts(act, flags=("--policy", str(policy)))
    assert set(made(outcome.records[act])) == {"plain", "cloexec", "exec"}, outcome.brief()
    assert "memfd-exec" in str(outcome.report.get("degraded")), "a degrade word is shown in the result"


def test_high_bits_of_the_terminal_call(casemate: Runner, scene: Scene) -> None:
    """TIOCSTI and TIOCLINUX are refused on the command's own terminal too, whatever the upper bits are."""
    record = casemate.acts("kernel.tiocsti", how={"tty": True}, inject="x").records["kernel.tiocsti"]
    assert not record["plain"], record
    assert not record["high"], record
    assert not record["linux"], record
