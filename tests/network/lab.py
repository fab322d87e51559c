"""The lab host: a machine made of namespaces, on which ``casemate`` runs, with an internet beside it.

Nothing of the real machine changes, and nothing of the lab can leave it: the lab host's network namespace
has one cable, and its other end is the lab's internet. Its ``/etc`` is an overlay with names, a resolver and
an authority of its own; its state directories are empty. Everything dies with the processes that hold it.

The truth of every test is taken here: from the events of the internet and of the host's own services.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cli.harness import STATE, Caller
from tests.network import certificates, zone
from tests.security.lab import PATH, REPO, drop_to, give

if TYPE_CHECKING:
    from collections.abc import Callable

TOOLS = ("ip", "openssl", "unshare", "nsenter", "setpriv", "git")

_HOST = r"""
set -e
base=$1
shift
# Sandboxes of others that run just now: this copy of their mounts must not hold them.
for mount in $(awk '$2 ~ "/casemate/" {print $2}' /proc/self/mounts); do umount -l "$mount"; done
hostname lab-host
mkdir -p "$base/etc"
mount -t tmpfs -o mode=0755 etc "$base/etc"
mkdir "$base/etc/up" "$base/etc/work"
mount -t overlay -o "lowerdir=/etc,upperdir=$base/etc/up,workdir=$base/etc/work" etc /etc
for place in "$@"; do
    mkdir -p "$place"
    mount -t tmpfs -o mode=0755,size=512m den "$place"
