"""How the tokens of a plan are shared out among its points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specsot.core.skeleton import Point


@dataclass(frozen=True, slots=True)
class BudgetShares:
    """points: those that are written, the plan's first ones. headings: the tokens of each; a point that is
    not named has none. budgets: tokens of each branch.
    """

    points: tuple[Point, ...]
    headings: Mapping[int, int]
    budgets: Mapping[int, int]


def share_out(
    points: Sequence[Point], headings: Mapping[int, int], total: int, least: int, cap: int | None = None
) -> BudgetShares:
    """As many points as get `least` tokens of text beside their headings, at least one.

    headings: tokens of each point's heading. Headings and budgets together are at most `total`, which is > 0.
    """
    kept = tuple(points[: max(_affordable(points, headings, total, least), 1)])
    spent = sum(headings[point.id] for point in kept)
    if total - spent < min(least, total):  # one point, and a title too long for what is left
        return BudgetShares(kept, {}, split_budget(kept, total, cap))
    told = {point.id: headings[point.id] for point in kept}
    return BudgetShares(kept, told, split_budget(kept, total - spent, cap, least))


def split_budget(
    points: Sequence[Point], total: int, cap: int | None = None, least: int = 1
) -> dict[int, int]:
    """Tokens for each point id: pro rata wished length by largest remainders, at least `least` where there
    is as much for everybody, at most `cap`. The sum is at most `total`; it needs total >= len(points).
    """
    least = min(least, total // len(points))
    weights = {point.id: max(point.length, 1) for point in points}
    shares = dict.fromkeys(weights, least)
    rest = total
    while low := {id for id, weight in weights.items() if rest * weight < least * sum(weights.values())}:
        rest -= least * len(low)
        weights = {id: weight for id, weight in weights.items() if id not in low}
    whole = sum(weights.values())
    shares |= {id: rest * weight // whole for id, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda id: (-(rest * weights[id] % whole), id))
    for id in by_remainder[: total - sum(shares.values())]:
        shares[id] += 1
    return shares if cap is None else {id: min(share, cap) for id, share in shares.items()}


def _affordable(points: Sequence[Point], headings: Mapping[int, int], total: int, least: int) -> int:
    """How many of the first points have room for their headings and `least` tokens each."""
    count = 0
    for point in points:
        total -= headings[point.id] + least
        if total < 0:
            break
        count += 1
    return count
