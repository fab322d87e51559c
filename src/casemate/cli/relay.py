"""Copies between the caller's standard streams and the sandbox's, one poll loop, no thread.

The host's descriptors never enter a sandbox, so neither does the host's terminal: with a terminal the
command has a pty of its own, the caller's is put into raw mode and given back as it was. Only built-in
modules are used, since the daemon's thin client runs this too.
"""

from __future__ import annotations

import _signal
import os
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Relay"]

_CHUNK = 65536
_TICK = 0.05
_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGCONT")


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
        self._pending = b""
        self._poll = select.poll()
        self._input_open = False
        self._input_ended = False

    def run(self) -> None:
        """Copy until the sandbox has ended and its output is drained."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        old_wakeup = _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        old_handlers = self._catch_signals()
        saved = self._raw_terminal()
        try:
            self._loop(wake_read)
        finally:
            self._restore_terminal(saved)
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

    def _catch_signals(self) -> dict[int, object]:
        old: dict[int, object] = {}
        names = [*_FORWARDED, "SIGWINCH"] if self.terminal >= 0 else _FORWARDED
        for name in names:
            number = int(getattr(_signal, name))
            if _signal.getsignal(number) != _signal.SIG_IGN or name == "SIGWINCH":
                old[number] = _signal.signal(number, lambda *_: None)
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
        drain_until = 0.0
        settled = monotonic() + 4 * _TICK
        while alive or self._sources:
            now = monotonic()
            if alive and deadline is not None and now >= deadline:
                self._end("timeout")
                deadline = None
            if not alive and now >= drain_until:
                break
            pause = _TICK if self._watched or now < settled or not alive else 1.0
            if deadline is not None:
                pause = min(pause, max(0.0, deadline - now))
            for descriptor, _events in poll.poll(pause * 1000):
                if descriptor == wake:
                    self._handle_signals(os.read(wake, 512))
                elif descriptor == self.ended:
                    poll.unregister(self.ended)
                    alive = False
                    self._want_input(False)
                    self._let_slave_go()
                    # What is in the pipes stays readable; nobody can add to it any more.
                    drain_until = monotonic() + 1.0
                elif descriptor in self._sources:
                    self._copy_out(descriptor)
                elif descriptor == 0:
                    self._copy_in()
                elif descriptor == self._to_sandbox:
                    self._flush()
            if alive and (limit := self._tick()):
                self._end(limit)

    def _end(self, limit: str) -> None:
        if not self.limit:
            self.limit = limit
        self._kill()

    # -- streams -----------------------------------------------------------------------------------

    def _copy_out(self, source: int) -> None:
        target = self._sources[source]
        self._interrupted_at = -1.0
        try:
            data = os.read(source, _CHUNK)
        except BlockingIOError:
            return
        except OSError:  # EIO: the last process has closed the pty
            data = b""
        if not data:
            self._poll.unregister(source)
            del self._sources[source]
            return
        if self._output_left is not None:
            if len(data) > self._output_left:
                data = data[: self._output_left]
                self._end("output")
            self._output_left -= len(data)
        if target == 2 or self.terminal >= 0:
            self.stderr_tail = (self.stderr_tail + data)[-self._tail :]
        if not _write_all(target, data):
            # The caller's reader is gone: the command gets SIGPIPE's effect at its next write.
            self._poll.unregister(source)
            del self._sources[source]
            os.close(source)

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
        if not data:
            self._input_ended = True
            self._want_input(False)
            if self.terminal >= 0:
                self._pending += b"\x04"
                self._flush()
            else:
                self._close_input()
            return
        if self.terminal >= 0 and data == b"\x03":
            self._second_interrupt()
        self._pending = data
        self._flush()

    def _second_interrupt(self) -> None:
        """Two Ctrl-C within a second and not a byte of output between them: the command is not listening."""
        from time import monotonic

        now = monotonic()
        if 0 <= now - self._interrupted_at < 1.0:
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
        if self._pending and self._input_open:
            self._want_input(False)
            self._watch_input(True)
        elif not self._pending and not self._input_open and not self._input_ended:
            self._watch_input(False)
            self._want_input(True)

    def _watch_input(self, wanted: bool) -> None:
        if self.terminal >= 0:
            self._poll.modify(self.terminal, select.POLLIN | (select.POLLOUT if wanted else 0))
        elif wanted:
            self._poll.register(self._to_sandbox, select.POLLOUT)
        else:
            try:
                self._poll.unregister(self._to_sandbox)
            except KeyError:
                return

    def _close_input(self) -> None:
        if self.terminal < 0 and self._to_sandbox >= 0:
            self._watch_input(False)
            os.close(self._to_sandbox)
            self._to_sandbox = -1

    # -- signals and the terminal ---------------------------------------------------------------------

    def _handle_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number == _signal.SIGWINCH:
                self._copy_size()
                continue
            if number == _signal.SIGINT:
                self._interrupts += 1
                if self._interrupts >= 2:
                    self._kill()
                    continue
            self._signal(number)
            if number == _signal.SIGTSTP:
                os.kill(os.getpid(), _signal.SIGSTOP)

    def _raw_terminal(self) -> list[object] | None:
        if self.terminal < 0:
            return None
        import termios

        saved: list[object] = termios.tcgetattr(0)
        raw = termios.tcgetattr(0)
        raw[0] &= ~(
            termios.BRKINT | termios.ICRNL | termios.INPCK | termios.ISTRIP | termios.IXON | termios.INLCR
        )
        raw[1] &= ~termios.OPOST
        raw[2] = (raw[2] & ~(termios.CSIZE | termios.PARENB)) | termios.CS8
        raw[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN | termios.ISIG)
        termios.tcsetattr(0, termios.TCSADRAIN, raw)
        self._copy_size()
        return saved

    def _restore_terminal(self, saved: list[object] | None) -> None:
        if saved is not None:
            import termios

            termios.tcsetattr(0, termios.TCSADRAIN, saved)

    def _copy_size(self) -> None:
        import fcntl
        import termios

        try:
            size = fcntl.ioctl(0, termios.TIOCGWINSZ, b"\0" * 8)
            fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, size)
        except OSError:
            return


def _write_all(target: int, data: bytes) -> bool:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:
            select.select([], [target], [])
        except OSError:
            return False
    return True