done
echo 0 2147483647 >/proc/sys/net/ipv4/ping_group_range
echo ready
read line
"""

_HOST_NETWORK = f"""
link set lo up
link add up0 type veth peer name down0 netns {{internet}}
link set up0 up
addr add {zone.HOST4}/24 dev up0
addr add {zone.HOST6}/64 dev up0 nodad
route add default via {zone.NEAR4}
route add default via {zone.NEAR6}
"""
# Every address of the world is local there (but for the way back, which is longer, so it comes first).
_INTERNET_NETWORK = f"""
link set lo up
link set down0 up
addr add {zone.NEAR4}/24 dev down0
addr add {zone.NEAR6}/64 dev down0 nodad
addr add fe80::1/64 dev down0 nodad
route add local 0.0.0.0/0 dev lo table main
route add local ::/0 dev lo table main
"""


class Missing(RuntimeError):
    """The lab cannot be made here. This is a failure, never a skip."""


@dataclasses.dataclass
class Witness:
    """A process that tells what it sees, one JSON object a line."""

    process: subprocess.Popen[bytes]
    events: list[dict[str, Any]]
    told: threading.Condition
    reader: threading.Thread | None = None

    @classmethod
    def start(cls, prefix: list[str], *argv: str) -> Witness:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", *argv], cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"},
        )  # fmt: skip
        made = cls(process, [], threading.Condition())
        made.reader = threading.Thread(target=made._read, daemon=True)
        made.reader.start()
        if not made.wait(lambda: any(event["kind"] == "ready" for event in made.events), 20):
            process.kill()
            raise Missing(f"{argv[0]} did not start")
        return made

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                event = json.loads(line)
                with self.told:
                    self.events.append(event)
                    self.told.notify_all()

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Until the events are as wanted; False at the deadline."""
        with self.told:
            return self.told.wait_for(condition, seconds)

    def order(self, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(fields).encode() + b"\n")
        self.process.stdin.flush()

    def sync(self, number: int) -> None:
        """All that had arrived before is among the events afterwards."""
        self.order(sync=number)
        if not self.wait(
            lambda: any(event["kind"] == "synced" and event["sync"] == number for event in self.events), 20
        ):
            raise RuntimeError("a witness is silent")

    def close(self) -> None:
        """The end of its input is its end."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.reader is not None:
            self.reader.join(10)


class Lab:
    """Two namespaces, their cable, and what runs at both ends. Made once for many runs."""

    def __init__(self) -> None:
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if os.geteuid() != 0:
            missing.append("uid 0")
        if missing:
            raise Missing("missing: " + ", ".join(missing))
        self.base = Path(tempfile.mkdtemp(prefix="casemate-net-", dir="/srv"))
        self.base.chmod(0o755)
        self.token = "git-token-" + secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._stack = contextlib.ExitStack()
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        self._stack.callback(shutil.rmtree, self.base, ignore_errors=True)
        (self.base / "tls").mkdir(mode=0o700)
        self.files = certificates.make(self.base / "tls")
        self.authority = self.base / "authority.pem"
        shutil.copyfile(self.files["ca.crt"], self.authority)
        self.authority.chmod(0o644)
        self._host = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "--propagation", "private", "sh", "-c", _HOST, "lab",
             str(self.base), *STATE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._stack.callback(self._host.communicate)
        assert self._host.stdout is not None
        if self._host.stdout.readline() != b"ready\n":
            raise Missing("namespaces")
        self.root = f"/proc/{self._host.pid}/root"
        self._write_etc()
        repositories = self.base / "repositories"
        repositories.mkdir()
        config = {**self.files, "repositories": str(repositories), "token": self.token, "device": "down0"}
        self.repositories = repositories
        self.internet = self._start_internet(config)
        self._stack.callback(self.internet.close)
        self.sockets = self.base / "sockets"
        self.sockets.mkdir(mode=0o755)
        place = [*self.prefix, str(REPO)]
        self.neighbours = Witness.start(place, "tests.network.neighbours", str(self.sockets))
        self._stack.callback(self.neighbours.close)

    def _start_internet(self, config: dict[str, str]) -> Witness:
        holder = subprocess.Popen(["unshare", "--net", "sh", "-c", "read line"], stdin=subprocess.PIPE)
        try:
            self._ip(self._host.pid, _HOST_NETWORK.format(internet=holder.pid))
            self._ip(holder.pid, _INTERNET_NETWORK)
            enter = ["nsenter", f"--net=/proc/{holder.pid}/ns/net", "--"]
            # Both halves of TCP Fast Open, for this namespace.
            subprocess.run([*enter, "sh", "-c", "echo 3 >/proc/sys/net/ipv4/tcp_fastopen"], check=True)
            return Witness.start(enter, "tests.network.internet", json.dumps(config))
        finally:
            holder.communicate(b"\n")

    def _ip(self, pid: int, commands: str) -> None:
        for line in commands.strip().splitlines():
            family = ["-6"] if "::" in line else []
            subprocess.run(
                ["nsenter", f"--net=/proc/{pid}/ns/net", "--", "ip", *family, *line.split()], check=True
            )

    def _write_etc(self) -> None:
        etc = Path(self.root) / "etc"
        for name, words in {
            "hosts": "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 lab-host\n",
            "resolv.conf": f"nameserver {zone.RESOLVER}\nsearch {zone.SEARCH}\noptions timeout:2\n",
            "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
            "hostname": "lab-host\n",
        }.items():
            place = etc / name
            place.unlink(missing_ok=True)  # some machines have a link there, to elsewhere
            place.write_text(words)
            place.chmod(0o644)
        bundle = etc / "ssl/certs/ca-certificates.crt"
        authority = self.authority.read_text()
        bundle.parent.mkdir(parents=True, exist_ok=True)
        before = bundle.read_text() if bundle.exists() else ""
        bundle.write_text(before + authority)
        (bundle.parent / f"{self.files['hash']}.0").write_text(authority)

    # -- the host, as tests.cli.harness knows a den -----------------------------------------------------

    @property
    def enter(self) -> list[str]:
        """The words before a command that run it on the lab host."""
        kinds = [f"--{kind}=/proc/{self._host.pid}/ns/{name}" for kind, name in
                 (("net", "net"), ("mount", "mnt"), ("uts", "uts"))]  # fmt: skip
        return ["nsenter", *kinds, "--"]

    @property
    def prefix(self) -> list[str]:
        """The same in a directory, which is the next word."""
        return [*self.enter, "/bin/sh", "-c", 'cd -- "$0" && exec "$@"']

    def mounts(self) -> list[str]:
        """Its mount points."""
        lines = Path(f"/proc/{self._host.pid}/mountinfo").read_text().splitlines()
        return [line.split()[4] for line in lines]

    def caller(self, mode: str, command: Path) -> Caller:
        """Somebody who calls ``casemate`` on the lab host."""
        base = self.base / mode
        base.mkdir(mode=0o755)
        made = Caller(mode, command, base, self)  # type: ignore[arg-type]
        made.home.mkdir(mode=0o700)
        give(made.home, made.uid)
        return made

    def bare(
        self, *argv: str, uid: int = 0, cwd: str = "/", timeout: float = 30,
        env: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[bytes]:  # fmt: skip
        """A command on the lab host without any sandbox."""
        words = [*self.prefix, cwd, *drop_to(uid), *argv]
        clean = {"PATH": PATH, "HOME": "/nonexistent", **(env or {})}
        return subprocess.run(words, env=clean, capture_output=True, timeout=timeout, check=False)

    # -- the truth --------------------------------------------------------------------------------------

    def mark(self) -> tuple[int, int]:
        """Now, for ``since``."""
        self.sync()
        return len(self.internet.events), len(self.neighbours.events)

    def sync(self) -> None:
        """Everything that happened is among the events afterwards."""
        number = next(self._numbers)
        self.internet.sync(number)
        self.neighbours.sync(number)

    def since(self, mark: tuple[int, int]) -> list[dict[str, Any]]:
        """What the internet and the host's services have seen."""
        self.sync()
        found = self.internet.events[mark[0] :] + self.neighbours.events[mark[1] :]
        return [event for event in found if event["kind"] != "synced"]

    def until(
        self, mark: tuple[int, int], wanted: Callable[[dict[str, Any]], bool], seconds: float = 5
    ) -> bool:
        """Whether such an event comes within the time."""
        end = time.monotonic() + seconds
        while not any(map(wanted, self.since(mark))):
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def repository(self, name: str) -> Path:
        """An empty repository that the internet's git server takes pushes for."""
        place = self.repositories / name
        subprocess.run(["git", "init", "-q", "--bare", "-b", "main", str(place)], check=True)
        subprocess.run(["git", "-C", str(place), "config", "http.receivepack", "true"], check=True)
        return place

    def close(self) -> None:
        """Nothing is left: the namespaces end with their last process, the files are removed."""
        self._stack.close()
