"""Writes requests to the journal, and replays them from it after a restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import structlog

from specsot import errors
from specsot.core.frames import Outcome
from specsot.core.skeleton import PlanRules
from specsot.errors import PlanError, SpecsotError, Unavailable
from specsot.events import Numbered
from specsot_master.core.commands import (
    CloseSequence,
    Command,
    FailRequest,
    OpenAnswer,
    OpenBranch,
    OpenPolish,
    OpenScore,
    OpenSkeleton,
)
from specsot_master.core.router import scoring
from specsot_master.core.sequence import SequenceFactory, TokenLog
from specsot_master.engine.request_state import ActiveSequence, RequestState
from specsot_master.journal import (
    AdmittedRecord,
    BranchRecord,
    CancelledRecord,
    FailedRecord,
    Journal,
    JournaledRequest,
    LapRecord,
    Record,
    ReopenedRecord,
    fingerprint_of,
)
from specsot_master.prompts import PromptTurn
from specsot_master.text import Text


class RequestJournal:
    """now in seconds of the engine's clock. wall: seconds of a clock that goes on without the master."""

    def __init__(self, journal: Journal | None = None, wall: Callable[[], float] = time.time) -> None:
        self._journal, self._wall = journal, wall

    def record_arrival(self, request: RequestState, now: float) -> None:
        if self._journal and request.ask.resumable:
            began = self._wall() - (now - request.since)
            wording = fingerprint_of(request.wording)
            kept = JournaledRequest(
                request.id, request.client, request.ask, request.seed, began, (), request.owner, wording
            )
            self._journal.put(request.id, kept)

    def age(self, kept: JournaledRequest) -> float:
        """Seconds since it came."""
        return max(self._wall() - kept.began, 0.0)

    def record(self, request: RequestState, record: Record) -> None:
        if self._journal and request.ask.resumable:
            self._journal.put(request.id, record)

    def record_branch(self, request: RequestState, point: int) -> None:
        if self._journal:
            self.record(request, BranchRecord(point, fingerprint_of(request.turn(point).suffix)))

    def forget(self, id: str) -> None:
        """Nobody can resume it any more."""
        if self._journal:
            self._journal.put(id, None)

    async def secure(self, request: RequestState) -> None:
        """What its client is about to see is written down."""
        if self._journal and request.ask.resumable:
            await self._journal.secure()


log = structlog.get_logger()


class JournalReplay:
    """`over`: it has ended. `error`: with this."""

    def __init__(self, request: RequestState, text: Text, factory: SequenceFactory) -> None:
        self._request, self._text, self._factory = request, text, factory
        self.error: SpecsotError | None = None

    @property
    def over(self) -> bool:
        return self.error is not None or self._request.plan.finished

    def run(self, kept: JournaledRequest) -> None:
        """Nothing follows its end. What does not play ends it, too."""
        try:
            check_prompt_unchanged(kept.wording, self._request.wording)
            for record in kept.records:
                if self.over:
                    return
                self._take(record)
        except SpecsotError as error:  # what ended it then ends it now
            self.error = error
        except Exception:
            log.exception("request lost", **self._request.log_fields)
            self.error = Unavailable("what was written down of this request cannot be played again")

    def _take(self, record: Record) -> None:
        request = self._request
        match record:
            case AdmittedRecord(at, found):
                request.begun, request.found = True, found
                self._obey(request.plan.start(request.asked_tokens, request.since + at, found))
            case BranchRecord(id, wording):
                self._branch(id, wording)
            case LapRecord(at, said):
                request.plan.on_lap((outcome for _, outcome in said), request.since + at)
                for ordinal, outcome in said:
                    if sequence := request.sequences.get(ordinal):
                        self._learn(sequence, outcome, request.since + at)
            case ReopenedRecord(ordinal):
                log = request.sequences[ordinal].log
                log.reopen(log.opening)
            case CancelledRecord(at):
                self._obey(request.plan.cancel(request.since + at))
            case FailedRecord(name, message):
                self.error = _error_of(name, message)

    def _branch(self, id: int, wording: str) -> None:
        plan = self._request.plan
        point = next(one for one in plan.ready() if one.id == id)
        order = plan.preview(point)
        turn = self._request.branch_turn(order)
        check_prompt_unchanged(wording, turn.suffix)
        self._open(id, turn, order.budget)
        self._obey(plan.open_branch(point))

    def _learn(self, sequence: ActiveSequence, outcome: Outcome, now: float) -> None:
        plan, ordinal = self._request.plan, sequence.ordinal
        pieces = sequence.read(sequence.log.append(outcome), outcome.chances)
        if outcome.end:
            self._request.sequences.pop(ordinal)
        self._obey(plan.on_text(ordinal, pieces, now))
        if outcome.end and ordinal not in self._request.sequences:
            self._obey(plan.on_end(ordinal, outcome.end, now))

    def _obey(self, commands: Iterable[Command]) -> None:
        request = self._request
        for command in commands:
            match command:
                case Numbered():
                    request.events.push(command)
                case OpenAnswer(limit):
                    self._open(0, request.answer_turn(), limit)
                case OpenSkeleton(limit, rules, constrained):
                    self._open(0, request.skeleton_turn(), limit, rules if constrained else None)
                case OpenPolish(text, limit):
                    self._open(0, request.polish_turn(text), limit)
                case OpenScore():
                    self._open(0, request.first_turn, 1, scored=True)
                case OpenBranch():
                    pass  # opened by its own record
                case CloseSequence(ordinal):
                    request.sequences.pop(ordinal, None)
                case FailRequest(error):
                    self.error = error

    def _open(
        self, ordinal: int, turn: PromptTurn, limit: int, rules: PlanRules | None = None, scored: bool = False
    ) -> None:
        """As it was first asked for; pages, lease and fork are the next ring's."""
        request = self._request
        opening = self._factory.writer(
            len(turn.tokens),
            scoring(request.ask) if scored else request.ask,
            request.seed,
            ordinal=ordinal,
            limit=limit,
            drafted=False,
            rules=rules,
        )
        log = TokenLog(opening, turn.tokens)
        request.sequences[ordinal] = ActiveSequence(
            log, 0, 0, self._text.detokenizer(), self._text.spell, lost=True
        )


def check_prompt_unchanged(before: str, tokens: Sequence[int]) -> None:
    """Raises Unavailable: what was written then answered another prompt. before: "" for unknown."""
    if before and before != fingerprint_of(tokens):
        raise Unavailable("the master was restarted, and words its prompts differently now; ask again")


def _error_of(name: str, message: str) -> SpecsotError:
    """As it was told then."""
    kind = getattr(errors, name, SpecsotError)
    return PlanError(message, "") if kind is PlanError else kind(message)
