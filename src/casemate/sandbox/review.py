"""Who answers when the policy leaves a question: a person at the terminal, or a program.

A reviewer is called with a question (plain data) and a function for the answer, which it calls once, now or
later: whether it is allowed, and for how long (``once``, ``session``: as long as this command runs,
``saved``: for this workspace from now on). Whatever is no clear yes is a no.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress

from casemate.sys.packets import readable
from casemate.sys.plain import is_list, is_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Reply = Callable[[bool, str], None]

__all__ = ["SCOPES", "Program", "Saved", "question_text"]

SCOPES = ("once", "session", "saved")
_SECONDS = 120.0
_MOST = 64 << 10
_MOST_SAVED = 1000


def question_text(question: dict[str, object]) -> str:
    """A question for a person, in one line; names in it are ASCII already."""
    return f"the command wants to reach {question['host']}:{question['port']}"


class Program:
    """A program that reads the question as JSON and writes ``{"decision": "allow", "scope": "once"}``.

    Any other answer, an exit code but 0, or none within two minutes is a no. ``poll`` moves things on.
    """

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        self._waiting: list[_Asked] = []

    @property
    def busy(self) -> bool:
        """Whether an answer is still to come, so that ``poll`` has to be called now and then."""
        return bool(self._waiting)

    def ask(self, question: dict[str, object], reply: Reply) -> None:
        """Start it on one question."""
        try:
            self._waiting.append(_Asked(self._argv, question, reply))
        except OSError:
            reply(False, "once")

    def poll(self) -> None:
        """Take the answers that have come."""
        for asked in [*self._waiting]:
            if asked.answered():
                self._waiting.remove(asked)

    def close(self) -> None:
        """Nobody waits for an answer any more."""
        for asked in self._waiting:
            asked.give_up()
        self._waiting = []


class _Asked:
    """One question under way."""

    def __init__(self, argv: list[str], question: dict[str, object], reply: Reply) -> None:
        self._reply = reply
        self._said = b""
        self._end = time.monotonic() + _SECONDS
        text = os.memfd_create("casemate-question", os.MFD_CLOEXEC)
        read, write = os.pipe2(os.O_CLOEXEC)
        try:
            os.write(text, json.dumps({"version": 1, **question}).encode() + b"\n")
            os.lseek(text, 0, os.SEEK_SET)
            actions = [(os.POSIX_SPAWN_DUP2, text, 0), (os.POSIX_SPAWN_DUP2, write, 1)]
            self._pid = os.posix_spawnp(
                argv[0], argv, os.environ, file_actions=actions, setsigmask=[], setsigdef=range(1, 32)
            )
        except OSError:
            os.close(read)
            raise
        finally:
            os.close(text)
            os.close(write)
        self._read = read

    def answered(self) -> bool:
        """Whether it is over, which is when the program has ended; one that hangs up is not waited for."""
        while self._read >= 0 and readable(self._read):
            data = os.read(self._read, _MOST)
            self._said += data
            if len(self._said) > _MOST:
                self.give_up()
                return True
            if not data:
                self._hang_up()
        if self._read < 0 and (ended := os.waitpid(self._pid, os.WNOHANG))[0]:
            allow, scope = _understood(self._said) if ended[1] == 0 else (False, "once")
            self._reply(allow, scope)
            return True
        if time.monotonic() > self._end:
            self.give_up()
            return True
        return False

    def _hang_up(self) -> None:
        if self._read >= 0:
            os.close(self._read)
            self._read = -1

    def give_up(self) -> None:
        self._hang_up()
        with suppress(ProcessLookupError):
            os.kill(self._pid, 9)
        os.waitpid(self._pid, 0)
        self._reply(False, "once")


def _understood(said: bytes) -> tuple[bool, str]:
    try:
        answer: object = json.loads(said)
    except ValueError:
        return False, "once"
    if not is_object(answer) or answer.get("decision") != "allow":
        return False, "once"
    scope = answer.get("scope", "once")
    return (True, scope) if isinstance(scope, str) and scope in SCOPES else (False, "once")


class Saved:
    """Hosts that a reviewer has allowed for good, in one file of the workspace's state."""

    def __init__(self, path: str) -> None:
        self._path = path

    def rules(self) -> tuple[str, ...]:
        """The rules, such as ``example.org:443``. What cannot be read allows nothing."""
        try:
            with open(self._path, "rb") as file:
                found: object = json.loads(file.read(1 << 20))
        except (OSError, ValueError):
            return ()
        return tuple(str(rule) for rule in found[:_MOST_SAVED]) if is_list(found) else ()

    def add(self, rule: str) -> None:
        """Remember one more. Raises OSError."""
        rules = [*dict.fromkeys((*self.rules(), rule))][-_MOST_SAVED:]
        os.makedirs(os.path.dirname(self._path), 0o700, exist_ok=True)
        new = f"{self._path}.{os.getpid()}"
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, json.dumps(rules).encode())
        finally:
            os.close(handle)
        os.replace(new, self._path)
