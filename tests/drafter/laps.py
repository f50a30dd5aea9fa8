"""A clockless ring for the tuner: laps with known costs and known true acceptance.

Candidates are probabilities, acceptance is a seeded draw.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from specsot.members import Curve, TreeShape
from specsot_drafter.core.budget import LapSeconds, TreeOutcome
from specsot_drafter.core.cost_model import RowCurve
from specsot_drafter.core.selection import Floats, falling, keep_best
from specsot_drafter.core.tree_budget import MeasuredBudget

# Seconds per rows, recorded: the demo model on two cores (fp32 in a fast hour, bf16, fp32), an 8B
# model on one accelerator, and a machine on which every row costs.
DEMO: Curve = (
    (1, 3.2e-3),
    (4, 3.2e-3),
    (8, 3.5e-3),
    (16, 4.0e-3),
    (32, 5.6e-3),
    (64, 7.9e-3),
    (128, 13.2e-3),
)
BF16: Curve = (
    (1, 3.35e-3),
    (4, 3.85e-3),
    (8, 4.43e-3),
    (16, 4.65e-3),
    (32, 6.65e-3),
    (64, 9.36e-3),
    (128, 15.8e-3),
)
FP32: Curve = (
    (1, 5.25e-3),
    (4, 8.06e-3),
    (8, 8.52e-3),
    (16, 9.83e-3),
    (32, 13.0e-3),
    (64, 18.2e-3),
    (128, 30.3e-3),
)
LARGE: Curve = ((1, 7.0e-3), (8, 7.1e-3), (32, 7.4e-3), (64, 7.9e-3), (128, 9.6e-3), (256, 15.0e-3))
STEEP: Curve = ((1, 1.0e-3), (2, 1.9e-3), (8, 7.0e-3), (64, 55e-3))
QUICK_HEAD: Curve = ((1, 0.3e-3), (4, 0.35e-3), (16, 0.5e-3), (64, 1.2e-3))
BF16_HEAD: Curve = ((1, 0.71e-3), (4, 0.95e-3), (16, 1.35e-3), (64, 3.0e-3))
FP32_HEAD: Curve = ((1, 1.23e-3), (4, 2.22e-3), (16, 3.12e-3), (64, 6.1e-3))
SLOW_HEAD: Curve = ((1, 4.0e-3), (4, 4.5e-3), (64, 12e-3))

SHAPE = TreeShape()


@dataclass(frozen=True, slots=True)
class World:
    """Each lap the head is as sure as one of `claims` says: that much for the next token, siblings
    getting `spread` of it in falling order. `truth` times that is so. A lap with trees really takes
    `strain` times what the curve says, and `handover` seconds more for every lap that waits for trees.
    Whoever comes back from a rest catches up with what was written, `row` seconds each, in plain laps.
    """

    lap: Curve
    level: Curve
    live: int
    truth: float
    strain: float = 1.0
    claims: tuple[float, ...] = (0.97, 0.85, 0.6)
    spread: tuple[float, ...] = (0.8, 0.13, 0.05, 0.02)
    handover: float = 0.1e-3
    row: float = 5e-6

    def candidates(self, claim: float, levels: int) -> tuple[Floats, NDArray[np.int64]]:
        """A caterpillar: the best node of each depth has children. Chances [n] per depth, depths [n]."""
        chances = [
            claim * (claim * self.spread[0]) ** above * part
            for above in range(levels)
            for part in self.spread
        ]
        return np.array(chances), np.repeat(np.arange(1, levels + 1), len(self.spread))

    def plain(self) -> float:
        """Seconds of a lap without drafts."""
        return seconds_of(self.lap, self.live)


@cache
def seconds_of(curve: Curve, rows: int) -> float:
    return float(timing_of(curve).at(rows))


@cache
def timing_of(curve: Curve) -> RowCurve:
    """Only asked, never told anything."""
    return RowCurve(curve)


@dataclass(slots=True)
class Run:
    """A tuned run against plain decoding."""

    tokens: int = 0
    seconds: float = 0.0
    plain: float = 0.0
    drafted: int = 0
    laps: int = 0

    @property
    def ratio(self) -> float:
        """Tokens per second, over plain's for the same tokens."""
        return self.plain / self.seconds


