"""The same command line with a resident daemon behind it: the guarantees must not differ."""

from __future__ import annotations

import os
import subprocess
import time
from typing import TYPE_CHECKING

from tests.security.engines import Casemate, Request
from tests.security.lab import PATH, STARTED, drop_to

if TYPE_CHECKING:
    from tests.security.lab import World

# Root's daemon listens at a fixed place. A mount namespace with an empty /run/casemate keeps it apart from
# any other daemon of the machine; its clients enter the same namespace.
_PRIVATE = (
    'mkdir -p /run/casemate && mount -t tmpfs -o mode=0700 none /run/casemate && exec "$0" daemon serve'
)


class Daemon:
    """A running daemon of one lab."""

    def __init__(self, world: World) -> None:
        assert world.command is not None
        self.world = world
        command = str(world.command)
        argv = [*drop_to(world.uid), command, "daemon", "serve"]
        if world.uid == 0:
            argv = ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", _PRIVATE, command]
        env = {"PATH": PATH, "HOME": str(world.home), "LC_ALL": "C.UTF-8"}
        self.process = subprocess.Popen(argv, env=env, cwd="/", stdin=subprocess.DEVNULL)
        STARTED.add(self.process.pid)
        end = time.monotonic() + 10
        while "pid" not in (said := self.status()) and time.monotonic() < end:
            time.sleep(0.05)
        if "pid" not in said or "not used" in said:
            self.close()
            raise RuntimeError(f"the daemon does not serve this installation: {said!r}")

    def client(self, cwd: str) -> list[str]:
        """The words before a client's command."""
        if self.world.uid:
            return []
        return ["nsenter", f"--target={self.process.pid}", "--mount", f"--wdns={cwd}", "--"]

    def status(self) -> str:
        argv = [*drop_to(self.world.uid), *self.client("/"), str(self.world.command), "daemon", "status"]
        ran = subprocess.run(
            argv, env=self.world.environment(), cwd="/", capture_output=True, text=True, check=False
        )
        return ran.stdout

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ByDaemon(Casemate):
    """Casemate by way of the lab's daemon."""

    name = "daemon"

    def __init__(self) -> None:
        self.daemons: dict[str, Daemon] = {}

    def argv(self, request: Request) -> list[str]:
        daemon = self.daemons[request.scene.world.mode]
        cwd = os.fspath(request.cwd or request.scene.ws)
        return [*daemon.client(cwd), *super().argv(request)]


ENGINE = ByDaemon()
