"""Figures of the egress gate, side by side with doing without it: relay, connect, many connections, a run.

Servers and clients are this host's own, over loopback; the sandboxes reach them by
``host.casemate.internal``, the one name that leads there. Every figure comes with its counterpart from the
same interleaved run. ``bulk`` is a stream of bytes, ``tls`` one that the gate does not look into, ``https``
one that it does (both sides of it are TLS, and requests are read); ``connect`` is a connection to an address
and one answer over it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench import machine

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from casemate import AsyncSandbox

__all__ = ["main"]

_BLOCK = bytes(256 << 10)
_PYTHON = "/usr/bin/python3"
# What a client does, inside and outside alike: argv is host, port, act, amount.
_CLIENT = r"""
import socket, ssl, sys, time
host, port, act, amount = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
begin = time.perf_counter()
address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
looked_up = (time.perf_counter() - begin) * 1e3
def connect():
    s = socket.socket(address[0], socket.SOCK_STREAM)
    s.settimeout(60)
    s.connect(address[4])
    return s
if act in ("bulk", "http", "tls", "https"):
    with connect() as s:
        if act in ("tls", "https"):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            s = context.wrap_socket(s, server_hostname="host.casemate.internal")
        get = b"GET /%d HTTP/1.1\r\nHost: host.casemate.internal:%d\r\n\r\n" % (amount, port)
        s.sendall(b"b%d\n" % amount if act in ("bulk", "tls") else get)
        buffer, got, begin = bytearray(1 << 18), 0, time.perf_counter()
        while (size := s.recv_into(buffer)):
            got += size
            if act in ("http", "https") and got >= amount:
                break
        assert got >= amount
        print(got / (time.perf_counter() - begin) / 1e6)
elif act == "connect":
    connect().close()
    found = []
    for _ in range(amount):
        begin = time.perf_counter()
        with connect() as s:
            s.sendall(b"e\n")
            assert s.recv(2) == b"e\n"
        found.append((time.perf_counter() - begin) * 1e3)
    print(*found)
elif act == "look-up":
    print(looked_up)
else:
    held = [connect() for _ in range(amount)]
    for number, s in enumerate(held):
        s.sendall(b"e%d\n" % number)
    print(sum(s.recv(20) == b"e%d\n" % number for number, s in enumerate(held)))
