"""The command line's share in the egress gate: its worker, and who answers questions about hosts."""

from __future__ import annotations

from casemate.cli.main import line
from casemate.sandbox.gate import GateWorker
from casemate.sandbox.review import Program, question_text
from casemate.sandbox.seed import GateSeed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from casemate.cli.relay import Relay
    from casemate.cli.run import Options
    from casemate.sandbox.inline import InlineRun

    Reply = Callable[[bool, str], None]

__all__ = ["RunGate"]

# Whole words: a key that was meant for the command must not be an answer.
_ANSWERS = {"yes": (True, "once"), "session": (True, "session"), "always": (True, "saved")}


class RunGate:
    """Lives as long as one ``casemate run``. ``relay`` is set once there is one."""

    def __init__(self, options: Options) -> None:
        self._seed = GateSeed()
        self._worker: GateWorker | None = None
        self.relay: Relay | None = None
        program = options.values.get("reviewer")
        self._program = Program([program]) if program is not None else None

    @property
    def patient(self) -> bool:
        """Whether ``tick`` has to be called often: a reviewer's answer is looked for there."""
        return self._program is not None

    def worker(self) -> GateWorker:
        """The worker; it starts when it is first asked for."""
        if self._worker is None:
            self._worker = GateWorker(self._seed)
            if self.relay is not None:
                self.relay.serve(self._worker.fileno(), self._worker.pump)
        return self._worker

    def join(self, relay: Relay, run: InlineRun) -> None:
        """Have the relay's loop serve the gate: now, or when the command begins to use the network."""
        self.relay = relay
        if self._worker is not None:
            relay.serve(self._worker.fileno(), self._worker.pump)
        listeners = run.listeners

        def wake() -> None:
            for descriptor in listeners:
                relay.leave(descriptor)
            run.wake()

        for descriptor in listeners:
            relay.serve(descriptor, wake)

    def ask(self, question: dict[str, object], reply: Reply) -> None:
        """Put a question about a host: to the program that was named, else to whoever sits there."""
        if self._program is not None:
            self._program.ask(question, reply)
            return
        if self.relay is None:
            reply(False, "once")
            return
        text = line(f"{question_text(question)}: yes (once), session, always or no, in full? ").rstrip("\n")
        self.relay.ask(text, lambda word: reply(*_ANSWERS.get(word, (False, "once"))))

    def tick(self) -> None:
        """Look for answers."""
        if self._program is not None:
            self._program.poll()

    def close(self) -> None:
        """End the worker."""
        if self._program is not None:
            self._program.close()
        self._seed.close()
        if self._worker is not None:
            self._worker.close()
