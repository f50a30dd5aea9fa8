"""The branches of a plan: which may start, what each has written, the merged answer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

from specsot.core.skeleton import Point
from specsot.events import Reason, TokenLogprobs
from specsot_master.core.limits import BudgetShares
from specsot_master.core.plans.answer import END, AnswerText
from specsot_master.core.plans.cuts import LoopRule
from specsot_master.core.plans.merged_answer import GAP, MergedAnswer
from specsot_master.core.plans.text_pieces import TextPiece, TokenSpans
from specsot_master.core.plans.time_limit import ends_sentence

CUT_MARK = "…"
# Share of a branch's budget. Text after that is shown by whole sentences and lines, so that the limit leaves
# out the sentence that it interrupts. Untuned: few sentences of a branch are longer than half of its budget.
SENTENCES_FROM: Final = 0.5
TAIL_CHARACTERS: Final = 16  # Characters of a text's end that tell whether it ends a sentence.
_COMPLETE = (Reason.STOP, Reason.LENGTH)  # ends after which a branch's text can be built on


def critical_paths(points: Sequence[Point]) -> dict[int, int]:
    """For each point the longest chain of wished lengths from it through the points that need it."""
    paths: dict[int, int] = {}
    for point in reversed(points):  # needs are smaller ids, so whoever needs a point is already done
        behind = (paths[other.id] for other in points if point.id in other.needs)
        paths[point.id] = point.length + max(behind, default=0)
    return paths


def pick_ready(
    points: Sequence[Point], done: AbstractSet[int], taken: Collection[int], places: int
) -> tuple[Point, ...]:
    """At most `places` points to start now, longest critical path first, then in id order.

    done: points whose text is there. taken: points that are running or over, however they ended.
    """
    paths = critical_paths(points)
    free = [point for point in points if point.id not in taken and done >= set(point.needs)]
    free.sort(key=lambda point: (-paths[point.id], point.id))
    return tuple(free[: max(places, 0)])


@dataclass(slots=True)
class PlanBranch:
    """One point being written. `reason` None: not over yet. ended: by an end token, which is one more.
    least: tokens in which stop strings are not looked for.

    holds_sentences: the later part of the text is shown by whole sentences; see `hold`.
    left_out: tokens of the sentence that the limit interrupted, which is not shown.
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
    _received: int = 0
    _held: list[TextPiece] = field(default_factory=list[TextPiece])
    _tail: str = ""
    # True while the shown text ends with a whole sentence or line.
    _whole: bool = False

    def hold(self, pieces: Iterable[TextPiece]) -> list[TextPiece]:
        """Return the pieces that may be shown now, in order; a sentence that has begun late is held back.

        The result depends on the tokens alone, not on how many arrive at once:
        # budget 8, tokens "A b . C d . E f" -> "A b . C" one by one, "d ." together, "E f" held
        """
        shown: list[TextPiece] = []
        for piece in pieces:
            self._received += 1
            self._held.append(piece)
            self._tail = (self._tail + piece.text)[-TAIL_CHARACTERS:]
            late = self.holds_sentences and self._received > SENTENCES_FROM * self.budget
            whole = ends_sentence(self._tail)
            if not late or whole:
                shown += self._held
                self._held.clear()
                self._whole = whole
        return shown

    def release(self, reason: Reason) -> list[TextPiece]:
        """Return the pieces still held when the branch ends: none if its limit interrupts a sentence after a
        whole one.
        """
        held = self._held.copy()
        self._held.clear()
        if reason is Reason.LENGTH and held and self._whole:
            self.left_out = len(held)
            return []
        return held

    @property
    def live(self) -> bool:
        return self.opened and self.reason is None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of its body, white space included; markers and what follows a stop string left out."""
        return self.spans.within(self._begin, self._reach if self.answer.stopped else None)

    @property
    def mark(self) -> str:
        """What shows in the merged answer that a limit ended it within a sentence, often within a word."""
        text = self.answer.text
        interrupted = self.reason is Reason.LENGTH and not self.left_out
        return CUT_MARK if interrupted and text and not ends_sentence(text) else ""

    def take_logprobs(self, over: bool) -> tuple[TokenLogprobs, ...]:
        """Those of the tokens whose text is out, each once; `over`: of all that are left."""
        whole = over and not self.answer.stopped
        return self.spans.take_logprobs(self._begin, None if whole else self._reach)

    @property
    def _begin(self) -> int:
        return self.answer.skipped if self.answer.marked else 0

    @property
    def _reach(self) -> int:
        """Raw characters up to the end of what was let through."""
        return self.answer.skipped + self.answer.released


class PlanBranches:
    """All branches of a plan. cut: a limit has taken something of the plan itself. loops: see AnswerText."""

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
    ) -> None:
        """least: by a branch's budget. shown: see AnswerText. holds_sentences: see PlanBranch."""
        stops = (*stops, END)
        points = shares.points
        budgets = shares.budgets
        self.points = points
        self._headings = shares.headings
        self._cut = cut
        self.merge = MergedAnswer(points, shares.headings)
        self._max_parallel = max_parallel
        self._branches = {
            p.id: PlanBranch(
                p,
                budgets[p.id],
                AnswerText(stops, True, loops, shown),
                least=least(budgets[p.id]),
                holds_sentences=holds_sentences,
            )
            for p in points
        }

    def __getitem__(self, id: int) -> PlanBranch:
        return self._branches[id]

    @property
    def all_opened(self) -> bool:
        return all(branch.opened or branch.reason for branch in self._branches.values())

    @property
    def over(self) -> bool:
        return all(branch.reason for branch in self._branches.values())

    @property
    def unopened(self) -> tuple[int, ...]:
        return tuple(id for id, branch in self._branches.items() if not (branch.opened or branch.reason))

    @property
    def live(self) -> tuple[int, ...]:
        return tuple(id for id, branch in self._branches.items() if branch.live)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for branch in self._branches.values() for token in branch.tokens)

    @property
    def bodies(self) -> str:
        """The texts without headings, a paragraph or more of each branch."""
        return GAP.join(text for branch in self._branches.values() if (text := branch.answer.text))

    @property
    def reason(self) -> Reason:
        """How the whole answer ended, by its worst branch."""
        reasons = {branch.reason for branch in self._branches.values()}
        if reasons & {Reason.FAILED, Reason.PARENT_FAILED}:
            return Reason.FAILED
        return Reason.LENGTH if self._cut or Reason.LENGTH in reasons else Reason.STOP

    @property
    def written(self) -> int:
        """Tokens of all branches, those that are left out of the answer and end tokens too."""
        return sum(len(branch.spans) + branch.left_out + branch.ended for branch in self._branches.values())

    @property
    def heading_tokens(self) -> int:
        """Of the headings that are in the answer."""
        return sum(self._headings[id] for id in self.merge.headed)

    def ready(self) -> tuple[Point, ...]:
        """Points that may start now, the most urgent first, never more than may run beside each other."""
        places = self._max_parallel - len(self.live)
        if places <= 0 or self.all_opened:
            return ()
        done = {id for id, branch in self._branches.items() if branch.reason in _COMPLETE}
        taken = [id for id, branch in self._branches.items() if branch.opened or branch.reason]
        return pick_ready(self.points, done, taken, places)

    def open(self, id: int) -> PlanBranch:
        self._branches[id].opened = True
        return self._branches[id]

    def parents(self, point: Point) -> tuple[tuple[Point, str], ...]:
        """The points it needs with their texts."""
        return tuple((self._branches[id].point, self._branches[id].answer.text) for id in point.needs)

    def write(self, id: int, pieces: Iterable[TextPiece]) -> str:
        """Take a live branch's text; returns what of it may be shown. Nothing follows a stop string."""
        branch = self._branches[id]
        return self._feed(branch, branch.hold(pieces))

    def flush(self, id: int, reason: Reason) -> str:
        """Take what is left of a branch that ends for this reason; returns what of it may be shown."""
        branch = self._branches[id]
        return self._feed(branch, branch.release(reason)) + branch.answer.flush()

    def _feed(self, branch: PlanBranch, pieces: Iterable[TextPiece]) -> str:
        shown: list[str] = []
        for piece in pieces:
            if branch.answer.stopped:
                break
            branch.spans.add(piece)
            shown.append(branch.answer.feed(piece.text, len(branch.spans) <= branch.least))
        return "".join(shown)

    def end(self, id: int, reason: Reason) -> tuple[int, ...]:
        """Branch `id` is over; returns the branches that end with it because they need it."""
        self._branches[id].reason = reason
        if reason in _COMPLETE:
            return ()
        orphans = self._orphans(id)
        for orphan in orphans:
            self._branches[orphan].reason = Reason.PARENT_FAILED
        return orphans

    def _orphans(self, id: int) -> tuple[int, ...]:
        """Branches that need `id`, directly or not; needs are smaller ids, so one pass finds them."""
        lost = {id}
        for point in self.points:
            if lost.intersection(point.needs):
                lost.add(point.id)
        return tuple(sorted(lost - {id}))
