"""One request from its arrival to its end: plan, sequences, event buffer, alarms and prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from specsot.core.frames import Fork, Outcome
from specsot.errors import Cancelled, InvalidRequest, SpecsotError, TooLarge, Unavailable
from specsot.events import Numbered
from specsot.params import MAX_BIASES, Ask
from specsot.tracing import trace_of
from specsot_master.core import commands, records
from specsot_master.core.plans.forecast import Workload
from specsot_master.core.plans.fork_plan import ForkPlan, ForkTags
from specsot_master.core.plans.plan import RequestPlan
from specsot_master.core.plans.prompts import (
    PROBE_POINTS,
    Conversation,
    PromptTurn,
    shared_length,
    turn_from,
)
from specsot_master.core.plans.router import Decision, ScorePrompt, scoring
from specsot_master.core.plans.speculation import PLAN_ORDINAL
from specsot_master.core.ring.admission import NO_PREFIX, PlanSizes, PromptPrefix
from specsot_master.core.ring.prefix_tree import PrefixNode, ancestors
from specsot_master.core.ring.quarantine import BreakHistory
from specsot_master.core.ring.ring_state import RingState
from specsot_master.core.sequence import ActiveSequence


class Home(Protocol):
    """The engine that runs a request, as far as the request needs to know it: it handles the request's
    inputs.
    """

    def handle(self, event: Any, /) -> None:
        """Handle one input of the engine.

        event: an object of one of the classes in `core.inputs`.
        """


class Timer(Protocol):
    """A pending call of `Clock.later`."""

    def cancel(self) -> None:
        """Do not make the call. Has no effect if the call was already made or cancelled."""


class Clock(Protocol):
    """A monotonic clock, in seconds, that can also schedule calls."""

    def now(self) -> float:
        """Return the current time in seconds."""

    def later(self, seconds: float, callback: Callable[[], object], /) -> Timer:
        """Call a function on the event loop after a delay, unless the returned timer is cancelled before.

        seconds: the delay, from now.
        callback: called without arguments; its result is ignored.
        """

    def later_while_running(self, seconds: float, callback: Callable[[], object], /) -> Timer:
        """Call a function like `later`, but count only time during which the event loop ran: while this
        process is stopped, or its machine sleeps, all that it waits for may stand still, too.

        seconds: the delay, from now. The time may be off by an eighth of it.
        callback: called without arguments; its result is ignored.
        """


# Events. Bounds how many events of a resumable request stay buffered after they were read: enough for more
# than 5,000 tokens of text, which take some megabytes. Untuned.
MAX_BUFFERED_EVENTS = 16_384
# Logits. The bias of a token that a branch must not write. Precedent: OpenAI's range of logit_bias.
MIN_BIAS: Final = -100.0


class Reader:
    """The receiver of a request's events, for example one HTTP response that streams them.

    `error` is None while the reader is attached. Once the buffer has cut the reader off, `error` is the
    exception that the reader's next `EventBuffer.take` raises.
    """

    # What the reader's next `EventBuffer.take` raises, since the buffer has cut it off; None while it is
    # attached.
    error: SpecsotError | None = None  # Set when the buffer cut this reader off.

    def wake(self) -> None:
        """Resume the reader, because `EventBuffer.take` has a new event, or an error, for it. This base class
        does nothing.
        """


class EventBuffer:
    """A numbered buffer of one request's events, with any number of pushes and at most one attached reader at
    a time.

    The attribute `over` is True once the buffer was ended: no event follows. `error` is the error that the
    buffer was ended with, or None.

    Offsets count from the first event of the request. Example with keeps=2, four pushed events and three of
    them taken:

        buffered [e2 e3], _first = 2 (oldest event kept), _next = 3 (next to take), _end = 4 (next to push)

    Offset 2 can still be attached to, offset 1 is refused.
    """

    def __init__(self, keeps: int = 0) -> None:
        """Create an empty buffer without a reader.

        keeps: how many events stay in the buffer although they were read, so that a reader which reconnects
            can read them again; 0 for a request that cannot be resumed.
        """
        self.keeps = keeps
        self.over = False
        self.error: SpecsotError | None = None
        self._events: dict[int, Numbered] = {}
        self._first = self._end = self._next = 0
        self._reader: Reader | None = None

    @property
    def unread(self) -> int:
        """Number of events that were pushed and that no reader has taken yet."""
        return self._end - self._next

    @property
    def position(self) -> int:
        """Offset of the event that the next `take` returns, counted from the first event of the request;
        `position` equals the number of pushed events if all were taken.
        """
        return self._next

    @property
    def has_reader(self) -> bool:
        """True if a reader is attached."""
        return self._reader is not None

    def is_full(self, max_unread: int) -> bool:
        """Return True if the request should pause because too many events are unread.

        With a reader attached, `max_unread` events are too many. Without a reader the bound is `keeps` (at
        least 1): a client that is disconnected misses nothing, as far as the buffer may grow.

        max_unread: the configured number of events that an attached client may leave unread (`--unread`).
        """
        return self.unread >= (max_unread if self._reader else max(self.keeps, 1))

    def push(self, event: Numbered) -> None:
        """Append one event and wake the reader. If the buffer keeps fewer events, events that were read
        before are dropped. The buffer has no upper bound of its own; see `is_full`.

        event: the next event, with its number, for the client.
        """
        self._events[self._end] = event
        self._end += 1
        self._trim()
        self._wake()

    def end(self, error: SpecsotError | None = None) -> None:
        """Mark the buffer as over. The reader still takes the unread events. A second call has no effect. The
        reader is woken.

        error: what the reader raises after the unread events, or None if the request finished without an
            error.
        """
        if not self.over:
            self.over = True
            self.error = error
            self._wake()

    def attach(self, reader: Reader, offset: int) -> None:
        """Let a reader read from an offset on. A reader that was attached before is cut off with Cancelled.
        The events from the offset on, also those that were read before, are then unread.

        reader: the receiver of the events from now on.
        offset: number of the event that the reader takes first, counted from the first event of the request.

        Raises InvalidRequest if the event at `offset` is no longer buffered (a negative offset included), or
        if `offset` is larger than the number of events so far. If the buffer was ended with an error, an
        offset that is too large raises that error instead.
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
        self._cut_off(Cancelled("another call has resumed this request"))
        self._reader = reader
        self._next = offset

    def detach(self, reader: Reader) -> bool:
        """Detach a reader that has left. Return True if it was the attached reader; else change nothing and
        return False. The buffered events stay.

        reader: the reader that has left; it may have been cut off before.
        """
        if self._reader is not reader:
            return False
        self._reader = None
        return True

    def disconnect(self, error: SpecsotError) -> None:
        """Cut the attached reader off, if there is one. If the buffer keeps no events for a later reader
        (`keeps` is 0), all buffered events are dropped too. The dropped events count as read.

        error: what the reader's next `take` raises.
        """
        self._cut_off(error)
        if not self.keeps:
            self._events.clear()
            self._first = self._next = self._end

    def take(self, reader: Reader) -> Numbered | None:
        """Return the next event for a reader and advance, or return None if no event is unread. Events that
        were read and need not be kept are dropped.

        reader: the reader that asks, which must be the attached one or have been cut off.

        Raises the error that this reader was cut off with. Raises the error that the buffer was ended with
        once all events before it were taken.
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

    def peek(self, reader: Reader) -> Numbered | None:
        """Return the event that the next `take` returns, without taking it. Return None if no event is
        unread, or if this reader was cut off.

        reader: the reader that asks.
        """
        return self._events[self._next] if self.unread and reader is self._reader else None

    def _trim(self) -> None:
        """Drop events that were read, the oldest first, until at most `keeps` events are buffered."""
        while self._first < self._next and len(self._events) > self.keeps:
            del self._events[self._first]
            self._first += 1

    def _wake(self) -> None:
        """Wake the attached reader, if there is one."""
        if self._reader is not None:
            self._reader.wake()

    def _cut_off(self, error: SpecsotError) -> None:
        """Detach the current reader, if there is one. The reader is woken.

        error: what the reader's next `take` raises.
        """
        if self._reader is not None:
            self._reader.error = error
            self._wake()
            self._reader = None


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The prompts of a request, encoded as tokens: the prompt of a direct answer, or the turns of a planned
    one.

    decision: whether the request is answered directly or by a plan, and why.
    answer: the prompt of a direct answer, and of a model that forks by itself; empty for a planned request.
    conversation: the turns of a planned request, or None for a direct answer.
    sizes: the prompt lengths of a planned request, or None for a direct answer.
    score: the prompt of the router's score if the model's score decides between both ways, else None.
    kind: the kind of question, by which the forecast keeps its averages; "" for a prompt in tokens, and for a
        model that forks by itself.
    points: the maximum number of points that a list plan may have within the client's time limit, or None for
        no such limit.
    tags: the token ids of the fork and join tags, for a model that was trained to fork its answer; else None.
    speculates: True if the plan is started together with the direct answer.
    """

    decision: Decision
    answer: tuple[int, ...] = ()
    conversation: Conversation | None = None
    sizes: PlanSizes | None = None
    score: ScorePrompt | None = None
    kind: str = ""
    points: int | None = None
    tags: ForkTags | None = None
    speculates: bool = False