@dataclass(slots=True)
class Ring:
    """Turns laps of changing worlds for one tuner: rests as stage 0 does, and hears as the drafter does.

    jitter: by how much a lap by the clock may differ from what it takes, in parts.
    """

    tuner: MeasuredBudget
    rng: random.Random
    measured: bool = True
    jitter: float = 0.0
    resting: int = 0
    missed: int = 0
    due: int = 0
    waking: float = 0.0  # seconds until the drafter has caught up

    def run(self, world: World, laps: int, done: Run | None = None) -> Run:
        """So many laps; returns (and adds to) what they brought."""
        done = done or Run()
        for _ in range(laps):
            self._turn(world, done)
        return done

    def _turn(self, world: World, done: Run) -> None:
        done.laps += 1
        if self.resting > 0:
            self._rest(world, done)
            return
        if self.waking > 0:
            self._wake(world, done)
            return
        levels = self.tuner.plan_levels(world.live, SHAPE.depth + 1, self.due)
        if levels:
            self._draft(world, levels, done)
            return
        self.resting = self.tuner.rest or 1
        done.seconds += world.handover
        self._rest(world, done)

    def _plain_lap(self, world: World, done: Run) -> float:
        taken = self._jittered(world.plain())
        done.seconds += taken
        done.tokens += world.live
        done.plain += world.plain()
        return taken

    def _wake(self, world: World, done: Run) -> None:
        """Nobody waits for a drafter that catches up; see `Frame.waking`."""
        self.waking -= self._plain_lap(world, done)
        if self.waking <= 0:
            self.due = world.live

    def _rest(self, world: World, done: Run) -> None:
        """Nobody hears of it but in the end: the last lap of a rest is told, with all before it."""
        taken = self._plain_lap(world, done)
        self.resting -= world.live
        self.due += world.live
        if self.resting > 0:
            self.missed += world.live
            return
        if self.missed:
            self.waking = self.due * world.row
            self.tuner.record_rest(self.missed, world.live)
            self.missed = 0
        self.tuner.record_lap([TreeOutcome(0, 1, (), 0)] * world.live, LapSeconds(taken, taken))

    def _draft(self, world: World, levels: int, done: Run) -> None:
        """One lap that waits for its trees."""
        lap, level = timing_of(world.lap), timing_of(world.level)
        trees, fed = _grow(world, self.tuner, levels, self.rng)
        grown, rows = trees[0].grown, sum(tree.rows for tree in trees)
        computed = self._jittered(float(lap.at(rows)) * (world.strain if rows > world.live else 1.0))
        growing = sum(float(level.at(world.live * nodes)) for nodes in fed)
        catching = self.due * world.row
        if self.measured:
            self.tuner.record_growth(world.live, grown, self.due, growing + catching)
        self.due = sum(tree.accepted + 1 for tree in trees)
        wall = computed + growing + catching + world.handover
        done.seconds += wall
        done.tokens += self.due
        done.plain += self.due / world.live * world.plain()
        done.drafted += 1
        told = wall if rows > world.live else self._jittered(world.plain())  # see the worker's clock of laps
        self.tuner.record_lap(trees, LapSeconds(computed, told, growing + catching))

    def _jittered(self, seconds: float) -> float:
        return seconds * self.rng.uniform(1 - self.jitter, 1 + self.jitter)


def ring(world: World, seed: int = 0, **more: object) -> Ring:
    """With a tuner that was told the world's curves."""
    return Ring(MeasuredBudget(SHAPE, world.lap, world.level), random.Random(seed), **more)  # type: ignore[arg-type]


def _grow(
    world: World, tuner: MeasuredBudget, most: int, rng: random.Random
) -> tuple[list[TreeOutcome], list[int]]:
    """The trees, and the nodes of each that were fed per level."""
    claims, depths = world.candidates(rng.choice(world.claims), most)
    fed = _fed(world, tuner, claims, depths, most)
    levels = len(fed)
    claims, depths = claims[depths <= levels], depths[depths <= levels]
    worth = np.tile(claims * tuner.acceptance.trust()[depths - 1], (world.live, 1))
    count = tuner.count_rows(falling(keep_best(worth, SHAPE.nodes - 1)), world.live, levels)
    tuner.record_nodes(world.live, levels, count)
    best = np.argsort(-worth[0], kind="stable")
    each = [count // world.live + (row < count % world.live) for row in range(world.live)]
    masses = {nodes: _masses(claims, depths, best[:nodes], levels) for nodes in {*each}}
    return [_tree(world, nodes, masses[nodes], rng) for nodes in each], fed


def _fed(
    world: World, tuner: MeasuredBudget, claims: Floats, depths: NDArray[np.int64], most: int
) -> list[int]:
    """The best of each level is always fed, and only it has children here."""
    fed = [1]
    for depth in range(1, most):
        scores = np.tile(np.log(claims[depths == depth]), (world.live, 1))
        if not (nodes := tuner.pays_deeper(scores, depth)):
            break
        fed.append(nodes)
    return fed


def _masses(claims: Floats, depths: NDArray[np.int64], sent: NDArray[np.int64], levels: int) -> list[float]:
    """The head's probability of what is sent, per depth."""
    return [float(claims[sent][depths[sent] == depth].sum()) for depth in range(1, levels + 1)]


def _tree(world: World, nodes: int, masses: list[float], rng: random.Random) -> TreeOutcome:
    accepted, reach = 0, 1.0
    for mass in masses:
        if rng.random() >= world.truth * mass / reach:
            break
        accepted, reach = accepted + 1, mass
    return TreeOutcome(len(masses), 1 + nodes, masses, accepted)


def hop(tuner: MeasuredBudget, drafted: bool, seconds: float) -> None:
    tuner.costs.record_hop(drafted, seconds, 3e-3)


def looked(tuner: MeasuredBudget, *texts: int) -> MeasuredBudget:
    """The first lap of so many texts was plain."""
    for live in texts:
        assert tuner.plan_levels(live, 6) == 0
    return tuner
