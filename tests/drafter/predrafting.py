"""What trees for likely verdicts would bring: `python -m tests.drafter.predrafting` simulates it.

A drafter is idle while its tree is verified. It could guess the verdict (which node is the last accepted one,
and the token that follows it), and grow the next tree behind the likeliest guesses. If one of them comes
true, the next lap does not wait for drafting. Recorded drafts and verdicts (see `replay`) are walked lap by
lap, once with the best tree there is, once with such guesses, the best of both settings each.

It is an upper bound. Trees of guesses are taken to be as good as trees behind true features, although the
features of guessed tokens are not there yet; and the guess is ranked by the true tree's own probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from specsot_drafter.core.cost_model import RowCurve
from tests.drafter.replay import DEPTHS, INT8, LAYOUT, Machine, Offer, trace

LAPS_MS = (5, 10, 20, 50, 100, 200)  # of a plain lap, hops included
SIZES = (1, 2, 3, 5, 8, 12, 16, 20)  # nodes of a tree
GUESSES = (1, 2, 4, 8, 16, 32)
RANKS = LAYOUT[0]


@dataclass(frozen=True, slots=True)
class Shape:
    levels: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Walk:
    """Texts in laps of one shape. ranks: of each lap the true verdict's place among the guesses, 0 the first;
    None where it is none of them.
    """

    tokens: int
    ranks: tuple[int | None, ...]

    def hits(self, guesses: int) -> float:
        return sum(rank is not None and rank < guesses for rank in self.ranks) / len(self.ranks)


def walk(shape: Shape, following: np.ndarray) -> Walk:
    """following: [RANKS] how often the drafter's r-th token is the right one."""
    tokens, ranks = 0, list[int | None]()
    for text in trace().texts:
        at = 0
        while at < len(text):
            kept = chosen(text[at], shape)
            accepted, last = verdict(text[at], kept)
            if at + accepted + 1 < len(text):
                ranks.append(place(text[at], kept, last, text[at + accepted], following))
            tokens += 1 + accepted
            at += 1 + accepted
    return Walk(tokens, tuple(ranks))


def chosen(offer: Offer, shape: Shape) -> np.ndarray:
    """[n] the likeliest nodes of so many levels."""
    scores = np.where(shape.levels >= DEPTHS, offer.scores, -np.inf)
    best = np.argsort(-scores, kind="stable")[: shape.nodes]
    kept = np.zeros(len(scores), dtype=bool)
    kept[best[np.isfinite(scores[best])]] = True
    return kept


def verdict(offer: Offer, kept: np.ndarray) -> tuple[int, int]:
    """Accepted drafts, and the last of them by its number, 0 for the root."""
    right = np.flatnonzero(kept & offer.right)
    return (int(DEPTHS[right[-1]]), int(right[-1]) + 1) if len(right) else (0, 0)


def place(offer: Offer, kept: np.ndarray, last: int, behind: Offer, following: np.ndarray) -> int | None:
    """Rank of the verdict that came among all pairs of a last node and the token behind it.

    A node is the last one with its probability less that of its children in the tree; the token behind it is
    the r-th of those that are not in the tree with the share of `following`. behind: what was drafted at the
    verdict's place, whose first level says which rank the true token has.
    """
    mass = np.concatenate(([1.0], np.where(kept, np.exp(offer.scores), 0.0)))
    taken = np.zeros(len(mass), dtype=int)
    for number in np.flatnonzero(kept):
        mass[offer.parents[number]] -= np.exp(offer.scores[number])
        taken[offer.parents[number]] += 1
    ends = np.concatenate(([True], kept))
    pairs = np.where(ends, mass.clip(0), 0.0)[:, None] * np.stack(
        [np.where(np.arange(RANKS) >= many, following, 0.0) for many in taken]
    )
    first = np.flatnonzero(behind.right & (DEPTHS == 1))
    if not len(first):
        return None
    order = np.argsort(-behind.scores[DEPTHS == 1], kind="stable")
    rank = int(np.flatnonzero(order == first[0])[0])
    own = pairs[last, max(rank, taken[last])] if rank >= taken[last] else 0.0
    return int((pairs > own).sum()) if own > 0 else None


def shares() -> np.ndarray:
    """[RANKS] how often the drafter's r-th token is the right one."""
    counts = np.zeros(RANKS)
    offers = [offer for text in trace().texts for offer in text]
    for offer in offers:
        order = np.argsort(-offer.scores[DEPTHS == 1], kind="stable")
        counts += offer.right[DEPTHS == 1][order]
    return counts / len(offers)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. plain: of a lap of one row, hops included; further rows and drafting as on `machine`."""

    plain: float
    machine: Machine

    def lap(self, nodes: int) -> float:
        curve = RowCurve(self.machine.lap)
        return self.plain + float(curve.at(1 + nodes) - curve.at(1))

    def draft(self, shape: Shape, trees: int = 1) -> float:
        """Trees grow side by side, their widest level counts for all."""
        level = RowCurve(self.machine.level)
        widths = (1, *LAYOUT[: shape.levels - 1])
        fed = sum(float(level.at(trees * min(width, shape.nodes))) for width in widths)
        return self.machine.growth + fed

    def waits(self, shape: Shape, guesses: int, hits: float) -> float:
        """For drafting, on average. What is not ready when the verdict comes is waited for."""
        growing = self.draft(shape, guesses)
        late = max(growing - self.lap(shape.nodes), 0.0)
        return hits * min(late, self.draft(shape)) + (1 - hits) * self.draft(shape)


HEADINGS = (
    "plain lap, ms",
    "best tree: levels, nodes",
    "tree of a guess",
    "guesses",
    "one comes true",
    "times the best tree",
    "if drafting took no time",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """rate: tokens a second; guesses: 0 where it waits for the verdict."""

    rate: float
    shape: Shape
    guesses: int = 0


def row_of(ms: int, walks: Mapping[Shape, Walk]) -> str:
    costs, settings = Costs(ms / 1e3, INT8), list[Setting]()
    free = 0.0
    for shape, walked in walks.items():
        per_lap, lap = walked.tokens / len(walked.ranks), costs.lap(shape.nodes)
        free = max(free, per_lap / lap)
        settings.append(Setting(per_lap / (lap + costs.draft(shape)), shape))
        for guesses in GUESSES:
            waits = costs.waits(shape, guesses, walked.hits(guesses))
            settings.append(Setting(per_lap / (lap + waits), shape, guesses))
    alone = max((one for one in settings if not one.guesses), key=lambda one: one.rate)
    ahead = max((one for one in settings if one.guesses), key=lambda one: one.rate)
    hits = walks[ahead.shape].hits(ahead.guesses)
    return (
        f"| {ms} | {alone.shape.levels}, {alone.shape.nodes} | {ahead.shape.levels}, {ahead.shape.nodes} "
        f"| {ahead.guesses} | {hits:.2f} | {ahead.rate / alone.rate:.2f} | {free / alone.rate:.2f} |"
    )


def main() -> None:
    following, depths = shares(), range(1, len(LAYOUT) + 1)
    shapes = [Shape(levels, nodes) for levels in depths for nodes in SIZES if nodes >= levels]
    walks = {shape: walk(shape, following) for shape in shapes}
    print(f"| {' | '.join(HEADINGS)} |\n|{'---:|' * len(HEADINGS)}")
    for ms in LAPS_MS:
        print(row_of(ms, walks))


if __name__ == "__main__":
    main()
