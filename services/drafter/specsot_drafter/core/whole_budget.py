"""How much to draft where a device grows all levels of a tree at once; by the clock alone.

There a host takes most of a short lap, so that stages' seconds say little, and changing over between laps
with drafts and without takes longer than either. So what a tree is like is chosen by what is expected of it,
but whether there is one by an account: what a text lost to plain decoding, in plain laps, stays below what it
was given, the lap that may bring nothing and the change back to plain ones included. What all texts gain and
lose pays for those to come. Counts, probabilities and measured seconds in, counts out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from specsot.members import Curve, TreeShape
from specsot_drafter.core.acceptance import AcceptanceRates, TreeWorth
from specsot_drafter.core.budget import UNKNOWN_SECONDS, BudgetPolicy, LapSeconds, TreeOutcome, lessons_of
from specsot_drafter.core.cost_model import SIZED_LAPS, Counts, RowCurve, slopes_of
from specsot_drafter.core.selection import (
    Candidates,
    Flags,
    Floats,
    Ints,
    acceptance_chances,
    best_overall,
    falling,
    keep_best,
)

# Plain laps that a text may lose of so many, as far as the purse pays: 3 %, less what nobody books.
TEXT_CREDIT, TEXT_LAPS = 5.75, 200
MOST_CREDIT = 12.0  # that a text may lose again of what it gained
# Texts that may lose that much before any gained, and of what others gained: what texts to come may lose.
FIRST_TEXTS, MOST_TEXTS = 3, 10
RISK_SHARE = 0.002  # of plain time, beside that
# Plain laps without drafts, after which it is looked again at what those take, where past gains pay for it.
UNTRIED_LAPS = 1000
# Times what drafts add to a lap, that the first lap without takes more, and the first with: 1.3 and 3.1 ms of
# 2.4 (SmolLM2-135M, H100).
CHANGE = 0.75
# A choice is held for so many laps, of which no more is learned than what they gained: deciding anew takes a
# host 1 ms, and a lap with a tree of 24 takes 2.8 without (SmolLM2-135M, H100).
LEAST_HELD, HELD_LAPS = 3, 15  # the least, as long as few laps say what such take
DEEPER = 0.98  # times the best rate, that a deeper tree is expected to have: else it is never known
OFTEN = 0.4
LOOK_LAPS = 6  # of a look at plain laps: all but the first are begun early
LOOK_SHARE = 0.01  # of laps, that looks may lose
MAX_REST_TREES, FIRST_REST_LAPS = 8192, 16  # of one rest, unless fewer laps; as stage 0's MAX_UNSENT_ROWS
# Of many texts so many are drafted for at first, and as many times more with every lap: a first draft catches
# up with prompts, and 64 texts on an H100 took 35 ms for it where a plain lap takes 8.
FEW_TEXTS, TEXTS_GROW = 4, 4
PLAIN_LOOKS, DRAFTED_LAPS = 5, 63  # that are believed; replayed traces hold it
CALM = 0.4  # of such laps take less than what is believed; replayed traces hold 0.25 to 0.5
RATE_WEIGHT = 0.05  # of one lap in the exponential mean of what drafts bring; not measured
UNSEEN = 0.5  # of a plain lap, that drafts are taken to add to it beside what curves say; not measured
# Plain laps that they are believed to add beside that, at most: the first with more texts may compile a
# kernel. On an H100 one of 66 ms, for 6, kept 8 and 64 clients without drafts for good.
MOST_ADDED = 2.5
CATCHUP_ROW_SHARE = 0.3  # of a level over as many rows, for rows only caught up with; a guess


class ClockedLaps:
    """Seconds of laps with trees and without, as the clock had them lately: what curves say of rows and
    levels, and a rest, which is a median.
    """

    def __init__(self, lap: Curve, level: Curve, widths: Sequence[int]) -> None:
        """lap: seconds per rows of all stages; level: of one level; widths: rows of level 2, 3, ..."""
        self._lap, self._level, self._widths = RowCurve(lap), RowCurve(level), (1, *widths)
        self._plain = dict[int, deque[float]]()  # by bits of texts, what curves leave out
        self._drafted = dict[int, deque[tuple[int, float]]]()  # rows, and that
        self._row = 0.0  # seconds of one row that the curve leaves out

    def plain(self, texts: int) -> float:
        return float(self._lap.at(texts)) + self._row * texts + self._beside(texts)

    def drafted(self, texts: int, grown: int, levels: Counts, nodes: Counts) -> Floats:
        """Of so many texts, `grown` of which have trees of so many levels; nodes: of all of them."""
        rows = texts + np.asarray(nodes)
        return self._told(rows, grown, levels) + self._row * rows + self._beside_drafted(texts)

    def catchup(self, rows: int) -> float:
        """Rows that must be caught up with before anything grows."""
        return CATCHUP_ROW_SHARE * float(self._level.at(rows)) if rows else 0.0

    def record_plain(self, texts: int, wall: float) -> None:
        seen = self._plain.setdefault(texts.bit_length(), deque(maxlen=PLAIN_LOOKS))
        seen.append(wall - float(self._lap.at(texts)))

    def record_drafted(self, texts: int, grown: int, levels: int, rows: int, wall: float) -> None:
        seen = self._drafted.setdefault(texts.bit_length(), deque(maxlen=DRAFTED_LAPS))
        most = MOST_ADDED * self.plain(texts)
        seen.append((rows, min(wall - float(self._told(rows, grown, levels)), most)))

    def forget(self, kept: int = 4) -> None:
        """Of laps with drafts the least stay, one in `kept`; 0: none do."""
        for seen in self._drafted.values():
            ordered = sorted(seen, key=lambda one: one[1] - self._row * one[0])
            seen.clear()
            seen.extend(ordered[: -(-len(ordered) // kept)] if kept else ())

    def learn(self, texts: int) -> None:
        """What a row takes, by laps of different sizes."""
        laps, plain = self._drafted.get(texts.bit_length(), ()), _nearest(self._plain, texts)
        found, least = slopes_of([*laps][-SIZED_LAPS:]), _calm(plain) if plain else 0.0
        most = min(((took - least) / max(rows - texts, 1) for rows, took in laps), default=0.0)
        self._row = max(min(median(found) if found else self._row, most), 0.0)

    def looks(self, texts: int) -> int:
        """At plain laps, of about so many texts, that say what those take."""
        return len(self._plain.get(texts.bit_length(), ()))

    def known(self, texts: int) -> int:
        """Laps with drafts that say so, of about so many texts."""
        return len(self._drafted.get(texts.bit_length(), ()))

    def _told(self, rows: Counts, grown: int, levels: Counts) -> Floats:
        passes = np.cumsum(self._level.at(grown * np.array(self._widths)))
        return self._lap.at(rows) + passes[np.asarray(levels) - 1]

    def _beside(self, texts: int) -> float:
        near = _nearest(self._plain, texts)
        return max(_calm(near) - self._row * texts, 0.0) if near else 0.0

    def _beside_drafted(self, texts: int) -> float:
        if near := _nearest(self._drafted, texts):
            return _calm(took - self._row * rows for rows, took in near)
        return self._beside(texts) + UNSEEN * self.plain(texts)


def _calm(seen: Iterable[float]) -> float:
    """What it takes beside few neighbours."""
    ordered = sorted(seen)
    return ordered[int((len(ordered) - 1) * CALM)]


def _nearest(seen: Mapping[int, Any], texts: int) -> Any:
    """Of about as many texts; where they were never seen, of those that are most like them."""
    bits, there = texts.bit_length(), [one for one in seen if seen[one]]
    return seen[min(there, key=lambda one: abs(one - bits))] if there else None


class Account:
    """Plain laps that those who write may lose yet, and those that come behind them."""

    def __init__(self) -> None:
        self.credit, self.purse, self._laps = TEXT_CREDIT, FIRST_TEXTS * TEXT_CREDIT, 0.0

    def record(self, gained: float, laps: float = 0.0) -> None:
        """So many laps passed, which gained so many plain laps' time on plain decoding, or lost it."""
        self._laps += laps
        if self._laps > TEXT_LAPS:
            self.credit += max(min(laps * self._share, TEXT_CREDIT - self.credit), 0.0)
        self.credit = min(self.credit + gained, MOST_CREDIT)
        self.purse = min(self.purse + gained + laps * RISK_SHARE, MOST_TEXTS * TEXT_CREDIT)

    @property
    def _share(self) -> float:
        """Of plain time, that a long text may lose."""
        return TEXT_CREDIT / TEXT_LAPS if self.purse > FIRST_TEXTS * TEXT_CREDIT else RISK_SHARE

    @property
    def full(self) -> bool:
        """Those who write have gained what they may lose."""
        return self.credit > MOST_CREDIT - 1

    def begin_texts(self) -> None:
        self.credit, self._laps = min(self.purse, TEXT_CREDIT), 0.0

    def laps_until(self, lacks: float) -> float:
        """Laps without drafts until there is so much more."""
        return max(TEXT_LAPS - self._laps, 0.0) + lacks / self._share


