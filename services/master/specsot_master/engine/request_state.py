"""The state of a request and its sequences while they live: timers, unread events, prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specsot.core.frames import End, Fork, Logprob, Open
from specsot.errors import Cancelled, InvalidRequest, SpecsotError
from specsot.events import Candidate, Numbered, TokenLogprobs
from specsot.params import Ask
from specsot.tracing import trace_of
from specsot_master.core.admission import NO_PREFIX, PlanSizes, PromptPrefix, own_pages, position_limit
from specsot_master.core.commands import OpenBranch
from specsot_master.core.forecast import Workload
from specsot_master.core.plan import RequestPlan
from specsot_master.core.prefix_tree import PrefixNode, ancestors
from specsot_master.core.prompts import turn_from
from specsot_master.core.ring import RingState
from specsot_master.core.router import Decision, ScorePrompt
from specsot_master.core.schedule import BreakHistory
from specsot_master.core.sequence import TokenLog
from specsot_master.core.text_pieces import TextPiece
from specsot_master.prompts import Conversation, PromptTurn
from specsot_master.text import Detokenizer


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """Seconds that only go forward."""

    def now(self) -> float: ...

    def later(self, seconds: float, act: Callable[[], object], /) -> Timer:
        """Call `act` on the event loop after so many seconds, unless cancelled."""
        ...


class LoopClock:
    """The event loop's own time."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def later(self, seconds: float, act: Callable[[], object], /) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, act)


class Timers:
    """Alarms of one request by name."""

    def __init__(self) -> None:
        self._set: dict[str, Timer] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._set

    def set(self, name: str, clock: Clock, seconds: float, act: Callable[[], object]) -> None:
        """Replaces the one of that name."""
        self.clear(name)

        def ring() -> None:
            del self._set[name]
            act()

        self._set[name] = clock.later(seconds, ring)

    def clear(self, *names: str) -> None:
        """Those of these names, or all."""
        for name in names or tuple(self._set):
            if alarm := self._set.pop(name, None):
                alarm.cancel()


MAX_KEPT_EVENTS = 16_384  # of a resumable request: more than 5,000 tokens of text, some megabytes


class EventBuffer:
    """Many pushes, one reader at a time. keeps: so many events that were read stay, so that another may read
    them again.
    """

    def __init__(self, keeps: int = 0) -> None:
        self.keeps = keeps
        self._events: dict[int, Numbered] = {}
        self._first = self._end = self._next = 0
        self._reader: Subscription | None = None
        self._news = asyncio.Event()
        self._over = False
        self._error: SpecsotError | None = None

    @property
    def unread(self) -> int:
        return self._end - self._next

    @property
    def position(self) -> int:
        """Offset of the event that is read next."""
        return self._next

    @property
    def error(self) -> SpecsotError | None:
        """What it was ended with."""
        return self._error

    @property
    def has_reader(self) -> bool:
        """Somebody reads."""
        return self._reader is not None

    def push(self, event: Numbered) -> None:
        self._events[self._end] = event
        self._end += 1
        self._trim()
        self._news.set()

    def end(self, error: SpecsotError | None = None) -> None:
        """Nothing follows; the reader gets what is unread first, then `error` if there is one."""
        if not self._over:
            self._over, self._error = True, error
            self._news.set()

    def attach(self, reader: Subscription, offset: int) -> None:
        """This one reads on from `offset`, instead of whoever reads now.

        Raises InvalidRequest (not that far yet, or no longer kept), and what it was ended with before it came
        that far.
        """
        if self._error is not None and offset > self._end:
            raise self._error
        if offset < self._first:
            raise InvalidRequest(
                f"resume_offset {offset} is too far back: events from {self._first} on are kept",
                field="resume_offset",
            )
        if not 0 <= offset <= self._end:
            raise InvalidRequest(
                f"resume_offset {offset} is ahead: there are {self._end} events", field="resume_offset"
            )
        self._cut_off(Cancelled("another call reads on here"))
        self._reader, self._next = reader, offset

    def detach(self, reader: Subscription) -> bool:
        """This one reads no more; whether it was the one who read."""
        if self._reader is not reader:
            return False
        self._reader = None
        return True

    def disconnect(self, error: SpecsotError) -> None:
        """Whoever reads gets `error` instead of the next event; what nobody can read any more is gone."""
        self._cut_off(error)
        if not self.keeps:
            self._events.clear()
            self._first = self._next = self._end

    async def take(self, reader: Subscription) -> Numbered | None:
        """The next event, None at the end. Raises the error it was ended with, or the reader was cut with."""
        while reader.error is None and self._next == self._end:
            if self._error is not None:
                raise self._error
            if self._over:
                return None
            self._news.clear()
            await self._news.wait()
        if reader.error is not None:
            raise reader.error
        event = self._events[self._next]
        self._next += 1
        self._trim()
        return event

    def _trim(self) -> None:
        """What was read goes, the oldest first, as far as it is more than is kept."""
        while self._first < self._next and len(self._events) > self.keeps:
            del self._events[self._first]
            self._first += 1

    def _cut_off(self, error: SpecsotError) -> None:
        if self._reader is not None:
            self._reader.error, self._reader = error, None
            self._news.set()


