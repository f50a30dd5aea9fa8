"""Orders paired runs (AB BA AB ...), and computes their medians, ratios and spread.

The order lets a machine whose speed drifts affect all sides alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class Sample:
    """One run.

    tokens: tokens that count.
    seconds: duration of the run.
    """

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Return tokens a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of A and B, pair by pair.

    name: what is compared.
    a: runs of A.
    b: runs of B.
    aim: the ratio to reach, or None.
    """

    name: str
    a: tuple[Sample, ...]
    b: tuple[Sample, ...]
    aim: float | None = None

    @property
    def ratios(self) -> list[float]:
        """Return A's speed divided by B's, for each pair."""
        return [one.rate / other.rate for one, other in zip(self.a, self.b)]

    @property
    def ratio(self) -> float:
        """Return the median ratio."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """Return the first and third quartile of the ratios; with a single pair, its ratio twice."""
        if len(self.a) < 2:
            return self.ratio, self.ratio
        quartiles = statistics.quantiles(self.ratios, n=4)
        return quartiles[0], quartiles[2]

    @property
    def rates(self) -> tuple[float, float]:
        """Return the median tokens per second of A and of B."""
        return statistics.median(s.rate for s in self.a), statistics.median(s.rate for s in self.b)


Side = TypeVar("Side")


def order(sides: Sequence[Side], number: int) -> Sequence[Side]:
    """Return the sides in the order of a round: forwards in even rounds, backwards in odd ones."""
    return sides if number % 2 == 0 else sides[::-1]


def turns(sides: Sequence[Side], count: int) -> Iterator[tuple[int, Side]]:
    """Yield (round, side) for all rounds: with two sides and 2 rounds (0, A), (0, B), (1, B), (1, A)."""
    for number in range(count):
        for side in order(sides, number):
            yield number, side
