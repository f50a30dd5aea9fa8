"""A request from arrival to end, as it stands: its plan and sequences, unread events, alarms, prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from specsot.core.frames import Fork, Outcome
from specsot.errors import Cancelled, InvalidRequest, SpecsotError, TooLarge, Unavailable
from specsot.events import Numbered
from specsot.params import Ask
from specsot.tracing import trace_of
from specsot_master.core import commands, records
from specsot_master.core.plans.forecast import Workload
from specsot_master.core.plans.fork_plan import ForkPlan, ForkTags
from specsot_master.core.plans.plan import RequestPlan
from specsot_master.core.plans.prompts import Conversation, PromptTurn, turn_from
from specsot_master.core.plans.router import Decision, ScorePrompt, scoring
from specsot_master.core.ring.admission import NO_PREFIX, PlanSizes, PromptPrefix
from specsot_master.core.ring.prefix_tree import PrefixNode, ancestors
from specsot_master.core.ring.quarantine import BreakHistory
from specsot_master.core.ring.ring_state import RingState
from specsot_master.core.sequence import ActiveSequence


class Home(Protocol):
    def handle(self, event: Any, /) -> None:
        """Take one of `core.inputs`."""
        ...


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """Seconds that only go forward."""

    def now(self) -> float: ...

    def later(self, seconds: float, act: Callable[[], object], /) -> Timer:
        """Call `act` on the event loop after so many seconds, unless cancelled."""
        ...


MAX_KEPT_EVENTS = 16_384  # of a resumable request: more than 5,000 tokens of text, some megabytes


class Reader:
    """Who reads a request's events. error: what it gets instead of the next one."""

    error: SpecsotError | None = None

    def wake(self) -> None:
        """There is something new."""