@dataclass(slots=True, eq=False)
class RequestState:
    """Everything the master knows of one request, from its arrival until it is forgotten.

    id: the request's id, unique among the requests that wait, run, or can still be read.
    client: the client's name; the queue shares places fairly between clients.
    arrival: a counter of arrivals in this engine, by which the queue breaks ties.
    ask: what the client asked for.
    seed: the sampling seed, the client's own or a drawn one.
    plan: the state machine that decides what is opened and what the client is sent.
    prompt: the request's prompts in tokens.
    home: the engine that runs the request, or that ran it last.
    owner: the only caller that may resume or cancel the request; "" if every caller who knows the id may.
    since: when the request arrived, in seconds of the engine's clock.
    trace: the request's tracing context, which spans and log lines carry; None without tracing.
    beginning: the common beginning of the request's prompts, and the KV pages that the request needs to enter
        the ring.
    node: the prefix that the request's sequences are forked from, or None if they fork nothing.
    shared: how many first tokens of a direct prompt are forked from `node`.
    num_cached_tokens: how many tokens of the request's first prompt were in the ring's prefix cache when it
        was admitted.
    has_room_for_plan: False if the ring had no room for the request's speculative plan when the request was
        admitted.
    family: the family of the request's sequences, which the frame scheduler treats as one group; None before
        the first sequence is placed.
    deadline: when the request times out, in seconds of the engine's clock; None for never.
    entered_ring: True once the request has entered a ring.
    forgotten: True once the request cannot be resumed any more, so that another request may have its id.
    misfit: why the current ring, which is smaller than an earlier one, cannot hold the request; None if it
        can.
    breaks: which rings broke while this request was in them.
    events: the events for the client.
    sequences: the request's live sequences by ordinal: 0 for the skeleton or the answer, PLAN_ORDINAL for a
        speculative skeleton, else the point's id.
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
    num_cached_tokens: int = 0
    has_room_for_plan: bool = True
    family: int | None = None
    deadline: float | None = None
    entered_ring: bool = False
    forgotten: bool = False
    misfit: TooLarge | None = None
    breaks: BreakHistory = field(default_factory=BreakHistory)
    events: EventBuffer = field(init=False)
    sequences: dict[int, ActiveSequence] = field(default_factory=dict[int, ActiveSequence])
    # The prompts of sequences that were opened or are about to be, by ordinal.
    _turns: dict[int, PromptTurn] = field(default_factory=dict[int, PromptTurn])
    # The tokens that the prompts of all branches of the plan begin with; None before they were compared.
    _plan_prefix: tuple[int, ...] | None = None
    # The pending alarms, by the class of the event that each passes on.
    _alarms: dict[type[object], Timer] = field(default_factory=dict[type[object], Timer])

    def __post_init__(self) -> None:
        """Create the event buffer, which keeps events that were read only for a resumable request."""
        self.events = EventBuffer(MAX_BUFFERED_EVENTS if self.ask.resumable else 0)

    @property
    def log_fields(self) -> dict[str, str | None]:
        """Fields that every log line about this request carries, in whichever task it is written: its id, and
        the id of its trace, which is None without tracing. They never contain the client's text.
        """
        return {"request_id": self.id, "trace_id": trace_of(self.trace)}

    @property
    def over(self) -> bool:
        """True if the plan has finished, or the event buffer was ended with an error."""
        return self.plan.finished or self.events.error is not None

    def belongs_to(self, owner: str) -> bool:
        """Return True if a caller may resume or cancel the request: it is the owner, or the request has none.

        owner: the owner of the caller's token; "" for a caller without a token.
        """
        return self.owner in ("", owner)

    @property
    def wording(self) -> tuple[int, ...]:
        """Tokens that identify how this master words the request's prompts, for a fingerprint in the journal.

        They are the first prompt, the router's threshold in millionths if there is one, and the suffix of an
        empty polish turn if the client wants a polished answer. The prompts of branches have fingerprints of
        their own. A master that restarts with another template or plan file computes other tokens, and so
        refuses to continue the request.
        """
        threshold = self.prompt.decision.threshold
        turns = self.prompt.conversation
        polish = turns.polish("").suffix if turns and self.ask.polish else ()
        return (*self.first_turn.tokens, *(() if threshold is None else (round(threshold * 1e6),)), *polish)

    @property
    def prompt_tokens(self) -> int:
        """Length of the request's first prompt in tokens, including the instruction to plan."""
        return len(self.first_turn.tokens)

    @property
    def asked_tokens(self) -> int:
        """Length in tokens of the prompt that a direct answer to the same messages would have."""
        turns = self.prompt.conversation
        return turns.asked if turns else len(self.prompt.answer)

    @property
    def max_sequences(self) -> int:
        """The most sequences that the request may decode at the same time from now on; at least 1. A model
        that forks by itself counts with those that it has.
        """
        if isinstance(self.plan, ForkPlan):
            return max(len(self.sequences), 1)
        return self.plan.max_sequences

    @property
    def begins_alone(self) -> bool:
        """True if the request begins with a single sequence, whose first token need not wait for the prefix
        that its plan will fork: it has a speculative plan, and has not entered a ring yet. False if the
        router's score decides first, which forks the same prefix, and if the client wants a KV policy or
        per-head windows, for which the branches have no longer prefix.
        """
        plain = not (self.ask.policy or self.ask.head_aware or self.prompt.score)
        return self.prompt.speculates and not self.entered_ring and plain

    def workload(self, num_running_sequences: int) -> Workload:
        """Return the inputs of this request's forecast: how many tokens its first prompt still has to
        prefill, its limits, and the length of a branch's own turn (None for a direct answer). Tokens of the
        first prompt whose KV the ring had at admission need no prefill.

        num_running_sequences: how many sequences of other requests run in the ring.
        """
        sizes = self.prompt.sizes
        suffix = sizes.turn if sizes else None
        rows = self.prompt_tokens - self.num_cached_tokens
        return Workload(rows, self.ask.limits, suffix, num_running_sequences, self.prompt.kind)

    @property
    def first_turn(self) -> PromptTurn:
        """The prompt of the sequence that is opened first: the score, the skeleton, or the direct answer. A
        planned request has the skeleton, or the score if the router's score decides; a direct answer shares
        what the request forks.
        """
        turns = self.prompt.conversation
        score = self.prompt.score
        if turns and score:
            return turn_from(turns.prefix, score.tokens)
        return turns.skeleton if turns else PromptTurn(self.prompt.answer, self.shared)

    def branch_turn(self, command: commands.OpenBranch) -> PromptTurn:
        """Return the prompt of a branch. It is built on the first call and cached, as a branch may wait for
        pages many times.

        The prompt of a model that forks by itself is what it has written, followed by the head of the thread.

        command: the command that opens the branch: its point, the plan, the texts that it needs, and its
            budget; the branch's length in its prompt is at most the budget.

        Raises InvalidRequest if the prompt cannot be built.
        """
        turns = self.prompt.conversation
        id = command.point.id
        if id not in self._turns and isinstance(self.plan, ForkPlan):
            head = self.forked
            self._turns[id] = PromptTurn(head + self.plan.head_of(id), len(head))
        if id not in self._turns:
            assert turns is not None
            length = min(command.point.length, command.budget)
            turn = turns.branch(command.point, command.points, command.parents, length, command.introduction)
            prefix = self.branch_prefix(command)
            self._turns[id] = turn_from(prefix, turn.tokens, turn.shared) if prefix else turn
        return self._turns[id]

    def branch_wording(self, command: commands.OpenBranch) -> tuple[int, ...]:
        """Return the tokens of a branch's prompt after the request's common prefix, for a fingerprint in the
        journal. Without a conversation, these are the tokens after those that the branch shares with the text
        before it.

        command: the command that opens the branch.

        Raises InvalidRequest if the prompt cannot be built.
        """
        turn = self.branch_turn(command)
        turns = self.prompt.conversation
        return turn_from(turns.prefix, turn.tokens).suffix if turns else turn.suffix

    def branch_prefix(self, command: commands.OpenBranch) -> tuple[int, ...]:
        """Return the tokens that the prompts of all branches begin with, so that the ring computes them once.
        Return () if the branches share no more than the request's own prefix, if they are asked for in
        markers, or if the client wants a KV policy or per-head windows. The result is the prompt and all
        written text for a model that forks by itself.

        For a plan in a list the tokens are found from two sample points that differ from their first letter
        on, and remembered.

        command: the command that opens one of the branches; its points and introduction are the same for all.
        """
        if isinstance(self.plan, ForkPlan):
            return self.forked
        turns = self.prompt.conversation
        if turns is None or turns.instructions is None or self.ask.policy or self.ask.head_aware:
            return ()
        if self._plan_prefix is None:
            left, right = (
                turns.branch(one, command.points, (), 1, command.introduction) for one in PROBE_POINTS
            )
            shared = left.tokens[: shared_length(left.tokens, right.tokens, left.shared)]
            self._plan_prefix = shared if len(shared) > len(turns.prefix) else ()
        return self._plan_prefix

    @property
    def lost_prefix(self) -> tuple[int, ...]:
        """The tokens that the lost branches' prompts begin with; () if no branch was lost. It is also () if
        the branches share no more than the request's own prefix. The skeleton and the answer are no branches.
        """
        if not any(0 < sequence.ordinal < PLAN_ORDINAL for sequence in self.lost):
            return ()
        return self.forked if isinstance(self.plan, ForkPlan) else self._plan_prefix or ()

    def unmade(self, command: commands.OpenBranch) -> int:
        """Return how many characters must be tokenised to build a branch's prompt; 0 if the prompt is cached
        already, or if the request has no conversation. These are the characters that follow the shared text,
        and those of the texts that the branch needs.

        command: the command that opens the branch.
        """
        if command.point.id in self._turns or self.prompt.conversation is None:
            return 0
        return self.prompt.conversation.num_branch_characters + sum(len(text) for _, text in command.parents)

    def take_turn(self, command: commands.Open) -> PromptTurn:
        """Return the prompt of the sequence that a command opens, and remember it as the prompt of that
        ordinal, so that `turn` returns it when the sequence is opened again after a repair. For a score the
        first prompt is returned, as for every command without a prompt of its own, and nothing is remembered.

        command: the command that opens the sequence.

        Raises InvalidRequest if the prompt cannot be built.
        """
        turns = self.prompt.conversation
        match command:
            case commands.OpenBranch():
                return self.branch_turn(command)
            case commands.OpenSkeleton(ordinal=ordinal) if turns:
                self._turns[ordinal] = turns.skeleton
                return turns.skeleton
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
        """The tokens that the branches of a forking model fork: the prompt, and everything the model has
        written after it. For any other request the prompt of its direct answer, which is empty if it is
        planned.
        """
        return self.prompt.answer + (self.plan.context if isinstance(self.plan, ForkPlan) else ())

    def ask_for(self, command: commands.Open) -> Ask:
        """Return the request's parameters, adapted to the sequence that a command opens. In all cases that
        are not named here, the client's parameters are returned unchanged.

        A score writes one token with default sampling and logprobs. A skeleton has no `min_tokens`. A branch
        gets biases of MIN_BIAS for the tokens that the conversation excludes, except where the client gave a
        bias; no such bias is added if there would be more than MAX_BIASES. For a model that forks by tags,
        the only stop token of a branch is the tag that ends a thread, and the only stop token of any other
        sequence is the tag that ends the outlines.

        command: the command that opens the sequence.
        """
        if isinstance(command, commands.OpenScore):
            return scoring(self.ask)
        if isinstance(command, commands.OpenSkeleton):
            return replace(self.ask, min_tokens=0)
        if isinstance(command, commands.OpenBranch) and (biases := self._branch_biases()):
            return replace(self.ask, sampling=replace(self.ask.sampling, logit_bias=biases))
        if self.prompt.tags is None:
            return self.ask
        threads = isinstance(command, commands.OpenBranch)
        tag = self.prompt.tags.thread_end if threads else self.prompt.tags.outlines_end
        return replace(self.ask, stop_token_ids=(tag,))

    def _branch_biases(self) -> tuple[tuple[int, float], ...]:
        """Return the biases of a branch as (token id, bias), by ascending id: the client's, and MIN_BIAS for
        tokens that no branch may write. A bias of the client is kept. Return () if the client's biases
        suffice, or if both together were too many.
        """
        turns = self.prompt.conversation
        unwanted = turns.unwanted if turns else ()
        biases = dict.fromkeys(unwanted, MIN_BIAS) | dict(self.ask.sampling.logit_bias)
        if not unwanted or len(biases) > MAX_BIASES:
            return ()
        return tuple(sorted(biases.items()))

    def shares(self, turn: PromptTurn) -> int:
        """Return how many first tokens of a prompt are forked from the request's prefix; 0 if the request has
        none in the ring.

        turn: the prompt of one of the request's sequences.
        """
        return min(turn.shared, self.shared) if self.node else 0

    def turn(self, ordinal: int) -> PromptTurn:
        """Return the prompt of the sequence with this ordinal; the first prompt if none was remembered.

        ordinal: 0 for the skeleton or the answer, PLAN_ORDINAL for a speculative skeleton, else the point's
            id.
        """
        return self._turns.get(ordinal) or self.first_turn

    # --- records ---

    def play(self, record: records.Record) -> Iterator[commands.Command]:
        """Apply a record to the plan and to the text, and yield the commands that follow; some records have
        none. A StepRecord applies each outcome to its sequence, and skips outcomes of unknown ordinals and of
        sequences that were replaced; it always renews the leases. An AdmittedRecord starts the plan, a
        BranchRecord opens a branch, a ReopenedRecord restarts the count of a sequence's draft rounds, a
        CancelledRecord cancels the plan, and a FailedRecord yields the failure of the request.

        The engine plays a record when it happens, and a later master plays it again from the journal. The
        caller must execute each command before it asks for the next one, because later commands depend on the
        effects of earlier ones.

        record: what happened to the request, with times in seconds since its arrival.

        Raises WireError if a result is missing, and Unavailable if this master words a branch's prompt
        differently than the master that wrote the record. Raises StopIteration or KeyError for a record of a
        branch or sequence that is unknown.
        """
        plan = self.plan
        match record:
            case records.StepRecord(at, outcomes):
                plan.on_step([outcome for _, outcome in outcomes], self.since + at)
                for ordinal, outcome in outcomes:
                    sequence = self.sequences.get(ordinal)
                    # The journal stores sequence id 0: the sequences of a master before a restart are gone.
                    if sequence and outcome.sequence in (0, sequence.id):
                        yield from self._read(sequence, outcome, self.since + at)
                # After all outcomes of the step: none of them belongs to a sequence that is opened again.
                yield from plan.pass_openings(self.since + at)
                yield commands.RenewLeases()
            case records.AdmittedRecord(at, found, plans):
                self.entered_ring = True
                self.num_cached_tokens = found
                self.has_room_for_plan = plans
                yield from plan.start(self.asked_tokens, self.since + at, found, plans)
            case records.BranchRecord(id, wording):
                point = next(one for one in plan.ready() if one.id == id)
                records.check_prompt_unchanged(wording, self.branch_wording(plan.preview(point)))
                yield from plan.open_branch(point)
            case records.ReopenedRecord(ordinal):
                log = self.sequences[ordinal].log
                log.reopen(log.opening)
            case records.CancelledRecord(at):
                yield from plan.cancel(self.since + at)
            case records.FailedRecord(name, message):
                yield commands.FailRequest(records.error_of(name, message))

    def _read(self, sequence: ActiveSequence, outcome: Outcome, now: float) -> Iterator[commands.Command]:
        """Apply one sequence's outcome of a step: log its tokens, detokenize them, and yield the commands
        that follow; none for a repeated outcome. An outcome that ends the sequence also yields CloseSequence,
        and then what the plan does at its end, unless the plan has opened another sequence in its place.

        sequence: the sequence that the step advanced.
        outcome: its accepted tokens and their logprobs, and why it ended, if it did.
        now: the time of the step, in seconds of the engine's clock.
        """
        plan = self.plan
        ordinal = sequence.ordinal
        pieces = sequence.read(sequence.log.append(outcome), outcome.chances, outcome.prompt_chances)
        if outcome.end:
            yield commands.CloseSequence(ordinal)
        yield from plan.on_text(ordinal, pieces, now)
        # If the ordinal is occupied again, the plan has already opened another sequence in its place.
        if outcome.end and ordinal not in self.sequences:
            yield from plan.on_end(ordinal, outcome.end, now)

    # --- in the ring ---

    @property
    def lineage(self) -> list[PrefixNode]:
        """The prefix that the request forks and all ancestors of that prefix; empty if it forks nothing."""
        return list(ancestors(self.node)) if self.node else []

    @property
    def in_ring(self) -> bool:
        """True if at least one sequence of the request is in the ring; False while all wait to be opened
        again, or without any.
        """
        return any(not sequence.lost for sequence in self.sequences.values())

    @property
    def has_lost(self) -> bool:
        """True if at least one sequence waits to be opened again in the next ring."""
        return any(sequence.lost for sequence in self.sequences.values())

    @property
    def lost(self) -> list[ActiveSequence]:
        """Sequences that wait to be opened again in the next ring, by ascending ordinal; empty if none was
        lost.
        """
        return [self.sequences[ordinal] for ordinal in sorted(self.sequences) if self.sequences[ordinal].lost]

    def mark_lost(self) -> None:
        """Record that the ring is gone: every sequence has to be opened again, and the prefix no longer
        exists.
        """
        self.node = None
        self.family = None
        for sequence in self.sequences.values():
            sequence.lost = True

    def overdue(self, missing: str, seconds: float, waiting_for: str) -> SpecsotError:
        """Return the error that ends the request after it waited in vain for a ring, or for a larger ring. If
        the present ring is complete but too small for the request, the error is TooLarge, else Unavailable.
        The error names how long the request has waited.

        missing: why there was no ring when the wait began, in words.
        seconds: how long the request has waited.
        waiting_for: what the ring lacks now, in words; "" if the ring is complete.
        """
        if self.misfit and not waiting_for:
            message = f"{self.misfit}; no larger ring came within {seconds:g} s"
            return TooLarge(message, field=self.misfit.field)
        return Unavailable(f"{missing}; after {seconds:g} s the ring is still waiting for {waiting_for}")

    def fork(self, turn: PromptTurn) -> Fork | None:
        """Return the fork that a sequence begins with: the prefix, and how many of its first tokens are
        shared. Return None if the prompt shares no token with the request's prefix.

        turn: the prompt of the sequence.
        """
        return Fork(self.node.sequence, shared) if self.node and (shared := self.shares(turn)) else None

    # --- alarms ---

    def set_alarm(self, event: object, clock: Clock, seconds: float, while_running: bool = False) -> None:
        """Pass an event to the request's engine after a delay. A pending alarm with an event of the same
        class is replaced. The alarm is removed when its time has come, before the event is passed on.

        event: an object of one of the classes in `core.inputs`.
        clock: schedules the call.
        seconds: the delay, from now.
        while_running: True to count only time during which this process ran.
        """
        kind = type(event)
        self.clear_alarms(kind)

        def ring() -> None:
            """Forget this alarm, as its time has come, and pass its event to the engine."""
            del self._alarms[kind]
            self.home.handle(event)

        later = clock.later_while_running if while_running else clock.later
        self._alarms[kind] = later(seconds, ring)

    def has_alarm(self, event_class: type[object]) -> bool:
        """Return True if an alarm with an event of this class is pending.

        event_class: one of the classes in `core.inputs`.
        """
        return event_class in self._alarms

    def clear_alarms(self, *event_classes: type[object]) -> None:
        """Cancel the pending alarms with events of these classes, or all alarms if no class is given. Nothing
        happens for a class without an alarm.

        event_classes: classes of `core.inputs`, such as `DeadlinePassed`.
        """
        for kind in event_classes or tuple(self._alarms):
            if timer := self._alarms.pop(kind, None):
                timer.cancel()


def is_drafted(request: RequestState, ring: RingState) -> bool:
    """Return True if the ring drafts for this request: the ring has a drafter, and the client named either no
    drafter or one that the ring has. Return False if the client named "none" or a drafter that this ring
    lacks.

    request: the request, with the drafter that its client named, if any.
    ring: the state of the ring that runs the request.
    """
    return ring.has_drafter and request.ask.drafter in (None, *ring.drafters)
