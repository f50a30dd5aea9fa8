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

    tokens: Number of tokens that the run wrote.
    seconds: Duration of the run.
    """

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Return the number of tokens a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of A and B, pair by pair.

    name: Name of what is compared.
    a: Runs of side A, one for each pair.
    b: Runs of side B, one for each pair.
    aim: Ratio to reach; None: no aim.
    """

    name: str
    a: tuple[Sample, ...]
    b: tuple[Sample, ...]
    aim: float | None = None

    @property
    def ratios(self) -> list[float]:
        """Return A's tokens per second divided by B's, for each pair."""
        return [run_a.rate / run_b.rate for run_a, run_b in zip(self.a, self.b)]

    @property
    def ratio(self) -> float:
        """Return the median ratio of A's speed to B's. Raises statistics.StatisticsError without pairs."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """Return the first and third quartile of the ratios; with a single pair, its ratio twice.

        The ratios are A's speed divided by B's.

        Raises statistics.StatisticsError without pairs.
        """
        if len(self.a) < 2:
            return self.ratio, self.ratio
        quartiles = statistics.quantiles(self.ratios, n=4)
        return quartiles[0], quartiles[2]

    @property
    def rates(self) -> tuple[float, float]:
        """Return (median tokens per second of A, of B).

        Raises statistics.StatisticsError without runs.
        """
        return statistics.median(s.rate for s in self.a), statistics.median(s.rate for s in self.b)


Side = TypeVar("Side")


def order(sides: Sequence[Side], round_number: int) -> Sequence[Side]:
    """Return the sides in the order in which a round runs them: as given in even rounds, backwards in odd
    ones.

    sides: The sides that are compared.
    round_number: Number of the round, counted from 0.
    """
    return sides if round_number % 2 == 0 else sides[::-1]


def turns(sides: Sequence[Side], num_rounds: int) -> Iterator[tuple[int, Side]]:
    """Yield (round number, side) for all rounds: with two sides and 2 rounds (0, A), (0, B), (1, B), (1, A).

    sides: The sides that are compared.
    num_rounds: Number of rounds; 0 yields nothing.
    """
    for round_number in range(num_rounds):
        for side in order(sides, round_number):
            yield round_number, side
