"""How much drafting pays now: levels to grow, rows to send, or for how long to rest.

Two safeguards make drafting cheap where it does not pay. The best expected rate wins, plain decoding
included; and nothing is tried beyond the risk budget. Where drafting does not pay the drafter rests, each
time longer; behind a rest comes a short trial, since measurements and texts change. Counts, probabilities
and measured seconds in, counts out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specsot.drafting import TunerName
from specsot.members import Curve, TreeShape
from specsot_drafter.core.acceptance import AcceptanceRates
from specsot_drafter.core.budget import (
    UNKNOWN_SECONDS,
    BudgetPolicy,
    FixedBudget,
    LapSeconds,
    SeedBudget,
    TreeOutcome,
    lessons_of,
)
from specsot_drafter.core.cost_model import CostModel
from specsot_drafter.core.risk_budget import MAX_TRIAL_LAPS, RiskBudget
from specsot_drafter.core.selection import (
    Candidates,
    Flags,
    Floats,
    Ints,
    KeepGrowing,
    acceptance_chances,
    best_overall,
    falling,
    keep_best,
)
from specsot_drafter.core.whole_budget import WholeBudget

# What halving and doubling changes: docs/results/house.md.
FIRST_NODES_PER_LEVEL = 1.0  # nodes per level and tree, before anything is known; halved, gains fall by 3 %
FIRST_REST_LAPS, MAX_REST_LAPS = 16, 128  # a rest doubles while trials fail; the first, doubled: 1.5 % less
# Of a rest until a trial can be paid; behind 1024 a text that gained 1.4 was not tried for 800 tokens.
MAX_UNPAID_LAPS = 256
# Trees of one rest, unless fewer than FIRST_REST_LAPS laps; as stage 0's MAX_UNSENT_ROWS.
MAX_REST_TREES = 8192
TRIAL_TREES = 4  # trees of one level that a trial takes; changes 0.1 %
PLAIN_PROBE_LAPS = 128  # laps with drafts, after which one without measures plain decoding: under 1 % of laps
# Laps of such a look with so many texts: a stage begins all but the first one early, and 64 texts on an H100
# take 8 ms then, 12 where none is. Five, so that most of what is seen is so; not measured.
LOOK_LAPS, LOOK_TEXTS = 5, 16
# The share of laps that looks may lose where drafts pay. Those up to so many laps apart are had in any case,
# as they may show that drafts do not: with half as many a replayed text came to 0.81 of plain, for 0.94.
LOOK_SHARE, FIRST_LOOKS = 0.01, 8
# Of many texts so many are drafted for at first, and as many times more with every lap: a first draft catches
# up with prompts, and 64 texts on an H100 took 35 ms for it where a plain lap takes 8.
FEW_TEXTS, TEXTS_GROW = 4, 4
LAP_WEIGHT = 0.2  # of one lap in the exponential mean; not measured
RATE_WEIGHT = 0.05  # of one lap in the exponential mean of what drafts bring; not measured

Widths = Sequence[int]


class MeasuredBudget(BudgetPolicy):
    """Chooses levels and rows that maximise expected tokens per second of the whole lap."""

    adaptive, holding = True, False

    def __init__(self, shape: TreeShape, lap: Curve, level: Curve, widths: Widths | None = None) -> None:
        """lap: seconds per rows of all stages; level: seconds per rows of one level of growth.
        widths: rows per tree that level 2, 3, ... takes; EAGLE's when absent.
        """
        widths = (shape.top_k,) * shape.depth if widths is None else tuple(widths)
        self.costs = CostModel(lap, level, widths)
        self.acceptance = AcceptanceRates(shape.depth + 1)
        super().__init__(replace(shape, depth=min(shape.depth, len(widths))))  # a drafter may have fewer
        self._risk = RiskBudget()
        self._rest_laps = FIRST_REST_LAPS
        self._trial_trees = self._drafted_laps = 0
        self._next_plain = 1  # laps with drafts until one without; first looks come soon, others are rare
        self._gained: float | None = None
        self._vain_laps = 0  # of rests behind which a trial was too dear
        self._rested = False  # a rest is over, and nothing was drafted since
        self._trying = False  # the trees that grow now are a trial
        self._looked = set[int]()  # bits of numbers of texts whose plain laps were looked at
        self._looks = False  # what rests now does so for that alone
        self._timed = True  # it was told how long the last lap took
        self._most_nodes = 0  # that a lap had
        self._texts = FEW_TEXTS  # to draft for at most
        self._others = 0  # texts beside those that grow now
        self._nodes_by_live: dict[int, float] = {}
        self._fed: list[int] = []  # nodes of each level that were fed for the trees that grow now
        # Nodes fed for level 2, 3, ... at least: none for a block's. None: nobody asks between levels.
        self._narrow: tuple[int, ...] | None = tuple(min(1, width) for width in widths)
        self._rate = 1.0  # times plain decoding, lately
        self._sent = 1.0  # of laps that grew trees, those that had nodes, lately

    @property
    def keep_growing(self) -> KeepGrowing | None:
        return self.pays_deeper

    @property
    def drafting(self) -> bool:
        return self._gained is not None

    def limit_texts(self, live: int) -> int:
        return min(live, self._texts)

    def plan_levels(self, live: int, most: int, due: int = 0, beside: int = 0) -> int:
        self.rest, self._fed, self._trying, self._others = 0, [], False, beside
        if not live or most <= 0:
            return 0
        texts = live + beside
        if self._look(texts):
            return 0
        plain, levels = self.costs.plain_lap(texts), np.arange(1, most + 1)
        added = self._costs(texts, levels)
        costs = self._costs(live, levels) if beside else added  # theirs alone, as of a lap
        costs = costs + self.costs.catchup(due)
        if self._rested:  # what was accepted before may not be any more
            self._risk.grant(2 * float(costs[0]) / plain)
        deep = 1 if self._narrow else most
        only = deep if self._rested else most
        left, self._rested = self._affordable_seconds(live, plain)[:most], False
        affordable = (costs <= left) & (levels <= only)
        affordable &= live * levels <= self._most(live)
        expected = self._sent * self.acceptance.expected_tokens()[:most]
        rates = np.where(affordable, texts * (1 + expected) / (plain + added), 0.0)
        if np.any(rates * plain > texts):
            return 1 + int(np.argmax(rates)) if self._narrow is None else int(levels[affordable][-1])
        if self._trial_trees > 0 and affordable[0]:
            self._trial_trees -= live
            self._trying = True
            return int(levels[affordable & (levels <= deep)][-1])
        if not np.any(levels * plain > added):  # not even if every guess were right
            self._rest_laps = MAX_REST_LAPS
        self._start_rest(live, texts, due)
        return 0

    def looks_next(self, texts: int) -> bool:
        if not self._timed:  # prompts beside them make laps what they are
            return False
        laps = LOOK_LAPS if texts >= LOOK_TEXTS else 1
        waits = laps * self._next_plain
        if self._next_plain >= FIRST_LOOKS or laps > 1:
            waits = max(waits, laps * (1 - 1 / max(self._rate, 1.0)) / LOOK_SHARE)
        if self.costs.plain_is_old:
            waits = min(waits, laps * FIRST_LOOKS)
        return self._drafted_laps >= waits or texts.bit_length() not in self._looked

    def _look(self, texts: int) -> bool:
        """Whether it is time to see what plain laps take; then that rests."""
        self._looks = self.looks_next(texts)
        if self._looks:
            laps = LOOK_LAPS if texts >= LOOK_TEXTS else 1
            self._looked.add(texts.bit_length())
            self._drafted_laps, self.rest = 0, texts * laps
            self._next_plain = min(2 * self._next_plain, PLAIN_PROBE_LAPS)
        return self._looks

    def _costs(self, live: int, levels: Ints) -> Floats:
        """Seconds that trees of so many levels, of as many nodes as usual, add to a lap."""
        nodes = live * np.minimum(levels * self._typical_nodes(live), self._each)
        return self.costs.draft_seconds(live, levels, self._narrow) + self.costs.tree_rows(live, nodes)

    def _most(self, live: int) -> int:
        """Nodes that `live` trees may have: no more than twice what was seen."""
        return max(2 * self._most_nodes, live)

    def pays_deeper(self, scores: Floats, depth: int) -> int:
        """How many nodes of a frontier to feed, best first; 0: no deeper. It is as sure as it is of itself.

        scores: [live, width] cumulative log-probabilities of the frontier at `depth`. Another level pays when
        it brings more tokens than its seconds would bring otherwise.
        """
        live = len(scores)
        trust, chances = self.acceptance.trust(), self.acceptance.by_depth()
        reached = np.minimum(np.cumsum(np.exp(scores), 1) * trust[depth - 1], 1.0).sum(0)
        widths = np.arange(1, scores.shape[1] + 1)
        row = self.costs.tree_rows(live, live * (depth + 1)) - self.costs.tree_rows(live, live * depth)
        spent = self.costs.level_seconds(live, live * widths) + row  # and that of each tree
        gains = reached * chances[depth] - self._worth(live) * spent
        best = int(np.argmax(gains))
        if gains[best] <= 0:
            return 0
        self._fed.append(best + 1)
        return best + 1

    def score(self, offer: Candidates) -> Floats:
        """[live, n] the chance of each candidate to be accepted, as far as its drafter can be trusted."""
        return acceptance_chances(offer, self.acceptance.trust())

    def foreseen_nodes(self, live: int, levels: int, most: int) -> int:
        return 0  # it is asked between levels, and which are worth it is known behind them

    def select(self, values: Floats, levels: int, most: int) -> Flags:
        """[live, n] which candidates to send, at most `most` in all: as many as pay, the best of all."""
        open_to = keep_best(values, self._each)
        count = self.count_rows(falling(open_to)[: max(most, 0)], len(values), levels)
        return best_overall(open_to, count)

    def count_rows(self, worth: Floats, live: int, levels: int) -> int:
        """How many of the grown nodes to send, best first.

        worth: chances of acceptance of all nodes on offer, falling.
        """
        count = self._best_count(np.cumsum(worth), np.arange(len(worth) + 1), live, levels)
        if self._trying:  # nothing would be learned from nothing
            count = max(count, min(live, len(worth)))
        return count

    def _best_count(self, worth: Floats, counts: Ints, live: int, levels: int) -> int:
        """That of these numbers of nodes, 0 first, which gains most. worth: of 1, 2, ... together."""
        texts = live + self._others
        plain = self.costs.plain_lap(texts)
        spent = float(self.costs.draft_seconds(live, levels))
        extra = self.costs.tree_rows(texts, counts)
        gains = np.concatenate(([0.0], worth)) - self._worth(live) * extra
        left = max(float(self._affordable_seconds(live, plain)[levels - 1]) - spent, 0.0)
        gains[1:][(extra > left)[1:] | (counts > self._most(live))[1:]] = 0.0
        return int(counts[np.argmax(gains)])

    def begin_texts(self) -> bool:
        return self._risk.begin_texts() and self._gained is None

    def record_rest(self, trees: int, live: int) -> None:
        self._risk.record(laps=trees / live)
        self.costs.skip_laps(trees / live)
        if self._gained is None and not self._looks:
            self._trial_trees, self._rested = TRIAL_TREES, True

    def record_growth(self, live: int, levels: int, due: int, seconds: float) -> None:
        self.costs.record_growth(live, levels, due, seconds, self._fed)
        if len(self._fed) < levels - 1:
            self._narrow = None

    def record_lap(self, trees: Sequence[TreeOutcome], spent: LapSeconds = UNKNOWN_SECONDS) -> None:
        """A lap came back: learn from it, and book what it gained or lost against plain decoding."""
        if not trees:
            return
        self._timed = spent.computed + spent.wall > 0
        live, rows = len(trees), sum(tree.rows for tree in trees)
        drafted = [tree for tree in trees if tree.grown]
        if drafted and rows == live:  # grown for nothing: the ring tells what a plain lap takes, not this one
            spent = replace(spent, wall=0.0)
        self._record_costs(live, rows, bool(drafted), spent)
        plain, gained = self.costs.plain_lap(live), 0.0
        if drafted:
            brought = sum(tree.accepted for tree in drafted) / live
            took = float(self.costs.draft_seconds(len(drafted), drafted[0].grown, self._fed))
            took += float(self.costs.tree_rows(live, rows - live))
            gained = brought * plain - took
            self._rate += RATE_WEIGHT * ((1 + brought) / (1 + took / plain) - self._rate)
            self._sent += LAP_WEIGHT * ((rows > live) - self._sent)
            self._gained = (self._gained or 0.0) + gained
            self._most_nodes = max(self._most_nodes, rows - live)
            self._texts *= TEXTS_GROW if len(drafted) == self._texts else 1
        self._risk.record(gained / plain)
        self._drafted_laps = self._drafted_laps + bool(spent.wall) if drafted else 0
        if drafted and rows > live:  # where no node was sent, none was refused
            self.acceptance.record(lessons_of(drafted))

    def _affordable_seconds(self, live: int, plain: float) -> Floats:
        """[levels] seconds that a lap with `live` trees may take longer than a plain one: the risk budget,
        and what the first level brings so surely that it is no risk.
        """
        sure = float(self.acceptance.pessimistic_tokens()[0]) * live / (live + self._others)
        return np.full(self._levels, self._risk.available(plain) + plain * sure)

    def _worth(self, live: int) -> float:
        """Tokens that a second brings otherwise: plain, or as laps with drafts did lately."""
        texts = live + self._others
        return max(self._rate, 1.0) * texts / self.costs.plain_lap(texts)

    def _record_costs(self, live: int, rows: int, drafted: bool, spent: LapSeconds) -> None:
        if spent.computed:
            self.costs.record_lap(live, rows, spent.computed)
            if spent.wall:
                hop = spent.wall - spent.computed - spent.growing
                self.costs.record_hop(drafted, hop, spent.computed, rows, live)
        if spent.wall and not drafted:
            self.costs.record_plain(live, spent.wall, spent.computed)

    def _start_rest(self, live: int, texts: int, due: int) -> None:
        """Rest twice as long as the last time, unless drafting had paid; and until a trial can be paid."""
        plain = self.costs.plain_lap(texts)
        if self._gained is not None:
            self._rest_laps = (
                FIRST_REST_LAPS if self._gained > plain else min(2 * self._rest_laps, MAX_REST_LAPS)
            )
            self.acceptance.discount()
        else:  # it was asked in vain
            self._risk.record(-self.costs.handover() / plain, laps=0)
            self._vain_laps += self._rest_laps
            if self._vain_laps >= MAX_UNPAID_LAPS:
                self._vain_laps = 0
                self.costs.doubt()
        laps = self._rest_laps
        self.costs.skip_laps(laps)
        costs = self._costs(live, np.arange(1, self._levels + 1))
        trial = float(costs[0]) + self.costs.catchup(due)
        if (paid := trial / plain) > MAX_TRIAL_LAPS:
            unsure = paid - float(self.acceptance.pessimistic_tokens()[0])
            laps = max(laps, min(self._risk.laps_until(unsure), MAX_UNPAID_LAPS))
        self.rest = math.ceil(min(laps * texts, max(MAX_REST_TREES, FIRST_REST_LAPS * texts)))
        self._gained, self._trial_trees, self._drafted_laps, self._texts = None, 0, 0, FEW_TEXTS

    def _typical_nodes(self, live: int) -> float:
        """Typical nodes per level and tree with about so many trees."""
        return self._nodes_by_live.get(live.bit_length(), FIRST_NODES_PER_LEVEL)

    def record_nodes(self, live: int, levels: int, nodes: int) -> None:
        before, found = self._typical_nodes(live), nodes / (live * levels)
        self._nodes_by_live[live.bit_length()] = before + LAP_WEIGHT * (
            max(found, FIRST_NODES_PER_LEVEL / 4) - before
        )


def make_budget(
    name: TunerName, shape: TreeShape, lap: Curve, level: Curve, widths: Widths, at_once: bool = False
) -> BudgetPolicy:
    """lap, level: see `MeasuredBudget`. at_once: nobody can be asked between levels. A fixed shape is always
    drafted whole.
    """
    if shape.fixed or name == "fixed":
        return FixedBudget(shape)
    if name == "seed":
        return SeedBudget(shape)
    return WholeBudget(shape, lap, level, widths) if at_once else MeasuredBudget(shape, lap, level, widths)
