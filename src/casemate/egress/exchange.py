"""One request and its answer, between a client's connection and the host's.

Both ways at a time, so that a host may answer before it has the whole body, ask for it (100), or change the
protocol (101). Nothing is collected: a piece goes on before the next one is read.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import h11
import msgspec

from casemate.egress.decode import CODINGS, Decoder
from casemate.egress.httphead import (
    accepts_upgrade,
    answer_fields,
    is_crowded,
    is_encoded,
    trailer_fields,
    values,
)
from casemate.egress.streams import PIECE

if TYPE_CHECKING:
    from casemate.egress.credentials import Book
    from casemate.egress.httphead import Fields, Head
    from casemate.egress.redact import Redactor
    from casemate.egress.streams import Stream

__all__ = ["LIMITS", "Broken", "Exchange", "Failed", "Gone", "Limits", "Peer"]

_EVENTS = 256  # of h11, before others get their turn
_WAITING = 256 << 10  # bytes of an answer that are collected for one write
_INFORMATIONAL = 1000  # answers before the answer
_LOOK_SECONDS, _LOOKS = 10.0, 3


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, and bytes of a head. What takes longer, or is longer, ends the connection."""

    handshake: float = 15.0
    head: float = 20.0
    idle: float = 120.0
    """Between two requests."""
    silent: float = 900.0
    """Without a byte either way during a request: models and builds think for minutes."""
    upgraded: float = 3600.0
    """The same after a change of protocol."""
    late_body: float = 5.0
    """For the rest of a body after its answer is over."""
    head_bytes: int = 64 << 10


LIMITS = Limits()


