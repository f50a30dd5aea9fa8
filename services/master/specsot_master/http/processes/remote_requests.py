"""The entry point of requests in an API process: encodes prompts, and reads events that the engine sends."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, Final

import msgspec
import structlog

from specsot.errors import ContextLengthExceeded, SpecsotError, Unavailable
from specsot.events import MergedText, Numbered
from specsot.params import MAX_TOKENS, Ask
from specsot.tracing import caller as calling_trace
from specsot_master.core.limits import prompt_characters
from specsot_master.core.plans.router import decide_question, question_of
from specsot_master.core.ring.ring_state import PreparedPrompt
from specsot_master.engine import ANONYMOUS, Caller
from specsot_master.engine.event_stream import join_pieces
from specsot_master.engine.intake import THREAD_CHARACTERS, TURN_CHARACTERS
from specsot_master.http.processes.link import EngineLink
from specsot_master.http.processes.messages import (
    END,
    FAILURE,
    CancelRequest,
    CloseRequest,
    Entries,
    OpenRequest,
    PauseStream,
    Query,
    Reply,
    ToApi,
    decode_error,
    decode_event,
)
from specsot_master.master import ServingState
from specsot_master.prompts import Prompts, messages_of

# Events. A stream of which so many wait for the client is paused, and resumed once a quarter of them is left.
# Untuned.
MAX_WAITING_EVENTS: Final = 256
# What clients read when the engine has ended.
ENGINE_ENDED: Final = "the engine of this server has ended"


class _ArrivingStream:
    """The events of one request that have arrived from the engine.

    The attribute `is_over` is True once the end of the stream has arrived; no event follows. `is_paused` is
    True while the engine was asked to send no further events.
    """

    def __init__(self) -> None:
        """Create a stream to which nothing has arrived."""
        self._waiting: deque[Numbered] = deque()
        self._error: SpecsotError | None = None
        self._news: asyncio.Future[None] | None = None
        self.is_over = False
        self.is_paused = False

    @property
    def num_waiting(self) -> int:
        """How many events wait for the client."""
        return len(self._waiting)

    def push(self, numbered: Numbered) -> None:
        """Add an event that has arrived.

        numbered: the event with its number.
        """
        self._waiting.append(numbered)
        self._wake()

    def end(self, error: SpecsotError | None) -> None:
        """End the stream; the client still reads the events that wait.

        error: what the reader gets after the events that wait; None if the request finished.
        """
        if not self.is_over:
            self.is_over = True
            self._error = error
            self._wake()

    async def next_event(self, join_text: bool) -> Numbered | None:
        """Wait for the next event and return it; return None after the last one.

        join_text: True to join the pieces of answer text that wait.

        Raises the error that ended the stream.
        """
        while not (self._waiting or self.is_over):
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        if not self._waiting:
            if self._error is not None:
                raise self._error
            return None
        numbered = self._waiting.popleft()
        return self._join(numbered) if join_text and self._waiting else numbered

    def _join(self, numbered: Numbered) -> Numbered:
        """Return an event, joined with the pieces of answer text that wait after it; unchanged if it is no
        answer text. The joined event has the number of its last piece.

        numbered: the event that was just taken.
        """
        first = numbered.event
        if not isinstance(first, MergedText):
            return numbered
        pieces = [first]
        while self._waiting and isinstance(following := self._waiting[0].event, MergedText):
            pieces.append(following)
            numbered = self._waiting.popleft()
        return Numbered(numbered.number, join_pieces(pieces))

    def _wake(self) -> None:
        """Resume the reader if it waits."""
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


class RemoteRequests:
    """The entry point of requests in an API process; the engine runs them in its own process.

    The attribute `lost` is True once the engine has ended.
    """

    def __init__(self, link: EngineLink[ToApi], prompts: Prompts, max_positions: int) -> None:
        """Create an entry point without requests.

        link: the link to the engine.
        prompts: makes the prompts of direct answers, so that the engine does not have to.
        max_positions: the model's context, in tokens.
        """
        self._prompts = prompts
        self._positions = max_positions
        self._streams: dict[int, _ArrivingStream] = {}
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._link = link
        self.lost = False

    async def generate(
        self, ask: Ask, caller: Caller = ANONYMOUS, *, join_text: bool = False
    ) -> AsyncGenerator[Numbered, None]:
        """Yield the events of a new request. Closing the generator cancels the request.

        ask: what the client asks for.
        caller: who asks.
        join_text: True to join pieces of answer text that wait for the client.

        Raises the errors of the engine, and Unavailable if the engine has ended.
        """
        caller = replace(caller, prepared=await self._prepare(ask))
        fields = structlog.contextvars.get_contextvars()
        number = next(self._numbers)
        stream = self._streams[number] = _ArrivingStream()
        self._send(OpenRequest(number, ask, caller, join_text, calling_trace.get(), fields))
        try:
            while (numbered := await stream.next_event(join_text)) is not None:
                if stream.is_paused and stream.num_waiting <= MAX_WAITING_EVENTS // 4:
                    stream.is_paused = False
                    self._send(PauseStream(number, False))
                yield numbered
        finally:
            del self._streams[number]
            if not stream.is_over:
                self._send(CloseRequest(number), must_arrive=False)

    def cancel(self, request_id: str, owner: str = "") -> None:
        """Cancel a request; the text so far becomes its answer. Nothing happens if no such request of this
        owner waits or runs.

        request_id: the id under which the request was opened.
        owner: the owner of the caller's token; "" for a caller without a token.
        """
        self._send(CancelRequest(request_id, owner), must_arrive=False)

    async def state(self) -> ServingState:
        """Return the present state of the master. Raises Unavailable if the engine has ended."""
        return msgspec.convert(await self._ask("state"), ServingState)

    async def metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format. Raises Unavailable if the engine has ended."""
        return await self._ask("metrics")

    def handle(self, message: ToApi) -> None:
        """Handle a message of the engine. Entries and replies for which no one waits any more are dropped.

        message: any message of the engine; those that concern no request are ignored.
        """
        match message:
            case Entries(entries):
                for number, event, kind, contents in entries:
                    if stream := self._streams.get(number):
                        self._take_in(number, stream, event, kind, contents)
            case Reply(number, value):
                if (query := self._queries.pop(number, None)) and not query.done():
                    query.set_result(value)
            case _:
                pass

    def on_lost(self) -> None:
        """End all streams and queries with Unavailable, because the engine has ended."""
        self.lost = True
        for stream in self._streams.values():
            stream.end(Unavailable(ENGINE_ENDED))
        for query in self._queries.values():
            if not query.done():
                query.set_exception(Unavailable(ENGINE_ENDED))
        self._queries.clear()

    def _take_in(self, number: int, stream: _ArrivingStream, event: int, kind: int, contents: Any) -> None:
        """Add what an entry says to its stream. A stream of which too much waits is paused.

        number: the number of the stream.
        stream: the stream.
        event: the number of the event.
        kind: the entry's kind.
        contents: the entry's contents.
        """
        if kind == END:
            stream.end(None)
        elif kind == FAILURE:
            stream.end(decode_error(contents))
        else:
            stream.push(decode_event(event, kind, contents))
            if not stream.is_paused and stream.num_waiting >= MAX_WAITING_EVENTS:
                stream.is_paused = True
                self._send(PauseStream(number, True), must_arrive=False)

    async def _prepare(self, ask: Ask) -> PreparedPrompt | None:
        """Return the prompt of a direct answer. Return None if the engine shall encode the prompt:
        that of a request that may be planned or that is given in tokens, and one that the template refuses,
        so that errors are those of the engine, in the engine's order.

        ask: what the client asks for.

        Raises ContextLengthExceeded for a prompt that is so long that it need not be tokenized as a whole.
        """
        if ask.mode != "direct" or ask.tokens or self._prompts.tags:
            return None
        try:
            if prompt_characters(ask) + TURN_CHARACTERS * len(ask.messages) < THREAD_CHARACTERS:
                tokens = self._prompts.chat(messages_of(ask))
            else:
                tokens = await asyncio.to_thread(self._encode_long, ask)
        except ContextLengthExceeded:
            raise
        except SpecsotError:
            return None
        return PreparedPrompt(tokens, decide_question(question_of(ask)))

    def _encode_long(self, ask: Ask) -> tuple[int, ...]:
        """Return the tokens of a long prompt. Called in a thread.

        ask: what the client asks for.

        Raises ContextLengthExceeded for a prompt that cannot fit, and InvalidRequest if the template refuses
        the conversation.
        """
        self._prompts.check_fits(ask, MAX_TOKENS if ask.window else self._positions)
        return self._prompts.chat(messages_of(ask))

    async def _ask(self, subject: Any) -> Any:
        """Return the engine's reply to a question about the master.

        subject: what is asked for; see `Query`.

        Raises Unavailable if the engine has ended.
        """
        number = next(self._numbers)
        query = self._queries[number] = asyncio.get_running_loop().create_future()
        self._send(Query(number, subject))
        try:
            return await query
        finally:
            self._queries.pop(number, None)

    def _send(self, message: object, must_arrive: bool = True) -> None:
        """Send a message to the engine.

        message: an object of one of the classes of `messages`.
        must_arrive: False for a message that an engine which has ended does not need.

        Raises Unavailable for a message that must arrive if the engine has ended.
        """
        if self.lost and must_arrive:
            raise Unavailable(ENGINE_ENDED)
        self._link.send(message)
