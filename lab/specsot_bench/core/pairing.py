"""Runs in turns (AB BA AB ...), and what pairs of them say: medians, ratios, spread.

A machine that drifts hits all sides alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: tokens that count, and seconds."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of A and B, pair by pair. `ratio` is how many times A is as fast as B."""

    name: str
    a: tuple[Sample, ...]
    b: tuple[Sample, ...]
    aim: float | None = None

    @property
    def ratios(self) -> list[float]:
        return [one.rate / other.rate for one, other in zip(self.a, self.b)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        if len(self.a) < 2:
            return self.ratio, self.ratio
        quartiles = statistics.quantiles(self.ratios, n=4)
        return quartiles[0], quartiles[2]

    @property
    def rates(self) -> tuple[float, float]:
        """Median tokens per second of A and of B."""
        return statistics.median(s.rate for s in self.a), statistics.median(s.rate for s in self.b)


Side = TypeVar("Side")


def order(sides: Sequence[Side], number: int) -> Sequence[Side]:
    """Whose turn it is in a round: forwards and backwards in turns, so AB BA AB BA ... of two."""
    return sides if number % 2 == 0 else sides[::-1]


def turns(sides: Sequence[Side], count: int) -> Iterator[tuple[int, Side]]:
    """The number of each round and whose turn it is, round after round."""
    for number in range(count):
        for side in order(sides, number):
            yield number, side
