"""Copies between the caller's standard streams and the sandbox's, one poll loop, no thread.

The host's descriptors never enter a sandbox, so neither does the host's terminal: with a terminal the
command has a pty of its own, the caller's is put into raw mode and given back as it was. Only built-in
modules are used, since the daemon's thin client runs this too.

Nothing here waits for a reader: while one of the caller's streams takes no more, its sources are not read,
and signals, limits and the other streams go on.
"""

from __future__ import annotations

import _signal
import os
import select
import sys

from casemate.cli.sink import Sink
from casemate.cli.streams import put

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["Relay", "window_size"]

_CHUNK = 65536
_TICK = 0.05
_PATIENCE = 1.0
# Before a question: whatever the command has set of the terminal must not hide it (soft reset, plain
# characters, a line of its own).
_PLAIN = b"\x1b[!p\x1b[0m\x1b(B\x0f\r\n"
_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGCONT")
_ENDING = (_signal.SIGHUP, _signal.SIGINT, _signal.SIGQUIT, _signal.SIGTERM)


def window_size() -> tuple[int, ...]:
    """Rows, columns and both in pixels of the caller's terminal; 24 x 80 where it has none."""
    if not any(os.isatty(number) for number in (0, 1, 2)):
        return 24, 80, 0, 0
    import fcntl
    import termios

    for number in (0, 1, 2):
        try:
            size = fcntl.ioctl(number, termios.TIOCGWINSZ, b"\0" * 8)
        except OSError:
            continue
        return tuple(memoryview(size).cast("H"))
    return 24, 80, 0, 0


def _forget(poll: select.poll, descriptor: int) -> None:
    try:
        poll.unregister(descriptor)
    except KeyError:
        return


def _noted(_number: int, _frame: object) -> None:
    """The wake-up descriptor has told the loop; the default action must not be taken."""