class Readers(Protocol):
    """Hears how a request is read."""

    async def on_read(self, request: RequestState, /) -> None: ...

    def on_leave(self, request: RequestState, /) -> None: ...


class Subscription(AsyncIterator[Numbered]):
    """One call's reading of one request. Closing it ends a request that is not resumable.

    error: what it gets instead of the next event.
    """

    error: SpecsotError | None = None

    def __init__(self, readers: Readers, request: RequestState) -> None:
        self._readers, self._request = readers, request

    async def __anext__(self) -> Numbered:
        """Raises Cancelled (cut off), and what ended the request."""
        event = await self._request.events.take(self)
        if event is None:
            raise StopAsyncIteration
        await self._readers.on_read(self._request)
        return event

    async def aclose(self) -> None:
        if self._request.events.detach(self):
            self._readers.on_leave(self._request)


class RingOfRequest(Protocol):
    """Whoever runs a request: hears that nobody wants it any more, or that its client reads again."""

    def drop(self, request: RequestState, /) -> None: ...

    def renew(self, request: RequestState, /) -> None: ...


# Characters; shorter texts are tokenised in a few milliseconds, on the loop; figures not recorded.
THREAD_CHARACTERS = 16 << 10


@dataclass(slots=True)
class ActiveSequence:
    """A sequence that writes. `pages`: charged for it. `spell`: a token's bytes.

    lost: it is in no ring; where its epoch is over, it waits to be opened again. ends: its
    end token is part of its text.
    """

    log: TokenLog
    detokenizer: Detokenizer
    spell: Callable[[int], bytes]
    pages: int = 0
    lease: int = 0
    lost: bool = True
    ends: bool = False

    @property
    def id(self) -> int:
        return self.log.opening.sequence

    @property
    def ordinal(self) -> int:
        """Its place in the plan."""
        return self.log.opening.ordinal

    @property
    def has_work(self) -> bool:
        """The next lap may bring it on: it is not paused by its lease, and more than a prefix."""
        log = self.log
        return log.opening.decodes and (not log.has_output or log.position <= self.lease)

    def read(
        self, tokens: Sequence[int], chances: Sequence[Logprob] = (), prompt: Sequence[Logprob] = ()
    ) -> list[TextPiece]:
        """New tokens as pieces of text; at the end, with what was held back, and which token it ended with.

        chances: of the tokens, or none. prompt: of the prompt's tokens but the first.
        """
        over, stop = self.log.end, None
        if over is End.STOP and tokens and tokens[-1] in self.log.opening.stop_ids:
            stop, tokens = tokens[-1], tokens if self.ends else tokens[:-1]
        told = [self._tell(token, chance) for token, chance in zip(tokens, chances)] or [None] * len(tokens)
        pieces = [TextPiece(token, self.detokenizer.feed((token,)), one) for token, one in zip(tokens, told)]
        rest = self.detokenizer.flush() if over else ""
        if prompt:
            scored = map(self._tell, self.log.prompt[1:], prompt)
            pieces.insert(0, TextPiece(None, "", prompt=tuple(scored)))
        return [*pieces, TextPiece(None, rest, stop=stop)] if rest or stop is not None else pieces

    def _tell(self, token: int, chance: Logprob) -> TokenLogprobs:
        top = (Candidate(other, self.spell(other), logprob) for other, logprob in chance.top)
        return TokenLogprobs(Candidate(token, self.spell(token), chance.logprob), tuple(top))

    def order(self) -> Open:
        """The order that opens it."""
        opening = self.log.opening
        shared = opening.fork.length if opening.fork else 0
        return Open(opening, self.log.tokens[shared:], self.lease)


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A request's prompts in tokens: of a direct answer, or the turns of a planned one and their sizes.

    decision: which of the two, and why; score: what the model is asked where it decides. kind: of question.
    points: for which there is time.
    """

    decision: Decision
    answer: tuple[int, ...] = ()
    conversation: Conversation | None = None
    sizes: PlanSizes | None = None
    score: ScorePrompt | None = None
    kind: str = ""
    points: int | None = None


@dataclass(slots=True)
class RequestState:
    """A request from arrival to end.

    client: who asks, for fairness. owner: who alone may resume and cancel it; "": whoever knows its id.
    since: when it came, in seconds. trace: its context, as spans and log lines name it.
    beginning: what its prompts begin with, and the pages it must have to enter the ring.
    node: what its sequences are forked from; `shared` tokens of a direct prompt are. found: tokens of its
          prompt that were in the ring before it.
    family: its sequences ride in the same frames.
    deadline: by the engine's clock.
    home: who runs it, or ran it last; None: nobody yet.
    forgotten: nobody can come back to it, and its id may be another's.
    begun: it has been in the ring. record: of the rings that broke while it was in them.
    """

    id: str
    client: str
    arrival: int
    ask: Ask
    seed: int
    plan: RequestPlan
    prompt: EncodedPrompt
    owner: str = ""
    since: float = 0.0
    trace: str | None = None
    beginning: PromptPrefix = NO_PREFIX
    node: PrefixNode | None = None
    shared: int = 0
    found: int = 0
    family: int | None = None
    deadline: float | None = None
    begun: bool = False
    home: RingOfRequest | None = None
    forgotten: bool = False
    breaks: BreakHistory = field(default_factory=BreakHistory)
    events: EventBuffer = field(init=False)
    timers: Timers = field(default_factory=Timers)
    sequences: dict[int, ActiveSequence] = field(default_factory=dict[int, ActiveSequence])
    _turns: dict[int, PromptTurn] = field(default_factory=dict[int, PromptTurn])
    _making: dict[int, asyncio.Task[PromptTurn]] = field(
        default_factory=dict[int, "asyncio.Task[PromptTurn]"]
    )

    def __post_init__(self) -> None:
        self.events = EventBuffer(MAX_KEPT_EVENTS if self.ask.resumable else 0)

    @property
    def log_fields(self) -> dict[str, str | None]:
        """What every log line about it carries, in whoever's task; never its words."""
        return {"request_id": self.id, "trace_id": trace_of(self.trace)}

    @property
    def over(self) -> bool:
        """Nothing more will happen to it."""
        return self.plan.finished or self.events.error is not None

    def belongs_to(self, owner: str) -> bool:
        return self.owner in ("", owner)

    @property
    def wording(self) -> tuple[int, ...]:
        """What it depends on beside its branches' prompts: the first prompt, the threshold of its score in
        millionths, what asks for a polished text.
        """
        threshold, turns = self.prompt.decision.threshold, self.prompt.conversation
        polish = turns.polish("").suffix if turns and self.ask.polish else ()
        return (*self.first_turn.tokens, *(() if threshold is None else (round(threshold * 1e6),)), *polish)

    @property
    def prompt_tokens(self) -> int:
        """Of its first prompt, what it is told to plan included."""
        return len(self.first_turn.tokens)

    @property
    def asked_tokens(self) -> int:
        """Of the prompt that a direct answer to the same messages has."""
        turns = self.prompt.conversation
        return turns.asked if turns else len(self.prompt.answer)

    def workload(self, others: int) -> Workload:
        """What a forecast depends on. others: sequences beside it."""
        sizes = self.prompt.sizes
        suffix = sizes.turn if sizes else None
        rows = self.prompt_tokens - self.found
        return Workload(rows, self.ask.limits, suffix, others, self.prompt.kind)

    @property
    def first_turn(self) -> PromptTurn:
        """The first prompt that writes."""
        turns, score = self.prompt.conversation, self.prompt.score
        if turns and score:
            return turn_from(turns.prefix, score.tokens)
        return turns.skeleton if turns else PromptTurn(self.prompt.answer, self.shared)

    def branch_turn(self, order: OpenBranch) -> PromptTurn:
        """A branch's prompt, made once though it may wait for pages many times. Raises InvalidRequest."""
        turns, id = self.prompt.conversation, order.point.id
        assert turns is not None
        if id not in self._turns:
            length = min(order.point.length, order.budget)
            self._turns[id] = turns.branch(order.point, order.points, order.parents, length)
        return self._turns[id]

    def has_turn(self, order: OpenBranch, made: Callable[[], object]) -> bool:
        """Whether a branch's prompt is there, or made in no time. If not it is made in a thread, and `made`
        is called. Raises what making it raised.
        """
        id = order.point.id
        if id in self._turns or self._work(order) < THREAD_CHARACTERS:
            return True
        if (task := self._making.get(id)) is None:
            task = self._making[id] = asyncio.create_task(asyncio.to_thread(self.branch_turn, order))
            task.add_done_callback(lambda _: made())
        elif task.done():
            task.result()
        return False

    def _work(self, order: OpenBranch) -> int:
        """Characters to be made tokens."""
        assert self.prompt.conversation is not None
        return self.prompt.conversation.behind + sum(len(text) for _, text in order.parents)

    def answer_turn(self) -> PromptTurn:
        """A plain answer's prompt, from now on that of ordinal 0."""
        turns = self.prompt.conversation
        if turns is not None:
            self._turns[0] = turns.answer
        return self.turn(0)

    def skeleton_turn(self) -> PromptTurn:
        """A plan's prompt, from now on that of ordinal 0."""
        turns = self.prompt.conversation
        assert turns is not None
        self._turns[0] = turns.skeleton
        return turns.skeleton

    def polish_turn(self, text: str) -> PromptTurn:
        """The prompt of what joins the branches, from now on that of ordinal 0."""
        assert self.prompt.conversation is not None
        self._turns[0] = self.prompt.conversation.polish(text)
        return self._turns[0]

    def turn(self, ordinal: int) -> PromptTurn:
        """The prompt of a sequence that was opened."""
        return self._turns.get(ordinal) or self.first_turn

    @property
    def lineage(self) -> list[PrefixNode]:
        """The beginnings that its sequences stand on."""
        return list(ancestors(self.node)) if self.node else []

    @property
    def inside(self) -> bool:
        """Something of it is in the ring."""
        return any(not sequence.lost for sequence in self.sequences.values())

    @property
    def lost(self) -> list[ActiveSequence]:
        """Those that wait to be opened again, in the plan's order."""
        return [self.sequences[ordinal] for ordinal in sorted(self.sequences) if self.sequences[ordinal].lost]

    def mark_lost(self) -> None:
        """Its epoch is over, with all that was in the ring."""
        self.node, self.family = None, None
        for sequence in self.sequences.values():
            sequence.lost = True

    def fork(self, turn: PromptTurn) -> Fork | None:
        return Fork(self.node.sequence, turn.shared) if self.node and turn.shared else None


def is_drafted(request: RequestState, state: RingState) -> bool:
    """Whether the ring drafts for it."""
    return state.has_drafter and request.ask.drafter in (None, *state.drafters)


def check_branch_fits(request: RequestState, turn: PromptTurn, budget: int, state: RingState) -> None:
    """Raises InvalidRequest when a branch, with the plan before it, can never fit."""
    length = len(turn.tokens) + budget
    held = sum(node.pages for node in request.lineage)
    pages = own_pages(length, turn.shared, state, request.ask.policy) + held
    most = position_limit(request.ask, state)
    if length > most or pages > state.pages:
        raise InvalidRequest(
            f"a branch of this plan needs {length} positions in {pages} KV pages; the model has "
            f"{most}, the ring {state.pages} pages",
            field="max_new_tokens",
        )