"""


def _serve(listener: socket.socket, context: ssl.SSLContext | None = None) -> None:
    """``bN``: N bytes; ``e…``: the same line; ``GET /N``: N bytes by HTTP. One thread for each connection."""

    def one(client: socket.socket) -> None:
        with suppress(OSError), client if context is None else context.wrap_socket(client, True) as client:
            line = client.recv(4096)
            if line.startswith(b"GET /"):
                amount = int(line[5:].split(b" ", 1)[0])
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {amount}\r\nConnection: close\r\n\r\n"
                client.sendall(head.encode())
            elif line.startswith(b"b"):
                amount = int(line[1:])
            else:
                client.sendall(line)
                client.recv(1)
                return
            for _ in range(amount // len(_BLOCK)):
                client.sendall(_BLOCK)

    while True:
        client, _ = listener.accept()
        threading.Thread(target=one, args=(client,), daemon=True).start()


class _Bench:
    """``port`` is the server's, ``secure`` that of the one which speaks TLS."""

    def __init__(self, port: int, secure: int, place: Path, quick: bool) -> None:
        self.port, self.secure, self.place = port, secure, place
        self.rounds = 5 if quick else 9
        self.bulk = (256 if quick else 1024) << 20
        self.connects = 100 if quick else 400
        self.samples: dict[str, list[float]] = {}
        self.facts: dict[str, object] = {}

    def note(self, name: str, *values: float) -> None:
        self.samples.setdefault(name, []).extend(values)

    def _words(self, host: str, act: str, amount: int) -> list[str]:
        port = self.secure if act in ("tls", "https") else self.port
        return [_PYTHON, "-I", "-S", "-c", _CLIENT, host, str(port), act, str(amount)]

    async def outside(self, act: str, amount: int) -> list[float]:
        process = await asyncio.create_subprocess_exec(
            *self._words("127.0.0.1", act, amount),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, _ = await process.communicate()
        assert process.returncode == 0
        return [float(word) for word in out.split()]

    async def inside(self, sandbox: AsyncSandbox, act: str, amount: int) -> list[float]:
        result = await sandbox.run(self._words("host.casemate.internal", act, amount))
        assert result.ok, (result, result.stderr[-500:])
        return [float(word) for word in result.stdout.split()]

    def sandbox(self, number: int = 0, *, gate: bool = True, looked_into: bool = False) -> AsyncSandbox:
        from casemate import AsyncSandbox
        from casemate.policy.model import FlagLayer

        workspace = self.place / str(number)
        workspace.mkdir(exist_ok=True)
        allow = tuple(f"host.casemate.internal:{port}" for port in (self.port, self.secure))
        flags = FlagLayer(network="allowlist", allow=allow) if gate else FlagLayer(network="none")
        policy = self.place / f"{number}.toml"
        rules = '[network.requests]\n"host.casemate.internal" = ["GET /*"]\n' if looked_into else ""
        policy.write_text(f"version = 1\n{rules}")
        return AsyncSandbox(workspace, preset="read-only", flags=flags, policy_file=policy)

    async def side_by_side(self) -> None:
        """Throughput, connecting, and a run of nothing, with the gate and without."""
        async with (
            self.sandbox() as gated,
            self.sandbox(1, gate=False) as plain,
            self.sandbox(2, looked_into=True) as seen,
        ):
            for kept in (False, True, *(True for _ in range(self.rounds - 1))):
                figures = {
                    "bulk_direct": await self.outside("bulk", self.bulk),
                    "bulk_gate": await self.inside(gated, "bulk", self.bulk),
                    "http_direct": await self.outside("http", self.bulk // 4),
                    "http_gate": await self.inside(gated, "http", self.bulk // 4),
                    "tls_direct": await self.outside("tls", self.bulk // 4),
                    "tls_gate": await self.inside(gated, "tls", self.bulk // 4),
                    "https_direct": await self.outside("https", self.bulk // 4),
                    "https_gate": await self.inside(seen, "https", self.bulk // 4),
                    "connect_direct": await self.outside("connect", self.connects),
                    "connect_gate": await self.inside(gated, "connect", self.connects),
                    "look_up": await self.inside(gated, "look-up", 0),
                }
                for name, sandbox in (("run_gate", gated), ("run_none", plain)):
                    begin = time.perf_counter()
                    assert (await sandbox.run(["/usr/bin/true"])).ok
                    figures[name] = [(time.perf_counter() - begin) * 1e3]
                if kept:  # the first round starts what is started once
                    for name, values in figures.items():
                        self.note(name, *values)

    async def many(self, count: int = 100, each: int = 10) -> None:
        """Connections from many sandboxes at a time: how many of them got their own answer."""
        from casemate.sandbox import gates

        async with AsyncExitStack() as stack:
            sandboxes = [await stack.enter_async_context(self.sandbox(n)) for n in range(count)]
            begin = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.inside(sandbox, "many", each)) for sandbox in sandboxes]
                await asyncio.sleep(0)
                most = 0
                for task in asyncio.as_completed(tasks):
                    await task
                    most = max([most, *(_descriptors(pid) for pid in gates.gates().pids)])
            self.facts["many_answered"] = int(sum(task.result()[0] for task in tasks))
            self.facts["many_asked"] = count * each
            self.facts["many_seconds"] = round(time.perf_counter() - begin, 2)
            self.facts["worker_descriptors_most"] = most

    async def idle(self, count: int = 50) -> None:
        """What the worker, the keeper and this process hold for sandboxes that do nothing."""
        from casemate.sandbox import gates

        async with AsyncExitStack() as stack:
            sandboxes = [await stack.enter_async_context(self.sandbox(n)) for n in range(count)]
            # Id maps are made once for each of those that run at a time, up to a number, and kept.
            await asyncio.gather(*(sandbox.run(["/usr/bin/true"]) for sandbox in sandboxes))
            await asyncio.sleep(1)  # what has ended is taken apart when nothing else is to be done
            (pid,) = gates.gates().pids
            pids = {"worker": pid, "keeper": _keeper(), "library": os.getpid()}
            idle = {name: _descriptors(pid) for name, pid in pids.items()}
            before = (idle["worker"], _memory(pid))
            async with asyncio.TaskGroup() as group:
                waiting = [group.create_task(sandbox.run(["/bin/sleep", "4"])) for sandbox in sandboxes]
                # What another process holds has no event to wait for.
                wanted = before[0] + 2 * count
                while _descriptors(pid) < wanted and not any(t.done() for t in waiting):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                await asyncio.sleep(0.2)  # of a young command the keeper holds more
                after = (_descriptors(pid), _memory(pid))
                busy = {name: _descriptors(pid) for name, pid in pids.items()}
        self.facts["descriptors_per_sandbox"] = {
            name: round((busy[name] - idle[name]) / count, 2) for name in pids
        }
        self.facts["worker_kib_per_sandbox"] = round((after[1] - before[1]) / count, 1)
        self.facts["worker_kib_alone"] = before[1]

    def _descriptors_met(self) -> dict[str, object]:
        held = self.facts["descriptors_per_sandbox"]
        assert isinstance(held, dict)
        most = {"worker": 2, "keeper": 4, "library": 3}
        return {"value": held, "most": most, "met": all(held[name] <= most[name] for name in most)}

    def ratio(self, kind: str) -> float:
        """Through the gate to without it: the median of what the rounds say, each of one moment."""
        pairs = zip(self.samples[f"{kind}_gate"], self.samples[f"{kind}_direct"], strict=True)
        return median(gate / direct for gate, direct in pairs)

    def report(self) -> dict[str, object]:
        medians = {name: round(median(values), 3) for name, values in self.samples.items()}
        added = medians["connect_gate"] - medians["connect_direct"]
        relay, tls = (self.ratio(kind) for kind in ("bulk", "tls"))
        lost = int(str(self.facts["many_asked"])) - int(str(self.facts["many_answered"]))
        return {
            "bench": "network",
            "unit": "ms; bulk, http, tls and https in MB/s",
            "medians": medians,
            "samples": {name: len(values) for name, values in self.samples.items()},
            "targets": {
                "relay_ratio": {"value": round(relay, 3), "least": 0.5, "met": relay >= 0.5},
                "tls_ratio": {"value": round(tls, 3), "least": 0.5, "met": tls >= 0.5},
                "http_ratio": {"value": round(self.ratio("http"), 3)},
                "https_ratio": {"value": round(self.ratio("https"), 3)},
                "added_connect_ms": {"value": round(added, 3), "most": 0.5, "met": added <= 0.5},
                "connections_lost": {"value": lost, "most": 0, "met": lost == 0},
                "descriptors_per_sandbox": self._descriptors_met(),
                "run_with_gate_ms": {"value": round(medians["run_gate"] - medians["run_none"], 3)},
            },
            "facts": self.facts,
            "machine": machine.facts() | {"load_after": machine.load()},
        }


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def _keeper() -> int:
    """This process's keeper."""
    for thread in os.listdir("/proc/self/task"):
        for child in Path(f"/proc/self/task/{thread}/children").read_text().split():
            if b"process.keeper" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise AssertionError("no keeper")


def _memory(pid: int) -> int:
    """Resident KiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4


async def _measure(bench: _Bench) -> None:
    await bench.side_by_side()
    await bench.idle()
    await bench.many()


def _certified(place: Path) -> ssl.SSLContext:
    """A server's certificate. This process's gate trusts its authority from here on."""
    from casemate.egress.certificates import Authority

    authority = Authority(["host.casemate.internal"])
    bundle = place / "authority.pem"
    bundle.write_text(authority.certificate_pem)
    place.chmod(0o755)
    os.environ["SSL_CERT_FILE"] = str(bundle)
    return authority.context_for("host.casemate.internal")


def _started(stack: ExitStack, context: ssl.SSLContext | None) -> int:
    """A server in a process of its own; its port."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=4096))
    fork = multiprocessing.get_context("fork")
    server = fork.Process(target=_serve, args=(listener, context), daemon=True)
    server.start()
    stack.callback(server.join)
    stack.callback(server.kill)
    return int(listener.getsockname()[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit code says whether all could be measured, never whether it was fast."""
    parser = argparse.ArgumentParser(prog="python -m bench.network", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, below 40 s")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        place = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="casemate-bench-", dir="/var/tmp"))
        )
        ports = [_started(stack, context) for context in (None, _certified(place))]
        bench = _Bench(*ports, place, options.quick)
        asyncio.run(_measure(bench))
    report = bench.report()
    if options.json:
        print(json.dumps(report))
        return 0
    for name, value in report["medians"].items():  # type: ignore[attr-defined]
        print(f"{name:28s}{value:12.3f}")
    for name, target in report["targets"].items():  # type: ignore[attr-defined]
        print(f"{name:28s}{target}")
    print(report["facts"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
