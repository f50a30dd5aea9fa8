"""A clockless ring for the tuner: laps with known costs and known true acceptance.

Refuses to know heads and tensors: candidates are probabilities, acceptance is a seeded draw.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specsot.members import Curve, TreeShape
from specsot_drafter.selection import Floats, ranked
from specsot_drafter.timing import Timing
from specsot_drafter.tuning import Returned, Tuner

# Seconds per rows, recorded: the demo model on two cores, an 8B model on one accelerator.
DEMO: Curve = (
    (1, 3.2e-3),
    (4, 3.2e-3),
    (8, 3.5e-3),
    (16, 4.0e-3),
    (32, 5.6e-3),
    (64, 7.9e-3),
    (128, 13.2e-3),
)
LARGE: Curve = ((1, 7.0e-3), (8, 7.1e-3), (32, 7.4e-3), (64, 7.9e-3), (128, 9.6e-3), (256, 15.0e-3))
STEEP: Curve = ((1, 1.0e-3), (2, 1.9e-3), (8, 7.0e-3), (64, 55e-3))
QUICK_HEAD: Curve = ((1, 0.3e-3), (4, 0.35e-3), (16, 0.5e-3), (64, 1.2e-3))
SLOW_HEAD: Curve = ((1, 4.0e-3), (4, 4.5e-3), (64, 12e-3))

SHAPE = TreeShape()


@dataclass(frozen=True, slots=True)
class World:
    """Each lap the head is as sure as one of `claims` says: that much for the next token, siblings
    getting `spread` of it in falling order. `truth` times that is so. A lap with trees really takes
    `strain` times what the curve says.
    """

    lap: Curve
    level: Curve
    live: int
    truth: float
    strain: float = 1.0
    claims: tuple[float, ...] = (0.97, 0.85, 0.6)
    spread: tuple[float, ...] = (0.8, 0.13, 0.05, 0.02)

    def candidates(self, claim: float, levels: int) -> tuple[Floats, NDArray[np.int64]]:
        """A caterpillar: the best node of each depth has children. Chances [n] per depth, depths [n]."""
        chances = [
            claim * (claim * self.spread[0]) ** above * part
            for above in range(levels)
            for part in self.spread
        ]
        return np.array(chances), np.repeat(np.arange(1, levels + 1), len(self.spread))


@dataclass(slots=True)
class Run:
    """A tuned run against plain decoding."""

    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    plain: float = 0.0

    @property
    def ratio(self) -> float:
        """Tokens per second, over plain's."""
        return self.tokens / self.seconds / self.plain


def run(world: World, laps: int, seed: int = 0, tuner: Tuner | None = None, measured: bool = False) -> Run:
    """Drive a tuner for so many laps. measured: it is told what growing really took."""
    rng = random.Random(seed)
    lap, level = Timing(world.lap), Timing(world.level)
    tuner = tuner or Tuner(SHAPE, world.lap, world.level)
    done = Run(plain=world.live / float(lap.at(world.live)))
    for _ in range(laps):
        trees = _lap(world, tuner, rng)
        grown = trees[0].grown
        done.drafted += bool(grown)
        done.tokens += sum(tree.accepted + 1 for tree in trees)
        rows = sum(tree.rows for tree in trees)
        turning = float(lap.at(rows)) * (world.strain if rows > len(trees) else 1.0)
        tuner.settle(trees, turning)
        done.seconds += turning
        if grown:
            growing = float(level.at(world.live) + (grown - 1) * level.at(world.live * SHAPE.top_k))
            done.seconds += growing
            if measured:
                tuner.note_drafting(world.live, grown, growing)
    return done


def _lap(world: World, tuner: Tuner, rng: random.Random) -> list[Returned]:
    most = tuner.plan_levels(world.live, SHAPE.depth + 1)
    if not most:
        return [Returned(0, 1, (), 0)] * world.live
    claims, depths = world.candidates(rng.choice(world.claims), most)
    levels = _deserved(world, tuner, claims, depths, most)
    claims, depths = claims[depths <= levels], depths[depths <= levels]
    worth = np.tile(claims * tuner.acceptance.trust()[depths - 1], (world.live, 1))
    count = tuner.choose_rows(ranked(worth, SHAPE.nodes - 1), world.live, levels)
    best = np.argsort(-worth[0], kind="stable")
    each = [count // world.live + (row < count % world.live) for row in range(world.live)]
    return [_tree(world, claims, depths, best[:nodes], levels, rng) for nodes in each]


def _deserved(world: World, tuner: Tuner, claims: Floats, depths: NDArray[np.int64], most: int) -> int:
    for depth in range(1, most):
        scores = np.tile(np.log(claims[depths == depth]), (world.live, 1))
        if not tuner.deserves(scores, depth):
            return depth
    return most


def _tree(
    world: World,
    claims: Floats,
    depths: NDArray[np.int64],
    sent: NDArray[np.int64],
    levels: int,
    rng: random.Random,
) -> Returned:
    masses = [float(claims[sent][depths[sent] == depth].sum()) for depth in range(1, levels + 1)]
    accepted, reach = 0, 1.0
    for mass in masses:
        if rng.random() >= world.truth * mass / reach:
            break
        accepted, reach = accepted + 1, mass
    return Returned(levels, 1 + len(sent), masses, accepted)
