"""A clockless ring for the tuner: laps with known costs and known true acceptance.

Refuses to know heads and tensors: candidates are probabilities, acceptance is a seeded draw.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from specsot.members import Curve, TreeShape
from specsot_drafter.selection import ranked
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


@dataclass(frozen=True, slots=True)
class World:
    """Siblings get `spread` of what the head claims (in falling order), `truth` times that is so."""

    lap: Curve
    level: Curve
    live: int
    truth: float
    claim: float = 0.85
    spread: tuple[float, ...] = (0.7, 0.2, 0.07, 0.03)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens per second of the tuned run, of plain decoding, and what the tuner did."""

    tuned: float
    plain: float
    drafted: int
    laps: int

    @property
    def ratio(self) -> float:
        return self.tuned / self.plain


def run(world: World, laps: int, shape: TreeShape, seed: int = 0, tuner: Tuner | None = None) -> Outcome:
    """Drive the tuner for so many laps."""
    rng = random.Random(seed)
    lap, level = Timing(world.lap), Timing(world.level)
    tuner = tuner or Tuner(shape, world.lap, world.level)
    tokens = drafted = 0
    seconds = 0.0
    for _ in range(laps):
        levels = tuner.plan_levels(world.live, shape.depth + 1)
        trees = _lap(world, tuner, shape, levels, rng)
        tuner.settle(trees)
        drafted += bool(levels)
        tokens += sum(tree.accepted + 1 for tree in trees)
        seconds += float(lap.at(sum(tree.rows for tree in trees)))
        if levels:
            seconds += float(level.at(world.live)) + (levels - 1) * float(level.at(world.live * shape.top_k))
    plain = world.live / float(lap.at(world.live))
    return Outcome(tokens / seconds, plain, drafted, laps)


def _lap(world: World, tuner: Tuner, shape: TreeShape, levels: int, rng: random.Random) -> list[Returned]:
    if not levels:
        return [Returned(0, 1, (), 0)] * world.live
    claims, depths = candidates(world, levels, shape.top_k)
    worth = np.tile(claims * tuner.acceptance.trust()[depths - 1], (world.live, 1))
    count = tuner.choose_rows(ranked(worth, shape.nodes - 1), world.live, levels)
    each = [count // world.live + (row < count % world.live) for row in range(world.live)]
    return [_tree(world, claims, depths, nodes, levels, rng) for nodes in each]


def candidates(world: World, levels: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """A caterpillar: at each depth the best node has top_k children. Chances falling, depths."""
    claims = [
        world.claim ** (d + 1) * world.spread[0] ** d * world.spread[j]
        for d in range(levels)
        for j in range(top_k)
    ]
    depths = [d + 1 for d in range(levels) for _ in range(top_k)]
    order = np.argsort(-np.array(claims), kind="stable")
    return np.array(claims)[order], np.array(depths)[order]


def _tree(
    world: World, claims: np.ndarray, depths: np.ndarray, nodes: int, levels: int, rng: random.Random
) -> Returned:
    masses = [float(claims[:nodes][depths[:nodes] == depth].sum()) for depth in range(1, levels + 1)]
    accepted = 0
    for depth in range(1, levels + 1):
        width = int((depths[:nodes] == depth).sum())
        if rng.random() >= world.truth * world.claim * sum(world.spread[:width]):
            break
        accepted += 1
    return Returned(levels, 1 + nodes, masses, accepted)