class EventBuffer:
    """Many pushes, one reader at a time. keeps: so many events that were read stay, so that another may read
    them again. over: nothing follows; error: what it was ended with.
    """

    def __init__(self, keeps: int = 0) -> None:
        self.keeps = keeps
        self.over = False
        self.error: SpecsotError | None = None
        self._events: dict[int, Numbered] = {}
        self._first = self._end = self._next = 0
        self._reader: Reader | None = None

    @property
    def unread(self) -> int:
        return self._end - self._next

    @property
    def position(self) -> int:
        return self._next

    @property
    def has_reader(self) -> bool:
        return self._reader is not None

    def is_full(self, limit: int) -> bool:
        """More than `limit` events are unread. What a client that is away misses is kept, as far as it can
        be.
        """
        return self.unread >= (limit if self._reader else max(self.keeps, 1))

    def push(self, event: Numbered) -> None:
        self._events[self._end] = event
        self._end += 1
        self._trim()
        self._wake()

    def end(self, error: SpecsotError | None = None) -> None:
        """Nothing follows; the reader gets what is unread first, then `error` if there is one."""
        if not self.over:
            self.over = True
            self.error = error
            self._wake()

    def attach(self, reader: Reader, offset: int) -> None:
        """This one reads on from `offset`, instead of whoever reads now.

        Raises InvalidRequest (not that far yet, or no longer kept), and what it was ended with before it came
        that far.
        """
        if self.error is not None and offset > self._end:
            raise self.error
        if offset < self._first:
            raise InvalidRequest(
                f"resume_from {offset} is too far back: events from {self._first} on are kept",
                field="resume_from",
            )
        if not 0 <= offset <= self._end:
            raise InvalidRequest(
                f"resume_from {offset} is ahead: there are {self._end} events", field="resume_from"
            )
        self._cut_off(Cancelled("another call reads on here"))
        self._reader = reader
        self._next = offset

    def detach(self, reader: Reader) -> bool:
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

    def take(self, reader: Reader) -> Numbered | None:
        """The next event, None where there is none. Raises the error it was ended with, or the reader was cut
        off with.
        """
        if reader.error is not None:
            raise reader.error
        if not self.unread:
            if self.error is not None:
                raise self.error
            return None
        event = self._events[self._next]
        self._next += 1
        self._trim()
        return event

    def _trim(self) -> None:
        """What was read goes, the oldest first, as far as it is more than is kept."""
        while self._first < self._next and len(self._events) > self.keeps:
            del self._events[self._first]
            self._first += 1

    def _wake(self) -> None:
        if self._reader is not None:
            self._reader.wake()

    def _cut_off(self, error: SpecsotError) -> None:
        if self._reader is not None:
            self._reader.error = error
            self._wake()
            self._reader = None


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A request's prompts in tokens: of a direct answer, or the turns of a planned one and their sizes.

    decision: which of the two, and why; score: what the model is asked where it decides. kind: of question.
    points: for which there is time. tags: by which its model forks, where it may.
    """

    decision: Decision
    answer: tuple[int, ...] = ()
    conversation: Conversation | None = None
    sizes: PlanSizes | None = None
    score: ScorePrompt | None = None
    kind: str = ""
    points: int | None = None
    tags: ForkTags | None = None


@dataclass(slots=True, eq=False)
class RequestState:
    """A request from arrival to end.

    client: who asks, for fairness. owner: who alone may resume and cancel it; "": whoever knows its id.
    since: when it came, in seconds. trace: its context, as spans and log lines name it.
    beginning: what its prompts begin with, and the pages it must have to enter the ring.
    node: what its sequences are forked from; `shared` tokens of a direct prompt are. found: tokens of its
          prompt that were in the ring before it.
    family: its sequences ride in the same frames.
    deadline: by the engine's clock.
    home: who runs it, or ran it last.
    forgotten: nobody can come back to it, and its id may be another's.
    begun: it has been in the ring. breaks: of the rings that broke while it was in them.
    misfit: why the ring cannot hold it, which has become smaller; None: it can.
    """

    id: str
    client: str
    arrival: int
    ask: Ask
    seed: int
    plan: RequestPlan | ForkPlan
    prompt: EncodedPrompt
    home: Home
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
    forgotten: bool = False
    misfit: TooLarge | None = None
    breaks: BreakHistory = field(default_factory=BreakHistory)
    events: EventBuffer = field(init=False)
    sequences: dict[int, ActiveSequence] = field(default_factory=dict[int, ActiveSequence])
    _turns: dict[int, PromptTurn] = field(default_factory=dict[int, PromptTurn])
    _alarms: dict[type[object], Timer] = field(default_factory=dict[type[object], Timer])

    def __post_init__(self) -> None:
        self.events = EventBuffer(MAX_KEPT_EVENTS if self.ask.resumable else 0)

    @property
    def log_fields(self) -> dict[str, str | None]:
        """What every log line about it carries, in whoever's task; never its words."""
        return {"request_id": self.id, "trace_id": trace_of(self.trace)}

    @property
    def over(self) -> bool:
        return self.plan.finished or self.events.error is not None

    def belongs_to(self, owner: str) -> bool:
        return self.owner in ("", owner)

    @property
    def wording(self) -> tuple[int, ...]:
        """What it depends on beside its branches' prompts: the first prompt, the threshold of its score in
        millionths, what asks for a polished text.
        """
        threshold = self.prompt.decision.threshold
        turns = self.prompt.conversation
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
        turns = self.prompt.conversation
        score = self.prompt.score
        if turns and score:
            return turn_from(turns.prefix, score.tokens)
        return turns.skeleton if turns else PromptTurn(self.prompt.answer, self.shared)

    def branch_turn(self, order: commands.OpenBranch) -> PromptTurn:
        """A branch's prompt, made once though it may wait for pages many times. Raises InvalidRequest."""
        turns = self.prompt.conversation
        id = order.point.id
        if id not in self._turns and isinstance(self.plan, ForkPlan):
            head = self.forked
            self._turns[id] = PromptTurn(head + self.plan.head_of(id), len(head))
        if id not in self._turns:
            assert turns is not None
            length = min(order.point.length, order.budget)
            self._turns[id] = turns.branch(order.point, order.points, order.parents, length)
        return self._turns[id]

    def unmade(self, order: commands.OpenBranch) -> int:
        """Characters that are to be tokenised for a branch's prompt; 0: it is there."""
        if order.point.id in self._turns or self.prompt.conversation is None:
            return 0
        return self.prompt.conversation.behind + sum(len(text) for _, text in order.parents)

    def take_turn(self, order: commands.Open) -> PromptTurn:
        """The prompt of what is opened, from now on that of its ordinal. Raises InvalidRequest."""
        turns = self.prompt.conversation
        match order:
            case commands.OpenBranch():
                return self.branch_turn(order)
            case commands.OpenSkeleton() if turns:
                self._turns[0] = turns.skeleton
            case commands.OpenPolish(text) if turns:
                self._turns[0] = turns.polish(text)
            case commands.OpenAnswer() if isinstance(self.plan, ForkPlan) and self.plan.context:
                self._turns[0] = PromptTurn(self.forked, len(self.forked) - 1)
            case commands.OpenAnswer() if turns:
                self._turns[0] = turns.answer
            case _:
                pass
        return self.turn(0)

    @property
    def forked(self) -> tuple[int, ...]:
        """What threads fork: its prompt and all that is written behind it so far."""
        return self.prompt.answer + (self.plan.context if isinstance(self.plan, ForkPlan) else ())

    def asks(self, order: commands.Open) -> Ask:
        """What the ring is asked: tags end what a model that forks writes; a plan has no least length."""
        if isinstance(order, commands.OpenScore):
            return scoring(self.ask)
        if isinstance(order, commands.OpenSkeleton):
            return replace(self.ask, min_tokens=0)
        if self.prompt.tags is None:
            return self.ask
        threads = isinstance(order, commands.OpenBranch)
        tag = self.prompt.tags.thread_end if threads else self.prompt.tags.outlines_end
        return replace(self.ask, stop_token_ids=(tag,))

    def shares(self, turn: PromptTurn) -> int:
        """Tokens of a turn that are in the ring."""
        return min(turn.shared, self.shared) if self.node else 0

    def turn(self, ordinal: int) -> PromptTurn:
        return self._turns.get(ordinal) or self.first_turn

    # --- what happens to it ---

    def play(self, record: records.Record) -> Iterator[commands.Command]:
        """It takes effect in plan and text, now or when a later master reads the journal. Every command is to
        be carried out before the next one is asked for.

        Raises WireError (a result is missing), Unavailable (prompts are worded differently now).
        """
        plan = self.plan
        match record:
            case records.LapRecord(at, said):
                plan.on_lap([outcome for _, outcome in said], self.since + at)
                for ordinal, outcome in said:
                    sequence = self.sequences.get(ordinal)
                    if sequence and outcome.sequence in (0, sequence.id):  # 0: of one before a restart
                        yield from self._read(sequence, outcome, self.since + at)
                yield commands.RenewLeases()
            case records.AdmittedRecord(at, found):
                self.begun = True
                self.found = found
                yield from plan.start(self.asked_tokens, self.since + at, found)
            case records.BranchRecord(id, wording):
                point = next(one for one in plan.ready() if one.id == id)
                records.check_prompt_unchanged(wording, self.branch_turn(plan.preview(point)).suffix)
                yield from plan.open_branch(point)
            case records.ReopenedRecord(ordinal):
                log = self.sequences[ordinal].log
                log.reopen(log.opening)
            case records.CancelledRecord(at):
                yield from plan.cancel(self.since + at)
            case records.FailedRecord(name, message):
                yield commands.FailRequest(records.error_of(name, message))

    def _read(self, sequence: ActiveSequence, outcome: Outcome, now: float) -> Iterator[commands.Command]:
        plan = self.plan
        ordinal = sequence.ordinal
        pieces = sequence.read(sequence.log.append(outcome), outcome.chances, outcome.prompt_chances)
        if outcome.end:
            yield commands.CloseSequence(ordinal)
        yield from plan.on_text(ordinal, pieces, now)
        if outcome.end and ordinal not in self.sequences:  # else another was opened in its place
            yield from plan.on_end(ordinal, outcome.end, now)

    # --- in the ring ---

    @property
    def lineage(self) -> list[PrefixNode]:
        return list(ancestors(self.node)) if self.node else []

    @property
    def inside(self) -> bool:
        return any(not sequence.lost for sequence in self.sequences.values())

    @property
    def lost(self) -> list[ActiveSequence]:
        """Those that wait to be opened again, in the plan's order."""
        return [self.sequences[ordinal] for ordinal in sorted(self.sequences) if self.sequences[ordinal].lost]

    def mark_lost(self) -> None:
        self.node = None
        self.family = None
        for sequence in self.sequences.values():
            sequence.lost = True

    def overdue(self, lacking: str, seconds: float, waiting_for: str) -> SpecsotError:
        """What it ends with where it has waited so long for a ring, or for a larger one."""
        if self.misfit and not waiting_for:
            told = f"{self.misfit}; no larger ring came within {seconds:g} s"
            return TooLarge(told, field=self.misfit.field)
        return Unavailable(f"{lacking}; after {seconds:g} s the ring is still waiting for {waiting_for}")

    def fork(self, turn: PromptTurn) -> Fork | None:
        return Fork(self.node.sequence, shared) if self.node and (shared := self.shares(turn)) else None

    # --- alarms ---

    def set_alarm(self, event: object, clock: Clock, seconds: float) -> None:
        """After so many seconds this comes in at home; it replaces the alarm of its kind."""
        kind = type(event)
        self.clear_alarms(kind)

        def ring() -> None:
            del self._alarms[kind]
            self.home.handle(event)

        self._alarms[kind] = clock.later(seconds, ring)

    def has_alarm(self, kind: type[object]) -> bool:
        return kind in self._alarms

    def clear_alarms(self, *kinds: type[object]) -> None:
        for kind in kinds or tuple(self._alarms):
            if timer := self._alarms.pop(kind, None):
                timer.cancel()


def is_drafted(request: RequestState, state: RingState) -> bool:
    return state.has_drafter and request.ask.drafter in (None, *state.drafters)
