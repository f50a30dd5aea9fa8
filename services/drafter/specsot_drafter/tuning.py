"""How much drafting pays now: how many levels to grow, and how many rows to send, or none at all.

Refuses to know tensors, tokens and clocks: counts, probabilities and measured seconds in, counts out.

Two safeguards make drafting cheap where it does not pay. The best expected rate wins, plain decoding
included; and every lap is booked against what plain decoding would have taken for the same tokens,
so that trying things out can never cost more than ALLOWANCE of the time plus one GRANT. What the
allowance pays for now and then is a trial against all expectation: a measurement may have been wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specsot.members import Curve, TreeShape
from specsot_drafter.acceptance import Acceptance
from specsot_drafter.timing import Timing

Floats = NDArray[np.floating[Any]]

ALLOWANCE = 0.015  # of plain time, for trying things out
GRANT = 1.0  # plain laps of credit to begin with
CEILING = 20.0  # plain laps of credit that good times may leave to bad ones
SLENDER = 1.0  # nodes per level and tree, before anything is known
UNTRIED = 100  # laps without drafts after which one level is tried against all expectation
REST = 8  # laps without another look, once drafting does not pay
UNPLAIN = 64  # laps with drafts after which one without shows what plain decoding takes now
WORST_STRAIN = 3.0  # times what the curve says, beyond which a lap with trees is not believed
MOST_HOP = 4.0  # times the computing of a lap that its hops may seem to take
WEIGHT = 0.2  # of one lap in what is typical


@dataclass(frozen=True, slots=True)
class Returned:
    """One tree that came back.

    grown:    levels grown for it; 0 when its root was sent alone.
    rows:     its nodes, root included.
    masses:   the head's probability of its nodes, summed per depth.
    accepted: how deep it was accepted.
    """

    grown: int
    rows: int
    masses: Sequence[float]
    accepted: int


class Tuner:
    """Chooses levels and rows that maximise expected tokens per second of the whole lap."""

    def __init__(self, shape: TreeShape, lap: Curve, level: Curve) -> None:
        """lap: seconds per rows of all stages; level: seconds per rows of one pass of the head."""
        self.lap, self.level = Timing(lap), Timing(level)
        self.acceptance = Acceptance(shape.depth + 1)
        self._top_k = shape.top_k
        self._credit: float | None = None
        self._resting = self._rested_by = self._untried = 0
        self._bushes: dict[int, float] = {}
        self._hops: dict[bool, float] = {}
        self._strain = 1.0
        self._unplain = 0

    def plan_levels(self, live: int, most: int) -> int:
        """Levels that `live` trees may grow, at most `most`; 0: send the roots alone."""
        if not live or most <= 0 or self._rests(live) or self._unplain >= UNPLAIN:
            return 0
        levels = np.arange(1, most + 1)
        plain = self._plain(live)
        costs = self._drafting(live, levels) + self._sending(live, live * levels * self._bush(live))
        rates = (live + live * self.acceptance.expected()[:most]) / (plain + costs)
        affordable = costs <= self._purse(plain)
        if np.any(rates[affordable] * plain > live):
            self._untried = 0
            return int(levels[affordable][-1])
        if self._untried >= UNTRIED and 2 * costs[0] <= self._purse(plain):
            self._untried = 0
            return 1
        self._resting, self._rested_by = REST, live
        return 0

    def deserves(self, scores: Floats, depth: int) -> bool:
        """Whether one more level pays below a frontier of `depth`, as sure as this one is of itself.

        scores: [live, top_k] cumulative log-probabilities of the frontier. A level pays when it brings
        more tokens per second than the lap so far.
        """
        live = len(scores)
        plain = self._plain(live)
        trust, chances = self.acceptance.trust(), self.acceptance.chances()
        reached = float(np.minimum(np.exp(scores).sum(1) * trust[depth - 1], 1.0).sum())
        rate = (live + reached * depth) / (plain + float(self._drafting(live, depth)))
        return reached * float(chances[depth]) > rate * float(self.level.at(live * self._top_k))

    @property
    def rest(self) -> int:
        """Laps for which nothing will be drafted unless the number of trees changes much."""
        return self._resting

    def choose_rows(self, worth: Floats, live: int, levels: int) -> int:
        """How many of the grown nodes to send, best first.

        worth: chances of acceptance of all nodes on offer, falling. Books the growth's cost.
        """
        plain = self._plain(live)
        spent = float(self._drafting(live, levels))
        purse = self._purse(plain)
        extra = self._sending(live, np.arange(len(worth) + 1))
        tokens = live + np.concatenate(([0.0], np.cumsum(worth)))
        rates = tokens / (plain + spent + extra)
        rates[1:][extra[1:] > max(purse - spent, 0.0)] = 0.0
        count = int(np.argmax(rates))
        self._credit = purse - spent
        self._remember_bush(live, count / (live * levels))
        return count

    def note_hop(self, drafted: bool, seconds: float, computed: float) -> None:
        """What a lap took beside the stages' and the drafter's computing; waiting for clients is cut off.

        Laps that wait for trees hop more often, and judge more rows: the difference is a cost of drafts.
        """
        hop = min(max(seconds, 0.0), MOST_HOP * computed)
        before = self._hops.get(drafted, hop)
        self._hops[drafted] = before + WEIGHT * (hop - before)

    def note_drafting(self, live: int, levels: int, seconds: float) -> None:
        """Growing `live` trees of so many levels took so long, all in all."""
        self.level.note(float(self._growing(live, levels)), seconds)

    def settle(self, trees: Sequence[Returned], seconds: float | None = None) -> None:
        """A lap came back: learn from it, and book what it gained or lost against plain decoding.

        seconds: what all stages together took for it; None when there was more in its frame.
        """
        if not trees:
            return
        live = len(trees)
        extra = self._extra(live, sum(tree.rows for tree in trees), seconds)
        plain = self._plain(live)
        gained = (sum(tree.accepted for tree in trees) / live) * plain - extra
        self._credit = min(self._purse(plain) + ALLOWANCE * plain + gained, CEILING * plain)
        self._learn([tree for tree in trees if tree.grown])

    def _extra(self, live: int, rows: int, seconds: float | None) -> float:
        """What the stages took beyond a plain lap.

        Laps without drafts move the curve, and so does any lap that was faster than it says; how much
        more laps with trees take (their masks, their branching, each sequence's own context) is kept apart.
        """
        expected = float(self.lap.at(rows))
        if rows == live or not self.lap.measured or 0.0 < (seconds or 0.0) < expected:
            self.lap.note(expected, seconds or 0.0)
            expected = float(self.lap.at(rows))
        if rows == live:
            return 0.0
        if not seconds or expected <= 0:
            return float(self._sending(live, rows - live))
        strain = min(max(seconds / expected, 1.0), WORST_STRAIN)
        self._strain += WEIGHT * (strain - self._strain)
        return strain * expected - float(self.lap.at(live))

    def _learn(self, drafted: Sequence[Returned]) -> None:
        for tree in drafted:
            self.acceptance.note(tree.grown, tree.masses, tree.accepted)
        self._unplain = self._unplain + 1 if drafted else 0
        if not drafted:
            self._untried += 1
            self.acceptance.fade()

    def _rests(self, live: int) -> bool:
        """Count down a rest, which ends early when drafting might pay at this number of trees."""
        alike = live.bit_length() == self._rested_by.bit_length()
        self._resting = max(self._resting - 1, 0) if alike else 0
        return self._resting > 0

    def _purse(self, plain: float) -> float:
        """Seconds that may be risked now."""
        return GRANT * plain if self._credit is None else self._credit

    def _drafting(self, live: int, levels: Floats | NDArray[np.int64] | int) -> Floats:
        """What trees of so many levels cost before any of their rows is fed."""
        return self._growing(live, levels) + self._handover()

    def _growing(self, live: int, levels: Floats | NDArray[np.int64] | int) -> Floats:
        """The first level takes a pass over one row per tree, each further one over top_k."""
        return self.level.at(live) + (np.asarray(levels) - 1) * self.level.at(live * self._top_k)

    def _plain(self, live: int) -> float:
        """Seconds of a lap without drafts, hops included."""
        return float(self.lap.at(live)) + self._plain_hop()

    def _handover(self) -> float:
        """What waiting for trees adds to a lap."""
        return max(self._hops.get(True, 0.0) - self._plain_hop(), 0.0)

    def _plain_hop(self) -> float:
        """Taken as half of that of drafted laps as long as none without drafts was seen."""
        return self._hops.get(False, self._hops.get(True, 0.0) / 2)

    def _sending(self, live: int, nodes: Floats | NDArray[np.int64] | int) -> Floats:
        """What so many nodes add to a lap of `live` roots."""
        drafted = self.lap.at(live + np.asarray(nodes, dtype=float)) * self._strain
        return np.where(np.asarray(nodes) > 0, drafted - self.lap.at(live), 0.0)

    def _bush(self, live: int) -> float:
        """Typical nodes per level and tree with about so many trees."""
        return self._bushes.get(live.bit_length(), SLENDER)

    def _remember_bush(self, live: int, nodes: float) -> None:
        before = self._bush(live)
        self._bushes[live.bit_length()] = before + WEIGHT * (max(nodes, SLENDER / 4) - before)
