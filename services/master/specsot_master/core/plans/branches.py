"""The branches of a plan: which branches may start, what each has written, and the merged answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from specsot.core.skeleton import Point
from specsot.events import Reason, TokenLogprobs
from specsot_master.core.limits import (
    SENTENCE_TOKENS,
    BudgetShares,
    hard_limit,
    longest_branch,
    soft_limit,
)
from specsot_master.core.plans.answer import END, AnswerText
from specsot_master.core.plans.closings import STOCK_WORDS, ClosingRule
from specsot_master.core.plans.cuts import LoopRule
from specsot_master.core.plans.merged_answer import GAP, MergedAnswer
from specsot_master.core.plans.openings import (
    NOT_PROSE,
    Beginnings,
    BranchOpening,
    opening_of,
    speaks_of_itself,
)
from specsot_master.core.plans.repetition import RepetitionFilter
from specsot_master.core.plans.sentences import (
    NextHeading,
    SentenceBuffer,
    ends_announcing,
    ends_sentence,
    is_announcement,
    leans,
    open_fence,
)
from specsot_master.core.plans.text_pieces import TextPiece, TokenSpans

CUT_MARK = "…"  # Ends the text of a branch that a limit cut within a sentence.
# Fraction of a branch's budget. Text after it is shown in whole sentences and lines, so that a sentence which
# the limit interrupts can be left out. Untuned: few sentences of a long branch are longer than half of its
# budget.
SENTENCES_FROM: Final = 0.5
# Reasons after which the text of a branch can be used by the branches that need it.
_COMPLETE = (Reason.STOP, Reason.LENGTH)


def critical_paths(points: Sequence[Point]) -> dict[int, int]:
    """Return, for each point, the wished length in tokens of the longest chain of points from this point
    through those that need it; {} for no points. A point that no other needs has its own length.

        lengths 1: 30, 2: 20 (needs 1), 3: 40 -> {1: 50, 2: 20, 3: 40}

    points: the points of the plan, by ascending id; each needs only points with smaller ids.
    """
    paths: dict[int, int] = {}
    # A point only needs points with smaller ids, so in reverse order all points that need it come before it.
    for point in reversed(points):
        behind = (paths[other.id] for other in points if point.id in other.needs)
        paths[point.id] = point.length + max(behind, default=0)
    return paths


def pick_ready(
    points: Sequence[Point], done: AbstractSet[int], taken: Collection[int], places: int
) -> tuple[Point, ...]:
    """Return at most `places` points to start now, those with the longest critical path first, then by id; ()
    if none may start. A point may start if it was not started and all points that it needs are done.

    points: the points of the plan, by ascending id.
    done: ids of points whose text is complete.
    taken: ids of points that have been started, or that are over for any reason.
    places: how many may be started now; 0 or less returns ().
    """
    paths = critical_paths(points)
    free = [point for point in points if point.id not in taken and done >= set(point.needs)]
    free.sort(key=lambda point: (-paths[point.id], point.id))
    return tuple(free[: max(places, 0)])


@dataclass(slots=True)
class PlanBranch:
    """One branch of a plan: the text of one point.

    point: the point that the branch writes.
    budget: the most tokens that the branch may decode.
    answer: the branch's text, with stop strings and markers removed.
    spans: which token wrote which characters of the raw text.
    opened: True once the branch's sequence was opened.
    ended: True if an end token ended the branch. That token is one more than `spans` counts.
    reason: why the branch is over; None before.
    least: how many first tokens are not searched for stop strings.
    holds_sentences: True if the later part of the text is shown in whole sentences and lines only; see
        `hold`.
    left_out: number of tokens of an interrupted sentence or of an announcement at the end, of sentences that
        repeat an earlier point, or of a closing, which are not shown; 0 if there is none.
    soft_limit: the tokens from which on the branch ends after a sentence; None for no soft end. The last
        stage ends it.
    shortened: True if the budget is less than what the client's limit leaves to the branch.
    longest: the tokens at which the branch ends once it has a whole sentence; the sentence that it has begun
        by then is left out. None for no such end.
    full: True once `longest` has ended the branch.
    next_heading: finds where the branch begins the heading of the next point, before which it ends.
    opening: the branch's first words, until they differ from those of all earlier branches.
    discarded: how many tokens the discarded beginnings of the branch have; 0 if none was discarded.
    buffer: the pieces of the unfinished sentence.
    closing_rule: decides whether the text is shown, once it is complete; None for a point.
    defers: True if sentences after the first one wait until all earlier points are over, because those that
        repeat an earlier point are left out.
    end: why the branch's sequence ended, if its sentences wait then; None before.
    """

    point: Point
    budget: int
    answer: AnswerText
    spans: TokenSpans = field(default_factory=TokenSpans)
    opened: bool = False
    ended: bool = False
    reason: Reason | None = None
    least: int = 0
    holds_sentences: bool = False
    left_out: int = 0
    soft_limit: int | None = None
    shortened: bool = False
    longest: int | None = None
    full: bool = False
    next_heading: NextHeading = field(default_factory=NextHeading)
    opening: BranchOpening = field(default_factory=lambda: BranchOpening(settled=True))
    discarded: int = 0
    buffer: SentenceBuffer = field(default_factory=SentenceBuffer)
    closing_rule: ClosingRule | None = None
    defers: bool = False
    end: Reason | None = None
    # The whole sentences that wait for earlier points, in order.
    _deferred: list[list[TextPiece]] = field(default_factory=list[list[TextPiece]])
    # Whether the last sentence that waited was left out.
    _gap: bool = False
    # Tokens that arrived so far, shown or held.
    _received: int = 0
    # The pieces of a closing's whole sentences.
    _closing: list[TextPiece] = field(default_factory=list[TextPiece])

    @property
    def stopped(self) -> bool:
        """True once something other than the sequence itself has ended the text."""
        return self.full or self.next_heading.found or self.answer.stopped

    def hold(self, pieces: Iterable[TextPiece]) -> list[TextPiece]:
        """Return the pieces that may be shown now, in order; [] if all are held. A sentence that continues in
        the later part of the budget, where it may be interrupted, is held back until it is complete, unless
        it is the first one. That part begins after SENTENCES_FROM of the budget, or 2 * SENTENCE_TOKENS
        before its end if that is earlier; a branch with a `longest` has no earlier part. Pieces from the next
        point's heading on are dropped, as are those after `longest`. Nothing is held back or dropped unless
        `holds_sentences` is set. All pieces of a closing are held until `release`, and all but the first
        sentence of a branch that defers until `take_deferred`.

        The result depends on the tokens alone, not on how many arrive at once:

            budget 8, tokens "A b . C d . E f" -> "A b . C" one by one, "d ." together, "E f" held

        pieces: the next pieces of the branch, one per token.
        """
        shown: list[TextPiece] = []
        for piece in pieces:
            at_end = self.longest is not None and self._received >= self.longest
            self.full = self.full or (self.holds_sentences and at_end and self.buffer.begun)
            if self.full or (self.holds_sentences and self.next_heading.begins_with(piece)):
                break
            self._received += 1
            first = min(SENTENCES_FROM * self.budget, self.budget - 2 * SENTENCE_TOKENS)
            late = self.holds_sentences and (self.longest is not None or self._received > first)
            later = self.defers and self.buffer.begun
            released = self.buffer.add(piece, late and self.buffer.begun)
            if later and released:
                self._defer(released)
            else:
                shown += released
        if self.closing_rule:
            self._closing += shown
            return []
        return shown

    def release(self, reason: Reason) -> list[TextPiece]:
        """Return the pieces that are still held when the branch ends; [] if none is. Return none if they
        follow a complete sentence, and if the token limit has interrupted them or they announce what does not
        follow: they are left out, and `left_out` becomes their number. A closing is returned as a whole if
        its rule allows it, else left out.

        reason: why the branch ends.
        """
        if self.closing_rule:
            return self._release_closing(self.closing_rule)
        later = self.defers and self.buffer.begun
        held = self.buffer.take()
        text = _text_of(held)
        interrupted = self.full or reason is Reason.LENGTH
        unfinished = interrupted or ends_announcing(text) or is_announcement(text)
        if unfinished and held and self.buffer.whole:
            self.left_out += len(held)
            return []
        if later and held:
            self._defer(held)
            return []
        return held

    def _defer(self, pieces: list[TextPiece]) -> None:
        """Let the pieces of a whole sentence wait for earlier points. White space before it waits with it.

        pieces: the pieces of the sentence, or white space that follows a sentence.
        """
        if self._deferred and not _text_of(self._deferred[-1]).strip():
            self._deferred[-1] += pieces
        else:
            self._deferred.append(pieces)

    def take_deferred(self, earlier: RepetitionFilter) -> list[TextPiece]:
        """Return the pieces of the sentences that waited for earlier points, without those that repeat the
        answer so far, and without those that lean on a sentence left out ("This helps you to ..."). Return []
        if there are no sentences. The number of tokens of those left out is added to `left_out`. White space
        at the end continues to wait for the next sentence.

        earlier: the introduction and all earlier points, to which what is shown of this point is added.
        """
        shown: list[TextPiece] = []
        waiting = self._deferred
        self._deferred = [waiting.pop()] if waiting and not _text_of(waiting[-1]).strip() else []
        if waiting:
            earlier.add(self.answer.text)
        for sentence in waiting:
            text = _text_of(sentence)
            self._gap = earlier.repeats(text) or (self._gap and leans(text))
            if self._gap:
                self.left_out += len(sentence)
            else:
                earlier.add(text)
                shown += sentence
        return shown

    def _release_closing(self, rule: ClosingRule) -> list[TextPiece]:
        """Return the pieces of a closing that `rule` allows. Otherwise return [], and set `left_out` to their
        number. An unfinished sentence after whole ones is left out before the rule is asked.

        rule: decides whether the closing is shown.
        """
        shown = self._closing
        rest = self.buffer.take()
        if not (shown and self.buffer.begun):
            shown = shown + rest
            rest = []
        if not rule.allows(_text_of(shown)):
            rest = shown + rest
            shown = []
        self._closing = []
        self.left_out = len(rest)
        return shown

    def settle_reason(self, reason: Reason) -> Reason:
        """Return why a branch is over whose sequence ended for `reason`, once `release` was called: STOP for
        a shortened branch that is as long as it should be, or whose text repeats itself, else `reason`
        unchanged. Only LENGTH is ever changed.

        A branch that has reached `longest`, or used up a budget below its share, and whose text ends with a
        whole sentence, is as long as it should be, and no limit of the client has cut it. Code that was not
        closed was cut:

            aim 60, share 400, budget 90; 90 tokens, the last 5 left out -> STOP instead of LENGTH

        reason: why the sequence ended.
        """
        # A loop that ends a sentence which has waited is found after the sequence's end.
        full = self.full or self.answer.stopped or (self.shortened and self._received >= self.budget)
        # A closing is shown as a whole or not at all. A loop is left out with the sentence that it begins.
        at_end = self.buffer.whole or self.answer.stopped
        whole = self.closing_rule is not None or (at_end and not open_fence(self.answer.text))
        return Reason.STOP if reason is Reason.LENGTH and full and whole else reason

    @property
    def live(self) -> bool:
        """True while the branch's sequence runs; False before it is opened, and once it is over."""
        return self.opened and self.reason is None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of the branch's text, white space around it included; () before the first one. Markers,
        and text after a stop string, are left out.
        """
        return self.spans.within(self._begin, self._reach if self.answer.stopped else None)

    @property
    def mark(self) -> str:
        """What follows the text in the merged answer: the end of a code block that the branch has not
        closed, or a mark if a limit ended the branch within a shown sentence, else "". There is no mark for
        a text without characters, for one that ends with a whole sentence, or if pieces were left out.
        """
        text = self.answer.text
        if fence := open_fence(text):
            return fence if text.endswith("\n") else f"\n{fence}"
        interrupted = self.reason is Reason.LENGTH and not (self.left_out or self.buffer.whole)
        return CUT_MARK if interrupted and text and not ends_sentence(text) else ""

    def take_logprobs(self, over: bool) -> tuple[TokenLogprobs, ...]:
        """Return the logprobs of tokens whose text has been released, each token once; () if there are none,
        or if the client asked for none.

        over: True to return those of all remaining tokens too, unless a stop string ended the branch.
        """
        whole = over and not self.answer.stopped
        return self.spans.take_logprobs(self._begin, None if whole else self._reach)

    @property
    def _begin(self) -> int:
        """The first raw character that belongs to the text, after a leading [ANSWER]."""
        return self.answer.skipped if self.answer.marked else 0

    @property
    def _reach(self) -> int:
        """The number of raw characters up to the end of the released text."""
        return self.answer.skipped + self.answer.released


def _text_of(pieces: Iterable[TextPiece]) -> str:
    """Return the text of some pieces; "" for none.

    pieces: consecutive pieces of one branch.
    """
    return "".join(piece.text for piece in pieces)


class PlanBranches:
    """All branches of a plan: which may start, what each has written, and how their texts are merged."""

    def __init__(
        self,
        shares: BudgetShares,
        stops: Iterable[str],
        max_parallel: int,
        cut: bool,
        loops: LoopRule | None,
        least: Callable[[int], int] = lambda _: 0,
        shown: Collection[str] = (),
        holds_sentences: bool = False,
        introduction: str = "",
        closing: int | None = None,
        aim: int | None = None,
        question: str = "",
        beginnings: Beginnings = lambda _: (),
    ) -> None:
        """Create the branches of a plan, none of them opened. Without sentences that are held back, branches
        are not shortened to the aim. Without an aim, openings are settled from the start.

        shares: the points that are written, and how the client's tokens are divided.
        stops: the client's stop strings.
        max_parallel: the most branches that may run at the same time.
        cut: True if a limit has cut the plan itself, so that the answer is incomplete in any case.
        loops: the rule that ends repetitive text, or None.
        least: returns, for a branch's budget, how many first tokens are not searched for stop strings.
        shown: the stop strings that stay in the text; empty if none does.
        holds_sentences: True if the later part of each branch is shown in whole sentences and lines only.
        introduction: the text before the first point, which was sent to the client already; "" for none.
        closing: the id of the branch that writes the closing paragraph, or None. The paragraph is shown if
            `ClosingRule` allows it.
        aim: how many tokens each branch should have, about; None for as many as the model writes. With an
            aim, no branch begins with one of NOT_PROSE, nor the closing with one of STOCK_WORDS. The closing
            ends after its first sentence.
        question: the text that the client asks; "" if it is not given as text.
        beginnings: returns the ids of the tokens with which a text that begins with a certain word or mark
            may begin.
        """
        stops = (*stops, END)
        points = shares.points
        # A branch whose unfinished sentence cannot be left out is not shortened: that would cut the sentence.
        limits = {
            id: hard_limit(share, aim if holds_sentences else None) for id, share in shares.budgets.items()
        }
        self.points = points
        self._headings = shares.headings
        self._cut = cut
        self._beginnings = beginnings
        self.introduction = introduction
        self.closing = closing
        # The first words of the branches whose openings are settled.
        self._words: dict[int, str] = {}
        # The first words of the question and of the introduction, with which no point begins.
        self._words_before = {opening_of(text, whole=True) or "" for text in (question, introduction) if text}
        self.merge = MergedAnswer(points, shares.headings, introduction, closing)
        self._max_parallel = max_parallel
        marks = () if aim is None else NOT_PROSE
        excluded = [token for mark in marks for token in beginnings(mark)]
        # Only the closing may not begin with a stock word either.
        stock = [token for word in STOCK_WORDS if marks for token in beginnings(word)]
        titles = tuple(point.title for point in points if point.id != closing)
        self._branches = {
            p.id: PlanBranch(
                p,
                limits[p.id],
                AnswerText(stops, True, loops, shown),
                least=least(limits[p.id]),
                holds_sentences=holds_sentences,
                soft_limit=1 if p.id == closing else soft_limit(shares.budgets[p.id], aim),
                shortened=limits[p.id] < shares.budgets[p.id],
                longest=longest_branch(aim) if holds_sentences and aim else None,
                opening=BranchOpening(
                    settled=aim is None,
                    excluded=tuple(dict.fromkeys((*excluded, *(stock if p.id == closing else ())))),
                ),
                # A branch with an aim is too short for most code, so that unfinished code is left out.
                buffer=SentenceBuffer(holds_code=aim is not None),
                closing_rule=ClosingRule(question, introduction, titles) if p.id == closing else None,
                defers=holds_sentences and aim is not None and p.id != closing,
            )
            for p in points
        }
        # The introduction and the first `_num_over` points, all of which are over.
        self._earlier = RepetitionFilter(question)
        self._earlier.add(introduction)
        self._num_over = 0

    def __getitem__(self, id: int) -> PlanBranch:
        """Return the branch of the point with this id. Raises KeyError if the plan has no such point."""
        return self._branches[id]

    @property
    def planned(self) -> tuple[Point, ...]:
        """The points of the plan that are written, without the closing."""
        return tuple(point for point in self.points if point.id != self.closing)

    @property
    def all_opened(self) -> bool:
        """True if every branch was opened or is over, and none will be opened again."""
        return all((one.opened and one.opening.settled) or one.reason for one in self._branches.values())

    @property
    def over(self) -> bool:
        """True if every branch is over, whatever the reason."""
        return not self.unfinished

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Ids of branches that are not over, opened or not; () if all are."""
        return tuple(id for id, branch in self._branches.items() if not branch.reason)

    @property
    def unopened(self) -> tuple[int, ...]:
        """Ids of branches that were neither opened nor ended; () if there is none."""
        return tuple(id for id, branch in self._branches.items() if not (branch.opened or branch.reason))

    @property
    def live(self) -> tuple[int, ...]:
        """Ids of branches whose sequences run; () if none does."""
        return tuple(id for id, branch in self._branches.items() if branch.live)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of all branches' texts, in the plan's order; () before the first token."""
        return tuple(token for branch in self._branches.values() for token in branch.tokens)

    @property
    def bodies(self) -> str:
        """The texts of all branches without headings, separated by blank lines. Empty texts are left out; ""
        if all are empty.
        """
        return GAP.join(text for branch in self._branches.values() if (text := branch.answer.text))

    @property
    def reason(self) -> Reason:
        """Why the whole answer ended: FAILED if a branch failed, else LENGTH if a limit cut the plan or a
        branch, else STOP. A branch that was cancelled, or that is not over, counts as one that stopped.
        """
        reasons = {branch.reason for branch in self._branches.values()}
        if reasons & {Reason.FAILED, Reason.PARENT_FAILED}:
            return Reason.FAILED
        return Reason.LENGTH if self._cut or Reason.LENGTH in reasons else Reason.STOP

    @property
    def written(self) -> int:
        """Tokens that all branches decoded, including end tokens and tokens that are not part of the
        answer.
        """
        return sum(len(branch.spans) + branch.left_out + branch.ended for branch in self._branches.values())

    @property
    def heading_tokens(self) -> int:
        """Number of tokens of the headings that are in the merged answer; 0 before the first heading."""
        return sum(self._headings[id] for id in self.merge.headed)

    @property
    def discarded(self) -> int:
        """Tokens of beginnings that were discarded, because an earlier branch begins with the same words."""
        return sum(branch.discarded for branch in self._branches.values())

    def pass_openings(self) -> tuple[list[int], list[int]]:
        """Settle the openings of the first branches, as far as their words are known. Return the ids of the
        branches that were settled, and of those that must be opened again because they begin like an earlier
        branch, speak of themselves, begin not with prose, or, for points, begin like the question or the
        introduction; both lists may be empty. A branch is opened again at most MAX_REWRITES times; then its
        opening is settled as it is.
        For branches that are opened again, their tokens are counted as discarded. A branch is opened again
        for the second time once the first texts of
        all earlier branches have begun, with whose tokens it must not begin then.

        Openings are settled in order, so that a branch is compared with the final words of all earlier ones:

            branch 1 settled, 2 begins like it, 3 does not -> settled [], again [2]; 3 waits for 2
        """
        settled: list[int] = []
        again: list[int] = []
        taken = set[str]()
        # The first tokens of earlier branches; None once one of them is not known yet.
        firsts: tuple[int, ...] | None = ()
        passing = True
        for id, branch in self._branches.items():
            opening = branch.opening
            opening.read_first_token()
            before = firsts
            first = () if branch.reason and opening.first_tokens is None else opening.first_tokens
            firsts = None if before is None or first is None else before + first
            words = self._words.get(id) if opening.settled else opening.words
            # A closing may return to the question.
            barred = taken if id == self.closing else taken | self._words_before
            if opening.settled or (branch.reason and not opening.waiting):
                taken.update([words] if words else [])
            elif opening.may_rewrite(bool(words) and (words in barred or speaks_of_itself(words))):
                if opening.rewrites and before is None:
                    passing = False
                    continue
                branch.discarded += opening.discard(self._beginnings, before or ())
                branch.opened = passing = False
                again.append(id)
            elif words is not None and passing:
                self._words[id] = words
                taken.add(words)
                settled.append(id)
            else:
                passing = False
        return settled, again

    @property
    def turn(self) -> int | None:
        """The id of the first branch that is not over; None if all are over. Its sentences wait no longer."""
        self._read_over()
        return self.points[self._num_over].id if self._num_over < len(self.points) else None

    def _read_over(self) -> None:
        """Add what the first branches say, as far as they are over."""
        for point in self.points[self._num_over :]:
            if not self._branches[point.id].reason:
                return
            self._earlier.add(self._branches[point.id].answer.text)
            self._num_over += 1

    def waits(self, id: int) -> bool:
        """Return True if sentences of this branch wait for earlier points, so that the branch cannot end yet.

        id: the point's id.
        """
        return self._branches[id].defers and self.turn != id

    def ready(self) -> tuple[Point, ...]:
        """Return the points whose branches may start now, the most urgent first, and at most as many as may
        still run in parallel; () if none may start. A branch that failed or was cancelled does not count as
        done for the branches that need it. A branch whose sentences wait runs no longer.
        """
        places = self._max_parallel - sum(self._branches[id].end is None for id in self.live)
        if places <= 0 or not self.unopened:
            return ()
        done = {id for id, branch in self._branches.items() if branch.reason in _COMPLETE}
        taken = [id for id, branch in self._branches.items() if branch.opened or branch.reason]
        return pick_ready(self.points, done, taken, places)

    def open(self, id: int) -> PlanBranch:
        """Mark the branch as opened and return it.

        id: the point's id.

        Raises KeyError if the plan has no such point.
        """
        self._branches[id].opened = True
        return self._branches[id]

    def parents(self, point: Point) -> tuple[tuple[Point, str], ...]:
        """Return the points that `point` needs, each with its branch's text.

        point: a point of the plan; () is returned if it needs none.
        """
        return tuple((self._branches[id].point, self._branches[id].answer.text) for id in point.needs)

    def write(self, id: int, pieces: Iterable[TextPiece]) -> str:
        """Add text to a running branch and return the part that may be shown; "" if all of it is held back.
        Text after a stop string is dropped. Pieces of an unfinished sentence may be held back, see
        `PlanBranch.hold`. Sentences that have waited for earlier points are added once these are over.

        id: the point's id.
        pieces: the next pieces of the branch, one per token; empty to add only what has waited.

        Raises KeyError if the plan has no such point.
        """
        branch = self._branches[id]
        text = self._feed(branch, branch.hold(pieces))
        return text if self.waits(id) else text + self._feed(branch, branch.take_deferred(self._earlier))

    def flush(self, id: int, reason: Reason) -> str:
        """Add the pieces that a branch still holds when it ends for this reason, and the sentences that have
        waited for earlier points. Return the remaining text that may be shown; "" if there is none.

        id: the point's id.
        reason: why the branch ends.
        """
        return self._feed(self._branches[id], self._branches[id].release(reason)) + self.flush_whole(id)

    def flush_whole(self, id: int) -> str:
        """Add the whole sentences that have waited for earlier points, without the unfinished one. Return the
        remaining text that may be shown; "" if there is none.

        id: the point's id.
        """
        branch = self._branches[id]
        self._read_over()
        return self._feed(branch, branch.take_deferred(self._earlier)) + branch.answer.flush()

    def _feed(self, branch: PlanBranch, pieces: Iterable[TextPiece]) -> str:
        """Add pieces to a branch and return the part of their text that may be shown; "" if all of it is held
        back. Text after a stop string is dropped. The first `least` tokens of the branch are not searched for
        stop strings.

        branch: a branch of this plan.
        pieces: pieces that are not held back.
        """
        shown: list[str] = []
        for piece in pieces:
            if branch.answer.stopped:
                break
            branch.spans.add(piece)
            shown.append(branch.answer.feed(piece.text, len(branch.spans) <= branch.least))
        return "".join(shown)

    def end(self, id: int, reason: Reason) -> tuple[int, ...]:
        """End a branch. If its text is not complete, branches that need it end with PARENT_FAILED; return
        their ids. Return () if it is complete, or if no branch needs it.

        id: the point's id.
        reason: why the branch ends.

        Raises KeyError if the plan has no such point.
        """
        self._branches[id].reason = reason
        if reason in _COMPLETE:
            return ()
        orphans = self._orphans(id)
        for orphan in orphans:
            self._branches[orphan].reason = Reason.PARENT_FAILED
        return orphans

    def _orphans(self, id: int) -> tuple[int, ...]:
        """Return the ids of branches that need `id`, directly or through others; () if none does. One pass in
        id order is enough, because a point only needs points with smaller ids. The ids are ascending, without
        `id` itself.

        id: the id of a point whose branch has failed.
        """
        lost = {id}
        for point in self.points:
            if lost.intersection(point.needs):
                lost.add(point.id)
        return tuple(sorted(lost - {id}))