class Relay:
    """One run's streams. ``stdin``, ``stdout``, ``stderr`` are the sandbox's ends, or ``terminal`` is."""

    def __init__(
        self,
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        terminal: int,
        slave: int,
        ended: int,
        signal: Callable[[int], None],
        kill: Callable[[], None],
        tick: Callable[[], str],
        watched: bool,
        output_limit: int | None,
        timeout: float | None,
        tail: int,
        stdout_to: int = 1,
    ) -> None:
        self.ended = ended
        self.terminal = terminal
        self._slave = slave
        self.limit = ""
        self.stderr_tail = b""
        self._signal, self._kill, self._tick = signal, kill, tick
        self._watched = watched
        self._output_left = output_limit
        self._timeout = timeout
        self._tail = tail
        self._interrupts = 0
        self._interrupted_at = -1.0
        self._to_sandbox = stdin if terminal < 0 else terminal
        self._sources = {stdout: stdout_to, stderr: 2} if terminal < 0 else {terminal: 1}
        self._served: dict[int, Callable[[], None]] = {}
        self._sinks = {number: Sink(number) for number in sorted({*self._sources.values()})}
        self._pending = b""
        self._last = b"\n"
        self._poll = select.poll()
        self._input_open = False
        self._input_ended = False
        self._saved: list[Any] | None = None
        self._progress = 0.0
        self._impatient = False
        self._questions: list[tuple[str, Callable[[str], None]]] = []

    def serve(self, descriptor: int, ready: Callable[[], None]) -> None:
        """Watch one more descriptor while the loop runs."""
        self._served[descriptor] = ready
        self._poll.register(descriptor, select.POLLIN)

    def leave(self, descriptor: int) -> None:
        """Watch a served descriptor no more."""
        if self._served.pop(descriptor, None) is not None:
            _forget(self._poll, descriptor)

    def ask(self, text: str, answered: Callable[[str], None]) -> None:
        """Ask whoever sits at the terminal; the next line is the answer, and not for the command.

        While a question is open nothing of the command's is shown, so that it can neither cover the question
        nor put one of its own beside it. Without a terminal the answer is empty, at once.
        """
        if not self._input_open or not os.isatty(0):
            answered("")
            return
        self._questions.append((text, answered))
        if len(self._questions) == 1:
            self._put_question()

    def _put_question(self) -> None:
        import termios

        for source in self._sources:
            _forget(self._poll, source)
        self._restore_terminal()
        termios.tcflush(0, termios.TCIFLUSH)  # what was typed before was meant for something else
        put(2, _PLAIN + self._questions[0][0].encode("utf-8", "replace"))

    def _answer(self, data: bytes) -> None:
        _, answered = self._questions.pop(0)
        answered(data.decode("utf-8", "replace").strip().lower())
        if self._questions:
            self._put_question()
        else:
            self._resume()

    def _give_up_questions(self) -> None:
        """The command has ended: nobody has to answer any more."""
        questions, self._questions = self._questions, []
        for _, answered in questions:
            answered("")
        if questions:
            put(2, b"\n")
            self._resume()

    def _resume(self) -> None:
        self._make_raw()
        for source in self._sources:
            self._watch(source)

    def run(self) -> None:
        """Copy until the sandbox has ended and its output is drained."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        old_wakeup = _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        old_handlers = self._catch_signals()
        mask = _signal.pthread_sigmask(_signal.SIG_UNBLOCK, old_handlers)
        self._make_raw()
        try:
            self._loop(wake_read)
        finally:
            self._restore_terminal()
            _signal.pthread_sigmask(_signal.SIG_SETMASK, mask)
            for number, handler in old_handlers.items():
                _signal.signal(number, handler)
            _signal.set_wakeup_fd(old_wakeup)
            os.close(wake_read)
            os.close(wake_write)

    def close(self) -> None:
        """Close the sandbox's ends."""
        self._let_slave_go()
        for descriptor in {*self._sources, self._to_sandbox}:
            if descriptor >= 0:
                os.close(descriptor)
        self._sources = {}
        self._to_sandbox = -1

    def _let_slave_go(self) -> None:
        if self._slave >= 0:
            os.close(self._slave)
            self._slave = -1

    def _catch_signals(self) -> dict[int, Any]:
        old: dict[int, Any] = {}
        names = [*_FORWARDED, "SIGWINCH"] if self.terminal >= 0 else _FORWARDED
        for name in names:
            number = int(getattr(_signal, name))
            if _signal.getsignal(number) != _signal.SIG_IGN or name == "SIGWINCH":
                old[number] = _signal.signal(number, _noted)
        return old

    def _loop(self, wake: int) -> None:
        from time import monotonic

        deadline = monotonic() + self._timeout if self._timeout is not None else None
        poll = self._poll
        poll.register(wake, select.POLLIN)
        poll.register(self.ended, select.POLLIN)
        for source in self._sources:
            poll.register(source, select.POLLIN)
        os.set_blocking(self._to_sandbox, False)
        self._want_input(True)
        alive = True
        settled = monotonic() + 4 * _TICK
        while alive or self._sources or self._waiting():
            now = monotonic()
            if alive and deadline is not None and now >= deadline:
                self._end("timeout")
                deadline = None
            if not alive and now - self._progress >= _PATIENCE and self._may_stop():
                break
            pause = _TICK if self._watched or now < settled or not alive else 1.0
            if deadline is not None:
                pause = min(pause, max(0.0, deadline - now))
            for descriptor, events in poll.poll(pause * 1000):
                if descriptor == wake:
                    self._handle_signals(os.read(wake, 512))
                elif descriptor == self.ended:
                    poll.unregister(self.ended)
                    alive = False
                    self._give_up_questions()
                    self._want_input(False)
                    self._let_slave_go()
                    self._progress = monotonic()
                elif descriptor == self._to_sandbox and events & (select.POLLOUT | select.POLLERR):
                    self._flush()  # with a terminal, what there is to read is seen at the next turn
                elif descriptor in self._served:
                    self._served[descriptor]()
                    if events & (select.POLLHUP | select.POLLERR):
                        _forget(poll, descriptor)
                elif descriptor in self._sources:
                    self._copy_out(descriptor)
                    self._progress = monotonic()
                elif descriptor == 0:
                    self._copy_in()
                elif descriptor in self._sinks:
                    self._drain(self._sinks[descriptor])
                    self._progress = monotonic()
            if alive and (limit := self._tick()):
                self._end(limit)

    def _waiting(self) -> bool:
        return any(sink.pending for sink in self._sinks.values())

    def _may_stop(self) -> bool:
        """After the end, a moment without progress. A slow reader is waited for as long as it takes, unless
        the end was forced. Without one, somebody outside holds the other end of a pipe.
        """
        return not self._waiting() or bool(self.limit) or self._impatient

    def _end(self, limit: str) -> None:
        if not self.limit:
            self.limit = limit
        self._kill()

    # -- streams -----------------------------------------------------------------------------------

    def _copy_out(self, source: int) -> None:
        try:
            data = os.read(source, _CHUNK)
        except BlockingIOError:
            return
        except OSError:  # EIO: the last process has closed the pty
            data = b""
        if not data:
            _forget(self._poll, source)
            del self._sources[source]
            return
        if self.terminal >= 0 and data.replace(b"^C", b"").strip():
            self._interrupted_at = -1.0  # more than the echo: the command is listening
        if self._output_left is not None:
            if len(data) > self._output_left:
                data = data[: self._output_left]
                self._end("output")
            self._output_left -= len(data)
        sink = self._sinks[self._sources[source]]
        if sink.number == 2 or self.terminal >= 0:
            self.stderr_tail = (self.stderr_tail + data)[-self._tail :]
        sink.pending += data
        self._drain(sink)

    def _drain(self, sink: Sink) -> None:
        """Give the reader what it takes; while something is left, its sources are not read."""
        try:
            sink.write()
        except OSError:
            sink.pending = b""
            self._reader_gone(sink)
        if sink.pending:
            self._poll.register(sink.number, select.POLLOUT)
        else:
            _forget(self._poll, sink.number)
        for source, number in self._sources.items():
            if number == sink.number:
                self._watch(source)

    def _reader_gone(self, sink: Sink) -> None:
        if self.terminal >= 0:  # what the command says goes nowhere; a terminal that hung up sends SIGHUP
            sink.gone = True
            return
        for source in [source for source, number in self._sources.items() if number == sink.number]:
            del self._sources[source]
            _forget(self._poll, source)
            os.close(source)  # the command gets SIGPIPE at its next write

    def _watch(self, descriptor: int) -> None:
        """Poll one of the sandbox's ends for what can be done with it now."""
        events = 0
        shown = descriptor in self._sources and not self._questions
        if shown and not self._sinks[self._sources[descriptor]].pending:
            events |= select.POLLIN
        if descriptor == self._to_sandbox and self._pending:
            events |= select.POLLOUT
        if events:
            self._poll.register(descriptor, events)
        else:
            _forget(self._poll, descriptor)

    def _want_input(self, wanted: bool) -> None:
        if wanted and not self._input_open:
            try:
                self._poll.register(0, select.POLLIN)
                self._input_open = True
            except (OSError, ValueError):
                self._close_input()
        elif not wanted and self._input_open:
            self._poll.unregister(0)
            self._input_open = False

    def _copy_in(self) -> None:
        try:
            data = os.read(0, _CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if self._questions:
            self._answer(data)
            return
        if not data:
            self._input_ended = True
            self._want_input(False)
            if self.terminal >= 0:
                # Ctrl-D ends the input at the start of a line only; elsewhere the first one ends the line.
                self._pending = b"\x04" if self._last == b"\n" else b"\x04\x04"
                self._flush()
            else:
                self._close_input()
            return
        self._last = data[-1:]
        if self.terminal >= 0 and b"\x03" in data:
            self._count_interrupts(data.count(b"\x03"))
        self._pending = data
        self._flush()

    def _count_interrupts(self, number: int) -> None:
        """Two Ctrl-C within a second and nothing but their echo between them: the command is not listening.

        Where Ctrl-C is no signal but a key (an editor), it is left alone.
        """
        import termios
        from time import monotonic

        if not termios.tcgetattr(self.terminal)[3] & termios.ISIG:
            return
        now = monotonic()
        if number > 1 or 0 <= now - self._interrupted_at < 1.0:
            self._impatient = True
            self._kill()
        self._interrupted_at = now

    def _flush(self) -> None:
        """Hand pending input on; while it does not fit, none is read."""
        try:
            sent = os.write(self._to_sandbox, self._pending)
            self._pending = self._pending[sent:]
        except BlockingIOError:
            pass
        except OSError:  # the command has closed its stdin
            self._pending = b""
            self._input_ended = True
            self._want_input(False)
            self._close_input()
            return
        self._watch(self._to_sandbox)
        if not self._input_ended:
            self._want_input(not self._pending)

    def _close_input(self) -> None:
        if self.terminal < 0 and self._to_sandbox >= 0:
            _forget(self._poll, self._to_sandbox)
            os.close(self._to_sandbox)
            self._to_sandbox = -1

    # -- signals and the terminal ---------------------------------------------------------------------

    def _handle_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == _signal.SIGWINCH:
                self._copy_size()
                continue
            if number in _ENDING:
                self._impatient = True
                self._interrupts += 1
                if self._interrupts >= 2:  # whoever ends it a second time means it
                    self._kill()
                    continue
            self._signal(number)
            if number == _signal.SIGTSTP:
                self._restore_terminal()
                os.kill(os.getpid(), _signal.SIGSTOP)
                self._make_raw()

    def _make_raw(self) -> None:
        if self.terminal < 0:
            return
        if os.isatty(0):
            import termios

            self._saved = termios.tcgetattr(0)
            raw = termios.tcgetattr(0)
            raw[0] &= ~(
                termios.BRKINT | termios.ICRNL | termios.INPCK | termios.ISTRIP | termios.IXON | termios.INLCR
            )
            raw[1] &= ~termios.OPOST
            raw[2] = (raw[2] & ~(termios.CSIZE | termios.PARENB)) | termios.CS8
            raw[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN | termios.ISIG)
            termios.tcsetattr(0, termios.TCSANOW, raw)
        self._copy_size()

    def _restore_terminal(self) -> None:
        if self._saved is not None:
            import termios

            saved, self._saved = self._saved, None
            try:
                # At once: a terminal that nobody reads would never be drained.
                termios.tcsetattr(0, termios.TCSANOW, saved)
            except termios.error:
                return  # it was hung up

    def _copy_size(self) -> None:
        import fcntl
        import termios

        size = b"".join(number.to_bytes(2, sys.byteorder) for number in window_size())
        try:
            fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, size)
        except OSError:
            return