class Failed(Exception):
    """The host could not be asked or did not answer, and the client has got nothing yet.

    ``retry``: nothing came back, on a connection that had been used before, so it was probably closed
    meanwhile.
    """

    def __init__(self, status: int, code: str, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.status, self.code, self.retry = status, code, retry


class Broken(Exception):
    """An answer ended in the middle; the client must not take it for a whole one."""


class Gone(Exception):
    """The client has gone, or what it sends is no body."""


class Peer:
    """One side: its stream, and what has been said on it."""

    def __init__(self, stream: Stream, role: type[h11.CLIENT | h11.SERVER], head_bytes: int) -> None:
        self.stream = stream
        self.http = h11.Connection(role, max_incomplete_event_size=head_bytes)
        self.used = False
        self.read = self.written = 0

    async def fill(self, size: int = PIECE) -> int:
        """Read once. Raises OSError."""
        got = await self.stream.pull(self._take, size)
        self.read += got
        return got

    def _take(self, data: memoryview) -> None:
        self.http.receive_data(data)  # type: ignore[arg-type]  # which adds it to a bytearray of its own

    async def write(self, *parts: bytes) -> None:
        """Write all of it. Raises OSError."""
        await self.stream.write(*parts)
        self.written += sum(map(len, parts))

    def next_cycle(self) -> bool:
        """Make it ready for another request, if it can be."""
        if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            return False
        if self.http.our_role is h11.CLIENT and self.http.trailing_data[0]:
            return False  # what a host says unasked would be the answer to the next request
        self.http.start_next_cycle()
        self.used = True
        return True


class Exchange:
    """``run`` it once; ``switched`` says that ``tunnel`` comes next."""

    def __init__(
        self, client: Peer, host: Peer, head: Head, book: Book, *, limits: Limits = LIMITS, last: bool = False
    ) -> None:
        self._client, self._host, self._head = client, host, head
        self._limits, self._last = limits, last
        self._book = book
        self._redactor: Redactor | None = book.redactor() if book else None
        self._watcher = book.watcher()
        self._timer: asyncio.Timeout | None = None
        self._moved = time.monotonic()
        self._gone = False
        self._looking: asyncio.TimerHandle | None = None
        self._looks = 0
        self._spoke = host.read
        self._begun = False
        self._pending: list[bytes] = []
        self._waiting = 0
        self.status = 0
        self.switched = False

    @property
    def in_body(self) -> tuple[str, ...]:
        """Credentials whose placeholders went by in the request's body."""
        return self._watcher.seen

    async def run(self, request: h11.Request, *, bare: bool) -> None:
        """Send ``request`` and relay its body and the answer. ``bare``: there is no body.

        Raises Failed, Broken, Gone.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limits.silent) as self._timer:
                await self._ask(request, bare=bare)
                self._looking = loop.call_later(_LOOK_SECONDS, self._look)
                sending = None if bare else loop.create_task(self._send_body())
                try:
                    await self._relay_answer()
                    if sending is not None and not self.switched:
                        await asyncio.wait({sending}, timeout=self._limits.late_body)
                finally:
                    self._looking.cancel()
                    if sending is not None:
                        sending.cancel()
                        await asyncio.gather(sending, return_exceptions=True)
        except TimeoutError:
            if self._gone:
                raise Gone from None
            raise self._failure("silence", "it said nothing for too long", status=504) from None

    # ------------------------------------------------------------ the request

    async def _ask(self, request: h11.Request, *, bare: bool) -> None:
        begin = self._host.http.send(request)
        if bare:
            if self._client.http.their_state is h11.SEND_BODY:
                self._client.http.next_event()  # the end of a body that is not there
            begin += self._host.http.send(h11.EndOfMessage())
        try:
            await self._host.write(begin)
        except OSError:
            raise self._failure("no-answer", "it closed the connection") from None

    async def _send_body(self) -> None:
        """Pass the body on. A host that takes no more of it may have answered; a client that sends no more of
        it has gone, which ends the exchange.
        """
        try:
            while await self._send_some():
                self._progress()
        except (OSError, h11.RemoteProtocolError):
            self._give_up()
        except h11.LocalProtocolError:
            pass  # the host's side is over

    async def _send_some(self) -> bool:
        parts: list[bytes] = []
        event: object = None
        while len(parts) < _EVENTS:
            event = self._client.http.next_event()
            if isinstance(event, h11.Data):
                self._watcher.feed(event.data)
            elif isinstance(event, h11.EndOfMessage):
                event = h11.EndOfMessage(headers=trailer_fields(event.headers.raw_items(), self._book.names))
            else:
                break
            parts += self._host.http.send_with_data_passthrough(event) or ()
            if isinstance(event, h11.EndOfMessage):
                break
        try:
            await self._host.write(*parts)
        except OSError:
            return False
        if isinstance(event, h11.EndOfMessage):
            return False
        if event is h11.NEED_DATA:
            await self._client.fill()
        else:
            await asyncio.sleep(0)
        return True

    # ------------------------------------------------------------ the answer

    async def _relay_answer(self) -> None:
        for _ in range(_INFORMATIONAL):
            event = await self._event()
            if isinstance(event, h11.Response):
                await self._relay_response(event)
                return
            if not isinstance(event, h11.InformationalResponse):
                break
            if event.status_code == 101:
                await self._switch(event)
                return
            if self._client.http.their_http_version == b"1.1":
                await self._say(
                    h11.InformationalResponse(
                        status_code=event.status_code,
                        headers=self._clean(answer_fields(event.headers.raw_items())),
                        reason=self._clean_text(event.reason),
                    )
                )
        raise self._failure("bad-answer", "it answered in a way that is no HTTP/1.1")

    async def _switch(self, event: h11.InformationalResponse) -> None:
        fields = event.headers.raw_items()
        if not self._head.key or not accepts_upgrade(self._head.key, fields):
            raise self._failure("bad-answer", "it changed to a protocol that was not asked for")
        passed = [
            *self._clean(answer_fields(fields)),
            (b"Connection", b"Upgrade"),
            (b"Upgrade", b"websocket"),
        ]
        self.status, self.switched = 101, True
        reason = self._clean_text(event.reason)
        await self._say(h11.InformationalResponse(status_code=101, headers=passed, reason=reason))

    async def _relay_response(self, event: h11.Response) -> None:
        fields = answer_fields(event.headers.raw_items())
        bodiless = self._head.method == "HEAD" or event.status_code in (204, 304)
        coding = is_encoded(fields)
        decoder = None
        if self._redactor is not None and _is_partial(event.status_code, fields):
            why = "it answered with a part, which was not asked for and may cut a credential"
            raise self._failure("partial-answer", why)
        if coding and self._redactor is not None and not bodiless:
            if coding not in CODINGS:
                why = f"it answered in {coding}, which was not asked for and may hide a credential"
                raise self._failure("coded-answer", why)
            decoder = Decoder(coding)
            without = (b"content-encoding", b"content-length")
            fields = [(name, value) for name, value in fields if name.lower() not in without]
        # Nothing but the end of the connection marks the end: then it must be a proper one.
        lengthless = not (
            values(fields, b"content-length") or values(event.headers.raw_items(), b"transfer-encoding")
        )
        if self._last:
            fields.append((b"Connection", b"close"))
        self.status = event.status_code
        await self._say(
            h11.Response(
                status_code=event.status_code,
                headers=self._clean(fields),
                reason=self._clean_text(event.reason),
            ),
            now=False,
        )
        await self._relay_body(decoder, must_end=lengthless and not bodiless and decoder is None)

    async def _relay_body(self, decoder: Decoder | None, *, must_end: bool) -> None:
        events = 0
        while True:
            event = self._next_event()
            if isinstance(event, h11.Data):
                await self._pass(event.data, decoder)
                events += 1
                if events % _EVENTS == 0:
                    await self._write_out()
                    await asyncio.sleep(0)
            elif isinstance(event, h11.EndOfMessage):
                if must_end and self._host.stream.cut:
                    raise Broken("the host's connection was cut")
                await self._finish(event, decoder)
                return
            elif event is h11.NEED_DATA:
                await self._write_out()
                await self._read()
            else:
                raise Broken("the host's connection ended")

    async def _pass(self, data: bytes, decoder: Decoder | None) -> None:
        try:
            for piece in (data,) if decoder is None else decoder.feed(data):
                self._put(piece if self._redactor is None else self._redactor.feed(piece))
                if self._waiting > _WAITING:
                    await self._write_out()
                    await asyncio.sleep(0)  # a small piece may become a large one many times over
        except ValueError as error:
            raise Broken(str(error)) from None

    async def _finish(self, event: h11.EndOfMessage, decoder: Decoder | None) -> None:
        try:
            if decoder is not None:
                decoder.end()
        except ValueError as error:
            raise Broken(str(error)) from None
        if self._redactor is not None:
            self._put(self._redactor.end())
        modern = self._client.http.their_http_version == b"1.1"
        trailers = self._clean(trailer_fields(event.headers.raw_items())) if modern else []
        try:
            self._add(h11.EndOfMessage(headers=trailers))
        except h11.LocalProtocolError:
            raise Broken("an answer's length is not what it said") from None
        await self._write_out()

    # ------------------------------------------------------------ reading

    def _next_event(self) -> object:
        try:
            return self._host.http.next_event()
        except h11.RemoteProtocolError:
            raise self._failure("bad-answer", "its answer is no HTTP/1.1, or not whole") from None

    async def _read(self) -> None:
        try:
            await self._host.fill()
        except OSError:
            raise self._failure("no-answer", "it closed the connection") from None
        self._progress()

    async def _event(self) -> object:
        while (event := self._next_event()) is h11.NEED_DATA:
            await self._read()
            if is_crowded(self._host.http.trailing_data[0]):
                raise self._failure("bad-answer", "its answer has too many header fields")
        return event

    def _failure(self, code: str, why: str, *, status: int = 502) -> Failed | Broken:
        if self._begun:
            return Broken(why)
        unheard = self._host.used and self._host.read == self._spoke and status == 502
        return Failed(status, code, why, retry=unheard)

    # ------------------------------------------------------------ writing

    async def _say(self, event: h11.InformationalResponse | h11.Response, *, now: bool = True) -> None:
        self._add(event)
        if now:
            await self._write_out()

    def _add(self, event: h11.Event) -> None:
        for part in self._client.http.send_with_data_passthrough(event) or ():
            self._pending.append(part)
            self._waiting += len(part)

    def _put(self, data: bytes) -> None:
        if data:
            try:
                self._add(h11.Data(data))
            except h11.LocalProtocolError:
                raise Broken("an answer is longer than it said") from None

    async def _write_out(self) -> None:
        """Hand over what is pending. From then on the client has an answer, and no other can be given."""
        if not self._pending:
            return
        parts, self._pending = self._pending, []
        self._waiting = 0
        self._begun = self.status != 0  # 100 and its like do not count
        try:
            await self._client.write(*parts)
        except OSError:
            raise Gone from None

    def _clean(self, fields: Fields) -> Fields:
        if self._redactor is None:
            return fields
        return [(self._redactor.whole(name), self._redactor.whole(value)) for name, value in fields]

    def _clean_text(self, text: bytes) -> bytes:
        return text if self._redactor is None else self._redactor.whole(text)

    # ------------------------------------------------------------ time

    def _progress(self) -> None:
        """Something moved: the time limit starts anew. A timer costs, so not for every piece."""
        now = time.monotonic()
        if now - self._moved > 1.0 and not self._gone:
            self._moved = now
            self._reschedule(self._limits.silent)

    def _look(self) -> None:
        """Whether there is still somebody to get the answer.

        Once is not enough: a client may close its own way and wait for the answer.
        """
        self._looks = self._looks + 1 if self._client.stream.gone() else 0
        if self._looks >= _LOOKS:
            self._give_up()
        else:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _give_up(self) -> None:
        self._gone = True
        self._reschedule(0)

    def _reschedule(self, seconds: float) -> None:
        if self._timer is not None:
            with suppress(RuntimeError):  # it is running out at this moment
                self._timer.reschedule(asyncio.get_running_loop().time() + seconds)

    # ------------------------------------------------------------ after a change of protocol

    async def tunnel(self) -> None:
        """Pass bytes both ways until either side ends. Nothing is read in them, but values are still taken
        out.
        """
        client, host = self._client, self._host
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._limits.upgraded) as self._timer:
                await host.write(client.http.trailing_data[0])
                await self._down(host.http.trailing_data[0])
                loop = asyncio.get_running_loop()
                ways = {loop.create_task(self._copy_up()), loop.create_task(self._copy_down())}
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                    await asyncio.wait(ways, timeout=self._limits.late_body)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.wait(ways)

    async def _copy_up(self) -> None:
        with suppress(OSError):
            while data := await self._client.stream.read():
                self._client.read += len(data)
                await self._host.write(data)
                self._moving()
            await self._host.stream.end()

    async def _copy_down(self) -> None:
        with suppress(OSError):
            while data := await self._host.stream.read():
                await self._down(data)
                self._moving()
            if self._redactor is not None:
                await self._client.write(self._redactor.end())
            await self._client.stream.end()

    async def _down(self, data: bytes) -> None:
        await self._client.write(data if self._redactor is None else self._redactor.feed(data))

    def _moving(self) -> None:
        now = time.monotonic()
        if now - self._moved > 1.0:
            self._moved = now
            self._reschedule(self._limits.upgraded)


def _is_partial(status: int, fields: Fields) -> bool:
    """Whether an answer is a part of a whole, however it says so."""
    kinds = values(fields, b"content-type")
    parts = any(kind.lower().lstrip().startswith(b"multipart/byteranges") for kind in kinds)
    return status == 206 or parts or (status != 416 and bool(values(fields, b"content-range")))
