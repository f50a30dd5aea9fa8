"""How much drafting pays now: how many levels to grow, how many rows to send, or for how long to rest.

Refuses to know tensors, tokens and clocks: counts, probabilities and measured seconds in, counts out.

Two safeguards make drafting cheap where it does not pay. The best expected rate wins, plain decoding
included; and nothing is tried that the purse does not hold. Where drafting does not pay the drafter
rests, each time longer; behind a rest comes a short trial, since measurements and texts change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsot.members import Curve, TreeShape
from specsot_drafter.acceptance import Acceptance
from specsot_drafter.costs import Costs
from specsot_drafter.purse import Purse
from specsot_drafter.selection import Deserves, Flags, Offer, best_overall, ranked, worth

Floats = NDArray[np.floating[Any]]

SLENDER = 1.0  # nodes per level and tree, before anything is known
FIRST_REST, LONGEST_REST = 32, 1024  # laps
MOST_RESTED = 8192  # trees of one rest, unless that is less than FIRST_REST laps: as stage 0 has it
TRIAL = 4  # trees of one level that a trial takes
UNPLAIN = 128  # laps with drafts after which one without shows what plain decoding takes now
WILDEST = 2.0  # plain laps beyond which what a lap took by the clock is not believed
STRANGEST = 3.0  # times what growing should take, beyond which that is not believed either
WEIGHT = 0.2  # of one lap in what is typical


@dataclass(frozen=True, slots=True)
class Returned:
    """One tree that came back.

    grown:    levels grown for it; 0 when its root was sent alone.
    rows:     its nodes, root included.
    masses:   the drafter's probability of its nodes, summed per depth.
    accepted: tokens it brought that would not have come without it.
    own:      how deep the drafter's own nodes were accepted; None: as deep as that.
    """

    grown: int
    rows: int
    masses: Sequence[float]
    accepted: int
    own: int | None = None


@dataclass(frozen=True, slots=True)
class Spent:
    """What one lap took, in seconds; 0 where it is not known.

    computed: by all stages, when nothing else was in the frame. wall: by the clock. growing: by the drafter.
    """

    computed: float = 0.0
    wall: float = 0.0
    growing: float = 0.0


UNKNOWN = Spent()


class Tuner:
    """Chooses levels and rows that maximise expected tokens per second of the whole lap.

    rest: for how many trees nothing shall be drafted; set by a plan that says so.
    drafting: whether trees were sent since the last rest.
    """

    adapts = True

    def __init__(
        self, shape: TreeShape, lap: Curve, level: Curve, widths: Sequence[int] | None = None
    ) -> None:
        """lap: seconds per rows of all stages; level: seconds per rows of one level of growth.
        widths: rows per tree that level 2, 3, ... takes; EAGLE's when absent.
        """
        self.costs = Costs(lap, level, (shape.top_k,) * shape.depth if widths is None else widths)
        self.acceptance = Acceptance(shape.depth + 1)
        self._each = shape.nodes - 1
        self.rest = 0
        self._purse = Purse()
        self._pause, self._fresh = FIRST_REST // 2, True
        self._trial = self._unplain = 0
        self._look = (
            1  # laps with drafts until one without; the first look comes at once, the others are rare
        )
        self._gain: float | None = None
        self._bushes: dict[int, float] = {}

    @property
    def asks(self) -> Deserves | None:
        """Who is to be asked before each level."""
        return self.deserves

    @property
    def drafting(self) -> bool:
        return self._gain is not None

    def plan_levels(self, live: int, most: int, due: int = 0) -> int:
        """Levels that `live` trees may grow, at most `most`; 0: none, and `rest` says for how long.

        due: rows that must be caught up with first.
        """
        self.rest = 0
        if not live or most <= 0:
            return 0
        if self._unplain >= (self._look if self.costs.knows_plain(live) else 1):
            self._unplain, self._look, self.rest = 0, UNPLAIN, live
            return 0
        plain, levels = self.costs.plain(live), np.arange(1, most + 1)
        costs = self.costs.drafting(live, levels)
        costs += self.costs.sending(live, live * levels * self._bush(live))
        rates = (live + live * self.acceptance.expected()[:most]) / (plain + costs)
        affordable = costs + self.costs.catching(due) <= self._stake(plain)
        if np.any(rates[affordable] * plain > live):
            return int(levels[affordable][-1])
        if self._trial > 0 and affordable[0]:
            self._trial -= live
            return 1
        if not np.any((1 + levels) * plain > plain + costs):  # not even if every guess were right
            self._pause = LONGEST_REST
        self._lie_down(live, plain, math.ceil(TRIAL / live) * float(costs[0]) + self.costs.catching(due))
        return 0

    def deserves(self, scores: Floats, depth: int) -> bool:
        """Whether one more level pays below a frontier of `depth`, as sure as this one is of itself.

        scores: [live, top_k] cumulative log-probabilities of the frontier. A level pays when it brings
        more tokens per second than the lap so far.
        """
        live = len(scores)
        trust, chances = self.acceptance.trust(), self.acceptance.chances()
        reached = float(np.minimum(np.exp(scores).sum(1) * trust[depth - 1], 1.0).sum())
        spent = self.costs.plain(live) + float(self.costs.drafting(live, depth))
        return reached * chances[depth] > (live + reached * depth) / spent * self.costs.further(live, depth)

    def values(self, offer: Offer) -> Floats:
        """[live, n] the chance of each candidate to be accepted, as far as its drafter can be trusted."""
        return worth(offer, self.acceptance.trust())

    def choose(self, values: Floats, levels: int, most: int) -> Flags:
        """[live, n] which candidates to send, at most `most` in all: as many as pay, the best of all."""
        count = self.choose_rows(ranked(values, self._each), len(values), levels)
        return best_overall(values, min(count, most), self._each)

    def choose_rows(self, worth: Floats, live: int, levels: int) -> int:
        """How many of the grown nodes to send, best first.

        worth: chances of acceptance of all nodes on offer, falling.
        """
        plain = self.costs.plain(live)
        spent = float(self.costs.drafting(live, levels))
        extra = self.costs.sending(live, np.arange(len(worth) + 1))
        tokens = live + np.concatenate(([0.0], np.cumsum(worth)))
        rates = tokens / (plain + spent + extra)
        rates[1:][extra[1:] > max(self._stake(plain) - spent, 0.0)] = 0.0
        count = int(np.argmax(rates))
        self._remember_bush(live, count / (live * levels))
        return count

    def rested(self, trees: int, live: int) -> None:
        """So many trees went without drafts; `live` of them a lap, as far as is known."""
        self._purse.book(self.costs.plain(live), laps=trees / live)
        if self._gain is None:
            self._trial = TRIAL
            self.acceptance.doubt()

    def note_growth(self, live: int, levels: int, due: int, seconds: float) -> None:
        """Growing `live` trees of so many levels took so long, `due` rows caught up with included."""
        self.costs.note_growth(live, levels, due, seconds)

    def settle(self, trees: Sequence[Returned], spent: Spent = UNKNOWN) -> None:
        """A lap came back: learn from it, and book what it gained or lost against plain decoding."""
        if not trees:
            return
        live, rows = len(trees), sum(tree.rows for tree in trees)
        drafted = [tree for tree in trees if tree.grown]
        self._note(live, rows, bool(drafted), spent)
        plain, gained = self.costs.plain(live), 0.0
        if drafted:
            gained = sum(tree.accepted for tree in drafted) / live * plain
            gained -= self._extra(live, rows, drafted[0].grown, spent)
            self._fresh = False
            self._gain = (self._gain or 0.0) + gained
        self._purse.book(plain, gained)
        self._unplain = self._unplain + bool(spent.wall) if drafted else 0
        for tree in drafted:
            own = tree.accepted if tree.own is None else tree.own
            self.acceptance.note(tree.grown, tree.masses, own)

    def _stake(self, plain: float) -> float:
        """Seconds that a lap with drafts may take longer than a plain one: what the purse holds, and what
        drafts bring so surely that it is no risk.
        """
        return self._purse.holds(plain) + plain * self.acceptance.surely()

    def _note(self, live: int, rows: int, drafted: bool, spent: Spent) -> None:
        if spent.computed:
            self.costs.note_lap(live, rows, spent.computed)
            if spent.wall:
                hop = spent.wall - spent.computed - spent.growing
                self.costs.note_hop(drafted, hop, spent.computed)
        if spent.wall and not drafted:
            self.costs.note_plain(live, spent.wall)

    def _extra(self, live: int, rows: int, grown: int, spent: Spent) -> float:
        """Seconds that a lap with drafts took beyond a plain one; waiting for clients is cut off."""
        plain = self.costs.plain(live)
        sending = float(self.costs.sending(live, rows - live))
        grew = float(self.costs.drafting(live, grown))
        if self._fresh:  # caches are cold, kernels are loaded: what the first one takes no other will
            return grew + sending
        believed = min(spent.growing, STRANGEST * grew)  # nor one that loads kernels for rows of its own
        said = max(grew, believed) + sending
        wall = spent.wall - (spent.growing - believed)
        return min(wall - plain, WILDEST * plain + said) if spent.wall else said

    def _lie_down(self, live: int, plain: float, trial: float) -> None:
        """Rest twice as long as the last time, unless drafting had paid; and until a trial can be paid."""
        if self._gain is not None:
            self._pause = FIRST_REST if self._gain > plain else min(2 * self._pause, LONGEST_REST)
        laps = min(max(FIRST_REST, self._pause, self._purse.laps_until(trial, plain)), LONGEST_REST)
        self.rest = math.ceil(min(laps * live, max(MOST_RESTED, FIRST_REST * live)))
        self._purse.book(plain, -self.costs.handover(), laps=0)
        self._gain, self._trial, self._unplain = None, 0, 0

    def _bush(self, live: int) -> float:
        """Typical nodes per level and tree with about so many trees."""
        return self._bushes.get(live.bit_length(), SLENDER)

    def _remember_bush(self, live: int, nodes: float) -> None:
        before = self._bush(live)
        self._bushes[live.bit_length()] = before + WEIGHT * (max(nodes, SLENDER / 4) - before)
