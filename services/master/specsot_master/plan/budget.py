"""How an answer's tokens are split over the branches, once, when the plan is complete.

Pure. A live counter that branches share would make what is cut off depend on timing.
"""

from __future__ import annotations

from collections.abc import Sequence

from specsot.skeleton import Point


def split_budget(points: Sequence[Point], total: int, cap: int | None = None) -> dict[int, int]:
    """Tokens for each point id: pro rata wished length by largest remainders, at least 1, at most `cap`.

    The sum is at most `total`; it needs total >= len(points), which PlanRules.max_points sees to.
    """
    spare = total - len(points)
    weights = {point.id: max(point.length, 1) for point in points}
    whole = sum(weights.values())
    shares = {id: 1 + spare * weight // whole for id, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda id: (-(spare * weights[id] % whole), id))
    for id in by_remainder[: total - sum(shares.values())]:
        shares[id] += 1
    return shares if cap is None else {id: min(share, cap) for id, share in shares.items()}
