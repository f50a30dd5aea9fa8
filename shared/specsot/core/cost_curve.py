"""Estimates the seconds of a computation from the number of tokens it processes, along a measured curve.

Stages, drafters, forecasts and placement all measure a few sizes, and interpolate all other sizes here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from specsot.members import Curve

Point = tuple[float, float]


class CostCurve:
    """A non-decreasing, piecewise linear curve of seconds through measured points.

    * Seconds never fall with more tokens: if a point was measured with fewer seconds than a point of fewer
      tokens, it counts with the seconds of that point.
    * Between two points the curve is a straight line. Below the first point it is constant, because a step
      reads all weights even for one token. After the last point it continues with its last slope; a curve of
      a single point continues in proportion to the tokens.
    * An empty curve is false, and returns 0 seconds for any number of tokens.

    >>> curve = CostCurve([(1, 2.0), (4, 2.0), (8, 3.0)])
    >>> [curve.at(tokens) for tokens in (0.5, 4, 6, 16)]  # before, at, between and after measured points
    [2.0, 2.0, 2.5, 5.0]
    """

    def __init__(self, points: Curve | Iterable[Point] = ()) -> None:
        """Sort the points, and raise each point's seconds to the most seconds of any point with fewer tokens.

        points: (tokens, seconds) as measured, in any order. Without points, the curve is empty.
        """
        ordered = sorted(points)
        self._tokens = [float(tokens) for tokens, _ in ordered]
        self._seconds = list(accumulate((seconds for _, seconds in ordered), max))
        self._slope = _last_slope(self._tokens, self._seconds)
        # The same points as arrays, so that `at_each` need not convert the lists in every call.
        self._arrays = np.array(self._tokens), np.array(self._seconds)

    def __bool__(self) -> bool:
        """Return whether the curve has points."""
        return bool(self._tokens)

    @property
    def points(self) -> list[Point]:
        """The points of the curve as (tokens, seconds), by ascending tokens. Empty if the curve is."""
        return list(zip(self._tokens, self._seconds))

    def at(self, tokens: float) -> float:
        """Return the estimated seconds for one number of tokens; 0 if the curve is empty.

        tokens: number of tokens that the computation processes; may be a fraction.

        Below the first point, the result is the first point's seconds; beyond the last point, the curve
        continues with its last slope, so that a curve of one point continues in proportion to the tokens.
        """
        if not self._tokens:
            return 0.0
        place = bisect_left(self._tokens, tokens)
        if place == 0:
            return self._seconds[0]
        if place == len(self._tokens):
            return self._seconds[-1] + (tokens - self._tokens[-1]) * self._slope
        first, last = self._tokens[place - 1], self._tokens[place]
        low, high = self._seconds[place - 1], self._seconds[place]
        return low + (high - low) * (tokens - first) / (last - first)

    def at_each(self, tokens: np.ndarray | Sequence[int] | int) -> np.ndarray:
        """Return the estimated seconds for each number of tokens, in an array of the same shape.

        tokens: numbers of tokens, an array of any shape, or one number, for which the shape is (). If the
            curve is empty, the result consists of zeros.

        Each entry is what `at` returns for the number, up to rounding errors.
        """
        if not self._tokens:
            return np.zeros(np.shape(tokens))
        # For a single number, Python's `max` takes a tenth of the time of numpy's.
        beyond = (
            max(tokens - self._tokens[-1], 0.0)
            if isinstance(tokens, int)
            else np.maximum(np.asarray(tokens) - self._tokens[-1], 0.0)
        )
        return np.interp(tokens, *self._arrays) + beyond * self._slope  # pyrefly: ignore[bad-return]

    def in_sizes(self, sizes: Iterable[int]) -> CostCurve:
        """Return the curve of a computation that exists only in some sizes, as captured graphs do: a number
        of tokens takes as long as the next larger size. Beyond the largest size, the result is a straight
        line through this curve at one token more and at twice the size.

        sizes: numbers of tokens, each at least 1 and the largest at least 2, in any order. Without sizes,
            this curve is returned. An empty curve stays empty.

        >>> curve = CostCurve([(1, 2.0), (9, 10.0)]).in_sizes([4, 8])
        >>> [curve.at(tokens) for tokens in (1, 4, 5, 8, 9)]
        [5.0, 5.0, 9.0, 9.0, 10.0]
        """
        ordered = sorted(sizes)
        if not ordered or not self:
            return self
        steps = [
            (tokens, self.at(size))
            for before, size in zip((0, *ordered), ordered)
            for tokens in (before + 1, size)
        ]
        beyond = ordered[-1] + 1, 2 * ordered[-1]
        return CostCurve([*steps, *((tokens, self.at(tokens)) for tokens in beyond)])

    def corrected(self, observed: Iterable[Point]) -> CostCurve:
        """Return a curve through the `observed` points that keeps the shape of this one between them.

        Every point of this curve is scaled by the ratio of observed to estimated seconds at the observed
        point that is nearest to it in the ratio of tokens. Without observed points, this curve is returned.

        observed: (tokens, seconds) as measured in operation, in any order.

        >>> CostCurve([(1, 2.0), (8, 3.0)]).corrected([(1, 4.0)]).points  # twice as slow as measured
        [(1.0, 4.0), (8.0, 6.0)]

        The observed points themselves are on the new curve; of several with the same tokens, the last one
        counts. If this curve is empty or estimates 0 seconds at all observed points, the new curve has the
        observed points only.
        """
        observed_seconds = {float(tokens): seconds for tokens, seconds in observed}
        if not observed_seconds:
            return self
        ratios = {
            tokens: seconds / estimated
            for tokens, seconds in sorted(observed_seconds.items())
            if (estimated := self.at(tokens))
        }
        sizes = [*ratios]

        def ratio(tokens: float) -> float:
            """Return the observed slowdown at the observed point that is nearest to `tokens` in the ratio of
            tokens.

            tokens: number of tokens of a point of this curve.
            """
            # Stages correct their curves in nearly every step. So only the observed points next to `tokens`,
            # at most one on each side, are compared: the others are no nearer.
            place = bisect_left(sizes, tokens)
            around = sizes[max(place - 1, 0) : place + 1]
            nearest = min(around, key=lambda point: max(point, tokens) / max(min(point, tokens), 1.0))
            return ratios[nearest]

        shape = {tokens: seconds * ratio(tokens) for tokens, seconds in self.points} if ratios else {}
        return CostCurve((shape | observed_seconds).items())


def _last_slope(tokens: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the seconds that one more token takes after the last point.

    With a single point, the slope is that point's seconds per token. Without points, or if the only point has
    0 tokens, the slope is 0.

    tokens: tokens of the points, ascending.
    seconds: seconds of the points, non-decreasing.
    """
    if len(tokens) < 2:
        return seconds[-1] / tokens[-1] if tokens and tokens[-1] else 0.0
    return (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2])


# The curve that is used if nothing was measured: one second for any number of tokens, so that only ratios of
# its seconds are meaningful.
UNIT_CURVE = CostCurve([(1, 1.0), (2, 1.0)])