class WholeBudget(BudgetPolicy):
    """Chooses levels and nodes together, those that bring most by the clock, as long as its account pays."""

    adaptive, holding = True, False

    def __init__(self, shape: TreeShape, lap: Curve, level: Curve, widths: Sequence[int]) -> None:
        """lap: seconds per rows of all stages; level: seconds per rows of one level of growth.
        widths: rows per tree that level 2, 3, ... takes.
        """
        super().__init__(replace(shape, depth=min(shape.depth, len(widths))))
        self.costs = ClockedLaps(lap, level, widths)
        self.acceptance = AcceptanceRates(self._levels)
        self._worth = TreeWorth(self.acceptance)
        self._account = Account()
        self._texts, self._others = FEW_TEXTS, 0  # to draft for at most; beside those that grow now
        self._drafts = False  # the lap before had trees
        self._looked = set[int]()  # bits of numbers of texts whose plain laps were looked at
        self._laps = 0  # with drafts, since the last look
        self._untried = 0.0  # plain laps since any had trees
        self._timed = True  # it was told how long the last lap took
        self._rate = 1.0  # times plain decoding, lately
        self._held, self._choice, self._nodes = 0, (0, 0, 0), 0  # laps more; texts, others, levels; of each
        self._stake = 0.0  # plain laps that such a lap takes more than a plain one
        self._returned: list[tuple[int, Sequence[float], int]] = []  # trees that nothing was learned of yet

    @property
    def drafting(self) -> bool:
        return self._drafts

    def limit_texts(self, live: int) -> int:
        return min(live, self._texts)

    def plan_levels(self, live: int, most: int, due: int = 0, beside: int = 0) -> int:
        self.rest, self.holding, self._others, texts = 0, False, beside, live + beside
        if not live or most <= 0:
            return 0
        if self.looks_next(texts):
            self._looked.add(texts.bit_length())
            caught_up = self._texts  # and those few laps later, but for as many rows
            self._start_rest(LOOK_LAPS, texts)
            self._texts = caught_up
            return 0
        if self._holds(live, most, due):
            return self._choice[2]
        plain, catchup = self.costs.plain(texts), self.costs.catchup(due)
        rates, nodes, added = self._best(live, np.arange(1, most + 1))
        best = int(np.flatnonzero(rates >= DEEPER * rates.max())[-1])
        self._stake = float(added[best]) / plain
        needs = (1 + CHANGE) * (self._stake + catchup / plain)
        lacks, rich = needs - self._account.credit, 4 * needs <= self._account.purse
        if lacks > 0 and rich and self._untried >= UNTRIED_LAPS:  # neighbours may have been busy then
            self.costs.forget(0)
        elif lacks > 0:
            self._start_rest(max(self._account.laps_until(lacks), FIRST_REST_LAPS), texts)
            return 0
        self._account.record(-catchup / plain)
        self._held = min(max(self.costs.known(texts), LEAST_HELD), HELD_LAPS)
        self._nodes = int(nodes[best])
        self._choice = live, beside, best + 1
        return best + 1

    def _holds(self, live: int, most: int, due: int) -> bool:
        """Whether what was chosen last is right for this lap, too, and nothing is learned."""
        levels = self._choice[2]
        same = self._choice == (live, self._others, levels) and levels <= most and due <= live * (levels + 2)
        same &= self._drafts and (1 + CHANGE) * self._stake <= self._account.credit
        self.holding = same and self._held > 0
        self._held = self._held - 1 if self.holding else 0
        return self.holding

    def _best(self, live: int, levels: Ints) -> tuple[Floats, Ints, Floats]:
        """[levels] tokens a second with trees of so many levels, with those nodes of each that bring most;
        those; and seconds that such laps take more than plain ones.
        """
        self._learn(live + self._others)
        nodes, texts = np.arange(1, self._each + 1), live + self._others
        took = self.costs.drafted(texts, live, levels[:, None], live * nodes)
        worth = self._worth.best(self._levels, self._each)[levels - 1]
        rates = (texts + live * worth) / took
        best = rates.argmax(1)
        picked = np.arange(len(levels)), best
        return rates[picked], nodes[best], np.maximum(took[picked] - self.costs.plain(texts), 0.0)

    def _learn(self, texts: int) -> None:
        if self._returned:
            self.acceptance.record(self._returned)
            self._returned = []
        self.costs.learn(texts)

    def looks_next(self, texts: int) -> bool:
        if not self._timed:  # prompts beside them make laps what they are
            return False
        lost = (LOOK_LAPS * (1 - 1 / max(self._rate, 1.0))) + 2 * CHANGE * self._stake / (1 + self._stake)
        often = min(
            max(self.costs.looks(texts) / PLAIN_LOOKS, OFTEN), 1.0
        )  # sooner, as long as one may have misled
        due = self._laps >= max(lost, 1.0) / LOOK_SHARE * often and self._account.full
        return due or texts.bit_length() not in self._looked

    def foreseen_nodes(self, live: int, levels: int, most: int) -> int:
        return min(self._nodes, most // live)

    def score(self, offer: Candidates) -> Floats:
        """[live, n] the chance of each candidate to be accepted, as far as its drafter can be trusted."""
        return acceptance_chances(offer, self.acceptance.trust())

    def log_trust(self) -> Floats:
        return np.log(self.acceptance.trust())

    def select(self, values: Floats, levels: int, most: int) -> Flags:
        """[live, n] which candidates to send, at most `most` in all: the best, as many as bring most."""
        live, open_to = len(values), keep_best(values, self._each)
        worth = falling(open_to)[: max(most, 0)]
        took = self.costs.drafted(live + self._others, live, levels, np.arange(len(worth) + 1))
        rates = (live + self._others + np.concatenate(([0.0], np.cumsum(worth)))) / took
        return best_overall(open_to, int(np.argmax(rates)))

    def record_worth(self, values: Floats, depths: Ints) -> None:
        if not self.holding:
            self._worth.record(values, depths)

    def begin_texts(self) -> bool:
        self._account.begin_texts()
        return not self._drafts and self._account.credit > 0

    def record_rest(self, trees: int, live: int) -> None:
        self._account.record(0.0, trees / live)
        self._untried += trees / live

    def record_growth(self, live: int, levels: int, due: int, seconds: float) -> None:
        """The clock tells."""

    def record_lap(self, trees: Sequence[TreeOutcome], spent: LapSeconds = UNKNOWN_SECONDS) -> None:
        """A lap came back: learn from it, and book what it gained or lost against plain decoding."""
        if not trees:
            return
        self._timed = spent.computed + spent.wall > 0
        live, rows = len(trees), sum(tree.rows for tree in trees)
        drafted = [tree for tree in trees if tree.grown]
        if not drafted:
            if spent.wall:
                self.costs.record_plain(live, spent.wall)
            return
        grown, brought = drafted[0].grown, sum(tree.accepted for tree in drafted) / live
        if spent.wall and rows > live and self._drafts:
            self.costs.record_drafted(live, len(drafted), grown, rows, spent.wall)
        change = 0.0 if self._drafts else CHANGE * self._stake
        self._account.record(brought - self._stake - change, 1.0)
        self._rate += RATE_WEIGHT * ((1 + brought) / (1 + self._stake) - self._rate)
        self._drafts, self._laps, self._untried = True, self._laps + 1, 0.0
        self._texts *= TEXTS_GROW if len(drafted) == self._texts else 1
        self._returned += lessons_of(drafted)

    def _start_rest(self, laps: float, texts: int) -> None:
        if self._drafts:
            self._account.record(-CHANGE * self._stake)
            self.costs.forget()
        self._drafts, self._laps, self._texts, self._held = False, 0, FEW_TEXTS, 0
        self.rest = math.ceil(min(laps * texts, max(MAX_REST_TREES, FIRST_REST_LAPS * texts)))
