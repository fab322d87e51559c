"""The relay alone, between pipes: no reader is waited for, nothing is lost, every end is passed on."""

from __future__ import annotations

import os
import pty
import socket
import threading
from typing import Any

import pytest

from casemate.cli.relay import Relay
from casemate.cli.sink import Sink
from tests.cli.harness import until


def test_sink_takes_what_fits() -> None:
    """A full pipe takes a part and no more; when there is room again, the rest, in order."""
    read, write = os.pipe()
    sink = Sink(write)
    data = os.urandom(200_000)
    sink.pending = data
    sink.write()
    assert 0 < len(sink.pending) < len(data)
    assert os.get_blocking(write)
    got = b""
    while sink.pending:
        got += os.read(read, 30_000)
        sink.write()
    os.close(write)
    while chunk := os.read(read, 65536):
        got += chunk
    assert got == data
    os.close(read)


@pytest.mark.parametrize("kind", ["pipe", "socket", "terminal", "file"])
def test_sink_never_waits(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever the descriptor is, ``write`` comes back; with a file at once with everything."""
    other, number = -1, -1
    if kind == "pipe":
        other, number = os.pipe()
    elif kind == "terminal":
        other, number = pty.openpty()
    elif kind == "socket":
        one, two = socket.socketpair()
        other, number = one.detach(), two.detach()
    else:
        number = os.open(tmp_path_factory.mktemp("sink") / "f", os.O_WRONLY | os.O_CREAT)
    sink = Sink(number)
    sink.pending = b"x" * 2_000_000
    done = threading.Thread(target=sink.write, daemon=True)
    done.start()
    done.join(10)
    assert not done.is_alive(), "it waits for the reader"
    assert bool(sink.pending) == (kind != "file")
    for end in {other, number} - {-1}:
        os.close(end)


def test_sink_whose_reader_has_gone() -> None:
    """A reader that has gone is an error, for the relay to pass on."""
    read, write = os.pipe()
    os.close(read)
    sink = Sink(write)
    sink.pending = b"x"
    with pytest.raises(BrokenPipeError):
        sink.write()
    os.close(write)


class Bench:
    """A relay whose sandbox is a few pipes; 0, 1 and 2 are this process's own for the time of the run."""

    def __init__(self, **how: Any) -> None:
        self.stdin, self.stdout, self.stderr, self.ended = os.pipe(), os.pipe(), os.pipe(), os.pipe()
        self.told: list[Any] = []
        self.how = how

    def run(self, script: Any, stdin: bytes = b"") -> tuple[bytes, bytes, Relay]:
        """Run the relay while ``script(bench)`` plays the sandbox; returns what the caller's side got."""
        caller_in, caller_out, caller_err = os.pipe(), os.pipe(), os.pipe()
        os.write(caller_in[1], stdin)
        os.close(caller_in[1])
        saved = [os.dup(number) for number in (0, 1, 2)]
        got: dict[int, bytes] = {}

        def drain(key: int, number: int) -> None:
            data = b""
            while chunk := os.read(number, 65536):
                data += chunk
            got[key] = data

        readers = [
            threading.Thread(target=drain, args=(key, pipe[0]))
            for key, pipe in ((1, caller_out), (2, caller_err))
        ]
        sandbox = threading.Thread(target=script, args=(self,))
        try:
            for number, end in ((0, caller_in[0]), (1, caller_out[1]), (2, caller_err[1])):
                os.dup2(end, number)
                os.close(end)
            relay = Relay(
                stdin=self.stdin[1], stdout=self.stdout[0], stderr=self.stderr[0], terminal=-1, slave=-1,
                ended=self.ended[0], signal=lambda number: self.told.append(number),
                kill=lambda: self.told.append("kill"), tick=lambda: "", watched=False,
                **{"output_limit": None, "timeout": None, "tail": 10, **self.how},
            )  # fmt: skip
            for thread in (*readers, sandbox):
                thread.start()
            relay.run()
            relay.close()
        finally:
            for number, end in enumerate(saved):
                os.dup2(end, number)
                os.close(end)
        for thread in (sandbox, *readers):
            thread.join(10)
        for reader in (caller_out[0], caller_err[0], self.ended[0]):
            os.close(reader)
        return got[1], got[2], relay

    def end(self) -> None:
        """The sandbox's end: its streams close, the descriptor of its end becomes readable."""
        for number in (self.stdin[0], self.stdout[1], self.stderr[1], self.ended[1]):
            os.close(number)


def test_streams_to_their_ends() -> None:
    """What goes in comes in, both outputs come out, the end of stdin is passed on."""
    seen = []

    def sandbox(bench: Bench) -> None:
        data = b""
        while chunk := os.read(bench.stdin[0], 100):
            data += chunk
        seen.append(data)
        os.write(bench.stdout[1], b"out")
        os.write(bench.stderr[1], b"0123456789abcdef")
        bench.end()

    out, err, relay = Bench().run(sandbox, b"input")
    assert (seen, out, err, relay.limit) == ([b"input"], b"out", b"0123456789abcdef", "")
    assert relay.stderr_tail == b"6789abcdef"


def test_output_limit() -> None:
    """Past the limit the sandbox is killed once, the limit is named, and not a byte more is passed on."""

    def sandbox(bench: Bench) -> None:
        os.write(bench.stdout[1], b"x" * 70)
        os.write(bench.stderr[1], b"y" * 70)
        until(lambda: bench.told)
        os.write(bench.stdout[1], b"z" * 70)
        bench.end()

    bench = Bench(output_limit=100)
    out, err, relay = bench.run(sandbox)
    assert len(out) + len(err) == 100
    assert (relay.limit, bench.told[0]) == ("output", "kill")


def test_timeout() -> None:
    """At the deadline the sandbox is killed and the limit named."""

    def sandbox(bench: Bench) -> None:
        until(lambda: bench.told)
        bench.end()

    bench = Bench(timeout=0.05)
    _, _, relay = bench.run(sandbox)
    assert (relay.limit, bench.told) == ("timeout", ["kill"])


def test_everything_to_stderr() -> None:
    """With --json both outputs share one descriptor, and each is whole in itself."""

    def sandbox(bench: Bench) -> None:
        for _ in range(50):
            os.write(bench.stdout[1], b"o" * 1000)
            os.write(bench.stderr[1], b"e" * 1000)
        bench.end()

    out, err, _ = Bench(stdout_to=2).run(sandbox)
    assert (out, err.count(b"o"), err.count(b"e"), len(err)) == (b"", 50_000, 50_000, 100_000)


def test_a_pipe_that_somebody_else_holds() -> None:
    """A write end that lives on elsewhere does not keep the relay waiting after the sandbox's end."""
    held: list[int] = []

    def sandbox(bench: Bench) -> None:
        held.append(os.dup(bench.stdout[1]))
        os.write(bench.stdout[1], b"last words")
        bench.end()

    out, _, _ = Bench().run(sandbox)
    assert out == b"last words"
    os.close(held[0])
