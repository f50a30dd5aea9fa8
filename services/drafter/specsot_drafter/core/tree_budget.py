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
from specsot_drafter.core.acceptance import AcceptanceRates, TreeWorth
from specsot_drafter.core.budget import (
    UNKNOWN_SECONDS,
    BudgetPolicy,
    FixedBudget,
    LapSeconds,
    SeedBudget,
    TreeOutcome,
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

# What halving and doubling changes: docs/results/house.md.
FIRST_NODES_PER_LEVEL = 1.0  # nodes per level and tree, before anything is known; halved, gains fall by 3 %
FIRST_REST_LAPS, MAX_REST_LAPS = 16, 128  # a rest doubles while trials fail; the first, doubled: 1.5 % less
# Of a rest until a trial can be paid; behind 1024 a text that gained 1.4 was not tried for 800 tokens.
MAX_UNPAID_LAPS = 256
# Trees of one rest, unless fewer than FIRST_REST_LAPS laps; as stage 0's MAX_UNSENT_ROWS.
MAX_REST_TREES = 8192
TRIAL_TREES = 4  # trees of one level that a trial takes; changes 0.1 %
HARDLY_MORE = 1.5  # times what one level adds to a lap, a trial adds where all levels grow at once
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
# Where all levels grow at once a choice is held for so many laps, of which no more is learned than what they
# gained and how far trees went, while credit is full: deciding anew takes a host 1 ms, and a lap with a tree
# of 24 takes 2.9 without (SmolLM2-135M, H200).
HELD_LAPS = 3
LAP_WEIGHT = 0.2  # of one lap in the exponential mean; not measured
RATE_WEIGHT = 0.05  # of one lap in the exponential mean of what drafts bring; not measured

Widths = Sequence[int]


class MeasuredBudget(BudgetPolicy):
    """Chooses levels and rows that maximise expected tokens per second of the whole lap."""

    adaptive, holding = True, False

    def __init__(
        self, shape: TreeShape, lap: Curve, level: Curve, widths: Widths | None = None, at_once: bool = False
    ) -> None:
        """lap: seconds per rows of all stages; level: seconds per rows of one level of growth.
        widths: rows per tree that level 2, 3, ... takes; EAGLE's when absent. at_once: nobody asks between
        levels, as far as is known before any grew.
        """
        widths = (shape.top_k,) * shape.depth if widths is None else tuple(widths)
        self.costs = CostModel(lap, level, widths, at_once)
        self.acceptance = AcceptanceRates(shape.depth + 1)
        super().__init__(replace(shape, depth=min(shape.depth, len(widths))))  # a drafter may have fewer
        self._risk = RiskBudget(at_once)
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
        self._seen = TreeWorth(self.acceptance)  # where all levels grow at once
        self._fed: list[int] = []  # nodes of each level that were fed for the trees that grow now
        # Nodes fed for level 2, 3, ... at least: none for a block's. None: nobody asks between levels.
        self._narrow = None if at_once else tuple(min(1, width) for width in widths)
        self._held, self._choice = 0, (0, 0, 0)  # for how many laps more; texts, those beside, levels
        self._foreseen = 0, 0, 0  # texts, levels, and nodes of each
        self._took = (0, 0, 0), 0.0  # texts, rows, levels of a lap; seconds more than a plain one takes
        self._returned: list[tuple[int, Sequence[float], int]] = []  # trees of held laps
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
        self.holding = False
        if not live or most <= 0:
            return 0
        texts = live + beside
        if self._look(texts):
            return 0
        if self._holds(live, most, due):
            return self._choice[2]
        plain, levels = self.costs.plain_lap(texts), np.arange(1, most + 1)
        if self._narrow is None and not self._rested:  # of most laps nothing else is asked
            left = self._affordable_seconds(live, plain)[:most] - self.costs.catchup(due)
            rates = self._best_rates(live, levels, left)
            if np.any(rates * plain > texts):
                self._held, self._choice = HELD_LAPS, (live, beside, 1 + int(np.argmax(rates)))
                return self._choice[2]
        added = self._costs(texts, levels)
        costs = self._costs(live, levels) if beside else added  # theirs alone, as of a lap
        costs = costs + self.costs.catchup(due)
        deep = self._trial_levels(costs)
        if self._rested:  # what was accepted before may not be any more
            self._risk.grant(2 * float(costs[deep - 1]) / plain)
        only = deep if self._rested else most
        left, self._rested = self._affordable_seconds(live, plain)[:most], False
        affordable = (costs <= left) & (levels <= only)
        affordable &= live * levels <= max(self._most(live), live * deep)
        if self._narrow is None:
            rates = self._best_rates(live, levels, left - self.costs.catchup(due))
            rates[only:] = 0.0
        else:
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

    def _holds(self, live: int, most: int, due: int) -> bool:
        """Whether what was chosen last is right for this lap, too, and nothing is learned."""
        levels = self._choice[2]
        same = self._choice == (live, self._others, levels) and levels <= most and due <= live * (levels + 2)
        same &= not self._rested and self._risk.full
        self.holding = same and self._held > 0
        self._held = self._held - 1 if self.holding else 0
        return self.holding

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

    def _best_rates(self, live: int, levels: Ints, left: Floats) -> Floats:
        """Tokens a second with trees of so many levels, with those nodes of each that bring most; `live` of
        them take at most `left` seconds, [levels].
        """
        nodes, texts = np.arange(1, self._each + 1), live + self._others
        rows = self.costs.tree_rows(texts, texts * nodes)
        grown = self.costs.draft_seconds(texts, levels, self._narrow)
        worth = self._seen.best(self._levels, self._each)[levels - 1]
        rates = texts * (1 + self._sent * worth) / (self.costs.plain_lap(texts) + grown[:, None] + rows)
        if self._others:
            rows = self.costs.tree_rows(live, live * nodes)
            grown = self.costs.draft_seconds(live, levels, self._narrow)
        fits = (grown[:, None] + rows <= left[:, None]) & (live * nodes <= self._most(live))
        return np.where(fits, rates, 0.0).max(1)

    def _costs(self, live: int, levels: Ints) -> Floats:
        """Seconds that trees of so many levels, of as many nodes as usual, add to a lap."""
        nodes = live * np.minimum(levels * self._typical_nodes(live), self._each)
        return self.costs.draft_seconds(live, levels, self._narrow) + self.costs.tree_rows(live, nodes)

    def _trial_levels(self, costs: Floats) -> int:
        """Levels of a trial: where all grow at once, those that add hardly more to a lap than the first."""
        return int(np.sum(costs <= HARDLY_MORE * costs[0])) if self._narrow is None else 1

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
        """As many as would have paid lately, of each the same."""
        if self._trying or self._rested:  # a trial's are chosen when it is known whether there is one
            return 0
        if not (self.holding and self._foreseen[:2] == (live, levels)):
            worth = self._seen.best(self._levels, self._each)[levels - 1, : most // live]
            counts = live * np.arange(len(worth) + 1)
            nodes = self._best_count(live * worth, counts, live, levels) // live
            self._foreseen = live, levels, nodes
        return min(self._foreseen[2], most // live)

    def log_trust(self) -> Floats:
        return np.log(self.acceptance.trust())

    def select(self, values: Floats, levels: int, most: int) -> Flags:
        """[live, n] which candidates to send, at most `most` in all: as many as pay, the best of all."""
        open_to = keep_best(values, self._each)
        count = self.count_rows(falling(open_to)[: max(most, 0)], len(values), levels)
        return best_overall(open_to, count)

    def record_worth(self, values: Floats, depths: Ints) -> None:
        if self._narrow is None and not self.holding:
            self._seen.record(values, depths)

    def count_rows(self, worth: Floats, live: int, levels: int) -> int:
        """How many of the grown nodes to send, best first.

        worth: chances of acceptance of all nodes on offer, falling.
        """
        count = self._best_count(np.cumsum(worth), np.arange(len(worth) + 1), live, levels)
        if self._trying:  # nothing would be learned from nothing
            rows = self.costs.tree_rows(live + self._others, np.arange(len(worth) + 1))
            free = (HARDLY_MORE - 1) * float(self.costs.draft_seconds(live, levels))
            cheap = int(np.sum(rows <= free)) - 1 if self._narrow is None else 0
            count = max(count, cheap, min(live, len(worth)))
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
        if not self.holding:
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
        held = self.holding and self._took[0] == (live, rows, drafted[0].grown if drafted else 0)
        if not held:
            self._record_costs(live, rows, bool(drafted), spent)
        plain, gained = self.costs.plain_lap(live), 0.0
        if drafted:
            brought = sum(tree.accepted for tree in drafted) / live
            took = self._took[1] if held else self._added_seconds(live, rows, drafted)
            gained = brought * plain - took
            self._rate += RATE_WEIGHT * ((1 + brought) / (1 + took / plain) - self._rate)
            self._sent += LAP_WEIGHT * ((rows > live) - self._sent)
            self._gained = (self._gained or 0.0) + gained
            self._most_nodes = max(self._most_nodes, rows - live)
            self._texts *= TEXTS_GROW if len(drafted) == self._texts else 1
        self._risk.record(gained / plain)
        self._drafted_laps = self._drafted_laps + bool(spent.wall) if drafted else 0
        if drafted and rows > live:  # where no node was sent, none was refused
            self._returned += [
                (one.grown, one.masses, one.accepted if one.own is None else one.own) for one in drafted
            ]
        if self._returned and not held:
            self.acceptance.record(self._returned)
            self._returned = []

    def _added_seconds(self, live: int, rows: int, drafted: Sequence[TreeOutcome]) -> float:
        """What such a lap takes more than a plain one."""
        grown = drafted[0].grown
        took = float(self.costs.draft_seconds(len(drafted), grown, self._fed))
        took += float(self.costs.tree_rows(live, rows - live))
        self._took = (live, rows, grown), took
        return took

    def _affordable_seconds(self, live: int, plain: float) -> Floats:
        """[levels] seconds that a lap with `live` trees may take longer than a plain one: the risk budget,
        and what drafts bring so surely that it is no risk: the first level, or all that grow at once.
        """
        sure = self.acceptance.pessimistic_tokens() * live / (live + self._others)
        all_of_them = self._narrow is None and not self._risk.overdrawn
        return self._risk.available(plain) + plain * (sure if all_of_them else np.full_like(sure, sure[0]))

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
        trial = float(costs[self._trial_levels(costs) - 1]) + self.costs.catchup(due)
        if (paid := trial / plain) > MAX_TRIAL_LAPS:
            unsure = paid - float(self.acceptance.pessimistic_tokens()[0])
            laps = max(laps, min(self._risk.laps_until(unsure), MAX_UNPAID_LAPS))
        self.rest = math.ceil(min(laps * texts, max(MAX_REST_TREES, FIRST_REST_LAPS * texts)))
        self._gained, self._trial_trees, self._drafted_laps, self._texts = None, 0, 0, FEW_TEXTS
        self._held, self.holding = 0, False

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
    """lap, level, at_once: see `MeasuredBudget`. A fixed shape is always drafted whole."""
    if shape.fixed or name == "fixed":
        return FixedBudget(shape)
    return SeedBudget(shape) if name == "seed" else MeasuredBudget(shape, lap, level, widths, at_once)
