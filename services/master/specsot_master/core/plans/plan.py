"""The state machine of one request: methods receive events and return commands and client events.

    start -> [score ->] skeleton -> plan -> branches -> [polish ->] finished
         \\-> answer <--/ ------------------------------------/

A request in mode auto whose plan is speculative opens the direct answer and right after it the skeleton. The
client reads the direct answer from its first token. If the plan is used, the
direct answer is cut to its introduction, and the branches follow it; otherwise the direct answer continues,
and the plan is discarded.

If fewer than two points of a plan are usable, the model answers directly instead. If the client asked for a
polished answer, a last turn rewrites the branches' merged text. The rewritten text is the answer; the merged
text is sent to the client only if there is no such turn.

`max_new_tokens` bounds everything together: the plan with its markers, the headings of the merged answer,
every branch with its end token, or the direct answer that the model chose instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Final

from specsot import events
from specsot.core.frames import End, Outcome
from specsot.core.list_plan import ListReader
from specsot.core.skeleton import MAX_POINTS, PlanReader, Point, write_plan
from specsot.errors import PlanError
from specsot.params import Ask
from specsot_master.core.commands import (
    REASON_OF_END,
    CloseSequence,
    Command,
    FailRequest,
    OpenAnswer,
    OpenBranch,
    OpenPolish,
    OpenScore,
    OpenSkeleton,
)
from specsot_master.core.limits import (
    CLOSING_AIM,
    MIN_BRANCH_TOKENS,
    aim_of,
    least_of,
    length_of_things,
    mode_of,
    plan_limit,
    rules_of,
    share_out,
    skeleton_limit,
)
from specsot_master.core.plans.answer import FirstSequence
from specsot_master.core.plans.answer_forms import UsualLengths
from specsot_master.core.plans.branches import PlanBranches
from specsot_master.core.plans.cuts import BRANCH_LOOPS, DIRECT_LOOPS, LoopRule
from specsot_master.core.plans.forecast import Outlook
from specsot_master.core.plans.guards import plan_of
from specsot_master.core.plans.introduction import MAX_INTRODUCTION_TOKENS
from specsot_master.core.plans.merged_answer import heading_of
from specsot_master.core.plans.openings import Beginnings
from specsot_master.core.plans.router import (
    ASKED_FOR,
    Decision,
    ScorePrompt,
    asks_for_things,
    ends_loops,
    judge_by,
    points_asked,
    question_of,
)
from specsot_master.core.plans.short_answers import ShortAnswer
from specsot_master.core.plans.speculation import NO_ROOM, PLAN_ORDINAL, Speculation, Verdict
from specsot_master.core.plans.text_pieces import TextPiece
from specsot_master.core.plans.time_limit import TimeLimit
from specsot_master.core.plans.wording import PARAGRAPH_TOKENS
from specsot_master.core.stats import OutputTokens, RequestTally

# Tokens. Bounds the prompt logprobs in one event, so that with 20 candidates per token an event still fits a
# message.
PROMPT_PART = 512
# Points. From so many on, a speculative plan gets a closing paragraph. Given by the aim of the feature.
MIN_CLOSED_POINTS: Final = 4


class RequestPlan:
    """The plan of one request, from its admission to its last event: a state machine from events to commands.

    Ordinal 0 is the score, the skeleton, the direct answer or the polish turn; PLAN_ORDINAL is the skeleton
    of a speculative plan, whose direct answer has ordinal 0; every other ordinal is a point's id.

    Every method returns commands in the order in which they must be executed. The client events among them
    are numbered without a gap. Once `finished` is True, every method returns nothing. `reason` says why the
    request finished; it stays None if an invalid plan ended it.
    """

    def __init__(
        self,
        ask: Ask,
        request: str,
        seed: int,
        model: str = "",
        now: float = 0.0,
        size: Callable[[str], int] = len,
        told: Sequence[str] | None = None,
        decision: Decision | None = None,
        score: ScorePrompt | None = None,
        most: int | None = None,
        speculates: bool = False,
        answer_tokens: UsualLengths | None = None,
        paragraph_tokens: int | None = PARAGRAPH_TOKENS,
        shows_markers: bool = False,
        beginnings: Beginnings = lambda _: (),
    ) -> None:
        """Create the plan of a request. Nothing is decided or opened before `start`.

        ask: what the client asks for.
        request: the request's id, for the Started event.
        seed: the request's sampling seed, for the Started event.
        model: the public name of the model, for the Started event; "" for no name.
        now: when the request arrived, in seconds of the engine's clock.
        size: returns the number of tokens of a text that the model did not write (a heading).
        told: the instructions in the prompt of a model that plans in numbered lists; None for a model that
            plans in markers.
        decision: whether to plan; None to follow the request's mode.
        score: the router's score prompt if the model's score decides whether to plan, else None.
        most: the most points of a list that fit the client's time limit, or None for no such limit. It does
            not bound a plan in markers.
        speculates: True if a planned answer is begun together with the direct answer.
        answer_tokens: the usual lengths of direct answers to such a question, by form, at which a speculative
            planned answer aims; None for no aim. They have no effect if the plan is not speculative.
        paragraph_tokens: a direct answer whose first paragraph has so many tokens is not planned; None if the
            model answers in long paragraphs.
        shows_markers: True if the client reads a plan that the model wrote as a list in the language of
            markers. The skeleton's text is then sent once, when the plan is used, and has no logprobs.
        beginnings: returns the ids of the tokens with which a text that begins with a certain word or mark
            may begin.
        """
        self._ask = ask
        self._request = request
        self._seed = seed
        self._model = model
        self._decision = decision or Decision(mode_of(ask), ASKED_FOR)
        self._mode = self._decision.mode
        # Each heading is tokenized once, although several decisions need its number of tokens.
        self._size = cache(size)
        self._told = told
        self._listed = told is not None
        self._shows_markers = shows_markers
        self._beginnings = beginnings
        self._rules = rules_of(ask, self._listed, most, speculates)
        self._tally = RequestTally(now)
        self._number = 0
        self._outlook: Outlook | None = None  # The forecast, if there is one.
        whole = ask.finish_within_s
        self.deadline = TimeLimit(now + whole, whole, polishes=ask.polish) if whole else None
        # True until the branches are over, if the client wants them rewritten by a polish turn.
        self._to_polish = ask.polish
        # True once the polish turn was opened.
        self._polished = False
        self._branches: PlanBranches | None = None
        # Tokens of earlier sequences with ordinal 0: the score, an unusable plan, or the skeleton before a
        # polish turn.
        self._before = 0
        # The stop token of the client that ended a sequence, if one did.
        self._stop_token: int | None = None
        self._speculates = speculates
        self._answer_tokens = answer_tokens if speculates else None
        self._paragraph_tokens = paragraph_tokens
        # The skeleton and the direct answer that are decoded at the same time; None if only one of them is.
        self._speculation: Speculation | None = None
        self._solo = self._make_solo()
        self._solo_over = False
        # Why the direct answer ended, if it ended before the speculation was decided.
        self._solo_reason = events.Reason.STOP
        # The score prompt, or None once the score has been read.
        self._score = score
        self._scored: events.TokenLogprobs | None = None
        self._direct_text_sent = self._mode == "direct"
        self.finished = False
        self.reason: str | None = None

    @property
    def all_opened(self) -> bool:
        """True if the request will open no further sequence."""
        plan = self._branches
        return (
            self.finished or self._direct_text_sent or bool(plan and plan.all_opened and not self._to_polish)
        )

    @property
    def max_sequences(self) -> int:
        """The most sequences that the request may decode at the same time from now on, at least 1. Until a
        plan is known, it counts as one with as many points as the rules allow; a speculative plan may have a
        closing, and is decoded beside the direct answer.
        """
        most = self._ask.limits.max_parallel
        if self._branches:
            return max(min(len(self._branches.unfinished), most), 1)
        if self._direct_text_sent or self.finished:
            return 1
        if self._speculates:
            return max(min(self._rules.max_points + 1, most), 2)
        return min(self._rules.max_points, most)

    def apply_forecast(self, outlook: Outlook) -> None:
        """Use a forecast for the request, and for its time limit if it has one.

        outlook: the measured costs, with the sizes of this request.
        """
        self._outlook = outlook
        if self.deadline:
            self.deadline.outlook = outlook

    def start(self, prompt_tokens: int, now: float, found: int = 0, plans: bool = True) -> list[Command]:
        """Return the commands of an admitted request: the Started event, and the opening of the first
        sequence, which is the direct answer's if the plan is speculative. If the router's score decides, the
        first sequence is the score's.

        prompt_tokens: number of tokens of the prompt that a direct answer has.
        now: the time of admission, in seconds of the engine's clock.
        found: how many first tokens of the first prompt the ring had in its prefix cache; 0 for none.
        plans: False if the ring has no room for a speculative plan, so that the answer is direct; it has no
            effect if the plan is not speculative.
        """
        if self._speculates and not plans:
            self._speculates = False
            self._score = None
            self._answer_only(Decision("direct", NO_ROOM))
        self._tally.prompt_tokens = prompt_tokens
        self._tally.cached_tokens = min(found, prompt_tokens)
        forecast = self._outlook.of_both(now - self._tally.began) if self._outlook else None
        started = events.Started(
            self._request, self._model, self._ask.mode, self._seed, prompt_tokens, forecast
        )
        if self._score:
            self._tally.enter("decision", now)
            return [self._tell(started), OpenScore()]
        return [self._tell(started), *self._begin(now)]

    def on_step(self, outcomes: Iterable[Outcome], now: float) -> None:
        """Count one step of the ring. Must be called before `on_text` and `on_end`; nothing happens after the
        end.

        outcomes: what the step did for the request's sequences.
        now: the time of the step, in seconds of the engine's clock.
        """
        if not self.finished:
            self._tally.step(outcomes, now)

    def on_text(self, ordinal: int, pieces: Sequence[TextPiece], now: float) -> list[Command]:
        """Handle new text of a sequence. Return the commands that follow, in order; an empty list after the
        end or without pieces. If the client's time limit leaves no more time, the sequence or the plan is
        ended.

        ordinal: 0 for the score, the skeleton, the answer or the polish turn, PLAN_ORDINAL for a speculative
            skeleton, else the point's id.
        pieces: one piece per token, without the token that ended the sequence.
        now: the time of the step, in seconds of the engine's clock.
        """
        if self.finished or not pieces:
            return []
        if ordinal == PLAN_ORDINAL:
            return self._write_skeleton(pieces, now)
        told = self._note(pieces)
        over = False
        writes = ordinal or self._direct_text_sent or self._polished
        if self.deadline and writes:
            live = len(self._branches.live) if self._branches else 1
            pieces, over = self.deadline.take(ordinal, pieces, now, live)
        told += self._write_branch(ordinal, pieces, now) if ordinal else self._write_solo(pieces, now)
        plans = self._listed and not (writes or self._solo_over or self._score)
        if plans and self.deadline and self.deadline.ends_plan(now):
            return [*told, CloseSequence(0), *self._end_solo(End.LENGTH, now)]
        return [*told, *self._end_in_time(ordinal, now)] if over and not self.finished else told

    def _note(self, pieces: Sequence[TextPiece]) -> list[Command]:
        """Return the events for what the pieces carry besides text; an empty list if they carry nothing else.
        Prompt logprobs are split into events of at most PROMPT_PART tokens, so that each fits a message. A
        stop token of the client in the last piece is remembered for the Finished event.

        pieces: at least one piece.
        """
        if pieces[-1].stop in self._ask.stop_token_ids:
            self._stop_token = pieces[-1].stop
        scored = pieces[0].prompt
        starts = range(0, len(scored), PROMPT_PART)
        return [self._tell(events.PromptScored(1 + at, scored[at : at + PROMPT_PART])) for at in starts]

    def on_end(self, ordinal: int, end: End, now: float) -> list[Command]:
        """Handle the end of a sequence, whose text was passed to `on_text` before. Return the commands that
        follow; an empty list after the end. A branch whose opening is not settled yet only remembers its end,
        unless it failed or was cancelled; `pass_openings` ends it later.

        ordinal: 0 for the score, the skeleton, the answer or the polish turn, PLAN_ORDINAL for a speculative
            skeleton, else the point's id.
        end: why the sequence ended.
        now: the time of the step, in seconds of the engine's clock.
        """
        if self.finished:
            return []
        if ordinal == PLAN_ORDINAL:
            return self._end_skeleton(end, now)
        rest = self.deadline.rest(ordinal, whole=end is End.STOP) if self.deadline else ()
        if not ordinal:
            told = self._write_solo(rest, now) if rest else []
            return [*told, *self._end_solo(end, now)]
        told = self._write_branch(ordinal, rest, now)
        opening = self._branches[ordinal].opening if self._branches else None
        if opening and not opening.settled:
            if end in (End.STOP, End.LENGTH, End.GRAMMAR):
                opening.end = end
                return told
            told += self._write_branch(ordinal, opening.settle(), now)
        if self._branches and self._branches[ordinal].live:
            self._branches[ordinal].ended = end is End.STOP and not self._ask.include_stop_str_in_output
        return [*told, *self._end_branch(ordinal, REASON_OF_END[end], now)]

    def _end_in_time(self, ordinal: int, now: float) -> list[Command]:
        """End this sequence because of the client's time limit; return the commands that follow. Branches
        that have not been opened never are. They end with LENGTH, as this sequence does.

        ordinal: the sequence that has no time left.
        now: the present time, in seconds of the engine's clock.
        """
        branches = self._branches
        waiting = [branches.open(id).point.id for id in branches.unopened] if branches else []
        ends = [self.on_end(id, End.LENGTH, now) for id in (*waiting, ordinal)]
        return [CloseSequence(ordinal), *(command for end in ends for command in end)]

    def ready(self) -> tuple[Point, ...]:
        """Return the points whose branches may be opened now, the most urgent first; () if none may, without
        a plan, or after the end.
        """
        return self._branches.ready() if self._branches and not self.finished else ()

    def preview(self, point: Point) -> OpenBranch:
        """Return the command that would open a point's branch. Nothing changes. Its budget is the branch's
        own.

        point: a point of the plan, whose needs are met.
        """
        assert self._branches is not None
        branches = self._branches
        branch = branches[point.id]
        return OpenBranch(
            *(point, branches.points, branches.parents(point), branch.budget),
            *(branches.introduction, branch.opening.excluded, branch.soft_limit),
        )

    def open_branch(self, point: Point) -> list[Command]:
        """Mark a point's branch as opened, and return the command that opens it with its BranchStarted event.
        A branch that is opened again, because of its first words, has no further such event.

        point: a point that `ready` has returned.
        """
        assert self._branches is not None
        order = self.preview(point)
        branch = self._branches.open(point.id)
        if branch.opening.rewrites:
            return [order]
        return [order, self._tell(events.BranchStarted(point.id, point.title, order.budget))]

    def cancel(self, now: float) -> list[Command]:
        """Close all running sequences. The text so far becomes the answer. Return the commands; an empty list
        after the end.

        now: the present time, in seconds of the engine's clock.
        """
        return [] if self.finished else self._abandon(events.Reason.CANCELLED, now)

    def _begin(self, now: float) -> list[Command]:
        """Return the command that opens the direct answer or the skeleton, once it is decided which of the
        two it is. If the plan is speculative, both are opened. The direct answer comes first, so that its
        first token waits for nothing of the plan. Its text is withheld until its introduction is known.

        now: the present time, in seconds of the engine's clock.
        """
        rest = self._ask.limits.new_tokens - self._before
        if self._mode == "direct":
            self._tally.enter("direct", now)
            return [OpenAnswer(rest)]
        self._tally.enter("skeleton", now)
        limit = min(skeleton_limit(self._ask, self._listed, self._speculates), rest)
        if not self._speculates:
            return [OpenSkeleton(limit, self._rules, self._ask.constraint)]
        question = question_of(self._ask)
        length = ShortAnswer(self._paragraph_tokens)
        self._speculation = Speculation(
            self._solo, question, points_asked(question), asks_for_things(question), length
        )
        self._solo = self._begin_text(rest, loops=DIRECT_LOOPS if ends_loops(self._ask) else None)
        self._solo.visible = 0
        return [OpenAnswer(rest), OpenSkeleton(limit, self._rules, self._ask.constraint, PLAN_ORDINAL)]

    def _answer_only(self, decision: Decision) -> None:
        """Decide, before anything was opened, that the answer is a direct one. Nothing more will be opened
        after it.

        decision: a decision with the mode "direct", and its reason for the statistics.
        """
        self._decision = decision
        self._mode = "direct"
        self._solo = self._make_solo()
        self._direct_text_sent = True

    def _decide(self, end: End, now: float) -> list[Command]:
        """Decide between a direct answer and a plan by the score, whose sequence has ended. Return the
        commands that begin it. A score that failed or was cancelled ends the request. A direct answer is
        announced by a Planned event without points. The score counts as one token of the request.

        end: why the score's sequence ended.
        now: the present time, in seconds of the engine's clock.
        """
        if end in (End.FAILED, End.CANCELLED):
            return self._abandon(REASON_OF_END[end], now)
        assert self._score is not None
        self._decision = judge_by(self._scored, self._score)
        self._mode = self._decision.mode
        self._score = None
        self._before = 1
        self._solo = self._make_solo()
        self._direct_text_sent = self._mode == "direct"
        told_direct = [self._tell(events.Planned(()))] if self._direct_text_sent else []
        return [*told_direct, *self._begin(now)]

    def _make_solo(self) -> FirstSequence:
        """Return the reader of the text of ordinal 0: of a direct answer, or of a skeleton that may become
        one. Loops end only a direct answer, and only if `ends_loops` allows it.
        """
        reader = None if self._mode == "direct" else self._make_reader()
        rest = self._ask.limits.new_tokens - self._before
        loops = DIRECT_LOOPS if reader is None and ends_loops(self._ask) else None
        limit = plan_limit(self._ask)
        if self._speculates:
            limit = skeleton_limit(self._ask, self._listed, speculates=True)
        return self._begin_text(rest, reader, limit, loops)

    def _begin_text(
        self,
        limit: int,
        reader: PlanReader | ListReader | None = None,
        plan: int = 0,
        loops: LoopRule | None = None,
    ) -> FirstSequence:
        """Return a reader for the text of a sequence with ordinal 0. The stop token of an earlier sequence is
        forgotten.

        limit: the most tokens of a direct answer.
        reader: parses the plan language; None for a direct answer or a polish turn.
        plan: the number of tokens after which an unfinished plan is used as it is.
        loops: the rule that ends repetitive text, or None.
        """
        ask = self._ask
        self._stop_token = None
        return FirstSequence(ask.stop, limit, reader, plan, loops, ask.min_tokens, self._shown_stops)

    @property
    def _branch_loops(self) -> LoopRule | None:
        """The rule by which a repetitive point of a list, or a repetitive polish turn, is ended. None if such
        text is never ended.
        """
        return BRANCH_LOOPS if self._listed and not self._ask.min_tokens else None

    @property
    def _shown_stops(self) -> tuple[str, ...]:
        """The stop strings that stay in the text; () if the client wants them left out."""
        return self._ask.stop if self._ask.include_stop_str_in_output else ()

    def _make_reader(self) -> PlanReader | ListReader:
        """Return a parser for the model's plan language. It accepts up to MAX_POINTS points in markers, as
        `_settle_solo` drops those for which there is no room.
        """
        rules = replace(self._rules, max_points=MAX_POINTS)
        return ListReader(self._rules) if self._listed else PlanReader(rules)

    # --- ordinal 0 ---

    def _write_solo(self, pieces: Sequence[TextPiece], now: float) -> list[Command]:
        """Return the commands that follow from new text of ordinal 0; an empty list if its text is over, or
        for the router's score, which is only remembered. An invalid plan in markers ends the request with an
        error. If the text is over by a stop string or a limit, its sequence is closed. While a speculative
        plan is not decided, only the introduction's text is told.

        pieces: one piece per token.
        now: the present time, in seconds of the engine's clock.
        """
        if self._solo_over:
            return []
        if self._score:
            self._scored = pieces[0].logprobs
            return []
        try:
            for piece in pieces:
                self._solo.write(piece)
        except PlanError as error:
            return self._give_up(error)
        step = sum(piece.token is not None for piece in pieces)
        if self._undecided:
            return self._speculate(pieces, step, now)
        told = self._direct_events(step)
        if self._solo.over:
            return [*told, CloseSequence(0), *self._settle_solo(self._solo.over, now)]
        return told

    def _end_solo(self, end: End, now: float) -> list[Command]:
        """Return the commands that follow from the end of the sequence with ordinal 0; an empty list if its
        text is over already. A failed or cancelled sequence ends the request with the text so far, and an
        invalid plan in markers ends it with an error. A speculative plan's direct answer that ends waits for
        the decision.

        end: why the sequence ended.
        now: the present time, in seconds of the engine's clock.
        """
        if self._solo_over:
            return []
        if self._score:
            return self._decide(end, now)
        if end in (End.FAILED, End.CANCELLED):
            return self._abandon(REASON_OF_END[end], now)
        self._solo.ended = end is End.STOP and not self._ask.include_stop_str_in_output
        try:
            self._solo.finish()
        except PlanError as error:
            return self._give_up(error)
        if spec := self._undecided:
            if spec.direct_ended:
                return []
            self._solo_reason = REASON_OF_END[end]
            spec.end_direct()
            return self._speculate((), 0, now)
        return [*self._direct_events(0), *self._settle_solo(REASON_OF_END[end], now)]

    def _direct_events(self, step: int) -> list[Command]:
        """Return events for the new text of ordinal 0: skeleton text, or text of the answer; an empty list if
        there is none. When the text turns out to be a direct answer, a Planned event without points comes
        first.

        step: how many tokens the present step added.
        """
        told = self._skeleton_events(self._solo)
        if self._solo.direct and not (self._direct_text_sent or self._polished or self._speculation):
            self._direct_text_sent = True
            self._tally.rename("direct")
            told.append(self._tell(events.Planned(())))
        delta = self._solo.take_delta()
        logprobs = self._solo.take_logprobs()
        if delta or logprobs:
            told.append(self._tell(events.MergedText(self._solo.taken - len(delta), delta, logprobs, step)))
        return told

    def _skeleton_events(self, skeleton: FirstSequence) -> list[Command]:
        """Return the event for new text of the skeleton. The list is empty if there is no new text, and for a
        list that the client reads in markers, which `_branch_out` sends.

        skeleton: reads the skeleton's sequence.
        """
        if self._shows_markers:
            return []
        raw = skeleton.take_raw()
        logprobs = skeleton.take_raw_logprobs()
        return [self._tell(events.SkeletonText(raw, logprobs))] if raw or logprobs else []

    def _settle_solo(self, reason: events.Reason, now: float) -> list[Command]:
        """Handle the end of the text of ordinal 0: start its plan's branches, or finish if the text is the
        answer. If fewer than two points of a plan are usable, a direct answer is opened instead. Half of the
        tokens that are left are kept for a polish turn. Points beyond the rules' number, and those for which
        there is no time, are left out.

        reason: why the text ended.
        now: the present time, in seconds of the engine's clock.
        """
        self._solo_over = True
        if not self._solo.planned:
            return self._finish(reason, now)
        rest = self._ask.limits.new_tokens - self._before - self._solo.written
        points = plan_of(
            self._solo.points,
            reason is events.Reason.LENGTH,
            question_of(self._ask),
            rest if self._listed else None,
            self._told or (),
        )
        if not points:
            return self._answer_instead(rest, now)
        among: Sequence[Point] = points[: self._rules.max_points]
        among = self.deadline.fit(among, now) if self.deadline else among
        cut = reason is events.Reason.LENGTH or len(among) < len(points)
        return self._branch_out(among, rest // 2 if self._to_polish else rest, cut, now)

    def _branch_out(
        self, points: Sequence[Point], rest: int, cut: bool, now: float, introduction: str = ""
    ) -> list[Command]:
        """Start the branches of these points, and the closing if the plan has one. Return the Planned event,
        after the plan's text if the client reads a list in markers; `ready` then returns the first branches.
        A speculative plan with at least MIN_CLOSED_POINTS points has a closing paragraph. Points for which
        there are too few tokens are left out. The event carries a forecast if there is one.

        points: the points that the guards kept, at least one.
        rest: number of tokens for all headings and branches together.
        cut: True if a limit has shortened the plan.
        now: the present time, in seconds of the engine's clock.
        introduction: the text before the first point; "" if the plan was not speculative.
        """
        headings = {point.id: self._size(heading_of(point)) for point in points}
        closing = len(points) + 1 if self._speculation and len(points) >= MIN_CLOSED_POINTS else None
        aim = self._aim_of(points, headings, closing)
        if closing:
            # The closing has as much room as a point; its soft end is its first sentence.
            points = (*points, Point(closing, points[0].length, ""))
        costs = headings | ({closing: 0} if closing else {})
        shares = share_out(points, costs, rest, MIN_BRANCH_TOKENS, self._ask.limits.max_branch_tokens)
        shares = replace(shares, headings={id: n for id, n in shares.headings.items() if id != closing})
        cut = cut or len(shares.points) < len(points)
        branches = self._branches = PlanBranches(
            shares,
            *(self._ask.stop, self._ask.limits.max_parallel, cut, self._branch_loops),
            least=partial(least_of, self._ask),
            shown=self._shown_stops,
            # A stop string within a held sentence would be found late; plans in markers end by one.
            holds_sentences=self._listed and not self._ask.stop,
            introduction=introduction,
            closing=closing,
            aim=aim,
            question=question_of(self._ask),
            beginnings=self._beginnings,
        )
        self._tally.enter("branches", now)
        since = now - self._tally.began
        skeleton = self._speculation.skeleton if self._speculation else self._solo
        written = self._before + skeleton.written
        forecast = self._outlook.of_plan(shares.points, since, written) if self._outlook else None
        shown: list[Command] = []
        if self._shows_markers:
            shown = [self._tell(events.SkeletonText(write_plan(branches.planned)))]
        return [*shown, self._tell(events.Planned(branches.planned, forecast))]

    def _aim_of(
        self, points: Sequence[Point], headings: Mapping[int, int], closing: int | None
    ) -> int | None:
        """Return how many tokens each point should have. Return None if the plan has no aim, or if the client
        wants the model's end tokens ignored: then each branch writes all of its share.

        The shown text is to be as long as a direct answer of the same form as this request's direct answer
        usually is, scaled to the number of things if the introduction or the question names one
        (`length_of_things`). The tokens of the introduction, the headings and the closing are taken off the
        aim first.

        points: the points of the plan, without the closing.
        headings: tokens of each point's heading, by point id.
        closing: the id of the closing, or None if the plan has none.
        """
        spec = self._speculation
        if self._answer_tokens is None or spec is None or self._ask.ignore_eos:
            return None
        usual = length_of_things(self._answer_tokens.of(spec.form.form or "plain"), spec.named_count)
        others = sum(headings.values()) + len(self._solo.tokens) + (CLOSING_AIM if closing else 0)
        return aim_of(usual, len(points), others)

    # --- a plan and a direct answer at the same time ---

    @property
    def _undecided(self) -> Speculation | None:
        """The speculation until it is decided; None afterwards, and for a request whose plan is not
        speculative.
        """
        spec = self._speculation
        return spec if spec and not spec.decided else None

    def _speculate(self, pieces: Sequence[TextPiece], step: int, now: float) -> list[Command]:
        """Handle new text of the direct answer, or its end, while the plan is not decided. Return the
        commands that follow. Text after the introduction is withheld. If the direct answer must end by
        itself, its sequence is closed, and its reason is kept for later.

        pieces: the next pieces of the direct answer; empty at its end.
        step: how many tokens the present step added.
        now: the present time, in seconds of the engine's clock.
        """
        spec = self._speculation
        assert spec is not None
        spec.read_direct(pieces)
        self._solo.visible = spec.introduction.visible
        told = self._direct_events(step)
        if self._solo.over and not spec.direct_ended:
            self._solo_reason = self._solo.over
            spec.end_direct()
            told.append(CloseSequence(0))
        return [*told, *self._take_verdict(spec, now)]

    def _write_skeleton(self, pieces: Sequence[TextPiece], now: float) -> list[Command]:
        """Handle new text of a speculative plan. Return the commands that follow; an empty list if the plan
        is complete or not needed any more. If the plan is over by a stop string or a limit, its sequence is
        closed and its points are settled.

        pieces: the next pieces of the plan, one per token.
        now: the present time, in seconds of the engine's clock.

        Raises PlanError if the text is a plan in markers without a valid line.
        """
        spec = self._undecided
        if spec is None or spec.points is not None:
            return []
        for piece in pieces:
            spec.skeleton.write(piece)
        told = self._skeleton_events(spec.skeleton)
        if spec.skeleton.over:
            return [*told, CloseSequence(PLAN_ORDINAL), *self._settle_skeleton(spec, spec.skeleton.over, now)]
        return told

    def _end_skeleton(self, end: End, now: float) -> list[Command]:
        """Handle the end of a speculative plan's sequence. Return the commands that follow; an empty list if
        the plan is complete or not needed any more. If the sequence failed, the direct answer is used.

        end: why the sequence ended.
        now: the present time, in seconds of the engine's clock.

        Raises PlanError if the text is a plan in markers without a valid line.
        """
        spec = self._undecided
        if spec is None or spec.points is not None:
            return []
        if end in (End.FAILED, End.CANCELLED):
            spec.points = ()
            return self._take_verdict(spec, now)
        spec.skeleton.ended = end is End.STOP and not self._ask.include_stop_str_in_output
        spec.skeleton.finish()
        return [*self._skeleton_events(spec.skeleton), *self._settle_skeleton(spec, REASON_OF_END[end], now)]

    def _settle_skeleton(self, spec: Speculation, reason: events.Reason, now: float) -> list[Command]:
        """Apply the guards to a speculative plan that is complete, and return the commands that follow. Fewer
        than two usable points mean that the direct answer is used.

        spec: the plan and the direct answer that are decoded at the same time.
        reason: why the plan ended; LENGTH if a limit cut it.
        now: the present time, in seconds of the engine's clock.
        """
        spec.cut = reason is events.Reason.LENGTH
        points = spec.skeleton.points if spec.skeleton.planned else ()
        rest = self._ask.limits.new_tokens - self._before - spec.skeleton.written
        spec.points = plan_of(points, spec.cut, question_of(self._ask), rest, self._told or ())
        return self._take_verdict(spec, now)

    def _take_verdict(self, spec: Speculation, now: float) -> list[Command]:
        """Use the plan or the direct answer, if the tokens so far decide between them. Return the commands
        that follow; an empty list as long as they do not decide.

        spec: the plan and the direct answer that are decoded at the same time.
        now: the present time, in seconds of the engine's clock.
        """
        match spec.verdict:
            case Verdict.PLAN:
                return self._use_plan(spec, now)
            case Verdict.DIRECT:
                return self._use_direct(spec, now)
            case Verdict.OPEN:
                return []

    def _use_plan(self, spec: Speculation, now: float) -> list[Command]:
        """End the direct answer after its introduction, and start the branches. If there are too few tokens
        for two points, use the direct answer. Return the commands that follow. Points beyond those that the
        introduction promises, or that the rules allow, are left out.

        spec: the plan, which is complete, and the direct answer, whose introduction is known.
        now: the present time, in seconds of the engine's clock.
        """
        points = spec.promised_points[: self._rules.max_points]
        # A plan that has reached its own usual length is not incomplete for that.
        limited = spec.cut and plan_limit(self._ask) <= skeleton_limit(self._ask, True, speculates=True)
        cut = limited or len(points) < len(spec.promised_points)
        rest = self._ask.limits.new_tokens - self._before - spec.skeleton.written - MAX_INTRODUCTION_TOKENS
        if rest < sum(self._size(heading_of(point)) + MIN_BRANCH_TOKENS for point in points[:2]):
            return self._use_direct(spec, now)
        spec.decided = True
        self._solo.abridge(spec.introduction_text)
        told = self._direct_events(0)
        self._solo_over = True
        rest += MAX_INTRODUCTION_TOKENS - len(self._solo.tokens)
        return [*told, CloseSequence(0), *self._branch_out(points, rest, cut, now, spec.introduction_text)]

    def _use_direct(self, spec: Speculation, now: float) -> list[Command]:
        """End the plan, release the withheld text of the direct answer, and let that answer continue. Return
        the commands that follow. If the direct answer has ended already, the request finishes.

        spec: the plan and the direct answer that are decoded at the same time.
        now: the present time, in seconds of the engine's clock.
        """
        spec.decided = True
        self._decision = Decision("direct", spec.reason or events.NO_PLAN)
        self._direct_text_sent = True
        self._solo.visible = None
        self._tally.enter("direct", now)
        told = [CloseSequence(PLAN_ORDINAL), self._tell(events.Planned(())), *self._direct_events(0)]
        return [*told, *(self._settle_solo(self._solo_reason, now) if spec.direct_ended else ())]

    def _answer_instead(self, rest: int, now: float) -> list[Command]:
        """Open a direct answer, because the plan has fewer than two usable points. The answer is ended if it
        repeats itself, by the rule that holds for branches. A Planned event without points comes first. Text
        that has to reach a least length is never ended for repeating itself. What the plan took counts toward
        the request's tokens.

        rest: how many tokens are left for the answer.
        now: the present time, in seconds of the engine's clock.
        """
        self._before = self._before + self._solo.written
        self._direct_text_sent = True
        self._decision = Decision("direct", events.NO_PLAN)
        loops = None if self._ask.min_tokens else BRANCH_LOOPS
        self._solo = self._begin_text(rest, loops=loops)
        self._solo_over = False
        self._tally.enter("direct", now)
        return [self._tell(events.Planned(())), OpenAnswer(rest)]

    # --- branches ---

    def _write_branch(self, id: int, pieces: Sequence[TextPiece], now: float) -> list[Command]:
        """Return the commands that follow from new text of a branch; an empty list if the branch is over, or
        while its first words are not settled. If a stop string, a loop or the next point's heading ends the
        text, its sequence is closed and the branch ends with STOP.

        id: the point's id.
        pieces: one piece per token.
        now: the present time, in seconds of the engine's clock.

        Raises KeyError if the plan has no such point.
        """
        branches = self._branches
        if branches is None or not branches[id].live:
            return []
        opening = branches[id].opening
        if not opening.settled:
            opening.waiting += pieces
            return []
        step = sum(piece.token is not None for piece in pieces)
        told = self._branch_events(id, branches.write(id, pieces), step)
        if branches[id].stopped:
            return [*told, CloseSequence(id), *self._end_branch(id, events.Reason.STOP, now)]
        return told

    def pass_openings(self, now: float) -> list[Command]:
        """Show the branches whose first words are settled, and close those that are opened again. Must be
        called after each step. Return the commands; an empty list without branches, or once every branch is
        settled. Branches whose sequences have ended meanwhile end after their text was shown.

        now: the present time, in seconds of the engine's clock.
        """
        branches = self._branches
        if branches is None or self.finished or branches.all_opened:
            return []
        settled, again = branches.pass_openings()
        told: list[Command] = [CloseSequence(id) for id in again]
        for id in settled:
            told += self._write_branch(id, branches[id].opening.settle(), now)
            if (end := branches[id].opening.end) and not self.finished:
                told += self.on_end(id, end, now)
        return told

    def _branch_events(self, id: int, text: str, step: int, over: bool = False) -> list[Command]:
        """Return events for new text of a branch and for what the merged answer gains by it; an empty list if
        there is neither text nor logprobs. Offsets are characters of the branch's text.

        id: the point's id.
        text: the new text of the branch that may be shown.
        step: how many tokens the present step added.
        over: True at the end of the branch, when the logprobs of all remaining tokens are sent.
        """
        assert self._branches is not None
        logprobs = self._branches[id].take_logprobs(over)
        if not text and not logprobs:
            return []
        offset = self._branches[id].answer.length - len(text)
        told: list[Command] = [self._tell(events.BranchText(id, offset, text, step, logprobs))]
        return told + self._merged_events(self._branches.merge.write(id, text, logprobs))

    def _merged_events(self, delta: str) -> list[Command]:
        """Return the event for new text of the merged answer; an empty list if there is none, or if a polish
        turn will rewrite that text. The offset is in characters of the merged answer.

        delta: the new text of the merged answer; may be empty.
        """
        assert self._branches is not None
        if self._ask.polish:
            return []
        merge = self._branches.merge
        logprobs = merge.take_logprobs()
        if not delta and not logprobs:
            return []
        return [self._tell(events.MergedText(merge.length - len(delta), delta, logprobs))]

    def _end_branch(self, id: int, reason: events.Reason, now: float) -> list[Command]:
        """End a branch, and every branch that needs it if it has failed. Return the commands; an empty list
        if the branch is over already. Branches that need it end with PARENT_FAILED. If all branches are over
        then, the polish turn is opened or the request finishes. Without a plan the list is empty, too.

        A branch whose sentences wait for earlier points ends only when these are over; until then, the list
        is empty. The end of a branch may so bring the ends of later ones.

        id: the point's id.
        reason: why the branch ends.
        now: the present time, in seconds of the engine's clock.
        """
        branches = self._branches
        if branches is None or not branches[id].live:
            return []
        if reason in (events.Reason.STOP, events.Reason.LENGTH) and branches.waits(id):
            branches[id].end = reason
            return []
        told = self._branch_events(id, branches.flush(id, reason), 0, over=True)
        for one in (id, *branches.end(id, branches[id].settle_reason(reason))):
            delta = branches.merge.finish(one, branches[one].mark)
            told += [self._finished_branch_event(one), *self._merged_events(delta)]
        if branches.over:
            return [*told, *self._end_branches(branches, now)]
        waiting = branches.turn
        if waiting is None or not branches[waiting].live:
            return told
        told += self._branch_events(waiting, branches.write(waiting, ()), 0)
        end = branches[waiting].end
        return [*told, *self._end_branch(waiting, end, now)] if end else told

    def _end_branches(self, branches: PlanBranches, now: float) -> list[Command]:
        """Handle the end of the last branch: open the polish turn, which rewrites the branches' text, or
        finish the answer. Return the commands that follow.

        The polish turn is opened if the client asked for one, at least two branches are in the answer and
        none failed, and at least MIN_BRANCH_TOKENS and enough time are left. The turn gets all tokens that
        are left.

        branches: the branches, all of which are over.
        now: the present time, in seconds of the engine's clock.
        """
        wanted = self._to_polish
        self._to_polish = False
        limit = self._ask.limits.new_tokens - self._before - self._solo.written - branches.written
        whole = (
            branches.reason in (events.Reason.STOP, events.Reason.LENGTH) and len(branches.merge.headed) > 1
        )
        late = self.deadline and not self.deadline.allows(len(branches.tokens), now)
        if not wanted or not whole or late or limit < MIN_BRANCH_TOKENS:
            return self._finish(branches.reason, now)
        self._before = self._before + self._solo.written
        self._polished = True
        self._solo_over = False
        self._solo = self._begin_text(limit, loops=self._branch_loops)
        self._tally.enter("polish", now)
        return [OpenPolish(branches.bodies, limit)]

    def _finished_branch_event(self, id: int) -> events.Numbered:
        """Return the BranchFinished event of a branch that is over. It names the branch's reason and the
        number of the tokens of its text.

        id: the point's id.
        """
        assert self._branches is not None
        branch = self._branches[id]
        assert branch.reason is not None
        return self._tell(events.BranchFinished(id, branch.reason, len(branch.tokens)))

    # --- ends ---

    def _abandon(self, reason: events.Reason, now: float) -> list[Command]:
        """Close all running sequences and finish with the text so far; a branch that runs contributes what it
        has. Branches that were never opened contribute nothing. Return the commands, of which the last is the
        Finished event.

        reason: why the answer ends.
        now: the present time, in seconds of the engine's clock.
        """
        commands: list[Command] = [] if self._solo_over else [CloseSequence(0)]
        if spec := self._undecided:
            commands.append(CloseSequence(PLAN_ORDINAL))
            self._solo.visible = None
        if (spec or self._direct_text_sent) and not (self._solo_over or self._score):
            # Release text that was held back as the possible beginning of a loop or of a stop string.
            self._solo.finish()
            commands += self._direct_events(0)
        if branches := self._branches:
            for id in branches.live:
                told = self._write_branch(id, branches[id].opening.settle(), now)
                if branches[id].reason:
                    commands += told
                    continue
                text = branches.flush_whole(id)
                branches[id].reason = reason
                told += self._branch_events(id, text, 0, over=True)
                commands += [CloseSequence(id), *told, self._finished_branch_event(id)]
            for point in branches.points:
                commands += self._merged_events(branches.merge.finish(point.id, branches[point.id].mark))
        return [*commands, *self._finish(reason, now)]

    def _give_up(self, error: PlanError) -> list[Command]:
        """Return the commands that end the request with an error, because its plan is invalid.

        error: what is wrong with the plan.
        """
        self.finished = True
        return [CloseSequence(0), FailRequest(error)]

    def _finish(self, reason: events.Reason, now: float) -> list[Command]:
        """Return the last events: Finished with the whole text, its tokens and the request's statistics. An
        answer that a polish turn was to rewrite, and that it did not, is sent as one event first. The stop
        string or token is named only if it ended the whole answer. The forecasts learn from the end, unless a
        time limit or a polish turn shaped the answer.

        reason: why the answer ended.
        now: the present time, in seconds of the engine's clock.
        """
        self.finished = True
        self.reason = reason.value
        solo = self._solo
        branches = self._branches
        told = list[Command]()
        text = solo.text
        tokens = solo.tokens
        headings = 0
        polish = solo.written if self._polished else 0
        written = self._before + solo.written
        plan = self._before + solo.plan_tokens
        discarded = 0
        if spec := self._speculation:
            shown = len(tokens) if branches else solo.written
            plan = self._before + (spec.skeleton.written if branches else 0)
            written = plan + shown
            discarded = solo.written + spec.skeleton.written + self._before - written
        if branches:
            plan = plan if spec else written - polish
            written = written + branches.written
            discarded += branches.discarded
        if branches and not (polish and text):
            text = branches.merge.text
            tokens = (*(tokens if spec else ()), *branches.tokens)
            headings = branches.heading_tokens
            if self._ask.polish and text:
                told = [self._tell(events.MergedText(0, text, branches.merge.take_logprobs()))]
        counts = OutputTokens(written, plan, len(tokens), headings, polish, discarded)
        planned = bool(branches) or (self._mode == "sot" and spec is None)
        way = self._decision.way(planned, self._direct_text_sent)
        figures = self._tally.close(*way, counts, len(branches.points) if branches else 0, now)
        figures = replace(figures, in_time=bool(self.deadline and self.deadline.passed))
        whole = reason in (events.Reason.STOP, events.Reason.LENGTH) and not (self.deadline or polish)
        if self._outlook and whole and (branches or self._mode == "direct"):
            cut = reason is events.Reason.LENGTH
            self._outlook.on_end(branches is not None, figures.seconds, figures.steps, len(tokens), cut)
        alone = reason is events.Reason.STOP and (not branches or bool(polish and solo.text))
        stop = (solo.stop, None if solo.stop else self._stop_token) if alone else (None, None)
        return [*told, self._tell(events.Finished(reason, text, tokens, figures, *stop))]

    def _tell(self, event: events.Event) -> events.Numbered:
        """Return an event with the next number. Numbers count up from 0.

        event: an event for the client.
        """
        number = self._number
        self._number = self._number + 1
        return events.Numbered(number, event)
